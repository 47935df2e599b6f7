"""One party's process, started by `local`: `python -m fedpact.deployment.party KIND DIRECTORY`."""

import gc
import sys
from pathlib import Path

from fedpact.common.errors import FedpactError


def main() -> None:
    """Run the party that the command line names."""
    # Loaded modules stay alive. Collecting garbage among them, during the imports and at exit,
    # would take a quarter of a party's time outside its rounds.
    gc.disable()
    from fedpact.deployment.processes import run_server, run_site
    from fedpact.deployment.server import print_round

    gc.freeze()
    gc.enable()
    kind, where = sys.argv[1], Path(sys.argv[2])
    try:
        if kind == "server":
            print(f"ended: {run_server(where, print_round)['status']}", flush=True)
        else:
            run_site(where)
    except FedpactError as error:
        print(f"fedpact: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
