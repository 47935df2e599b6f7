"""Who holds which labels, as partition.json has it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LabelTable:
    """Training records of each label at each site; simulator only. counts[site][label]."""

    sites: list[str]
    labels: list[str]
    counts: list[list[int]]

    @staticmethod
    def of(partition: Mapping[str, Any]) -> "LabelTable":
        """Return partition.json's. Raises KeyError, TypeError or ValueError: it is no such file."""
        return LabelTable(
            sites=[str(name) for name in partition["train"]],
            labels=[str(label) for label in partition["classes"]],
            counts=[[int(n) for n in row] for row in partition["label_counts"]],
        )
