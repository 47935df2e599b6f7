"""What scales columns: how far one record moves its sums, and the noise in them."""

import math

import pytest
import torch

from fedpact.common.randomness.seeded import SeededDraws
from fedpact.privacy import column_scales
from fedpact.privacy.accounting.accountant import Budget


def test_one_record_moves_the_sums_by_at_most_the_sensitivity():
    """Over records drawn at random and at the corners, where it is attained; sums are exact."""
    generator = torch.Generator().manual_seed(1)
    for m in (1, 3, 8):
        most = 0.0
        for trial in range(200):
            record = torch.rand(1, m, generator=generator) * 2 - 1
            if trial % 2:
                record = record.sign()
            others = torch.randn(50, m, generator=generator)
            moved = column_scales.sums(torch.cat([others, record])) - column_scales.sums(others)
            assert torch.equal(moved, column_scales.sums(record))
            most = max(most, float(moved.norm()))
        assert 0.999 * column_scales.most_moved(m) < most <= column_scales.most_moved(m)
    wild = torch.tensor([[math.inf, -1e30, math.nan]])
    assert float(column_scales.sums(wild).norm()) <= column_scales.most_moved(3)


def test_the_noise_has_the_stated_deviation():
    """Each of 4,000 numbers; within 4 standard errors, so it fails once in 15,000 by chance."""
    of = column_scales.release(2, Budget(1.0, 1e-5), "best", 0.04, 1)
    nobody = torch.zeros(0, 2)
    found = torch.stack(
        [
            column_scales.answer_columns(
                of, nobody, 1.0, lambda *_: None, SeededDraws(s, "a", 0)
            ).means
            for s in range(1000)
        ]
    )
    assert float(found.std()) == pytest.approx(
        column_scales.deviation(of), rel=4 / math.sqrt(2 * 4000)
    )
    assert column_scales.deviation(of) == of.event.sigma * column_scales.most_moved(2)
