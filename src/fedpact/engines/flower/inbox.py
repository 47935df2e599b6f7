"""Flower's Grid, without its waiting: an answer that is still on its way holds up no other.

A SuperLink knows of an answer before it has its content. Flower's own Grid, once it has been told
of one, waits for the content, and with it whoever asked: for three minutes after a site was killed
in the midst of sending, while the other sites' answers lie there.
"""

import logging
import queue
import threading
from collections.abc import Iterable

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid import HttpGrid

_log = logging.getLogger("fedpact.server")
_HERE_SECONDS = 0.05


class PromptGrid(HttpGrid):
    """A Grid whose `pull_messages` returns at once, with the answers that are there in full.

    The others come with a later call, whatever that asks for.
    """

    def __init__(self, address: str, root: bytes | None, token: str) -> None:
        super().__init__(address, root_certificates=root, token=token)
        # To which messages answers are on their way, and the answers that are here: None, if one
        # never came in full.
        self._awaited = set[str]()
        self._here = queue.SimpleQueue[tuple[str, Message | None]]()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return answers to these messages, or to earlier ones, that have arrived in full."""
        # Of an answer that has been fetched a SuperLink says that there never was any.
        asked = [number for number in message_ids if number not in self._awaited]
        fetching = self._fetch_all(asked) if asked else []
        for thread in fetching:
            # Most are there in full; then they come with this call.
            thread.join(_HERE_SECONDS)
        found = list[Message]()
        while not self._here.empty():
            number, message = self._here.get()
            self._awaited.discard(number)
            if message is not None:
                found.append(message)
        return found

    def _fetch_all(self, asked: list[str]) -> list[threading.Thread]:
        told = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        fetching = list[threading.Thread]()
        for each, tree in zip(told.messages_list, told.message_object_trees, strict=True):
            about = each.metadata.reply_to_message_id
            self._awaited.add(about)
            arguments = about, each.metadata.message_id, tree
            fetching.append(threading.Thread(target=self._fetch, args=arguments, daemon=True))
            fetching[-1].start()
        return fetching

    def _fetch(self, about: str, number: str, tree: ObjectTree) -> None:
        """Wait for an answer's content, tell Flower that it is here, and put it with the others."""
        client, run, message = self._runtime_client, self.run.run_id, None
        try:
            contents = pull_objects(
                [each.object_id for each in iterate_object_tree(tree)],
                make_pull_object_fn_protobuf(client.PullObject, self.node, run),
            )
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=number)
            )
            found = inflate_object_from_contents(number, contents)
            # What it says inside is no more than its sender's word. Under which question it was
            # filed at the SuperLink follows from that question's number, a hash with a signature
            # in it, which only the site that was asked has been told.
            if isinstance(found, Message) and found.metadata.reply_to_message_id == about:
                message = found
            else:
                _log.warning("an answer says that it answers another question: left out")
        except Exception as error:  # what a stranger sent may be unreadable in any way
            # Who was asked does not answer, which is how it is treated.
            _log.warning("an answer never arrived in full: %s", error)
        finally:
            self._here.put((about, message))
