"""`fedpact tune`: parameters by the papers' theory, and how far that theory carries."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedpact.cli.console import AsJson, group
from fedpact.common.errors import InputError

app = group("Choose an algorithm's parameters by its paper's theory.")
RunFolder = Annotated[
    Path | None, typer.Argument(help="The folder of a run to measure; none for given numbers.")
]


@app.command()
def fedproxvr(
    run: RunFolder = None,
    smoothness: Annotated[
        float | None, typer.Option("--L", help="L, smoothness of each record's loss, > 0.")
    ] = None,
    weak_convexity: Annotated[
        float | None, typer.Option("--lam", help="λ, weak convexity of a site's loss, 0 <= λ <= L.")
    ] = None,
    heterogeneity: Annotated[
        float | None, typer.Option("--sigma2", help="σ̄² = Σ p_n σ_n², >= 0. Not a noise.")
    ] = None,
    gamma: Annotated[
        float | None,
        typer.Option(help="γ = d_cmp/d_com, time of a local step over that of the messages, > 0."),
    ] = None,
    solver: Annotated[Literal["sarah", "svrg"], typer.Option(help="The inner loop.")] = "sarah",
    out: Annotated[
        Path | None,
        typer.Option(help="Draw the optimum against γ here, .png or .svg; a RUN's is drawn in it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find FedProxVR's μ, β and τ of least training time by the paper's theorem.

    With RUN, what is not given is measured: d_com and d_cmp from the rounds' seconds, and L, λ, σ̄²
    from the simulation's records.
    """
    from fedpact.cli.console import show
    from fedpact.common.files import check_file
    from fedpact.report.run_summary import read_run
    from fedpact.studies.papers.fedproxvr import Losses, draw, find_parameters, print_document
    from fedpact.studies.papers.measure import from_run

    given = {"L": smoothness, "lam": weak_convexity, "sigma2": heterogeneity, "gamma": gamma}
    if out is not None:
        check_file("--out", out, ".png", ".svg")
    if run is None:
        if missing := [f"--{name}" for name, value in given.items() if value is None]:
            raise InputError(
                f"{', '.join(missing)} missing: expected all of --L, --lam, --sigma2 and --gamma, "
                "or the folder of a run, from which the others are measured"
            )
        numbers, measured = {k: v for k, v in given.items() if v is not None}, {}
    else:
        numbers, measured = from_run(read_run(run), given)
        out = run / "fedproxvr.png" if out is None else out
    losses = Losses(numbers["L"], numbers["lam"], numbers["sigma2"])
    found = find_parameters(losses, numbers["gamma"], solver, measured)
    if out is not None:
        draw(losses, numbers["gamma"], solver, out)
        found["figure"] = str(out)
    show(found, as_json, lambda: print_document(found))


@app.command()
def fedfdp(
    gradient_bound: Annotated[
        float, typer.Option("--G", help="G, bound on a record's gradient.")
    ] = 1.0,
    smoothness: Annotated[float, typer.Option("--L", help="L, smoothness.")] = 1.0,
    convexity: Annotated[float, typer.Option("--mu", help="μ, strong convexity.")] = 0.1,
    gap: Annotated[
        float, typer.Option("--Gamma", help="Γ = F* - Σ p_i F_i*, heterogeneity.")
    ] = 0.5,
    sigma: Annotated[float, typer.Option(help="σ, the gradient's noise.")] = 2.0,
    clip: Annotated[float, typer.Option("--C", help="C, the clip.")] = 0.1,
    dimension: Annotated[int, typer.Option("--d", help="d, parameters.")] = 582_026,
    batch: Annotated[float, typer.Option("--B", help="B̂, the smallest expected batch.")] = 75.0,
    least: Annotated[
        float, typer.Option("--Q0", help="Least ℓ - F; -F, as no loss is below 0.")
    ] = -2.3,
    most: Annotated[float, typer.Option("--Q1", help="Most ℓ - F.")] = 2.5,
    start: Annotated[
        float, typer.Option("--Delta1", help="Δ1 = E‖w_1 - w*‖², squared distance at the start.")
    ] = 1.0,
    steps: Annotated[int, typer.Option("--T", help="T, rounds.")] = 600,
    as_json: AsJson = False,
) -> None:
    """Explain the choice of FedFDP's λ: why the theorem gives 0, and what to do instead.

    The defaults are the paper's experiment where it has one. None of them changes the answer as
    long as Q0 <= 0, which is always so.
    """
    from fedpact.cli.console import show
    from fedpact.studies.papers.fedfdp import Slopes, answer_question, noise_term, print_answer

    noise = noise_term(sigma, clip, dimension, batch)
    bounds = Slopes(gradient_bound, smoothness, convexity, gap, noise, least, most, start)
    found = answer_question(bounds, steps)
    show(found, as_json, lambda: print_answer(found))
