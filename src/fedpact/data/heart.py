"""UCI Heart Disease: four hospitals, binary target, every constant declared here.

Nothing is estimated from records. A feature is centred on the middle of its declared range and
scaled to -1..1, values beyond the range are set to its end. What was not recorded (`?`, and the 0
that stands for it in chol and trestbps, where no living patient has 0) is read as the declared
normal finding. Codes and units are those of the data set's own description, heart-disease.names.
"""

import numpy as np
import torch

from fedpact.data.dataset import Dataset
from fedpact.data.files import SOURCES, read

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
    x, y, site = [], [], []
    for file in source.files:
        columns = _columns(read(source, file).decode("ascii"))
        x.append(_features(columns))
        y.append(columns["num"] > 0)
        site += [file.split(".")[1]] * len(y[-1])
    return Dataset(
        name="heart_disease",
        x=torch.from_numpy(np.concatenate(x)).float(),
        y=torch.from_numpy(np.concatenate(y)).long(),
        classes=("healthy", "disease"),
        site=tuple(site),
        description="UCI Heart Disease, 4 hospitals; missing values and ranges by the constants "
        "declared in data/heart.py",
    )


def _columns(text: str) -> dict[str, np.ndarray]:
    rows = [line.split(",") for line in text.split()]
    values = np.array([["nan" if v == "?" else v for v in row] for row in rows], np.float64)
    columns = dict(zip(_COLUMNS, values.T, strict=True))
    for name in ("chol", "trestbps"):
        columns[name] = np.where(columns[name] == 0, np.nan, columns[name])
    for name, normal in _NORMAL.items():
        columns[name] = np.where(np.isnan(columns[name]), normal, columns[name])
    return columns


def _features(columns: dict[str, np.ndarray]) -> np.ndarray:
    scaled = [
        np.clip((2 * columns[name] - low - high) / (high - low), -1, 1)
        for name, (low, high) in _RANGES.items()
    ]
    binary = [columns[name] for name in _BINARY]
    one_hot = [columns[name] == code for name, codes in _CODES.items() for code in codes]
    return np.stack([*scaled, *binary, *one_hot], axis=1)
