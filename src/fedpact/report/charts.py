"""The charts of a run. Each function returns a Chart, or None if there is nothing to draw."""

import math
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.ticker import FuncFormatter

from fedpact.common.format import choose_byte_unit, count_noun, number, percent, size, upper
from fedpact.evaluation.metrics import METRICS, find_display, ranking
from fedpact.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MANY,
    ORANGE,
    RED,
    Chart,
    log_axis,
    marker,
    percent_axis,
    rounds_axis,
    sheet,
    shorten,
    thin,
)
from fedpact.report.run_summary import RunSummary


def draw_epsilon(run: RunSummary) -> Chart | None:
    """ε spent by each site over rounds, and the budget; None in a plain run.

    With different budgets, ε is drawn as a share of each site's budget.
    """
    records = thin([record for record in run.records if record.epsilon])
    if not (run.private and records):
        return None
    sites = run.site_privacy
    budgets = {(site.epsilon_allowed, site.delta) for site in sites.values()}
    allowed, delta = max(budgets)
    shares = len(budgets) > 1
    rounds = np.array([record.round for record in records])
    spent = np.array([[r.epsilon.get(name, np.nan) for name in sites] for r in records], float)
    if shares:
        spent = spent / [site.epsilon_allowed for site in sites.values()]
    # Infinite and unknown values leave a gap.
    spent[~np.isfinite(spent)] = np.nan
    with sheet() as chart:
        axes = chart.pair("round", "share of the budget's ε" if shares else "ε")
        label = count_noun(len(sites), "site")
        if len(sites) <= MANY:
            look: dict[str, Any] = {"lw": 1.4, "alpha": 0.8, "marker": marker(len(rounds)), "ms": 3}
            for i, column in enumerate(spent.T):
                axes.plot(rounds, column, color=BLUE, label="_" if i else label, **look)
        else:
            known = ~np.isnan(spent).all(1)
            low, middle, high = np.nanquantile(spent[known], (0, 0.5, 1), axis=1)
            label = f"all {label}"
            axes.fill_between(rounds[known], low, high, color=BLUE, alpha=0.18, lw=0, label=label)
            axes.plot(rounds[known], middle, color=BLUE, label="median site")
        budget = "budget" if shares else f"budget (ε = {upper(allowed)}, δ = {upper(delta)})"
        axes.axhline(1 if shares else allowed, color=INK, lw=1.2, ls="--", label=budget)
        axes.set_ylim(bottom=0)
        rounds_axis(axes)
    caption = (
        f"Upper bounds on ε at each site's δ; adjacency: {run.privacy['adjacency']}; accountant: "
        f"{run.privacy['accountant']}. "
    )
    if shares:
        caption += (
            f"The sites have {len(budgets)} different budgets, so each curve is relative to its "
            "own budget. "
        )
    if run.spent and run.spent.condition:
        caption += (
            f"They assume {run.spent.condition}; if all others collude, ε is at most "
            f"{upper(run.spent.alone)}. "
        )
    caption += "No line may cross its dashed budget: a site stops answering before it does."
    return chart.named("ε spent over rounds", caption)


def traffic(run: RunSummary) -> Chart | None:
    """Bytes sent so far over rounds, both ways, and the budget of bytes."""
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
    with sheet() as chart:
        axes = chart.pair("round", f"sent so far ({unit})")
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
    return chart.named(title, caption)


# From transparent to half a colour, on which text is legible.
_SHARE = LinearSegmentedColormap.from_list("share", [to_rgba(BLUE, a) for a in (0.0, 0.5)])
_WRITTEN = 8
"""Up to this number of sites, cells of the partition have room for their counts."""


def accuracy(run: RunSummary) -> Chart | None:
    """Global accuracy over rounds, with the middle 80 % of the sites and the worst one."""
    records = thin([r for r in run.evaluated if math.isfinite(r.accuracy or 0.0)])
    if not records:
        return None
    title = "Accuracy over rounds"
    with sheet() as chart:
        axes = chart.pair("round", "accuracy")
        rounds = [r.round for r in records]
        values = np.array([r.accuracy for r in records], dtype=float)
        axes.plot(rounds, values, color=BLUE, marker=marker(len(rounds)), ms=3.5, label="global")
        kept = [r for r in records if r.average]
        if kept:
            averages = [r.average["accuracy"] for r in kept]
            axes.plot([r.round for r in kept], averages, color=BLUE, ls=":", label="averaged")
        spread = [(r.round, [s.accuracy for s in r.scores.values()]) for r in records if r.scores]
        if spread:
            x = [at for at, _ in spread]
            low, high = (np.array([np.quantile(v, q) for _, v in spread]) for q in (0.1, 0.9))
            label = "sites, middle 80 %"
            axes.fill_between(x, low, high, color=BLUE, alpha=0.15, lw=0, label=label)
            worst = [min(v) for _, v in spread]
            axes.plot(x, worst, color=RED, lw=1.1, ls="--", label="worst site")
        percent_axis(axes)
        rounds_axis(axes)
    caption = "A global line that has flattened out has converged."
    if spread:
        caption += (
            " A wide band, or a worst site far below the line, means a model that serves some sites"
            " and not others."
        )
    return chart.named(title, caption, simulator_only=bool(spread))


def metric(run: RunSummary, name: str) -> Chart | None:
    """A metric over rounds; METRICS on a logarithmic axis if they span orders of magnitude."""
    known = [(r.round, r.metrics[name]) for r in run.records if name in r.metrics]
    label, about = find_display(name).label, find_display(name).about
    return _over_rounds(label, known, about, simulator_only=True, log=name in METRICS)


def draw_loss(run: RunSummary) -> Chart | None:
    """Mean loss over rounds, for a run without an accuracy."""
    known = [(r.round, r.loss) for r in run.records if r.loss is not None]
    if run.counted:
        return None
    about = "The mean loss of the global model, which training lowers; 0 is exact."
    return _over_rounds("mean loss", known, about, simulator_only=run.pooled)


def _over_rounds(
    label: str,
    known: list[tuple[int, float]],
    about: str,
    *,
    simulator_only: bool,
    log: bool = True,
) -> Chart | None:
    points = thin([(at, value) for at, value in known if math.isfinite(value)])
    if not points:
        return None
    title = f"{label[:1].upper()}{label[1:]} over rounds"
    with sheet() as chart:
        axes = chart.pair("round", label)
        rounds, values = zip(*points, strict=True)
        axes.plot(rounds, values, color=GREEN, marker=marker(len(points)), ms=3.5)
        if log and min(values) > 0 and max(values) > 30 * min(values):
            log_axis(axes)
        else:
            # What is far below 0, as R² before training, would flatten the rest.
            lowest, highest = min(0.0, *values), max(values)
            axes.set_ylim(max(-1.0, 1.08 * lowest), 1.08 * highest if highest > 0 else 0.05)
        rounds_axis(axes)
    caption = about
    if min(values) < -1:
        caption += f" It was {number(min(values))} at worst; what is below -1 is not drawn."
    lost = sum(1 for _, value in known if not math.isfinite(value))
    if lost:
        caption += (
            f" In {count_noun(lost, 'round')} {label} was not finite and is not drawn: the model "
            "diverged."
        )
    return chart.named(title, caption, simulator_only=simulator_only)


def site_accuracy(run: RunSummary) -> Chart | None:
    """Accuracy of each site, worst first; the worst ones if there are many sites."""
    scores = {n: s for n, s in run.scores.items() if math.isfinite(s.accuracy)}
    if not scores:
        return None
    names = ranking(scores)[:MANY]
    values = [scores[name].accuracy for name in names]
    overall = run.evaluated[-1].accuracy if run.evaluated else None
    with sheet(0.75 + 0.24 * len(names)) as chart:
        axes, at = chart.pair("accuracy", ""), range(len(names))
        axes.barh(at, values, height=0.68, color=[RED] + [BLUE] * (len(names) - 1))
        for y, value in enumerate(values):
            # Outside the axes, where no line crosses the text.
            beside = axes.get_yaxis_transform()
            axes.text(1.02, y, percent(value), transform=beside, va="center", color=INK)
        axes.set_yticks(at, [shorten(name, 14) for name in names])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, 1.05 * max(*values, 0.01))
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        percent_axis(axes, "x")
        if overall is not None and math.isfinite(overall):
            label = f"global {percent(overall)}"
            axes.axvline(overall, color=INK, lw=1.2, ls="--", label=label)
    which = (
        f"The worst {len(names)} of {len(scores):,} sites" if len(scores) > MANY else "The sites"
    )
    caption = (
        f"{which}, the worst first, on their own held-out records. Look at how far the top bar "
        "stays behind the dashed global line."
    )
    return chart.named("Accuracy of the sites", caption, simulator_only=True)


def draw_labels(run: RunSummary) -> Chart | None:
    """The partition: sizes above, the share of each label below."""
    if not run.partition:
        return None
    title, sites = "Who holds what", run.partition["sites"]
    labels, counts = run.partition["classes"], run.partition["label_counts"]
    many = len(sites) > MANY
    if many:
        # Sorted by their most frequent label, even a thousand sites show how uneven they are.
        purity = counts.max(1) / np.maximum(counts.sum(1), 1)
        counts = counts[np.lexsort((-purity, counts.argmax(1)))]
    sizes = counts.sum(1)
    names = [] if many else [shorten(name, 12) for name in sites]
    upright = sum(map(len, names)) > 40
    with sheet(1.7 + 0.17 * min(len(labels), MANY) + 0.7 * upright) as chart:
        top, below = chart.subplots(2, 1, sharex=True, height_ratios=(1, 2.8))
        top.bar(range(len(sizes)), sizes, width=1.0 if many else 0.7, color=GREY)
        top.set_ylabel("records")
        top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        shares = counts / np.maximum(sizes[:, None], 1)
        edges = [np.arange(n + 1) - 0.5 for n in counts.shape]
        raster = many or len(labels) > MANY
        below.pcolormesh(*edges, shares.T, cmap=_SHARE, vmin=0, vmax=1, rasterized=raster)
        below.invert_yaxis()
        below.grid(visible=False)
        # With many labels only every n-th is named.
        at = range(0, len(labels), math.ceil(len(labels) / MANY))
        below.set_yticks(at, [shorten(labels[i], 16) for i in at])
        below.set_ylabel("label")
        below.set_xlabel(f"{len(sites):,} sites" if many else "")
        below.set_xticks(range(len(names)), names, rotation=90 if upright else 0)
        if len(names) <= _WRITTEN and not raster:
            for (site, label), count in np.ndenumerate(counts):
                if count:
                    below.text(site, label, f"{count:.0f}", color=INK, ha="center", va="center")
    caption = (
        f"Training records of {count_noun(len(sites), 'site')} (columns) by label (rows). "
        "Darker cells: the label makes up more of the site. Similar columns mean similar label "
        "distributions; single dark cells mean that sites have only some labels."
    )
    if many:
        caption += " Sites are sorted by their commonest label."
    return chart.named(title, caption, simulator_only=True)


def draw_run(run: RunSummary) -> dict[str, Chart]:
    """Return all charts of a run that have something to show, by name."""
    found = {
        "accuracy": accuracy(run),
        "loss": draw_loss(run),
        **{name: metric(run, name) for name in run.measured},
        "sites": site_accuracy(run),
        "epsilon": draw_epsilon(run),
        "bytes": traffic(run),
        "labels": draw_labels(run),
    }
    return {name: chart for name, chart in found.items() if chart}
