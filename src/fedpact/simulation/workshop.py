"""Building a party's model and kernel from the plan and the public form of a record."""

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn

from fedpact.algorithms.wrappers.optimizers import check_head
from fedpact.common.errors import FedpactError, ModelError
from fedpact.common.losses import Loss, cross_entropy
from fedpact.common.params import TOKENS, FlatModel, keeping_modes
from fedpact.common.randomness.seeded import seeded_generator
from fedpact.common.user_code import is_own
from fedpact.data.tokens import is_next_token
from fedpact.evaluation.metrics import check_measures
from fedpact.evaluation.tasks import check_loss
from fedpact.models.build import build
from fedpact.models.hugging_face import NamedInputs, check_adapters, reads_ahead
from fedpact.models.initial import check_apart, check_repeated, fill
from fedpact.models.prepare import with_lines
from fedpact.models.zoo import Views, check_vocabulary
from fedpact.per_sample.kernel import PerSampleKernel, PlainKernel
from fedpact.per_sample.layers import is_torchs
from fedpact.per_sample.passes import WAYS
from fedpact.plan import Plan
from fedpact.privacy.batches import Kernel as PrivateKernel
from fedpact.privacy.mechanisms import mechanism_of

_TOGETHER: Final = 256
_SHOWN: Final = 20
_FEW: Final = 64
_ROUNDED: Final = 1e-2
"""Tolerance for answers, in units of the largest: machines differ by less, other code by more."""

_logger = logging.getLogger("fedpact")


@dataclass(frozen=True)
class Worker:
    """A worker's kernel, with its own copy of the model."""

    kernel: PrivateKernel | PlainKernel

    @property
    def private(self) -> PrivateKernel:
        """The clipping kernel of a private run."""
        if isinstance(self.kernel, PlainKernel):
            raise TypeError("a plain run's worker was asked for a private release")
        return self.kernel

    @property
    def plain(self) -> PlainKernel:
        """The kernel of a plain run."""
        if not isinstance(self.kernel, PlainKernel):
            raise TypeError("a private run's worker was asked for exact numbers")
        return self.kernel

    def find_accepted(self, x: Tensor, y: Tensor, origin: str, numbers: Tensor) -> Tensor:
        """Return which records x, y [n, ...] the model accepts, bool [n].

        A record at which the model raises would make every batch with it raise, which others could
        notice; it is left out, and named only in this machine's log. origin: the file. numbers: the
        records' numbers in it [n].
        """
        good = torch.ones(len(y), dtype=torch.bool)
        # Torch's own layers accept all numbers.
        if x.is_floating_point() and is_torchs(self.kernel.model.module):
            return good
        told = dict[int, str]()
        for rows in torch.arange(len(y)).split(_TOGETHER):
            if self._error(x[rows], y[rows]) is not None:
                each = ((j, self._error(x[j : j + 1], y[j : j + 1])) for j in rows.tolist())
                told |= {j: error for j, error in each if error is not None}
        if told:
            good[[*told]] = False
            rows = [
                f"row {int(numbers[j])}" + (f" ({error})" if place < _SHOWN else "")
                for place, (j, error) in enumerate(told.items())
            ]
            _logger.warning(
                "%s: the model fails on %d of %d records, which are left out of everything: "
                "%s; look for categories, words or labels that were not declared",
                origin,
                len(told),
                len(y),
                ", ".join(rows),
            )
        return good

    def _error(self, x: Tensor, y: Tensor) -> str | None:
        try:
            self.kernel.losses(x.clone(), y)
            if isinstance(self.kernel, PlainKernel):
                return None
            # Evaluations use the module itself, which may refuse what its trace takes.
            module = self.kernel.model.module
            with keeping_modes(module), torch.no_grad():
                module.eval()(x.clone())
        except Exception as error:  # a model may raise anything
            return f"{type(error).__name__}: {error}"
        return None


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """Builds models and kernels for records of the form of `example` [*shape].

    classes: the number of labels. device: where kernels compute; see machine.device_of.
    start: the model's initial weights by name; None: drawn from the seed.
    """

    plan: Plan
    example: Tensor
    classes: int
    device: str = "cpu"
    start: Mapping[str, Tensor] | None = None

    @staticmethod
    def of(plan: Plan, example: Tensor, classes: int, at: Path = Path()) -> "TrainingSetup":
        """Return it with the plan's initial weights. Raises ModelError: they cannot be read.

        at: the folder that a relative path of weights refers to.
        """
        return TrainingSetup(plan, example, classes, start=plan.initial.tensors(at))

    def on(self, device: str) -> "TrainingSetup":
        """Return the same on a device; itself if it is there already."""
        return self if device == self.device else replace(self, device=device)

    def module(self) -> nn.Module:
        """Return the model with its initial weights, the same at every call.

        Raises PlanError: the head is not the size of the last tensors. ModelError: the initial
        weights do not fit this model.
        """
        plan = self.plan
        module = self._draw(plan.seed)
        if "head" in plan.settings:
            check_head(module, plan.head, "settings.head")
        check_head(module, plan.local.head)
        if self.start is not None:
            fill(module, self.start)
        return module

    def _draw(self, seed: int) -> nn.Module:
        plan, kind = self.plan, self.plan.task.target.kind
        check_vocabulary(plan.model, plan.records.vocabulary, self.classes)
        return build(plan.model, self.example, self.classes, seed, plan.logistic, kind)

    @cached_property
    def loss(self) -> Loss:
        """The plan's loss per record, on the device."""
        loss = self.plan.task.per_record(self.classes)
        return cast(Loss, self.move(loss)) if isinstance(loss, nn.Module) else loss

    def move(self, module: nn.Module) -> nn.Module:
        """Return a module on the device; on a GPU a copy, as others may hold its layers too.

        A module that cannot be copied is moved itself.
        """
        if self.device == "cpu":
            return module
        with suppress(Exception):  # as of weight_norm's tensors, a generator or a lock
            module = copy.deepcopy(module)
        return module.to(self.device)

    def bench(self, *, check: bool = False) -> Worker:
        """Return a kernel of the plan's kind; `check` tries the model on dummy records first.

        Raises ModelError: a model that mixes records, cannot be trained as asked, fails on the
        dummy records, or differs at every call. PlanError: it is not said what its weights were
        trained on.
        """
        if check and is_own(self.plan.model):
            self._check_own()
        mode, module, views = self.plan.privacy.mode, self.module(), self.plan.views
        if views.used:
            module = Views(module, views, tuple(self.example.shape))
        model = FlatModel(self.move(module), self.plan.run.precision)
        if check and self.plan.task.loss is not None:
            tried = self.plan.task.loss, self.loss, model.module, *self.make_dummy_records()
            check_loss(*tried, finite=mode != "none")
        if mode == "none":
            return Worker(PlainKernel(model, self.loss))
        kernel = mechanism_of(mode).kernel(model, self.loss)
        if check:
            self._verify(kernel)
        return Worker(kernel)

    def _check_own(self) -> None:
        """Check the user's model factory, before anything changes the modules it returns."""
        name, seed = self.plan.model, self.plan.seed
        one, again = self._draw(seed), self._draw(seed)
        if self.plan.privacy.mode != "none":
            self.plan.initial.check_drawn(name, one, self._draw(seed ^ 1))
        check_apart(name, one, again)
        self._check_text(one)
        for module in (one, again) if self.start is not None else ():
            fill(module, self.start or {})
        check_repeated(name, one, again)

    def _check_text(self, module: nn.Module) -> None:
        """Raise ModelError if a model of text would learn to copy what it has read."""
        plan, text = self.plan, self.example[None].expand(2, *self.example.shape)
        target = plan.task.target
        if target.kind != "pixels" or text.is_floating_point():
            return
        wrapped = module if isinstance(module, NamedInputs) else None
        model = f"model {plan.model if wrapped is None else wrapped.called}"
        shifted = target.next or is_next_token(plan.label)
        if wrapped and not shifted and wrapped.shifts_labels(torch.ones_like(text)):
            raise ModelError(
                f"{model} learns the next token: its own loss shifts the labels by one, and those "
                f"of task.kind = {plan.task.kind!r} are used as they are, so that it would learn "
                'to repeat its input: set kind = "next_token" (task="next_token" in Python), with '
                "records.vocabulary and a label column that holds the tokens themselves, as "
                '"labels" or "input_ids"'
            )
        # A decoder's text is shifted already.
        written = len(self.example) == len(TOKENS) and self.example.dim() == 2
        # A model of its own, whose weights are moved.
        vocabulary = plan.records.vocabulary or self.classes
        if target.next and (written or reads_ahead(self._draw(plan.seed), text, vocabulary)):
            raise ModelError(
                f"{model} reads the token that it is to name: with task.kind = 'next_token' it "
                "would learn to copy it. Learn masked tokens, or what a decoder writes, by kind = "
                '"tokens", with labels as they are, or choose a causal model, as '
                "AutoModelForCausalLM, some with is_decoder = True in their configuration"
            )

    def check_labels(self, y: Tensor) -> None:
        """Try outputs and metrics on dummy records with labels like y [n, ...].

        Raises ModelError: a mask of another size than the output, or a metric that is not a number.
        """
        outputs = self._try(self.make_dummy_records()[0])
        if outputs is None:
            # In a plain run the model need not accept dummy records; in a private run it has been
            # tried on them. Failures at real records will show in training.
            return
        if self.loss is cross_entropy and _are_probabilities(outputs):
            _logger.warning(
                "model %s returns probabilities, but cross_entropy applies a softmax itself, so it "
                "would learn slowly: return logits, without the last softmax",
                self.plan.model,
            )
        if y.ndim > 2 and outputs.shape[2:] != y.shape[1:]:
            raise ModelError(
                f"model {self.plan.model!r} returns {tuple(outputs.shape[1:])} for a record, but "
                f"its mask has shape {tuple(y.shape[1:])}: expected {self.classes} scores for each "
                "pixel of the mask; keep height and width in the model, or resize the masks"
            )
        check_measures(self.plan.task.measures(self.classes), outputs, y, self.classes)

    def _verify(self, kernel: PrivateKernel) -> None:
        try:
            x, y = (v.to(self.device) for v in self.make_dummy_records())
            kernel.verify(x, y)
            if isinstance(kernel, PerSampleKernel):
                check_adapters(kernel, x, y)
        except ModelError as error:
            raise with_lines(error, kernel.model.module, self.example) from error
        except FedpactError:
            raise
        except Exception as error:
            kinds = "normal numbers, or " if self.example.is_floating_point() else ""
            raise ModelError(
                f"model {self.plan.model!r} failed on four dummy records, {kinds}zeros and ones, "
                f"of shape {tuple(self.example.shape)}: {type(error).__name__}: {error}. A private "
                "run checks on such records that the model does not mix the records of a batch, so "
                "it has to accept them"
            ) from error

    def separation(self) -> str:
        """Return how a private run's kernel separates the records of a batch, in words."""
        x, y = (v.to(self.device) for v in self.make_dummy_records())
        return WAYS[self.bench().private.way(x, y)]

    def placement(self, kernel: PrivateKernel, *expected: float) -> str:
        """Return how a site has to place its records in passes, a key of PLACEMENTS.

        "compact" if the check finds this model batch invariant on this machine. On a GPU, steps
        have a fixed shape anyway. expected: the public expected sizes of batches, of local steps
        and of openings.
        """
        if self.device != "cpu" or not isinstance(kernel, PerSampleKernel):
            return "scattered"
        x, y = self.make_dummy_records()
        good = all(kernel.invariant(x, y, size) for size in {*expected})
        return "compact" if good else "scattered"

    @cached_property
    def size(self) -> int:
        """The number of the model's parameters, d."""
        return FlatModel(self.module()).size

    def answers(self, module: nn.Module | None = None) -> tuple[float, ...]:
        """Return some of a user's model's answers to dummy records, by which it is known again.

        module: None for one with its initial weights. There are no answers of a model of fedpact's,
        nor of one that does not accept dummy records.
        """
        if not is_own(self.plan.model):
            return ()
        outputs = self._try(self.make_dummy_records()[0], module)
        if outputs is None:
            return ()
        found = outputs.double().flatten()
        return tuple(found[:: -(-len(found) // _FEW)].nan_to_num(0, 0, 0).tolist())

    def answers_as(self, known: Sequence[float] | None, module: nn.Module | None = None) -> bool:
        """Whether a module's `answers` are the known ones, up to rounding; None: none are known."""
        if known is None:
            return True
        now, most = self.answers(module), _ROUNDED * max(map(abs, known), default=0.0)
        return len(now) == len(known) and all(
            abs(a - b) <= most for a, b in zip(now, known, strict=True)
        )

    def make_dummy_records(self) -> tuple[Tensor, Tensor]:
        """Return four dummy records x, y."""
        # Copies, as a model may write to its input.
        x, y = self._dummy_records
        return x.clone(), y.clone()

    @cached_property
    def _dummy_records(self) -> tuple[Tensor, Tensor]:
        generator = seeded_generator("made-up records")
        shape = (4, *self.example.shape)
        if self.example.is_floating_point():
            x = torch.randn(shape, generator=generator, dtype=self.example.dtype)
            if self._try(x) is None:
                # A column may hold categories that the model looks up: at least 0 and 1.
                x = (x > 0).to(x.dtype)
        else:
            x = torch.randint(2, shape, generator=generator, dtype=self.example.dtype)
            if self._try(x) is None:
                x[..., 0] = 1  # like a text that is not empty
        return x, self._labels(x, generator)

    def _try(self, x: Tensor, module: nn.Module | None = None) -> Tensor | None:
        """Return the model's outputs on dummy records, None if it does not accept them."""
        # Some modules have a length, which may be 0, or cannot be asked for it (torch.compile).
        module = self.module() if module is None else module
        try:
            with keeping_modes(module), torch.no_grad():
                return module.eval()(x)
        except Exception:  # a model may raise anything
            return None

    def _labels(self, x: Tensor, generator: torch.Generator) -> Tensor:
        kind = self.plan.task.target.kind
        if kind == "number":
            return torch.rand(len(x), generator=generator) * 2 - 1
        if kind == "several":
            return torch.randint(2, (len(x), self.classes), generator=generator).float()
        shape = (len(x),)
        if kind == "pixels":
            with torch.no_grad():
                shape = (len(x), *self.module()(x).shape[2:])
        return torch.randint(self.classes, shape, generator=generator)


def _are_probabilities(outputs: Tensor) -> bool:
    """Whether each row of outputs [n, K] looks like a softmax's."""
    rows = outputs.dim() == 2 and outputs.shape[1] > 1 and outputs.is_floating_point()
    return rows and bool((outputs >= 0).all() and ((outputs.sum(1) - 1).abs() < 1e-4).all())
