"""What honest replies can be (privacy.reply_bounds): they never leave it, lies beyond it are told.

An honest reply leaves its bounds with a chance of less than 10^-12, whatever its records are.
"""

import dataclasses
import math

import pytest
import torch
from tests.conformance.conftest import of

from fedpact.common.messages import from_bytes, to_bytes
from fedpact.deployment.admission import Admission
from fedpact.plan import Plan
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.privacy.oracle import Records
from fedpact.privacy.reply_bounds import longest_gradient

EXTREMES = {
    "much noise, twice as many as declared": {
        "sigma": 50.0,
        "rate": 0.05,
        "sizes": {"a": 6.0, "b": 15.0, "c": 3.5},
    },
    "hardly any noise, all records, a tiny clip in float32": {
        "sigma": 1e-3,
        "rate": 1.0,
        "clip": 1e-6,
        "dtype": torch.float32,
    },
}


def pulling(made):
    """Every record pulls the same way, as hard as its clip allows: sums are as long as they get."""
    for site, records in made.records.items():
        x = torch.full_like(records.x, 1e4)
        made.records[site] = Records(x, torch.zeros_like(records.y))
    return made


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
    terms = made.terms(reply.site, method.facts.channels, method.facts.opening)
    # As many as the rounds of this file make.
    terms = dataclasses.replace(terms, steps=1000)
    admission = Admission(method, {reply.site: terms}, None)
    opened = method.decode_reply(reply, task.vectors)
    return admission.far_off(reply.site, task, opened.vectors, reply.numbers)


def test_honest_replies_are_within_their_bounds(federation, case):
    if case.facts.plain_only:
        pytest.skip("it has no private form, and so no bounds")
    for extreme, setting in EXTREMES.items():
        made = pulling(federation(private=True, seed=1, **setting))
        for task, reply in rounds(made, case, 2):
            assert fault(made, case, task, reply) is None, extreme
            for name, value in task.numbers.items():
                assert case.facts.task_numbers[name].holds(value), extreme


def lies(method, task, reply):
    """What one site may say in place of its reply: vectors and numbers of overflowing size.

    Gradient differences have no bound, and neither have codes before they are decoded.
    """
    if "difference" not in method.facts.channels and not method.facts.coded:
        for name, vector in reply.vectors.items():
            if vector.is_floating_point():
                for other in (vector + 1e30, vector - 1e30):
                    yield name, dataclasses.replace(reply, vectors={**reply.vectors, name: other})
    for name, value in reply.numbers.items():
        for other in (1e308, -1e308, math.nan, value + 1e20):
            yield name, dataclasses.replace(reply, numbers={**reply.numbers, name: other})


def test_false_replies_are_beyond_the_bounds(federation, case):
    """Whoever adds 1e30, or says a number that would overflow."""
    if case.facts.plain_only:
        pytest.skip("it has no private form, and so no bounds")
    made = pulling(federation(private=True))
    for task, reply in rounds(made, case, 1):
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


@pytest.mark.parametrize("kind", ["float16", "int8", "topk", "grid"])
def test_compressed_replies_too(federation, kind):
    kept = {"keep": 0.3} if kind == "topk" else {}
    tables = {"algorithm": "fedavg", "compression": {"kind": kind, **kept}}
    # A plain run has no noise to round to.
    method = Plan.parse(tables).method if kind == "grid" else of(tables)
    made = pulling(federation(private=True, dtype=torch.float32))
    # Enough rounds for what topk leaves out to add up.
    for task, reply in rounds(made, method, 12):
        assert fault(made, method, task, reply) is None
        for name in reply.numbers.keys() & {"compressed/w"}:
            far = dataclasses.replace(reply, numbers={**reply.numbers, name: 1e12})
            assert fault(made, method, task, far)


def test_batch_clipping_too(federation):
    """The mean is clipped, so how many records are in a batch makes it no longer."""
    method, made = of({"algorithm": "fedavg"}), pulling(federation(private=True, sigma=0.5))
    made.kernel, per_sample = BatchClippedKernel(made.model, made.loss), made.terms
    made.terms = lambda *about: dataclasses.replace(per_sample(*about), mechanism="batch_clipped")
    for task, reply in rounds(made, method, 2):
        assert fault(made, method, task, reply) is None
        assert all(fault(made, method, task, lie) for _, lie in lies(method, task, reply))


def test_no_gradient_is_longer_than_the_server_expects(federation):
    """With hardly any noise, all records pulling one way: G is reached, but for twice the size."""
    method = of({"algorithm": "ldp_fedsgd"})
    made = pulling(federation(private=True, rate=1.0, sigma=1e-9, clip=0.25))
    for _, reply in rounds(made, method, 1):
        terms = made.terms(reply.site, method.facts.channels, method.facts.opening)
        most = longest_gradient(terms, len(made.w))
        assert most / 2.1 < float(reply.vectors["gradient"].norm()) <= most
