"""`fedpact execute_export`: a run's statement as a registry's entry, a model card, or a summary."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedpact.cli.console import show
from fedpact.common.files import check_file, write_whole
from fedpact.report import export, model_card
from fedpact.report.export import Facts, about_of
from fedpact.report.run_files import read_run


def execute_export(
    run: Path, form: str, out: Path | None, overrides: Sequence[str], as_json: bool
) -> None:
    """Carry out `fedpact execute_export`. form: "registry", "model-card" or "summary"."""
    if out is not None:
        check_file("--out", out)
    found = read_run(run)
    facts = Facts(found, about_of(found.plan, overrides))
    if form == "registry":
        document = export.entry(facts)
        text = export.as_yaml(document)
    elif form == "summary":
        document, text = model_card.summarise_facts(facts), model_card.render_summary(facts)
    else:
        text = model_card.render_model_card(facts)
        document = {"markdown": text}
    if out is not None:
        write_whole(out, text.encode(), private=False)
    for warning in facts.warnings:
        Console(stderr=True, highlight=False, quiet=as_json).print(warning, markup=False)
    wrote = {} if out is None else {"file": str(out)}

    def tell() -> None:
        sys.stdout.write(text if out is None else f"{out}\n")

    show({**document, **wrote}, as_json, tell)
