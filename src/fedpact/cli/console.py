"""What a command prints: one JSON document for a program, or text for a reader; never both."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def show(document: Mapping[str, Any], as_json: bool, text: Callable[[], None]) -> None:
    """Print the document as strict JSON and nothing else, or call `text` to print for a reader.

    JSON has no NaN and no infinity: such numbers become null.
    """
    if as_json:
        print(json.dumps(_strict(document), indent=2, allow_nan=False, default=str))
    else:
        text()


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(entry) for entry in value]
    return value
