"""Per-sample losses against their formulas."""

import pytest
import torch

from fedpact.common.losses import cross_entropy, squared_error


def test_cross_entropy_is_minus_the_log_probability():
    logits, y = torch.randn(5, 4).double(), torch.tensor([0, 3, 1, 1, 2])
    expected = torch.stack(
        [-torch.log(torch.softmax(row, 0)[k]) for row, k in zip(logits, y, strict=True)]
    )
    assert torch.allclose(cross_entropy(logits, y), expected)


def test_cross_entropy_of_sequences_is_a_mean_over_positions():
    logits, y = torch.randn(5, 3, 4).double(), torch.randint(0, 4, (5, 3))
    each = torch.stack([cross_entropy(logits[:, t], y[:, t]) for t in range(3)], 1)
    assert torch.allclose(cross_entropy(logits, y), each.mean(1))


@pytest.mark.parametrize("wrong", [4, -1, -100, 2**40])
def test_unknown_class_has_zero_loss_and_gradient(wrong):
    logits, y = torch.randn(3, 4).double().requires_grad_(), torch.tensor([0, wrong, 3])
    losses = cross_entropy(logits, y)
    assert losses.isnan().tolist() == [False, True, False]
    assert torch.equal(losses[[0, 2]], cross_entropy(logits[[0, 2]], y[[0, 2]]))
    losses[[0, 2]].sum().backward()
    assert not logits.grad[1].any()
    words = torch.tensor([[0, 1], [2, wrong], [3, 3]])
    assert cross_entropy(torch.randn(3, 2, 4), words).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(5, 1), (5, 3), (5, 2, 3)])
def test_squared_error_is_half_the_squared_distance(shape):
    outputs, y = torch.randn(shape).double(), torch.randn(shape).double()
    expected = torch.stack([0.5 * (a - b).norm() ** 2 for a, b in zip(outputs, y, strict=True)])
    assert torch.allclose(squared_error(outputs, y), expected)


def test_squared_error_never_pairs_a_record_with_another():
    outputs, y = torch.randn(5, 1), torch.randn(5)
    assert torch.allclose(squared_error(outputs, y), 0.5 * (outputs[:, 0] - y) ** 2)
    with pytest.raises(RuntimeError):
        squared_error(torch.randn(5, 2), y)
