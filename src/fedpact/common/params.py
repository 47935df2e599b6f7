"""A model's parameters as one contiguous vector w ∈ R^d, with the model's weights as views of it.

Frozen parameters (requires_grad = False) and buffers are not part of it: they are constants, equal
at every site, and never cross the wire. A buffer that training changes would leak statistics of
records past the oracle, so such a model is refused.

On a GPU the host must not read numbers during a step: reading waits for all queued work, and the
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

TOKENS: Final = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids")
"""The rows of a tokenised record, in order, by their names in Hugging Face models."""

from_numpy = cast(Callable[[NDArray[Any]], Tensor], torch.from_numpy)  # pyright: ignore[reportUnknownMemberType]

Precision = Literal["float32", "tf32", "bf16"]
"""The precision of products in forward and backward passes."""


def all_finite(vector: Tensor) -> bool:
    """Return whether every entry is finite; true for an empty vector.

    >>> all_finite(torch.tensor([1.0, torch.inf])), all_finite(torch.tensor([3e38, 3e38]))
    (False, True)
    """
    # If the sum is finite, so are all entries, and it takes a fortieth of the time. A sum of finite
    # numbers may overflow, though.
    return bool(vector.sum().isfinite()) or bool(vector.isfinite().all())


def on_cpu(tensor: Tensor) -> bool:
    """Whether the host can read the numbers without waiting for a device."""
    return tensor.device.type == "cpu"


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied from the CPU without waiting.

    A GPU reads pinned memory by itself; with other memory the host would wait.
    """
    if device.type == "cuda" and on_cpu(tensor):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state for a file: unshared, contiguous tensors."""
    state = module.state_dict()
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in state.items()}


def model_name(module: nn.Module) -> str:
    """Return a model's name in messages: its class, or the name that a wrapper module gives."""
    return str(getattr(module, "called", type(module).__name__))


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of torch's threads for this thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Restore each part's training or evaluation mode after the block."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def init_worker_thread() -> None:
    """Initialise a pool's thread: torch computes on it alone, and does not flush denormals.

    torch initialises a thread's number of threads at the first operation that needs it, from what
    any other thread has set last, which would override the number set here. So it is read first.
    Flushing of denormals is inherited from the starting thread.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


def one_thread() -> AbstractContextManager[None]:
    """Let torch use one thread inside the block.

    While workers use every core, torch's threads only wait for each other: adding the vectors of
    ten sites took seven times as long on two threads as on one. Between rounds, two threads on one
    core wait for the scheduler: 6 ms for a sum that takes 0.1 ms on one thread.
    """
    return threads(1)


class _Whole:
    """Keeps oneDNN's float32 products at full precision while any thread needs it.

    The settings belong to the process, so they are restored when the last thread is done.
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
    """Allow or forbid TF32 on a GPU, by the older of torch's interfaces, which tracing reads."""
    backends = cast(Any, torch.backends)
    try:
        before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    except RuntimeError:
        raise InputError(
            "torch's settings of TF32 contradict each other (both fp32_precision and allow_tf32 "
            "were set), so torch cannot trace a model: set torch.backends.cuda.matmul."
            "allow_tf32 = torch.backends.cudnn.allow_tf32 = False; sums do not use TF32 anyway"
        ) from None
    try:
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = allowed
        yield
    finally:
        backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before


@contextmanager
def _same_order() -> Iterator[None]:
    """Use torch's deterministic algorithms on a GPU, where it has them."""
    switch, memory = torch.use_deterministic_algorithms, cast(Any, torch.utils).deterministic
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = memory.fill_uninitialized_memory
    # Torch warns without this, although with a single stream cuBLAS is deterministic anyway.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        switch(True, warn_only=True)
        # Filling fresh memory with NaN only takes time, as it is written before it is read.
        memory.fill_uninitialized_memory = False
        yield
    finally:
        switch(before, warn_only=only_warns)
        memory.fill_uninitialized_memory = fills


def all_digits(vector: Tensor) -> AbstractContextManager[None]:
    """Compute at full precision inside the block, whatever the caller has set in torch.

    TF32 and bfloat16 products, and autocast, would give norms with 8 to 11 bits; inference mode
    prevents differentiation. A GPU uses deterministic algorithms, where torch has them. Raises
    InputError: see _tf32.
    """
    kind = vector.device.type
    if (
        kind == "cpu"
        and not torch.is_autocast_enabled(kind)
        and not torch.is_inference_mode_enabled()
    ):
        return _WHOLE.held()  # the rest would slow down steps of small models
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
    """Disable autocast for a kind of device."""
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def fewer_digits(model: "FlatModel") -> AbstractContextManager[object]:
    """Use the model's reduced precision for products, within all_digits; see also `autocast`.

    Only for computing gradients, never for norms, clipping or sums.
    """
    reduced = model.precision != "float32" and model.vector.device.type == "cuda"
    return _tf32(True) if reduced else nullcontext()


def autocast(model: "FlatModel") -> AbstractContextManager[object]:
    """Use bfloat16 in a forward pass if that is the model's precision; see torch.autocast."""
    if model.precision != "bf16":
        return nullcontext()
    # Without autocast's cache of weights, which a captured pass would replay.
    return torch.autocast(model.vector.device.type, torch.bfloat16, cache_enabled=False)


def check_unwritten(module: nn.Module, x: Tensor, version: int) -> None:
    """Raise ModelError if the module has written to x; version: x._version from before.

    torch counts every write to a tensor, through any view.
    """
    if x._version != version:
        refuse_writing(module)


def refuse_writing(module: nn.Module) -> NoReturn:
    """Raise ModelError: the module writes to its input."""
    raise ModelError(
        f"model {type(module).__name__} writes to its input, so every pass would change the "
        "records: build its first layers without inplace=True, and write x = x - 1 instead of "
        "x -= 1"
    )


class FlatModel:
    """A module whose trainable parameters are views of one vector.

    vector: w [d], contiguous, in the order of `module.named_parameters()`; writing to it changes
    the model, and `load` sets it. A parameter shared by two modules is contained once.
    own: the trainable parameters by name, as views of the vector.
    precision: of a kernel's passes through the model.
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
