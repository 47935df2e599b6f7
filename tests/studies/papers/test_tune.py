"""`fedpact tune`: what it prints is the theory's, and what it measures is what can be computed."""

import doctest
import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import DataError, InputError
from fedpact.common.messages import RoundRecord
from fedpact.common.run_folder import Folder
from fedpact.data.load import load_dataset
from fedpact.data.partition import Partition
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate
from fedpact.studies.papers import fedproxvr
from fedpact.studies.papers.fedfdp import Slopes, best_weight, noise_term
from fedpact.studies.papers.fedproxvr import Losses, decrease, local_accuracy, most_tau
from fedpact.studies.papers.measure import split_records

SPEC = ("--L", "1", "--lam", "0.5", "--sigma2", "1", "--gamma", "0.01")


def tune(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "200"})


def no_constant(name):
    raise ValueError(f"{name} is no JSON")


def as_json(*arguments):
    result = tune(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout, parse_constant=no_constant)


def refused(*arguments):
    result = tune(*arguments)
    assert isinstance(result.exception, InputError | DataError), result.stdout
    return str(result.exception)


@pytest.fixture(autouse=True)
def _no_figure(request, monkeypatch):
    """To draw one takes most of a command's time."""
    if "figure" not in request.node.name:
        draw = "fedpact.studies.papers.fedproxvr.draw"
        monkeypatch.setattr(draw, lambda *given: given[-1].touch())


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """A run of FedFDP on sites of unlike labels; every site has fewer than 1000 records."""
    plan = Plan.parse(
        {
            "algorithm": "fedfdp",
            "rounds": 3,
            "sites": 4,
            "partition": {"kind": "dirichlet", "beta": 0.5},
            "privacy": {"epsilon": 3.0},
            "run": {"workers": 1},
        }
    )
    return simulate(plan, tmp_path_factory.mktemp("runs") / "run").folder


# ---------------------------------------------------------------- fedproxvr with given numbers


def test_the_check_value_from_the_command_line():
    found = as_json("fedproxvr", *SPEC)
    assert found["mu"] == pytest.approx(22.4, abs=0.1)
    assert found["beta"] == pytest.approx(19.4, abs=0.05)
    assert found["tau"] == pytest.approx(225, abs=1)
    assert 0.180 <= found["theta"] <= 0.181
    assert found["objective"] == pytest.approx(231.3, abs=0.1)
    # What belongs together.
    losses = Losses(1.0, 0.5, 1.0)
    assert found["tau"] <= most_tau(found["beta"] * (1 + 1e-12))
    assert found["theta"] == local_accuracy(losses, found["mu"], found["beta"], found["tau"])
    assert found["Theta"] == decrease(losses, found["mu"], found["theta"])
    assert found["objective"] == (1 + 0.01 * found["tau"]) / found["Theta"]
    assert found["lemma1"]["objective"] < found["real"]["objective"] <= found["objective"]


@pytest.mark.parametrize("heterogeneity", ["1", "1e9"])
def test_the_printed_settings_are_read_by_a_plan(heterogeneity):
    out = tune("fedproxvr", *SPEC[:4], "--sigma2", heterogeneity, "--gamma", "1").stdout
    settings = tomllib.loads(out[out.index("settings = {") :].splitlines()[0])
    Plan.parse({"algorithm": "fedproxvr", **settings, "privacy": {"mode": "none"}})
    assert isinstance(settings["settings"]["local_steps"], int)


def test_the_text_states_the_optimum_and_its_meaning():
    out = tune("fedproxvr", *SPEC).stdout
    for part in ("L = 1, λ = 0.5, σ̄² = 1, γ = 0.01", "231.346", "notes/errata.md, V4"):
        assert part in out
    assert "local_steps = 177" in out


@pytest.mark.slow
def test_the_figure_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(fedproxvr, "POINTS", 3)  # each is a search
    out = tmp_path / "figure.svg"
    assert as_json("fedproxvr", *SPEC, "--out", str(out))["figure"] == str(out)
    assert out.read_bytes().startswith(b"<?xml")


def test_every_panel_of_the_figure_has_its_axis_numbered(tmp_path, monkeypatch):
    monkeypatch.setattr(fedproxvr, "POINTS", 2)
    saved = []
    monkeypatch.setattr("fedpact.report.drawing.save_figure", lambda *given: saved.append(given[0]))
    fedproxvr.draw(fedproxvr.Losses(1.0, 0.1, 0.0), 0.1, "sarah", tmp_path / "figure.svg")
    saved[0].draw_without_rendering()
    for axis in saved[0].axes[:-1]:
        assert any(tick.label1.get_visible() for tick in axis.xaxis.get_major_ticks())


def test_mismatches_are_refused(tmp_path):
    (tmp_path / "d.png").mkdir()
    assert "--sigma2, --gamma missing" in refused("fedproxvr", "--L", "1", "--lam", "0.5")
    told = tune("fedproxvr", *SPEC, "--solver", "sgd").output
    assert "'sgd' is not one of 'sarah', 'svrg'" in told
    assert ".png or .svg" in refused("fedproxvr", *SPEC, "--out", "figure.jpg")
    (tmp_path / "file").touch()
    missing = tmp_path / "file" / "figure.png"
    assert "file is not a folder" in refused("fedproxvr", *SPEC, "--out", str(missing))
    assert "which is a folder" in refused("fedproxvr", *SPEC, "--out", str(tmp_path / "d.png"))
    assert "gamma" in refused("fedproxvr", *SPEC[:-1], "nan")
    assert "weak_convexity" in refused(
        "fedproxvr", "--L", "1", "--lam", "2", "--sigma2", "1", "--gamma", "1"
    )
    assert str(tmp_path / "none") in refused("fedproxvr", str(tmp_path / "none"))


# ---------------------------------------------------------------- a run's time


def rounds(taus, d_com, d_cmp):
    first = [RoundRecord(round=0)]
    return first + [
        RoundRecord(round=i, steps=tau, seconds=d_com + d_cmp * tau)
        for i, tau in enumerate(taus, start=1)
    ]


def test_several_tau_tell_messages_from_steps():
    found = split_records(rounds([1, 4, 2, 9], d_com=0.5, d_cmp=0.02))
    assert found.separated
    assert (found.d_com, found.d_cmp) == (pytest.approx(0.5), pytest.approx(0.02))


def test_equal_tau_do_not_and_the_split_is_said():
    found = split_records(rounds([5] * 7, d_com=0.5, d_cmp=0.02))
    assert not found.separated
    assert found.d_com == pytest.approx(0.3)
    assert found.d_com == pytest.approx(5 * found.d_cmp)
    assert "cannot be split" in found.note


@pytest.mark.parametrize("taus", [[1, 4, 2, 9, 3, 5], [5] * 6])
def test_the_time_of_evaluations_is_left_out(taus):
    """Every other round also took 7 s to be evaluated, and says that it was."""
    both = rounds(taus, d_com=0.5, d_cmp=0.02)
    slow = [
        replace(record, seconds=record.seconds + 7, accuracy=0.5) if record.round % 2 else record
        for record in both
    ]
    found, bare = (
        split_records(slow),
        split_records([record for record in both if record.round % 2 == 0]),
    )
    assert (found.d_com, found.d_cmp) == (pytest.approx(bare.d_com), pytest.approx(bare.d_cmp))
    assert "evaluations" not in found.note


def test_the_note_says_if_all_sites_were_evaluated():
    slow = [replace(record, accuracy=0.5) for record in rounds([1, 4, 2], d_com=0.5, d_cmp=0.02)]
    assert split_records(slow).d_com == pytest.approx(0.5)
    assert "time of evaluations is among it" in split_records(slow).note
    # The others have one τ and tell nothing apart: then all count.
    some = [*slow[:3], replace(slow[3], accuracy=None)]
    assert split_records(some) == split_records(slow)


@pytest.mark.parametrize(
    "wrong",
    [
        [RoundRecord(round=0)],
        rounds([1, 4, 9], d_com=0.5, d_cmp=-0.02),  # longer rounds took less time
        rounds([3, 6], d_com=0.0, d_cmp=0.1),
        rounds([3, 3], d_com=0.0, d_cmp=0.0),
    ],
)
def test_rounds_that_do_not_tell_gamma_are_refused(wrong):
    with pytest.raises(InputError, match="--gamma"):
        split_records(wrong)


# ---------------------------------------------------------------- a run's records


def softmax_gradients(run):
    """Each site's ∇F_n at the last model, by hand: logistic regression, mean of (p - y) x̃ᵀ."""
    data = load_dataset("digits")
    sites = Partition.load(run / "partition.json").sites(data)
    w = Folder(run).restore()[0].state.vectors["w"].double().numpy()
    weights, bias = w[:640].reshape(10, 64), w[640:]
    gradients, norms = [], []
    for site in sites:
        x, y = site.x.double().flatten(1).numpy(), site.y.numpy()
        logits = x @ weights.T + bias
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        error = p - np.eye(10)[y]
        gradients.append(np.concatenate([(error.T @ x / len(y)).ravel(), error.mean(0)]))
        # A record's Hessian is (diag p - ppᵀ) ⊗ x̃x̃ᵀ, x̃ = (x, 1).
        norms.append(
            np.array(
                [
                    np.linalg.eigvalsh(np.diag(a) - np.outer(a, a))[-1] * (b @ b + 1)
                    for a, b in zip(p, x, strict=True)
                ]
            )
        )
    return np.stack(gradients), np.array([float(len(s.y)) for s in sites]), norms


def test_the_estimates_of_a_run_are_those_computed_by_hand(private):
    found = as_json("fedproxvr", str(private), "--gamma", "0.1")
    estimates = found["estimates"]
    gradients, sizes, norms = softmax_gradients(private)
    p = sizes / sizes.sum()
    mean = p @ gradients
    last = p @ ((gradients - mean) ** 2).sum(1) / (mean @ mean)
    assert estimates["sigma2_last"] == pytest.approx(last, rel=1e-4)  # float32
    assert found["sigma2"] == max(estimates[f"sigma2_{at}"] for at in ("first", "last"))
    # Logistic regression is convex, and L is seen from below at two models, so it is no smaller
    # than the largest record seen at this one and no larger than x̃ᵀx̃/2 of any.
    assert found["lam"] == pytest.approx(0, abs=1e-5)  # float32
    every = np.concatenate(norms)
    assert np.quantile(every, 0.2) < found["L"]
    x = load_dataset("digits").x.double().flatten(1)
    assert found["L"] <= float((x * x).sum(1).max() + 1) / 2
    assert any("no (ε, δ) covers" in note for note in found["notes"])
    assert Path(found["figure"]).exists()


def test_a_runs_gamma_is_measured(private):
    found = as_json("fedproxvr", str(private), *SPEC[:-2])
    costs = found["costs"]
    assert found["gamma"] == pytest.approx(costs["d_cmp"] / costs["d_com"])
    assert not costs["separated"]  # FedFDP has τ = 1 in every round
    assert found["gamma"] == pytest.approx(1)
    assert any("cannot be split" in note for note in found["notes"])


def test_a_deployments_records_are_elsewhere(private, tmp_path):
    run = shutil.copytree(private, tmp_path / "run")
    (run / "partition.json").unlink()
    assert "the records are with the sites" in refused("fedproxvr", str(run), "--gamma", "0.1")
    assert as_json("fedproxvr", str(run), *SPEC)["tau"] > 0


# ---------------------------------------------------------------- fedfdp


def test_the_theorem_gives_zero_and_the_reason_is_said():
    found = as_json("fedfdp")
    assert found["lam"] == 0
    assert found["slope_at_0"] > 0
    assert "docs/notes/errata.md, F10" in found["why"]
    bounds = [row["P"] for row in found["bound"]]
    assert bounds == sorted(bounds)
    assert all(lam <= 1 / 2.3 for lam in found["sweep"])  # no weight is clamped at 0
    out = tune("fedfdp").stdout
    assert "λ* = 0" in out
    assert "sweep" in out


def test_the_remedy_is_in_the_plans_syntax():
    said = as_json("fedfdp")["instead"]
    assert said in " ".join(tune("fedfdp").stdout.split())
    settings = tomllib.loads(
        said[said.index("settings = {") :].split("}")[0].replace("= c", "= 1") + "}"
    )
    relative = Plan.parse({"algorithm": "fedfdp", **settings}).algorithm_settings
    assert (relative.weight_rule, relative.fairness_weight) == ("relative", 1)


def test_a_positive_weight_needs_a_positive_q0():
    found = as_json("fedfdp", "--Q0", "5", "--Q1", "6", "--d", "1000000")
    noise = noise_term(sigma=2.0, clip=0.1, dimension=1_000_000, batch=75.0)
    expected = best_weight(Slopes(1.0, 1.0, 0.1, 0.5, noise, 5.0, 6.0, 1.0))
    assert found["lam"] == expected > 0
    assert "no data satisfy" in found["why"]
    by_lam = {row["lam"]: row["P"] for row in found["bound"]}
    assert by_lam[expected] < by_lam[0.0]


def test_fedfdp_refuses_what_makes_no_sense():
    assert "least_difference" in refused("fedfdp", "--Q0", "9")
    assert "smoothness" in refused("fedfdp", "--L", "nan")
    assert "dimension" in refused("fedfdp", "--d", "0")


def test_the_code_in_the_documentation_runs():
    page = Path(__file__).parents[3] / "docs" / "how-to" / "compare-and-tune.md"
    done = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert done.attempted > 15
    assert done.failed == 0
