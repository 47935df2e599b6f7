"""How parties end: a server whose SuperLink is lost at any moment exits, with its own code.

Nothing here waits for a time to pass: a SuperLink dies at a request that it counts, and the server
is waited for until it has exited.
"""

import logging
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
import uvicorn
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest
from flwr.supercore.task_identity import TaskIdentity
from tests.deployment.conftest import Forked
from tests.waiting import wait_for

from fedpact.common.errors import FedpactError, TransportLost
from fedpact.deployment import processes
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import program
from fedpact.deployment.flower.internals import PromptGrid, SuperLink, tls

# Of a SuperLink: answers requests by name, and is killed at the one that it is told.
LINK = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto import message_pb2, runtime_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
question = Message(RecordDict({"r": ConfigRecord({"r": "question"})}), 7, "train")
question.metadata.__dict__["_message_id"] = "question"
question.metadata.__dict__["_src_node_id"] = 1
reply = Message(RecordDict({"r": ConfigRecord({"r": "answer"})}), reply_to=question)
reply.metadata.__dict__["_message_id"] = reply.object_id
objects = {key: each.deflate() for key, each in get_all_nested_objects(reply).items()}
seen = []

def push_messages(body):
    sent = runtime_pb2.PushAppMessagesRequest.FromString(body)
    pushed = [n for tree in sent.message_object_trees for n in names(tree)]
    return runtime_pb2.PushAppMessagesResponse(message_ids=["question"], objects_to_push=pushed)

def names(tree):
    return [tree.object_id, *(n for child in tree.children for n in names(child))]

def push_object(body):
    return message_pb2.PushObjectResponse(stored=True)

def pull_messages(body):
    return runtime_pb2.PullAppMessagesResponse(
        messages_list=[message_to_proto(reply)], message_object_trees=[get_object_tree(reply)]
    )

def pull_object(body):
    asked = message_pb2.PullObjectRequest.FromString(body)
    content = objects[asked.object_id]
    return message_pb2.PullObjectResponse(
        object_found=True, object_available=True, object_content=content
    )

def confirm_message_received(body):
    return message_pb2.ConfirmMessageReceivedResponse()

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.rpartition("/")[2].replace("-", "_")
        seen.append(name)
        if seen.count(sys.argv[1]) == int(sys.argv[2]) and name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = globals()[name](body).SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def ask(directory, moment, held_up):
    """Send a question and fetch the answer, again and again, as `run_server` does."""
    processes._KNOCK_SECONDS = 0.05
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    command = [sys.executable, str(directory / "link.py"), *moment]
    link = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    port = link.stdout.readline().strip()
    try:
        with (
            processes._end_by_signals(),
            processes._ends_with(lambda: link.poll() is None, directory),
            closing(PromptGrid(f"http://127.0.0.1:{port}", None, "token", 1)) as grid,
        ):
            while True:
                message = Message(RecordDict({"r": ConfigRecord({"r": "question"})}), 7, "train")
                list(grid.push_messages([message]))
                list(grid.pull_messages(["question"]))
                held_up()
    except FedpactError as error:
        print(error)
        sys.exit(error.exit_code)


def serve(directory, moment, held_up=lambda: None):
    """Return the exit code of such a server, and its output."""
    (directory / "link.py").write_text(LINK)
    (directory / "flower").mkdir()
    (directory / "flower" / "log.txt").write_text("ERROR of Flower\n")
    ended = Forked(partial(ask, directory, moment, held_up), directory / "out.txt")
    ended.wait()
    return ended.poll(), ended.log.read_text()


@pytest.mark.parametrize(
    "moment",
    [
        ("push_object", "2"),  # in a thread of Flower's
        ("push_messages", "1"),
        ("pull_messages", "1"),
        ("pull_object", "3"),
        ("confirm_message_received", "1"),
        ("pull_object", "1"),  # in a thread of ours, which waits for Flower's
    ],
)
@pytest.mark.slow
def test_server_whose_superlink_is_killed_exits(tmp_path, moment):
    code, told = serve(tmp_path, moment)
    assert code == TransportLost.exit_code == 69, told
    assert "SuperLink has ended: see why in" in told


def test_a_blocked_server_exits_too(tmp_path):
    """As by a thread that nobody ends, or a main thread that takes no notice of signals."""

    def stuck():
        processes._LOST_SECONDS = 0.1
        threading.Thread(target=threading.Event().wait).start()

    code, told = serve(tmp_path, ("pull_messages", "3"), stuck)
    assert code == TransportLost.exit_code == 69, told


@pytest.fixture
def federation(make, tmp_path):
    """Real processes of two sites and a server; the server's is started by `start_server`."""
    patience = {"join_seconds": 3600, "round_seconds": 3600, "resend_seconds": 6}
    directory = make(tmp_path / "d", {"patience": patience}, rounds=3, sites=2)
    with processes.Parties(directory) as here:
        yield here
    for path in directory.rglob("log.txt"):
        print(path, path.read_text()[-3000:], sep="\n")


def is_connected(log):
    return log.exists() and "is connected" in log.read_text()


@pytest.mark.slow
def test_a_run_stopped_by_a_user_says_so(federation, tmp_path):
    """As anybody who reaches the control API can do."""
    server = tmp_path / "d" / "server"
    federation.start("server", "site-00")
    wait_for(lambda: is_connected(server / "log.txt"), server)
    link = SuperLink(Federation.read(server / "federation.toml").address, tls(server))
    for number in link._client.ListRuns(ListRunsRequest()).run_dict:
        link._client.StopRun(StopRunRequest(run_id=number))
    link.close()
    wait_for(lambda: not federation.runs("server"), server)
    assert "was stopped by Flower's control API" in processes.last_log_lines(server, "server")


@pytest.mark.parametrize("ends", ["raises", "exits", "returns"])
def test_a_superlink_that_ends_ends_its_thread(tmp_path, monkeypatch, ends):
    """Which the server watches, and so exits with code 69: see above."""

    def flower():
        if ends == "raises":
            raise OSError("no space left")
        if ends == "exits":
            sys.exit(3)

    script = SimpleNamespace(load=lambda: flower)
    monkeypatch.setattr(program, "entry_points", lambda **_: (script,))
    monkeypatch.setattr(uvicorn, "run", uvicorn.run)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    log = tmp_path / program.LOG
    log.parent.mkdir()
    flwr = logging.getLogger("flwr")
    monkeypatch.setattr(flwr, "propagate", flwr.propagate)
    for handler in flwr.handlers:
        monkeypatch.setattr(handler, "stream", handler.stream)
    with program.superlink(tmp_path, 1000, []) as thread:
        thread.join(20)
        assert not thread.is_alive()
    assert ("OSError: no space left" in log.read_text()) == (ends == "raises")
