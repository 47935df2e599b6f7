"""Each record decides by itself whether it is held out."""

import pytest
import torch

from fedpact.common.randomness.seeded import seeded_generator
from fedpact.evaluation.held_out import EvaluationSettings, form_of, hold_out, key_of_seed

KEY = key_of_seed(0, "site-00")


def records(count):
    x = torch.randn(count, 3, generator=seeded_generator("split"))
    return x, torch.randint(2, (count,), generator=seeded_generator("labels"))


def test_one_record_more_moves_no_other():
    x, y = records(200)
    whole = hold_out(x, y, 0.3, KEY)
    for out in (0, 100, 199):
        rest = torch.arange(200) != out
        assert torch.equal(hold_out(x[rest], y[rest], 0.3, KEY), whole[rest])
    order = torch.randperm(200, generator=seeded_generator("order"))
    assert torch.equal(hold_out(x[order], y[order], 0.3, KEY), whole[order])


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_about_so_many_are_held_out(share):
    """5 deviations of a binomial count: outside once in 10^6."""
    x, y = records(4000)
    count = int(hold_out(x, y, share, KEY).sum())
    assert abs(count - 4000 * share) < 5 * (4000 * share * (1 - share)) ** 0.5


def test_a_person_is_on_one_side_regardless_of_others():
    x, y = records(300)
    names = [f"p{i % 100}" for i in range(300)]
    whole = hold_out(x, y, 0.4, KEY, names)
    assert torch.equal(whole[:100], whole[100:200])
    assert torch.equal(whole[:100], whole[200:])
    # By the name alone: other values, other persons, other places.
    some = torch.arange(0, 300, 7)
    assert torch.equal(
        hold_out(x[some] + 1, y[some], 0.4, KEY, [names[i] for i in some]), whole[some]
    )
    # A split by records is none by persons.
    by_record = hold_out(x, y, 0.4, KEY)
    assert not torch.equal(by_record[:100], by_record[100:200])
    assert hold_out(x[:0], y[:0], 0.4, KEY, []).shape == (0,)


def test_label_key_and_share_decide_too():
    x, y = records(1000)
    whole = hold_out(x, y, 0.5, KEY)
    assert not torch.equal(hold_out(x, 1 - y, 0.5, KEY), whole)
    assert not torch.equal(hold_out(x, y, 0.5, key_of_seed(0, "site-01")), whole)
    # A larger share holds out those of a smaller one, and more.
    assert (hold_out(x, y, 0.6, KEY) | ~whole).all()
    assert not hold_out(x, y, 0.0, KEY).any()
    assert hold_out(x, y, 1.0, KEY).all()
    half, less = (form_of(EvaluationSettings(share=s), ["a"], None, "record") for s in (0.5, 0.4))
    splits = {half.split(KEY, persons=False), half.split(KEY, persons=True)}
    splits |= {less.split(KEY, persons=False), half.split(b"other", persons=False)}
    assert len(splits) == 4
