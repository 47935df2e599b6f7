"""More rounds on a run that has ended: a reservation of its own, after those that the run had.

earlier.json, in the run's folder, holds what was promised and spent before: whoever extends a run
has seen what it released, so its reservations add up by basic composition, ε and δ both, and no
event of the first can be used for the second. The rounds go on in number, so no draw comes again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from fedpact.common.check import count
from fedpact.common.errors import PlanError
from fedpact.common.format import upper
from fedpact.common.messages import RoundRecord
from fedpact.common.run_folder import EARLIER, FIRST_PLAN, Checkpoint, Folder, read_earlier
from fedpact.plan import Plan, read_extension
from fedpact.privacy.accounting.accountant import History, add_budgets
from fedpact.privacy.ledger.reservations import EACH_FIXED, WHY_EXTENDED, next_name
from fedpact.privacy.terms import Terms
from fedpact.simulation.statement import per_person

_ADDED: Final = ("epsilon", "delta", "epsilon_reserved")
_OWN: Final = (*_ADDED, "steps", "rate", "clip", "sigmas", "multipliers", "sigma_joint", "opening")


@dataclass(frozen=True)
class PreviousReservations:
    """What a run had before its last reservation. runs: their names in ledgers, in order.

    sites: of each site what its statement says of all of them together. spent: ε of each.
    told: what was said of each reservation, in words. more: what the extensions among them asked.
    """

    runs: tuple[str, ...] = ()
    sites: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    told: tuple[str, ...] = ()
    more: tuple[Mapping[str, Any], ...] = ()

    @staticmethod
    def read(folder: Folder) -> "PreviousReservations":
        """Return what a run's folder holds of it. Raises DataError: damaged, or lost."""
        return PreviousReservations(**read_earlier(folder))

    def delta(self, site: str) -> float:
        """Return the sum of the δ of a site's earlier reservations."""
        return float(self.sites.get(site, {}).get("delta", 0.0))

    def loudest(self, terms: Mapping[str, Terms]) -> dict[str, Terms]:
        """Return terms with the most noise that any reservation had, for privacy.reply_bounds
        alone.

        A reply may hold what an earlier round's noise left at its site, as FedDyn's h_i does.
        """
        found = dict(terms)
        for name in found.keys() & self.sites.keys():
            each = [terms[name].sigmas, *(part["sigmas"] for part in _parts(self.sites[name]))]
            most = {c: max(sigmas.get(c, 0.0) for sigmas in each) for c in terms[name].sigmas}
            found[name] = replace(terms[name], sigmas=most)
        return found

    def over(self, said: dict[str, Any], run: str, plan: Plan) -> dict[str, Any]:
        """Return a statement of the last reservation as one of the whole run."""
        if not self.runs:
            return said
        told = [*self.told, _told(run, plan.after, plan.rounds, said["sites"])]
        if not plan.private:
            return {**said, "reservations": told}
        sites = {name: _sum(each, self.sites[name]) for name, each in said["sites"].items()}
        line = (
            f"The run was extended: {'; '.join(told)}. Each is a reservation of its own in every "
            "site's ledger, made after what came before was seen; together they cost the sums of "
            "their ε and of their δ, which is what is stated here."
        )
        return {
            **said,
            "accounting": EACH_FIXED,
            "accounting_reason": WHY_EXTENDED,
            "sites": sites,
            "per_person": per_person(sites, plan.privacy.unit, None),
            "covers": [*said["covers"], line],
            "reservations": told,
        }


def with_epsilon(
    record: RoundRecord,
    terms: Mapping[str, Terms],
    spent: Mapping[str, History],
    earlier: Mapping[str, float],
) -> RoundRecord:
    """Return a round's record with each site's ε so far, from the events that it was charged.

    earlier: ε of reservations before this one, where the run was extended.
    """
    now = {name: terms[name].epsilon_after(events) for name, events in spent.items()}
    return replace(
        record,
        epsilon={name: each + earlier.get(name, 0.0) for name, each in now.items()},
        epsilon_alone={
            name: terms[name].epsilon_alone_after(events)
            for name, events in spent.items()
            if terms[name].honest
        },
    )


def check_begun(plan: Plan, at: Checkpoint) -> None:
    """Raise PlanError: the plan's first rounds are another reservation's, and were never done."""
    if at.round < plan.after:
        raise PlanError(
            f"after is {plan.after}, and {at.round} rounds are done: `fedpact extend` writes it "
            "for a run that has ended; leave it out of a new one"
        )


def extend_plan(folder: Folder, rounds: int, budget: float | None) -> Plan:
    """Return the plan of a run that has ended, with so many more rounds under a new reservation.

    budget: the new reservation's ε at every site; None: that of the run's plan.
    Raises PlanError: it has not ended, or cannot be extended. DataError: it is no run. InputError:
    rounds is no integer >= 1.
    """
    raw = folder.read_json("plan.json")
    at, _ = folder.restore()
    plan, status = Plan.parse(raw), _status(folder)
    if status in ("not ended", "stopped", "diverged") or not at.round:
        raise PlanError(
            f"run {folder.path} is {status}, after {at.round} rounds: expected one that has ended, "
            "as `fedpact resume` ends it, and of a deployment `fedpact deploy up`; a run that "
            "diverged is begun anew"
        )
    _check_room(folder, plan, at)
    return with_rounds(plan, at.round, rounds, budget)


def _check_room(folder: Folder, plan: Plan, at: Checkpoint) -> None:
    """Raise PlanError: bytes or seconds are used up, so that more rounds reserve for nothing."""
    sent, seconds, allowed = at.costs.sent, at.costs.seconds, plan.budget
    # One more round as long as they were on the way.
    full = allowed.bytes is not None and sent + sent / at.round > allowed.bytes
    late = allowed.seconds is not None and seconds >= allowed.seconds
    for name, used, most in (
        ("bytes", full, f"{sent:,} of {allowed.bytes} are sent"),
        ("seconds", late, f"{seconds:.4g} of {allowed.seconds} are over"),
    ):
        if used or _status(folder) == name:
            raise PlanError(
                f"budget.{name} of run {folder.path} is used up ({most}): more rounds would be "
                f"reserved, and not one carried out; begin a new run with a larger budget.{name}, "
                f'and initial = "{folder.path}"'
            )


def with_rounds(plan: Plan, done: int, rounds: int, budget: float | None) -> Plan:
    """Return a plan of which `done` rounds are over, with more. Raises as `extend_plan` does."""
    plan.check_extended()
    count(rounds=rounds)
    whole = plan.document()
    changed = {**whole, "rounds": done + rounds, "after": done}
    if budget is not None:
        if plan.privacy.per_site or not plan.private:
            raise PlanError(
                f"--epsilon {budget:g} with privacy.per_site or a plain run: the new reservation "
                "has the budgets of the plan; leave --epsilon out"
            )
        changed["privacy"] = {**whole["privacy"], "epsilon": budget, "sigma": None}
    return Plan.parse(changed)


def begin_extension(folder: Folder, plan: Plan) -> str:
    """Write into a run's folder that it goes on with an extended plan; return its new name.

    What it has promised and spent so far becomes earlier.json. Its statement is to be written anew.
    Whoever calls it keeps what the files held (run_folder.keep_before) until all is done.
    """
    before, environment = PreviousReservations.read(folder), folder.read_json("environment.json")
    said, summary = folder.read_json("privacy.json"), folder.read_json("summary.json")
    run, old = environment["run"], Plan.parse(folder.read_json("plan.json"))
    last = {name: _parts(each)[-1] for name, each in said["sites"].items()}
    own = _told(run, old.after, plan.after, last)
    more = (*before.more, read_extension(old.document())) if old.after else ()
    told = (*before.told, own)
    earlier = PreviousReservations(
        (*before.runs, run), said["sites"], summary["epsilon"], told, more
    )
    name = next_name(run)
    folder.write_json(EARLIER, asdict(earlier))
    if not old.after:
        folder.write_json(FIRST_PLAN, old.document())
    folder.write_json("environment.json", {**environment, "run": name})
    folder.write_json("plan.json", plan.document())
    (folder.path / "summary.json").unlink()
    return name


def keep_model(folder: Folder, plan: Plan) -> dict[str, str]:
    """Keep the model that an extended run had before, as model-ROUNDS.safetensors.

    Other plans may begin with it (models.initial). Returns names and digests of all that are kept.
    """
    if not plan.after:
        return {}
    path = folder.path / f"model-{plan.after}.safetensors"
    if not path.exists():
        (folder.path / "model.safetensors").replace(path)
    kept = sorted(folder.path.glob("model-*.safetensors"))
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in kept}


def _status(folder: Folder) -> str:
    path = folder.path / "summary.json"
    return str(folder.read_json(path.name)["status"]) if path.exists() else "not ended"


def _sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A site's figures over both: ε and δ add, also those of a person with several records.

    reservations: what each had of its own, as one σ and one T are of one of them.
    """
    sums = {key: add_budgets([one[key], other[key]]) for key in _ADDED}
    found = {**one, **sums, "steps": one["steps"] + other["steps"]}
    of, before = one["epsilon_per_person"] or {}, other["epsilon_per_person"] or {}
    found["epsilon_per_person"] = {k: of[k] + before[k] for k in of if k in before}
    return {**found, "reservations": [*_parts(other), *_parts(one)]}


def _parts(site: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a site's statement says of each reservation, the first one first."""
    return site.get("reservations") or [{key: site[key] for key in _OWN}]


def _told(run: str, after: int, last: int, sites: Mapping[str, Mapping[str, Any]]) -> str:
    told = f"rounds {after + 1} to {last} as {run}"
    if not sites:
        return told
    most = max(each["epsilon"] for each in sites.values())
    return f"{told}, ε <= {upper(most)} at δ = {upper(max(e['delta'] for e in sites.values()))}"
