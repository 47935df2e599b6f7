import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedpact.common.errors import InputError
from fedpact.common.losses import cross_entropy, squared_error
from fedpact.common.messages import SiteScore
from fedpact.common.params import FlatModel
from fedpact.evaluation.metrics import (
    METRICS,
    Metric,
    area,
    entropy,
    evaluate,
    fairness,
    of_sites,
    psi,
    ranking,
)
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel

losses = st.lists(st.floats(0, 100), min_size=1, max_size=20)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a number."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in func.name()
        return func(*args, **(kwargs or {}))


class Scores(nn.Module):
    """Its input is its output."""

    def forward(self, x):
        return x


def score(accuracy):
    return SiteScore(accuracy=accuracy, loss=0.0, records=1)


@pytest.mark.parametrize("batch", [1, 7, 50, 1024])
def test_evaluate_is_the_mean_over_the_whole_set(batch):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (50,), generator=generator)
    found = evaluate(Scores(), cross_entropy, x, y, batch)
    # -log softmax written out, and the largest score by comparison.
    expected = (x.exp().sum(1).log() - x[range(50), y]).mean()
    right = sum(bool((x[i, y[i]] >= x[i]).all()) for i in range(50))
    assert found.loss == pytest.approx(float(expected), rel=1e-12)
    assert found.accuracy == right / 50
    assert found.records == 50


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8)])
def test_images_are_evaluated_as_the_model_computes_them(shape):
    """Their memory format is another for the while: the same scores, and weights as they were."""
    module = nn.Sequential(
        nn.Conv2d(shape[0], 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ).double()
    x, y = torch.randn(50, *shape, dtype=torch.float64), torch.randint(3, (50,))
    before = [(p.data_ptr(), p.stride(), p.detach().clone()) for p in module.parameters()]
    outputs = module(x).detach()
    found = evaluate(module, cross_entropy, x, y, batch=7)
    assert found.loss == pytest.approx(float(cross_entropy(outputs, y).mean()), rel=1e-12)
    assert found.accuracy == float((outputs.argmax(1) == y).double().mean())
    for parameter, (place, stride, value) in zip(module.parameters(), before, strict=True):
        assert (parameter.data_ptr(), parameter.stride()) == (place, stride)
        assert torch.equal(parameter, value)


class ByMemory(nn.Module):
    """A model of one's own, whose code goes by how its images lie in memory."""

    def __init__(self, way):
        super().__init__()
        self.way, self.body = way, nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        x = self.body(x)
        if self.way == "view":
            return self.head(x.view(x.size(0), -1))
        return self.head(x.as_strided((len(x), 36), (36, 1)))


@pytest.mark.parametrize(("way", "nested"), [("view", True), ("as_strided", False)])
def test_a_custom_model_gets_images_in_their_usual_layout(way, nested):
    """What torch's own layers take is no business of code that looks at memory."""
    module = ByMemory(way).double()
    if nested:
        module = nn.Sequential(module, nn.ReLU())
    x, y = torch.randn(20, 3, 8, 8, dtype=torch.float64), torch.randint(3, (20,))
    losses = cross_entropy(module(x), y).detach()
    assert evaluate(module, cross_entropy, x, y, batch=7).loss == pytest.approx(
        float(losses.mean()), rel=1e-12
    )
    model = FlatModel(module)
    for kernel in (PlainKernel(model, cross_entropy), PerSampleKernel(model, cross_entropy)):
        assert torch.allclose(kernel.losses(x, y), losses, rtol=1e-12)


@pytest.mark.parametrize("rows", [3, 1])
def test_model_that_overwrites_its_test_data_is_refused(rows):
    """Even where nothing changes, in one batch out of several; a later layer may write."""
    x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    for first in (nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)):
        module = nn.Sequential(nn.Flatten(), first, nn.Linear(2, 2))
        with pytest.raises(InputError, match="Sequential writes to its input"):
            evaluate(module, cross_entropy, x, y, batch=rows)
    later = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    assert evaluate(later, cross_entropy, x, y, batch=rows).records == 3


def test_sum_is_taken_in_double_precision():
    # In float32, 2^24 + 1 = 2^24: a float32 sum over batches would lose the small losses.
    x = torch.tensor([[2.0**12.5]] + [[math.sqrt(2)]] * 1000)
    each = squared_error(x, torch.zeros(1001)).double()
    found = evaluate(Scores(), squared_error, x, torch.zeros(1001), batch=1)
    assert found.loss == pytest.approx(float(each.sum()) / 1001, rel=1e-14)


def test_sequences_count_positions():
    scores = torch.eye(3)[torch.tensor([[0, 1], [2, 2]])]
    found = evaluate(Scores(), cross_entropy, scores, torch.tensor([[0, 1], [2, 0]]))
    assert found.accuracy == 0.75
    assert found.records == 2


def test_a_number_instead_of_class_scores_has_no_accuracy():
    found = evaluate(Scores(), squared_error, torch.full((3, 1), 2.0), torch.zeros(3))
    assert math.isnan(found.accuracy)
    assert found.loss == 2.0


def test_a_diverged_model_is_wrong_and_its_loss_is_reported():
    y = torch.zeros(4, dtype=torch.int64)
    found = evaluate(Scores(), cross_entropy, torch.full((4, 3), math.nan), y)
    assert found.accuracy == 0.0
    assert math.isnan(found.loss)


def test_evaluates_in_evaluation_mode_and_restores_every_mode():
    module = nn.Sequential(nn.Dropout(1.0), nn.Dropout(1.0))
    module[1].eval()
    x, y = torch.eye(3), torch.arange(3)
    assert evaluate(module, cross_entropy, x, y).accuracy == 1.0
    assert [part.training for part in module.modules()] == [True, True, False]


def test_leaves_no_gradient_behind():
    module = nn.Linear(3, 2)
    seen = []

    def loss(outputs, y, /):
        seen.append(outputs.requires_grad)
        return cross_entropy(outputs, y)

    evaluate(module, loss, torch.eye(3), torch.tensor([0, 1, 0]))
    assert seen == [False]


@pytest.mark.parametrize(("x", "y"), [((0, 2), 0), ((3, 2), 4)])
def test_evaluate_refuses_no_records_and_unequal_lengths(x, y):
    with pytest.raises(InputError, match=f"x has {x[0]} records and y has {y}"):
        evaluate(Scores(), cross_entropy, torch.zeros(x), torch.zeros(y, dtype=torch.int64))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 100)), min_size=1, max_size=20))
def test_psi_is_the_weighted_second_moment_less_the_squared_mean(sites):
    total = math.fsum(n for _, n in sites)
    mean = math.fsum(n / total * f for f, n in sites)
    square = math.fsum(n / total * f * f for f, n in sites)
    found = psi([f for f, _ in sites], [n for _, n in sites])
    assert found == pytest.approx(square - mean * mean, rel=1e-9, abs=1e-9)


@settings(max_examples=30)
@given(st.floats(0, 1e300), st.lists(st.floats(0.01, 1e300), min_size=1, max_size=9))
def test_psi_of_equal_losses_is_exactly_zero(loss, weights):
    assert psi([loss] * len(weights), weights) == 0.0


@pytest.mark.parametrize(
    ("f", "expected"),
    [([1.0, math.inf], math.inf), ([1.0, math.nan], math.nan), ([math.inf, math.nan], math.nan)],
)
def test_psi_reports_a_lost_site(f, expected):
    assert psi(f, [1, 1]) == pytest.approx(expected, nan_ok=True)


def test_psi_leaves_out_a_site_without_weight():
    assert psi([1.0, math.nan, 3.0], [1, 0, 1]) == 1.0


def test_psi_beyond_the_largest_number_is_infinite():
    assert psi([1e300, 0.0], [1, 1]) == math.inf
    assert psi([1.7e308, -1.7e308], [1, 1]) == math.inf
    assert psi([0.0, 2.0], [1.7e308, 1.7e308]) == 1.0


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=20), st.data())
def test_entropy_obeys_the_chain_rule(values, data):
    # H(all) = H(shares of the two groups) + Σ share · H(within the group).
    cut = data.draw(st.integers(0, len(values)))
    groups = [group for group in (values[:cut], values[cut:]) if sum(group) > 1e-6]
    if not groups or sum(map(len, groups)) < len(values):
        return
    total = sum(values)
    shares = [sum(group) / total for group in groups]
    within = sum(s * entropy(group) for s, group in zip(shares, groups, strict=True))
    between = -sum(s * math.log(s) for s in shares)
    assert entropy(values) == pytest.approx(between + within, abs=1e-9)


def test_entropy_of_equal_values_is_exactly_log_n():
    assert entropy([0.0] * 7) == entropy([0.3] * 7) == entropy([1.7e308] * 7) == math.log(7)
    assert entropy([0.0, 0.25, 0.0]) == 0.0
    assert math.isnan(entropy([0.5, math.nan]))


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_fairness_is_of_the_accuracies_whatever_the_sizes(accuracies):
    scores = {f"s{i:02}": SiteScore(a, 0.0, 10**i % 97 + 1) for i, a in enumerate(accuracies)}
    found = fairness(scores)
    mean = math.fsum(accuracies) / len(accuracies)
    second = math.fsum((a - mean) ** 2 for a in accuracies) / len(accuracies)
    assert found["variance"] == pytest.approx(second, abs=1e-12)
    assert found["entropy"] == entropy(np.sort(accuracies).tolist())


@pytest.mark.parametrize(("sites", "worst"), [(1, 1), (10, 1), (11, 2), (1000, 100)])
def test_worst_tenth_is_rounded_up_to_whole_sites(sites, worst):
    # Accuracy i / sites for i = 0, 1, ...: the worst m have the mean (m - 1) / 2 / sites.
    found = fairness({str(i): score(i / sites) for i in range(sites)})
    assert found["worst_tenth"] == pytest.approx((worst - 1) / 2 / sites, rel=1e-12)


def test_a_site_without_a_number_ranks_worst_and_shows():
    scores = {"b": score(0.5), "a": score(0.5), "lost": score(math.nan)}
    assert ranking(scores) == ["lost", "a", "b"]
    assert fairness(scores)["worst_site"] == "lost"
    assert math.isnan(fairness(scores)["variance"])
    assert math.isnan(fairness(scores)["entropy"])


def test_evaluate_reads_two_numbers_however_many_batches():
    x, y = torch.randn(50, 4), torch.arange(50) % 4
    with Reads() as reads:
        evaluate(Scores(), cross_entropy, x, y, 10)
    assert reads.count == 2


@pytest.mark.parametrize("value", [None, "high", [0.5, 0.6], torch.zeros(2)], ids=str)
def test_a_metric_that_is_no_number_is_named(monkeypatch, value):
    monkeypatch.setitem(METRICS, "mine", Metric("m", lambda *_: value, "number", "", ""))
    with pytest.raises(InputError, match=r"metric 'mine' is .*: expected a number"):
        of_sites({"a": score(0.5)}, {"a": 1.0})


@pytest.mark.parametrize("value", [torch.tensor(0.5), np.float32(0.5), 0.5], ids=str)
def test_any_number_is_written_as_a_float(monkeypatch, value):
    monkeypatch.setitem(METRICS, "mine", Metric("m", lambda *_: value, "number", "", ""))
    found = of_sites({"a": score(0.5)}, {"a": 1.0})["mine"]
    assert type(found) is float
    assert found == 0.5


def test_equal_scores_are_half_a_pair_each():
    """A constant score orders no pair; of two pairs, one tie and one in order are 3/4."""
    y = torch.tensor([0, 1, 1])
    assert area(torch.zeros(3, 2), y) == 0.5
    assert area(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), y) == 0.75
