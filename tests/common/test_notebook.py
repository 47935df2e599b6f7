"""What a notebook shows: short reprs, cards, tables, figures as objects, a bar."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tests.browser import chromium, look, opened
from tests.report.conftest import builder
from tests.report.test_comparison import put, read

from fedpact.api import Result
from fedpact.common import notebook
from fedpact.common.messages import RoundRecord
from fedpact.common.notebook import Bar, in_notebook
from fedpact.plan import Plan
from fedpact.studies.compare import Compared

SITES = ["north", "<b>south</b>", "east"]


def result(folder: Path, **run) -> Result:
    builder(folder)(SITES, **run)
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"rounds": 4, "accuracy": 0.7, "delta": dict.fromkeys(summary["epsilon"], 1e-5)}
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    return Result(folder, [RoundRecord.from_json(line) for line in lines], summary, None)


def compared(folder: Path) -> Compared:
    for name, top in (("one", 0.8), ("two", 0.9)):
        for seed in (1, 2):
            put(folder, name, seed, {0: 0.1, 4: top})
    found = read(folder, ["one", "two"], (1, 2))
    return Compared(found.folder, found.entries)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs) -> None:
        assert tag not in ("script", "link", "img", "b2")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_reprs_are_short_and_say_what_matters(tmp_path):
    plan = Plan.read(None, ["privacy.epsilon=[1.5, 2.0, 2.0, 2.0, 2.0]"])
    assert repr(plan) == (
        "Plan(algorithm fedavg, data digits, model logistic, sites 5, rounds 60, "
        "ε 2 per record, δ 1e-05)"
    )
    assert "ε NOT PRIVATE" in repr(Plan.read(None, ["privacy.mode=none"]))
    (tmp_path / "run").mkdir()
    found = result(tmp_path / "run")
    # 4 rounds at 0.3004 each, rounded up.
    told = "Result(4 rounds, finished, accuracy 70.0 %, ε ≤ 1.202 at δ = 1e-05; '"
    assert repr(found).startswith(told)
    several = repr(compared(tmp_path / "compared"))
    assert several.startswith("Comparison(one 80.00 ± 0.00 %, two 90.00 ± 0.00 %; 4 runs; '")
    assert max(map(len, (repr(plan), repr(found), several))) < 250


def test_cards_are_whole_and_names_are_text(tmp_path):
    for folder, run in (("private", {}), ("plain", {"private": False})):
        (tmp_path / folder).mkdir()
        html = result(tmp_path / folder, **run)._repr_html_()
        Tags(html)
        assert "70.0 %" in html
        assert "<b>south" not in html
        assert ("NOT PRIVATE" in html) == (folder == "plain")
        assert ("SIMULATION" in html) == (folder == "private")
    Tags(compared(tmp_path / "compared")._repr_html_())
    plan = Plan.read(None, ["data=<i>.csv", "label=y"])._repr_html_()
    Tags(plan)
    assert "&lt;i&gt;.csv" in plan
    assert "privacy.epsilon" in plan
    assert "settings.local_steps" not in plan  # nobody chose it


def test_cards_are_legible_in_both_themes_notebook_first(tmp_path):
    (tmp_path / "run").mkdir()
    found = result(tmp_path / "run")
    parts = [found, compared(tmp_path / "c"), Plan.read(None), found.figures()["sites"]]
    page = tmp_path / "cell.html"
    page.write_text(f"<!doctype html><body>{''.join(p._repr_html_() for p in parts)}")
    with chromium() as browser, opened(browser, page) as (shown, asked):
        for scheme in ("light", "dark"):
            seen = look(shown, 1000, scheme)
            assert seen.faint == []
            assert seen.texts > 60
        shown.evaluate("document.body.dataset.jpThemeLight = 'true'")
        ground = "getComputedStyle(document.querySelector('.fedpact')).backgroundColor"
        assert shown.evaluate(ground) == "rgb(255, 255, 255)"
        assert asked == []


def test_tables_have_a_row_a_round_a_run_a_setting(tmp_path):
    (tmp_path / "run").mkdir()
    found, several = result(tmp_path / "run"), compared(tmp_path / "compared")
    rounds = found.frame()
    assert list(rounds["round"]) == [0, 1, 2, 3, 4]
    assert rounds["accuracy"].iloc[-1] == 0.7
    runs = several.frame()
    assert list(zip(runs["entry"], runs["seed"], strict=True)) == [
        *(("one", 1), ("one", 2)),
        *(("two", 1), ("two", 2)),
    ]
    assert list(runs["accuracy"]) == [0.8, 0.8, 0.9, 0.9]
    assert set(runs["epsilon"]) == {1.0}
    settings = Plan.read(None).frame().set_index("key")
    assert settings.loc["privacy.epsilon", "value"] == 2.0
    assert not settings.loc["privacy.epsilon", "default"]
    assert settings.loc["settings.local_steps", "default"]


@pytest.mark.drawn
def test_figures_are_matplotlib_and_saved_with_legends(tmp_path):
    (tmp_path / "run").mkdir()
    found = result(tmp_path / "run").figures()
    assert set(found) == {"accuracy", "sites", "epsilon", "bytes", "labels", "psi"}
    assert all(isinstance(figure, Figure) for figure in found.values())
    figure = found["accuracy"]
    figure.savefig(tmp_path / "accuracy.svg")
    saved = (tmp_path / "accuracy.svg").read_text()
    assert all(text in saved for text in ("global", "worst site", "round"))
    # In a page the legend is text beside the figure, and not in it as well.
    assert not figure.legends
    assert "worst site" not in figure.svg
    assert {key.label for key in figure.keys} == {"global", "sites, middle 80 %", "worst site"}
    titles = set(compared(tmp_path / "c").figures())
    assert {"Accuracy against rounds", "Accuracy against ε"} <= titles


def test_progress_bar_uses_one_output_in_notebooks_only(monkeypatch):
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    assert not in_notebook()
    shown = []

    class Cell:
        def update(self, html):
            shown.append(html.data)

    monkeypatch.setattr(display, "display", lambda html, display_id: Cell())
    monkeypatch.setattr(notebook.time, "monotonic", lambda: 1000.0)
    bar = Bar(3)
    for done in range(1, 4):
        bar(done, "accuracy <5 %")
    # The second came in the same tenth of a second; the last one is shown in any case.
    assert [re.findall(r"\d/\d", html) for html in shown] == [["1/3"], ["3/3"]]
    assert "accuracy &lt;5 %" in shown[-1]
    assert "value=3" in shown[-1]
