"""What leaves a site has the same form whatever its records are: data cannot speak by refusals."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.deployment.grid import read_from, stored

from fedpact.common.errors import PlanError
from fedpact.common.messages import Refusal, Task, from_bytes, to_bytes
from fedpact.deployment.federation import Federation
from fedpact.deployment.site import Site, answer

ROUNDS = 3  # of which the plan's reservation has two


def form(message):
    """All of a message but its noisy numbers and the hash of what was charged when."""
    if isinstance(message, Refusal):
        return message
    return (
        message.run,
        message.round,
        message.site,
        message.weight,
        {name: (v.shape, v.dtype) for name, v in message.vectors.items()},
        sorted(message.numbers),
        message.ledger_length,
        len(message.ledger_head),
        all(v.isfinite().all() for v in message.vectors.values()),
        all(map(math.isfinite, message.numbers.values())),
    )


# Codes are as long as what was released makes them, so they are not compared: of floats all lengths
# can be.
EQUAL_LENGTHS = {"compression": {"kind": "none"}}


def everything(site_dir):
    """The form of all that leaves a site in a run, and of the files that follow from it."""
    for name in ("ledger.jsonl", "ledger.jsonl.seen", "site.db"):
        (site_dir / name).unlink(missing_ok=True)
    found = []
    numbers = False
    with Site(site_dir) as site:
        method = site.plan.method
        w = method.init(site._bench.private.model.vector.clone())
        for number in range(1, ROUNDS + 1):
            # As far from the start as bad records would pull it, and farther.
            asked = method.task(w)
            told = {name: v + 0.01 * number for name, v in asked.vectors.items()}
            about = site.run, number, site.plan.algorithm
            task = Task(*about, told, dict(asked.numbers), number - 1)
            block, _ = answer(site, to_bytes(task))
            message = from_bytes(block)
            found.append(form(message))
            # A released number is written in as many digits as its noise gives it, and lengths are
            # rounded up to 8: they follow from what is released, and are not compared.
            if not isinstance(message, Refusal):
                numbers = bool(message.numbers)
                found += [] if numbers else [len(block)]
    ledger = [json.loads(line) for line in (site_dir / "ledger.jsonl").read_text().splitlines()]
    found += [sorted(entry) for entry in ledger]
    if not numbers:
        found.append(len(stored(site_dir)))
    return found


def images(site_dir):
    with np.load(site_dir / "records.npz") as stored:
        return stored["x"], stored["y"]


def with_record(x, y, record, label):
    more = np.broadcast_to(np.asarray(record), x[:1].shape)
    return np.concatenate([x, more]), np.concatenate([y, np.asarray([label])])


BAD_IMAGES = {
    "NaN": lambda x, y: with_record(x, y, math.nan, 3),
    "infinite": lambda x, y: with_record(x, y, -math.inf, 3),
    "3e38": lambda x, y: with_record(x, y, 3e38, 3),
    "float64": lambda x, y: with_record(x.astype(float), y, 1e300, 3),
    "text": lambda x, y: with_record(x[:20].astype(str), y[:20], "unknown", 3),
    "whole": lambda x, y: (np.rint(x).astype(int), y),
    "label 99": lambda x, y: with_record(x, y, 0.5, 99),
    "label -100": lambda x, y: with_record(x, y, 0.5, -100),
    "label NaN": lambda x, y: with_record(x, y, 0.5, math.nan),
    "label text": lambda x, y: with_record(x, y.astype(str), 0.5, "cat"),
    "all bad": lambda x, y: (x * math.nan, y),
    "none": lambda x, y: (x[:0], y[:0]),
    "one": lambda x, y: (x[:1], y[:1]),
    "twenty times as many": lambda x, y: (np.tile(x, (20, 1, 1, 1)), np.tile(y, 20)),
}


def store(site_dir, x, y):
    (site_dir / "records.npz").unlink()
    np.savez(site_dir / "records.npz", x=x, y=y)


@pytest.mark.parametrize("algorithm", ["fedavg", "ldp_fedsgd", "fedfdp"])
def test_outgoing_message_form_is_independent_of_records(make, tmp_path, algorithm):
    """Codes, shapes, lengths, counts, ledgers; before, six of these did not open at all."""
    mode = {"mode": "batch_clipped"} if algorithm == "ldp_fedsgd" else {}
    privacy = {"accountant": "rdp", **mode}
    settings = {} if algorithm == "ldp_fedsgd" else {"local_steps": 2}
    plan = {"algorithm": algorithm, "privacy": privacy, "settings": settings, "rounds": 2}
    plan |= EQUAL_LENGTHS
    site_dir = make(tmp_path / "d", **plan) / "sites" / "site-00"
    x, y = images(site_dir)
    # An owner who wants no record to decide whether the site opens.
    with (site_dir / "site.toml").open("a") as settings_file:
        settings_file.write("most_left_out = 1.0\n")
    clean = everything(site_dir)
    codes = [entry.code for entry in clean if isinstance(entry, Refusal)]
    assert set(codes) == {"budget"}
    # What a site reads is the same for all algorithms; what they make of it is tried on a few.
    names = BAD_IMAGES if algorithm == "fedavg" else ("all bad", "twenty times as many")
    for name in names:
        change = BAD_IMAGES[name]
        store(site_dir, *change(x, y))
        assert everything(site_dir) == clean, name


class Bag(torch.nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.e, self.l = torch.nn.Embedding(50, 4), torch.nn.Linear(4, classes)

    def forward(self, x):
        return self.l(self.e(x).mean(1))


@pytest.fixture(scope="module")
def word_sites(make, tmp_path_factory):
    where = tmp_path_factory.mktemp("words")
    rng = np.random.default_rng(0)
    np.savez(where / "t.npz", x=rng.integers(0, 50, (60, 6)), y=rng.integers(0, 2, 60))
    plan = {"data": str(where / "t.npz"), "model": f"{__name__}:Bag"}
    plan |= {"sites": 2, "sampling_rate": 0.5}
    return make(where / "d", settings={"local_steps": 1}, rounds=2, **plan, **EQUAL_LENGTHS)


@pytest.mark.parametrize(("vocabulary", "word"), [(None, 50), (50, -1)])
def test_a_word_that_the_model_does_not_have_leaves_no_trace(
    word_sites, tmp_path, vocabulary, word, caplog
):
    """Declared or not. In the owner's log it has its row."""
    site_dir = Path(shutil.copytree(word_sites / "sites" / "site-00", tmp_path / "s"))
    if vocabulary:
        path = site_dir / "federation.toml"
        path.write_text(path.read_text().replace("[records]", "[records]\nvocabulary = 50"))
    x, y = images(site_dir)
    clean = everything(site_dir)
    assert "left out" not in caplog.text
    store(site_dir, *with_record(x, y, word, 0))
    assert everything(site_dir) == clean
    assert f"row {len(y)}" in caplog.text


def test_a_batch_that_raises_is_answered_without_the_cause(word_sites, tmp_path, monkeypatch):
    """As where a site's trial of its records found nothing. Before: refusal "error"."""
    site_dir = Path(shutil.copytree(word_sites / "sites" / "site-00", tmp_path / "s"))
    clean = everything(site_dir)
    found = torch.ones(0, dtype=torch.bool)
    monkeypatch.setattr(
        "fedpact.simulation.workshop.Worker.find_accepted",
        lambda _, x, y, *__: found.new_ones(len(y)),
    )
    x, y = images(site_dir)
    store(site_dir, x + 50, y)  # so that whatever is drawn raises
    assert everything(site_dir) == clean


def test_a_csv_of_wrong_lines_leaves_no_trace(make, tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        f"{a:.3f},{b:.3f},{c}" for a, b, c in zip(*rng.normal(size=(2, 60)), "ab" * 30, strict=True)
    ]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["p,q,out", *rows]) + "\n")
    plan = {"data": str(table), "label": "out", "sites": 2, "rounds": 2}
    choices = {"records": False}
    site_dir = make(tmp_path / "d", choices, **plan) / "sites" / "site-00"
    read_from(table, site_dir)
    clean = everything(site_dir)
    for line in ('1,"2,a', "1,2", "abc,1,a", ",1,b", "1,1,c", "1,1,", "1e39,1,a", "nan,1,b"):
        table.write_text("\n".join(["p,q,out", line, *rows, line]) + "\n")
        assert everything(site_dir) == clean, line


def test_federation_toml_keeps_what_was_declared(make, tmp_path):
    """From the plan, by columns for tables, by places for the arrays that are written from one."""
    table = tmp_path / "t.csv"
    table.write_text("age,ward,out\n" + "30,A,x\n40,B,y\n" * 20)
    columns = {"age": {"low": 0.0, "high": 120, "clamp": True}, "ward": {"categories": ["A", "B"]}}
    records = {"classes": ["x", "y"], "columns": columns}
    plan = {"data": str(table), "label": "out", "sites": 2, "records": records}
    for given, names in ((False, {"age", "ward"}), (True, {"0", "1"})):
        where = make(tmp_path / str(given), {"records": given}, **plan) / "server"
        federation = Federation.read(where / "federation.toml")
        assert set(federation.records.columns) == names
        assert "range = [0.0, 120.0]" in (where / "federation.toml").read_text()
        assert federation.features == (() if given else ("age", "ward"))
        first = federation.records.columns[min(names)]
        assert (first.low, first.high, first.clamp) == (0.0, 120.0, True)
        last = federation.records.columns[max(names)]
        assert last.categories == ([0.0, 1.0] if given else ["A", "B"])
    assert federation.classes == ("x", "y")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vocabulary = 50", 'set values = "int64"'),
        ('[records.columns."0"]\nlow = 0.0', "not a row of columns"),
        ("low = 2.0\nhigh = 1.0", "low <= high"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(site_dir, line, message):
    path = site_dir / "federation.toml"
    path.write_text(path.read_text().replace('labels = "numbers"', line))
    with pytest.raises(PlanError, match=message):
        Site(site_dir)
