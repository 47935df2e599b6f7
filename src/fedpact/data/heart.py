"""UCI Heart Disease: four hospitals, binary target, every constant declared here.

Nothing is estimated from records. A feature is centred on the middle of its declared range and
scaled to -1..1, values beyond the range are set to its end. What was not recorded (`?`, and the 0
that stands for it in chol and trestbps, where no living patient has 0) is read as the declared
normal finding. Codes and units are those of the data set's own description, heart-disease.names.

`heart_disease_flamby` is the same table as FLamby (Terrail et al., arXiv 2210.04620) cuts it:
slope, ca and thal are left out, then each record with a gap in the rest, and each hospital has a
fixed test part, by scikit-learn's train_test_split with train_size 0.66 and random_state 43,
stratified by label where both have more than two records. heart_split.json has the test parts, as
places among the records that are left. Of cp and restecg the first code is the reference, and has
no column, as there (pandas' get_dummies with drop_first). Features are scaled by declared ranges,
where FLamby takes each hospital's exact means.
"""

import json
from pathlib import Path
from typing import Final

import numpy as np
import torch

from fedpact.data.dataset import Dataset
from fedpact.data.files import SOURCES, read_verified

_COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)

# feature: (lowest, highest) of its range, in the data set's units
_RANGES = {
    "age": (20, 80),  # years
    "trestbps": (80, 200),  # resting blood pressure, mm Hg
    "chol": (100, 400),  # serum cholesterol, mg/dl
    "thalach": (60, 200),  # highest heart rate reached, 1/min
    "oldpeak": (-2, 6),  # ST depression in exercise, mm
    "ca": (0, 3),  # major vessels coloured by fluoroscopy
}
# In FLamby's cut. 0 stands for cholesterol that was not measured, in 79 of its records.
_FLAMBY_RANGES = {
    "age": (20, 80),
    "trestbps": (80, 200),
    "chol": (100, 400),
    "thalach": (60, 210),
    "oldpeak": (0, 6),
}
_FLAMBY_LEFT_OUT = ("slope", "ca", "thal")
_SPLIT: Final = Path(__file__).with_name("heart_split.json")
_BINARY = ("sex", "fbs", "exang")
_CODES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}

# feature: the value that stands for a missing one
_NORMAL = {
    "trestbps": 120,
    "chol": 200,
    "fbs": 0,
    "restecg": 0,
    "thalach": 150,
    "exang": 0,
    "oldpeak": 0,
    "slope": 1,
    "ca": 0,
    "thal": 3,
}


def load_heart() -> Dataset:
    """Return 920 records of 22 features; site: cleveland, hungarian, switzerland, va.

    Features: the six of _RANGES in -1..1, three binary, then the one-hot codes of cp, restecg,
    slope and thal. Label 1: disease, num > 0. Raises DataError: a file is missing or damaged.
    """
    source = SOURCES["heart_disease"]
    tables, y, site = list[dict[str, np.ndarray]](), [], []
    for file in source.files:
        columns = _columns(read_verified(source, file).decode("ascii"))
        tables.append(_features(columns))
        y.append(columns["num"] > 0)
        site += [file.split(".")[1]] * len(y[-1])
    return Dataset(
        name="heart_disease",
        x=torch.from_numpy(_rows(tables)).float(),
        y=torch.from_numpy(np.concatenate(y)).long(),
        classes=("healthy", "disease"),
        site=tuple(site),
        features=tuple(tables[0]),
        description="UCI Heart Disease, 4 hospitals; missing values and ranges by the constants "
        "declared in data/heart.py",
    )


def load_flamby() -> Dataset:
    """Return 740 records of 13 features in the same sites, of which 254 are FLamby's test records.

    Features: the five of _FLAMBY_RANGES in -1..1, three binary, then the codes of cp and restecg
    but for the first of each. held: the test records, for partition.held_out = "own". Raises
    DataError: see load_heart.
    """
    source, split = SOURCES["heart_disease"], json.loads(_SPLIT.read_text(encoding="utf-8"))
    tables, y, site, held = list[dict[str, np.ndarray]](), [], [], []
    for file in source.files:
        name = file.split(".")[1]
        columns = _whole(_numbers(read_verified(source, file).decode("ascii")))
        tables.append(_features(_filled(columns), _FLAMBY_RANGES, reference=True))
        y.append(columns["num"] > 0)
        held.append(np.isin(np.arange(len(y[-1])), split[name]))
        site += [name] * len(y[-1])
    return Dataset(
        name="heart_disease_flamby",
        x=torch.from_numpy(_rows(tables)).float(),
        y=torch.from_numpy(np.concatenate(y)).long(),
        classes=("healthy", "disease"),
        site=tuple(site),
        features=tuple(tables[0]),
        held=torch.from_numpy(np.concatenate(held)),
        description="UCI Heart Disease, 4 hospitals, FLamby's columns, records and test parts; "
        "ranges declared in data/heart.py",
    )


def _numbers(text: str) -> dict[str, np.ndarray]:
    rows = [line.split(",") for line in text.split()]
    values = np.array([["nan" if v == "?" else v for v in row] for row in rows], np.float64)
    return dict(zip(_COLUMNS, values.T, strict=True))


def _whole(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """FLamby's columns, of the records that have a value in each."""
    left = {name: values for name, values in columns.items() if name not in _FLAMBY_LEFT_OUT}
    good = ~np.isnan(np.stack([*left.values()])).any(0)
    return {name: values[good] for name, values in left.items()}


def _columns(text: str) -> dict[str, np.ndarray]:
    return _filled(_numbers(text))


def _filled(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    filled = dict(columns)
    for name, normal in _NORMAL.items():
        if name in filled:
            values = filled[name]
            missing = np.isnan(values) | ((values == 0) & (name in ("chol", "trestbps")))
            filled[name] = np.where(missing, normal, values)
    return filled


def _features(
    columns: dict[str, np.ndarray],
    ranges: dict[str, tuple[int, int]] = _RANGES,
    *,
    reference: bool = False,
) -> dict[str, np.ndarray]:
    """Return each feature's values. reference: the first code of each is all others' absence.

    What is called "age scaled" is in -1..1, so that nobody takes it for years.
    """
    scaled = {
        f"{name} scaled": np.clip((2 * columns[name] - low - high) / (high - low), -1, 1)
        for name, (low, high) in ranges.items()
    }
    binary = {name: columns[name] for name in _BINARY}
    codes = {name: known[reference:] for name, known in _CODES.items() if name in columns}
    one_hot = {f"{n}={code}": columns[n] == code for n, known in codes.items() for code in known}
    return {**scaled, **binary, **one_hot}


def _rows(tables: list[dict[str, np.ndarray]]) -> np.ndarray:
    return np.concatenate([np.stack([*table.values()], axis=1) for table in tables])
