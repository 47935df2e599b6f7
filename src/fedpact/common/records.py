"""The record of a round, for reports: one line of a run's rounds.jsonl."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fedpact.common.format import upper

SumsBySite = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class SiteScore:
    """The global model's scores on one site's held-out records. Simulator only: not private."""

    accuracy: float
    loss: float
    records: int


@dataclass(frozen=True)
class RoundRecord:
    """The record of one round.

    round: 0 is the initial model, before any training; r >= 1 follows r rounds.
    accuracy, loss: the global model on the public test set; None if the round was not evaluated.
    metrics: on the sites' held-out records, by the names of evaluation.metrics.METRICS (Ψ is
    "psi"). scores: the same per site. average: the same for the server's average of models. All
    three are empty if the round was not evaluated. steps: τ.
    epsilon: ε spent so far by each site at its δ; empty in a plain run. epsilon_alone: the same if
    no other site's noise counts; empty if noise is not shared.
    bytes_down, bytes_up: bytes of this round's encoded messages, over all sites.
    sockets: in a deployment, bytes (to, from) sites in this round as the sockets counted them, with
    TLS and Flower's overhead; empty if not counted.
    seconds: wall-clock time of the round. simulated_seconds: by the plan's [clock].
    asked: the sites that should take part; empty: all. refused: site -> code, of these.
    numbers: of the server's state (F, τ, a loss bound), released numbers only.
    evaluation: site -> channel -> noisy sums over its held-out records, released after this round;
    empty if not asked for. unevaluated: site -> code, of sites that released none.
    held_out: the same sums, exact; simulator only.
    """

    round: int
    accuracy: float | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    scores: Mapping[str, SiteScore] = field(default_factory=dict[str, SiteScore])
    steps: int = 0
    epsilon: Mapping[str, float] = field(default_factory=dict[str, float])
    epsilon_alone: Mapping[str, float] = field(default_factory=dict[str, float])
    bytes_down: int = 0
    bytes_up: int = 0
    sockets: Sequence[int] = field(default_factory=list[int])
    seconds: float = 0.0
    simulated_seconds: float = 0.0
    asked: Sequence[str] = field(default_factory=list[str])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    average: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluation: SumsBySite = field(default_factory=dict[str, Mapping[str, Sequence[float]]])
    unevaluated: Mapping[str, str] = field(default_factory=dict[str, str])
    held_out: SumsBySite = field(default_factory=dict[str, Mapping[str, Sequence[float]]])

    def was_asked(self, site: str) -> bool:
        """Whether a site should take part in this round of training."""
        return self.round > 0 and (not self.asked or site in self.asked)

    def took_part(self, site: str) -> bool:
        """Whether a site was asked and its reply was included."""
        return self.was_asked(site) and site not in self.refused

    def replied(self, site: str) -> bool:
        """Whether a site was asked and has replied, even if its reply was not included."""
        in_vain = self.refused.get(site) in ("late", "rejected: update")
        return self.took_part(site) or (self.was_asked(site) and in_vain)

    def most_spent(self, allowed: str = "") -> str:
        """Return the largest ε of a site, rounded up, and that without other sites' noise.

        allowed: what to write after the first.
        """
        alone = max(self.epsilon_alone.values(), default=None)
        beside = "" if alone is None else f" (alone {upper(alone)})"
        return f"{upper(max(self.epsilon.values()))}{allowed}{beside}"

    def describe_average(self, kind: str) -> str:
        """Return in words which models the server averages. kind: server.average."""
        first = self.numbers.get("average/first")
        of = "the rounds' models" if first is None else f"rounds {first:.0f} to {self.round}"
        return f"{kind} average of {of}"

    def to_json(self) -> str:
        """Return the record as one line of strict JSON, with metrics at the top level."""
        scores = {name: vars(score) for name, score in self.scores.items()}
        body = {**vars(self), **self.metrics, "scores": scores}
        del body["metrics"]
        return json.dumps(strict(body), allow_nan=False)

    @staticmethod
    def from_json(line: str) -> "RoundRecord":
        """Read back a line that `to_json` wrote."""
        raw: dict[str, Any] = json.loads(line)
        names = {f.name for f in dataclasses.fields(RoundRecord)} - {"metrics"}
        known = {name: raw.pop(name) for name in names & raw.keys()}
        scored = ("accuracy", "loss")
        if known["scores"] or any(known.get(name) is not None for name in scored):
            known |= {name: _fill(known.get(name), math.nan) for name in scored}
            raw = _fill(raw, math.nan)
        for name in known.keys() & {"numbers", "average", "evaluation", "held_out", "scores"}:
            known[name] = _fill(known[name], math.nan)
        for name in known.keys() & {"epsilon", "epsilon_alone"}:
            known[name] = _fill(known[name], math.inf)  # a missing ε bounds nothing
        known["scores"] = {name: SiteScore(**score) for name, score in known["scores"].items()}
        return RoundRecord(metrics={name: float(value) for name, value in raw.items()}, **known)


def strict(value: Any) -> Any:
    """Return the value with null for NaN and infinity, which strict JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(entry) for key, entry in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [strict(entry) for entry in cast(Sequence[Any], value)]
    return value


def _fill(value: Any, missing: float) -> Any:
    """Return a JSON value with this number instead of null."""
    if isinstance(value, dict):
        entries = cast(dict[str, Any], value).items()
        return {key: _fill(entry, missing) for key, entry in entries}
    if isinstance(value, list):
        return [_fill(entry, missing) for entry in cast(list[Any], value)]
    return missing if value is None else value
