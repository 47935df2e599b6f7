"""Noise for the sum: shares on one grid, summed modulo 2^b, and nothing else of a site is seen.

References are Gaussian laws by scipy and sums of whole numbers; docs/notes/noise-for-the-sum.md.
"""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tests.policies import GENEROUS, write_policy
from tests.simulation.secure_aggregation.summed import COMMON, SUM, plan_of

from fedpact import algorithms
from fedpact.algorithms import Summed
from fedpact.common.errors import DataError, InputError, PlanError, PolicyRefused
from fedpact.common.messages import Reply, State, Task
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.accounting.shared_noise import SHARE_DEVIATION
from fedpact.privacy.ledger.ledger import Ledger
from fedpact.privacy.ledger.receipt import receipt, remaining
from fedpact.privacy.policy import Policy, sum_reservations
from fedpact.report.page import write_report
from fedpact.simulation.secure_aggregation import encoding, words
from fedpact.simulation.secure_aggregation.encoding import MASKED, Form
from fedpact.simulation.simulate import simulate


def terms_of(plan, count=5, size=200.0):
    return plan.terms({f"site-{i:02d}": size + i for i in range(count)})


@pytest.mark.parametrize("width", [*range(8, 33), 64])
def test_packed_words_come_back(width):
    generator = np.random.default_rng(width)
    for length in (1, 7, 8, 650, 2**16 + 3):
        given = generator.integers(0, 2**64, length, dtype=np.uint64, endpoint=False)
        packed = words.pack_bits(given, width)
        assert len(packed) == -(-length * width // 8)
        back = words.unpack_bits(packed, width)[:length]
        assert (back == given & np.uint64(2**width - 1)).all()


def test_signs_are_decoded():
    for width in (16, 19, 32):
        whole = np.array([0, 1, -1, 2 ** (width - 1) - 1, -(2 ** (width - 1))])
        assert words.centre_words(whole.astype(np.uint64), width).tolist() == whole.tolist()


@pytest.fixture
def session(party):
    """A federation of five with t = 4, and a share of each."""
    mine = party(5, 4)
    terms = terms_of(plan_of())
    coding = encoding.SharedSum(terms, Summed(), plan_of().method.local)
    generator = torch.Generator().manual_seed(1)
    for site, masker in mine.maskers.items():
        masker._coding = coding
        whole = torch.randint(-300, 300, (mine.length,), generator=generator)
        mine.replies[site] = Reply("run", 1, site, terms[site].size, {"gradient": whole}, {})
    mine.weighing = mine.coding = coding
    return mine


@pytest.mark.parametrize("gone", [None, "site-01", "site-04"])
def test_the_opened_sum_is_that_of_shares_and_one_step(session, gone):
    """With one of two local parts that fedavg's clients have: w - η Σ e unit / Σ q N."""
    last, away = ("unmask", {gone: "masked"}) if gone else ("open", {})
    tried = session.up_to(session.session(), last, away)
    masked = session.mask
    there = [site for site in session.sites if site != gone]
    total = sum(session.replies[site].vectors["gradient"] for site in there)
    width = encoding.bits(session.coding.terms)
    assert words.centre_words(tried.total(), width).tolist() == total.tolist()
    layout = session.coding.layout(Form.of(session.task.vectors, ()))
    form = session.coding.form(layout)
    for reply in masked.values():
        assert [*reply.vectors] == [MASKED]
        assert reply.vectors[MASKED].shape == form.vectors[MASKED][0]
        assert reply.numbers == {}
    mean, _ = session.coding.mean(session.task, tried.replies, tried.total(), layout)
    terms = session.coding.terms
    records = sum(terms[site].rate * terms[site].size for site in there)
    step = 0.5 * total.double() * terms["site-00"].unit("gradient", 1.0) / records
    assert torch.allclose(mean.vectors["w"], session.task.vectors["w"] - step, rtol=1e-12)


def test_a_masked_share_is_spread_evenly(session):
    """Of 40 words the low 16 bits; an unmasked one has 11 of them equal to its sign."""
    session.up_to(session.session(), "masked")
    sent = np.concatenate([session.coding.words(m) for m in session.mask.values()])
    # 200 words: each of the top bits is set in half of them, but once in 10^9 (8.5 deviations).
    for bit in range(8, 16):
        share = float(((sent >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 8.5 * 0.5 / math.sqrt(len(sent))


def test_an_invalid_share_is_not_sent(session):
    for vectors in ({"gradient": torch.zeros(3)}, {"w": torch.zeros(3).long()}, {}):
        reply = Reply("run", 1, "site-00", 1.0, vectors, {})
        with pytest.raises(DataError, match="expected a share"):
            session.coding.encode(session.task, reply)


class Fixed:
    """Draws of one kind, of `count` sites and as many requests as asked for."""

    def __init__(self, kind, site):
        self._kind, self._site, self._own = kind, site, SecureDraws()

    def share(self, total, unit, units, request):
        draws = self._own if self._kind == "secure" else SeededDraws(3, self._site, request)
        return draws.share(total, unit, units, 0, "gradient")


COORDINATES, REQUESTS = 2000, 10
# Of a right law beyond it once in 10^9.
CELLS = np.arange(-4, 5)


def surprise(values, exact):
    """χ² over the values of CELLS, and whatever is beyond."""
    counts = np.array([(values == n).sum() for n in CELLS], dtype=float)
    counts = np.append(counts, len(values) - counts.sum())
    expected = np.append(exact, 1 - exact.sum()) * len(values)
    return float(((counts - expected) ** 2 / expected).sum())


def law(place, units, honest):
    """The probabilities of floor(a + ν sqrt(h) Z + U_1 + ... + U_h) at CELLS, by Fourier."""
    t = np.linspace(-30, 30, 60001)
    wave = np.exp(-((units * t) ** 2) * honest / 2) * np.sinc(t / (2 * np.pi)) ** honest
    return np.array([np.trapezoid(wave * np.cos(t * (place - n)), t) / (2 * np.pi) for n in CELLS])


@pytest.mark.parametrize("kind", ["secure", "seeded"])
@pytest.mark.parametrize("units", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("honest", [3, 7])
def test_opened_sums_have_the_law_that_is_accounted_for(kind, units, honest):
    """A right one is turned down once in 10^9; half the noise, one seed for two sites, no noise of
    one of three are found in each of the cases that follow."""
    limit = float(chi2.ppf(1 - 1e-9, len(CELLS)))
    places = np.linspace(-0.4, 0.7, honest)
    sites = [Fixed(kind, f"site-{i}") for i in range(honest)]

    def opened(sites, units=units):
        return np.concatenate(
            [
                sum(
                    site.share(torch.full((COORDINATES,), place * 0.25), 0.25, units, request)
                    for site, place in zip(sites, places, strict=True)
                ).numpy()
                for request in range(REQUESTS)
            ]
        )

    exact = law(places.sum(), units, honest)
    assert surprise(opened(sites), exact) < limit
    assert surprise(opened(sites, units / 2), exact) > limit
    if kind == "seeded":
        assert surprise(opened([sites[0]] * honest), exact) > limit


@pytest.mark.parametrize("survivors", [4, 5, 6, 7])
def test_the_opened_sums_variance_for_each_number_of_survivors(survivors):
    """ν² + 1/12 of each: every site draws a share of its own. Off by 6.1 deviations once in 10^9;
    a share more or less is off by 20."""
    count = 20000
    total = sum(
        Fixed("seeded", f"s{i}").share(torch.zeros(count), 1.0, SHARE_DEVIATION, 0)
        for i in range(survivors)
    )
    expected = survivors * (SHARE_DEVIATION**2 + 1 / 12)
    found = float(total.double().square().mean())
    assert abs(found / expected - 1) < 6.1 * math.sqrt(2 / count)


def test_the_ring_holds_the_largest_sum_and_no_bit_more():
    terms = terms_of(plan_of())
    width = encoding.bits(terms)
    most = sum(
        1.001 * encoding.most_records(t.batch_size) * SHARE_DEVIATION / t.sigmas["gradient"]
        for t in terms.values()
    )
    assert 16 <= width <= 32
    assert most + 12 * SHARE_DEVIATION * math.sqrt(5) < 2 ** (width - 1)
    large = terms_of(plan_of(sampling_rate=1.0), size=1e5)
    assert encoding.bits(large) > width
    most = sum(
        encoding.most_records(t.batch_size) * SHARE_DEVIATION / t.sigmas["gradient"]
        for t in large.values()
    )
    assert most > 2 ** (encoding.bits(large) - 2)
    # Beyond 2^22 units floating point is not shown to round a sum as a real number.
    with pytest.raises(PlanError, match=r"expected at most 4\.19e"):
        encoding.bits(terms_of(plan_of(sampling_rate=1.0, rounds=1), size=1e9))


@pytest.mark.parametrize("sites", [2, 5, 40])
@pytest.mark.parametrize("width", [17, 20, 22])
def test_the_largest_legal_sum_does_not_wrap(sites, width):
    """Every record of the largest batch at its bound, and noise of 12 deviations.

    σ is such that this sum just fits into a width, or just does not.
    """
    some = plan_of(sampling_rate=1.0).terms({"site-00": 200.0})["site-00"]
    records = encoding.most_records(some.batch_size)
    noise = 12 * SHARE_DEVIATION * math.sqrt(sites)
    for part, needed in ((0.998, width), (1.0001, width + 1)):
        largest = part * 2.0 ** (width - 1)
        sigma = records * SHARE_DEVIATION * sites / (largest - noise)
        terms = {str(i): replace(some, sigmas={"gradient": sigma}) for i in range(sites)}
        assert encoding.bits(terms) == needed
        for whole in (int(largest / sites), -int(largest / sites)):
            word = np.array([whole]).astype(np.uint32)
            sent = [words.unpack_bits(words.pack_bits(word, needed), needed) for _ in terms]
            total = np.sum(sent, axis=0, dtype=np.uint32)
            assert words.centre_words(total, encoding.bits(terms)) == sites * whole


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"secure_aggregation": {"threshold": 0}}, "only sees sums"),
        ({"settings": {"local_steps": 2}}, "own noisy ones"),
        ({"algorithm": "fedprox", "settings": {"local_steps": 1}}, "steps and memory"),
        ({"algorithm": "scaffold", "settings": {"local_steps": 1}}, "steps and memory"),
        ({"algorithm": "fedfdp"}, 'use loss_of = "common"'),
        ({"algorithm": "fedfdp", "settings": {**COMMON, "local_steps": 2}}, "own noisy ones"),
        ({"algorithm": "qffl"}, "weights depend on"),
        ({"fairness": {"weight": 0.1}}, 'use loss_of = "common"'),
        ({"fairness": {"weight": 0.1, **COMMON}, "settings": {"local_steps": 2}}, "own noisy"),
        ({"privacy": {"trust": "sum"}}, "honest >= 1"),
        ({"privacy": {"honest": 2}}, 'trust = "own"'),
        ({"privacy": {"trust": "sum", "honest": 3, "sizes": "noisy"}}, "sizes"),
        ({"privacy": {"trust": "sum", "honest": 3, "mode": "batch_clipped"}}, "per_sample"),
        ({"privacy": {"trust": "sum", "honest": 3, "sigma": [1.0] * 5}}, "give one number"),
        ({"robust": {"rule": "median"}}, "robust"),
        ({"compression": {"kind": "topk"}}, "compression"),
    ],
)
def test_shared_noise_refuses_conflicts_with_the_reason(tables, why):
    with pytest.raises(PlanError, match=why):
        Plan.parse({**SUM, **tables})


@pytest.mark.parametrize(("threshold", "honest"), [(4, 4), (4, 1), (3, 2), (5, 5)])
def test_more_honest_sites_than_a_sum_has_are_refused(threshold, honest):
    plan = plan_of(
        secure_aggregation={"threshold": threshold}, privacy={"trust": "sum", "honest": honest}
    )
    with pytest.raises(PlanError, match=f"privacy.honest = {honest} with 5 sites") as told:
        terms_of(plan)
    # Each remedy is one.
    named = re.search(r"honest = (\d)", str(told.value).partition("expected")[2])
    larger = re.search(r"a threshold of at least (\d)", str(told.value))
    assert (named is None) == (threshold == 3)
    assert (larger is None) == (honest == 5)
    remedies = [(threshold, int(named[1]))] if named else []
    remedies += [(int(larger[1]), honest)] if larger else []
    for t, h in remedies:
        terms_of(
            plan_of(secure_aggregation={"threshold": t}, privacy={"trust": "sum", "honest": h})
        )


@pytest.mark.parametrize("rule", ["quantile", "mean"])
@pytest.mark.parametrize("name", [*algorithms.names(), "fairness"])
def test_the_step_of_the_mean_is_the_mean_of_the_steps(name, rule):
    """What an algorithm says by `needs_own_noise`: its local part is one batch at the task's w
    whose answers enter what it sends linearly, and it remembers nothing."""
    told = {**COMMON, "loss_bound_rule": rule}
    tables = {"algorithm": "fedavg", "fairness": {"weight": 0.1, **told}}
    if name != "fairness":
        tables = {"algorithm": name, "settings": told if name == "fedfdp" else {}}
    method = Plan.parse({**tables, "privacy": {"mode": "none"}}).method
    if method.facts.needs_own_noise:
        return
    terms = replace(terms_of(plan_of())["site-00"], sigmas=dict(method.facts.channels))
    state = method.init(torch.randn(6, dtype=torch.float64))
    told = method.task(state)
    task = Task("run", 1, name, told.vectors, told.numbers)
    sums = [
        {c: torch.randn(6 if c == "gradient" else 1).double() for c in terms.sigmas}
        for _ in range(3)
    ]
    mean = {c: torch.stack([each[c] for each in sums]).mean(0) for c in terms.sigmas}
    made = [method.local(task, encoding.NoisySumOracle(each, terms, 1.0), State()) for each in sums]
    one = method.local(task, encoding.NoisySumOracle(mean, terms, 1.0), State())
    assert not one.memory.vectors
    assert not one.memory.numbers
    for vector, found in one.vectors.items():
        mean = torch.stack([each.vectors[vector] for each in made]).mean(0)
        assert torch.allclose(found, mean, rtol=1e-12)
    for number in set(one.numbers) - set(method.facts.summed.public):
        each = [m.numbers[number] for m in made]
        assert one.numbers[number] == pytest.approx(sum(each) / 3, rel=1e-12)


def test_a_sum_answers_its_channels_and_nothing_else():
    oracle = encoding.NoisySumOracle(
        {"gradient": torch.zeros(3)}, terms_of(plan_of())["site-00"], 10.0
    )
    w = torch.zeros(3)
    for asked in (
        lambda: next(oracle.batches(2, "gradient")),
        lambda: next(oracle.batches(1, "gradient", "loss")),
        lambda: oracle.opening("gradient"),
        lambda: oracle.unprotected(w),
        lambda: next(oracle.batches(1, "gradient")).loss(w, 1.0),
        lambda: next(oracle.batches(1, "gradient")).below(w, 1.0),
        lambda: next(oracle.batches(1, "gradient")).difference(w, w, 1.0),
    ):
        with pytest.raises(PolicyRefused):
            asked()


def weights(result):
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


def test_a_run_shares_its_noise_and_says_both_epsilons(tmp_path):
    """Its noise is that of h shares where all K come: sqrt(K/h) of what is accounted for."""
    plan = plan_of(algorithm="ldp_fedsgd", settings={"learning_rate": 1e-9})
    result = simulate(plan, tmp_path / "run")
    said = json.loads((tmp_path / "run" / "privacy.json").read_text())
    own = said["sites"]["site-00"]
    assert own["sigmas"]["gradient"] * math.sqrt(3) == pytest.approx(own["sigma_joint"], rel=1e-12)
    assert own["honest"] == 3
    assert own["epsilon_alone"] > 1.5 * own["epsilon"]
    assert "3 other sites add their share" in " ".join(said["covers"])
    last = result.records[-1]
    assert max(last.epsilon.values()) <= 2.0
    assert max(last.epsilon_alone.values()) <= own["epsilon_alone"] * (1 + 1e-9)
    spent = receipt(tmp_path / "run" / "sites" / "site-00" / "ledger.jsonl")
    run = next(iter(spent["runs"].values()))
    assert run["honest"] == 3
    assert run["epsilon_spent"] <= run["epsilon_reserved"] == 2.0
    assert run["epsilon_alone_spent"] <= run["epsilon_alone_reserved"] == own["epsilon_alone"]
    assert run["epsilon_alone_spent"] > run["epsilon_spent"]
    assert spent["epsilon_alone_reserved"] == run["epsilon_alone_reserved"]
    page = write_report(tmp_path / "run").read_text()
    assert page.count("ε alone") >= 3
    assert "3 honest sites in each sum" in " ".join(page.split())
    path = tmp_path / "run" / "sites" / "site-00" / "ledger.jsonl"
    with pytest.raises(InputError, match="noise of 3 honest sites"):
        remaining(path, Budget(8.0, 1e-4), joint=True)
    left = remaining(path, Budget(8.0, 1e-4))
    assert left.condition == "the noise of 3 honest sites in each sum"
    assert left.budget.epsilon == 6.0
    # On the wire a coordinate of a masked reply has 16 bits in place of 64.
    whole = {**SUM, "privacy": {}, "compression": {"kind": "none"}}
    plain = simulate(Plan.parse(whole), tmp_path / "plain")
    assert result.summary["bytes_up"] < 0.6 * plain.summary["bytes_up"]


def test_threads_sum_the_same_shares(tmp_path):
    whole = simulate(plan_of(), tmp_path / "one")
    assert torch.equal(
        weights(whole), weights(simulate(plan_of(run={"workers": 2}), tmp_path / "two"))
    )


def test_alone_is_the_same_where_noise_is_a_sites_own():
    terms = terms_of(Plan.parse({**SUM, "privacy": {}}))["site-00"]
    for steps in (0, 1, 3, 4):
        history = terms.history(steps)
        assert terms.guarantee_after(history).alone == terms.guarantee_after(history).epsilon


def test_revoked_trust_counts_past_noise_as_own_only(tmp_path):
    """Earlier: ε = 2 with h = 3. A policy with a smaller h, or none, counts what needs nobody."""
    earlier = terms_of(plan_of())["site-00"]
    own = terms_of(Plan.parse({**SUM, "privacy": {"epsilon": 1.0}}))["site-00"]
    with Ledger(tmp_path / "ledger.jsonl", "a", hypothetical=True) as ledger:
        ledger.reserve("one", earlier.guarantee, earlier.history(earlier.steps))
        alone = earlier.guarantee.alone
        for honest, needed in ((0, alone), (2, alone), (3, 2.0)):
            for ever, allowed in ((needed + 1.01, True), (needed + 0.99, False)):
                more = {"honest": honest, "epsilon_alone_per_run": 99.0, "epsilon_alone_ever": 99.0}
                raw = {**GENEROUS, "epsilon_ever": ever, **(more if honest else {})}
                policy = Policy.parse(raw)
                if allowed:
                    policy.check_run("fedavg", own, *sum_reservations(ledger, "two", policy))
                else:
                    with pytest.raises(PolicyRefused, match="epsilon_ever"):
                        policy.check_run("fedavg", own, *sum_reservations(ledger, "two", policy))


def test_only_the_owner_can_allow_the_honesty_assumption(tmp_path):
    path = tmp_path / "policy.toml"
    plan = plan_of(policy=write_policy(path))
    alone = {"honest": 4, "epsilon_alone_per_run": 99.0, "epsilon_alone_ever": 99.0}
    for some, why in (
        ({}, "honest = 3"),
        (alone | {"honest": 2}, "site's policy has honest = 2"),
        (alone | {"epsilon_alone_per_run": 2.5}, "epsilon_alone_per_run = 2.5"),
        (alone | {"epsilon_alone_ever": 2.5}, "epsilon_alone_ever = 2.5"),
        ({"honest": 3}, "all three or none"),
    ):
        write_policy(path, smallest_sigma=0.1, **some)
        with pytest.raises((PolicyRefused, PlanError), match=why):
            simulate(plan, tmp_path / "refused")
    write_policy(path, smallest_sigma=0.1, **alone)
    assert simulate(plan, tmp_path / "run").summary["status"] == "finished"
