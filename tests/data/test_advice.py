"""Arrays whose numbers get far from 0, as pixels of 0 .. 255 do: warned of, with what helps."""

import re
import tomllib

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedpact.data.advice import advise
from fedpact.data.schema import Column, RecordForm
from fedpact.plan import Plan
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate


def pixels(path, *, count=600, shape=(1, 8, 8), dtype=np.float32, **spoilt):
    """Two classes of images of 0 .. 255 that differ in which half is brighter."""
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, count)
    bright = np.repeat([[40, 0], [0, 40]], 32, axis=1)
    x = (draw.integers(0, 216, (count, 64)) + bright[y]).astype(dtype)
    for place, value in spoilt.items():
        x[int(place[1:]), 3] = value
    np.savez(path, x=x.reshape(count, *shape), y=y)
    return str(path)


def plan_of(data, records=None, **more):
    tables = {
        "sites": 2,
        "rounds": 12,
        "sampling_rate": 0.5,
        "privacy": {"epsilon": 5.0, "accountant": "rdp"},
    }
    return Plan.parse({"data": data, "records": records or {}, **tables, **more})


def told(caplog):
    """What was said of far numbers since the last look."""
    found = [r.message for r in caplog.records if re.search(r"far from 0|as far as", r.message)]
    caplog.clear()
    return found


@pytest.mark.parametrize("shape", [(1, 8, 8), (16, 4), (64,)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_unscaled_pixels_are_reported_once(tmp_path, caplog, shape, dtype):
    SimulationSetup.of(plan_of(pixels(tmp_path / "x.npz", shape=shape, dtype=dtype)))
    (one,) = told(caplog)
    assert "as far as 255 from 0 (found by looking" in one
    assert '[records]\nlow = ...\nhigh = ...\nscale = "range"' in one


def test_remedy_works_and_reveals_nothing_of_the_file(tmp_path, caplog):
    data = pixels(tmp_path / "x.npz")
    bad = simulate(plan_of(data), tmp_path / "bad").summary
    told(caplog)
    SimulationSetup.of(plan_of(data, {"low": 0, "high": 300}))
    (one,) = told(caplog)
    assert "as far as 300 from 0. " in one
    assert "255" not in one
    remedy = tomllib.loads(one[one.index("[records]") :])["records"]
    assert remedy == {"low": 0, "high": 300, "scale": "range"}
    good = simulate(plan_of(data, remedy), tmp_path / "good").summary
    assert told(caplog) == []
    # A step that suits numbers of about 1 throws the model far off, and all pixels are bright.
    assert good["loss"] < 0.3 < 3 < bad["loss"]
    assert bad["accuracy"] < 0.9 < 0.95 < good["accuracy"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(1, 8, 8), (64,)])
def test_a_nan_record_hides_no_fault(tmp_path, caplog, shape, value):
    SimulationSetup.of(plan_of(pixels(tmp_path / "x.npz", shape=shape, _5=value)))
    assert "as far as 255 from 0" in told(caplog)[0]


@pytest.mark.parametrize("kind", ["scattering", "patches"])
def test_features_that_do_not_depend_on_the_scale_need_none(tmp_path, caplog, kind):
    made = {
        "kind": kind,
        "seed": 0,
        "whiten": False,
        **({"filters": 8} if kind == "patches" else {}),
    }
    data = pixels(tmp_path / "x.npz", count=100)
    plan = plan_of(data, model="logistic", features=made)
    small = plan_of(str(tmp_path / "y.npz"), model="logistic", features=made)
    with np.load(tmp_path / "x.npz") as stored:
        np.savez(tmp_path / "y.npz", x=stored["x"] / 255, y=stored["y"])
    large, small = (SimulationSetup.of(each).dataset.x for each in (plan, small))
    assert told(caplog) == []
    assert float((large - small).norm(dim=1).max()) < 1e-3  # of unit rows


def test_a_wide_unnamed_column_is_reported_by_position(tmp_path, caplog):
    draw = np.random.default_rng(0)
    x = draw.uniform(-1, 1, (100, 9)).astype(np.float32)
    x[:, 4] *= 80
    np.savez(tmp_path / "x.npz", x=x, y=draw.integers(0, 2, 100))
    SimulationSetup.of(plan_of(str(tmp_path / "x.npz")))
    (one,) = told(caplog)
    assert "[records.columns.4]" in one
    assert "[records]\n" not in one


@pytest.mark.parametrize(
    ("value", "most"), [(9876543.0, "1e+07"), (43.0, "1e+02"), (10.0, "1e+01")]
)
def test_a_sites_log_has_no_value_of_a_record(caplog, value, most):
    """A log is sent around for help, and one row's income with it."""
    x = torch.tensor([[0.5, 0.1], [0.25, value]])
    form = RecordForm(columns={"age": Column(low=0.0, high=120.0)})
    advise("t.csv", form, (2,), ("age", "income"), x, values=False)
    (one,) = told(caplog)
    assert f"age (120), income (up to {most}) (found by looking" in one
    assert f"{value:g}" not in one.replace(f"up to {most}", "")


def test_records_near_zero_are_reported_with_a_remedy(tmp_path, caplog):
    """No column is narrower than the others: all of them are, as of numbers in another unit."""
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 1000)
    x = (draw.uniform(-1, 1, (1000, 6)) + 0.5 * (2 * y[:, None] - 1)) * 0.0025
    np.savez(tmp_path / "x.npz", x=x.astype(np.float32), y=y)
    data = str(tmp_path / "x.npz")
    bad = simulate(plan_of(data), tmp_path / "bad").summary
    (one,) = [r.message for r in caplog.records if "all numbers stay near 0" in r.message]
    caplog.clear()
    lines = one[one.index("[records]") : one.index("\n\nor columns")]
    declared = lines.replace("low = ...", "low = -0.004").replace("high = ...", "high = 0.004")
    good = simulate(plan_of(data, tomllib.loads(declared)["records"]), tmp_path / "good").summary
    assert "stay near 0" not in caplog.text
    assert good["accuracy"] > 0.8 > bad["accuracy"]


def test_site_hears_its_record_length_by_powers_of_ten(caplog):
    short = torch.tensor([[0.03, 0.04], [0.0, 0.01], [float("nan"), 9.0]])
    advise("t.csv", RecordForm(), (2,), ("a", "b"), short, values=False)
    assert "no record is longer than up to 1e-01" in caplog.text
    caplog.clear()
    # Rows of length 1 have short numbers when there are many, and zeros have no unit.
    for rows in (torch.full((3, 2500), 0.02), torch.zeros(3, 2)):
        advise("t.npz", RecordForm(), tuple(rows.shape[1:]), (), rows)
    advise("t.npz", RecordForm(low=0.0, high=0.0004, scale="range"), (2,), (), short * 0.01)
    assert not caplog.text


LITTLE = "much farther from 0 than they differ"


@pytest.mark.parametrize(
    ("declared", "ends"),
    [
        ({}, (7.3, 7.5)),  # a pH: below every limit of length, and one number to a model
        ({}, (-9.52, -9.5)),
        ({"range": [0, 250], "scale": "range"}, (1.5, 2.0)),  # of centimetres, in metres
        ({"range": [0, 250], "scale": "unit"}, (249.0, 250.0)),
        ({"range": [7.0, 7.8], "scale": "none"}, None),  # as declared, where nobody looks
        ({"range": [0, 90], "mean": 70.0, "deviation": 1.0, "scale": "standard"}, (7.0, 7.1)),
    ],
)
def test_small_differences_far_from_zero_are_reported(caplog, declared, ends):
    form = RecordForm.model_validate({"columns": {"a": declared} if declared else {}})
    x = None
    if ends is not None:
        x = torch.stack([torch.linspace(*ends, 50), torch.arange(50.0) % 2], 1)
    advise("t.csv", form, (2,), ("a", "b"), x)
    assert f"{LITTLE}: a (" in caplog.text
    assert "b (" not in caplog.text
    assert ("found by looking" in caplog.text) == (ends is not None)


def test_a_slip_a_gap_and_a_wide_column_hide_no_other(caplog):
    """Of a hundred records one at each end does not count, nor what is said of another column."""
    ph = torch.cat([torch.linspace(7.3, 7.5, 300), torch.tensor([0.0, 9.9])])
    x = torch.stack([ph, torch.arange(302.0) % 2], 1)
    advise("t.csv", RecordForm(), (2,), ("ph", "sex"), x)
    assert f"{LITTLE}: ph (" in caplog.text
    caplog.clear()
    wide = torch.cat([x, torch.linspace(0, 90, 302)[:, None]], 1)
    advise("t.csv", RecordForm(), (3,), ("ph", "sex", "age"), wide)
    assert "get far from 0: age (90)" in caplog.text
    assert f"{LITTLE}: ph (" in caplog.text


def test_clear_or_undecidable_differences_are_not_listed(caplog):
    """Codes, columns of one number, those that sites rescale by what they release, and pixels."""
    released = {"range": [0, 250], "scale": "released"}
    columns = {"height": released, "code": {"categories": [101, 102], "scale": "one-hot"}}
    form = RecordForm.model_validate({"columns": columns})
    some = torch.stack([torch.linspace(1.5, 2, 50), 101 + torch.arange(50.0) % 2], 1)
    one = torch.stack([torch.full((50,), 3.0), torch.arange(50.0) % 2], 1)
    advise("t.csv", form, (2,), ("height", "code"), some)
    advise("t.csv", RecordForm(), (2,), ("one", "sex"), one)
    advise("t.csv", RecordForm(), (2,), ("metres", "sex"), one + torch.rand(50, 1) - 1.5)
    # Of digits as columns, scaled by their range, some are hardly ever other numbers.
    digits = torch.from_numpy(load_digits().data).float()
    names = tuple(f"pixel {k}" for k in range(64))
    for scale in ("range", "unit"):
        known = {name: {"range": [0, 16], "scale": scale} for name in names}
        form = RecordForm.model_validate({"columns": known})
        advise("t.csv", form, (64,), names, digits)
    edge = torch.cat([torch.linspace(-0.42, -0.4, 50)[:, None], torch.randn(50, 59)], 1)
    advise("t.npz", RecordForm(), (60,), (), edge)
    assert not caplog.text
    # Without names, but as few as a table has.
    advise("t.npz", RecordForm(), (40,), (), edge[:, :40], values=False)
    assert f"{LITTLE}: 0 (up to 1e+02 times)" in caplog.text


def test_categories_in_no_order_are_warned_of(caplog):
    """Unless scale = "none" says that they have one, or there are two."""
    x = torch.tensor([[0.0], [2.0]])
    for own, warned in (
        ({"categories": ["A", "B", "C"]}, True),
        ({"categories": ["A", "B"]}, False),
        ({"categories": ["A", "B", "C"], "scale": "none"}, False),
        ({"categories": ["A", "B", "C"], "scale": "one-hot"}, False),
        ({"categories": [0.0, 1.0, 2.0]}, False),
    ):
        advise("t.csv", RecordForm.model_validate({"columns": {"ward": own}}), (1,), ("ward",), x)
        assert ('scale = "one-hot"' in caplog.text) == warned, own
        caplog.clear()
