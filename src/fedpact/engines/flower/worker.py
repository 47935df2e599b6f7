"""A site's process: takes tasks from its SuperNode, and answers those that its server signed."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from fedpact.engines.flower import codec, seal
from fedpact.engines.flower.runtime import TaskQueue
from fedpact.engines.parties.site import Site, answer
from fedpact.errors import FedpactError, InputError
from fedpact.messages import Refusal, Step, Task, from_bytes, to_bytes

_log = logging.getLogger("fedpact.site")
_POLL_SECONDS = 0.1
# A SuperNode takes a few seconds to start.
_SILENT_SECONDS = 20.0


def respond(site: Site, key: ec.EllipticCurvePrivateKey, message: Message) -> Message:
    """Return a site's signed answer to a message; to one that its server did not sign, a refusal.

    key: the site's private key.
    """
    began = time.perf_counter()
    server = seal.public_key(site.federation.server_key)
    try:
        # A message may carry one of Flower's errors in place of a record.
        record = message.content if message.has_content() else RecordDict()
        block, signature = codec.from_record(record)
        seen, agreed = codec.read_seen(record), codec.read_agreed(record)
        signed = seal.is_signed(
            server, seal.signing_context(site.name, seen, agreed), block, signature
        )
    except InputError:
        block, seen, agreed, signed = b"", (0, ""), "", False
    if not signed:
        reply, told = to_bytes(Refusal("", 0, site.name, "unsigned")), "unsigned task refused"
    elif agreed != site.agreed:
        reply, told = _disagreed(site, block)
    else:
        reply, told = answer(site, block, seen)
    record = codec.to_record(reply, seal.sign(key, f"reply of {site.name}", reply))
    seconds = time.perf_counter() - began
    site.note(reply, seconds)
    _log.info("%s, in %.3f s", told, seconds)
    return Message(record, reply_to=message)


def _disagreed(site: Site, block: bytes) -> tuple[bytes, str]:
    """Return the refusal of a question under other terms, and what to write into the site's log."""
    try:
        question = from_bytes(block, site.most_vectors)
    except InputError:
        question = None
    about = (question.run, question.round) if isinstance(question, Task | Step) else ("", 0)
    told = (
        "refused: terms; the server has another plan.json or federation.toml than this site "
        "(columns, sizes, labels, any setting), or another version of fedpact: compare both files"
    )
    return to_bytes(Refusal(*about, site.name, "terms")), f"round {about[1]}: {told}"


def work(
    site: Site,
    directory: Path,
    alive: Callable[[], bool],
) -> None:
    """Answer tasks until `alive` says no, or nobody is at the SuperNode's end any more.

    It also ends after an answer that was not handed over: a SuperNode waits for it for ever, and
    for nothing else.
    directory: the site's, with its key and secret. Raises FedpactError: the site has stopped.
    """
    key = seal.read_private_key(directory / "site.key")
    address = f"127.0.0.1:{site.settings.port}"
    desk = TaskQueue(address, TaskType.CLIENT_APP, directory / "runtime.secret", None)
    try:
        while alive() and desk.silent_seconds < _SILENT_SECONDS:
            found = desk.next()
            if found is None:
                time.sleep(_POLL_SECONDS)
            else:
                handed_over = _serve(site, key, desk, found[1], alive)
                if site.stopped:
                    raise FedpactError(site.stopped)
                if not handed_over:
                    return
    finally:
        desk.close()


def _serve(
    site: Site,
    key: ec.EllipticCurvePrivateKey,
    desk: TaskQueue,
    token: str,
    alive: Callable[[], bool],
) -> bool:
    """Carry out one task; return whether its answer was handed over.

    What the network loses is asked for again, and then lies stored.
    """
    try:
        with desk.work(token) as client:
            message, context = _pulled(client, alive)
            push_message(client, respond(site, key, message), context)
    except Exception as error:  # whatever Flower's inside raises: `respond` raises nothing
        _log.warning("an answer was not handed over (%s): waiting to be asked again", error)
        return False
    return True


def _pulled(client: RuntimeHttpClient, alive: Callable[[], bool]) -> tuple[Message, Context]:
    """Return a task's message and context. Raises what Flower's inside does.

    A message whose server was lost before it was whole stays so, and Flower waits two hours for the
    rest: here no longer than there is somebody. Raises TimeoutError.
    """
    found: queue.SimpleQueue[tuple[Message, Context] | Exception] = queue.SimpleQueue()

    def pull() -> None:
        try:
            found.put(pull_task_input(client)[:2])
        except Exception as error:
            found.put(error)

    threading.Thread(target=pull, daemon=True).start()
    while True:
        try:
            pulled = found.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if not alive():
                raise TimeoutError("its question was not whole when the server was lost") from None
            continue
        if isinstance(pulled, Exception):
            raise pulled
        return pulled
