"""Whose each record is, where a person and not a record is what ε is promised to.

One person under two names is protected less, and so is one whose name is another's as well: records
of m others count for less once k of hers count with them, by up to 2 k / (m + k) of the bound on a
person. So a name that may be several persons' is nobody's, and its records are used for nobody.
"""

import re
import unicodedata
from functools import cache
from typing import Any, Final, cast

import numpy as np

from fedpact.data.cells import Cells, NumberCells
from fedpact.data.own import readable, text_of, without_decimal_zeros
from fedpact.data.sieve import RecordFilter
from fedpact.errors import DataError

_NOBODY: Final = frozenset(
    {"", "na", "nan", "nat", "null", "none", "nil", "1ind", "1qnan", "inf", "infinity"}
    | {"unknown", "missing", "undefined", "anonymous"}
)
"""Names that name nobody, by their letters and digits: "-", "#N/A" and "n. a." are of them."""

# What spreadsheets and data frames make of long numbers: 3.2E+17, in some countries with a comma.
_EXPONENT: Final = re.compile(r"[+-]?(?=[.,]?[0-9])[0-9]*[.,]?[0-9]*e[+-]?[0-9]+", re.IGNORECASE)
_POINT: Final = re.compile(r"[+-]?[0-9]+[.,][0-9]*")
_CONTROLS: Final = "".join(map(chr, (*range(33), *range(127, 161))))


def persons_of(given: Cells | np.ndarray, sieve: RecordFilter, column: str = "person") -> list[str]:
    """Return whose each record is, n of them; the sieve has those that may be several persons'.

    Those are the records that name nobody, and those whose number was rounded, so that its
    neighbours, other persons, are the same. 7.0 is 7, however it is stored, and letters are the
    same in whichever of Unicode's ways they are written. Raises DataError: another length.
    """
    if len(given) != sieve.count:
        raise DataError(
            f"data set {sieve.origin}: person has {len(given)} entries for {sieve.count} records: "
            "give one person a record"
        )
    values = given.values if isinstance(given, NumberCells) else given
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        # Whole numbers of a column are floats once one of them is missing, as numpy and pandas
        # have it; such as those would round are nobody's without it, too.
        exact = _exact(float)
        given = [v if v is None or abs(v) < exact else float(v) for v in list(given)]
    if isinstance(given, np.ndarray):
        # Floats stay of their type, which says from where on they round.
        read = readable(given)
        given = list(read) if read.dtype.kind == "f" else cast(list[Any], read.tolist())
    written = [_shown(text_of(value)) for value in given]
    for row, (name, value) in enumerate(zip(written, given, strict=True)):
        if why := _rounded(name, value):
            why += ", which may stand for several persons; give such names as text"
            sieve.leave_out(row, column, why, value)
        elif _names_nobody(name):
            sieve.leave_out(row, column, "names no person")
    # No array of text, in which one name is as long as the longest.
    return [without_decimal_zeros(name) for name in written]


def _shown(name: str) -> str:
    """Return a name as one sees it, without what has no width, as copied names carry with them."""
    if name.isascii() and name.isprintable():
        return name
    text = unicodedata.normalize("NFC", name)
    return "".join(c for c in text if unicodedata.category(c) != "Cf").strip(_CONTROLS)


def _names_nobody(name: str) -> bool:
    letters = "".join(c for c in name.casefold() if c.isalnum())
    failed = name.startswith("#") and name.endswith(("!", "?", "N/A"))  # a spreadsheet's formula
    return failed or letters in _NOBODY


def _rounded(name: str, value: Any) -> str:
    """Return in which way a number was rounded, "" if it was not."""
    if isinstance(value, float | np.floating):
        exact = _exact(type(value))
        return "" if abs(value) < exact else f"is a number that floats round, from {exact:.0f} on"
    if not isinstance(value, str | bytes):
        return ""
    # A code such as 12E3 is none; 1.2e3 and 12E+3 are how numbers are written.
    if _EXPONENT.fullmatch(name) and re.search(r"[.,]|e[+-]", name, re.IGNORECASE):
        return "is a number in exponents, as a spreadsheet rounds long ones"
    exact = _exact(float)
    too_far = _POINT.fullmatch(name) and abs(float(name.replace(",", "."))) >= exact
    return f"is a number with a point beyond {exact:.0f}" if too_far else ""


@cache
def _exact(kind: type[Any]) -> float:
    """Return from where on two whole numbers may be one float of a type."""
    return 2.0 ** (np.finfo(kind).nmant + 1)
