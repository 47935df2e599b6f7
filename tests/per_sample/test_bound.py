"""The promise that privacy rests on, for batches, records, clips and weights of any size.

|S(D + r) - S(D)| <= C (1 + slack(|D + r|)), and S is finite. Models are traced once; values are
drawn. Rates: r, and each of up to 6 records of D besides ordinary ones, is of one of 7 kinds, each
as often: 2 of them cancel over their positions, 1 is not finite or almost; magnitudes are spread
evenly over float32's exponents.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.per_sample.attacked import CLASSES, MODELS, allowed, kernel, moved, put, records

from fedpact.per_sample import norms
from fedpact.per_sample.clipping import SHORTEST

KINDS = ("normal", "cancelling", "spikes", "constant", "mixed", "denormal", "bad")

one_record = st.tuples(st.sampled_from(KINDS), st.integers(-44, 38), st.integers(0, 2**16))
clips = st.one_of(
    st.floats(math.log2(SHORTEST) + 1, 60).map(lambda e: 2.0**e),
    st.floats(-10, 2).map(lambda e: 10.0**e),
)


def weigh_no_more_than_a_million(losses):
    """A fair weight: of its own record's loss alone, from 0 on, and now and then none at all."""
    return (1e6 * (losses - 1)).clamp(0, 1e6)


def weigh_by_the_loss(losses):
    """A weight that grows with the loss, without an end."""
    return 1e3 * losses


WEIGHTS = (None, weigh_no_more_than_a_million, weigh_by_the_loss)
"""How records are weighted: not at all, fairly, and by something that may be infinite."""


def drawn(name, recipe):
    """A record [1, ...] of a kind, about 10^exponent large."""
    kind, exponent, seed = recipe
    shape, g = MODELS[name][1], torch.Generator().manual_seed(seed)
    if name == "words":
        return torch.randint(0, 9, (1, *shape), generator=g)
    x = torch.randn(1, *shape, generator=g)
    size = 10.0**exponent
    if kind in ("cancelling", "spikes"):
        # Positions are the first of a record's dimensions, or behind its channels.
        flat = x.flatten(1)
        half = flat.shape[1] // 2
        if kind == "spikes":
            flat = torch.zeros_like(flat)
            flat[:, 0] = 1.0
        flat[:, half : 2 * half] = -flat[:, :half]
        x = flat.view(x.shape)
    elif kind == "constant":
        x = torch.ones_like(x)
    elif kind == "mixed":
        x = x * 10.0 ** (30 * torch.rand(x.shape, generator=g) - 15)
    elif kind == "denormal":
        size = 1e-42
    elif kind == "bad":
        size = (math.inf, math.nan, 3e38)[seed % 3]
    return (x * size).clamp(-3.4e38, 3.4e38) if kind != "bad" else x * size


def batch(name, recipes, ordinary):
    """Records of D: ordinary ones, and those of the recipes among them."""
    x, _ = records(name, ordinary, len(recipes))
    for recipe in recipes:
        x = put(x, drawn(name, recipe), recipe[2] % (len(x) + 1))
    return x, torch.arange(len(x)) % CLASSES


CASES = (
    ([], 40, ("spikes", 14, 1), 1.0, None),
    ([("cancelling", 12, 3)] * 3, 16, ("bad", 0, 2), 1e-3, weigh_by_the_loss),
)


def attack(name, sum_of, recipes, ordinary, r, clip, weights):
    """Assert of one case what this module is about; sum_of(x, y, clip, weights)."""
    x, y = batch(name, recipes, ordinary)

    def summed(x, y):
        return sum_of(x, y, clip, weights)

    found = moved(summed, x, y, drawn(name, r), torch.tensor([r[2] % CLASSES]))
    assert found <= allowed(len(x), clip)


def attack_by_cases(name, sum_of):
    for case in CASES:
        attack(name, sum_of, *case)


def by_turns(*values):
    """Each model with one of the values, neighbours with different ones."""
    return list(zip(MODELS, itertools.cycle(values), strict=False))


@pytest.mark.parametrize("examples", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_one_record_moves_a_sum_by_no_more_than_its_share(name, examples):
    assert kernel(name).way(*records(name, 3, 0)) == MODELS[name][2]
    attack_by_cases(name, kernel(name).clipped_sum)

    @settings(max_examples=examples, derandomize=True, database=None)
    @given(
        recipes=st.lists(one_record, max_size=6),
        ordinary=st.sampled_from((0, 1, 5, 15, 16, 40)),
        r=one_record,
        clip=clips,
        weights=st.sampled_from(WEIGHTS),
    )
    def attack_by_chance(**case):
        attack(name, kernel(name).clipped_sum, **case)

    attack_by_chance()


@pytest.mark.parametrize("name", MODELS)
def test_nor_where_gradients_are_made_twice_or_on_a_card(name, monkeypatch, request):
    monkeypatch.setattr(norms, "KEEP_BYTES", 1)
    attack_by_cases(name, kernel(name).clipped_sum)
    if MODELS[name][2] != "dense":  # a GPU has no dense way
        request.getfixturevalue("card")
        attack_by_cases(name, kernel(name).clipped_sum)


@pytest.mark.parametrize(("name", "apart"), by_turns(1e-6, 0.1))
def test_nor_a_sum_of_differences(name, apart):
    made = kernel(name)
    w = made.model.vector.clone()
    anchor = w + apart * torch.randn(len(w), generator=torch.Generator().manual_seed(0))
    attack_by_cases(name, lambda x, y, c, _: made.clipped_difference(x, y, w, anchor, c))


@pytest.mark.parametrize(("name", "keep"), by_turns(norms.KEEP_BYTES, 1))
def test_one_record_more_changes_no_bit_of_the_others_losses(name, keep, monkeypatch):
    """Else a count of losses below a bound would move by more than that record's own vote."""
    monkeypatch.setattr(norms, "KEEP_BYTES", keep)
    made = kernel(name)
    x, y = batch(name, [("normal", 0, 1), ("mixed", 0, 2)], 40)
    every = made.losses(x, y)
    for count in (1, 2, 7, 15, 16, 17, 33, 41):
        alike = made.losses(x[:count], y[:count])
        assert torch.equal(alike.nan_to_num(-1), every[:count].nan_to_num(-1)), count
