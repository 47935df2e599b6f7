"""One file an algorithm, found by its file name.

An algorithm is a module of pure functions, described by `Algorithm`: what the server tells the
sites, what a site does with its oracle, what the server does with the replies. The loops over
rounds and over sites belong to the engine. docs/how-to/extend.md writes one from scratch.

>>> "fedavg" in names()
True
>>> load("scaffold").NEUTRAL.parent
'fedavg'
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from pydantic import BaseModel
from torch import Tensor

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError, nearest
from fedpact.common.messages import Local, Reply, State, Task
from fedpact.common.user_code import own_factory
from fedpact.privacy.oracle import Opening, Oracle, Range, Terms


@dataclass(frozen=True)
class Summed:
    """What the server's update takes from single replies, where it is one weighted mean of them.

    weight: the number in a reply that is its weight ω_i, "" for its declared size N_i.
    public: numbers that the update reads of each reply; they depend on no record. All others, and
    all vectors, it uses as Σ ω_i x_i / Σ ω_i only. why_not: why that is not enough; "" if it is.
    """

    weight: str = ""
    public: tuple[str, ...] = ()
    why_not: str = ""


EVEN_IS_NOT_SUMMED = Summed(
    why_not="aggregation = 'uniform' counts sites alike, and masked vectors count by declared size"
)


@dataclass(frozen=True)
class MethodFacts:
    """What is known of an algorithm with its settings before it runs. A wrapper replaces some.

    The defaults are what holds for any algorithm: what a file does not say of itself is refused.
    """

    channels: Mapping[str, float] = field(default_factory=lambda: {"gradient": 1.0})
    """What a batch releases: channel -> noise multiplier relative to the gradient's."""

    opening: Opening | None = None
    """What opens a round beside the batches of its local steps."""

    task_numbers: Mapping[str, Range] = field(default_factory=dict[str, Range])
    """The numbers that a task may carry, each in its range; a site refuses a task with others."""

    weighs_records: bool = False
    """Whether records of a batch get unlike weights, which batch clipping has no place for."""

    plain_only: str = ""
    """Why a private run of it is refused; empty where it is not."""

    unprotected: bool = False
    """Whether it lets exact numbers out of the sites, so that no run with it is private."""

    controlled: bool = False
    """Whether τ follows what is left of the budgets, which rounds.py writes to the state."""

    iterations: int | None = None
    """Of a controlled τ: the local iterations of all rounds together; None: what σ allows."""

    summed: Summed = Summed()
    """What secure aggregation has to leave of single replies: by default their sizes only."""

    needs_all_sites: str = (
        "its file does not say that a round of some of the sites is what its paper means"
    )
    """Why each round needs every site; empty where `update` asks for no more than this round's
    replies, and a site's memory may be of any earlier round."""

    needs_own_noise: str = (
        "a site's own steps and memory are hidden by the site's own noise alone, and its file "
        "does not say that it has none"
    )
    """Why noise that sites share out would not protect it; empty where `local` is one batch's
    gradient at the task's w, which enters the reply linearly, nothing is remembered and the update
    uses the replies' mean: see docs/notes/noise-for-the-sum.md; the conformance suite compares
    both."""

    excludes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Part of a plan -> why it does not go with the algorithm: "fairness", "control", "robust",
    "local", "local.head", "server", or "privacy.clip_schedule"."""

    opens_run: bool = False
    """Whether sites release something before the first round, in round 0."""

    coded: bool = False
    """Whether a reply's vectors are blocks of codes, as long as they came out."""

    units: float = 0.0
    """The deviation of releases' noise in units of a coarse grid (Terms.grid), or 0."""


class BaseSettings(BaseModel):
    """The base of every algorithm's Settings: frozen, no unknown names, no conversion."""

    model_config = FROZEN

    @property
    def step_size(self) -> float | None:
        """η: the length of a step, of a site or, where sites make none, of the server."""
        return getattr(self, "learning_rate", None)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d], where each trains one; None where w is everybody's.

        w: the server's newest [d]. memory: what the site remembers of its last included reply. Made
        of released numbers alone; what is evaluated at that site, and nowhere sent.
        """
        del w, memory
        return None


@dataclass(frozen=True)
class Neutral:
    """The settings under which an algorithm is its parent, which the conformance suite checks.

    parent: the other algorithm's name. settings: ours that make it neutral. parent_settings: the
    parent's that go with them. Settings of equal name (learning_rate) are equal in both.
    tolerance: largest difference of any weight relative to the largest weight; 0 is bit for bit.
    In a private run it holds at the same gradient σ and the same draws.
    """

    parent: str
    settings: Mapping[str, Any]
    parent_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tolerance: float = 0.0


class Algorithm(Protocol):
    """The functions and names of an algorithm's module. `settings` is its own Settings.

    A function may be left out: it is then FedAvg's, and `facts` those of an algorithm of which
    nothing is known (`wrappers.base.Method`).
    """

    Settings: type[BaseSettings]
    """The [settings] table of a plan; every field has a sound default."""

    NEUTRAL: Neutral | None
    """How it reduces to a parent, or None."""

    __name__: str

    def facts(self, settings: Any) -> MethodFacts:
        """Return what is known of it before it runs."""
        ...

    def steps(self, settings: Any, state: State | None = None) -> int:
        """Return the local iterations τ of the next round: at most so many batches are asked for.

        state: the server's, for an algorithm that changes τ; None asks for the most there can be.
        Where a controller around the algorithm chooses τ, the task's "local_steps" says so.
        """
        ...

    def init(self, w: Tensor, settings: Any) -> State:
        """Return the server's first state, from the initial model w [d]."""
        ...

    def task(self, state: State, settings: Any) -> State:
        """Return what every site is told: "w" [d] and whatever else crosses the wire."""
        ...

    def public_numbers(self, task: Task, terms: Terms, settings: Any) -> dict[str, Range]:
        """Return the numbers of a reply that follow from the task and a site's terms.

        The server rejects a reply with another one, as no site is to choose by how much it counts.
        Of all other numbers and vectors a site may say what it likes within privacy.reply_bounds,
        so `update` has to clamp what it divides by or takes a root of.
        """
        ...

    def local(self, task: Task, oracle: Oracle, memory: State, settings: Any) -> Local:
        """Return a site's reply and its next memory. Leaves the task and the memory as they are.

        memory: what this function returned when its reply was last included; empty at first.
        """
        ...

    def update(self, state: State, replies: Iterable[Reply], settings: Any) -> State:
        """Return the server's next state.

        replies: at least one, in the order of site names, computed as they are asked for: they are
        to be folded, never collected. Where it raises, or the state is not finite, the loop finds
        out by which of them (algorithms.wrappers.robust). reply.weight is N_i, so p_i = N_i / Σ N.
        """
        ...


def names() -> list[str]:
    """Return the names of all algorithms, sorted."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """Algorithm -> the full name of its module, in this folder or in `private`."""
    found = dict[str, str]()
    for folder in ("", "/private"):
        for module in pkgutil.iter_modules([path + folder for path in __path__]):
            if not module.ispkg and not module.name.startswith("_"):
                found[module.name] = __name__ + folder.replace("/", ".") + "." + module.name
    return found


def load(name: str) -> Algorithm:
    """Return the algorithm of that name, or of a user's own 'package.module:name'.

    Which is a module, or a class with these names. Raises PlanError: there is none. ModelError:
    the user's cannot be imported.
    """
    if ":" in name:
        form = "the functions of fedpact.algorithms.Algorithm"
        found = own_factory(name, "algorithm", names(), form)
        settings = getattr(found, "Settings", None)
        if not (isinstance(settings, type) and issubclass(settings, BaseSettings)):
            raise PlanError(
                f"algorithm is {name!r}: expected a module, or a class, with Settings, a subclass "
                "of fedpact.algorithms.BaseSettings, and NEUTRAL; see docs/how-to/extend.md"
            )
        return cast(Algorithm, found)
    # One that is loaded is known: to look through the folder is most of reading a short plan.
    loaded = sys.modules.get(f"{__name__}.{name}")
    if loaded is not None and not hasattr(loaded, "__path__"):
        return cast(Algorithm, loaded)
    places = _modules()
    if name not in places:
        known = sorted(places)
        told = f"expected one of {', '.join(known)}{nearest(name, known)}"
        raise PlanError(f"algorithm is {name!r}: {told}")
    return cast(Algorithm, importlib.import_module(places[name]))
