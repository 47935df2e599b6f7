"""Bits a coordinate on the wire of a deployment on this machine: three sites, TLS, signatures.

    FEDPACT_DATA=DIR python experiments/fewer_bytes/deployed.py [MODEL]

Fashion-MNIST, fedavg with one step a round. Prints, for plain replies and for noise shared out
under masks, bits a coordinate up and down: of the first round, before which all have the model,
and of the later ones. Results are stored (deployed.json).
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import fedpact
from fedpact.common.messages import RoundRecord
from fedpact.deployment import local
from fedpact.deployment.files import Choices, write_deployment

HERE = Path(__file__).parent
SITES = 3
SUM = {
    "secure_aggregation": {"threshold": 3},
    "privacy": {"trust": "sum", "honest": 2, "accountant": "rdp"},
}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "masked": SUM}


def plan(model: str, tables: dict[str, Any]) -> fedpact.Plan:
    """Return the deployment's plan."""
    return fedpact.Plan.parse(
        {
            "data": "fashion_mnist",
            "model": model,
            "rounds": 6,
            "sites": SITES,
            "sampling_rate": 0.01,
            "compression": {"kind": "grid"},
            "privacy": {"accountant": "rdp"},
            **tables,
        }
    )


def allow(directory: Path) -> None:
    """Each owner says that it relies on the others: takes the lines out of their comment."""
    for path in directory.glob("sites/*/policy.toml"):
        text = path.read_text()
        for name in ("honest", "epsilon_alone_per_run", "epsilon_alone_ever"):
            text = text.replace(f"# {name} =", f"{name} =")
        path.write_text(text)


def deployed(chosen: fedpact.Plan, port: int) -> tuple[list[RoundRecord], int]:
    """Carry a deployment out and return its rounds, and d."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "d"
        write_deployment(directory, chosen, Choices(port=port))
        allow(directory)
        run = local.run_all_parties(directory)
        lines = (run / "rounds.jsonl").read_text().splitlines()
        summary = json.loads((run / "summary.json").read_text())
    d = summary["model_parameters"]
    print(f"d = {d}", flush=True)
    return [RoundRecord.from_json(line) for line in lines], d


def main(model: str) -> None:
    """Carry both out, and print and store what they sent."""
    stored = HERE / "deployed.json"
    found = json.loads(stored.read_text()) if stored.exists() else {}
    for number, (name, tables) in enumerate(KINDS.items()):
        if f"{model}/{name}" not in found:
            records, d = deployed(plan(model, tables), 19300 + number)
            bits = [
                {"up": 8 * r.bytes_up / d / SITES, "down": 8 * r.bytes_down / d / SITES}
                for r in records[1:]
            ]
            found[f"{model}/{name}"] = {"d": d, "rounds": bits}
            stored.write_text(json.dumps(found, indent=1) + "\n")
        rounds = found[f"{model}/{name}"]["rounds"]
        for told, some in (("first", rounds[:1]), ("later", rounds[1:])):
            mean = {way: sum(r[way] for r in some) / len(some) for way in ("up", "down")}
            print(f"| {name} | {told} | {mean['up']:.2f} | {mean['down']:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp")
