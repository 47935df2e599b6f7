"""Sums over held-out records, by hand; and how far one record moves them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpact.common.errors import PlanError
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.evaluation.held_out import EvaluationSettings, Grouping, HeldOut, SumsForm, form_of
from fedpact.per_sample.kernel import PerSampleKernel

SETTINGS = EvaluationSettings(share=0.2, releases=["hits", "loss", "roc"], loss_bound=0.8, bins=4)
FORM = SumsForm(SETTINGS, ("no", "yes"), ("a", "b", "c"))


def kernel():
    return PerSampleKernel(FlatModel(nn.Linear(3, 2)), cross_entropy)


def held(count):
    x = torch.randn(count, 3, generator=seeded_generator("totals"))
    y = torch.randint(2, (count,), generator=seeded_generator("y"))
    return HeldOut(x, y, torch.randint(3, (count,), generator=seeded_generator("group")))


def part(of, chosen):
    return HeldOut(of.x[chosen], of.y[chosen], of.group[chosen])


def by_hand(one, w):
    """Record by record, from the model's outputs."""
    hits, roc, loss = torch.zeros(3, 2, 2), torch.zeros(2, 4), 0.0
    for x, y, group in zip(one.x, one.y, one.group, strict=True):
        p = torch.softmax(w[:6].view(2, 3) @ x + w[6:], 0).double()
        hits[group, y, int(p.argmax() != y)] += 1
        roc[y, min(3, int(4 * p[1]))] += 1
        loss += min(1.0, float(-p[y].log()) / 0.8)
    return {"hits": hits, "roc": roc, "loss": torch.tensor([loss])}


def test_they_are_what_counting_gives():
    w, one = torch.randn(8, generator=seeded_generator("w")), held(50)
    found, expected = one.totals(FORM, kernel(), w), by_hand(one, w)
    assert torch.equal(found["hits"], expected["hits"].double().reshape(-1))
    assert torch.equal(found["roc"], expected["roc"].double().reshape(-1))
    # Each part is rounded down to 2^-20.
    assert 0 <= float(expected["loss"] - found["loss"]) < 50 * 2**-20 + 1e-4
    assert [*found] == ["hits", "loss", "roc"]
    assert {c: len(v) for c, v in found.items()} == {
        c: math.prod(shape) for c, shape in FORM.shapes.items()
    }


def test_false_positives_are_misses_by_the_class_that_is_said():
    settings = EvaluationSettings(share=0.2, releases=["hits", "false_positives"])
    form = SumsForm(settings, ("x", "y", "z"), ("a", "b", "c"))
    used = PerSampleKernel(FlatModel(nn.Linear(3, 3)), cross_entropy)
    w, one = torch.randn(12, generator=seeded_generator("w of three")), held(50)
    # A record without scores is a miss, and nothing is said of it.
    one.x[7] = torch.nan
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for x, y, group in zip(one.x, one.y, one.group, strict=True):
        said = int((w[:9].view(3, 3) @ x + w[9:]).argmax())
        expected[group, said] += float(said != int(y) and bool(x.isfinite().all()))
    found = one.totals(form, used, w)
    assert torch.equal(found["false_positives"], expected.reshape(-1))
    assert expected.sum() == found["hits"].view(-1, 2)[:, 1].sum() - 1
    for out in range(0, 50, 7):
        assert part(one, torch.arange(50) == out).totals(form, used, w)["false_positives"].sum() < 2


def test_one_record_moves_each_channel_by_at_most_one():
    """And the other records' parts are as they were, to the last bit."""
    w, one, used = torch.randn(8, generator=seeded_generator("w")), held(60), kernel()
    whole = one.totals(FORM, used, w)
    for out in range(0, 60, 7):
        rest = torch.arange(60) != out
        fewer = HeldOut(one.x[rest], one.y[rest], one.group[rest]).totals(FORM, used, w)
        alone = HeldOut(one.x[~rest], one.y[~rest], one.group[~rest]).totals(FORM, used, w)
        for channel, total in whole.items():
            assert torch.equal(total - fewer[channel], alone[channel])
            assert alone[channel].norm() <= 1


def test_person_moves_each_channel_by_at_most_one():
    w, one, used = torch.randn(8, generator=seeded_generator("w")), held(60), kernel()
    whose = torch.cat(
        [torch.zeros(40), torch.arange(1, 8), torch.arange(1, 8), torch.full((6,), 3)]
    )
    one = replace(one, persons=whose.long())
    form = replace(FORM, unit="person")
    whole = one.totals(form, used, w)
    # By hand: the mean over persons of the means over their records, each rounded down.
    for channel, total in whole.items():
        means = [by_hand(part(one, whose == p), w)[channel].double().reshape(-1) for p in range(8)]
        means = [mean / (whose == p).sum() for p, mean in enumerate(means)]
        assert torch.allclose(total, torch.stack(means).sum(0), atol=60 * 2**-20 + 1e-4)
    for person in range(8):
        rest = whose != person
        numbered = torch.unique(whose[rest], return_inverse=True)[1]
        fewer = replace(part(one, rest), persons=numbered).totals(form, used, w)
        alone = replace(part(one, ~rest), persons=torch.zeros(int((~rest).sum())).long())
        for channel, total in alone.totals(form, used, w).items():
            assert torch.equal(whole[channel] - fewer[channel], total)
            assert 0.99 * (channel != "loss") < total.sum() <= 1
    # Records for themselves would have moved the table by 40.
    assert replace(one, persons=None).totals(form, used, w)["hits"].sum() == 60


def test_whatever_a_record_does_it_is_one_record():
    w, one = torch.randn(8, generator=seeded_generator("w")), held(3)
    one.x[1] = torch.inf
    found = one.totals(FORM, kernel(), w)
    assert found["hits"].sum() == found["roc"].sum() == 3
    assert found["loss"].isfinite().all()
    nobody = HeldOut(one.x[:0], one.y[:0], one.group[:0]).totals(FORM, kernel(), w)
    assert all(not total.any() for total in nobody.values())
    assert {c: len(v) for c, v in nobody.items()} == {
        c: math.prod(shape) for c, shape in FORM.shapes.items()
    }


@pytest.mark.parametrize(("release", "count"), [("false_positives", 2), ("roc", 3)])
def test_some_releases_are_of_two_classes_or_of_more(release, count):
    settings = EvaluationSettings(share=0.2, releases=["hits", release])
    with pytest.raises(PlanError, match=f"{count} classes"):
        form_of(settings, "abc"[:count], None, "record")


def test_groups_are_declared_categories_of_a_column():
    groups = Grouping(column=1, values=(0.0, 1.0), names=("f", "m"))
    assert groups.of(torch.tensor([[9.0, 1.0], [9.0, 0.0]])).tolist() == [1, 0]
