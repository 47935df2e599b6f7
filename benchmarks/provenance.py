"""Which code a figure is of: the commit, and a digest of the kernel package.

The digest is of the package's syntax trees without docstrings, so that comments, formatting and
prose do not change it. A change of code that cannot change a figure is listed in harmless.toml.
"""

import ast
import hashlib
import inspect
import subprocess
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Table
from benchmarks.steps import PerSampleKernel
from benchmarks.tables import OF_KERNEL, modules

PACKAGE = Path(inspect.getfile(PerSampleKernel)).parent
HARMLESS = Path(__file__).parent / "harmless.toml"


@dataclass(frozen=True)
class Change:
    """A change of the package, from one digest to another, and why no figure changes with it."""

    before: str
    after: str
    because: str


def digest(package: Path = PACKAGE) -> str:
    """Return twelve hexadecimal digits of the code in a folder and those below it."""
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        code.update(repr((path.relative_to(package).as_posix(), _code(tree))).encode())
    return code.hexdigest()[:12]


def _code(node: object) -> object:
    """Return a syntax tree without docstrings; ast.dump differs between versions of Python."""
    if isinstance(node, list):
        return [_code(one) for one in node if not _is_text(one)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, _code(value)) for name, value in ast.iter_fields(node) if value is not None)
    return type(node).__name__, [field for field in fields if field[1] != []]


def _is_text(node: object) -> bool:
    """Whether a statement is a string alone: a docstring, of whatever it stands behind."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def harmless(path: Path = HARMLESS) -> list[Change]:
    """Return the listed changes. Raises ValueError for one without a reason."""
    changes = [Change(**one) for one in tomllib.loads(path.read_text()).get("change", [])]
    for change in changes:
        if not change.because.strip():
            raise ValueError(f"{path.name}: the change to {change.after} has no reason")
    return changes


def stale(tables: Iterable[Table], now: str, changes: Iterable[Change]) -> list[str]:
    """Return the kernel's tables whose figures are of other code than that of the digest `now`."""
    listed = [(change.before, change.after) for change in changes]
    same = {now}
    # Backwards over every listed change that leads to the code there is now.
    while more := {before for before, after in listed if after in same} - same:
        same |= more
    found = modules()
    kind = {name: module.__name__.rpartition(".")[2] for name, module in found.items()}
    of_kernel = [t for t in tables if kind.get(t.name) in OF_KERNEL and t.measured]
    return [table.name for table in of_kernel if table.kernel not in same]


def commit() -> str:
    """Return the commit that is checked out, with a + where the sources differ from it."""
    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
        return git("rev-parse", "--short=9", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
