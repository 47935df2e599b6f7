"""Columns that are scaled by what the sites release: what is released, what it costs, how often."""

import json
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from tests.policies import GENEROUS, write_policy
from tests.recounted import charges
from tests.tables import write_csv

from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.cli.commands import plan as command
from fedpact.common.errors import FedpactError, LedgerError, PlanError, PolicyRefused
from fedpact.common.messages import Reply
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.plan import Plan
from fedpact.privacy import column_scales
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.oracle import Charge, PrivateOracle, Records
from fedpact.simulation import simulate as joining
from fedpact.simulation import simulate as simulation
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.studies.audit.target import Target

DECLARED = {
    "bmi": {"range": [10, 60], "clamp": True, "fill": 25, "scale": "released"},
    "age": {"range": [0, 120], "clamp": True, "scale": "released"},
}
SITES = ["site-00", "site-01", "site-02"]


def table(path, n=300):
    rng = np.random.default_rng(0)
    rows = [
        [sex, round(age, 1), "" if k % 10 == 0 else round(bmi, 2), int(age > 50)]
        for k, (sex, age, bmi) in enumerate(
            zip(rng.integers(0, 2, n), rng.normal(50, 20, n), rng.normal(25, 4, n), strict=True)
        )
    ]
    return str(write_csv(path, ["sex", "age", "bmi", "out"], *rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return table(tmp_path_factory.mktemp("table") / "t.csv")


def plan(data, **changes):
    asked = {
        "data": data,
        "label": "out",
        "sites": 3,
        "rounds": 3,
        "records": {"columns": DECLARED},
        "run": {"workers": 1},
        "privacy": {"accountant": "rdp"},
    }
    return Plan.parse(asked | changes)


def weights(result):
    return FlatModel(result.model).vector


def independent(scene):
    """Mean and deviation of all sites' training records, by numpy, in declared ranges' units."""
    x = np.concatenate([site.x.numpy().astype(float) for site in scene.sites])
    u = x[:, list(scene.released)]
    return u.mean(0), u.std(0)


def test_without_noise_columns_are_standardised(data, tmp_path):
    """Mean 0 and variance 1 over all sites' records; the trained weights are those of a table that
    was standardised by hand, with the same two numbers declared.
    """
    plain = plan(data, privacy={"mode": "none"})
    result = simulate(plain, tmp_path / "run")
    scene = SimulationSetup.of(plain)
    mean, deviation = independent(scene)
    told = json.loads((result.folder / "columns.json").read_text())
    assert list(told) == ["bmi", "age"]
    assert [one["mean"] for one in told.values()] == pytest.approx(mean, abs=1e-5)
    assert [one["deviation"] for one in told.values()] == pytest.approx(deviation, abs=1e-5)
    # u = (2 x - low - high) / (high - low), so x has mean (u (high - low) + low + high) / 2.
    declared = {}
    for name, m, s in zip(["bmi", "age"], mean, deviation, strict=True):
        own = DECLARED[name]
        low, high = own["range"]
        by = {"mean": (m * (high - low) + low + high) / 2, "deviation": s * (high - low) / 2}
        declared[name] = {**own, **by, "scale": "standard"}
    other = plan(data, privacy={"mode": "none"}, records={"columns": declared})
    hand = simulate(other, tmp_path / "hand")
    torch.testing.assert_close(weights(result), weights(hand), atol=1e-4, rtol=1e-4)
    assert result.records[0].accuracy == hand.records[0].accuracy
    assert result.summary["accuracy"] == pytest.approx(hand.summary["accuracy"], abs=0.02)


def cost(events, delta):
    """By the accountant of another library, Gaussian mechanisms with and without sampling."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for q, sigma, count in events:
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        event = gaussian if q == 1 else dp_accounting.PoissonSampledDpEvent(q, gaussian)
        accountant.compose(event, count)
    return accountant.get_epsilon(delta)


def test_the_release_is_charged_first_once_and_within_the_budget(data, tmp_path):
    result = simulate(plan(data, rounds=4, privacy={"epsilon": 1.0}), tmp_path / "run")
    found = set()
    for site in SITES:
        entries = charges(result.folder, site)
        assert [(e["purpose"], e["round"]) for e in entries] == [
            (["columns moments"], 0),
            *((["gradient"], r) for r in range(1, 5)),
        ]
        assert (entries[0]["q"], entries[0]["count"]) == (1.0, 1)
        found.add(tuple((e["q"], e["sigma"], e["count"]) for e in entries))
    # All sites have one budget and one noise.
    (events,) = found
    whole = cost(events, 1e-5)
    assert 0.98 < whole <= 1.0 + 1e-3
    assert [*result.summary["epsilon"].values()] == pytest.approx([whole] * 3, rel=2e-2)
    # 4 % by 1/σ²: alone it would cost all of (1, 1e-5) at a fifth of the noise.
    assert cost([(1.0, entries[0]["sigma"] / 5, 1)], 1e-5) == pytest.approx(1.0, rel=2e-3)
    told = json.loads((result.folder / "privacy.json").read_text())
    assert any(
        "columns bmi, age" in line and "0.04 of the budget" in line for line in told["covers"]
    )
    assert told["sites"][SITES[0]]["columns"]["sigma"] == entries[0]["sigma"]


def test_a_plan_says_what_the_release_takes(data, tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan(data).model_dump(mode="json")))
    command.plan(file)
    shown = capsys.readouterr().out
    sigma = SimulationSetup.of(plan(data)).terms[SITES[0]].columns.event.sigma
    assert f"site-00 releases the scales of 2 columns before training: σ {sigma:.4f}" in shown
    assert "0.04 of the budget" in shown


def test_a_resumed_run_releases_once(data, tmp_path):
    expected = simulate(plan(data), tmp_path / "whole")
    rounds = iter([False, True])
    assert simulate(plan(data), tmp_path / "r", stop=lambda: next(rounds)).summary["rounds"] == 1
    resumed = simulate(plan(data), tmp_path / "r")
    assert torch.equal(weights(resumed), weights(expected))
    for site in SITES:
        assert [e["round"] for e in charges(resumed.folder, site)] == [0, 1, 2, 3]


def test_crash_between_release_and_start_repeats_the_release(data, tmp_path, monkeypatch):
    """Charged before it died: the second start is the same run, whose request is the same."""
    expected = simulate(plan(data), tmp_path / "whole")

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(simulation.Folder, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            simulate(plan(data), tmp_path / "r")
    assert [e["round"] for e in charges(tmp_path / "r", SITES[0])] == [0]
    resumed = simulate(plan(data), tmp_path / "r")
    assert torch.equal(weights(resumed), weights(expected))
    for site in SITES:
        assert [e["round"] for e in charges(resumed.folder, site)] == [0, 1, 2, 3]


def test_a_ledger_without_the_release_is_detected(data, tmp_path):
    folder = simulate(plan(data), tmp_path / "r", stop=lambda: True).folder
    ledger = folder / "sites" / SITES[0] / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:2]))
    with pytest.raises(LedgerError, match="no charge of a round"):
        simulate(plan(data), folder)


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """As for fedavg: batch-clipped or with other channels the release's event is the same."""
    folder = simulate(plan(data, rounds=1), tmp_path_factory.mktemp("fedavg") / "run").folder
    return json.loads((folder / "columns.json").read_text())


@pytest.mark.parametrize(
    "changes",
    [
        {"run": {"workers": 2}},
        {"secure_aggregation": {"threshold": 2}},
        {"algorithm": "fedproxvr"},
        {"privacy": {"mode": "batch_clipped", "accountant": "rdp"}},
        {"privacy": {"sizes": "noisy", "accountant": "rdp"}},
    ],
    ids=str,
)
def test_every_method_and_engine_has_the_same_constants(data, expected, tmp_path, changes):
    """Bit for bit but where sums are in fixed point, or sizes have noise of their own."""
    found = simulate(plan(data, **({"rounds": 2} | changes)), tmp_path / "b")
    told = json.loads((found.folder / "columns.json").read_text())
    for name, one in expected.items():
        if changes.get("privacy", {}).get("sizes"):
            assert told[name] == pytest.approx(one, abs=0.5)
        else:
            assert told[name] == pytest.approx(one, abs=1e-6)
    for site in SITES:
        entries = [e for e in charges(found.folder, site) if e["purpose"] == ["columns moments"]]
        assert [e["round"] for e in entries] == [0]
    assert max(found.summary["epsilon"].values()) <= 2.0


def test_ledgers_that_are_open_elsewhere_have_it_too(data, tmp_path, monkeypatch):
    """As with engine "ray", whose actors open them; here threads do, and nothing is started."""

    def elsewhere(sites, workshop, ledgers, stack):
        for ledger in ledgers.values():
            ledger.close()
        opened = {site.name: stack.enter_context(site.open_ledger()) for site in sites}
        return simulation._on_threads(sites, workshop, opened, stack)

    monkeypatch.setattr(simulation, "_on_ray", elsewhere)
    monkeypatch.setattr(simulation, "require_ray", lambda: None)
    found = simulate(plan(data), tmp_path / "ray", engine="ray")
    expected = simulate(plan(data), tmp_path / "local")
    assert torch.equal(weights(found), weights(expected))
    assert [e["round"] for e in charges(found.folder, SITES[0])] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"privacy": {"trust": "sum", "honest": 1}, "secure_aggregation": {"threshold": 3}},
            'trust = "sum" cannot be combined with',
        ),
        (
            {"algorithm": "ldp_fedsgd", "secure_aggregation": {"threshold": 2}},
            "weights replies by other numbers",
        ),
        ({"compression": {"kind": "grid"}}, "rounds to a part of the gradients' noise"),
        ({"features": {"kind": "scattering"}}, "with \\[features\\]"),
        ({"privacy": {"column_share": 0.0}}, "column_share"),
        ({"privacy": {"column_share": 0.9}, "budget": {"spare_rounds": 3}}, "costs ε"),
    ],
)
def test_incompatible_settings_are_refused(data, changes, message):
    with pytest.raises(PlanError, match=message):
        SimulationSetup.of(plan(data, **changes))


def test_the_oracle_releases_nothing_that_the_terms_do_not_have(data, tmp_path):
    """Other terms, or more columns than the event is of, are refused before a record is read."""
    scene = SimulationSetup.of(plan(data))
    terms = scene.terms[SITES[0]]
    assert column_scales.covers(terms.columns, 2)
    assert not column_scales.covers(terms.columns, 3)
    site = scene.sites[0]
    with Ledger(tmp_path / "l.jsonl", "a", hypothetical=True) as ledger:
        charge = Charge(ledger, "r", 0, "digest")
        for chosen, own in (
            ((0, 1, 2), terms),
            ((), terms),
            ((0, 1), replace(terms, columns=None)),
        ):
            records = Records(site.x, site.y, chosen)
            oracle = PrivateOracle(records, None, own, SeededDraws(0), charge)
            with pytest.raises(PolicyRefused, match="columns was asked for"):
                oracle.columns()
        assert ledger.length == 1
        # Not reserved: refused by the ledger.
        oracle = PrivateOracle(Records(site.x, site.y, (0, 1)), None, terms, SeededDraws(0), charge)
        with pytest.raises(PolicyRefused, match="has not reserved"):
            oracle.columns()


def test_a_start_that_no_site_answers_ends_with_a_sentence(data, tmp_path):
    policy = write_policy(tmp_path / "policy.toml", **GENEROUS)
    with pytest.raises(FedpactError, match="releases columns moments are not allowed here"):
        SimulationSetup.of(plan(data, policy=policy))


def test_options_for_raw_records_are_refused_when_declared(data, tmp_path):
    """An audit, and what joining was worth, would be of other records than those trained on."""
    message = r'scale = "released": audits, comparisons and tuning'
    with pytest.raises(PlanError, match=message):
        Target.of(SimulationSetup.of(plan(data)))
    folder = simulate(plan(data), tmp_path / "r").folder
    with pytest.raises(PlanError, match=message):
        joining.of_run(folder)


def test_constants_follow_released_numbers_within_limits():
    """Whatever noise made of the means: a mean in [-1, 1], a deviation above that of the noise."""
    # Mean squares less 1/2: of 0.7, of -2.5, and of 0.25 + 0.09.
    means = torch.tensor([5.0, 0.0, -0.5, 0.2, -3.0, -0.16], dtype=torch.float64)
    by = column_scales.constants(means, 0.01)
    assert by.tolist() == pytest.approx([1.0, 0.0, -0.5, 0.1, 0.1, 0.3])
    x = torch.tensor([[1.0, 7.0, -0.5]])
    assert column_scales.scale_columns(
        x, (0, 2), torch.tensor([0.5, -0.5, 0.25, 2.0])
    ).tolist() == [[2, 7, 0]]


def test_stated_noise_is_that_of_the_servers_mean(data):
    """Σ c_i D_i z / Σ c_i N_i: `moved` is its deviation, and the floor of variances in `update`."""
    unlike = plan(data, privacy={"epsilon": [8.0, 2.0, 0.01]})
    scene = SimulationSetup.of(unlike)
    each = [(one.columns, one.size) for one in scene.terms.values()]
    loud = [column_scales.deviation(of) for of, _ in each]
    assert unlike.privacy.least_noise_of(2) == min(loud)
    parts = [column_scales.site_weight(noise, min(loud)) for noise in loud]
    assert parts[0] == 1.0 >= parts[1] > parts[2]
    # Beyond three times the least by the inverse of the variance.
    assert parts[2] * loud[2] ** 2 == pytest.approx(9 * loud[0] ** 2)
    whole = sum(c * n for c, (_, n) in zip(parts, each, strict=True))
    noise = math.hypot(*(c * d for c, d in zip(parts, loud, strict=True))) / whole
    assert column_scales.mean_noise(each) == pytest.approx(noise)
    assert column_scales.mean_noise([(None, 5.0)]) == 0.0
    replies = []
    for k, (c, d, (_, n)) in enumerate(zip(parts, loud, each, strict=True)):
        means = {"columns/means": torch.tensor([0.1, 0.1, -0.4, -0.4], dtype=torch.float64) * c}
        numbers = {"columns/part": c, "columns/noise": (c * d) ** 2 / n}
        replies.append(Reply("run", 0, f"s{k}", n, means, numbers))
    found = unlike.method.update(unlike.method.init(torch.zeros(3)), replies)
    by = found.vectors[CONSTANTS]
    assert by[:2].tolist() == pytest.approx([0.1, 0.1])
    # 1/2 - 0.4 - 0.1² = 0.09 is less than the noise here.
    assert noise > 0.09
    assert by[2:].tolist() == pytest.approx([math.sqrt(noise)] * 2)


def test_equal_budgets_weigh_sites_by_records(data, tmp_path):
    """A large site is no better judge of a column than all records are: nobody's part is less."""
    like = plan(data, privacy={"epsilon": 1.0}, partition={"kind": "dirichlet", "beta": 1.0})
    scene = SimulationSetup.of(like)
    assert len({one.size for one in scene.terms.values()}) > 1
    quiet = like.privacy.least_noise_of(2)
    assert {
        column_scales.site_weight(column_scales.deviation(t.columns), quiet)
        for t in scene.terms.values()
    } == {1}
    # Noise of three times as much counts in full, too.
    assert column_scales.site_weight(3 * quiet, quiet) == 1.0
    assert column_scales.site_weight(1e300, quiet) == 2.0**-20


def test_one_noisy_site_does_not_dominate_column_scales(data, tmp_path, caplog):
    """Constants are within what noise is said to do, and sampling, of the numbers themselves.

    By sizes alone the mean was an end of the range and the deviation some ten times it. Noise
    beyond five deviations fails once in 10^6 seeds.
    """
    careful = plan(data, privacy={"epsilon": [50.0, 50.0, 0.001], "accountant": "rdp"})
    result, scene = simulate(careful, tmp_path / "run"), SimulationSetup.of(careful)
    mean, _ = independent(scene)
    told = json.loads((result.folder / "columns.json").read_text())
    noise = column_scales.mean_noise((one.columns, one.size) for one in scene.terms.values())
    # The careful site's records hardly count: those of the others differ from all by sampling.
    far = 5 * noise + 0.15
    assert far < 0.6
    assert [one["mean"] for one in told.values()] == pytest.approx(mean, abs=far)
    assert all(one["deviation"] < 1 for one in told.values())
    assert "released mean" not in caplog.text
    SimulationSetup.of(plan(data, privacy={"epsilon": 0.001, "accountant": "rdp"}))
    assert "noise moves the released mean of a column" in caplog.text
