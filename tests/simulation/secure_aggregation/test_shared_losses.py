"""Losses and counts as sums that sites share their noise out for, with one bound of the server's.

References are the laws of rounded normals, and the same run under noise of each site's own.
"""

import math

import numpy as np
import pytest
import torch
from tests.policies import GENEROUS
from tests.simulation.secure_aggregation.summed import COMMON, FAIR, SUM, plan_of

from fedpact.common.errors import PolicyRefused
from fedpact.common.messages import Reply, Task
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.privacy.accounting.accountant import epsilon
from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION
from fedpact.privacy.policy import Policy
from fedpact.simulation.secure_aggregation import encoding
from fedpact.simulation.secure_aggregation.encoding import Form
from fedpact.simulation.simulate import simulate

AROUND = {"settings": {"learning_rate": 1.0}, "fairness": {"weight": 0.1, **COMMON}}


def weights(result):
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


def test_one_event_of_all_channels_with_the_noise_of_all_shares():
    """σ_joint = (Σ σ_c^-2)^(-1/2) of h shares together; h times the variance of one."""
    fair = plan_of(**FAIR)
    terms = fair.terms({f"site-{i:02d}": 200.0 for i in range(5)})["site-00"]
    own = [terms.sigmas[name] for name in ("gradient", "loss", "below")]
    assert terms.sigmas["loss"] == 2.5 * own[0]
    assert terms.sigmas["below"] == 10 * own[0]
    together = math.sqrt(3) / math.sqrt(sum(1 / s**2 for s in own))
    assert terms.event.sigma == pytest.approx(together, rel=1e-12)
    assert set(terms.releases) == {"gradient", "loss", "below"}


@pytest.mark.parametrize("tables", [{}, FAIR])
def test_most_careful_site_sets_the_noise_and_steps_are_reserved(tables):
    """Also where rounding takes the last bit off σ √h / √h, as at these budgets."""
    grants = {"site-00": {"epsilon": 12.0}}
    plan = plan_of(
        **tables,
        sampling_rate=1.0,
        privacy={"trust": "sum", "honest": 3, "epsilon": 20.0, "per_site": grants},
    )
    terms = plan.terms({f"site-{i:02d}": 200.0 + i for i in range(5)})
    assert {one.steps for one in terms.values()} == {4}
    assert len({tuple(one.sigmas.items()) for one in terms.values()}) == 1
    for name, one in terms.items():
        spent = epsilon(one.history(4), one.delta, "best")
        assert spent <= one.budget.epsilon
        assert (spent > 0.99 * one.budget.epsilon) == (name == "site-00")
    even = plan_of(**tables, sampling_rate=1.0, privacy={**SUM["privacy"], "epsilon": 20.0})
    assert even.terms(dict.fromkeys(terms, 200.0))["site-01"].steps == 4


def test_opened_loss_and_count_have_all_summed_noise():
    """n (ν² + 1/12) unit² / (Σ q N)², of empty batches. Off by 6.1 deviations once in 10^9; a
    share more or less is off by 7 or more."""
    survivors = 5
    plan = plan_of(**FAIR, sites=7, secure_aggregation={"threshold": 5})
    terms = plan.terms({f"site-{i:02d}": 200.0 for i in range(7)})
    coding = encoding.SharedSum(terms, plan.method.facts.summed, plan.method.local)
    told = plan.method.task(plan.method.init(torch.zeros(3)))
    task = Task("run", 1, "fedfdp", told.vectors, told.numbers)
    some, count, nothing = terms["site-00"], 3000, torch.zeros(1)
    sites = sorted(terms)[:survivors]
    # What the coding makes of one unit in each channel; noise is drawn for all requests at once.
    drawn = {
        name: sum(
            SeededDraws(5, site).share(nothing.expand(count), 1.0, SHARE_DEVIATION, 0, name)
            for site in sites
        )
        for name in ("loss", "below")
    }
    found = {name: [] for name in drawn}
    for k in range(count):
        one = {"gradient": torch.zeros(3).long(), **{n: drawn[n][k : k + 1] for n in drawn}}
        reply = Reply("run", 1, sites[0], 200.0, one, {})
        layout = coding.layout(Form.of(one, ()))
        mean, _ = coding.mean(task, dict.fromkeys(sites, reply), coding.encode(task, reply), layout)
        for name in drawn:
            found[name].append(mean.numbers[name])
    records = sum(terms[site].batch_size for site in sites)
    # Bounds: C_l = 2.5 of a loss; half a vote, around one half.
    for name, bound, centre in (("loss", 2.5, 0.0), ("below", 0.5, 0.5)):
        variance = (
            survivors
            * (1 + 1 / (12 * SHARE_DEVIATION**2))
            * (some.sigmas[name] * bound / records) ** 2
        )
        square = np.square(np.array(found[name]) - centre).mean()
        assert abs(square / variance - 1) < 6.1 * math.sqrt(2 / count)


@pytest.mark.parametrize(
    ("tables", "rule"),
    [(FAIR, "quantile"), pytest.param(AROUND, "mean", marks=pytest.mark.slow)],
)
def test_without_noise_it_is_the_run_under_own_noise(tmp_path, monkeypatch, tables, rule):
    """Model, F and C_l of each round, up to the grid: half a unit a site, of 1400 records."""
    nothing = torch.zeros(1, dtype=torch.float64)
    monkeypatch.setattr(SeededDraws, "gaussian", lambda self, size, *_: nothing.repeat(size))
    monkeypatch.setattr(SeededDraws, "add_noise", lambda self, total, *_, **__: total)
    tables = {k: dict(v) if isinstance(v, dict) else v for k, v in tables.items()}
    tables["fairness" if "fairness" in tables else "settings"]["loss_bound_rule"] = rule
    runs = {}
    for trust, privacy in (("own", {}), ("sum", {"trust": "sum", "honest": 3})):
        plan = plan_of(**tables, sampling_rate=1.0, privacy={**privacy, "epsilon": 20.0})
        runs[trust] = simulate(plan, tmp_path / trust)
    ours, theirs = runs["sum"], runs["own"]
    assert float((weights(ours) - weights(theirs)).abs().max()) < 0.01
    assert float(weights(theirs).abs().max()) > 0.1
    followed = 0
    for one, other in zip(ours.records[1:], theirs.records[1:], strict=True):
        assert one.numbers.keys() == other.numbers.keys()
        assert len(one.numbers) == 2
        for name, value in one.numbers.items():
            assert value == pytest.approx(other.numbers[name], abs=0.05)
            followed += name.endswith("loss_bound") and value != 2.5
    assert followed == 4


def test_no_site_remembers_a_bound_and_replies_are_sums_alone(tmp_path):
    plan = plan_of(**FAIR)
    simulate(plan, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*memory*"))
    own = plan_of(**FAIR, privacy={}, secure_aggregation={})
    simulate(own, tmp_path / "own")
    assert not list((tmp_path / "own").rglob("*memory*"))


def test_fedfdp_is_fedavg_with_fairness_here_too(tmp_path):
    one, other = (simulate(plan_of(**t), tmp_path / str(i)) for i, t in enumerate((FAIR, AROUND)))
    assert torch.equal(weights(one), weights(other))


def test_a_policy_names_each_summed_channel(tmp_path):
    terms = plan_of(**FAIR).terms({f"site-{i:02d}": 200.0 for i in range(5)})["site-00"]
    alone = dict.fromkeys(("epsilon_alone_per_run", "epsilon_alone_ever"), 99.0)
    raw = GENEROUS | {"algorithms": ["fedfdp"], "honest": 3, **alone}
    named = Policy.parse({**raw, "releases": ["gradient", "loss", "below"]})
    named.check_run("fedfdp", terms, (0.0, 0.0), 0.0)
    unnamed = Policy.parse({**raw, "releases": ["gradient", "loss"]})
    with pytest.raises(PolicyRefused, match="below"):
        unnamed.check_run("fedfdp", terms, (0.0, 0.0), 0.0)
