"""How λ follows from what is given and from the released loss F."""

import math

import pytest
import torch

from fedpact.algorithms.common.fairness import FairOracle, weight, weighting
from fedpact.common.errors import InputError
from fedpact.privacy.oracle import Fair, Uniform


@pytest.mark.parametrize("scale", [0.02, 1.0, 40.0])
def test_relative_weights_do_not_see_the_scale_of_the_loss(scale):
    """1 - c + c ℓ/F: the same for losses and reference times any factor; fixed λ is not."""
    losses = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    found = weighting("relative", 0.3, scale)(scale * losses)
    torch.testing.assert_close(found, 0.7 + 0.3 * losses, rtol=1e-14, atol=0)
    fixed = weighting("fixed", 0.3, scale)(scale * losses)
    assert torch.allclose(fixed, found) == (scale == 1.0)


@pytest.mark.parametrize("reference", [0.01, 1.0, 7.0])
def test_up_to_a_share_of_one_no_relative_weight_is_below_zero(reference):
    unclamped = 1 + weight("relative", 1.0, reference) * (0.0 - reference)
    assert unclamped == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("rule", ["fixed", "relative"])
@pytest.mark.parametrize("reference", [math.nan, math.inf, -math.inf])
def test_without_a_reference_records_count_alike(rule, reference):
    assert weight(rule, 0.3, reference) == 0.0
    assert isinstance(weighting(rule, 0.3, reference), Uniform)


@pytest.mark.parametrize("reference", [0.0, -3.0])
def test_noise_below_zero_makes_no_negative_weight(reference):
    assert weighting("relative", 0.3, reference) == Fair(0.3 / 0.01, reference)


def test_a_solver_that_asks_for_no_batch_is_told_so():
    oracle = FairOracle(None, Uniform(), ())
    with pytest.raises(InputError, match="no batch was asked for"):
        oracle.last_batch  # noqa: B018
