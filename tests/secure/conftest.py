"""A session without any engine: sites and a server that speak through the codec."""

from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("flwr", reason="the extra fedpact[deploy] is not installed")

from cryptography.hazmat.primitives.asymmetric import ec

from fedpact.algorithms import Summed
from fedpact.engines.secure import ring, wire
from fedpact.engines.secure.server import Session
from fedpact.engines.secure.site import Masker, Opened
from fedpact.messages import Reply, Task, from_bytes, to_bytes

DIMENSION = 40


def names(count):
    return [f"site-{i:02d}" for i in range(count)]


@dataclass
class Party:
    """`count` sites of unlike sizes with a made-up reply each, and a threshold."""

    count: int
    threshold: int
    length: int = DIMENSION
    summed: Summed = Summed()  # noqa: RUF009
    sizes: dict = field(default_factory=dict)
    replies: dict = field(default_factory=dict)
    maskers: dict = field(default_factory=dict)

    def __post_init__(self):
        self.sites = names(self.count)
        self.keys = {site: ec.generate_private_key(ec.SECP384R1()) for site in self.sites}
        self.public = {site: key.public_key() for site, key in self.keys.items()}
        generator = torch.Generator().manual_seed(self.count)
        self.sizes = {site: 10.0 + 7 * i for i, site in enumerate(self.sites)}
        self.weighing = ring.Weighing(sum(self.sizes.values()), self.summed, self.count)
        for site in self.sites:
            w = torch.randn(self.length, generator=generator, dtype=torch.float64) * 3
            loss = float(torch.rand(1, generator=generator, dtype=torch.float64))
            reply = Reply("run", 1, site, self.sizes[site], {"w": w}, {"loss": loss})
            self.replies[site] = reply
            self.maskers[site] = self.masker(site, Opened(None))
        self.task = Task("run", 1, "fedavg", {"w": torch.zeros(self.length).double()}, {})

    def masker(self, site, opened):
        args = site, self.keys[site], self.public, self.threshold, self.weighing, opened
        return Masker(*args)

    def session(self, number=1):
        return Session.of("run", number, self.public, self.threshold, self.weighing)

    def answer(self, site, question):
        """A site's answer; question and answer go through the codec."""
        question = from_bytes(to_bytes(question))
        given = self.maskers[site].answer(question, lambda _: self.replies[site])
        return from_bytes(to_bytes(given))

    def up_to(self, session, last, away=None):
        """Carry a session through its steps up to `last`. away: site -> the step it is gone at.

        A site that is away at a step is away from then on. Returns the masked replies.
        """
        away, masked = away or {}, {}
        order = wire.STEPS
        for step in order[: order.index(last) + 1]:
            asks = {
                "keys": session.ask_keys,
                "shares": session.ask_shares,
                "masked": lambda: session.ask_masked(dict.fromkeys(self.sites, self.task)),
                "consistency": session.ask_consistency,
                "unmask": session.ask_unmask,
            }[step]()
            for site, question in asks.items():
                if site in away and order.index(away[site]) <= order.index(step):
                    continue
                answer = self.answer(site, question)
                if step == "masked":
                    masked[site] = wire.reply_in(answer)
                    session.take_masked(site, masked[site])
                else:
                    getattr(session, f"take_{step}")(site, answer)
        return masked

    def mean(self, sites):
        """Σ N_i x_i / Σ N_i of these sites' vectors and losses, in float64."""
        weights = torch.tensor([self.sizes[site] for site in sites], dtype=torch.float64)
        w = torch.stack([self.replies[site].vectors["w"] for site in sites])
        losses = [self.replies[site].numbers["loss"] for site in sites]
        share = weights / weights.sum()
        return share @ w, float(share @ torch.tensor(losses, dtype=torch.float64))


@pytest.fixture
def party():
    return Party
