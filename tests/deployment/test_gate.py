"""What a site is told when its server does not let it in: a real TLS server gives the answers."""

import email.utils
import http.server
import json
import shutil
import ssl
import threading
import time
from types import SimpleNamespace

import pytest
from flwr.proto.fleet_pb2 import ActivateNodeResponse, DeactivateNodeRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse

from fedpact.deployment import keys
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import program, site_process
from fedpact.deployment.flower.site_process import NotLetIn


class Server:
    """A SuperLink's answers. ahead: seconds by which its clock is. refuse: (status, body) or None.

    left: the nodes that were told to be gone. It breaks off when it is asked for messages.
    """

    def __init__(self, server_dir, node=77):
        self.ahead, self.refuse, self.node, self.left = 0.0, None, node, []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                status, content = outer.answer(self.path, body)
                self.send_response_only(status)
                date = email.utils.formatdate(time.time() + outer.ahead, usegmt=True)
                self.send_header("date", date)
                self.send_header("content-type", "application/protobuf")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        federation = Federation.read(server_dir / "federation.toml")
        (server_dir / "flower").mkdir()
        keys.write_anchors(server_dir, federation)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(server_dir / "tls.crt", server_dir / "tls.key")
        # As uvicorn does with the options that a SuperLink is given.
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(server_dir / program.ANCHORS)
        self.http.socket = context.wrap_socket(
            self.http.socket, server_side=True, do_handshake_on_connect=False
        )
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.http.server_address[1]}"

    def answer(self, path, body):
        if path.endswith("deactivate-node"):
            self.left.append(DeactivateNodeRequest.FromString(body).node_id)
            return 200, b""
        if path.endswith("pull-messages"):
            return 500, b""
        if path.endswith("heartbeat"):
            return 200, SendNodeHeartbeatResponse(success=True).SerializeToString()
        if self.refuse is not None:
            return self.refuse
        return 200, ActivateNodeResponse(node_id=self.node).SerializeToString()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(deployment):
    found = Server(deployment / "server")
    yield found
    found.close()


@pytest.fixture
def enter(server, site_dir):
    federation = Federation.read(site_dir / "federation.toml")
    federation = federation.model_copy(update={"address": server.address})
    site = SimpleNamespace(
        name="site-00", federation=federation, stopped="", ending=None, longest_question=0
    )
    (site_dir / "flower").mkdir()
    keys.write_client_certificate(site_dir, "site.key")
    return lambda: site_process.work(site, site_dir, lambda _: None)


def test_an_admitted_node_has_its_number_before_its_task(enter, server, site_dir):
    """Killed in its first task, it would be turned away for a minute for want of it."""
    enter()
    assert server.left == [77]
    assert (site_dir / "flower" / "node").read_text() == "77"
    # Its successor gives up what the killed one has left, then asks.
    enter()
    assert server.left == [77, 77, 77]
    # A new database knows it under another number.
    server.node = 78
    enter()
    assert server.left[3:] == [77, 78]
    assert (site_dir / "flower" / "node").read_text() == "78"


def test_an_unreadable_number_is_asked_again(enter, server, site_dir):
    (site_dir / "flower" / "node").write_bytes(b"\xff\x00")
    enter()
    assert (site_dir / "flower" / "node").read_text() == "77"


@pytest.mark.parametrize(("ahead", "told"), [(-3600, "ahead of"), (3600, "behind")])
def test_a_clock_error_gives_the_difference(enter, server, ahead, told):
    server.ahead, server.refuse = ahead, (401, b'{"detail": "Invalid SuperNode authentication"}')
    # A busy machine takes its time between the two clocks.
    words = rf"clock of this machine is 3[56]\d\d s {told} .* by a time server"
    with pytest.raises(NotLetIn, match=words):
        enter()


def test_a_key_unknown_to_the_server_is_reported(enter, server):
    body = {"code": 2004, "detail": "Failed to activate SuperNode."}
    server.refuse = 412, json.dumps(body).encode()
    with pytest.raises(NotLetIn, match=r"does not let 'site-00' in.*sha256sum federation\.toml"):
        enter()


def test_a_key_outside_the_federation_is_rejected(enter, server, site_dir):
    """TLS itself ends it: no request of a stranger's is read."""
    keys.write_signing_key(site_dir / "strangers.key")
    shutil.move(site_dir / "strangers.key", site_dir / "site.key")
    keys.write_client_certificate(site_dir, "site.key")
    with pytest.raises(NotLetIn, match=r"hangs up on this site's key .*sha256sum federation\.toml"):
        enter()
    assert server.left == []


def test_another_refusal_is_reported_unchanged(enter, server):
    server.refuse = 400, json.dumps({"code": 2003, "detail": "Invalid interval."}).encode()
    with pytest.raises(NotLetIn, match=r"code 2003: Invalid interval\..*the same version"):
        enter()
    server.refuse = 500, b"<html>"
    with pytest.raises(NotLetIn, match="status 500"):
        enter()


def test_a_server_under_another_authority_is_not_taken_for_it(enter, site_dir, tmp_path):
    keys.write_authority(tmp_path / "other")
    (site_dir / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
    with pytest.raises(NotLetIn, match=r"is not taken for the server .*CERTIFICATE_VERIFY_FAILED"):
        enter()


def test_a_server_that_disappears_is_reported(enter, server):
    server.http.socket.close()
    server.http.shutdown()
    with pytest.raises(NotLetIn, match="no answer at"):
        enter()
