"""fedpact recommend: a configuration that is a plan, from public numbers alone."""

import json
import math
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedpact.algorithms import ldp_fedsgd
from fedpact.cli.main import app
from fedpact.common.errors import InputError
from fedpact.common.messages import Reply
from fedpact.deployment.files import write_deployment
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.calibration import smallest_sigma
from fedpact.privacy.accounting.planner import (
    NOISE,
    TABLE_NOISE,
    full_batch,
    signal_to_noise,
)
from fedpact.simulation.setup import SimulationSetup
from fedpact.studies.recommend import Recommendation


def cli(*arguments):
    return CliRunner().invoke(app, arguments)


def document(*arguments):
    done = cli(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments):
    """Carry out a command that fails; return its error and all that it prints."""
    done = cli(*arguments)
    assert done.exit_code != 0
    return f"{done.exception}{done.output}"


def declare(tmp_path, text):
    """Arguments by which this is declared of the records."""
    (tmp_path / "columns.toml").write_text(text)
    return "--columns", str(tmp_path / "columns.toml")


def arrays(tmp_path, shape=(400, 6), classes=2):
    """The path of records whose values are spread over -1 .. 1."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-1, 1, shape).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x, y=draw.integers(0, classes, len(x)))
    return str(tmp_path / "x.npz")


def csv(tmp_path, *rows):
    (tmp_path / "t.csv").write_text("\n".join(rows))
    return str(tmp_path / "t.csv")


AGE = '[records.columns.age]\nrange = [0, 120]\nscale = "range"\n'


def test_the_file_is_a_plan_that_keeps_the_budget(tmp_path):
    file = tmp_path / "digits.toml"
    asked = ("recommend", "digits", "--epsilon", "3", "--rounds", "8", "--sites", "4")
    assert cli(*asked, "--out", str(file)).exit_code == 0
    plan = Plan.parse(tomllib.loads(file.read_text()))
    assert (plan.rounds, plan.sites, plan.sampling_rate) == (8, 4, 1.0)
    shown = document("plan", str(file))
    assert all(2.99 < site["epsilon_by_round"][-1] <= 3 for site in shown["sites"].values())
    # The noise that the step was made for is what the sites will add.
    found = document(*asked)
    chosen = found["alternatives"][0]
    site = next(iter(shown["sites"].values()))
    assert chosen["sigma"] == pytest.approx(site["sigma_joint"], rel=1e-6)
    assert chosen["weights"] == shown["model_parameters"]
    assert found["configuration"] == tomllib.loads(file.read_text())


@pytest.mark.parametrize("honest", [1, 7, 9])
def test_shared_noise_plan_runs_with_few_honest_sites(tmp_path, honest):
    out = tmp_path / "study.toml"
    asked = ("digits", "--epsilon", "1", "--trust", "sum", "--honest", str(honest))
    assert cli("recommend", *asked, "--out", str(out)).exit_code == 0
    # Loads all that a run needs, and refuses what a run would.
    plan = SimulationSetup.of(Plan.read(out)).plan
    assert plan.privacy.honest == honest
    # Least t > h with 2t > K + (t - h).
    assert plan.secure_aggregation.threshold == max(honest, 10 - honest) + 1


def test_only_shape_classes_and_number_of_records_count(tmp_path):
    """Two tables with nothing else in common get one answer."""
    draws = np.random.default_rng(0)
    found = []
    for name in ("a", "b"):
        file = tmp_path / f"{name}.npz"
        np.savez(file, x=draws.normal(size=(60, 5)) * 10, y=np.arange(60) % 3)
        answer = document("recommend", str(file), "--epsilon", "2")
        found.append({**answer["configuration"], "data": ""})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (("--epsilon", "0"), "epsilon"),
        (("--epsilon", "nan"), "epsilon"),
        (("--epsilon", "1", "--trust", "none"), "trust"),
        (("--epsilon", "1", "--honest", "3"), "honest"),
        (("--epsilon", "1", "--trust", "sum", "--honest", "10"), "honest"),
        (("--epsilon", "1", "--trust", "sum", "--sites", "1"), "at least 2 sites"),
        (("--epsilon", "1", "--rounds", "0"), "rounds"),
        (("--epsilon", "1,"), "--epsilon is '1,': expected a number, or one for each site"),
        (("--epsilon", "1_0"), "--epsilon is '1_0': expected a number"),
        (("--epsilon", "1,2", "--sites", "3"), "lists 2 values for 3 sites"),
        (("--epsilon", "1,2", "--delta", "1e-5,1e-6,1e-7"), "as many of both as there are sites"),
        (("--epsilon", "1,-2"), "epsilon"),
        (("--epsilon", "1", "--records", "9"), "--records is 9 for 10 sites"),
        (("--epsilon", "1", "--sites", "5000"), "at most"),
    ],
)
def test_mismatches_are_named_before_writing(tmp_path, wrong, named):
    out = tmp_path / "study.toml"
    assert named in refused("recommend", "digits", *wrong, "--out", str(out))
    assert not out.exists()


def test_a_tables_columns_count_as_they_are_declared(tmp_path):
    """Six columns: an age by its range, and a ward as four codes, of which one is 1."""
    draws = np.random.default_rng(0)
    rows = [f"{draws.integers(0, 100)},{'ABCD'[i % 4]},{i % 2}" for i in range(400)]
    ward = '[records.columns.ward]\ncategories = ["A", "B", "C", "D"]\nscale = "one-hot"\n'
    file, out = csv(tmp_path, "age,ward,sick", *rows), tmp_path / "study.toml"
    asked = ("recommend", file, "--epsilon", "2", "--label", "sick", "--sites", "2")
    found = document(*asked, *declare(tmp_path, AGE + ward), "--out", str(out))
    # Two classes, five columns and a bias.
    assert found["alternatives"][0]["weights"] == 2 * 6
    # The length of (age in -1..1, one 1 of four): sqrt(1/3 + 1), and C a fifth of it.
    assert found["configuration"]["privacy"]["clip"] == pytest.approx(
        0.2 * (4 / 3) ** 0.5, abs=0.05
    )
    plan = Plan.parse(tomllib.loads(out.read_text()))
    assert plan.records.columns["ward"].categories == ["A", "B", "C", "D"]
    assert document("plan", str(out))["model_parameters"] == 12


def test_a_file_that_declares_nothing_is_refused(tmp_path):
    empty = declare(tmp_path, "rounds = 3\n")
    assert "[records]" in refused("recommend", "digits", "--epsilon", "1", *empty)


def test_data_with_sites_of_their_own_keep_them(tmp_path):
    """The hospitals of a table, not sites that records are dealt out to; the written file runs."""
    rows = (f"{20 + i % 60},{'abc'[i % 3]},{i % 2}" for i in range(300))
    file, out = csv(tmp_path, "age,hospital,ill", *rows), tmp_path / "study.toml"
    asked = ("recommend", file, "--label", "ill", "--site", "hospital", "--epsilon", "2")
    asked += (*declare(tmp_path, AGE), "--trust", "sum")
    found = document(*asked, "--out", str(out))["configuration"]
    assert (found["sites"], found["partition"]) == (3, {"kind": "natural"})
    assert found["privacy"]["honest"] == 2
    settings = ("--set", "rounds=1", "--set", "run.evaluate_every=1000")
    assert cli("run", str(out), *settings, "--out", str(tmp_path / "run")).exit_code == 0
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert sorted(partition["train"]) == ["a", "b", "c"]
    assert "3 sites of its own" in refused(*asked, "--sites", "4")


def test_a_mirror_is_refused_for_records_other_than_images(tmp_path):
    file = csv(tmp_path, "age,ill", *(f"{20 + k},{k % 2}" for k in range(60)))
    told = refused("recommend", file, "--label", "ill", "--epsilon", "1", "--mirror")
    assert "mirror is True for records of shape (1,)" in told


def test_a_task_given_with_columns_is_not_ignored(tmp_path):
    rows, out = (f"{20 + k},{k % 2}" for k in range(60)), tmp_path / "study.toml"
    file = csv(tmp_path, "age,ill", *rows)
    asked = ("recommend", file, "--label", "ill", "--epsilon", "1")
    told = refused(
        *asked, *declare(tmp_path, f'[task]\nkind = "regression"\nrange = [0, 9]\n{AGE}')
    )
    assert "not classes: see [task]; recommended models are linear" in told
    weighed = declare(tmp_path, f"[task]\nclass_weights = [1.0, 3.0]\n{AGE}")
    document(*asked, *weighed, "--out", str(out))
    assert Plan.parse(tomllib.loads(out.read_text())).task.class_weights == [1.0, 3.0]


def test_columns_that_nothing_is_declared_of_are_named(tmp_path, caplog):
    file = csv(tmp_path, "age,bmi,ill", *(f"{i},{i % 40},{i % 2}" for i in range(60)))
    columns = declare(tmp_path, "[records.columns.age]\nrange = [0, 120]\n")
    asked = ("recommend", file, "--label", "ill", "--epsilon", "2", "--sites", "2")
    reason = document(*asked, *columns)["reasons"]["privacy.clip"]
    assert "of bmi no range is declared" in reason
    assert "of bmi no range is declared: taken to lie in -1 .. 1" in caplog.text
    assert "age (120)" in caplog.text  # its range is declared, and is wide: with the remedy
    assert 'scale = "range"' in caplog.text


def test_values_and_class_weights_scale_clip_and_step(tmp_path):
    file, found = arrays(tmp_path, (400, 2, 30)), []
    weights = "[task]\nclass_weights = [1.0, 10.0]\n"
    for far, scale, more in (
        (1, "none", ""),
        (10, "none", ""),
        (10, "range", ""),
        (1, "none", weights),
    ):
        text = f'{more}[records]\nlow = -{far}\nhigh = {far}\nscale = "{scale}"\n'
        one = document("recommend", file, "--epsilon", "2", *declare(tmp_path, text))
        assert "-1 .. 1" not in one["reasons"]["privacy.clip"]
        assert ("class weight" in one["reasons"]["privacy.clip"]) is bool(more)
        settings = one["configuration"]["settings"]["learning_rate"]
        found.append((one["configuration"]["privacy"]["clip"], settings))
    (clip, rate), (longer, shorter), scaled, (weighed, smaller) = found
    # Of sixty numbers, whatever their axes: a fifth of sqrt(60 / 3), the length of such a record.
    assert clip == pytest.approx(0.2 * math.sqrt(20), rel=0.1)
    assert longer == weighed == pytest.approx(10 * clip)
    assert shorter == pytest.approx(rate / 100, rel=0.02)  # three digits are written
    # Noise grows with the clip, and the step is such that noise moves an answer as far.
    assert smaller == pytest.approx(rate / 10, rel=0.02)
    assert scaled == (clip, rate)


@pytest.mark.parametrize(("columns", "bias"), [(60, 0.3), (1200, 2.0)])
def test_long_records_have_a_longer_bias(tmp_path, columns, bias):
    """Of length sqrt(1200 / 3) = 20; 0.3 beside that never answers how common a class is."""
    one = document("recommend", arrays(tmp_path, (60, columns)), "--epsilon", "2")
    assert one["configuration"]["logistic"]["bias"] == bias


@pytest.mark.parametrize(("delta", "told"), [(0.005, False), (0.02, True)])
def test_a_delta_of_one_record_in_a_site_is_warned_of(tmp_path, caplog, delta, told):
    file = tmp_path / "plan.toml"
    asked = ("--epsilon", "2", "--delta", str(delta), "--sites", "4", "--out", str(file))
    assert cli("recommend", arrays(tmp_path), *asked).exit_code == 0
    assert ("far below 1/N" in caplog.text) is told
    caplog.clear()
    assert cli("plan", str(file)).exit_code == 0
    assert ("far below 1/N" in caplog.text) is told


def test_records_unfit_for_linear_models_get_alternatives(tmp_path):
    file = tmp_path / "words.npz"
    np.savez(file, x=np.arange(80).reshape(20, 4), y=np.arange(20) % 2)
    asked = ("recommend", str(file), "--epsilon", "1")
    assert "declare their number, as vocabulary = " in refused(*asked)
    words = declare(tmp_path, "[records]\nvocabulary = 80\n")
    assert "rows whose next word is the label" in refused(*asked, *words)


@pytest.mark.parametrize("far", [1e300, 1e20, 0.0])
def test_ranges_far_from_all_records_are_reported(tmp_path, far):
    """As where "no limit" is written as a huge number, or every column may hold one value alone."""
    np.savez(tmp_path / "x.npz", x=np.zeros((20, 3), np.float32), y=np.arange(20) % 2)
    columns = declare(tmp_path, f"[records]\nlow = {-far}\nhigh = {far}\n")
    done = cli("recommend", str(tmp_path / "x.npz"), "--epsilon", "2", *columns)
    assert done.exit_code != 0
    assert isinstance(done.exception, InputError)
    assert "declare the ranges that their numbers do have" in str(done.exception)


def test_text_gets_logistic_regression_on_its_last_words(tmp_path):
    """By its form alone: whichever characters stand in it, the configuration is the same."""
    file, classes = tmp_path / "text.npz", json.dumps([str(k) for k in range(6)])
    columns = declare(tmp_path, f"[records]\nvocabulary = 6\nclasses = {classes}\n")
    asked = ("recommend", str(file), "--epsilon", "8", "--sites", "2", *columns)
    found = []
    for seed in (0, 1):
        drawn = np.random.default_rng(seed).integers(0, 6, (300, 9))
        np.savez(file, x=drawn[:, :8], y=(drawn[:, 7] + 1) % 6)
        found.append(document(*asked))
    one, other = found
    assert one == other
    assert one["configuration"]["model"] == "ngram"
    assert one["configuration"]["records"]["vocabulary"] == 6
    assert "logistic" not in one["configuration"]
    # Weights of three places, and of the bias.
    assert one["alternatives"][0]["weights"] == 6 * (3 * 6 + 1)
    plan = tmp_path / "study.toml"
    assert cli(*asked, "--out", str(plan)).exit_code == 0
    assert SimulationSetup.of(Plan.read(plan)).plan.model == "ngram"


def test_a_named_data_set_is_declared_as_known(tmp_path, monkeypatch):
    """As if it had been handed over by --columns; which of others is given is that."""
    digits = tmp_path / "digits.toml"
    digits.write_text('[records]\nscale = "range"\nlow = 0.0\nhigh = 1.0\n')
    monkeypatch.setattr("fedpact.studies.circumstances.find_configuration", {"digits": digits}.get)
    asked = ("recommend", "digits", "--epsilon", "1")
    found = document(*asked)["configuration"]
    assert found == document(*asked, "--columns", str(digits))["configuration"]
    assert found["records"]["high"] == 1.0
    other = declare(tmp_path, '[records]\nscale = "unit"\nlow = 0.0\nhigh = 1.0\n')
    assert document(*asked, *other)["configuration"]["records"]["scale"] == "unit"


@pytest.mark.parametrize(("epsilon", "little"), [(0.1, True), (8.0, False)])
def test_noise_at_signal_level_drops_uninformative_columns(tmp_path, monkeypatch, epsilon, little):
    draws, out = np.random.default_rng(0), tmp_path / "study.toml"
    rows = (f"{draws.integers(0, 100)},{draws.integers(0, 9)},{i % 2}" for i in range(400))
    file = csv(tmp_path, "age,shoe,sick", *rows)
    shoe = '[records.columns.shoe]\nrange = [0, 9]\nscale = "range"\n'
    columns = declare(tmp_path, AGE + shoe)
    monkeypatch.setattr(
        "fedpact.studies.circumstances.find_configuration", {file: Path(columns[1])}.get
    )
    monkeypatch.setattr("fedpact.studies.circumstances.KNOWN", {file: ("shoe",)})
    asked = ("recommend", file, "--epsilon", str(epsilon), "--label", "sick", "--sites", "2")
    found = document(*asked, "--out", str(out))
    assert little or found["alternatives"][0]["snr"] > 5
    plan = Plan.parse(tomllib.loads(out.read_text()))
    assert SimulationSetup.of(plan).raw.features == (("age",) if little else ("age", "shoe"))
    assert ("records.drop" in found["reasons"]) == little
    # Who names a file says by it what is used.
    named = document(*asked, *columns)["configuration"]
    assert "drop" not in named["records"]


def table(tmp_path, columns):
    """Of a table of 400 records with a person's number, by what is declared: arguments."""
    draws = np.random.default_rng(0)
    rows = (
        f"{draws.integers(0, 100)},{draws.integers(0, 50)},{i // 2},{i % 2}" for i in range(400)
    )
    file = csv(tmp_path, "age,bmi,who,ill", *rows)
    return file, "--label", "ill", *declare(tmp_path, columns), "--sites", "4"


@pytest.mark.parametrize(
    ("beside", "share"),
    [("", 0.8), ("[evaluation]\nshare = 0.3\nepsilon = 1.0\n", 0.7)],
    ids=["held out", "evaluated"],
)
def test_records_that_do_not_train_do_not_count(tmp_path, beside, share):
    asked = table(tmp_path, f'person = "who"\n{AGE}{beside}')
    found = document("recommend", *asked, "--epsilon", "2")
    chosen = found["alternatives"][0]
    expected = signal_to_noise(1.0, chosen["sigma"], chosen["rounds"], 400 * share, 4, 6)
    assert chosen["snr"] == pytest.approx(expected, rel=1e-9)
    plan = Plan.parse(found["configuration"])
    # Whose a record is says nothing of it; what is held out stays so.
    assert plan.person == "who"
    assert SimulationSetup.of(plan).raw.features == ("age", "bmi")
    assert plan.evaluation.share == (0.3 if beside else 0.0)


def test_declared_roles_apply_and_typed_ones_take_precedence(tmp_path):
    file, _, _, *rest = table(tmp_path, f'label = "ill"\nsite = "bmi"\n{AGE}')
    plan = Plan.parse(document("recommend", file, *rest[:2], "--epsilon", "2")["configuration"])
    assert (plan.label, plan.site, plan.partition.kind) == ("ill", "bmi", "natural")
    other = document("recommend", file, *rest[:2], "--epsilon", "2", "--site", "who")
    assert other["configuration"]["site"] == "who"
    # One site's file, of a declared number of records, need not say whose it is.
    declared = tmp_path / "columns.toml"
    declared.write_text(declared.read_text().replace('"bmi"', '"ward"'))
    alone = document("recommend", file, *rest, "--epsilon", "2", "--records", "1000")
    assert "site" not in alone["configuration"]
    assert alone["configuration"]["label"] == "ill"


def test_a_promise_to_persons_is_refused_and_not_passed_over(tmp_path):
    asked = table(tmp_path, f'person = "who"\n{AGE}[privacy]\nunit = "person"\n')
    told = refused("recommend", *asked, "--epsilon", "2")
    assert 'has privacy.unit = "person": recommendations are for records' in told


def test_column_scaling_cost_is_taken_from_the_budget(tmp_path):
    both = "".join(
        f'[records.columns.{name}]\nrange = [0, 120]\nscale = "released"\n'
        for name in ("age", "bmi")
    )
    out = tmp_path / "study.toml"
    asked = (*table(tmp_path, f'person = "who"\n{both}'), "--epsilon", "1", "--out", str(out))
    found = document("recommend", *asked)
    site = next(iter(document("plan", str(out))["sites"].values()))
    assert found["alternatives"][0]["sigma"] == pytest.approx(site["sigma_joint"], rel=1e-6)


def test_images_of_another_kind_may_do_without_features():
    found = document("recommend", "digits", "--epsilon", "8", "--no-features")
    assert "features" not in found["configuration"]
    assert found["alternatives"][0]["weights"] == 10 * 65


def test_the_reason_for_few_rounds_is_that_no_more_were_allowed():
    few, many = (
        document("recommend", "digits", "--epsilon", "8", "--rounds", str(rounds))
        for rounds in (3, 200)
    )
    pay = many["configuration"]["rounds"]
    assert few["configuration"]["rounds"] == 3
    assert many["reasons"]["rounds"].startswith("as many as pay at")
    assert few["reasons"]["rounds"].startswith(f"as many as were allowed; {pay} would pay")


@pytest.mark.parametrize(
    ("epsilon", "trust", "ways"),
    [
        ("0.001", "own", "a larger ε or δ, more records, fewer columns, --trust sum"),
        ("0.001", "sum", "a larger ε or δ, more records, fewer columns"),
        ("8", "own", None),
    ],
)
def test_noise_that_drowns_all_records_is_said(caplog, epsilon, trust, ways):
    """Below a signal to noise of 1 no configuration is of use, whatever is said of its rounds."""
    asked = ("recommend", "digits", "--epsilon", epsilon, "--trust", trust, "--no-features")
    found = document(*asked)
    snr, why = found["alternatives"][0]["snr"], found["reasons"]["rounds"]
    assert (snr < 1) == (ways is not None)
    if ways is None:
        assert "pay at this signal" in why
        assert not caplog.records
        return
    far = f"noise goes {1 / snr:.2g} times as far as all records together can"
    assert why == f"the fewest: {far}"
    (told,) = caplog.records
    assert told.message.startswith(f"digits: {far}")
    assert told.message.endswith(f"help: {ways}")


def test_fewer_rounds_than_pay_have_no_longer_way():
    """The way is sqrt(R / R*) of that of the R* rounds that pay, so that a step grows less."""
    sigma, sites = partial(smallest_sigma, Budget(10.0, 1e-5), 1.0), 4
    whole = full_batch(sigma, 20_000, sites, 100)
    assert (whole.rounds, whole.noise) == (100, NOISE)
    for rounds in (1, 4, 25):
        few = full_batch(sigma, 20_000, sites, rounds)
        assert few.noise == pytest.approx(NOISE * (rounds / 100) ** 0.5)


def test_tables_take_less_noise_than_images(tmp_path, monkeypatch):
    """So that a longer way at equal accuracy does not raise the loss."""
    file = arrays(tmp_path)

    def rates():
        for data in (file, "digits"):
            found = document("recommend", data, "--epsilon", "2")
            yield found["configuration"]["settings"]["learning_rate"]

    own = [*rates()]
    monkeypatch.setattr("fedpact.studies.recommend.TABLE_NOISE", NOISE)
    table, images = rates()
    assert own == [pytest.approx(table * TABLE_NOISE / NOISE, rel=0.01), images]


def noise_of(tmp_path):
    """Of the written plan, by the terms of each site: σ_k."""
    sites = document("plan", str(tmp_path / "study.toml"))["sites"].values()
    return [site["sigma_joint"] for site in sites]


def test_unequal_budgets_get_the_step_of_their_joint_noise(tmp_path):
    """Of what is left of them, where columns' scales are released."""
    columns = '[records.columns.age]\nrange = [0, 120]\nscale = "released"\n'
    asked = table(tmp_path, f'person = "who"\n{columns}')
    asked = (*asked, "--epsilon", "0.5,1,2,8", "--delta", "1e-5,1e-5,1e-5,1e-6")
    found = document("recommend", *asked, "--out", str(tmp_path / "study.toml"))
    assert found["configuration"]["privacy"]["epsilon"] == [0.5, 1.0, 2.0, 8.0]
    assert found["configuration"]["privacy"]["delta"] == [1e-5, 1e-5, 1e-5, 1e-6]
    each, raw = noise_of(tmp_path), found["configuration"]
    assert len({round(sigma, 6) for sigma in each}) == 4
    chosen = found["alternatives"][0]
    # What the algorithm makes of such sites.
    assert raw["algorithm"] == "ldp_fedsgd"
    own, clip = ldp_fedsgd.Settings(**raw["settings"]), raw["privacy"]["clip"]
    held, w = SimulationSetup.of(Plan.parse(raw)).sizes, torch.zeros(chosen["weights"])
    # Four fifths of 400 train, about: persons are held out as a whole.
    sizes = {name: size * 320 / sum(held.values()) for name, size in held.items()}
    replies = [
        Reply("r", 1, name, size, {"gradient": w}, told(size, sigma, clip))
        for (name, size), sigma in zip(sizes.items(), each, strict=True)
    ]
    after = ldp_fedsgd.update(ldp_fedsgd.init(w, own), replies, own)
    deviation = math.sqrt(after.numbers["noise_variance"])
    expected = deviation * sum(sizes.values()) / (clip * math.sqrt(4))
    assert chosen["sigma"] == pytest.approx(expected, rel=1e-3)  # a penalty of three digits
    # Less than if all records counted alike.
    assert 1.2 * chosen["sigma"] < math.sqrt(sum(sigma**2 for sigma in each) / 4)


def told(size, sigma, clip):
    """What a site says with its gradient."""
    return {"batch_size": size, "noise_variance": (sigma * clip / size) ** 2}


@pytest.mark.slow
def test_a_careful_sites_noise_does_not_drown_the_others_answers(tmp_path):
    """All records alike, whatever their sites' budgets, has about 80 %."""
    out = tmp_path / "study.toml"
    document("recommend", "digits", "--epsilon", "0.5,0.5,8,8", "--out", str(out))
    cli("run", str(out), "--out", str(tmp_path / "run"), "--set", "run.evaluate_every=1000")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"] > 0.9
    assert sorted(summary["epsilon"].values()) == pytest.approx([0.5, 0.5, 8, 8], rel=1e-3)


@pytest.mark.parametrize("beside", [("--records", "1154"), ()], ids=["declared", "dealt"])
def test_possibly_distant_sites_are_weighted_cautiously(beside):
    """The bias is bounded by K C² T, and where records are dealt by the deviation of a mean."""
    found = document("recommend", "digits", "--epsilon", "0.5,0.5,8,8", *beside)["configuration"]
    clip, apart = found["privacy"]["clip"], 4 if beside else 4 * 4 / 1154
    penalty = found["settings"]["bias_penalty"]
    assert penalty == pytest.approx(found["rounds"] * apart * clip**2, rel=0.01)


def test_shared_noise_follows_the_most_careful_site(tmp_path):
    asked, out = ("digits", "--trust", "sum"), str(tmp_path / "study.toml")
    found = document("recommend", *asked, "--epsilon", "1,2,4", "--out", out)
    assert found["configuration"]["sites"] == 3
    loudest = {round(sigma, 6) for sigma in noise_of(tmp_path)}
    assert loudest == {round(found["alternatives"][0]["sigma"], 6)}
    alone = document("recommend", *asked, "--epsilon", "1", "--sites", "3")
    assert alone["alternatives"][0] == found["alternatives"][0]


def test_declared_record_count_replaces_the_counted_one(tmp_path):
    """One site's file, or one made up alike, is enough: no number of it is in what is said."""
    found = []
    for rows in (40, 52):
        file = tmp_path / f"{rows}.npz"
        np.savez(file, x=np.arange(rows * 5.0).reshape(rows, 5), y=np.arange(rows) % 3)
        asked = (str(file), "--epsilon", "2", "--sites", "4", "--records", "20000")
        said = document("recommend", *asked)
        found.append({**said, "configuration": {**said["configuration"], "data": ""}})
    assert found[0] == found[1]
    row = found[0]["alternatives"][0]
    expected = signal_to_noise(1.0, row["sigma"], row["rounds"], 20_000, 4, row["weights"])
    assert row["snr"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["records.csv", "study.json", "there.toml"])
def test_it_writes_over_nothing(tmp_path, name):
    """Not over the records, nor over the declaration that it was given."""
    for there in ("records.csv", "there.toml"):
        (tmp_path / there).write_text("mine")
    told = refused("recommend", "digits", "--epsilon", "1", "--out", str(tmp_path / name))
    assert "--out is" in told
    assert str(tmp_path / name) in told
    assert {path.name for path in tmp_path.iterdir()} == {"records.csv", "there.toml"}
    assert (tmp_path / "records.csv").read_text() == "mine"


def test_one_sites_file_suffices_with_a_declared_count(tmp_path):
    """Four rows for five sites, and a column that names one of them, which the plan leaves out."""
    rows, out = (f"{20 + i},north,{i % 2}" for i in range(4)), tmp_path / "study.toml"
    asked = ("recommend", csv(tmp_path, "age,hospital,ill", *rows), "--label", "ill", "--site")
    asked += ("hospital", *declare(tmp_path, AGE), "--records", "5000", "--epsilon", "1,1,2,2,4")
    found = document(*asked, "--out", str(out))
    raw = found["configuration"]
    assert raw["sites"] == 5
    assert raw["records"]["drop"] == ["hospital"]
    assert "partition" not in raw
    assert found["alternatives"][0]["weights"] == 2 * 2
    told = found["reasons"]["privacy.epsilon"]
    assert told == "site 1 1, site 2 1, site 3 2, site 4 2, site 5 4"
    assert Plan.read(out).sites == 5


def test_a_budget_is_shown_with_its_owner(tmp_path):
    """Names are in the order of text: 10 is before 2."""
    rows = (f"{20 + i % 60},{(1, 2, 10)[i % 3]},{i % 2}" for i in range(120))
    asked = ("recommend", csv(tmp_path, "age,hospital,ill", *rows), "--label", "ill", "--site")
    found = document(*asked, "hospital", *declare(tmp_path, AGE), "--epsilon", "1,2,3")
    assert found["reasons"]["privacy.epsilon"] == "1 1, 10 2, 2 3"


def test_classes_found_are_shown_written_and_shown_again(tmp_path, caplog):
    """A mistyped label would be a class, in a file that everybody gets."""
    rows = (f"{20 + i % 60},{('no', 'yes')[i % 2]}" for i in range(200))
    file, out = csv(tmp_path, "age,ill", *rows, "50,nno"), tmp_path / "study.toml"
    asked = ("recommend", file, "--label", "ill", "--epsilon", "1", "--sites", "2")
    told = "classes are taken from the labels: 'nno', 'no', 'yes'; they count as public"
    found = document(*asked, *declare(tmp_path, AGE), "--out", str(out))
    assert told in caplog.text
    assert found["configuration"]["records"]["classes"] == ["nno", "no", "yes"]
    assert "classes = " in out.read_text()
    caplog.clear()
    found = document(*asked, *declare(tmp_path, f'records.classes = ["no", "yes"]\n{AGE}'))
    assert "found in the labels" not in caplog.text
    assert found["configuration"]["records"]["classes"] == ["no", "yes"]
    plan = Plan.parse({**found["configuration"], "records": {"columns": {}}})
    write_deployment(tmp_path / "federation", plan)
    assert f"federation.toml is public: {told}" in caplog.text


def test_one_sites_records_do_not_make_a_federation_of_one(tmp_path):
    file = csv(tmp_path, "age,hospital,ill", *(f"{20 + i},north,{i % 2}" for i in range(40)))
    asked = ("recommend", file, "--label", "ill", "--site", "hospital", "--epsilon", "1")
    told = refused(*asked, *declare(tmp_path, AGE), "--records", "5000")
    assert "has one site, 'north': say of how many sites" in told


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Recommendation, "toml", lambda self: "\ud800")
    told = refused("recommend", "digits", "--epsilon", "1", "--out", str(tmp_path / "study.toml"))
    assert "which cannot be written" in told
    assert list(tmp_path.iterdir()) == []
