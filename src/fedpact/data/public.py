"""The public data sets: Adult, heart disease, images, Shakespeare, and synthetic ones.

Nothing is estimated from records: constants are declared here, in NAME.toml beside this file, or
published with the data set.

Heart disease. A feature is centred on the middle of its declared range and scaled to -1..1; values
outside are set to its ends. A missing value (`?`, or 0 in chol and trestbps) becomes the declared
normal finding. Codes and units are those of heart-disease.names.

`heart_disease_flamby` is the same table as FLamby cuts it (Terrail et al., arXiv 2210.04620).
slope, ca and thal are left out, then each record with a missing value. Each hospital has a fixed
test part (scikit-learn's train_test_split with train_size 0.66 and random_state 43, stratified by
label where possible): heart_split.json has its places among the records that are left. The first
code of cp and restecg has no column. FLamby scales by each hospital's exact means, we do not.

Synthetic. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated optimization in heterogeneous
networks, MLSys 2020, section 5.1. Device k has:

    u_k ~ N(0, α²),  W_k [10, 60] and b_k [10] with entries ~ N(u_k, 1)
    B_k ~ N(0, β²),  v_k [60] with entries ~ N(B_k, 1)
    x ~ N(v_k, Σ),  Σ diagonal, Σ_jj = j^-1.2, j = 1..60;   y = argmax softmax(W_k x + b_k)

α and β are standard deviations, as in the authors' code. synthetic_iid: one W, b with entries
~ N(0, 1) for all devices, and v_k = 0. Sizes: p(s) ∝ s^-2 in [smallest, largest], by default those
of Nguyen et al. (FedProxVR).

Shakespeare is a list of speeches, "ROLE:" and then lines, with a blank line after each. What a role
says is cut into pieces of 41 characters without overlap: 40 are a record, the last one is its
label. Roles with fewer than 100 pieces are left out (Caldas et al., LEAF, arXiv 1812.01097, which
lets pieces overlap).
"""

import ast
import gzip
import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.random import PCG64, Generator, SeedSequence
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedpact.common.errors import DataError
from fedpact.data.cells import Columns
from fedpact.data.dataset import Dataset
from fedpact.data.download import SOURCES, Arrays, Source, load_cached, read_verified
from fedpact.data.inputs import table_of
from fedpact.data.schema import RecordForm
from fedpact.data.splits import power_law_sizes
from fedpact.data.tables import Roles, Table

CLASSES = ("<=50K", ">50K")

_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
# How many people a row stands for, and the years of education in words.
_LEFT_OUT = ("fnlwgt", "education")


def adult_tables(form: RecordForm) -> list[Table]:
    """Return the 32,561 records to train on and the 16,281 to test, with features by `form`.

    Raises DataError: no such column, or see read_verified.
    """
    # Dropping what is left out anyway is no mistake.
    form = form.model_copy(update={"drop": [name for name in form.drop if name not in _LEFT_OUT]})
    tables = list[Table]()
    for file in SOURCES["adult"].files:
        text = read_verified(SOURCES["adult"], file).decode("ascii")
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
        cells = zip(*(row for row in rows if len(row) == len(_COLUMNS)), strict=True)
        kept = {n: some for n, some in zip(_COLUMNS, cells, strict=True) if n not in _LEFT_OUT}
        # The labels of the test records end with a full stop.
        kept["income"] = tuple(label.removesuffix(".") for label in kept["income"])
        tables.append(table_of("data set adult", Columns(kept), Roles("income"), form))
    return tables


_HEART_COLUMNS = (
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
    **{name: _RANGES[name] for name in ("age", "trestbps", "chol")},
    **{"thalach": (60, 210), "oldpeak": (0, 6)},
}
_BINARY = ("sex", "fbs", "exang")
_CODES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
# feature: the value that stands for a missing one
_NORMAL = {
    **{"trestbps": 120, "chol": 200, "fbs": 0, "restecg": 0, "thalach": 150},
    **{"exang": 0, "oldpeak": 0, "slope": 1, "ca": 0, "thal": 3},
}
_Columns = dict[str, np.ndarray]


def load_heart() -> Dataset:
    """Return 920 records of 22 features; site: cleveland, hungarian, switzerland, va.

    Features: the six of _RANGES in -1..1, three binary, then the one-hot codes of cp, restecg,
    slope and thal. Label 1: disease, num > 0. Raises DataError: a file is missing or damaged.
    """
    return _heart("heart_disease", _hospitals(), _RANGES, 0)


def load_flamby() -> Dataset:
    """Return 740 records of 13 features in the same sites, of which 254 are FLamby's test records.

    Features: the five of _FLAMBY_RANGES in -1..1, three binary, then the codes of cp and restecg
    but for the first of each. held: the test records, for partition.held_out = "own". Raises
    DataError: see load_heart.
    """
    tables = dict[str, _Columns]()
    for site, columns in _hospitals().items():
        left = {n: some for n, some in columns.items() if n not in ("slope", "ca", "thal")}
        whole = ~np.isnan(np.stack([*left.values()])).any(0)
        tables[site] = {name: some[whole] for name, some in left.items()}
    found = _heart("heart_disease_flamby", tables, _FLAMBY_RANGES, 1)
    split = json.loads(Path(__file__).with_name("heart_split.json").read_text(encoding="utf-8"))
    held = [np.isin(np.arange(len(c["num"])), split[site]) for site, c in tables.items()]
    return replace(found, held=torch.from_numpy(np.concatenate(held)))


def _hospitals() -> dict[str, _Columns]:
    """Return each hospital's columns as they are in its file, NaN for what is missing."""
    found = dict[str, _Columns]()
    for file in SOURCES["heart_disease"].files:
        text = read_verified(SOURCES["heart_disease"], file).decode("ascii")
        found[file.split(".")[1]] = _columns(text)
    return found


def _columns(text: str) -> _Columns:
    rows = [line.split(",") for line in text.replace("?", "nan").split()]
    return dict(zip(_HEART_COLUMNS, np.array(rows, np.float64).T, strict=True))


def _heart(
    name: str, tables: dict[str, _Columns], ranges: dict[str, tuple[int, int]], first: int
) -> Dataset:
    features = {site: _features(columns, ranges, first) for site, columns in tables.items()}
    x = [np.stack([*columns.values()], axis=1) for columns in features.values()]
    y = [columns["num"] > 0 for columns in tables.values()]
    return Dataset(
        name=name,
        x=torch.from_numpy(np.concatenate(x)).float(),
        y=torch.from_numpy(np.concatenate(y)).long(),
        classes=("healthy", "disease"),
        site=tuple(site for site, rows in zip(tables, y, strict=True) for _ in rows),
        features=tuple(next(iter(features.values()))),
    )


def _features(columns: _Columns, ranges: dict[str, tuple[int, int]], first: int) -> _Columns:
    """Return each feature's values. first: of each code's values the first that has a column.

    What is called "age scaled" is in -1..1, so that nobody takes it for years.
    """
    filled = dict(columns)
    for name in _NORMAL.keys() & columns.keys():
        missing = np.isnan(columns[name])
        missing |= (columns[name] == 0) & (name in ("chol", "trestbps"))
        filled[name] = np.where(missing, _NORMAL[name], columns[name])
    scaled = {
        f"{name} scaled": np.clip((2 * filled[name] - low - high) / (high - low), -1, 1)
        for name, (low, high) in ranges.items()
    }
    codes = {n: known[first:] for n, known in _CODES.items() if n in filled}
    one_hot = {f"{n}={code}": filled[n] == code for n, known in codes.items() for code in known}
    return {**scaled, **{name: filled[name] for name in _BINARY}, **one_hot}


_CLOTHES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_OBJECTS = "airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck"
# Classes, and each channel's mean and standard deviation over pixels in 0..1, as published.
_IMAGES = {
    "mnist": (tuple("0123456789"), (0.1307,), (0.3081,)),
    "fashion_mnist": (tuple(_CLOTHES.split(",")), (0.2860,), (0.3530,)),
    "cifar10": (tuple(_OBJECTS.split(",")), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def load_images(name: str) -> Dataset:
    """Return "mnist" or "fashion_mnist" [n, 1, 28, 28], or "cifar10" [n, 3, 32, 32].

    Each channel is (pixel / 255 - mean) / std. Raises DataError where a file is missing or damaged.
    """
    classes, *constants = _IMAGES[name]
    mean, std = (torch.tensor(c).view(-1, 1, 1) for c in constants)
    arrays = load_cached(SOURCES[name], _decode_cifar if name == "cifar10" else _decode_idx)

    def read(end: str) -> tuple[Tensor, Tensor]:
        pixels, labels = arrays["x" + end].astype(np.float32), arrays["y" + end].astype(np.int64)
        x = torch.from_numpy(pixels).div_(255).sub_(mean).div_(std)
        return x, torch.from_numpy(labels)

    return Dataset(name, *read(""), classes, *read("_test"))


def load_digits() -> Dataset:
    """Return 1,797 handwritten digits [n, 1, 8, 8], pixels / 16, which come with the package.

    The public test set is every fifth record of each class in the order of the file: 20 %.
    """
    with files("fedpact.data").joinpath("digits.npz").open("rb") as file, np.load(file) as held:
        pixels, labels = held["pixels"], held["labels"]
    x = torch.from_numpy(pixels / 16).float()[:, None]
    y = torch.from_numpy(labels).long()
    rank = (torch.cumsum(torch.nn.functional.one_hot(y), 0) - 1).gather(1, y[:, None])[:, 0]
    test = rank % 5 == 4
    return Dataset("digits", x[~test], y[~test], tuple("0123456789"), x[test], y[test])


def _decode_idx(source: Source) -> Arrays:
    # An IDX file: two zero bytes, the type (8 = uint8), the number of dimensions, each of them as a
    # big-endian uint32, then the values.
    arrays = []
    for file in source.files:
        content = gzip.decompress(read_verified(source, file))
        shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
        arrays.append(np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape))
    x, y, x_test, y_test = arrays
    return {"x": x[:, None], "y": y, "x_test": x_test[:, None], "y_test": y_test}


def _decode_cifar(source: Source) -> Arrays:
    batches = [cifar_batch(read_verified(source, file)) for file in source.files]
    *train, (x_test, y_test) = batches
    x, y = (np.concatenate(part) for part in zip(*train, strict=True))
    return {"x": x, "y": y, "x_test": x_test, "y_test": y_test}


def cifar_batch(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, 3, 32, 32] and labels [n], uint8, of one CIFAR-10 batch in binary form.

    A row is the label, then 1,024 red, 1,024 green and 1,024 blue values, line by line.
    """
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


FEATURES, SYNTHETIC_CLASSES = 60, 10
FORMS = ("synthetic(ALPHA,BETA)", "synthetic_iid")
_EXPONENT = 2.0
_NAME = re.compile(r"synthetic(_iid)?\s*(\(.*\))?\s*")


class Device(NamedTuple):
    """One device's law, float64: y = argmax softmax(w x + b), x ~ N(v, Σ), and what it draws by.

    w [10, 60], b [10], v [60].
    """

    w: np.ndarray
    b: np.ndarray
    v: np.ndarray
    draws: Generator


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class Synthetic:
    """A federation of synthetic devices; `Synthetic.parse` reads it from its name.

    alpha, beta: >= 0. sites: devices. smallest, largest: of a device's records, those it will hold
    out included. The first devices are the same for any larger number of them.
    """

    alpha: float = Field(default=0.0, ge=0)
    beta: float = Field(default=0.0, ge=0)
    iid: bool = False
    sites: int = Field(default=100, ge=1)
    smallest: int = Field(default=37, ge=2)
    largest: int = Field(default=3277, ge=2)
    seed: int = Field(default=0, ge=0)

    @staticmethod
    def parse(name: str) -> "Synthetic | None":
        """Return what a name such as "synthetic(0.5,0.5, sites=30, seed=1)" means, None if nothing.

        Raises DataError: it begins like such a name and has other values in it.

        >>> Synthetic.parse("synthetic(0.5, 1, sites=30)")
        Synthetic(alpha=0.5, beta=1.0, iid=False, sites=30, smallest=37, largest=3277, seed=0)
        """
        if _NAME.fullmatch(name) is None:
            return None
        try:
            call, iid = ast.parse(name, mode="eval").body, name.startswith("synthetic_iid")
            spread = [ast.literal_eval(each) for each in getattr(call, "args", ())]
            pairs = getattr(call, "keywords", ())
            given = {pair.arg: ast.literal_eval(pair.value) for pair in pairs}
            made = Synthetic(*(spread or (0.0, 0.0)), iid=iid, **given)
            good = len(spread) == (0 if iid else 2) and len(given) == len(pairs)
            good &= made.smallest <= made.largest
        except (ValueError, TypeError, SyntaxError):
            good, made = False, None
        if not good:
            raise DataError(
                f"data set {name!r}: expected synthetic(ALPHA,BETA) with two finite numbers >= 0, "
                "or synthetic_iid, and in the brackets, if wanted, sites=100, smallest=37, "
                "largest=3277 (2 <= smallest <= largest), seed=0 (>= 0), each once"
            )
        return made

    def sizes(self) -> np.ndarray:
        """Return the devices' numbers of records, int [sites]."""
        draws = self._draws(0)
        return power_law_sizes(self.sites, (self.smallest, self.largest), _EXPONENT, draws)

    def device(self, k: int) -> Device:
        """Return the law of device k, 0 <= k < sites."""
        draws, u, middle = self._draws(2 + k), 0.0, 0.0
        if not self.iid:
            u, middle = self.alpha * draws.standard_normal(), self.beta * draws.standard_normal()
        law = self._draws(1) if self.iid else draws
        w = u + law.standard_normal((SYNTHETIC_CLASSES, FEATURES))
        b = u + law.standard_normal(SYNTHETIC_CLASSES)
        v = np.zeros(FEATURES) if self.iid else middle + law.standard_normal(FEATURES)
        return Device(w, b, v, draws)

    def dataset(self, name: str) -> Dataset:
        """Return all records, device after device, each with its device's name as its site."""
        width, scale = max(2, len(str(self.sites - 1))), covariance() ** 0.5
        x, y, site = [], [], []
        for k, size in enumerate(self.sizes()):
            device = self.device(k)
            records = device.v + scale * device.draws.standard_normal((size, FEATURES))
            # Labelled as stored, so that the rule holds for the float32 records themselves.
            stored = records.astype(np.float32)
            x.append(stored)
            y.append((stored.astype(np.float64) @ device.w.T + device.b).argmax(1))
            site += [f"device-{k:0{width}}"] * int(size)
        return Dataset(
            name=name,
            x=torch.from_numpy(np.concatenate(x)),
            y=torch.from_numpy(np.concatenate(y).astype(np.int64)),
            classes=tuple(map(str, range(SYNTHETIC_CLASSES))),
            site=tuple(site),
        )

    def _draws(self, stream: int) -> Generator:
        """Return a generator of its own: 0 for the sizes, 1 for the common law, 2 + k a device."""
        return Generator(PCG64(SeedSequence(self.seed, spawn_key=(stream,))))


def covariance() -> np.ndarray:
    """Return the diagonal of Σ, [60]: Σ_jj = j^-1.2 with j counted from 1."""
    return np.arange(1, FEATURES + 1, dtype=np.float64) ** -1.2


CHARACTERS: Final = (
    "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # the text's, by code
)
LENGTH: Final = 40
_SHAKESPEARE_LEAST: Final = 100


def load_shakespeare() -> Dataset:
    """Return records x [n, 40] and labels, places in CHARACTERS; site: the role.

    Raises DataError: the file is missing or damaged.
    """
    source = SOURCES["shakespeare"]
    (file,) = source.files
    return of_roles(roles(read_verified(source, file).decode("ascii")))


def roles(text: str) -> dict[str, str]:
    """Return what each role says, its speeches one after another."""
    found = dict[str, list[str]]()
    for speech in text.split("\n\n"):
        name, colon, said = speech.strip("\n").partition(":\n")
        if colon and "\n" not in name:
            found.setdefault(name, []).append(said)
    return {name: "\n".join(speeches) for name, speeches in found.items()}


def of_roles(said: dict[str, str], least: int = _SHAKESPEARE_LEAST) -> Dataset:
    """Return the data set of roles that have at least so many pieces. Raises DataError: none."""
    place = {character: k for k, character in enumerate(CHARACTERS)}
    rows, sites = list[list[int]](), list[str]()
    for name, text in sorted(said.items()):
        # Another text may have others: they are left out of it.
        codes = [place[c] for c in text if c in place]
        pieces = len(codes) // (LENGTH + 1)
        if pieces < least:
            continue
        rows += [codes[k * (LENGTH + 1) : (k + 1) * (LENGTH + 1)] for k in range(pieces)]
        sites += [name] * pieces
    if not rows:
        raise DataError(
            f"data set shakespeare: no role has {least} pieces of {LENGTH + 1} characters: "
            "expected speeches, each a line 'ROLE:' with lines below it and a blank line behind"
        )
    pieces = torch.tensor(rows)
    return Dataset(
        name="shakespeare",
        x=pieces[:, :LENGTH].contiguous(),
        y=pieces[:, LENGTH].contiguous(),
        classes=tuple(map(repr, CHARACTERS)),
        site=tuple(sites),
    )
