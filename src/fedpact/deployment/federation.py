"""The public agreement of a deployment's parties: federation.toml.

The server and every site have a copy next to plan.json. The server cannot change it for a site:
each site reads its own copy, and takes part only in the run that it names.
"""

import hashlib
import ipaddress
import json
import re
import tomllib
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from torch import Tensor

from fedpact.common.configuration import DEFAULTS_KEY, plan_error
from fedpact.common.errors import PlanError
from fedpact.common.format import count_noun
from fedpact.data.features.extract import FeatureStage
from fedpact.data.schema import RecordForm
from fedpact.data.tokens import is_tokens
from fedpact.evaluation.held_out import Grouping, SumsForm
from fedpact.plan import Plan
from fedpact.privacy.terms import Terms
from fedpact.simulation.secure_aggregation.encoding import Coding, coding_of
from fedpact.simulation.workshop import TrainingSetup

_FROZEN = ConfigDict(
    frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
)
_Model = TypeVar("_Model", bound=BaseModel)

_AGREED = {"classes", "shape", "values", "seeds", "records", "person", "groups", "features"}
_OF_ONE_PARTY = ("about", "run", "policy", DEFAULTS_KEY)  # of plan.json


# A host name or an IPv4 address, as the server does not listen on IPv6, and a port.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_ADDRESS = re.compile(rf"(?=[^:]{{1,253}}:){_LABEL}(?:\.{_LABEL})*\.?:([0-9]{{1,5}})")


def check_address(address: str) -> str:
    """Return a server's address. Raises ValueError: sites cannot connect to such a one."""
    found = _ADDRESS.fullmatch(address)
    # The system would take a larger port modulo 65536.
    if found and 1 <= int(found[1]) <= 65535:
        return address
    raise ValueError(
        f"{address!r} is no address: expected the server's name or IPv4 address, as sites reach "
        "it, and a port from 1 to 65535, like fed.example.org:8443"
    )


class Patience(BaseModel):
    """How the server waits for sites."""

    model_config = _FROZEN
    round_seconds: float = Field(default=600.0, gt=0)
    """The longest a round waits for replies."""
    resend_seconds: float = Field(default=60.0, gt=0)
    """A site that has not answered for this long is asked again; it answers a repeated task
    with the stored reply, so asking costs no budget."""
    join_seconds: float = Field(default=60.0, ge=0)
    """How long a start waits for all sites; later rounds do not wait for missing ones."""
    start_sites: int | None = Field(default=None, ge=1)
    """How many sites must be ready before the first round, which reserves budget. Default: all."""
    least_replies: int = Field(default=1, ge=1)
    """With fewer replies the round is repeated."""
    retries: int = Field(default=2, ge=0)
    """How often a round is repeated before the run stops; it can be resumed."""


class Member(BaseModel):
    """A site as known to the others."""

    model_config = _FROZEN
    size: float = Field(gt=0)
    """The declared N_i."""
    key: str
    """The site's public key, OpenSSH."""


class Federation(BaseModel):
    """The public agreement of a deployment's parties (federation.toml)."""

    model_config = _FROZEN
    run: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """The run's name; a site takes part only in this run."""
    address: Annotated[str, AfterValidator(check_address)]
    """The server's address, host:port, as the sites reach it."""
    server_key: str
    """The server's public key, with which it signs tasks."""
    classes: tuple[str, ...] = Field(min_length=1)
    """The names of the labels, in order."""
    shape: tuple[int, ...]
    """The shape of a record, such as [60] for a row of 60 numbers."""
    values: Literal["float32", "int64"] = "float32"
    """The type of a record's values: numbers, or words ("int64")."""
    seeds: Literal["secure", "test"] = "secure"
    """With "test" every party draws from the plan's seed, to compare a deployment with a simulation
    bit for bit. That protects no one, so it is refused unless the address is this machine's own,
    and ledgers are marked hypothetical."""
    patience: Patience = Patience()
    records: RecordForm = RecordForm()
    """What a record may hold; a site leaves out records that do not fit."""
    person: str | None = None
    """The column (in an .npz the array) of a site's file that identifies a record's person. It is
    not a feature; a record without a person is left out. Sizes count persons if the plan protects
    them."""
    groups: Grouping | None = None
    """The column by which evaluations form groups, if the plan names one."""
    features: tuple[str, ...] = ()
    """A table's columns in the order of a record's numbers; files may have another order."""
    sites: dict[str, Member] = Field(min_length=1)
    """The sites by name."""

    @property
    def host(self) -> str:
        """The server's host name or IP address, without the port."""
        return self.address.partition(":")[0]

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        if self.seeds == "test" and not _is_this_machine(self.host):
            raise ValueError(
                f'seeds = "test" with address = {self.address!r}: noise from a seed protects no '
                "one, so a run over a network is refused; leave seeds out"
            )
        for name in ("least_replies", "start_sites"):
            least = getattr(self.patience, name) or 0
            if least > len(self.sites):
                many = count_noun(len(self.sites), "site")
                raise ValueError(f"patience.{name} = {least}: there are {many}")
        if self.records.vocabulary is not None and self.values != "int64":
            raise ValueError(
                f"records.vocabulary = {self.records.vocabulary} with values = {self.values!r}: "
                'words are whole numbers; set values = "int64"'
            )
        if self.records.columns and len(self.shape) != 1:
            raise ValueError(
                f"records.columns with shape = {list(self.shape)}: a record is not a row of "
                "columns; declare low and high for all values"
            )
        if self.groups is not None and not (
            len(self.shape) == 1 and self.groups.column < self.shape[0]
        ):
            raise ValueError(
                f"groups.column = {self.groups.column} with shape = {list(self.shape)}: expected "
                "the position of a column in a record that is a row"
            )
        return self

    @model_validator(mode="after")
    def _features_fit(self) -> Self:
        named = self.features
        unknown = sorted(set(self.records.kept) - set(named))
        # Columns of tokens are lists, one per row of the record.
        whole = self.shape[:1] if is_tokens(named) and len(self.shape) == 2 else self.shape
        if named and ((len(set(named)),) != whole or unknown):
            raise ValueError(
                f"features = {list(named)} with shape = {list(self.shape)}, and declared columns "
                f"that are not features: {', '.join(unknown) or 'none'}. Expected one column per "
                "number of a record, each once, including all declared ones"
            )
        return self

    @staticmethod
    def read(path: Path) -> "Federation":
        """Read federation.toml. Raises PlanError, naming every mistake."""
        return parse_toml(Federation, path)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sites' names, sorted."""
        return tuple(sorted(self.sites))

    def terms(self, plan: Plan) -> dict[str, Terms]:
        """Return every site's terms, from public numbers alone.

        Raises PlanError: plan and federation declare different things, or persons are protected
        and no person column is named.
        """
        here, there = len(self.records.released), len(plan.records.released)
        if here != there:
            raise PlanError(
                f'federation.toml has {here} columns with scale = "released", plan.json {there}: '
                "expected the same declarations in both; write both again with `fedpact deploy "
                "init`"
            )
        if plan.handed:
            raise PlanError(
                f"plan.json has {', '.join(plan.handed)}, which was passed in from Python: every "
                "party builds model and loss itself; define them in a file that all parties have, "
                "as package.module:name"
            )
        simulated = {
            "a [clock]": plan.clock.used,
            "partition.validation": plan.partition.validation,
        }
        for key in (key for key, used in simulated.items() if used):
            raise PlanError(f"plan.json has {key}, which only simulations use; leave it out")
        if plan.sites_per_round is not None and plan.sites_per_round < self.patience.least_replies:
            raise PlanError(
                f"plan.json has sites_per_round = {plan.sites_per_round}, but federation.toml has "
                f"patience.least_replies = {self.patience.least_replies}: no round could have "
                "enough replies; lower the second"
            )
        if plan.privacy.unit == "person" and self.person is None:
            raise PlanError(
                'plan.json has privacy.unit = "person", but federation.toml has no person: name '
                "the column of the sites' files that identifies a person, as person = ..."
            )
        return plan.terms({name: member.size for name, member in self.sites.items()})

    def agreed(self, plan: Plan) -> str:
        """Return a digest of everything that must be the same at every party.

        It covers the plan and this agreement, except address, patience and keys, which may differ
        between parties or are proven by use; and which minor version of fedpact runs, as another
        may give a plan another meaning.
        """
        own = self.model_dump(mode="json", include=_AGREED)
        sites = {name: member.size for name, member in sorted(self.sites.items())}
        of_plan = {k: v for k, v in plan.document().items() if k not in _OF_ONE_PARTY}
        minor = version("fedpact").split(".")[:2]
        whole = json.dumps([own, sites, of_plan, minor], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()

    def describe_labels(self, plan: Plan) -> RecordForm:
        """Return the declaration of records and, from the plan, of their labels."""
        return self.records.model_copy(update={"target": plan.task.target})

    def columns(self, plan: Plan) -> tuple[str, ...]:
        """Return a table's columns in the order of a record's numbers; () if unknown.

        They come from the plan if the sites' files are arrays, as in a trial.
        """
        return self.features or tuple(plan.records.features or ())

    def form(self, plan: Plan) -> SumsForm:
        """Return the sums over held-out records. Raises PlanError: plan and classes differ."""
        return plan.sums_form(self.classes, self.groups)

    def workshop(self, plan: Plan, at: Path) -> TrainingSetup:
        """Return a party's model, loss and preparation of records. at: its directory."""
        example = self.stage(plan, at).example(self.example())
        return TrainingSetup.of(plan, example, len(self.classes), at)

    def stage(self, plan: Plan, at: Path) -> FeatureStage:
        """Return the preparation from a party's records to the model's input."""
        return plan.stage(at, self.records)

    def coding(self, plan: Plan) -> Coding:
        """Return how vectors are encoded under secure aggregation."""
        sizes = {name: float(member.size) for name, member in self.sites.items()}
        return coding_of(plan, sizes, self.terms(plan))

    def example(self) -> Tensor:
        """Return a record of zeros."""
        return torch.zeros(self.shape, dtype=getattr(torch, self.values))


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_plan(path: Path) -> Plan:
    """Read a deployment's plan. Raises PlanError: unreadable, or not deployable."""
    plan = Plan.read(path)
    check_deployable(plan)
    return plan


def check_deployable(plan: Plan) -> None:
    """Raise PlanError for a plan that can only be simulated."""
    if not plan.private:
        raise PlanError(
            f"{plan.why_unprotected}: a deployment trains only private runs; simulate it instead"
        )
    if plan.noisy_sizes:
        raise PlanError(
            'privacy.sizes is "noisy": in a deployment every site declares its size in '
            'federation.toml before the run; use privacy.sizes = "public" and a round number'
        )


def parse_toml(kind: type[_Model], path: Path) -> _Model:
    """Read a TOML file as a pydantic model. Raises PlanError, naming every mistake."""
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{path} cannot be read ({error}): expected a file that `fedpact deploy init` wrote"
        ) from None
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        mistakes = plan_error(error, (), kind)
        raise PlanError(
            f"{path} is not understood: {mistakes}; expected {', '.join(kind.model_fields)}"
        ) from None
