"""Where a deployment's time goes: Flower's part, ours, and the in-process engine's whole round.

    python benchmarks/deployment.py [key=value ...]        over the embedded default, 3 sites

A federation of processes on this machine, TLS and keys on, then the same plan in process. Prints,
for each round: the time of the round; the slowest site's own work (its oracle, ledger, disk and
signature); the server's own work; what is left, which is Flower's (TLS and its
messages' way through the SuperLink); and the round in process.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

from fedpact.deployment import processes
from fedpact.deployment.files import write_deployment
from fedpact.plan import Plan
from fedpact.simulation.simulate import simulate

SITE = re.compile(r"round (\d+): replied; .*, in ([\d.]+) s")
SERVER = re.compile(r"round (\d+): [\d.]+ s waiting, ([\d.]+) s own work")


def by_round(path: Path, pattern: re.Pattern[str]) -> dict[int, float]:
    """Return round -> seconds as a party's log has them."""
    found = pattern.findall(path.read_text(encoding="utf-8"))
    return {int(number): float(seconds) for number, seconds in found}


def run_all_parties(directory: Path) -> Path:
    """Start all parties, wait for the server to end, stop the rest; return the run's folder.

    Raises RuntimeError: the server ended without a run.
    """
    with processes.Parties(directory) as here:
        here.start()
        while here.runs(processes.SERVER):
            time.sleep(0.5)
        how = processes.describe_end(here.exit_code(processes.SERVER))
    run = directory / processes.SERVER / "run"
    if not (run / "summary.json").exists():
        said = processes.last_log_lines(directory, processes.SERVER)
        raise RuntimeError(f"the server {how}, before its run: {said}")
    return run


def main() -> None:
    """Run both and print a table."""
    plan = Plan.read(None, ["sites=3", "rounds=8", "run.evaluate_every=100", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "deployment"
        federation = write_deployment(directory, plan, port=18944, seeds="test")
        lines = (run_all_parties(directory) / "rounds.jsonl").read_text().splitlines()
        total = {r["round"]: r["seconds"] for r in map(json.loads, lines)}
        server = by_round(directory / "server" / "log.txt", SERVER)
        sites = [by_round(directory / "sites" / n / "log.txt", SITE) for n in federation.names]
        alone = {r.round: r.seconds for r in simulate(plan, Path(name) / "run").records}
    print("round  whole s  sites' s  server's s  Flower's s  ours/Flower's  in process s")
    for number in sorted(server):
        slowest = max(site[number] for site in sites)
        ours = slowest + server[number]
        flower = total[number] - ours
        print(
            f"{number:5}  {total[number]:7.2f}  {slowest:8.3f}  {server[number]:10.3f}  "
            f"{flower:10.2f}  {ours / flower:13.1%}  {alone[number]:12.3f}"
        )


if __name__ == "__main__":
    main()
