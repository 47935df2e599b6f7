"""What is done with records before a run: each is tried with its model, by itself if need be."""

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fedpact.data.splits import limit_records_per_person, number_persons
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layers import is_torchs
from fedpact.plan import Plan
from fedpact.privacy.batches import BatchClippedKernel

_TOGETHER: Final = 256
_SHOWN: Final = 20

AnyKernel = PerSampleKernel | BatchClippedKernel | PlainKernel

_logger = logging.getLogger("fedpact")


def find_accepted(x: Tensor, y: Tensor, kernel: AnyKernel, origin: str, numbers: Tensor) -> Tensor:
    """Return which records x, y [n, ...] the kernel's model takes, bool [n].

    Each is tried by itself or among others that it takes. One that makes the model raise would make
    every batch raise that holds it, and that would show. It is named in the log of this machine and
    nowhere else. origin: the file. numbers: the records' numbers in it [n].
    """
    good = torch.ones(len(y), dtype=torch.bool)
    # Such layers take every number.
    if x.is_floating_point() and is_torchs(kernel.model.module):
        return good
    told: list[str] = []
    for start in range(0, len(y), _TOGETHER):
        some = range(start, min(start + _TOGETHER, len(y)))
        if _error(x, y, kernel, some) is None:
            continue
        for j in some:
            error = _error(x, y, kernel, range(j, j + 1))
            if error is not None:
                good[j] = False
                told.append(
                    f"row {int(numbers[j])}" + (f" ({error})" if len(told) < _SHOWN else "")
                )
    if told:
        _logger.warning(
            "%s: the model does not take %d of %d records, which are left out of everything: %s; "
            "look for categories, words or labels that were not declared",
            origin,
            len(told),
            len(y),
            ", ".join(told),
        )
    return good


def limit_per_person(
    persons: Sequence[str], good: Tensor, plan: Plan
) -> tuple[Tensor, Tensor | None]:
    """Return which records are used, as indices [m], and whose each is; None if that is all one.

    persons: whose each record is [n], or empty where nobody asked. good: which are taken, bool [n].
    Beyond `privacy.person_records` of a person the plan drops some; see
    splits.limit_records_per_person.
    """
    places = good.nonzero()[:, 0]
    if not persons:
        return places, None
    numbers = number_persons(persons, places.numpy())
    most = plan.privacy.person_records
    if numbers is not None and most is not None:
        kept = torch.from_numpy(limit_records_per_person(numbers.tolist(), most, plan.seed))
        places, numbers = places[kept], numbers[kept]
    return places, numbers if plan.privacy.unit == "person" else None


def _error(x: Tensor, y: Tensor, kernel: AnyKernel, some: range) -> str | None:
    rows = slice(some.start, some.stop)
    try:
        kernel.losses(x[rows].clone(), y[rows])
    except Exception as error:  # whatever a model may raise at a record
        return f"{type(error).__name__}: {error}"
    return None
