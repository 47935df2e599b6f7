"""The command line as a user meets it: its exit code and its two streams.

Calls go through main() in this process.
"""

import contextlib
import errno
import html
import importlib.metadata
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import fedpact as package
from fedpact.cli.commands import run as commands
from fedpact.cli.main import main
from fedpact.client import Client
from fedpact.common.messages import RoundRecord
from fedpact.common.run_folder import Folder
from fedpact.simulation.setup import SimulationSetup

QUICK = ["--set", "rounds=3", "--set", "run.workers=1"]


@pytest.fixture(autouse=True)
def _keep_interrupt_handler():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def fedpact(*arguments, cwd):
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(cwd)
        patched.setattr(sys, "argv", ["fedpact", *arguments])
        patched.setattr(sys, "path", list(sys.path))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "fedpact resume"),
        (errno.EFBIG, "fedpact resume"),
        (errno.EROFS, "can read and write"),
    ],
)
def test_machine_limits_are_reported_and_the_run_resumes(tmp_path, monkeypatch, number, told):
    commit = Folder.commit

    def refused(folder, at, record):
        if at.round == 2:
            raise OSError(number, os.strerror(number), "there")
        return commit(folder, at, record)

    monkeypatch.setattr(Folder, "commit", refused)
    done = fedpact("run", *QUICK, "--out", "r", cwd=tmp_path)
    assert done.returncode == 2
    assert os.strerror(number) in done.stderr
    assert told in done.stderr
    monkeypatch.undo()
    assert fedpact("resume", "r", cwd=tmp_path).returncode == 0


def test_other_runs_folder_is_detected_before_computing(tmp_path, monkeypatch):
    assert fedpact("run", *QUICK, "--out", "r", cwd=tmp_path).returncode == 0

    def refused(path, *given, **named):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    # As an ordinary user finds it; who runs the tests may be allowed everything.
    monkeypatch.setattr("fedpact.report.page.write_whole", refused)
    monkeypatch.setattr(
        "fedpact.common.run_folder.os.access", lambda place, kind: not kind & os.W_OK
    )
    shown = fedpact("report", "r", cwd=tmp_path)
    assert (shown.returncode, "worst site" in shown.stdout) == (2, True)
    assert "report.html" in shown.stderr
    monkeypatch.setattr("fedpact.studies.audit.one_run.one_run", None)
    monkeypatch.setattr("fedpact.simulation.simulate.own_models", None)
    for command in (("audit", "r"), ("personalise", "r")):
        done = fedpact(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert "is not writable by this account" in done.stderr


def test_a_wrong_folder_error_suggests_the_runs_folder(tmp_path):
    compared = ("compare", "--algorithms", "fedavg", "--seeds", "1", "--set", "rounds=1")
    found = tmp_path / "c" / "fedavg" / "seed-0"
    assert fedpact("run", *QUICK, "--out", str(found), cwd=tmp_path).returncode == 0
    (tmp_path / "c" / "comparison.json").write_text("{}")
    places = {"c": "c/comparison.html", "d/server": "d/server/run", "d": "d/server/run"}
    for name in ("d/server", "d/sites/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "federation.toml").touch()
    (tmp_path / "d" / "sites" / "a" / "site.toml").touch()
    for folder, told in {**places, "d/sites/a": "deploy status"}.items():
        shown = fedpact("report", folder, cwd=tmp_path)
        assert shown.returncode == 2
        assert told in shown.stderr
    # A comparison does not go into a run's folder, as a run does not into a comparison's.
    for mixed in ((*compared, "--out", str(found)), ("run", *QUICK, "--out", "c")):
        done = fedpact(*mixed, cwd=tmp_path)
        assert done.returncode == 2
        assert "another" in done.stderr
    # As of a deployment's server, whose records are at its sites.
    (found / "summary.json").unlink()
    (found / "partition.json").unlink()
    done = fedpact("resume", str(found), cwd=tmp_path)
    assert done.returncode == 2
    assert "fedpact deploy up" in done.stderr


def test_run_prints_the_outcome_and_the_reports_path(tmp_path):
    done = fedpact("run", *QUICK, "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "add/remove one record" in done.stdout
    assert "δ = 1e-05" in done.stdout
    page = tmp_path / "r" / "report.html"
    page.write_text("old")
    shown = fedpact("report", "r", cwd=tmp_path)
    assert shown.stdout == done.stdout
    assert "r/report.html" in done.stdout
    assert page.stat().st_size > 10_000
    # Not a terminal: a plain line for every round, on the other stream.
    assert [line for line in done.stderr.splitlines() if line.startswith("round 3/3")]


def printed(folder):
    """The command under "How to repeat it", as a shell would take it apart."""
    page = (folder / "report.html").read_text()
    (command,) = re.findall("<h3>How to repeat it</h3>\n<p><code>(.*?)</code>", page)
    return shlex.split(html.unescape(command))


def test_the_command_that_a_report_prints_repeats_the_run(tmp_path):
    # Settings left to defaults, given ones, and a name that a shell would take apart.
    given = ("--set", "algorithm=fedprox", "--set", "settings.proximal=0.5", "--set", "seed=3")
    first = tmp_path / "a run's"
    assert fedpact("run", *QUICK, *given, "--out", first.name, cwd=tmp_path).returncode == 0
    name, *arguments = printed(first)
    assert name == "fedpact"
    done = fedpact(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (again,) = {path.parent for path in tmp_path.glob("*/plan.json")} - {first}
    for file in ("model.safetensors", "plan.json", "partition.json"):
        assert (again / file).read_bytes() == (first / file).read_bytes()
    marked = json.loads((first / "plan.json").read_text())["defaults"]
    assert {"settings.local_steps", "settings.learning_rate", "label"} <= set(marked)
    assert {"settings.proximal", "seed", "algorithm", "rounds"}.isdisjoint(marked)


def test_json_is_one_document_and_nothing_else(tmp_path):
    done = fedpact("data", "list", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict | list)


def test_a_run_reports_again_and_a_plan_foretells_what_it_spends(tmp_path):
    run = json.loads(fedpact("run", *QUICK, "--out", "r", "--json", cwd=tmp_path).stdout)
    again = json.loads(fedpact("report", "r", "--json", cwd=tmp_path).stdout)
    foretold = json.loads(fedpact("plan", *QUICK, "--json", cwd=tmp_path).stdout)
    for site, spent in run["epsilon"].items():
        assert again["summary"]["epsilon"][site] == spent
        assert foretold["sites"][site]["epsilon_by_round"][-1] == pytest.approx(spent)
    sent = run["bytes_up"] + run["bytes_down"]
    assert foretold["bytes"] == pytest.approx(sent, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "--set", "nonsense=1"), "nonsense"),
        (("run", "--set", "rounds=abc"), "rounds"),
        (("run", "--set", "privacy.epsilon=-1"), "privacy.epsilon"),
        (("run", "--set", "data=short.csv", "--set", "label=z"), "short.csv"),
        (("run", "--set", "data=range.npz"), "range.npz"),
        (("run", "--set", "data=far.npz"), "1000000000"),
        (("run", "--set", "data=digits", "--set", "sites=4000"), "site"),
        (("run", "--set", "data=missing.csv", "--set", "label=y"), "missing.csv"),
        (("run", "missing.toml"), "missing.toml"),
        (("run", "--set", "model=own:wide"), "own:wide"),
        (("run", "--set", "model=cnn"), "cnn"),
        (("run", "--set", "privacy.sigma=0.01"), "privacy.sigma is 0.01"),
        (
            ("plan", "--set", "data=t.csv", "--set", "label=y", "--set", "task.kind=multi_label"),
            "each record has a single label: expected 0 or 1 for each of K labels",
        ),
        (("report", "nowhere"), "nowhere"),
        (("resume", "nowhere"), "nowhere"),
        (("plan", "--set", "privacy.delta=2"), "privacy.delta"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(tmp_path, monkeypatch, arguments, told):
    (tmp_path / "short.csv").write_text("a,b,y\n1,2,0\n")
    (tmp_path / "t.csv").write_text("a,b,y\n" + "1,2,0\n3,4,1\n" * 20)
    np.savez(tmp_path / "range.npz", x=np.zeros((40, 3), np.float32), y=np.full(40, -1))
    far = np.array([0, 1] * 19 + [1, 10**9])
    np.savez(tmp_path / "far.npz", x=np.zeros((40, 3), np.float32), y=far)
    (tmp_path / "own.py").write_text(
        "from torch import nn\ndef wide(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes + 1))\n"
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = {path.name for path in tmp_path.iterdir()}
    done = fedpact(*arguments, cwd=tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("fedpact: ")
    assert done.stderr.strip().count("\n") == 0
    assert told in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == before


def test_interrupt_ends_after_the_round_and_resume_continues(tmp_path, monkeypatch):
    """Ctrl-C while the first site of round 6 has its task."""
    handle, sent = Client.handle, []

    def while_a_site_trains(self, task, bench):
        if task.round == 6 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return handle(self, task, bench)

    many = ["--set", "rounds=12", "--set", "run.workers=1", "--set", "run.evaluate_every=100"]
    with monkeypatch.context() as patched:
        patched.setattr(Client, "handle", while_a_site_trains)
        try:
            done = fedpact("run", *many, "--out", "r", "--json", cwd=tmp_path)
        except KeyboardInterrupt:  # it would end these tests
            pytest.fail("nobody waits for the round")
    assert done.returncode == 130, done.stderr
    stopped = json.loads(done.stdout)
    assert (stopped["status"], stopped["rounds"]) == ("stopped", 6)
    resumed = json.loads(fedpact("resume", "r", "--json", cwd=tmp_path).stdout)
    assert (resumed["status"], resumed["rounds"]) == ("finished", 12)
    again = fedpact("resume", "r", cwd=tmp_path)
    assert "The run has ended (finished), so there is nothing to resume." in again.stderr
    whole = fedpact("run", *many, "--out", "whole", "--json", cwd=tmp_path)
    assert json.loads(whole.stdout)["epsilon"] == resumed["epsilon"]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("r", "whole")]
    assert models[0] == models[1]


def test_an_ended_run_of_records_from_python_is_shown_again(tmp_path):
    x = np.arange(80, dtype=np.float32).reshape(40, 2)
    run = package.run("logistic", (x, x[:, 0] > 40), rounds=1, sites=2, out=tmp_path / "r")
    again = fedpact("resume", "r", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["accuracy"] == run.summary["accuracy"]


def test_interrupt_before_the_first_round_ends_at_once(tmp_path, monkeypatch):
    """While records are read and features made no round is under way that could be waited for."""
    monkeypatch.setattr(SimulationSetup, "of", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = fedpact("run", *QUICK, "--out", "r", cwd=tmp_path)
    assert done.returncode == 130
    assert "Stopping after this round" not in done.stderr


def test_stored_rounds_do_not_count_in_the_time_left(tmp_path, monkeypatch):
    (tmp_path / "rounds.jsonl").write_text("{}\n" * 4)
    passed, said = [0.0], io.StringIO()
    monkeypatch.setattr(commands, "time", SimpleNamespace(perf_counter=lambda: passed[0]))
    plan = package.Plan.parse({"rounds": 8, "privacy": {"mode": "none"}})
    live = commands._Live(plan, tmp_path, Console(file=said))
    for number in range(6):
        passed[0] += 10.0 * (number > 3)
        live(RoundRecord(round=number))
    assert said.getvalue().endswith("30 s left\n")
    assert said.getvalue().count("left") == 2


def test_the_public_names_are_there_and_theory_needs_no_torch():
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert package.__all__ == sorted(package.__all__)
    assert package.__version__ == importlib.metadata.version("fedpact")
    code = "import sys, fedpact.privacy.accounting.accountant; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_accuracy_is_shown_with_the_majority_baseline(tmp_path):
    """A model that hardly trained is right of as many labels as are the commonest."""
    rows = [f"{i % 7 / 7},{'rare' if i % 10 == 0 else 'common'}" for i in range(600)]
    (tmp_path / "ill.csv").write_text("\n".join(["a,label", *rows]) + "\n")
    given = ["data='ill.csv'", "label='label'", "model='logistic'", "sites=2"]
    changed = [part for one in [*given, "privacy.mode='none'"] for part in ("--set", one)]
    done = fedpact("run", *QUICK, *changed, "--out", "runs/one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    beside = summary["commonest"]
    assert beside["name"] == "common"
    assert summary["accuracy"] == beside["accuracy"]
    share = f"{100 * beside['accuracy']:.2f} %"
    told = f"no better than always answering 'common', which gives {share}"
    assert told in " ".join(done.stdout.split())
    page = html.unescape((tmp_path / "runs/one/report.html").read_text())
    assert "no better than always answering 'common'" in page


def test_a_loss_above_the_first_models_is_told(tmp_path):
    rows = [f"{i % 7 / 7},{3 * i % 11}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,y", *rows]) + "\n")
    given = {"data": "t.csv", "label": "y", "model": "logistic", "task.kind": "regression"}
    given |= {"sites": 2, "privacy.mode": "none", "settings.learning_rate": 9.0}
    given |= {"task.range": [0, 11]}
    changed = [part for key, one in given.items() for part in ("--set", f"{key}={one!r}")]
    done = fedpact("run", *QUICK, *changed, "--out", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "before training: lower the learning rate" in " ".join(done.stdout.split())


def test_answers_can_be_joined_to_the_rows_of_the_file(tmp_path):
    """Also where a record is left out."""
    table = ["age,ill"] + [f"{i},{'yes' if i > 30 else 'no'}" for i in range(60)]
    (tmp_path / "old.csv").write_text("\n".join(table))
    records = {"classes": ["no", "yes"], "columns": {"age": {"range": [0, 60], "scale": "range"}}}
    given = {"label": "ill", "records": records, "rounds": 2, "sites": 2}
    package.run("logistic", str(tmp_path / "old.csv"), out=tmp_path / "r", **given)
    (tmp_path / "new.csv").write_text("age\n40\nvery old\n20\n")
    words = ["predict", "r", "new.csv"]
    done = fedpact(*words, cwd=tmp_path)
    lines = [line.split(",") for line in done.stdout.splitlines()]
    assert (done.returncode, lines[0]) == (0, ["row", "label", "no", "yes"])
    assert [line[0] for line in lines[1:]] == ["1", "2", "3"]
    assert [bool(line[1]) for line in lines[1:]] == [True, False, True]
    done = fedpact(*words, "--out", str(tmp_path / "new.csv"), cwd=tmp_path)
    assert done.returncode == 2
    assert "which holds the records: the predictions would replace them" in done.stderr
    assert (tmp_path / "new.csv").read_text().startswith("age\n40\n")


def test_a_run_without_any_accuracy_says_why(tmp_path):
    (tmp_path / "few.csv").write_text("a,y\n" + "".join(f"0.{i % 10},{i % 2}\n" for i in range(8)))
    given = ["data='few.csv'", "label='y'", "model='logistic'", "sites=4", "privacy.mode='none'"]
    changed = [part for one in given for part in ("--set", one)]
    done = fedpact("run", *QUICK, *changed, "--out", "runs/one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "there is no public test set, and no site holds out a record" in done.stdout
