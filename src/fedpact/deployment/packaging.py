"""Writes container, compose, Helm and systemd files that run a party's directory.

Sources: https://docs.docker.com/reference/dockerfile/, https://compose-spec.io,
https://helm.sh/docs/topics/charts/, https://www.freedesktop.org/software/systemd/man/systemd.exec

A party's directory is mounted as it is. A site's `records` is mounted again read-only, and
`ledger` from a volume that is never lost or restored. So the paths in site.toml are right both in
and outside a container. A party is not restarted after exit code 2 (a person must act, see
common.errors) or 0 (the run has ended). The templates are in packages/.
"""

import json
import re
import shutil
from collections.abc import Iterable
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import Final, Literal

from fedpact.common.files import safe_name
from fedpact.deployment.processes import SERVER, parties

Form = Literal["compose", "helm", "systemd", "flower"]

SERVER_HOSTS: Final[dict[str, str]] = {
    "compose": SERVER,
    "helm": "fedpact-server",
    "flower": "superlink",
}
"""The server's default host name for sites; as a Flower app they do not connect to it."""

_LONGEST_LABEL: Final = 40  # Kubernetes allows 63, including prefixes

_LEFT_OUT: Final = " ".join(
    f"--exclude=./{name}"
    for name in ("records", "ledger", "test.npz", "site.db*", "run", "flower", "log.txt")
)

_PACKAGES: Final = Path(__file__).with_name("packages")
_APP: Final = Path(__file__).parent / "flower" / "app"

_NEXT: Final = {
    "compose": """
## With Docker Compose

The whole federation on one machine. Sites reach the server by the name of its service, so
`--host` is of no use here. INDEX is the address of PyTorch's CPU wheels.

    pip wheel --no-deps fedpact
    docker compose build --build-arg PIP_EXTRA_INDEX_URL=INDEX
    FEDPACT_USER=$(id -u):$(id -g) docker compose up
""",
    "helm": """
## With Helm

`helm/README.md` has the commands.
""",
    "systemd": """
## With systemd

`pip wheel --no-deps fedpact` writes fedpact's wheel. INDEX is the address of PyTorch's CPU wheels.
On each machine, as root, for a site; for the server `fedpact-server.service` and `server`:

    python3.11 -m venv /opt/fedpact
    PIP_EXTRA_INDEX_URL=INDEX /opt/fedpact/bin/pip install --require-hashes -r deploy.lock
    /opt/fedpact/bin/pip install --no-index --no-deps --no-build-isolation fedpact-*.whl
    useradd --system fedpact
    install -d -m 700 -o fedpact -g fedpact /var/lib/fedpact
    cp -r sites/NAME /var/lib/fedpact/NAME && chown -R fedpact:fedpact /var/lib/fedpact/NAME
    cp systemd/fedpact-site@.service /etc/systemd/system/
    systemctl enable --now fedpact-site@NAME
""",
}
"""What README.md adds for each form."""


def write_package(directory: Path, form: Form, port: int) -> None:
    """Write the files that run a deployment's parties. directory: as written by write_deployment.

    port: the server's. For containers a site's ledger and records get separate directories.
    """
    places = parties(directory)
    sites = {name: where for name, where in places.items() if name != SERVER}
    if form == "flower":
        return _write_app(directory, sites)
    with (directory / "README.md").open("a", encoding="utf-8") as readme:
        readme.write(_NEXT[form])
    if form in ("helm", "systemd"):
        shutil.copytree(_PACKAGES / form, directory / form)
    shutil.copyfile(Path(__file__).with_name("deploy.lock"), directory / "deploy.lock")
    if form == "systemd":
        return
    for where in sites.values():
        _move_records_and_ledger(where)
    shutil.copytree(_PACKAGES / "container", directory, dirs_exist_ok=True)
    if form == "compose":
        _write_compose(directory / "compose.yaml", sites)
    else:
        _write_values(directory, places, port)


def _write_app(directory: Path, sites: dict[str, Path]) -> None:
    app = directory / "app"
    shutil.copytree(_APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    server = json.dumps(str((directory / SERVER).resolve()))
    _edit(app / "pyproject.toml", 'server-dir = ""', f"server-dir = {server}")
    for where in sites.values():
        socket = f'socket = "/run/fedpact/{where.name}.sock"'
        _edit(where / "site.toml", "# socket =", socket)


def _edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def _move_records_and_ledger(site: Path) -> None:
    for name in ("ledger", "records"):
        (site / name).mkdir(mode=0o700)
    if (own := site / "records.npz").exists():
        own.rename(site / "records" / own.name)
    settings = site / "site.toml"
    _edit(settings, 'ledger = "ledger.jsonl"', 'ledger = "ledger/ledger.jsonl"')
    _edit(settings, 'records = "records.npz"', 'records = "records/records.npz"')
    _edit(settings, 'records = "/path/to/records.csv"', 'records = "records/records.csv"')


def _write_compose(path: Path, sites: dict[str, Path]) -> None:
    labels, text = _labels([SERVER, *sites]), (_PACKAGES / path.name).read_text(encoding="utf-8")
    # The template of one site, up to the next empty line.
    before, one, after = re.split(r'(?s)(  "SERVICE":.*?)(?=\n\n)', text)
    each = [
        one.replace("SERVICE", labels[name]).replace("NAME", where.name)
        for name, where in sites.items()
    ]
    path.write_text(before + "\n".join(each) + after, encoding="utf-8")


def _labels(names: Iterable[str]) -> dict[str, str]:
    """Return a unique DNS label for each party, of lowercase letters, digits and hyphens."""
    found = dict[str, str]()
    for name in names:
        file = safe_name(name).lower()
        plain = re.sub(r"[^a-z0-9]+", "-", file)[:_LONGEST_LABEL].strip("-") or "site"
        others = (f"{plain}-{number}" for number in count(2))
        found[name] = next(one for one in chain([plain], others) if one not in found.values())
    return found


def _write_values(directory: Path, places: dict[str, Path], port: int) -> None:
    helm, labels, commands = directory / "helm", _labels(places), list[str]()
    for name, where in places.items():
        role = "server" if name == SERVER else "site"
        label, there = labels[name], where.relative_to(directory)
        values = (helm / role / "values.yaml").read_text(encoding="utf-8")
        values = values.replace(f"fedpact-{role}", f"fedpact-{label}")
        values = values.replace("port: 8443", f"port: {port}")
        (helm / f"{label}.yaml").write_text(values, encoding="utf-8")
        commands += [
            f"tar -C {quote(str(there))} {_LEFT_OUT} -cf party.tar .",
            f"kubectl create secret generic fedpact-{label} --from-file=party.tar && rm party.tar",
            f"helm install fedpact-{label} helm/{role} --values helm/{label}.yaml",
        ]
    _edit(helm / "README.md", "PARTIES", "\n".join(commands))
