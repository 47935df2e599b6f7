"""For the whole suite: one thread, no waits, nothing made or tried twice, few figures, a reference.

The reference is per-sample gradients by torch.func or ordinary autograd, clipped as written.
"""

import os

# Before numpy and scipy are loaded, here and in the processes that tests start: on small matrices
# their threads only wait for each other, which was three quarters of what a tuned model cost.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Records that lie on this machine decide nothing but for tests that ask for them (`real_data`).
if "FEDPACT_DATA" in os.environ:
    os.environ["FEDPACT_REAL_DATA"] = os.environ.pop("FEDPACT_DATA")

import copy
import functools
import gc
import importlib
import logging
import math
import pkgutil
import shutil
import signal
import sqlite3
import stat
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedpact import per_sample as per_sample_package
from fedpact import privacy
from fedpact.cli.main import main
from fedpact.common import randomness
from fedpact.common.losses import squared_error
from fedpact.common.params import FlatModel
from fedpact.common.user_code import is_own
from fedpact.data import load, public
from fedpact.per_sample import passes
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.per_sample.layout import Placement
from fedpact.per_sample.per_record import Alone
from fedpact.per_sample.tracing import export
from fedpact.privacy.batches import BatchClippedKernel
from fedpact.report import drawing
from fedpact.simulation import run, workshop
from fedpact.simulation.workshop import TrainingSetup

# How long an example takes is the machine's doing: on a busy one a deadline fails what is right.
settings.register_profile("busy", deadline=None, max_examples=40)
settings.load_profile("busy")

# As reproducible runs have and xdist needs; in operations this small more cost more than they save.
torch.set_num_threads(1)

if not torch.cuda.is_available():
    # It keeps a formatted stack for each kind of card that there might be: 3 ms.
    torch.manual_seed = torch.default_generator.manual_seed

# Files lie in memory where there is room: to make and remove them on a busy disk takes a third of
# what a deployment's test waits for.
_MEMORY = "/dev/shm"
_room = shutil.disk_usage(_MEMORY).free if os.path.isdir(_MEMORY) else 0
if "TMPDIR" not in os.environ and _room > 2**32:
    tempfile.tempdir = _MEMORY

_SYNC = os.fsync


def _without_waiting(descriptor: int) -> None:
    """In place of os.fsync, which is a third of a small run.

    No test cuts the power, and what a process has written others see, though it be killed: to wait
    for the disk finds nothing. What has to be synced, and when, is for the tests that put a
    function of their own in this place. A closed file, or one that is no file, raises as ever.
    """
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        _SYNC(descriptor)


os.fsync = _without_waiting


class _Unsynced(sqlite3.Connection):
    """As `_without_waiting`, for what SQLite writes by itself."""

    def execute(self, sql: str, *parameters) -> sqlite3.Cursor:
        synced = sql.startswith("PRAGMA synchronous =")
        return super().execute("PRAGMA synchronous = OFF" if synced else sql, *parameters)


sqlite3.connect = partial(sqlite3.connect, factory=_Unsynced)

_VERIFY, _verified = TrainingSetup._verify, set()
_PLACEMENT, _placed = TrainingSetup.placement, {}


def _key(shop: TrainingSetup, kernel: PerSampleKernel | BatchClippedKernel) -> tuple:
    """What a model does on made-up records follows from this."""
    plan, example = shop.plan, shop.example
    kind = type(kernel), type(kernel).verify, plan.model, plan.logistic, plan.seed
    return *kind, tuple(example.shape), example.dtype, shop.classes, shop.device


def _once(shop: TrainingSetup, kernel: PerSampleKernel | BatchClippedKernel) -> None:
    """In place of TrainingSetup._verify, which is over half of a small private run.

    A model that was refused, and one of a test's own, is tried every time.
    """
    key = _key(shop, kernel)
    if key not in _verified:
        _VERIFY(shop, kernel)
        if ":" not in shop.plan.model:
            _verified.add(key)


def _found(shop: TrainingSetup, kernel: PerSampleKernel, *expected: float) -> str:
    """In place of TrainingSetup.placement, a fifth of what opening a site takes; as `_once`."""
    invariant = getattr(kernel, "invariant", None)
    found = getattr(invariant, "__func__", invariant)
    key = *_key(shop, kernel), found, torch.get_num_threads(), *expected
    if ":" in shop.plan.model or key not in _placed:
        _placed[key] = _PLACEMENT(shop, kernel, *expected)
    return _placed[key]


TrainingSetup._verify, TrainingSetup.placement = _once, _found

_BUILD, _built = workshop.build, {}


def _copied(name: str, example: torch.Tensor, *given: object) -> nn.Module:
    """In place of build, which a run calls ten times; a model of a test's own is made each time."""
    key = name, tuple(example.shape), example.dtype, *map(repr, given)
    if is_own(name):
        return _BUILD(name, example, *given)
    if key not in _built:
        _built[key] = _BUILD(name, example, *given)
    return copy.deepcopy(_built[key])


workshop.build = _copied

# What is installed does not change, and each run states it: a twentieth of a small one.
run.version = functools.cache(run.version)

_DIGITS = functools.cache(public.load_digits)
load._LOADERS["digits"] = lambda: copy.deepcopy(_DIGITS())

# As many traces as the suite's models have: those of fedpact's own would be made again and again.
export._KEPT = 4096

_DRAW, _AXES = drawing._draw_svg, drawing.Chart.subplots


def _undrawn(figure: object, salt: str, attributes: str) -> str:
    """In place of drawing._draw_svg, which is over half of a small run with its report.

    Figures, and the pictures of their legends, are drawn where they are what is tested: by tests
    that are marked `drawn`, and in processes of their own.
    """
    return f"<svg {attributes}></svg>"


class _Nowhere:
    """Axes on which all that is drawn is lost, as to make axes takes half of what is left."""

    def __getattr__(self, name: str) -> "_Nowhere":
        return self

    def __call__(self, *_: object, **__: object) -> "_Nowhere":
        return self

    def get_ylim(self) -> tuple[float, float]:
        return 0.0, 1.0


def _no_axes(chart: object, rows: int = 1, *_: object, **__: object) -> object:
    """In place of Chart.subplots, where figures are not drawn."""
    return _Nowhere() if rows == 1 else [_Nowhere()] * rows


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    drawn = item.get_closest_marker("drawn")
    drawing._draw_svg = _DRAW if drawn else _undrawn
    drawing.Chart.subplots = _AXES if drawn else _no_axes
    return (yield)


def pytest_configure(config):
    """Nor does a cache that earlier runs have filled. Workers take what the first process sets."""
    if not hasattr(config, "workerinput"):
        config.cache_of_tests = tempfile.TemporaryDirectory(prefix="fedpact-tests-")
        os.environ["FEDPACT_CACHE"] = config.cache_of_tests.name


def pytest_collection():
    """What is collected stays to the end: a quarter of the time would go into looking for waste."""
    gc.disable()


def pytest_collection_finish():
    """Later waste is looked for rarely, which takes a thirtieth of the time otherwise."""
    gc.enable()
    gc.freeze()  # what was collected, waste and all: to look through it takes half a second
    gc.set_threshold(10_000, 10, 100)
    # pytest puts its handlers, six times a test, on each logger that tells the root nothing: torch
    # has sixty of them.
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch."):
            logging.getLogger(name).propagate = True


def pytest_unconfigure(config):
    """The interpreter ends; to look through all that is left finds nothing."""
    if hasattr(config, "cache_of_tests"):
        config.cache_of_tests.cleanup()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Each test begins with the same random numbers, whichever ran before it."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def card(monkeypatch):
    """No number is at hand: what is done otherwise on a card is done here."""
    for package in (per_sample_package, randomness, privacy):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            if "on_cpu" in vars(module):
                monkeypatch.setattr(module, "on_cpu", lambda _: False)
    monkeypatch.setattr(passes, "slots_that_fit", lambda run, device: 64)


@pytest.fixture
def no_page(monkeypatch):
    """A run without its page, which takes a second to draw."""
    monkeypatch.setattr("fedpact.api.write_report", lambda folder: None)


@pytest.fixture
def typed(monkeypatch, capsys):
    """typed(*words) -> this command's exit code, and what it writes: `out` and `err`."""
    before = signal.getsignal(signal.SIGINT)

    def done(*words):
        monkeypatch.setattr("sys.argv", ["fedpact", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)

    yield done
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def two_threads():
    """torch computes on two threads, as it does for users."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class Looked(Exception):
    """Somebody asked for a number."""


class _Nobody(TorchDispatchMode):
    """Raises where an operation's result, or the form of it, depends on numbers."""

    LOOKING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "unique", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if by_mask or any(word in name for word in self.LOOKING):
            raise Looked(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_operation_looks():
    """A context in which whoever asks torch what a number is gets an exception."""
    return _Nobody()


@pytest.fixture
def nobody_looks(monkeypatch):
    """The same, and no tensor gives its numbers away for the whole of the test."""

    def refused(self, *args, **kwargs):
        raise Looked

    for name in ("numpy", "tolist", "cpu", "item", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    return _Nobody()


def per_sample(module, loss, x, y):
    """The gradients [B, d] of the trainable parameters in float64, record by record."""
    module = copy.deepcopy(module).double()
    weights = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    x = x.double() if x.is_floating_point() else x
    y = y.double() if y.is_floating_point() else y

    def one(w, record, target):
        return loss(functional_call(module, w, (record[None],)), target[None]).sum()

    rows = vmap(grad(one), in_dims=(None, 0, 0))(weights, x, y)
    return torch.cat([r.reshape(len(x), -1) for r in rows.values()], 1)


def per_sample_loop(module, loss, x, y):
    """The same by ordinary autograd, for what vmap cannot batch."""
    module = copy.deepcopy(module)
    weights = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for j in range(len(x)):
        value = loss(module(x[j : j + 1].clone()), y[j : j + 1]).sum()
        found = torch.autograd.grad(value, weights, materialize_grads=True)
        rows.append(torch.cat([g.reshape(-1) for g in found]))
    return torch.stack(rows)


def dealt(w):
    """Weights w [B] that are no function of the losses, for a batch that is asked in slices."""
    start = 0

    def weights(losses):
        nonlocal start
        found = w[start : start + len(losses)].to(losses.dtype)
        start += len(losses)
        if start >= len(w):
            start = 0
        # Of slots that hold no record, too.
        return torch.nn.functional.pad(found, (0, len(losses) - len(found)))

    return weights


def standing(count, length=8):
    """A layout that leaves records where they stand when some are taken out: layout.of(others)."""
    return Placement(torch.arange(count), slots=-(-count // length) * length, length=length)


def clipped(rows, clip=math.inf, w=None):
    """Contributions c_j g_j [B, d] with c_j = min(max(w_j, 0), C/‖g_j‖)."""
    w = torch.ones(len(rows), dtype=rows.dtype) if w is None else w.to(rows.dtype)
    c = torch.minimum(w.clamp_min(0), clip / rows.norm(dim=1))
    return c[:, None] * rows


def error(found, contributions):
    """How far a sum is off, relative to the lengths of what was summed."""
    scale = contributions.norm(dim=1).sum().clamp_min(1e-300)
    return float((found.double() - contributions.sum(0)).norm() / scale)


WAYS = ("dense", "graph")


def forced(way, module, loss):
    """A kernel of a copy of the model that takes one way: dense, graph or records."""
    model = FlatModel(copy.deepcopy(module))
    kernel = PerSampleKernel(model, loss)
    if way != "dense":
        kernel._passes.dense = None
    if way == "records":
        alone = {}

        def traced(x, y):
            key = x.shape[1:], x.dtype, y.shape[1:], y.dtype
            if key not in alone:
                alone[key] = Alone(model, loss, x, y, "as the test wants it")
            return alone[key]

        kernel._passes._trace_for = traced
    return kernel


def kernels(module, loss, *ways):
    """{way: kernel} for every way that is asked for, and that the model can take.

    Whether the graph can be taken is for whoever asks to know: see PerSampleKernel.way.
    """
    found = {way: forced(way, module, loss) for way in ways or WAYS}
    if "dense" in found and found["dense"]._passes.dense is None:
        del found["dense"]
    return found


def check_model(module, loss, x, y, tolerance=1e-12, rows=None, way="graph", ways=None):
    """Each way's sums at several clips and weights against the reference; returns the last kernel.

    way: the one that is taken where the model is not dense, "graph" or "records".
    ways: those to try, and to find; by default what there is.
    The records are the site's own at a sampling rate of 1, so they have to be left as they are.
    """
    given_x = x.clone()
    rows = per_sample(module, loss, x, y) if rows is None else rows
    middle = float(rows.norm(dim=1).median()) or 1.0
    w = torch.linspace(-0.5, 2, len(x), dtype=torch.float64)
    found = kernels(module, loss, *(ways or ()))
    assert not ways or set(ways) - found.keys() <= {"dense"}
    each = [loss(module(x[j : j + 1].clone()), y[j : j + 1]) for j in range(len(x))]
    # Of a given length, as to find one takes longer than these sums: see tests of layouts.
    layout = Placement(length=8)
    for name, kernel in found.items():
        for clip, weights in ((math.inf, None), (math.inf, w), (middle, None), (1e-3 * middle, w)):
            given = None if weights is None else dealt(w)
            total = kernel.clipped_sum(x, y, clip, given, layout=layout)
            off = error(total, clipped(rows, clip, weights))
            assert off < tolerance, f"{name} is off by {off:.1e} at clip {clip}"
        losses = torch.cat(each).detach()
        alike = kernel.losses(x, y, layout)
        assert torch.allclose(alike, losses, rtol=10 * tolerance, atol=tolerance)
        assert kernel.way(x, y) == (way if name == "graph" else name)
    assert torch.equal(given_x, x)
    return kernel


class Apply(nn.Module):
    """A module that runs a given function of its submodules."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


class Shift(nn.Module):
    """A module with parameters of its own, which are used by no layer that is known."""

    def __init__(self, *shape):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return x * self.scale + self.shift


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def check_structure(module, x=None, rows=None, way="graph"):
    """Like check_model, with squared errors to targets of the outputs' form."""
    module = module.double()
    x = data(5, 4) if x is None else x
    with torch.no_grad():
        y = torch.randn_like(module(x.clone()))
    if rows == "loop":
        rows = per_sample_loop(module, squared_error, x, y)
    return check_model(module, squared_error, x, y, rows=rows, way=way)


@pytest.fixture(scope="session")
def reference():
    return SimpleNamespace(
        per_sample=per_sample,
        per_sample_loop=per_sample_loop,
        clipped=clipped,
        dealt=dealt,
        standing=standing,
        error=error,
        forced=forced,
        kernels=kernels,
        check=check_model,
        check_structure=check_structure,
        data=data,
        Apply=Apply,
        Looked=Looked,
        Shift=Shift,
    )
