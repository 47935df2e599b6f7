"""`fedpact deploy init`: everything that a federation needs, for one configuration."""

import logging
import re
import shutil
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from fedpact.configuration import plan_error
from fedpact.data.form import RecordForm
from fedpact.data.given.targets import unscale
from fedpact.deploy import keys, texts
from fedpact.engines.parties.federation import (
    Checks,
    Federation,
    Member,
    Patience,
    check_deployable,
)
from fedpact.engines.scene import SimulationSetup, describe_undeclared_classes, units
from fedpact.errors import PlanError
from fedpact.files import check_out, replacing
from fedpact.folder import Folder
from fedpact.plan import Plan

# A name's labels, or an IPv4 address: the server listens to nothing else.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*\.?")

_logger = logging.getLogger("fedpact")


@dataclass(frozen=True)
class Choices:
    """What a configuration does not say. host, port: the server's address as sites reach it.

    records: whether each site's directory gets its part of the plan's data set, for trying.
    seeds, patience, checks: see Federation, which checks them.
    """

    host: str = "127.0.0.1"
    port: int = 8443
    records: bool = True
    seeds: str = "secure"
    patience: Patience | Mapping[str, Any] = field(default_factory=Patience)
    checks: Checks = field(default_factory=Checks)


def write_deployment(directory: Path, plan: Plan, choices: Choices) -> Federation:
    """Write a deployment of a plan into a new directory and return its federation.

    Raises InputError of some kind for whatever does not fit; then nothing is left there.
    """
    check_out(directory)
    if directory.exists() and any(directory.iterdir()):
        raise PlanError(f"{directory} is not empty: name a new directory for the deployment")
    address = _address(choices)
    check_deployable(plan)
    scene = SimulationSetup.of(plan)
    if told := describe_undeclared_classes(plan, scene.dataset):
        _logger.warning("federation.toml is everybody's: %s", told)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return _write(directory, plan, scene, choices, address)
    except BaseException:
        # Half of one would be in the way of the next call, and be taken for a whole one.
        for left in directory.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
        raise


def _address(choices: Choices) -> str:
    """Return the server's address. Raises PlanError: no host, or no port."""
    if not 1 <= choices.port <= 65535:
        raise PlanError(f"port is {choices.port}: expected 1 to 65535")
    if not _HOST.fullmatch(choices.host):
        raise PlanError(
            f"host is {choices.host!r}: expected the server's name or its IPv4 address, as sites "
            "reach it, like fed.example.org or 10.0.0.7; its port is --port"
        )
    return f"{choices.host}:{choices.port}"


def _write(
    directory: Path, plan: Plan, scene: SimulationSetup, choices: Choices, address: str
) -> Federation:
    plan, files = _beside(_naming_columns(plan, scene.raw.features))
    authority, server = directory / "authority", directory / "server"
    authority.mkdir(mode=0o700)
    server.mkdir()
    keys.write_authority(authority)
    keys.write_server_certificate(authority, server, choices.host)
    line = keys.write_signing_key(server / "server.key")
    members = dict[str, Member]()
    for site in scene.sites:
        key = keys.write_signing_key(directory / "sites" / site.name / "site.key")
        members[site.name] = Member(size=float(units(plan, site)), key=key)
    told: dict[str, Any] = {
        "run": f"{plan.algorithm}-{uuid.uuid4().hex[:12]}",
        "address": address,
        "server_key": line,
        "classes": scene.dataset.classes,
        "shape": tuple(scene.raw.x.shape[1:]),
        "values": str(scene.raw.x.dtype).removeprefix("torch."),
        "seeds": choices.seeds,
        "patience": choices.patience,
        "checks": choices.checks,
        "person": _person(scene, choices.records),
        "features": () if choices.records else scene.raw.features,
        "records": _declared(scene, choices.records),
        "groups": scene.groups,
        "sites": members,
    }
    try:
        federation = Federation.model_validate(told)
    except ValidationError as error:
        raise plan_error(error, (), Federation) from None
    _write_server(server, scene)
    for site in scene.sites:
        _write_site(directory / "sites" / site.name, scene, site.name, choices.records)
    for party in (server, *(directory / "sites" / name for name in members)):
        _write_shared(party, authority, plan, federation)
        for name, source in files.items():
            shutil.copyfile(source, party / name)
    (directory / "README.md").write_text(texts.README, encoding="utf-8")
    return federation


def _naming_columns(plan: Plan, features: tuple[str, ...]) -> Plan:
    """Return the plan that says of which columns, in which order, a record is made.

    Sites' arrays have no names, and a file that the model is asked about has its own order.
    """
    if not features:
        return plan
    named = {"features": [*features], "drop": [], "columns": plan.records.kept}
    return plan.model_copy(update={"records": plan.records.model_copy(update=named)})


def _beside(plan: Plan) -> tuple[Plan, dict[str, Path]]:
    """Return the plan that names files of weights as they lie beside it, and those by name."""
    files, changed = dict[str, Path](), dict[str, object]()
    weights, initial = plan.features.weights, plan.initial
    if weights is not None:
        # A name of its own: no party's file has it, whatever theirs is called.
        name = f"features-{Path(weights).name}"
        files[name] = Path(weights)
        changed["features"] = plan.features.model_copy(update={"weights": name})
    if initial.weights is not None:
        source = initial.file()
        name = f"initial-{(initial.sha256 or '')[:8]}{source.suffix}"
        files[name] = source
        changed["initial"] = initial.model_copy(update={"weights": name})
    return plan.model_copy(update=changed), files


def _declared(scene: SimulationSetup, with_records: bool) -> RecordForm:
    """The form of what the sites read: arrays that are written for them, or tables of theirs."""
    form = scene.plan.records.shared()
    return form.in_arrays(scene.raw.features) if with_records else form


def _person(scene: SimulationSetup, with_records: bool) -> str | None:
    """Return what of the sites' files says whose a record is; None where nothing does."""
    if not with_records:
        return scene.plan.person
    return None if scene.raw.person is None else "person"


def _write_shared(party: Path, authority: Path, plan: Plan, federation: Federation) -> None:
    (party / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    keys.write_runtime_secret(party / "runtime.secret")
    Folder(party).write_json("plan.json", plan.document())
    (party / "federation.toml").write_text(texts.federation(federation), encoding="utf-8")


def _write_server(server: Path, scene: SimulationSetup) -> None:
    app = server / "app"
    app.mkdir()
    for name, text in (
        ("pyproject.toml", texts.APP),
        ("app.py", texts.APP_MODULE),
        ("LICENSE", texts.LICENSE),
    ):
        (app / name).write_text(text, encoding="utf-8")
    _write_script(server / "start.sh", texts.SERVER_START)
    data = scene.raw
    if data.x_test is not None and data.y_test is not None:
        np.savez(server / "test.npz", x=data.x_test.numpy(), y=_labels(scene, data.y_test))


def _write_site(directory: Path, scene: SimulationSetup, name: str, with_records: bool) -> None:
    terms, plan = scene.terms[name], scene.plan
    records = "records.npz" if with_records else "/path/to/records.csv"
    label = None if with_records else plan.label or "label"
    (directory / "site.toml").write_text(
        texts.render_site_toml(name, records, label, _free_port()), encoding="utf-8"
    )
    text = texts.policy(plan.algorithm, terms, plan.evaluation_terms)
    (directory / "policy.toml").write_text(text, encoding="utf-8")
    _write_script(directory / "start.sh", texts.SITE_START)
    if with_records:
        part = scene.partition
        # With evaluations a site has all its records, and finds out itself which are held out.
        held = part.held_out[name] if plan.evaluation.used else part.held_out[name][:0]
        chosen = torch.from_numpy(np.sort(np.concatenate([part.train[name], held])))
        x, y = scene.raw.x[chosen], scene.raw.y[chosen]
        with replacing(directory / "records.npz", private=True) as new, new.open("wb") as file:
            whose = scene.raw.person
            named = {} if whose is None else {"person": np.array(whose)[chosen.numpy()]}
            np.savez(file, allow_pickle=False, x=x.numpy(), y=_labels(scene, y), **named)


def _labels(scene: SimulationSetup, y: Tensor) -> np.ndarray:
    """Return labels as a file has them: numbers in their own units, in the declared range."""
    target = scene.plan.task.target
    if target.kind != "number":
        return y.numpy()
    return np.clip(unscale(y.double().numpy(), target), target.low, target.high)


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
