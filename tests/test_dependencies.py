"""What the package imports is what pyproject.toml declares, and the other way round."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.test_architecture import named_imports

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def distribution(requirement):
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def imported():
    """Top-level name of another's package -> files of ours that import it, anywhere in them."""
    found = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in named_imports(path.read_text(encoding="utf-8")):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for top in {name.split(".")[0] for name in names}:
                if top != "fedpact" and top not in sys.stdlib_module_names:
                    found.setdefault(top, set()).add(path.name)
    return found


def test_declared_dependencies_are_exactly_the_imports():
    hard = {distribution(text) for text in PROJECT["dependencies"]}
    extras = PROJECT["optional-dependencies"]
    asked = {
        distribution(text)
        for name in extras
        if name not in ("dev", "bench", "docs")
        for text in extras[name]
    }
    homes = packages_distributions()
    used = set()
    for top, where in imported().items():
        names = {name.lower().replace("_", "-") for name in homes.get(top, [top])}
        assert names & (hard | asked), f"{top}, imported by {sorted(where)}, is not declared"
        used |= names
    assert hard <= used, f"declared and imported nowhere: {sorted(hard - used)}"
