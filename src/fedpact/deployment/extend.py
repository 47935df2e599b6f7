"""More rounds on a deployed run that has ended: what each party's files then say.

The new plan and the new run's name follow from a party's own files and what it is asked for, so
every party may do it by itself: their `plan.json` and `federation.toml` are equal again. A site's
policy is its owner's, and is left as it is: where it allows no second run, the site refuses.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from fedpact.common.errors import PlanError
from fedpact.common.files import write_whole
from fedpact.common.run_folder import Folder, commit, exclusive, keep_before, rollback
from fedpact.deployment.federation import Federation, read_plan
from fedpact.deployment.files import federation as as_toml
from fedpact.deployment.local import ledger_path, one_at_a_time, parties
from fedpact.deployment.server import Coordinator
from fedpact.plan import Plan
from fedpact.privacy.accounting.calibration import round_down
from fedpact.privacy.ledger.hash_chain import read_all
from fedpact.privacy.ledger.reservations import next_name
from fedpact.simulation.extend import begin_extension, extend_plan, with_rounds


def extend_deployment(
    directory: Path, rounds: int, budget: float | None
) -> tuple[Plan, str, float]:
    """Extend the parties that lie in a directory, or the one; return plan, run's name, least σ.

    That is the least noise of any release of any site, with which a policy has to agree; 0 of a
    plain run. budget: the new reservation's ε at every site, None for the plan's.
    Raises InputError of some kind: it cannot be extended; then nothing is changed.
    """
    places = tuple(parties(directory).values())
    # Whoever starts them waits, and finds all files changed, or none.
    with one_at_a_time(directory), exclusive(*places):
        plan = _agreed(places, rounds, budget)
        keep_before(*places)
        try:
            names = {_write(place, plan) for place in places}
            if len(names) > 1:
                raise PlanError(f"the parties name other runs than one another: {', '.join(names)}")
            commit(*places)
        finally:
            rollback(*places)
    return plan, names.pop(), _least_sigma(places[0], plan)


def _least_sigma(place: Path, plan: Plan) -> float:
    terms = Federation.read(place / "federation.toml").terms(plan).values()
    of_held = plan.evaluation_terms
    releases = [one.releases for one in terms] + ([of_held.releases] if of_held and terms else [])
    return round_down(min(s for one in releases for s in one.values())) if releases else 0.0


def _agreed(places: Sequence[Path], rounds: int, budget: float | None) -> Plan:
    """Return the plan that all parties go on with. Raises PlanError: they have other ones."""
    alone = not any(_is_server(place) for place in places)
    found = {place: _planned(place, rounds, budget, alone=alone) for place in places}
    plan = found[places[0]]
    odd = [str(place) for place, one in found.items() if one != plan]
    if odd:
        raise PlanError(f"{', '.join(odd)} have other plans than the rest: put plan.json back")
    return plan


def _check_ended(place: Path, plan: Plan) -> None:
    """Raise PlanError: nothing at a site that is by itself says that its run has ended."""
    federation, ledger = Federation.read(place / "federation.toml"), ledger_path(place)
    run, (name,) = federation.run, parties(place)
    entries = read_all(ledger)[0] if ledger.exists() else []
    charged = (e["round"] for e in entries if e["kind"] == "charge" and e["run"] == run)
    path = place / "run" / "summary.json"
    handed = json.loads(path.read_bytes()) if path.exists() else {}
    if handed.get("run") == run and handed.get("rounds"):
        return
    own = plan.participants(federation.names).last_of(name, plan.rounds)
    last = max(charged, default=0)
    if not plan.after < own <= last:
        raise PlanError(
            f"run {run!r} has charged this site up to round {last} of {own}, and handed no "
            "model over: it has not ended, or not begun since it was extended; of a run that the "
            "server has extended, put the server's plan.json and federation.toml here"
        )


def _planned(place: Path, rounds: int, budget: float | None, *, alone: bool) -> Plan:
    plan = read_plan(place / "plan.json")
    folder = Folder(place / "run")
    if not _is_server(place):
        if alone:
            _check_ended(place, plan)
        return with_rounds(plan, plan.rounds, rounds, budget)
    found = extend_plan(folder, rounds, budget)
    if found.after != plan.rounds:
        raise PlanError(
            f"the run ended after {found.after} of {plan.rounds} rounds: a deployment is extended "
            "when all rounds are done; begin a new one, with initial = the model that it has"
        )
    return found


def _write(place: Path, plan: Plan) -> str:
    path = place / "federation.toml"
    federation = Federation.read(path)
    renamed = federation.model_copy(update={"run": next_name(federation.run)})
    if _is_server(place):
        begin_extension(Folder(place / "run"), plan)
    Folder(place).write_json("plan.json", plan.document())
    write_whole(path, as_toml(renamed).encode(), private=False)
    if _is_server(place):
        _restate(place)
    return renamed.run


def _is_server(place: Path) -> bool:
    return (place / "server.key").exists()


def _restate(place: Path) -> None:
    """Write the server's statement of the whole run; new attempts are counted from here."""
    coordinator = Coordinator.of(place)
    coordinator.folder.write_json("privacy.json", coordinator.statement())
    if coordinator.attempts.exists():
        number, attempt, _ = json.loads(coordinator.attempts.read_bytes())
        write_whole(coordinator.attempts, json.dumps([number, attempt, 0]).encode())
