"""Features of somebody's own: factory(shape) -> a frozen nn.Module, given one record at a time.

A module is given each record alone, as a batch of one, with the random state of every other. What
it holds (see held) is put back after each; where its weights or buffers had become others, the
record is left out. What is kept elsewhere, as in a variable of its file, is tried on made-up
records in two orders: a factory is code that its users answer for. Its weights are those that the
factory leaves, or those of a file of safetensors or of torch, whose SHA-256 the plan names.
"""

import hashlib
import inspect
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpact.errors import ModelError
from fedpact.features.held import ModuleSnapshot
from fedpact.features.settings import FeatureSettings
from fedpact.models.weights import read_checked, tensors_of
from fedpact.own.digests import stable_digest
from fedpact.own.named import own_factory
from fedpact.params import one_thread

_logger = logging.getLogger("fedpact")
_FORM = "factory(shape) -> nn.Module"
# The random state is the process's: two threads of one would draw from each other's.
_ONE_AT_A_TIME = threading.RLock()
_TOLD = 32  # numbers of an answer


def _anew() -> None:
    """In a fork, whose parent may have been within, nobody is."""
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.RLock()


os.register_at_fork(after_in_child=_anew)


class Backbone:
    """A frozen module: records [1, *shape] -> numbers [1, ...], the same for equal records.

    shape: a record's. seed: what weights are drawn from where the factory draws some. at: where a
    relative `weights` is looked for. Raises ModelError: the factory, the file, or what comes out.
    """

    def __init__(
        self, settings: FeatureSettings, shape: tuple[int, ...], seed: int, at: Path
    ) -> None:
        self._name = f"features.kind = {settings.kind!r}"
        # Kept, so that no other has its identity while this is known by it.
        self._factory = factory_of(settings.kind)
        # Of now: whoever edits the file while a run goes on has not changed what it computes.
        self.source = _source_of(self._factory)
        with _ONE_AT_A_TIME, one_thread(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                module = self._factory(shape)
            except (Exception, SystemExit) as error:
                raise ModelError(
                    f"{self._name}: calling it with shape {shape} failed with "
                    f"{type(error).__name__}: {error}; expected {_FORM}"
                ) from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"{self._name} returned {type(module).__name__}: expected {_FORM}")
        if settings.weights is not None:
            self._fill(module, at / settings.weights, settings.sha256)
        self._module, self._seed = module.eval(), seed
        try:
            self._held = ModuleSnapshot(module)
        except TypeError as error:
            raise ModelError(
                f"{self._name} holds {error}: expected dense tensors with values in the CPU's "
                "memory; of lazy layers, have the factory call the module once"
            ) from None
        self._try(shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a record's features [p] as float32, of x [1, *shape], times some power of two.

        The largest is in [0.5, 1) then, unless all are 0, so that no length is beyond float32.
        Raises ModelError: another form, or a module that changes itself; and whatever it raises.
        """
        with _ONE_AT_A_TIME, one_thread():
            found = self._asked(x)
        if not isinstance(found, Tensor) or found.dim() < 2 or len(found) != 1:
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ModelError(
                f"{self._name} answers a batch of one record with {what}: expected [1, ...]"
            )
        if found.is_complex() or not found.numel():
            raise ModelError(
                f"{self._name} answers a record with {found.numel()} numbers of {found.dtype}: "
                "expected at least one, and real numbers, as torch.view_as_real makes of others"
            )
        values = found.detach().reshape(-1).double().numpy()
        exponent = np.frexp(np.abs(values).max())[1]
        return torch.from_numpy(np.ldexp(values, -exponent)).float()

    def _asked(self, x: Tensor) -> Any:
        """Return what the module answers, with all that it holds put back."""
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                found = self._module(x.clone())
        except (Exception, KeyboardInterrupt):  # the latter is the user's, as far as one can tell
            raise
        except BaseException as error:  # as of sys.exit(): at a record it must not end a party
            raise RuntimeError(f"{self._name} raised {type(error).__name__}") from error
        finally:
            changed = self._held.put_back()
        if changed:
            raise ModelError(
                f"{self._name} changes its own weights, buffers or mode at a record, which the "
                "next one would tell of: expected a module that leaves them as they are; what it "
                "fills at its first call, have the factory fill by a call of its own"
            )
        return found

    def _try(self, shape: tuple[int, ...]) -> None:
        """Raise ModelError where made-up records are answered otherwise in another order."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(1, *shape, generator=generator)
        made = [torch.zeros(1, *shape), torch.ones(1, *shape), drawn]
        with torch.no_grad():
            self.width = self._width(made[0])
            once = [self._answer(x) for x in made]
            self.answer = self._shown(drawn)
            again = [self._answer(x) for x in reversed(made)][::-1]
        of = (*self._module.parameters(), *self._module.buffers())
        state = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in of]
        # Of code in other files than the factory's: what it refers to, and what it answers.
        code = stable_digest(self._module).encode()
        self.fingerprint = hashlib.sha256(b"".join([code, *state, *once])).hexdigest()
        if len(set(once)) == 1:
            _logger.warning(
                "%s answers zeros, ones and drawn numbers with the same: a model of it learns "
                "nothing, unless records are of another kind",
                self._name,
            )
        if once != again:
            raise ModelError(
                f"{self._name} answers a record otherwise after others: expected a module without "
                "state of its own and without random numbers but torch's"
            )

    def _width(self, zeros: Tensor) -> int:
        try:
            return len(self(zeros))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self._name} failed at a record of zeros with {type(error).__name__}: {error}; "
                "expected numbers, which say how many a record has"
            ) from error

    def _shown(self, x: Tensor) -> tuple[float, ...]:
        """Return how an answer begins, of unit length; () where it fails."""
        try:
            found = self(x)
        except Exception:  # whatever a module raises at what is no record of its own
            return ()
        return tuple(F.normalize(found[None])[0, :_TOLD].tolist())

    def _answer(self, x: Tensor) -> bytes:
        try:
            return self(x).numpy().tobytes()
        except ModelError:
            raise
        except Exception as error:  # whatever a module raises at what is no record of its own
            return repr(type(error)).encode()

    def _fill(self, module: nn.Module, path: Path, sha256: str | None) -> None:
        block = read_checked(path, sha256, "features.weights")
        tensors = tensors_of(path, block, "features.weights")
        try:
            module.load_state_dict(tensors)
        except Exception as error:
            raise ModelError(
                f"features.weights: {path} does not fill the module of {self._name} "
                f"({type(error).__name__}: {error}): expected its state_dict, as "
                "safetensors.torch.save_file or torch.save writes it"
            ) from error


def factory_of(kind: str) -> Callable[..., Any]:
    """Return what a 'package.module:factory' names at this moment. Raises ModelError."""
    return own_factory(kind, "features.kind", (), _FORM)


def _source_of(factory: Callable[..., Any]) -> str:
    """Return the SHA-256 of the file that a factory is in, "" where there is none."""
    path = Path(getattr(inspect.getmodule(factory), "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
