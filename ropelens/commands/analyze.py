"""The command `ropelens analyze`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ropelens.commands import options
from ropelens.commands.terminal import (
    finish,
    print_plan,
    say,
    say_plan,
    stopped_in_its_words,
    this_command,
)


class Backend(StrEnum):
    """The library that runs the model."""

    hf = "hf"
    transformer_lens = "transformer-lens"


@stopped_in_its_words()
def analyze(
    run: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            parser=options.name_of,
            metavar="MODEL",
            help="A local folder, a Hub id, bundled, or bundled:NAME, "
            "which ropelens list names; or a folder of models, such as RUN/history. "
            "Several are measured one after another. [default: bundled]",
            show_default=False,
        ),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=options.path_of,
            metavar="DIR",
            help="Folder for the results; needed but with --plan.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Print what would run and the memory it takes, and measure nothing."
        ),
    ] = False,
    text: options.Text = None,
    ids: options.Ids = None,
    tokenizer: options.Tokenizer = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Text to look into, token by token, up to 256 tokens; may be repeated. "
            "[default: pieces of the text]",
            show_default=False,
        ),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="The same, from a file.", show_default=False),
    ] = None,
    attention_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help='Search for heads by the tokens they attend to: a text such as "\'", '
            "punctuation, or repeated; may be repeated.",
            show_default=False,
        ),
    ] = None,
    context: options.Context = None,
    sequences: options.SequenceCount = None,
    rows: options.Rows = "auto",
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    device_map: options.SpreadOver = None,
    quantize: options.Quantize = None,
    dtype: options.Dtype = "float32",
    backend: Annotated[
        Backend, typer.Option(help="The library that runs the model.")
    ] = Backend.hf,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="R,R,...",
            help="Branch, tag or commit of a Hub model; or several.",
            show_default=False,
        ),
    ] = None,
    local_files_only: options.Offline = False,
    trust_remote_code: options.RemoteCode = False,
) -> None:
    """Measure a model on text: which heads are positional, through which wavelengths.

    Writes index.html (the page), profile.nc (every number, netCDF), heads.csv (a row a
    head) and run.json (how to run it again) to DIR, and prints the path of the page.

    Several models or revisions each get a folder DIR/NAME. DIR itself gets a page that sets
    them side by side, checkpoints.nc (all numbers over `checkpoint`) and heads.csv (with a
    column of that name). The same command again passes over those that are measured.

    \b
    Examples:
      ropelens analyze --out out
      ropelens analyze ./my-llama --text book.txt --context 1024 --out out
      ropelens analyze ./my-llama --text book.txt --plan
      ropelens analyze runs/rope/history --text book.txt --out out
      ropelens analyze org/model --revision a,b,c --text book.txt --out out
    """
    from ropelens.files.results import check_out
    from ropelens.models.paths import name_checkpoints
    from ropelens.models.texts import read_documents

    parts = [part.strip() for part in (revision or "").split(",")]
    revisions: list[str | None] = [part for part in parts if part]
    if revision and not revisions:
        run.fail("Option '--revision' names nothing")
    checkpoints = name_checkpoints(models or ["bundled"], revisions or [revision])
    several = len(checkpoints) > 1
    first = next(iter(checkpoints.values()))[0]
    if not plan:
        if out is None:
            run.fail("Missing option '--out'")
        check_out(out, "comparison" if several else "analysis")
    options.check_first(
        first,
        text,
        ids,
        device=device,
        dtype=dtype,
        device_map=device_map,
        quantize=quantize,
    )
    if several and not text and ids is None:
        from ropelens.models.bundled import sample_path

        text = [sample_path(first.partition(":")[2] or "rope")]  # the same for all
    asked: dict[str, Any] = {
        "text": text,
        "ids": ids,
        "tokenizer": tokenizer,
        "prompts": [*(prompt or []), *read_documents(prompt_file or [])],
        "attention_on": attention_on or [],
        "context": context,
        "sequences": sequences,
        "rows": rows,
        "batch_size": batch_size,
        "seed": seed,
        "backend": backend.value,
        "device": device,
        "device_map": device_map,
        "quantize": quantize,
        "dtype": dtype,
        "local_files_only": local_files_only,
        "trust_remote_code": trust_remote_code,
    }
    measure_each(checkpoints, asked, out=out, plan=plan)


def measure_each(
    checkpoints: Mapping[str, tuple[str, str | None]],
    asked: Mapping[str, Any],
    *,
    out: Path | None,
    plan: bool,
) -> None:
    """Measure each checkpoint as `asked` into `out`, several into a folder each; or plan it."""
    from ropelens.files.progress import opening, show_progress

    with opening(show_progress, "starting"):  # torch and transformers take seconds
        from ropelens.analysis.analyze import analyze as measure
        from ropelens.analysis.checkpoints import is_measured, write_checkpoints
        from ropelens.analysis.standing import with_what_stands
        from ropelens.analysis.summary import summarize
        from ropelens.files.results import read_record
        from ropelens.measure.savepoint import UNFINISHED, remove_savepoint
        from ropelens.models.processes import gather, processes, shared
    several = len(checkpoints) > 1
    for name, (model, revision) in checkpoints.items():
        asked_of_it = {**asked, "revision": revision}
        folder = out and (out / name if several else out)
        with shared():  # the first process says what is there: another's disk may differ
            found = several and not plan and folder and is_measured(folder, model, asked_of_it)
            is_there = gather(found)[0]
        if is_there:
            say(f"{name} is measured already", by="")
            continue
        try:
            with shared():
                analysis = measure(
                    model,
                    **asked_of_it,
                    cache=folder and folder / UNFINISHED,
                    progress=show_progress,
                    announce=print_plan if plan else say_plan,
                    command=this_command(),
                )
        except typer.Exit:  # the plan is told, and not carried out
            continue
        assert folder is not None
        if processes().is_main_process:
            with opening(show_progress, "writing"):
                folder.parent.mkdir(exist_ok=True)
                page = with_what_stands(analysis, folder).save(folder)
            remove_savepoint(folder / UNFINISHED)
            if several:
                say(f"{name}: {summarize(analysis)[0]}", by="")
            else:
                finish(summarize(analysis), page)
        del analysis  # and its model, before the next is read
    if several and out is not None and not plan and processes().is_main_process:
        with opening(show_progress, "writing"):
            page = write_checkpoints(out, list(checkpoints), command=this_command())
        finish(read_record(out)["findings"][:5], page)
