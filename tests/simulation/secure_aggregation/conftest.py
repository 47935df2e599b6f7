"""A session without any engine: sites and a server that speak through the codec."""

from dataclasses import dataclass, field, replace

import pytest
import torch

pytest.importorskip("flwr", reason="the extra fedpact[deploy] is not installed")

from cryptography.hazmat.primitives.asymmetric import ec

from fedpact.algorithms import Summed
from fedpact.common.messages import MOST_VECTORS, Reply, Task, from_bytes, to_bytes
from fedpact.simulation.secure_aggregation import encoding, messages
from fedpact.simulation.secure_aggregation.client import Masker, UnmaskedSums
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.secure_aggregation.keys import KeyContext
from fedpact.simulation.secure_aggregation.session import Session

DIMENSION = 40
SLOW = (*messages.SETUP_STEPS, "masked", "consistency", "unmask")
FAST = (*messages.SETUP_STEPS, "masked", "open")


def names(count):
    return [f"site-{i:02d}" for i in range(count)]


@dataclass
class Party:
    """`count` sites of unlike sizes with a made-up reply each, and a threshold.

    against: how many of them may be the server's; as many as the threshold bears where it is 0.
    masked: the masked replies of the last sum.
    """

    count: int
    threshold: int
    against: int = 0
    length: int = DIMENSION
    summed: Summed = Summed()  # noqa: RUF009
    sizes: dict = field(default_factory=dict)
    replies: dict = field(default_factory=dict)
    maskers: dict = field(default_factory=dict)
    mask: dict = field(default_factory=dict)

    def __post_init__(self):
        self.sites = names(self.count)
        against = self.against or 2 * self.threshold - self.count - 1
        self.circle = MaskingGraph(self.sites, self.threshold, against)
        self.keys = {site: ec.generate_private_key(ec.SECP256R1()) for site in self.sites}
        self.public = {site: key.public_key() for site, key in self.keys.items()}
        generator = torch.Generator().manual_seed(self.count)
        self.sizes = {site: 10.0 + 7 * i for i, site in enumerate(self.sites)}
        self.weighing = encoding.FixedPointMean(sum(self.sizes.values()), self.summed, self.count)
        for site in self.sites:
            w = torch.randn(self.length, generator=generator, dtype=torch.float64) * 3
            loss = float(torch.rand(1, generator=generator, dtype=torch.float64))
            reply = Reply("run", 1, site, self.sizes[site], {"w": w}, {"loss": loss})
            self.replies[site] = reply
            self.maskers[site] = self.masker(site, UnmaskedSums(None))
        self.task = Task("run", 1, "fedavg", {"w": torch.zeros(self.length).double()}, {})

    def masker(self, site, opened):
        args = site, self.keys[site], self.public, self.circle, self.weighing, opened
        return Masker(*args)

    def session(self, number=1, slots=1):
        return Session(KeyContext.new("run", number), self.public, self.circle, slots)

    def answer(self, site, question):
        """A site's answer; question and answer go through the codec."""
        most = MOST_VECTORS + 4 * self.count
        question = from_bytes(to_bytes(question), most)
        given = self.maskers[site].answer(question, lambda _: self.replies[site])
        return from_bytes(to_bytes(given), most)

    def up_to(self, session, last, away=None, number=1):
        """Carry a session through its steps, and one sum of a round, up to the step `last`.

        away: site -> the step it is gone at; from then on it is away. A session that has agreed on
        its sites goes on with its next slot. Returns the sum, or the session where it did not come
        to one.
        """
        away, this = away or {}, None
        order = FAST if last == "open" else SLOW
        steps = order[: order.index(last) + 1]
        for step in steps[3:] if session.signatures else steps:
            if step == "masked":
                this = session.slot(number, self.weighing)
                task = replace(self.task, round=number)
                asks = this.ask_masked(dict.fromkeys(self.sites, task))
                self.mask = {}
            else:
                asks = getattr(this or session, f"ask_{step}")()
            for site, question in asks.items():
                if site in away and order.index(away[site]) <= order.index(step):
                    continue
                answer = self.answer(site, question)
                if step == "masked":
                    self.mask[site] = messages.reply_in(answer)
                    this.take_masked(site, self.mask[site])
                elif step in ("open", "unmask"):
                    this.take_opened(site, answer)
                else:
                    getattr(this or session, f"take_{step}")(site, answer)
        return this or session

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
