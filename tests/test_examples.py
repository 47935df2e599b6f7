"""The examples of docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import fedpact

SOURCE = Path(fedpact.__file__).parents[1]
NAMES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_give_what_they_say(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert found.attempted
    assert not found.failed
