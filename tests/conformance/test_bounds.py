"""What honest replies can be, by `bounds`: they never leave it, and lies beyond it are told.

An honest reply leaves its bounds with a chance of less than 10^-12 (privacy.reply_bounds),
whatever its records are; so do all replies of this file together, with less than 10^-9.
"""

import dataclasses
import math

import pytest
import torch
from tests.conformance.conftest import of

from fedpact.common.messages import from_bytes, to_bytes
from fedpact.plan import Plan
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.privacy.oracle import Records

EXTREMES = {
    "as they come": {},
    "much noise, twice as many as declared": {
        "sigma": 50.0,
        "rate": 0.05,
        "sizes": {"a": 6.0, "b": 15.0, "c": 3.5},
    },
    "hardly any noise, all records": {"sigma": 1e-3, "rate": 1.0},
    "tiny clip in float32": {"clip": 1e-6, "dtype": torch.float32},
}


def pulling(made):
    """Every record pulls the same way, as hard as its clip allows: sums are as long as they get."""
    for site, records in made.records.items():
        x = torch.full_like(records.x, 1e4)
        made.records[site] = Records(x, torch.zeros_like(records.y))
    return made


def declared(made, method, task, site):
    terms = made.terms(site, method.facts.channels, method.facts.opening)
    return method.bounds(task, dataclasses.replace(terms, steps=1000))


def rounds(made, method, count):
    """(task, reply) of every site and round, as an engine without checks has them."""
    state = method.init(made.w)
    made.steps_left = 999.0
    for number in range(1, count + 1):
        begun = made.begin(state, number) if method.facts.controlled else state
        task = made.task(method, state, number)
        replies = list(made.replies(method, state, number))
        yield from ((task, reply) for reply in replies)
        state = from_bytes(to_bytes(method.update(begun, replies)))


def fault(made, method, task, reply):
    bounds = declared(made, method, task, reply.site)
    opened = method.decode_reply(reply, task.vectors)
    return bounds.fault(opened.vectors, reply.numbers, task.vectors)


@pytest.mark.parametrize("extreme", EXTREMES)
def test_honest_replies_are_within_their_bounds(federation, case, extreme):
    """Three seeds; in two of them all records pull the same way."""
    if case.facts.plain_only:
        pytest.skip("it has no private form, and so no bounds")
    for seed in range(3):
        made = federation(private=True, seed=seed, **EXTREMES[extreme])
        if seed:
            pulling(made)
        for task, reply in rounds(made, case, 2):
            assert fault(made, case, task, reply) is None


def test_all_that_is_sent_is_declared(federation, case):
    """Fails for an algorithm that sends a vector or a number without a bound on it."""
    made = federation(private=True)
    for task, reply in rounds(made, case, 2):
        bounds = declared(made, case, task, reply.site)
        assert bounds.find_undeclared(reply.vectors, reply.numbers) == []
        assert set(bounds.numbers) == set(reply.numbers)
        assert all(
            case.facts.task_numbers[name].holds(value) for name, value in task.numbers.items()
        )


def lies(method, task, reply):
    """What one site may say in place of its reply: far vectors, and each number far out.

    -90 times a gradient difference may pass: its bound multiplies from step to step.
    """
    times = [] if "difference" in method.facts.channels else [-90]
    for name, vector in reply.vectors.items():
        told = task.vectors.get(name, torch.zeros_like(vector))
        multiples = [told + factor * (vector - told) for factor in times]
        for other in (*multiples, vector + 1e30, vector - 1e30):
            yield name, dataclasses.replace(reply, vectors={**reply.vectors, name: other})
    for name, value in reply.numbers.items():
        for other in (1e308, -1e308, math.nan, value + 1e20):
            yield name, dataclasses.replace(reply, numbers={**reply.numbers, name: other})


def test_lies_are_beyond_the_bounds(federation, case):
    """Whoever multiplies by -90, adds 1e30, or says any number that no records can give."""
    if case.facts.plain_only:
        pytest.skip("it has no private form, and so no bounds")
    made = pulling(federation(private=True))
    for task, reply in rounds(made, case, 2):
        for name, lie in lies(case, task, reply):
            assert fault(made, case, task, lie), (name, lie)


def test_public_numbers_are_those_of_the_terms(federation):
    """A batch of 0, or of 10^12, a variance of -1 or of 0: one site would choose its own weight."""
    method = of({"algorithm": "ldp_fedsgd", "settings": {"aggregation": "least_noise"}})
    made = federation(private=True)
    for task, reply in rounds(made, method, 1):
        for name, values in {
            "batch_size": (0.0, 1e12, -1.0, 1.01 * reply.numbers["batch_size"]),
            "noise_variance": (-1.0, 0.0, 1e12, 0.99 * reply.numbers["noise_variance"]),
        }.items():
            for value in values:
                lie = dataclasses.replace(reply, numbers={**reply.numbers, name: value})
                assert name in fault(made, method, task, lie)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "qffl", "fedfdp"])
def test_a_bound_is_near_to_what_honest_records_reach(federation, name):
    """All records pull one way, without noise: τ η C, and no bound is more than 2.1 times that.

    Twice, for sites that hold more than they declared.
    """
    method = of({"algorithm": name, "settings": {"local_steps": 3, "learning_rate": 0.5}})
    made = pulling(federation(private=True, rate=1.0, sigma=1e-9, clip=0.25))
    for task, reply in rounds(made, method, 1):
        far = float((reply.vectors["w"] - task.vectors["w"]).norm())
        assert far == pytest.approx(3 * 0.5 * 0.25, rel=1e-2)
        assert declared(made, method, task, reply.site).longest("w", task.vectors) < 2.1 * far


@pytest.mark.parametrize("kind", ["float16", "int8", "topk", "grid"])
@pytest.mark.parametrize("name", ["fedavg", "ldp_fedsgd", "scaffold"])
def test_compressed_replies_too(federation, kind, name):
    kept = {"keep": 0.3} if kind == "topk" else {}
    tables = {"algorithm": name, "compression": {"kind": kind, **kept}}
    # A plain run has no noise to round to.
    method = Plan.parse(tables).method if kind == "grid" else of(tables)
    for seed in range(3):
        made = federation(private=True, seed=seed, dtype=torch.float32)
        if seed:
            pulling(made)
        # Enough rounds for what topk leaves out to add up.
        for task, reply in rounds(made, method, 12):
            assert fault(made, method, task, reply) is None
            opened = method.decode_reply(reply, task.vectors)
            for lie in (1e30, -1e30):
                vectors = {n: v + lie for n, v in opened.vectors.items()}
                bounds = declared(made, method, task, reply.site)
                assert bounds.fault(vectors, reply.numbers, task.vectors)
            for scale in reply.numbers.keys() & {"compressed/w", "compressed/gradient"}:
                for value in (1e6, -1e-3):
                    far = dataclasses.replace(reply, numbers={**reply.numbers, scale: value})
                    assert fault(made, method, task, far)


@pytest.mark.parametrize("name", ["fedavg", "ldp_fedsgd", "scaffold"])
def test_batch_clipping_too(federation, name):
    """The mean is clipped, so how many records are in a batch makes it no longer."""
    method = of({"algorithm": name})
    for seed in range(3):
        made = federation(private=True, seed=seed, sigma=0.5)
        if seed:
            pulling(made)
        made.kernel, per_sample = BatchClippedKernel(made.model, made.loss), made.terms
        made.terms = lambda *about, of=per_sample: dataclasses.replace(
            of(*about), mechanism="batch_clipped"
        )
        for task, reply in rounds(made, method, 2):
            assert fault(made, method, task, reply) is None
            assert all(fault(made, method, task, lie) for _, lie in lies(method, task, reply))


def test_norms_and_batches_keep_the_bounds_that_the_proof_names():
    """P(‖z‖ > sqrt(d) + t) <= exp(-t²/2), and Bernstein's bound, at a t that samples can see.

    The bounds are several times the truth, so 20,000 samples do not pass them by chance.
    """
    generator, t = torch.Generator().manual_seed(0), 2.0
    for d in (1, 3, 650):
        norms = torch.randn(20_000, d, generator=generator).norm(dim=1)
        assert float((norms > math.sqrt(d) + t).double().mean()) <= math.exp(-(t**2) / 2)
    for expected, q in ((1.0, 0.01), (50.0, 0.1), (400.0, 0.5)):
        law = torch.distributions.Binomial(expected / q, torch.tensor(q))
        torch.manual_seed(0)
        drawn = law.sample((20_000,))
        tail = t**2 / 2
        most = expected + tail / 3 + math.sqrt(tail**2 / 9 + 2 * tail * expected)
        assert float((drawn > most).double().mean()) <= math.exp(-tail)
