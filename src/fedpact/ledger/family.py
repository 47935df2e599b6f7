"""A run's reservations: NAME, and NAME_more1, NAME_more2 where it was extended. Their costs add up.

Each is made after what came before was seen, so both ε and both δ are summed, by basic composition.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from fedpact.ledger.reservations import over_runs

# As `next_name` writes it, so that no two names are one reservation: neither _more0 nor _more01.
_NAME: Final = re.compile(r"(?P<base>.*?)(?:_more(?P<number>[1-9][0-9]{0,8}))?", re.DOTALL)


def next_name(run: str) -> str:
    """Return what a run's next reservation is called in ledgers: NAME, NAME_more1, NAME_more2."""
    base, number = _parts(run)
    return f"{base}_more{number + 1}"


def is_extension(run: str) -> bool:
    """Whether a run's name is one that `next_name` gives: of a run that was extended."""
    return _parts(run)[1] > 0


def family(run: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return those of the known names that are of the run's reservations up to `run`, in order."""
    base, last = _parts(run)
    found = {number: name for name in known for of, number in [_parts(name)] if of == base}
    return tuple(found[number] for number in sorted(found) if number <= last)


def spend_of(run: str, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
    """Return what a run's reservations have cost together, None where a ledger has none of it.

    runs: of a receipt. Keys: epsilon_spent, epsilon_reserved, both of them with "alone", and delta.
    Of training and evaluations, which are of other records, the larger counts.
    """
    whose = {name: str(told["beside"] or name) for name, told in runs.items()}
    names = set(family(run, whose.values()))
    mine = [(whose[name], told) for name, told in runs.items() if whose[name] in names]
    if not mine:
        return None
    found = dict[str, float]()
    for state in ("spent", "reserved"):
        for key in (f"epsilon_{state}", f"epsilon_alone_{state}"):
            found[key], found["delta"] = over_runs((n, t[key], t["delta"]) for n, t in mine)
    return found


def _parts(run: str) -> tuple[str, int]:
    found = _NAME.fullmatch(run)
    return (run, 0) if found is None else (found["base"], int(found["number"] or 0))
