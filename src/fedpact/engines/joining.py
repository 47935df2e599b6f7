"""What joining was worth to each site of a simulated run: joining.json, simulator only.

The figures are exact: each is one that a deployed site's owner sees of the own site, and nobody
else. See personal.joining for what is compared.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from fedpact.client import read_memory
from fedpact.data.dataset import Dataset
from fedpact.data.partition import Partition
from fedpact.data.splits import number_persons
from fedpact.engines.scene import SimulationSetup
from fedpact.errors import PlanError
from fedpact.folder import Checkpoint, Folder, check_writable
from fedpact.methods.released import check_as_declared
from fedpact.params import FlatModel, one_thread
from fedpact.personal.joining import (
    METHOD,
    SiteFigures,
    SiteModel,
    on_held_out,
    personalise_model,
    train_locally,
)
from fedpact.plan import Plan

SiteModels = dict[str, dict[str, SiteModel]]
"""What sites have by themselves, kept from run to run: what it follows from -> site -> model."""

_ALONE = ("data", "label", "site", "model", "logistic", "seed", "sites", "partition")
_RECORDS = ("features", "records", "person", "evaluation")


def of_run(
    path: Path,
    data: Dataset | None = None,
    known: SiteModels | None = None,
    on_site: Callable[[str, int], None] | None = None,
) -> dict[str, Any]:
    """Compute, write and return the content of joining.json of a simulated run that has ended.

    data: what the run was given in place of plan.data. known: is read and added to. on_site: is
    told of each site, and of how many, before its models are made; minutes each, for large ones.
    Raises InputError of some kind: no simulated run, one that has not ended, no held-out records.
    """
    folder = Folder(path)
    plan = Plan.parse(folder.read_json("plan.json"))
    _check(folder)
    check_writable(path)
    check_as_declared(plan.method)
    plan.task.check_plain("what joining was worth")
    partition = Partition.load(folder.partition)
    scene = SimulationSetup.of(plan, data, partition)
    if not any(len(site.y_held) for site in scene.sites):
        raise PlanError(
            f"{path}: no site holds records out (partition.held_out, or evaluation.share): without "
            "them nothing can be compared; run it with some"
        )
    models, model = _released(folder, plan, scene), FlatModel(scene.module())
    initial = model.vector.clone()
    alones = ({} if known is None else known).setdefault(_follows_from(plan), {})
    found = dict[str, SiteFigures]()
    with one_thread():
        for site in scene.sites:
            if on_site is not None:
                on_site(site.name, len(scene.sites))
            if site.name not in alones:
                alones[site.name] = train_locally(model, site.x, site.y, initial, site.persons)
            w = models[site.name]
            tuned = personalise_model(model, site.x, site.y, w, site.persons)
            whose = number_persons(scene.dataset.person, partition.held_out[site.name])
            held = site.x_held, site.y_held, whose
            found[site.name] = on_held_out(model, alones[site.name], tuned, w, *held)
    document = {
        "simulator_only": True,
        "method": METHOD,
        "own_models": plan.method.has_own_models,
        "sites": {name: asdict(figures) for name, figures in found.items()},
    }
    folder.write_json("joining.json", document)
    return document


def _check(folder: Folder) -> None:
    if not folder.partition.exists():
        raise PlanError(
            f"{folder.path} has no partition.json: expected the folder of a simulated run, or the "
            "directory of a deployed site, which has a site.toml"
        )
    summary = folder.path / "summary.json"
    status = folder.read_json("summary.json")["status"] if summary.exists() else "not ended"
    if status in ("stopped", "not ended"):
        raise PlanError(
            f"the run in {folder.path} is {status}: what joining was worth is known at its end; "
            "`fedpact resume` goes on with it"
        )


def _follows_from(plan: Plan) -> str:
    document = plan.model_dump(mode="json", include={*_ALONE, *_RECORDS})
    document["person_records"] = plan.privacy.person_records
    return json.dumps(document, sort_keys=True)


def _released(folder: Folder, plan: Plan, scene: SimulationSetup) -> Mapping[str, Tensor]:
    """Return the model that each site has from the federation, [d] each."""
    at = Checkpoint.from_bytes((folder.path / "state.safetensors").read_bytes())
    w, found = at.state.vectors["w"], dict[str, Tensor]()
    for site in scene.sites:
        path = folder.site(site.name) / "memory.safetensors"
        own = plan.method.own_model(w, read_memory(path, at.included.get(site.name, -1)))
        found[site.name] = w if own is None else own
    return found
