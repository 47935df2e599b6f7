"""`fedpact account` and `fedpact tradeoffs`, run in this process."""

import json
import re

import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import BudgetExhausted, InputError
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.privacy.accounting.group_privacy import epsilon_per_person
from fedpact.privacy.accounting.tuning_cost import describe_law, winner_epsilon
from fedpact.report import tradeoffs as tradeoffs_module

SETTING = ("--q", "0.015", "--sigma", "1.1", "--steps", "317")


def run(*arguments):
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    if done.exception is not None:
        raise done.exception
    return done.stdout


def answer(*arguments):
    return json.loads(run("account", *arguments, "--json"))


def test_epsilon_as_in_the_paper():
    got = answer(*SETTING, "--accountant", "rdp", "--conversion", "mironov")
    assert got["epsilon"] == pytest.approx(2.005, abs=5e-4)
    assert got["solved_for"] == "epsilon"
    assert got["adjacency"] == "add/remove one record"


def test_the_answer_says_what_it_is_and_rounds_up():
    text = run("account", *SETTING)
    exact = epsilon({SampledGaussian(0.015, 1.1): 317}, 1e-5)
    shown = float(text.splitlines()[2].split()[0])
    assert exact <= shown <= exact + 1e-4
    assert "(ε, δ)-differential privacy, add/remove one record" in text
    assert "PLD" in text


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        (("--q", "0.1", "--steps", "100"), "sigma"),
        (("--q", "0.1", "--sigma", "2.25"), "steps"),
        (("--sigma", "2.25", "--steps", "100"), "q"),
    ],
)
def test_any_of_the_others_from_a_budget(given, solved):
    got = answer(*given, "--epsilon", "2", "--accountant", "rdp")
    assert got["solved_for"] == solved
    assert got["epsilon"] <= got["target_epsilon"] == 2
    again = epsilon({SampledGaussian(got["q"], got["sigma"]): got["steps"]}, 1e-5, "rdp")
    assert again == got["epsilon"]


def test_every_accountant_side_by_side():
    rows = answer(*SETTING, "--all")["results"]
    ways = {(row["accountant"], row["conversion"]): row["epsilon"] for row in rows}
    assert (
        ways["rdp", "mironov"] > ways["rdp", "balle"] > ways["pld", None] == ways["best", "balle"]
    )
    assert "Mironov" in run("account", *SETTING, "--all")


def test_best_says_which_of_the_two_it_is():
    assert answer(*SETTING)["bound_by"] == "pld"
    assert "best of PLD and RDP: PLD" in " ".join(run("account", *SETTING).split())
    # Below every δ that a transform reaches only RDP has a bound.
    assert answer(*SETTING, "--delta", "1e-300")["bound_by"] == "rdp"
    assert answer(*SETTING, "--accountant", "rdp")["bound_by"] == "rdp"


def test_an_infinite_bound_is_not_written_as_a_number():
    got = answer("--q", "1", "--sigma", "1e-200", "--steps", "1", "--accountant", "pld")
    assert got["epsilon"] is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--q", "0.1"), InputError, "exactly three"),
        ((*SETTING, "--epsilon", "2"), InputError, "exactly three"),
        (("--q", "nan", "--sigma", "1", "--steps", "3"), InputError, "q is nan"),
        (("--q", "0.1", "--sigma", "1", "--steps", "-3"), InputError, "steps is -3"),
        ((*SETTING, "--delta", "0"), InputError, "delta is 0"),
        ((*SETTING, "--accountant", "gdp"), SystemExit, "2"),
        (("--q", "0.1", "--steps", "3", "--epsilon", "nan"), InputError, "epsilon is nan"),
        (
            (*SETTING, "--accountant", "pld", "--conversion", "mironov"),
            InputError,
            "needs no conversion",
        ),
        ((*SETTING, "--tuned", "1"), InputError, "--tuned is 1"),
        ((*SETTING, "--per-person", "0"), InputError, "--per-person is 0"),
        ((*SETTING, "--tuned", "-4"), InputError, "--tuned is -4"),
        ((*SETTING, "--tuned", "3", "--per-person", "2"), InputError, "per-person 2"),
        ((*SETTING, "--tuned", "3", "--ledger", "somewhere"), InputError, "ledger show"),
        ((*SETTING, "--tuned", "2000000000"), InputError, "runs is 2000000000"),
        (
            ("--q", "0.1", "--steps", "3", "--epsilon", "1e-12", "--delta", "1e-30"),
            BudgetExhausted,
            "no noise is large enough",
        ),
    ],
)
def test_errors_name_the_fault(arguments, error, message):
    with pytest.raises(error, match=message):
        run("account", *arguments)


@pytest.fixture
def unproven(monkeypatch):
    """What is proven for a curve's σ, most of the time, is left to test_custom_tradeoffs."""
    monkeypatch.setattr(tradeoffs_module, "epsilon_of", lambda *_: 0.0)


@pytest.fixture
def few_points(monkeypatch):
    monkeypatch.setattr(tradeoffs_module, "STEP_COUNTS", (70_000, 700_000))
    monkeypatch.setattr(tradeoffs_module, "EPSILONS", (0.3,))
    monkeypatch.setattr(tradeoffs_module, "EXACT_ACCOUNTANTS", ("rdp",))


def test_tradeoffs_as_printed(few_points, unproven):
    document = json.loads(run("tradeoffs", "--json", "--preset", "paper"))
    utility = {(p["curve"], p["steps"]): p["utility"] for p in document["points"]}
    assert utility["proposed", 70_000] == pytest.approx(25.83, abs=6e-3)
    assert utility["MA", 70_000] == pytest.approx(10.79, abs=6e-3)
    assert utility["AC2", 70_000] == pytest.approx(1.40, abs=6e-3)
    assert "comparison only" in document["guarantee"]


@pytest.mark.slow
def test_tradeoffs_table_and_figure(few_points, unproven, tmp_path):
    file = tmp_path / "figure.png"
    text = run("tradeoffs", "--out", str(file))
    assert "add/remove one record" in text
    assert "violated" in text
    assert "RDP, proven" in text
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_a_figure_of_one_epsilon_shows_unsound_bounds(few_points, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr("fedpact.report.drawing.save_figure", lambda *given: saved.append(given[0]))
    run("tradeoffs", "--q", "0.01", "--steps", "100", "--epsilon", "1", "--out", "figure.svg")
    dotted = [line for line in saved[0].axes[0].lines if line.get_linestyle() == ":"]
    assert dotted
    assert all(line.get_marker() == "." for line in dotted)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--preset", "mine"),
        ("--preset", "paper", "--q", "0.1"),
        ("--out", "x.bmp"),
        ("--out", "/dev/null/x.png"),
        *(("--q", "nan"), ("--q", "0"), ("--delta", "1"), ("--steps", "0"), ("--epsilon", "nan")),
    ],
)
def test_tradeoffs_refusals(few_points, arguments):
    with pytest.raises(InputError, match=f"{arguments[0][2:]} (is|paper has)"):
        run("tradeoffs", *arguments)


def test_custom_tradeoffs_mark_unsound_bounds():
    given = ("--q", "1e-2", "--delta", "1e-4", "--steps", "2000", "--epsilon", "2")
    document = json.loads(run("tradeoffs", "--json", *given))
    assert document["problem"]["q"] == 1e-2
    points = {point["curve"]: point for point in document["points"]}
    assert {(p["steps"], p["epsilon"]) for p in document["points"]} == {(2_000, 2.0)}
    # The noise that MA asks for is too little by a tenth, and "proposed" by a quarter.
    assert points["proposed"]["proven"] == pytest.approx(3.19, abs=0.01)
    assert points["MA"]["proven"] == pytest.approx(2.11, abs=0.01)
    for curve, point in points.items():
        # Less noise than the least that keeps ε is unsound, and nothing else is.
        assert point["unsound"] == (point["sigma"] < 0.99 * points["pld"]["sigma"]), curve
        assert point["unsound"] == (curve in ("proposed", "MA")), curve
    text = run("tradeoffs", *given)
    lines = [line for line in text.splitlines() if "UNSOUND" in line and "│" in line]
    assert [re.search("proposed|MA|AC[12]", line)[0] for line in lines] == ["proposed", "MA"]


def test_epsilon_per_person_is_shown_next_to_per_record():
    given = ("--q", "0.05", "--sigma", "2.8391", "--steps", "200")
    got = answer(*given, "--per-person", "5")
    history = {SampledGaussian(0.05, 2.8391): 200}
    assert got["epsilon"] == epsilon(history, 1e-5)
    assert got["person_records"] == 5
    assert got["epsilon_per_person"] == epsilon_per_person(history, 1e-5, 5) > 5 * got["epsilon"]
    text = run("account", *given, "--per-person", "5")
    assert "a patient with 5 visits" in text
    assert "6.19" in text
    assert "epsilon_per_person" not in answer(*given)


def test_tuning_costs_and_their_observers():
    given = ("--q", "0.05", "--sigma", "2.8391", "--steps", "200")
    got = answer(*given, "--tuned", "10")
    run_of = {SampledGaussian(0.05, 2.8391): 200}
    assert got["epsilon"] == epsilon(run_of, 1e-5)
    tuned = got["tuned"]
    assert tuned["epsilon_of_every"] == epsilon({SampledGaussian(0.05, 2.8391): 2000}, 1e-5)
    assert tuned["epsilon_of_winner"] == winner_epsilon([run_of], 1e-5, 10)
    text = " ".join(run("account", *given, "--tuned", "10").split())
    every, winner = tuned["holds_for"]
    assert every in text
    assert winner in text
    assert "the server and the other sites do: ε = " in every
    assert "best of exactly 10" in every
    assert "not against the server or another site" in winner
    assert describe_law(10) in winner
    # With the noise that a budget needs, it is of that noise.
    solved = answer("--q", "0.05", "--steps", "200", "--epsilon", "1", "--tuned", "3")
    assert solved["tuned"]["epsilon_of_one"] == solved["epsilon"] <= 1
    rows = answer(*given, "--all", "--tuned", "10")["results"]
    assert all(row["tuned"] == tuned for row in rows)
    assert "tuned" not in answer(*given)
