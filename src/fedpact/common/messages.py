"""The only types that cross the wire, all immutable, and their encoding.

A Task goes from the server to a site; a Reply or a Refusal comes back. With secure aggregation,
Steps go both ways (docs/notes/secure-aggregation.md). `to_bytes` and `from_bytes` convert each to
one safetensors block and back without losing a bit; NaN and infinity are allowed, as a diverging
run has to be recorded. A RoundRecord (common.records) is one line of a run's rounds.jsonl.

No type here holds records. Everything in a Reply has passed the site's oracle and its ledger.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final, Protocol, cast

import torch
from safetensors.torch import load as _load_tensors
from torch import Tensor

from fedpact.common.errors import InputError
from fedpact.common.records import RoundRecord as RoundRecord
from fedpact.common.records import SiteScore as SiteScore

Vectors = Mapping[str, Tensor]
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Task:
    """The server's request to one site in one round.

    vectors: flat float tensors by name, including "w" [d]; numbers: scalars by name.
    included: the last round whose reply from this site entered the server's state, -1 if none; it
    tells the site which pending memory to keep.
    """

    run: str
    round: int
    algorithm: str
    vectors: Vectors
    numbers: Numbers
    included: int = -1
    attempt: int = 0

    @cached_property
    def wire_bytes(self) -> int:
        """The length of the encoded task."""
        return encoded_length(self)

    @cached_property
    def digest(self) -> str:
        """A hash of the request: equal requests have equal digests.

        The attempt is left out: in a simulation a repeated request has the same noise.
        """
        return _hash(dataclasses.replace(self, attempt=0))


EVALUATION: Final = "evaluation"
"""The algorithm of a task that only asks for sums over held-out records at "w"."""

FINAL: Final = "final model"
"""The algorithm of a task that delivers the run's final model, and asks for nothing."""

READY: Final = "ready"
"""The algorithm of a task that asks whether a site would take part, which costs nothing."""

FREE: Final = (FINAL, READY)
"""The algorithms of tasks that a site answers without any release."""


@dataclass(frozen=True)
class Reply:
    """What a site releases in answer to a Task.

    weight: the site's declared, public size N_i. ledger_head, ledger_length: hash and number of
    the last entry in the site's ledger, which reveal a shortened or forked ledger.
    """

    run: str
    round: int
    site: str
    weight: float
    vectors: Vectors
    numbers: Numbers
    ledger_head: str = ""
    ledger_length: int = 0


@dataclass(frozen=True)
class Refusal:
    """A site's refusal, with a code that depends on public quantities only."""

    run: str
    round: int
    site: str
    code: str


REASONS: Final = {
    "absent": "does not answer: it has not been started, it did not open (see its log), or it does "
    "not reach the server",
    "budget": "has spent its privacy budget",
    "policy": "does not allow this run: see its policy.toml and its reservation",
    "terms": "has a plan.json or federation.toml that differs from the server's, or another "
    "version of fedpact",
    "ledger": "has a ledger that lacks entries which the server has seen",
    "rejected: ledger": "showed another ledger than the server has seen",
    "run": "takes part in another run",
    "error": "failed: its own log says why",
}
"""Why a site takes no part, by code; to be read after its name."""


@dataclass(frozen=True)
class Step:
    """A message of the secure aggregation protocol, to a site or back.

    session: the attempt of the round. step: of the protocol. vectors: blocks of bytes by name,
    uint8: keys, encrypted shares, an encoded Task or Reply.
    """

    run: str
    round: int
    site: str
    session: str
    step: str
    vectors: Vectors


@dataclass(frozen=True)
class State:
    """Named vectors and numbers that persist between rounds: the server's state, a site's memory.

    The server's holds "w" [d]. A site's memory holds what its algorithm needs (c_i, h_i, a bound)
    and is computed from released numbers only.
    """

    vectors: Vectors = field(default_factory=dict[str, Tensor])
    numbers: Numbers = field(default_factory=dict[str, float])

    @cached_property
    def digest(self) -> str:
        """A hash of the state."""
        return _hash(self)


@dataclass(frozen=True)
class Local:
    """What an algorithm's local part returns: what to send, and the site's next memory."""

    vectors: Vectors
    numbers: Numbers = field(default_factory=dict[str, float])
    memory: State = field(default_factory=State)


class Transport(Protocol):
    """How tasks reach the sites: threads in this process, or a network."""

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites, sorted."""
        ...

    def exchange(self, tasks: dict[str, Task]) -> Iterator[Reply | Refusal]:
        """Send each site its task; yield the answers in the order of site names."""
        ...

    @property
    def traffic(self) -> tuple[int, int] | None:
        """Bytes down and up of the last exchange, if they differ from the tasks and answers."""
        ...


def split_state(state: State, prefix: str) -> tuple[State, State]:
    """Return the entries under `prefix`, without the prefix, and the other entries."""
    own_v = {k.removeprefix(prefix): v for k, v in state.vectors.items() if k.startswith(prefix)}
    own_n = {k.removeprefix(prefix): n for k, n in state.numbers.items() if k.startswith(prefix)}
    rest_v = {k: v for k, v in state.vectors.items() if not k.startswith(prefix)}
    rest_n = {k: n for k, n in state.numbers.items() if not k.startswith(prefix)}
    return State(own_v, own_n), State(rest_v, rest_n)


def join(own: State, prefix: str, rest: State) -> State:
    """Return `rest` with the entries of `own` under `prefix`: the inverse of `split_state`."""
    vectors = {prefix + key: vector for key, vector in own.vectors.items()}
    numbers = {prefix + key: number for key, number in own.numbers.items()}
    return State({**rest.vectors, **vectors}, {**rest.numbers, **numbers})


Message = Task | Reply | Refusal | Step | State

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Task, Reply, Refusal, Step, State)
}

_DECLARED: Final[Mapping[type[Message], Mapping[str, object]]] = {
    kind: {f.name: f.type for f in dataclasses.fields(kind)} for kind in _KINDS.values()
}

_TYPES: Final[Mapping[torch.dtype, str]] = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of types in safetensors, in the order in which it stores vectors."""

_RESERVED: Final = "__metadata__"
"""Where safetensors stores other data than vectors."""

MOST_VECTORS: Final = 64
"""More than any algorithm's task, reply or state has."""

# Bytes of a header: for numbers and the other fields, and for each vector.
_HEAD, _HEAD_EACH = 2**16, 2**9

_PLACES: Final = {dtype: place for place, dtype in enumerate(_TYPES)}

# json.dumps would create an encoder on every call.
_FIELDS: Final = json.JSONEncoder(sort_keys=True, default=dict).encode
_LAYOUT: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_bytes(message: Message) -> bytes:
    """Encode a message as one safetensors block, with its other fields in the block's metadata.

    Raises InputError: a field, or a vector, of a type that cannot be sent.
    """
    return b"".join(encode_parts(message))


def encode_parts(message: Message) -> list[bytes | memoryview]:
    """Return what `to_bytes` joins: a header, then every vector's own memory. Raises as it does."""
    head, vectors = _header(message)
    return [head, *map(_memory, vectors)]


def encoded_length(message: Message) -> int:
    """Return the length in bytes of what `to_bytes` returns. Raises as it does."""
    head, vectors = _header(message)
    return len(head) + sum(vector.nbytes for vector in vectors)


def _hash(message: Message) -> str:
    # SHA-256, as processors have instructions for it. Ledgers of simulations identify requests by
    # it: a change must increment seeded.DRAWS, so that no run is resumed in the middle of a round.
    digest = hashlib.sha256()
    for part in encode_parts(message):
        digest.update(part)
    return digest.hexdigest()[:32]


def from_bytes(block: bytes, most_vectors: float = MOST_VECTORS) -> Message:
    """Decode what `to_bytes` encoded. Raises InputError if the block is not a valid message.

    most_vectors: the most that it may have; infinite for a file of one's own. A longer header is
    refused unread, so that a malicious message causes little work before the number of its vectors
    is known.
    """
    told, most = int.from_bytes(block[:8], "little"), _HEAD + _HEAD_EACH * most_vectors
    if told > most:
        raise InputError(
            f"a block of {len(block)} bytes is not a fedpact message: it declares a header of "
            f"{told} bytes, but with {most_vectors} vectors there are at most {most}"
        )
    try:
        layout: dict[str, Any] = json.loads(block[8 : 8 + told])
        if len(layout) - 1 > most_vectors:
            raise ValueError(f"{len(layout) - 1} vectors")
        head: dict[str, Any] = json.loads(layout[_RESERVED]["fedpact"])
        kind = _KINDS[head.pop("kind")]
        _check_fields(kind, head)
        vectors = _load_tensors(block)
        if kind is not Refusal:
            head["vectors"] = vectors
        return kind(**head)
    except Exception as error:
        raise InputError(
            f"a block of {len(block)} bytes is not a fedpact message ({type(error).__name__}): "
            "expected the output of messages.to_bytes; check that both ends run the same version"
        ) from error


def _header(message: Message) -> tuple[bytes, list[Tensor]]:
    """Return a block's header with its length in front, and the vectors in storage order.

    Raises InputError: a field, or a vector's name or type, that a block cannot store.
    """
    # A subclass that only changes how a message is sent is encoded as the message itself.
    kind = next(each for each in type(message).__mro__ if each in _DECLARED)
    fields = {name: getattr(message, name) for name in _DECLARED[kind]}
    vectors: Vectors = fields.pop("vectors", {})
    _check_fields(kind, fields)
    for name, vector in vectors.items():
        if name == _RESERVED:
            raise InputError(
                f"{kind.__name__}.vectors has a vector {name!r}: expected another name, as blocks "
                "store other fields under it"
            )
        if vector.dtype not in _TYPES:
            raise InputError(
                f"{kind.__name__}.vectors[{name!r}] is of {vector.dtype}: expected one of "
                f"{', '.join(map(str, _TYPES))}; convert it with .to(...)"
            )
    names = sorted(vectors, key=lambda name: (_PLACES[vectors[name].dtype], name))
    head = _LAYOUT(_FIELDS({"kind": kind.__name__, **fields}))
    layout = _layout(tuple((name, vectors[name].dtype, vectors[name].shape) for name in names))
    text = f'{{"{_RESERVED}":{{"fedpact":{head}}}{layout}}}'.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [vectors[name] for name in names]


@lru_cache(maxsize=64)
def _layout(forms: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> str:
    """Return the JSON after the metadata: where vectors of these names, types, shapes are."""
    found: dict[str, object] = {}
    end = 0
    for name, dtype, shape in forms:
        start, end = end, end + shape.numel() * dtype.itemsize
        found[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": (start, end)}
    return "," + _LAYOUT(found)[1:-1] if found else ""


def _memory(vector: Tensor) -> memoryview:
    """Return a vector's bytes, uncopied if it is contiguous and on the CPU."""
    flat = vector.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # A single number counts as contiguous with any stride, but only stride 1 can be viewed.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


_LARGEST: Final = 2**63 - 1


def _is_number(value: object) -> bool:
    """Whether it is a float, or an int of 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return -_LARGEST <= value <= _LARGEST
    return isinstance(value, float)


def _check_fields(kind: type[Message], fields: Mapping[str, Any]) -> None:
    """Raise InputError unless each field is a str, an int, a number or numbers, as declared."""
    declared = _DECLARED[kind]
    for name, value in fields.items():
        if declared[name] is float:
            good = _is_number(value)
        elif declared[name] == Numbers:
            numbers = cast(Mapping[object, object], value)
            good = isinstance(value, Mapping) and all(
                isinstance(key, str) and _is_number(number) for key, number in numbers.items()
            )
        else:
            good = type(value) is declared[name]
        if not good:
            raise InputError(
                f"{kind.__name__}.{name} is {value!r}: expected {declared[name]} of Python "
                "numbers; convert other scalars with float() or int()"
            )
