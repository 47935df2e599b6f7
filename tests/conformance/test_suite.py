"""What holds for every algorithm, plain and private: it is in here by its file's existence."""

from collections import Counter

import pytest
import torch

from fedpact import algorithms
from fedpact.algorithms.wrappers.base import Method
from fedpact.common.messages import State, from_bytes, to_bytes
from fedpact.privacy.ledger.ledger import Ledger, read_entries

both_forms = pytest.mark.parametrize("private", [False, True], ids=["plain", "private"])


def assert_same(one, other):
    """Equal bit for bit."""
    assert one.numbers == other.numbers
    assert one.vectors.keys() == other.vectors.keys()
    for key, vector in one.vectors.items():
        assert torch.equal(vector, other.vectors[key]), key


def assert_close(one, other, tolerance):
    """Equal up to `tolerance` relative to the largest entry."""
    assert one.vectors.keys() == other.vectors.keys()
    assert one.numbers == pytest.approx(other.numbers, rel=tolerance, abs=tolerance)
    for key, vector in one.vectors.items():
        largest = max(1.0, float(other.vectors[key].abs().max()))
        assert float((vector - other.vectors[key]).abs().max()) <= tolerance * largest, key


def released(method):
    """What a site draws for: its batches, and noise on every channel."""
    return {
        "batch",
        *method.facts.channels,
        *(method.facts.opening.channels if method.facts.opening else ()),
    }


def assert_finite(message):
    assert all(torch.isfinite(v).all() for v in message.vectors.values())
    assert all(torch.isfinite(torch.tensor(v)) for v in message.numbers.values())


def first(federation, case, **setting):
    """A federation, and the method's first state in it."""
    bed = federation(**setting)
    return bed, case.init(bed.w)


@pytest.fixture(scope="module")
def ran(federation):
    """`ran(case, private)`: a federation after a run that several tests share, and its state."""
    done = {}

    def found(case, private):
        key, bed = (str(case.tables), private), federation(private=private)
        if key not in done:
            done[key] = bed.run(case), dict(bed.memories)
        state, memories = done[key]
        bed.memories = dict(memories)
        return bed, state

    return found


@both_forms
def test_neutral_settings_reduce_it_to_its_parent(reducible, private, federation):
    name, algorithm = reducible, algorithms.load(reducible)
    neutral, parent = algorithm.NEUTRAL, algorithms.load(algorithm.NEUTRAL.parent)
    settings = algorithm.Settings(**neutral.settings)
    shared = settings.model_dump(include=parent.Settings.model_fields.keys())
    theirs = parent.Settings(**{**shared, **neutral.parent_settings})
    # Same gradient σ and same draws; the other channels have noise of their own.
    ours_w = federation(private=private).run(Method(name, settings)).vectors["w"]
    parents_w = federation(private=private).run(Method(neutral.parent, theirs)).vectors["w"]
    largest = float(parents_w.abs().max())
    assert float((ours_w - parents_w).abs().max()) <= neutral.tolerance * largest


def test_settings_that_are_not_neutral_do_not_reduce_it(reducible, federation):
    """Else the test above could pass for an algorithm that does nothing of its own."""
    algorithm = algorithms.load(reducible)
    neutral = algorithm.Settings(**algorithm.NEUTRAL.settings)
    both = (neutral, algorithm.Settings())
    runs = [federation(private=False).run(Method(reducible, s)) for s in both]
    assert not torch.equal(runs[0].vectors["w"], runs[1].vectors["w"])


@both_forms
def test_site_order_does_not_matter(case, private, federation):
    bed, state = first(federation, case, private=private)
    replies = list(bed.replies(case, state))
    forth = case.update(state, iter(replies))
    back = case.update(state, iter(reversed(replies)))
    assert_close(forth, back, 1e-13)


class Unbounded:
    """An oracle whose losses and differences have no bound, as C = ∞ is for the gradient."""

    def __init__(self, inner):
        self.inner = inner

    def batches(self, count, *channels):
        return map(Unbounded, self.inner.batches(count, *channels))

    def opening(self, *channels):
        return Unbounded(self.inner.opening(*channels))

    def difference(self, w, anchor, bound):
        return self.inner.difference(w, anchor, 1e30)

    def loss(self, w, bound):
        return self.inner.loss(w, 1e30)

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str
)
def test_no_noise_and_no_clip_give_the_plain_run(case, dtype, tolerance, federation, ran):
    # A plain run has no reservation that could end it: nor has its twin here.
    without = {"sigma": 0.0, "clip": float("inf"), "around": Unbounded, "steps_left": float("inf")}
    private = federation(private=True, dtype=dtype, **without)
    shared = dtype == federation.dtype
    plain = ran(case, False)[1] if shared else federation(private=False, dtype=dtype).run(case)
    assert_close(private.run(case), plain, tolerance)


@pytest.mark.parametrize(
    "setting", [{"sigma": 1e-3, "clip": 1e3}, {"sigma": 0.0, "clip": 0.01}], ids=["noise", "clip"]
)
def test_noise_and_clip_change_the_run(case, setting, federation, ran):
    """Else the test above could pass for an oracle that neither clips nor adds noise."""
    private = federation(private=True, **setting).run(case)
    _, plain = ran(case, False)
    assert float((private.vectors["w"] - plain.vectors["w"]).abs().max()) > 1e-3


@both_forms
@pytest.mark.parametrize(
    "setting",
    [
        {"rate": 1e-12},
        {"counts": {"a": 0, "b": 20}, "sizes": {"a": 10.0, "b": 20.0}},
        {"counts": {"a": 0}, "sizes": {"a": 10.0}},
        {"counts": {"a": 20}},
        {"counts": {"a": 1}, "rate": 1.0},
    ],
    ids=["empty batches", "an empty site", "nothing but an empty site", "one site", "one record"],
)
def test_little_or_no_data(case, private, setting, federation):
    # A tiny rate divides the noise by a tiny expected batch: leave the noise away there.
    sigma = 0.0 if "rate" in setting else 1.0
    bed = federation(private=private, sigma=sigma, **setting)
    state = bed.run(case, 2)
    assert_finite(state)
    assert state.vectors["w"].shape == bed.w.shape


def test_an_empty_site_still_adds_noise(case, federation):
    """Else its reply would tell that it is empty."""
    empty = {"private": True, "counts": {"a": 0}, "sizes": {"a": 10.0}}
    bed, state = first(federation, case, **empty)
    (reply,) = bed.replies(case, state)
    (silent,) = federation(**empty, sigma=0.0).replies(case, state)
    for key, vector in reply.vectors.items():
        assert not torch.equal(vector, silent.vectors[key])
    assert set(bed.drawn["a"]) == released(case)


@both_forms
def test_everything_that_crosses_survives_the_codec(case, private, ran):
    bed, state = ran(case, private)
    task = bed.task(case, state, 4)
    messages = [state, task, *bed.replies(case, state, 4), *bed.memories.values()]
    for message in messages:
        read = from_bytes(to_bytes(message))
        assert type(read) is type(message)
        assert_same(read, message)
        assert to_bytes(read) == to_bytes(message)


@both_forms
def test_local_leaves_what_it_is_given_and_repeats_itself(case, private, ran):
    bed, state = ran(case, private)
    task, memory = bed.task(case, state, 4), bed.memories["a"]
    before = to_bytes(task), to_bytes(memory)
    once = bed.local(case, "a", task)
    assert (to_bytes(task), to_bytes(memory)) == before
    again = bed.local(case, "a", task)
    assert_same(once, again)
    assert_same(once.memory, again.memory)


@both_forms
def test_update_leaves_what_it_is_given(case, private, federation):
    bed, state = first(federation, case, private=private)
    replies = list(bed.replies(case, state))
    before = [to_bytes(m) for m in (state, *replies)]
    case.update(state, iter(replies))
    assert [to_bytes(m) for m in (state, *replies)] == before


@both_forms
def test_no_more_batches_than_declared(case, private, federation):
    bed, state = first(federation, case, private=private)
    list(bed.replies(case, state))
    allowed = case.steps(state)
    assert allowed <= case.steps()
    allowed += 1 if case.facts.opening else 0
    for counts in bed.drawn.values():
        assert 1 <= counts["batch"] <= allowed


def test_released_is_what_the_ledger_holds(case, federation, tmp_path):
    rounds, plan = 3, federation(private=True)
    ledgers = {}
    for site in plan.sites:
        ledgers[site] = Ledger(tmp_path / f"{site}.jsonl", site, hypothetical=True)
        terms = plan.terms(site, case.facts.channels, case.facts.opening)
        budget = type(terms.budget)(1e6, 1e-5)  # the cost is tested elsewhere
        ledgers[site].reserve("run", budget, terms.history(rounds * case.steps(), rounds))
    bed = federation(private=True, ledgers=ledgers)
    bed.run(case, rounds)
    for site, ledger in ledgers.items():
        ledger.close()
        terms, held = bed.terms(site, case.facts.channels, case.facts.opening), Counter()
        for entry in read_entries(ledger.path):
            if entry["kind"] == "charge":
                held["batch"] += entry["count"]
                assert (entry["q"], entry["sigma"]) in {
                    (event.q, event.sigma) for event in (terms.event, terms.opening.event)
                }
                held.update(dict.fromkeys(entry["purpose"], entry["count"]))
        assert held == bed.drawn[site]
        assert held.keys() == released(case)


def test_two_seeds_draw_differently_at_every_site(case, federation):
    drawn = []
    for seed in (0, 1):
        bed, state = first(federation, case, private=True, seed=seed)
        drawn.append([reply.vectors for reply in bed.replies(case, state)])
    for one, other in zip(*drawn, strict=True):
        for key, vector in one.items():
            assert not torch.equal(vector, other[key])


def test_two_sites_and_two_rounds_draw_differently(case, federation):
    counts, noise = {"a": 0, "b": 0}, []
    bed, state = first(federation, case, private=True, counts=counts, sizes={"a": 9.0, "b": 9.0})
    for number in (1, 2):
        bed.memories.clear()
        noise += [r.vectors for r in bed.replies(case, state, number)]
    for key in noise[0]:
        assert len({tuple(vectors[key].tolist()) for vectors in noise}) == 4


def test_the_first_state_holds_the_model(case, federation):
    _, state = first(federation, case, private=False)
    assert isinstance(state, State)
    assert torch.equal(state.vectors["w"], federation(private=False).w)
