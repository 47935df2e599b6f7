"""How an oracle's events are written down before they are released."""

from dataclasses import dataclass

from fedpact.errors import PolicyRefused
from fedpact.ledger.ledger import Ledger
from fedpact.privacy.terms import Terms
from fedpact.theory.accounting import SampledGaussian


@dataclass(frozen=True)
class Charge:
    """How an oracle's events are written down: the ledger, and what tells this request apart.

    digest: of all that the answer follows from besides records and seed, so that what a
    hypothetical ledger takes for a repetition is one. `run` has to stand for one seed.
    """

    ledger: Ledger
    run: str
    round: int
    digest: str
    attempt: int = 0

    def steps_left(self, terms: Terms) -> float:
        """Return how many of the reserved batches the ledger leaves the run."""
        return terms.steps_after(self.ledger.spent(self.run))

    def __call__(self, terms: Terms, first: int, count: int, channels: tuple[str, ...]) -> None:
        """Charge `count` joint events, the first of them the request's step `first`.

        An event is charged whole, as the terms' event, even where fewer channels are asked for.
        Raises PolicyRefused: a channel that the terms do not name, or none, or one twice.
        """
        if not channels or len(set(channels)) < len(channels) or set(channels) - set(terms.sigmas):
            raise PolicyRefused(
                f"channels {list(channels)} were asked for: this run's terms at the site name "
                f"{sorted(terms.sigmas)}, each once a batch"
            )
        self.ledger.charge(
            self.run,
            f"{self.round}/{first}/{self.digest}",
            terms.event,
            count,
            purpose=channels,
            round_number=self.round,
            attempt=self.attempt,
        )

    def once(self, event: SampledGaussian, purpose: tuple[str, ...]) -> None:
        """Charge one event of all records, which is no batch's. purpose: what it is for."""
        self.ledger.charge(
            self.run,
            f"{self.round}/once/{self.digest}",
            event,
            1,
            purpose=purpose,
            round_number=self.round,
            attempt=self.attempt,
        )
