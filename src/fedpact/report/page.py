"""The page of a run, and how to repeat the run."""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from fedpact.common.configuration import DEFAULTS_KEY, flatten
from fedpact.common.files import write_whole
from fedpact.common.format import (
    against_majority_class,
    count_noun,
    duration,
    format_metric,
    headline_metric,
    lower,
    number,
    percent,
    size,
    upper,
)
from fedpact.common.messages import REASONS
from fedpact.common.notebook import CardFigure, TextTable
from fedpact.common.user_code import get_handed_in
from fedpact.evaluation.intervals import wilson_interval
from fedpact.evaluation.metrics import METRICS, find_display, ranking
from fedpact.privacy.accounting.accountant import ACCOUNTANTS
from fedpact.report import charts, evaluations
from fedpact.report.evaluations import JOINING_NOTE, joining_rows, joining_table, summarise_joining
from fedpact.report.meaning import explain_run
from fedpact.report.run_summary import RunSummary, SitePrivacy, read_run
from fedpact.report.template import page

_SAME = (
    "It trains the same model, bit for bit, from the same data, with the versions below on the "
    "same kind of machine."
)
_GIVEN = (
    "The records were given in Python and are not part of the plan: give the same ones, or "
    "fedpact trains on the data that plan.json names."
)
_HANDED = (
    "Objects given in Python are not part of the plan, which stores only their digest: {what}. "
    "Pass the same ones, and the test set as test=... if there was one; another data set is "
    "refused, and another model makes another plan."
)
_FORMS: Final = {"task.loss": "loss=...", "task.metrics": "metrics=[...]"}
_TEST = (
    "Every party drew from the plan's seed, so a simulation repeats the run: the same model, bit "
    "for bit, if the sites' records were those that `fedpact deploy init` gave them, if "
    "features' weights are where plan.json names them, and if every reply arrived in its round."
)
_SECURE = (
    "This run cannot be repeated, as each site drew its batches and noise from secret "
    "randomness. The command simulates its plan with plan.json's data and the plan's seed, which "
    "spends no budget. To train at the same sites again, name a new run in federation.toml at "
    "every party; each site's ledger then reserves and spends again."
)
_LEDGERS = "run.ledgers names ledgers that are kept: a repetition reserves and spends there again."
_TIMED = "budget.seconds ends a run by measured time, which a repetition does not reproduce."
_REASONS: Final = 5
_CARD = "It trained on a GPU, whose random noise a CPU cannot reproduce."


def repeat(run: RunSummary) -> tuple[str, str]:
    """Return the command or the Python call that repeats a run, and what it gives, in words."""
    path, again = run.path / "plan.json", run.path.with_name(f"{run.path.resolve().name}-again")
    shell = f"fedpact run {shlex.quote(str(path))} --out {shlex.quote(str(again))}"
    randomness = str(run.privacy["randomness"])
    if randomness.startswith("secure"):
        return shell, _SECURE
    if randomness.startswith("seeded test"):
        return shell, _TEST
    given, budget = run.plan.get("run", {}), run.plan.get("budget", {})
    words = [_SAME]
    words += [_LEDGERS] if given.get("ledgers") else []
    words += [_TIMED] if budget.get("seconds") else []
    words += [_CARD] if given.get("device", "cpu") != "cpu" else []
    if own := get_handed_in(run.plan):
        what = " and ".join(f"{key} {', '.join(names)}" for key, names in own.items())
        return _in_python(path, own), " ".join([_HANDED.format(what=what), *words])
    if run.environment.get("data") == "given":
        return _in_python(path, ["data"]), " ".join([_GIVEN, *words])
    return shell, " ".join(words)


def _in_python(path: Path, given: Iterable[str]) -> str:
    """Return the call that repeats a run. given: the keys of objects to pass in."""
    own = "".join(f", {_FORMS.get(key, f'{key}=...')}" for key in given)
    return f"fedpact.run(fedpact.Plan.read(Path({str(path)!r})){own})"


def write_report(folder: Path) -> Path:
    """Write report.html into a run's folder and return its path.

    Raises DataError: the folder has no run, or a file in it is damaged.
    """
    return write_page(read_run(folder))


def write_page(run: RunSummary) -> Path:
    """Write report.html into the run's folder and return its path."""
    path = run.path / "report.html"
    write_whole(path, render_run(run).encode(), private=False)
    return path


def render_run(run: RunSummary) -> str:
    """Return the page as one HTML document."""
    # The papers' theory takes time to load.
    from fedpact.report.convergence import wire

    about = ACCOUNTANTS.get(str(run.privacy.get("accountant")))
    marked, settings = set(run.plan.get(DEFAULTS_KEY, ())), _flat(run.plan)
    left = [row for row in settings if row[0] in marked or row[1] == "–"]
    drawn = charts.draw_run(run)
    others = {name: drawn.pop(name, None) for name in ("labels", "epsilon", "bytes")}
    return page(
        "page",
        run=run,
        title=run.title,
        facts=_facts(run),
        cards=build_headline(run),
        meaning=explain_run(run),
        learned=list(drawn.values()),
        drawings=others,
        wire=wire(run),
        most_entropy=math.log(len(run.scores)) if run.scores else 0.0,
        released=evaluations.find_last_evaluation(run),
        unevaluated=evaluations.why_none(run),
        sites=_site_table(run),
        joining=joining_table(joining_rows([run])),
        paid=summarise_joining([run]),
        joining_note=JOINING_NOTE,
        condition=run.spent.condition if run.spent else "",
        accountant=about.told if about else "not known to this version",
        refusals=_refusals(run),
        repeat=repeat(run),
        configuration=[row for row in settings if row not in left and row[0] != DEFAULTS_KEY],
        defaults=[row for row in left if row[0] != DEFAULTS_KEY],
        environment=_flat(run.environment),
    )


def build_headline(run: RunSummary) -> list[CardFigure]:
    """Return the headline figures, which page, terminal and notebook show alike."""
    allowed = run.bytes_allowed
    rounds = run.plan.get("rounds")
    bytes_note = f"{size(run.bytes_down)} to the sites, {size(run.bytes_up)} from them"
    bytes_note += f"; {run.sockets}" if run.sockets else ""
    return [
        *_learning_cards(run),
        _epsilon_card(run),
        *_other_privacy_cards(run),
        CardFigure(
            "rounds",
            f"{run.last.round:,}" + (f" of {rounds:,}" if rounds else ""),
            f"{count_noun(run.last.steps, 'local step')} in the last; {run.ended}",
        ),
        *_control_card(run),
        *_left_out_card(run),
        CardFigure(
            "bytes sent",
            size(run.bytes),
            bytes_note + (f"; {size(allowed)} allowed" if allowed else "; no limit set"),
            bad=bool(allowed) and run.bytes > allowed,
        ),
        CardFigure("time", duration(run.seconds), "wall clock, all rounds, on the run's machine"),
        *_metric_cards(run),
    ]


def _learning_cards(run: RunSummary) -> Iterator[CardFigure]:
    pooled = run.pooled
    if run.evaluated:
        first, last = run.evaluated[0], run.evaluated[-1]
        note = f"the global model after round {last.round}"
        note += f"; mean loss {number(last.loss)}" if run.counted else ""
        if pooled:
            note += ", on the sites' own held-out records: "
            note += "each site has its own head" if run.head else "there is no public test set"
        if last.accuracy is not None and (records := run.summary.get("judged_records")):
            low, high = wilson_interval(last.accuracy, records)
            note += f"; 95 % interval {percent(low)} to {percent(high)} by "
            note += count_noun(records, "test record")
        if against := against_majority_class(last.accuracy, run.summary.get("commonest")):
            note += f"; {against}"
        if run.worse:
            note += f"; a loss of {number(first.loss)} before training: lower the learning rate"
        headline = headline_metric(last.accuracy, last.loss)
        yield CardFigure(*headline, note, bad=run.worse, simulator_only=pooled)
        if last.average:
            kind = last.describe_average(run.plan["server"]["average"])
            note = f"the {kind}; mean loss {number(last.average['loss'])}"
            value = headline_metric(last.average["accuracy"], last.average["loss"])[1]
            yield CardFigure("averaged model", value, note, simulator_only=pooled)
    if (found := evaluations.find_released_accuracy(run)) is not None:
        yield CardFigure("accuracy, released", *found)
    elif not run.evaluated:
        yield CardFigure("accuracy", "not evaluated", evaluations.why_none(run))
    if run.fairness:
        even = run.fairness
        note = f"{even['worst_site']}; the worst 10 % have {percent(even['worst_tenth'])}"
        yield CardFigure("worst site", percent(even["worst_accuracy"]), note, simulator_only=True)
    elif run.worst_loss is not None:
        note = f"mean loss at {ranking(run.scores)[0]}"
        yield CardFigure("worst site", number(run.worst_loss), note, simulator_only=True)


def _left_out_card(run: RunSummary) -> Iterator[CardFigure]:
    if out := run.summary.get("left_out"):
        why = [f"{column or 'a line'} {reason}: {count:,}" for column, reason, count in out["why"]]
        note = "; ".join([*why[:_REASONS], *["..."] * (len(why) > _REASONS)])
        value = f"{out['records']:,} of {out['of']:,}"
        yield CardFigure("records left out", value, note, simulator_only=True)


def _metric_cards(run: RunSummary) -> Iterator[CardFigure]:
    for name in run.measured:
        metric, last = find_display(name), [r for r in run.records if name in r.metrics][-1]
        value = format_metric(metric.form, last.metrics[name])
        note = f"{metric.note}; after round {last.round}"
        sim = run.pooled or name in METRICS
        yield CardFigure(metric.label, value, note, simulator_only=sim)


def _epsilon_card(run: RunSummary) -> CardFigure:
    if not run.private:
        why = run.privacy.get("why_unprotected")
        note = "no (ε, δ) guarantee of any kind" + (f": {why}" if why else "")
        return CardFigure("privacy", "NOT PRIVATE", note, bad=True)
    # An unknown ε may be the largest.
    name, site = max(
        run.site_privacy.items(),
        key=lambda item: math.inf if math.isnan(item[1].epsilon_spent) else item[1].epsilon_spent,
    )
    whose = f"site {name}"
    if len(run.site_privacy) > 1:
        whose = f"the most of {count_noun(len(run.site_privacy), 'site')} ({name})"
    over = [n for n, s in run.site_privacy.items() if s.epsilon_spent > s.epsilon_allowed]
    return CardFigure(
        "ε spent of ε allowed",
        f"{upper(site.epsilon_spent)} of {upper(site.epsilon_allowed)}",
        f"{whose}, at δ = {upper(site.delta)}; {run.privacy['adjacency']}; accountant "
        f"{run.privacy['accountant']}" + (f"; OVER BUDGET: {', '.join(over[:5])}" if over else ""),
        bad=bool(over),
    )


def _other_privacy_cards(run: RunSummary) -> Iterator[CardFigure]:
    if run.spent and run.spent.condition:
        # Without other sites' noise; each site's own needs no such figure.
        note = f"if all others collude; the ε next to it needs {run.spent.condition}"
        yield CardFigure("ε alone", upper(run.spent.alone), note)
    if found := run.released:
        value = f"{upper(max(found['epsilon_spent'].values()))} of {upper(found['epsilon'])}"
        yield CardFigure("ε of evaluations", value, evaluations.cost(found))
    # What all runs in the same kept ledgers may release together.
    kept = run.summary.get("ledgers")
    if kept and kept["runs"] >= 2:
        epsilon, delta = upper(kept["epsilon_reserved"]), upper(kept["delta_reserved"])
        note = f"{kept['runs']} runs in {run.plan['run']['ledgers']}: together ε ≤ {epsilon} at "
        yield CardFigure("ε of all runs", epsilon, f"{note}δ = {delta}")
    if run.audit and (most := run.audit.most):
        note = f"by {most.method}, {100 * most.confidence:.4g} % confidence; claimed "
        note += run.audit.claim + "; THE AUDIT CONTRADICTS THE CLAIM" * run.audit.wrong
        value = f"≥ {lower(most.bound)} of {upper(run.audit.guarantee.epsilon)}"
        yield CardFigure("ε audited", value, note, bad=run.audit.wrong)


def _control_card(run: RunSummary) -> Iterator[CardFigure]:
    """What a controller of τ did, and in how many rounds it had no clear estimate."""
    even, chosen = run.last.numbers.get("control/even"), [r.steps for r in run.records[1:]]
    if even is not None and chosen:
        note = f"τ from {min(chosen)} to {max(chosen)}; the budgets' even split, for want of a "
        note += f"clear estimate, in {even:,.0f} of {count_noun(len(chosen), 'round')}"
        yield CardFigure("local iterations", f"{sum(chosen):,}", note)


def _facts(run: RunSummary) -> list[str]:
    facts = [f"model {run.plan.get('model', 'unknown')}"]
    if d := run.summary.get("model_parameters"):
        facts.append(count_noun(d, "parameter"))
    facts.append(count_noun(len(run.sites) or run.plan.get("sites", 0), "site"))
    if run.drawn:
        facts.append(f"{run.plan.get('sites_per_round')} of them in each round")
    facts.append(run.ended)
    return [*facts, str(run.environment.get("run", run.path.resolve().name))]


def _site_table(run: RunSummary) -> TextTable:
    """Return a row for each site, worst first: its privacy and the last model's figures."""
    bounds: dict[str, Callable[[SitePrivacy], float]] = {
        "ε spent": attrgetter("epsilon_spent"),
        "ε alone": attrgetter("epsilon_alone"),
        "ε allowed": attrgetter("epsilon_allowed"),
        "ε reserved": attrgetter("epsilon_reserved"),
        "δ": attrgetter("delta"),
    }
    if not (run.spent and run.spent.condition):
        del bounds["ε alone"]
    terms = {"N": "size", "q": "rate", "C": "clip", "σ": "sigma", "T": "steps"}
    headings = [*bounds, *terms] if run.private else []
    headings += ["rounds"] * run.drawn + ["accuracy"] * run.counted + ["loss", "held out"]
    scored, rows = ranking(run.scores), list[tuple[str, ...]]()
    for name in [*scored, *(name for name in run.sites if name not in run.scores)]:
        score, privacy, row = run.scores.get(name), run.site_privacy.get(name), [name]
        if privacy:
            row += [upper(of(privacy)) for of in bounds.values()]
            row += [number(getattr(privacy, key)) for key in terms.values()]
            row[1] += " OVER" if privacy.epsilon_spent > privacy.epsilon_allowed else ""
        elif run.private:
            row += ["–"] * (len(bounds) + len(terms))
        if run.drawn:
            asked = sum(record.was_asked(name) for record in run.records)
            row.append(f"{sum(record.took_part(name) for record in run.records)} of {asked}")
        if run.counted:
            row.append(percent(score.accuracy) if score else "–")
        row += [number(score.loss), number(score.records)] if score else ["–", "–"]
        rows.append(tuple(row))
    return TextTable(tuple(headings), rows, "site")


def _refusals(run: RunSummary) -> list[tuple[str, str, list[int]]]:
    """Return each site and reason, with the rounds in which it refused for it."""
    rounds: dict[tuple[str, str], list[int]] = {}
    for record in run.records:
        for refused in record.refused.items():
            rounds.setdefault(refused, []).append(record.round)
    return [
        (site, f"{code}: it {REASONS[code]}" if code in REASONS else code, at)
        for (site, code), at in sorted(rounds.items())
    ]


def _flat(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (key, "–" if value in (None, {}) else str(value))
        for key, value in flatten(document).items()
    ]
