"""The end of a deployment: the server hands the final model to every site that lacks it.

run/handed-over.json says to whom, and of which round. Who is away gets it when the server is
started again, or from a file (`fedpact deploy model`): the run does not wait for anybody.
"""

import json
import logging
from typing import Any, Final

from fedpact.errors import FedpactError
from fedpact.files import parse_errors
from fedpact.folder import Checkpoint, Folder
from fedpact.messages import FINAL, Refusal, Task
from fedpact.methods.released import CONSTANTS
from fedpact.round import Transport

_log = logging.getLogger("fedpact.server")
FILE: Final = "handed-over.json"
_LOST: Final = "remove it: every site is then handed the final model again"


def hand_over(folder: Folder, run: str, at: Checkpoint, transport: Transport) -> None:
    """Give every site that lacks it the model of the last round; whoever cannot have it is named.

    What goes wrong with that leaves the run as it is: it has ended.
    """
    has = read_handovers(folder)
    vectors = {n: at.state.vectors[n] for n in ("w", CONSTANTS) if n in at.state.vectors}
    tasks = {
        site: Task(run, at.round, FINAL, vectors, {}, at.included.get(site, -1))
        for site in transport.sites
        if has.get(site) != [run, at.round]
    }
    if not tasks or not at.round:
        return
    lacking = dict.fromkeys(tasks, "absent")
    try:
        for answer in transport.exchange(tasks):
            if isinstance(answer, Refusal):
                lacking[answer.site] = answer.code
            else:
                lacking.pop(answer.site, None)
                has[answer.site] = [run, at.round]
    except FedpactError as error:
        _log.warning("handing the final model over: %s", error)
    folder.write_json(FILE, has)
    for site, code in lacking.items():
        _log.warning(
            "site %s has not got the final model (%s): start the server again when it is there, or "
            "let its owner have %s and run `fedpact deploy model`",
            site,
            code,
            folder.path / "model.safetensors",
        )


def read_handovers(folder: Folder) -> dict[str, Any]:
    """Return site -> [run, round] of the final model that it was handed. Raises DataError."""
    path = folder.path / FILE
    if not path.exists():
        return {}
    with parse_errors(path, _LOST):
        return dict(json.loads(path.read_bytes()))
