"""The validated configuration of a run, and how a notebook shows it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from fedpact import algorithms
from fedpact.algorithms import BaseSettings
from fedpact.algorithms.wrappers import combine
from fedpact.algorithms.wrappers.base import Method
from fedpact.algorithms.wrappers.combine import check_mode, combine_wrappers
from fedpact.algorithms.wrappers.compression import CompressionSettings
from fedpact.algorithms.wrappers.fairness_and_control import ControlSettings, FairnessSettings
from fedpact.algorithms.wrappers.optimizers import LocalSettings, ServerSettings
from fedpact.algorithms.wrappers.released_scales import why_not
from fedpact.algorithms.wrappers.robust import RobustSettings
from fedpact.common import configuration
from fedpact.common.configuration import (
    DEFAULTS_KEY,
    FROZEN,
    defaults_used,
    find_typed_keys,
    flatten,
    plan_error,
    read_configuration,
    select_given,
)
from fedpact.common.errors import PlanError
from fedpact.common.files import safe_name
from fedpact.common.format import upper
from fedpact.common.notebook import CardFigure, card, frame
from fedpact.common.randomness.seeded import Participants, size_of_round
from fedpact.common.run_settings import About, Limits, Running, SecureSettings, SimulatedClock
from fedpact.common.user_code import Named, get_handed_in
from fedpact.data.features.extract import FeatureStage
from fedpact.data.features.kinds import FeatureSettings
from fedpact.data.partition import PartitionSettings
from fedpact.data.schema import PlanRecords, RecordForm
from fedpact.evaluation.held_out import EvaluationSettings, Grouping, SumsForm, form_of
from fedpact.evaluation.tasks import TaskSettings
from fedpact.models.initial import InitialSettings
from fedpact.models.zoo import LogisticSettings, ViewSettings
from fedpact.privacy.settings import Privacy
from fedpact.privacy.terms import FullDataRelease, Terms

_RATE = 0.5  # q if neither it nor a batch size is given


class Plan(BaseModel):
    """Everything that determines a run. Mistakes raise one PlanError, which lists them all."""

    model_config = FROZEN
    data: str = "digits"
    """A data set's name (`fedpact data list`), or a .csv, .parquet or .npz file."""
    label: str | None = None
    """The column to predict, for a table."""
    site: str | None = None
    """The column that names a record's site. It makes partition.kind "natural" unless another is
    given."""
    person: str | None = None
    """The column with the person that a record belongs to."""
    model: Named = "logistic"
    """logistic, mlp, cnn, cnn_group_norm, cnn_padded, ngram, lstm, transformer, or one of your
    own as package.module:factory, called as factory(shape, classes) -> nn.Module."""
    algorithm: str = "fedavg"
    """The algorithm's name; `fedpact algorithms` lists them."""
    rounds: int = Field(default=30, ge=1)
    """T, the number of rounds of training."""
    sites: int = Field(default=5, ge=1)
    """K, the number of sites in a simulation."""
    sites_per_round: int | None = Field(default=None, ge=1)
    """m, the number of sites sampled for each round, from the public seed and round number; by
    default all sites take part."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The random seed of a simulation, which makes it repeatable bit for bit."""
    sampling_rate: float | None = Field(default=None, gt=0, le=1)
    """q, each record's probability of being in a batch; by default 0.5, or from batch_size."""
    batch_size: float | None = Field(default=None, gt=0)
    """B, the expected batch size, instead of q: q_i = B / N_i."""
    about: About = About()
    records: PlanRecords = PlanRecords()
    initial: InitialSettings = InitialSettings()
    features: FeatureSettings = FeatureSettings()
    views: ViewSettings = ViewSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    task: TaskSettings = TaskSettings()
    partition: PartitionSettings = PartitionSettings()
    logistic: LogisticSettings = LogisticSettings()
    settings: dict[str, Any] = Field(default_factory=dict)
    """The algorithm's own settings; `fedpact algorithms NAME` shows them."""
    privacy: Privacy = Privacy()
    fairness: FairnessSettings = FairnessSettings()
    control: ControlSettings = ControlSettings()
    server: ServerSettings = ServerSettings()
    local: LocalSettings = LocalSettings()
    compression: CompressionSettings = CompressionSettings()
    robust: RobustSettings = RobustSettings()
    secure_aggregation: SecureSettings = SecureSettings()
    budget: Limits = Limits()
    clock: SimulatedClock = SimulatedClock()
    run: Running = Running()
    policy: str | None = None
    """A TOML file with the policy that every simulated site has (policy.toml)."""

    def __init__(self, typed: Collection[str] | None = None, /, **raw: Any) -> None:
        """Validate a plan's keys. typed: those that must have an effect, None for all."""
        try:
            super().__init__(**configuration.plain(raw))
        except ValidationError as error:
            known = (name := raw.get("algorithm", "fedavg")) in algorithms.names()
            own = {"settings": algorithms.load(name).Settings} if known or ":" in str(name) else {}
            raise plan_error(error, (), Plan, own) from None
        combine.check_used(self, typed)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.site is not None and "kind" not in self.partition.model_fields_set:
            # Whoever names a site column wants these sites. The plan is still being validated, so
            # it may be changed.
            natural = self.partition.model_copy(update={"kind": "natural"})
            object.__setattr__(self, "partition", natural)
        self.task.check_plain("[evaluation]" * self.evaluation.used)
        self.privacy.check_rate(self.sampling_rate, self.batch_size)
        self.logistic.check_model(self.model)
        self.views.check_goes(self.task.plain, self.features.used)
        self.initial.check_model(self.model)
        mode = self.privacy.mode
        why = self.features.why_unstated or self.initial.why_unstated(self.model)
        why = why if mode != "none" else ""
        if why := why or why_not(self.records.released, self.features, self.privacy):
            raise ValueError(why)
        method, facts = self.method, self.method.facts
        combine.check_numbers(self)
        check_mode(method, self.algorithm, mode)
        self.privacy.check_clips(self.rounds)
        if self.compression.kind == "auto":
            # plan.json records the choice. The plan is still being validated, so it may be changed.
            chosen = self.compression.settle(self.private and not self.records.released)
            object.__setattr__(self, "compression", chosen)
            vars(self).pop("method")
        self.compression.check_noise(self.why_unprotected)
        self.privacy.check_means(exact=facts.unprotected, released=bool(self.records.released))
        whose = f"algorithm = {self.algorithm!r}" + ", [fairness]" * (self.fairness.weight > 0)
        self.privacy.check_sum(self.secure_aggregation.threshold, whose, facts.needs_own_noise)
        self.check_sites(self.sites)
        self.clock.check(self.sites, facts.needs_all_sites, self.secure_aggregation.threshold)
        self.budget.check_method(facts.controlled, self.task.kind)
        self.evaluation.check_ends(
            self.budget.accuracy, self.budget.patience, self.private, self.rounds
        )
        if self.partition.validation and self.evaluation.used:
            raise ValueError(
                f"partition.validation = {self.partition.validation} with evaluation.share = "
                f"{self.evaluation.share}: a run that settings are chosen by releases no "
                "evaluation; leave [evaluation] out while choosing"
            )
        return self

    @cached_property
    def method(self) -> Method:
        """The algorithm with its settings and wrappers."""
        return combine_wrappers(
            self.algorithm,
            self.algorithm_settings,
            self.fairness,
            self._control,
            self.server,
            self.compression,
            self.robust,
            self.secure_aggregation,
            self.local,
            self.privacy,
            self.sites_per_round,
            self.rounds,
            len(self.records.released),
        )

    @cached_property
    def algorithm_settings(self) -> BaseSettings:
        """The [settings] table as the algorithm's own Settings."""
        module = algorithms.load(self.algorithm)
        try:
            found = module.Settings(**self.settings)
        except ValidationError as error:
            tables = {"settings": module.Settings}
            raise plan_error(error, ("settings",), module.Settings, tables, Plan) from None
        return combine.with_iterations(found, self.rounds) if self.privacy.calibrates else found

    @property
    def _control(self) -> ControlSettings:
        own, rounds = self.control, self.rounds
        return combine.with_iterations(own, rounds) if self.privacy.calibrates else own

    def stage(self, at: Path = Path(), form: RecordForm | None = None) -> FeatureStage:
        """Return the stage that scales records and computes features.

        at: the folder that relative paths of weights refer to. form: of a party's records, by
        default the plan's.
        """
        return FeatureStage(self.features, self.seed, at, form or self.form)

    @property
    def handed(self) -> list[str]:
        """The names of objects passed in from Python, which other processes cannot import."""
        return [
            n for key, own in get_handed_in(self.document()).items() if key != "data" for n in own
        ]

    @property
    def form(self) -> RecordForm:
        """The form of a record and its label, which all parties know."""
        return self.records.shared(self.task.target)

    def check_sites(self, count: int) -> None:
        """Raise PlanError if sites_per_round or [robust] does not allow so many sites."""
        self.robust.check_round(size_of_round(self.sites_per_round, count))

    @property
    def counts_sites(self) -> bool:
        """Whether the number of sites follows from the records, which name theirs."""
        return self.partition.kind == "natural" and "sites" not in self.model_fields_set

    @property
    def private(self) -> bool:
        """Whether everything that leaves the sites is protected."""
        return not self.why_unprotected

    @property
    def why_unprotected(self) -> str:
        """Why the run protects nobody; empty if it is private."""
        if self.privacy.mode == "none":
            why = self.method.facts.plain_only
            return 'privacy.mode = "none"' + (why and f", as {self.algorithm} has no private form")
        if self.method.facts.unprotected:
            return 'estimator = "raw": exact numbers over the records leave every site'
        return ""

    @property
    def noisy_sizes(self) -> bool:
        """Whether sites release their sizes with noise instead of declaring them."""
        return self.private and self.privacy.sizes == "noisy"

    def seeds(self, site: str, number: int) -> tuple[int, *tuple[int | str, ...]]:
        """Return the key of a site's seeded random numbers in a round.

        It includes the initial weights, if given: a run that continues another with the same seed
        must not repeat that run's noise.
        """
        start = self.initial.sha256
        own = self.seed, safe_name(site), number
        return own if start is None else (*own, start)

    def participants(self, sites: Iterable[str]) -> Participants:
        """Return which of all these sites take part in which round. Raises PlanError."""
        return Participants(self.seed, tuple(sorted(sites)), self.sites_per_round)

    @property
    def steps(self) -> int:
        """The most joint events (or plain batches) of a site that takes part in every round.

        τ times the rounds, or `control.iterations` if τ is controlled and they are given.
        """
        return self.method.facts.iterations or self.rounds * self.method.steps()

    def rate(self, site: str, size: float) -> float:
        """Return q_i of a site of nominal size N_i; B / N_i is rounded up to a shared grid."""
        return self.privacy.rate(site, size, self.sampling_rate or _RATE, self.batch_size)

    @property
    def head(self) -> int:
        """How many of the model's last numbers each site has of its own; 0 for none."""
        return self.local.head or getattr(self.algorithm_settings, "head", 0)

    @property
    def adaptive(self) -> bool:
        """Whether a run's number of events may follow from releases: then its ε is the reserved.

        The lengths of compressed replies, which use up a budget of bytes, follow from noise.
        """
        facts = self.method.facts
        coded = facts.coded and self.budget.bytes is not None
        return facts.controlled or facts.adaptive or coded

    def terms(self, sizes: Mapping[str, float]) -> dict[str, Terms]:
        """Return each site's terms for these sizes, declared or released; empty in a plain run.

        Raises PlanError: at the given sigma, a site's budget does not allow a single step.
        """
        mode = self.privacy.mode
        if mode == "none":
            return {}
        names = tuple(sorted(sizes))
        self.privacy.check_sites(names)
        self.privacy.check_shared(self.secure_aggregation.threshold, len(names))
        each = self.participants(names).rounds(self.rounds)
        unit = (self.terms_at_unit_noise(name, sizes[name], names, each[name]) for name in names)
        result = {asked.site: self.privacy.terms(names, asked) for asked in unit}
        return self.privacy.together(result)

    @property
    def held_out(self) -> float | str:
        """The share of each site's records that is held out; "own": as the data set says."""
        return self.evaluation.share or self.partition.held_out

    @cached_property
    def evaluation_terms(self) -> FullDataRelease | None:
        """What a site releases about its held-out records; None: nothing.

        Raises BudgetExhausted: no amount of noise is enough.
        """
        if not self.private:
            return None
        return self.evaluation.terms(self.rounds, self.budget.spare_rounds, self.privacy.accountant)

    def sums_form(self, classes: Sequence[str], groups: Grouping | None) -> SumsForm:
        """Return which sums of held-out records are computed and released, and when.

        Raises PlanError: they do not fit the classes.
        """
        unit, once = self.privacy.unit, self.evaluation_terms
        return form_of(self.evaluation, classes, groups, unit, once, self.rounds)

    def terms_at_unit_noise(
        self, name: str, size: float, names: tuple[str, ...], rounds: int
    ) -> Terms:
        """Return a site's terms at base σ = 1. rounds: the number it takes part in."""
        mode, spare = self.privacy.mode, self.budget.spare_rounds if rounds else 0
        if mode == "none":
            raise PlanError('privacy.mode = "none": a plain run has no terms')
        facts = self.method.facts
        opening = facts.opening if rounds + spare else None
        steps = facts.iterations or (rounds + spare) * self.method.steps()
        rate = self.rate(name, size)
        return Terms(
            site=name,
            size=size,
            rate=rate,
            clip=self.privacy.clip,
            clips=self.privacy.clips(self.rounds),
            sigmas=facts.channels,
            steps=steps,
            opening_rate=opening.rate if opening else 1.0,
            opening_sigmas=opening.ratios(rate, steps / (rounds + spare)) if opening else {},
            openings=rounds + spare if opening else 0,
            budget=self.privacy.budget(name, names),
            accountant=self.privacy.accountant,
            mechanism=mode,
            size_noise=self.privacy.size_noise if self.noisy_sizes else None,
            honest=self.privacy.honest,
            grid=facts.units,
            columns=self.privacy.release_of(self.records.released, name, names, 1 + spare),
            protects=self.privacy.unit,
        )

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{figure.label} {figure.value}' for figure in self._figures())})"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        whole = self.document()
        chosen = sorted(set(flatten(whole)) - {*whole[DEFAULTS_KEY], DEFAULTS_KEY})
        return card("Plan", self._figures(), below=f"chosen: {', '.join(chosen)}")

    def _figures(self) -> list[CardFigure]:
        largest = self.privacy.largest
        held = self.evaluation if self.evaluation.used and self.evaluation.releases else largest
        epsilon, delta = max(largest.epsilon, held.epsilon), max(largest.delta, held.delta)
        bound = f"{upper(epsilon)} per {self.privacy.unit}"
        if self.privacy.honest:
            bound += f", if {self.privacy.honest} sites of each sum are honest"
        named = {
            "algorithm": self.algorithm,
            "data": self.data,
            "model": str(self.model),
            "sites": f"{self.sites:,}",
            "sites per round": str(self.sites_per_round or ""),
            "rounds": f"{self.rounds:,}",
            "ε": bound if self.private else "NOT PRIVATE",
            "δ": str(delta) if self.private else "",
        }
        bad = not self.private
        return [CardFigure(n, v, bad=bad and n == "ε") for n, v in named.items() if v]

    def frame(self) -> Any:
        """Return every setting in effect as a DataFrame: key, value, default (nobody gave it)."""
        whole = self.document()
        unset = set(whole.pop(DEFAULTS_KEY))
        rows = [{"key": k, "value": v, "default": k in unset} for k, v in flatten(whole).items()]
        return frame(rows)

    def document(self) -> dict[str, Any]:
        """Return plan.json's content: every setting in effect, and which of them are defaults."""
        whole, own = self.model_dump(mode="json"), self.algorithm_settings
        whole["control"] = self._control.model_dump()
        settings = own.model_dump(mode="json")
        if self.method.facts.controlled:
            settings.pop("local_steps", None)
        if "learning_rate" in settings:
            settings["learning_rate"] = own.step_size
        whole["settings"] = settings | self.settings
        if self.batch_size is None:
            whole["sampling_rate"] = self.sampling_rate or _RATE
        unset = {key for key in defaults_used(self) if key != "settings"}
        unset |= {f"settings.{key}" for key in whole["settings"].keys() - self.settings}
        # Given as None, they are filled in all the same.
        if self.sampling_rate is None:
            unset.add("sampling_rate")
        if self.control.iterations is None:
            unset.add("control.iterations")
        return whole | {DEFAULTS_KEY: sorted(unset)}

    @staticmethod
    def parse(raw: Mapping[str, Any], typed: Collection[str] | None = None) -> "Plan":
        """Return the plan of a parsed configuration, such as plan.json.

        typed: keys that are refused if they have no effect; by default all, but none of plan.json.
        """
        return _validate(
            select_given(raw, _document), find_typed_keys(raw) if typed is None else typed
        )

    @staticmethod
    def read(path: Path | str | None, overrides: Sequence[str] = ()) -> "Plan":
        """Read a .toml or .json file (None: the embedded default) and apply `key=value` overrides.

        A value is read as TOML, or as a plain string if it is not TOML: `privacy.epsilon=1`,
        `data=mnist`. Raises PlanError: the file or an override cannot be read.
        """
        raw = read_configuration(path, overrides, lambda found: select_given(found, _document))
        typed = None if path is None else find_typed_keys(Path(path), overrides)
        private = any(configuration.key_of(text).startswith("privacy") for text in overrides)
        if path is None and not private and Method(raw["algorithm"]).facts.plain_only:
            # The default configuration asks for privacy; the user did not.
            raw["privacy"] = {"mode": "none"}
        return _validate(raw, typed)


def _validate(raw: Mapping[str, Any], typed: Collection[str] | None) -> Plan:
    if not isinstance(raw, Mapping):
        raise PlanError(f"a plan is {raw!r:.80}: expected a table of keys, as in a .toml file")
    return Plan(typed, **raw)


def _document(raw: Mapping[str, Any]) -> dict[str, Any]:
    return _validate(raw, ()).document()
