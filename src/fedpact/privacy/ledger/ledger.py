"""A site's ledger: reservations and charges, written before anything is released.

One file per site, for all runs on the same data, stored by `hash_chain`. Kinds of entries:

    open      the site's name, and whether its releases are hypothetical (a simulation's)
    reserve   a run may make these events, which together cost at most (ε, δ). A reservation beside
              a run covers other records of the site and has its own name: "RUN/evaluation"
    charge    `count` joint events of one kind, for one request, about to be released
    unprotected  exact numbers are about to leave: the run's (ε, δ) protect nobody any more
    torn      a line that a crash made unreadable, counted as the most expensive remaining events

`charge` returns only after the entry is on the disk, so a crash costs budget, never privacy. (A
simulation's charge does not wait for the disk. A power failure may lose it, which the resumed run
notices by `last_round`.) The events of a reservation may be used in any order, up to the reserved
counts; unused events only lower the cost. Reservations of several runs add up (`total`).

A site also knows of its ledger outside of it, so that one that was put back is found out:

    LEDGER.seen         beside the ledger: the latest entry, by number and hash, that it once had,
                        and who says so: this site, or a server that had a reply with it
    site.db             the stored reply names the entries it was paid with (deployment.store)
    the server's word   every question says what the server has seen last of this site's ledger

A ledger that lacks any of them has lost entries, or is a copy that others have been written to: its
site charges nothing, and no receipt is made of it. What the server says and the ledger lacks is
kept in LEDGER.seen, so that it counts until a person acts, in later runs, too.
"""

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fedpact.common.check import count as at_least_one
from fedpact.common.errors import LedgerError, PolicyRefused
from fedpact.common.files import write_whole
from fedpact.privacy.accounting.accountant import (
    ADJACENCY_BY_UNIT,
    Budget,
    History,
    SampledGaussian,
)
from fedpact.privacy.guarantee import Guarantee
from fedpact.privacy.ledger.hash_chain import Chained, HashChain, LedgerEntry
from fedpact.privacy.ledger.reservations import (
    CompanionReservation,
    FixedSequence,
    cost_of_torn,
    from_entry,
    not_reserved,
    other_terms,
    over_runs,
)

_FORMAT = 1
_Request = tuple[str, str, tuple[str, ...], SampledGaussian]


def _opening(site: str, hypothetical: bool) -> dict[str, Any]:
    return {"site": site, "hypothetical": hypothetical, "format": _FORMAT}


def check_opening(path: Path, first: LedgerEntry, site: str, *, hypothetical: bool) -> None:
    """Raise LedgerError: a ledger's first entry is of another site, or another kind of run."""
    opening = _opening(site, hypothetical)
    found = {key: first.get(key) for key in opening}
    if found != opening:
        raise LedgerError(
            f"ledger {path} was opened as {found}, not as {opening}: "
            "name the ledger that belongs to this site and to this kind of run"
        )


class Ledger:
    """An open ledger. One process at a time holds it; threads may share it.

    hypothetical: its releases are a simulation's, where a repeated request has the same noise and
    is charged once. Otherwise every charge counts.
    Raises LedgerError: another site's ledger, an altered one, or one that is open elsewhere.
    """

    def __init__(self, path: Path, site: str, *, hypothetical: bool) -> None:
        self.path, self.site, self.hypothetical = path, site, hypothetical
        self._lock = threading.Lock()
        self._reserved: dict[str, FixedSequence] = {}
        self._placements: dict[str, dict[str, str]] = {}
        self._requests: dict[_Request, int] = {}
        self._rounds: dict[str, int] = {}
        self._attempts: set[tuple[str, int, int]] = set()
        self._exposed: set[str] = set()
        self._chain = HashChain(path)
        try:
            self._restore()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, with everything charged on the disk."""
        self._chain.close()

    @property
    def head(self) -> str:
        """The last entry's hash. Keeping it reveals a ledger that is shortened or forked later."""
        return self._chain.head

    @property
    def length(self) -> int:
        """The number of entries."""
        return self._chain.length

    def holds(self, length: int, head: str) -> bool:
        """Whether this ledger continues one that had `length` entries, the last with this hash.

        A ledger that was reset to an older state, or forked, does not.
        """
        with self._lock:
            return self._chain.holds(length, head)

    def reserve(
        self,
        run: str,
        promise: Guarantee | Budget,
        events: History,
        beside: CompanionReservation | None = None,
        unit: str = "record",
        only_ask: bool = False,
    ) -> None:
        """Reserve events for a run, at a cost of at most `promise`; repeating it changes nothing.

        promise: a Budget if the events' noise is the site's own. beside: if the events are of other
        records than those of another run. unit: what (ε, δ) protects, a "record" or a "person"; a
        ledger has one unit, as different ones do not add up.
        only_ask: check whether it would be refused, without reserving.
        Raises PolicyRefused: the events cost more than the budget, the run has other terms, the
        ledger another unit, or that run another companion. LedgerError: it cannot be written.
        """
        asked = Counter({event: number for event, number in events.items() if number})
        if isinstance(promise, Budget):
            promise = Guarantee(promise.epsilon, promise.delta, promise.epsilon)
        reservation = FixedSequence(promise, asked, beside, unit)
        with self._lock:
            if self._is_promised(run, reservation):
                return
            self._check_unit(run, unit)
            self._check_beside(run, beside)
            for cost, promised in reservation.costs():
                if not cost <= promised:
                    raise PolicyRefused(
                        f"the events reserved for run {run!r} cost ε = {cost:.6g} at δ = "
                        f"{promise.delta:g} ({ADJACENCY_BY_UNIT[unit]}), more than the promised "
                        f"ε = {promised:g}"
                    )
            if not only_ask:
                self._append({"run": run, **reservation.entry})

    def _check_unit(self, run: str, unit: str) -> None:
        others = {one.unit for one in self._reserved.values()} - {unit}
        if others:
            raise PolicyRefused(
                f"run {run!r} is per {unit}, but the runs in {self.path} are per "
                f"{', '.join(others)}: such ε do not add up; all runs on the same records need the "
                "same unit"
            )

    def _check_beside(self, run: str, beside: CompanionReservation | None) -> None:
        for name, one in self._reserved.items():
            if beside and one.beside and one.beside.beside == beside.beside:
                raise PolicyRefused(
                    f"{run!r} would be a second companion of run {beside.beside!r} in {self.path}, "
                    f"beside {name!r}: only the larger of a run and one companion counts; reserve "
                    "it as a separate run"
                )

    def _is_promised(self, run: str, promise: FixedSequence) -> bool:
        if run not in self._reserved:
            return False
        before = self._reserved[run]
        if before.terms != promise.terms:
            raise other_terms(run, self.path, before, promise)
        return True

    def charge(
        self,
        run: str,
        request: str,
        event: SampledGaussian,
        count: int,
        *,
        purpose: tuple[str, ...],
        round_number: int,
        attempt: int = 0,
    ) -> None:
        """Write `count` events to the disk, before the first of them is released.

        request: identifies what is released (the task and the step in it). purpose: the channels.
        In a hypothetical ledger a request that was charged before, with the same event and purpose,
        is the same release: only events beyond the earlier count are charged.
        Raises PolicyRefused: nothing reserved, or not this event. BudgetExhausted: too many.
        LedgerError: the charge cannot be written.
        """
        at_least_one(count=count)
        channels = sorted(purpose)
        key = (run, request, tuple(channels), event)
        with self._lock:
            if run not in self._reserved:
                raise not_reserved(run, event)
            new = count - (self._requests.get(key, 0) if self.hypothetical else 0)
            if new <= 0:
                return
            self._reserved[run].check(run, event, new)
            body: LedgerEntry = {
                "kind": "charge",
                "mechanism": "sampled_gaussian",
                "run": run,
                "round": round_number,
                "attempt": attempt,
                "request": request,
                "purpose": channels,
                "q": event.q,
                "sigma": event.sigma,
                "count": new,
            }
            if own := self._reserved[run].guarantee.own_share(event):
                body["sigma_alone"] = own.sigma
            # A simulation's charge protects nobody, so it does not wait for the disk.
            self._chain.append(body, wait=not self.hypothetical)
            self._charge(key, new, round_number, attempt)

    def expose(self, run: str, round_number: int) -> None:
        """Record that exact numbers leave the site, so that the run is not private.

        Raises PolicyRefused: a deployment, which never releases any. LedgerError: it cannot be
        written.
        """
        if not self.hypothetical:
            raise PolicyRefused(
                f"run {run!r} asked for exact numbers in round {round_number}: a deployed site "
                "never releases any; remove what asks for them"
            )
        with self._lock:
            self._append({"kind": "unprotected", "run": run, "round": round_number})

    def note_placement(self, run: str, placement: str, precision: str) -> None:
        """Record how a run's gradients are computed from now on, unless it is recorded already.

        placement: a key of per_sample.layout.PLACEMENTS. precision: "float32", "tf32" or "bf16".
        Raises LedgerError: it cannot be written.
        """
        found = {"placement": placement, "precision": precision}
        with self._lock:
            if self._placements.get(run) != found:
                self._append({"kind": "placement", "run": run, **found})
                self._placements[run] = found

    def spent(self, run: str) -> Mapping[SampledGaussian, int]:
        """Return the events charged to a run so far."""
        with self._lock:
            return dict(self._reserved[run].spent) if run in self._reserved else {}

    def last_round(self, run: str) -> int:
        """Return the last round that a run was charged for, -1 if none."""
        with self._lock:
            return self._rounds.get(run, -1)

    def is_charged(self, run: str, round_number: int, attempt: int) -> bool:
        """Whether something was charged for this attempt at a run's round."""
        with self._lock:
            return (run, round_number, attempt) in self._attempts

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that have a reservation."""
        with self._lock:
            return tuple(self._reserved)

    def total(self, without: str | None = None, trusted: float = math.inf) -> tuple[float, float]:
        """Return (Σ ε, Σ δ) over the reservations of all runs, by basic composition.

        This bounds what all runs together can cost a record; (0, 0) without reservations, and an
        infinite ε once a run has released exact numbers. without: a run to leave out, together with
        its companion. trusted: the number of sites trusted to add noise; a run that needs more
        counts with the ε that trusts none.
        """
        with self._lock:
            each = [
                (one.beside.beside if one.beside else r, one) for r, one in self._reserved.items()
            ]
            lost = math.inf if self._exposed - {without} else 0.0
        counted = [
            (run, one.guarantee.counted(trusted), one.guarantee.delta)
            for run, one in each
            if run != without
        ]
        epsilon, delta = over_runs(counted)
        return lost + epsilon, delta

    def _restore(self) -> None:
        entries = self._chain.entries
        if not entries:
            self._append({"kind": "open", **_opening(self.site, self.hypothetical)})
            return
        check_opening(self.path, entries[0], self.site, hypothetical=self.hypothetical)
        try:
            for entry in entries:
                self._apply(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"ledger {self.path} has an entry of unknown form ({type(error).__name__}: "
                f"{error}): it was not written by this version of fedpact; use the one that did"
            ) from error
        if self._chain.torn:
            self._append(cost_of_torn(self._chain.torn, self._reserved))

    def _append(self, body: LedgerEntry) -> None:
        self._apply(self._chain.append(body))

    def _charge(self, key: _Request, count: int, round_number: int, attempt: int) -> None:
        run, _, _, event = key
        self._reserved[run].charge(event, count)
        self._requests[key] = self._requests.get(key, 0) + count
        self._rounds[run] = max(self._rounds.get(run, -1), round_number)
        self._attempts.add((run, round_number, attempt))

    def _apply(self, entry: LedgerEntry) -> None:
        match entry["kind"]:
            case "reserve":
                self._reserved[entry["run"]] = from_entry(entry)
            case "charge":
                event = SampledGaussian(entry["q"], entry["sigma"])
                key = (entry["run"], entry["request"], tuple(entry["purpose"]), event)
                self._charge(key, entry["count"], entry["round"], entry["attempt"])
            case "torn":
                for run, q, sigma, count in entry["charges"]:
                    self._reserved[run].spent[SampledGaussian(q, sigma)] += count
            case "placement":
                names = ("placement", "precision")
                self._placements[entry["run"]] = {name: entry[name] for name in names}
            case "unprotected":
                self._exposed.add(entry["run"])
            case _:
                pass


# More entries than any ledger has, and no more than Flower carries.
_MOST = 2**53
_HASH = re.compile(r"[0-9a-f]{64}")


def is_place(length: int, head: str) -> bool:
    """Whether a ledger can have had `length` entries, of which the last one's hash is `head`."""
    return head == "" if length == 0 else 0 < length < _MOST and bool(_HASH.fullmatch(head))


class RollbackGuard:
    """LEDGER.seen, of a ledger's path: the latest entry that anybody has named, and who.

    A party that names an earlier one, mistaken or speaking of old times, takes nothing back.
    Raises LedgerError: unreadable.
    """

    def __init__(self, ledger: Path) -> None:
        self._ledger, self.path = ledger, ledger.with_name(ledger.name + ".seen")
        self._place, self._who = self._read() if self.path.exists() else ((0, ""), "")

    def check(self, ledger: Chained | Ledger, reply: tuple[int, str] = (0, "")) -> None:
        """Raise LedgerError for a ledger that lacks the entry seen, or the one of a stored reply.

        word: number and hash of that other entry. whose: who names it.
        """
        for place, told, wrong in (
            (
                self._place,
                f"which it had by the word of {self._who} ({self.path})",
                f"; if that word is known to be wrong, remove {self.path}",
            ),
            (reply, "which paid for a stored reply", ""),
        ):
            if not ledger.holds(*place):
                raise LedgerError(
                    f"ledger {self._ledger} {_lacks(ledger, *place)}, {told}: it was put back to "
                    "an older state, or this is a copy of a site that runs elsewhere. Put back the "
                    "ledger as it was after the last release; if there is none left, treat the "
                    f"records' budget as spent{wrong}"
                )

    def keep(self, length: int, head: str, who: str) -> None:
        """Remember that the ledger had this entry, by the word of `who`, unless it had a later."""
        if length > self._place[0]:
            found = {"entry": [length, head], "who": who}
            write_whole(self.path, json.dumps(found).encode() + b"\n")
            self._place, self._who = (length, head), who

    def hear(self, ledger: Ledger, length: int, head: str, who: str) -> None:
        """Remember an entry that the ledger lacks, by the word of somebody else; `check` says so.

        Where it lacks another one already, the later stays.
        """
        if not ledger.holds(length, head):
            if ledger.holds(*self._place):
                self._place = 0, ""
            self.keep(length, head, who)

    def _read(self) -> tuple[tuple[int, str], str]:
        try:
            found: Any = json.loads(self.path.read_bytes().decode("ascii"))
            (length, head), who = found["entry"], str(found["who"])
            good = type(length) is int and is_place(length, head)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be read ({error.strerror}): give the account of this process "
                "the right to, and do not remove it, as it shows whether the ledger was put back"
            ) from None
        except (ValueError, TypeError, AttributeError, LookupError):
            length, head, who, good = 0, "", "", False
        if not good:
            raise LedgerError(
                f"{self.path} is unreadable: expected the number and hash of an entry that "
                f"{self._ledger} had; put it back from a backup, or remove it if you are sure that "
                "the ledger is as it was after its last release"
            )
        return (length, head), who


def _lacks(ledger: Chained | Ledger, length: int, head: str) -> str:
    if ledger.length < length:
        return f"has {ledger.length} entries and lacks number {length}, {head[:16]}..."
    return f"has another entry in place of number {length}, {head[:16]}..."
