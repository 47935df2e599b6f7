"""Who takes part in a comparison: named plans, and the seeds they all run with."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpact import algorithms, check
from fedpact.configuration import key_of
from fedpact.errors import InputError, PlanError
from fedpact.plan import Plan
from fedpact.report.equality import DATA, differences

_ALONE = {"local": ("mr_mtl", ("settings.proximal=0.0", "settings.proximal_noise=0.0"))}
"""A name for `--algorithms` -> the algorithm that it is, with what is set."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def read_plans(
    configs: Sequence[Path], chosen: Sequence[str] = (), overrides: Sequence[str] = ()
) -> dict[str, Plan]:
    """Return the plans of configuration files, each once with every chosen algorithm, by name.

    Without a file it is the embedded default, whose settings are those of its own algorithm alone;
    without chosen algorithms, each file's own.
    "local" is each site by itself, under the same privacy: mr_mtl with λ = κ = 0. Of a
    file's [settings], an algorithm gets those that it knows; an override `settings.KEY=VALUE` goes
    to the algorithms that know KEY. Raises PlanError: a file or an override that does not fit, or a
    setting that none of the algorithms knows.
    """
    found: dict[str, Plan] = {}
    for config in configs or [None]:
        stem = _file_name(config.stem) if config else "default"
        if not chosen:
            _add(found, stem, Plan.read(config, overrides))
        for algorithm in chosen:
            name = algorithm if len(configs) < 2 else f"{stem}-{algorithm}"
            _add(found, name, _with_algorithm(config, algorithm, overrides))
    _all_known(chosen, overrides)
    return found


def name_plans(plans: Plan | Mapping[str, Plan] | Sequence[Plan]) -> dict[str, Plan]:
    """Return plans by name: as given, or named by algorithm and numbered where it repeats.

    Raises InputError: no plan, something else, or a name that cannot be a folder's.
    """
    found: dict[str, Plan] = {}
    if isinstance(plans, Mapping):
        found.update({name: _plan(plan) for name, plan in plans.items()})
    else:
        # A path is no list of plans, and text is one of letters.
        alone = isinstance(plans, Plan | str | Path) or not isinstance(plans, Iterable)
        for plan in map(_plan, [plans] if alone else plans):
            _add(found, plan.algorithm, plan)
    if not found:
        raise InputError("there is nothing to compare: give at least one plan")
    for name in found:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"an entry is called {name!r}: expected letters, digits, '.', '_' and '-', a letter"
                " or digit first, as it names a folder"
            )
    if len({name.casefold() for name in found}) < len(found):
        raise InputError(
            f"entries are called {', '.join(found)}: expected names that differ by more than case, "
            "as they name folders"
        )
    return found


def _plan(given: Any) -> Plan:
    if isinstance(given, Plan):
        return given
    if isinstance(given, str | Path):
        of = f"the text or path {str(given)!r}: read it by fedpact.Plan.read({str(given)!r})"
    else:
        of = f"a {type(given).__name__}: make a plan of it, as by fedpact.Plan.parse({{...}})"
    raise InputError(f"plans holds {of}; expected plans, in a list or by name")


def comparable(plans: Mapping[str, Plan]) -> None:
    """Refuse plans of which no figure means the same, or whose runs would not be independent.

    Raises PlanError: their data differ, or a plan keeps ledgers across runs.
    """
    found = differences({name: plan.document() for name, plan in plans.items()})
    for difference in found:
        if difference.key in DATA:
            values = ", ".join(f"{name}: {value}" for name, value in difference.values.items())
            raise PlanError(
                f"the plans differ in {difference.key} ({values}): accuracy and Ψ of different "
                "records have nothing in common; compare runs on the same data"
            )
    for name, plan in plans.items():
        if plan.run.ledgers is not None:
            raise PlanError(
                f"{name}: run.ledgers is {plan.run.ledgers!r}: the runs of a comparison are "
                "alternatives, and in ledgers that are kept across runs each would pay for the "
                "others; leave it out"
            )


def seeds_of(plans: Mapping[str, Plan], seeds: int | Sequence[int]) -> list[int]:
    """Return the seeds that every entry runs with: those given, or so many from the first plan's.

    Raises InputError: no seed, one that is no integer >= 0, or one twice.
    """
    if not isinstance(seeds, Iterable):
        first = next(iter(plans.values())).seed
        return [first + i for i in range(check.count(seeds=seeds))]
    found = [check.natural(seed=seed) for seed in seeds]
    if not found or len(set(found)) < len(found):
        raise InputError(f"seeds are {found}: expected at least one, each once")
    return found


def reseed(plan: Plan, seed: int, workers: int) -> Plan:
    """Return a plan with another seed and, unless it names a number of workers, so many."""
    raw = plan.document()
    raw["seed"] = seed
    raw["run"]["workers"] = plan.run.workers or workers
    return Plan.parse(raw)


def _with_algorithm(config: Path | None, chosen: str, overrides: Sequence[str]) -> Plan:
    algorithm, fixed = _ALONE.get(chosen, (chosen, ()))
    general = [text for text in overrides if _setting(text) is None]
    base = Plan.read(config, general)
    # The embedded configuration's settings are its own algorithm's.
    own = base.settings if config or algorithm == base.algorithm else {}
    fields = _fields(algorithm)
    # A list or a plain value reads the same in JSON and in TOML.
    kept = [f"settings.{key}={json.dumps(own[key])}" for key in own if key in fields]
    mine = [text for text in overrides if _setting(text) in fields]
    return Plan.read(
        config, [*general, f"algorithm={algorithm}", "settings={}", *kept, *mine, *fixed]
    )


def _all_known(chosen: Sequence[str], overrides: Sequence[str]) -> None:
    for text in overrides:
        key = _setting(text)
        if chosen and key is not None and not any(key in _fields(name) for name in chosen):
            known = sorted({field for name in chosen for field in _fields(name)})
            raise PlanError(
                f"--set {text!r}: settings.{key} is no setting of {' or '.join(chosen)}: expected "
                f"one of {', '.join(known)}"
            )


def _fields(algorithm: str) -> dict[str, Any]:
    return dict(algorithms.load(_ALONE.get(algorithm, (algorithm,))[0]).Settings.model_fields)


def _setting(override: str) -> str | None:
    key = key_of(override)
    return key.split(".")[1] if key.startswith("settings.") else None


def _add(found: dict[str, Plan], name: str, plan: Plan) -> None:
    free = (f"{name}-{i}" if i > 1 else name for i in range(1, len(found) + 2))
    found[next(other for other in free if other not in found)] = plan


def _file_name(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-_") or "plan"
