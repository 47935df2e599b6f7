"""The documentation's notebooks run from the first cell to the last, and show what they say."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from fedpact.studies.pool import Job

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
# What each has to show, beside that no cell fails.
SHOWN = {
    "first-run": ("SIMULATION", "privacy.epsilon", "<progress", "Accuracy over rounds"),
}
# A comparison is many runs, and parties of a deployment are processes of Flower's: a minute.
SLOW = {
    "own-data-and-model": ("worst site", "model.pt", "p(yes)", "Accuracy of the sites"),
    "compare-and-choose": ("worst_accuracy", "Accuracy over privacy.epsilon", "4 runs of 16"),
    "deployment": ("epsilon_per_run", "ε spent of ε allowed", "reserved"),
}


def code_cells(name: str) -> list[dict[str, Any]]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def carried_out(folder: Path, name: str) -> str:
    """Run a notebook in a folder by IPython alone, without a kernel; return all that it shows."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    os.chdir(folder)
    # The processes of a comparison are tested in tests/studies/test_compare.py.
    Job.here = True
    told = []
    # How fedpact finds that it is in a notebook.
    shell = InteractiveShell.instance()
    InteractiveShell.__name__ = "ZMQInteractiveShell"
    shell.reset()
    for cell in code_cells(name):
        with capture_output() as shown:
            done = shell.run_cell("".join(cell["source"]))
        done.raise_error()
        result = {} if done.result is None else shell.display_formatter.format(done.result)[0]
        told += [shown.stdout, *result.values()]
        told += ["".join(display.data.values()) for display in shown.outputs]
    return "\n".join(told)


def test_all_are_listed_and_stored_without_outputs():
    named = [*SHOWN, *SLOW]
    assert sorted(named) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    page = (ROOT / "docs" / "how-to" / "runs.md").read_text(encoding="utf-8")
    for name in named:
        assert f"notebooks/{name}.ipynb" in page
        cells = code_cells(name)
        assert len(cells) >= 6
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.fixture(scope="module")
def fork():
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        yield pool


@pytest.mark.filterwarnings("ignore:.*fork")  # what a process with threads is told
@pytest.mark.parametrize("name", [*SHOWN, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_a_notebook_runs(name, fork, tmp_path):
    """In a fork of this process, which has loaded torch, and in which no figure is drawn."""
    pytest.importorskip("IPython", reason="IPython is not installed")
    pytest.importorskip("pandas", reason="pandas is not installed")
    told = fork.submit(carried_out, tmp_path, name).result()
    parts = {**SHOWN, **SLOW}[name]
    assert all(part in told for part in parts), told[-3000:]
