"""Records handed in site by site are refused with the form that is expected."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fedpact
from fedpact.common.errors import DataError

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
FRAME = pd.DataFrame({"a": X[:, 0], "ill": Y})


ROWS = FRAME.to_dict("records")
COLUMNS = FRAME.to_dict("list")
PAIRS = TensorDataset(torch.tensor(X), torch.tensor(Y))
BY_SITE = {
    "dict of pairs": ({"north": (X, Y), "south": (X, Y)}, "2 parts", "from_arrays"),
    "two pairs": ([(X, Y), (X, Y)], "2 parts", "from_arrays"),
    "three pairs": ([(X, Y)] * 3, "3 parts", "from_arrays"),
    "pairs of lists": ({"a": (X.tolist(), Y.tolist())}, "1 part", "from_arrays"),
    "frames and series": ({"a": (FRAME[["a"]], FRAME["ill"])}, "1 part", "from_arrays"),
    "torch": ([PAIRS, PAIRS], "2 parts", "from_arrays"),
    "tuple of pairs": (((X, Y), (X, Y)), "2 parts", "from_arrays"),
    "labels of places": ({"a": (X, X), "b": (X, X)}, "2 parts", "from_arrays"),
    "loaders": ([DataLoader(PAIRS)], "1 part", "from_arrays"),
    "dict of tables": ({"a": FRAME, "b": FRAME}, "2 parts", "for name, one in data.items()"),
    "dict of columns": ({"a": COLUMNS, "b": COLUMNS}, "2 parts", "pandas.DataFrame"),
    "list of columns": ([COLUMNS, COLUMNS], "2 parts", "in enumerate(data)"),
    "rows": (ROWS, "6 parts", "each dict is one record, data = pandas.DataFrame"),
    "dict of rows": ({"a": ROWS, "b": ROWS}, "2 parts", "pandas.DataFrame"),
    "files": (["a.csv", "b.csv"], "2 parts", "pandas.read_csv"),
}


@pytest.mark.parametrize("form", BY_SITE)
def test_records_by_site_are_refused_with_a_remedy(form, tmp_path):
    data, count, remedy = BY_SITE[form]
    with pytest.raises(DataError, match=rf"of {count}: expected the records of all") as told:
        fedpact.run("logistic", data, label="ill", rounds=1, out=tmp_path / "run")
    assert remedy in str(told.value)


def test_the_remedy_for_tables_by_site_is_accepted(tmp_path):
    data = {"north": COLUMNS, "south": COLUMNS}
    data = pd.concat([pd.DataFrame(one).assign(site=name) for name, one in data.items()])
    fedpact.run(
        "logistic", data, label="ill", site="site", rounds=1, privacy={"mode": "none"},
        out=tmp_path / "run",
    )  # fmt: skip


def test_a_pair_and_a_table_are_no_sites(tmp_path):
    for number, (data, label) in enumerate([((X, Y), None), (FRAME, "ill")]):
        fedpact.run(
            "logistic", data, label=label, sites=2, rounds=1, privacy={"mode": "none"},
            out=tmp_path / str(number),
        )  # fmt: skip
