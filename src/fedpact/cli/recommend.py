"""`fedpact recommend`: a configuration for a budget, from public numbers alone."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedpact.cli.console import show
from fedpact.configuration import read_configuration
from fedpact.data.columns.advice import advise, square, undeclared
from fedpact.data.columns.known import KNOWN, known
from fedpact.data.dataset import Dataset
from fedpact.data.form import PlanRecords
from fedpact.data.partition import make_partition
from fedpact.engines.scene import is_table, loaded
from fedpact.errors import InputError, PlanError
from fedpact.features.settings import FeatureSettings, suited
from fedpact.features.stage import FeatureStage
from fedpact.files import write_whole
from fedpact.models.build import build
from fedpact.models.papers import LogisticSettings
from fedpact.params import FlatModel
from fedpact.plan import Plan
from fedpact.reference.starting import configuration
from fedpact.theory.accounting import ADJACENCY, Budget
from fedpact.theory.calibration import smallest_sigma
from fedpact.theory.full_batch import FullBatch, full_batch, signal_to_noise

FITTED_ON: Final = "the digits (1,442 images of 8 x 8) at ε = 0.5, 2, 8 and 32"
# A share of the gradient's length at the zero model, which is about that of the row.
_CLIP: Final = 0.2
_MANY_COLUMNS: Final = 4
# Of signal to noise: below it a column that says little costs more than it brings.
_NOISY: Final = 5.0
_NOTHING: Final = PlanRecords()


@dataclass(frozen=True)
class Circumstances:
    """What is known before anybody trains; see cli.commands.recommend. sites: 0 for the default."""

    data: str
    epsilon: float
    delta: float
    rounds: int
    sites: int
    trust: str
    honest: int
    mirror: bool | None = None
    label: str | None = None
    site: str | None = None
    records: PlanRecords = _NOTHING
    little: tuple[str, ...] = ()  # columns that say little beside the others
    partition: Mapping[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def declared(self) -> dict[str, Any]:
        """The [records] table, as far as anything is declared."""
        return self.records.model_dump(mode="json", exclude_defaults=True)

    def without_little(self) -> "Circumstances":
        """Return them without the columns that say little."""
        kept = {k: v for k, v in self.records.columns.items() if k not in self.little}
        changed = {"columns": kept, "drop": [*self.records.drop, *self.little]}
        return replace(self, records=self.records.model_copy(update=changed), little=())


@dataclass(frozen=True)
class Alternative:
    """One way to spend the budget; snr: see theory.full_batch.signal_to_noise."""

    what: str
    weights: int
    rate: float
    sigma: float
    rounds: int
    snr: float


def recommend(asked: Circumstances, out: Path | None, *, as_json: bool) -> None:
    """Carry out `fedpact recommend`."""
    found = Recommendation.of(asked)
    if out is not None:
        write_whole(out, found.toml().encode(), private=False)
    document = {
        "configuration": found.raw,
        "reasons": found.reasons,
        "alternatives": [asdict(row) for row in found.rows],
        "fitted_on": FITTED_ON,
    }
    show(document, as_json, lambda: _print(found, out))


def declared(columns: Path | None, data: str) -> dict[str, Any]:
    """Return `records`, `little` and `task` of Circumstances. Raises PlanError: none declared."""
    given = columns or known(data)
    if given is None:
        return {}
    raw = read_configuration(given)
    if not raw.get("records"):
        raise PlanError(
            f"--columns {columns} has no table [records]: expected a configuration that declares "
            "what columns may hold, as [records.columns.age] with range = [0, 120]"
        )
    task = raw.get("task", {})
    found = {"records": Plan.parse({"records": raw["records"], "task": task}).records, "task": task}
    return found if columns else {**found, "little": KNOWN.get(data, ())}


@dataclass(frozen=True)
class Recommendation:
    """A configuration, why each of its values, and what others would give."""

    raw: dict[str, Any]
    reasons: dict[str, str]
    rows: list[Alternative]

    @classmethod
    def of(cls, asked: Circumstances) -> "Recommendation":
        """Return what suits. Raises InputError of some kind for what does not fit together."""
        of = {"data": asked.data, "label": asked.label, "site": asked.site}
        read = Plan.parse({**of, "records": asked.declared, "task": asked.task})
        data, form = loaded(read), asked.records.shared()
        _check_kind(data)
        asked = _of_sites(asked, data)
        example = read.stage().example(data.x[0])
        names = data.features or tuple(map(str, range(data.x[0].numel())))
        # What a data set says is to test by trains nobody.
        records = len(data.y) - (0 if data.held is None else int(data.held.sum()))
        public = _Public.of(asked, example, square(form, names), records, len(data.classes))
        bare = undeclared(form, names) if is_table(asked.data) and not public.features else ""
        if not public.features:
            advise(data.name, form, data.x.shape[1:], data.features, None)
        rows = public.rows(chosen := public.chosen())
        if asked.little and rows[0].snr < _NOISY:
            found = cls.of(asked.without_little())
            why = "they say little beside the others, and noise goes nearly as far as the signal"
            return replace(found, reasons={**found.reasons, "records.drop": why})
        raw, reasons = public.configuration(chosen), public.reasons(chosen)
        plan = Plan.parse(raw)
        if bare:
            whose = bare if example.ndim == 1 else "its numbers"
            reasons["privacy.clip"] += f"; of {whose} no range is declared: taken to lie in -1 .. 1"
        make_partition(data, plan.partition, plan.sites, plan.seed)
        return cls(raw, reasons, rows)

    def toml(self) -> str:
        """Return the configuration as a file, a reason beside each table."""
        return f"# {self.reasons['guarantee']}\n\n{configuration(self.raw, self.reasons)}"


@dataclass(frozen=True)
class _Public:
    """The numbers that are public before anybody trains, and what follows from them."""

    asked: Circumstances
    budget: Budget
    honest: int
    records: int
    classes: int
    example: Tensor
    features: dict[str, Any]
    square: float

    @classmethod
    def of(
        cls, asked: Circumstances, example: Tensor, square: float, records: int, classes: int
    ) -> "_Public":
        if asked.trust not in ("own", "sum"):
            raise InputError(f"--trust is {asked.trust!r}: expected own or sum")
        if asked.honest and asked.trust == "own":
            raise InputError(f"--honest is {asked.honest} with --trust own: it goes with sum")
        honest = (asked.honest or asked.sites - 1) if asked.trust == "sum" else 1
        if not 1 <= honest <= max(asked.sites - 1, 1):
            raise InputError(
                f"--honest is {honest} with --sites {asked.sites}: expected at least 2 sites and "
                "fewer honest than all, as a site that looks at a sum knows its own share"
            )
        budget = Budget(asked.epsilon, asked.delta)
        features = suited(tuple(example.shape), asked.mirror)
        square = 1.0 if features else square
        return cls(asked, budget, honest, records, classes, example, features, square)

    @property
    def shares(self) -> float:
        """K / h: how often the noise that protects is in a sum."""
        return self.asked.sites / self.honest

    @property
    def length(self) -> float:
        """About the length of a record's row."""
        return math.sqrt(self.square)

    @property
    def clip(self) -> float:
        return float(f"{_CLIP * self.length:.1g}")

    def chosen(self) -> FullBatch:
        return full_batch(
            self.budget,
            self.records,
            self.asked.sites,
            self.asked.rounds,
            weights=self._weights("logistic", self.features),
            honest=self.honest,
            clip=self.clip,
            length=self.length,
        )

    def configuration(self, chosen: FullBatch) -> dict[str, Any]:
        """Return what Plan.parse takes."""
        asked, most = self.asked, max(self.honest, self.asked.sites - self.honest)
        of_table = {"label": asked.label, "site": asked.site}
        shared = {"trust": "sum", "honest": self.honest} if asked.trust == "sum" else {}
        server = {"optimiser": "momentum", "momentum": chosen.momentum}
        return {
            "data": asked.data,
            **{k: v for k, v in of_table.items() if v is not None},
            "model": "logistic",
            "algorithm": "fedavg",
            "rounds": chosen.rounds,
            "sites": asked.sites,
            **({"partition": asked.partition} if asked.partition else {}),
            "sampling_rate": 1.0,
            **({"features": self.features} if self.features else {}),
            "logistic": self._logistic(self.features),
            "settings": {"learning_rate": float(f"{chosen.learning_rate:.3g}"), "local_steps": 1},
            **({"server": server} if chosen.momentum else {}),
            "privacy": {
                "epsilon": asked.epsilon,
                "delta": asked.delta,
                "clip": self.clip,
                **shared,
            },
            # Who looks at a sum knows one share; and 2t > K + (t - h), for no two lists of sites.
            **({"secure_aggregation": {"threshold": most + 1}} if shared else {}),
            **({"task": asked.task} if asked.task else {}),
            # Last, as it may be long.
            **({"records": asked.declared} if asked.declared else {}),
        }

    def reasons(self, chosen: FullBatch) -> dict[str, str]:
        """Return a sentence for each choice, by its key."""
        asked = self.asked
        whose = (
            f"if at least {self.honest} of the {asked.sites} sites are honest"
            if asked.trust == "sum"
            else "each site's own noise"
        )
        way = f"noise moves an answer by {chosen.noise * self.length:.2g}"
        return {
            "guarantee": f"({asked.epsilon:g}, {asked.delta:g}) per record, {ADJACENCY}, {whose}",
            "model": "signal does not grow with the number of weights, noise does",
            "rounds": f"as many as pay at this signal to noise; {way} in the end",
            "sampling_rate": "all records in every step: the largest sqrt(T) q / σ there is",
            "features.kind": "made from no record: what pays most at a given (ε, δ)",
            "features.mirror": "images that mean the same mirrored; --no-mirror if they do not",
            "logistic.start": "all classes alike: nearer to the end than any draw",
            "logistic.bias": "" if not self.features else "it would take its part of every clip",
            "settings.learning_rate": f"η, so that {way}",
            "server.momentum": "the same way in fewer rounds",
            "privacy.clip": f"C, {_CLIP:g} of a record's length: a share of its first gradient",
            "privacy.honest": "whose noise protects a sum; ε alone needs none, and is stated too",
            "secure_aggregation.threshold": "the fewest of a sum with so many honest sites",
        }

    def rows(self, chosen: FullBatch) -> list[Alternative]:
        """Return the chosen row, and others at the same budget."""
        d = self._weights("logistic", self.features)
        others = [("chosen", d, 1.0, chosen.rounds)]
        others += [(f"q = {q:g}", d, q, chosen.rounds) for q in (0.2, 0.05)]
        others += [(f"T = {t}", d, 1.0, t) for t in sorted({1, 4 * chosen.rounds})]
        if self.features:
            plain = self._weights("logistic", {})
            others.append(("logistic on the records", plain, 1.0, chosen.rounds))
        if not self.features and self.example.ndim == 1 and len(self.example) >= _MANY_COLUMNS:
            half = replace(self, example=self.example[: len(self.example) // 2])
            fewer = half._weights("logistic", {})
            others.append(("half of the columns", fewer, 1.0, chosen.rounds))
        if len(self.example.shape) == 3 and min(self.example.shape[1:]) >= 28:
            others.append(("cnn", self._weights("cnn", {}), 1.0, chosen.rounds))
        return [self._row(*other) for other in others]

    def _row(self, what: str, weights: int, rate: float, rounds: int) -> Alternative:
        sigma = smallest_sigma(self.budget, rate, rounds)
        snr = signal_to_noise(rate, sigma, rounds, self.records, self.shares, weights)
        return Alternative(what, weights, rate, sigma, rounds, snr)

    def _weights(self, model: str, features: dict[str, Any]) -> int:
        example = FeatureStage(FeatureSettings(**features), 0).example(self.example)
        settings = LogisticSettings(**self._logistic(features))
        return FlatModel(build(model, example, self.classes, 0, settings)).size

    def _logistic(self, features: dict[str, Any]) -> dict[str, Any]:
        # A bias of 1 takes as much of what a clip leaves of a row, and one-hot codes hold one.
        return {"start": "zero", "bias": False if features else 0.3}


def _check_kind(data: Dataset) -> None:
    """Raise InputError: records or labels that no model recommended here learns."""
    begin = "what is recommended is linear, of numbers and classes; begin with `fedpact plan`"
    if not data.x.is_floating_point():
        words = 'whole numbers, as words are: see model = "lstm" or "transformer"'
        raise InputError(f"records of {data.name} are {words}; {begin}")
    if data.kind != "class":
        raise InputError(f"labels of {data.name} are no classes: see [task]; {begin}")


def _of_sites(asked: Circumstances, data: Dataset) -> Circumstances:
    """Return the circumstances with a number of sites and a [partition] table.

    Data with sites of their own keep them. Raises InputError: another number of sites is asked for.
    """
    own = len(set(data.site or ()))
    if not own:
        return replace(asked, sites=asked.sites or 10)
    if asked.sites not in (0, own):
        raise InputError(
            f"--sites is {asked.sites} and {data.name} has {own} sites of its own: leave it out"
        )
    held = {} if data.held is None else {"held_out": "own"}
    return replace(asked, sites=own, partition={"kind": "natural", **held})


def _print(found: Recommendation, out: Path | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if out is None:
        console.print(found.toml(), markup=False)
    else:
        console.print(f"Written: {out}; run it with `fedpact run {out}`.")
    table = Table("", "weights", "q", "T", "σ", "signal to noise")
    for row in found.rows:
        weights, sigma, snr = f"{row.weights:,}", f"{row.sigma:.4g}", f"{row.snr:.3g}"
        table.add_row(row.what, weights, f"{row.rate:g}", f"{row.rounds}", sigma, snr)
    console.print(table)
    console.print(
        "Signal to noise: how far clipped gradients can move the model at most, over how far noise "
        "does, in the whole run: sqrt(T) q N / (σ sqrt(K/h) sqrt(d)). At q = 1 it is the same for "
        "every T; rounds and features are for what the model learns. Of the data only shape, "
        f"classes, number of records and own sites are used. The rule was fitted on {FITTED_ON}."
    )
