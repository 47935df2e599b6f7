"""What a ledger leaves of a budget for one more run on the same records.

    apart    The new run may cost (ε - Σ ε_i, δ - Σ δ_i), with what each earlier run reserved. This
             holds whatever the new run's q, σ and steps were chosen from (basic composition).
    joint    The events that earlier runs reserved and the new run's are one sequence at δ, which
             costs less. It is a proof only where that sequence was fixed: every earlier run
             reserved fixed events, and nothing of the new run follows from what they released.

Reserved counts, not spent ones: how far a run went may have followed from what it released.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpact.errors import BudgetExhausted, InputError
from fedpact.ledger.receipt import receipt
from fedpact.theory.accounting import Budget, History, SampledGaussian


@dataclass(frozen=True)
class Remaining:
    """What is left. budget: of the new run, together with `spent`, the events that share it.

    epsilon_reserved, delta_reserved: sums over the earlier runs, `runs` of them. honest: of how
    many sites of each sum they need the noise, 0 for none. unit: whom these ε are of.
    """

    site: str
    runs: int
    epsilon_reserved: float
    delta_reserved: float
    budget: Budget
    spent: History
    honest: int = 0
    unit: str = "record"


def remaining(path: Path, whole: Budget, *, joint: bool = False) -> Remaining:
    """Return what a ledger leaves of the budget `whole`, which all runs on its records share.

    Raises LedgerError: no ledger, or an altered one. BudgetExhausted: nothing is left. InputError:
    joint, with a run whose noise was shared.
    """
    told = receipt(path)
    runs = told["runs"].values()
    unit = next((run["unit"] for run in runs), "record")
    epsilon, delta = told["epsilon_reserved"], told["delta_reserved"]
    honest = max((run["honest"] for run in runs), default=0)
    if joint and honest:
        raise InputError(
            f"--joint with ledger {path}: an earlier run has the noise of {honest} sites together, "
            "and one sequence of its events and others' would rest on them; leave --joint out"
        )
    if not math.isfinite(epsilon):
        raise BudgetExhausted(
            f"ledger {path} has a run that let exact numbers out: no ε bounds what is known of its "
            "records, and nothing is left for another run"
        )
    if joint:
        return Remaining(told["site"], len(runs), epsilon, delta, whole, _events(told), unit=unit)
    left = _rest(whole.epsilon, epsilon), _rest(whole.delta, delta)
    if not min(left) > 0:
        raise BudgetExhausted(
            f"ledger {path} has reserved (ε, δ) = ({epsilon:g}, {delta:g}) for {len(runs)} runs, "
            f"{told['adjacency']}: of ({whole.epsilon:g}, {whole.delta:g}) nothing is left for "
            "one more; raise the budget's ε and δ, both, or ask for --joint where all events were "
            "fixed"
        )
    return Remaining(told["site"], len(runs), epsilon, delta, Budget(*left), {}, honest, unit)


def _rest(whole: float, spent: float) -> float:
    """Return the largest number that added to `spent` is at most `whole`, in floating point too."""
    left = whole - spent
    while left > 0 and spent + left > whole:
        left = math.nextafter(left, 0.0)
    return left


def _events(told: dict[str, Any]) -> History:
    events = Counter[SampledGaussian]()
    for run in told["runs"].values():
        for event in run["events"]:
            events[SampledGaussian(event["q"], event["sigma"])] += event["reserved"]
    return events
