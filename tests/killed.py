"""A process that is killed between two changes of the disk: none after that one is made."""

import contextlib
from pathlib import Path

from fedpact.privacy.ledger.hash_chain import HashChain


class Killed(BaseException):
    """No code of the process sees it: nothing that it does leaves a trace any more."""


@contextlib.contextmanager
def killed_after(monkeypatch, changes):
    """Kill the block once so many changes are made; gives a list that has something if it was."""
    made, died = 0, []

    def counted(real):
        def call(*args, **more):
            nonlocal made
            made += 1
            if made > changes:
                died.append(made)
                raise Killed
            return real(*args, **more)

        return call

    with monkeypatch.context() as patch:
        for home, name in ((Path, "replace"), (Path, "unlink"), (HashChain, "append")):
            patch.setattr(home, name, counted(getattr(home, name)))
        with contextlib.suppress(Killed):
            yield died
