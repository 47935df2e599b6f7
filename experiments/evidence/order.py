"""The order in which runs are made: what tells most for a minute of processor time comes first."""

from collections.abc import Iterator
from typing import Final

from experiments.evidence import ali, best, fedfdp, fedproxvr
from experiments.evidence.runs import Run
from experiments.evidence.variants import variants


def _first() -> Iterator[tuple[Run, int]]:
    """What bears on the papers' claims and is cheap, one seed."""
    yield ali.fixed("fashion_mnist", "cnn", ali.FAITHFUL, 1), 0
    yield from ((run, 0) for run in _table("fashion_mnist", "logistic", ali.FAITHFUL))
    yield ali.fixed("fashion_mnist", "cnn", ali.LARGER, 1), 0
    for epsilon in (2.75, 1.55):
        yield best.on_test("fashion_mnist", epsilon, "own"), 0
    yield fedfdp.private("fashion_mnist", "fedavg", 16.0), 0
    yield fedfdp.private("fashion_mnist", "fedfdp", 16.0, 3.0), 0
    yield best.inside("mnist", 3.52, "own"), 0
    yield fedproxvr.run(fedproxvr.CONVEX[0]), 0
    yield from ((run, 0) for run in _table("fashion_mnist", "logistic", ali.LARGER))
    yield ali.choice("fashion_mnist", "cnn", 8.0), 0
    yield ali.choice("fashion_mnist", "cnn", 24.0), 0
    yield ali.released("fashion_mnist"), 0
    yield from ((run, 0) for run in _ordering())


def _ordering() -> Iterator[Run]:
    """ALI's widest row with the CNN, then what is faithful of FedFDP."""
    widest = next(column for column in ali.COLUMNS if column.row == "R_c/5")
    yield ali.adaptive("fashion_mnist", "cnn", ali.FAITHFUL, widest)
    yield ali.fixed("fashion_mnist", "cnn", ali.FAITHFUL, 5)
    yield fedfdp.private("mnist", "fedavg", 1.0)
    yield fedfdp.private("mnist", "fedfdp", 1.0)
    yield ali.fixed("cifar10", "cnn", ali.FAITHFUL, 1)


def _table(data: str, model: str, rate: float) -> Iterator[Run]:
    """ALI-DPFL's tables for a data set, a model and an η."""
    yield from (ali.fixed(data, model, rate, tau) for tau in (1, 3, 5, 2, 4, 7, 9))
    yield from (ali.adaptive(data, model, rate, column) for column in reversed(ali.COLUMNS))


def _tables() -> Iterator[Run]:
    """Every run of the papers' tables, and what is best beside them."""
    for data in ali.DATA:
        for epsilon in sorted({column.epsilon for column in ali.COLUMNS}):
            if epsilon != 2.0:  # experiments/features has it
                yield from (best.on_test(data, epsilon, trust) for trust in ("own", "sum"))
        yield from (ali.undivided(data, tau) for tau in (1, 2, 3, 4, 5, 7, 9))
        for rate in (ali.FAITHFUL, ali.LARGER):
            yield from _table(data, "logistic", rate)
        for rate in (ali.FAITHFUL, ali.LARGER):
            yield from _table(data, "cnn", rate)
    for data in fedfdp.DATA:
        yield from (best.inside(data, 3.52, trust) for trust in ("own", "sum"))
    for epsilon in (1.0, 2.0, 3.0, 4.0):
        yield best.inside("fashion_mnist", epsilon, "own")
    yield from map(fedproxvr.run, fedproxvr.CONVEX)
    yield from _of_fedfdp()
    yield from map(fedproxvr.run, fedproxvr.CNN)


def _of_fedfdp() -> Iterator[Run]:
    for rate in (1.0, 16.0):
        for data in fedfdp.DATA:
            yield from (fedfdp.private(data, method, rate) for method in fedfdp.PRIVATE)
            yield fedfdp.private(data, "fedfdp", rate, 3.0)
        yield from (fedfdp.loudest(method, rate) for method in fedfdp.BUDGETS)
    for data in fedfdp.DATA:
        yield from (fedfdp.plain(data, method) for method in fedfdp.PLAIN)
    for data, sites, beta in fedfdp.SPREADS:
        for method in fedfdp.SPREAD_METHODS:
            yield fedfdp.spread(data, sites, beta, method)


def _sweeps() -> Iterator[Run]:
    """Sweeps over one seed: learning rate, noise, λ and C."""
    for data in ali.DATA:
        yield from (ali.choice(data, "cnn", rate) for rate in ali.RATES)
        yield ali.released(data)
        yield ali.noiseless(data)
        yield from (ali.plain(data, rate) for rate in ali.PLAIN)
        yield from (run for run, _ in variants(data).values())
    yield from (ali.undivided("fashion_mnist", *between) for between in ali.BETWEEN)
    for data in fedfdp.SWEEPS:
        yield from (fedfdp.weighed(data, weight) for weight in fedfdp.SWEPT)
        yield from (fedfdp.clipped(data, clip) for clip in fedfdp.CLIPS)
    yield from map(fedfdp.each_site, ("fedavg", "fedfair"))
    for method in fedfdp.STEADY:
        yield from (fedfdp.long(data, method) for data in fedfdp.DATA)
    for data in fedfdp.DATA:
        yield from (fedfdp.plain(data, *careful) for careful in fedfdp.CAREFUL)
    yield from map(fedproxvr.run, fedproxvr.CURVES + fedproxvr.CURVES_CNN)


def _order() -> Iterator[tuple[Run, int]]:
    yield from _first()
    for seed in range(3):
        yield from ((run, seed) for run in _tables() if run.kind != "cnn")
    yield from ((run, 0) for run in _tables())
    yield from ((run, 0) for run in _sweeps())
    for seed in (1, 2):
        yield from ((run, seed) for run in _tables())


ORDER: Final[tuple[tuple[Run, int], ...]] = tuple(dict.fromkeys(_order()))
