"""What a machine needs beside a party's directory to run it: an image, compose, Helm, systemd.

Sources: https://docs.docker.com/reference/dockerfile/, https://compose-spec.io,
https://helm.sh/docs/topics/charts/, https://www.freedesktop.org/software/systemd/man/systemd.exec

A party's directory is mounted as it is; in it a site's `records` is mounted once more to be read
only, and `ledger` from wherever the owner keeps what must never be lost or put back. So site.toml
has paths that are right in a container and out of it. Exit code 2 says that a person has to do
something (common.errors), and 0 that a run has ended: after neither is a party started again.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import Final, Literal

from fedpact.common.errors import DataError
from fedpact.deployment.local import SERVER, parties

Form = Literal["compose", "helm", "systemd", "flower"]

SERVER_HOSTS: Final[dict[str, str]] = {
    "compose": SERVER,
    "helm": "fedpact-server",
    "flower": "superlink",
}
"""What sites call the server where nobody names a host; as a Flower app they never call it."""

_USER: Final = 10001
_LONGEST_LABEL: Final = 40  # Kubernetes takes 63, of which it and we use some

_BASE: Final = "python:3.11-slim-bookworm"

_DOCKERFILE: Final = f"""\
# An image of one party. BEFORE
# docker build -t fedpact:0.1.0 --build-arg PIP_EXTRA_INDEX_URL=... .
# with the index of PyTorch's CPU wheels: of torch, deploy.lock lists that wheel alone.
FROM {_BASE} AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY LOCK ./deploy.lock
RUN python -m venv /opt/fedpact \\
    && /opt/fedpact/bin/pip install --no-cache-dir --require-hashes -r deploy.lock
COPY_IT
RUN /opt/fedpact/bin/pip install --no-cache-dir --no-index --no-deps --no-build-isolation IT

FROM {_BASE}
COPY --from=build /opt/fedpact /opt/fedpact
RUN groupadd --gid {_USER} fedpact \\
    && useradd --uid {_USER} --gid {_USER} --no-create-home --shell /usr/sbin/nologin fedpact
# The root file system may be read only: what is written lies in /party and, for a while, in /tmp.
ENV PATH=/opt/fedpact/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER {_USER}:{_USER}
WORKDIR /party
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \\
    CMD ["fedpact", "deploy", "health", "/party"]
ENTRYPOINT ["fedpact"]
"""

# Directories beside it hold keys and records: nothing of them is sent to whoever builds.
_IGNORED: Final = "*\n!deploy.lock\n!fedpact-*.whl\n"

_COMPOSE: Final = """\
# A whole federation on one machine. `docker compose up` starts it, and `docker compose down` ends
# it; nothing is lost by either, as all that is kept lies in the directories that are mounted.
# The account in the containers has to own these: FEDPACT_USER=$(id -u):$(id -g), or chown them.
x-party: &party
  image: fedpact:0.1.0
  build: .
  user: "${FEDPACT_USER:-USER:USER}"
  init: true
  read_only: true
  tmpfs: ["/tmp:mode=1777"]
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  restart: on-failure   # not after exit code 0: the run has ended
  stop_grace_period: 30s
  networks: [federation]

services:
"""

_COMPOSE_SERVER: Final = """\
  server:
    <<: *party
    command: [deploy, server, /party]
    volumes:
      - {type: bind, source: ./server, target: /party}
"""

_COMPOSE_SITE: Final = """\
  SERVICE:
    <<: *party
    command: [deploy, site, /party]
    volumes:
      - {type: bind, source: "./sites/NAME", target: /party}
      - {type: bind, source: "./sites/NAME/records", target: /party/records, read_only: true}
      # On a disk that is backed up, and never put back.
      - {type: bind, source: "./sites/NAME/ledger", target: /party/ledger}
"""

_COMPOSE_NETWORK: Final = """
networks:
  federation:
    internal: true   # no party needs anything from outside
"""

_CHART: Final = """\
apiVersion: v2
name: fedpact-ROLE
description: The ROLE of a fedpact federation.
type: application
version: 0.1.0
appVersion: "0.1.0"
"""

_VALUES: Final = """\
# `name` is what the party is called here; a server's is also the host in federation.toml.
name: NAME
image: fedpact:0.1.0
# With the key party.tar: the party's files, as README.md says.
secret: NAME
stateSize: 2Gi
"""

_VALUES_SERVER: Final = "port: PORT\n"

_VALUES_SITE: Final = """\
ledgerSize: 1Gi
# A claim that is there already, with the file that site.toml names under records/.
recordsClaim: NAME-records
"""

_POD: Final = """\
      automountServiceAccountToken: false
      securityContext:
        runAsNonRoot: true
        runAsUser: USER
        runAsGroup: USER
        fsGroup: USER
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {type: RuntimeDefault}
      initContainers:
        - name: files
          image: "{{ .Values.image }}"
          command: [tar, --extract, --no-same-owner, --directory=/party, --file=/secret/party.tar]
          securityContext: &locked
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          volumeMounts:
            - {name: state, mountPath: /party}
            - {name: secret, mountPath: /secret, readOnly: true}
      containers:
        - name: party
          image: "{{ .Values.image }}"
          args: [deploy, ROLE, /party]
          securityContext: *locked
          # No liveness probe: a site that waits for its server is well, and is let wait.
          readinessProbe:
            exec: {command: [fedpact, deploy, health, /party]}
            periodSeconds: 10
            timeoutSeconds: 10
          volumeMounts:
            - {name: state, mountPath: /party}
            - {name: tmp, mountPath: /tmp}
"""

_VOLUMES: Final = """\
      volumes:
        - name: tmp
          emptyDir: {medium: Memory}
        - name: secret
          secret: {secretName: "{{ .Values.secret }}", defaultMode: 0400}
"""

_JOB: Final = (
    """\
# A job, as a server ends with its run. Exit code 2 needs a person; after any other it goes on.
apiVersion: batch/v1
kind: Job
metadata:
  name: "{{ .Values.name }}"
spec:
  backoffLimit: 100
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes: {containerName: party, operator: In, values: [2]}
  template:
    metadata:
      labels: {app: "{{ .Values.name }}"}
    spec:
      restartPolicy: Never
"""
    + _POD
    + _VOLUMES
    + """\
        - name: state
          persistentVolumeClaim: {claimName: "{{ .Values.name }}-state"}
"""
)

_CLAIM: Final = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: "{{ .Values.name }}-state"
  annotations: {"helm.sh/resource-policy": keep}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: "{{ .Values.stateSize }}"}}
"""

_SERVICE: Final = """\
apiVersion: v1
kind: Service
metadata:
  name: "{{ .Values.name }}"
spec:
  selector: {app: "{{ .Values.name }}"}
  ports:
    - {name: fleet, port: {{ .Values.port }}, targetPort: {{ .Values.port }}}
"""

_STATEFUL_SET: Final = (
    """\
# One pod, never two: a ledger has one process. What it has written outlives the chart.
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: "{{ .Values.name }}"
spec:
  replicas: 1
  serviceName: "{{ .Values.name }}"
  persistentVolumeClaimRetentionPolicy: {whenDeleted: Retain, whenScaled: Retain}
  selector:
    matchLabels: {app: "{{ .Values.name }}"}
  template:
    metadata:
      labels: {app: "{{ .Values.name }}"}
    spec:
"""
    + _POD
    + """\
            - {name: ledger, mountPath: /party/ledger}
            - {name: records, mountPath: /party/records, readOnly: true}
"""
    + _VOLUMES
    + """\
        - name: records
          persistentVolumeClaim: {claimName: "{{ .Values.recordsClaim }}", readOnly: true}
  volumeClaimTemplates:
    - metadata: {name: state}
      spec:
        accessModes: [ReadWriteOnce]
        resources: {requests: {storage: "{{ .Values.stateSize }}"}}
    - metadata: {name: ledger}
      spec:
        accessModes: [ReadWriteOnce]
        resources: {requests: {storage: "{{ .Values.ledgerSize }}"}}
"""
)

_HELM_README: Final = """\
# With Helm

Build the image (`../Dockerfile`), push it where the cluster finds it, and name it as `image` in
the values. For the server and each site, in its owner's cluster or namespace:

```sh
PARTIES
```

The tar holds keys and settings, and neither records nor a ledger; make it anew, and restart the
pod, when a file of it has changed. A site's records lie in the claim that `recordsClaim` names. A
server's public test set is copied by `kubectl cp` into its directory, where there is one.
"""

_LEFT_OUT: Final = " ".join(
    f"--exclude=./{name}"
    for name in ("records", "ledger", "test.npz", "site.db*", "run", "flower", "log.txt")
)

_UNIT: Final = """\
# COMMENT
[Unit]
Description=fedpact: INSTANCE
Wants=network-online.target
After=network-online.target
# Without an end: whoever waits for a network or a server is to go on waiting.
StartLimitIntervalSec=0

[Service]
User=fedpact
Group=fedpact
WorkingDirectory=DIRECTORY
ExecStart=/opt/fedpact/bin/fedpact deploy ROLE DIRECTORY
Restart=on-failure
RestartSec=10
# A person has to do something: the log says what.
RestartPreventExitStatus=2
# Stopped by systemd itself.
SuccessExitStatus=143
TimeoutStopSec=30

UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ReadWritePaths=DIRECTORY
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service

[Install]
WantedBy=multi-user.target
"""

_INSTALL_SERVER: Final = (
    "To /etc/systemd/system; the server's directory is /var/lib/fedpact/server."
)
_INSTALL_SITE: Final = (
    "To /etc/systemd/system; a site's directory to /var/lib/fedpact/NAME, and its ledger\n"
    "# in there, or add a ReadWritePaths= for it. systemctl enable --now fedpact-site@NAME. With\n"
    '# device = "cuda" in site.toml: PrivateDevices=no.'
)

_APP: Final = Path(__file__).parent / "flower" / "app"
_LEDGER: Final = 'ledger = "ledger.jsonl" '
_RECORDS: Final = re.compile(r'(?m)^records = "(?:.*/)?([^/"]+)"')


def write_package(directory: Path, form: Form, port: int) -> None:
    """Write what runs a deployment's parties in a form. directory: as write_deployment left it.

    port: the server's. In a container a site's ledger and records lie in directories of their own.
    """
    places = parties(directory)
    if form == "systemd":
        _write(directory / "systemd", dict(_units()))
        return
    sites = {name: where for name, where in places.items() if name != SERVER}
    if form == "flower":
        _write_app(directory, sites)
        return
    for where in sites.values():
        _move_records_and_ledger(where)
    _write(directory, {"Dockerfile": render_dockerfile(), ".dockerignore": _IGNORED})
    shutil.copyfile(Path(__file__).with_name("deploy.lock"), directory / "deploy.lock")
    if form == "compose":
        _write(directory, {"compose.yaml": _compose(sites)})
    else:
        _write(directory / "helm", dict(_charts(directory, places, port)))


def _write_app(directory: Path, sites: dict[str, Path]) -> None:
    """Write the Flower app of a run, whose sites answer at sockets."""
    app = directory / "app"
    shutil.copytree(_APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    server = json.dumps(str((directory / SERVER).resolve()))
    text = (app / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace('server-dir = ""', f"server-dir = {server}")
    _write(app, {"pyproject.toml": text})
    for where in sites.values():
        text = (where / "site.toml").read_text(encoding="utf-8")
        _write(where, {"site.toml": text.replace("# socket = ", "socket = ")})


def render_dockerfile(checkout: bool = False) -> str:
    """Return a Dockerfile: beside a wheel of fedpact, or at the root of a checkout."""
    before = "Put fedpact's wheel beside this file: pip wheel --no-deps fedpact; then"
    told = {"BEFORE": before, "LOCK": "deploy.lock", "COPY_IT": "COPY fedpact-*.whl ./"}
    told |= {"IT": "./fedpact-*.whl"}
    if checkout:
        copied = "COPY pyproject.toml README.md LICENSE ./\nCOPY src src"
        told |= {"BEFORE": "From a checkout:", "COPY_IT": copied, "IT": "."}
        told |= {"LOCK": "src/fedpact/deployment/deploy.lock"}
    return re.sub(rf"\b({'|'.join(told)})\b", lambda found: told[found[0]], _DOCKERFILE)


def _write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")


def _move_records_and_ledger(site: Path) -> None:
    settings = site / "site.toml"
    text = settings.read_text(encoding="utf-8")
    if _LEDGER not in text or not (found := _RECORDS.search(text)):
        raise DataError(f"{settings} is not as `fedpact deploy init` writes it")
    (site / "ledger").mkdir(mode=0o700)
    (site / "records").mkdir(mode=0o700)
    if (own := site / found[1]).exists():
        own.rename(site / "records" / found[1])
    text = text.replace(_LEDGER, 'ledger = "ledger/ledger.jsonl" ')
    text = _RECORDS.sub(r'records = "records/\1"', text)
    settings.write_text(text, encoding="utf-8")


def _compose(sites: dict[str, Path]) -> str:
    labels = _labels([SERVER, *sites])
    services = "".join(
        _COMPOSE_SITE.replace("SERVICE", labels[name]).replace("NAME", name) for name in sites
    )
    head = _COMPOSE.replace("USER:USER", f"{_USER}:{_USER}")
    return head + _COMPOSE_SERVER + services + _COMPOSE_NETWORK


def _labels(names: Iterable[str]) -> dict[str, str]:
    """Return each party's DNS label, of small letters, digits and hyphens; no two have the same."""
    found = dict[str, str]()
    for name in names:
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_LABEL].strip("-") or "site"
        others = (f"{plain}-{number}" for number in count(2))
        found[name] = next(one for one in chain([plain], others) if one not in found.values())
    return found


def _charts(directory: Path, places: dict[str, Path], port: int) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file of the two charts, and of each party's values."""
    templates = {
        "server": {"job.yaml": _JOB, "claim.yaml": _CLAIM, "service.yaml": _SERVICE},
        "site": {"statefulset.yaml": _STATEFUL_SET},
    }
    values = {"server": _VALUES + _VALUES_SERVER, "site": _VALUES + _VALUES_SITE}
    for role, files in templates.items():
        yield f"{role}/Chart.yaml", _CHART.replace("ROLE", role)
        yield f"{role}/values.yaml", _named(values[role], SERVER, port)
        for name, text in files.items():
            told = text.replace("ROLE", role).replace("USER", str(_USER))
            yield f"{role}/templates/{name}", told
    labels, commands = _labels(places), list[str]()
    for name, where in places.items():
        role = "server" if name == SERVER else "site"
        label, there = labels[name], where.relative_to(directory)
        yield f"{label}.yaml", _named(values[role], label, port)
        commands += [
            f"tar -C {quote(str(there))} {_LEFT_OUT} -cf party.tar .",
            f"kubectl create secret generic fedpact-{label} --from-file=party.tar && rm party.tar",
            f"helm install fedpact-{label} helm/{role} --values helm/{label}.yaml",
        ]
    yield "README.md", _HELM_README.replace("PARTIES", "\n".join(commands))


def _named(values: str, label: str, port: int) -> str:
    return values.replace("NAME", f"fedpact-{label}").replace("PORT", str(port))


def _units() -> Iterator[tuple[str, str]]:
    for role, file, instance, comment in (
        ("server", "fedpact-server.service", "server", _INSTALL_SERVER),
        ("site", "fedpact-site@.service", "%i", _INSTALL_SITE),
    ):
        where = f"/var/lib/fedpact/{instance}"
        text = _UNIT.replace("COMMENT", comment).replace("DIRECTORY", where)
        yield file, text.replace("INSTANCE", instance).replace("ROLE", role)
