"""One file per algorithm, found by its file name.

An algorithm is a module of pure functions: the task that the server sends to the sites, what a site
computes with its oracle, and how the server combines the replies. `wrappers.base.Method` describes
them; in a file their last argument is the settings. A function that a file lacks is FedAvg's, and
missing `facts` are the safe defaults. A file also has `Settings`, a class of BaseSettings whose
fields all have sound defaults, and NEUTRAL, how it reduces to a parent, or None. The loops over
rounds and sites are elsewhere. docs/how-to/extend.md writes one from scratch.

>>> "fedavg" in names()
True
>>> load("scaffold").NEUTRAL.parent
'fedavg'
"""

import importlib
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from fedpact.common.configuration import FROZEN
from fedpact.common.errors import PlanError, nearest, with_colon
from fedpact.common.messages import State
from fedpact.common.user_code import own_factory
from fedpact.privacy.oracle import Opening, Range


@dataclass(frozen=True)
class Summed:
    """What the server's update reads of single replies, if it only needs one weighted mean.

    weight: the number in a reply that is its weight ω_i, "" for its declared size N_i.
    public: numbers that the update reads of each reply; they depend on no record. All other numbers
    and all vectors enter as Σ ω_i x_i / Σ ω_i only. why_not: why a mean is not enough; "" if it is.
    """

    weight: str = ""
    public: tuple[str, ...] = ()
    why_not: str = ""


EVEN_IS_NOT_SUMMED = Summed(
    why_not="aggregation = 'uniform' weights sites equally, and masked vectors by declared size"
)


@dataclass(frozen=True)
class MethodFacts:
    """Properties of an algorithm with its settings, known before it runs. Wrappers change some.

    The defaults are safe for any algorithm: what a file does not declare is refused.
    """

    channels: Mapping[str, float] = field(default_factory=lambda: {"gradient": 1.0})
    """What a batch releases: channel -> noise multiplier relative to the gradient's."""

    opening: Opening | None = None
    """The event that opens a round, in addition to the batches of the local steps."""

    task_numbers: Mapping[str, Range] = field(default_factory=dict[str, Range])
    """The numbers that a task may carry, each in its range; a site refuses a task with others."""

    weighs_records: bool = False
    """Whether records of a batch get different weights, which batch clipping cannot have."""

    plain_only: str = ""
    """Why a private run of it is refused; empty if it is not."""

    unprotected: bool = False
    """Whether sites release exact numbers, so that no run with it is private."""

    controlled: bool = False
    """Whether τ depends on the remaining budgets, which rounds.py writes to the state."""

    iterations: int | None = None
    """With a controlled τ: the total of local iterations; None: as many as σ allows."""

    adaptive: bool = False
    """Whether the number of events of a round may follow from what was released before, as with a
    controlled τ: then the ε of a run is what it reserved."""

    summed: Summed = Summed()
    """What the server needs of single replies: by default only their sizes."""

    needs_all_sites: str = (
        "its file does not declare that a round with some of the sites is meaningful"
    )
    """Why each round needs every site; empty if `update` needs only this round's replies, and a
    site's memory may be from any earlier round."""

    needs_own_noise: str = (
        "a site's local steps and memory are hidden by the site's own noise only, and its file "
        "does not declare that it has none"
    )
    """Why noise shared among sites would not protect it; empty if `local` is one batch's gradient
    at the task's w, linear in the reply, without memory, and the update uses the mean of the
    replies (docs/notes/noise-for-the-sum.md). The conformance suite compares both kinds."""

    sums_releases: bool = False
    """Whether each vector of a reply is the task's vector of that name, or 0, plus the round's
    released gradients times numbers that follow from the task, for any memory of the site. Masked
    replies can then be short. The conformance suite compares both."""

    scales_steps: tuple[str, ...] = ()
    """The numbers of a site's memory by which the noise of its steps is scaled."""

    excludes: Mapping[str, str] = field(default_factory=dict[str, str])
    """Part of a plan -> why it cannot be combined with the algorithm: "fairness", "control",
    "robust", "local", "local.head", "server", "server.average", "privacy.clip_schedule", or
    "privacy.mode", which is of automatic clipping."""

    opens_run: bool = False
    """Whether sites release something before the first round, in round 0."""

    coded: bool = False
    """Whether a reply's vectors are compressed blocks, whose length varies."""

    units: float = 0.0
    """The standard deviation of a release's noise in units of a coarse grid (Terms.grid), or 0."""


class BaseSettings(BaseModel):
    """The base of every algorithm's Settings: frozen, no unknown names, no conversion."""

    model_config = FROZEN

    @property
    def step_size(self) -> float | None:
        """η: the step size of the sites or, if they make no steps, of the server."""
        return getattr(self, "learning_rate", None)

    def own_model(self, w: Tensor, memory: State) -> Tensor | None:
        """Return a site's own model [d], if each site trains one; None if all use w.

        w: the server's latest [d]. memory: the site's, as of its last included reply. It must be
        computed from released numbers only; it is evaluated at that site and never sent.
        """
        return None


@dataclass(frozen=True)
class Neutral:
    """The settings under which an algorithm equals its parent; the conformance suite checks it.

    parent: the other algorithm's name. settings: of this algorithm. parent_settings: of the parent.
    Settings with the same name (learning_rate) are equal in both.
    tolerance: largest difference of any weight relative to the largest weight; 0: bit for bit.
    In a private run it holds at the same gradient σ and the same random numbers.
    """

    parent: str
    settings: Mapping[str, Any]
    parent_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tolerance: float = 0.0


def names() -> list[str]:
    """Return the names of all algorithms, sorted."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """Algorithm -> the full name of its module, in this folder or in `private`."""
    places = [path + folder for folder in ("", "/private") for path in __path__]
    # Read again once a file came or went.
    return _listed(tuple((at, os.stat(at).st_mtime_ns) for at in places if os.path.isdir(at)))


@lru_cache(maxsize=16)
def _listed(places: tuple[tuple[str, int], ...]) -> dict[str, str]:
    found = dict[str, str]()
    for path, _ in places:
        package = f"{__name__}.private" if path.endswith("/private") else __name__
        for module in pkgutil.iter_modules([path]):
            if not module.ispkg and not module.name.startswith("_"):
                found[module.name] = f"{package}.{module.name}"
    return found


def load(name: str) -> Any:
    """Return the algorithm of that name, or a user's 'package.module:name'.

    A user's is a module, or a class with these functions. Raises PlanError: there is none.
    ModelError: the user's cannot be imported.
    """
    if ":" in name:
        form = "the functions of docs/how-to/extend.md"
        found = own_factory(name, "algorithm", names(), form)
        settings = getattr(found, "Settings", None)
        fits = isinstance(settings, type) and issubclass(settings, BaseSettings)
        if not (fits and hasattr(found, "NEUTRAL")):
            lacking = "Settings, a subclass of fedpact.algorithms.BaseSettings"
            if fits:
                lacking = "NEUTRAL; NEUTRAL = None says that no settings are neutral"
            raise PlanError(
                f"algorithm is {name!r}: expected a module, or a class, with Settings and NEUTRAL, "
                f"and it lacks {lacking}; see docs/how-to/extend.md"
            )
        return found
    places = _modules()
    if name not in places:
        known = sorted(places)
        told = f"expected one of {', '.join(known)}{nearest(name, known) or with_colon(name)}"
        raise PlanError(f"algorithm is {name!r}: {told}")
    return importlib.import_module(places[name])
