"""What every vmap over records runs in."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch


@contextmanager
def for_vmap() -> Generator[None]:
    """Without torch's advice on the speed of operations that vmap takes record by record.

    Not warnings.catch_warnings, which other threads would see; one pass has few slow operations.
    """
    switch = cast(Any, torch)._C._functorch._set_vmap_fallback_warning_enabled
    switch(False)
    try:
        yield
    finally:
        switch(True)
