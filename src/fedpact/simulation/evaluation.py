"""Evaluating models between the rounds of a simulation.

The public test set gives accuracy and loss. The sites' held-out records give accuracy per site and
Ψ, which only a simulation knows, as no site would release them. A site's own model, if any, is
evaluated at that site. The algorithm never sees these results.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fedpact.algorithms.wrappers.optimizers import read_average
from fedpact.algorithms.wrappers.released_scales import CONSTANTS
from fedpact.common.messages import RoundRecord, SiteScore, State
from fedpact.common.params import FlatModel, on_cpu, threads
from fedpact.common.records import SumsBySite
from fedpact.common.run_folder import Checkpoint
from fedpact.evaluation.metrics import evaluate, of_sites
from fedpact.per_sample.kernel import PlainKernel
from fedpact.privacy.accounting.accountant import History
from fedpact.privacy.batches import Kernel
from fedpact.privacy.column_scales import scale_columns
from fedpact.simulation.run import with_epsilon
from fedpact.simulation.setup import SimulationSetup

_EVALUATIONS = 50
"""The default number of evaluations, at rounds that depend on the plan only."""


class Evaluator:
    """A rounds.Evaluate. With evaluate_every = 0 there are 50 to 100 evenly spaced evaluations.

    charged: site -> the events charged to the run so far. remembered: (site, last included round or
    -1) -> the site's memory.
    """

    def __init__(
        self,
        scene: SimulationSetup,
        charged: Callable[[str], History],
        remembered: Callable[[str, int], State],
    ) -> None:
        self._scene, self._charged, self._remembered = scene, charged, remembered
        self._device = torch.device(scene.plan.run.device)
        workshop = scene.workshop.on(scene.plan.run.device)
        self._loss = workshop.loss
        self._measures = scene.plan.task.measures(len(scene.dataset.classes))
        self._model = FlatModel(workshop.move(workshop.module()))
        # Workers are idle during an evaluation, so it may use all threads.
        self._threads = torch.get_num_threads()
        # id of records -> records and labels on the device.
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        # The scales of columns in the evaluated state.
        self._by: Tensor | None = None

    def __call__(self, at: Checkpoint, record: RoundRecord, *, last: bool = False) -> RoundRecord:
        """Return the record with the evaluation of `at`, if it is due or `last`."""
        if self._scene.plan.private:
            terms = self._scene.terms
            spent = {name: self._charged(name) for name in terms}
            record = with_epsilon(record, terms, spent)
        form, number = self._scene.form, record.round
        # Exact sums are also due in a run whose sites release none.
        exact = form.share > 0 and form.once is None and number > 0
        exact = exact and (last or form.is_due(number))
        if not record.held_out and (record.evaluation or exact):
            record = replace(record, held_out=self._exact(at))
        plan = self._scene.plan
        every = plan.run.evaluate_every or max(1, plan.rounds // _EVALUATIONS)
        due = last or plan.budget.early or at.round % every == 0
        if record.accuracy is not None or not due:
            return record
        with threads(self._threads):
            return self._measure(at, record)

    def _measure(self, at: Checkpoint, record: RoundRecord) -> RoundRecord:
        self._by = at.state.vectors.get(CONSTANTS)
        w = at.state.vectors["w"]
        found = self._of(w, own_models(self._scene, at, self._remembered), record)
        average = read_average(at.state)
        beside = record if average is None else self._of(average, {}, record)
        if beside.accuracy is None or beside.loss is None:
            return found
        numbers = {"accuracy": beside.accuracy, "loss": beside.loss, **beside.metrics}
        return replace(found, average=numbers)

    def _of(self, common: Tensor, own: Mapping[str, Tensor], record: RoundRecord) -> RoundRecord:
        """Return the record with the metrics of a model [d], and of the sites' own, if any."""
        kept = list[tuple[Tensor, Tensor]]()
        data, scores = self._scene.dataset, self._at_sites(common, own, kept)
        self._model.load(common)
        if own and self._scene.plan.head:
            # The head of `common` is untrained.
            whole = _pool(scores)
        elif data.x_test is not None and data.y_test is not None:
            kept.clear()
            whole = self._score(data.x_test, data.y_test, kept)
        elif own:
            kept.clear()
            whole = _pool(self._at_sites(common, {}, kept))
        else:
            whole = _pool(scores)
        sizes = {site.name: float(len(site.y)) for site in self._scene.sites}
        measured = dict[str, float]()
        if self._measures and kept:
            outputs, y = (torch.cat(parts).cpu() for parts in zip(*kept, strict=True))
            measured = {name: of(outputs, y) for name, of in self._measures.items()}
        return replace(
            record,
            accuracy=whole.accuracy if whole else None,
            loss=whole.loss if whole else None,
            metrics={**of_sites(scores, sizes), **measured},
            scores=scores,
        )

    def _at_sites(
        self, common: Tensor, own: Mapping[str, Tensor], kept: list[tuple[Tensor, Tensor]]
    ) -> dict[str, SiteScore]:
        """Return each site's score on its held-out records, for its own model or the common one.

        kept: outputs and labels are appended.
        """
        scores = dict[str, SiteScore]()
        for site in self._scene.sites:
            if len(site.y_held):
                self._model.load(own.get(site.name, common))
                scores[site.name] = self._score(site.x_held, site.y_held, kept)
        return scores

    def _exact(self, at: Checkpoint) -> SumsBySite:
        """Return the sums that sites release, without noise, for comparison."""
        scene, kernel = self._scene, self._kernel
        own = own_models(scene, at, self._remembered)
        w, by = at.state.vectors["w"], at.state.vectors.get(CONSTANTS)
        sums = {
            s.name: scene.held_out(s).totals(scene.form.shown, kernel, own.get(s.name, w), by)
            for s in scene.sites
        }
        return {name: {c: v.tolist() for c, v in each.items()} for name, each in sums.items()}

    @cached_property
    def _kernel(self) -> Kernel | PlainKernel:
        return self._scene.workshop.on(self._scene.plan.run.device).bench().kernel

    def _score(self, x: Tensor, y: Tensor, kept: list[tuple[Tensor, Tensor]]) -> SiteScore:
        if id(x) not in self._moved:
            self._moved[id(x)] = x.to(self._device), y.to(self._device)
        x, y = self._moved[id(x)]
        if self._by is not None:
            x = scale_columns(x, self._scene.released, self._by)
        wanted = kept if self._measures else None
        # On a CPU, small batches stay in the cache; a GPU needs large ones.
        batch = 128 if on_cpu(x) else 1024
        return evaluate(self._model.module, self._loss, x, y, batch, wanted)


def own_models(
    scene: SimulationSetup, at: Checkpoint, remembered: Callable[[str, int], State]
) -> dict[str, Tensor]:
    """Return the sites' own models, [d] each; empty if all use the server's.

    remembered: see Evaluator.
    """
    found = dict[str, Tensor]()
    for site in scene.sites:
        memory = remembered(site.name, at.included.get(site.name, -1))
        own = scene.plan.method.own_model(at.state.vectors["w"], memory)
        if own is None:
            break
        found[site.name] = own
    return found


def select_judged_labels(scene: SimulationSetup) -> Tensor:
    """Return the labels on which accuracy is measured: the test set's, or all held-out ones."""
    public = scene.dataset.y_test
    if public is not None and not scene.plan.head:
        return public
    return torch.cat([site.y_held for site in scene.sites])


def _pool(scores: dict[str, SiteScore]) -> SiteScore | None:
    """Return the score on all held-out records together, or None without any."""
    records = sum(score.records for score in scores.values())
    if not records:
        return None
    return SiteScore(
        accuracy=sum(s.accuracy * s.records for s in scores.values()) / records,
        loss=sum(s.loss * s.records for s in scores.values()) / records,
        records=records,
    )
