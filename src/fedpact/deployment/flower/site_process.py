"""A site's process under Flower: its connection to the server, and its answers.

What goes wrong is said in words that the site's owner can act on.
"""

import datetime
import email.utils
import json
import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict

from fedpact.common.errors import FedpactError, InputError
from fedpact.common.files import write_whole
from fedpact.common.messages import Refusal, Step, from_bytes, to_bytes
from fedpact.common.messages import Task as TrainingTask
from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.internals import FleetLink, read_refusal, tls
from fedpact.deployment.flower.program import NODE
from fedpact.deployment.site import Site, answer
from fedpact.simulation.secure_aggregation import keys

_log = logging.getLogger("fedpact.site")
# What Flower allows a message's time to differ from the server's: ahead, and behind.
_AHEAD_SECONDS, _BEHIND_SECONDS = 5.0, 305.0
# All sites together look for questions so many times a second, and each at least so often.
_LOOKS_PER_SECOND, _MOST_PAUSE_SECONDS = 10, 3.0
_SILENT_SECONDS = 20.0
_MOST_SEAL_BYTES = 2**12


class NotLetIn(FedpactError):
    """The server does not let the site in now, and why; it may later."""


def work(site: Site, directory: Path, tell: Callable[[str], None]) -> None:
    """Connect to the site's server and answer its questions until the connection ends.

    It also ends after an answer that was not handed over: the server asks again, and the answer
    then lies stored. tell: takes what the site's owner is told. directory: the site's, with its
    key, the authority's certificate, and the number under which the server knows its node, once
    that was told. Raises NotLetIn; FedpactError: the site has stopped.
    """
    key, address = keys.read_private_key(directory / "site.key"), site.federation.address
    known, let_in = None, False
    with suppress(OSError, ValueError):  # a number that cannot be read is one that is not known
        known = int((directory / NODE).read_bytes())
    pause = min(_MOST_PAUSE_SECONDS, len(site.federation.sites) / _LOOKS_PER_SECOND)
    link = FleetLink(address, tls(directory), key, _most_bytes(site))
    try:
        # Its time tells whether the site is at work (program.find_outage).
        with link.enter(known, (directory / NODE).touch) as node:
            if node != known:
                write_whole(directory / NODE, str(node).encode())
            let_in = True
            tell("let in by the server")
            while not site.stopped:
                question = link.next()
                if question is None:
                    time.sleep(pause)
                    continue
                began = time.perf_counter()
                link.answer(respond(site, key, question), time.perf_counter() - began)
    except Exception as error:  # of Flower's modules: `respond` raises nothing
        if let_in:
            if not site.ending:  # after the end of the run the server goes
                tell(f"the connection to the server has ended: {error}")
        elif isinstance(error, httpx.HTTPStatusError):
            raise NotLetIn(_explain_refusal(site, error.response)) from None
        elif isinstance(error, httpx.HTTPError | ssl.SSLError):
            raise NotLetIn(_explain_unreached(address, directory, str(error))) from None
        elif isinstance(error, ValueError):
            raise NotLetIn(
                f"the server at {address} gives an answer that Flower cannot read ({error}): see "
                "whether both ends run the same version of fedpact and Flower"
            ) from None
        else:
            raise
    finally:
        link.close()
    if site.stopped:
        raise FedpactError(site.stopped)


def _most_bytes(site: Site) -> int:
    return flower_records.most_bytes(site.longest_question, len(site.federation.sites))


def _explain_refusal(site: Site, response: httpx.Response) -> str:
    address, ahead = site.federation.address, 0.0
    with suppress(KeyError, ValueError):
        there = email.utils.parsedate_to_datetime(response.headers["date"])
        ahead = (datetime.datetime.now(datetime.UTC) - there).total_seconds()
    if not -_BEHIND_SECONDS < ahead < _AHEAD_SECONDS:
        where = "ahead of" if ahead > 0 else "behind"
        return (
            f"the clock of this machine is {abs(ahead):.0f} s {where} that of the server at "
            f"{address}, and a site is let in only with {_AHEAD_SECONDS:.0f} s ahead to "
            f"{_BEHIND_SECONDS:.0f} s behind: set both by a time server"
        )
    turned_away, told = read_refusal(response)
    if turned_away:
        return (
            f"the server at {address} does not let {site.name!r} in. Either its federation.toml "
            "has another key for this site, or it has not started with this one yet: compare "
            "`sha256sum federation.toml` with the server's. Or another process is connected with "
            "this site's key: one that was killed counts for a minute; a copy of this directory "
            "that runs elsewhere has to be ended, as both would spend the same budget"
        )
    return (
        f"the server at {address} does not let {site.name!r} in ({told}): see the server's "
        "flower/log.txt, and whether both ends run the same version of fedpact and Flower"
    )


def _explain_unreached(address: str, directory: Path, why: str) -> str:
    if "ALERT" in why or "EOF" in why:
        return (
            f"the server at {address} hangs up on this site's key ({why}): its federation.toml has "
            "another one for this site, or it has not started with this one yet; compare "
            "`sha256sum federation.toml` with the server's. Or a firewall or proxy hangs up"
        )
    if "CERTIFICATE" not in why and "SSL" not in why:
        return (
            f"no answer at {address}, the server's address in federation.toml ({why}): the site "
            "keeps trying; check that the server runs, and that its port is open to this machine"
        )
    now = datetime.datetime.now(datetime.UTC)
    return (
        f"who answers at {address} is not taken for the server ({why}): expected a certificate "
        f"for that address under {directory / 'ca.crt'} that holds today, and this machine's clock "
        f"says {now:%Y-%m-%d %H:%M} UTC. Compare ca.crt and the address in federation.toml with "
        "the server's, and set the clock by a time server"
    )


def respond(site: Site, key: ec.EllipticCurvePrivateKey, message: Message) -> Message:
    """Return a site's signed answer to a message, which may be one of Flower's errors."""
    record = message.content if message.has_content() else RecordDict()
    return Message(reply_to_record(site, key, record), reply_to=message)


def reply_to_record(site: Site, key: ec.EllipticCurvePrivateKey, record: RecordDict) -> RecordDict:
    """Return a site's signed answer to a question; to what its server did not sign, a refusal.

    key: the site's private key. The refusal of an empty question says who the site is.
    """
    began = time.perf_counter()
    server = keys.public_key(site.federation.server_key)
    try:
        block, signature = flower_records.from_record(record)
        seen, agreed = flower_records.read_seal(record)
        signed = keys.is_signed(
            server, keys.signing_context(site.name, seen, agreed), block, signature
        )
    except InputError:
        block, seen, agreed, signed = b"unreadable", (0, ""), "", False
    if not signed:
        told = "unsigned task refused" if block else "asked for its name"
        reply = to_bytes(Refusal("", 0, site.name, "unsigned"))
    elif agreed != site.agreed:
        reply, told = _refuse_terms(site, block)
    else:
        reply, told = answer(site, block, seen)
    seconds = time.perf_counter() - began
    if block:
        site.note(reply, seconds)
    _log.info("%s, in %.3f s", told, seconds)
    return flower_records.to_record(reply, keys.sign(key, f"reply of {site.name}", reply))


def _refuse_terms(site: Site, block: bytes) -> tuple[bytes, str]:
    """Return the refusal of a question under other terms, and what to write into the site's log."""
    try:
        question = from_bytes(block, site.most_vectors)
    except InputError:
        question = None
    about = (question.run, question.round) if isinstance(question, TrainingTask | Step) else ("", 0)
    told = (
        "refused: terms; the server has another plan.json or federation.toml than this site "
        "(columns, sizes, labels, any setting), or another minor version of fedpact: compare both "
        "files, and `fedpact --version`"
    )
    return to_bytes(Refusal(*about, site.name, "terms")), f"round {about[1]}: {told}"


def listen(site: Site, directory: Path, path: Path) -> None:
    """Answer at a Unix socket what a Flower app's client passes on; see app/app.py.

    One after the other; a client that is silent for long is left. directory: the site's.
    Raises FedpactError: the site has stopped.
    """
    key = keys.read_private_key(directory / "site.key")
    path.unlink(missing_ok=True)  # of a process that was killed: the directory is held by this one
    with Listener(str(path), "AF_UNIX", backlog=16) as listener:
        path.chmod(0o660)
        _log.info("answers at %s", path)
        while not site.stopped:
            try:
                with listener.accept() as link:
                    _answer_at(link, site, key)
            except EOFError:
                pass  # it went away, or looked whether somebody is here
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                _log.warning("a question at the socket was left: %s", error)
    raise FedpactError(site.stopped)


def _answer_at(link: Connection, site: Site, key: ec.EllipticCurvePrivateKey) -> None:
    parts = list[bytes]()
    for most in (_MOST_SEAL_BYTES, _most_bytes(site)):
        if not link.poll(_SILENT_SECONDS):
            raise TimeoutError("it did not come")
        parts.append(link.recv_bytes(most))
    seal = json.loads(parts[0])
    seen = seal["length"], seal["head"]
    signature = bytes.fromhex(seal["signature"])
    record = flower_records.to_record(parts[1], signature, seen, seal["agreed"])
    block, signature = flower_records.from_record(reply_to_record(site, key, record))
    link.send_bytes(signature)
    link.send_bytes(block)
