"""The documentation's site is built strictly, without a network, and asks for nothing outside."""

import fcntl
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.browser import chromium

import fedpact
from fedpact.algorithms import names
from fedpact.cli import commands
from fedpact.cli.reference import everything

pytestmark = pytest.mark.slow  # a build of the whole site
ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"
# What a browser fetches by itself; a link that a reader may follow is none of it.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=[\"']?((?:\w+:)?//[^\"'\s>]*)"
)
IN_STYLES = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]*)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built once for all processes of a run of the suite."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    out = shared / "site"
    away = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE)
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                env={**os.environ, **away, "NO_MKDOCS_2_WARNING": "1"},
            )
            assert done.returncode == 0, done.stderr
    return out


def text(page):
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")).replace("&para;", "")


def test_its_pages_load_nothing_from_outside(site):
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 40
    assert [(p.name, a) for p in pages for a in FETCHED.findall(p.read_text("utf-8"))] == []
    assert [(p.name, a) for p in styles for a in IN_STYLES.findall(p.read_text("utf-8"))] == []
    assert FETCHED.findall('<link rel="stylesheet" href="https://fonts.example/css">')
    assert IN_STYLES.findall("@import url(//cdn.example/x.css)")


def test_reference_lists_every_key_algorithm_command_and_name(site):
    told = {name: text(site / f"reference/{name}.html") for name in ("configuration", "deployment")}
    for table in everything():
        file = "deployment" if ".toml" in table.name else "configuration"
        for key in table.keys:
            # As in HTML: words alone are enough to tell that the meaning is there.
            words = re.findall(r"\w{4,}", key.meaning)[:4]
            assert key.last in told[file], key.name
            assert all(word in told[file] for word in words), key.name
    page = (site / "reference/algorithms.html").read_text("utf-8")
    assert all(f'id="{name}"' in page for name in names())
    page = (site / "reference/commands.html").read_text("utf-8")
    assert all(f'id="fedpact-{name}' in page for name in commands.names())
    page = text(site / "reference/python.html")
    assert all(f"fedpact.{name}" in page for name in fedpact.__all__)


def test_links_outside_docs_resolve_on_the_site(site):
    home = (site / "index.html").read_text("utf-8")
    assert 'href="explanation/guarantee.html"' in home
    assert 'href="experiments/index.html"' in home
    assert "docs/" not in " ".join(re.findall(r'href="([^"]*)"', home))
    page = (site / "experiments/joining/index.html").read_text("utf-8")
    assert 'href="../../how-to/evaluate-and-personalise.html"' in page


def test_a_browser_requests_nothing_from_other_hosts(site):
    asked = []
    with chromium() as browser:
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        for name in ("index", "reference/configuration"):
            page.goto((site / f"{name}.html").as_uri(), wait_until="networkidle")
    assert len(asked) > 4
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


# A plain question, and the page that answers it.
QUESTIONS = {
    "what does epsilon mean": "explanation/epsilon",
    "what is delta": "explanation/epsilon",
    "who is protected by the guarantee": "explanation/guarantee",
    "what evaluations cost": "explanation/guarantee",
    "dishonest server": "explanation/threats",
    "five ideas of the architecture": "explanation/architecture",
    "what does accountant mean in the glossary": "reference/glossary",
    "known limits of this version": "CHANGELOG",
    "errata of the papers": "notes/errata",
    "lemma of passes of one shape proof": "notes/proofs",
    "upgrading torch and flower": "notes/upgrading",
    "which tables go together with robust": "reference/combinations",
    "fedpact ledger verify command": "reference/commands",
    "first federation on one machine": "tutorials/first-federation",
    "how do I install it": "tutorials/first-run",
    "train on my own csv file": "tutorials/own-data-and-model",
    "missing values in a table": "how-to/prepare-tables",
    "compare several algorithms": "how-to/compare-and-tune",
    "is the difference between two methods more than chance": "how-to/compare-and-tune",
    "use a hugging face model": "how-to/hugging-face",
    "add my own algorithm": "how-to/extend",
    "run a federation with docker compose": "how-to/operate-a-deployment",
    "what happens when a site crashes": "how-to/operate-a-deployment",
    "continue an interrupted run": "how-to/runs",
    "masks of secure aggregation": "how-to/secure-aggregation",
    "accuracy on held-out records of each site": "how-to/evaluate-and-personalise",
    "pretrained features for images": "how-to/features",
    "model card": "how-to/statements",
}


STOP = re.compile(r"an?|the|[oi][nfr]|is|are|be|by|to|and|what|which|who|how|does|do|i|my|it")


def stems(text):
    """Words as lunr's pipeline leaves them: no stop words, endings taken off."""
    words = re.findall(r"[^\W_]+", text.lower())
    return [
        re.sub(r"(ies|es|s|ing|ed)$", "", w) if len(w) > 4 else w
        for w in words
        if not STOP.fullmatch(w)
    ]


FIELDS = {"title": 10.0, "text": 1.0}  # and what a word of it counts


def ranked(index, question):
    """Documents by lunr's score: BM25 of each field (k1 = 1.2, b = 0.75), titles weighted highest.

    index: field -> each document's words. Of the words that are asked each is optional.
    """
    score = Counter()
    for field, words in index.items():
        mean = sum(c.total() for c in words) / len(words)
        for term in set(stems(question)):
            having = [i for i, counts in enumerate(words) if term in counts]
            rarity = math.log(1 + (len(words) - len(having) + 0.5) / (len(having) + 0.5))
            for i in having:
                often, size = words[i][term], words[i].total()
                weight = often * 2.2 / (often + 1.2 * (0.25 + 0.75 * size / mean))
                score[i] += FIELDS[field] * rarity * weight
    return [i for i, _ in score.most_common()]


def test_search_finds_the_page_that_answers(site):
    documents = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    pages = [d["location"].split("#")[0].removesuffix(".html") for d in documents]
    index = {
        field: [Counter(stems(re.sub(r"<[^>]+>", " ", d[field]))) for d in documents]
        for field in FIELDS
    }
    assert {q: pages[ranked(index, q)[0]] for q in QUESTIONS} == QUESTIONS
