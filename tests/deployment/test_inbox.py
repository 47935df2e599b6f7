"""Flower's Grid with answers that are on their way: none of them holds up another."""

import threading

import pytest
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.internals import PromptGrid


class Link:
    """A SuperLink's side: it tells of an answer once, and has its content when `content` is set.

    asked: what it was asked for, call by call. An answer that was confirmed it has forgotten.
    """

    def __init__(self):
        self.told, self.content, self.asked, self.confirmed = [], {}, [], threading.Event()
        self.objects = {}

    def answer(self, question, block, inside=None):
        """inside: the number of the question that the answer's own metadata name."""
        reply = Message(flower_records.to_record(block, b"signature"), reply_to=question)
        about = reply.metadata.reply_to_message_id
        reply.metadata.__dict__["_reply_to_message_id"] = inside or about
        number = reply.object_id
        reply.metadata.__dict__["_message_id"] = number
        here = threading.Event()
        for key, each in get_all_nested_objects(reply).items():
            self.objects[key] = each.deflate(), here
        outside = message_to_proto(reply)
        outside.metadata.reply_to_message_id = about
        self.told.append((outside, get_object_tree(reply)))
        self.content[block] = here
        return about

    def PullMessages(self, request):
        self.asked.append(list(request.message_ids))
        now = [e for e in self.told if e[0].metadata.reply_to_message_id in request.message_ids]
        self.told = [each for each in self.told if each not in now]
        return PullAppMessagesResponse(
            messages_list=[message for message, _ in now],
            message_object_trees=[tree for _, tree in now],
        )

    def PullObject(self, request):
        content, here = self.objects[request.object_id]
        here.wait()
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        self.confirmed.set()


@pytest.fixture
def grid():
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    found = PromptGrid("https://nowhere:1", None, "token", 1)
    found.client = Link()
    return found


def question(node):
    message = Message(flower_records.to_record(b"question", b"signature"), node, "train")
    message.metadata.__dict__["_message_id"] = f"question to {node}"
    message.metadata.__dict__["_src_node_id"] = 1
    return message


def blocks(messages):
    return [flower_records.from_record(message.content)[0] for message in messages]


def test_an_answer_that_is_half_sent_holds_up_no_other(grid):
    link = grid.client
    slow = link.answer(question(7), b"half sent")
    quick = link.answer(question(8), b"all here")
    link.content[b"all here"].set()
    found = []
    while not found:  # the other thread may be late on a busy machine; nothing else can be
        found = blocks(grid.pull_messages([slow, quick]))
    assert found == [b"all here"]
    # A SuperLink takes who asks for an answer on its way for one who has lost it.
    assert blocks(grid.pull_messages([slow])) == []
    assert link.asked == [[slow, quick]]
    link.content[b"half sent"].set()
    while not found or found == [b"all here"]:
        found = blocks(grid.pull_messages([slow]))
    assert found == [b"half sent"]
    assert link.asked == [[slow, quick]]


def test_a_missing_answer_is_none_and_can_be_requested_again(grid):
    link = grid.client
    number = link.answer(question(7), b"lost")
    link.PullObject = lambda request: PullObjectResponse(object_found=False)
    while len(link.asked) < 2:
        assert blocks(grid.pull_messages([number])) == []
    assert link.asked == [[number], [number]]


def test_an_answer_counts_for_the_question_that_it_was_sent_for(grid):
    """Whatever it says inside: a site could settle another's question, with what is none of it."""
    link = grid.client
    honest = question(8).metadata.message_id
    liars = link.answer(question(7), b"lie", inside=honest)
    link.content[b"lie"].set()
    while len(link.asked) < 2:  # given up, it may be asked for again
        assert blocks(grid.pull_messages([liars, honest])) == []
    link.answer(question(8), b"truth")
    link.content[b"truth"].set()
    found = []
    while not found:
        found = grid.pull_messages([liars, honest])
    assert blocks(found) == [b"truth"]
    assert [message.metadata.reply_to_message_id for message in found] == [honest]
