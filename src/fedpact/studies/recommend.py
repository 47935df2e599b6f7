"""Recommend a plan for a budget from public numbers only, with reasons."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from fedpact.common.configuration import write_toml
from fedpact.common.errors import InputError
from fedpact.common.params import FlatModel
from fedpact.data.advice import advise, find_undeclared, square
from fedpact.data.features.extract import FeatureStage
from fedpact.data.features.kinds import FeatureSettings, suggest_features
from fedpact.models.build import build
from fedpact.models.zoo import LogisticSettings
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import ADJACENCY
from fedpact.privacy.accounting.planner import (
    NOISE,
    TABLE_NOISE,
    FullBatch,
    full_batch,
    signal_to_noise,
)
from fedpact.privacy.column_scales import advise_of_loud
from fedpact.privacy.settings import Privacy
from fedpact.privacy.terms import delta_too_large
from fedpact.simulation.setup import describe_undeclared_classes, is_table, load_data
from fedpact.studies.circumstances import Circumstances, SiteNoise, check_kind, sizes_of, with_sites

# Relative to the gradient's length at the zero model, which is about that of the row.
_CLIP: Final = 0.2
_BIAS: Final = 0.3  # for rows up to a length of _USUAL, as of the hospitals' table
_USUAL: Final = 6.0
_BIAS_SHARE: Final = 0.1  # of a longer record's length


def heaviest(document: Mapping[str, Any]) -> float:
    """Return the factor of the largest class weight on a gradient's length, at least 1."""
    return max(1.0, *(document.get("task", {}).get("class_weights") or ()), 1.0)


_logger = logging.getLogger("fedpact")

FITTED_ON: Final = (
    "the digits (1,442 images of 8 x 8) at ε = 0.5, 2, 8 and 32; beside it, figures of records set "
    "aside of three image sets had been seen, and the bias and the columns of tables are those of "
    "the hospitals' heart disease; what counts of a text was chosen on Python's manual"
)
_LONGEST: Final = 1e12
# Below this signal-to-noise ratio, a column that adds little costs more than it brings.
_NOISY: Final = 5.0


@dataclass(frozen=True)
class Recommendation:
    """A configuration, the reasons for its values, and rows of ways to spend the budget.

    snr of a row: see privacy.accounting.planner.signal_to_noise.
    """

    raw: dict[str, Any]
    reasons: dict[str, str]
    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, asked: Circumstances) -> "Recommendation":
        """Return the recommendation. Raises InputError: the circumstances do not fit together."""
        data, form = load_data(Plan.parse(asked.document)), asked.records.shared()
        check_kind(data, form.vocabulary)
        asked = with_sites(asked, data)
        read = Plan.parse({**asked.document, "sites": asked.sites})
        example = read.stage().example(data.x[0])
        names = data.features or tuple(map(str, range(data.x[0].numel())))
        sizes = sizes_of(asked, data, read)
        public = _Public.of(asked, example, square(form, names), sizes, len(data.classes))
        numbers = not (public.features or public.words)
        bare = find_undeclared(form, names) if is_table(asked.data) and numbers else ""
        if numbers:
            advise(data.name, form, data.x.shape[1:], data.features, None)
        rows = public.rows(chosen := public.chosen())
        if asked.little and rows[0]["snr"] < _NOISY:
            found = cls.of(asked.without_little())
            why = "they say little beside the others, and noise goes nearly as far as the signal"
            return replace(found, reasons={**found.reasons, "records.drop": why})
        raw, reasons = public.configuration(chosen), public.reasons(chosen)
        if (snr := rows[0]["snr"]) < 1:
            far = f"noise goes {1 / snr:.2g} times as far as all records together can"
            ways = ["a larger ε or δ", "more records", *["fewer columns"] * numbers]
            ways += ["--trust sum"] * (public.honest == 1 and asked.sites > 2)
            reasons["rounds"] = f"the fewest: {far}"
            _logger.warning(
                "%s: %s: expected the opposite, ten times; what is trained may be little better "
                "than a guess. What would help: %s",
                *(data.name, far, ", ".join(ways)),
            )
        advise_of_loud(data.name, public.noise.releases)
        if told := delta_too_large(
            zip((b.delta for b in asked.budgets), sizes.values(), strict=True)
        ):
            _logger.warning("%s: %s", data.name, told)
        if told := describe_undeclared_classes(read, data):
            _logger.warning("%s: %s", data.name, told)
            raw["records"] = {**raw.get("records", {}), "classes": list(data.classes)}
            reasons["records.classes"] = "found in the labels, and public from here on: see to them"
        Plan.parse(raw)
        if bare:
            whose = bare if example.ndim == 1 else "its numbers"
            told = f"of {whose} no range is declared: taken to lie in -1 .. 1"
            reasons["privacy.clip"] += f"; {told}"
            look = "`fedpact plan` of what is written here looks at them, and says what to declare"
            _logger.warning("%s: %s; %s", data.name, told, look)
        return cls(raw, reasons, rows)

    def toml(self) -> str:
        """Return the configuration as TOML with the reasons as comments."""
        return f"# {self.reasons['guarantee']}\n\n{write_toml(self.raw, self.reasons)}"


@dataclass(frozen=True)
class _Public:
    """The numbers that are public before training, and what follows from them."""

    asked: Circumstances
    honest: int
    classes: int
    example: Tensor
    features: dict[str, Any]
    noise: SiteNoise
    length: float  # about that of a record's row
    names: tuple[str, ...]  # of the sites

    @classmethod
    def of(
        cls,
        asked: Circumstances,
        example: Tensor,
        square: float,
        sizes: Mapping[str, float],
        classes: int,
    ) -> "_Public":
        if asked.trust not in ("own", "sum"):
            raise InputError(f"--trust is {asked.trust!r}: expected own or sum")
        if asked.honest and asked.trust == "own":
            raise InputError(f"--honest is {asked.honest} with --trust own: it goes with sum")
        honest = (asked.honest or asked.sites - 1) if asked.trust == "sum" else 1
        if not 1 <= honest <= max(asked.sites - 1, 1):
            raise InputError(
                f"--trust sum of {asked.sites} sites, {honest} of them honest: expected at least 2 "
                "sites, and an --honest from 1 to one less, as a site that looks at a sum knows "
                "its own share"
            )
        features = suggest_features(tuple(example.shape), asked.mirror) if asked.features else {}
        length = 1.0 if features or not example.is_floating_point() else math.sqrt(square)
        if not 0 < length <= _LONGEST:
            raise InputError(
                f"columns as they are declared make records about {length:.3g} long: expected "
                f"between 0 and {_LONGEST:g}; declare the ranges that their numbers do have, or "
                'scale = "range" ([records])'
            )
        granted = Privacy(**asked.granted)
        sites = tuple(map(str, range(asked.sites)))
        released = asked.records.released
        columns = tuple(granted.release_of(released, site, sites, 1) for site in sites)
        noise = SiteNoise(
            asked.budgets,
            tuple(sizes.values()),
            columns,
            clip=float(f"{_CLIP * length * heaviest(asked.document):.1g}"),
            shared=asked.trust == "sum",
            # What is declared stands for sites whose records nobody deals out.
            dealt=asked.size is None and asked.partition.get("kind", "iid") == "iid",
        )
        return cls(asked, honest, classes, example, features, noise, length, tuple(sizes))

    @property
    def shares(self) -> float:
        """K / h: the factor of a sum's noise over the noise that protects."""
        return self.asked.sites / self.honest

    @property
    def records(self) -> int:
        """N, of all sites."""
        return round(sum(self.noise.sizes))

    @property
    def words(self) -> bool:
        """Whether a record is words of a text, or characters."""
        return not self.example.is_floating_point()

    @property
    def model(self) -> str:
        return "ngram" if self.words else "logistic"

    def chosen(self) -> FullBatch:
        weights = self._weights(self.model, self.features)
        return full_batch(
            lambda rounds: self.noise.sigma(1.0, rounds, weights),
            *(self.records, self.shares, self.asked.rounds),
            weights=weights,
            clip=self.noise.clip,
            length=self.length,
            noise=NOISE if self.features or self.words else TABLE_NOISE,
        )

    def configuration(self, chosen: FullBatch) -> dict[str, Any]:
        """Return what Plan.parse takes."""
        asked, most = self.asked, max(self.honest, self.asked.sites - self.honest)
        shared = {"trust": "sum", "honest": self.honest} if asked.trust == "sum" else {}
        server = {"optimiser": "momentum", "momentum": chosen.momentum}
        given, suits = asked.document, self.noise.settings(chosen.rounds)
        rate = {"learning_rate": float(f"{chosen.learning_rate:.3g}")}
        records = {"records": given.pop("records")} if "records" in given else {}
        return {
            **given,
            "model": self.model,
            "algorithm": suits["algorithm"],
            "rounds": chosen.rounds,
            "sites": asked.sites,
            "sampling_rate": 1.0,
            **({"features": self.features} if self.features else {}),
            **({} if self.words else {"logistic": self._logistic(self.features)}),
            "settings": {**rate, **suits["settings"]},
            **({"server": server} if chosen.momentum else {}),
            "privacy": {
                **asked.granted,
                "clip": self.noise.clip,
                **shared,
            },
            # Who looks at a sum knows one share; and 2t > K + (t - h), for no two lists of sites.
            **({"secure_aggregation": {"threshold": most + 1}} if shared else {}),
            **records,
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
        pay = "pay at this signal to noise"
        if chosen.rounds < chosen.useful:
            pay = f"were allowed; {chosen.useful} would {pay}"
        weight = " and the largest class weight" * (heaviest(asked.document) > 1)
        clip = f"C, {_CLIP:g} of a record's length{weight}: a share of its first gradient"
        bias = f"its input: {_BIAS:g}, or of records longer than {_USUAL:g} a tenth of that"
        return {
            "guarantee": f"{asked.guarantee} per record, {ADJACENCY}, {whose}",
            "model": "signal does not grow with the number of weights, noise does",
            "rounds": f"as many as {pay}; {way} in the end",
            "sampling_rate": "all records in every step: the largest sqrt(T) q / σ there is",
            "features.kind": (
                "made from no record: of images of things and digits what pays most, whatever the "
                "table's ratios; --no-features where images are of another kind"
            ),
            "features.mirror": "images that mean the same mirrored; --no-mirror if they do not",
            "logistic.start": "all classes alike: nearer to the end than any draw",
            "logistic.bias": "it would take its part of every clip" if self.features else bias,
            "settings.learning_rate": f"η, so that {way}: N = {self.records:,}",
            "server.momentum": "the same way in fewer rounds",
            "privacy.epsilon": self._whose(),
            **self._explain_noise(),
            "privacy.clip": clip,
            "privacy.honest": "whose noise protects a sum; ε alone needs none, and is stated too",
            "secure_aggregation.threshold": "the fewest of a sum with so many honest sites",
        }

    def _whose(self) -> str:
        """Return each site's budget in words; "" if they are equal."""
        of = self.asked.budgets
        if len(set(of)) == 1:
            return ""
        unlike = len({one.delta for one in of}) > 1
        told = [f"({one.epsilon:g}, {one.delta:g})" if unlike else f"{one.epsilon:g}" for one in of]
        return ", ".join(f"{site} {one}" for site, one in zip(self.names, told, strict=True))

    def _explain_noise(self) -> dict[str, str]:
        """Return the reasons for the algorithm with different budgets."""
        if len(set(self.asked.budgets)) == 1:
            return {}
        if not self.noise.weighed:
            return {"algorithm": "all sites add the noise of the most careful one"}
        bias = "dealt at random, records differ from site to site by chance alone"
        if not self.noise.dealt:
            bias = "as far as sites can be apart, so that none is passed over; less counts on noise"
        return {
            "algorithm": "sites of unlike budgets count by their noise, careful ones less",
            "settings.bias_penalty": bias,
        }

    def rows(self, chosen: FullBatch) -> list[dict[str, Any]]:
        """Return the chosen row and alternatives with the same budget."""
        d = self._weights(self.model, self.features)
        others = [("chosen", d, 1.0, chosen.rounds)]
        others += [(f"q = {q:g}", d, q, chosen.rounds) for q in (0.2, 0.05)]
        others += [(f"T = {t}", d, 1.0, t) for t in sorted({1, 4 * chosen.rounds})]
        if self.features:
            plain = self._weights("logistic", {})
            others.append(("logistic on the records", plain, 1.0, chosen.rounds))
        found = list[dict[str, Any]]()
        for what, weights, rate, rounds in others:
            sigma = self.noise.sigma(rate, rounds, weights)
            snr = signal_to_noise(rate, sigma, rounds, self.records, self.shares, weights)
            row = {"what": what, "weights": weights, "rate": rate, "sigma": sigma}
            found.append({**row, "rounds": rounds, "snr": snr})
        return found

    def _weights(self, model: str, features: dict[str, Any]) -> int:
        example = FeatureStage(FeatureSettings(**features), 0).example(self.example)
        settings = LogisticSettings(**self._logistic(features))
        return FlatModel(build(model, example, self.classes, 0, settings)).size

    def _logistic(self, features: dict[str, Any]) -> dict[str, Any]:
        # A bias input of 1 would take up as much of the clip as a one-hot code. With long rows, a
        # tenth of their length is needed to learn the classes' frequencies.
        longer = self.length > _USUAL
        bias = min(1000.0, float(f"{_BIAS_SHARE * self.length:.1g}")) if longer else _BIAS
        return {"start": "zero", "bias": False if features else bias}
