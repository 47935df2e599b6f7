"""What a benchmark leaves: tables of rows, kept as JSON, one file a table."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured number.

    value: the median; low, high: the quartiles, equal to it where there is one number only; None
    where nothing was measured, and `note` says why. goal, stretch: what it is to reach, in the
    same unit, and `larger_is_better` in which direction.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = "×"
    goal: float | None = None
    stretch: float | None = None
    larger_is_better: bool = False
    note: str = ""

    def reaches(self, mark: float | None) -> bool | None:
        """Whether the value, rounded as it is shown, reaches a mark; None where either lacks."""
        if self.value is None or mark is None:
            return None
        value = float(shown(self.value))
        return value >= mark if self.larger_is_better else value <= mark


@dataclass(frozen=True)
class Table:
    """The rows of one table, all measured on one machine and of one kernel.

    made: date and time; busy: others used the machine; commit, kernel: see provenance.
    """

    name: str
    rows: tuple[Row, ...]
    machine: Mapping[str, str]
    made: str
    quick: bool
    busy: bool
    commit: str
    kernel: str

    @property
    def measured(self) -> bool:
        """Whether there is any figure."""
        return any(row.value is not None for row in self.rows)

    def save(self, folder: Path = RESULTS) -> None:
        """Write folder/NAME.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    def can_resume(self, stored: "Table") -> bool:
        """Whether a stored table's cells can be kept: they are of this kernel and machine."""
        return (stored.kernel, dict(stored.machine)) == (self.kernel, dict(self.machine))

    @staticmethod
    def load(path: Path) -> "Table":
        """Read what `save` wrote."""
        raw = json.loads(path.read_text())
        rows = tuple(Row(**row) for row in raw.pop("rows"))
        return Table(rows=rows, **raw)


def shown(value: float) -> str:
    """Return a number with three significant digits, and no more than two decimals."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
