"""Waiting for what has to happen, for as long as anything happens at all.

A machine that is busy with other work makes everything late, and nothing wrong. So no wait has an
end of its own: it ends when the files of a deployment have not changed for `STILL` seconds, which
is what a federation that hangs looks like.
"""

import time

STILL = 600.0


def signs_of_life(directory):
    """What changes while a federation does anything: its files' lengths and times."""
    found = {}
    for path in directory.rglob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # replaced meanwhile
        found[path] = status.st_size, status.st_mtime_ns
    return found


def wait_for(condition, directory, pause=0.5):
    """Return when the condition holds; fail when nothing in the directory changes any more."""
    last, since = {}, time.monotonic()
    while not condition():
        found = signs_of_life(directory)
        if found != last:
            last, since = found, time.monotonic()
        assert time.monotonic() - since < STILL, "nothing happens any more"
        time.sleep(pause)
