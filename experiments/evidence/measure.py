"""Carry a run out."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.evidence.runs import Run
from experiments.made import made

import fedpact
from fedpact.common.messages import RoundRecord
from fedpact.common.randomness.seeded import DRAWS
from fedpact.simulation.simulate import Simulated, simulate

HERE = Path(__file__).parent


def carry_out(run: Run, seed: int, out: Path) -> Iterator[dict[str, Any]]:
    """Carry a run on from look to look, and return after each what is to be stored so far."""
    began = time.process_time()
    plan = fedpact.Plan.read(HERE.parent / run.base, [*run.settings, f"seed={seed}"])
    for asked in run.looks:
        done = _until(plan, out, asked)
        records, diverged = done.records, done.summary["status"] == "diverged"
        looks = {str(r.round): _seen(r) for r in records if r.accuracy is not None and r.round}
        # Its iterations were used up, or it diverged: later looks see what there is.
        past = (look for look in run.looks if records[-1].round < look <= asked)
        looks |= {str(look): _seen(records[-1]) for look in past}
        steps = [r.steps for r in records[1:]] if plan.method.facts.controlled else []
        yield {
            "looks": looks,
            **({"steps": steps} if steps else {}),
            **({"diverged": records[-1].round} if diverged else {}),
            "cpu_seconds": round(time.process_time() - began, 1),
            **made(),
            "draws": DRAWS,
        }


def _until(plan: fedpact.Plan, out: Path, asked: int) -> Simulated:
    """Carry a run on to a round, after which the model is evaluated."""
    reached = [0]
    return simulate(
        plan, out, on_round=lambda r: reached.append(r.round), stop=lambda: reached[-1] >= asked
    )


def _seen(record: RoundRecord) -> dict[str, Any]:
    """Return what is kept of a round. held_out: accuracy on the sites' held-out records."""
    scores = record.scores.values()
    count = sum(score.records for score in scores)
    found = {
        "accuracy": record.accuracy,
        "loss": record.loss,
        "held_out": sum(s.accuracy * s.records for s in scores) / count if count else None,
        "psi": record.metrics.get("psi"),
        "sites": [score.accuracy for score in scores] or None,
        "epsilon": max(record.epsilon.values(), default=None),
        "epsilon_alone": max(record.epsilon_alone.values(), default=None),
    }
    return {name: value for name, value in found.items() if value is not None}


def tradeoffs(results: Path) -> None:
    """Store LDP FedSGD's curves: what `fedpact tradeoffs` prints, and by which versions."""
    for name, own in (("ldp", []), ("ldp-paper", ["--preset", "paper"])):
        command = [sys.executable, "-m", "fedpact", "tradeoffs", "--json", *own]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        text = json.dumps({**json.loads(printed), "made": made()}, indent=1)
        (results / f"{name}.json").write_text(text + "\n", encoding="utf-8")
