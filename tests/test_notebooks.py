"""The documentation's notebooks run from the first cell to the last, and show what they say."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
# What each has to show, beside that no cell fails.
SHOWN = {
    "first-run": ("SIMULATION", "privacy.epsilon", "<progress", "Accuracy over rounds"),
    "own-data-and-model": ("worst site", "model.pt", "p(yes)", "Accuracy of the sites"),
    "compare-and-choose": ("worst_accuracy", "Accuracy over privacy.epsilon", "4 runs of 16"),
}
# Parties of a deployment are processes of Flower's: a minute.
SLOW = {"deployment": ("epsilon_per_run", "ε spent of ε allowed", "reserved")}
# How figures are drawn, which takes most of the time, is tested in tests/common/test_notebook.py,
# and the processes of a comparison in tests/studies/test_compare.py.
UNDRAWN = """
from fedpact.report.drawing import Chart
from fedpact.studies.pool import Job
Chart.svg, Job.here = property(lambda chart: f"<svg>{chart.title}</svg>"), True
"""


def read(name: str) -> Any:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def carried_out(folder: Path, *names: str) -> list[str]:
    """Run notebooks in an empty folder, one after the other, and return all that each shows.

    In one kernel, as starting it takes most of the time; its names are forgotten in between.
    """
    client = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("pandas", reason="pandas is not installed")
    # Its kernel imports this checkout, whatever is installed.
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    where = {"metadata": {"path": str(folder)}}
    whole, ends = read(names[0]), list[int]()
    for name in names[1:]:
        ends.append(len(whole.cells))
        whole.cells += read(name).cells
        begun = next(cell for cell in whole.cells[ends[-1] :] if cell.cell_type == "code")
        begun.source = "%reset -f\n" + begun.source
    first = next(cell for cell in whole.cells if cell.cell_type == "code")
    first.source = UNDRAWN + first.source
    found = client.NotebookClient(whole, timeout=600, resources=where).execute(env=environment)
    return [shown(found.cells[i:j]) for i, j in itertools.pairwise([0, *ends, len(whole.cells)])]


def shown(cells: list[Any]) -> str:
    outputs = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs]
    texts = [o.text if o.output_type == "stream" else "".join(o.data.values()) for o in outputs]
    return "\n".join(texts)


def test_all_are_listed_and_stored_without_outputs() -> None:
    named = [*SHOWN, *SLOW]
    assert sorted(named) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    page = (ROOT / "docs" / "how-to" / "runs.md").read_text(encoding="utf-8")
    for name in named:
        assert f"notebooks/{name}.ipynb" in page
        cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
        assert len(cells) >= 6
        assert not any(cell.outputs or cell.execution_count for cell in cells)


def test_notebooks_run(tmp_path: Path) -> None:
    for (name, parts), told in zip(SHOWN.items(), carried_out(tmp_path, *SHOWN), strict=True):
        assert all(part in told for part in parts), (name, [p for p in parts if p not in told])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_deployment_in_a_notebook_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    (told,) = carried_out(tmp_path, name)
    assert all(part in told for part in SLOW[name]), told[-3000:]
