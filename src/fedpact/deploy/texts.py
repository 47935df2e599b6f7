"""The files that `fedpact deploy init` writes for people to read and edit."""

from typing import Final

from fedpact.data.form import RecordForm
from fedpact.engines.parties.federation import Federation
from fedpact.evaluation.groups import Grouping
from fedpact.privacy.once import FullDataRelease
from fedpact.privacy.terms import Terms
from fedpact.text import toml, toml_key
from fedpact.theory.accounting import ADJACENCY_BY_UNIT
from fedpact.theory.calibration import round_down, round_up

APP = """\
# What Flower wants to be told of a run. It carries no code that a site runs: a site's process
# answers with the fedpact that its owner has installed.
[project]
name = "fedpact"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41,<1.43"]

[tool.flwr.app]
publisher = "fedpact"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""

APP_MODULE = '''\
"""A run of fedpact: nothing in here is carried out; see `fedpact deploy server` and `site`."""

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server, client = ServerApp(), ClientApp()
'''

LICENSE = "Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0\n"

README = """\
# A fedpact deployment

| directory | belongs to | keep secret |
| --- | --- | --- |
| `authority/` | whoever sets the federation up; on no machine of the run | `ca.key` |
| `server/` | the server | `server.key`, `tls.key`, `runtime.secret` |
| `sites/NAME/` | the site NAME: copy it to that machine, and delete it here | `site.key`, \
`runtime.secret`, the records |

On one machine, for trying: `fedpact deploy up .`, `fedpact deploy status .`, `fedpact deploy down
.`

On several: `server/start.sh` on the server, `start.sh` of each site's directory at that site. Each
site's owner reads `site.toml` and `policy.toml` first, and points `records` at the site's records.
`federation.toml` and `plan.json` are the same everywhere. docs/deployment.md has the whole story.
"""

SERVER_START = """\
#!/bin/sh
# Runs the server until the run has ended; started again, it goes on from the last committed round.
exec fedpact deploy server "$(dirname "$0")"
"""

SITE_START = """\
#!/bin/sh
# Takes part until it is stopped; started again, it goes on where it was.
exec fedpact deploy site "$(dirname "$0")"
"""


def federation(of: Federation) -> str:
    """Return federation.toml."""
    members = "".join(
        f'\n[sites."{name}"]\nsize = {member.size:g}\nkey = "{member.key}"\n'
        for name, member in of.sites.items()
    )
    patience, checks = of.patience, of.checks
    return f"""\
# What all parties agree on; public, and the same at every party.
run = "{of.run}"               # a site takes part in this run and in no other
address = "{of.address}"       # the server's, as the sites reach it
server_key = "{of.server_key}"
classes = {list(of.classes)!r}
shape = {list(of.shape)}       # of one record
values = "{of.values}"
{_person(of.person)}
{_features(of.features)}
seeds = "{of.seeds}"           # "test": noise from the plan's seed, on one machine only

[patience]
round_seconds = {patience.round_seconds:g}        # how long a round waits for replies
resend_seconds = {patience.resend_seconds:g}      # a site that does not answer is asked again
join_seconds = {patience.join_seconds:g}          # how long the start waits for all sites
least_replies = {patience.least_replies}          # with fewer, the round is tried again
retries = {patience.retries}                      # how often, before the run stops

[checks]
longest = {checks.longest:g}   # a reply's distance over the median of the round's, at most

# What a record may hold: a public declaration, never what somebody counted. low and high (and
# clamp = true, to set what is beyond to them); vocabulary = 50 for words 0, ..., 49; or a table
# [records.columns.NAME] with low and high, or categories. What does not fit is left out at its
# site, and named in that site's log alone.
{_records(of.records)}{_groups(of.groups)}{members}"""


def _groups(of: Grouping | None) -> str:
    """The [groups] table: by which place of a record evaluations tell groups apart."""
    if of is None:
        return ""
    entries = "".join(f"{key} = {toml(value)}\n" for key, value in of.model_dump().items())
    return f"\n[groups]\n{entries}"


def _person(column: str | None) -> str:
    told = (
        "says whose a record is; no feature, and sizes count persons where the plan protects them"
    )
    return (
        f'# person = "..."   # {told}' if column is None else f"person = {toml(column)}   # {told}"
    )


def _features(columns: tuple[str, ...]) -> str:
    told = "a table's columns in the order of a record's numbers; a file may have another"
    listed = toml([*columns]) if columns else "[...]"
    return f"{'' if columns else '# '}features = {listed}   # {told}"


def _records(form: RecordForm) -> str:
    """The [records] table, and those of its columns."""
    tables = {"records": form.model_dump(exclude_defaults=True, exclude={"columns"})}
    for name, column in form.columns.items():
        tables[f"records.columns.{toml_key(name)}"] = column.model_dump(exclude_defaults=True)
    return "\n".join(
        f"[{table}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in entries.items())
        for table, entries in tables.items()
    )


def render_site_toml(name: str, records: str, label: str | None, port: int) -> str:
    """Return site.toml."""
    column = (
        f'label = "{label}"' if label else '# label = "..."   # the label\'s column, of a table'
    )
    return f"""\
# The owner's settings; no message can change them. Paths are relative to this directory.
name = "{name}"                # as in federation.toml
records = "{records}"     # .npz with x and y, .csv or .parquet: the site's records
{column}
data_set = "{name}"            # what the ledger is called: one for these records, for ever
# data_version = "2026-01"     # what its receipts say of it beside the name
ledger = "ledger.jsonl"        # on a local disk, backed up, never put back
device = "cpu"                 # or "cuda": where it computes
port = {port}                  # a free one of this machine, for the site's own processes
"""


def policy(algorithm: str, terms: Terms, evaluation: FullDataRelease | None) -> str:
    """Return policy.toml that allows exactly this run, on a site's terms.

    That sites share noise out is for the owner to allow in person.
    """
    releases = terms.releases | (evaluation.releases if evaluation else {})
    names = ", ".join(f'"{name}"' for name in sorted(releases))
    epsilon, delta = terms.budget.epsilon, terms.budget.delta
    of_held = evaluation.budget if evaluation else terms.budget
    ever = max(epsilon, of_held.epsilon), max(delta, of_held.delta)
    sigma = round_down(min(releases.values()) * (1 - _ELSEWHERE))
    honest, alone = terms.honest, round_up(terms.epsilon_alone * (1 + _ELSEWHERE))
    unit = terms.protects
    return f"""\
# What this site allows at most, whatever a server asks. What it does not name is refused.
# As written it allows the run that it came with, once. (ε, δ) are for one {unit}:
# {ADJACENCY_BY_UNIT[unit]}.
unit = "{unit}"
algorithms = ["{algorithm}"]
releases = [{names}]
epsilon_per_run = {epsilon!r}
delta_per_run = {delta!r}
epsilon_ever = {ever[0]!r}     # all runs on these records together
delta_ever = {ever[1]!r}
smallest_sigma = {sigma!r}     # least noise multiplier of any release
{_EVALUATION.format(of_held) if evaluation else ""}""" + (
        _HONEST.format(honest=honest, epsilon=epsilon, alone=alone) if honest else ""
    )


# A site computes the same by itself, and the last digits are its own processor's.
_ELSEWHERE: Final = 1e-6

_EVALUATION = """\
# Of evaluations, for whoever is held out of training, and then bears nothing of that:
evaluation_epsilon_per_run = {0.epsilon!r}
evaluation_delta_per_run = {0.delta!r}
"""

_HONEST = """
# The run's sites share noise out: its epsilon = {epsilon!r} holds if at least {honest} of the sites
# in each sum, this one too, add their noise and tell nobody. Without that it is {alone!r}. Nobody
# but the owner can know whether to rely on the others: the site takes part once these lines count.
# honest = {honest}
# epsilon_alone_per_run = {alone!r}
# epsilon_alone_ever = {alone!r}
"""
