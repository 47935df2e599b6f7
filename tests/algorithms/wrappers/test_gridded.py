"""Replies and models as whole numbers: exact where they can be, a half per cent of noise elsewhere.

References: the noise that went in, weights by hand, and runs that were never cut short.
"""

import dataclasses
import json
import math

import pytest
import torch
from scipy.stats import chi2
from tests.algorithms.made_up import SMALL
from torch.testing import assert_close

from fedpact.algorithms.wrappers import integers
from fedpact.algorithms.wrappers.compression import shortest, whole
from fedpact.algorithms.wrappers.integers import weights
from fedpact.common.errors import InputError, PlanError
from fedpact.common.messages import Reply, State, Task, encoded_length, from_bytes, to_bytes
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import SeededDraws, seeded_generator
from fedpact.common.run_folder import Checkpoint
from fedpact.plan import Plan
from fedpact.privacy.accounting.shared_noise import FINE_UNITS, SHARE_DEVIATION
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import check_grid
from fedpact.rounds import Rounds

GRID = {"compression": {"kind": "grid"}}
D = 20_000


def plan_of(**tables):
    return Plan.parse({**SMALL, **GRID, **tables})


class Sums:
    """A kernel whose sums are given: of a batch nobody is in."""

    def __init__(self, total):
        self.total = total
        self.model = self

    def load(self, w):
        pass

    def seed(self, seed):
        pass

    def clipped_sum(self, *_):
        return self.total.clone()


def oracle_of(terms, total, draws, charge=lambda *_: None):
    records = Records(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    return PrivateOracle(records, Sums(total), terms, draws, charge)


def terms_of(plan, size=400.0):
    return plan.terms({"a": size})["a"]


def released(plan, total, draws):
    terms = terms_of(plan)
    oracle = oracle_of(terms, total, draws)
    batch = next(oracle.batches(1, "gradient"))
    return batch.gradient(torch.zeros_like(total)) * terms.batch_size, terms


@pytest.mark.parametrize("draws", [SeededDraws(1, "a", 1), SecureDraws()])
@pytest.mark.parametrize(("steps", "units"), [(1, SHARE_DEVIATION), (3, FINE_UNITS)])
def test_oracle_releases_integers_with_both_variances(draws, steps, units):
    """Σ (e - a)²/(ν² + 1/12) is χ²(d) to 1e-3 of its deviation; each bound fails once in 10^7.

    Half of the noise's deviation, or 3 % less or more, is found.
    """
    plan = plan_of(settings={"local_steps": steps})
    d = 10 * D
    total = torch.linspace(-3, 3, d, dtype=torch.float64)
    sums, terms = released(plan, total, draws)
    assert terms.grid == units
    unit = terms.sigmas["gradient"] * terms.clip / units
    assert_close(sums / unit, (sums / unit).round(), rtol=0, atol=1e-6)
    square = float((sums - total).div(unit).square().sum())
    least, most = (chi2.ppf(p, d) for p in (1e-7, 1 - 1e-7))
    assert least < square / (units**2 + 1 / 12) < most
    for wrong in (0.5, 0.97, 1.03):
        assert not least < square / (units**2 + 1 / 12) / wrong**2 < most


def test_floats_of_the_sum_do_not_show():
    """Sums that differ in their last bits have the same release, as the grid is the defence."""
    plan = plan_of()
    total = torch.linspace(-3, 3, 200, dtype=torch.float64)
    one, _ = released(plan, total, SeededDraws(1, "a", 1))
    other, _ = released(plan, total * (1 + 1e-15), SeededDraws(1, "a", 1))
    assert torch.equal(one, other)


def reply_to(plan, task, total, seed=1):
    """What a site sends on fixed sums, over the wire."""
    oracle = oracle_of(terms_of(plan), total, SeededDraws(seed, "a", task.round))
    local = plan.method.local(task, oracle, State())
    reply = Reply("run", task.round, "a", 1.0, local.vectors, local.numbers)
    return from_bytes(to_bytes(reply))


def task(number=1, dtype=torch.float32, **numbers):
    w = torch.randn(D, generator=seeded_generator("gridded", number), dtype=torch.float64).to(dtype)
    return Task("run", number, "fedavg", {"w": w, "c": torch.zeros_like(w)}, numbers)


@pytest.mark.parametrize("name", ["fedavg", "ldp_fedsgd"])
def test_one_release_is_sent_as_the_oracle_rounded_it(name):
    plan = plan_of(algorithm=name)
    total = torch.linspace(-0.1, 0.1, D)
    reply, terms = reply_to(plan, task(), total), terms_of(plan)
    (block,) = reply.vectors.values()
    codes, _ = integers.unpack_codes(block, D)
    unit = terms.sigmas["gradient"] * terms.clip / SHARE_DEVIATION
    drawn = SeededDraws(1, "a", 1).share(total, unit, SHARE_DEVIATION, 0, "gradient")
    sign = -1 if name == "fedavg" else 1
    assert torch.equal(sign * codes, drawn)
    assert 8 * encoded_length(reply) / D <= 4.4


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {"local_steps": 5}),
        ("fedprox", {"local_steps": 5, "proximal": 0.5}),
        ("scaffold", {"local_steps": 5}),
        ("feddyn", {"local_steps": 5}),
        ("qffl", {"local_steps": 5}),
        ("fedfdp", {"local_steps": 5}),
    ],
)
def test_other_replies_have_at_most_the_noise_of_6_in_1000_more(name, settings):
    """With gradients that are 0 but for noise, a reply's variance is s² 16 (1 + 1/192 + 1/3072).

    χ² over D coordinates, each bound fails once in 10^7; a step that is 5 % off is found.
    """
    plan = plan_of(algorithm=name, settings=settings)
    told = dataclasses.replace(task(), vectors=dict.fromkeys(("w", "c"), torch.zeros(D)))
    kernel = Sums(torch.zeros(D))
    kernel.losses = lambda x, y: torch.zeros(0)
    terms = terms_of(plan)
    oracle = oracle_of(terms, kernel.total, SeededDraws(1, "a", 1))
    oracle._kernel = kernel
    local = plan.method.local(told, oracle, State())
    codes, step = integers.unpack_codes(local.vectors["w"], D)
    (c, _) = weights(plan.method, told)["w"]
    assert step == pytest.approx(c * math.sqrt(terms.noise_variance) / 4)
    square = float((codes.double() * step).square().sum()) / (c * c * terms.noise_variance)
    more = 1 + 1 / (12 * 16) + 1 / (12 * FINE_UNITS**2)
    assert more < 1.006
    least, most = (chi2.ppf(p, D) for p in (1e-7, 1 - 1e-7))
    assert least < square / more < most
    assert not least < square / more / 1.05**2 < most
    assert 8 * len(local.vectors["w"]) / D <= 4.4


def test_weights_are_the_papers():
    """By hand: each gradient enters -η (fedavg), -η (1 - ημ)^j (fedprox), 1 (ldp_fedsgd)."""
    rate, steps = 0.25, 4
    given = {"learning_rate": rate, "local_steps": steps}

    def found(name, key="w", **settings):
        return weights(plan_of(algorithm=name, settings=settings).method, task())[key]

    assert found("fedavg", **given) == pytest.approx((rate * 2, 0))
    assert found("scaffold", **given) == pytest.approx((rate * 2, 0))
    a = 1 - rate * 0.4
    prox = rate * math.sqrt(sum(a ** (2 * j) for j in range(steps)))
    assert found("fedprox", proximal=0.4, **given) == pytest.approx((prox, 0))
    # u = w - h/α with h = -α (w - w̄): twice the way from w̄.
    assert found("feddyn", proximal=0.4, **given) == pytest.approx((2 * prox, 0))
    assert found("ldp_fedsgd", "gradient") == (1, 0)
    # The opening's alone, -η b at w¹, through b = 1/(1 + ημ) and steps along the same v.
    batches, opening = found("fedproxvr", learning_rate=rate, proximal=0.0, local_steps=3)
    assert (batches, opening) == pytest.approx((0, 4 * rate))


def test_tau_of_the_task_counts():
    method = plan_of(settings={"local_steps": 2}).method
    (c, _) = weights(method, task(local_steps=9))["w"]
    assert c == pytest.approx(0.5 * 3)


def test_only_a_reply_that_is_one_release_has_the_coarser_grid():
    several = {"control": {"kind": "ali", "iterations": 6}}
    for tables in (several, {"algorithm": "feddyn", "settings": {"local_steps": 1}}):
        assert plan_of(**tables).method.facts.units == FINE_UNITS
    for tables in ({}, {"algorithm": "ldp_fedsgd"}):
        assert plan_of(**tables).method.facts.units == SHARE_DEVIATION
    assert plan_of(secure_aggregation={"threshold": 2}).method.facts.units == 0


def test_privacy_is_what_it_was():
    """Rounding is post-processing: σ, events, ε and δ are those of a run without a grid."""
    for tables in ({}, {"algorithm": "fedfdp"}, {"algorithm": "fedproxvr"}):
        none, grid = (
            terms_of(plan_of(**tables, compression={"kind": kind})) for kind in ("none", "grid")
        )
        assert dataclasses.replace(grid, grid=0.0) == none
        assert (grid.delta, grid.history(9)) == (none.delta, none.history(9))


def test_the_release_is_a_function_of_the_gaussian_one():
    """For the same draws: floor(x + 1/2) of what a run without a grid would have released."""
    total = torch.linspace(-3, 3, D, dtype=torch.float64)
    rounded, terms = released(plan_of(), total, SeededDraws(1, "a", 1))
    exact, _ = released(plan_of(compression={"kind": "none"}), total, SeededDraws(1, "a", 1))
    unit = terms.sigmas["gradient"] * terms.clip / SHARE_DEVIATION
    # But for halves, where the two ways to add differ in the last bit: none in 20,000.
    assert_close(rounded / unit, (exact / unit + 0.5).floor(), rtol=0, atol=1e-6)


def test_a_sum_that_floating_point_would_not_hold_is_refused():
    terms = terms_of(plan_of())
    check_grid([terms])
    crowded = dataclasses.replace(terms, size=1e9, sigmas={"gradient": 1e-3})
    check_grid([dataclasses.replace(crowded, grid=0.0)])
    with pytest.raises(PlanError, match="units of its grid"):
        check_grid([crowded])
    for wrong in ({"grid": 1.0}, {"grid": math.nan}, {"grid": -4.0}, {"honest": 2}):
        with pytest.raises(InputError, match="grid is"):
            dataclasses.replace(terms, **wrong)


def test_it_is_the_default_of_private_runs_and_not_a_choice(tmp_path):
    """A stored plan says what was done, and is no refusal of what it may be changed to."""
    plan = Plan.read(None)
    assert plan.compression.kind == "grid"
    assert "compression.kind" in plan.document()["defaults"]
    stored = tmp_path / "plan.json"
    stored.write_text(json.dumps(plan.document()))
    assert Plan.read(stored).compression.kind == "grid"
    plain = Plan.read(stored, ["privacy.mode=none"])
    assert plain.compression.kind == "none"
    stored.write_text(json.dumps(plain.document()))
    assert Plan.read(stored, ["privacy.mode=per_sample"]).compression.kind == "grid"
    given = Plan.read(None, ["compression.kind=none"])
    assert given.compression.kind == "none"
    assert "compression.kind" not in given.document()["defaults"]


def test_a_plain_run_is_refused():
    with pytest.raises(PlanError, match="adds none"):
        plan_of(privacy={"mode": "none"})
    raw = {"kind": "ali", "iterations": 6, "estimator": "raw"}
    with pytest.raises(PlanError, match="adds none"):
        plan_of(control=raw)


class Recorded:
    """A transport whose sites take what is sent, short or whole, and answer by noise.

    absent: round -> sites that do not answer.
    """

    sites = ("a", "b", "c")
    traffic = None

    def __init__(self, plan, absent):
        self.plan, self.absent = plan, absent
        start = plan.method.task(plan.method.init(torch.zeros(D))).vectors
        self.told, self.blocks = {site: {0: start} for site in self.sites}, []

    def exchange(self, tasks):
        for site, full in tasks.items():
            if site in self.absent.get(full.round, ()):
                continue
            block = to_bytes(shortest(full))
            assert len(block) == full.wire_bytes
            self.blocks.append((full.round, site, len(block)))
            got = whole(from_bytes(block), self.told[site].get(full.round - 1))
            assert got.digest == full.digest
            self.told[site] = {full.round: got.vectors}
            oracle = oracle_of(
                terms_of(self.plan), torch.zeros(D), SeededDraws(1, site, full.round)
            )
            local = self.plan.method.local(got, oracle, State())
            yield Reply("run", full.round, site, 1.0, local.vectors, local.numbers)


def rounds_of(plan, transport, at):
    return list(Rounds(plan, "run", transport, lambda at, record: record, in_process=True)(at))


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize("server", ["none", "momentum", "adam"])
def test_the_server_sends_the_model_bit_for_bit(name, server):
    """Over drop-outs; down as few bits as up for whoever was there, 32 for whoever was not.

    Before the first round nobody is sent any.
    """
    plan = plan_of(
        algorithm=name, rounds=6, server={"optimiser": server}, settings={"local_steps": 2}
    )
    start = Checkpoint(plan.method.init(torch.zeros(D)), 0, {})
    absent = {2: {"b"}, 4: {"a", "c"}}
    straight = Recorded(plan, absent)
    outcomes = rounds_of(plan, straight, start)
    vectors = 2 if name == "scaffold" else 1
    for number, site, length in straight.blocks:
        bits = 8 * length / D / vectors
        most = 3.4 if vectors == 1 else 4.8
        if number == 1:
            # Every site has the plan's start.
            assert length < 500
        else:
            is_new = site in absent.get(number - 1, ())
            assert bits > 32 if is_new else bits < most, (number, site, bits)
    # From any round on, by a server that has only what it wrote down, and by sites as they were.
    at = Checkpoint.from_bytes(b"".join(outcomes[2][0].to_parts()))
    again = Recorded(plan, absent)
    again.told = {site: {at.round: plan.method.task(outcomes[1][0].state).vectors} for site in "ac"}
    again.told["b"] = again.told["a"]
    resumed = rounds_of(plan, again, at)
    for (one, first), (other, second) in zip(outcomes[3:], resumed, strict=True):
        assert torch.equal(one.state.vectors["w"], other.state.vectors["w"])
        assert (first.bytes_down, first.bytes_up) == (second.bytes_down, second.bytes_up)


@pytest.mark.parametrize("missing", [0, 2])
def test_returning_sites_model_stays_within_the_byte_budget(missing):
    """Whatever the budget: the mean of rounds without a model in full says nothing of one with."""
    absent = {number: {"a", "b"} for number in ([5] if missing else [])}
    start = Checkpoint(plan_of().method.init(torch.zeros(D)), 0, {})
    free = [r for _, r in rounds_of(plan_of(rounds=8), Recorded(plan_of(), absent), start)]
    sent = [record.bytes_down + record.bytes_up for record in free]
    # Before anything was sent a reply may be half as long as the model.
    least = len(Recorded.sites) * (2 * D + 2000)
    assert least < 3 * sent[1]
    for allowed in range(least, sum(sent), 3 * sent[-1] // 2):
        plan = plan_of(rounds=8, budget={"bytes": allowed})
        found = [r for _, r in rounds_of(plan, Recorded(plan, absent), start)]
        assert found
        assert sum(r.bytes_down + r.bytes_up for r in found) <= allowed


def test_omissions_by_the_server_do_not_accumulate():
    """After T rounds the model is the sum of all changes, but for the last rounding: r/2 at most.

    Without what is kept it would be off by sqrt(T) r/sqrt(12) in the mean, 2.9 r for T = 100.
    """
    plan = plan_of()
    state, total = State({"w": torch.zeros(D)}), torch.zeros(D, dtype=torch.float64)
    for number in range(100):
        x = torch.randn(D, generator=seeded_generator("down", number), dtype=torch.float64)
        codes, step = integers.quantise(x, 1 / SHARE_DEVIATION)
        reply = Reply("run", number, "a", 1.0, {"w": integers.pack_codes(codes, step)}, {})
        total += codes * step
        state = plan.method.update(state, [reply])
    block = plan.method.short(state)["grid/w"]
    _, r = integers.unpack_codes(block, D)
    assert 0.4 < r < 0.6
    assert float((state.vectors["w"].double() - total).abs().max()) <= r / 2 * (1 + 1e-3)
    assert 8 * len(block) / D < 3.2


@pytest.mark.parametrize("change", ["unknown", "torn", "twice"])
def test_changes_that_fit_no_model_are_refused(change):
    block = integers.pack_codes(torch.ones(5, dtype=torch.int64), 1.0)
    vectors = {
        "unknown": {"grid/v": block},
        "torn": {"grid/w": block[:-2]},
        "twice": {"grid/w": block, "w": torch.zeros(5)},
    }[change]
    with pytest.raises(InputError):
        whole(Task("run", 2, "fedavg", vectors, {}), {"w": torch.zeros(5)})
