"""synthetic(α, β) is what the FedProx paper's section 5.1 says, for every device.

Randomised checks run on fixed seeds; each names the rate at which a right generator would fail it
on a fresh seed.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from fedpact.api import default_folder
from fedpact.common.errors import DataError
from fedpact.data.load import load_dataset
from fedpact.data.public import Synthetic, covariance
from fedpact.plan import Plan

ERROR = 1e-6


def chi_square(squares, degrees):
    """Refuse a sum of squared standard normals that is too large or too small. Rate 2 · 1e-6."""
    assert ERROR < stats.chi2.sf(squares, degrees) < 1 - ERROR


def by_device(name):
    data = load_dataset(name)
    sites = np.asarray(data.site)
    for k, site in enumerate(np.unique(sites)):
        chosen = torch.from_numpy(np.flatnonzero(sites == site))
        yield k, data.x[chosen].double().numpy(), data.y[chosen].numpy()


def test_device_records_are_normal_with_given_moments():
    name = "synthetic(1,1, sites=3, smallest=5000, largest=5000)"
    made = Synthetic.parse(name)
    for k, x, _ in by_device(name):
        z = (x - made.device(k).v) / [math.sqrt(j**-1.2) for j in range(1, 61)]
        for column in z.T:
            chi_square((column**2).sum(), 5000)
        chi_square(5000 * (z.mean(0) ** 2).sum(), 60)
        # Independent coordinates: √n r is standard normal up to O(1/n), 1,770 pairs a device.
        r = np.corrcoef(z.T)[np.triu_indices(60, 1)]
        assert np.abs(r).max() * math.sqrt(5000) < stats.norm.isf(ERROR / 3540)


def test_the_covariance_is_the_papers():
    assert covariance().shape == (60,)
    # log Σ_jj = -1.2 log j.
    slope = np.log(covariance()[1:]) / np.log(np.arange(2, 61))
    assert covariance()[0] == 1.0
    assert slope == pytest.approx(np.full(59, -1.2), rel=1e-12)


@pytest.mark.parametrize("name", ["synthetic(0,0,sites=8)", "synthetic(2,1,sites=8)"])
def test_every_label_has_the_largest_probability(name):
    # Softmax written out in the standard library's numbers, on the records as stored.
    made = Synthetic.parse(name)
    for k, xs, ys in by_device(name):
        device = made.device(k)
        for x, y in list(zip(xs, ys, strict=True))[:20]:
            scores = [
                math.fsum(a * b for a, b in zip(row, x, strict=True)) + bias
                for row, bias in zip(device.w.tolist(), device.b.tolist(), strict=True)
            ]
            total = math.fsum(math.exp(score - max(scores)) for score in scores)
            shares = [math.exp(score - max(scores)) / total for score in scores]
            assert shares.index(max(shares)) == y


def test_alpha_shifts_the_whole_model_of_a_device_by_one_number():
    # W_k = u_k + noise and b_k = u_k + noise, with u_k = α z_k for the same draw z_k.
    still, moved = (Synthetic(alpha=a, sites=40) for a in (0.0, 2.0))
    shifts = []
    for k in range(40):
        a, b = still.device(k), moved.device(k)
        u = b.b[0] - a.b[0]
        assert b.w - a.w == pytest.approx(np.full((10, 60), u), abs=1e-12)
        assert b.b - a.b == pytest.approx(np.full(10, u), abs=1e-12)
        assert np.array_equal(a.v, b.v)
        shifts.append(u / 2.0)
    chi_square(float(np.square(shifts).sum()), 40)
    chi_square(40 * float(np.mean(shifts)) ** 2, 1)


def test_beta_shifts_the_inputs_of_a_device_by_one_number():
    still, moved = (Synthetic(beta=b, sites=100) for b in (0.0, 0.5))
    shifts = []
    for k in range(100):
        a, b = still.device(k), moved.device(k)
        assert b.v - a.v == pytest.approx(np.full(60, b.v[0] - a.v[0]), abs=1e-12)
        assert np.array_equal(a.w, b.w)
        shifts.append((b.v[0] - a.v[0]) / 0.5)
    chi_square(float(np.square(shifts).sum()), 100)


def test_zero_alpha_beta_give_standard_normal_models():
    devices = [Synthetic(sites=100).device(k) for k in range(100)]
    for part in ("w", "b", "v"):
        z = np.stack([getattr(device, part) for device in devices])
        chi_square(float((z**2).sum()), z.size)
        chi_square(z.size * float(z.mean()) ** 2, 1)
    # Devices are independent: no two of them share a model.
    assert len({device.w.tobytes() for device in devices}) == 100


def test_sizes_follow_the_power_law_in_its_range():
    sizes = Synthetic(sites=20_000).sizes()
    assert sizes.min() >= 37
    assert sizes.max() <= 3277
    # P(S <= s) for density ∝ t^-2 on [37, 3278), S its integer part. DKW: rate 1e-6.
    s = np.arange(37, 3278)
    expected = (1 / 37 - 1 / (s + 1)) / (1 / 37 - 1 / 3278)
    found = np.searchsorted(np.sort(sizes), s, side="right") / len(sizes)
    assert np.abs(found - expected).max() < math.sqrt(math.log(2 / ERROR) / (2 * len(sizes)))


def test_iid_devices_share_one_law():
    name = "synthetic_iid(sites=40, smallest=100, largest=100)"
    made = Synthetic.parse(name)
    first = made.device(0)
    for k in range(40):
        device = made.device(k)
        assert np.array_equal(device.w, first.w)
        assert np.array_equal(device.b, first.b)
        assert not device.v.any()
    x = np.concatenate([x for _, x, _ in by_device(name)])
    chi_square(len(x) * float((x.mean(0) ** 2 / covariance()).sum()), 60)
    chi_square(float((first.w**2).sum()), 600)


def test_seed_decides_and_more_devices_keep_the_first():
    name = "synthetic(0.5,0.5,sites={},seed={})"
    a, again, other, more = (
        load_dataset(name.format(*v)) for v in ((5, 1), (5, 1), (5, 2), (7, 1))
    )
    assert torch.equal(a.x, again.x)
    assert torch.equal(a.y, again.y)
    assert not torch.equal(a.x[:37], other.x[:37])
    assert torch.equal(more.x[: len(a.x)], a.x)
    assert more.site[: len(a.x)] == a.site
    assert len(set(more.site)) == 7


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("synthetic(0,0)", Synthetic()),
        ("synthetic( 0.5 , 1e-1 )", Synthetic(0.5, 0.1)),
        ("synthetic(1,1,sites=30, seed=3)", Synthetic(1, 1, sites=30, seed=3)),
        ("synthetic_iid", Synthetic(iid=True)),
        ("synthetic_iid(sites=30)", Synthetic(iid=True, sites=30)),
        ("synthetic(0,0,smallest=9,largest=9)", Synthetic(smallest=9, largest=9)),
        ("mnist", None),
        ("synthetic.csv", None),
        ("synthetics(0,0)", None),
    ],
)
def test_names_are_read(name, expected):
    assert Synthetic.parse(name) == expected


@pytest.mark.parametrize(
    "inside",
    [
        *("", "1", "1,2,3", "-1,0", "nan,0", "0,inf", "a,b", "0,0,sites=0", "0,0,sites=2.5"),
        *("0,0,smallest=1", "0,0,smallest=40,largest=39", "0,0,seed=-1", "0,0,sites=3,sites=3"),
        *("0,0,users=3", "0,0,alpha=3", "alpha=0,beta=0", "0,0,=3", "0,0,iid=1"),
    ],
)
def test_other_values_are_refused_with_the_expectation(inside):
    with pytest.raises(DataError, match="expected synthetic\\(ALPHA,BETA\\)") as error:
        load_dataset(f"synthetic({inside})")
    assert repr(f"synthetic({inside})") in str(error.value)


def test_the_public_test_sets_records_join_the_others():
    data, whole = load_dataset("digits"), load_dataset("digits+test")
    assert whole.x_test is None
    assert whole.y_test is None
    assert torch.equal(whole.x, torch.cat([data.x, data.x_test]))
    assert torch.equal(whole.y, torch.cat([data.y, data.y_test]))
    assert len(whole.y) == 1797
    assert whole.classes == data.classes


@pytest.mark.parametrize("name", ["synthetic(0,0,sites=2)+test", "digits+test+test"])
def test_no_test_set_is_added_without_a_public_one(name):
    with pytest.raises(DataError, match=r"\+test needs a public test set"):
        load_dataset(name)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("synthetic(0.5, 0.5, sites=30)", "synthetic-0.5-0.5-sites-30"),
        ("a b/c d.csv", "c-d"),
        ("digits+test", "digits+test"),
    ],
)
def test_a_runs_folder_is_named_after_the_data_and_is_one_folder(name, shown):
    folder = default_folder(Plan(data=name, label="y" if "csv" in name else None))
    assert folder.parent == Path("runs")
    assert re.fullmatch(rf"fedavg-{re.escape(shown)}-\d{{8}}-\d{{6}}", folder.name)


def test_runs_begun_within_a_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan(data="digits")
    found = []
    for _ in range(3):
        found.append(default_folder(plan))
        found[-1].mkdir(parents=True)
    assert len({*found}) == 3
