"""Bits a coordinate on the wire of a deployment on this machine: three sites, TLS, signatures.

    FEDPACT_DATA=DIR python -m experiments.fewer_bytes.deployed [MODEL]

Fashion-MNIST, fedavg with one step a round. Prints, for plain replies, and under masks for noise
shared out and each site's own, bits a coordinate up and down in the messages: of the first round,
before which all have the model, and of the later ones. Then kB a site and round through the
sockets, counted by a relay between sites and server over the whole run, beside the messages' own:
what Flower, HTTP and TLS add, a site's looking for work among it. Results are stored
(deployed.json).
"""

import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.deployment import run_all_parties
from experiments.made import made

import fedpact
from fedpact.common.messages import RoundRecord
from fedpact.deployment.files import write_deployment

HERE = Path(__file__).parent
SITES = 3
SUM = {
    "secure_aggregation": {"threshold": 3},
    "privacy": {"trust": "sum", "honest": 2, "accountant": "rdp"},
}
OWN = {"secure_aggregation": {"threshold": 3}}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "masked": SUM, "masked, own noise": OWN}


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


@contextmanager
def relay(port: int, server: int) -> Generator[Counter[str]]:
    """Hand connections to `port` on to `server`; yield how many bytes went up and down."""
    counted, loop = Counter[str](), asyncio.new_event_loop()

    async def pump(way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while block := await reader.read(2**16):
                counted[way] += len(block)
                writer.write(block)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", server)
        except OSError:
            # The server has not started yet, or has ended.
            writer.close()
            return
        await asyncio.gather(pump("up", reader, there[1]), pump("down", there[0], writer))

    loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", port))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    yield counted
    loop.call_soon_threadsafe(loop.stop)


def deployed(chosen: fedpact.Plan, port: int) -> tuple[list[RoundRecord], int, Counter[str]]:
    """Carry a deployment out and return its rounds, d, and what went through the sockets."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "d"
        write_deployment(directory, chosen, port=port)
        allow(directory)
        for site in directory.glob("sites/*/federation.toml"):
            text = site.read_text(encoding="utf-8")
            site.write_text(text.replace(f":{port}", f":{port + 50}"), encoding="utf-8")
        with relay(port + 50, port) as counted:
            run = run_all_parties(directory)
        lines = (run / "rounds.jsonl").read_text().splitlines()
        summary = json.loads((run / "summary.json").read_text())
    d = summary["model_parameters"]
    print(f"d = {d}", flush=True)
    return [RoundRecord.from_json(line) for line in lines], d, counted


def main(model: str) -> None:
    """Carry each out, and print and store what they sent."""
    stored = HERE / "deployed.json"
    found = json.loads(stored.read_text()) if stored.exists() else {}
    for number, (name, tables) in enumerate(KINDS.items()):
        if f"{model}/{name}" not in found:
            records, d, counted = deployed(plan(model, tables), 19300 + number)
            bits = [
                {"up": 8 * r.bytes_up / d / SITES, "down": 8 * r.bytes_down / d / SITES}
                for r in records[1:]
            ]
            share = 1e3 * SITES * len(bits)
            sockets = {
                "up": [counted["up"] / share, sum(r.bytes_up for r in records) / share],
                "down": [counted["down"] / share, sum(r.bytes_down for r in records) / share],
            }
            figures = {"d": d, "rounds": bits, "sockets": sockets, "made": made()}
            found[f"{model}/{name}"] = figures
            stored.write_text(json.dumps(found, indent=1) + "\n")
        rounds = found[f"{model}/{name}"]["rounds"]
        for told, some in (("first", rounds[:1]), ("later", rounds[1:])):
            mean = {way: sum(r[way] for r in some) / len(some) for way in ("up", "down")}
            print(f"| {name} | {told} | {mean['up']:.2f} | {mean['down']:.2f} |", flush=True)
        for way, (whole, own) in found[f"{model}/{name}"]["sockets"].items():
            print(f"| {name} | {way} | {whole:.1f} | {own:.1f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mlp")
