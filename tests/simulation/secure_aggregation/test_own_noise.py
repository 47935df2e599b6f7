"""Masked replies with each site's own noise: how wide their words are, and what rounding costs."""

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from fedpact.common.errors import DataError
from fedpact.common.messages import Reply, Task
from fedpact.plan import Plan
from fedpact.simulation.secure_aggregation import encoding
from fedpact.simulation.secure_aggregation.encoding import FixedPointMean, Form, RoundedMean
from fedpact.simulation.secure_aggregation.words import join_words, split_words
from fedpact.simulation.simulate import simulate

SIZES = {"a": 200.0, "b": 350.0, "c": 90.0, "d": 1000.0}
STEPS, RATE, D = 4, 0.5, 50
BASE = {
    "settings": {"local_steps": STEPS, "learning_rate": RATE},
    "sites": 4,
    "rounds": 5,
    "sampling_rate": 0.3,
    "secure_aggregation": {"threshold": 3},
    "privacy": {"accountant": "rdp"},
}


@cache
def planned(tables):
    plan = Plan.parse({**BASE, **json.loads(tables)})
    return plan, plan.terms(SIZES) if plan.private else {}


def made(least=0.8, **tables):
    """(coding, terms) of a plan with these tables; sites of unlike sizes and noise.

    least: the least σ of a gradient.
    """
    plan, terms = planned(json.dumps(tables))
    unlike = dict(zip(SIZES, (1.0, 1.7, 1.2, 3.0), strict=True))
    terms = {
        site: replace(of, sigmas=dict.fromkeys(of.sigmas, least * unlike[site]))
        for site, of in terms.items()
    }
    return encoding.coding_of(plan, SIZES, terms), terms


def deviation(of, number=1, rate=RATE):
    """The noise of one coordinate of fedavg's reply: τ releases, each η σ C / (q N) long."""
    return math.sqrt(STEPS) * rate * of.sigmas["gradient"] * of.at(number).clip / of.batch_size


def opened(coding, task, replies):
    """The mean of these replies' plain words, and its stated error."""
    one = replies[min(replies)]
    layout = coding.layout(Form.of(one.vectors, one.numbers))
    total = sum(coding.encode(task, reply) for reply in replies.values())
    return coding.mean(task, replies, total, layout)


def task_of(d=D, number=1):
    generator = torch.Generator().manual_seed(d)
    return Task("run", number, "fedavg", {"w": torch.randn(d, generator=generator).double()}, {})


@pytest.mark.parametrize("gone", ["", "b"])
def test_mean_is_that_of_the_replies_within_its_error(gone):
    """Vectors within half a unit a reply, which is far less than noise; numbers in fixed point."""
    coding, terms = made()
    task, generator = task_of(), torch.Generator().manual_seed(3)
    replies = {}
    for site in SIZES.keys() - {gone}:
        noise = torch.randn(D, generator=generator, dtype=torch.float64)
        w = task.vectors["w"] + deviation(terms[site]) * noise
        replies[site] = Reply("run", 1, site, SIZES[site], {"w": w}, {"loss": -0.7, "x": 1e5})
    mean, error = opened(coding, task, replies)
    total = sum(SIZES[site] for site in replies)
    exact = sum(SIZES[site] / total * reply.vectors["w"] for site, reply in replies.items())
    off = (mean.vectors["w"] - exact).abs()
    unit = coding.units(task)["w"] * sum(SIZES.values()) / total
    assert isinstance(coding, RoundedMean)
    assert error == pytest.approx(len(replies) * unit / 2)
    assert 0 < float(off.max()) <= error
    assert mean.numbers == pytest.approx({"loss": -0.7, "x": 1e5}, abs=1e-10)


@pytest.mark.parametrize("kind", ["grid", "none"])
def test_error_includes_the_rounding_of_large_float32_weights(kind):
    coding, _ = made(1e-3, compression={"kind": kind})
    vectors = {"w": task_of().vectors["w"].float() * 1e4}
    task, replies = Task("run", 1, "fedavg", vectors, {}), {}
    for site in SIZES:
        w = vectors["w"] + 1e-2 * torch.rand(D)
        replies[site] = Reply("run", 1, site, SIZES[site], {"w": w}, {})
    mean, error = opened(coding, task, replies)
    parts = (SIZES[s] / sum(SIZES.values()) * r.vectors["w"].double() for s, r in replies.items())
    assert 0 < float((mean.vectors["w"].double() - sum(parts)).abs().max()) <= error <= 0.1


@pytest.mark.parametrize(
    ("tables", "number", "rate"),
    [
        ({}, 1, RATE),
        ({"privacy": {"accountant": "rdp", "clip_schedule": [1.0, 0.5]}}, 4, RATE),
        ({"local": {"schedule": [1.0, 0.25]}}, 5, RATE / 4),
    ],
)
def test_rounding_is_a_ten_thousandth_of_each_sites_noise(tables, number, rate):
    """By the formula of each site's noise, in a round of another clip or step, too."""
    coding, terms = made(**tables)
    unit = coding.units(task_of(number=number))["w"]
    shares = {site: size / sum(SIZES.values()) for site, size in SIZES.items()}
    noise = [shares[site] * deviation(of, number, rate) for site, of in terms.items()]
    assert all(unit**2 / 12 < 1e-4 * own**2 for own in noise)
    assert min(noise) / unit == pytest.approx(encoding.OWN_NOISE_UNITS)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("narrower", [0, 1])
def test_longest_replies_fit_and_do_not_in_fewer_bits(sign, narrower):
    """Each record of the largest batch at its bound in one coordinate, noise of 12 deviations in
    the same direction in each step, at every site."""
    low, high = 0.01, 60.0
    # Noise at which the sum all but fills its words.
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if made(middle)[0].bits > 17 else (low, middle)
    coding, terms = made(high)
    assert coding.bits == 17
    vars(coding)["bits"] -= narrower
    task, replies = task_of(1), {}
    for site, of in terms.items():
        records = encoding.most_records(of.batch_size) * of.clip / of.batch_size
        noise = 12 * of.sigmas["gradient"] * of.clip / of.batch_size
        far = sign * STEPS * RATE * (records + noise)
        replies[site] = Reply("run", 1, site, SIZES[site], {"w": task.vectors["w"] + far}, {})
    mean, error = opened(coding, task, replies)
    total = sum(SIZES.values())
    exact = sum(SIZES[site] / total * reply.vectors["w"] for site, reply in replies.items())
    off = float((mean.vectors["w"] - exact).abs().max())
    assert off > 100 * error if narrower else off <= error


@pytest.mark.parametrize(
    "tables",
    [
        {"compression": {"kind": "none"}},
        {"privacy": {"mode": "none"}},
        {"algorithm": "feddyn"},
        {"algorithm": "proxskip", "settings": {}},
        {"algorithm": "fedproxvr", "settings": {}},
        {"local": {"head": 10}},
    ],
    ids=str,
)
def test_unbounded_values_keep_64_bits(tables):
    coding, _ = made(**tables)
    assert type(coding) is FixedPointMean
    assert coding.bits == 64


def test_a_sum_too_long_for_32_bits_keeps_64():
    coding, _ = made(1e-6)
    assert type(coding) is FixedPointMean


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_values_that_are_not_integers_are_not_sent(value):
    coding, _ = made()
    reply = Reply("run", 1, "a", 200.0, {"w": torch.tensor([0.0, value]).double()}, {})
    with pytest.raises(DataError, match="cannot be summed"):
        coding.encode(task_of(2), reply)


@pytest.mark.parametrize("sites", [1, 3, 8, 100])
def test_sums_of_long_numbers_are_decoded_from_short_words(sites):
    """In 16 bits the parts of `sites` numbers add up without a carry from one to the next."""
    width = 16 - (sites - 1).bit_length()
    given = np.full((sites, 5), 2**64 - 1, np.uint64)
    given[0] = np.arange(5) * 12345678901234
    total = sum(split_words(row, width) for row in given)
    assert total.max() < 2**16
    assert (join_words(total, width) == given.sum(0, dtype=np.uint64)).all()


def test_a_run_charges_the_same_and_sends_less(tmp_path):
    """Beside 64 bits. Both models are rounded on the way down, whose grid the means follow."""
    whole, short = (
        simulate(Plan.parse({**BASE, "rounds": 2, "compression": {"kind": kind}}), tmp_path / kind)
        for kind in ("none", "grid")
    )
    assert short.summary["epsilon"] == whole.summary["epsilon"]
    assert short.summary["bytes_up"] < 0.5 * whole.summary["bytes_up"]
    told = [json.loads((run.folder / "privacy.json").read_bytes()) for run in (whole, short)]
    bits = [one["secure_aggregation"]["bits"] for one in told]
    assert bits[0] == 64
    assert 16 <= bits[1] <= 24
    assert told[0]["sites"] == told[1]["sites"]
