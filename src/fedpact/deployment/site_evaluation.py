"""A site's evaluations, its personal model, and the exact figures for its owner.

held-out.key          the secret that selects held-out records; created at the first opening
                      with evaluations, and required from then on
personal.safetensors  the model tuned on the site's own records
"""

import json
import logging
import secrets
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedpact.algorithms.wrappers.released_scales import check_as_declared, find_examined
from fedpact.common.errors import LedgerError
from fedpact.common.files import write_whole
from fedpact.common.messages import EVALUATION, FINAL, Refusal, Reply, State, Step, Task, Vectors
from fedpact.common.params import FlatModel, one_thread, state_of
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import Draws, SeededDraws
from fedpact.common.run_folder import RUN, check_writable
from fedpact.data.splits import number_persons
from fedpact.deployment.final_model import (
    find_published_model,
    own_model,
    read_ending,
    read_model,
)
from fedpact.deployment.site_records import Own, SiteFiles, own_records
from fedpact.deployment.store import Store, read_store
from fedpact.evaluation.held_out import (
    HeldOut,
    charge_of,
    digest_records,
    hold_out,
    key_of_seed,
)
from fedpact.evaluation.personal import SiteFigures, on_own_parts, personalise_model
from fedpact.privacy.ledger.hash_chain import read_entries
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Records
from fedpact.simulation.workshop import Worker

NOT_PRIVATE: Final = "NOT PRIVATE: tuned on this site's own records; never release it"


def personalise_site(directory: Path, model: Path | None = None) -> tuple[SiteFigures, str | None]:
    """Tune the final model on a site's records, unless that is not advised.

    Returns the figures, and the file of the tuned model; None if tuning is not advised.

    model: the run's model.safetensors as published by the server; by default the one that the site
    received, or that of a server on this machine. An older personal.safetensors is removed if
    tuning is not advised. Raises InputError: no final model, or one that is not the plan's.
    """
    check_writable(directory)
    files = SiteFiles.read(directory)
    federation, plan, name = files.federation, files.plan, files.name
    check_as_declared(plan.method)
    plan.task.check_plain("what joining was worth")
    handed = directory / RUN / "model.safetensors"
    # A site with its own model has stored that one, not the shared one.
    here = read_ending(directory, federation.run) is not None
    if model is None and here and not plan.method.has_own_models:
        model = handed
    source = find_published_model(directory, federation.run, model)
    module = files.workshop.module()
    flat = FlatModel(module)
    initial = flat.vector.clone()
    w = read_model(source, module, flat)
    with closing(Store(directory)) as store:
        # The site's last reply counts as included if it was for its last round.
        own = own_model(files, store, w, files.last_round(plan.rounds))
    found = own_records(files)
    x, y = found.records.x, found.records.y
    whose = number_persons(found.whose, np.arange(len(y)))
    with one_thread():
        by_itself = personalise_model(flat, x, y, initial, whose)
        tuned = personalise_model(flat, x, y, own, whose)
    path = directory / "personal.safetensors"
    if not tuned.choice.tune:
        path.unlink(missing_ok=True)
        return on_own_parts(by_itself, tuned), None
    flat.load(tuned.w)
    marked = {"privacy": NOT_PRIVATE, "run": federation.run, "site": name}
    write_whole(path, save_tensors(state_of(module), metadata=marked))
    return on_own_parts(by_itself, tuned), str(path)


_log = logging.getLogger("fedpact.site")


def read_progress(block: bytes | None) -> dict[str, Any]:
    """Return a site's progress in a run: of the last answer the round and the seconds; counts."""
    return {"round": 0, "answers": 0, "seconds": 0.0, "refusals": {}} | json.loads(block or b"{}")


def count_answer(store: Store, run: str, answer: Reply | Refusal | Step, seconds: float) -> None:
    """Count a site's answer. A full disk is only logged, as nothing depends on this count."""
    found = read_progress(store.read(f"{run}/progress"))
    refusals = Counter(found["refusals"])
    if isinstance(answer, Refusal):
        refusals[answer.code] += 1
    found |= {"round": max(found["round"], answer.round), "answers": found["answers"] + 1}
    found |= {"seconds": seconds, "refusals": refusals}
    try:
        store.write(f"{run}/progress", json.dumps(found).encode())
    except OSError as error:
        _log.warning("the progress is not written: %s", error)


_KEY_FILE: Final = "held-out.key"
_KEY_BYTES: Final = 32


class Examiner:
    """Evaluates models on a site's held-out records. store: the site's.

    Raises LedgerError: the site has reserved evaluations, but its secret is missing.
    """

    def __init__(self, files: SiteFiles, store: Store) -> None:
        name, federation, plan = files.name, files.federation, files.plan
        self._name, self._plan, self._groups = name, plan, federation.groups
        self._run = federation.run
        self._of_persons = federation.person is not None
        self.form = federation.form(plan)
        self._test = federation.seeds == "test"
        self._secure = SecureDraws()
        self._key = b""
        if self.form.share:
            where, run = files.directory, federation.run
            drawn = key_of_seed(plan.seed, name) if self._test else None
            self._key = drawn or find_examiner_key(where, files.ledger, run) or b""
            if not self._key:
                # Costs of runs add up, so another run may have another secret.
                self._key = secrets.token_bytes(_KEY_BYTES)
                write_whole(where / _KEY_FILE, self._key)
        self._store = store
        self._held: HeldOut | None = None

    def watch(self, own: Own, *, begun: bool) -> None:
        """Warn the owner if records have changed since the run was reserved (`begun`).

        With other values a record may be on the other side. The log alone says so, as no record may
        stop a site.
        """
        if not self.form.share:
            return
        name, now = f"{self._run}/records", digest_records(own.raw, own.records.y, own.whose)
        before = self._store.read(name)
        if not begun or before is None:
            self._store.write(name, now)
        elif before != now:
            _log.warning(
                "the records, their persons, or [columns] in site.toml have changed since this "
                "run began: a changed record may be trained on as well as evaluated, and then "
                "costs both ε. Put back the file and site.toml of the beginning until the run has "
                "ended"
            )

    def split(self, own: Own) -> Tensor:
        """Return which of the site's records are held out, bool [n]."""
        share, key = self.form.share, self._key or b"-"
        return hold_out(own.raw, own.records.y, share, key, own.whose)

    def take(self, raw: Tensor, held: Records) -> None:
        """Set the held-out records. raw: as in the file; held: as used by the model."""
        y = held.y
        group = y.new_zeros(len(y)) if self._groups is None else self._groups.of(raw)
        self._held = HeldOut(held.x, y, group.to(y.device), held.persons, held.columns)

    def reserve(self, ledger: Ledger, run: str, *, only_ask: bool) -> None:
        """Reserve the run's evaluations, if it has any. only_ask: see Ledger.reserve."""
        split = self.form.split(self._key, persons=self._of_persons)
        self.form.reserve(ledger, run, split, only_ask=only_ask)

    def examine(self, ledger: Ledger, task: Task, memory: State, bench: Worker) -> Vectors:
        """Charge an evaluation, and return its noisy sums."""
        held, once = self._held, self.form.once
        if held is None or once is None:
            raise LedgerError(f"site {self._name!r} has not reserved evaluations")
        draws: Draws = self._secure
        if self._test:
            draws = SeededDraws(*self._plan.seeds(self._name, task.round))
        w, by = find_examined(self._plan.method, task, memory)
        return once.release(
            charge_of(ledger, task),
            lambda: held.totals(self.form, bench.private, w, by),
            draws,
        )

    def note(self, task: Task, memory: State, bench: Worker) -> None:
        """Store the exact sums of a task's model for the owner. Errors are only logged."""
        if self._held is None or task.round == 0 or not self.form.share:
            return
        try:
            ended = task.algorithm in (EVALUATION, FINAL)
            after = task.round if ended else task.round - 1
            w, by = find_examined(self._plan.method, task, memory)
            sums = self._held.totals(self.form.whole, bench.private, w, by)
            name = f"{task.run}/figures"
            known = json.loads(self._store.read(name) or b"{}")
            known[str(after)] = {channel: total.tolist() for channel, total in sums.items()}
            self._store.write(name, json.dumps(known).encode())
        except Exception as error:  # no answer may depend on it
            _log.warning("the owner's exact figures are not stored: %s", type(error).__name__)


def own_figures(directory: Path, run: str) -> dict[str, Any] | None:
    """Return the exact sums by round for a site's owner, of SumsForm.whole.

    None: no record is held out, or no round has ended. Raises DataError: a damaged store.
    """
    found = read_store(directory, f"{run}/figures")
    return None if found is None else {"rounds": json.loads(found)}


def find_examiner_key(directory: Path, ledger: Path, run: str) -> bytes | None:
    """Return the site's secret; None if there is none, and none is required.

    Raises LedgerError: damaged, or missing although this run has reserved evaluations.
    """
    path = directory / _KEY_FILE
    if path.exists():
        found = path.read_bytes()
        if len(found) == _KEY_BYTES:
            return found
    else:
        entries = read_entries(ledger) if ledger.exists() else []
        if not any(entry.get("beside") == run for entry in entries):
            return None
    raise LedgerError(
        f"{path} is missing or damaged, but {ledger} has reserved evaluations of run {run}: "
        "expected the secret that selects held-out records; with another one, training records "
        "would be evaluated too. Restore it from a backup (a new run may have a new secret)"
    )
