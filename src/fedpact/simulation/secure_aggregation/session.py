"""The server's side of a session: relays keys and shares, sums what is masked, takes masks off.

It keeps a running sum, and never two masked vectors. What does not fit is the site's drop-out: a
step is asked of those who have answered the one before. With fewer than t of them, or too few
around one of them, nothing goes on.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedpact.algorithms.wrappers.compression import shortest
from fedpact.common.errors import FedpactError, InputError
from fedpact.common.messages import Reply, Step, Task, to_bytes
from fedpact.simulation.secure_aggregation import keys, messages
from fedpact.simulation.secure_aggregation.client import add_pair
from fedpact.simulation.secure_aggregation.encoding import Coding
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.secure_aggregation.keys import Advert, KeyContext, SecretsDoNotFit
from fedpact.simulation.secure_aggregation.words import RingWords

_SEALING: Final = 28
"""Bytes that sealing adds: a nonce of 12 and a tag of 16."""

_MOST_TRIES: Final = 100
"""At putting a secret together; more where each single site is to be tried without."""

_log = logging.getLogger("fedpact.server")


class BelowThreshold(FedpactError):
    """Fewer sites than the threshold are left in a session, so it is given up."""


@dataclass
class Session:
    """Sites that agree on who they are, with keys and shares for the sums of so many slots.

    keys: every site's long-term key. Each `ask_...` returns the questions to those who are still
    in it and raises BelowThreshold where they are too few; each `take_...` takes in one site's
    answer, and raises InputError or SecretsDoNotFit where it is no answer to that. In the order of
    messages.SETUP_STEPS; then they may be asked for sums (`slot`). roster: see keys.roster_of.
    used: slots.
    """

    place: KeyContext
    keys: Mapping[str, ec.EllipticCurvePublicKey]
    circle: MaskingGraph
    slots: int
    adverts: dict[str, Advert] = field(default_factory=dict[str, Advert])
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    signatures: dict[str, bytes] = field(default_factory=dict[str, bytes])
    roster: str = ""
    used: int = 0

    @staticmethod
    def of(
        run: str,
        number: int,
        public: Mapping[str, ec.EllipticCurvePublicKey],
        circle: MaskingGraph,
        slots: int,
    ) -> "Session":
        """Return a session that begins in a round, under a name that no other has."""
        # By chance, not by counting: a server that starts again must not repeat a name.
        return Session(KeyContext(run, number, secrets.token_hex(8)), public, circle, slots)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites in the session, sorted: those that have dealt shares."""
        return tuple(sorted(self.sealed))

    def ask_keys(self) -> dict[str, Step]:
        """Ask all sites."""
        block = {"slots": messages.from_number(self.slots)}
        return {site: messages.step(self.place, site, "keys", block) for site in sorted(self.keys)}

    def take_keys(self, site: str, answer: Step) -> None:
        """Take a site's keys, if it signed them."""
        advert = messages.to_advert(messages.blocks(answer))
        keys.check_adverts({site: advert}, self.keys, self.place)
        # Found here it costs one site its part; found by the others it would end all of theirs.
        keys.check_usable(advert, self.slots, site)
        self.adverts[site] = advert

    def ask_shares(self) -> dict[str, Step]:
        """Tell U1, the sites with keys, each other's."""
        blocks = messages.from_adverts(dict(sorted(self.adverts.items())))
        one = messages.step(self.place, "", "shares", blocks)
        return {site: replace(one, site=site) for site in self._held(self.adverts, "sent keys")}

    def take_shares(self, site: str, answer: Step) -> None:
        """Take the shares that a site sealed for the others."""
        sealed = messages.blocks(answer, "share/")
        # All or nothing: a site that deals to some only could not be unmasked when it drops out.
        if set(sealed) != set(self.adverts) - {site}:
            raise InputError(f"{site} sealed shares for other sites than it was told of")
        for peer, block in sealed.items():
            # The server cannot open it, but its length says how many shares are in it.
            each = 2 if peer in self.circle.around(site) else 1
            length = each * keys.SHARE * self.slots + _SEALING
            if len(block) != length:
                raise InputError(f"{site} sealed {len(block)} bytes: expected {length}")
        self.sealed[site] = sealed

    def ask_roster(self) -> dict[str, Step]:
        """Hand the shares of U2, who have dealt them, out."""
        asks, sites = dict[str, Step](), self._held(self.sealed, "sealed shares")
        # From here on nobody joins: the roster's hash names exactly these sites and keys.
        self.roster = keys.roster_of({site: self.adverts[site] for site in sites})
        for site in sites:
            own = {peer: sealed[site] for peer, sealed in self.sealed.items() if peer != site}
            asks[site] = messages.step(self.place, site, "roster", messages.under("share/", own))
        return asks

    def take_roster(self, site: str, answer: Step) -> None:
        """Take a site's signature of U2."""
        signature = messages.block(answer, "signature")
        if not keys.has_signed(
            self.keys[site], site, self.roster, self.sites, self.place, signature
        ):
            raise SecretsDoNotFit(f"{site} has not signed who is in the session")
        self.signatures[site] = signature

    def slot(self, number: int, coding: Coding) -> "Sum":
        """Return the next slot, for a round. Raises BelowThreshold: too few agree on who is in."""
        signed = enough(self.circle, number, self.signatures, "agreed on who is in the session")
        self.used += 1
        # Each of them is checked by each site.
        shown = {site: self.signatures[site] for site in signed[: self.circle.threshold]}
        return Sum(self, self.used - 1, number, coding, shown)

    def _held(self, found: Mapping[str, object], what: str) -> list[str]:
        return around(self.circle, self.place.round, found, what)


@dataclass
class Sum:
    """One try at one round's sum: the masked replies, then what takes the masks off.

    As in Session, in the order of messages.BEFORE: `open` where all of the session have replied,
    else `consistency` and `unmask`. shown: signatures of who is in the session.
    """

    session: Session
    number: int
    round: int
    coding: Coding
    shown: Mapping[str, bytes]
    replies: dict[str, Reply] = field(default_factory=dict[str, Reply])
    signatures: dict[str, bytes] = field(default_factory=dict[str, bytes])
    attempt: int = 0
    opened: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    _total: RingWords | None = None
    _wrong: set[str] = field(default_factory=set[str])

    @property
    def place(self) -> KeyContext:
        """What the keys, shares and signatures of this sum's slot are for."""
        return self.session.place.of_slot(self.number, self.round)

    @property
    def is_whole(self) -> bool:
        """Whether all of the session are in the sum, so that nobody has to agree on a list."""
        return len(self.replies) == len(self.session.sites)

    def ask_masked(self, tasks: Mapping[str, Task]) -> dict[str, Step]:
        """Hand the tasks out."""
        self.attempt = next(iter(tasks.values())).attempt
        signed = messages.under("signature/", self.shown)
        return {
            site: messages.step(
                self.place, site, "masked", {"task": to_bytes(shortest(tasks[site])), **signed}
            )
            for site in self.session.sites
        }

    def take_masked(self, site: str, reply: Reply) -> None:
        """Add a checked masked reply to the sum. Raises InputError: it cannot be added."""
        words = self.coding.words(reply)
        self.coding.check(reply)
        if self._total is None:
            self._total = np.zeros_like(words)
        # numpy would broadcast one word to all.
        if self._total.shape != words.shape:
            raise InputError(f"{site} sent {len(words)} words: expected {len(self._total)}")
        np.add(self._total, words, out=self._total)
        # The sum is all that is kept of it: no two masked vectors are ever in memory together.
        self.replies[site] = replace(reply, vectors={})

    def ask_open(self) -> dict[str, Step]:
        """Ask for what takes the masks off a sum over all of the session."""
        sites = around(self.session.circle, self.round, self.replies, "sent masked vectors")
        return {site: messages.step(self.place, site, "open", {}) for site in sites}

    def ask_consistency(self) -> dict[str, Step]:
        """Tell U3, the sites in the sum, who they are."""
        survivors = around(self.session.circle, self.round, self.replies, "sent masked vectors")
        block = {"survivors": messages.from_names(survivors)}
        return {site: messages.step(self.place, site, "consistency", block) for site in survivors}

    def take_consistency(self, site: str, answer: Step) -> None:
        """Take a site's signature of that list."""
        signature = messages.block(answer, "signature")
        what, key = keys.of_attempt(self.attempt, self.session.roster), self.session.keys[site]
        # Checked before it is shown to others, whom a bad one would make drop out.
        if not keys.has_signed(key, site, what, self.replies, self.place, signature):
            raise SecretsDoNotFit(f"{site} has not signed the list that it was told")
        self.signatures[site] = signature

    def ask_unmask(self) -> dict[str, Step]:
        """Show U4, those who have signed, that at least t of them have signed the same list."""
        signed = enough(
            self.session.circle, self.round, self.signatures, "signed who is in the sum"
        )
        # t signatures rule a second list out; each more is one more for every site to check.
        some = signed[: self.session.circle.threshold]
        blocks = messages.under("signature/", {site: self.signatures[site] for site in some})
        return {site: messages.step(self.place, site, "unmask", blocks) for site in signed}

    def take_opened(self, site: str, answer: Step) -> None:
        """Take what a site opened: a share of b of each in the sum, of m of each other near it."""
        found, near = messages.blocks(answer), self.session.circle.around(site)
        # Never both secrets of one site: b of those in the sum, m of those that are missing.
        missing = near & (set(self.session.sites) - set(self.replies))
        if set(found) != {*("seed/" + s for s in self.replies), *("mask/" + s for s in missing)}:
            raise InputError(f"{site} opened other shares than it was asked for")
        if any(len(share) != keys.SHARE for share in found.values()):
            raise InputError(f"{site} opened shares that are not of {keys.SHARE} bytes")
        self.opened[site] = found

    def total(self) -> RingWords:
        """Return Σ e_i over U3, uint64 [L].

        Raises BelowThreshold: too few have opened their shares. Raises SecretsDoNotFit: those
        opened are not of the secrets that their sites had told everybody about.
        """
        enough(self.session.circle, self.round, self.opened, "opened shares")
        if self._total is None:
            raise InputError("nothing was summed: expected masked replies before shares")
        # A copy: where shares are wrong, it is tried again with others on the same sum.
        total, circle, adverts = self._total.copy(), self.session.circle, self.session.adverts
        # Whoever is in the sum has its own mask, PRG(b), in it.
        for site in self.replies:
            seed = self._secret("seed/" + site, site, circle.threshold, keys.is_committed)
            np.subtract(total, keys.expand_seed(seed, total), out=total)
        # Masks of pairs cancel where both are in; those with a site that is missing are left.
        for missing in sorted(set(self.session.sites) - set(self.replies)):
            name, least = "mask/" + missing, circle.graph.shares
            mask_key = X25519PrivateKey.from_private_bytes(
                self._secret(name, missing, least, keys.is_of_advert)
            )
            for site in self.replies.keys() & circle.around(missing):
                # What the missing one would have added for the other takes that one's mask off.
                public = adverts[site].mask_of(self.number)
                add_pair(total, mask_key, public, (missing, site), self.place, self.attempt)
        return total

    def _secret(
        self, name: str, owner: str, least: int, fits: Callable[[Advert, int, bytes], bool]
    ) -> bytes:
        """Return a site's secret from any `least` of its opened shares. Raises SecretsDoNotFit.

        fits: whether it is what the site has told everybody about; so wrong shares do no harm while
        there are enough right ones. With more shares, one site that opens wrong ones is found by
        leaving each out in turn, and if that does not do it, the secret's owner has dealt them.
        """
        given = sorted(site for site, shares in self.opened.items() if name in shares)
        advert, place = self.session.adverts[owner], self.session.circle.place
        most = max(_MOST_TRIES, 1 + len(given))
        # There are ever more sets of sites to do without: so many tries suffice for few liars.
        for out in islice(self._left_out(given, least), most):
            those = [site for site in given if site not in out][:least]
            try:
                secret = keys.recover_secret({place(s): self.opened[s][name] for s in those})
            except InputError:
                continue
            if fits(advert, self.number, secret):
                self._tell(owner, out)
                return secret
        if len(given) < least:
            raise BelowThreshold(
                f"round {self.round}: {len(given)} sites opened shares of {owner}, and it takes "
                f"{least}: nothing is opened"
            )
        # To do without each site in turn is enough against one liar: so the dealer is blamed.
        blamed = owner if len(given) > least else ""
        raise SecretsDoNotFit(f"the opened shares of {owner} are not of what it told", blamed)

    def _left_out(self, given: list[str], least: int) -> Iterator[tuple[str, ...]]:
        """Yield sets of sites to do without: who was wrong before in this sum comes first."""
        spare = len(given) - least
        wrong = tuple(sorted(self._wrong.intersection(given)))
        if 0 < len(wrong) <= spare:
            yield wrong
        yield from chain.from_iterable(combinations(given, k) for k in range(spare + 1))

    def _tell(self, owner: str, out: tuple[str, ...]) -> None:
        for site in sorted({*out} - self._wrong):
            _log.warning(
                "round %d: %s has opened a wrong share of %s, or that one has dealt it; the others "
                "suffice",
                self.round,
                site,
                owner,
            )
        self._wrong |= {*out}


def enough(circle: MaskingGraph, number: int, found: Mapping[str, object], what: str) -> list[str]:
    """Return the sites, sorted. number: of the round. Raises BelowThreshold: fewer than t."""
    if len(found) < circle.threshold:
        raise BelowThreshold(
            f"round {number}: {len(found)} sites {what}, and the threshold of secure aggregation "
            f"is {circle.threshold}: nothing is opened"
        )
    return sorted(found)


def around(circle: MaskingGraph, number: int, found: Mapping[str, object], what: str) -> list[str]:
    """Return `enough` of them. Raises BelowThreshold also for too few in a site's neighbourhood."""
    sites = enough(circle, number, found, what)
    if not circle.holds(sites):
        raise BelowThreshold(
            f"round {number}: {len(found)} sites {what}, and a site of them has fewer than "
            f"{circle.graph.shares} of its neighbourhood among them: nothing is opened"
        )
    return sites
