"""Features are a pure function of one record and of public numbers, or they are refused."""

import hashlib
import importlib
import logging
import math
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from scipy.signal import convolve2d
from tests.data.features import backbones_of_users
from torch import nn

import fedpact
from fedpact.common.configuration import check_kinds
from fedpact.common.errors import FedpactError, ModelError, PlanError
from fedpact.common.messages import Task
from fedpact.common.params import threads
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.data.cells import read_npz
from fedpact.data.features import extract, kinds
from fedpact.data.features.extract import Extractor, FeatureStage, beside, same_answer
from fedpact.data.features.kinds import (
    DIRECTIONS,
    FEATURE_KINDS,
    MADE,
    FeatureKind,
    FeatureSettings,
    Patches,
    Scattering,
    dead_leaves,
    gabor,
    generate_images,
)
from fedpact.data.load import from_arrays
from fedpact.plan import Plan
from fedpact.simulation.setup import SimulationSetup
from fedpact.simulation.simulate import simulate
from fedpact.studies.audit.target import Target

OWN = backbones_of_users.__name__
SHAPE = (3, 11, 12)
SMALL = {
    "scattering": {"kind": "scattering", "cells": 2, "mirror": True},
    "patches": {"kind": "patches", "filters": 24, "size": 4},
    "own": {"kind": f"{OWN}:Mixing", "trained_on": "nothing: it has no weights"},
}

FEW = 272  # a multiple of 8, and no fewer than are looked at
ASKED = Task("run", 1, "fedavg", {}, {})


def made(count, shape=SHAPE, seed=5):
    return torch.rand(count, *shape, generator=seeded_generator("records", seed))


def backbone(name, tmp_path):
    """Features by a module of a user's, of records [2, 3]."""
    chosen = FeatureSettings(kind=f"{OWN}:{name}", trained_on="nothing")
    return Extractor(chosen, (2, 3), 0, tmp_path)


@pytest.fixture(scope="module", autouse=True)
def whitened_by_few(tmp_path_factory):
    """By a few of the made images, and filters too: they take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract, "MADE", FEW)
        patch.setattr(kinds, "MADE", FEW)
        patch.setattr(kinds, "_IMAGES", FEW)
        patch.setenv("FEDPACT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=SMALL)
def small(request, tmp_path_factory):
    chosen = FeatureSettings(**SMALL[request.param])
    return Extractor(chosen, SHAPE, 0, tmp_path_factory.getbasetemp())


def test_features_do_not_depend_on_neighbouring_records(small):
    x = made(70)
    x[7] *= 1e30
    x[9] = 0
    together = small(x)
    assert together.good.all()
    assert together.x.unique(dim=0).shape[0] >= 69
    order = torch.randperm(70, generator=seeded_generator("order"))
    assert torch.equal(small(x[order]).x, together.x[order])
    for some in (slice(0, 1), slice(9, 10), slice(3, 40), slice(69, 70)):
        assert torch.equal(small(x[some]).x, together.x[some])
    with threads(2):
        assert torch.equal(small(x).x, together.x)
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 2


def test_features_are_unit_rows_of_float16(small):
    found = small(made(20)).x
    assert found.dtype == torch.float16
    # Each of p entries is off by at most 2^-11 of itself.
    assert torch.allclose(found.double().norm(dim=1), torch.ones(20).double(), atol=1e-3)


def test_no_records_have_no_features(small):
    found = small(made(5)[:0])
    assert found.x.shape == (0, small.width)
    assert found.good.shape == (0,)


def test_features_follow_from_the_plans_seed_or_their_own(tmp_path):
    def of(plans, **changes):
        chosen = FeatureSettings(**{**SMALL["patches"], "whiten": False, **changes})
        return Extractor(chosen, SHAPE, plans, tmp_path)(made(3)).x

    assert torch.equal(of(1), of(1))
    assert not torch.equal(of(1), of(2))
    assert torch.equal(of(1, seed=7), of(2, seed=7))


@pytest.mark.parametrize("kind", [{"kind": "scattering"}, {**SMALL["patches"], "filters": 7}])
def test_mirrored_images_have_the_same_features(tmp_path, kind):
    chosen = FeatureSettings(**kind, cells=3, mirror=True, whiten=False)
    mirrored = Extractor(chosen, SHAPE, 0, tmp_path)
    x = made(4)
    assert torch.allclose(mirrored(x).x.float(), mirrored(x.flip(3)).x.float(), atol=2e-3)
    plain = Extractor(chosen.model_copy(update={"mirror": False}), SHAPE, 0, tmp_path)
    assert not torch.allclose(plain(x).x.float(), plain(x.flip(3)).x.float(), atol=2e-3)
    # Of three columns of cells, the left and the middle one.
    assert mirrored.width * 3 == plain.width * 2


@pytest.mark.parametrize("width", [11, 12])
@pytest.mark.parametrize("cells", [1, 2, 3])
def test_patch_filters_have_mirrored_twins(width, cells):
    """What the twins of the first filters are is seen in the bank: mirrored, and in the maps."""
    chosen = FeatureSettings(kind="patches", filters=24, size=4, cells=cells)
    maps = FEATURE_KINDS["patches"].make(chosen, (2, 10, width), 0)
    twins = FEATURE_KINDS["patches"].twins(chosen)
    assert torch.allclose(maps._bank[twins[:24]], maps._bank.flip(3), atol=1e-5)
    x = made(5, (2, 10, width))
    assert torch.allclose(maps(x.flip(3)), maps(x)[:, twins].flip(3), atol=1e-5)
    assert not torch.allclose(maps(x.flip(3)), maps(x).flip(3), atol=1e-2)
    assert FEATURE_KINDS["patches"].twins(chosen.model_copy(update={"filters": 23})) is None
    assert FEATURE_KINDS["scattering"].twins(chosen) is None


def test_whitened_features_are_uncorrelated_where_they_vary(tmp_path):
    """(Σ + rI)^-1 whitens: in an eigenbasis of Σ, variances are λ / (λ + r), correlations 0."""
    raw = Extractor(FeatureSettings(kind="scattering", cells=2, whiten=False), SHAPE, 3, tmp_path)
    mean, whitening = Extractor(
        FeatureSettings(kind="scattering", cells=2), SHAPE, 3, tmp_path
    )._whitening
    found = torch.cat([raw._map(x) for x in dead_leaves(FEW, SHAPE, 3, 0, FEW).split(64)]).double()
    assert torch.allclose(found.mean(0), mean.double(), atol=1e-6)
    covariance = torch.cov((found - mean).T, correction=0)
    ridge = 0.4 * covariance.trace() / len(covariance)
    white = whitening.double() @ covariance @ whitening.double().T
    variances = torch.linalg.eigvalsh(covariance)
    expected = variances / (variances + ridge)
    assert torch.allclose(torch.linalg.eigvalsh(white), expected, atol=1e-4)


def test_gabor_filters_are_waves_of_mean_0_in_eight_directions():
    for width in (0.8, 1.6):
        bank = gabor(width).double()
        assert bank.shape[0] == 2 * DIRECTIONS
        assert torch.allclose(bank.sum((1, 2, 3)), torch.zeros(16).double(), atol=1e-6)
        # The fifth direction is the first one turned by a quarter.
        assert torch.allclose(bank[4, 0], bank[0, 0].T, atol=1e-6)


def test_scattering_maps_are_the_convolutions_that_its_page_says():
    x = made(1, (1, 9, 9))
    maps = Scattering(1)(x)[0, :, 0, 0].double()
    image = x[0, 0].double().numpy()

    def strength(picture, width, k):
        bank = gabor(width).double().numpy()[:, 0]
        # conv2d correlates, so the filter is turned; the image goes on at its edges as it ends.
        sides = [
            convolve2d(torch.tensor(picture).numpy(), bank[j][::-1, ::-1], mode="valid")
            for j in (k, k + DIRECTIONS)
        ]
        return (sides[0] ** 2 + sides[1] ** 2) ** 0.5

    def padded(picture, width):
        side = math.ceil(3 * width)
        given = torch.tensor(picture)[None, None]
        return nn.functional.pad(given, (side,) * 4, mode="replicate")[0, 0].numpy()

    means = [strength(padded(image, w), w, k).mean() for w in (0.8, 1.6) for k in range(8)]
    narrow = strength(padded(image, 0.8), 0.8, 2)
    second = strength(padded(narrow, 1.6), 1.6, 5)[::2, ::2].mean()
    # One cell: each map is its mean over its length, 1, unless it is faint beside the longest.
    longest = max(means)
    unscaled = Scattering(1)
    pooled = {}
    unscaled._pool = lambda m: pooled.setdefault(len(pooled), m.mean((2, 3), keepdim=True))
    unscaled(x)
    assert torch.allclose(pooled[1].flatten().double(), torch.tensor(means[:8]), atol=1e-6)
    assert torch.allclose(pooled[2].flatten().double(), torch.tensor(means[8:]), atol=1e-6)
    assert float(pooled[3].flatten()[2 * 8 + 5]) == pytest.approx(second, abs=1e-6)
    assert maps.max() == pytest.approx(1, abs=1e-6)
    assert longest > 0


def test_a_patchs_brightness_and_contrast_do_not_count():
    """By the definition, patch by patch: contrast, product with the filters, threshold, mean."""
    of = Patches((1, 7, 7), 0, 1, 6, 4, 0.25)
    x = made(1, (1, 7, 7))
    found = of(x)[0, :, 0, 0].double()
    patches = nn.functional.unfold(x, 4)[0].T.double()
    patches = patches - patches.mean(1, keepdim=True)
    patches /= patches.std(1, correction=0, keepdim=True)
    answers = patches @ of._bank.flatten(1).T.double()
    sides = [(s * answers - 0.25).clamp_min(0).mean(0) for s in (1, -1)]
    assert torch.allclose(found, torch.cat(sides), atol=1e-4)


def test_made_images_are_nobodys_and_no_two_are_alike():
    images = dead_leaves(50, (3, 10, 9), 1, 0, 50)
    assert images.shape == (50, 3, 10, 9)
    assert 0 <= images.min() <= images.max() <= 1
    assert images.unique(dim=0).shape[0] == 50
    assert torch.equal(images, dead_leaves.__wrapped__(50, (3, 10, 9), 1, 0, 50))
    assert not torch.equal(images, dead_leaves(50, (3, 10, 9), 2, 0, 50))


def test_large_images_are_made_in_parts_that_fit_into_memory(monkeypatch):
    """4,000 of them would be 2.4 GB, and what draws them several times that."""
    parts, shape = [], (3, 224, 224)

    def noted(count, shape, seed, start, stop):
        parts.append(stop - start)
        return torch.zeros(stop - start, 1)

    monkeypatch.setattr(kinds, "dead_leaves", noted)
    monkeypatch.setattr(kinds, "MADE", MADE)
    assert sum(len(part) for part in generate_images(MADE, shape, 1)) == sum(parts) == MADE
    assert all(size % 8 == 0 and size * math.prod(shape) <= 2**24 for size in parts)


def test_made_images_in_parts_are_the_same_images():
    """Each is drawn from the same numbers, whoever is made beside it."""
    shape = (3, 7, 9)
    whole = dead_leaves.__wrapped__(FEW, shape, 1, 0, FEW)
    for start, stop in ((0, 8), (8, 9), (103, 200), (FEW - 1, FEW)):
        part = dead_leaves.__wrapped__(FEW, shape, 1, start, stop)
        assert torch.equal(part, whole[start:stop])
    assert torch.equal(torch.cat(list(generate_images(100, shape, 1))), whole[:100])


# ---------------------------------------------------------------- what is refused

UNWHITENED = {**SMALL["patches"], "whiten": False}


@pytest.mark.parametrize(
    ("chosen", "shape", "word"),
    [
        (SMALL["scattering"], (13,), "expected images"),
        (SMALL["patches"], (1, 3, 28), "at least 4 x 4 pixels, as size = 4; lower size"),
        ({"kind": "scattering"}, (1, 8), "at least 2 x 2 pixels$"),
        ({**SMALL["patches"], "cells": 6}, (8, 8), "5 x 5 at most; lower cells, or size = 4"),
        ({**SMALL["patches"], "threshold": 1000.0}, (8, 8), "a lower threshold than 1000"),
        ({"kind": "scattering", "cells": 9}, (8, 8), "4 x 4 at most"),
        ({"kind": f"{OWN}:none", "trained_on": "x"}, SHAPE, "cannot be imported|has no attribute"),
        ({"kind": f"{OWN}:nothing", "trained_on": "x"}, SHAPE, "returned NoneType"),
        ({"kind": "patches", "filters": 6000, "size": 3}, SHAPE, "at most 8192"),
        ({"kind": "still"}, SHAPE, "the same in most made images"),
        ({"kind": "still", "whiten": False}, SHAPE, "the same in most made images"),
        # Three of four have nothing above it.
        ({**SMALL["patches"], "threshold": 4.0}, (8, 8), "a lower threshold than 4"),
        ({**UNWHITENED, "threshold": 4.0}, (8, 8), "a lower threshold than 4"),
        ({**UNWHITENED, "threshold": 1000.0}, (8, 8), "a lower threshold than 1000"),
    ],
)
def test_incompatible_records_and_settings_are_refused(tmp_path, monkeypatch, chosen, shape, word):
    monkeypatch.setitem(
        FEATURE_KINDS, "still", FeatureKind(lambda *_: lambda x: torch.ones(len(x), 4, 1, 1))
    )
    with pytest.raises(ModelError, match=word):
        Extractor(FeatureSettings(**chosen), shape, 0, tmp_path)(made(2, shape))


@pytest.mark.parametrize(
    ("chosen", "word"),
    [
        ({"kind": "scatering"}, "features.kind: 'scatering' is no kind of features"),
        ({"kind": "scattering", "filters": 7}, "filters is 7 with kind = 'scattering'"),
        ({"cells": 3}, "cells is 3 with kind = 'none'"),
        ({"kind": "a.b:c", "mirror": True}, "mirror is True"),
        ({"kind": "a.b:c", "weights": "w.pt"}, "give both"),
        ({"kind": "a.b:c"}, "no ε can be stated"),
        ({"kind": "a.b:c", "trained_on": " "}, "trained_on"),
        ({"kind": "patches", "threshold": math.nan}, "threshold"),
    ],
)
def test_a_plan_with_unknown_or_unfitting_features_is_refused(chosen, word):
    with pytest.raises(PlanError, match=word):
        Plan.parse({"features": chosen})


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("Counting", "a pass changes seen"),
        ("Noisy", "draws random numbers"),
        ("Branching", "a branch on a value"),
        ("scripted", "TorchScript"),
        ("Waves", "real numbers"),
        ("lazy", "lazy layers"),
        ("Raising", "never ready"),
        ("Empty", "at least one"),
    ],
)
def test_a_module_whose_answers_are_no_features_is_refused(tmp_path, name, word):
    """As where one record would be in the features of the next."""
    with pytest.raises(ModelError, match=word):
        backbone(name, tmp_path)


def test_state_of_a_module_reaches_no_other_record(tmp_path):
    """In a variable of its file: what runs is what was traced, before there was a record."""
    x, others = torch.rand(5, 2, 3), torch.tensor([4, 2, 0])
    of = backbone("Remembering", tmp_path)
    assert torch.equal(of(x).x[others], of(x[others]).x)


def test_code_that_a_factory_only_uses_is_in_the_caches_key(tmp_path, monkeypatch):
    """As of a module that its file imports: that file's own digest stays what it was."""
    before = backbone("Scaled", tmp_path).key
    assert backbone("Scaled", tmp_path).key == before
    monkeypatch.setattr(backbones_of_users, "SCALE", 2.0)
    assert backbone("Scaled", tmp_path).key != before


@pytest.mark.parametrize("made", [lambda least: nn.Hardtanh(-1, least), backbones_of_users.Cut])
def test_layers_from_another_file_are_part_of_the_key(tmp_path, monkeypatch, made):
    """No made-up record is answered otherwise, and no file of the factory's is another."""
    found = []
    for least in (2.0, 50.0, 2.0):
        monkeypatch.setattr(backbones_of_users, "GIVEN", made(least))
        found.append(backbone("given", tmp_path).key)
    assert found[0] == found[2] != found[1]


def test_a_run_is_not_resumed_with_different_features(tmp_path, monkeypatch):
    """A round that is carried out again would be another release under the first one's charge."""
    x, y = torch.rand(60, 2, 3), torch.arange(60) % 2
    numpy.savez(tmp_path / "t.npz", x=x.numpy(), y=y.numpy())
    mine = Plan.parse(
        {
            "data": str(tmp_path / "t.npz"),
            "model": "logistic",
            "sites": 2,
            "rounds": 4,
            "sampling_rate": 0.5,
            "features": {"kind": f"{OWN}:Scaled", "trained_on": "nothing"},
        }
    )
    simulate(mine, tmp_path / "run", stop=iter([False, False, True]).__next__)
    with monkeypatch.context() as patch:
        patch.setattr(backbones_of_users, "SCALE", 2.0)
        extract.extractor.cache_clear()  # as another process begins
        with pytest.raises(PlanError, match="started on other features: the code"):
            simulate(mine, tmp_path / "run")
    extract.extractor.cache_clear()
    assert simulate(mine, tmp_path / "run").summary["status"] == "finished"


def test_own_code_computes_on_one_thread_however_many_there_are(tmp_path):
    """Sums that torch splits over threads round by how many there are, under one cache's key."""
    one, x = backbone("Threads", tmp_path), torch.rand(3, 2, 3)
    for number in (1, 2, 4):
        with threads(number):
            assert torch.equal(one(x).x, torch.full((3, 2), 0.5**0.5).half())


def test_prediction_uses_the_features_of_training(tmp_path, monkeypatch):
    x, y = torch.rand(60, 2, 3).numpy(), numpy.arange(60) % 2
    kind = {"kind": f"{OWN}:weighted", "trained_on": "nothing"}
    plan = Plan(model="logistic", sites=2, rounds=1, features=kind)
    done = fedpact.run(plan, data=(x, y), out=tmp_path / "run")
    before = fedpact.load(done.folder).predict(x).probabilities
    monkeypatch.setattr(backbones_of_users, "WEIGHT", 2.0)
    extract.extractor.cache_clear()
    with pytest.raises(ModelError, match="has other code or weights than when"):
        fedpact.load(done.folder)
    monkeypatch.undo()
    extract.extractor.cache_clear()
    assert numpy.array_equal(fedpact.load(done.folder).predict(x).probabilities, before)


def test_a_reloaded_module_has_separate_features(tmp_path, monkeypatch):
    """As in a notebook: the plan is the same, the code is not."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_again.py").write_text(MINE.format(by=1.0))
    module, x = importlib.import_module("mine_again"), torch.rand(3, 2, 3)
    stage = FeatureStage(FeatureSettings(kind="mine_again:made", trained_on="nothing"), 0)
    before = stage(x, x[0], "x", None).x
    (tmp_path / "mine_again.py").write_text(MINE.format(by=-1.0) + "\n\n")
    importlib.reload(module)
    assert torch.allclose(stage(x, x[0], "x", None).x, -before)


MINE = """from torch import nn


class G(nn.Module):
    def forward(self, x):
        return {by} * x.flatten(1)


def made(shape):
    return G()
"""


def test_features_do_not_depend_on_the_number_of_threads(tmp_path):
    """An orthogonal start rounds by how many there are; and no other machine rounds the same."""
    found = []
    for number in (1, 4):
        with threads(number):
            found.append(backbone("orthogonal", tmp_path).answer)
    assert found[0] == found[1]
    assert same_answer(found[0], [x + 1e-5 for x in found[0]])
    for other in (found[0][:-1], found[0][::-1]):
        assert not same_answer(found[0], other)


def test_features_use_the_loaded_code_not_the_changed_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "mine_edited.py"
    file.write_text(MINE.format(by=1.0))
    importlib.import_module("mine_edited")
    stage = FeatureStage(FeatureSettings(kind="mine_edited:made", trained_on="nothing"), 0)
    before = stage.answer(torch.zeros(2, 3))
    file.unlink()
    assert stage.answer(torch.zeros(2, 3)) == before


def test_any_callable_is_a_factory(tmp_path):
    kind = f"{OWN}:callable_without_hash"
    stage = FeatureStage(FeatureSettings(kind=kind, trained_on="nothing"), 0, tmp_path)
    x = torch.rand(4, 2, 3)
    assert stage(x, x[0], "x", None).good.all()


def test_more_filters_than_patches_are_refused(monkeypatch):
    monkeypatch.setattr(kinds, "_IMAGES", 40)
    asked = FeatureSettings(kind="patches", filters=10_000, size=2)
    with pytest.raises(ModelError, match=r"features\.filters is 10000 of size 2.*lower filters"):
        FEATURE_KINDS["patches"].make(asked, (1, 12, 12), 0)


def test_the_origin_of_features_is_one_line():
    told = {"kind": f"{OWN}:Scaled", "trained_on": "ImageNet\n\n## ε = 0.001\n"}
    assert Plan(features=told).features.trained_on == "ImageNet ## ε = 0.001"
    told = {"weights": "w.pt", "sha256": "a" * 64, "trained_on": "scans\n" * 500}
    assert Plan(initial=told).initial.trained_on == " ".join(["scans"] * 500)
    for nothing in ("", " \n", "\x1b"):
        with pytest.raises(PlanError, match=r"features\.trained_on: it says nothing"):
            Plan(features={"kind": f"{OWN}:Scaled", "trained_on": nothing})


def test_how_long_a_modules_answers_are_does_not_matter(tmp_path):
    """A power of two changes no bit of a direction; nor does it make one of length 0."""
    x = made(20, (2, 3))
    x[3] = 0
    expected = backbone("Times", tmp_path)(x)
    straight = nn.functional.normalize(x.flatten(1)).half()
    assert torch.equal(expected.x, straight)
    assert expected.good.all()
    for name in ("TimesHuge", "TimesTiny"):
        found = backbone(name, tmp_path)(x)
        assert torch.equal(found.x, straight)
        assert found.good.all()
    for by in (1e30, 1e-30, 1e-44):
        found = backbone("Times", tmp_path)(x * by)
        assert found.x[x.flatten(1).sum(1) > 0].float().norm(dim=1).min() > 0.99


def test_words_are_no_images(tmp_path):
    data = from_arrays([[[1, 2], [3, 4]]] * 4, [0, 1, 0, 1])
    with pytest.raises(ModelError, match="words"):
        SimulationSetup.of(Plan.parse({"features": SMALL["scattering"], "sites": 2}), data)


def test_a_kind_with_an_unknown_setting_is_an_error(monkeypatch):
    monkeypatch.setitem(
        FEATURE_KINDS, "odd", FeatureKind(lambda *_: nn.Identity(), own=("colour",))
    )
    with pytest.raises(FedpactError, match="colour"):
        check_kinds(FEATURE_KINDS, FeatureSettings, kinds.SETTINGS_OF_NO_KIND)


# ---------------------------------------------------------------- weights of somebody's own


def weights_file(path):
    torch.manual_seed(3)
    module = backbones_of_users.linear(SHAPE)
    if path.suffix == ".safetensors":
        save_file(module.state_dict(), path)
    else:
        torch.save(module.state_dict(), path)
    return module, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_backbone_has_the_weights_of_its_file(tmp_path, name):
    module, sha256 = weights_file(tmp_path / name)
    chosen = FeatureSettings(
        kind=f"{OWN}:linear", weights=name, sha256=sha256, trained_on="made numbers"
    )
    x = made(5)
    expected = nn.functional.normalize(module(x)).detach()
    found = Extractor(chosen, SHAPE, 0, tmp_path)(x).x
    assert torch.allclose(found.float(), expected, atol=1e-3)


def test_a_file_that_is_another_or_fits_no_module_is_refused(tmp_path):
    module, sha256 = weights_file(tmp_path / "w.pt")
    chosen = {"kind": f"{OWN}:linear", "weights": "w.pt", "trained_on": "made numbers"}

    def extractor(shape=SHAPE, **changes):
        return Extractor(FeatureSettings(**{**chosen, **changes}), shape, 0, tmp_path)

    with pytest.raises(ModelError, match="the plan names"):
        extractor(sha256="0" * 64)
    with pytest.raises(ModelError, match="cannot be read"):
        extractor(weights="elsewhere.pt", sha256=sha256)
    with pytest.raises(ModelError, match="does not fill"):
        extractor(shape=(2, 2), sha256=sha256)
    # A file of torch's that would carry code out is none of weights.
    torch.save(module, tmp_path / "code.pt")
    code = hashlib.sha256((tmp_path / "code.pt").read_bytes()).hexdigest()
    with pytest.raises(ModelError, match="cannot be read as weights") as told:
        extractor(weights="code.pt", sha256=code)
    assert "\n" not in str(told.value)
    assert "http" not in str(told.value)


@pytest.mark.parametrize("table", ["features", "initial"])
def test_a_sha256_ignores_case_and_others_are_refused(tmp_path, table):
    _, sha256 = weights_file(tmp_path / "w.pt")
    own = {"kind": f"{OWN}:linear"} if table == "features" else {}
    chosen = {**own, "weights": str(tmp_path / "w.pt"), "trained_on": "made numbers"}
    plan = Plan.parse({table: {**chosen, "sha256": sha256.upper()}})
    assert getattr(plan, table).sha256 == sha256
    with pytest.raises(PlanError, match="expected 64 hexadecimal digits"):
        Plan.parse({table: {**chosen, "sha256": sha256[:-1]}})


def test_records_at_which_a_backbone_fails_are_dropped(tmp_path, caplog):
    """Two have no finite features: the others keep theirs, and the run goes on."""
    x = 4 + made(60, (2, 3))
    x[4], x[11, 0, 0] = -1000, 0
    chosen = {"kind": f"{OWN}:Picky", "trained_on": "nothing: it has no weights"}
    plan = Plan.parse({"features": chosen, "sites": 2, "rounds": 1})
    labels = [0, 1] * 30
    with caplog.at_level(logging.WARNING, logger="fedpact"):
        scene = SimulationSetup.of(plan, from_arrays(x, labels))
    assert "2 of 60 records have no features" in caplog.text
    assert "places 4, 11" in caplog.text
    rest = [k for k in range(60) if k not in (4, 11)]
    without = SimulationSetup.of(plan, from_arrays(x[rest], [labels[k] for k in rest]))
    assert torch.equal(scene.dataset.x, without.dataset.x)
    assert torch.equal(scene.raw.x, x[rest])


# ---------------------------------------------------------------- in a run


DIGITS = {
    "features": {"kind": "scattering", "cells": 2},
    "sites": 2,
    "rounds": 3,
    "settings": {"learning_rate": 8.0},
    "privacy": {"clip": 0.5, "accountant": "rdp"},
    "run": {"workers": 1},
}


def test_a_run_trains_on_features_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPACT_CACHE", str(tmp_path / "cache"))
    result = simulate(Plan.parse(DIGITS), tmp_path / "run")
    assert result.summary["model_parameters"] == 81 * 4 * 10 + 10
    assert result.records[-1].accuracy > result.records[0].accuracy + 0.3
    said = (tmp_path / "run" / "privacy.json").read_text()
    assert "from made images: no record takes part" in said
    kept = sorted((tmp_path / "cache").glob("*.features"))
    assert len(kept) == 2  # training, and the public test set
    # From the cache the same bits.
    again = simulate(Plan.parse(DIGITS), tmp_path / "again")
    for one, other in zip(result.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_audit_attacks_the_model_of_the_features():
    data = from_arrays(made(60, (8, 8)), [0, 1] * 30)
    scene = SimulationSetup.of(Plan.parse({**DIGITS, "rounds": 1}), data)
    assert scene.dataset.x.shape != scene.raw.x.shape
    target = Target.of(scene)
    assert torch.equal(target.records.x, scene.sites[0].x)
    assert target.records.x.shape[1:] == scene.dataset.x.shape[1:]


def test_whitening_is_cached_reports_progress_and_is_stable(tmp_path, monkeypatch, capsys):
    """Thousands of made images, however few the records: of large ones they are the work."""
    monkeypatch.setenv("FEDPACT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(extract, "TELL_EVERY", 0.0)
    settings, x = FeatureSettings(kind="scattering", cells=1), made(3)
    first = Extractor(settings, SHAPE, 0, tmp_path)(x).x
    told = capsys.readouterr().err
    assert f"of {FEW} made images, to whiten by" in told
    assert "features of 3 of 3 records" in told
    (kept,) = (tmp_path / "cache" / "whitening").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(extract, "generate_images", None)
        assert torch.equal(Extractor(settings, SHAPE, 0, tmp_path)(x).x, first)
        # Another seed has other filters or images, and its own.
        with pytest.raises(TypeError):
            Extractor(settings, SHAPE, 1, tmp_path)(x)
    # A damaged one is made anew; where none can be kept, it is made each time.
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    assert torch.equal(Extractor(settings, SHAPE, 0, tmp_path)(x).x, first)
    monkeypatch.setenv("FEDPACT_CACHE", str(kept))
    assert torch.equal(Extractor(settings, SHAPE, 0, tmp_path)(x).x, first)
    # As of a service's user, who has no home.
    monkeypatch.delenv("FEDPACT_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    assert torch.equal(Extractor(settings, SHAPE, 0, tmp_path)(x).x, first)


def homeless():
    raise RuntimeError("Could not determine home directory.")


# ---------------------------------------------------------------- the cache


class Counted(Extractor):
    count = 0

    def _compute(self, x):
        self.count += len(x)
        return super()._compute(x)


@pytest.fixture
def counted(tmp_path):
    return Counted(FeatureSettings(kind="scattering", cells=1, whiten=False), SHAPE, 0, tmp_path)


def test_the_cache_is_its_owners_alone_and_spares_the_work(tmp_path, counted):
    x, path = made(10), beside(tmp_path / "records.npz")
    first = counted(x, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = counted(x, path)
    assert counted.count == 10
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.good, second.good)
    assert [p.name for p in tmp_path.iterdir()] == ["records.npz.features"]


def test_other_records_and_other_settings_have_other_features(tmp_path, counted):
    x, path = made(10), tmp_path / "f"
    counted(x, path)
    x[3, 0, 0, 0] += 1
    assert torch.equal(counted(x, path).x, counted(x).x)
    other = Counted(FeatureSettings(kind="scattering", cells=2, whiten=False), SHAPE, 0, tmp_path)
    assert torch.equal(other(x, path).x, other(x).x)
    whole = Extractor(other._settings, SHAPE, 1, tmp_path)
    assert whole.key != other.key


def test_a_damaged_cache_is_rebuilt(tmp_path, counted):
    x, path = made(10), tmp_path / "f"
    good = counted(x, path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    for damaged in (bytes(flipped), whole[:-1], b""):
        path.write_bytes(damaged)
        assert torch.equal(counted(x, path).x, good.x)
        assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path, counted, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="fedpact"):
        found = counted(made(3), tmp_path / "file" / "f")
    assert found.good.all()
    assert "are not cached" in caplog.text


# ---------------------------------------------------------------- a deployment


def test_a_deployed_sites_features_are_those_of_the_simulation(tmp_path):
    pytest.importorskip("flwr", reason="the extra fedpact[deploy] is not installed")
    from fedpact.deployment.files import write_deployment
    from fedpact.deployment.server import Coordinator
    from fedpact.deployment.site import Site

    plan = Plan.parse(DIGITS)
    directory = tmp_path / "deployment"
    write_deployment(directory, plan)
    scene = SimulationSetup.of(plan)
    for site in scene.sites:
        home = directory / "sites" / site.name
        # What is handed out are records, and the features are the site's to compute.
        assert read_npz(home / "records.npz")["x"].shape[1:] == (1, 8, 8)
        with Site(home) as opened:
            assert torch.equal(opened._records(ASKED).x, site.x)
        assert stat.S_IMODE((home / "records.npz.features").stat().st_mode) == 0o600
    coordinator = Coordinator(directory / "server")
    assert coordinator.workshop().example.shape == scene.dataset.x.shape[1:]


def test_a_deployments_parties_each_have_the_weights(tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="the extra fedpact[deploy] is not installed")
    from fedpact.deployment.files import write_deployment
    from fedpact.deployment.site import Site

    monkeypatch.setenv("FEDPACT_CACHE", str(tmp_path / "cache"))
    module = backbones_of_users.linear((1, 8, 8))
    # What it is called takes the place of no file of a party's.
    path = tmp_path / "site.key"
    torch.save(module.state_dict(), path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    chosen = {"kind": f"{OWN}:linear", "weights": str(path), "sha256": sha256, "trained_on": "x"}
    plan = Plan.parse({"features": chosen, "sites": 3, "privacy": {"accountant": "rdp"}})
    write_deployment(tmp_path / "d", plan)
    path.unlink()
    with Site(tmp_path / "d" / "sites" / "site-00") as opened:
        assert opened._records(ASKED).x.shape[1] == 6


def test_brightness_and_contrast_of_a_record_change_nothing(tmp_path):
    chosen = FeatureSettings(kind="scattering", cells=2, whiten=False)
    of = Extractor(chosen, SHAPE, 0, tmp_path)
    x = made(4)
    assert torch.allclose(of(x).x.float(), of(3 * x - 40).x.float(), atol=2e-3)
