"""The server's side of a session: it relays keys and shares, sums masked vectors, removes masks.

It stores a running sum, and never two masked vectors. Each step is asked of the sites that gave a
valid answer to the one before; the session ends if these are fewer than t, or too few around one.
"""

import logging
from collections.abc import Callable, Mapping
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
"""Bytes added by sealing: a nonce of 12 and a tag of 16."""

_MOST_TRIES: Final = 100
"""Tries to recover a secret; more if needed to leave out each single site once."""

_log = logging.getLogger("fedpact.server")


class BelowThreshold(FedpactError):
    """Fewer sites than the threshold are left in a session, so it is abandoned."""


@dataclass
class Session:
    """A list of sites with keys and shares for the sums of a number of slots.

    Call its methods in the order of messages.SETUP_STEPS, then `slot` for each sum. `ask_...`
    returns the questions to the remaining sites, or raises BelowThreshold. `take_...` stores a
    site's answer; it raises InputError or SecretsDoNotFit if that is invalid.
    keys: every site's long-term key. roster: see keys.roster_of. used: the number of used slots.
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

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites in the session, sorted: those that have dealt shares."""
        return tuple(sorted(self.sealed))

    def ask_keys(self) -> dict[str, Step]:
        """Ask all sites."""
        block = {"slots": self.slots.to_bytes()}
        return {site: messages.step(self.place, site, "keys", block) for site in sorted(self.keys)}

    def take_keys(self, site: str, answer: Step) -> None:
        """Store a site's keys, if it signed them."""
        advert = Advert.unpack(messages.block(answer, "keys"), self.slots)
        keys.check_adverts({site: advert}, self.keys, self.place)
        # An error here excludes one site; found by the other sites, it would stop them all.
        keys.check_usable(advert, self.slots, site)
        self.adverts[site] = advert

    def ask_shares(self) -> dict[str, Step]:
        """Send U1, the sites with keys, each other's keys."""
        blocks = {site: advert.pack() for site, advert in sorted(self.adverts.items())}
        one = messages.step(self.place, "", "shares", blocks)
        sites = around(self.circle, self.place.round, self.adverts, "sent keys")
        return {site: replace(one, site=site) for site in sites}

    def take_shares(self, site: str, answer: Step) -> None:
        """Store the shares that a site sealed for the others."""
        sealed = messages.blocks(answer, "share/")
        # If some shares were missing, the site could not be unmasked when it drops out.
        if set(sealed) != set(self.adverts) - {site}:
            raise InputError(f"{site} sealed shares for other sites than it was told of")
        for peer, block in sealed.items():
            # The server cannot open a block, but its length shows the number of shares.
            each = 2 if peer in self.circle.around(site) else 1
            length = each * keys.SHARE * self.slots + _SEALING
            if len(block) != length:
                raise InputError(f"{site} sealed {len(block)} bytes: expected {length}")
        self.sealed[site] = sealed

    def ask_roster(self) -> dict[str, Step]:
        """Send U2, the sites that dealt shares, the shares for them."""
        asks = dict[str, Step]()
        sites = around(self.circle, self.place.round, self.sealed, "sealed shares")
        # The list is final: the roster's hash covers exactly these sites and keys.
        self.roster = keys.roster_of({site: self.adverts[site] for site in sites})
        for site in sites:
            own = {peer: sealed[site] for peer, sealed in self.sealed.items() if peer != site}
            asks[site] = messages.step(self.place, site, "roster", messages.under("share/", own))
        return asks

    def take_roster(self, site: str, answer: Step) -> None:
        """Store a site's signature of U2."""
        signature = messages.block(answer, "signature")
        if not keys.has_signed(
            self.keys[site], site, self.roster, self.sites, self.place, signature
        ):
            raise SecretsDoNotFit(f"{site} has not signed the session's list of sites")
        self.signatures[site] = signature

    def slot(self, number: int, coding: Coding) -> "Sum":
        """Return the next slot, for a round. Raises BelowThreshold: too few signed the list."""
        signed = enough(self.circle, number, self.signatures, "agreed on who is in the session")
        self.used += 1
        # Only t of them, as every site checks each.
        shown = {site: self.signatures[site] for site in signed[: self.circle.threshold]}
        return Sum(self, self.used - 1, number, coding, shown)


@dataclass
class Sum:
    """One attempt at one round's sum: the masked replies, then the secrets that remove masks.

    Methods as in Session, in the order of messages.BEFORE: `open` if all sites of the session have
    replied, else `consistency` and `unmask`. shown: signatures of the session's list.
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
        """The context of this sum's slot."""
        return self.session.place.of_slot(self.number, self.round)

    @property
    def is_whole(self) -> bool:
        """Whether all sites of the session are in the sum, so no other list has to be agreed on."""
        return len(self.replies) == len(self.session.sites)

    def ask_masked(self, tasks: Mapping[str, Task]) -> dict[str, Step]:
        """Send the tasks."""
        self.attempt = next(iter(tasks.values())).attempt
        signed = messages.under("signature/", self.shown)
        return {
            site: messages.step(
                self.place, site, "masked", {"task": to_bytes(shortest(tasks[site])), **signed}
            )
            for site in self.session.sites
        }

    def take_masked(self, site: str, reply: Reply) -> None:
        """Check a masked reply and add it to the sum. Raises InputError: it cannot be added."""
        words = self.coding.words(reply)
        if self._total is None:
            self._total = np.zeros_like(words)
        # numpy would broadcast a single word.
        if self._total.shape != words.shape:
            raise InputError(f"{site} sent {len(words)} words: expected {len(self._total)}")
        np.add(self._total, words, out=self._total)
        # Only the sum is stored, never two masked vectors.
        self.replies[site] = replace(reply, vectors={})

    def ask_open(self) -> dict[str, Step]:
        """Ask for the shares that unmask a sum over all sites of the session."""
        sites = around(self.session.circle, self.round, self.replies, "sent masked vectors")
        return {site: messages.step(self.place, site, "open", {}) for site in sites}

    def ask_consistency(self) -> dict[str, Step]:
        """Send U3, the sites in the sum, their list."""
        survivors = around(self.session.circle, self.round, self.replies, "sent masked vectors")
        block = {"survivors": "\n".join(survivors).encode()}
        return {site: messages.step(self.place, site, "consistency", block) for site in survivors}

    def take_consistency(self, site: str, answer: Step) -> None:
        """Store a site's signature of U3."""
        signature = messages.block(answer, "signature")
        what, key = keys.of_attempt(self.attempt, self.session.roster), self.session.keys[site]
        # Checked here, as an invalid one would make the other sites drop out.
        if not keys.has_signed(key, site, what, self.replies, self.place, signature):
            raise SecretsDoNotFit(f"{site} has not signed the list that it was sent")
        self.signatures[site] = signature

    def ask_unmask(self) -> dict[str, Step]:
        """Send U4, the sites that signed, t signatures of the list."""
        signed = enough(
            self.session.circle, self.round, self.signatures, "signed who is in the sum"
        )
        # t signatures rule out a second list; more would only cost checks.
        some = signed[: self.session.circle.threshold]
        blocks = messages.under("signature/", {site: self.signatures[site] for site in some})
        return {site: messages.step(self.place, site, "unmask", blocks) for site in signed}

    def take_opened(self, site: str, answer: Step) -> None:
        """Store a site's shares: of b for sites in the sum, of m for missing ones, never both."""
        found, near = messages.blocks(answer), self.session.circle.around(site)
        missing = near & (set(self.session.sites) - set(self.replies))
        if set(found) != {*("seed/" + s for s in self.replies), *("mask/" + s for s in missing)}:
            raise InputError(f"{site} opened other shares than it was asked for")
        if any(len(share) != keys.SHARE for share in found.values()):
            raise InputError(f"{site} opened shares that are not of {keys.SHARE} bytes")
        self.opened[site] = found

    def total(self) -> RingWords:
        """Return Σ e_i over U3 [L].

        Raises BelowThreshold: too few sites opened shares. SecretsDoNotFit: the shares do not give
        the secrets that sites had committed to.
        """
        enough(self.session.circle, self.round, self.opened, "opened shares")
        if self._total is None:
            raise InputError("nothing was summed: expected masked replies before shares")
        # A copy, as a retry with other shares needs the same sum.
        total, circle, adverts = self._total.copy(), self.session.circle, self.session.adverts
        # Remove each site's own mask, PRG(b).
        for site in self.replies:
            seed = self._secret("seed/" + site, site, circle.threshold, keys.is_committed)
            np.subtract(total, keys.expand_seed(seed, total), out=total)
        # Masks of pairs cancel if both are in the sum; remove those with a missing site.
        for missing in sorted(set(self.session.sites) - set(self.replies)):
            name, least = "mask/" + missing, circle.graph.shares
            mask_key = X25519PrivateKey.from_private_bytes(
                self._secret(name, missing, least, keys.is_of_advert)
            )
            for site in self.replies.keys() & circle.around(missing):
                # The missing site's mask for the other cancels the other's.
                public = adverts[site].mask_of(self.number)
                add_pair(total, mask_key, public, (missing, site), self.place, self.attempt)
        return total

    def _secret(
        self, name: str, owner: str, least: int, fits: Callable[[Advert, int, bytes], bool]
    ) -> bytes:
        """Return a site's secret from any `least` of its opened shares. Raises SecretsDoNotFit.

        fits: whether it is the secret that the site committed to. With more than `least` shares, a
        site that opens wrong ones is found by leaving out each in turn; if that fails, the owner is
        blamed for dealing them.
        """
        given = sorted(site for site, shares in self.opened.items() if name in shares)
        advert, place = self.session.adverts[owner], self.session.circle.place
        most = max(_MOST_TRIES, 1 + len(given))
        # The number of subsets grows fast; these tries suffice for a few liars.
        spare = range(max(0, len(given) - least + 1))
        subsets = chain.from_iterable(combinations(given, k) for k in spare)
        # Sites that were wrong before in this sum come first.
        for out in islice(chain([tuple(self._wrong)], subsets), most):
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
        # Leaving out each site in turn would have found a single liar, so the dealer is blamed.
        blamed = owner if len(given) > least else ""
        raise SecretsDoNotFit(f"the opened shares of {owner} do not give its secret", blamed)

    def _tell(self, owner: str, out: tuple[str, ...]) -> None:
        for site in sorted({*out} - self._wrong):
            _log.warning(
                "round %d: %s has opened a wrong share of %s, or was dealt it; the others suffice",
                self.round,
                site,
                owner,
            )
        self._wrong |= {*out}


def enough(circle: MaskingGraph, number: int, found: Mapping[str, object], what: str) -> list[str]:
    """Return the sites, sorted. number: the round's. Raises BelowThreshold: fewer than t."""
    if len(found) < circle.threshold:
        raise BelowThreshold(
            f"round {number}: {len(found)} sites {what}, and the threshold of secure aggregation "
            f"is {circle.threshold}: nothing is opened"
        )
    return sorted(found)


def around(circle: MaskingGraph, number: int, found: Mapping[str, object], what: str) -> list[str]:
    """As `enough`, but raise BelowThreshold also for too few sites in a site's neighbourhood."""
    sites = enough(circle, number, found, what)
    if not circle.holds(sites):
        raise BelowThreshold(
            f"round {number}: {len(found)} sites {what}, and a site of them has fewer than "
            f"{circle.graph.shares} of its neighbourhood among them: nothing is opened"
        )
    return sites
