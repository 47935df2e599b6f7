"""Secure aggregation in a simulation: the same protocol, with keys that last for a run.

It measures what a federation would do, and hides nothing, as one process has all records.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric import ec

from fedpact.common.errors import InputError
from fedpact.common.messages import Refusal, Reply, Step, Task, Transport
from fedpact.plan import Plan
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation import messages
from fedpact.simulation.secure_aggregation.client import Masker, UnmaskedSums
from fedpact.simulation.secure_aggregation.encoding import Coding, Form, coding_of
from fedpact.simulation.secure_aggregation.graph import MaskingGraph
from fedpact.simulation.secure_aggregation.transport import Attempts, Secured, Server, Take


def secure_simulation(
    inner: Transport, plan: Plan, sizes: Mapping[str, float], terms: Mapping[str, Terms]
) -> Secured:
    """Return a transport that returns only sums of `inner`'s replies.

    sizes: N_i of each site. terms: of each site, in a private run.
    """
    circle = MaskingGraph.of(plan, inner.sites)
    coding = coding_of(plan, sizes, terms)
    own = {site: ec.generate_private_key(ec.SECP256R1()) for site in inner.sites}
    public = {site: key.public_key() for site, key in own.items()}
    maskers = {
        site: Masker(site, key, public, circle, coding, UnmaskedSums(None))
        for site, key in own.items()
    }
    carrier = _Hall(inner, maskers, coding)
    server = Server(public, circle, coding, plan.rounds, circle.threshold, 0, carrier.layout)
    return _Simulated(carrier, server)


class _Simulated(Secured):
    """A transport of sums that trains with whole tasks instead of rebuilding them from changes."""

    def __init__(self, hall: "_Hall", server: Server) -> None:
        super().__init__(hall, server, Attempts(None))
        self._hall = hall

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        self._hall.tasks = tasks
        return super().exchange(tasks)


class _Hall:
    """A carrier to maskers in this process, whose sites train through `inner`."""

    def __init__(self, inner: Transport, maskers: Mapping[str, Masker], coding: Coding) -> None:
        self._inner, self._maskers, self._coding = inner, maskers, coding
        self._layout: Form | None = None
        self.tasks = dict[str, Task]()

    @property
    def sites(self) -> tuple[str, ...]:
        return self._inner.sites

    def layout(self, task: Task) -> Form:
        """Return the layout of the last replies."""
        if self._layout is None:
            raise InputError(f"round {task.round}: no site has replied yet")
        return self._layout

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        return self._inner.exchange(tasks)

    def within_reach(self, number: int) -> dict[str, str]:
        """Return all sites; see Carrier."""
        return dict.fromkeys(self.sites, "")

    def carry(self, asks: Mapping[str, Step], least: int, take: Take) -> dict[str, Refusal]:
        """Ask each site its question and `take` each answer that is a Step."""
        refused = dict[str, Refusal]()
        for site, question, train in self._visits(asks):
            answer = self._maskers[site].answer(question, train)
            if isinstance(answer, Refusal):
                refused[site] = answer
                continue
            why = take(site, answer)
            if why is not None:
                code = f"rejected: {why}"
                refused[site] = Refusal(question.run, question.round, site, code)
        return refused

    def _visits(
        self, asks: Mapping[str, Step]
    ) -> Iterator[tuple[str, Step, Callable[[Task], Reply | Refusal]]]:
        """Yield each site's question, and a function that trains it."""
        # Sites train for one of a session's questions only.
        if next(iter(asks.values())).step != "masked":
            yield from ((site, question, _refuse_to_train) for site, question in asks.items())
            return
        attempts = {site: messages.task_in(question).attempt for site, question in asks.items()}
        tasks = {site: replace(self.tasks[site], attempt=n) for site, n in attempts.items()}
        # The inner transport trains all sites at once; each masker gets its site's reply.
        for answer in self._inner.exchange(tasks):
            if isinstance(answer, Reply):
                self._layout = self._coding.layout(Form.of(answer.vectors, answer.numbers))

            def trained(_: Task, answer: Reply | Refusal = answer) -> Reply | Refusal:
                return answer

            yield answer.site, asks[answer.site], trained


def _refuse_to_train(task: Task) -> Reply | Refusal:
    raise InputError(f"round {task.round}: a site was asked to train at the wrong step")
