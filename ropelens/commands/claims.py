"""The command `ropelens claims`, which tests published claims on one or several models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropelens.analysis.options import ClaimsOut, TextOption, check_names, with_options
from ropelens.checkpoints.local import is_bundled
from ropelens.checkpoints.names import name_checkpoints
from ropelens.commands.claim_settings import (
    Ledger,
    Testing,
    ledger_of_settings,
    print_expected_time,
    print_plans,
    settings_of,
)
from ropelens.commands.measure import PlanOption
from ropelens.commands.terminal import finish, out_or_own, print_lines
from ropelens.errors import BadArgument
from ropelens.runtime.progress import opening, show_progress

if TYPE_CHECKING:
    import pandas as pd

PLACES_HELP = "Models, or folders that analyze or claims wrote. [default: bundled]"
SHOWN_COLUMNS = (
    "claim",
    "layers",
    "verdict",
    "number",
    "null_low",
    "null_high",
    "q_value",
)


@with_options(
    Testing, only=Testing.__dataclass_fields__.keys() - {"prompts", "attention_on"}
)
def claims_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|DIR", help=PLACES_HELP, callback=check_names),
    ] = None,
    *,
    out: ClaimsOut = None,
    text: TextOption = None,
    plan: PlanOption = False,
    options: Testing,
) -> None:
    """Test published claims about RoPE on one or several models.

    Each claim compares a number of the model with its values under chance and geometry. The
    verdict is one of four: holds, contradicted, unresolved, not testable. Writes index.html
    (the page), claims.csv and claims.json (one row per claim and model) and run.json to DIR,
    and prints the table and the path of the page. DIR/NAME contains the analysis of each
    measured model. The same command can be repeated after a stop, and continues.

    \b
    Examples:
      ropelens claims
      ropelens claims analyzed/llama analyzed/qwen --out out
      ropelens claims analyzed/llama --model ./my-llama --text book.txt --out out
      ropelens claims ./my-llama --text a.txt --text b.txt --contexts 1024,2048 --robust
    """
    from ropelens.runtime.own_folder import begun
    from ropelens.runtime.result_folder import check_out

    out = out_or_own(out, "claims")
    places = name_checkpoints(models or ["bundled"])
    if not plan:
        check_out(out, "claims", parts=places)
    ledgers = _read_ledgers(out, places, text, options)
    settings = {}
    with opening(show_progress, "reading"):  # find errors before the first measurement
        for name, place in places.items():
            if name not in ledgers:
                settings[name] = settings_of(
                    out / name, place, text, options, run=not plan
                )
    if plan:
        for of_model in settings.values():
            print_plans(of_model)
        return
    if options.robust:
        for of_model in settings.values():
            print_expected_time(of_model)
    with begun(out):
        for name, of_model in settings.items():
            ledgers[name] = ledger_of_settings(of_model, name, out, options)
        _write(out, places, [ledgers[name] for name in places], options)
    finish(out)


def _read_ledgers(
    out: Path, places: dict[str, str], text: TextOption, options: Testing
) -> dict[str, Ledger]:
    """The ledgers among the places, by name. Refuses options that do not fit the places."""
    from ropelens.report.claims_page import read_ledger
    from ropelens.runtime.run_record import read_record

    kinds = {name: read_record(place).get("kind") for name, place in places.items()}
    models = [name for name in places if kinds[name] in (None, "comparison")]
    _check_options(places, models, text, options)
    ledgers = {}
    names: list[str] = []
    for name, place in places.items():
        if kinds[name] == "claims":
            ledgers[name] = Ledger(*read_ledger(place, out))
            names += ledgers[name].models
        else:
            names.append(name)
    if len(set(names)) < len(names):
        raise BadArgument(
            "A ledger has each model once.",
            seen=", ".join(names),
            hint="each name only once",
        )
    return ledgers


def _check_options(
    places: dict[str, str], models: list[str], text: TextOption, options: Testing
) -> None:
    """Raise `BadArgument` for options that do not fit the places; `models` are not saved."""
    again = "Saved results are not measured again."
    if options.contexts and not options.robust:
        raise BadArgument(
            "--contexts belongs to --robust.", hint="--context, or --robust"
        )
    if options.model is not None:
        several = len(places) > 1 or models
        has_text = text or is_bundled(options.model)
        if several or not has_text or options.robust:
            raise BadArgument(
                "--model is the model of one analyzed folder, and needs its --text.",
                hint="ropelens claims DIR --model MODEL --text FILE",
            )
    elif options.robust and len(models) < len(places):
        raise BadArgument(again, hint="without --robust")
    elif text and not models:
        raise BadArgument(again, hint="without --text")


def _write(
    out: Path, places: dict[str, str], ledgers: list[Ledger], options: Testing
) -> None:
    """Print the table of all models, and write it with its page."""
    import pandas as pd

    from ropelens.profiles.measurement import versions
    from ropelens.report.claims_page import render_claims
    from ropelens.report.sentences.claims import claims_sentences
    from ropelens.runtime.result_folder import ResultFolder
    from ropelens.runtime.run_record import this_command

    table = pd.concat([ledger.table for ledger in ledgers])
    models = {}
    for ledger in ledgers:
        models.update(ledger.models)
    _print_table(table)
    names = [facts.get("model", name) for name, facts in models.items()]
    name = names[0] if len(names) == 1 else f"{len(names)} models"
    findings = claims_sentences(table, places)
    record = {
        "command": this_command(),
        "versions": versions(bridged=options.uses_bridge),
        "findings": findings,
        "model": {"name": name},
        "runs": models,
    }
    results = ResultFolder(
        kind="claims",
        findings=findings,
        files={"claims.csv": table, "claims.json": table},
        record=record,
        page=partial(render_claims, table, record),
    )
    results.write(out)


def _print_table(table: pd.DataFrame) -> None:
    """Print the verdicts of each model on stderr, and what the numbers are."""
    from ropelens.figures.formats import signed
    from ropelens.report.sentences.claims import TABLE_COLUMNS

    columns = list(SHOWN_COLUMNS)
    if "robust" in table:
        columns.append("robust")
    number = partial(signed, form=".3g")
    for model, rows in table[columns].groupby(table["model"], sort=False):
        verdicts = rows.to_string(index=False, na_rep="–", float_format=number)
        print_lines(f"{model}\n{verdicts}\n", err=True)
    numbers = dict(zip(table["claim"], table["what"], strict=True))
    lines = [TABLE_COLUMNS]
    for claim, meaning in numbers.items():
        lines.append(f"  {claim}: {meaning}")
    print_lines("\n".join([*lines, ""]), err=True)
