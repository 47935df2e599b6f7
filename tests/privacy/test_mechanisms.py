"""Every noise mechanism of the table is held to what it states."""

import dataclasses
import math
from functools import cache

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedpact.common.errors import InputError, PlanError
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import ACCOUNTANTS, Budget
from fedpact.privacy.mechanisms import MECHANISMS, sensitivity
from fedpact.privacy.oracle import PrivateOracle, Records, Terms
from fedpact.privacy.reply_bounds import longest_gradient
from fedpact.privacy.settings import Privacy

CLIP = 0.7
BOUND = 1.5
FEATURES = 2


def half_square(output, y):
    return (output[:, 0] - y).square() / 2


def terms(name, sigma=0.0):
    # Expected batches of one record: nothing is divided, so a release is its sum.
    sigmas = dict.fromkeys(MECHANISMS[name].sensitivities, sigma)
    return Terms("a", 1.0, 1.0, CLIP, sigmas, 10, Budget(2.0, 1e-5), "best", name)


@cache
def kernel(name):
    model = FlatModel(nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64))
    return MECHANISMS[name].kernel(model, half_square)


def released(name, held, channel, sigma=0.0):
    """A channel's release over all records, without noise unless sigma says so."""
    oracle = PrivateOracle(held, kernel(name), terms(name, sigma), SeededDraws(0), lambda *_: None)
    batch = next(oracle.batches(1, channel))
    w = torch.tensor([0.3, -0.2], dtype=torch.float64)
    arguments = {"gradient": (), "difference": (2 * w, BOUND)}.get(channel, (BOUND,))
    return torch.as_tensor(getattr(batch, channel)(w, *arguments), dtype=torch.float64)


def bound_of(channel):
    return {"gradient": CLIP, "below": 0.5}.get(channel, BOUND)


STATED = [(name, channel) for name, m in MECHANISMS.items() for channel in m.sensitivities]


@pytest.mark.parametrize(("name", "channel"), STATED)
def test_one_record_moves_a_release_by_the_stated_amount(name, channel):
    """Small, large and broken records, beside none to five others."""
    generator = torch.Generator().manual_seed(0)
    farthest = 0.0
    for trial in range(24):
        x = torch.randn(1 + trial % 6, FEATURES, generator=generator).double()
        x *= 10.0 ** ((trial % 9) - 4)
        x[-1] *= 10.0 ** (trial % 5)
        if trial % 11 == 0:
            x[-1] = torch.inf
        y = torch.randn(len(x), generator=generator).double()
        more, less = (released(name, Records(x[:n], y[:n]), channel) for n in (len(x), len(x) - 1))
        farthest = max(farthest, float((more - less).norm()))
    stated = sensitivity(name, channel) * bound_of(channel)
    assert 0 < farthest <= stated * (1 + 1e-9)


@pytest.mark.parametrize(("name", "channel"), STATED)
def test_the_noise_is_sigma_times_the_bound(name, channel):
    held = Records(torch.ones(3, FEATURES).double(), torch.zeros(3).double())
    noisy, exact = (released(name, held, channel, sigma) for sigma in (3.0, 0.0))
    drawn = SeededDraws(0).gaussian(exact.numel(), noisy.flatten(), 0, channel).view_as(exact)
    assert torch.allclose(noisy - exact, 3.0 * bound_of(channel) * drawn, rtol=1e-9)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_gradient_is_no_longer_than_the_server_expects(name):
    """What is no sum is at most C long, of however many records; the bound reckons with it."""
    for count in (1, 2, 9):
        x, y = torch.full((count, FEATURES), 50.0).double(), torch.zeros(count).double()
        length = float(released(name, Records(x, y), "gradient").norm())
        assert length <= (count if MECHANISMS[name].summed else 1) * CLIP * (1 + 1e-9)
    assert longest_gradient(terms(name), 1) >= CLIP


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_plan_a_page_and_an_accountant_take_it_by_name(name):
    agreed = Plan.parse({"privacy": {"mode": name}}).terms({"a": 500.0})["a"]
    assert agreed.mechanism == name
    sigma = agreed.sigmas["gradient"]
    assert agreed.multipliers["gradient"] == sigma / sensitivity(name, "gradient")


def test_an_unknown_name_or_channel_is_refused_everywhere():
    with pytest.raises(PlanError, match="'per_smaple': expected one of"):
        Plan.parse({"privacy": {"mode": "per_smaple"}})
    with pytest.raises(InputError, match="mechanism is 'per_smaple'"):
        dataclasses.replace(terms("per_sample"), mechanism="per_smaple")
    for name in MECHANISMS:
        with pytest.raises(PlanError, match="'size' has no known sensitivity"):
            sensitivity(name, "size")


def test_every_mechanism_is_complete():
    for name, entry in MECHANISMS.items():
        assert name.isidentifier()
        assert name != "none"
        assert entry.told.strip()
        assert "gradient" in entry.sensitivities
        for channel, moved in entry.sensitivities.items():
            assert 0 < moved < math.inf
            assert callable(getattr(entry.batch, channel))


@pytest.mark.parametrize(("table", "key"), [(MECHANISMS, "mode"), (ACCOUNTANTS, "accountant")])
def test_a_plan_may_name_what_was_added_later(monkeypatch, table, key):
    with pytest.raises(ValidationError, match="'mine': expected one of"):
        Privacy(**{key: "mine"})
    monkeypatch.setitem(table, "mine", next(iter(table.values())))
    assert getattr(Privacy(**{key: "mine"}), key) == "mine"
