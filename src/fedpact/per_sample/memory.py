"""How many slots a pass may have by the memory of a GPU."""

from collections.abc import Callable
from typing import Final

import torch

_SHARE: Final = 3
"""A pass takes a third of a GPU's memory at most, and differences, which are two, two thirds."""

_FEW, _MORE = 8, 24
"""Slots of two passes, of which the second's peak is higher by what the slots between take."""


def fitting(run: Callable[[int], object], device: torch.device) -> int:
    """Return how many slots a pass may have, at least 1. run: does a pass with so many."""
    run(_FEW)  # libraries take memory of their own the first time
    few, more = (peak(run, slots, device) for slots in (_FEW, _MORE))
    each = max(1, (more - few) // (_MORE - _FEW))
    return max(1, _FEW + (total(device) // _SHARE - few) // each)


def peak(run: Callable[[int], object], slots: int, device: torch.device) -> int:
    """Return how many bytes a pass with so many slots takes at most."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(slots)
    return torch.cuda.max_memory_allocated(device) - before


def total(device: torch.device) -> int:
    """Return how many bytes a GPU has in all, in use or not."""
    return torch.cuda.mem_get_info(device)[1]
