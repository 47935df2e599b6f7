"""What `fedpact deploy init` writes: complete, readable, closed where it has to be."""

import codecs
import json
import math
import os
import re
import stat
import tomllib
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import DataError, InputError, PlanError, PolicyRefused
from fedpact.common.messages import RoundRecord
from fedpact.deployment import processes
from fedpact.deployment.federation import Federation, Member, Patience, read_plan
from fedpact.deployment.files import (
    policy,
    render_federation,
    render_site_toml,
    write_deployment,
)
from fedpact.deployment.flower import flower_records
from fedpact.deployment.flower.program import find_outage
from fedpact.deployment.server import Coordinator
from fedpact.deployment.site import Site
from fedpact.plan import Plan
from fedpact.privacy.policy import Policy
from fedpact.simulation.machine import QUIET, require_flower
from fedpact.simulation.predict import OwnColumns
from fedpact.simulation.secure_aggregation import keys

SECRETS = ("*.key", "runtime.secret", "records.npz")


def test_every_party_has_the_same_plan_and_federation(written):
    parties = [written / "server", *sorted((written / "sites").iterdir())]
    assert len(parties) == 4
    for name in ("federation.toml", "plan.json", "ca.crt"):
        assert len({(party / name).read_bytes() for party in parties}) == 1


def test_names_and_figures_of_any_form_are_read_back(written):
    found = Federation.read(written / "server" / "federation.toml")
    classes = ("> 50\u202f000", "a\\b", "both ' and \"")
    # A key's comment is the account that made it, as Windows has it.
    key = rf'{found.sites["site-00"].key} ST-ANNA\usr "b"'
    member = Member(size=1234567.0, key=key)
    of = found.model_copy(
        update={
            "classes": classes,
            "sites": {**found.sites, "site-00": member},
            "server_key": key,
            "patience": Patience(
                round_seconds=1234567.5, resend_seconds=1 / 3, join_seconds=12345678
            ),
        }
    )
    assert Federation.model_validate(tomllib.loads(render_federation(of))) == of
    site = tomllib.loads(render_site_toml("a", "records.csv", 'ill "yes"'))
    assert site["label"] == 'ill "yes"'


def test_files_with_a_byte_order_mark_are_read(deployment, site_dir):
    """As some editors write them."""
    for path in deployment.rglob("*.toml"):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    Site(site_dir).close()
    assert OwnColumns.of(site_dir) == OwnColumns()
    for party in (site_dir, deployment / "server"):
        assert find_outage(party) == f"no process runs in {party}"


def test_a_server_prints_one_document_or_lines_with_their_terms(deployment, monkeypatch):
    def run(directory, on_round):
        on_round(RoundRecord(round=1, epsilon={"a": 1.0}))
        return {"status": "finished"}

    monkeypatch.setattr(processes, "run_server", run)
    done = CliRunner().invoke(app, ["deploy", "server", str(deployment / "server"), "--json"])
    assert done.exception is None, done.exception
    assert json.loads(done.stdout) == {"status": "finished"}
    told = CliRunner().invoke(app, ["deploy", "server", str(deployment / "server")]).stdout
    assert "each at its δ, adjacency and accountant as in plan.json\nround 1  ε 1 " in told


def test_secrets_are_for_their_owner_only_and_no_two_are_alike(written):
    secret = [path for pattern in SECRETS for path in written.rglob(pattern)]
    # 3 sites with a key and records; the server's two keys and secret; the authority's.
    assert len(secret) == 3 * 2 + 3 + 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert len({path.read_bytes() for path in secret}) == len(secret)


def test_the_policy_allows_this_run_once_and_names_its_noise(written):
    site = written / "sites" / "site-01"
    allowed = Policy.read(site / "policy.toml")
    terms = Federation.read(site / "federation.toml").terms(read_plan(site / "plan.json"))
    least = min(terms["site-01"].releases.values())
    assert least * (1 - 1e-5) < allowed.smallest_sigma <= least
    assert (allowed.epsilon_ever, allowed.delta_ever) == (2.0, 1e-5)
    allowed.check_run("fedavg", terms["site-01"], (0.0, 0.0))


@pytest.mark.parametrize("honest", [0, 2])
@pytest.mark.parametrize("elsewhere", [1 - 1e-9, 1 + 1e-9])
def test_the_policy_allows_what_another_processor_computes(tmp_path, elsewhere, honest):
    """A site finds σ and the ε alone by itself, and the last digits are its own."""
    privacy = {"trust": "sum", "honest": honest} if honest else {}
    secure = {"threshold": 3 if honest else 0}
    plan = Plan.parse({"sites": 3, "privacy": privacy, "secure_aggregation": secure})
    terms = plan.terms(dict.fromkeys(("a", "b", "c"), 500.0))["a"]
    other = replace(terms, sigmas={c: s * elsewhere for c, s in terms.sigmas.items()})
    assert min(other.releases.values()) != min(terms.releases.values())
    written = policy("fedavg", other, None)
    (tmp_path / "policy.toml").write_text(
        re.sub("^# (honest|epsilon_alone)", r"\1", written, flags=re.M)
    )
    Policy.read(tmp_path / "policy.toml").check_run("fedavg", terms, (0.0, 0.0))
    less = replace(terms, sigmas={c: s * (1 - 1e-4) for c, s in terms.sigmas.items()})
    with pytest.raises(PolicyRefused, match="sigma"):
        Policy.read(tmp_path / "policy.toml").check_run("fedavg", less, (0.0, 0.0))


def test_smallest_sigma_is_of_the_sites_own_noise():
    """Of shared noise h shares together are the σ that is calibrated; a site draws one of them."""
    plans = [
        Plan.parse({"sites": 3, "privacy": privacy, "secure_aggregation": {"threshold": least}})
        for privacy, least in (({}, 0), ({"trust": "sum", "honest": 2}, 3))
    ]
    alone, shared = (plan.terms(dict.fromkeys("abc", 500.0))["a"] for plan in plans)
    written = [
        tomllib.loads(policy("fedavg", one, None))["smallest_sigma"] for one in (alone, shared)
    ]
    assert all(
        s <= min(one.releases.values()) for s, one in zip(written, (alone, shared), strict=True)
    )
    # The sum has hardly more noise for being drawn in parts: on a grid, at a little less δ.
    assert written[1] * math.sqrt(2) == pytest.approx(written[0], rel=0.01)


def test_sites_with_records_of_their_own(make, tmp_path):
    """--no-records: the owner names a file, here a table with other columns' names."""
    directory = make(tmp_path / "d", {"records": False})
    site = directory / "sites" / "site-00"
    assert not list(site.glob("*.npz"))
    with pytest.raises(InputError, match=r"/path/to/records\.csv"):
        Site(site)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"privacy": {"mode": "none"}}, "private runs"),
        ({"privacy": {"sizes": "noisy"}}, "sizes"),
        ({"clock": {"message_seconds": 1.0}}, "which only simulations use; leave it out"),
        ({"partition": {"validation": 0.2}}, "which only simulations use; leave it out"),
    ],
)
def test_simulation_only_features_are_refused_before_writing(tmp_path, change, told):
    with pytest.raises(PlanError, match=told):
        write_deployment(tmp_path / "d", Plan.parse(change))
    assert not list((tmp_path / "d").glob("*"))


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"port": 65536}, ":65536' is no address: expected"),
        *(
            ({"host": host}, re.escape(f"'{host}:8443' is no address: expected"))
            for host in ("", "http://x.org", "::1", "é.org")
        ),
        ({"patience": {"round_seconds": math.nan}}, "patience.round_seconds is nan"),
        ({"patience": {"least_replies": 99}}, "least_replies = 99: there are 2 sites"),
        ({"patience": {"start_sites": 3}}, "start_sites = 3: there are 2 sites"),
    ],
)
def test_a_choice_that_does_not_fit_leaves_nothing(tmp_path, choice, told):
    plan = Plan.parse({"sites": 2, "rounds": 2})
    with pytest.raises(PlanError, match=told):
        write_deployment(tmp_path / "d", plan, **choice)
    assert not list((tmp_path / "d").glob("*"))
    # What was wrong is put right in the same place.
    assert write_deployment(tmp_path / "d", plan).address == "127.0.0.1:8443"


def test_nothing_is_written_over(written):
    with pytest.raises(PlanError, match="not empty"):
        write_deployment(written, Plan.parse({}))


def test_without_flower_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("fedpact.simulation.machine.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"fedpact\[deploy\]"):
        require_flower()
    for arguments in (["init", "d"], ["up", "d"]):
        outcome = CliRunner().invoke(app, ["deploy", *arguments], catch_exceptions=True)
        assert isinstance(outcome.exception, InputError)


def test_requesting_flower_sends_no_telemetry(monkeypatch):
    """A party's own process imports Flower too, and was not started by one that said so."""
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    require_flower()
    assert {name: os.environ[name] for name in QUIET} == QUIET


def run_cli(*arguments):
    outcome = CliRunner().invoke(app, ["deploy", *map(str, arguments)], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_the_command_writes_its_input_and_status_reads_it(tmp_path):
    where = tmp_path / "d[b]"  # no markup
    told = run_cli(
        *("init", where, "--set", "rounds=2", "--set", "sites=2", "--port", "9443"),
        *("--host", "localhost", "--test-seeds"),
    )
    found = Federation.read(where / "server" / "federation.toml")
    assert f"{where}: run {found.run}" in told
    assert found.address == "localhost:9443"
    assert found.seeds == "test"
    status = json.loads(run_cli("status", where, "--json"))
    assert status["running"] == {"server": False, "site-00": False, "site-01": False}
    assert (status["round"], status["state"]) == (0, "not begun")


def test_the_status_of_one_party(deployment):
    site = deployment / "sites" / "site-00"
    with Site(site) as opened:
        run = opened.run
        opened.take_part()
    status = json.loads(run_cli("status", site, "--json"))
    assert list(status["ledgers"]) == ["site-00"]
    assert status["ledgers"]["site-00"]["runs"][run]["epsilon_reserved"] == 2.0
    assert f"{run}: no answer yet" in run_cli("status", site)
    (site / "run").mkdir()
    (site / "run" / "model.safetensors").touch()
    (site / "log.txt").write_text("nobody answers: the site goes on trying\n")
    for of, told in ((run, "ended: the final model is here"), ("an-earlier", "no answer")):
        (site / "run" / "summary.json").write_text(json.dumps({"run": of}))
        found = run_cli("status", site)
        assert f"{run}: {told}" in found
        assert ("goes on trying" in found) == (of != run)
    assert list(processes.parties(deployment / "server")) == ["server"]
    with pytest.raises(DataError, match="has no deployment"):
        processes.parties(deployment / "authority")


def test_the_server_shows_what_each_site_has_spent(deployment):
    """At a server of its own there is no ledger: it tells what it counts, of each site."""
    run = deployment / "server" / "run"
    Coordinator(deployment / "server")._begin()
    record = RoundRecord(1, epsilon={"site-00": 0.5, "site-01": 0.75, "site-02": 1.25}, steps=2)
    (run / "rounds.jsonl").write_text(record.to_json() + "\n")
    lines = run_cli("status", deployment / "server").splitlines()
    for name, epsilon in record.epsilon.items():
        (line,) = [line for line in lines if name in line]
        assert "elsewhere" in line
        assert f"{epsilon:g}" in line


def test_block_survives_the_codec_and_other_data_is_refused(monkeypatch):
    monkeypatch.setattr(flower_records, "PIECE", 128)
    block, signature = bytes(range(256)) * 5, b"signed"
    assert flower_records.from_record(flower_records.to_record(block, signature)) == (
        block,
        signature,
    )
    packed = flower_records.to_record(block, signature)
    assert [*packed] == ["seal", *map(str, range(1, 10))]
    record = type(packed)({k: v for k, v in packed.items() if k != "seal"})
    with pytest.raises(InputError, match="not a fedpact message"):
        flower_records.from_record(record)


def test_a_signature_holds_for_one_block_one_purpose_and_one_key(written):
    key = keys.read_private_key(written / "server" / "server.key")
    other = keys.read_private_key(written / "sites" / "site-00" / "site.key")
    signature = keys.sign(key, "task for a", b"block")
    assert keys.is_signed(key.public_key(), "task for a", b"block", signature)
    assert not keys.is_signed(key.public_key(), "task for b", b"block", signature)
    assert not keys.is_signed(key.public_key(), "task for a", b"blocc", signature)
    assert not keys.is_signed(other.public_key(), "task for a", b"block", signature)
    assert not keys.is_signed(key.public_key(), "task for a", b"block", b"")
    # The end of the purpose cannot be moved into the block.
    assert not keys.is_signed(key.public_key(), "task", b" for a\0block", signature)


def test_without_records_no_count_is_published(make, tmp_path):
    """A declared size has two digits, and a policy is for what federation.toml declares."""
    exact = Federation.read(make(tmp_path / "a") / "server" / "federation.toml")
    where = make(tmp_path / "b", {"records": False})
    rounded = Federation.read(where / "server" / "federation.toml")
    for name, member in rounded.sites.items():
        assert member.size == float(f"{exact.sites[name].size:.2g}")
    terms = rounded.terms(read_plan(where / "server" / "plan.json"))
    for name, own in terms.items():
        allowed = Policy.read(where / "sites" / name / "policy.toml")
        assert allowed.smallest_sigma <= min(own.releases.values())


def test_sites_have_the_names_that_were_chosen(tmp_path):
    command = ["deploy", "init", str(tmp_path / "d"), "--set", "rounds=2"]
    done = CliRunner().invoke(app, [*command, "--name", "北京", "--name", "north"])
    assert done.exit_code == 0, done.output
    places = sorted((tmp_path / "d" / "sites").iterdir())
    assert [place.name for place in places] == ["north", "xn--1lq90i"]
    names = Federation.read(tmp_path / "d" / "server" / "federation.toml").names
    assert names == ("north", "北京")
    for place, name in zip(places, names, strict=True):
        with Site(place) as site:
            assert site.name == name
    assert "No purpose is stated" in done.stdout


_UNUSABLE = ("a", "a"), ("a/b", "c"), ("server", "c"), ("ü", "u")


@pytest.mark.parametrize("names", _UNUSABLE)
def test_names_that_sites_cannot_have_are_refused(tmp_path, names):
    given = [part for name in names for part in ("--name", name)]
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "d"), *given])
    assert isinstance(done.exception, PlanError)
    assert not list((tmp_path / "d").glob("*"))
