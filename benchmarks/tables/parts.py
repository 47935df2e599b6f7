"""What a private step consists of, part by part."""

import tempfile
from pathlib import Path

import torch

from benchmarks import steps
from benchmarks.problems import CLIP, PROBLEMS
from benchmarks.results import Row
from benchmarks.scale import Scale
from benchmarks.timing import Turns, Work, by_turns, milliseconds
from fedpact.common.messages import Reply, to_bytes
from fedpact.common.randomness import secure as grid
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Charge

TITLE = "Its parts"
ABOUT = (
    "Model B, an expected batch of 75 of 1,500 records, one step per round. Ratios to the plain "
    "step; the note has the part's time, also per record. A charge is one entry on the disk for "
    "all steps of a round. ε after a round is computed for the whole history (PLD) while the run "
    "continues."
)
NAMES = ("parts",)

_TITLES = {
    "sample": "Poisson batch, its records gathered",
    "kernel_alone": "clipped sum",
    "seeded": "a simulation's noise, added",
    "secure": "secure noise, added on the grid",
    "ledger": "ledger: one charge",
    "accounting": "accounting: ε after a round",
    "encoding": "reply encoded",
}


def run(name: str, scale: Scale) -> tuple[list[Row], bool]:
    """See tables."""
    del name
    torch.set_num_threads(1)
    problem, batch = PROBLEMS[scale.of("B", "tiny")], scale.of(75, 3)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl", "site", hypothetical=False)
        works: dict[str, Work] = {
            "plain": steps.plain(problem, batch),
            "kernel_alone": steps.kernel_alone(problem, batch),
            "sample": _sample(problem.records(20 * batch), batch),
            **_noise(problem.size),
            **_accounts(ledger, batch, scale.of(2000, 3)),
            "encoding": _encoding(problem.size),
        }
        turns = by_turns(works, scale.repetitions)
        ledger.close()
    return [_row(turns, part, batch) for part in ("plain", *_TITLES)], turns.busy


def _row(turns: Turns, part: str, batch: int) -> Row:
    found, seconds = turns.ratio(part, "plain"), turns.time(part).median
    note = f"{milliseconds(seconds)}, {seconds / batch * 1e6:.3g} µs a record"
    title = _TITLES.get(part, "plain step")
    return Row(title, found.median, found.low, found.high, note=note)


def _sample(records: tuple[torch.Tensor, torch.Tensor], batch: int) -> Work:
    (x, y), draws = records, SeededDraws(0, "site", 1)

    def sample() -> None:
        chosen = draws.batch(len(y), batch / len(y), 0)
        x[chosen], y[chosen]

    return sample


def _noise(d: int) -> dict[str, Work]:
    total, seeded, secure = torch.ones(d), SeededDraws(0, "site", 1), SecureDraws()

    def gaussian(size: int, like: torch.Tensor) -> torch.Tensor:
        return secure.gaussian(size, like, 0, "gradient")

    return {
        "seeded": lambda: total.add(seeded.gaussian(d, total, 0, "gradient"), alpha=CLIP),
        "secure": lambda: grid.noisy(total, 1.0, CLIP, gaussian),
    }


def _accounts(ledger: Ledger, batch: int, steps_: int) -> dict[str, Work]:
    terms = steps.terms_of(batch, rate=0.05, sigma=2.0)
    ledger.reserve("run", Budget(1000.0, 1e-5), {terms.event: 10**6})
    charge = Charge(ledger, "run", 1, "0" * 32)
    spent = {terms.event: 0}

    def accounting() -> None:
        # A history that was not asked for before: answers are kept.
        spent[terms.event] = spent[terms.event] % steps_ + 1
        terms.guarantee_after(spent)

    return {"ledger": lambda: charge(terms, 0, 1, ("gradient",)), "accounting": accounting}


def _encoding(d: int) -> Work:
    reply = Reply("run", 1, "site", 1.0, {"w": torch.ones(d)}, {})
    return lambda: to_bytes(reply)
