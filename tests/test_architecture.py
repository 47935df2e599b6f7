"""The rules of docs/notes/internals.md, held on the syntax tree; each rule is shown to fail, too.

A package is given to the checks as {module name: source}, so that a made-up one can be checked as
the real one is.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import fedpact
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.messages import Transport
from fedpact.privacy.batches import Batch
from fedpact.privacy.oracle import Oracle

Sources = dict[str, str]
"""Dotted module name -> source; a package's own name stands for its __init__.py."""

# From the bottom to the top. A unit is a module or a package directly under fedpact. It imports
# itself and units of lower rows, never a unit of its own row or above. A new unit needs a row.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("common",),  # what every other package builds on: errors, files, messages, randomness
    ("per_sample",),  # linear algebra that knows no budget
    ("privacy", "models", "data"),  # the oracle, accounting, ledger; networks; records, features
    ("evaluation", "algorithms"),  # tasks, metrics, held-out records; an algorithm, its wrappers
    ("plan", "client"),  # the validated configuration; a site's side of the wire
    ("rounds",),  # the server's side of the wire
    ("simulation", "report"),  # one trains on one machine; one reads a run's folder, never trains
    ("deployment", "api"),  # a federation on real machines; what Python users call
    ("studies",),  # many runs side by side, recommendations, audits, the papers' theory
    ("cli",),
    ("__init__", "__main__"),  # the public names; the command line by the package
)
MOST_UNITS = 16  # beside __init__ and __main__, which are no layer either
MOST_LAYERS = 10
_LEVEL = {unit: level for level, row in enumerate(LAYERS) for unit in row}

# An algorithm meets records through the oracle's surface alone: no kernel, no data, no metrics.
# What several algorithms share is held to the same rule; what goes around them is not.
ALGORITHMS, WRAPPERS = "fedpact.algorithms", "fedpact.algorithms.wrappers"
ALGORITHMS_MAY_IMPORT = (
    "algorithms",
    "privacy.oracle",
    "privacy.accounting",
    "common.messages",
    "common.check",
    "common.configuration",
    "common.errors",
)
ACCOUNTING = "fedpact.privacy.accounting"


def within(module: str, package: str) -> bool:
    """Whether a module is that package or in it."""
    return module == package or module.startswith(f"{package}.")


# One function for each engine.
ONE_THING = {"secured"}

MOST_CODE_LINES = 400  # of a file: lines that are neither blank, comment nor docstring
MOST_FILES = 20  # of a folder, beside its __init__ and __main__
MOST_FLOORS = 8  # of a folder: a file stands above those beside it that it imports
MOST_FUNCTION_LINES = 80  # from `def` to the end, all lines


# ---------------------------------------------------------------- reading


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a module, which no rule changes."""
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a module's tree."""
    return tuple(ast.walk(parsed(source)))


def read_package(root: Path) -> Sources:
    sources: Sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


@cache
def named_imports(source: str) -> tuple[ast.AST, ...]:
    return tuple(n for n in nodes(source) if isinstance(n, ast.Import | ast.ImportFrom))


def imports(sources: Sources, module: str) -> Iterator[tuple[int, str]]:
    """Every import anywhere in a module, as (line, dotted name): the module it names if it can."""
    for node in named_imports(sources[module]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                base = "." * node.level + (node.module or "")
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in sources else base


def own_imports(sources: Sources, module: str) -> Iterator[tuple[int, str]]:
    """The imports of fedpact's own modules, without `fedpact.`; "__init__" is the package."""
    for line, name in imports(sources, module):
        if name == "fedpact" or name.startswith("fedpact."):
            yield line, name.removeprefix("fedpact").removeprefix(".") or "__init__"


def unit_of(module: str) -> str:
    """fedpact.privacy.oracle -> privacy; fedpact -> __init__."""
    return [*module.split("."), "__init__"][1]


# ---------------------------------------------------------------- the rules


def upward_imports(sources: Sources) -> Iterator[str]:
    for module in sources:
        unit = unit_of(module)
        if unit not in _LEVEL:
            yield f"{module}: {unit!r} has no row in LAYERS: add one, and docs/notes/internals.md"
            continue
        for line, name in own_imports(sources, module):
            target = name.split(".")[0]
            if target != unit and _LEVEL.get(target, len(LAYERS)) >= _LEVEL[unit]:
                yield f"{module}:{line} imports {name}, which is not below it"


def relative_imports(sources: Sources) -> Iterator[str]:
    for module in sources:
        for line, name in imports(sources, module):
            if name.startswith("."):
                yield f"{module}:{line} imports {name}: write the whole name"


def past_the_oracle(sources: Sources) -> Iterator[str]:
    for module in sources:
        if not within(module, ALGORITHMS) or within(module, WRAPPERS):
            continue
        for line, name in own_imports(sources, module):
            if (module, name) == (ALGORITHMS, "common.user_code"):
                continue  # the folder itself finds a user's own
            around = within(f"fedpact.{name}", WRAPPERS)
            if around or not any(within(name, a) for a in ALGORITHMS_MAY_IMPORT):
                yield f"{module}:{line} imports {name}: an algorithm has the oracle only"


def torch_in_accounting(sources: Sources) -> Iterator[str]:
    """Directly, or by way of another of our modules."""
    for module in sources:
        if not within(module, ACCOUNTING):
            continue
        reached, waiting = {module}, [module]
        while waiting:
            at = waiting.pop()
            for line, name in imports(sources, at):
                if name.split(".")[0] == "torch":
                    yield f"{module} reaches torch at {at}:{line}"
                if name in sources and name not in reached:
                    reached.add(name)
                    waiting.append(name)


def import_cycles(sources: Sources) -> Iterator[str]:
    edges = {m: {n for _, n in imports(sources, m) if n in sources and n != m} for m in sources}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> Iterator[str]:
        if module in path:
            yield " -> ".join((*path[path.index(module) :], module))
        elif module not in done:
            for target in sorted(edges[module]):
                yield from visit(target, (*path, module))
            done.add(module)

    for module in sources:
        yield from visit(module, ())


def tangled_packages(sources: Sources) -> Iterator[str]:
    """A package's modules and packages stand in layers, too: two of them that need each other.

    A package's own __init__ is left to `import_cycles`.
    """
    packages = {m.rpartition(".")[0] for m in sources if "." in m}
    for package in sorted(packages):
        inner = {
            m: m[len(package) + 1 :].split(".")[0] for m in sources if m.startswith(package + ".")
        }
        units = {
            f"{package}.{unit}": " ".join(
                f"import {package}.{inner[name]};"
                for module in inner
                if inner[module] == unit
                for _, name in imports(sources, module)
                if inner.get(name, unit) != unit
            )
            for unit in set(inner.values())
        }
        yield from import_cycles(units)


def asserts(sources: Sources) -> Iterator[str]:
    """`python -O` removes them."""
    for module, source in sources.items():
        for node in nodes(source):
            if isinstance(node, ast.Assert):
                yield f"{module}:{node.lineno} asserts: raise one of errors.py instead"


def stubs(sources: Sources) -> Iterator[str]:
    for module, source in sources.items():
        for node in nodes(source):
            if isinstance(node, ast.Name) and node.id == "NotImplementedError":
                yield f"{module}:{node.lineno} names NotImplementedError: write it or leave it out"


PROTOCOLS = (Method, Oracle, Batch, Transport)
DESCRIBED = {"facts"} | {name for protocol in PROTOCOLS for name in vars(protocol)}
"""Functions that are described once, in their protocol, for all algorithms and oracles."""
ONCE_DESCRIBED = (
    *("fedpact.algorithms.", "fedpact.simulation."),
    *("fedpact.privacy.batches", "fedpact.privacy.oracle"),
)
"""Where they are written."""


def without_docstring(sources: Sources) -> Iterator[str]:
    """Public: no part of the path begins with an underscore, and no function is around it."""

    def visit(node: ast.Module | ast.ClassDef, path: str) -> Iterator[str]:
        for child in node.body:
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            if isinstance(child, kinds) and not child.name.startswith("_"):
                among = module.startswith(ONCE_DESCRIBED)
                described = among and child.name in DESCRIBED
                if not (ast.get_docstring(child) or described):
                    yield f"{path}.{child.name} has no docstring"
                if isinstance(child, ast.ClassDef):
                    yield from visit(child, f"{path}.{child.name}")

    for module, source in sources.items():
        tree = parsed(source)
        if not ast.get_docstring(tree):
            yield f"{module} has no docstring"
        yield from visit(tree, module)


def docstrings(sources: Sources) -> Iterator[tuple[str, str, ast.Module]]:
    """Every docstring, as (module, its text, the module's tree)."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, source in sources.items():
        tree = parsed(source)
        for node in nodes(source):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield module, text, tree


def pointers_to_nowhere(sources: Sources) -> Iterator[str]:
    """`See X.` where X is no name of this module, made or imported, and no other's in full."""
    homes = {
        f"{module.split('.')[-1]}.{name}"
        for module, source in sources.items()
        for name in re.findall(r"^(?:class |def |async def )?([A-Za-z]\w*)", source, re.MULTILINE)
    }
    for module, text, tree in docstrings(sources):
        pointed = re.match(r"See ([A-Za-z_][\w.]*\w)", text)
        if not pointed or pointed[1] in ("the", "there"):
            continue
        known = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        known |= {node.name for node in ast.walk(tree) if hasattr(node, "name")}
        known |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        target = pointed[1]
        first, last = target.split(".")[0], ".".join(target.split(".")[-2:])
        if first not in known and last not in homes:
            yield f"{module}: 'See {target}' leads nowhere: name it as module.Name, or import it"


def public_names(sources: Sources) -> Iterator[tuple[str, str, bool]]:
    """Public classes and functions of modules, as (module, name, whether a class)."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for module, source in sources.items():
        for node in parsed(source).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                yield module, node.name, isinstance(node, ast.ClassDef)


def names_of_two_things(sources: Sources) -> Iterator[str]:
    """Two classes of one name; two functions of one name that are both met without their module."""
    homes: dict[str, list[str]] = {}
    for module, name, is_class in public_names(sources):
        # Every algorithm's file has the same form.
        folder = module.rpartition(".")[0]
        if folder in (ALGORITHMS, f"{ALGORITHMS}.private") or name in ONE_THING:
            continue
        if is_class and name in homes:
            yield f"{module}.{name} has the name of {homes[name][0]}.{name}"
        homes.setdefault(name, []).append(module)
    met: dict[str, set[str]] = {}
    for source in sources.values():
        for node in nodes(source):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if node.module in homes.get(alias.name, ()) and not alias.asname:
                    met.setdefault(alias.name, set()).add(node.module)
    for name, modules in met.items():
        if len(modules) > 1:
            yield f"{name} is imported from {' and '.join(sorted(modules))}: give one a name"


def crowded_folders(sources: Sources) -> Iterator[str]:
    if list(import_cycles(sources)):  # then there are no floors; that rule finds them
        return
    folders: dict[str, set[str]] = {}
    for module in sources:
        if not any(other.startswith(f"{module}.") for other in sources):
            folders.setdefault(module.rpartition(".")[0], set()).add(module)
    for folder, files in folders.items():
        below = {m: {n for _, n in imports(sources, m)} & files - {m} for m in files}

        def floor(module: str, below: dict[str, set[str]] = below) -> int:
            return 1 + max(map(floor, below[module]), default=0)

        counted = files - {"fedpact.__main__"}
        if len(counted) > MOST_FILES:
            yield f"{folder} has {len(counted)} files: expected {MOST_FILES} at most"
        if (floors := max(map(floor, files))) > MOST_FLOORS:
            yield f"{folder} has {floors} floors: expected {MOST_FLOORS} at most"


def long_files(sources: Sources) -> Iterator[str]:
    for module, source in sources.items():
        said = set[int]()
        for node in nodes(source):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and ast.get_docstring(node):
                said.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1))
        count = sum(1 for n, line in lines if line and line[0] != "#" and n not in said)
        if count >= MOST_CODE_LINES:
            yield f"{module} has {count} lines of code: expected fewer than {MOST_CODE_LINES}"


def long_functions(sources: Sources) -> Iterator[str]:
    for module, source in sources.items():
        for node in nodes(source):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > MOST_FUNCTION_LINES:
                    yield f"{module}.{node.name} has {count} lines"


Rule = Callable[[Sources], Iterator[str]]

# Every rule, with made-up packages that break it, each in its own way.
RULES: dict[Rule, list[Sources]] = {
    upward_imports: [
        {"fedpact.common.check": "from fedpact.rounds import Rounds"},
        {"fedpact.common.check": "import fedpact.plan"},
        {"fedpact.rounds": "from fedpact import api", "fedpact.api": ""},
        {"fedpact.client": "from fedpact.plan import Plan"},  # the same row
        {"fedpact.data.files": "def f():\n    from fedpact.models import build"},  # hidden inside
        {"fedpact.privacy.oracle": "if TYPE_CHECKING:\n    import fedpact.algorithms.fedavg"},
        {"fedpact.rounds": "import fedpact"},  # the package's names are on top
        {"fedpact.report.page": "from fedpact.unheard_of import x"},
        {"fedpact.unheard_of": ""},
    ],
    relative_imports: [
        {"fedpact.privacy.policy": "from .terms import Terms"},
        {"fedpact.privacy.policy": "from .. import plan"},
    ],
    past_the_oracle: [
        {"fedpact.algorithms.x": "from fedpact.per_sample.kernel import PerSampleKernel"},
        {"fedpact.algorithms.x": "from fedpact.evaluation.metrics import psi"},
        {"fedpact.algorithms.common.steps": "from fedpact.data.dataset import Dataset"},
        {"fedpact.algorithms.common": "from fedpact import privacy", "fedpact.privacy": ""},
        {"fedpact.algorithms.x": "from fedpact.algorithms.wrappers.base import Method"},
    ],
    torch_in_accounting: [
        {"fedpact.privacy.accounting.pld": "import torch"},
        {"fedpact.privacy.accounting": "from torch.nn import Module"},
        {
            "fedpact.privacy.accounting.rdp": "from fedpact.common import check",
            "fedpact.common.check": "import fedpact.common.params",
            "fedpact.common.params": "import torch.nn",
        },
    ],
    import_cycles: [
        {"fedpact.data.a": "import fedpact.data.b", "fedpact.data.b": "import fedpact.data.a"},
        {
            "fedpact.data.a": "from fedpact.data import b",
            "fedpact.data.b": "def f():\n    from fedpact.data.c import x",
            "fedpact.data.c": "from fedpact.data.a import y",
        },
        {"fedpact.data": "import fedpact.data.a", "fedpact.data.a": "from fedpact.data import z"},
    ],
    tangled_packages: [
        {
            "fedpact.data.a": "import fedpact.data.features.b",
            "fedpact.data.features.b": "x = 1",
            "fedpact.data.features.c": "import fedpact.data.a",
        },
    ],
    asserts: [{"fedpact.common.check": "def positive(x):\n    assert x > 0\n    return x"}],
    stubs: [
        {"fedpact.plan": "def f():\n    raise NotImplementedError"},
        {"fedpact.plan": "def f():\n    raise NotImplementedError('later')"},
    ],
    without_docstring: [
        {"fedpact.plan": "x = 1"},
        {"fedpact.plan": '"""M."""\ndef f():\n    return 1'},
        {"fedpact.plan": '"""M."""\nclass A:\n    x = 1'},
        {"fedpact.plan": '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        return 1'},
        {"fedpact.plan": '"""M."""\nasync def f():\n    return 1'},
        {"fedpact.plan": '"""M."""\ndef update():\n    return 1'},
        {"fedpact.algorithms.fedavg": '"""M."""\ndef other():\n    return 1'},
    ],
    names_of_two_things: [
        {"fedpact.plan": "class Plan:\n    x = 1", "fedpact.report.page": "class Plan:\n    y = 2"},
        {
            "fedpact.common.check": "def within(x):\n    return x",
            "fedpact.privacy.policy": "def within(x):\n    return -x",
            "fedpact.plan": "from fedpact.common.check import within",
            "fedpact.rounds": "from fedpact.privacy.policy import within",
        },
    ],
    pointers_to_nowhere: [
        {"fedpact.rounds": '"""M."""\ndef f():\n    """See Unheard."""'},
        {"fedpact.rounds": '"""M."""\ndef f():\n    """See plan.Unheard."""'},
        {"fedpact.plan": "class Plan:\n    x = 1", "fedpact.rounds": '"""See Plan."""'},
    ],
    crowded_folders: [
        {f"fedpact.data.m{i}": "" for i in range(MOST_FILES + 1)},
        {
            f"fedpact.data.m{i}": f"import fedpact.data.m{i + 1}" if i < MOST_FLOORS else ""
            for i in range(MOST_FLOORS + 1)
        },
    ],
    long_files: [{"fedpact.plan": "x = 1\n" * MOST_CODE_LINES}],
    long_functions: [
        {"fedpact.plan": "def f():\n" + "    x = 1\n" * MOST_FUNCTION_LINES},
        {"fedpact.plan": "class A:\n    def f(self):\n" + "        # .\n" * 80 + "        x = 1"},
    ],
}

# What comes near to breaking a rule and does not.
GOOD: Sources = {
    "fedpact.algorithms.y": '"""M."""\nclass Settings:\n    """S."""\ndef local():\n    """L."""',
    "fedpact.algorithms.z": '"""M."""\nclass Settings:\n    """S."""\ndef local():\n    """L."""',
    "fedpact.studies.one": '"""See the module."""\nfrom fedpact.plan import Plan\nclass C:\n'
    '    """See Plan."""\nclass B:\n    """See C."""\ndef f():\n    """See splits.labels."""',
    "fedpact.data.splits": '"""M."""\ndef labels():\n    """L."""',
    "fedpact.report.figures": '"""M."""\nfrom fedpact.data.splits import labels\n'
    'from fedpact.data.splits import labels as others\ndef labels():\n    """L."""',
    "fedpact": '"""M."""\nfrom fedpact.api import run',
    "fedpact.api": '"""M."""\nfrom fedpact.simulation.simulate import simulate',
    "fedpact.simulation.simulate": '"""M."""\nfrom fedpact.client import Client',
    "fedpact.client": '"""M."""\nfrom fedpact import algorithms\nimport torch',
    "fedpact.algorithms": '"""M."""\nfrom fedpact.privacy.oracle import Oracle',
    "fedpact.algorithms.x": '"""M."""\nfrom fedpact.algorithms import a\nimport torch',
    "fedpact.privacy.oracle": '"""M."""\nfrom fedpact.privacy.accounting import pld',
    "fedpact.privacy.accounting": '"""M."""',
    "fedpact.privacy.accounting.pld": '"""M."""\n'
    "from fedpact.common import check\nimport torchless",
    "fedpact.common.check": '"""M."""\ndef f():\n    """F."""\n    def inner():\n        pass\n'
    "def _g():\n    pass\nclass _H:\n    def f(self):\n        pass\n"
    'class A:\n    """A."""\n    def __len__(self):\n        return 1',
    "fedpact.plan": '"""NotImplementedError, assert."""\n' + "x = 1\n" * (MOST_CODE_LINES - 2),
    "fedpact.common.errors": '"""M."""\n'
    + "# Comments and blank lines are no code.\n\n" * MOST_CODE_LINES
    + "def _f():\n"
    + "    x = 1\n" * (MOST_FUNCTION_LINES - 1),
}


@pytest.fixture(scope="module")
def sources():
    return read_package(Path(fedpact.__file__).parent)


def test_the_package_is_read(sources):
    assert {"fedpact", "fedpact.common.errors", "fedpact.privacy.oracle"} <= set(sources)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule, sources):
    assert list(rule(sources)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_package_passes(rule):
    assert list(rule(GOOD)) == []


@pytest.mark.parametrize(
    ("rule", "bad"),
    [(rule, bad) for rule, cases in RULES.items() for bad in cases],
    ids=lambda value: getattr(value, "__name__", None) or next(iter(value)),
)
def test_a_bad_package_is_found(rule, bad):
    assert list(rule(bad))


def test_the_top_level_can_be_seen_at_a_glance(sources):
    units = {unit_of(module) for module in sources} - {"__init__", "__main__"}
    assert len(units) <= MOST_UNITS, sorted(units)
    assert len(LAYERS) - 1 <= MOST_LAYERS


def test_the_documents_table_is_this_one():
    # Each row of LAYERS is one line of that page's block of layers.
    page = Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md"
    block = page.read_text(encoding="utf-8").split("```layers\n")[1].split("```")[0]
    rows = [line.split("#")[0].replace(",", " ").split() for line in block.splitlines()]
    assert rows == [list(row) for row in reversed(LAYERS)]


def test_every_package_has_a_row_that_says_where_to_start():
    root = Path(fedpact.__file__).parent
    page = (root.parents[1] / "docs/notes/internals.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE)
    assert {name for name, _ in rows} == {path.parent.name for path in root.glob("*/__init__.py")}
    for name, first in rows:
        files = re.findall(r"`([\w/]+\.py)`", first)
        assert files
        assert all((root / name / file).is_file() for file in files), (name, first)
