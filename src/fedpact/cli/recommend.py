"""`fedpact execute_recommend`: a configuration for a budget, from public numbers alone."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.table import Table

from fedpact.cli.console import show
from fedpact.common.errors import DataError, InputError
from fedpact.common.files import write_whole
from fedpact.common.notebook import print_table
from fedpact.studies.circumstances import Circumstances
from fedpact.studies.recommend import FITTED_ON, Recommendation


def execute_recommend(asked: Circumstances, out: Path | None, *, as_json: bool) -> None:
    """Carry out `fedpact execute_recommend`. Raises InputError: `out` is there, or has another
    ending."""
    if out is not None and (out.exists() or out.suffix != ".toml"):
        raise InputError(
            f"--out is {out}, {'which is there' if out.exists() else 'which is no TOML'}: name a "
            "file that is not there yet, as study.toml"
        )
    try:
        found = Recommendation.of(asked)
    except DataError as error:
        if "records" in asked.document or "[records]" not in str(error):
            raise
        raise DataError(f"{error}. [records] stands in a TOML: --columns FILE") from None
    if out is not None:
        try:
            write_whole(out, found.toml().encode(), private=False)
        except (OSError, UnicodeEncodeError) as error:
            raise InputError(f"--out is {out}, which cannot be written: {error}") from None
    document = {
        "configuration": found.raw,
        "reasons": found.reasons,
        "alternatives": [asdict(row) for row in found.rows],
        "fitted_on": FITTED_ON,
    }
    show(document, as_json, lambda: _print(asked, found, out))


def _print(asked: Circumstances, found: Recommendation, out: Path | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if out is None:
        console.print(found.toml(), markup=False)
    else:
        run = "" if asked.size else f"; run it with `fedpact run {quote(str(out))}`"
        console.print(f"Written: {out}{run}.")
    counted = "classes" if asked.size else "classes, number of records that fit what is declared"
    table = Table("", "weights", "q", "T", "σ", "signal to noise")
    for row in found.rows:
        weights, sigma, snr = f"{row.weights:,}", f"{row.sigma:.4g}", f"{row.snr:.3g}"
        table.add_row(row.what, weights, f"{row.rate:g}", f"{row.rounds}", sigma, snr)
    print_table(console, table)
    console.print(
        "Signal to noise: how far clipped gradients can move the model at most, over how far noise "
        "does, in the whole run: sqrt(T) q N / (σ sqrt(K/h) sqrt(d)). At q = 1 it is the same for "
        "every T; rounds and features are for what the model learns. Of the data only shape, "
        f"{counted} and own sites are used. The rule was fitted on {FITTED_ON}."
    )
