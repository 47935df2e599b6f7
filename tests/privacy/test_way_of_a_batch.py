"""docs/notes/internals.md: the way of a batch is as it says, and turns back three times at most.

A turn back is a call from a module to one that imports it, directly or through others: whoever
reads along has left that file already, and has to go back to it.
"""

import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.test_architecture import own_imports, read_package, unit_of
from torch import nn

import fedpact
from fedpact.common.losses import cross_entropy
from fedpact.common.params import FlatModel
from fedpact.common.randomness.seeded import SeededDraws
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.oracle import PrivateOracle, Records, Terms

SOURCE = Path(fedpact.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "notes" / "internals.md"
MOST = 3


WAYS = {
    "dense": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "graph": lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)),
}

FORM = {"graph": (1, 3, 3)}


@cache
def calls(way):
    """Who called whom, as modules of ours, while a batch's gradient was released."""
    kernel = PerSampleKernel(FlatModel(WAYS[way]()), cross_entropy)
    terms = Terms("a", 20.0, 0.5, 1.0, {"gradient": 1.0}, 9, Budget(1.0, 1e-5), "best")
    records = Records(torch.randn(20, *FORM.get(way, (3,))), torch.zeros(20, dtype=torch.int64))
    oracle = PrivateOracle(records, kernel, terms, SeededDraws(0), lambda *_: None)
    made = []

    def module(frame):
        # Through whatever is not ours, as an iterator of the library's, to who asked.
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(SOURCE):
                return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
            frame = frame.f_back
        return None

    def seen(frame, event, _):
        if event == "call" and SOURCE in Path(frame.f_code.co_filename).parents:
            called, caller = module(frame), module(frame.f_back)
            if called and caller and called != caller:
                made.append((caller, called))

    def release():
        next(iter(oracle.batches(1, "gradient"))).gradient(kernel.model.vector)

    release()  # what is built for a model's first batch is no part of the way
    sys.setprofile(seen)
    try:
        release()
    finally:
        sys.setprofile(None)
    return made


def above():
    """Module -> all on the way that import it; what is above these packages they do not import."""
    packages = ("common", "per_sample", "privacy")
    sources = {m: s for m, s in read_package(SOURCE).items() if unit_of(m) in packages}
    direct = {
        module: {f"fedpact.{name}" for _, name in own_imports(sources, module)}
        for module in sources
    }
    found = {module: set() for module in sources}
    for module in sources:
        waiting, reached = [module], set()
        while waiting:
            new = (direct[waiting.pop()] & sources.keys()) - reached
            reached |= new
            waiting += new
        for name in reached:
            found[name].add(module)
    return found


def section():
    return PAGE.read_text(encoding="utf-8").split("## How a batch is summed\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def importers():
    return above()


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_turns_back_three_times_at_most(way, importers):
    made = calls(way)
    assert f"fedpact.per_sample.{way}" in {called for _, called in made}
    back = {(caller, called) for caller, called in made if called in importers[caller]}
    assert len(back) <= MOST, sorted(back)


@pytest.mark.parametrize("way", WAYS)
def test_the_page_names_every_file_on_the_way(way):
    named = set(re.findall(r"`(\w+/\w+(?:/\w+)?)\.py`", section()))
    packages = ("privacy", "per_sample", "common/randomness")
    passed = {called.removeprefix("fedpact.").replace(".", "/") for _, called in calls(way)}
    assert {file for file in passed if file.startswith(packages)} <= named
