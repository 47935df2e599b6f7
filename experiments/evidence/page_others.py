"""FedProxVR's and LDP FedSGD's parts of the page, and results of other experiments."""

import json
import math
import statistics
from collections.abc import Iterator
from typing import Any, Final

from experiments.evidence import best, fedproxvr
from experiments.evidence.cells import Book, mean_text, table
from experiments.evidence.stored import HERE

EXPERIMENTS: Final = HERE.parent


def proxvr(book: Book) -> Iterator[str]:
    """Return FedProxVR's paragraphs and tables."""
    yield "## FedProxVR, Tables 1 and 2, Figures 1 to 4"
    yield (
        "No privacy. Sizes by a power law, 2 labels per site, 25 % held out inside each; accuracy "
        "on all held-out records after the paper's number of rounds T. η is that of the released "
        "scripts. Table 1: logistic regression, Fashion-MNIST, 100 devices; Table 2: the CNN with "
        "padding, MNIST, 10 devices."
    )
    yield _proxvr_says(book)
    rows = [
        [
            "1" if row in fedproxvr.CONVEX else "2",
            *(_method(row.method), f"{row.local_steps}", f"{row.beta}", f"{row.proximal:g}"),
            *(f"{row.batch}", f"{row.rounds}", f"{row.printed:.2f}"),
            book.held_out(fedproxvr.run(row), row.rounds),
        ]
        for row in (*fedproxvr.CONVEX, *fedproxvr.CNN)
    ]
    yield table(["table", "method", "τ", "β", "μ", "B", "T", "printed", "measured"], rows)
    yield "### Figures 1 to 4"
    yield (
        "Figure 1, the best parameters over γ, is drawn by `fedpact tune fedproxvr --L 1 --lam 0.5 "
        "--sigma2 1 --gamma 0.01 --out FILE`. Figures 2 and 3 show the course of runs with "
        "B = 32 and 64. Those of SVRG and SARAH at β = 7, τ = 20 are Table 1's, as β is not "
        "used. The paper's text does not give the third τ of Figure 2, nor β and τ of Figure 3; "
        "here those of Table 2. Figure 4, μ on synthetic data, is in "
        "[experiments/fedproxvr](../experiments/fedproxvr/README.md)."
    )
    rows = [
        [
            "2" if row in fedproxvr.CURVES else "3",
            *(_method(row.method), f"{row.local_steps}", f"{row.beta}", f"{row.proximal:g}"),
            *(f"{row.batch}", f"{row.rounds}"),
            book.held_out(fedproxvr.run(row), row.rounds),
        ]
        for row in (*fedproxvr.CURVES, *fedproxvr.CURVES_CNN)
    ]
    yield table(["figure", "method", "τ", "β", "μ", "B", "T", "measured"], rows)
    yield (
        "![Loss and accuracy over rounds](images/evidence-fedproxvr-2.svg)\n\n"
        "Figure 2, as far as it is measured, and Table 1's runs: mean over seeds."
    )


def _method(name: str) -> str:
    return "FedAvg" if name == "fedavg" else f"FedProxVR ({name.upper()})"


def _proxvr_says(book: Book) -> str:
    lines = ["Is variance reduction better than FedAvg?"]
    for number, rows in (("1", fedproxvr.CONVEX), ("2", fedproxvr.CNN)):
        means = book.paired([(fedproxvr.run(row), row.rounds) for row in rows], "held_out")
        if means[0] is None or all(mean is None for mean in means[1:]):
            lines.append(f"* Table {number}: not run.")
            continue
        base, *each = (book.values(fedproxvr.run(row), row.rounds, "held_out") for row in rows)
        gaps = list[str]()
        for row, mean, own in zip(rows[1:], means[1:], each, strict=True):
            if mean is not None:
                gaps.append(f"{row.method.upper()} {100 * (mean - means[0]):+.2f}")
                if len(own) == len(base) > 1:
                    apart = [100 * (a - b) for a, b in zip(own, base, strict=True)]
                    gaps[-1] += f" ({statistics.stdev(apart):.2f})"
        lines.append(
            f"* Table {number}, points above FedAvg at the same seed (standard deviation of the "
            f"difference): {', '.join(gaps)}."
        )
    return "\n".join(lines)


def ldp(book: Book) -> Iterator[str]:
    """Return LDP FedSGD's paragraphs and table."""
    yield "## LDP FedSGD, Figure 1"
    yield (
        "Noise, utility bound and rate bound against ε. Only RDP and PLD are guarantees. The four "
        "older bounds drop terms and are shown for comparison ([Errata](notes/errata.md)). "
        "q = 1e-3, δ = 1e-4, d = 10,000, 100 clients; σ is noise over C per coordinate, the rate "
        "is in nats per round. `fedpact tradeoffs --json` computes the numbers, and with `--out` "
        "the figure."
    )
    whole = _stored("ldp.json")
    if whole is None:
        yield book.not_run("ldp", "`python -m experiments.evidence --ldp`, 1 min")
        return
    yield table(["T", "ε", *_CURVES], [_point(whole, *at) for at in _places(whole)])
    printed = _stored("ldp-paper.json")
    if printed is not None:
        yield _example(printed)


_CURVES: Final = ("proposed", "MA", "AC1", "AC2", "rdp", "pld")
# Utility, and rate in thousands of bits, at ε = 0.3 after 7e4 iterations, as printed.
_PRINTED: Final = {
    "proposed": (25.83, 5.81),
    "MA": (10.79, 6.44),
    "AC1": (0.22, 9.26),
    "AC2": (1.40, 7.91),
}


def _stored(name: str) -> dict[str, Any] | None:
    path = HERE / "results" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _places(whole: dict[str, Any]) -> list[tuple[int, float]]:
    return sorted({(point["steps"], point["epsilon"]) for point in whole["points"]})


def _point(whole: dict[str, Any], steps: int, epsilon: float) -> list[str]:
    here = {
        point["curve"]: point
        for point in whole["points"]
        if (point["steps"], point["epsilon"]) == (steps, epsilon)
    }
    return [f"{steps:,}", f"{epsilon:g}", *(_point_text(here[curve]) for curve in _CURVES)]


def _point_text(point: dict[str, Any]) -> str:
    if point["sigma"] is None:
        return "none"
    rate = f"{point['rate']:,.0f}"
    return f"σ² {point['sigma'] ** 2:.3g}, utility {point['utility']:.3g}, rate {rate}"


def _example(whole: dict[str, Any]) -> str:
    found = {
        point["curve"]: (point["utility"], point["rate"] / math.log(2) / 1000)
        for point in whole["points"]
        if (point["steps"], point["epsilon"]) == (70_000, 0.3) and point["curve"] in _PRINTED
    }
    rows = list[list[str]]()
    for name, printed in _PRINTED.items():
        pairs = zip(printed, found[name], strict=True)
        rows.append([name, *(f"{value:.2f}" for pair in pairs for value in pair)])
    text = (
        "The printed utilities at ε = 0.3, T = 7e4, use T/10 in the noise and, except for AC2, "
        "logarithms to base 10 (`--preset paper`). The convention of AC1 is not known. No "
        "convention that was tried gives the printed rates ([L6](notes/errata.md)); rates are in "
        "thousands of bits:"
    )
    head = ["bound", "utility, printed", "with these conventions"]
    head += ["rate, printed", "with these conventions"]
    return f"{text}\n\n{table(head, rows)}"


def others(book: Book) -> Iterator[str]:
    """Return the results of the other folders of experiments/ at an (ε, δ)."""
    yield "## Other settings"
    yield (
        "Results of other experiments: three seeds, twenty for heart disease. own: each site adds "
        "its full noise; sum: the sites share it, and all but one are assumed honest. Their pages "
        "say how settings were chosen, and for which rows the test set had been evaluated before "
        "with other settings (Fashion-MNIST and MNIST with each site's noise; heart disease)."
    )
    rows = list[list[str]]()
    for name, said, printed in _FEATURES:
        for trust in ("own", "sum"):
            asked = name if trust == "own" else f"{name}-sum"
            found = best.of_features(asked)
            command = f"`python -m experiments.features.run {asked}`"
            cell = mean_text(found, 2) if found else book.not_run(f"features {asked}", command)
            rows.append([said, trust, printed, cell])
    rows += _heart() + _noise()
    yield table(["data, (ε, δ)", "noise", "printed elsewhere", "measured"], rows)


_FEATURES: Final = (
    ("fashion_mnist", "Fashion-MNIST, 2 labels a site, (2, 1e-5), features", "84.19 (ALI-DPFL)"),
    ("cifar10", "CIFAR-10, 2 labels a site, (2, 1e-5), features", "56.76 (ALI-DPFL)"),
    ("mnist", "MNIST, Dirichlet(0.1), (3.52, 1e-5), features", "95.13 (FedFDP)"),
)
_NOMINAL: Final = {"1.0": "68.5 ± 5.5 (FLamby, nominal ε)", "0.1": "60.6 ± 12.1 (the same)"}


def _heart() -> list[list[str]]:
    whole = json.loads((EXPERIMENTS / "heart" / "results.json").read_text(encoding="utf-8"))
    rows = list[list[str]]()
    found = sorted(whole["test"].items(), key=lambda one: (-float(one[0].split()[1]), one[0]))
    for title, runs in found:
        noise, epsilon, *_ = title.split()
        said = f"heart disease, FLamby's split, ({float(epsilon):g}, 1e-4)"
        cell = mean_text([100 * run["accuracy"] for run in runs], 1).replace(" (20 seeds)", "")
        rows.append([said, noise, _NOMINAL[epsilon], cell])
    return rows


def _noise() -> list[list[str]]:
    """Each site's noise and shared noise: Fashion-MNIST, two labels per site."""
    rows = list[list[str]]()
    for model in ("logistic", "cnn"):
        path = EXPERIMENTS / "noise_for_the_sum" / f"results-{model}.json"
        whole = json.loads(path.read_text(encoding="utf-8"))
        for noise in ("own", "sum, h = 9"):
            for epsilon in ("1.0", "2.0"):
                begin = f"{noise} {epsilon} two labels "
                found = [100 * v["test"] for name, v in whole.items() if name.startswith(begin)]
                said = f"Fashion-MNIST, 2 labels a site, ({float(epsilon):g}, 1e-5), {model}"
                rows.append([said, noise, "", mean_text(found, 2)])
    return rows
