"""One run of a comparison in a process of its own: `python -m fedpact.studies.worker`.

Standard input: {"plan": plan.json's content, "folder": path, "path": where modules lie}. Standard
output: one JSON object a line, {"round": r, "accuracy": a or null, "loss": likewise} after each
round and at most one {"error": paragraph}. What else the run prints goes to standard error. Exit
code 0: ended, or stopped by an interrupt after the round under way; 2: refused, with an error line;
else a bug, with a traceback.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from fedpact.common.errors import FedpactError


class _Stop:
    """True from the first interrupt on."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGINT, self._ask)

    def __call__(self) -> bool:
        return self._asked

    def _ask(self, *_: object) -> None:
        self._asked = True


def main() -> int:
    """Carry out the run that standard input names; return the exit code."""
    stop = _Stop()
    channel = _channel()
    # What is loaded stays; see deployment/party.py.
    gc.disable()
    from fedpact.api import run
    from fedpact.common.records import RoundRecord, strict
    from fedpact.plan import Plan

    gc.freeze()
    gc.enable()

    def say(**line: Any) -> None:
        # Whoever reads may have died: the broken pipe then ends this process, too.
        print(json.dumps(strict(line), allow_nan=False), file=channel, flush=True)

    def on_round(record: RoundRecord) -> None:
        say(round=record.round, accuracy=record.accuracy, loss=record.loss)

    asked = json.load(sys.stdin)
    sys.path += [place for place in asked["path"] if place not in sys.path]
    try:
        run(Plan.parse(asked["plan"]), Path(asked["folder"]), on_round=on_round, stop=stop)
    except FedpactError as error:
        say(error=str(error))
        return 2
    return 0


def _channel() -> TextIO:
    """Keep standard output for the lines above, and send all other output to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


if __name__ == "__main__":
    sys.exit(main())
