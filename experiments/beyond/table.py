"""Beyond the papers' data: accuracy by (ε, δ) and number of sites, `local` beside it.

    FEDPACT_DATA=DIR python -m experiments.beyond.table NAME [SITES ...]      results-NAME.json
    python -m experiments.beyond.table --page           README.md's tables, of what is stored

NAME: adult, adult-iid, heart, shakespeare, shakespeare-transformer or shakespeare-ngram. Entrants:
federated with each site's own noise, federated with noise for the sum (all but one site honest),
each site alone under the same (ε, δ), and, in words below the table, each alone and exact. Rounds
and η are chosen for each cell at seed 0; figures are of other seeds, each with other noise and, but
for natural sites, another partition, on what each site holds out. Resumable: each result is stored
as it comes, with the digest of its partition and what each site's receipt says was spent.
"""

import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from experiments.made import made

import fedpact
from fedpact.common.files import write_whole
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.simulate import of_run

HERE = Path(__file__).parent
EPSILONS = (1.0, 2.0, 4.0, 8.0)
ENTRANTS = {"own": "own noise", "sum": "for the sum", "local": "each alone"}
ALONE = "alone"


@dataclass(frozen=True)
class Study:
    """What is compared.

    ways: (rounds, η) to choose from; local_ways: for sites alone, if others. choice: overrides of
    the runs by which it is chosen. seeds: of the figures. alone: whether each site is also fitted
    alone and exactly.
    """

    title: str
    plan: str
    overrides: Sequence[str]
    sites: Sequence[int]
    ways: Sequence[tuple[int, float]]
    choice: Sequence[str] = ()
    seeds: Sequence[int] = (1, 2, 3)
    alone: bool = True
    local_ways: Sequence[tuple[int, float]] = ()


_LINEAR = ((3, 2.0), (10, 2.0), (40, 2.0), (40, 8.0), (100, 8.0))
STUDIES = {
    "adult-iid": Study(
        "Adult, records dealt out at random, logistic over 50 declared columns, δ = 10⁻⁵",
        "../adult/adult.toml",
        ['partition={kind = "iid", held_out = 0.2}'],
        (4, 10, 30, 100),
        _LINEAR,
    ),
    # Dirichlet(0.3) of adult.toml leaves some of a hundred sites without ten records.
    "adult": Study(
        "Adult, Dirichlet(1) over the two labels, the same model and δ",
        "../adult/adult.toml",
        ["partition.beta=1.0", "partition.held_out=0.2"],
        (4, 10, 30, 100),
        _LINEAR,
    ),
    "heart": Study(
        "Heart disease, FLamby's hospitals and test parts, logistic over 13 features, δ = 10⁻⁴",
        "../heart/heart.toml",
        [],
        (4,),
        ((3, 0.2), (10, 0.2), (10, 0.5), (30, 0.5)),
        ["partition.held_out=0.25"],  # the test parts are left alone
    ),
    "shakespeare": Study(
        "Shakespeare, a site for each of 71 roles, next-character LSTM, δ = 10⁻⁵",
        "../shakespeare/lstm.toml",
        # Shared noise hides one step alone, and a site alone has no server with momentum.
        ["partition.held_out=0.2", "settings.local_steps=1", "server={}"],
        (71,),
        ((30, 8.0),),  # at seed 0 and ε = 1 above η = 2, with own noise and for the sum
        # One site's noise is large: what suits a sum of 71 is no way for it.
        local_ways=((30, 0.5), (30, 2.0), (30, 8.0)),
        alone=False,  # an LSTM's optimum at each of 71 sites takes longer than all the rest
    ),
    "shakespeare-transformer": Study(
        "Shakespeare, the same sites, a transformer of one block",
        "../shakespeare/transformer.toml",
        ["partition.held_out=0.2", "settings.local_steps=1", "server={}"],
        (71,),
        ((30, 2.0), (30, 8.0)),
        local_ways=((30, 0.5), (30, 2.0)),
        alone=False,
    ),
    "shakespeare-ngram": Study(
        "Shakespeare, the same sites, logistic regression on the last three characters",
        "../shakespeare/ngram.toml",
        ["partition.held_out=0.2", "server={}"],
        (71,),
        # About as far as noise allows, by privacy.accounting.planner, and three times that.
        ((20, 120.0), (60, 120.0), (60, 400.0)),
        local_ways=((4, 14.0), (4, 40.0), (4, 140.0), (14, 14.0), (14, 40.0), (14, 140.0)),
    ),
}


@dataclass(frozen=True)
class Cell:
    """An entrant at an ε and a number of sites."""

    entrant: str
    sites: int
    epsilon: float

    def plan(self, study: Study, way: tuple[int, float], seed: int) -> fedpact.Plan:
        """Return one run's plan. Each site alone is MR-MTL with λ = 0."""
        rounds, rate = way
        own = [f"sites={self.sites}", f"seed={seed}", f"rounds={rounds}"]
        own += [f"settings.learning_rate={rate}", f"privacy.epsilon={self.epsilon}"]
        own += ["run.evaluate_every=1000", "run.workers=1"]
        if self.entrant == "sum":
            own += ["privacy.trust=sum", f"privacy.honest={self.sites - 1}"]
            own += [f"secure_aggregation.threshold={self.sites}"]
        if self.entrant == "local":
            own += ["algorithm=mr_mtl", "settings.proximal=0"]
        if seed not in study.seeds:
            own += study.choice
        return fedpact.Plan.read(HERE / study.plan, [*study.overrides, *own])

    def __str__(self) -> str:
        return f"{self.entrant} sites={self.sites} ε={self.epsilon:g}"


class Results:
    """A study with a JSON file of what was found, by key."""

    def __init__(self, name: str) -> None:
        self.study, self._path = STUDIES[name], HERE / f"results-{name}.json"
        self.found: dict[str, Any] = (
            json.loads(self._path.read_text()) if self._path.exists() else {}
        )

    def of(self, cell: Cell, way: tuple[int, float], seed: int) -> dict[str, Any]:
        """Return one run's figures; compute and store them where they are missing."""
        key = f"{cell} T={way[0]} η={way[1]:g} seed={seed}"
        if key not in self.found:
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                last = fedpact.run(cell.plan(self.study, way, seed), run).records[-1]
                figures = self._figures(run, {s: x.accuracy for s, x in last.scores.items()})
                alone = f"{ALONE} sites={cell.sites} seed={seed}"
                wanted = self.study.alone and cell.entrant == "own" and seed in self.study.seeds
                if wanted and alone not in self.found:
                    sites = of_run(run)["sites"].values()
                    found = _summary([each["local"] for each in sites])
                    self.found[alone] = found | {"made": made()}
            self.found[key] = figures
            text = json.dumps(self.found, indent=0, sort_keys=True) + "\n"
            write_whole(self._path, text.encode(), private=False)
        return self.found[key]

    def _figures(self, run: Path, accuracies: dict[str, float]) -> dict[str, Any]:
        partition = (run / "partition.json").read_bytes()
        ledgers = sorted((run / "sites").glob("*/ledger.jsonl"))
        return {
            **_summary(list(accuracies.values())),
            "partition": hashlib.sha256(partition).hexdigest(),
            "spent": tallied([receipt(path) for path in ledgers]),
            "made": made(),
        }

    def cells(self) -> Iterator[Cell]:
        """Yield every cell of the study."""
        for sites, epsilon, entrant in product(self.study.sites, EPSILONS, ENTRANTS):
            yield Cell(entrant, sites, epsilon)

    def chosen(self, cell: Cell) -> tuple[int, float]:
        """Return the rounds and η of the best mean over sites at seed 0."""
        local = self.study.local_ways if cell.entrant == "local" else ()
        ways = local or self.study.ways
        if len(ways) == 1:
            return ways[0]
        return max(ways, key=lambda way: self.of(cell, way, 0)["mean"])


def tallied(receipts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many sites spent which ε by their own ledgers, each of one run."""
    each = [next(iter(one["runs"].values()))["epsilon_spent"] for one in receipts]
    return {f"{x:.6f}": each.count(x) for x in set(each)}


def _summary(accuracies: list[float]) -> dict[str, float]:
    return {"mean": round(statistics.fmean(accuracies), 5), "worst": round(min(accuracies), 5)}


def told(runs: list[dict[str, Any]], figure: str) -> str:
    """Return a figure's mean ± standard deviation over runs, in percent."""
    values = [100 * run[figure] for run in runs]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def page(results: Results) -> Iterator[str]:
    """Yield a study's section, of what is stored alone."""
    yield f"## {results.study.title}"
    yield ""
    yield (
        "| sites | ε | " + " | ".join(f"{told}: mean | worst" for told in ENTRANTS.values()) + " |"
    )
    yield "|" + " --- |" * (2 + 2 * len(ENTRANTS))
    for sites, epsilon in product(results.study.sites, EPSILONS):
        row = list[str]()
        for entrant in ENTRANTS:
            cell = Cell(entrant, sites, epsilon)
            try:
                way = results.chosen(cell)
                runs = [results.of(cell, way, seed) for seed in results.study.seeds]
                row += [told(runs, "mean"), told(runs, "worst")]
            except LookupError:
                row += ["not run", ""]
        yield f"| {sites} | {epsilon:g} | {' | '.join(row)} |"
    yield ""
    if not results.study.alone:
        yield "Each alone and exact: not looked for, which would take longer than all the rest."
        return
    alone = list[str]()
    for sites in results.study.sites:
        keys = [f"{ALONE} sites={sites} seed={seed}" for seed in results.study.seeds]
        runs = [results.found[key] for key in keys if key in results.found]
        if runs:
            alone.append(f"{told(runs, 'mean')} (worst {told(runs, 'worst')}) of {sites}")
    yield f"Each alone and exact: {', '.join(alone) or 'not run'}."


class Stored(Results):
    """What is stored, of which nothing is computed anew. Raises KeyError for what is missing."""

    def of(self, cell: Cell, way: tuple[int, float], seed: int) -> dict[str, Any]:
        """Return one run's figures."""
        return self.found[f"{cell} T={way[0]} η={way[1]:g} seed={seed}"]


def readme() -> str:
    """Return README.md with its tables written anew."""
    head, *_ = (HERE / "README.md").read_text(encoding="utf-8").partition("\n## ")
    return "\n\n".join([head.rstrip(), *("\n".join(page(Stored(name))) for name in STUDIES)]) + "\n"


def main(name: str, sites: list[str]) -> None:
    """Compute what is missing of a study, with these numbers of sites alone where any are given."""
    results = Results(name)
    known = {str(cell.sites) for cell in results.cells()}
    if unknown := set(sites) - known:
        sys.exit(f"{name} has no {', '.join(unknown)} sites: expected {', '.join(sorted(known))}")
    for cell in results.cells():
        if not sites or str(cell.sites) in sites:
            way = results.chosen(cell)
            runs = [results.of(cell, way, seed) for seed in results.study.seeds]
            print(cell, way, told(runs, "mean"), told(runs, "worst"), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        (HERE / "README.md").write_text(readme(), encoding="utf-8")
    elif sys.argv[1:] and sys.argv[1] in STUDIES:
        main(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(f"expected --page, or one of {', '.join(STUDIES)} and numbers of sites")
