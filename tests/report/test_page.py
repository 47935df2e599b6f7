import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fedpact.common.messages import SiteScore
from fedpact.common.notebook import LIGHT
from fedpact.report import charts
from fedpact.report.meaning import explain_run, stake
from fedpact.report.page import write_report
from fedpact.report.run_summary import read_run

from .conftest import builder, change

FIVE = [f"clinic-{i}" for i in range(5)]
VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


class Page(HTMLParser):
    """A page taken apart: its text, its attributes; tags that are not closed in order."""

    def __init__(self, path):
        super().__init__()
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.crossed: list[str] = []
        self._open: list[str] = []
        self.folder, self.source = path.parent, path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.crossed += self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))

    def titles(self):
        return [value for tag, key, value in self.attributes if (tag, key) == ("svg", "aria-label")]


def page(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path)


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """A page of five sites, with its figures; for tests that are marked `drawn`."""
    return page(builder(tmp_path_factory.mktemp("five"))(FIVE))


@pytest.mark.drawn
def test_fetches_nothing_and_refers_to_nothing_that_is_missing(five):
    found = five
    for tag, key, value in found.attributes:
        if key in {"src", "href", "xlink:href", "srcset", "data", "action", "poster"}:
            assert value.startswith(("#", "data:")), (tag, key, value)
    assert not {"script", "iframe", "object", "embed", "base"} & set(found.tags)
    assert "@import" not in found.source
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", found.source)
    assert not re.search(r"https?:|//\w", without_names)
    ids = [value for _, key, value in found.attributes if key == "id"]
    assert len(ids) == len(set(ids)), "two figures share an id: one draws with the other's shapes"
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', found.source)
    assert used
    assert {a or b for a, b in used} <= set(ids)


@pytest.mark.drawn
def test_it_is_well_formed_and_says_nothing_of_nothing(five):
    """Of joining where no site was trained alone; a missing figure is no word of Python's."""
    assert five.crossed == []
    assert "worth joining" not in five.text
    assert not re.search(r"\bNone\b|\bnan\b", five.text)


def test_an_accuracy_has_the_interval_of_its_test_records(build):
    """Wilson's, whose ends solve (θ - share)² = z² θ (1 - θ) / n, n of records, not of sites."""
    folder = build(FIVE)
    assert "95 % interval" not in page(folder).text
    change(folder, "summary", judged_records=400)
    found = re.search(
        r"95 % interval ([\d.]+) % to ([\d.]+) % by 400 test records", page(folder).text
    )
    assert found
    ends = [float(end) / 100 for end in found.groups()]
    assert ends[0] < 0.7 < ends[1]
    for end in ends:
        assert (end - 0.7) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / 400, rel=0.03)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("values", "ends", "told"),
    [
        ((-0.5, 0.5), (-0.54, 0.54), False),
        ((-40.0, 0.5), (-1.0, 0.54), True),
        ((1e-5, 2e-5), (0.0, 2.16e-5), False),
    ],
)
def test_no_metric_is_cut_off_unless_it_is_said(build, values, ends, told):
    run = read_run(build(FIVE))
    rounds = [replace(run.last, round=i, metrics={"r2": v}) for i, v in enumerate(values)]
    drawn = charts.metric(replace(run, records=rounds), "r2")
    assert drawn.axes[0].get_ylim() == pytest.approx(ends)
    assert ("-40 at worst" in drawn.caption) == told


def test_a_digest_is_no_title_and_keys_break_at_points(build):
    source = page(change(build(FIVE), "plan", data="table@0123456789abcdef")).source
    assert "<h1>fedavg on table</h1>" in source
    assert "settings.<wbr>learning_rate" in source


def test_names_every_site_and_states_the_guarantee(build):
    text = page(build(FIVE, budgets=[1.5, 2, 2, 2, 8.25])).text
    for name in FIVE:
        assert name in text
    for number in ("1.5", "8.25", "1e-05"):
        assert number in text
    for part in (
        "add/remove one record",
        "pessimistic estimate",
        "all that a site sends",
        "how long a site takes",
        "what only a simulator sees",
        "protects nobody",
        "70.0 %",
        "0.0125",
        "0.125",
        "9.8.7",
    ):
        assert part in text


def test_epsilon_is_printed_rounded_up(build):
    # 4 rounds at 0.3004 spend 1.2016; a 1.20161 written anywhere must not be printed as 1.2016.
    text = page(build(FIVE, epsilon=dict.fromkeys(FIVE, 1.20161))).text
    assert "1.202 of 2" in text
    assert "1.2016" not in text


def test_the_largest_epsilon_on_record_counts(build):
    folder = build(FIVE, epsilon={})
    (folder / "summary.json").unlink()
    # What earlier rounds recorded stays spent: 3 rounds at 0.3004.
    assert "0.9012 of 2" in page(folder).text


def test_an_unrecorded_epsilon_is_not_called_small(build):
    spent = dict.fromkeys(FIVE, 1.0) | {"clinic-3": math.nan}
    text = page(build(FIVE, epsilon=spent)).text
    assert "not recorded of 2" in text
    assert "(clinic-3)" in text


def test_an_overspent_site_is_shown_in_red(build):
    assert "OVER BUDGET: clinic-2" in page(build(FIVE, epsilon={"clinic-2": 2.5})).text
    assert "OVER BUDGET" not in page(build(FIVE)).text


def test_a_plain_run_is_marked_and_shows_no_epsilon(build):
    private, plain = page(build(FIVE)), page(build(FIVE, private=False))
    assert "NOT PRIVATE" in plain.text
    assert "NOT PRIVATE" not in private.text
    assert "ε spent over rounds" in private.titles()
    assert "ε spent over rounds" not in plain.titles()
    assert "ε spent" not in plain.text
    # Marked before anything else is claimed.
    assert plain.source.index("NOT PRIVATE") < plain.source.index('class="cards"')


def test_seeded_randomness_is_marked_and_a_deployment_is_not(build):
    folder = build(FIVE)
    assert "SIMULATION" in page(folder).text
    privacy = folder / "privacy.json"
    privacy.write_text(privacy.read_text().replace("seeded simulation", "operating system"))
    text = page(folder).text
    assert "SIMULATION" not in text
    assert "protects nobody" not in text


def test_values_that_no_site_releases_are_marked(build):
    source = page(build(FIVE)).source
    for title in ("Ψ over rounds", "Accuracy of the sites", "Who holds what"):
        assert re.search(re.escape(title) + r' <span class="tag">simulator only', source)


@pytest.mark.drawn
def test_names_are_text_and_a_diverged_run_is_reported(build):
    names = ["<b>", '"><script>alert(1)</script>', "$\\frac{$", "a&b", "医院", "clinic-1"]
    lost = {name: SiteScore(0.1, math.inf, 10) for name in names}
    lost["clinic-1"] = SiteScore(math.nan, math.nan, 10)
    changes = {"accuracy": 0.1, "loss": math.nan, "metrics": {"psi": math.inf}, "scores": lost}
    refused = dict.fromkeys(names[:-1], "policy")
    found = page(build(names, labels=(*names, "$x$"), refused=refused, **changes))
    assert found.crossed == []
    assert "script" not in found.tags
    assert "b" not in found.tags
    assert all(name in found.text for name in names)
    assert "mean loss not a number" in found.text
    assert "In 1 round spread of losses Ψ was not finite" in found.text
    assert "clinic-1; the worst 10 % have not a number" in found.text


@pytest.mark.drawn
def test_many_sites_stay_legible_and_small(build):
    names = [f"ward-{i:04}" for i in range(50)]
    folder = build(names, budgets=[1 + i / 1000 for i in range(50)])
    found = page(folder)
    assert len(found.source.encode()) < 5_000 * 50
    table = set(re.findall(r'<th class="wrap">(ward-\d{4})</th>', found.source))
    assert table == set(names)
    # Drawn by name are the worst ones alone, of which ward-0000 is the first.
    drawn = " ".join(re.findall(r"<svg.*?</svg>", found.source, re.DOTALL))
    assert set(re.findall(r">(ward-\d{4})<", drawn)) == set(names[:20])
    assert "50 different budgets" in found.text


@pytest.mark.drawn
def test_figures_have_the_pages_colours_and_no_others(five):
    figures = re.findall(r"<svg.*?</svg>", five.source, re.DOTALL)
    assert len(figures) > 6
    for figure in figures:
        assert not re.search(r"#[0-9a-fA-F]{3,6}\b|\brgb|\bwhite\b|\bblack\b", figure)
        assert set(re.findall(r"var\(--([\w-]+)\)", figure)) <= set(LIGHT)


@pytest.mark.drawn
def test_a_few_sites_are_drawn_by_name_worst_first(five):
    source = five.source
    bars = next(s for s in re.findall(r"<svg.*?</svg>", source, re.DOTALL) if "of the sites" in s)
    names = re.findall(r">(clinic-\d)</text>", bars)
    heights = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>clinic-', bars)]
    assert sorted(names) == FIVE
    # In the fixture clinic-0 is worst; an SVG counts y from the top.
    assert [name for _, name in sorted(zip(heights, names, strict=True))] == FIVE


def test_the_entropy_of_accuracies_is_shown_with_its_bound(build):
    # Shares 1/2, 1/4, 1/4: ln 2 / 2 + 2 ln 4 / 4 = 1.5 ln 2; of three equal ones it is ln 3.
    unequal = {n: SiteScore(a, 0.1, 9) for n, a in zip("abc", (0.8, 0.4, 0.4), strict=True)}
    text = page(build([*"abc"], scores=unequal)).text
    assert f"{1.5 * math.log(2):.4f} of at most {math.log(3):.4f} nats" in text


def test_refusals_say_who_why_and_when(build):
    text = page(build(FIVE, refused={"clinic-4": "budget"})).text
    assert "clinic-4 budget: it has spent its privacy budget 1 4 4" in text
    assert "No site refused" in page(build(FIVE)).text


def test_defaults_are_distinguished_from_given_values(build):
    plan = {"settings": {"learning_rate": 0.125, "local_steps": 7}, "seed": 0}
    folder = change(build(["a"]), "plan", **plan, defaults=["seed", "settings.local_steps"])
    source = write_report(folder).read_text().replace("<wbr>", "")
    given, left = source[source.index("<h3>Configuration") :].split("2 settings at their defaults")
    assert "<th>settings.learning_rate</th>" in given
    assert "<th>seed</th>" not in given
    assert "<th>defaults</th>" not in source
    assert "<th>settings.local_steps</th><td>7</td>" in left


@pytest.mark.parametrize(
    ("randomness", "told"),
    [
        ("seeded simulation", "bit for bit, from the same data"),
        ("seeded test: protects no one", "so a simulation repeats the run"),
        ("secure, at each site", "This run cannot be repeated"),
    ],
)
def test_the_page_says_what_a_repetition_gives(build, randomness, told):
    folder = change(build(["a"]), "privacy", randomness=randomness)
    assert told in " ".join(write_report(folder).read_text().split())


@pytest.mark.drawn
def test_a_run_at_its_beginning_has_a_page(build):
    folder = build(FIVE, rounds=1, bytes_down=0, bytes_up=0)
    for name in ("summary", "environment", "partition"):
        (folder / f"{name}.json").unlink()
    found = page(folder)
    assert "not ended" in found.text
    assert "Who holds what" not in found.titles()


def test_a_run_without_evaluation_has_a_page(build):
    folder = build(FIVE, rounds=0, accuracy=None, loss=None, metrics={}, scores={})
    assert "[evaluation] share = 0.2" in page(folder).text


@pytest.mark.slow
@pytest.mark.drawn
def test_the_page_of_a_run_is_always_the_same(five):
    assert page(five.folder).source == five.source


@pytest.mark.parametrize("delta", [1e-9, 0.95, 1 - 2**-53])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 300.0, 800.0, 1e300])
def test_odds_are_shown_for_every_budget(epsilon, delta):
    """However large: a share of the wins is between what is lost without ε and certainty."""
    found = stake("one record", epsilon, delta)
    told = float(found.right.removeprefix("over ").removesuffix(" %"))
    least = 100 / (1 + (1 - delta) / (math.exp(min(epsilon, 700.0)) + delta))
    assert min(least, 99.9) - 1e-6 <= told <= 100
    assert found.little == (least > 100 * 1000 / 1001)


@pytest.mark.parametrize(("split_by", "expected"), [("record", 7.0), ("person", 5.0)])
def test_a_persons_odds_count_evaluations(build, split_by, expected):
    """The records of one person may be trained on, held out, or, split one by one, both."""
    folder = build(["a"])
    path = folder / "privacy.json"
    privacy = json.loads(path.read_text())
    privacy["sites"]["a"]["epsilon_per_person"] = {"2": 2.0}
    held = {"unit": "record", "split_by": split_by, "epsilon_reserved": 1.0, "delta": 1e-5}
    privacy["evaluation"] = held | {"epsilon_per_person": {"2": 5.0}}
    path.write_text(json.dumps(privacy))
    found = explain_run(read_run(folder))
    (person,) = (each for each in found.stakes if each.who.startswith("person, 2 records"))
    assert float(person.epsilon) == expected
    assert ("δ = 2e-05" in person.who) == (split_by == "record")


@pytest.mark.drawn
def test_the_partition_of_few_sites_has_its_counts_written(build):
    chart = charts.draw_labels(read_run(build(["a", "b"])))
    assert [text.get_text() for text in chart.axes[1].texts] == ["1", "10", "11"]


@pytest.mark.slow
@pytest.mark.drawn
def test_figures_have_room_for_long_names(build):
    # matplotlib warns where a figure's decorations leave no room; the suite makes that an error.
    names = [f"a-very-long-name-of-a-hospital-{i}" for i in range(20)]  # more are not named
    classes = tuple(f"a-very-long-name-of-a-label-{i}" for i in range(30))
    allowed = [1.23456 + i % 4 for i in range(20)]
    found = page(build(names, labels=classes, budgets=allowed))
    assert len(found.titles()) == 6
