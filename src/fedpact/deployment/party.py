"""`python -m fedpact.deployment.party KIND DIRECTORY`: one party's process, as `local` starts
it.
"""

import gc
import sys
from pathlib import Path

from fedpact.common.errors import FedpactError
from fedpact.common.records import RoundRecord


def main() -> None:
    """Run the party that the command line names."""
    # What is loaded stays. To look through it for waste, while it is loaded and again when the
    # interpreter ends, is a quarter of what a party's process takes beside its rounds.
    gc.disable()
    from fedpact.deployment.processes import run_server, run_site

    gc.freeze()
    gc.enable()
    kind, where = sys.argv[1], Path(sys.argv[2])
    try:
        if kind == "server":
            print(f"ended: {run_server(where, _tell)['status']}", flush=True)
        else:
            run_site(where)
    except FedpactError as error:
        print(f"fedpact: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _tell(record: RoundRecord) -> None:
    # To the last digit: rounded down it would be no bound.
    spent = ", ".join(f"{site} {epsilon!r}" for site, epsilon in record.epsilon.items())
    alone = ", ".join(f"{site} {epsilon!r}" for site, epsilon in record.epsilon_alone.items())
    spent += f"; if no other site's noise counts: {alone}" if alone else ""
    refused = "".join(f", {site}: {code}" for site, code in record.refused.items())
    told = f"ε, each at its site's δ, adjacency and accountant as in plan.json: {spent}"
    print(f"round {record.round}: {told}{refused}", flush=True)


if __name__ == "__main__":
    main()
