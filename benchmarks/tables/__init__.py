"""The tables: every module here is one kind, found by its file.

A module has TITLE, ABOUT (a paragraph for the page), NAMES of its tables, and
run(name, scale) -> (rows, busy).
"""

import importlib
import pkgutil
from types import ModuleType

# In the order of the page.
_ORDER = (
    "step", "brought", "stacked", "parts", "memory", "roofline", "noise",
    "round", "hundred", "workers", "overhead", "profile", "sites", "secure", "accuracy", "card",
)  # fmt: skip


def modules() -> dict[str, ModuleType]:
    """Return table name -> its module, in the order of the page."""
    found = {module.name for module in pkgutil.iter_modules(__path__)}
    names = sorted(found, key=lambda name: (*_ORDER, name).index(name))
    loaded = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {name: module for module in loaded for name in module.NAMES}
