"""Real processes on loopback with TLS and keys on: the same bits as the in-process engine, and no
way in without a key, with another authority's certificate, or over plain HTTP."""

import json
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.recounted import timeless
from tests.waiting import wait_for

from benchmarks import deployment
from fedpact.deployment import keys, processes
from fedpact.deployment.federation import Federation
from fedpact.deployment.flower import program
from fedpact.deployment.snapshot import inspect_deployment
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

PLAN = {"rounds": 3, "sites": 2, "settings": {"local_steps": 4}}
SITES = ("site-00", "site-01")


def finished(make, elsewhere):
    """A deployment that has run to its end, with what strangers got who knocked meanwhile."""
    directory = make(
        elsewhere / "d",
        {"seeds": "test", "patience": {"join_seconds": 3600}},
        privacy={},
        **PLAN,
    )
    # As long as a site has not come the run does not begin, so strangers find the server there.
    here = processes.Parties(directory)
    try:
        here.start("server", SITES[0])
        log = directory / "server" / "log.txt"
        wait_for(lambda: not here.runs("server") or "is connected" in log.read_text(), directory)
        knocked = knock(directory, elsewhere / "strangers")
        number = here._children["server"].pid
        knocked["long body"] = flood(directory, number)
        site = directory / "sites" / SITES[0]
        knocked["a site's long body"] = flood(directory, number, site)
        knocked["a site's long header"] = flood(directory, number, site, "X: ")
        here.start()
        wait_for(lambda: not here.runs("server"), directory)
        return directory, knocked, inspect_deployment(directory)
    finally:
        here.stop()
        for path in directory.rglob("log.txt"):
            print(path, path.read_text()[-2000:], sep="\n")


def knock(directory, elsewhere):
    """Try to get in as those do who must not; return what each got."""
    (elsewhere / "flower").mkdir(parents=True)
    address = Federation.read(directory / "server" / "federation.toml").address
    keys.write_signing_key(elsewhere / "site.key")
    keys.write_client_certificate(elsewhere, "site.key")
    keys.write_authority(elsewhere)
    server, site = directory / "server", directory / "sites" / SITES[0]

    def context(authority, key=None):
        found = ssl.create_default_context(cafile=authority)
        if key is not None:
            found.load_cert_chain(key / program.CLIENT)
        return found

    url = f"https://{address}/health"
    return {
        "a site": asked(url, context(server / "ca.crt", site)),
        "unknown key": asked(url, context(server / "ca.crt", elsewhere)),
        "wrong certificate": asked(url, context(elsewhere / "ca.crt", site)),
        "no key": asked(url, context(server / "ca.crt")),
        "plain HTTP": asked(url.replace("https", "http"), None),
    }


def asked(url, context):
    try:
        with urllib.request.urlopen(url, timeout=10, context=context):
            return "answered"
    except urllib.error.HTTPError:
        return "answered"
    except OSError as error:
        return str(error)


def flood(directory, number, site=None, ends="\r\n"):
    """Send a body of 256 MiB, with a site's certificate or none; return the growth of memory's
    peak, and the answer. ends: of the header, which becomes as long if it does not end."""
    server = directory / "server"
    host, port = Federation.read(server / "federation.toml").address.split(":")
    context = ssl.create_default_context(cafile=server / "ca.crt")
    if site is not None:
        context.load_cert_chain(site / program.CLIENT)
    with context.wrap_socket(
        socket.create_connection((host, int(port))), server_hostname=host
    ) as s:
        Path(f"/proc/{number}/clear_refs").write_text("5")  # its peak is what it has now
        before = peak_bytes(number)
        head = f"POST /v1/control/start-run HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Type: application/protobuf\r\nContent-Length: {2**28}\r\n{ends}"
        answer = b""
        try:
            s.sendall(head.encode())
            for _ in range(2**8):
                s.sendall(b"a" * 2**20)
            answer = s.recv(100)
        except OSError:  # it hangs up
            answer = answer or b"hung up"
    return peak_bytes(number) - before, answer.decode()


def peak_bytes(number):
    """The most memory that a process has had."""
    (line,) = [
        line
        for line in Path(f"/proc/{number}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return 1024 * int(line.split()[1])


def simulated(directory, out):
    """The in-process engine on the same plan, under the deployment's run name."""
    run = Federation.read(directory / "server" / "federation.toml").run
    identifier = run.partition("-")[2]
    plan = Plan.read(directory / "server" / "plan.json")
    patch = pytest.MonkeyPatch()
    with patch.context() as changed:
        fixed = type("Fixed", (), {"hex": identifier})
        changed.setattr("fedpact.simulation.run.uuid.uuid4", fixed)
        result = simulate(plan, out)
    assert json.loads((out / "environment.json").read_text())["run"] == run
    return result


def check_that_it_ended_and_nobody_was_missed(found):
    assert found["status"] == "finished"
    assert found["round"] == PLAN["rounds"]
    assert not any(site["refusals"] for site in found["sites"].values())


def check_the_model_bit_for_bit(directory, simulated):
    over_flower = load_file(directory / "server" / "run" / "model.safetensors")
    in_process = load_file(simulated.folder / "model.safetensors")
    assert over_flower.keys() == in_process.keys()
    assert all(torch.equal(over_flower[name], in_process[name]) for name in in_process)
    # A model that never moved would be equal, too.
    assert simulated.records[-1].accuracy > simulated.records[0].accuracy + 0.3


def check_every_round(directory, simulated):
    lines = (directory / "server" / "run" / "rounds.jsonl").read_text().splitlines()
    for line, record in zip(map(json.loads, lines), simulated.records, strict=True):
        told = (line["round"], line["steps"], line["bytes_down"], line["bytes_up"])
        assert told == (record.round, record.steps, record.bytes_down, record.bytes_up)
        # Around each message are TLS and what Flower says: a few requests, and no second message.
        if record.round:
            down, up = line["sockets"]
            assert record.bytes_down < down < record.bytes_down + 200_000
            assert record.bytes_up < up < record.bytes_up + 400_000
        # Nobody was asked twice, so what the server counts is what the ledgers hold.
        assert line["epsilon"] == record.epsilon
        if record.accuracy is not None:
            assert (line["accuracy"], line["loss"]) == (record.accuracy, record.loss)


def check_the_ledgers_entry_by_entry(directory, simulated):
    for name in SITES:
        here = timeless(directory / "sites" / name / "ledger.jsonl")
        there = timeless(simulated.folder / "sites" / name / "ledger.jsonl")
        # A simulation, which protects nobody, notes no placement; "number" counts entries.
        assert here.pop(2)["placement"] in ("compact", "scattered")
        for number, entry in enumerate(here):
            entry["number"] = number
        assert here == there
        assert [entry["kind"] for entry in here] == ["open", "reserve"] + ["charge"] * PLAN[
            "rounds"
        ]


def check_that_strangers_did_not_get_in(directory, knocked):
    assert knocked["a site"] == "answered"
    for name in ("unknown key", "wrong certificate", "no key", "plain HTTP"):
        assert knocked[name] != "answered", name
    assert knocked["long body"][1] == "hung up"
    assert knocked["a site's long body"][1].startswith(("HTTP/1.1 413", "hung up"))
    assert knocked["a site's long header"][1].startswith(("HTTP/1.1 400", "hung up"))
    floods = "long body", "a site's long body", "a site's long header"
    assert max(knocked[flood][0] for flood in floods) < 2**26
    assert "CERTIFICATE_VERIFY_FAILED" in knocked["wrong certificate"]
    log = (directory / "server" / "log.txt").read_text()
    connected = {line.split()[-3] for line in log.splitlines() if line.endswith("is connected")}
    assert connected == set(SITES)


def check_that_every_party_states_how_the_run_ended(directory):
    run = Federation.read(directory / "server" / "federation.toml").run
    summary = json.loads((directory / "server" / "run" / "summary.json").read_text())
    for name, place in processes.parties(directory).items():
        lines = (place / "log.txt").read_text().splitlines()
        line = next(line for line in lines if f"run {run} has ended" in line)
        # The site's figures are its ledger's, the server's what it has counted.
        for site in (name,) if name in SITES else SITES:
            spent = f"{site} ε <= {summary['epsilon'][site]!r} at δ = {summary['delta'][site]!r}"
            assert spent in line
        assert f"after round {PLAN['rounds']}; its model is" in line
        assert str(place.resolve() / "run" / "model.safetensors") in line


def check_that_the_logs_say_what_each_round_took(directory):
    """The benchmark of a deployment reads them."""
    logs = [(directory / "server", deployment.SERVER)]
    logs += [(directory / "sites" / name, deployment.SITE) for name in SITES]
    for where, pattern in logs:
        assert sorted(deployment.by_round(where / "log.txt", pattern)) == [1, 2, 3]


def check_that_its_log_and_flowers_files_are_its_owners(site):
    """Of a party that was started as owners start it."""
    assert (site / "log.txt").stat().st_mode & 0o777 == 0o600
    assert processes._home(site).stat().st_mode & 0o777 == 0o700


def check_that_nothing_is_left_running(directory):
    found = inspect_deployment(directory)
    assert not any(found["running"].values())
    for name, where in processes.parties(directory).items():
        for process in Path("/proc").glob("[0-9]*/cwd"):
            try:
                at = process.resolve(strict=True)
            except OSError:
                continue
            assert at != where.resolve(), f"{name}: {process}"


@pytest.mark.usefixtures("forked")
def test_a_federation_of_processes(make, tmp_path, monkeypatch):
    """One test, as starting it is most of its time."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as services that run tests do: logs have none
    directory, knocked, found = finished(make, tmp_path)
    check_that_it_ended_and_nobody_was_missed(found)
    in_process = simulated(directory, tmp_path / "simulated")
    check_the_model_bit_for_bit(directory, in_process)
    check_every_round(directory, in_process)
    check_the_ledgers_entry_by_entry(directory, in_process)
    check_that_strangers_did_not_get_in(directory, knocked)
    check_that_every_party_states_how_the_run_ended(directory)
    check_that_the_logs_say_what_each_round_took(directory)
    check_that_its_log_and_flowers_files_are_its_owners(directory / "sites" / SITES[1])
    check_that_nothing_is_left_running(directory)
