"""Measures against scikit-learn's, and by what they are where it is plain."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, r2_score, roc_auc_score

from fedpact.common.losses import UNLABELLED
from fedpact.evaluation.metrics import (
    area,
    calibration_error,
    commonest,
    f1,
    measures_of,
    r_squared,
)


def scores(classes, seed=0, n=200):
    generator = torch.Generator().manual_seed(seed)
    # Rounded, so that many are equal.
    outputs = (torch.randn(n, classes, generator=generator) * 2).round() / 2
    return outputs, torch.randint(classes, (n,), generator=generator)


@pytest.mark.parametrize("classes", [2, 4])
def test_area_and_f1_are_those_of_scikit_learn(classes):
    outputs, y = scores(classes)
    # Equal ones are equal, in whatever order their terms were added.
    p = outputs.double().softmax(1).numpy().round(12)
    if classes == 2:
        assert area(outputs, y) == pytest.approx(roc_auc_score(y, p[:, 1]))
        assert f1(outputs, y) == pytest.approx(f1_score(y, p[:, 1] > 0.5))
    else:
        assert area(outputs, y) == pytest.approx(roc_auc_score(y, p, multi_class="ovr"))
        assert f1(outputs, y) == pytest.approx(f1_score(y, p.argmax(1), average="macro"))


def test_a_class_that_a_model_rules_out_has_an_area():
    outputs, y = scores(3)
    outputs[y == 0, 2] = -math.inf
    finite = outputs.clamp_min(-1e3)
    assert area(outputs, y) == area(finite, y) > 0.6


def test_of_several_labels_they_are_means_over_labels():
    outputs, _ = scores(3)
    y = (scores(3, seed=1)[0] > 0).float()
    p = outputs.double().sigmoid().numpy()
    assert area(outputs, y) == pytest.approx(roc_auc_score(y, p))
    assert f1(outputs, y) == pytest.approx(f1_score(y, p > 0.5, average="macro"))


@pytest.mark.parametrize("of", [area, f1, calibration_error])
@pytest.mark.parametrize("bad", [(3, slice(None)), (slice(None), 1)], ids=["record", "class"])
@pytest.mark.parametrize("several", [False, True])
def test_scores_that_are_no_numbers_have_no_measure(of, bad, several):
    """One broken score must not be left out of a mean, nor count as the first class."""
    outputs, y = scores(3)
    y = torch.eye(3)[y] if several else y
    assert math.isfinite(of(outputs, y))
    outputs[bad] = math.nan
    assert math.isnan(of(outputs, y))


def test_of_pixels_f1_is_the_dice_score_of_all_pixels():
    outputs = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, (5, 4, 4), generator=torch.Generator().manual_seed(1))
    expected = f1_score(y.flatten(), outputs.argmax(1).flatten(), average="macro")
    assert f1(outputs, y) == pytest.approx(expected)


def test_calibration_error_is_0_if_calibrated_and_1_if_sure():
    """Of four records told 3/4, three are right: no error. All wrong at certainty: error 1."""
    told = torch.tensor([[0.0, math.log(3)]]).expand(4, 2)
    assert calibration_error(told, torch.tensor([1, 1, 1, 0])) == pytest.approx(0, abs=1e-7)
    assert calibration_error(torch.tensor([[0.0, 60.0]]), torch.tensor([0])) == pytest.approx(1)
    labels = torch.tensor([[60.0, -60.0]])
    assert calibration_error(labels, torch.tensor([[1.0, 0.0]])) == pytest.approx(0, abs=1e-7)


def test_places_without_a_label_count_in_no_measure():
    outputs = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, (5, 4, 4), generator=torch.Generator().manual_seed(1))
    some = torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    alone = outputs.movedim(1, -1)[some], y[some]
    left = outputs, torch.where(some, y, UNLABELLED)
    for measure in (area, f1, calibration_error):
        assert measure(*left) == pytest.approx(measure(*alone))
        assert math.isnan(measure(outputs, torch.full_like(y, UNLABELLED)))


def test_explained_is_scikit_learns_r2():
    generator = np.random.default_rng(0)
    y, said = generator.normal(size=(2, 50))
    found = r_squared(torch.from_numpy(said)[:, None], torch.from_numpy(y))
    assert found == pytest.approx(r2_score(y, said))
    assert math.isnan(r_squared(torch.zeros(3, 1), torch.ones(3)))


def test_an_undefined_value_is_nan():
    outputs, _ = scores(2)
    assert math.isnan(area(outputs, torch.zeros(200, dtype=torch.int64)))
    assert math.isnan(area(outputs * math.nan, scores(2)[1]))
    assert math.isnan(calibration_error(outputs * math.nan, scores(2)[1]))


def test_two_classes_are_measured_and_ten_only_where_it_is_asked():
    assert set(measures_of("class", None, 2)) == {"auc", "f1", "ece"}
    assert measures_of("class", None, 10) == {}
    assert set(measures_of("class", ["ece"], 10)) == {"ece"}
    assert set(measures_of("number", None, 1)) == {"r2"}


def test_commonest_class_has_most_labels_and_none_for_numbers():
    y, classes = torch.tensor([2, 0, 2, 1, 2]), ["a", "b", "c"]
    assert commonest(y, classes) == {"name": "c", "accuracy": 0.6}
    assert commonest(torch.tensor([[1, 1], [1, 0]]), classes) == {"name": "b", "accuracy": 0.75}
    assert commonest(torch.rand(4), classes) is None
    assert commonest(y[:0], classes) is None


def test_area_does_not_change_when_scores_are_scaled_up():
    """Far from 0 probabilities are 1 and alike; the scores still have an order."""
    outputs, y = (
        torch.randn(300, 4, generator=torch.Generator().manual_seed(0)),
        scores(4, n=300)[1],
    )
    several = torch.nn.functional.one_hot(y, 4).float()
    for some, labels in ((outputs[:, :2], y % 2), (outputs[:, :1], several[:, :1])):
        assert area(1000 * some, labels) == pytest.approx(area(some, labels), abs=1e-12)
    far = 10.0 * torch.arange(40)
    assert area(torch.stack([-far, far, torch.zeros(40)], 1), (far > 195).long()) == 1.0
    assert math.isnan(area(torch.tensor([[0.0, math.inf], [0.0, 1.0]]), torch.tensor([1, 0])))


def test_no_measure_of_a_vocabulary_is_computed_unasked():
    assert measures_of("pixels", None, 4)
    assert not measures_of("pixels", None, 30_522)
    assert set(measures_of("pixels", ["f1"], 30_522)) == {"f1"}
