"""Tuning inside a deployed site, after the run: for its owner alone.

It reads the site's records, its copy of the plan and the final model, and writes
personal.safetensors into the site's directory, mode 0600. It opens no connection, asks no ledger
and changes nothing else: no message is made of what it finds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.torch import save as save_tensors

from fedpact.client import read_memory
from fedpact.data.splits import number_persons
from fedpact.engines.parties.federation import Federation, parse_toml, read_plan
from fedpact.engines.parties.final import find_published_model, read_model
from fedpact.engines.parties.records import SiteSettings, own_records
from fedpact.files import write_whole
from fedpact.folder import RUN, check_writable
from fedpact.methods.released import check_as_declared
from fedpact.params import FlatModel, one_thread
from fedpact.personal.joining import SiteFigures, on_own_parts, personalise_model, train_locally

NOT_PRIVATE: Final = "NOT PRIVATE: tuned on this site's own records; never release it"


@dataclass(frozen=True)
class Personal:
    """What tuning found at a site. file: the model that was written, None if it advised not to."""

    site: str
    figures: SiteFigures
    file: str | None


def personalise_site(directory: Path, model: Path | None = None) -> Personal:
    """Tune the final model on a site's records, or say that it is not worth it.

    model: the run's model.safetensors as the server published it; by default the one that it handed
    to the site, or that of a server whose directory lies beside the sites'.
    An older personal.safetensors is removed where the advice is not to tune.
    Raises InputError of some kind: no final model, or one that is not the plan's.
    """
    settings = parse_toml(SiteSettings, directory / "site.toml")
    check_writable(directory)
    federation = Federation.read(directory / "federation.toml")
    plan = read_plan(directory / "plan.json")
    check_as_declared(plan.method)
    plan.task.check_plain("what joining was worth")
    handed = directory / RUN / "model.safetensors"
    # What a site with a model of its own was handed is that, and no longer everybody's.
    if model is None and handed.is_file() and not plan.method.has_own_models:
        model = handed
    source = find_published_model(directory, federation.run, model)
    module = federation.workshop(plan, directory).module()
    flat = FlatModel(module)
    initial = flat.vector.clone()
    w = read_model(source, module, flat)
    # With the final model a site's last reply counts as included, if it was of its last round.
    last = plan.participants(federation.names).last_of(settings.name, plan.rounds)
    own = plan.method.own_model(w, read_memory(directory / "memory.safetensors", last))
    found = own_records(directory, settings, federation, plan)
    x, y = found.records.x, found.records.y
    whose = number_persons(found.whose, np.arange(len(y)))
    with one_thread():
        by_itself = train_locally(flat, x, y, initial, whose)
        tuned = personalise_model(flat, x, y, w if own is None else own, whose)
    path = directory / "personal.safetensors"
    if not tuned.choice.tune:
        path.unlink(missing_ok=True)
        return Personal(settings.name, on_own_parts(by_itself, tuned), None)
    flat.load(tuned.w)
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    marked = {"privacy": NOT_PRIVATE, "run": federation.run, "site": settings.name}
    write_whole(path, save_tensors(tensors, metadata=marked))
    return Personal(settings.name, on_own_parts(by_itself, tuned), str(path))
