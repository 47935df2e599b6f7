"""What `fedpact watch` shows: numbers of the run's files, of a site only its own, on 127.0.0.1."""

import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from tests.browser import chromium, look
from typer.testing import CliRunner

import fedpact
from fedpact.cli.main import app
from fedpact.common.errors import DataError, InputError
from fedpact.common.format import percent
from fedpact.common.messages import REASONS
from fedpact.common.run_folder import exclusive
from fedpact.deployment import snapshot
from fedpact.deployment.snapshot import take_snapshot
from fedpact.plan import Plan

HELD_OUT = {"share": 0.4, "every": 1, "epsilon": 50.0, "delta": 1e-5}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two rounds whose sites release evaluations."""
    folder = tmp_path_factory.mktemp("watch") / "run"
    plan = {"rounds": 2, "sites": 3, "privacy": {"accountant": "rdp"}, "evaluation": HELD_OUT}
    return fedpact.run(Plan.parse(plan), folder)


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of its folder."""
    return shutil.copytree(finished.folder, tmp_path / "run")


@pytest.fixture
def unended(folder):
    """A copy of its folder, as it was before the run had ended."""
    (folder / "summary.json").unlink()
    return folder


def write(folder, *records):
    (folder / "rounds.jsonl").write_text("".join(record.to_json() + "\n" for record in records))


@contextmanager
def serving(folder):
    with snapshot.create_server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def page(finished):
    """The page's server for a finished run, and `get(path, **headers)`."""
    with serving(finished.folder) as server:

        def get(path, **headers):
            request = urllib.request.Request(snapshot.address(server) + path, headers=headers)
            with urllib.request.urlopen(request, timeout=20) as answer:
                return SimpleNamespace(headers=answer.headers, body=answer.read().decode())

        yield SimpleNamespace(server=server, get=get)


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
    privacy = json.loads((finished.folder / "privacy.json").read_text())
    assert told["round"] == told["rounds"] == 2
    for site, each in told["sites"].items():
        terms = privacy["sites"][site]
        assert each["epsilon_spent"] == last.epsilon[site]
        assert each["epsilon_allowed"] == terms["epsilon"]
        assert (each["epsilon_reserved"], each["delta"]) == (
            terms["epsilon_reserved"],
            terms["delta"],
        )
        assert each["missing"] is None
    assert set(told["sites"]) == set(last.epsilon)
    assert (told["bytes_down"], told["bytes_up"]) == (summary["bytes_down"], summary["bytes_up"])
    assert told["seconds_spent"] == summary["seconds"]
    assert (told["status"], told["seconds_left"], told["to_do"]) == (summary["status"], None, [])
    curves = {(curve["name"], curve["of"]): curve["points"] for curve in told["curves"]}
    assert curves["accuracy", "on public test data"] == [
        [r.round, r.accuracy] for r in finished.records
    ]
    found = parsed(page.get("metrics").body)
    run = told["run"]
    assert run == json.loads((finished.folder / "environment.json").read_text())["run"]
    for site, spent in last.epsilon.items():
        assert found["fedpact_epsilon_spent", (("run", run), ("site", site))] == spent
    assert found["fedpact_bytes_down_total", (("run", run),)] == summary["bytes_down"]
    assert found["fedpact_round", (("run", run),)] == 2
    assert found["fedpact_ended", (("run", run),)] == 1


def test_released_values_are_shown_during_the_run(finished, unended):
    """With the majority class and the worst one, each figure with its round."""
    summary = finished.summary["evaluation"]
    told, ended = take_snapshot(unended), take_snapshot(finished.folder)
    assert told["curves"] == ended["curves"]
    assert told["compared"] == ended["compared"]
    (of_sites,) = (
        c for c in told["curves"] if c["name"] == "accuracy" and c["of"].startswith("released")
    )
    known = [
        [each["round"], f["value"], f["low"], f["high"]]
        for each in summary["by_round"]
        for f in each["figures"]
        if f["name"] == "accuracy"
    ]
    assert of_sites["points"] == known
    figures, majority, worst = told["compared"]
    (whole,) = (f for f in summary["figures"] if (f["name"], f["about"]) == ("accuracy", "all"))
    assert f"accuracy {percent(whole['value'])}" in figures
    assert majority.startswith("after round 2, as released: ")
    assert repr(summary["commonest"]["name"]) in majority
    by_class = [f for f in summary["figures"] if f["name"] == "accuracy" and f["of_part"]]
    lowest = min((f for f in by_class if f["high"] - f["low"] < 1), key=lambda f: f["value"])
    assert lowest["about"] in worst


@pytest.mark.parametrize("code", ["absent", "unheard of"])
def test_a_missing_site_is_named_with_its_reason(finished, unended, code):
    first, second = finished.records[1:]
    gone = replace(first, refused={"site-01": code}), replace(second, refused={"site-01": code})
    write(unended, finished.records[0], *gone)
    told = take_snapshot(unended)
    assert told["sites"]["site-01"]["missing"] == {
        "code": code, "since": 1, "why": REASONS.get(code, "see its own log"),
    }  # fmt: skip
    assert told["sites"]["site-01"]["refusals"] == {code: 2}
    assert told["sites"]["site-00"]["missing"] is None
    assert any(sentence.startswith("Site site-01 ") for sentence in told["to_do"])
    # It is there again.
    write(unended, finished.records[0], gone[0], second)
    assert take_snapshot(unended)["sites"]["site-01"]["missing"] is None


def test_permission_depends_on_who_runs_the_plan(unended):
    told = take_snapshot(unended)
    assert (told["status"], told["seconds_left"]) == ("interrupted", None)
    assert f"`fedpact resume {unended}`" in told["to_do"][0]
    with exclusive(unended):
        told = take_snapshot(unended)
    assert (told["status"], told["to_do"]) == ("running", [])
    (unended / "rounds.jsonl").unlink()
    (unended / "waits.json").write_text(
        json.dumps({"round": 0, "sites": {"site-02": {"waiting": True, "code": "policy"}}})
    )
    with exclusive(unended):
        told = take_snapshot(unended)
    assert told["status"] == "waiting for the first round"
    assert told["sites"]["site-02"]["missing"]["why"] == REASONS["policy"]


def test_the_time_left_is_of_the_rounds_that_are_left(finished, unended):
    plan = json.loads((unended / "plan.json").read_text())
    (unended / "plan.json").write_text(json.dumps(plan | {"rounds": 12}))
    write(unended, *(replace(r, seconds=3.0 * (r.round > 0)) for r in finished.records))
    with exclusive(unended):
        assert take_snapshot(unended)["seconds_left"] == 30.0


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
    assert all(link.startswith("data:") for link in links.found)
    assert set(re.findall(r'fetch\("([^"]*)"', answer.body)) == {"data.json"}
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert page.server.server_address[0] == "127.0.0.1"
    for path, headers in (("data.json", {"Host": "evil.example"}), ("../plan.json", {})):
        with pytest.raises(urllib.error.HTTPError):
            page.get(path, **headers)


def test_the_page_is_legible_and_self_contained(finished, unended):
    """At a phone's width too nothing is cut, with a name as long as names get."""
    long = "site-" + "0123456789" * 6
    for name in ("rounds.jsonl", "privacy.json"):
        text = (unended / name).read_text().replace("site-01", long)
        (unended / name).write_text(text)
    lines = (unended / "rounds.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"refused": {long: "absent"}}
    (unended / "rounds.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last), ""]))
    with serving(unended) as server, chromium() as browser:
        where, asked, said = snapshot.address(server), [], []
        shown = browser.new_page()
        shown.on("request", lambda request: asked.append(request.url))
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.goto(where)
        shown.wait_for_selector("#sites li")
        for width in (390, 1440):
            for scheme in ("light", "dark"):
                seen = look(shown, width, scheme)
                assert seen.overflow <= 0, (width, scheme)
                assert seen.faint == [], (width, scheme)
                assert seen.least[0] >= 11
        text = shown.inner_text("body")
        assert f"Site {long} {REASONS['absent']}." in text
        assert "missing since round 2" in text
        assert "round 2 of 2" in text
        curve = next(c for c in take_snapshot(unended)["curves"])
        assert f"{100 * curve['points'][-1][1]:.1f} % (" in shown.inner_text("figcaption >> nth=0")
        cut = """[...document.querySelectorAll("body *")].filter(e => e.checkVisibility()
            && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != "inline"
            && !(e instanceof SVGElement)).map(e => e.outerHTML.slice(0, 80))"""
        shown.set_viewport_size({"width": 390, "height": 900})
        assert shown.evaluate(cut) == []
        assert set(asked) == {where, where + "data.json"}
        assert said == []


def test_a_round_that_is_being_written_is_left_for_the_next_look(finished, unended):
    whole = replace(finished.records[1], bytes_up=5).to_json()
    (unended / "rounds.jsonl").write_text(f"{whole}\n{whole[:9]}")
    told = take_snapshot(unended)
    assert (told["round"], told["bytes_up"]) == (1, 5)


def test_an_accuracy_that_no_site_would_release_is_marked(folder, page):
    told = [line for line in page.get("metrics").body.splitlines() if "fedpact_accuracy{" in line]
    assert "simulator_only" not in told[0]
    privacy = json.loads((folder / "privacy.json").read_text()) | {"accuracy_pooled": True}
    (folder / "privacy.json").write_text(json.dumps(privacy | {"evaluation": None}))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"evaluation": None}))
    found = take_snapshot(folder)
    assert {curve["of"] for curve in found["curves"]} == {"simulator only"}
    (line,) = (
        line for line in snapshot.text(found).splitlines() if line.startswith("fedpact_accuracy{")
    )
    assert 'simulator_only="true"' in line


def test_status_once_as_json_and_for_no_run(finished, tmp_path):
    done = CliRunner().invoke(app, ["watch", str(finished.folder), "--json"])
    assert json.loads(done.stdout) == take_snapshot(finished.folder)
    with pytest.raises(DataError, match="has no run"):
        take_snapshot(tmp_path)
    with snapshot.create_server(finished.folder) as server:
        taken = server.server_address[1]
        with pytest.raises(InputError, match=f"--port {taken}"):
            snapshot.create_server(finished.folder, taken)


def test_labels_are_escaped_and_infinity_has_a_name():
    told = {
        "kind": "site", "name": 'a"b\\c', "run": "r", "round": 1, "rounds": 2, "answers": 3,
        "seconds": 0.5, "ledger_entries": 4, "refusals": {"budget": 2},
        "ledger": {"r": {"epsilon_spent": float("inf"), "epsilon_reserved": 1.0, "delta": 1e-5}},
    }  # fmt: skip
    found = parsed(snapshot.text(told))
    assert found["fedpact_epsilon_spent", (("run", "r"), ("site", 'a\\"b\\\\c'))] == float("inf")
    assert found["fedpact_refusals_total", (("code", "budget"), ("run", "r"),
                                            ("site", 'a\\"b\\\\c'))] == 2  # fmt: skip
    assert json.loads(snapshot.encode_json(told))["ledger"]["r"]["epsilon_spent"] == "inf"
