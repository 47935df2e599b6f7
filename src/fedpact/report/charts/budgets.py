"""What the run spends against what it may: ε of each site, and bytes.

Each figure takes the run and returns a Drawing, or None where there is nothing to draw.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from fedpact.messages import RoundRecord
from fedpact.report.charts.drawing import (
    BLUE,
    GREEN,
    INK,
    MANY,
    ORANGE,
    RED,
    Drawing,
    Sheet,
    marker,
    rounds_axis,
    thin,
)
from fedpact.report.reading import RunFolder, SitePrivacy
from fedpact.text import choose_byte_unit, size, upper

_COLOURS = (BLUE, GREEN, RED)

Sites = Mapping[str, SitePrivacy]


def draw_epsilon(run: RunFolder) -> Drawing | None:
    """ε spent over rounds by each site, against the budgets; None in a plain run.

    With more different budgets than a chart can tell apart, ε is drawn as a share of its own.
    """
    records = thin([record for record in run.records if record.epsilon])
    if not (run.private and records):
        return None
    title = "ε spent over rounds"
    groups = _by_budget(run.site_privacy)
    shares = len(groups) > len(_COLOURS)
    with Sheet() as sheet:
        axes = sheet.axes("round", "share of the budget's ε" if shares else "ε")
        if shares:
            _spending(axes, records, run.site_privacy, BLUE, relative=True)
            axes.axhline(1, color=INK, lw=1.2, ls="--", label="budget")
        else:
            for colour, sites in zip(_COLOURS, groups.values(), strict=False):
                _spending(axes, records, sites, colour)
            for colour, (allowed, delta) in zip(_COLOURS, groups, strict=False):
                budget = f"budget (ε = {upper(allowed)}, δ = {upper(delta)})"
                axes.axhline(allowed, color=colour, lw=1.2, ls="--", label=budget)
        axes.set_ylim(bottom=0)
        rounds_axis(axes)
    return Drawing(title, sheet.chart, _caption(run, groups, shares))


def _by_budget(sites: Sites) -> dict[tuple[float, float], dict[str, SitePrivacy]]:
    groups: dict[tuple[float, float], dict[str, SitePrivacy]] = {}
    for name, site in sites.items():
        groups.setdefault((site.epsilon_allowed, site.delta), {})[name] = site
    return dict(sorted(groups.items()))


def _spending(
    axes: Axes,
    records: Sequence[RoundRecord],
    sites: Sites,
    colour: str,
    *,
    relative: bool = False,
) -> None:
    rounds = np.array([record.round for record in records])
    spent = np.array([[r.epsilon.get(name, np.nan) for name in sites] for r in records], float)
    if relative:
        spent = spent / [site.epsilon_allowed for site in sites.values()]
    # What is infinite or unknown leaves a gap.
    spent[~np.isfinite(spent)] = np.nan
    label = f"{len(sites):,} sites" if len(sites) > 1 else "1 site"
    if len(sites) <= MANY:
        for i, column in enumerate(spent.T):
            axes.plot(
                rounds,
                column,
                color=colour,
                lw=1.4,
                alpha=0.8,
                marker=marker(len(rounds)),
                ms=3,
                label="_" if i else label,
            )
        return
    known = ~np.isnan(spent).all(1)
    low, middle, high = np.nanquantile(spent[known], (0, 0.5, 1), axis=1)
    axes.fill_between(
        rounds[known], low, high, color=colour, alpha=0.18, lw=0, label=f"all {label}"
    )
    axes.plot(rounds[known], middle, color=colour, label="median site")


def _caption(run: RunFolder, groups: Mapping[tuple[float, float], object], shares: bool) -> str:
    privacy = run.privacy
    guarantee = (
        f"Upper bounds on ε at each site's δ; adjacency: {privacy['adjacency']}; accountant: "
        f"{privacy['accountant']}. "
    )
    if shares:
        guarantee += (
            f"The sites have {len(groups)} different budgets, so each is drawn as a share of its "
            "own. "
        )
    if privacy.get("honest"):
        alone = max(site.epsilon_alone for site in run.site_privacy.values())
        guarantee += (
            f"They need the noise of {privacy['honest']} honest sites in each sum; ε alone, "
            f"against everybody together, is at most {upper(alone)}. "
        )
    return guarantee + "No line may cross its dashed budget: a site stops answering before it does."


def traffic(run: RunFolder) -> Drawing | None:
    """Bytes sent so far over rounds, both ways, against the budget of bytes if there is one."""
    down = np.cumsum([record.bytes_down for record in run.records])
    up = np.cumsum([record.bytes_up for record in run.records])
    whole = int(down[-1] + up[-1])
    if not whole:
        return None
    title = "Bytes over rounds"
    allowed = run.bytes_allowed
    value, unit = choose_byte_unit(max(whole, allowed or 0))
    kept = thin(range(len(run.records)))
    rounds = [run.records[i].round for i in kept]
    with Sheet() as sheet:
        axes = sheet.axes("round", f"sent so far ({unit})")
        axes.stackplot(
            rounds,
            down[kept] / value,
            up[kept] / value,
            colors=(BLUE, ORANGE),
            alpha=0.75,
            labels=("to the sites", "from the sites"),
        )
        if allowed:
            line = f"budget {size(allowed)}"
            axes.axhline(allowed / value, color=INK, lw=1.2, ls="--", label=line)
        axes.set_ylim(bottom=0)
        rounds_axis(axes)
    caption = (
        "Messages as encoded, all sites together, added up over rounds. A straight line means that "
        "every round costs the same; it bends where sites stop answering."
    )
    return Drawing(title, sheet.chart, caption)
