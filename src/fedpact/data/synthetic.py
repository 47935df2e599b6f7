"""synthetic(α, β): devices whose models and records differ by as much as α and β say.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated optimization in heterogeneous networks, MLSys
2020, section 5.1 (after Shamir, Srebro, Zhang, ICML 2014). Device k has its own label rule and its
own inputs:

    u_k ~ N(0, α²),  W_k [10, 60] and b_k [10] with entries ~ N(u_k, 1)
    B_k ~ N(0, β²),  v_k [60] with entries ~ N(B_k, 1)
    x ~ N(v_k, Σ),  Σ diagonal, Σ_jj = j^-1.2, j = 1..60;   y = argmax softmax(W_k x + b_k)

α and β are standard deviations, as in the authors' code; the paper's N(0, α) leaves it open.
synthetic_iid: one W, b with entries ~ N(0, 1) for all devices, and v_k = 0.
Sizes: p(s) ∝ s^-2 in [smallest, largest]. Nguyen et al. (FedProxVR) have 100 devices in [37, 3277].
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import PCG64, Generator, SeedSequence

from fedpact.data.dataset import Dataset
from fedpact.data.splits import power_law_sizes
from fedpact.errors import DataError

FEATURES, CLASSES = 60, 10
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
            classes=tuple(map(str, range(CLASSES))),
            site=tuple(site),
            description=f"synthetic records of {self.sites} devices, {law}, made from seed "
            f"{self.seed}; {FEATURES} features as drawn",
        )

    def _device(self, draws: Generator) -> Device:
        if self.iid:
            common = self._draws(1)
            w, b = common.standard_normal((CLASSES, FEATURES)), common.standard_normal(CLASSES)
            return Device(w, b, np.zeros(FEATURES))
        u, middle = self.alpha * draws.standard_normal(), self.beta * draws.standard_normal()
        w = u + draws.standard_normal((CLASSES, FEATURES))
        b = u + draws.standard_normal(CLASSES)
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
