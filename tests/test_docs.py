"""The code in the documentation runs."""

import re
import sys
from pathlib import Path

import pytest
from tests.conformance import test_bounds, test_sensitivity, test_suite
from tests.conformance.conftest import variants_of

import fedpact
from fedpact import algorithms
from fedpact.algorithms import names
from fedpact.studies.conformance import HandFederation

ROOT = Path(__file__).parents[1]


def test_the_worked_example_passes_the_conformance_suite(tmp_path, monkeypatch):
    """It becomes an algorithm by its file's existence, and the tests of each are called on it."""
    page = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "serverstep" not in names()
    (tmp_path / "serverstep.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    try:
        cases = variants_of("serverstep")
        assert len(cases) == 2  # local_steps
        for case in cases:
            test_suite.test_every_check_holds(case)
            test_sensitivity.test_every_query_of_every_algorithm(case, HandFederation)
            test_bounds.test_honest_replies_are_within_their_bounds(HandFederation, case)
            test_bounds.test_false_replies_are_beyond_the_bounds(HandFederation, case)
        if algorithms.load("serverstep").NEUTRAL:
            test_suite.test_it_is_its_parent_under_neutral_settings_alone("serverstep")
    finally:
        sys.modules.pop("fedpact.algorithms.serverstep", None)


@pytest.mark.parametrize(("page", "least"), [("notes/threats.md", 40), ("notes/what-holds.md", 10)])
def test_the_tests_that_a_page_names_exist(page, least):
    page = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    files = set(re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)`", page))
    sources = list((ROOT / "tests").rglob("*.py"))
    known = {name for path in sources for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > least
    assert named <= known, sorted(named - known)
    assert files <= {path.name for path in sources}


def test_the_odds_ratio_is_that_of_the_weights(tmp_path, monkeypatch, capsys):
    """Ten years of a range of 120 are 10/60 of the input, which lies in -1..1."""
    page = (ROOT / "docs/how-to/runs.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python odds\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    age = [20.0 + i % 60 for i in range(600)]
    table = {"age": age, "bmi": [27.0] * 600, "ward": ["A", "B", "C"] * 200}
    table["ill"] = ["yes" if a > 50 else "no" for a in age]
    columns = {"age": {"range": [0, 120], "scale": "range"}, "bmi": {"range": [10, 60]}}
    columns["ward"] = {"categories": ["A", "B", "C"]}
    records = {"classes": ["no", "yes"], "columns": columns}
    settings = {"label": "ill", "records": records, "sites": 1, "rounds": 5}
    result = fedpact.run("logistic", table, **settings, out="runs/patients")
    exec(compile(code, "runs.md", "exec"), {})
    weight = next(p for p in result.model.parameters() if p.ndim == 2).detach()
    ratio = float(((weight[1, 0] - weight[0, 0]) * 10 / 60).exp())
    assert f"by the factor {ratio:.2f}\n" in capsys.readouterr().out


def test_every_page_is_in_the_navigation_of_the_site():
    named = re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 20
    assert pages <= set(named), sorted(pages - set(named))


def anchors(page):
    """The places of a page that a link may name: its headings, as Python-Markdown names them."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", title)) for title in titles]
    return {re.sub(r"[-\s]+", "-", title.strip().lower()) for title in plain}


CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MADE = {"configuration", "algorithms", "deployment", "commands", "python"}  # docs/pages.py


def test_links_of_pages_lead_to_files_and_headings():
    """Without a build of the site, which test_site.py has."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "experiments").rglob("*.md")
    made = {ROOT / "docs" / "reference" / f"{name}.md" for name in MADE}
    found, wrong = 0, []
    for page in pages:
        text = CODE.sub("", page.read_text(encoding="utf-8"))
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            address, _, place = link.partition("#")
            if "://" in link or address.startswith("mailto:"):
                continue
            found += 1
            there = (page.parent / address).resolve() if address else page
            if there in made:
                continue
            marked = place and there.suffix == ".md"
            if not there.exists() or (marked and place not in anchors(there)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert found > 100
    assert wrong == []
