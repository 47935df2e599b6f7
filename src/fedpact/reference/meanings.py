"""What keys mean: of the docstrings of their classes, and of the symbols at an algorithm's top.

A class says of its keys, in sentences of this form, one after another or each in a line:

    momentum: β in [0, 1). schedule, halved_after: f of the local steps.

What a subclass does not say, its bases say. An algorithm's file has a table of symbols:

    Symbols   paper  code           meaning, unit or range                        who chooses it
              η      learning_rate  step size, > 0                                plan
"""

import re
from collections.abc import Iterable
from itertools import pairwise, zip_longest

from fedpact.reference.sources import Model, docstring, heading, lineage

_COLUMNS = ("paper", "code", "meaning", "who")


def summarise_class(model: Model) -> str:
    """Return the first sentence of what a class says of itself."""
    text = " ".join(docstring(model).split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`_a-z])", text)[0]


def find_meanings(model: Model, keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return of each of a class' keys the meaning and the papers' symbol, "" for none."""
    names, told, rows = tuple(keys), dict[str, str](), dict[str, tuple[str, str]]()
    for place in lineage(model):
        table = symbols(heading(place[0]))
        told = (
            {key: row[1] for key, row in table.items()}
            | parse_meanings(docstring(place), names)
            | told
        )
        rows = table | rows
    return {key: (told.get(key, ""), rows.get(key, ("", ""))[0].strip("-")) for key in names}


def parse_meanings(text: str, keys: Iterable[str]) -> dict[str, str]:
    """Return what a docstring says of these keys.

    >>> parse_meanings("Of a site. a, b: both > 0. Else it is refused. c: text.", ["a", "b", "c"])
    {'a': 'both > 0. Else it is refused.', 'b': 'both > 0. Else it is refused.', 'c': 'text.'}
    """
    one = "|".join(map(re.escape, sorted(keys, key=len, reverse=True)))
    names = re.compile(rf"(?:^|(?<=[.;:] ))((?:{one})(?:(?:, | and )(?:{one}))*): ")
    found = dict[str, str]()
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        places = list(names.finditer(line))
        for place, after in zip_longest(places, places[1:]):
            end = after.start() if after else len(line)
            for key in re.split(r", | and ", place[1]):
                found.setdefault(key, line[place.end() : end].strip().rstrip(";"))
    return found


def symbols(text: str) -> dict[str, tuple[str, str]]:
    """Return the table of symbols of an algorithm's file: code -> the papers' symbol, meaning."""
    lines = text.splitlines()
    heads = [n for n, line in enumerate(lines) if line.startswith("Symbols ")]
    if not heads or not all(column in lines[heads[0]] for column in _COLUMNS):
        return {}
    starts = [lines[heads[0]].index(column) for column in _COLUMNS]
    found, last = dict[str, tuple[str, str]](), ""
    for line in lines[heads[0] + 1 :]:
        if not line.startswith(" "):
            break
        paper, code, told = (line[a:b].strip() for a, b in pairwise(starts))
        if code:
            last = code
            found.setdefault(code, (paper, told))
        elif last and told:
            found[last] = (found[last][0], f"{found[last][1]} {told}")
    return found
