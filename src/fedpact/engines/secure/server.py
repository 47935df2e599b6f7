"""The server's side of a session: relays keys and shares, sums what is masked, takes masks off.

It keeps a running sum, and never two masked vectors. What does not fit is the site's drop-out: a
step is asked of those who have answered the one before. With fewer than t of them nothing goes on.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

from fedpact.engines.secure import keys, wire
from fedpact.engines.secure.keys import Advert, Place, SecretsDoNotFit
from fedpact.engines.secure.ring import Coding, Words
from fedpact.engines.secure.site import add_pair
from fedpact.errors import FedpactError, InputError
from fedpact.messages import Reply, Step, Task, to_bytes
from fedpact.methods.short import shortest

_LONGEST_SHARE: Final = 1024
"""In bytes: several times what a sealed share has. What a site sends is relayed to all others."""

_MOST_TRIES: Final = 100
"""At putting a secret together; more where each single site is to be tried without. 6 s of 20."""

_log = logging.getLogger("fedpact.server")


class BelowThreshold(FedpactError):
    """Fewer sites than the threshold are left in a session, so it is given up."""


@dataclass
class Session:
    """One try at one round's sum, asked and told step by step in the order of wire.STEPS.

    keys: every site's long-term key. Each `ask_...` returns the questions to those who are still
    in it and raises BelowThreshold where they are too few; each `take_...` takes in one site's
    answer, and raises InputError or SecretsDoNotFit where it is no answer to that.
    """

    place: Place
    keys: Mapping[str, ec.EllipticCurvePublicKey]
    threshold: int
    coding: Coding
    adverts: dict[str, Advert] = field(default_factory=dict[str, Advert])
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    replies: dict[str, Reply] = field(default_factory=dict[str, Reply])
    signatures: dict[str, bytes] = field(default_factory=dict[str, bytes])
    attempt: int = 0
    opened: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    _total: Words | None = None
    _wrong: set[str] = field(default_factory=set[str])

    @staticmethod
    def of(
        run: str,
        number: int,
        public: Mapping[str, ec.EllipticCurvePublicKey],
        threshold: int,
        coding: Coding,
    ) -> "Session":
        """Return a session of a round, under a name that no other has."""
        return Session(Place(run, number, secrets.token_hex(8)), public, threshold, coding)

    def ask_keys(self) -> dict[str, Step]:
        """Ask all sites."""
        return {site: wire.step(self.place, site, "keys", {}) for site in sorted(self.keys)}

    def take_keys(self, site: str, answer: Step) -> None:
        """Take a site's keys, if it signed them."""
        advert = wire.to_advert(wire.blocks(answer))
        keys.check_adverts({site: advert}, self.keys, self.place)
        keys.check_usable(advert, site, self.place)
        self.adverts[site] = advert

    def ask_shares(self) -> dict[str, Step]:
        """Tell U1, the sites with keys, each other's."""
        blocks = wire.from_adverts(dict(sorted(self.adverts.items())))
        return {
            site: wire.step(self.place, site, "shares", blocks)
            for site in self._enough(self.adverts, "sent keys")
        }

    def take_shares(self, site: str, answer: Step) -> None:
        """Take the shares that a site sealed for the others."""
        sealed = wire.blocks(answer, "share/")
        if set(sealed) != set(self.adverts) - {site}:
            raise InputError(f"{site} sealed shares for other sites than it was told of")
        if max(map(len, sealed.values()), default=0) > _LONGEST_SHARE:
            raise InputError(f"{site} sealed shares of more than {_LONGEST_SHARE} bytes")
        self.sealed[site] = sealed

    def ask_masked(self, tasks: Mapping[str, Task]) -> dict[str, Step]:
        """Hand the shares of U2 out, with the tasks."""
        asks = dict[str, Step]()
        self.attempt = next(iter(tasks.values())).attempt
        for site in self._enough(self.sealed, "sealed shares"):
            own = {peer: sealed[site] for peer, sealed in self.sealed.items() if peer != site}
            blocks = {"task": to_bytes(shortest(tasks[site])), **wire.under("share/", own)}
            asks[site] = wire.step(self.place, site, "masked", blocks)
        return asks

    def take_masked(self, site: str, reply: Reply) -> None:
        """Add a checked masked reply to the sum. Raises InputError: it cannot be added."""
        words = self.coding.words(reply)
        self.coding.check(reply)
        if self._total is None:
            self._total = np.zeros_like(words)
        if self._total.shape != words.shape:
            raise InputError(f"{site} sent {len(words)} words: expected {len(self._total)}")
        np.add(self._total, words, out=self._total)
        # The sum is all that is kept of it.
        self.replies[site] = replace(reply, vectors={})

    def ask_consistency(self) -> dict[str, Step]:
        """Tell U3, the sites in the sum, who they are."""
        survivors = self._enough(self.replies, "sent masked vectors")
        block = {"survivors": wire.from_names(survivors)}
        return {site: wire.step(self.place, site, "consistency", block) for site in survivors}

    def take_consistency(self, site: str, answer: Step) -> None:
        """Take a site's signature of that list."""
        signature = wire.block(answer, "signature")
        if not keys.has_signed(
            self.keys[site], site, self.replies, self.attempt, self.place, signature
        ):
            raise SecretsDoNotFit(f"{site} has not signed the list that it was told")
        self.signatures[site] = signature

    def ask_unmask(self) -> dict[str, Step]:
        """Show U4, those who have signed, that at least t of them have signed the same list."""
        signed = self._enough(self.signatures, "signed who is in the sum")
        blocks = wire.under("signature/", {site: self.signatures[site] for site in signed})
        return {site: wire.step(self.place, site, "unmask", blocks) for site in signed}

    def take_unmask(self, site: str, answer: Step) -> None:
        """Take what a site opened: of each site in the sum a share of b, of the others one of m."""
        found = wire.blocks(answer)
        expected = {("seed/" if peer in self.replies else "mask/") + peer for peer in self.sealed}
        if set(found) != expected:
            raise InputError(f"{site} opened other shares than it was asked for")
        # Putting them together takes time in proportion to the longest.
        if max(map(len, found.values()), default=0) > _LONGEST_SHARE:
            raise InputError(f"{site} opened shares of more than {_LONGEST_SHARE} bytes")
        self.opened[site] = found

    def total(self) -> Words:
        """Return Σ e_i over U3, uint64 [L].

        Raises BelowThreshold: too few have opened their shares. Raises SecretsDoNotFit: those
        opened are not of the secrets that their sites had told everybody about.
        """
        self._enough(self.opened, "opened shares")
        if self._total is None:
            raise InputError("nothing was summed: expected masked replies before shares")
        total = self._total.copy()
        for site in self.replies:
            seed = self._secret("seed/" + site, site, keys.is_committed)
            np.subtract(total, keys.stream(seed, total), out=total)
        for missing in set(self.sealed) - set(self.replies):
            mask_key = self._secret("mask/" + missing, missing, keys.is_of_advert)
            for site in self.replies:
                # What the missing one would have added for the other takes that one's mask off.
                public = self.adverts[site].mask
                add_pair(total, mask_key, public, (missing, site), self.place)
        return total

    def _secret(self, name: str, owner: str, fits: Callable[[Advert, bytes], bool]) -> bytes:
        """Return a site's secret from any t of its opened shares. Raises SecretsDoNotFit: none.

        fits: whether it is what the site has told everybody about; so wrong shares do no harm while
        there are t right ones. With more than t shares, one site that opens wrong ones is found by
        leaving each out in turn, and if that does not do it, the secret's owner has dealt them.
        """
        given = sorted(self.opened)
        most = max(_MOST_TRIES, 1 + len(given))
        for out in islice(self._left_out(given), most):
            those = [site for site in given if site not in out][: self.threshold]
            try:
                secret = keys.combined([self.opened[site][name] for site in those])
            except SecretsDoNotFit:
                continue
            if fits(self.adverts[owner], secret):
                self._tell(owner, out)
                return secret
        blamed = owner if len(given) > self.threshold else ""
        raise SecretsDoNotFit(f"the opened shares of {owner} are not of what it told", blamed)

    def _left_out(self, given: list[str]) -> Iterator[tuple[str, ...]]:
        """Yield sets of sites to do without: who was wrong before in this session comes first."""
        spare = len(given) - self.threshold
        if 0 < len(self._wrong) <= spare:
            yield tuple(sorted(self._wrong))
        yield from chain.from_iterable(combinations(given, k) for k in range(spare + 1))

    def _tell(self, owner: str, out: tuple[str, ...]) -> None:
        for site in sorted({*out} - self._wrong):
            _log.warning(
                "round %d: %s has opened a wrong share of %s, or that one has dealt it; the others "
                "suffice",
                self.place.round,
                site,
                owner,
            )
        self._wrong |= {*out}

    def _enough(self, found: Mapping[str, object], what: str) -> list[str]:
        if len(found) < self.threshold:
            raise BelowThreshold(
                f"round {self.place.round}: {len(found)} sites {what}, and the threshold of secure "
                f"aggregation is {self.threshold}: nothing is opened"
            )
        return sorted(found)
