"""Compressed replies: how far off, unbiased where claimed, nothing lost over rounds, no privacy."""

import math
from dataclasses import replace

import pytest
import torch
from tests.algorithms.made_up import SMALL
from torch.testing import assert_close

from fedpact.algorithms import BaseSettings, MethodFacts
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.compression import Compressed, CompressionSettings
from fedpact.common.errors import InputError
from fedpact.common.messages import Local, Reply, State, Task, from_bytes, to_bytes
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.plan import Plan
from fedpact.privacy.ledger.receipt import receipt
from fedpact.simulation.simulate import simulate

D = 1000


class Says(Method):
    """A method whose reply and memory are given."""

    def __init__(self, vectors, numbers=None, memory=None):
        self.name, self.settings, self.facts = "says", BaseSettings(), MethodFacts()
        self._local = Local(vectors, numbers or {}, memory or State())

    def local(self, task, oracle, memory):
        self.read_memory = memory
        return self._local

    def task(self, state):
        return state

    def update(self, state, replies):
        self.got = list(replies)
        return state


def vector(name, size=D, dtype=torch.float32):
    return torch.randn(
        size, generator=seeded_generator("compressed", name), dtype=torch.float64
    ).to(dtype)


def task(number=1, **vectors):
    return Task("run", number, "says", vectors, {})


def sent(method, to, memory=None):
    """What a site sends, over the wire, and its next memory."""
    local = method.local(to, None, memory or State())
    reply = Reply("run", to.round, "a", 1.0, local.vectors, local.numbers)
    return from_bytes(to_bytes(reply)), local.memory


def there_and_back(x, kind, to=None, keep=0.1):
    to = to or task(w=torch.zeros_like(x))
    method = Compressed(Says({"w": x}), CompressionSettings(kind=kind, keep=keep))
    reply, _ = sent(method, to)
    return method.decode_reply(reply, to.vectors).vectors["w"], reply


def test_float16_is_off_by_at_most_its_rounding():
    for scale in (1e-30, 1e-5, 1.0, 1e30):
        x = vector("x") * scale
        got, _ = there_and_back(x, "float16")
        most = float(x.abs().max())
        # 11 bits of each coordinate; near 0 the spacing of float16 below 2^-14, 2^-24 of the scale,
        # of which half; float32 of the result adds 2^-24.
        allowed = x.double().abs() * (2**-11 + 2**-24) + 2 * most * 2**-25
        assert bool(((got.double() - x.double()).abs() <= allowed).all())


def test_int8_is_off_by_less_than_a_level_and_unbiased():
    """E[s floor(x/s + u)] = x. The mean of n draws of each of D coordinates has standard deviation
    at most s/2/sqrt(n); six of them for D coordinates fails with probability below 2e-6."""
    x, draws = vector("x"), 200
    level = float(x.abs().max()) / 127
    total = torch.zeros(D, dtype=torch.float64)
    for number in range(draws):
        got, _ = there_and_back(x, "int8", task(number, w=torch.zeros(D)))
        assert float((got - x).abs().max()) < level * (1 + 1e-5)
        total += got.double()
    bias = (total / draws - x.double()).abs().max()
    assert float(bias) < 6 * level / 2 / math.sqrt(draws)
    # Rounding to the nearest would be off by up to half a level, and always the same way.
    nearest = (x.double() / level).round() * level
    assert float((nearest - x.double()).abs().max()) > 6 * level / 2 / math.sqrt(draws)


def test_int8_rounding_is_repeatable_and_independent():
    x = vector("x")
    first, again = there_and_back(x, "int8")[0], there_and_back(x, "int8")[0]
    assert torch.equal(first, again)
    other, _ = there_and_back(x, "int8", task(2, w=torch.zeros(D)))
    assert not torch.equal(first, other)


def test_topk_sends_the_largest_as_they_are_and_nothing_else():
    x = vector("x")
    got, reply = there_and_back(x, "topk", keep=0.05)
    kept = got != 0
    assert int(kept.sum()) == 50
    assert torch.equal(got[kept], x[kept])
    assert float(x[~kept].abs().max()) <= float(x[kept].abs().min())
    assert reply.vectors["w"].shape == (50,)


def test_error_feedback_loses_nothing_over_rounds():
    """Σ sent + what is kept = Σ x, exactly up to the rounding of float64."""
    whole, arrived, memory = torch.zeros(D).double(), torch.zeros(D).double(), State()
    for number in range(1, 30):
        x = vector(number, dtype=torch.float64)
        method = Compressed(Says({"w": x}), CompressionSettings(kind="topk", keep=0.02))
        to = task(number, w=torch.zeros(D).double())
        reply, memory = sent(method, to, memory)
        whole += x
        arrived += method.decode_reply(reply, to.vectors).vectors["w"]
    assert_close(arrived + memory.vectors["compressed/w"], whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["float16", "int8", "topk"])
def test_known_values_are_not_sent_back(kind):
    """A reply that only repeats the task is restored exactly, whatever its size."""
    w = 1e6 * vector("w")
    got, reply = there_and_back(w, kind, task(w=w))
    assert torch.equal(got, w)
    assert float(reply.vectors["w"].double().abs().max()) == 0


@pytest.mark.parametrize("kind", ["float16", "int8", "topk"])
def test_an_unknown_vector_and_a_diverged_one(kind):
    """It is as long as w and sent from 0, whatever w is; keep = 1 leaves nothing out."""
    g, w = vector("g"), vector("w")
    settings = CompressionSettings(kind=kind, keep=1.0)
    method = Compressed(Says({"g": g}, {"loss": 2.0}), settings)
    reply, _ = sent(method, task(w=w))
    opened = method.decode_reply(reply, {"w": w})
    assert opened.numbers == {"loss": 2.0}
    assert_close(opened.vectors["g"], g, rtol=0, atol=float(g.abs().max()) / 100)
    bad = torch.full((D,), math.inf)
    got = there_and_back(bad, kind)[0]
    assert bool(got.isinf().any() if kind == "topk" else got.isnan().all())


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_an_unknown_vector_may_be_shorter_than_the_model(kind):
    method = Compressed(Says({"g": vector("g", 3)}), CompressionSettings(kind=kind))
    reply, _ = sent(method, task(w=vector("w")))
    got = method.decode_reply(reply, {"w": vector("w")}).vectors["g"]
    assert_close(got, vector("g", 3), rtol=0, atol=0.05)


def test_the_inner_method_sees_its_own_memory_and_whole_replies():
    inner = Says({"w": vector("x")}, memory=State(numbers={"own": 3.0}))
    method = Compressed(inner, CompressionSettings(kind="topk"))
    to = task(w=torch.zeros(D))
    reply, memory = sent(method, to)
    assert memory.numbers == {"own": 3.0}
    sent(method, to, memory)
    assert (inner.read_memory.vectors, inner.read_memory.numbers) == ({}, {"own": 3.0})
    method.update(State(to.vectors), [reply])
    assert torch.equal(
        inner.got[0].vectors["w"], method.decode_reply(reply, to.vectors).vectors["w"]
    )


def test_bytes_on_the_wire():
    """2, 1 and 8 k / d bytes a coordinate, beside a head of a few hundred."""
    x = vector("x", 100_000)
    for kind, expected in (("float16", 200_000), ("int8", 100_000), ("topk", 80_000)):
        length = len(to_bytes(there_and_back(x, kind)[1]))
        assert expected < length < expected + 1000


@pytest.mark.parametrize(
    "change",
    [
        {"compressed/w": torch.tensor([0, 1000], dtype=torch.int32)},
        {"compressed/w": torch.tensor([-1, 3], dtype=torch.int32)},
        {"compressed/w": torch.tensor([0], dtype=torch.int32)},
        {"compressed/w": torch.tensor([0.0, 1.0])},
    ],
)
def test_invalid_positions_are_refused(change):
    method = Compressed(Says({"w": vector("x")}), CompressionSettings(kind="topk", keep=0.002))
    reply, _ = sent(method, task(w=torch.zeros(D)))
    with pytest.raises(InputError, match="places"):
        method.decode_reply(
            replace(reply, vectors={**reply.vectors, **change}), {"w": torch.zeros(D)}
        )


def test_a_run_spends_the_same_privacy_and_fewer_bytes(tmp_path):
    tables = {**SMALL, "rounds": 2, "algorithm": "scaffold"}
    plain, *others = (
        simulate(Plan.parse({**tables, "compression": {"kind": kind}}), tmp_path / kind)
        for kind in ("none", "float16", "int8", "topk")
    )
    for smaller in others:
        assert smaller.summary["bytes_up"] < 0.75 * plain.summary["bytes_up"]
        assert smaller.summary["epsilon"] == plain.summary["epsilon"]
        for path in plain.folder.rglob("ledger.jsonl"):
            other = smaller.folder / path.relative_to(plain.folder)
            events = [next(iter(receipt(p)["runs"].values()))["events"] for p in (path, other)]
            assert events[0] == events[1]


# How far off: with nothing left out, rounded to 16 bits, to 8.
KINDS = {"topk": 1e-5, "float16": 0.01, "int8": 0.1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("scaffold", "float16"), ("ditto", "int8"), ("ldp_fedsgd", "topk")],
)
def test_it_combines_with_algorithms_of_each_form(tmp_path, name, kind):
    """Plain runs are nearly those without it: replies of a model and more, of own ones, of none."""
    tables = {**SMALL, "rounds": 2, "algorithm": name, "privacy": {"mode": "none"}}
    models = {}
    for used in ("none", kind):
        compression = {"kind": used} | ({"keep": 1.0} if used == "topk" else {})
        plan = Plan.parse({**tables, "compression": compression})
        result = simulate(plan, tmp_path / used)
        models[used] = torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])
        assert result.summary["status"] == "finished"
    off = float((models[kind] - models["none"]).norm() / models["none"].norm())
    assert off < KINDS[kind]
