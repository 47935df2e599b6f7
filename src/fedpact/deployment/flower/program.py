"""One of Flower's programs, in a process that ends when the program's main thread does.

    python -P program.py NAME ARGUMENTS...

A SuperNode's main thread asks the server for work, and a second one serves the SuperNode's own
site. What the first raises ends that thread alone: an error of TLS, as from a server that is killed
in the midst of a handshake, is one after which it does not try again. The second thread then keeps
the process alive and goes on answering that there is no work, so that nobody notices.
"""

import gc
import logging
import os
import sys
import traceback
from importlib.metadata import entry_points


def run_script(name: str) -> int:
    """Run the console script `name` with this process's arguments; return how it ended."""
    try:
        (script,) = entry_points(group="console_scripts", name=name)
        # What is loaded stays; see deployment/party.py.
        gc.disable()
        program = script.load()
        gc.freeze()
        gc.enable()
        program()
        return 0
    except SystemExit as end:
        # None and text are what `sys.exit` takes, too.
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a second signal while it ends is a KeyboardInterrupt
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    status = run_script(sys.argv[0])
    logging.shutdown()
    sys.stdout.flush()
    # Whatever other threads it has left.
    os._exit(status)
