"""Records handed in site by site are refused with the form that is expected."""

import numpy as np
import pandas as pd
import pytest

import fedpact
from fedpact.common.errors import DataError

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6) % 2
FRAME = pd.DataFrame({"a": X[:, 0], "ill": Y})


@pytest.mark.parametrize(
    "data",
    [{"north": (X, Y), "south": (X, Y)}, [(X, Y), (X, Y)], [(X, Y)] * 3, {"a": FRAME, "b": FRAME}],
    ids=["dict of pairs", "two pairs", "three pairs", "dict of tables"],
)
def test_records_by_site_are_refused_with_a_remedy(data, tmp_path):
    with pytest.raises(DataError, match=rf"of {len(data)} tables or pairs.*site = "):
        fedpact.run("logistic", data, label="ill", rounds=1, out=tmp_path / "run")


def test_a_pair_and_a_table_are_no_sites(tmp_path):
    for number, (data, label) in enumerate([((X, Y), None), (FRAME, "ill")]):
        fedpact.run(
            "logistic", data, label=label, sites=2, rounds=1, privacy={"mode": "none"},
            out=tmp_path / str(number),
        )  # fmt: skip
