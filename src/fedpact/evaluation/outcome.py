"""What a run's evaluations come to: the last one, with intervals, and what all have cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedpact.evaluation.figures import Figure, Sums, estimate_figures
from fedpact.evaluation.totals import SumsForm
from fedpact.privacy.once import FullDataRelease
from fedpact.records.rounds import RoundRecord, SumsBySite
from fedpact.theory.accounting import epsilon


def outcome(
    records: Sequence[RoundRecord], form: SumsForm, once: FullDataRelease | None
) -> dict[str, Any] | None:
    """Return the last evaluation as plain data, None where the run released none.

    figures: of all sites together; sites: of each. by_round: of all sites together after each
    evaluated round, without those of single classes and groups. Of a simulation each figure has
    what it is without noise, `exact`. epsilon_spent: site -> ε of what it has released, at delta.
    """
    done = [record for record in records if record.evaluation]
    if once is None or not done:
        return None
    last, spent = done[-1], dict[str, float]()
    for site in sorted({site for record in done for site in record.evaluation}):
        count = sum(site in record.evaluation for record in done)
        spent[site] = epsilon({once.event: count}, once.budget.delta, once.accountant)
    noise = dict.fromkeys(form.shapes, once.sigma)
    released, exact = last.evaluation, last.held_out

    def together(record: RoundRecord) -> list[dict[str, Any]]:
        sums = list(record.evaluation.values())
        return _beside(form, noise, sums, _of(record.held_out, record.evaluation))

    return {
        "round": last.round,
        "unit": form.unit,
        "level": form.settings.level,
        "epsilon": once.budget.epsilon,
        "delta": once.budget.delta,
        "epsilon_spent": spent,
        "unevaluated": dict(last.unevaluated),
        "figures": together(last),
        "by_round": [
            {"round": record.round, "figures": [f for f in together(record) if not f["of_part"]]}
            for record in done
        ],
        "sites": {
            site: _beside(form, noise, [sums], _of(exact, {site: sums}))
            for site, sums in released.items()
        },
    }


def released_accuracy(record: RoundRecord, form: SumsForm, once: FullDataRelease) -> float | None:
    """Return the accuracy of all sites together as it was released, None where it was not."""
    if not record.evaluation:
        return None
    noise = dict.fromkeys(form.shapes, once.sigma)
    found = _beside(form, noise, list(record.evaluation.values()), [])
    values = [f["value"] for f in found if (f["name"], f["about"]) == ("accuracy", "all")]
    return next((value for value in values if value is not None and value == value), None)


def exact_outcome(records: Sequence[RoundRecord], form: SumsForm) -> dict[str, Any] | None:
    """Return what a plain run's held-out records come to, exactly; None where none are held out.

    round, unit, figures, by_round, sites: as `outcome` has them. Simulator only.
    """
    done = [record for record in records if record.held_out]
    if not done:
        return None
    noise, last = dict.fromkeys(form.shapes, 0.0), done[-1]

    def together(record: RoundRecord) -> list[dict[str, Any]]:
        return _beside(form, noise, list(record.held_out.values()), [])

    return {
        "round": last.round,
        "unit": form.unit,
        "figures": together(last),
        "by_round": [
            {"round": record.round, "figures": [f for f in together(record) if not f["of_part"]]}
            for record in done
        ],
        "sites": {s: _beside(form, noise, [sums], []) for s, sums in last.held_out.items()},
    }


def exact_figures(sums: Mapping[str, Sequence[float]], form: SumsForm) -> list[Figure]:
    """Return the figures of sums without noise, as a site's owner sees them."""
    return _figures(form, [sums], dict.fromkeys(form.shapes, 0.0))


def _of(exact: SumsBySite, released: SumsBySite) -> list[Mapping[str, Sequence[float]]]:
    return [exact[site] for site in released if site in exact]


def _beside(
    form: SumsForm,
    noise: Mapping[str, float],
    released: list[Mapping[str, Sequence[float]]],
    exact: list[Mapping[str, Sequence[float]]],
) -> list[dict[str, Any]]:
    found = [_plain(figure) for figure in _figures(form, released, noise)]
    if exact:
        known = _figures(form, exact, dict.fromkeys(noise, 0.0))
        for figure, without in zip(found, known, strict=True):
            figure["exact"] = _number(without.value)
    return found


def _figures(
    form: SumsForm, sums: list[Mapping[str, Sequence[float]]], noise: Mapping[str, float]
) -> list[Figure]:
    return estimate_figures(
        Sums.add(sums, noise), form.settings, form.classes, form.groups, form.unit
    )


def _plain(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "value": _number(figure.value), "of_part": figure.of_part}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
