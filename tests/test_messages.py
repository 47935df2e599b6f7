"""Messages come back bit for bit, and whatever is no message of ours is refused."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from fedpact.errors import InputError
from fedpact.messages import (
    Message,
    Refusal,
    Reply,
    RoundRecord,
    SiteScore,
    State,
    Step,
    Task,
    from_bytes,
    to_bytes,
)

BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
numbers = st.dictionaries(names, st.floats() | st.integers(-(2**60), 2**60), max_size=4)


@st.composite
def vectors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Vectors of any bit patterns: NaNs with payloads, infinities, denormals, -0."""
    found = dict[str, Tensor]()
    for name in draw(st.lists(names, max_size=3, unique=True)):
        dtype = draw(st.sampled_from(list(BITS)))
        width = torch.iinfo(BITS[dtype])
        words = draw(st.lists(st.integers(width.min, width.max), max_size=5))
        found[name] = torch.tensor(words, dtype=BITS[dtype]).view(dtype)
    return found


def message(kind: type[Any]) -> st.SearchStrategy[Any]:
    of_type = {str: st.text(st.characters(exclude_categories=["Cs"])), int: st.integers()}
    of_type |= {float: st.floats(0, 1e300)}
    given_ = {"vectors": vectors(), "numbers": numbers}
    fields = {
        f.name: given_[f.name] if f.name in given_ else of_type[f.type]
        for f in dataclasses.fields(kind)
    }
    return st.builds(kind, **fields)


def bits(value: Message) -> object:
    """All of a message, comparable: floats by their bits, so NaN equals itself and 0 not -0."""
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    of = fields.pop("vectors", {})
    return (
        type(value),
        {k: (v.dtype, v.shape, v.view(BITS[v.dtype]).tolist()) for k, v in of.items()},
        {
            k: repr(v) if k != "numbers" else {n: repr(x) for n, x in v.items()}
            for k, v in fields.items()
        },
    )


@settings(max_examples=150, deadline=None)
@given(value=st.one_of([message(kind) for kind in (Task, Reply, Refusal, Step, State)]))
def test_every_message_comes_back_bit_for_bit(value: Message) -> None:
    assert bits(from_bytes(to_bytes(value))) == bits(value)


@pytest.mark.parametrize("dtype", BITS)
def test_extreme_vectors_come_back(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    extreme = [math.nan, math.inf, -math.inf, -0.0, info.tiny / 4, info.max, info.eps]
    sent = State({"w": torch.tensor(extreme, dtype=dtype), "none": torch.zeros(0, dtype=dtype)})
    assert bits(from_bytes(to_bytes(sent))) == bits(sent)


def test_vectors_that_share_memory_or_are_strided_come_back() -> None:
    whole = torch.arange(12.0, requires_grad=True)
    sent = {"w": whole, "again": whole, "part": whole[3:5], "even": whole[::2]}
    back = from_bytes(to_bytes(State(sent)))
    assert isinstance(back, State)
    assert set(back.vectors) == set(sent)
    assert all(torch.equal(back.vectors[name], sent[name]) for name in sent)


def test_encoding_does_not_depend_on_the_order_of_names() -> None:
    w, c = torch.ones(2), torch.zeros(3)
    one = State({"w": w, "c": c}, {"x": 1.0, "y": 2.0})
    other = State({"c": c, "w": w}, {"y": 2.0, "x": 1.0})
    assert to_bytes(one) == to_bytes(other)


TASK = Task("run", 3, "fedavg", {"w": torch.tensor([1.0, 2.0])}, {"x": 1.0}, included=2, attempt=0)


def test_a_digest_leaves_out_the_attempt_and_nothing_else() -> None:
    assert dataclasses.replace(TASK, attempt=7).digest == TASK.digest
    others: dict[str, Any] = {
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


def test_any_cut_block_is_refused() -> None:
    block = to_bytes(TASK)
    for length in range(len(block)):
        with pytest.raises(InputError, match=f"a block of {length} bytes is no fedpact message"):
            from_bytes(block[:length])
    with pytest.raises(InputError):
        from_bytes(block + b"\0")


@settings(max_examples=200, deadline=None)
@given(block=st.binary(max_size=200))
def test_noise_is_refused(block: bytes) -> None:
    with pytest.raises(InputError):
        from_bytes(block)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_refused_or_gives_a_sound_message(data: st.DataObject) -> None:
    block = bytearray(to_bytes(TASK))
    place = data.draw(st.integers(0, len(block) - 1))
    block[place] ^= data.draw(st.integers(1, 255))
    try:
        back = from_bytes(bytes(block))
    except InputError:
        return
    # A block has no checksum; but whatever is let through can be encoded, so its types are right.
    assert bits(from_bytes(to_bytes(back))) == bits(back)


HEAD: dict[str, Any] = {
    "kind": "Reply",
    "run": "r",
    "round": 1,
    "site": "a",
    "weight": 2.0,
    "numbers": {"x": 1.0},
}


def block_of(head: object) -> bytes:
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
def test_fields_of_other_types_are_refused(wrong: dict[str, Any]) -> None:
    assert isinstance(from_bytes(block_of(HEAD)), Reply)
    with pytest.raises(InputError, match="no fedpact message"):
        from_bytes(block_of(HEAD | wrong))


@pytest.mark.parametrize("missing", ["kind", "run", "round", "site", "weight", "numbers"])
def test_missing_fields_are_refused(missing: str) -> None:
    with pytest.raises(InputError, match="no fedpact message"):
        from_bytes(block_of({k: v for k, v in HEAD.items() if k != missing}))


@pytest.mark.parametrize("number", [torch.tensor(1.0), "1", True, None])
def test_what_is_no_number_is_not_sent(number: Any) -> None:
    with pytest.raises(InputError, match=r"State.numbers is .*'loss'.*float\(\)"):
        to_bytes(State({}, {"loss": number}))


def test_a_record_is_one_line_and_comes_back() -> None:
    record = RoundRecord(
        round=4,
        accuracy=0.1 + 0.2,
        loss=math.inf,
        scores={"a\nb": SiteScore(0.5, 1 / 3, 7)},
        epsilon={"a\nb": 1.25},
        refused={"c": "budget"},
        numbers={"F": 2.5},
    )
    line = record.to_json()
    assert "\n" not in line
    assert RoundRecord.from_json(line) == record
    assert RoundRecord.from_json(RoundRecord(round=0).to_json()) == RoundRecord(round=0)
