"""The command `ropelens claims`, which tests published claims on one or several models."""

from __future__ import annotations

from functools import partial
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropelens.analysis.options import Options, OutOption, TextOption, with_options
from ropelens.checkpoints.load_options import option
from ropelens.checkpoints.names import name_checkpoints
from ropelens.commands.terminal import finish, print_lines
from ropelens.errors import BadArgument
from ropelens.runtime.progress import opening, show_progress

if TYPE_CHECKING:
    import pandas as pd

    from ropelens.analysis.plan import Plan


@with_options(Options, only=Options.__dataclass_fields__.keys() - {"prompts", "attention_on"})
def claims_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|DIR",
            help="Models as for ropelens analyze, or folders that ropelens analyze or claims "
            "wrote, which are not measured again. [default: bundled]",
        ),
    ] = None,
    *,
    out: OutOption = Path("claims"),
    text: TextOption = None,
    quick: Annotated[
        bool, option(None, "Skip the claims that need more runs of the model.", name="--quick")
    ] = False,
    options: Options,
) -> None:
    """Test published claims about RoPE on one or several models.

    Each claim compares a number of the model with its values under chance and geometry. The
    verdict is one of four: holds, contradicted, unresolved, not testable. Writes index.html
    (the page), claims.csv (one row per claim and model) and run.json to DIR, and prints the
    table and the path of the page. DIR/NAME contains the analysis of each measured model.

    \b
    Examples:
      ropelens claims
      ropelens claims analyzed/llama analyzed/qwen --out out
      ropelens claims ./my-llama --text book.txt --out out
    """
    from ropelens.runtime.results import PAGE, check_out, read_record

    places = name_checkpoints(models or ["bundled"])
    check_out(out, "claims", parts=places)
    with opening(show_progress, "starting"):  # importing torch takes seconds
        from ropelens.analysis.analysis import check_model
        from ropelens.analysis.analyze import run_plan
        from ropelens.analysis.plan import plan_analysis
        from ropelens.claims.claim_runs import test_claims
        from ropelens.profiles.measures import open_profile
        from ropelens.report.tables import short_facts
    tables: list[pd.DataFrame] = []
    runs: dict[str, Any] = {}
    ledgers = _read_ledgers(places, text)
    plans: dict[str, Plan] = {}
    with opening(show_progress, "reading"):  # find errors before the first measurement
        for name in (name for name, place in places.items() if not read_record(place)):
            plans[name] = plan_analysis(places[name], text, options)
            check_model(out / name, plans[name].model, again=places[name])
    for name, (table, entries) in ledgers.items():
        place = places[name]
        if table is None:
            run: dict[str, Any] = {}  # arguments that run the model again
            if name in plans:
                analysis = run_plan(plans[name], folder=None, progress=show_progress)
                place = str(out / name)
                with opening(show_progress, "writing"):
                    out.mkdir(parents=True, exist_ok=True)
                    analysis.save(place, again=places[name])
                run = {n: getattr(analysis, n) for n in ("model", "tokenizer", "text")}
                run["progress"] = show_progress
            profile = analysis.profile if run else open_profile(Path(place) / "profile.nc")
            table = test_claims(profile, seed=options.seed, **({} if quick else run))
            table = table.assign(model=name)
            entries[name] = {"facts": ", ".join(short_facts(profile)), "page": PAGE}
            entries[name]["tokens_sha256"] = profile.attrs["tokens_sha256"]
        for entry in entries.values():
            if "page" in entry:  # the page of the analysis
                entry["page"] = relpath(Path(place) / entry["page"], out)
        runs |= entries
        tables.append(table)
    _write_ledger(out, tables, runs)
    finish(out)


def _read_ledgers(
    places: dict[str, str], text: TextOption
) -> dict[str, tuple[pd.DataFrame | None, dict[str, Any]]]:
    """Table and `runs` of each ledger, by name. Other places have None and an empty run."""
    from ropelens.report.claims import read_ledger
    from ropelens.runtime.results import other_place, read_record

    kinds = {name: read_record(place).get("kind") for name, place in places.items()}
    if text and not {None, "comparison"} & {*kinds.values()}:
        raise BadArgument("Saved results are not measured again.", hint="without --text")
    ledgers: dict[str, tuple[pd.DataFrame | None, dict[str, Any]]] = {}
    for name, place in places.items():
        if kinds[name] in (None, "comparison") and not (text or place.startswith("bundled")):
            raise other_place(place, "an analyzed folder, or a model with --text FILE")
        ledgers[name] = read_ledger(place) if kinds[name] == "claims" else (None, {name: {}})
    names = [name for _, entries in ledgers.values() for name in entries]
    if len(set(names)) < len(names):
        what, seen = "A ledger has each model once.", ", ".join(names)
        raise BadArgument(what, seen=seen, hint="each name only once")
    return ledgers


def _write_ledger(folder: Path, tables: list[pd.DataFrame], runs: dict[str, Any]) -> None:
    import pandas as pd

    from ropelens.analysis.plan import this_command
    from ropelens.figures.formats import signed
    from ropelens.profiles.measurement import versions
    from ropelens.report.claims import claims_sentences, render_claims
    from ropelens.report.render import write_sentence
    from ropelens.runtime.results import write_folder

    table = pd.concat(tables)
    shown = table[["claim", "verdict", "number", "null_low", "null_high", "q_value"]]
    for name, rows in shown.groupby(table["model"], sort=False):
        number = partial(signed, form=".3g")
        lines = rows.to_string(index=False, na_rep="–", float_format=number)
        print_lines(f"{name}\n{lines}\n", err=True)
    numbers = dict(zip(table["claim"], table["what"], strict=True))
    meanings = [f"  {claim}: {what}" for claim, what in numbers.items()]
    print_lines("\n".join([write_sentence("claims", "table"), *meanings, ""]), err=True)
    record = {
        "kind": "claims",
        "findings": claims_sentences(table),
        "command": this_command(),
        "model": {"name": ", ".join(runs) if len(runs) == 1 else f"{len(runs)} models"},
        "runs": runs,
        "versions": versions(),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    page = partial(render_claims, table, record)
    write_folder(folder, record=record, results={"claims.csv": table}, page=page)
