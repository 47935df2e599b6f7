"""What runs inside Flower's Ray actors: a ClientApp that is each of a simulation's sites in turn.

An actor keeps a model and a kernel, and nothing of a site: records come out of Ray's store, ledger
and memory from the run's folder. So any actor can take any site, in any round.
"""

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import ray
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpact import errors
from fedpact.engines.flower import codec
from fedpact.engines.inprocess import Worker
from fedpact.engines.virtual import VirtualSite
from fedpact.engines.workshop import TrainingSetup
from fedpact.errors import DataError, FedpactError
from fedpact.messages import Task, from_bytes, to_bytes
from fedpact.theory.accounting import History, SampledGaussian

_PLACE = "partition-id"  # Flower's name for which of the virtual nodes it is
_opened: dict[Any, tuple["ActorState", Worker]] = {}


@dataclass(frozen=True)
class ActorState:
    """What all actors share. sites: references to VirtualSites in Ray's store, by their place."""

    workshop: TrainingSetup
    sites: Sequence[Any]


def open_app(reference: Any) -> ClientApp:
    """Return the app of the ActorState that a reference leads to; an actor keeps the last one's
    bench."""
    if reference not in _opened:
        torch.set_num_threads(1)
        kit: ActorState = ray.get(reference)
        _opened.clear()
        _opened[reference] = kit, kit.workshop.bench()
    kit, bench = _opened[reference]
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            site: VirtualSite = ray.get(kit.sites[int(context.node_config[_PLACE])])
            answer = _answer(site, bench, message)
        except Exception as error:
            answer = _failure(error)
        return Message(answer, reply_to=message)

    return app


def encode_task(place: int, block: bytes, run: int) -> tuple[Message, Context]:
    """Return what Flower hands to an actor: an encoded Task for the site at this place."""
    message = Message(codec.to_record(block, b""), dst_node_id=place + 1, message_type="train")
    return message, Context(run, place + 1, {_PLACE: place}, RecordDict(), {})


def decode_answer(answer: RecordDict) -> tuple[bytes, History]:
    """Return the encoded answer of a site, and all that its run has been charged so far.

    Raises FedpactError, of the kind that was raised at the actor: the site failed there.
    """
    failure = answer.get("failure")
    if isinstance(failure, ConfigRecord):
        kind = getattr(errors, str(failure["kind"]), None)
        if isinstance(kind, type) and issubclass(kind, FedpactError):
            raise kind(str(failure["text"]))
        error = FedpactError(f"a site failed at its actor: {failure['kind']}: {failure['text']}")
        error.add_note(str(failure["trace"]))
        raise error
    spent: Any = answer["spent"]
    events = zip(spent["q"], spent["sigma"], spent["count"], strict=True)
    return codec.from_record(answer)[0], {
        SampledGaussian(q, sigma): count for q, sigma, count in events
    }


def _answer(site: VirtualSite, bench: Worker, message: Message) -> RecordDict:
    task = _decoded(codec.from_record(message.content)[0])
    with site.open_ledger() or nullcontext() as ledger:
        block = to_bytes(site.client(ledger).handle(task, bench))
        spent = ledger.spent(site.run) if ledger else {}
    record = codec.to_record(block, b"")
    record["spent"] = ConfigRecord(
        {
            "q": [event.q for event in spent],
            "sigma": [event.sigma for event in spent],
            "count": list(spent.values()),
        }
    )
    return record


def _failure(error: Exception) -> RecordDict:
    kind, trace = type(error).__name__, traceback.format_exc()
    return RecordDict({"failure": ConfigRecord({"kind": kind, "text": str(error), "trace": trace})})


def _decoded(block: bytes) -> Task:
    """Decode a task. Raises InputError: another kind of message, or none."""
    message = from_bytes(block)
    if not isinstance(message, Task):
        raise DataError(f"a {type(message).__name__} came where a task is expected")
    return message
