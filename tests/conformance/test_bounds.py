"""What honest replies can be, by `bounds`: they never leave it, and lies beyond it are told.

An honest reply leaves its bounds with a chance of less than 10^-12 (privacy.reach), whatever its
records are; so do all replies of this file together, with less than 10^-9.
"""

import dataclasses
import math

import pytest
import torch

from fedpact.messages import Reply, State, from_bytes, to_bytes
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
    terms = made.terms(site, method.channels, method.anchor)
    return method.bounds(task, dataclasses.replace(terms, steps=1000))


def rounds(made, method, count):
    """(task, reply) of every site and round, as an engine without checks has them."""
    state = method.init(made.w)
    made.steps_left = 999.0
    for number in range(1, count + 1):
        begun = made.begin(state, number) if method.controlled else state
        task = made.task(method, state, number)
        replies = list(made.replies(method, state, number))
        yield from ((task, reply) for reply in replies)
        state = from_bytes(to_bytes(method.update(begun, replies)))


def fault(made, method, task, reply):
    bounds = declared(made, method, task, reply.site)
    opened = method.opened(reply, task.vectors)
    return bounds.fault(opened.vectors, reply.numbers, task.vectors)


@pytest.mark.parametrize("extreme", EXTREMES)
def test_honest_replies_are_within_their_bounds(federation, case, extreme):
    """Three seeds; in two of them all records pull the same way."""
    if case.settings.plain_only:
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
        assert bounds.undeclared(reply.vectors, reply.numbers) == []
        assert set(bounds.numbers) == set(reply.numbers)
        assert all(case.asked()[name].holds(value) for name, value in task.numbers.items())
