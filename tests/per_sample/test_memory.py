"""How long passes on a GPU are, by what they are found to take of its memory."""

import pytest
import torch
from torch import nn

from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.per_sample import passes
from fedpact.per_sample.kernel import PerSampleKernel

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch, request):
    """A GPU of so many bytes, on which a pass takes 500 bytes and 30 for each slot."""
    fitting = passes.slots_that_fit
    request.getfixturevalue("card")
    monkeypatch.setattr(passes, "slots_that_fit", fitting)

    def peak(run, slots, device):
        run(slots)
        return 500 + 30 * slots

    monkeypatch.setattr(passes, "peak_memory", peak)
    return lambda size: monkeypatch.setattr(passes, "whole_memory", lambda device: size)


@pytest.mark.parametrize("size", [3 * 10**3, 10**5, 10**9])
def test_a_pass_takes_a_third_and_no_more(gpu, size):
    gpu(size)
    most = passes.slots_that_fit(lambda slots: None, GPU)
    assert 500 + 30 * most <= size / 3
    assert 500 + 30 * (most + 1) > size / 3


def test_there_is_room_for_one_record_at_least(gpu):
    gpu(10)
    assert passes.slots_that_fit(lambda slots: None, GPU) == 1


def test_a_pass_is_as_long_as_fits_and_follows_from_no_record(gpu):
    model = FlatModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    x, y = torch.randn(50, 4), torch.arange(50) % 3
    lengths = []
    for size, length in ((10**4, 96), (10**9, 1024)):
        gpu(size)
        of_all, of_none = (
            PerSampleKernel(model, cross_entropy).scattered_length(x[some], y[some], 200)
            for some in (slice(None), slice(0))
        )
        assert of_all == of_none
        lengths.append(of_all)
        assert lengths[-1] <= length
    # On a GPU a pass is as long as fits, as few share a slot then.
    assert lengths[0] < lengths[1]
