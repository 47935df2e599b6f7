"""What `fedpact watch` shows: numbers of the run's files, of a site only its own, on 127.0.0.1."""

import json
import math
import re
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import fedpact
from fedpact.cli.main import app
from fedpact.common.errors import DataError, InputError
from fedpact.common.messages import RoundRecord
from fedpact.deployment import live
from fedpact.deployment.live import take_snapshot
from fedpact.plan import Plan


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch") / "run"
    plan = {"rounds": 2, "sites": 3, "privacy": {"accountant": "rdp"}}
    return fedpact.run(Plan.parse(plan), folder)


@pytest.fixture
def page(finished):
    """The page's server for a finished run, and `get(path, **headers)`."""
    with live.create_server(finished.folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()

        def get(path, **headers):
            request = urllib.request.Request(live.address(server) + path, headers=headers)
            with urllib.request.urlopen(request, timeout=20) as answer:
                return SimpleNamespace(headers=answer.headers, body=answer.read().decode())

        yield SimpleNamespace(server=server, get=get)
        server.shutdown()
        thread.join()


SAMPLE = re.compile(r'^(fedpact_[a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)$')


def parsed(text):
    """A page of Prometheus's format as (name, labels) -> value; fails on a line that is none."""
    found, typed = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("# HELP "):
            name, labels, value = SAMPLE.match(line).groups()
            assert name in typed
            pairs = re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', labels or "")
            found[name, tuple(sorted(pairs))] = float(value)
    assert text.endswith("\n")
    return found


def test_the_numbers_are_those_of_the_runs_files(finished, page):
    told = json.loads(page.get("data.json").body)
    last, summary = finished.records[-1], finished.summary
    assert told["round"] == told["rounds"] == 2
    assert {n: s["epsilon_spent"] for n, s in told["sites"].items()} == dict(last.epsilon)
    assert told["bytes_up"] == summary["bytes_up"]
    assert [r["accuracy"] for r in told["history"]] == [r.accuracy for r in finished.records]
    assert told["status"] == summary["status"]
    found = parsed(page.get("metrics").body)
    run = told["name"]
    for site, spent in last.epsilon.items():
        assert found["fedpact_epsilon_spent", (("run", run), ("site", site))] == spent
    assert found["fedpact_bytes_down_total", (("run", run),)] == summary["bytes_down"]
    assert found["fedpact_round", (("run", run),)] == 2


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href", "action")]


def test_page_loads_nothing_external_and_serves_no_other_host(page):
    answer = page.get("")
    links = Links()
    links.feed(answer.body)
    assert links.found == []
    assert set(re.findall(r'fetch\("([^"]*)"', answer.body)) == {"data.json"}
    assert re.findall(r"https?://[^\"' ]+", answer.body) == ["http://www.w3.org/2000/svg"]
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert page.server.server_address[0] == "127.0.0.1"
    for path, headers in (("data.json", {"Host": "evil.example"}), ("../plan.json", {})):
        with pytest.raises(urllib.error.HTTPError):
            page.get(path, **headers)


def test_a_round_that_is_being_written_is_left_for_the_next_look(finished, tmp_path):
    (tmp_path / "plan.json").write_text((finished.folder / "plan.json").read_text())
    whole = RoundRecord(round=1, bytes_up=5, refused={"a": "absent"}).to_json()
    (tmp_path / "rounds.jsonl").write_text(f"{whole}\n{whole[:9]}")
    told = take_snapshot(tmp_path)
    assert (told["round"], told["bytes_up"], told["status"]) == (1, 5, "running")
    assert told["name"] == tmp_path.name


def test_an_epsilon_that_no_number_bounds_is_shown_as_such(finished, tmp_path):
    """Strict JSON holds it as null; a site that has released nothing yet has no line of it."""
    record = RoundRecord(round=1, epsilon={"a": math.inf, "b": 0.5})
    (tmp_path / "rounds.jsonl").write_text(record.to_json() + "\n")
    (tmp_path / "plan.json").write_text((finished.folder / "plan.json").read_text())
    sites = {name: {"epsilon_reserved": told, "delta": 1e-5} for name, told in [("a", None)]}
    (tmp_path / "privacy.json").write_text(json.dumps({"private": True, "sites": sites}))
    found = take_snapshot(tmp_path)
    assert found["sites"]["a"]["epsilon_spent"] == math.inf
    assert found["sites"]["a"]["epsilon_reserved"] == math.inf
    assert found["sites"]["b"]["epsilon_reserved"] is None
    told = parsed(live.text(found))
    labels = (("run", tmp_path.name), ("site", "a"))
    assert told["fedpact_epsilon_spent", labels] == math.inf
    done = CliRunner().invoke(app, ["watch", str(tmp_path), "--once"])
    assert "a: ε ∞" in done.stdout
    assert json.loads(live.encode_json(found))["sites"]["a"]["epsilon_spent"] == "inf"


def test_an_accuracy_that_no_site_would_release_is_marked(finished, page):
    privacy = json.loads((finished.folder / "privacy.json").read_text())
    told = json.loads(page.get("data.json").body)
    found = [line for line in page.get("metrics").body.splitlines() if "fedpact_accuracy{" in line]
    assert told["simulator_only"] is privacy["accuracy_pooled"] is False
    assert "simulator_only" not in found[0]
    (line,) = (
        line
        for line in live.text({**told, "simulator_only": True}).splitlines()
        if line.startswith("fedpact_accuracy{")
    )
    assert 'simulator_only="true"' in line


def test_once_json_and_what_is_no_run(finished, tmp_path):
    done = CliRunner().invoke(app, ["watch", str(finished.folder), "--json"])
    assert json.loads(done.stdout) == take_snapshot(finished.folder)
    done = CliRunner().invoke(app, ["watch", str(finished.folder), "--once"])
    assert "round 2 of 2" in done.stdout
    with pytest.raises(DataError, match="holds no run"):
        take_snapshot(tmp_path)
    with live.create_server(finished.folder) as server:
        taken = server.server_address[1]
        with pytest.raises(InputError, match=f"--port {taken}"):
            live.create_server(finished.folder, taken)


def test_ctrl_c_ends_it_without_a_traceback(finished, monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(live.ThreadingHTTPServer, "serve_forever", interrupted)
    live.watch(finished.folder, 0, once=False, as_json=False)
    assert capsys.readouterr().out.endswith("ended\n")


def test_labels_are_escaped_and_infinity_has_a_name():
    told = {
        "kind": "site", "name": 'a"b\\c', "run": "r", "round": 1, "rounds": 2, "answers": 3,
        "seconds": 0.5, "ledger_entries": 4, "refusals": {"budget": 2},
        "ledger": {"r": {"epsilon_spent": float("inf"), "epsilon_reserved": 1.0, "delta": 1e-5}},
    }  # fmt: skip
    found = parsed(live.text(told))
    assert found["fedpact_epsilon_spent", (("run", "r"), ("site", 'a\\"b\\\\c'))] == float("inf")
    assert found["fedpact_refusals_total", (("code", "budget"), ("run", "r"),
                                            ("site", 'a\\"b\\\\c'))] == 2  # fmt: skip
    assert json.loads(live.encode_json(told))["ledger"]["r"]["epsilon_spent"] == "inf"
