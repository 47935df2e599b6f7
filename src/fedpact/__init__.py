"""fedpact: train one model across data owners who keep their records.

    import fedpact
    result = fedpact.run(fedpact.Plan(data="digits", rounds=60))

The public names are loaded when they are first used, so that fedpact.privacy.accounting works
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpact.api import Result, extend, load, run
    from fedpact.common.errors import FedpactError
    from fedpact.data.load import from_arrays
    from fedpact.models.prepare import prepare
    from fedpact.plan import Plan
    from fedpact.studies.compare import compare

__all__ = [
    "FedpactError",
    "Plan",
    "Result",
    "compare",
    "extend",
    "from_arrays",
    "load",
    "prepare",
    "run",
]

_HOMES = {
    "FedpactError": "fedpact.common.errors",
    "Plan": "fedpact.plan",
    "Result": "fedpact.api",
    "compare": "fedpact.studies.compare",
    "extend": "fedpact.api",
    "from_arrays": "fedpact.data.load",
    "load": "fedpact.api",
    "prepare": "fedpact.models.prepare",
    "run": "fedpact.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpact' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
