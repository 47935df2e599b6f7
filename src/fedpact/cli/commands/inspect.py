"""`fedpact inspect`: what a file holds, and a draft of what to declare of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedpact.cli.console import AsJson, plain_console, show
from fedpact.common.errors import DataError, FedpactError
from fedpact.common.format import count_noun, duration, number, percent, upper
from fedpact.common.notebook import print_table

if TYPE_CHECKING:
    from fedpact.data.summary import ColumnSummary
    from fedpact.deployment.check import SiteCheck

_MESSAGE_SECONDS = 0.1


def inspect(
    file: Annotated[Path, typer.Argument(help="Records: .csv, .parquet or .npz.")],
    label: Annotated[str | None, typer.Option(help="The column with the labels.")] = None,
    site: Annotated[str | None, typer.Option(help="The column with the site names.")] = None,
    person: Annotated[
        str | None, typer.Option(help="The column with the person that a record belongs to.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draft the records table of a plan from a file, to be checked by a person."""
    from fedpact.data.summary import draft

    text, columns = draft(file, {"label": label, "site": site, "person": person})
    document = {"draft": text, "columns": [asdict(one) for one in columns]}

    def both() -> None:
        print_columns(columns, plain_console(stderr=True))
        print(text, end="")

    show(document, as_json, both)


def check_sites(directory: Path, as_json: bool) -> None:
    """Carry out `fedpact deploy check`."""
    found = _check_all(sites_of(directory))
    document = {"sites": {one.site: asdict(one) for one in found}}

    def text() -> None:
        for one in found:
            print_check(one)

    show(document, as_json, text)
    # The problems are in the output already.
    if any(one.problems for one in found):
        raise typer.Exit(FedpactError.exit_code)


def check_before_start(directory: Path) -> None:
    """Print the check of each site before it starts. Raises FedpactError: one cannot start."""
    found = _check_all(sites_of(directory, least=0))
    for one in found:
        if one.problems:
            print_check(one)
        else:
            plain_console().print(_line(one))
            for remark in one.remarks:
                plain_console().print(f"  {remark}")
    if bad := [one.site for one in found if one.problems]:
        raise FedpactError(
            f"no party was started: {', '.join(bad)} cannot start, for the reasons above. Nothing "
            "was reserved or charged"
        )


def _check_all(sites: Sequence[Path]) -> list[SiteCheck]:
    from fedpact.deployment.check import check_site

    # The table counts skipped records; row numbers are for the site's log.
    logging.getLogger("fedpact").addHandler(logging.NullHandler())
    found = [check_site(where) for where in sites]
    files = dict[str, str]()
    for one in found:
        if (other := files.setdefault(str(Path(one.file).resolve()), one.site)) != one.site:
            one.remarks.append(f"site {other} reads the same file: is one of the paths wrong?")
    return found


def sites_of(directory: Path, least: int = 1) -> list[Path]:
    """Return the sites' directories below a directory. Raises DataError: there is none."""
    from fedpact.deployment import processes

    places = [
        where for where in processes.parties(directory).values() if (where / "site.toml").exists()
    ]
    if len(places) < least:
        raise DataError(
            f"{directory} is not a site's directory: name one, or the whole deployment's"
        )
    return places


def print_check(found: SiteCheck) -> None:
    """Print a site's check."""
    out = plain_console()
    out.print(f"site {found.site}, run {found.run}: {found.file}")
    others = [name for name in found.unexpected if name not in found.renamed.values()]
    if others:
        out.print(f"undeclared columns, ignored: {', '.join(others)}")
    if found.columns:
        print_columns(found.columns, out)
    if found.records:
        _print_records(found)
    _print_cost(found)
    for remark in found.remarks:
        out.print(f"note: {remark}")
    if found.mends:
        told = "lines for [columns] of site.toml that may mend this; read each of them:"
        out.print(told)
        for line in found.mends:
            out.print(f"  {line}")
    for problem in found.problems:
        out.print(f"problem: {problem}", style="red")
    if found.approvals:
        needed = count_noun(found.approvals, "more approval")
        out.print(f"{needed} needed: `fedpact deploy approve {found.directory} --by NAME`")
    bad = bool(found.problems)
    ready = "ready to start" + ", once approved" * bool(found.approvals)
    out.print("cannot start" if bad else ready, style="red" if bad else "green")
    out.print("Exact figures of this site's records, for its owner only; none of them is sent.")


def print_columns(columns: Sequence[ColumnSummary], out: Console) -> None:
    """Print columns, next to their declarations if there are any."""
    declared = any(one.declared for one in columns)
    headings = ["column", "holds", "minimum", "median", "maximum", "missing"]
    headings += ["not as declared", "declared"] * declared
    rows = list[list[str]]()
    for one in columns:
        kind = one.kind if declared else one.remark.partition(". ")[0] or one.kind
        cells = [one.name, kind, *map(number, (one.low, one.median, one.high))]
        cells += [percent(one.missing), percent(one.outside), one.declared]
        rows.append(cells[: len(headings)])
    print_table(out, headings, rows)


def _print_records(found: SiteCheck) -> None:
    out = plain_console()
    if found.left_out:
        rows = [(column or "the record", why, f"{n:,}") for column, why, n in found.left_out]
        print_table(out, ("left out by column", "reason", "records"), rows)
    out.print(_line(found))
    if found.classes:
        told = ", ".join(f"{name} {count:,}" for name, count in found.classes.items())
        out.print(f"classes: {told}")


def _print_cost(found: SiteCheck) -> None:
    """Print what a run costs a site, beside what other runs have reserved."""
    out = plain_console()
    if found.epsilon is None or found.delta is None:
        return
    promised = "has reserved" if found.reserved else "will reserve"
    told = f"cost: the run {promised} (ε, δ) = ({upper(found.epsilon)}, {upper(found.delta)})"
    if found.evaluation is not None:
        told += ", and for held-out records ({}, {})".format(*map(upper, found.evaluation))
        told += ", of which the larger counts"
    if found.epsilon_ever is not None:
        most = max(found.epsilon, (found.evaluation or (0.0,))[0])
        left = max(0.0, found.epsilon_ever - found.epsilon_before - most)
        told += (
            f"; other runs have reserved ε = {upper(found.epsilon_before)} of the "
            f"{upper(found.epsilon_ever)} that policy.toml allows over all runs, so {number(left)} "
            "remain after this one"
        )
    out.print(f"{told}.")
    if found.seconds is not None:
        out.print(
            f"time: about {duration(found.seconds)} per round on this machine "
            f"({count_noun(found.steps, 'step')}), plus {_MESSAGE_SECONDS} s for each site's "
            f"messages; at most {count_noun(found.rounds, 'round')}"
        )


def _line(found: SiteCheck) -> str:
    persons = "" if found.persons is None else f" of {count_noun(found.persons, 'person')}"
    out = found.records - found.used
    return (
        f"site {found.site}: {found.used:,} of {count_noun(found.records, 'record')}{persons} "
        f"used, {out:,} left out ({percent(out / found.records if found.records else 0.0)})"
    )
