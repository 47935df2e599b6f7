"""In place of a run of a comparison, in its process: acts on the name of the run's folder.

Imports nothing of the package, so that a process begins at once. Two rounds where nothing else is
asked.
"""

import os
import signal
import sys
import time
from pathlib import Path


def work(says, stopping, plan, folder):
    what = Path(folder).parent.name
    Path(folder).with_suffix(".pid").write_text(str(os.getpid()))
    if what == "interrupted":
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(plan["rounds"]):
        says.send(("round", number, None if number else 0.25, None))
        if what == "slow":
            if stopping.wait(600):
                return None
            sys.exit(5)
        if what == "deaf":
            time.sleep(600)
    if what.startswith("meets"):
        # Each waits for the other before it ends: one after the other, neither would.
        places = [Path(folder).parents[1] / f"met-{name}" for name in ("meets1", "meets2")]
        (Path(folder).parents[1] / f"met-{what}").touch()
        until = time.monotonic() + 600
        while not all(place.exists() for place in places):
            if time.monotonic() > until:
                sys.exit(4)
            time.sleep(0.02)
    if what == "refuses":
        return "the paragraph"
    if what == "crashes":
        print("noise", file=sys.stderr)
        raise RuntimeError("a bug")
    if what == "dies":
        # In the middle of a message.
        os.write(says.fileno(), b"\x00\x00")
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "silent":
        sys.exit(3)
    if what == "prints":
        sys.stdout.reconfigure(line_buffering=False, write_through=False)
        print("of this run")
    if what == "floods":
        sys.stderr.write("x" * 1_000_000)
    return None


def refuse(*_):
    return "a paragraph"
