"""Parameters are one flat vector: w ∈ R^d, contiguous; the model's weights are views of it.

Frozen parameters (requires_grad = False) and buffers stay where they are: they are constants of the
model, equal at every site, and never cross the wire. A buffer that training changes would carry
statistics of records around the oracle, so such a model is refused.

On a GPU the host must not read a number: that blocks until all work it has queued is done, and the
GPU then idles until the host has queued more.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from threading import Lock
from typing import Any, Final, Literal, NoReturn, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedpact.common.errors import InputError, ModelError

TOKENS: Final = ("input_ids", "attention_mask", "token_type_ids")
"""The rows of a record of tokens, in order, by the names that models of Hugging Face know."""

from_numpy = cast(Callable[[NDArray[Any]], Tensor], torch.from_numpy)  # pyright: ignore[reportUnknownMemberType]


Precision = Literal["float32", "tf32", "bf16"]
"""How forward and backward passes multiply: as the weights are, in TF32, or by bfloat16."""


def all_finite(vector: Tensor) -> bool:
    """Return whether every entry is a finite number; an empty vector's are.

    >>> all_finite(torch.tensor([1.0, torch.inf])), all_finite(torch.tensor([3e38, 3e38]))
    (False, True)
    """
    # One that is not spoils the sum, which takes a fortieth of the time of asking each; but a sum
    # of finite numbers may overflow.
    return bool(vector.sum().isfinite()) or bool(vector.isfinite().all())


def on_cpu(tensor: Tensor) -> bool:
    """Whether the host can look at the numbers without waiting."""
    return tensor.device.type == "cpu"


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied there from the CPU without waiting for the device.

    A GPU reads pinned memory by itself; for a copy from any other the host waits.
    """
    if device.type == "cuda" and on_cpu(tensor):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state as a file has it: each tensor by itself, and in one piece."""
    state = module.state_dict()
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in state.items()}


def model_name(module: nn.Module) -> str:
    """Return what messages call a model: its class, or what a module around one says it is."""
    return str(getattr(module, "called", type(module).__name__))


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Have torch compute on so many threads meanwhile, where this thread asks it to."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Leave training and evaluation as they were: a part may be frozen in evaluation mode."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def init_worker_thread() -> None:
    """Have torch compute on the calling thread alone from now on: how a thread of a pool begins.

    torch gives a thread its number at the first operation that asks, by what any other thread has
    set last, and would do so after it was set here. So it is asked for first. What becomes of
    denormals a thread has from the one that happened to start it, and here all have alike.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


def one_thread() -> AbstractContextManager[None]:
    """Have torch compute on this thread alone meanwhile.

    Beside threads that are at work on every core, its own only wait for each other: to add up the
    vectors of ten sites took seven times as long on two threads as on one. Between rounds, two of
    them on one core wait for the system to move one: 6 ms for a sum that takes one thread 0.1.
    """
    return threads(1)


class _Whole:
    """Holds oneDNN's settings of float32 at full precision for as long as anyone asks for it.

    They are the process's: who leaves first must not take them from who is still at work.
    """

    def __init__(self) -> None:
        self._places = {n: getattr(torch.backends.mkldnn, n) for n in ("matmul", "conv", "rnn")}
        self._lock = Lock()
        self._asking = 0
        self._before: dict[str, str] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._asking += 1
            for name, place in self._places.items():
                if place.fp32_precision in ("tf32", "bf16"):
                    self._before[name] = place.fp32_precision
                    place.fp32_precision = "ieee"
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1
                if not self._asking:
                    for name, precision in self._before.items():
                        self._places[name].fp32_precision = precision
                    self._before.clear()


_WHOLE: Final = _Whole()


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """On a GPU, by the older of torch's two ways: to trace a model torch reads it by that one."""
    backends = cast(Any, torch.backends)
    try:
        before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    except RuntimeError:
        raise InputError(
            "torch's settings of TF32 contradict each other (fp32_precision was set beside "
            "allow_tf32), and torch cannot trace a model then: write torch.backends.cuda.matmul."
            "allow_tf32 = torch.backends.cudnn.allow_tf32 = False; sums are made without it anyway"
        ) from None
    try:
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = allowed
        yield
    finally:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before


@contextmanager
def _same_order() -> Iterator[None]:
    """Have a GPU add in an order that does not follow from who comes first, where torch can."""
    switch, memory = torch.use_deterministic_algorithms, cast(Any, torch.utils).deterministic
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = memory.fill_uninitialized_memory
    # What cuBLAS's products need for it; one stream at a time does anyway, but torch would warn.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        switch(True, warn_only=True)
        # What is written before it is read needs no NaN in it.
        memory.fill_uninitialized_memory = False
        yield
    finally:
        switch(before, warn_only=only_warns)
        memory.fill_uninitialized_memory = fills


def all_digits(vector: Tensor) -> AbstractContextManager[None]:
    """Compute in the type of the numbers, whatever the caller has asked torch for.

    TF32 and bfloat16 products, and autocast, would measure norms in 8 to 11 bits; in inference mode
    torch records nothing to differentiate. A GPU adds in the same order every time, where torch has
    an algorithm that does. Raises InputError: see _tf32.
    """
    kind = vector.device.type
    if (
        kind == "cpu"
        and not torch.is_autocast_enabled(kind)
        and not torch.is_inference_mode_enabled()
    ):
        return _WHOLE.held()  # a step of a small model would feel the rest
    return _all_digits(kind)


@contextmanager
def _all_digits(kind: str) -> Iterator[None]:
    with ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(_tf32(False))
            stack.enter_context(_same_order())
        else:
            stack.enter_context(_WHOLE.held())
        stack.enter_context(without_autocast(kind))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Have a kind of device compute in the types of the numbers."""
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def fewer_digits(model: "FlatModel") -> AbstractContextManager[object]:
    """Let products be as the model's precision says, within all_digits; autocast is by itself.

    For numbers that are measured before they are added, and never for what adds them.
    """
    reduced = model.precision != "float32" and model.vector.device.type == "cuda"
    return _tf32(True) if reduced else nullcontext()


def autocast(model: "FlatModel") -> AbstractContextManager[object]:
    """Have a forward pass use bfloat16 where the model's precision is that; see torch.autocast."""
    if model.precision != "bf16":
        return nullcontext()
    # Without its cache of weights, which a captured pass would read anew as they were.
    return torch.autocast(model.vector.device.type, torch.bfloat16, cache_enabled=False)


def check_unwritten(module: nn.Module, x: Tensor, version: int) -> None:
    """Raise ModelError where the module wrote over x, of which `version` was x._version before.

    torch counts how often a tensor is written to, by whatever view and even with what it holds.
    """
    if x._version != version:
        refuse_writing(module)


def refuse_writing(module: nn.Module) -> NoReturn:
    """Raise ModelError: the module writes over its input."""
    raise ModelError(
        f"model {type(module).__name__} writes over its input, so the records would be others "
        "after every pass: build its first layers without inplace=True, and write x = x - 1 "
        "for x -= 1"
    )


class FlatModel:
    """A module whose trainable parameters are views of one vector.

    vector: w [d], contiguous, in the order of `module.named_parameters()`; writing to it changes
    the model, and `load` is the way to set it. A parameter shared by two modules stands in it once.
    own: the trainable parameters by name, as views of the vector.
    precision: of the passes that a kernel makes over the model.
    Raises ModelError: no trainable parameter, or trainable parameters of several types or devices.
    """

    def __init__(self, module: nn.Module, precision: Precision = "float32") -> None:
        self.module, self.precision = module, precision
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ModelError(
                f"model {type(module).__name__} has no trainable parameter: "
                "set requires_grad on at least one"
            )
        kinds = {(p.dtype, p.device) for p in trainable.values()}
        if len(kinds) > 1:
            raise ModelError(
                f"model {type(module).__name__} mixes {sorted(map(str, kinds))}: "
                "expected trainable parameters of one type on one device; convert it with .to(...)"
            )
        self._shapes = {name: p.shape for name, p in trainable.items()}
        ends = [0]
        for p in trainable.values():
            ends.append(ends[-1] + p.numel())
        self._slices = {
            name: slice(*ends) for name, ends in zip(trainable, pairwise(ends), strict=True)
        }
        with torch.no_grad():
            self.vector = torch.cat([p.detach().reshape(-1) for p in trainable.values()])
            self.own = dict(self.views(self.vector))
            for name, view in self.own.items():
                trainable[name].data = view

    @property
    def size(self) -> int:
        """d, the number of trainable parameters."""
        return self.vector.numel()

    def load(self, w: Tensor) -> None:
        """Set the model's weights to w [d]. Raises ModelError for another shape."""
        if w.shape != self.vector.shape:
            raise ModelError(
                f"w has shape {tuple(w.shape)}: the model has {self.size} trainable parameters; "
                "check that the vector comes from the same model"
            )
        if w is not self.vector:
            self.vector.copy_(w.detach())

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view) of any vector [d] laid out as this model's."""
        for name, part in self._slices.items():
            yield name, vector[part].view(self._shapes[name])
