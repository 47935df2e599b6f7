"""The target of an audit: a plan's oracle with a canary, and the attacker's views.

sum     the opened sum: this site's share and those of h - 1 others, against ε
alone   this site's share when all others are known, against the ε that trusts no other

Everything else in a sum is known, and the same with and without the record. If each site adds its
own noise, there is one view, of what the site sends.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor

from fedpact.algorithms.wrappers.released_scales import check_as_declared
from fedpact.common.errors import InputError, PlanError
from fedpact.common.messages import Reply, State, Task
from fedpact.common.randomness.seeded import Draws, SeededDraws, seeded_generator
from fedpact.per_sample.clipping import UNIFORM, Fair, Uniform, Weighting
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import epsilon
from fedpact.privacy.batches import Kernel
from fedpact.privacy.oracle import Oracle, OracleWrapper, PrivateOracle, Records
from fedpact.privacy.terms import Terms
from fedpact.simulation.setup import SimulationSetup

_VISITS = 5  # records of a canary person

MakeOracle = Callable[[Records, Kernel, Terms, Draws], Oracle]


def private_oracle(
    records: Records,
    kernel: Kernel,
    terms: Terms,
    draws: Draws,
    of: type[PrivateOracle] = PrivateOracle,
) -> PrivateOracle:
    """Return the oracle that a run would give the algorithm; it charges no ledger."""
    # Passes are as long as a simulated run's.
    return of(records, kernel, terms, draws, lambda *_: None, placement="compact")


@dataclass(frozen=True)
class Target:
    """One site as a run would set it up. make: makes its oracle; tests pass a broken one.

    records: the site's. spare: other sites' records, from which canaries are made. w: the initial
    model. canary_records: the number of equal records of a canary, 1 unless persons are protected.
    """

    plan: Plan
    terms: Terms
    records: Records
    spare: Records
    classes: int
    kernel: Kernel
    w: Tensor
    make: MakeOracle = private_oracle
    canary_records: int = 1

    @staticmethod
    def of(scene: SimulationSetup, site: str | None = None) -> "Target":
        """Return the named site, or the first of those that release most often.

        Raises InputError: no such site, or it releases nothing. PlanError: a plain run.
        """
        if not scene.plan.private:
            raise PlanError(
                f"{scene.plan.why_unprotected}: it claims no ε that an audit could contradict"
            )
        check_as_declared(scene.plan.method)
        scene.plan.task.check_plain("an audit")
        sites = {s.name: s for s in scene.sites}
        name = max(sites, key=lambda name: scene.terms[name].steps) if site is None else site
        if name not in sites:
            raise InputError(f"site is {name!r}: expected one of {', '.join(sites)}")
        if not scene.terms[name].steps:
            raise InputError(
                f"site {name!r} releases nothing in this run, as it is drawn in no round: there is "
                "nothing to attack"
            )
        others = [s for s in scene.sites if s.name != name] or scene.sites
        spare = Records(torch.cat([s.x for s in others]), torch.cat([s.y for s in others]))
        kernel, privacy = scene.workshop.bench().private, scene.plan.privacy
        of_persons = privacy.unit == "person"
        return Target(
            plan=scene.plan,
            terms=scene.terms[name],
            records=Records(
                *(sites[name].x, sites[name].y),
                persons=sites[name].persons if of_persons else None,
            ),
            spare=spare,
            classes=len(scene.dataset.classes),
            kernel=kernel,
            w=kernel.model.vector.clone(),
            canary_records=(privacy.person_records or _VISITS) if of_persons else 1,
        )

    def at(self, round_number: int) -> "Target":
        """Return the target in a round, counted from 1; a clip schedule depends on it."""
        return replace(self, terms=self.terms.at(round_number))

    def oracle(self, records: Records, draws: Draws) -> Oracle:
        """Return the oracle under audit, over these records."""
        return self.make(records, self.kernel, self.terms, draws)

    def answer(
        self,
        records: Records,
        channel: str,
        query: tuple[Any, ...],
        terms: Terms | None = None,
        size: float = 1.0,
    ) -> Tensor:
        """Return what these records add to a channel's sum over `size`, without noise: [d] or [1].

        terms: of the request, by default those of the batches. size: the expected size of a batch,
        on which the clip's margin for rounding depends. This is the attacker's own computation, so
        it never uses the oracle under audit.
        """
        own = silence(terms or self.terms, size)
        oracle = private_oracle(records, self.kernel, own, SeededDraws(0))
        batch = next(iter(oracle.batches(1, channel)))
        return torch.as_tensor(getattr(batch, channel)(*query)).reshape(-1)

    def claimed(self, events: int, delta: float, openings: int = 0) -> float:
        """Return the ε at δ that the accountant states for these numbers of events and openings."""
        history = Counter({self.terms.event: events})
        history[self.terms.opening.event] += openings
        return epsilon(history, delta, self.terms.accountant)

    @property
    def no_records(self) -> Records:
        """The records of a site without records."""
        persons = self.records.persons
        return Records(
            self.records.x[:0], self.records.y[:0], persons=None if persons is None else persons[:0]
        )

    @property
    def rounds(self) -> int:
        """The number of rounds that the site's events allow."""
        each = self.plan.method.steps()
        return max(1, min(self.plan.rounds, self.terms.steps // each))


def silence(terms: Terms, size: float) -> Terms:
    """Return terms with all records in a batch, without noise. size: the expected batch size."""
    return replace(
        terms,
        rate=1.0,
        size=size,
        sigmas=dict.fromkeys(terms.sigmas, 0.0),
        opening_rate=1.0,
        opening_sigmas=dict.fromkeys(terms.opening_sigmas, 0.0),
    )


def bound_of(channel: str, query: tuple[Any, ...], terms: Terms) -> float:
    """Return a channel's bound: C, 1/2 for a count, else the last argument of the query."""
    fixed = {"gradient": terms.clip, "below": 0.5}
    return fixed[channel] if channel in fixed else float(query[-1])


@dataclass(frozen=True)
class Asked:
    """One query of the algorithm to its oracle. batch: the batch's number in the request.

    terms: of the site's batches, or of the event that opens a round (`opening`).
    """

    batch: int
    channel: str
    query: tuple[Any, ...]
    answer: Tensor
    terms: Terms
    opening: bool = False

    @property
    def weighting(self) -> Weighting:
        """The weighting of a gradient's records."""
        return next((part for part in self.query if isinstance(part, Fair | Uniform)), UNIFORM)


class Recorder(OracleWrapper):
    """An oracle that records queries and answers."""

    def __init__(self, inner: Oracle, terms: Terms) -> None:
        super().__init__(inner)
        self._terms, self.asked, self._opened = terms, list[Asked](), count()

    def opening(self, *channels: str) -> Any:
        """Return the batch that opens a round, see Oracle.opening."""
        batch = self._inner.opening(*channels)
        return _RecordingBatch(batch, self.asked, next(self._opened), self._terms.opening, True)

    def batches(self, count: int, *channels: str) -> Iterator[Any]:
        """Yield `count` batches that answer these channels, see Oracle.batches."""
        for batch in self._inner.batches(count, *channels):
            yield _RecordingBatch(batch, self.asked, next(self._opened), self._terms, False)


class _RecordingBatch:
    def __init__(
        self, inner: Any, asked: list[Asked], number: int, terms: Terms, opening: bool
    ) -> None:
        self._inner, self._asked, self.noise_variance = inner, asked, inner.noise_variance
        self._number, self._terms, self._opening = number, terms, opening

    def __getattr__(self, channel: str) -> Callable[..., Any]:
        def ask(*query: Any) -> Any:
            # Copied, since algorithms overwrite their vectors.
            kept = tuple(q.clone() if isinstance(q, Tensor) else q for q in query)
            answer = getattr(self._inner, channel)(*query)
            flat = torch.as_tensor(answer).reshape(-1).clone()
            asked = Asked(self._number, channel, kept, flat, self._terms, self._opening)
            self._asked.append(asked)
            return answer

        return ask


def simulate_rounds(
    target: Target, records: Records, rounds: int, *key: str | int
) -> Iterator[list[Asked]]:
    """Yield the algorithm's queries in each round of a federation with this site only.

    key: distinguishes the random draws of this simulation from others.
    """
    plan, method, name = target.plan, target.plan.method, target.terms.site
    state, memory = method.init(target.w.clone()), State()
    for number in range(1, rounds + 1):
        told = method.task(state)
        task = Task("audit", number, plan.algorithm, told.vectors, told.numbers, number - 1)
        draws = SeededDraws(plan.seed, "audit", *key, number)
        now = target.at(number)
        recorder = Recorder(now.oracle(records, draws), now.terms)
        local = method.local(task, recorder, memory)
        memory = local.memory
        reply = Reply("audit", number, name, target.terms.size, local.vectors, local.numbers)
        state = method.update(state, iter([reply]))
        yield recorder.asked


def draw_mislabelled(target: Target, number: int) -> Records:
    """Return canaries: spare records, each with a wrong label. Deterministic in the plan's seed.

    With replacement if there are fewer spare records.
    """
    generator = seeded_generator(target.plan.seed, "audit", "canaries")
    spare = target.spare
    if number <= len(spare.y):
        chosen = torch.randperm(len(spare.y), generator=generator)[:number]
    else:
        chosen = torch.randint(len(spare.y), (number,), generator=generator)
    shift = torch.randint(1, max(2, target.classes), spare.y[chosen].shape, generator=generator)
    return Records(spare.x[chosen], (spare.y[chosen] + shift) % target.classes)


Drawn = Callable[[Draws], Draws]


def list_views(target: Target, drawn: Drawn = lambda draws: draws) -> Mapping[str, Target]:
    """Return the views to attack, by name; only "", the target itself, if no noise is shared.

    drawn: replaces a site's draws, for tests.
    """
    if not target.terms.shares_noise:
        return {"": target}

    def view(shares: int) -> Target:
        def make(records: Records, kernel: Kernel, terms: Terms, draws: Draws) -> Oracle:
            sigmas = {name: sigma / math.sqrt(shares) for name, sigma in terms.sigmas.items()}
            together = cast(Draws, _Together(drawn(draws), shares))
            return private_oracle(
                records, kernel, replace(terms, sigmas=sigmas), together, _Attacked
            )

        # As one share, so that the accounted noise is the noise in the view.
        return replace(target, terms=target.terms.as_one_share(shares), make=make)

    return {"sum": view(target.terms.shares), "alone": view(1)}


class _Attacked(PrivateOracle):
    """An oracle whose events stand for many rounds, each with its own release."""

    def _share(
        self, total: Tensor, sigma: float, bound: float, purpose: str, *, step: int
    ) -> Tensor:
        self.shares.clear()
        return super()._share(total, sigma, bound, purpose, step=step)


class _Together:
    """Draws of all sites: a share is the sum of `shares` shares, all but one of empty sites."""

    repeats = True

    def __init__(self, own: Draws, shares: int) -> None:
        self._own, self._shares = own, shares

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def share(self, total: Tensor, unit: float, units: float, step: int, purpose: str) -> Tensor:
        found, nothing = self._own.share(total, unit, units, step, purpose), torch.zeros_like(total)
        for k in range(1, self._shares):
            found = found + self._own.share(nothing, unit, units, step, f"{purpose} of share {k}")
        return found
