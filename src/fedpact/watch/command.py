"""`fedpact watch`: the page until Ctrl-C, or one look."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedpact.text import upper
from fedpact.watch import serving
from fedpact.watch.snapshot import take_snapshot


def watch(directory: Path, port: int, once: bool, as_json: bool) -> None:
    """Carry out `fedpact watch`."""
    out = Console(highlight=False, soft_wrap=True)
    if once or as_json:
        found = take_snapshot(directory)
        told = serving.encode_json(found) if as_json else "\n".join(_lines(found))
        out.print(told, markup=False)
        return
    with serving.create_server(directory, port) as server:
        where = serving.address(server)
        out.print(f"{where} shows {directory}, {where}metrics is for Prometheus; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("ended")


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['name']}: {found['status']}, round {found['round']} of {found['rounds']}"
    if found["kind"] == "site":
        for run, each in found["ledger"].items():
            yield f"  {run}: ε {upper(each['epsilon_spent'])} of {upper(each['epsilon_reserved'])}"
        codes = ", ".join(f"{code} {count}" for code, count in found["refusals"].items())
        yield f"  {found['answers']} answers; refusals: {codes or 'none'}"
        return
    yield f"  {found['bytes_down']:,} bytes down, {found['bytes_up']:,} up"
    for site, each in found["sites"].items():
        told = f"  {site}:"
        if each["epsilon_spent"] is not None:
            told += f" ε {upper(each['epsilon_spent'])}"
        if each["seconds"] is not None:
            told += f" {each['seconds']:.3f} s" + (" and waiting" if each["waiting"] else "")
        yield told + "".join(f" {code} {count}" for code, count in each["refusals"].items())
