"""A deployed site's held-out records: which they are, what is released, what its owner sees.

held-out.key      the site's secret, by which each record falls to one side; made at the first
                  opening with evaluations, and missed from then on
evaluation.bin    its last released evaluation, for when it is asked again
own-figures.json  exact sums after each round, for the site's owner: no message has any of it
"""

import json
import logging
import secrets
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from fedpact.draws.secure import SecureDraws
from fedpact.draws.seeded import Draws, SeededDraws
from fedpact.engines.inprocess import Worker
from fedpact.engines.parties.federation import Federation
from fedpact.engines.parties.records import Own
from fedpact.engines.parties.stored import LastReply
from fedpact.errors import LedgerError
from fedpact.evaluation import promise
from fedpact.evaluation.split import hold_out, key_of_seed, split_of
from fedpact.evaluation.totals import HeldOut
from fedpact.files import parse_errors, write_whole
from fedpact.ledger.family import family
from fedpact.ledger.ledger import Ledger, read_entries
from fedpact.messages import EVALUATION, FINAL, State, Task, Vectors
from fedpact.methods.released import find_examined
from fedpact.plan import Plan
from fedpact.privacy.oracle import Records

_log = logging.getLogger("fedpact.site")

OWN_FIGURES: Final = "own-figures.json"
_KEPT: Final = ("run", "settings", "classes", "groups", "unit", "rounds")
_KEY_BYTES: Final = 32


class Examiner:
    """Evaluates at a site. ledger: where the site's ledger is, which may not be there yet.

    Raises LedgerError: the secret of a site that has promised evaluations is not there.
    """

    def __init__(
        self, directory: Path, name: str, federation: Federation, plan: Plan, ledger: Path
    ) -> None:
        self._name, self._plan, self._groups = name, plan, federation.groups
        self._of_persons = federation.person is not None
        self.form, self.once = federation.form(plan), plan.evaluation_terms
        self._test = federation.seeds == "test"
        self._secure = SecureDraws()
        self._key = b""
        if plan.evaluation.used:
            drawn = key_of_seed(plan.seed, name) if self._test else None
            self._key = drawn or _key(directory, ledger, federation.run)
        self.last = LastReply(directory / "evaluation.bin")
        self._figures = directory / OWN_FIGURES
        self._held: HeldOut | None = None

    def split(self, own: Own) -> Tensor:
        """Return which of the site's records are held out, bool [n]."""
        share, key = self._plan.evaluation.share, self._key or b"-"
        return hold_out(own.raw, own.records.y, share, key, own.whose)

    def take(self, raw: Tensor, held: Records) -> None:
        """Keep the held-out records: as they stand in the file, and as they are evaluated."""
        y = held.y
        group = y.new_zeros(len(y)) if self._groups is None else self._groups.of(raw)
        self._held = HeldOut(held.x, y, group.to(y.device), held.persons, held.columns)

    def reserve(self, ledger: Ledger, run: str) -> None:
        """Promise the run's evaluations, if it has any."""
        if self.once is not None:
            split = split_of(self._key, self._plan.evaluation.share, persons=self._of_persons)
            promise.reserve(ledger, run, self.once, split, self._plan.privacy.unit)

    def examine(self, ledger: Ledger, task: Task, memory: State, bench: Worker) -> Vectors:
        """Return what the site releases in answer to a question, charged first."""
        held, once = self._held, self.once
        if held is None or once is None:
            raise LedgerError(f"site {self._name!r} has promised no evaluation")
        draws: Draws = self._secure
        if self._test:
            draws = SeededDraws(self._plan.seed, self._name, task.round)
        w, by = find_examined(self._plan.method, task, memory)
        return once.release(
            promise.charge_of(ledger, task),
            lambda: held.totals(self.form, bench.private, w, by),
            draws,
        )

    def note(self, task: Task, memory: State, bench: Worker) -> None:
        """Keep the exact sums of a task's model for the owner. Whatever goes wrong, stays here."""
        if self._held is None or task.round == 0 or not self._plan.evaluation.used:
            return
        try:
            ended = task.algorithm in (EVALUATION, FINAL)
            after = task.round if ended else task.round - 1
            form = self.form.whole
            w, by = find_examined(self._plan.method, task, memory)
            sums = self._held.totals(form, bench.private, w, by)
            known = own_figures(self._figures.parent) or {"rounds": {}}
            of_run = known["rounds"] if known.get("run") == task.run else {}
            of_run[str(after)] = {channel: total.tolist() for channel, total in sums.items()}
            settings = form.settings.model_dump(mode="json")
            named = {"classes": form.classes, "groups": form.groups, "unit": form.unit}
            found = {"run": task.run, "settings": settings, **named, "rounds": of_run}
            write_whole(self._figures, json.dumps(found).encode() + b"\n")
        except Exception as error:  # of records, or of the disk: no answer may depend on it
            _log.warning("the owner's own figures are not kept: %s", type(error).__name__)


def own_figures(directory: Path) -> dict[str, Any] | None:
    """Return what a site's owner sees: of which run and form, and by round the exact sums.

    None: no record is held out, or no round is over.
    Raises DataError: a file that the site did not write.
    """
    path = directory / OWN_FIGURES
    if not path.exists():
        return None
    with parse_errors(path, "remove it: the site writes a new one at the next round"):
        found = json.loads(path.read_bytes())
        return {name: found[name] for name in _KEPT}


def _key(directory: Path, ledger: Path, run: str) -> bytes:
    """Return the site's secret; made where this run has promised no evaluations yet.

    Over several runs a ledger adds up, so another run's may be another.
    """
    path = directory / "held-out.key"
    if path.exists():
        found = path.read_bytes()
        if len(found) == _KEY_BYTES:
            return found
    elif not (ledger.exists() and family(run, _evaluated(ledger))):
        found = secrets.token_bytes(_KEY_BYTES)
        write_whole(path, found)
        return found
    raise LedgerError(
        f"{path} is missing or damaged, and by {ledger} this site has promised evaluations of run "
        f"{run}: expected the secret by which records are held out; with another one, records that "
        "were trained on would be evaluated as well. Put it back from a backup (another run may "
        "draw its own)"
    )


def _evaluated(ledger: Path) -> set[str]:
    """Return the runs whose evaluations a ledger has promised."""
    return {str(entry["beside"]) for entry in read_entries(ledger) if entry.get("beside")}
