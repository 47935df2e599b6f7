"""What is done with a site's records before it takes part: each is tried, by itself if need be."""

import logging
from typing import Final

import torch

from fedpact.persample.kernel import PerSampleKernel
from fedpact.privacy.batch_clipped import BatchClippedKernel
from fedpact.privacy.oracle import Records

_TOGETHER: Final = 256

_logger = logging.getLogger("fedpact")


def usable(records: Records, kernel: PerSampleKernel | BatchClippedKernel, path: str) -> Records:
    """Return the records that the model takes, each tried by itself or among others that it takes.

    One that makes it raise would make every batch raise that holds it, and that would show. It is
    named in the site's own log and nowhere else.
    """
    bad: list[int] = []
    for start in range(0, len(records.y), _TOGETHER):
        some = range(start, min(start + _TOGETHER, len(records.y)))
        if not _taken(records, kernel, some):
            bad += [j for j in some if not _taken(records, kernel, range(j, j + 1))]
    if not bad:
        return records
    _logger.warning(
        "%s: the model does not take %d of %d records, which are left out of everything: %s; look "
        "for categories, words or labels that the federation does not have",
        path,
        len(bad),
        len(records.y),
        ", ".join(map(str, bad)),
    )
    good = torch.ones(len(records.y), dtype=torch.bool, device=records.y.device)
    good[bad] = False
    return Records(records.x[good], records.y[good])


def _taken(records: Records, kernel: PerSampleKernel | BatchClippedKernel, some: range) -> bool:
    rows = slice(some.start, some.stop)
    try:
        kernel.losses(records.x[rows].clone(), records.y[rows])
    except Exception:  # whatever a model may raise at a record
        return False
    return True
