"""Sites of a small model, stacked, beside one after another."""

from functools import partial

import torch

from benchmarks import steps
from benchmarks.problems import PROBLEMS, RATE
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Work, by_turns, milliseconds
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.per_sample.dense import SiteSum
from fedpact.privacy.oracle import PrivateOracle
from fedpact.simulation.stacked import Ask, Lockstep, Seat, SeatDraws, Stack
from fedpact.simulation.workshop import Worker

TITLE = "Stacked sites"
ABOUT = (
    "Logistic regression 784→10 (A), a hidden layer of 128 (mlp), batch 75, 16 sites with weights "
    "of their own: one step of each, all through their oracles, in lockstep on one core "
    "(`run.stacked = 16`) and one after another. Batches are at hand. Ratios to 16 plain steps."
)
NAMES = ("stacked",)
_SITES = 16


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    rows: list[Row] = []
    busy = False
    for model in scale.of(("A", "mlp"), ("tiny A",)):
        works = _works(model, scale.of(75, 3), scale.of(_SITES, 2))
        turns = by_turns(works, scale.repetitions)
        busy |= turns.busy
        plain = turns.time("plain")
        rows.append(Row(f"{model}: plain", 1.0, note=milliseconds(plain.median)))
        marks = {"goal": 0.9, "stretch": 0.8} if model == "A" else {}
        rows.append(turns.row(f"{model}: one after another", "alone", "plain"))
        rows.append(turns.row(f"{model}: stacked", "stacked", "plain", **marks))
        rows.append(turns.row(f"{model}: clipped sums alone", "sums_alone", "plain"))
        rows.append(turns.row(f"{model}: clipped sums stacked", "sums_stacked", "plain"))
    return rows, busy


def _works(model: str, batch: int, sites: int) -> dict[str, Work]:
    problem = PROBLEMS[model]
    records = [problem.records(batch, site) for site in range(sites)]
    kernel = steps.kernel_of(problem)
    form = FlatModel(problem.module())
    stack = Stack.of(form, cross_entropy)
    if stack is None:
        raise ValueError(f"{model} is no model that can be stacked")
    terms = steps.terms_of(batch)
    weights = [form.vector.clone() for _ in records]

    def step(i: int, bench: Worker) -> None:
        draws = bench.draws(0, f"site-{i}", 1)
        oracle = PrivateOracle(
            steps.AtHand(*records[i]), bench.private, terms, draws, lambda *_: None
        )
        for one in oracle.batches(1, "gradient"):
            weights[i].add_(one.gradient(weights[i]), alpha=-RATE)

    def alone() -> None:
        for i in range(sites):
            step(i, Worker(kernel))

    def seat(ask: Ask) -> Worker:
        kernel = Seat(FlatModel(problem.module()), cross_entropy, ask)
        return Worker(kernel, partial(SeatDraws, ask))

    table = Lockstep(sites, seat, stack.answers)
    jobs = [lambda own, i=i: step(i, own) for i in range(sites)]
    plain = [steps.plain(problem, batch) for _ in records]
    asked = [SiteSum(form, x, y, steps.CLIP, None) for x, y in records]
    return {
        "plain": lambda: [one() for one in plain],
        "alone": alone,
        "stacked": lambda: table.serve(jobs),
        "sums_alone": lambda: [kernel.clipped_sum(x, y, steps.CLIP) for x, y in records],
        "sums_stacked": lambda: stack.answers(asked),
    }
