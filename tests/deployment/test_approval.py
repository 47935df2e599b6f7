"""A site opens once people have signed for what it will release; a change makes that void."""

import json

import pytest
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import InputError, PlanError, PolicyRefused
from fedpact.common.format import upper
from fedpact.common.run_folder import Folder
from fedpact.deployment import keys
from fedpact.deployment.check import check_site
from fedpact.deployment.files import write_deployment
from fedpact.deployment.signatures import APPROVAL_FILE, approve, check_approved, read_approvals
from fedpact.deployment.site import Site
from fedpact.deployment.snapshot import take_snapshot
from fedpact.plan import Plan


def ask_for(site, count):
    path = site / "policy.toml"
    path.write_text(path.read_text().replace("approvals = 0", f"approvals = {count}"))
    return site


@pytest.fixture
def unsigned(site_dir):
    return ask_for(site_dir, 1)


def test_a_site_opens_after_an_approval_is_signed(unsigned):
    told = rf"approved so far by no one.*`fedpact deploy approve {unsigned}`"
    with pytest.raises(PolicyRefused, match=told):
        Site(unsigned)
    assert not (unsigned / "ledger.jsonl").exists()
    checked = CliRunner().invoke(app, ["deploy", "check", str(unsigned)]).output
    told = f"1 more approval needed: `fedpact deploy approve {unsigned} --by NAME`"
    assert told in " ".join(checked.split())
    assert f"approve {unsigned}`" in take_snapshot(unsigned)["to_do"][0]
    approve(unsigned, "A. Owner")
    with Site(unsigned):
        assert (unsigned / "ledger.jsonl").exists()
    told = take_snapshot(unsigned)["to_do"]
    assert not [one for one in told if "approve" in one]


def test_two_approvals_need_two_names(site_dir):
    ask_for(site_dir, 2)
    approve(site_dir, "A. Owner")
    with pytest.raises(PolicyRefused, match=r"approvals = 2, approved so far by A\. Owner"):
        check_approved(site_dir)
    with pytest.raises(InputError, match="has already approved this run"):
        approve(site_dir, "a.  owner ")
    # The same block twice, or under the same name otherwise written, is one.
    path = site_dir / APPROVAL_FILE
    block = path.read_text().partition("[[approvals]]")[2]
    path.write_text(path.read_text() + f"\n[[approvals]]{block}")
    assert read_approvals(site_dir).missing == 1
    approve(site_dir, "B. Other")
    check_approved(site_dir)


@pytest.mark.parametrize("name", ["plan.json", "federation.toml", "policy.toml"])
def test_a_changed_file_makes_approvals_void(unsigned, name):
    approve(unsigned, "A. Owner")
    check_approved(unsigned)
    path = unsigned / name
    before = path.read_text()
    path.write_text(before + "\n")
    with pytest.raises(PolicyRefused, match="approved so far by no one"):
        check_approved(unsigned)
    path.write_text(before)
    check_approved(unsigned)


@pytest.mark.parametrize("field", ["by", "time", "digest", "signature"])
def test_a_forged_approval_counts_for_nothing(unsigned, field):
    approve(unsigned, "A. Owner")
    path = unsigned / APPROVAL_FILE
    lines = path.read_text().splitlines()
    (at,) = (k for k, line in enumerate(lines) if line.startswith(f"{field} = "))
    end = "0" if lines[at][-2] != "0" else "1"
    path.write_text("\n".join([*lines[:at], f'{lines[at][:-2]}{end}"', *lines[at + 1 :]]))
    assert read_approvals(unsigned).names == []


def test_only_the_sites_own_key_signs(unsigned, deployment):
    other = ask_for(deployment / "sites" / "site-01", 1)
    approve(other, "A. Owner")
    (unsigned / APPROVAL_FILE).write_text((other / APPROVAL_FILE).read_text())
    assert read_approvals(unsigned).names == []
    keys.write_signing_key(unsigned / "site.key")
    approve(unsigned, "A. Owner")
    assert read_approvals(unsigned).missing == 1
    (unsigned / APPROVAL_FILE).write_text("approvals = 3")
    with pytest.raises(PlanError, match=r"approval\.toml is not understood"):
        read_approvals(unsigned)


def test_init_asks_for_approvals_where_records_are_owners(tmp_path, deployment):
    directory = tmp_path / "own"
    write_deployment(directory, Plan.parse({"sites": 2, "rounds": 2}), records=False)
    assert read_approvals(directory / "sites" / "site-00").needed == 1
    assert read_approvals(deployment / "sites" / "site-00").needed == 0


def test_command_says_cost_and_releases_then_signs(unsigned):
    command = ["deploy", "approve", str(unsigned)]
    shown = CliRunner().invoke(app, command)
    cost = check_site(unsigned)
    assert f"(ε, δ) = ({upper(cost.epsilon)}, {upper(cost.delta)}) for each record" in shown.output
    assert f"at most {cost.rounds} rounds" in shown.output
    assert "Approved by nobody" in shown.output
    assert not (unsigned / APPROVAL_FILE).exists()
    reserved = f"other runs have reserved ε = 0 of the {cost.epsilon_ever:g}"
    assert reserved in " ".join(shown.output.split())
    policy = unsigned / "policy.toml"
    text = policy.read_text()
    # A limit is never shown as less than it is.
    policy.write_text(text.replace("epsilon_ever = 2.0", "epsilon_ever = 2.34500049"))
    assert "allows ε = 2.346 on" in CliRunner().invoke(app, command).output
    policy.write_text(text.replace('"fedavg"', '"fedprox"'))
    refused = CliRunner().invoke(app, [*command, "--by", "A. Owner"])
    assert refused.exit_code != 0
    assert not (unsigned / APPROVAL_FILE).exists()
    policy.write_text(text)
    signed = CliRunner().invoke(app, [*command, "--by", "A. Owner"])
    assert "Approved by A. Owner, of 1" in signed.output
    assert reserved in " ".join(signed.output.split())
    assert "more approval" not in signed.output
    check_approved(unsigned)


@pytest.mark.parametrize(("how", "words"), [(["--yes"], ""), ([], "y\n"), ([], "n\n")])
def test_up_asks_before_it_signs(deployment, monkeypatch, how, words):
    sites = [ask_for(where, 1) for where in sorted((deployment / "sites").iterdir())]
    started = []
    monkeypatch.setattr(
        "fedpact.deployment.processes.Parties.start", lambda _: started.append(1) or {}
    )
    monkeypatch.setattr("fedpact.cli.commands.deploy._follow", lambda *_: None)
    monkeypatch.setattr("fedpact.cli.commands.inspect.check_before_start", lambda _: None)
    done = CliRunner().invoke(app, ["deploy", "up", str(deployment), *how], input=words)
    agreed = words != "n\n"
    assert (done.exit_code == 0, bool(started)) == (agreed, agreed), done.output
    assert [bool(read_approvals(where).missing) for where in sites] == [not agreed] * len(sites)
    assert "What leaves it" in done.output


@pytest.mark.parametrize("purpose", ["", "to find sick hearts"])
def test_the_purpose_is_shown_before_it_is_approved(site_dir, purpose):
    plan = Folder(site_dir).read_json("plan.json")
    plan["about"]["purpose"] = purpose
    (site_dir / "plan.json").write_text(json.dumps(plan))
    told = CliRunner().invoke(app, ["deploy", "approve", str(site_dir)]).stdout
    assert f"Purpose: {purpose or 'not stated'}" in told
