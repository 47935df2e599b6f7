"""The pages as a reader sees them, in Chromium: on a phone, a tablet, a screen, dark and on paper.

"Printed in four pages" is meant of runs and comparisons of ordinary size, up to 20 sites and 8
entries: what is longer is folded away, but for a table's rows.
"""

import json
import math

import pytest
from tests.browser import cells, chromium, look, opened, printed

from fedpact.report.compared_runs import SweepPoint
from fedpact.report.comparison import document, write_comparison
from fedpact.report.page import write_report

from .conftest import builder
from .test_audits import audit
from .test_comparison import put, read, swept

pytestmark = pytest.mark.drawn

SITES = [f"clinic-{i}" for i in range(5)]
LONG = [f"a-very-long-name-of-a-hospital-{i}" for i in range(20)]
OWN = "my_package_of_algorithms:an_aggregation_of_my_own_that_has_a_long_name_"
LABELS = tuple(f"label-{i}" for i in range(10))
PAGES = ("private", "plain", "person", "long", "many", "comparison", "sweep", "twelve")


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every kind of page, of runs whose files are written by hand."""
    root = tmp_path_factory.mktemp("pages")

    def run(name, sites, privacy=None, **more):
        (root / name).mkdir()
        folder = builder(root / name)(sites, **more)
        told = json.loads((folder / "privacy.json").read_text())
        for k, site in enumerate(told["sites"].values()):
            site |= {"size": 100.0 + k, "sigma_joint": 2.5 + k / 8, "clip": 1.5 + k}
        (folder / "privacy.json").write_text(json.dumps({**told, **(privacy or {})}))
        return folder

    budgets = [1.5, 2.0, 2.25, 3.0, 8.25]
    private = run("private", SITES, budgets=budgets, labels=LABELS)
    told = json.loads((private / "privacy.json").read_text())
    for k, site in enumerate(told["sites"].values()):
        site["epsilon_per_person"] = {"2": 3.0 + k, "5": 9.0 + k}
    (private / "privacy.json").write_text(json.dumps(told))
    wrong = audit(site="clinic-1")
    wrong["checks"][0]["bound"] = 2.5
    (private / "audit.json").write_text(json.dumps(wrong))
    run("plain", SITES, private=False)
    run(
        "person",
        SITES,
        {"unit": "person", "honest": 3, "per_person": "the same"},
        refused={"clinic-4": "budget"},
    )
    run("long", LONG, labels=LABELS)
    run("many", [f"ward-{i:04}" for i in range(60)], budgets=[1 + i / 99 for i in range(60)])
    for name in PAGES[:5]:
        write_report(root / name)
    comparison(root / "comparison", {"fedavg": 1.0, "fedprox": 2.0, "exact": None})
    comparison(root / "sweep", {f"fedavg-epsilon-{e:g}": e for e in (0.5, 1, 2, 4, 8)})
    comparison(root / "twelve", {f"{OWN}{i}_epsilon_{e}": e for i in range(12) for e in (1, 2, 8)})
    return {
        name: root / name / ("report.html" if name in PAGES[:5] else "comparison.html")
        for name in PAGES
    }


def comparison(root, epsilons):
    for name, epsilon in epsilons.items():
        for seed in (1, 2):
            top = 0.6 + 0.03 * seed + (epsilon or 9) / 40
            put(root, name, seed, {0: 0.1, 2: top / 2, 4: top}, epsilon=epsilon)
    found = read(root, list(epsilons), (1, 2))
    if root.name in ("sweep", "twelve"):
        bases = {n: "fedavg" if root.name == "sweep" else n.split("_epsilon")[0] for n in epsilons}
        points = {n: SweepPoint(bases[n], {"privacy.epsilon": e}) for n, e in epsilons.items()}
        found = swept(found, points)
    (root / "comparison.json").write_text(json.dumps(document(found), default=str))
    write_comparison(found)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_legible_self_contained_and_prints(browser, pages, name):
    with opened(browser, pages[name]) as (page, asked):
        for width, scheme in ((360, "light"), (768, "light"), (1440, "light"), (1440, "dark")):
            seen = look(page, width, scheme)
            assert seen.overflow <= 0, (scheme, width)
            assert seen.hidden == [], (scheme, width)
            assert seen.faint == [], (scheme, width)
            assert seen.least[0] >= 11, (scheme, width, seen.least)
            # It looked at the text, that of figures too.
            assert seen.texts > 100
            assert seen.drawn > 20
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(18, 22, 27)"
        if name not in ("many", "twelve"):
            assert 1 <= printed(page) <= 4
        assert asked == []


def test_a_faint_word_small_type_and_a_wide_table_are_seen(browser, tmp_path):
    # What the checks above are worth: each of these is a fault that they have to find.
    page = tmp_path / "page.html"
    page.write_text(
        "<body style='background:#fff'><p style='color:#888'>faint</p><p>good</p>"
        "<svg viewBox='0 0 100 20' width='100'><rect width='100' height='20' fill='#777'/>"
        "<text x='5' y='15' style='font-size:9px;fill:#fff'>ground</text></svg>"
        "<div style='width:200px;overflow-x:auto'><div style='width:300px'>moved</div></div>"
        "<div style='width:500px'>wide</div><img src='https://example.org/x.png'>"
    )
    with opened(browser, page) as (found, asked):
        seen = look(found, 360, "light")
    assert [text for text, _ in seen.faint] == ["faint", "ground"]
    # #777777 and #888888 on white, or white on it, by WCAG's own formula: 4.48 and 3.54.
    assert [round(ratio, 2) for _, ratio in seen.faint] == [3.54, 4.48]
    assert seen.least == (9.0, "ground")
    assert seen.hidden == ["moved"]
    assert seen.overflow > 100
    assert asked == ["https://example.org/x.png"]


def test_the_meaning_is_on_the_first_screen(browser, pages):
    for name in ("private", "person", "comparison"):
        with opened(browser, pages[name]) as (page, _):
            for width, height in ((1440, 900), (360, 800)):
                page.set_viewport_size({"width": width, "height": height})
                box = page.query_selector(".meaning tbody tr").bounding_box()
                # On a phone a comparison's two banners go before it.
                limit = height if (name, width) != ("comparison", 360) else 1.5 * height
                assert box["y"] + box["height"] < limit, (name, width)
            # What was configured, and left to defaults, comes after everything that was found.
            order = page.evaluate("[...document.querySelectorAll('h2, h3')].map(e => e.innerText)")
            if name != "comparison":
                assert order.index("Configuration") > order.index("What was sent")


def close(shown, exact, digits=4):
    """Whether a figure as printed is the file's, to so many significant digits."""
    number = float(shown.replace(",", "").split()[0])
    return abs(number - exact) <= 10.0 ** (math.floor(math.log10(abs(exact) or 1)) - digits + 1)


def test_every_number_of_a_report_is_the_files(browser, pages):
    folder = pages["private"].parent
    privacy = json.loads((folder / "privacy.json").read_text())
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    last = rounds[-1]
    with opened(browser, pages["private"]) as (page, _):
        stakes = cells(page, ".meaning tbody tr")
        cards = {
            card.query_selector("dt").inner_text().split("\n")[0].removesuffix(" simulator only"):
            card.query_selector(".value").inner_text()
            for card in page.query_selector_all(".card")
        }  # fmt: skip
        table = {row[0]: row[1:] for row in cells(page, "details table.full tbody tr")}
    sites = privacy["sites"]
    asked = [("one record", max(site["epsilon_reserved"] for site in sites.values()))]
    for k in ("2", "5"):
        most = max(site["epsilon_per_person"][k] for site in sites.values())
        asked.append((f"person, {k} records", most))
    for (who, epsilon), (shown, told, odds, right) in zip(asked, stakes, strict=True):
        assert shown == who
        assert 0 <= float(told) - epsilon <= 1e-3
        wins = (math.exp(epsilon) + 1e-5) / (1 - 1e-5)
        if wins > 1000:
            assert (odds, right) == ("over 1,000 : 1", "over 99.9 %")
        else:
            assert 0 <= float(odds.removesuffix(" : 1")) - wins <= wins / 10
            assert 0 <= float(right.removesuffix(" %")) - 100 * wins / (1 + wins) <= 0.1
    assert close(cards["accuracy"], 100 * last["accuracy"], 3)
    assert close(cards["worst site"], 100 * min(s["accuracy"] for s in last["scores"].values()), 3)
    assert cards["rounds"] == "4 of 4"
    sent = sum(r["bytes_up"] + r["bytes_down"] for r in rounds)
    assert cards["bytes sent"] == f"{sent / 1000:g} kB"
    assert list(table) == sorted(SITES, key=lambda name: last["scores"][name]["accuracy"])
    for name, row in table.items():
        own, score = sites[name], last["scores"][name]
        spent, allowed, reserved, delta = map(float, row[:4])
        for shown, exact in (
            (spent, last["epsilon"][name]),
            (allowed, own["epsilon"]),
            (reserved, own["epsilon_reserved"]),
            (delta, own["delta"]),
        ):
            assert exact <= shown <= exact * 1.001
        names = ("size", "rate", "clip", "sigma_joint", "steps")
        assert all(close(row[4 + i], own[key]) for i, key in enumerate(names))
        assert close(row[9], 100 * score["accuracy"], 3)
        assert close(row[10], score["loss"])
        assert row[11] == str(score["records"])


def test_every_number_of_a_comparison_is_the_files(browser, pages):
    told = json.loads((pages["sweep"].parent / "comparison.json").read_text())["entries"]
    with opened(browser, pages["sweep"]) as (page, _):
        single = cells(page, "details tbody tr")
        side = cells(page, ".note + .scroll > .stack tbody tr")[: len(told)]
        stakes = cells(page, ".meaning tbody tr")
    assert [row[0] for row in side] == list(told)
    for row in side:
        entry = told[row[0]]
        for cell, key in ((row[1], "accuracy"), (row[2], "worst_accuracy")):
            mean, deviation = (float(part) for part in cell.removesuffix(" %").split(" ± "))
            assert abs(mean - 100 * entry[key]["mean"]) <= 0.005 + 1e-9
            assert abs(deviation - 100 * entry[key]["deviation"]) <= 0.005 + 1e-9
        assert float(row[3].split(" at ")[0]) == entry["epsilon"]
        assert float(row[6]) == entry["rounds"]["mean"]
    assert [float(row[1]) for row in stakes] == [entry["epsilon"] for entry in told.values()]
    runs = [(n, s, run) for n, entry in told.items() for s, run in entry["runs"].items()]
    assert [row[:2] for row in single] == [[name, seed] for name, seed, _ in runs]
    for row, (_, _, run) in zip(single, runs, strict=True):
        assert close(row[2], 100 * run["accuracy"], 3)
        assert close(row[3], 100 * run["worst_accuracy"], 3)
