"""docs/how-to/extend.md: each of its blocks, added to a copy of the package, is found by all of it.

What is added where is the count of files that an extension touches: one each. An accountant's or a
mechanism's own mathematics would be a second. The copy has no algorithm but FedAvg, so that no file
is seen to need another one.
"""

import itertools
import json
import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from tests.test_architecture import (
    import_cycles,
    own_imports,
    read_package,
    upward_imports,
    without_docstring,
)
from typer.testing import CliRunner

import fedpact
from fedpact import algorithms
from fedpact.common.configuration import check_kinds
from fedpact.common.errors import FedpactError
from fedpact.data.partition import PARTITION_KINDS, PartitionKind, PartitionSettings
from fedpact.evaluation.metrics import METRICS, Metric, check_names
from fedpact.per_sample.tracing import batch_table, replacements

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")  # what a process with threads is told

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    (found,) = re.findall(rf"```python {name}\n(.*?)```", PAGE, re.DOTALL)
    return found


def algorithm() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return found


def before(line: str, text: str, added: str) -> str:
    assert text.count(line) == 1
    return text.replace(line, f"{added}\n\n{line}")


# What is added: the one file that it touches, and what becomes of it.
ADDED = {
    "algorithm": ("algorithms/serverstep.py", lambda text: algorithm()),
    "rule": (
        "per_sample/tracing/batch_table.py",
        lambda text: text + "\n\n" + block("rule"),
    ),
    "partition": (
        "data/partition.py",
        lambda text: before("def _check_kind(", text, block("partition")),
    ),
    "features": ("data/features/kinds.py", lambda text: text + "\n\n" + block("features")),
    "metric": (
        "evaluation/metrics.py",
        lambda text: before("check_names(METRICS)", text, block("metric")),
    ),
    "accountant": (
        "privacy/accounting/accountant.py",
        lambda text: before("def epsilon_on_the_way(", text, block("accountant")),
    ),
    "mechanism": (
        "privacy/mechanisms.py",
        lambda text: before("def mechanism_of(", text, block("mechanism")),
    ),
    "command": ("cli/commands/sites.py", lambda text: block("command")),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    root = tmp_path_factory.mktemp("copy")
    # Bytecode goes with it, which is found out of date where a file is changed.
    shutil.copytree(Path(fedpact.__file__).parent, root / "fedpact")
    for name in set(algorithms.names()) - {"fedavg"}:
        (found,) = (root / "fedpact" / "algorithms").rglob(f"{name}.py")
        found.unlink()
    for file, change in ADDED.values():
        path = root / "fedpact" / file
        path.write_text(change(path.read_text("utf-8") if path.exists() else ""), encoding="utf-8")
    return root


class Sinc(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return torch.sinc(self.layer(x))


def use(copy: Path) -> dict:
    """Use all that was added, in a process whose package becomes the copy."""
    replacements._library._destroy()  # torch would have its operators twice
    for name in [name for name in sys.modules if name.split(".")[0] == "fedpact"]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    os.environ["FEDPACT_CACHE"] = str(copy / "cache")
    os.chdir(copy)
    import fedpact
    from fedpact.cli.main import app
    from fedpact.common.losses import cross_entropy
    from fedpact.common.params import FlatModel
    from fedpact.common.randomness.seeded import SeededDraws
    from fedpact.per_sample.kernel import PerSampleKernel
    from fedpact.privacy.accounting.accountant import Budget
    from fedpact.privacy.oracle import PrivateOracle, Records, Terms
    from fedpact.report.compared_runs import Comparison, read_compared
    from fedpact.report.comparison import comparison_table, document, render_comparison
    from fedpact.report.drawing import Chart

    assert fedpact.__file__.startswith(str(copy))
    # That there is a figure, and of what; to draw them all is a fifth of the time.
    Chart.svg = property(lambda chart: f"<svg>{chart.title}</svg>")

    def call(*arguments):
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    run = Path("cmp/one/seed-0")
    settings = (
        "rounds=1",
        "sites=3",
        "algorithm=serverstep",
        "settings={}",
        "partition.kind=blocks",
        "features.kind=pixels",
        "run.workers=1",
        "privacy.accountant=twice",
        "privacy.mode=normalised",
    )
    options = [word for text in settings for word in ("--set", text)]
    printed = call("run", *options, "--out", str(run))
    plan = json.loads((run / "plan.json").read_text())
    found = Comparison(Path("cmp"), read_compared(Path("cmp"), {"one": plan}, [0]))
    kernel = PerSampleKernel(FlatModel(Sinc()), cross_entropy)
    terms = Terms("a", 1.0, 1.0, 0.5, {"gradient": 0.0}, 1, Budget(1.0, 1e-5), "best", "normalised")
    held = Records(torch.full((1, 3), 1e-3), torch.zeros(1, dtype=torch.int64))
    oracle = PrivateOracle(held, kernel, terms, SeededDraws(0), lambda *_: None)
    length = float(next(oracle.batches(1, "gradient")).gradient(kernel.model.vector).norm())
    return {
        "command": json.loads(call("sites", "--json")),
        "help": call("--help"),
        "printed": printed,
        "summary": json.loads((run / "summary.json").read_text()),
        "rounds": [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()],
        "page": (run / "report.html").read_text(),
        "partition": json.loads((run / "partition.json").read_text())["train"],
        "report": json.loads(call("report", str(run), "--json")),
        "account": json.loads(
            call("account", "--q", "0.1", "--sigma", "2", "--steps", "9", "--all", "--json")
        ),
        "privacy": json.loads((run / "privacy.json").read_text()),
        "row": comparison_table(found).rows[0],
        "comparison": document(found),
        "compared": render_comparison(found),
        "length": length,
        "way": kernel.way(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)),
    }


@pytest.fixture(scope="module")
def told(copy):
    """In a fork, as to load torch takes a third of the time."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(use, copy).result()


def test_one_file_is_touched_by_each():
    assert all(isinstance(file, str) for file, _ in ADDED.values())
    assert len({file for file, _ in ADDED.values()}) == len(ADDED)


def test_an_algorithms_file_can_go_and_no_other_misses_it(copy):
    """Of all files that stay none imports one that went; what runs below runs without them."""
    sources = read_package(copy / "fedpact")
    gone = {algorithms.load(name).__name__ for name in algorithms.names()} - {*sources}
    assert len(gone) == len(algorithms.names()) - 1
    for module in sources:
        assert not gone & {f"fedpact.{name}" for _, name in own_imports(sources, module)}


@pytest.mark.parametrize("rule", [without_docstring, upward_imports, import_cycles])
def test_additions_keep_the_rules_of_the_package(rule, copy):
    assert list(rule(read_package(copy / "fedpact"))) == []


def test_an_algorithm_and_a_partition_are_used_by_name(told):
    assert told["summary"]["status"] == "finished"
    # Blocks of neighbours: every record of a site lies before those of the next.
    sites = [told["partition"][name] for name in sorted(told["partition"])]
    assert len(sites) == 3
    assert all(max(one) < min(other) for one, other in itertools.pairwise(sites))


def test_features_are_used_by_name(told):
    assert told["privacy"]["features"].startswith("Features in place of the records")
    assert ": pixels; filters and whitening" in told["privacy"]["features"]


def test_a_metric_appears_wherever_one_is_shown(told):
    scores = [s["accuracy"] for s in told["rounds"][-1]["scores"].values()]
    gap = max(scores) - min(scores)
    assert told["rounds"][-1]["gap"] == told["summary"]["gap"] == pytest.approx(gap)
    assert told["report"]["summary"]["gap"] == told["summary"]["gap"]
    assert re.search(rf"gap +{100 * gap:.1f} % ", told["printed"])
    assert "0 is even; after round 1" in told["page"]
    assert "Gap over rounds" in told["page"]
    assert told["comparison"]["entries"]["one"]["gap"]["mean"] == pytest.approx(gap)
    assert told["comparison"]["entries"]["one"]["runs"]["0"]["gap"] == pytest.approx(gap)
    assert f"{100 * gap:.2f} %" in told["row"]
    assert told["compared"].count(">gap</th>") == 2
    # The one that was there is shown at the same places.
    assert {"psi", "gap"} <= set(told["rounds"][-1])


def test_an_accountant_is_used_by_name_and_shown(told):
    results = {
        r["accountant"]: r for r in told["account"]["results"] if r["conversion"] != "mironov"
    }
    assert results["twice"]["epsilon"] == 2 * results["rdp"]["epsilon"]
    assert results["twice"]["bound_by"] == "twice"
    assert told["privacy"]["accountant"] == "twice"
    assert {site["epsilon_by"] for site in told["privacy"]["sites"].values()} == {"TWICE"}
    assert "twice: twice the bound by Rényi" in told["page"]


def test_a_mechanism_is_used_by_name_and_shown(told):
    assert told["privacy"]["mechanism"] == "normalised"
    assert told["privacy"]["mechanism_meaning"].startswith("Each record's gradient is scaled to")
    assert "is scaled to length C before" in told["page"]
    # A short gradient was made longer, to C but for the clip's slack.
    assert 0.995 * 0.5 < told["length"] <= 0.5


def test_a_command_is_found_and_has_help(told):
    assert told["command"] == {"sites": 5}
    assert "Show how many sites a configuration has." in told["help"]


def test_a_rule_is_used(told):
    assert "aten.sinc.default" not in batch_table.RULES
    assert told["way"] == "graph"


def test_an_incomplete_partition_is_an_error():
    def split(y, sites, settings, rng):
        return []

    shared = PartitionSettings, ("kind", "held_out")
    with pytest.raises(FedpactError, match="depth"):
        check_kinds({**PARTITION_KINDS, "new": PartitionKind(split, own=("depth",))}, *shared)
    with pytest.raises(FedpactError, match="shards_per_site"):
        check_kinds({k: v for k, v in PARTITION_KINDS.items() if k != "shards"}, *shared)
    with pytest.raises(TypeError):
        PartitionKind()


@pytest.mark.parametrize("name", ["loss", "scores", "status", "fairness", "worst_accuracy", "a b"])
def test_a_metric_whose_name_is_taken_is_an_error(name):
    with pytest.raises(FedpactError, match=name):
        check_names({**METRICS, name: METRICS["psi"]})


def test_an_incomplete_metric_is_an_error():
    with pytest.raises(TypeError, match="about"):
        Metric(label="x", of=lambda scores, sizes: 0.0, form="number", note="")
