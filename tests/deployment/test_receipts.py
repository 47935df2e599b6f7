"""Receipts that a deployed site hands on: what they say, and who signed them."""

import json
import shutil

import pytest
from tests.deployment.test_site import task_of
from typer.testing import CliRunner

from fedpact.cli.main import app
from fedpact.common.errors import DataError, LedgerError
from fedpact.common.format import upper
from fedpact.common.run_folder import Folder
from fedpact.deployment.signatures import cost_per_person, delta_per_person
from fedpact.deployment.site import Site


def run(*arguments):
    done = CliRunner().invoke(app, ["ledger", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.fixture
def site(site_dir):
    """A site that has answered once, whose plan and settings say what for and on what data."""
    plan = Folder(site_dir).read_json("plan.json")
    plan["about"] |= {"purpose": "to find sick hearts"}
    (site_dir / "plan.json").write_text(json.dumps(plan))
    settings = (site_dir / "site.toml").read_text()
    (site_dir / "site.toml").write_text(settings + 'data_version = "2026-01"\n')
    with Site(site_dir) as opened:
        opened.handle(task_of(opened))
    return site_dir


@pytest.fixture
def receipt(site, tmp_path):
    run("export", site, "--out", tmp_path / "receipt.json")
    return tmp_path / "receipt.json"


def test_it_states_purpose_data_and_date(site, receipt):
    ((path, told),) = json.loads(receipt.read_text()).items()
    assert path == "ledger.jsonl"
    assert str(site) not in receipt.read_text()  # nor any other folder of the owner's machine
    assert told["data_set"] == {"name": "site-00", "version": "2026-01"}
    ((name, spend),) = told["runs"].items()
    assert spend["purpose"] == "to find sick hearts"
    assert name in (site / "federation.toml").read_text()
    assert told["sentence"].startswith("Whether or not any one record is in the data set")
    assert "as at a second site, pays the sum of both" in told["sentence"]
    # Nothing about records: neither theirs, nor how many there truly are.
    assert not ({"records", "size", "count"} & {key.lower() for key in told})


def test_receipt_signature_verifies_against_the_federation(site, receipt):
    told = run("verify", receipt, "--federation", site / "federation.toml")
    assert "intact, signed by site 'site-00'" in told
    (said,) = json.loads(receipt.read_text()).values()
    for spend in said["runs"].values():
        assert f"│ {upper(spend['epsilon_spent'])} " in told
    assert "says nothing" not in told
    # Its age, by which one from before a later run is seen.
    assert f"of 'site-00', written {said['date']}, up to entry {said['entries']} of" in told
    assert "give --federation to check" in run("verify", receipt)


def test_a_receipt_says_nothing_about_a_later_run(site, receipt, tmp_path):
    text = (site / "federation.toml").read_text()
    later = tmp_path / "federation.toml"
    later.write_text(text.replace('run = "', 'run = "later-', 1))
    assert "'later-" in (told := run("verify", receipt, "--federation", later))
    assert "about which it says nothing" in told


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(epsilon_reserved=0.1),
        lambda told: told["runs"].popitem(),
        lambda told: told["data_set"].update(name="another"),
        lambda told: told.update(date="1999-01-01T00:00:00+00:00"),
        lambda told: told["signature"].update(by="site-01"),
        lambda told: told.update(more=1),
    ],
)
def test_alterations_are_reported(receipt, change):
    receipts = json.loads(receipt.read_text())
    change(next(iter(receipts.values())))
    receipt.write_text(json.dumps(receipts))
    with pytest.raises(LedgerError, match="does not match the receipt"):
        run("verify", receipt)


def test_another_key_is_not_the_site_s_word(deployment, site, tmp_path):
    other = deployment / "sites" / "site-01"
    shutil.copy(other / "site.key", site / "site.key")
    run("export", site, "--out", tmp_path / "forged.json")
    assert "intact" in run("verify", tmp_path / "forged.json")
    with pytest.raises(LedgerError, match="is not from the site"):
        run("verify", tmp_path / "forged.json", "--federation", site / "federation.toml")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"a": {"epsilon_reserved": 1}}', LedgerError, "has no signature"),
        ('{"a": 3}', LedgerError, "has no signature"),
        ('{"a": {"signature": {"by": "x"}}}', LedgerError, "cannot be read"),
        ('{"a": {"signature": {"by": "x", "key": "no", "value": "*"}}}', LedgerError, "cannot be"),
        ("{}", LedgerError, "has no receipt"),
        ("[1]", DataError, "cannot be understood"),
        ("", DataError, "cannot be understood"),
    ],
)
def test_an_unsigned_receipt_is_reported(tmp_path, text, error, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(error, match=message):
        run("verify", tmp_path / "r.json")


def test_ledger_elsewhere_is_found_but_several_are_unsigned(deployment, site, tmp_path):
    (site / "ledger.jsonl").rename(tmp_path / "elsewhere.jsonl")
    text = (site / "site.toml").read_text()
    (site / "site.toml").write_text(
        text.replace('ledger = "ledger.jsonl"', f'ledger = "{tmp_path / "elsewhere.jsonl"}"')
    )
    run("export", site, "--out", tmp_path / "receipt.json")
    (told,) = json.loads((tmp_path / "receipt.json").read_text()).values()
    assert told["data_set"]["name"] == "site-00"
    assert "signed by site 'site-00'" in run(
        "verify", tmp_path / "receipt.json", "--federation", site / "federation.toml"
    )
    with Site(deployment / "sites" / "site-01") as other:
        other.handle(task_of(other))
    run("export", deployment, "--out", tmp_path / "all.json")
    with pytest.raises(LedgerError, match="has no signature"):
        run("verify", tmp_path / "all.json")
    with pytest.raises(LedgerError, match="--federation"):
        run("verify", tmp_path / "elsewhere.jsonl", "--federation", site / "federation.toml")


def test_a_persons_cost_is_one_number_everywhere():
    """In words and in the receipt: a run and its evaluations add up, the costliest run counts."""

    def of(beside, *costs):
        told = None if not costs else dict(zip(("2", "5"), costs, strict=True))
        return {"beside": beside, "epsilon_per_person": told, "delta": 0.25}

    runs = {"a": of(None, 4.0, 13.0), "a/evaluation": of("a", 2.0, 6.0), "b": of(None, 5.0, 14.0)}
    assert cost_per_person(runs) == {"2": 6.0, "5": 19.0}
    assert delta_per_person(runs) == 0.5
    assert delta_per_person({"b": runs["b"]}) == 0.25
    for none in ({"a": of(None)}, {}):
        assert cost_per_person(none) is delta_per_person(none) is None


def test_a_receipt_has_the_persons_cost_that_show_prints(site, receipt):
    (told,) = json.loads(receipt.read_text()).values()
    assert f"at most ε = {upper(told['epsilon_per_person_of_costliest_run']['5'])} (" in run(
        "show", site
    )


def test_another_sites_ledger_in_a_sites_folder_is_found(deployment, site, tmp_path):
    """Copied there with what lies beside it, it is intact: only its name tells."""
    other = deployment / "sites" / "site-01"
    with Site(other) as opened:
        opened.handle(task_of(opened))
    for name in ("ledger.jsonl", "ledger.jsonl.seen"):
        shutil.copy(other / name, site / name)
    for asked in (("verify", site), ("show", site), ("export", site, "--out", tmp_path / "r.json")):
        with pytest.raises(LedgerError, match=r"is of data set 'site-01', and site.toml has"):
            run(*asked)
    assert not (tmp_path / "r.json").exists()
