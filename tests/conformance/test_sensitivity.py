"""Changing one record moves each release by at most its sensitivity: the ground of every ε.

Everything is compared before noise (σ = 0) and at q = 1, where a batch is all the records: on one
batch the noise covers the difference, and the sampling only takes some of the differences away.
Releases are compared at equal queries, as adaptive composition asks. Nothing here is random but
the records, so no test can fail by chance.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpact.common.messages import Task
from fedpact.privacy.oracle import Fair, PrivateOracle, Records, Uniform

CLIP, BOUND = 0.1, 2.5
# The largest change of a sum, by channel. A new channel of the oracle comes here with its own.
SENSITIVITY = {
    "gradient": lambda *query: CLIP,
    "difference": lambda w, anchor, bound: bound,
    "loss": lambda w, bound: bound,
    "below": lambda *query: 0.5,
}

numbers = st.floats(-1e4, 1e4)
records = st.tuples(st.lists(numbers, min_size=3, max_size=3), st.integers(0, 2))
weightings = st.one_of(
    st.just(Uniform()),
    st.builds(Fair, st.sampled_from([0.0, 0.1, 0.6, 1.0, 100.0, 1e6]), st.floats(-1e3, 1e3)),
    st.builds(Uniform, st.sampled_from([1e-6, 0.1, 1.0, 1e6])),
)


def sums(bed, held, queries):
    """The noiseless sums that a site with the records `held` answers the queries with."""
    bed.records["a"] = held
    channels = {channel: 1.0 for channel, _ in queries}
    task = Task("run", 1, "fedavg", {"w": bed.w}, {})
    bed.steps_left = math.inf
    # All records are in every batch, and a batch answers a channel once.
    batches = bed.oracle("a", task, channels).batches(len(queries), *channels)
    scale = bed.rate * bed.sizes["a"]
    answers = []
    for batch, (channel, query) in zip(batches, queries, strict=True):
        answer = torch.as_tensor(getattr(batch, channel)(*query), dtype=torch.float64)
        # A count is centred, so that a record moves it by a half; see oracle.
        answers.append((answer - 0.5 if channel == "below" else answer) * scale)
    return answers


def check(bed, held, record, queries):
    """Fail if adding the record to those held moves a query's sum by more than allowed."""
    x, y = (torch.as_tensor(part) for part in record)
    more = Records(
        torch.cat([held.x, x.to(held.x.dtype).reshape(1, -1)]), torch.cat([held.y, y.reshape(1)])
    )
    compare(sums(bed, held, queries), sums(bed, more, queries), queries)


def compare(without, along, queries):
    """Fail if sums without a record and along with it are farther apart than allowed."""
    for before, after, (channel, query) in zip(without, along, queries, strict=True):
        allowed = SENSITIVITY[channel](*query)
        # float64 leaves an error of 1e-16 of the sums, which are at most 31 times the bound.
        assert float((after - before).norm()) <= allowed * (1 + 1e-12), channel


@pytest.fixture(scope="module")
def quiet(federation):
    return federation(private=True, sigma=0.0, clip=CLIP, rate=1.0)


@given(record=records, weighting=weightings, scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3]))
@settings(deadline=None, max_examples=25)
def test_gradient(record, weighting, scale, quiet):
    check(
        quiet,
        quiet.make_dummy_records("b", 30),
        record,
        [("gradient", (quiet.w * scale, weighting))],
    )


@given(record=records, bound=st.floats(1e-6, 1e6), scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3]))
@settings(deadline=None, max_examples=25)
def test_loss_and_below(record, bound, scale, quiet):
    w = quiet.w * scale
    check(
        quiet,
        quiet.make_dummy_records("b", 30),
        record,
        [("loss", (w, bound)), ("below", (w, bound))],
    )
    check(quiet, quiet.make_dummy_records("b", 30), record, [("below", (w, bound, "norm"))])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_a_nan_record_adds_nothing(value, quiet):
    held = quiet.make_dummy_records("b", 30)
    for weighting in (Uniform(), Fair(0.6, 2.0)):
        queries = [("gradient", (quiet.w, weighting)), ("loss", (quiet.w, BOUND))]
        check(quiet, held, ([value, 0.0, 1.0], 0), [*queries, ("below", (quiet.w, BOUND))])
        check(quiet, held, ([value, 0.0, 1.0], 0), [("below", (quiet.w, BOUND, "norm"))])


class Spy:
    """An oracle that writes down what it is asked."""

    def __init__(self, inner, queries):
        self.inner, self.queries = inner, queries

    @property
    def batch_size(self):
        return self.inner.batch_size

    @property
    def sampling_rate(self):
        return self.inner.sampling_rate

    @property
    def noise_variance(self):
        return self.inner.noise_variance

    @property
    def clip(self):
        return self.inner.clip

    def batches(self, count, *channels):
        for batch in self.inner.batches(count, *channels):
            yield Spy(batch, self.queries)

    def opening(self, *channels):
        return Spy(self.inner.opening(*channels), self.queries)

    @property
    def steps_left(self):
        return self.inner.steps_left

    def __getattr__(self, channel):
        def ask(*query):
            kept = tuple(q.clone() if isinstance(q, torch.Tensor) else q for q in query)
            self.queries.append((channel, kept))
            return getattr(self.inner, channel)(*query)

        return ask


def test_every_query_of_every_algorithm(case, federation):
    """What the algorithms ask for in two noisy rounds, asked again with each record left out."""
    queries = []
    noisy = federation(
        private=True, sigma=1.0, clip=CLIP, counts={"a": 4}, around=lambda o: Spy(o, queries)
    )
    noisy.run(case)
    assert queries
    bed = federation(private=True, sigma=0.0, clip=CLIP, rate=1.0, counts={"a": 4})
    every = bed.records["a"]
    whole = sums(bed, every, queries)
    for j in range(4):
        rest = torch.arange(4) != j
        compare(sums(bed, Records(every.x[rest], every.y[rest]), queries), whole, queries)


# The test must be able to fail. Each of these is a mistake that somebody could make in the oracle.


class Unclamped:
    """FedFDP's weight as printed, without a lower bound: min(1 + λΔ, C/‖g‖) by hand."""

    def __init__(self, bed):
        self.model, self.losses, self.seed = bed.model, bed.kernel.losses, bed.kernel.seed
        self._one = bed.kernel.clipped_sum

    def clipped_sum(self, x, y, clip, weights=None, *_):
        total = torch.zeros_like(self.model.vector)
        for j in range(len(y)):
            one = slice(j, j + 1)
            gradient = self._one(x[one], y[one], math.inf)
            weight = (
                1.0
                if weights is None
                else weights.lam * (float(self.losses(x[one], y[one])) - weights.reference) + 1.0
            )
            total += min(weight, clip / float(gradient.norm())) * gradient
        return total


class Unclipped(Unclamped):
    """No clipping at all."""

    def clipped_sum(self, x, y, clip, weights=None, *_):
        return self._one(x, y, math.inf, weights)


class AfterTheWeight(Unclamped):
    """Clipped to C first and weighted then, so that a weight above 1 makes it longer."""

    def clipped_sum(self, x, y, clip, weights=None, *_):
        return self._one(x, y, clip) * (1 if weights is None else 1 + weights.lam)


@pytest.mark.parametrize(
    ("broken", "reference"), [(Unclamped, 20.0), (Unclipped, 0.0), (AfterTheWeight, 0.0)]
)
def test_a_broken_gradient_is_rejected(broken, reference, federation):
    bed = federation(private=True, sigma=0.0, clip=CLIP, rate=1.0)
    held = bed.make_dummy_records("b", 5)
    bed.w = torch.zeros_like(bed.w)
    # At w = 0 the loss is ln 3 and ‖g‖ = 0.82 ‖(x, 1)‖: C/‖g‖ = 0.03, and 1 + λΔ = -10 or 1.7.
    query = ("gradient", (bed.w, Fair(0.6, reference)))
    record = ([1.0, 2.0, 3.0], 0)
    check(bed, held, record, [query])
    bed.kernel = broken(bed)
    with pytest.raises(AssertionError, match="gradient"):
        check(bed, held, record, [query])


@pytest.mark.parametrize(("channel", "wrong"), [("loss", 10.0), ("below", 2.0)])
def test_a_broken_number_is_rejected(channel, wrong, federation):
    bed = federation(private=True, sigma=0.0, clip=CLIP, rate=1.0)

    class Louder:
        def __init__(self, inner):
            self.inner = inner

        def batches(self, count, *channels):
            return map(Louder, self.inner.batches(count, *channels))

        def loss(self, w, bound):
            return self.inner.loss(w, bound * wrong)

        def below(self, w, bound):
            return self.inner.below(w, bound) * wrong

    queries = [(channel, (bed.w, 1e-3))]
    held, record = bed.make_dummy_records("b", 5), ([1.0, 2.0, 3.0], 0)
    check(bed, held, record, queries)
    with pytest.raises(AssertionError, match=channel):
        check(dataclasses.replace(bed, around=Louder), held, record, queries)


def test_a_loss_below_zero_adds_nothing(federation):
    """Cross-entropy never is; any other loss may be."""
    bed = federation(
        private=True, sigma=0.0, clip=CLIP, rate=1.0, loss=lambda outputs, y: outputs[:, 0]
    )
    bed.w = torch.ones_like(bed.w)
    query = ("loss", (bed.w, BOUND))
    for x in ([-1e3, 0.0, 0.0], [1e3, 0.0, 0.0], [-4.0, 0.0, 0.0]):
        check(bed, bed.make_dummy_records("b", 30), (x, 0), [query])


def test_the_oracle_is_the_private_one(quiet):
    task = Task("run", 1, "fedavg", {"w": quiet.w}, {})
    assert isinstance(quiet.oracle("a", task, {"gradient": 1.0}), PrivateOracle)
