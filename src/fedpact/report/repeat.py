"""How a run can be repeated, and what comes of it: what the report says under that heading."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedpact.engines.extended import PreviousReservations, read_extension
from fedpact.folder import FIRST_PLAN, Folder
from fedpact.own.named import get_handed_in
from fedpact.report.reading import RunFolder


@dataclass(frozen=True)
class Repeat:
    """command: what to type, where paths of the plan begin; is_python: there, and not in a shell.

    words: what comes of it.
    """

    command: str
    is_python: bool
    words: str


_SAME = (
    "It makes the same model, bit for bit, from the same data, with the versions below and on a "
    "machine of that kind."
)
_GIVEN = (
    "The records were given in Python and are no part of the plan: give the same ones. Otherwise "
    "fedpact would train on plan.json's data."
)
_HANDED = (
    "What was handed in from Python is no part of the plan, which knows it by a digest: {what}. "
    "Hand in the same; another data set is refused, and another model is another plan's."
)
_FORMS: Final = {"task.loss": "loss=...", "task.metrics": "metrics=[...]"}
_TEST = (
    "Every party drew from the plan's seed, so a simulation repeats the run: the same model, bit "
    "for bit, if the sites' records were those that `fedpact deploy init` gave them, if features' "
    "weights lie where plan.json names them, and if every reply came in its round."
)
_SECURE = (
    "Nobody can repeat this run: each site drew its batches and noise in secret, once. What can be "
    "repeated is the plan, which is what the command does with plan.json's own data and the plan's "
    "seed: a simulation, which spends nothing. To train the same sites anew, name a new run in "
    "federation.toml at every party; each site's ledger then reserves and spends anew."
)
_LEDGERS = "run.ledgers names ledgers that are kept: the repetition reserves and spends there anew."
_TIMED = "budget.seconds ends a run by measured time, which no repetition has to the second."
_CARD = "It trained on a GPU, whose noise a CPU does not draw."


def repeat(run: RunFolder) -> Repeat:
    """Return how the run can be repeated."""
    path, again = run.path / "plan.json", str(_beside(run.path))
    more = _extensions(run)
    if more:
        path = run.path / FIRST_PLAN
    steps = [f"fedpact run {shlex.quote(str(path))} --out {shlex.quote(again)}"]
    for one in more:
        step = f"fedpact extend {shlex.quote(again)} --rounds {one['rounds']}"
        steps.append(step + (f" --epsilon {one['epsilon']!r}" if one["epsilon"] else ""))
    shell = " && ".join(steps)
    randomness = str(run.privacy["randomness"])
    if randomness.startswith("secure"):
        return Repeat(shell, False, _SECURE)
    if randomness.startswith("seeded test"):
        return Repeat(shell, False, _TEST)
    words = [_SAME, *_conditions(run)]
    own = get_handed_in(run.plan)
    if own:
        what = " and ".join(f"{key} {', '.join(names)}" for key, names in own.items())
        told = _HANDED.format(what=what)
        call = _in_python(path, again, list(own), more)
        return Repeat(call, True, " ".join([told, *words]))
    if run.environment.get("data") == "given":
        call = _in_python(path, again, ["data"], more)
        return Repeat(call, True, " ".join([_GIVEN, *words]))
    return Repeat(shell, False, " ".join(words))


def _extensions(run: RunFolder) -> list[Mapping[str, Any]]:
    """Return what was asked for at each extension of the run, none where it was not extended."""
    if not run.plan.get("after"):
        return []
    return [*PreviousReservations.read(Folder(run.path)).more, read_extension(run.plan)]


def _in_python(
    path: Path, again: str, given: Sequence[str], more: Sequence[Mapping[str, Any]]
) -> str:
    """Return the call that repeats a run. given: the keys of what is handed in."""
    own = "".join(f", {_FORMS.get(key, f'{key}=...')}" for key in given)
    out = f", out={again!r}" if more else ""
    steps = [f"fedpact.run(fedpact.Plan.read(Path({str(path)!r})){out}{own})"]
    for one in more:
        cost = f", epsilon={one['epsilon']!r}" if one["epsilon"] else ""
        steps.append(f"fedpact.extend({again!r}, {one['rounds']}{cost}{own})")
    return "; ".join(steps)


def _conditions(run: RunFolder) -> list[str]:
    own, budget = run.plan.get("run", {}), run.plan.get("budget", {})
    conditions = {
        _LEDGERS: own.get("ledgers"),
        _TIMED: budget.get("seconds"),
        _CARD: own.get("device", "cpu") != "cpu",
    }
    return [told for told, holds in conditions.items() if holds]


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.resolve().name}-again")
