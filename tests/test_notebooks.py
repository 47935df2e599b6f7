"""The documentation's notebooks run from the first cell to the last, and show what they say."""

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


def read(name: str) -> Any:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def carried_out(name: str, folder: Path) -> str:
    """Run a notebook in an empty folder and return all that it shows."""
    client = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    # Its kernel imports this checkout, whatever is installed.
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    where = {"metadata": {"path": str(folder)}}
    found = client.NotebookClient(read(name), timeout=600, resources=where).execute(env=environment)
    outputs = [o for cell in found.cells if cell.cell_type == "code" for o in cell.outputs]
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


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    shown = carried_out(name, tmp_path)
    assert all(part in shown for part in SHOWN[name]), [p for p in SHOWN[name] if p not in shown]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_deployment_in_a_notebook_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    shown = carried_out(name, tmp_path)
    assert all(part in shown for part in SLOW[name]), shown[-3000:]
