"""Tables in files, for tests of what is read from them."""

import csv

import pytest


def write_csv(path, *rows):
    """The first row has the names."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def write_rows(path, records):
    """Rows that name their cells, as CSV."""
    records = list(records)
    return write_csv(path, records[0], *(record.values() for record in records))


def write_parquet(path, columns):
    """Lists of cells, or pyarrow's columns, by name."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow, an extra, is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path
