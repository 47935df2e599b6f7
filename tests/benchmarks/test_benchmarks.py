"""The benchmarks' own code: every table runs at its tiniest size, the page shows what was measured.

Nothing here measures: no test depends on how long anything takes.
"""

import itertools
import subprocess
import sys
import time
from functools import cache

import pytest
import torch
from benchmarks.problems import PROBLEMS
from benchmarks.results import RESULTS, Row, Table, shown
from benchmarks.scale import TINY, Scale
from benchmarks.tables import card, kernel, modules
from benchmarks.timing import Spread, by_turns

from benchmarks import __main__ as command
from benchmarks import child, page, pfl, provenance, steps, timing

# Opacus warns of how it is used; so it is used by those it is compared for. vmap warns of loops.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:opacus",
    "ignore:Full backward hook",
    "ignore:There is a performance drop because we have not yet implemented the batching rule",
)

MACHINE = {"processor": "abacus", "torch": "0", "device": "cpu", "torch's threads": "1"}
WHERE = "2026-01-02 03:04 UTC, commit fedcba987, abacus, torch 0, threads: 1"


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(child, "call", lambda function, *given, **_: function(*given))
    yield
    torch.set_num_threads(threads)


now = cache(provenance.digest)


def table(name, *rows, quick=False, busy=False, digest="0123456789ab"):
    return Table(name, rows, MACHINE, "2026-01-02 03:04 UTC", quick, busy, "fedcba987", digest)


# One table of each module; slow are those that take seconds, whose lists of methods are others, and
# other models of the kernel's tables, as one way of measuring serves all of them.
SLOW = ("round-B", "parts", "step-B", *kernel.NAMES[1:])
FIRST = {module: module.NAMES[0] for module in modules().values()}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in FIRST.values() if name not in SLOW),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_every_table_runs_and_can_be_shown(name, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "digest", now)
    found = command.measure(name, TINY)
    assert found.rows
    for row in found.rows:
        # Nothing measured needs a reason; what is measured is a positive number.
        assert row.note if row.value is None else row.value > 0 or row.unit == "ms"
    found.save(tmp_path)
    assert Table.load(tmp_path / f"{name}.json") == found
    text = page.text(tmp_path)
    # Of the kernel's tables the method stands above and the cell in front.
    assert all(part in text for row in found.rows for part in row.name.split(", batch"))


@pytest.fixture
def _idle(monkeypatch):
    """Methods that do nothing: what a table makes of their turns is what is tested."""
    for method in steps.METHODS:
        monkeypatch.setitem(steps.METHODS, method, lambda problem, batch: lambda: time.sleep(1e-3))


@pytest.mark.usefixtures("_idle")
def test_a_peer_that_fails_is_a_row_that_says_so(monkeypatch):
    def no(problem, batch):
        raise NotImplementedError("no such layer\nand more")

    monkeypatch.setitem(steps.METHODS, "opacus_ghost", no)
    found = command.measure("kernel-resnet", TINY)
    rows = {row.name: row for row in found.rows}
    row = rows["Opacus, ghost, batch 3, 1 thread"]
    assert (row.value, row.note) == (None, "fails: NotImplementedError: no such layer")
    text = "\n".join(kernel.lines(found))
    assert "* Opacus, ghost, batch 3, 1 thread: fails: NotImplementedError: no such layer." in text


def turns_by_name(monkeypatch, seconds):
    """Have a turn of each method take what is said, and return a list of what is timed."""
    asked = []

    def turns(works, repetitions, threads):
        asked.append((list(works), repetitions, threads))
        return timing.Turns({name: [seconds[name]] for name in works}, False)

    monkeypatch.setattr(kernel, "by_turns", turns)
    return asked


def work_of(monkeypatch, seconds):
    """Have methods take so many seconds of processor time, by their names, and no time."""
    clock = [0.0]
    monkeypatch.setattr(kernel.time, "process_time", lambda: clock[0])

    def method(name):
        def work():
            clock[0] += seconds.get(name, 1.0)

        return lambda problem, batch: work

    for name in steps.METHODS:
        monkeypatch.setitem(steps.METHODS, name, method(name))


def test_slow_peers_take_part_in_two_turns(monkeypatch):
    asked = turns_by_name(monkeypatch, dict.fromkeys(steps.METHODS, 1.0))
    work_of(monkeypatch, {"opacus_hooks": 10.0})
    monkeypatch.setattr(kernel.torch, "get_num_threads", lambda: 1)
    kernel.measured("tiny resnet", 3, 2, 60.0)
    # Four methods of a second each, in 60 seconds of turns that count one and a half times.
    assert asked == [
        (["plain", "kernel_step", "opacus_ghost", "vmap_grad"], 10, 2),
        (["plain", "opacus_hooks"], 2, 2),
    ]


def test_models_that_are_too_slow_are_not_timed(monkeypatch):
    work_of(monkeypatch, {"plain": 1.0, "kernel_step": 2.0})
    monkeypatch.setattr(kernel.torch, "get_num_threads", lambda: 1)
    ((row,), _) = kernel.measured("tiny resnet", 3, 1, 5.0)
    assert (row["name"], row["value"]) == ("fedpact, batch 3, 1 thread", None)
    assert row["note"] == "too long: a plain step and a private one take 1.0 s and 2.0 s"


@pytest.mark.usefixtures("_idle")
def test_cells_are_stored_as_they_finish(monkeypatch, tmp_path):
    """The second cell fails: the first is there afterwards, and is not measured again."""
    measured = []

    def call(function, model, batch, *given, **_):
        measured.append(batch)
        if measured == [16, 64]:
            raise KeyboardInterrupt
        return [{"name": f"fedpact, batch {batch}, 1 thread", "value": 1.0}], False

    monkeypatch.setattr(child, "call", call)
    monkeypatch.setattr(provenance, "digest", lambda: "one")
    quick = Scale(repetitions=1, rounds=1, quick=True)
    with pytest.raises(KeyboardInterrupt):
        command.measure("kernel-A", quick, tmp_path)
    found = command.measure("kernel-A", quick, tmp_path)
    assert measured == [16, 64, 64]
    assert [row.name.split(",")[1] for row in found.rows] == [" batch 16", " batch 64"]
    assert Table.load(tmp_path / "kernel-A.json") == found
    # Of another kernel nothing is kept.
    monkeypatch.setattr(provenance, "digest", lambda: "another")
    command.measure("kernel-A", quick, tmp_path)
    assert measured == [16, 64, 64, 16, 64]


def test_the_kernels_lines_compare_it_with_every_peer():
    rows = []
    for label, own in (("batch 16, 1 thread", 1.5), ("batch 64, 2 threads", 1.2)):
        goal = 1.3 if "1 thread" in label else None
        rows += [
            Row(f"plain, {label}", 1.0, note="2 ms"),
            Row(f"fedpact, {label}", own, own - 0.1, own + 0.1, goal=goal),
            Row(f"vmap(grad), {label}", 1.4),
            Row(f"Opacus, hooks, {label}", None, note="fails"),
        ]
    lines = kernel.lines(table("kernel-vit", *rows))
    assert lines[2:4] == [
        "| batch 16, 1 thread | 2 ms | 1.50 (1.40–1.60) | – | 1.40 | ≤ 1.30 | no | no |",
        "| batch 64, 2 threads | 2 ms | 1.20 (1.10–1.30) | – | 1.40 |  |  | yes |",
    ]


PACKAGE = '''
"""What it is for."""

def clipped(x, most):
    """Clip."""
    # A comment.
    return min(x, most)
'''


def digest_of(folder, code):
    (folder / "inner").mkdir(exist_ok=True)
    (folder / "inner" / "kernel.py").write_text(code)
    return provenance.digest(folder)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("What it is for.", "Another reason.", False),
        ("    # A comment.\n", "", False),
        ("(x, most):", "(\n    x,\n    most,\n):", False),
        ("min(", "max(", True),
        ("return min(x, most)", "return 0", True),
        ("x, most", "most, x", True),
    ],
)
def test_code_changes_the_digest_and_prose_does_not(tmp_path, old, new, code):
    assert old in PACKAGE
    before = digest_of(tmp_path, PACKAGE)
    assert (digest_of(tmp_path, PACKAGE.replace(old, new)) != before) == code
    # A file more changes it, too.
    digest_of(tmp_path, PACKAGE)
    (tmp_path / "more.py").write_text("")
    assert provenance.digest(tmp_path) != before


def test_tables_of_an_older_kernel_are_stale():
    """Unless every change since is listed; a table without a figure, or of other code, is not."""
    tables = [
        table("kernel-A", Row("r", 1.0), digest="a"),
        table("step-A", Row("r", 1.0), digest="b"),
        table("step-B", Row("r", 1.0), digest="c"),
        table("card", Row("r", None, note="no card"), digest="a"),
        table("noise", Row("r", 1.0), digest="a"),
    ]
    first = provenance.Change("a", "b", "a message")
    second = provenance.Change("b", "c", "a name")
    for changes, expected in (
        ([], ["kernel-A", "step-A"]),
        ([first], ["kernel-A", "step-A"]),
        ([second], ["kernel-A"]),
        ([second, first], []),
    ):
        assert provenance.stale(tables, "c", changes) == expected


def test_a_harmless_change_needs_a_reason(tmp_path):
    path = tmp_path / "harmless.toml"
    path.write_text('[[change]]\nbefore = "a"\nafter = "b"\nbecause = "a message"\n')
    assert provenance.harmless(path) == [provenance.Change("a", "b", "a message")]
    path.write_text('[[change]]\nbefore = "a"\nafter = "b"\nbecause = " "\n')
    with pytest.raises(ValueError, match="the change to b has no reason"):
        provenance.harmless(path)


STORED = [Table.load(path) for path in sorted(RESULTS.glob("*.json"))]


def test_the_kernels_figures_are_of_the_kernel_there_is():
    stale = provenance.stale(STORED, now(), provenance.harmless())
    measured = {found.kernel for found in STORED if found.name in stale}
    assert not stale, (
        f"{provenance.PACKAGE.name} has changed since {', '.join(stale)} were measured: measure "
        f"them anew by `make bench TABLES='{' '.join(stale)}'`, or, where the change cannot change "
        f"a figure, list it in benchmarks/harmless.toml: before = one of {sorted(measured)}, "
        f'after = "{now()}", because = ...'
    )


@pytest.mark.parametrize("found", STORED, ids=lambda found: found.name)
def test_figures_state_their_code_and_machine(found):
    needed = ("processor", "torch", "device", "torch's threads")
    assert all(found.machine[key] for key in needed)
    assert found.made
    assert found.commit
    known = modules()
    assert found.name in known
    assert f"commit {found.commit}, {found.machine['processor']}" in page.lines_of(found)[2]


def test_the_commit_says_whether_sources_differ_from_it(monkeypatch):
    answers = {"status": "", "rev-parse": "fedcba987\n"}

    def run(words, **_):
        return subprocess.CompletedProcess(words, 0, answers[words[1]], "")

    monkeypatch.setattr(provenance.subprocess, "run", run)
    assert provenance.commit() == "fedcba987"
    answers["status"] = " M src/fedpact/common/losses.py\n"
    assert provenance.commit() == "fedcba987+"

    def none(words, **_):
        raise FileNotFoundError

    monkeypatch.setattr(provenance.subprocess, "run", none)
    assert provenance.commit() == "unknown"


@pytest.mark.parametrize("name", ["resnet", "transformer", "vit", "lora", "lstm64"])
def test_the_model_for_opacus_computes_the_same(name):
    """The bare parameters in modules; and its own LSTM, whose weights are those of torch's."""
    problem = PROBLEMS[f"tiny {name}"]
    (x, y), module = problem.records(4), problem.module()
    assert (x.shape, x.is_floating_point()) == ((4, *problem.shape), not problem.vocabulary)
    assert y.max() < problem.classes == module(x).shape[1]
    torch.testing.assert_close(problem.module_for_opacus()(x), module(x))
    given = steps.for_opacus(problem)
    assert sum(p.numel() for p in given.parameters() if p.requires_grad) == problem.size
    # Opacus' attention puts heads together in another order than torch's where batch_first is set.
    if name not in ("transformer", "vit"):
        torch.testing.assert_close(given(x), module(x))


def test_a_cards_steps_are_waited_for():
    """On the CPU, which stands in for a card that is not there."""
    waits = []
    rows, _ = card.rows("cpu", lambda: waits.append(1), TINY)
    titles = [row.name.split(",")[0] for row in rows]
    assert titles == ["plain", "fedpact", "Opacus", "Opacus", "vmap(grad)"]
    assert all(row.value > 0 for row in rows)
    # Every one of the five methods runs twice to be tried, and at least once in a turn.
    assert len(waits) >= 5 * 3


def test_a_cards_rounds_are_timed():
    rows, _ = card.rounds("cpu", TINY)
    assert [(row.name, row.unit) for row in rows] == [("fedpact, a round of 2 sites", "s")]
    assert rows[0].value > 0


def test_the_page_shows_marks_values_and_commands(tmp_path, monkeypatch):
    rows = [
        Row("fine", 0.5, 0.4, 0.6, goal=0.8, stretch=0.5),
        Row("fair", 0.7, goal=0.8, stretch=0.5),
        Row("poor", 0.9, goal=0.8, stretch=0.5),
        Row("fast", 11.0, goal=10, stretch=15, larger_is_better=True, unit="times"),
        Row("absent", None, goal=10, note="a|reason"),
    ]
    monkeypatch.setitem(page.REMARKS, ("noise", "poor"), "Because.")
    monkeypatch.setitem(page.REMARKS, ("noise", "fine"), "Not to be seen.")
    table("noise", *rows, busy=True).save(tmp_path)
    table("memory", Row("old", 1.0), quick=True).save(tmp_path)
    text = page.text(tmp_path)
    for line in (
        "| fine | 0.50 × | 0.40–0.60 | ≤ 0.8 | ≤ 0.5 | stretch | `noise` |  |",
        "| fair | 0.70 × |  | ≤ 0.8 | ≤ 0.5 | goal | `noise` |  |",
        "| poor | 0.90 × |  | ≤ 0.8 | ≤ 0.5 | no | `noise` |  |",
        "| fast | 11.0 times |  | ≥ 10 | ≥ 15 | goal | `noise` |  |",
        r"| absent | – |  | ≤ 10 |  |  | `noise` | a\|reason |",
        "* poor: Because.",
        f"`python -m benchmarks noise`, {WHERE}; on a busy machine",
        f"`python -m benchmarks memory`, {WHERE}; quick: few repetitions",
        "Measured on: processor: abacus; torch: 0;",
        "Not measured: `python -m benchmarks step-B`.",
    ):
        assert line in text
    assert "Not to be seen." not in text


def test_a_mark_is_reached_by_the_value_as_shown():
    """1.004 is shown as 1.00 and reaches 1; 1.006 is shown as 1.01 and does not."""
    assert [Row("r", value, goal=1.0).reaches(1.0) for value in (1.004, 1.006)] == [True, False]
    assert Row("r", 9.96, larger_is_better=True).reaches(10) is False
    assert [shown(value) for value in (0.126, 1.0, 12.34, 123.4)] == ["0.13", "1.00", "12.3", "123"]


def test_the_command_measures_the_named_tables(tmp_path, monkeypatch, capsys):
    measured = []

    def measure(name, scale, folder=None):
        measured.append((name, scale.quick))
        return table(name, Row("r", 1.0))

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(Table, "save", lambda self: None)
    monkeypatch.setattr(page, "write", lambda: measured.append("page"))
    command.main(["noise", "memory", "--quick"])
    command.main(["--page"])
    # What is only tried takes no stored figure's place.
    assert measured == [("noise", True), ("memory", True), "page"]
    # The name of a kind of tables stands for all of them.
    measured.clear()
    command.main(["kernel", "--quick"])
    assert [name for name, _ in measured] == list(kernel.NAMES)
    with pytest.raises(SystemExit):
        command.main(["nothing"])
    assert "no such table: nothing" in capsys.readouterr().err


def measured(monkeypatch, quiet, repetitions, seconds, **asked):
    """by_turns with turns that are quiet or not, and functions that take what is said.

    seconds: by the clock and of the processor, of each function run, the trial runs first.
    """
    marks, durations = itertools.cycle(quiet), iter(seconds)
    monkeypatch.setattr(timing.Others, "undisturbed", property(lambda _: next(marks)))
    monkeypatch.setattr(timing, "_took", lambda *_: next(durations))
    return by_turns({"a": lambda: None, "b": lambda: None}, repetitions, **asked)


def test_turns_are_compared_turn_by_turn(monkeypatch):
    """Seconds 2 and 1, then 4 and 2, then 6 and 3: the ratio is 2, whatever the drift."""
    seconds = [(s, 0.0) for s in (1.0, 1.0, 2.0, 1.0, 4.0, 2.0, 6.0, 3.0)]
    turns = measured(monkeypatch, [True], 3, seconds)
    assert turns.ratio("a", "b") == Spread(2.0, 2.0, 2.0)
    assert turns.time("a") == Spread(4.0, 3.0, 5.0)
    assert not turns.busy


def test_disturbed_timings_count_only_if_few_others_exist(monkeypatch):
    seconds = [(float(n), 100.0 + n) for n in range(100)]
    turns = measured(monkeypatch, [False, True], 3, seconds)
    # Runs 0 and 1 are for trying; then every second turn is quiet, until three are disturbed.
    assert (turns.seconds["a"], turns.busy) == ([4.0, 8.0], False)
    turns = measured(monkeypatch, [False], 3, seconds)
    assert (turns.seconds["a"], turns.busy) == ([102.0, 104.0, 106.0], True)
    # Several threads' processor time is not theirs alone: then by the clock.
    turns = measured(monkeypatch, [False], 3, seconds, threads=2)
    assert (turns.seconds["a"], turns.busy) == ([2.0, 4.0, 6.0], True)


def test_short_functions_run_several_times(monkeypatch):
    """A millisecond each: ten times a turn after once unmeasured, besides two runs to try."""
    ticks = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 0.001 * next(ticks))
    monkeypatch.setattr(timing.Others, "undisturbed", True)
    runs = []
    by_turns({"a": lambda: runs.append(1)}, 1)
    assert len(runs) == 2 + 1 + 10


def test_a_separate_process_answers(monkeypatch):
    monkeypatch.undo()
    assert child.call(shown, 3.14159) == "3.14"
    with pytest.raises(RuntimeError, match="TypeError"):
        child.call(shown, "three")


def test_missing_packages_for_pfl_are_named(monkeypatch):
    """Without the variable, and with a Python that is not there or has no pfl, as this one."""
    monkeypatch.delenv("FEDPACT_BENCH_PFL", raising=False)
    assert pfl.missing().startswith("set FEDPACT_BENCH_PFL to the Python of an environment")
    for python in ("/nowhere/python", sys.executable):
        monkeypatch.setenv("FEDPACT_BENCH_PFL", python)
        assert pfl.missing().startswith(f"FEDPACT_BENCH_PFL = {python}: no Python with pfl")
    row = pfl.row({"fedpact": [1.0]}, "fedpact", goal=1.2, stretch=1.5)
    assert (row.value, row.note) == (None, pfl.missing())


def test_pfl_is_asked_for_two_more_rounds_than_count(monkeypatch, tmp_path):
    """A script in its place: it gets count + 2, and its first two seconds are left out."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(f'#!/bin/sh\necho "$@" > {asked}\necho noise\necho "[9, 8, 2.5, 3.5]"\n')
    python.chmod(0o755)
    monkeypatch.setenv("FEDPACT_BENCH_PFL", str(python))
    assert pfl.rounds("tiny A", 2, 3, 2, threads=1) == [2.5, 3.5]
    assert asked.read_text().split()[-2:] == ["1", "4"]
    python.write_text("#!/bin/sh\necho no such layer >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="no such layer"):
        pfl.rounds("tiny A", 2, 3, 2, threads=1)


def test_pfl_is_compared_by_its_faster_threads_run_by_run(monkeypatch):
    """6 / 2 and 4 / 4 on one thread, the faster in the median: 3 and 1, the middle 2."""
    monkeypatch.setattr(pfl, "versions", lambda: "pfl 0")
    found = {"fedpact": [2.0, 4.0], "1": [6.0, 4.0], "2": [1.0, 100.0]}
    row = pfl.row(found, "fedpact", goal=1.2, stretch=1.5)
    assert (row.value, row.low, row.high) == (2.0, 1.5, 2.5)
    assert row.reaches(row.stretch)
    assert "threads = 1: 5e+03 ms, threads = 2: 5.05e+04 ms" in row.note
