"""Numbers as a reader sees them, and values as TOML has them.

What bounds a privacy loss is rounded up, never down.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any, Literal

_MISSING = "–"


def upper(value: float, digits: int = 4) -> str:
    """Return ε or δ with so many significant digits, rounded up: what is printed is a bound too.

    >>> upper(1.99951), upper(2.0), upper(1e-5), upper(1 / 6000, digits=3)
    ('2', '2', '1e-05', '0.000167')
    """
    return _round(value, digits, ROUND_CEILING)


def span(least: str, most: str) -> str:
    """Return a range in words, one of both where they read the same.

    >>> span("1", "2"), span("1", "1")
    ('1 to 2', '1')
    """
    return least if least == most else f"{least} to {most}"


def lower(value: float, digits: int = 4) -> str:
    """Return what bounds from below, as a measured ε does, rounded down.

    >>> lower(0.23149), lower(2.0)
    ('0.2314', '2')
    """
    return _round(value, digits, ROUND_FLOOR)


def _round(value: float, digits: int, rounding: str) -> str:
    if math.isnan(value):
        return "not recorded"
    if math.isinf(value):
        return "∞"
    # repr, not the exact binary value: 1.1 is 1.1, and not a hair more.
    rounded = Context(prec=digits, rounding=rounding).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"


def number(value: float | None, digits: int = 4) -> str:
    """Return a plain figure with so many significant digits; a dash for None.

    >>> number(0.0123456), number(1234567), number(None)
    ('0.01235', '1,234,567', '–')
    """
    if value is None:
        return _MISSING
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    # Up to its digits a figure is rounded; beyond them it is a whole number, not a power of ten.
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e15 else f"{value:.{digits}g}"


def count_noun(count: float, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    >>> count_noun(1, "ledger"), count_noun(2500, "ledger"), count_noun(2, "entry")
    ('1 ledger', '2,500 ledgers', '2 entries')
    """
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else several}"


def list_some(names: Iterable[str], most: int = 40) -> str:
    """Return at most so many of some names, and how many more there are.

    >>> list_some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    every = list(names)
    return ", ".join(every[:most]) + f" and {len(every) - most:,} more" * (len(every) > most)


def percent(value: float | None) -> str:
    """Return a fraction in per cent.

    >>> percent(0.9234), percent(None)
    ('92.3 %', '–')
    """
    if value is None:
        return _MISSING
    return f"{100 * value:.1f} %" if math.isfinite(value) else "not a number"


def headline_metric(
    accuracy: float | None, loss: float | None, form: Callable[[float | None], str] = percent
) -> tuple[str, str]:
    """Return by what a model is judged, and its value: accuracy, or mean loss where there is none.

    Labels that are numbers are not right or wrong: their accuracy is NaN. None: not evaluated.
    form: of an accuracy.

    >>> headline_metric(0.9234, 0.25), headline_metric(math.nan, 0.25), headline_metric(None, None)
    (('accuracy', '92.3 %'), ('mean loss', '0.25'), ('accuracy', '–'))
    """
    if loss is not None and (accuracy is None or math.isnan(accuracy)):
        return "mean loss", number(loss)
    return "accuracy", form(accuracy)


def exact_percent(value: float | None) -> str:
    """Return a fraction in per cent with two decimals, as a terminal has it: 92.34%."""
    return _MISSING if value is None else f"{value:.2%}"


def size(count: float) -> str:
    """Return a number of bytes in decimal units.

    >>> size(999), size(12_345_678)
    ('999 B', '12.3 MB')
    """
    value, unit = choose_byte_unit(count)
    return f"{number(count / value, digits=3)} {unit}"


def choose_byte_unit(count: float) -> tuple[float, str]:
    """Return the decimal unit that suits a number of bytes, as (bytes of one unit, its name).

    >>> choose_byte_unit(5e9)
    (1000000000.0, 'GB')
    """
    for value, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= value:
            return value, unit
    return 1.0, "B"


def duration(seconds: float) -> str:
    """Return a time.

    >>> duration(0.25), duration(75), duration(7300)
    ('0.25 s', '1 min 15 s', '2 h 1 min')
    """
    if not math.isfinite(seconds):
        return "not a number"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def format_metric(form: Literal["number", "percent"], value: float | None) -> str:
    """Return a metric's value in its form; a dash for None.

    >>> format_metric("percent", 0.5), format_metric("number", 0.0125)
    ('50.0 %', '0.0125')
    """
    return percent(value) if form == "percent" else number(value)


def toml(value: Any) -> str:
    """Return a value as TOML has it.

    >>> toml({"a": [1, 2.5, "b"], "c d": True})
    '{ a = [1, 2.5, "b"], "c d" = true }'
    """
    if isinstance(value, Mapping):
        pairs = (f"{toml_key(str(key))} = {toml(inner)}" for key, inner in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Of what JSON lets stand as it is TOML has one character escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """Return a name as a key of TOML, in quotes where it needs them.

    >>> toml_key("age"), toml_key("b.m.i")
    ('age', '"b.m.i"')
    """
    bare = name.replace("-", "").replace("_", "").isalnum() and name.isascii()
    return name if bare else toml(name)


def against_majority_class(accuracy: float | None, commonest: Mapping[str, Any] | None) -> str:
    """Return what an accuracy is to be held against: answering the commonest class each time.

    commonest: as summary.json has it. Empty where either is unknown.

    >>> against_majority_class(0.95, {"name": "no", "accuracy": 0.9})
    "always answering 'no' gives 90.00 %"
    >>> against_majority_class(0.9, {"name": "no", "accuracy": 0.9})
    "no better than always answering 'no', which gives 90.00 %"
    """
    if accuracy is None or commonest is None:
        return ""
    answer, value = f"always answering {commonest['name']!r}", 100 * commonest["accuracy"]
    better = accuracy > commonest["accuracy"]
    told = f"{answer} gives" if better else f"no better than {answer}, which gives"
    return f"{told} {value:.2f} %"
