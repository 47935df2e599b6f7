"""Functions of this package in a process of their own, so that memory is theirs alone.

python -m benchmarks.child MODULE FUNCTION JSON-ARGUMENTS       prints the answer as JSON
"""

import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MARK = "answer: "


def call(function: Callable[..., Any], *arguments: Any, timeout: float = 1800) -> Any:
    """Return what a module's function answers in a new process; arguments and answer are JSON."""
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    command += [function.__module__, function.__name__, json.dumps(arguments)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not answers:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(answers[-1].removeprefix(_MARK))


if __name__ == "__main__":
    module, function, arguments = sys.argv[1:]
    # A method that needs more fails with an error, before the system kills the whole process.
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    answer = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    print(_MARK + json.dumps(answer), flush=True)
