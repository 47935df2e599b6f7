"""The public data sets: Adult, heart disease, images, Shakespeare, and synthetic ones.

Nothing is done to their columns here: what stands for words, gaps and wide numbers is declared in a
plan's [records], as for a table of one's own; adult.toml beside this file has it.

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

The normalising constants are published with the data sets; nothing is estimated from records.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated optimization in heterogeneous networks, MLSys
2020, section 5.1 (after Shamir, Srebro, Zhang, ICML 2014). Device k has its own label rule and its
own inputs:

    u_k ~ N(0, α²),  W_k [10, 60] and b_k [10] with entries ~ N(u_k, 1)
    B_k ~ N(0, β²),  v_k [60] with entries ~ N(B_k, 1)
    x ~ N(v_k, Σ),  Σ diagonal, Σ_jj = j^-1.2, j = 1..60;   y = argmax softmax(W_k x + b_k)

α and β are standard deviations, as in the authors' code; the paper's N(0, α) leaves it open.
synthetic_iid: one W, b with entries ~ N(0, 1) for all devices, and v_k = 0.
Sizes: p(s) ∝ s^-2 in [smallest, largest]. Nguyen et al. (FedProxVR) have 100 devices in [37, 3277].

The text is a list of speeches, "ROLE:" and then lines, with a blank line behind each. What a role
says in all of them is cut into pieces of 41 characters, none in two of them: 40 are a record, the
last one is its label. A piece is written with the 65 characters that are declared here. Roles that
have fewer than 100 pieces take no part. As LEAF has it (Caldas et al., arXiv 1812.01097), but for
pieces that do not overlap, so that a character is in one record.
"""

import gzip
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.random import PCG64, Generator, SeedSequence
from torch import Tensor

from fedpact.common.errors import DataError
from fedpact.data.dataset import Dataset
from fedpact.data.download import SOURCES, Arrays, Source, load_cached, read_verified
from fedpact.data.schema import RecordForm
from fedpact.data.splits import power_law_sizes
from fedpact.data.tables import Table, table_of

CLASSES = ("<=50K", ">50K")

_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
# How many people of the state a row stands for; and the years of education beside its name.
_LEFT_OUT = ("fnlwgt", "education")


def adult_tables(form: RecordForm) -> list[Table]:
    """Return the 32,561 records to train on and the 16,281 to test.

    form: which columns are features. Raises DataError: no such column, or see read_verified.
    """
    source = SOURCES["adult"]
    return [_table(read_verified(source, file).decode("ascii"), form) for file in source.files]


def _table(text: str, form: RecordForm) -> Table:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    cells = zip(*(row for row in rows if len(row) == len(_COLUMNS)), strict=True)
    columns = dict(zip(_COLUMNS, cells, strict=True))
    # The labels of the test records end with a full stop.
    columns["income"] = tuple(label.removesuffix(".") for label in columns["income"])
    kept = {name: values for name, values in columns.items() if name not in _LEFT_OUT}
    # To drop what is left out anyway is no mistake.
    form = form.model_copy(update={"drop": [name for name in form.drop if name not in _LEFT_OUT]})
    return table_of("data set adult", kept, "income", form=form)


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
    tables = {site: _filled(columns) for site, columns in _hospitals().items()}
    told = "missing values and ranges by the constants declared in data/public.py"
    features = {site: _features(columns) for site, columns in tables.items()}
    return _heart("heart_disease", features, tables, told)


def load_flamby() -> Dataset:
    """Return 740 records of 13 features in the same sites, of which 254 are FLamby's test records.

    Features: the five of _FLAMBY_RANGES in -1..1, three binary, then the codes of cp and restecg
    but for the first of each. held: the test records, for partition.held_out = "own". Raises
    DataError: see load_heart.
    """
    split = json.loads(_SPLIT.read_text(encoding="utf-8"))
    tables = {site: _whole(columns) for site, columns in _hospitals().items()}
    features = {
        site: _features(_filled(columns), _FLAMBY_RANGES, reference=True)
        for site, columns in tables.items()
    }
    held = [np.isin(np.arange(len(c["num"])), split[site]) for site, c in tables.items()]
    told = "FLamby's columns, records and test parts; ranges declared in data/public.py"
    found = _heart("heart_disease_flamby", features, tables, told)
    return replace(found, held=torch.from_numpy(np.concatenate(held)))


def _hospitals() -> dict[str, dict[str, np.ndarray]]:
    """Return each hospital's columns as they are in its file, NaN for what is missing."""
    source = SOURCES["heart_disease"]
    return {
        file.split(".")[1]: _columns(read_verified(source, file).decode("ascii"))
        for file in source.files
    }


def _columns(text: str) -> dict[str, np.ndarray]:
    rows = [line.split(",") for line in text.split()]
    values = np.array([["nan" if v == "?" else v for v in row] for row in rows], np.float64)
    return dict(zip(_HEART_COLUMNS, values.T, strict=True))


def _heart(
    name: str,
    features: dict[str, dict[str, np.ndarray]],
    tables: dict[str, dict[str, np.ndarray]],
    told: str,
) -> Dataset:
    x = [np.stack([*columns.values()], axis=1) for columns in features.values()]
    y = [columns["num"] > 0 for columns in tables.values()]
    return Dataset(
        name=name,
        x=torch.from_numpy(np.concatenate(x)).float(),
        y=torch.from_numpy(np.concatenate(y)).long(),
        classes=("healthy", "disease"),
        site=tuple(site for site, rows in zip(tables, y, strict=True) for _ in rows),
        features=tuple(next(iter(features.values()))),
        description=f"UCI Heart Disease, 4 hospitals; {told}",
    )


def _whole(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """FLamby's columns, of the records that have a value in each."""
    left = {name: values for name, values in columns.items() if name not in _FLAMBY_LEFT_OUT}
    good = ~np.isnan(np.stack([*left.values()])).any(0)
    return {name: values[good] for name, values in left.items()}


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


@dataclass(frozen=True)
class _Images:
    title: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of each channel, over pixels scaled to 0..1
    std: tuple[float, ...]


_DIGITS = tuple("0123456789")
_IMAGES = {
    "mnist": _Images("MNIST, handwritten digits 28x28", _DIGITS, (0.1307,), (0.3081,)),
    "fashion_mnist": _Images(
        "Fashion-MNIST, clothing 28x28",
        (
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        (0.2860,),
        (0.3530,),
    ),
    "cifar10": _Images(
        "CIFAR-10, natural images 3x32x32",
        (
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
}


def load_images(name: str) -> Dataset:
    """Return "mnist" or "fashion_mnist" [n, 1, 28, 28], or "cifar10" [n, 3, 32, 32].

    Each channel is (pixel / 255 - mean) / std. Raises DataError where a file is missing or damaged.
    """
    about = _IMAGES[name]
    decode = _decode_cifar if name == "cifar10" else _decode_idx
    arrays = load_cached(SOURCES[name], decode)
    return Dataset(
        name=name,
        x=_normalised(arrays["x"], about),
        y=torch.from_numpy(arrays["y"].astype(np.int64)),
        classes=about.classes,
        x_test=_normalised(arrays["x_test"], about),
        y_test=torch.from_numpy(arrays["y_test"].astype(np.int64)),
        description=f"{about.title}; pixels / 255, then mean {about.mean}, standard deviation "
        f"{about.std} (published)",
    )


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
    return Dataset(
        name="digits",
        x=x[~test],
        y=y[~test],
        classes=_DIGITS,
        x_test=x[test],
        y_test=y[test],
        description="UCI's digits 8x8; pixels / 16; every fifth record of a class tests",
    )


def _normalised(pixels: np.ndarray, about: _Images) -> Tensor:
    mean, std = (torch.tensor(c).view(-1, 1, 1) for c in (about.mean, about.std))
    return torch.from_numpy(pixels.astype(np.float32)).div_(255).sub_(mean).div_(std)


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
    # liblzma and SHA-256 release the interpreter's lock, so the batches decode in parallel.
    with ThreadPoolExecutor() as pool:
        batches = list(
            pool.map(lambda file: cifar_batch(read_verified(source, file)), source.files)
        )
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
_NAME = re.compile(r"(synthetic|synthetic_iid)\s*(?:\((.*)\))?\s*")
_LEAST = {"sites": 1, "smallest": 2, "largest": 2, "seed": 0}


@dataclass(frozen=True, eq=False)
class Device:
    """One device's law: label y = argmax softmax(w x + b), inputs x ~ N(v, Σ).

    w [10, 60], b [10], v [60], all float64.
    """

    w: np.ndarray
    b: np.ndarray
    v: np.ndarray


@dataclass(frozen=True)
class Synthetic:
    """A federation of synthetic devices; `Synthetic.parse` reads it from its name.

    alpha, beta: >= 0. sites: devices. smallest, largest: of a device's records, those it will hold
    out included. The first devices are the same for any larger number of them.
    """

    alpha: float = 0.0
    beta: float = 0.0
    iid: bool = False
    sites: int = 100
    smallest: int = 37
    largest: int = 3277
    seed: int = 0

    @staticmethod
    def parse(name: str) -> "Synthetic | None":
        """Return what a name such as "synthetic(0.5,0.5, sites=30, seed=1)" means, None if nothing.

        Raises DataError: it begins like such a name and has other values in it.

        >>> Synthetic.parse("synthetic(0.5, 1, sites=30)")
        Synthetic(alpha=0.5, beta=1.0, iid=False, sites=30, smallest=37, largest=3277, seed=0)
        """
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        federation = _read(found[1] == "synthetic_iid", found[2] or "")
        if federation is None:
            raise DataError(
                f"data set {name!r}: expected synthetic(ALPHA,BETA) with two finite numbers >= 0, "
                "or synthetic_iid, and in the brackets, if wanted, sites=100, smallest=37, "
                "largest=3277 (2 <= smallest <= largest), seed=0 (>= 0), each once"
            )
        return federation

    def sizes(self) -> np.ndarray:
        """Return the devices' numbers of records, int [sites]."""
        draws = self._draws(0)
        return power_law_sizes(self.sites, (self.smallest, self.largest), _EXPONENT, draws)

    def device(self, k: int) -> Device:
        """Return the law of device k, 0 <= k < sites."""
        return self._device(self._draws(2 + k))

    def dataset(self, name: str) -> Dataset:
        """Return all records, device after device, each with its device's name as its site."""
        width = max(2, len(str(self.sites - 1)))
        sizes, scale = self.sizes(), covariance() ** 0.5
        x, y, site = [], [], []
        for k, size in enumerate(sizes):
            draws = self._draws(2 + k)
            device = self._device(draws)
            records = device.v + scale * draws.standard_normal((size, FEATURES))
            # Labelled as stored, so that the rule holds for the float32 records themselves.
            stored = records.astype(np.float32)
            x.append(stored)
            y.append((stored.astype(np.float64) @ device.w.T + device.b).argmax(1))
            site += [f"device-{k:0{width}}"] * int(size)
        law = "one law for all" if self.iid else f"α = {self.alpha:g}, β = {self.beta:g}"
        return Dataset(
            name=name,
            x=torch.from_numpy(np.concatenate(x)),
            y=torch.from_numpy(np.concatenate(y).astype(np.int64)),
            classes=tuple(map(str, range(SYNTHETIC_CLASSES))),
            site=tuple(site),
            description=f"synthetic records of {self.sites} devices, {law}, made from seed "
            f"{self.seed}; {FEATURES} features as drawn",
        )

    def _device(self, draws: Generator) -> Device:
        if self.iid:
            common = self._draws(1)
            w, b = (
                common.standard_normal((SYNTHETIC_CLASSES, FEATURES)),
                common.standard_normal(SYNTHETIC_CLASSES),
            )
            return Device(w, b, np.zeros(FEATURES))
        u, middle = self.alpha * draws.standard_normal(), self.beta * draws.standard_normal()
        w = u + draws.standard_normal((SYNTHETIC_CLASSES, FEATURES))
        b = u + draws.standard_normal(SYNTHETIC_CLASSES)
        return Device(w, b, middle + draws.standard_normal(FEATURES))

    def _draws(self, stream: int) -> Generator:
        """Return a generator of its own: 0 for the sizes, 1 for the common law, 2 + k a device."""
        return Generator(PCG64(SeedSequence(self.seed, spawn_key=(stream,))))


def covariance() -> np.ndarray:
    """Return the diagonal of Σ, [60]: Σ_jj = j^-1.2 with j counted from 1."""
    return np.arange(1, FEATURES + 1, dtype=np.float64) ** -1.2


def _read(iid: bool, inside: str) -> Synthetic | None:
    entries = [entry.strip() for entry in inside.split(",") if entry.strip()]
    try:
        numbers = [float(entry) for entry in entries if "=" not in entry]
        whole = {key: int(value) for key, value in map(_pair, entries) if key}
        spread = {} if iid else {"alpha": numbers[0], "beta": numbers[1]}
        good = (
            len(numbers) == len(spread)
            and len(numbers) + len(whole) == len(entries)
            and all(number >= 0 and math.isfinite(number) for number in numbers)
            and all(value >= _LEAST[key] for key, value in whole.items())
        )
    except (ValueError, IndexError, KeyError):
        return None
    if not good:
        return None
    federation = Synthetic(**spread, iid=iid, **whole)
    return federation if federation.smallest <= federation.largest else None


def _pair(entry: str) -> tuple[str, Any]:
    key, _, value = entry.rpartition("=")
    return key.strip(), value


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
        description=f"Shakespeare's plays, {len(set(sites))} roles; the next of 65 characters",
    )
