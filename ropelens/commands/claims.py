"""The command `ropelens claims`: a ledger of published claims, of one model or of several."""

from __future__ import annotations

from functools import partial
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropelens.analysis.options import Options, Out, TextOption, with_options
from ropelens.checkpoints.load_options import option
from ropelens.commands.terminal import finish
from ropelens.errors import BadArgument
from ropelens.runtime.progress import opening, show_progress

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


@with_options(Options, only=Options.__dataclass_fields__.keys() - {"prompts", "attention_on"})
def claims(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|DIR",
            help="What ropelens analyze takes, or folders that ropelens analyze or claims "
            "wrote, which are not measured again. Several stand side by side. "
            "[default: bundled]",
        ),
    ] = None,
    *,
    out: Out = Path("claims"),  # beside the `out` of analyze
    text: TextOption = None,
    quick: Annotated[
        bool,
        option(None, "Leave out the claims for which the model runs again.", name="--quick"),
    ] = False,
    options: Options,
) -> None:
    """Test published claims about RoPE on a model: which of them hold here?

    Each claim is a number of the model beside what chance and geometry give. Its verdict is
    one of four words: holds, contradicted, unresolved, not testable. Writes index.html (the
    page), claims.csv (a row per claim and model) and run.json to DIR, prints the table, and the
    path of the page. What ropelens analyze writes of a model goes to DIR/NAME.

    \b
    Examples:
      ropelens claims
      ropelens claims analyzed/llama analyzed/qwen --out out
      ropelens claims ./my-llama --text book.txt --out out
    """
    from ropelens.checkpoints.names import name_checkpoints
    from ropelens.runtime.results import PAGE, check_out, other_place, read_record

    given = name_checkpoints(models or ["bundled"])
    check_out(out, "claims", parts=given)
    with opening(show_progress, "starting"):  # torch and transformers take seconds
        import pandas as pd

        from ropelens.claims.claim_runs import test_claims
        from ropelens.report.claims import read_ledger
        from ropelens.report.tables import short_facts
    kinds = {name: read_record(place).get("kind") for name, place in given.items()}
    if text and not {None, "comparison"} & {*kinds.values()}:
        raise BadArgument("Saved results are not measured again.", hint="without --text")
    ledgers: dict[str, tuple[pd.DataFrame | None, dict[str, Any]]] = {}
    for name, place in given.items():
        if kinds[name] in (None, "comparison") and not (text or place.startswith("bundled")):
            raise other_place(place, "what ropelens analyze wrote, or a model with --text FILE")
        ledgers[name] = read_ledger(place) if kinds[name] == "claims" else (None, {name: {}})
    names = [name for _, of in ledgers.values() for name in of]
    if len(set(names)) < len(names):
        raise BadArgument("A ledger has each model once.", seen=", ".join(names))
    tables: list[pd.DataFrame] = []
    runs: dict[str, Any] = {}
    for name, (table, of) in ledgers.items():
        place = given[name]
        if table is None:
            profile, more = _measured(place, text, options, out / name)
            place = str(out / name) if more else place
            table = test_claims(profile, seed=options.seed, **({} if quick else more))
            table = table.assign(model=name)
            of[name] = {"facts": ", ".join(short_facts(profile)), "page": PAGE}
            of[name]["tokens_sha256"] = profile.attrs["tokens_sha256"]
        for run in of.values():
            if "page" in run:  # that of the analysis, which has the figures
                run["page"] = relpath(Path(place) / run["page"], out)
        runs |= of
        tables.append(table)
    _write(out, pd.concat(tables), runs)
    finish(out)


def _write(folder: Path, table: pd.DataFrame, runs: dict[str, Any]) -> None:
    """Print the table; write it, its page and run.json, whole or not at all."""
    from ropelens.analysis.plan import this_command
    from ropelens.figures.formats import signed
    from ropelens.profiles.measurement import versions
    from ropelens.report.claims import claims_sentences, render_claims
    from ropelens.report.render import write_sentence
    from ropelens.runtime.results import write_folder

    shown = table[["claim", "verdict", "number", "null_low", "null_high", "q_value"]]
    for name, of in shown.groupby(table["model"], sort=False):
        words = of.to_string(index=False, na_rep="–", float_format=partial(signed, form=".3g"))
        typer.echo(f"{name}\n{words}\n", err=True)
    numbers = dict(zip(table["claim"], table["what"], strict=True))
    meanings = [f"  {claim}: {what}" for claim, what in numbers.items()]
    typer.echo("\n".join([write_sentence("claims", "table"), *meanings, ""]), err=True)
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


def _measured(
    place: str, text: TextOption, options: Options, folder: Path
) -> tuple[xr.Dataset, dict[str, Any]]:
    """The profile of a folder of results; or of a model, with what claims try on it.

    What is measured of a model is saved in `folder`.
    """
    from ropelens.analysis.analyze import analyze
    from ropelens.runtime.results import open_results, read_record

    if read_record(place):
        return open_results(Path(place) / "profile.nc", "profile"), {}
    analysis = analyze(place, text, options, progress=show_progress)
    with opening(show_progress, "writing"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        analysis.save(folder)
    more: dict[str, Any] = {"model": analysis.model, "tokenizer": analysis.tokenizer}
    more |= {"progress": show_progress}
    return analysis.profile, more | {"text": analysis.text}
