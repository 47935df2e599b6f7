"""The paper's Figure 1: FedProxVR's optimum against γ, for several σ̄²."""

from pathlib import Path
from typing import Any

import numpy as np

from fedpact.errors import InputError
from fedpact.files import check_file
from fedpact.papers.fedproxvr import Candidate
from fedpact.papers.proxvr_search import Parameters, path

FACTORS = (1, 2, 5)
GAMMAS = (1e-4, 1.0)
POINTS = 60
PANELS = (
    ("beta", "β*", "linear"),
    ("mu", "μ*", "linear"),
    ("theta", "θ", "linear"),
    ("decrease", "Θ", "linear"),
    ("tau", "τ*", "log"),
)


def _curves(setting: Candidate) -> dict[float, list[tuple[float, Parameters]]]:
    """Return (γ, optimum of (23) with real τ) for each σ̄²; γ from 1e-4 to 1, and the setting's."""
    low, high = min(GAMMAS[0], setting.gamma), max(GAMMAS[1], setting.gamma)
    gammas = np.geomspace(low, high, POINTS).tolist()
    factors = FACTORS if setting.heterogeneity else FACTORS[:1]
    return {
        factor * setting.heterogeneity: list(
            zip(gammas, path(setting.losses(factor), gammas, setting.inner), strict=True)
        )
        for factor in factors
    }


def draw(setting: Candidate, out: Path) -> None:
    """Draw β*, μ*, θ, Θ and τ* against γ into a file, .png or .svg. Raises InputError."""
    check_file("--out", out, ".png", ".svg")
    out.parent.mkdir(parents=True, exist_ok=True)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    found = _curves(setting)
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), sharex=True, layout="constrained")
    flat: list[Any] = list(axes.flat)
    for axis, (name, label, scale) in zip(flat, PANELS, strict=False):
        for spread, points in found.items():
            values = [getattr(best, name) for _, best in points]
            axis.plot([g for g, _ in points], values, label=f"σ̄² = {spread:.3g}")
        axis.axvline(setting.gamma, color="0.6", linewidth=1, linestyle=":")
        axis.set(xscale="log", yscale=scale, ylabel=label, xlabel="γ = d_cmp/d_com")
        axis.grid(alpha=0.3, which="both")
        axis.tick_params(labelbottom=True)
        if scale == "log":
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(ScalarFormatter())
            axis.yaxis.set_minor_formatter(NullFormatter())
    handles, labels = flat[0].get_legend_handles_labels()
    flat[-1].axis("off")
    flat[-1].legend(handles, labels, loc="center", frameon=False, title="dotted: the γ asked for")
    figure.suptitle(
        f"FedProxVR, {setting.solver.upper()}: least training time by (23), "
        f"L = {setting.smoothness:.3g}, λ = {setting.weak_convexity:.3g}",
        fontsize="medium",
    )
    try:
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise InputError(f"--out is {str(out)!r}: cannot be written ({error.strerror})") from error
    finally:
        pyplot.close(figure)
