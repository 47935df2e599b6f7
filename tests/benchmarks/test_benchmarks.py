"""The benchmarks' own code: every table runs at its tiniest size, the page shows what was measured.

Nothing here measures: no test depends on how long anything takes.
"""

import itertools
import json
import sys
import time

import pytest
import torch
from benchmarks.problems import PROBLEMS
from benchmarks.results import Row, Table, shown
from benchmarks.scale import TINY, Scale
from benchmarks.tables import brought, card, memory, modules
from benchmarks.timing import Spread, by_turns

from benchmarks import __main__ as command
from benchmarks import child, flower, page, pfl, steps, timing

# Opacus warns of how it is used; so it is used by those it is compared for. vmap warns of loops.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:opacus",
    "ignore:Full backward hook",
    "ignore:There is a performance drop because we have not yet implemented the batching rule",
)

LONG_TRACES = ("step-lstm", "step-transformer", "step-vit")
MACHINE = {"processor": "abacus", "torch": "0"}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(child, "call", lambda function, *given, **_: function(*given))
    yield
    torch.set_num_threads(threads)


def table(name, *rows, quick=False, busy=False):
    return Table(name, rows, MACHINE, "2026-01-02 03:04 UTC", quick, busy)


# One table of each module, those whose lists of methods are others, and every brought model: those
# with long traces are slow, as one table serves all of them and what differs is tested below.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in LONG_TRACES else [])
        for name in dict.fromkeys(
            [*{m: n for n, m in modules().items()}.values(), "step-B", "round-B", *brought.NAMES]
        )
    ],
)
def test_every_table_runs_and_can_be_shown(name, tmp_path):
    found = command.measure(name, TINY)
    assert found.rows
    for row in found.rows:
        # Nothing measured needs a reason; what is measured is a positive number.
        assert row.note if row.value is None else row.value > 0 or row.unit == "ms"
    found.save(tmp_path)
    assert Table.load(tmp_path / f"{name}.json") == found
    assert all(row.name in page.text(tmp_path) for row in found.rows)


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
    rows = {row.name: row for row in command.measure("step-resnet", TINY).rows}
    row = rows["Opacus, ghost, batch 64"]
    assert (row.value, row.note) == (None, "fails: NotImplementedError: no such layer")
    assert "Opacus, ghost / fedpact, batch 64" not in rows
    # The goal is at the best of those that are left.
    marked = [row for name, row in rows.items() if "/ fedpact" in name and row.goal == 1.5]
    assert [row.note.endswith("; the best of the peers") for row in marked] == [True]


@pytest.mark.usefixtures("_idle")
def test_slow_peers_are_timed_a_fifth_as_often(monkeypatch):
    asked = []

    def turns(works, repetitions):
        asked.append((list(works), repetitions))
        return timing.Turns({name: [1.0] for name in works}, False)

    monkeypatch.setattr(brought, "by_turns", turns)
    monkeypatch.setattr(brought, "_SLOW_SECONDS", 0.0)
    brought.run("step-resnet", Scale(repetitions=10, rounds=1, tiny=True))
    own, peers = ["plain", "fedpact"], ["opacus_hooks", "opacus_ghost", "vmap_grad"]
    assert asked == [([*own, "kernel_alone"], 10), ([*own, *peers], 2)]


@pytest.mark.parametrize("name", ["resnet", "transformer", "vit", "lora", "lstm64"])
def test_what_opacus_is_given_computes_the_same(name):
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


def test_only_factors_and_head_of_the_low_rank_transformer_are_trained():
    named = PROBLEMS["tiny lora"].module().named_parameters()
    trained = [name for name, p in named if p.requires_grad]
    # Two layers of four products, with two factors each; the head has weight and bias.
    assert len(trained) == 2 * 4 * 2 + 2
    assert all(name.endswith((".down", ".up")) or name.startswith("head.") for name in trained)


def test_a_cards_steps_are_waited_for():
    """On the CPU, which stands in for a card that is not there."""
    waits = []
    rows, _ = card.rows("cpu", lambda: waits.append(1), TINY)
    assert [row.name.split(",")[0] for row in rows] == ["plain", "fedpact", "Opacus", "Opacus"]
    assert all(row.value > 0 for row in rows)
    # Every one of the four methods runs twice to be tried, and at least once in a turn.
    assert len(waits) >= 4 * 3


def test_table_names_are_distinct_and_their_modules_complete():
    names = [name for module in set(modules().values()) for name in module.NAMES]
    assert sorted(names) == sorted(modules())
    assert all(module.TITLE and module.ABOUT for module in modules().values())


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
        "`python -m benchmarks noise`, 2026-01-02 03:04 UTC; on a busy machine",
        "`python -m benchmarks memory`, 2026-01-02 03:04 UTC; quick: few repetitions",
        "Measured on: processor: abacus; torch: 0.",
        "`step-B`: not measured here.",
    ):
        assert line in text
    assert "Not to be seen." not in text


def test_machines_are_told_apart(tmp_path):
    table("noise", Row("a", 1.0)).save(tmp_path)
    other = Table("memory", (), {"processor": "slide rule"}, "now", False, False)
    other.save(tmp_path)
    text = page.text(tmp_path)
    assert "Measured on (noise): processor: abacus" in text
    assert "Measured on (memory): processor: slide rule." in text


def test_a_mark_is_reached_by_the_value_as_shown():
    """1.004 is shown as 1.00 and reaches 1; 1.006 is shown as 1.01 and does not."""
    assert [Row("r", value, goal=1.0).reaches(1.0) for value in (1.004, 1.006)] == [True, False]
    assert Row("r", 9.96, larger_is_better=True).reaches(10) is False
    assert [shown(value) for value in (0.126, 1.0, 12.34, 123.4)] == ["0.13", "1.00", "12.3", "123"]


def test_the_command_measures_what_is_named(tmp_path, monkeypatch, capsys):
    measured = []

    def measure(name, scale):
        measured.append((name, scale.quick))
        return table(name, Row("r", 1.0))

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(Table, "save", lambda self: None)
    monkeypatch.setattr(page, "write", lambda: measured.append("page"))
    command.main(["noise", "memory", "--quick"])
    command.main(["--page"])
    # What is only tried takes no stored figure's place.
    assert measured == [("noise", True), ("memory", True), "page"]
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


def test_disturbed_turns_do_not_count_unless_there_are_few_others(monkeypatch):
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


def test_a_process_of_its_own_answers(monkeypatch):
    monkeypatch.undo()
    assert child.call(shown, 3.14159) == "3.14"
    with pytest.raises(RuntimeError, match="TypeError"):
        child.call(shown, "three")


def test_peak_memory_grows_with_what_is_held():
    before = memory.resident()
    block = torch.ones(2**24)
    assert memory.resident() >= before or block.numel() == 0
    assert json.loads(json.dumps(memory.resident())) > 0


def test_what_is_missing_for_flower_is_told(monkeypatch):
    monkeypatch.setattr(flower.importlib.util, "find_spec", lambda name: None)
    assert flower.missing() == "flwr is not installed: pip install 'fedpact[bench]'"


def test_what_is_missing_for_pfl_is_told(monkeypatch):
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
