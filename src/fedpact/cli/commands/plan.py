"""`fedpact plan`."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column

from fedpact.cli.console import AsJson, Config, Overrides, plain_console, show
from fedpact.common.errors import InputError
from fedpact.common.format import count_noun, size, upper
from fedpact.common.notebook import print_table

if TYPE_CHECKING:
    from torch import Tensor

    from fedpact.simulation.setup import SimulationSetup


def plan(
    config: Config = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody changes it
    optimise: Annotated[
        bool, typer.Option(help="Choose q, σ, T and τ from the budget, the rounds and the passes.")
    ] = False,
    passes: Annotated[
        float | None,
        typer.Option(
            help="With --optimise: at most this many passes over a site's data; default: the "
            "plan's."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a plan will spend: q, σ, iterations, ε per round and in total, bytes."""
    from fedpact.plan import Plan
    from fedpact.simulation.setup import SimulationSetup
    from fedpact.studies.circumstances import optimise_budgets

    if passes is not None and not optimise:
        raise InputError(f"--passes {passes:g} needs --optimise: give both, or leave it out")
    whole = Plan.read(config, overrides)
    scene = SimulationSetup.of(whole)
    document = forecast(scene)
    if optimise:
        document["optimised"] = optimise_budgets(scene, passes)
    show(document, as_json, lambda: _print(scene, document))


def forecast(scene: SimulationSetup) -> dict[str, Any]:
    """Return what the plan will spend if every site answers every round."""
    from fedpact.simulation.secure_aggregation.graph import secure_terms
    from fedpact.simulation.statement import describe_held_out_releases, per_person, site_terms

    plan, rounds = scene.plan, scene.plan.rounds
    total = _iterations(scene)
    sites = site_terms(scene.plan, scene.terms)
    of_held = describe_held_out_releases(plan, scene.form, scene.dataset.person is not None)
    size_of_message, size_of_all = _message_bytes(scene, of_held["times"] if of_held else 0)
    own = scene.participants.rounds(plan.rounds)
    return {
        "private": plan.private,
        "algorithm": plan.algorithm,
        "rounds": rounds,
        "sites_per_round": plan.sites_per_round,
        # A mean if τ is chosen during the run.
        "iterations_per_round": total // rounds if total % rounds == 0 else total / rounds,
        "iterations": total,
        "model_parameters": scene.workshop.size,
        "bytes_per_round": size_of_message,
        "bytes": size_of_all,
        "adjacency": plan.privacy.adjacency if plan.private else None,
        "accountant": plan.privacy.accountant if plan.private else None,
        "per_person": per_person(sites, plan.privacy.unit, of_held),
        "evaluation": of_held,
        "secure_aggregation": secure_terms(plan, len(scene.sites), scene.terms),
        "sites": {
            name: {
                **terms,
                # A noisy size is only known after it is charged.
                "size": None if plan.noisy_sizes else terms["size"],
                "rounds": own[name],
                "epsilon_by_round": _by_round(scene, name, total),
                "epsilon_alone_by_round": _by_round(scene, name, total, alone=True),
            }
            for name, terms in sites.items()
        },
    }


def _iterations(scene: SimulationSetup) -> int:
    """Return the local iterations of all rounds; the maximum if τ is chosen during the run."""
    plan = scene.plan
    if not plan.method.facts.controlled or plan.method.facts.iterations:
        return plan.steps
    # Without R_c the smallest budget ends the run.
    return min((terms.steps for terms in scene.terms.values()), default=plan.steps)


def _by_round(scene: SimulationSetup, site: str, total: int, *, alone: bool = False) -> list[float]:
    """Return ε after each round, constant once a site's events are used up.

    alone: without the noise of other sites. If τ is chosen during the run, the iterations are
    assumed to be spread evenly over rounds.
    """
    plan, terms, rounds = scene.plan, scene.terms[site], scene.plan.rounds
    own = (site in scene.participants.of(t) for t in range(1, plan.rounds + 1))
    steps = ((done, min(terms.steps, math.ceil(done * total / rounds))) for done in accumulate(own))
    histories = (terms.history(n, min(terms.openings, done), 1) for done, n in steps)
    found = map(terms.guarantee_after, histories)
    return [each.alone if alone else each.epsilon for each in found]


def _message_bytes(scene: SimulationSetup, evaluations: int) -> tuple[int, int]:
    """Return the bytes of a round and of all rounds, for tasks and replies of the same shapes.

    Compressed vectors are assumed to be noise, which is most of them. A site that did not take part
    in the previous round gets the whole model, and so does each site for each evaluation.
    """
    from fedpact.algorithms.wrappers.base import MethodWrapper
    from fedpact.algorithms.wrappers.compression import UNITS_DOWN, Compressed
    from fedpact.common.messages import Reply, Task, encoded_length
    from fedpact.common.params import FlatModel
    from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION
    from fedpact.simulation.secure_aggregation.graph import secure_terms

    method, plan, who = scene.plan.method, scene.plan, scene.participants
    told = method.task(method.init(FlatModel(scene.workshop.module()).vector))
    up, down, numbers = {"w": told.vectors["w"]}, told.vectors, dict(told.numbers)
    secured = secure_terms(plan, len(scene.sites), scene.terms)
    if secured:
        words = told.vectors["w"].new_zeros(scene.workshop.size * secured["bits"] // 8)
        up = {"masked": words.byte()}
    elif method.facts.coded:
        up = {name: _encode(vector, SHARE_DEVIATION) for name, vector in up.items()}
    if plan.compression.kind == "grid":
        down = {name: _encode(vector, UNITS_DOWN) for name, vector in down.items()}
    task = Task("run", 1, plan.algorithm, down, told.numbers)
    full = Task("run", 1, plan.algorithm, told.vectors, told.numbers)
    inner = method
    while isinstance(inner, MethodWrapper) and not isinstance(inner, Compressed):
        inner = inner.inner
    if isinstance(inner, Compressed):
        up, scales = inner.encode("w", up["w"], full)
        numbers |= scales
    reply = Reply("run", 1, "site", 1.0, up, numbers, "0" * 64)
    rounds = plan.rounds
    whole = (task.wire_bytes + encoded_length(reply)) * rounds * len(who.of(1))
    if who.partial:
        newcomers = who.newcomers(plan.rounds)
        whole += (full.wire_bytes - task.wire_bytes) * newcomers
    whole += full.wire_bytes * len(scene.sites) * evaluations
    return round(whole / rounds), whole


def _encode(like: Tensor, units: float) -> Tensor:
    from fedpact.algorithms.wrappers import integers
    from fedpact.common.randomness.seeded import SeededDraws

    noise = SeededDraws(0, "plan").gaussian(like.numel(), like, 0, "coded")
    return integers.pack_codes(*integers.quantise(noise.double(), 1 / units))


def _print(scene: SimulationSetup, document: dict[str, Any]) -> None:
    from fedpact.privacy.guarantee import Guarantee
    from fedpact.privacy.terms import channels
    from fedpact.simulation.statement import state_evaluation

    out = plain_console()
    plan = scene.plan
    out.print(
        f"{plan.algorithm} on {plan.data} with {plan.model} "
        f"({document['model_parameters']:,} parameters): {count_noun(len(scene.sites), 'site')}, "
        f"{_rounds(scene, document)}, "
        f"about {size(document['bytes'])} in messages"
    )
    if document["secure_aggregation"]:
        out.print(_describe_secure(**document["secure_aggregation"]))
    if not plan.private:
        out.print(f"NOT PRIVATE: {plan.why_unprotected}")
        return
    condition = Guarantee.read(next(iter(document["sites"].values()))).condition
    # Long names are wrapped after 24 letters, not cut.
    longest = min(24, max(map(len, document["sites"])))
    site = Column("site", no_wrap=True, min_width=longest)
    every = f" of {document['iterations']}" if scene.participants.partial else ""
    several = plan.privacy.told_records
    records = (plan.privacy.person_records or 5) if several else None
    columns = [site, "N", "q", "σ", Column("T", no_wrap=True), "ε after 1", "ε at the end", "δ"]
    of_training = ", by training" if document["evaluation"] else ""
    columns += [f"ε, person of {records}{of_training}"] if records else []
    columns += ["ε alone"] if condition else []
    rows = [
        (
            name,
            "noisy" if terms["size"] is None else f"{terms['size']:g}",
            f"{terms['rate']:.4g}",
            f"{terms['sigma_joint']:.4f}",
            f"{terms['steps']}{every}",
            upper(terms["epsilon_by_round"][0]),
            f"{upper(terms['epsilon_by_round'][-1])} of {upper(terms['epsilon'])}",
            upper(terms["delta"]),
            *([upper(terms["epsilon_per_person"][str(records)])] if records else []),
            *([upper(terms["epsilon_alone_by_round"][-1])] if condition else []),
        )
        for name, terms in document["sites"].items()
    ]
    print_table(out, columns, rows)
    if told_of_draw := scene.participants.describe():
        out.print(told_of_draw)
    if condition:
        out.print(
            f"Distributed noise: ε and σ assume {condition}, who keep their shares secret; ε alone "
            "holds even if all others collude."
        )
    for name, terms in document["sites"].items():
        if (of := terms["columns"]) is not None:
            out.print(
                f"{name} releases the scales of {count_noun(len(plan.records.released), 'column')} "
                f"before training: σ {of['sigma']:.4f}, ε {upper(of['epsilon'])} on its own, "
                f"{plan.privacy.column_share:.3g} of the budget"
            )
    if (of := document["evaluation"]) is not None:
        out.print(
            f"{state_evaluation(of)} {of['times']} evaluations with noise of deviation "
            f"{of['sigma']:.4g} "
            "in each of a site's counts."
        )
    out.print(
        f"(ε, δ) per site and {plan.privacy.unit}, {plan.privacy.adjacency}, accountant "
        f"{plan.privacy.accountant}; it covers every release of the "
        f"{'training' if document['evaluation'] else 'run'}. "
        f"{document['per_person']} Channels and their σ: {channels(scene.terms)}"
    )
    if "optimised" in document:
        _print_optimised(out, document["optimised"])


def _describe_secure(threshold: int, sites: int, neighbours: int, against: int, bits: int) -> str:
    others = f"{neighbours} of the {sites - 1} others"
    if neighbours == sites - 1:
        others = f"all {neighbours} others, as no smaller graph tolerates more"
    return (
        f"Secure aggregation: at least {threshold} of {sites} sites in each sum; a site shares "
        f"masks with {others}; up to {against} of them may collude with the server; "
        f"a masked coordinate takes {bits} bits"
    )


def _rounds(scene: SimulationSetup, document: dict[str, Any]) -> str:
    rounds, total = document["rounds"], document["iterations"]
    if scene.plan.method.facts.controlled:
        return (
            f"up to {count_noun(rounds, 'round')} with up to {count_noun(total, 'iteration')} in "
            "total, τ adapted during the run"
        )
    part = f"{scene.plan.sites_per_round} in each of " if scene.participants.partial else ""
    return (
        f"{part}{count_noun(rounds, 'round')} of "
        f"{count_noun(document['iterations_per_round'], 'iteration')}"
    )


def _print_optimised(out: Console, chosen: dict[str, Any]) -> None:
    rows = [
        (
            f"{case['epsilon']:g}" if name == "configured" else "",
            name,
            f"{case[name]['sampling_rate']:.4g}",
            f"{case[name]['sigma']:.4f}",
            f"{case[name]['steps']}",
            f"{case[name]['local_steps']}",
            f"{case[name]['passes']:.3g}",
            f"{case[name]['snr']:.4f}",
        )
        for case in chosen["cases"]
        for name in ("configured", "chosen")
    ]
    print_table(out, ("ε", "", "q", "σ", "T", "τ", "passes", "sqrt(T) q / σ"), rows)
    gains = ", ".join(f"{case['gain']:.2f}" for case in chosen["cases"])
    out.print(
        f"The chosen values have {gains} times the signal-to-noise ratio at the same (ε, δ). To "
        "use them, set rounds = T / τ (one number for all sites; if they differ, start with the "
        "smallest), sampling_rate and settings.local_steps, and leave privacy.sigma out."
    )
    pay = [case["useful_rounds"] for case in chosen["cases"] if case["useful_rounds"]]
    if pay:
        out.print(
            f"A linear model on unit rows benefits from {', '.join(map(str, pay))} rounds at "
            "this signal-to-noise ratio, the same for every T with all records in each batch "
            "(fedpact recommend chooses the step size); more rounds fit noise, fewer need steps "
            "that overshoot."
        )
