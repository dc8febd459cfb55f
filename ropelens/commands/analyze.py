"""The command `ropelens analyze`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropelens.analysis.options import Options
from ropelens.commands.options import Text, Tokenizer, name_of, path_of, with_options
from ropelens.commands.terminal import finish, measure, say
from ropelens.models.loading import option


@with_options(Options)
def analyze(
    run: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            parser=name_of,
            metavar="MODEL",
            help="A local folder, a Hub id, bundled, or bundled:NAME, which ropelens list "
            "names; or a folder of models, such as RUN/history. Several are measured one "
            "after another. [default: bundled]",
        ),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        option("DIR", "Folder for the results; needed without --plan.", parser=path_of),
    ] = None,
    plan: Annotated[
        bool,
        option(None, "Print what would run and its memory; measure nothing.", name="--plan"),
    ] = False,
    text: Text = None,
    tokenizer: Tokenizer = None,
    options: Options,
) -> None:
    """Measure a model on text: which heads are positional, through which wavelengths.

    Writes index.html (the page), profile.nc (every number, netCDF), heads.csv (a row a
    head) and run.json (how to run it again) to DIR, and prints the path of the page.

    Several models each get a folder DIR/NAME. DIR itself gets what ropelens compare makes of
    them, and heads.csv with a column `checkpoint`. The same command again skips those that
    are measured.

    \b
    Examples:
      ropelens analyze --out out
      ropelens analyze ./my-llama --text book.txt --context 1024 --out out
      ropelens analyze ./my-llama --text book.txt --plan
      ropelens analyze runs/rope/history/* --text book.txt --out out
    """
    from ropelens.files.progress import opening, show_progress
    from ropelens.files.results import check_out, read_record
    from ropelens.models.paths import check_text, name_checkpoints, sample_path

    checkpoints = name_checkpoints(models or ["bundled"])
    several = len(checkpoints) > 1
    first = next(iter(checkpoints.values()))
    if out is None and not plan:
        run.fail("Missing option '--out'")
    out = out or Path()
    if not plan:
        kind = "comparison" if several else "analysis"
        check_out(out, kind, parts=checkpoints if several else ())
    check_text(first, text or ())
    if several and not text:
        text = [sample_path(first.partition(":")[2] or "rope")]  # the same for all
    with opening(show_progress, "starting"):  # torch and transformers take seconds
        from ropelens.analysis.folders import is_measured, write_checkpoints
        from ropelens.analysis.plan import plan_analysis
        from ropelens.analysis.record import arguments_of
        from ropelens.models.processes import gather, processes, shared
    for name, model in checkpoints.items():
        if plan:
            typer.echo(plan_analysis(model, text, options, tokenizer=tokenizer))
            continue
        folder = out / name if several else out
        arguments = arguments_of(model, text, options, tokenizer=tokenizer)
        with shared():  # the first process decides: the disk of another may differ
            measured = several and is_measured(folder, arguments, text or [])
            measured = gather(measured)[0]
        if measured:
            say(f"{name} is measured already", by="")
        elif done := measure(model, text, options, folder=folder, tokenizer=tokenizer):
            summary, page = done
            if several:
                say(f"{name}: {summary[0]}", by="")
            else:
                finish(summary, page)
    if several and not plan and processes().is_main_process:
        with opening(show_progress, "writing"):
            page = write_checkpoints(out, list(checkpoints))
        finish(read_record(out)["findings"][:5], page)
