"""Messages come back bit for bit, and whatever is no message of ours is refused."""

import dataclasses
import hashlib
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from fedpact.common.errors import InputError
from fedpact.common.messages import (
    MOST_VECTORS,
    Refusal,
    Reply,
    RoundRecord,
    SiteScore,
    State,
    Step,
    Task,
    encode_parts,
    encoded_length,
    from_bytes,
    to_bytes,
)

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
OTHERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
]
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
numbers = st.dictionaries(names, st.floats() | st.integers(-(2**60), 2**60), max_size=4)


@st.composite
def vectors(draw):
    """Vectors of any bit patterns: NaNs with payloads, infinities, denormals, -0."""
    found = {}
    for name in draw(st.lists(names, max_size=3, unique=True)):
        dtype = draw(st.sampled_from(list(BITS)))
        width = torch.iinfo(BITS[dtype])
        words = draw(st.lists(st.integers(width.min, width.max), max_size=5))
        found[name] = torch.tensor(words, dtype=BITS[dtype]).view(dtype)
    return found


def message(kind):
    of_type = {str: st.text(st.characters(exclude_categories=["Cs"])), int: st.integers()}
    of_type |= {float: st.floats(0, 1e300)}
    given_ = {"vectors": vectors(), "numbers": numbers}
    fields = {
        f.name: given_[f.name] if f.name in given_ else of_type[f.type]
        for f in dataclasses.fields(kind)
    }
    return st.builds(kind, **fields)


def words(vector):
    return vector.new_empty(vector.numel()).copy_(vector.reshape(-1))


def bits(value):
    """All of a message, comparable: floats by their bits, so NaN equals itself and 0 not -0."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    of = fields.pop("vectors", {})
    return (
        type(value),
        {k: (v.dtype, v.shape, words(v).view(torch.uint8).tolist()) for k, v in of.items()},
        {
            k: repr(v) if k != "numbers" else {n: repr(x) for n, x in v.items()}
            for k, v in fields.items()
        },
    )


@st.composite
def tensors(draw):
    """Of every type, of no, one or several dimensions, with gaps, and in each other's memory."""
    whole = torch.arange(240).view(torch.uint8)
    shapes = [(), (0,), (1,), (5,), (2, 3), (0, 4)]
    found = {}
    for name in draw(st.lists(names, max_size=5, unique=True)):
        part = whole.view(draw(st.sampled_from([torch.float32, torch.float64, torch.uint8])))
        if draw(st.booleans()):
            part = torch.zeros(40, dtype=draw(st.sampled_from(OTHERS)))
        shape = draw(st.sampled_from(shapes))
        found[name] = part[3 : 3 + math.prod(shape)].view(shape)
        if draw(st.booleans()) and len(shape) == 1:
            found[name] = part[:: draw(st.integers(2, 40))]
    return found


@settings(max_examples=80)
@given(
    value=st.one_of([message(kind) for kind in (Task, Reply, Refusal, Step, State)]),
    held=tensors(),
)
def test_block_matches_safetensors_and_length_is_known(value, held):
    if not isinstance(value, Refusal):
        value = dataclasses.replace(value, vectors={**value.vectors, **held})
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    of = fields.pop("vectors", {}).items()
    apart = {name: words(vector).view(vector.shape) for name, vector in of}
    head = json.dumps({"kind": type(value).__name__, **fields}, sort_keys=True)
    block = to_bytes(value)
    assert block == save(apart, metadata={"fedpact": head})
    assert encoded_length(value) == len(block)
    assert bits(from_bytes(block)) == bits(value)


def test_the_parts_of_a_block_are_the_vectors_own_memory():
    w = torch.arange(4.0, requires_grad=True)
    _, part = encode_parts(State({"w": w}))
    with torch.no_grad():
        w[1] = 7.0
    assert bytes(part) == bytes(torch.tensor([0.0, 7.0, 2.0, 3.0]).numpy())


def test_a_digest_is_that_of_the_library_s_block():
    head = dataclasses.asdict(TASK) | {"kind": "Task", "attempt": 0}
    vectors = head.pop("vectors")
    block = save(vectors, metadata={"fedpact": json.dumps(head, sort_keys=True)})
    assert TASK.digest == hashlib.sha256(block).hexdigest()[:32]
    state = State({"c": torch.ones(3)}, {"x": 1.0})
    assert state.digest == hashlib.sha256(to_bytes(state)).hexdigest()[:32]


def test_a_vector_without_a_name_for_its_type_is_not_sent():
    for encode in (to_bytes, encoded_length):
        with pytest.raises(InputError, match=r"State.vectors\['w'\] is of torch.complex128"):
            encode(State({"w": torch.zeros(2, dtype=torch.complex128)}))


def test_a_vector_with_the_name_of_a_blocks_own_part_is_not_sent():
    for encode in (to_bytes, encoded_length):
        with pytest.raises(InputError, match=r"State\.vectors has a vector '__metadata__'"):
            encode(State({"__metadata__": torch.zeros(2)}))


def test_a_lazily_conjugated_or_negated_vector_is_decoded():
    waves = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    for vector in (waves.conj(), waves.conj().imag):
        assert torch.equal(from_bytes(to_bytes(State({"w": vector}))).vectors["w"], vector)  # pyright: ignore


TASK = Task("run", 3, "fedavg", {"w": torch.tensor([1.0, 2.0])}, {"x": 1.0}, included=2, attempt=0)


def test_a_digest_leaves_out_the_attempt_and_nothing_else():
    assert dataclasses.replace(TASK, attempt=7).digest == TASK.digest
    others = {
        "run": "other",
        "round": 4,
        "algorithm": "fedprox",
        "vectors": {"w": torch.tensor([1.0, math.nextafter(2, 3)], dtype=torch.float64)},
        "numbers": {"x": math.nextafter(1, 2)},
        "included": 1,
    }
    assert set(others) == {f.name for f in dataclasses.fields(Task)} - {"attempt"}
    digests = {dataclasses.replace(TASK, **{k: v}).digest for k, v in others.items()}
    assert len(digests | {TASK.digest}) == len(others) + 1


def test_any_cut_block_is_refused():
    block = to_bytes(TASK)
    for length in range(len(block)):
        with pytest.raises(InputError, match=f"a block of {length} bytes is not a fedpact message"):
            from_bytes(block[:length])
    with pytest.raises(InputError):
        from_bytes(block + b"\0")


@settings(max_examples=100)
@given(data=st.data())
def test_a_changed_byte_is_refused_or_gives_a_sound_message(data):
    block = bytearray(to_bytes(TASK))
    place = data.draw(st.integers(0, len(block) - 1))
    block[place] ^= data.draw(st.integers(1, 255))
    try:
        back = from_bytes(bytes(block))
    except InputError:
        return
    # A block has no checksum; but whatever is let through can be encoded, so its types are right.
    assert bits(from_bytes(to_bytes(back))) == bits(back)


HEAD = {
    "kind": "Reply",
    "run": "r",
    "round": 1,
    "site": "a",
    "weight": 2.0,
    "numbers": {"x": 1.0},
}


def block_of(head):
    return save({"w": torch.ones(1)}, metadata={"fedpact": json.dumps(head)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "RoundRecord"},
        {"kind": None},
        {"weight": "2"},
        {"weight": True},
        {"weight": None},
        {"round": 1.0},
        {"round": "1"},
        {"site": 5},
        {"numbers": [1.0]},
        {"numbers": {"x": "1"}},
        {"numbers": {"x": False}},
        {"unknown": 1},
    ],
)
def test_fields_of_other_types_are_refused(wrong):
    assert isinstance(from_bytes(block_of(HEAD)), Reply)
    with pytest.raises(InputError, match="not a fedpact message"):
        from_bytes(block_of(HEAD | wrong))


@pytest.mark.parametrize("missing", ["kind", "run", "round", "site", "weight", "numbers"])
def test_missing_fields_are_refused(missing):
    with pytest.raises(InputError, match="not a fedpact message"):
        from_bytes(block_of({k: v for k, v in HEAD.items() if k != missing}))


@pytest.mark.parametrize("number", [torch.tensor(1.0), "1", True, None])
def test_values_that_are_not_numbers_are_not_sent(number):
    with pytest.raises(InputError, match=r"State.numbers is .*'loss'.*float\(\)"):
        to_bytes(State({}, {"loss": number}))


def test_a_record_is_one_line_and_is_read_back():
    record = RoundRecord(
        round=4,
        accuracy=0.1 + 0.2,
        loss=0.75,
        scores={"a\nb": SiteScore(0.5, 1 / 3, 7)},
        epsilon={"a\nb": 1.25},
        refused={"c": "budget"},
        numbers={"F": 2.5},
        metrics={"psi": 0.25, "other": 1.5},
    )
    line = record.to_json()
    assert "\n" not in line
    # A metric stands under its own name, as Ψ always did.
    held = dataclasses.asdict(record)
    metrics = held.pop("metrics")
    assert json.loads(line) == {**held, **metrics}
    assert RoundRecord.from_json(line) == record
    assert RoundRecord.from_json(RoundRecord(round=0).to_json()) == RoundRecord(round=0)


def test_values_that_are_not_finite_are_strict_json():
    scores = {"a": SiteScore(math.nan, math.inf, 7)}
    odd = {"psi": math.nan, "r2": -math.inf}
    record = RoundRecord(2, math.nan, 0.5, odd, scores, epsilon={"a": math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    said = json.loads(record.to_json(), parse_constant=refuse)
    assert said["accuracy"] is said["psi"] is said["scores"]["a"]["loss"] is None
    back = RoundRecord.from_json(record.to_json())
    assert math.isnan(back.accuracy or 0.0)
    assert back.loss == 0.5
    assert set(back.metrics) == set(odd)
    assert all(map(math.isnan, (*back.metrics.values(), back.scores["a"].accuracy)))
    # An ε that is not known is not small.
    assert back.epsilon == {"a": math.inf}


def test_non_numeric_metric_invalidates_the_record():
    for odd in ("text", {"a": 1}, [1]):
        line = json.dumps({**json.loads(RoundRecord(round=0).to_json()), "psi": odd})
        with pytest.raises((TypeError, ValueError)):
            RoundRecord.from_json(line)


@pytest.mark.parametrize("count", [64, 65, 1000])
def test_a_message_has_few_vectors(count):
    """Each costs time beyond its length, before anybody can see that it is none of ours."""
    block = to_bytes(State({f"v{i}": torch.zeros(1) for i in range(count)}))
    if count <= MOST_VECTORS:
        assert len(from_bytes(block).vectors) == count
    else:
        with pytest.raises(InputError, match="not a fedpact message"):
            from_bytes(block)
    assert len(from_bytes(block, count).vectors) == count


@pytest.mark.parametrize("length", [2**17, 2**40, 2**64 - 1])
def test_a_header_that_is_longer_than_any_is_not_read(length):
    block = length.to_bytes(8, "little") + to_bytes(State({}))[8:]
    with pytest.raises(InputError, match=f"header of {length} bytes"):
        from_bytes(block)
