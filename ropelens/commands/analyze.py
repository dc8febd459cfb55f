"""The command `ropelens analyze`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ropelens.commands import options
from ropelens.commands.terminal import (
    finish,
    print_plan,
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
    model: options.Model = "bundled",
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=options.folder_of,
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
    revision: options.Revision = None,
    local_files_only: options.Offline = False,
    trust_remote_code: options.RemoteCode = False,
) -> None:
    """Measure a model on text: which heads are positional, through which wavelengths.

    Writes index.html (the page), profile.nc (every number, netCDF), heads.csv (a row a
    head) and run.json (how to run it again) to DIR, and prints the path of the page.

    \b
    Examples:
      ropelens analyze --out out
      ropelens analyze ./my-llama --text book.txt --context 1024 --out out
      ropelens analyze ./my-llama --text book.txt --plan
    """
    from ropelens.files.progress import opening, show_progress
    from ropelens.files.results import check_out
    from ropelens.models.texts import read_documents

    if not plan:
        if out is None:
            run.fail("Missing option '--out'")
        check_out(out, "analysis")
    options.check_first(
        model,
        text,
        ids,
        device=device,
        dtype=dtype,
        device_map=device_map,
        quantize=quantize,
    )
    with opening(show_progress, "starting"):  # torch and transformers take seconds
        from ropelens.analysis.analyze import analyze as measure
        from ropelens.analysis.summary import summarize
        from ropelens.measure.savepoint import UNFINISHED, remove_savepoint
    analysis = measure(
        model,
        text,
        ids=ids,
        tokenizer=tokenizer,
        prompts=[*(prompt or []), *read_documents(prompt_file or [])],
        attention_on=attention_on or [],
        context=context,
        sequences=sequences,
        rows=rows,
        batch_size=batch_size,
        seed=seed,
        backend=backend.value,
        device=device,
        device_map=device_map,
        quantize=quantize,
        dtype=dtype,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
        cache=out and out / UNFINISHED,
        progress=show_progress,
        announce=print_plan if plan else say_plan,
        command=this_command(),
    )
    assert out is not None  # for a plan is not carried out
    with opening(show_progress, "writing"):
        page = analysis.save(out)
    remove_savepoint(out / UNFINISHED)
    finish(summarize(analysis), page)
