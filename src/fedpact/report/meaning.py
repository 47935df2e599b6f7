"""The meaning of a run's (ε, δ), in plain words."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fedpact.common.format import count_noun, lower, upper
from fedpact.privacy.accounting.accountant import ACCOUNTANTS, add_budgets
from fedpact.privacy.guarantee import Guarantee
from fedpact.report.compared_runs import Comparison, Entry
from fedpact.report.run_summary import RunSummary, largest_epsilon

QUESTION: Final = (
    "An attacker knows all other records of a site and sees everything that it ever sent. A coin "
    "flip decided whether {whom} there. If they must guess, their odds of being right and their "
    "chance of it are at most these. A blind guess has 1 : 1 and 50\u00a0%."
)
_MOST: Final = 1000.0
_NOTES: Final = (
    "ε is an upper bound for the whole run, at the site where it is largest; odds are "
    "(e^ε + δ) : (1 - δ)",
    "δ is the probability that the guarantee may fail: it should be far below 1/N",
)


@dataclass(frozen=True)
class OddsStatement:
    """ε of a record or person, and an attacker's odds. little: whether it hardly protects."""

    who: str
    epsilon: str
    odds: str
    right: str
    little: bool


@dataclass(frozen=True)
class Meaning:
    """The panel on the first screen: a question, its answers, and notes."""

    question: str
    stakes: list[OddsStatement]
    notes: list[str]


def stake(who: str, epsilon: float, delta: float) -> OddsStatement:
    """Return an attacker's odds and chance under ε, each rounded up.

    >>> stake("one record", 2.0, 1e-5).odds, stake("one record", 2.0, 1e-5).right
    ('7.4 : 1', '88.1 %')
    >>> stake("one record", 9.0, 1e-5).odds
    'over 1,000 : 1'
    """
    if not math.isfinite(epsilon):
        return OddsStatement(who, upper(epsilon), "no limit", "100 %", True)
    # The best odds of a guess whether a record was there; see docs/notes/proofs.md. e^700 is close
    # to the largest float.
    wins = (math.exp(min(epsilon, 700.0)) + delta) / (1 - delta)
    little = wins > _MOST
    # Rounded up to a tenth, as bounds are.
    tenths = math.ceil(1000 / (1 + 1 / wins) - 1e-9)
    return OddsStatement(
        who,
        upper(epsilon),
        f"over {_MOST:,.0f} : 1" if little else f"{float(upper(wins, digits=2)):g} : 1",
        "over 99.9 %" if little else f"{tenths / 10:g} %",
        little,
    )


def explain_run(run: RunSummary) -> Meaning | None:
    """Return the meaning of a run's guarantee; None for a plain run."""
    if not run.private:
        return None
    size = max(site.size for site in run.site_privacy.values())
    delta = run.training.delta
    here = f"{_NOTES[1]}. Here δ is {upper(delta)}, and 1/N at least {lower(1 / size, digits=2)}"
    return Meaning(_question([run]), list(_stakes(run)), [_NOTES[0], here, *_accounting(run)])


def explain_comparison(comparison: Comparison) -> Meaning | None:
    """Return the meaning of the guarantees of a comparison's entries; None if all are plain."""
    runs = [run for run in comparison.runs if run.private]
    if not runs:
        return None
    found: dict[OddsStatement, list[Entry]] = {}
    for entry in comparison.entries:
        for each in _both("", entry.spent) if entry.spent else ():
            found.setdefault(each, []).append(entry)
    stakes = [replace(each, who=comparison.describe(of) + each.who) for each, of in found.items()]
    notes = dict.fromkeys(line for run in runs for line in _accounting(run))
    return Meaning(_question(runs), stakes, [*_NOTES, *notes])


def _both(who: str, of: Guarantee) -> Iterable[OddsStatement]:
    """Yield the odds, and if ε assumes the noise of other sites, also the odds without."""
    for condition, epsilon in of.cases:
        yield stake(f"{who}{condition}", epsilon, of.delta)


def _question(runs: Sequence[RunSummary]) -> str:
    units = dict.fromkeys(str(run.privacy["unit"]) for run in runs)
    whom = {"record": "a certain record was", "person": "a certain person, with all records, was"}
    return QUESTION.format(
        whom=" (or: ".join(whom[unit] for unit in units) + ")" * (len(units) - 1)
    )


def _stakes(run: RunSummary) -> Iterable[OddsStatement]:
    sites, training, held = run.privacy["sites"], run.training, run.privacy.get("evaluation")
    one = "one person, all records" if run.privacy["unit"] == "person" else "one record"
    yield from _both(one, training)
    for k in next(iter(sites.values())).get("epsilon_per_person") or {}:
        who, cost = f"person, {count_noun(int(k), 'record')}", _of_person(sites.values(), k)
        delta = training.delta
        if held:
            # Records of a person that are split one by one may be on both sides.
            join = max if held["split_by"] == "person" else add_budgets
            cost, delta = join([cost, _of_person([held], k)]), join([delta, float(held["delta"])])
            who += f", trained on or held out, at δ = {upper(delta)}"
        yield stake(who + training.cases[0][0], cost, delta)
    if held:
        told = f"{held['unit']} held out for evaluation"
        yield stake(told, float(held["epsilon_reserved"]), float(held["delta"]))


def _of_person(stated: Iterable[Mapping[str, Any]], k: str) -> float:
    """Return the largest ε stated for a person with k records."""
    # JSON has no infinity: an ε without a finite bound is null.
    return largest_epsilon(one["epsilon_per_person"][k] for one in stated)


def _accounting(run: RunSummary) -> Iterable[str]:
    privacy = run.privacy
    about = ACCOUNTANTS.get(str(privacy["accountant"]))
    yield f"Accountant {about.told if about else privacy['accountant']}"
    if "accounting" in privacy:
        reason = str(privacy["accounting_reason"]).rstrip(".")
        yield f"Accounting by a {privacy['accounting']}: {reason}"
