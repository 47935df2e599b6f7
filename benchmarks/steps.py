"""One step of training on one batch, by every method: functions (problem, batch) -> a step.

A step ends with changed weights. Peers are set up as their documents say, once, outside the step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.problems import CLIP, RATE, SIGMA, Problem
from benchmarks.timing import Work
from fedpact.common.params import FlatModel
from fedpact.common.randomness.secure import SecureDraws
from fedpact.common.randomness.seeded import Draws, SeededDraws
from fedpact.per_sample.kernel import PerSampleKernel
from fedpact.privacy.accounting.accountant import Budget
from fedpact.privacy.oracle import PrivateOracle, Records
from fedpact.privacy.terms import Terms

Method = Callable[[Problem, int], Work]


def plain(problem: Problem, batch: int) -> Work:
    """nn.Module, cross_entropy, torch.optim.SGD."""
    return _plain(problem, batch, torch.contiguous_format)


def channels_last(problem: Problem, batch: int) -> Work:
    """The same with the memory format that convolutions on a CPU like."""
    return _plain(problem, batch, torch.channels_last)


def _plain(problem: Problem, batch: int, form: torch.memory_format) -> Work:
    module, (x, y) = problem.module().to(memory_format=form), problem.records(batch)
    x = x.to(memory_format=form)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()

    return step


def kernel_of(problem: Problem) -> PerSampleKernel:
    """The private kernel on the problem's model."""
    return PerSampleKernel(FlatModel(problem.module()), problem.loss)


def terms_of(batch: int, rate: float = 1.0, sigma: float = SIGMA) -> Terms:
    """Terms that take the whole batch and allow any number of steps."""
    noise = {"gradient": sigma}
    return Terms("site", batch / rate, rate, CLIP, noise, 10**9, Budget(1.0, 1e-5), "best")


class AtHand(Records):
    """A batch that lies there, as every peer's does; a run has to gather it first."""

    def at(self, chosen: Tensor, *, lent: bool = False) -> tuple[Tensor, Tensor]:
        """See Records. All of them."""
        del chosen, lent
        return self.x, self.y


def _private(problem: Problem, batch: int, draws: Draws) -> Work:
    kernel = kernel_of(problem)
    records = AtHand(*problem.records(batch))
    oracle = PrivateOracle(records, kernel, terms_of(batch), draws, lambda *_: None)
    w = kernel.model.vector.clone()

    def step() -> None:
        for one in oracle.batches(1, "gradient"):
            w.add_(one.gradient(w), alpha=-RATE)

    return step


def fedpact(problem: Problem, batch: int) -> Work:
    """The oracle's gradient with a simulation's noise, and a step along it."""
    return _private(problem, batch, SeededDraws(0, "site", 1))


def fedpact_secure(problem: Problem, batch: int) -> Work:
    """The same with a deployment's noise on the grid."""
    return _private(problem, batch, SecureDraws())


def kernel_alone(problem: Problem, batch: int) -> Work:
    """The clipped sum, without noise or step."""
    kernel, (x, y) = kernel_of(problem), problem.records(batch)
    return lambda: kernel.clipped_sum(x, y, CLIP)


def kernel_step(problem: Problem, batch: int) -> Work:
    """The clipped sum, torch's normal noise and a step along it: what the peers' steps do."""
    kernel, (x, y) = kernel_of(problem), problem.records(batch)
    w = kernel.model.vector

    def step() -> None:
        total = kernel.clipped_sum(x, y, CLIP)
        # In pieces that stay in the cache: the system clears a new large vector first.
        for some, of in zip(w.split(2**18), total.split(2**18), strict=True):
            some.add_(of.add_(torch.randn_like(of), alpha=SIGMA * CLIP), alpha=-RATE / batch)

    return step


def opacus_hooks(problem: Problem, batch: int) -> Work:
    """Opacus as most use it: per-sample gradients by hooks."""
    return _opacus(problem, batch, "hooks")


def opacus_ghost(problem: Problem, batch: int) -> Work:
    """Opacus' fast gradient clipping with ghost norms: two backward passes."""
    return _opacus(problem, batch, "ghost")


class _LossPerRecord(nn.CrossEntropyLoss):
    """Cross entropy whose unreduced losses are [B] also where a record has a label a pixel."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses = super().forward(input, target)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def made_private(
    module: nn.Module, loader: DataLoader[Any], mode: str
) -> tuple[nn.Module, Any, Any, Any]:
    """Opacus' (module, optimizer, criterion, loader) for one site; fixed-size batches."""
    from opacus import PrivacyEngine

    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    criterion: Any = _LossPerRecord()
    asked: dict[str, Any] = {
        "module": module,
        "optimizer": optimizer,
        "data_loader": loader,
        "noise_multiplier": SIGMA,
        "max_grad_norm": CLIP,
        "poisson_sampling": False,
        "grad_sample_mode": mode,
    }
    engine = PrivacyEngine(accountant="rdp")
    if mode == "ghost":
        module, optimizer, criterion, loader = engine.make_private(criterion=criterion, **asked)
    else:
        module, optimizer, loader = engine.make_private(**asked)
    return module.train(), optimizer, criterion, loader


def for_opacus(problem: Problem) -> nn.Module:
    """Return the model with its own layers in place of torch's, as its documents say."""
    from opacus.validators import ModuleValidator

    return ModuleValidator.fix(problem.module_for_opacus())


def _opacus(problem: Problem, batch: int, mode: str) -> Work:
    x, y = problem.records(batch)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    module, optimizer, criterion, _ = made_private(for_opacus(problem), loader, mode)

    def step() -> None:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()

    return step


def vmap_grad(problem: Problem, batch: int) -> Work:
    """torch.func: vmap(grad), norms, one matrix-vector product a tensor."""
    module, (x, y) = problem.module(), problem.records(batch)
    named = module.named_parameters()
    weights = {name: p.detach().clone() for name, p in named if p.requires_grad}

    def loss(w: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, w, (one[None],)), label[None])

    each = vmap(grad(loss), (None, 0, 0), randomness="different")

    def step() -> None:
        grads = each(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()], 1).norm(dim=1)
        c = (CLIP / norms).clamp(max=1)
        for name, w in weights.items():
            total = torch.mv(grads[name].flatten(1).t(), c).view_as(w)
            w.add_(total.add_(torch.randn_like(w), alpha=SIGMA * CLIP), alpha=-RATE / batch)

    return step


def vmap_grad_products(problem: Problem, batch: int) -> Work:
    """The same with attention as matrix products: vmap has no rule for torch's fused one.

    That it calls record by record; which is faster depends on the model.
    """
    step = vmap_grad(problem, batch)

    def by_products() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            step()

    return by_products


METHODS: dict[str, Method] = {
    "plain": plain,
    "channels_last": channels_last,
    "fedpact": fedpact,
    "fedpact_secure": fedpact_secure,
    "kernel_alone": kernel_alone,
    "kernel_step": kernel_step,
    "opacus_hooks": opacus_hooks,
    "opacus_ghost": opacus_ghost,
    "vmap_grad": vmap_grad,
    "vmap_grad_products": vmap_grad_products,
}
