"""Tables in terminals of any width: every figure is there, whole or over two lines of its cell."""

import io

import pytest
from rich.console import Console
from rich.table import Column

from fedpact.common.notebook import print_table

FIGURES = ("0.71808", "123,456", "1e-05", "7.8496")


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("no_wrap", [False, True])
def test_no_figure_is_cut(width, no_wrap):
    columns = ("site", "ε at the end of all rounds", Column("T", no_wrap=no_wrap), "δ", "σ")
    row, out = ("a hospital of a long name", *FIGURES), io.StringIO()
    print_table(Console(file=out, width=width), columns, [row])
    cells = [line.split("│")[1:-1] for line in out.getvalue().splitlines() if "│" in line]
    columns = ["".join(part.strip() for part in column) for column in zip(*cells, strict=True)]
    assert tuple(columns[1:]) == FIGURES
