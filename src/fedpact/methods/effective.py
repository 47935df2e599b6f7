"""An algorithm's settings as they are in effect: with what follows from the rest of a plan."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from fedpact.algorithms import BaseSettings
from fedpact.control import STEPS_A_ROUND, Ali

_Settings = TypeVar("_Settings", bound=BaseModel)


def with_iterations(settings: _Settings, rounds: int) -> _Settings:
    """Return what chooses τ with an R_c, by default so many a round; all else as it is."""
    if not isinstance(settings, Ali) or settings.iterations is not None:
        return settings
    if getattr(settings, "kind", "ali") == "fixed":
        return settings
    return settings.model_copy(update={"iterations": STEPS_A_ROUND * rounds})


def in_effect(settings: BaseSettings, controlled: bool) -> dict[str, Any]:
    """Return the settings as plain data, η among them. controlled: whether τ is none of them."""
    found = settings.model_dump(mode="json")
    if controlled:
        found.pop("local_steps", None)
    return found | ({"learning_rate": settings.step_size} if "learning_rate" in found else {})


def unset(
    left: Iterable[str], settings: Iterable[str], given: Iterable[str], none: Mapping[str, Any]
) -> list[str]:
    """Return the keys of a plan that nobody gave, sorted.

    left: those left to their default. settings: of the algorithm, those in effect, and `given`.
    none: key -> value; nothing given, as a whole table says it, counts as left.
    """
    found = {key for key in left if key != "settings"}
    found |= {f"settings.{key}" for key in set(settings) - set(given)}
    return sorted(found | {key for key, value in none.items() if value is None})
