"""Writes the files of a deployment."""

import logging
import re
import secrets
import shutil
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from fedpact.common.configuration import plan_error
from fedpact.common.errors import PlanError
from fedpact.common.files import check_out, replacing, safe_name, write_whole
from fedpact.common.format import toml, toml_key
from fedpact.common.losses import UNLABELLED
from fedpact.common.run_folder import RUN, Folder
from fedpact.data.schema import RecordForm
from fedpact.data.targets import check_places, unscale
from fedpact.deployment import keys
from fedpact.deployment.federation import (
    Federation,
    Member,
    Patience,
    check_address,
    check_deployable,
    read_plan,
)
from fedpact.deployment.site_records import SiteSettings
from fedpact.plan import Plan
from fedpact.privacy.accounting.accountant import ADJACENCY_BY_UNIT
from fedpact.privacy.accounting.calibration import round_down, round_up
from fedpact.privacy.policy import Policy, shared_noise_lines
from fedpact.privacy.terms import FullDataRelease, Terms
from fedpact.simulation.setup import SimulationSetup, describe_undeclared_classes, units

README = """\
# A fedpact deployment

| directory | belongs to | keep secret |
| --- | --- | --- |
| `authority/` | the person who sets up the federation; not on a machine of the run | `ca.key` |
| `server/` | the server | `server.key`, `tls.key`, `runtime.secret` |
| `sites/NAME/` | the site NAME: copy it to that machine, and delete it here | `site.key`, \
the records |

To try it on one machine: `fedpact deploy up .`, and `fedpact deploy status .` in another terminal.

On several machines, agree on `federation.toml` first: each site's `size` is public, a round number
near what the site trains on. Then each site's owner reads `site.toml` and `policy.toml`, sets
`records` to the site's records, checks them with `fedpact deploy check .`, reads what the site will
release, and signs with `fedpact deploy approve . --by NAME`. To start: `fedpact deploy server
DIRECTORY` on the server, and `fedpact deploy site DIRECTORY` at each site; both can be stopped and
restarted without loss. Nothing is reserved or charged before all sites are ready.
`federation.toml` and `plan.json` are the same everywhere. The guide is
docs/how-to/operate-a-deployment.md.
"""


def render_federation(of: Federation) -> str:
    """Return federation.toml."""
    groups = "" if of.groups is None else f"[groups]\n{_entries(of.groups.model_dump())}\n"
    members = (
        f"\n[sites.{toml(name)}]\n{_entries(one.model_dump())}" for name, one in of.sites.items()
    )
    return f"""\
# The agreement of all parties; public, and the same at every party.
{_explain(of, "groups")}
[patience]
{_explain(of.patience)}
# What a record may hold: a public declaration, not computed from records. low and high (with
# clamp = true, values beyond them are set to them); vocabulary = 50 for words 0, ..., 49; or a
# table [records.columns.NAME] with range = [low, high], or categories. A site leaves out records
# that do not fit, and names them only in its own log.
{_records(of.records)}
{groups}# A site's size is public: a round number near what it trains on, not a count.
{"".join(members)}"""


def _explain(table: BaseModel, *left_out: str, defaults: bool = True) -> str:
    """Return the keys of a table, each below its meaning; one without a value is a comment.

    defaults: whether keys that were not set are more than comments.
    """
    found = ""
    for key, about in type(table).model_fields.items():
        value = getattr(table, key)
        if key not in left_out and not isinstance(value, BaseModel | dict):
            meaning = textwrap.wrap(" ".join((about.description or "").split()), 98)
            found += "".join(f"# {line}\n" for line in meaning)
            line = f"{key} =" if value in (None, ()) else f"{key} = {toml(value)}"
            given = value not in (None, ()) and (defaults or key in table.model_fields_set)
            found += f"{line}\n" if given else f"# {line}\n"
    return found


def _entries(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {toml(value)}\n" for key, value in table.items())


def _records(form: RecordForm) -> str:
    tables = {"records": form.model_dump(exclude_defaults=True, exclude={"columns"})}
    for name, column in form.columns.items():
        own = column.model_dump(exclude_defaults=True)
        if own.keys() >= {"low", "high"}:
            own = {"range": [own.pop("low"), own.pop("high")], **own}
        tables[f"records.columns.{toml_key(name)}"] = own
    return "\n".join(f"[{table}]\n{_entries(entries)}" for table, entries in tables.items())


def render_site_toml(name: str, records: str, label: str | None) -> str:
    """Return site.toml."""
    own = {"name": name, "records": records, "label": label, "data_set": name}
    settings = SiteSettings.model_validate({**own, "ledger": "ledger.jsonl"})
    return f"""\
# The owner's settings; no message can change them. Paths are relative to this directory.
{_explain(settings, "columns", defaults=False)}
# Columns of a table that have another name, unit or spelling here than in the federation: first
# the declared name. Columns that are not declared are ignored.
# [columns]
# bmi = "body_mass_index"
# lactate = {{ column = "lactate_mgdl", factor = 0.111 }}     # from mg/dL to mmol/L
# sex = {{ column = "gender", values = {{ F = "female", M = "male" }} }}
"""


def policy(
    algorithm: str, terms: Terms, evaluation: FullDataRelease | None, approvals: int = 1
) -> str:
    """Return policy.toml that allows exactly this run, on a site's terms.

    Only the owner can allow shared noise.
    """
    own, of_held = terms.budget, evaluation.budget if evaluation else None
    releases = terms.releases | (evaluation.releases if evaluation else {})
    of = terms.guarantee
    allowed = Policy.parse(
        {
            "unit": terms.protects,
            "algorithms": (algorithm,),
            "releases": tuple(sorted(releases)),
            "epsilon_per_run": own.epsilon,
            "delta_per_run": own.delta,
            "epsilon_ever": max(own.epsilon, of_held.epsilon) if of_held else own.epsilon,
            "delta_ever": max(own.delta, of_held.delta) if of_held else own.delta,
            "smallest_sigma": round_down(min(releases.values()) * (1 - _ELSEWHERE)),
            "approvals": approvals,
            "evaluation_epsilon_per_run": of_held and of_held.epsilon,
            "evaluation_delta_per_run": of_held and of_held.delta,
        }
    )
    shared = shared_noise_lines(replace(of, alone=round_up(of.alone * (1 + _ELSEWHERE))))
    return f"""\
# The limits of this site for any server. Everything that is not named is refused.
# As written it allows the run that it came with, once. (ε, δ) are for one {terms.protects}:
# {ADJACENCY_BY_UNIT[terms.protects]}.
# Other outputs leave the site only if a person releases them: receipts of the ledger, the exact
# figures of check, status and personalise, and personal models.
{_explain(allowed, "honest", "epsilon_alone_per_run", "epsilon_alone_ever")}{shared}"""


# A site computes the same values itself; its processor may change the last digits.
_ELSEWHERE: Final = 1e-6

_NAME = re.compile(r"\w[\w.-]{0,62}")

_logger = logging.getLogger("fedpact")


def write_deployment(
    directory: Path,
    plan: Plan,
    *,
    host: str = "127.0.0.1",
    port: int = 8443,
    names: Sequence[str] = (),
    records: bool = True,
    seeds: str = "secure",
    patience: Patience | Mapping[str, Any] = Patience(),  # noqa: B008 - it is frozen
) -> Federation:
    """Write a deployment of a plan into a new directory and return its federation.

    host, port: the server's address for sites. names: the sites' names, () for the simulation's.
    records: whether each site's directory gets its part of the plan's data set, for a trial.
    seeds, patience: see Federation, which validates them. Raises InputError if something does not
    match; then the directory is left empty.
    """
    _check_new(directory)
    try:
        address = check_address(f"{host}:{port}")
    except ValueError as error:
        raise PlanError(str(error)) from None
    check_deployable(plan)
    scene = SimulationSetup.of(plan)
    _check_names(names, len(scene.sites))
    if told := describe_undeclared_classes(plan, scene.dataset):
        _logger.warning("federation.toml is public: %s", told)
    directory.mkdir(parents=True, exist_ok=True)
    # An incomplete deployment could be mistaken for a complete one.
    with TemporaryDirectory(dir=directory) as partial:
        chosen = {"address": address, "seeds": seeds, "patience": patience}
        found = _write(Path(partial), plan, scene, sorted(names), records, chosen)
        for each in [*Path(partial).iterdir()]:
            each.rename(directory / each.name)
    return found


def _check_new(directory: Path) -> None:
    check_out(directory)
    if directory.exists() and any(directory.iterdir()):
        raise PlanError(f"{directory} is not empty: name a new directory")


def _check_names(names: Sequence[str], count: int) -> None:
    good = [name for name in {*names} if _NAME.fullmatch(name) and name != "server"]
    if names and not len(good) == len(names) == count:
        raise PlanError(
            f"the sites' names are {', '.join(map(repr, names))}: expected {count}, each once, of "
            "at most 63 letters, digits, '.', '-' and '_', and none 'server'"
        )
    files = {name: safe_name(name) for name in names}
    if len({file.casefold() for file in files.values()}) < len(files):
        raise PlanError(
            "the sites' names are not different as names of directories: "
            f"{', '.join(f'{name!r} is {file}' for name, file in files.items())}: choose others"
        )


def _write(
    directory: Path,
    plan: Plan,
    scene: SimulationSetup,
    names: Sequence[str],
    records: bool,
    chosen: Mapping[str, Any],
) -> Federation:
    if features := scene.raw.features:
        # Sites' arrays have no names, and a file for prediction may have another order.
        named = {"features": [*features], "drop": [], "columns": plan.records.kept}
        plan = plan.model_copy(update={"records": plan.records.model_copy(update=named)})
    plan, files = _beside(plan)
    authority, server = directory / "authority", directory / "server"
    authority.mkdir(mode=0o700)
    server.mkdir()
    keys.write_authority(authority)
    keys.write_server_certificate(authority, server, chosen["address"].rpartition(":")[0])
    line = keys.write_signing_key(server / "server.key")
    names = names or [site.name for site in scene.sites]
    members, parts = dict[str, Member](), dict[str, str]()
    places = {name: directory / "sites" / safe_name(name) for name in names}
    for name, site in zip(names, scene.sites, strict=True):
        key = keys.write_signing_key(places[name] / "site.key")
        size = float(units(plan, site))
        # The counts of the records at hand are nobody else's business.
        members[name] = Member(size=size if records else float(f"{size:.2g}"), key=key)
        parts[name] = site.name
    shape = tuple(scene.raw.x.shape[1:])
    check_places(scene.dataset.name, plan.task.target.kind, scene.raw.y.numpy(), shape)
    form, person = scene.plan.records.shared(), scene.plan.person
    if records:
        person = None if scene.raw.person is None else "person"
    told: dict[str, Any] = {
        "run": _new_run(plan),
        **chosen,
        "server_key": line,
        "classes": scene.dataset.classes,
        "shape": shape,
        "values": str(scene.raw.x.dtype).removeprefix("torch."),
        "person": person,
        "features": () if records else scene.raw.features,
        # What the sites' files hold: arrays that are written for them, or their own tables.
        "records": form.in_arrays(scene.raw.features) if records else form,
        "groups": scene.groups,
        "sites": members,
    }
    try:
        agreement = Federation.model_validate(told)
    except ValidationError as error:
        raise plan_error(error, (), Federation) from None
    write_whole(server / "runtime.secret", secrets.token_bytes(32))
    if scene.raw.x_test is not None and scene.raw.y_test is not None:
        labels = _labels(scene, scene.raw.y_test)
        np.savez(server / "test.npz", x=scene.raw.x_test.numpy(), y=labels)
    terms = agreement.terms(plan)
    for name, part in parts.items():
        _write_site(places[name], scene, terms[name], part, name, records)
    for party in (server, *places.values()):
        (party / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
        Folder(party).write_json("plan.json", plan.document())
        (party / "federation.toml").write_text(render_federation(agreement), encoding="utf-8")
        for name, source in files.items():
            shutil.copyfile(source, party / name)
    (directory / "README.md").write_text(README, encoding="utf-8")
    return agreement


def write_extension(server: Path, rounds: int, epsilon: float | None, out: Path) -> Federation:
    """Write the files that extend a server's ended run into a new directory, for every party.

    These are a federation.toml with a new run's name, a plan.json that begins with the final model,
    and that model; keys, records and ledgers do not change. epsilon: the new run's, by default the
    plan's. Raises InputError if something does not match.
    """
    if not (server / "server.key").exists():
        raise PlanError(
            f"{server} has no server.key: name the server's directory that `fedpact deploy init` "
            "wrote"
        )
    _check_new(out)
    shared, plan = Federation.read(server / "federation.toml"), read_plan(server / "plan.json")
    folder = Folder(server / RUN)
    if not (folder.path / "summary.json").exists():
        raise PlanError(
            f"{folder.path} has no run that has ended: expected the server's run, whose final "
            "model the new run begins with"
        )
    if folder.read_json("summary.json")["status"] == "diverged":
        raise PlanError(
            f"run {folder.path} is diverged: expected a finished run; a run that diverged has to "
            "be started again"
        )
    if epsilon is not None and plan.privacy.per_site:
        raise PlanError(
            f"epsilon is {epsilon!r} with privacy.per_site: the new run has the budgets of the "
            "plan; leave epsilon out"
        )
    changed = {**plan.document(), "rounds": rounds, "initial": {"weights": str(folder.path)}}
    if epsilon is not None:
        changed["privacy"] = {**changed["privacy"], "epsilon": epsilon, "sigma": None}
    begun = Plan.parse(changed)
    source, name = begun.initial.file(), f"initial-{(begun.initial.sha256 or '')[:8]}.safetensors"
    begun = begun.model_copy(update={"initial": begun.initial.model_copy(update={"weights": name})})
    found = shared.model_copy(update={"run": _new_run(plan)})
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, out / name)
    Folder(out).write_json("plan.json", begun.document())
    (out / "federation.toml").write_text(render_federation(found), encoding="utf-8")
    return found


def _new_run(plan: Plan) -> str:
    return f"{plan.algorithm}-{uuid.uuid4().hex[:12]}"


def _beside(plan: Plan) -> tuple[Plan, dict[str, Path]]:
    """Return the plan with weights renamed to copies next to it, and name -> original file."""
    files, changed = dict[str, Path](), dict[str, object]()
    weights = plan.features.weights
    if weights is not None:
        # A prefix, so that it does not overwrite another file of a party.
        name = f"features-{Path(weights).name}"
        files[name] = Path(weights)
        changed["features"] = plan.features.model_copy(update={"weights": name})
    if plan.initial.weights is not None:
        source = plan.initial.file()
        name = f"initial-{(plan.initial.sha256 or '')[:8]}{source.suffix}"
        files[name] = source
        changed["initial"] = plan.initial.model_copy(update={"weights": name})
    return plan.model_copy(update=changed), files


def _write_site(
    directory: Path,
    scene: SimulationSetup,
    terms: Terms,
    of: str,
    name: str,
    with_records: bool,
) -> None:
    """Write a site's own files. of: the part of the plan's records that it gets for a trial."""
    plan = scene.plan
    records = "records.npz" if with_records else "/path/to/records.csv"
    label = None if with_records else plan.label or "label"
    (directory / "site.toml").write_text(render_site_toml(name, records, label), encoding="utf-8")
    # A trial's records come from the plan's own data set, which has no owner who could sign.
    text = policy(plan.algorithm, terms, plan.evaluation_terms, approvals=int(not with_records))
    (directory / "policy.toml").write_text(text, encoding="utf-8")
    if with_records:
        part = scene.partition
        # With evaluations a site has all its records, and selects the held-out ones itself.
        held = part.held_out[of] if scene.form.share else part.held_out[of][:0]
        chosen = torch.from_numpy(np.sort(np.concatenate([part.train[of], held])))
        x, y = scene.raw.x[chosen], scene.raw.y[chosen]
        with replacing(directory / "records.npz", private=True) as new, new.open("wb") as file:
            whose = scene.raw.person
            named = {} if whose is None else {"person": np.array(whose)[chosen.numpy()]}
            np.savez(file, allow_pickle=False, x=x.numpy(), y=_labels(scene, y), **named)


def _labels(scene: SimulationSetup, y: Tensor) -> np.ndarray:
    """Return labels as stored in a file: numbers in their own units, of tokens the tokens' own."""
    target = scene.plan.task.target
    if target.next:
        return torch.nn.functional.pad(y[:, :-1], (1, 0), value=UNLABELLED).numpy()
    if target.kind != "number":
        return y.numpy()
    return np.clip(unscale(y.double().numpy(), target), target.low, target.high)
