"""One thing, one name: what public names stand for, and how long the names of tests are."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.test_architecture import parsed, read_package, unit_of

import fedpact

# Each file of these has the same names on purpose: an algorithm its functions, and a command of the
# command line a function of its own name.
ONE_FORM = ("algorithms", "cli")
ENTRY_POINT = "main"

MOST_MEANINGS = 10
LONGEST_TEST_NAME = 60
TESTS = Path(__file__).parent


def definitions(source):
    """Public names at the top of a module, with what a name stands for: a value, or a place."""
    for node in parsed(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named = [(node.name, f"line {node.lineno}")]
        elif isinstance(node, ast.Assign):
            value = ast.unparse(node.value)
            named = [(t.id, value) for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            named = [(node.target.id, ast.unparse(node.value))]
        else:
            continue
        yield from ((name, value) for name, value in named if not name.startswith("_"))


def names_of_several_things(sources):
    """Return name -> modules that define it otherwise than another; equal aliases are one thing."""
    homes = defaultdict(dict)
    for module, source in sources.items():
        if unit_of(module) in ONE_FORM:
            continue
        for name, value in definitions(source):
            if name != ENTRY_POINT:
                place = value.startswith("line ")
                homes[name][f"{module} {value}" if place else value] = module
    return {name: sorted(found.values()) for name, found in homes.items() if len(found) > 1}


def long_test_names(sources):
    return [
        f"{module}: {name} has {len(name)} letters"
        for module, source in sources.items()
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", source, re.MULTILINE)
        if len(name) > LONGEST_TEST_NAME
    ]


def test_few_public_names_stand_for_several_things():
    found = names_of_several_things(read_package(Path(fedpact.__file__).parent))
    lines = [f"{name}: {', '.join(modules)}" for name, modules in sorted(found.items())]
    assert len(lines) <= MOST_MEANINGS, "\n".join(lines)


def test_names_of_several_things_are_found():
    alias = "Array = list[float]"
    found = names_of_several_things(
        {
            "fedpact.data.a": f"def load():\n    return 1\n{alias}\nLEAST = 1\n_PRIVATE = 1",
            "fedpact.data.b": f"def load():\n    return 1\n{alias}\nLEAST: int = 2\n_PRIVATE = 2",
            "fedpact.report.c": "class Line:\n    x = 1\ndef main():\n    return 1",
            "fedpact.report.d": "Line = str\ndef main():\n    return 2",
            "fedpact.algorithms.e": "def load():\n    return 3\nLEAST = 3",
            "fedpact.cli.run": "Line = int",
        }
    )
    assert found == {
        "load": ["fedpact.data.a", "fedpact.data.b"],
        "LEAST": ["fedpact.data.a", "fedpact.data.b"],
        "Line": ["fedpact.report.c", "fedpact.report.d"],
    }


def test_names_of_tests_are_short():
    sources = {str(p.relative_to(TESTS)): p.read_text("utf-8") for p in TESTS.rglob("*.py")}
    assert len(sources) > 100
    assert long_test_names(sources) == []


def test_long_names_of_tests_are_found():
    short, long = f"test_{'x' * 55}", f"test_{'x' * 56}"
    source = f"def {short}():\n    pass\nclass TestA:\n    def {long}(self):\n        pass"
    assert long_test_names({"a.py": source}) == [f"a.py: {long} has 61 letters"]
