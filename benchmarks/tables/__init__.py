"""The tables: every module here is one kind, found by its file.

A module has TITLE, ABOUT (a paragraph for the page), NAMES of its tables, and
run(name, scale) -> (rows, busy). A table that takes long has instead of `run`:
cells(name, scale) -> {label: function without arguments -> (rows, busy)}, whose rows' names end
with the label and are stored as they come. It may have lines(table), its Markdown.
"""

import importlib
import pkgutil
from types import ModuleType

# In the order of the page.
_ORDER = (
    "kernel", "step", "parts", "memory", "roofline", "noise",
    "round", "hundred", "workers", "overhead", "profile", "sites", "secure", "accuracy", "card",
)  # fmt: skip


# Those whose figures are of the kernel: stale when its package changes; see provenance.
OF_KERNEL = ("kernel", "step", "parts", "memory", "roofline", "profile", "card")


def modules() -> dict[str, ModuleType]:
    """Return table name -> its module, in the order of the page."""
    found = {module.name for module in pkgutil.iter_modules(__path__)}
    names = sorted(found, key=lambda name: (*_ORDER, name).index(name))
    loaded = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {name: module for module in loaded for name in module.NAMES}
