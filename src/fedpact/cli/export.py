"""`fedpact export`: a run as a model card."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedpact.cli.console import show
from fedpact.common.files import check_file, write_whole
from fedpact.report.model_card import Facts, about_of, render_model_card
from fedpact.report.run_summary import read_run


def execute_export(run: Path, out: Path | None, overrides: Sequence[str], as_json: bool) -> None:
    """Carry out `fedpact export`. out: the file to write; None prints the card."""
    if out is not None:
        check_file("--out", out)
    found = read_run(run)
    facts = Facts(found, about_of(found.plan, overrides))
    text = render_model_card(facts)
    if out is not None:
        write_whole(out, text.encode(), private=False)
    for warning in facts.warnings:
        Console(stderr=True, highlight=False, quiet=as_json).print(warning, markup=False)
    wrote = {} if out is None else {"file": str(out)}

    def tell() -> None:
        sys.stdout.write(text if out is None else f"{out}\n")

    show({"markdown": text, **wrote}, as_json, tell)
