"""privacy.json: what is clipped, by which accountant each number is, and that the page says so."""

import json
import math
import re

import pytest

from fedpact.common.format import upper
from fedpact.deployment.final_model import may_end_early
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import SampledGaussian, epsilon
from fedpact.privacy.accounting.group_privacy import epsilon_per_person
from fedpact.privacy.accounting.shared_noise import ADDED_DELTA, SHARE_DEVIATION, added_delta
from fedpact.report.page import write_report
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.simulation.statement import describe_terms, of_simulation


def plan_of(**changes):
    return Plan.parse({"rounds": 3, "sites": 2, **changes})


def statement(**changes):
    return of_simulation(SimulationSetup.of(plan_of(**changes)))


@pytest.mark.parametrize("mode", ["per_sample", "batch_clipped"])
def test_the_mechanism_is_named_and_decides_the_multiplier(mode):
    told = statement(algorithm="ldp_fedsgd", privacy={"mode": mode})
    assert told["mechanism"] == mode
    for site in told["sites"].values():
        # Sensitivity C, or 2C where one record can turn the clipped mean round.
        share = 1.0 if mode == "per_sample" else 0.5
        assert site["multipliers"]["gradient"] == site["sigmas"]["gradient"] * share
        assert site["sigma_joint"] == site["multipliers"]["gradient"]


@pytest.mark.parametrize("accountant", ["best", "pld", "rdp"])
def test_the_number_is_that_of_the_accountant_it_names(accountant):
    scene = SimulationSetup.of(plan_of(privacy={"accountant": accountant}))
    for terms in scene.terms.values():
        told = describe_terms(terms)
        event = SampledGaussian(terms.rate, told["sigma_joint"])
        each = {
            by: epsilon({event: told["steps"]}, told["delta"], by.lower()) for by in ("PLD", "RDP")
        }
        assert told["epsilon_reserved"] == each[told["epsilon_by"]]
        assert (
            told["epsilon_by"]
            == {"pld": "PLD", "rdp": "RDP", "best": min(each, key=each.__getitem__)}[accountant]
        )


def test_every_epsilon_uses_the_plans_accountant(tmp_path):
    steps = {}
    for accountant in ("pld", "rdp"):
        noisy = {"sigma": 1.5, "accountant": accountant}
        whole = plan_of(rounds=4, sampling_rate=0.05, privacy=noisy)
        result = simulate(whole, tmp_path / accountant)
        (terms,) = {t.event: t for t in SimulationSetup.of(whole).terms.values()}.values()
        each = whole.steps // whole.rounds
        steps[accountant] = [record.epsilon["site-00"] for record in result.records]
        assert steps[accountant][-1] == epsilon({terms.event: 4 * each}, 1e-5, accountant)
        assert result.summary["accountant"] == accountant
    assert all(p < r for p, r in zip(steps["pld"][1:], steps["rdp"][1:], strict=True))


def test_plain_run_names_no_mechanism_and_private_page_does(tmp_path):
    assert statement(privacy={"mode": "none"})["mechanism"] == "none"
    result = simulate(Plan.parse({"rounds": 1, "sites": 2}), tmp_path / "run")
    told = json.loads((result.folder / "privacy.json").read_text())
    shown = " ".join(write_report(result.folder).read_text().split())
    assert f"<th>mechanism</th><td>per_sample. {told['mechanism_meaning']}" in shown.replace(
        "&#39;", "'"
    )


def test_the_event_that_opens_a_round_is_stated():
    """With it, what the statement lists costs exactly what it says is reserved."""
    plan = plan_of(algorithm="fedproxvr", settings={"local_steps": 2})
    (terms, *_) = plan.terms({"a": 100.0}).values()
    told = describe_terms(terms)
    opening = told["opening"]
    events = {
        SampledGaussian(told["rate"], told["sigma_joint"]): told["steps"],
        SampledGaussian(opening["rate"], opening["sigma_joint"]): opening["count"],
    }
    assert (told["steps"], opening["count"]) == (6, 3)
    assert epsilon(events, told["delta"]) == told["epsilon_reserved"]
    assert describe_terms(next(iter(Plan.parse({}).terms({"a": 9.0}).values())))["opening"] is None


@pytest.mark.parametrize(("rate", "alone"), [(1e-6, True), (5.1e-6, False)])
def test_it_warns_if_delta_exceeds_one_over_n(rate, alone):
    given = {"accountant": "rdp", "sigma": 2.0}  # which are not what is asked
    told = statement(rounds=2, sampling_rate=rate, settings={"local_steps": 1}, privacy=given)
    lines = [line for line in told["does_not_cover"] if "without any noise" in line]
    # Twice 1e-6 is below δ = 1e-5, twice 5.1e-6 is not.
    assert len(lines) == alone
    assert all("probability at most 2e-06" in line for line in lines)


def test_it_states_epsilon_for_a_patient_with_five_visits(tmp_path):
    plan = Plan.parse({"rounds": 2, "sites": 2, "privacy": {"person_records": 7}})
    result = simulate(plan, tmp_path / "run")
    told = json.loads((tmp_path / "run/privacy.json").read_text())
    terms = SimulationSetup.of(plan).terms
    for name, site in told["sites"].items():
        assert list(site["epsilon_per_person"]) == ["2", "3", "5", "7", "10"]
        history = terms[name].history(terms[name].steps)
        for k, e in site["epsilon_per_person"].items():
            assert e == epsilon_per_person(history, site["delta"], int(k)) > site["epsilon"]
    most = max(site["epsilon_per_person"]["5"] for site in told["sites"].values())
    assert f"at most {upper(most)} for a patient with five visits" in told["per_person"]
    page = write_report(result.folder).read_text()
    assert "a patient with five visits" in page
    assert any("the records of a person are not counted" in line for line in told["does_not_cover"])
    plain = of_simulation(SimulationSetup.of(Plan.parse({"privacy": {"mode": "none"}})))
    assert plain["per_person"] == ""


def test_shared_noise_has_both_of_a_person():
    trust = {"trust": "sum", "honest": 2}
    plan = plan_of(rounds=2, sites=3, secure_aggregation={"threshold": 3}, privacy=trust)
    scene = SimulationSetup.of(plan)
    told = of_simulation(scene)
    for name, site in told["sites"].items():
        assert site["epsilon_alone_per_person"]["2"] > site["epsilon_per_person"]["2"]
        event, steps = scene.terms[name].event, scene.terms[name].steps
        # Of h shares beyond the ε that a plan is checked for, with the laws' distance paid.
        together = site["epsilon_per_person"]["5"]
        assert together == pytest.approx(epsilon_per_person({event: steps}, site["delta"], 5))
        assert 10 < together < site["epsilon_alone_per_person"]["5"]
        sums = float(len(scene.workshop.bench().private.model.vector)) * steps
        assert added_delta(together, SHARE_DEVIATION, 3, sums) <= ADDED_DELTA
        own = SampledGaussian(event.q, event.sigma / math.sqrt(2))
        alone = epsilon_per_person({own: steps}, site["delta"], 5)
        assert site["epsilon_alone_per_person"]["5"] == pytest.approx(alone)
    assert "Without other sites' noise: 2 records" in told["per_person"]


@pytest.mark.parametrize(
    ("precision", "said"),
    [("float32", "computed in float32"), ("bf16", "computed in bfloat16; norms")],
)
def test_it_names_the_precision(precision, said):
    assert said in statement(run={"precision": precision})["precision"]


@pytest.mark.parametrize(
    ("algorithm", "settings", "more"),
    [
        ("ali_dpfl", {"iterations": 20, "kappa": 1e-4}, {}),
        ("fedavg", {}, {"control": {"kind": "ali", "iterations": 20}}),
        ("fedproxvr", {"accuracy": 2.0, "local_steps": 4}, {}),
    ],
)
def test_where_steps_follow_releases_epsilon_is_the_reserved(algorithm, settings, more, tmp_path):
    """The events charged so far are no bound where their number depends on what they showed."""
    raw = {"algorithm": algorithm, "settings": settings, "rounds": 4, "sites": 2, **more}
    raw["privacy"] = {"epsilon": 20.0, "accountant": "rdp"}
    plan = Plan.parse(raw)
    done = simulate(plan, tmp_path / "run")
    assert set(done.summary["epsilon"].values()) == {20.0}
    assert may_end_early(plan, done.summary["rounds"])
    assert not Plan.parse({"algorithm": "fedproxvr"}).adaptive


def test_the_budget_of_evaluations_is_rounded_up():
    budget = {"epsilon": 2.00000049, "delta": 1.00000049e-5}
    told = statement(evaluation={"share": 0.2, **budget}, privacy={"accountant": "rdp"})
    (line,) = (line for line in told["covers"] if line.startswith("Evaluations"))
    epsilon, delta = (float(x) for x in re.search(r"= \((.*?), (.*?)\)", line).groups())
    assert epsilon >= budget["epsilon"]
    assert delta >= budget["delta"]
