"""The command line: `ropelens analyze`, `rope`, `report`, `train`."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from ropelens.errors import RopelensError
from ropelens.terminal import catch_signals, quiet_libraries, say

app = typer.Typer(
    name="ropelens",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Backend(StrEnum):
    """The library that runs the model."""

    hf = "hf"
    transformer_lens = "transformer-lens"


def _rows(text: str) -> Any:
    """The value of --rows."""
    if text == "all":
        return text
    if not (text.isascii() and text.isdigit() and int(text)):
        raise typer.BadParameter(f'{text!r} is neither "all" nor a number, 1 or more')
    return int(text)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help='A local folder, a llama2.c .bin file, a Hub id, or "bundled".'
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Text file, or folder of *.txt, *.md and *.jsonl; may be repeated. A file is a "
        'document; a .jsonl file holds one a line, under "text". [default: for a bundled '
        "model, text sampled from it; needed for any other]",
        show_default=False,
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Of every random choice.")
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="T", help="float32, float64, bfloat16, float16, or auto: as the model is saved."
    ),
]
Device = Annotated[
    str, typer.Option(metavar="D", help="cpu, cuda, cuda:1; auto: cuda where there is one.")
]
Revision = Annotated[
    str | None, typer.Option(metavar="R", help="Branch, tag or commit of a Hub model.")
]
Offline = Annotated[
    bool, typer.Option("--local-files-only", help="Never ask the Hub, use its cache.")
]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]


@app.callback(invoke_without_command=True)
def ropelens(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    """See how a language model uses the frequencies of its rotary position embedding."""
    if show_version:
        typer.echo(version("ropelens"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@app.command(short_help="Measure a model on text, and make a page of it.")
def analyze(
    model: Model = "bundled",
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the results.")],
    text: Text = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=3,
            help="Tokens a sequence. [default: what the model allows, up to 2048]",
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Sequences; of more, a random sample. [default: up to 64]",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        Any,
        typer.Option(
            parser=_rows,
            metavar="N|all",
            help="Rows of attention looked at in each sequence: all, or a random N of them, "
            "which is cheaper on long contexts.",
        ),
    ] = "all",
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    backend: Annotated[
        Backend, typer.Option(help="The library that runs the model.")
    ] = Backend.hf,
    revision: Revision = None,
    local_files_only: Offline = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure a model on text: which heads are positional, through which wavelengths.

    Writes index.html (the page), profile.nc (every number, netCDF), heads.csv (a row a
    head) and run.json (how to run it again) to DIR, and prints the path of the page.

    \b
    Examples:
      ropelens analyze --out out
      ropelens analyze ./my-llama --text book.txt --context 1024 --out out
    """
    from ropelens.analyze import Job, run

    job = Job(
        model=model,
        out=out,
        text=tuple(text or ()),
        context=context,
        sequences=sequences,
        rows=rows,
        seed=seed,
        device=device,
        dtype=dtype,
        backend=backend.value,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )
    _print_path(run(job, command=shlex.join(["ropelens", *sys.argv[1:]])))


@app.command(short_help="Measure how each layer of a model rotates.")
def rope(
    model: Model = "bundled",
    *,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens, for RoPE variants that change with the length (dynamic, longrope). "
            "[default: what the model was trained for]",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:VALUE]",
            help="Of the model as this RoPE variant would make it: p-rope:0.75, yarn:4, ...",
        ),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="With --variant: of heads of N coordinates, no model.",
        ),
    ] = None,
    base: Annotated[
        float, typer.Option(metavar="B", min=1, help="With --head-dim: the base.")
    ] = 10_000.0,
    trained_context: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --head-dim: tokens trained for.")
    ] = 2048,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="A table a layer, also where layers are alike.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    revision: Revision = None,
    local_files_only: Offline = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure how each layer of a model rotates, from one forward pass, and print it.

    A row a plane: its angular frequency and wavelength as measured, and the frequency
    that the model states. With --variant, the rotation that an edit makes of it; with
    --head-dim too, the variant's formula alone.

    \b
    Examples:
      ropelens rope ./my-llama
      ropelens rope --variant p-rope:0.75 --head-dim 128
    """
    from rich.console import Console

    from ropelens.edit import edit_rope
    from ropelens.models.load import load
    from ropelens.models.rotation import measure_rope
    from ropelens.rope.formulas import Shape
    from ropelens.rope.variants import parse_variant
    from ropelens.tables import rotation_tables, variant_table

    console = Console(highlight=False)
    chosen = None if variant is None else parse_variant(variant)
    if head_dim is not None:
        if chosen is None:
            raise typer.BadParameter("--head-dim needs a --variant")
        shape = Shape(head_dim, base, trained_context, context or 0)
        console.print(variant_table(chosen, shape))
        return
    loaded, _ = load(
        model,
        dtype=dtype,
        device=device,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )
    with edit_rope(loaded, *([variant] if variant else [])):
        rotation = measure_rope(loaded, context=context)
    for table in rotation_tables(rotation, verbose=verbose):
        console.print(table)


@app.command(short_help="Make the page again, from saved results.")
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that ropelens analyze wrote.")
    ],
) -> None:
    """Make the page of DIR again, from its profile.nc, and print the path of the page.

    \b
    Example:
      ropelens report out
    """
    from ropelens.heads import classify_heads
    from ropelens.output import output_folder
    from ropelens.report import write_report
    from ropelens.results import open_profile

    profile = open_profile(folder / "profile.nc")
    heads = classify_heads(profile, seed=int(profile.attrs["seed"]))
    with output_folder(folder) as results:
        write_report(profile, results / "index.html", heads=heads)
    _print_path(folder / "index.html")


@app.command(short_help="Train small LLaMA-style models on text.")
def train(
    *,
    out: Annotated[
        Path,
        typer.Option(
            metavar="RUN", help="Folder of the run, which is also the model; or of the study."
        ),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text file or folder; may be repeated. [default: what the study names]",
            show_default=False,
        ),
    ] = None,
    valid: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Validation text; may be repeated. [default: 2% of the sequences]",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:CONFIG]",
            help="In place of --text: the train split of a dataset of the Hub, streamed.",
            show_default=False,
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Train all that a study names: variants, sizes and seeds. It takes the "
            "place of all options but --text, --valid and --out.",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(metavar="NAME[:VALUE]", help="The model's RoPE: p-rope:0.75, nope, ..."),
    ] = "rope",
    size: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Size of the model: tiny, small, base, or layers x width x heads x kv_heads, "
            "such as 8x384x6x2.",
        ),
    ] = "tiny",
    context: Annotated[int, typer.Option(metavar="N", help="Tokens a sequence.")] = 512,
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="Tokens of the BPE tokenizer.")
    ] = 2048,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps.")] = 2500,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="Peak rate. [default: the size's]", show_default=False
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train small LLaMA-style models on text; the same command goes on where it stopped.

    \b
    Examples:
      ropelens train --text books/ --variant p-rope:0.75 --out runs/books
      ropelens train --study variants.toml --text books/ --out runs/variants
    """
    if study is not None:
        from ropelens.train import run_study

        _print_path(run_study(study, out=out, text=text or (), valid=valid or ()))
        return
    if bool(text) == (dataset is not None):
        raise typer.BadParameter("one of --text, --dataset and --study is needed")
    from ropelens.train import train as train_model

    _print_path(
        train_model(
            text or (),
            out=out,
            valid=valid or (),
            dataset=dataset,
            variant=variant,
            size=size,
            context=context,
            vocabulary=vocabulary,
            steps=steps,
            learning_rate=learning_rate,
            seed=seed,
        )
    )


def _print_path(path: Path) -> None:
    typer.echo(bytes(path))  # a name need not be text in the terminal's encoding


def main() -> None:
    """Entry point: exit 0 done, 1 with one line on stderr for what a user can cause, 2 for
    wrong usage, 130 on Ctrl-C, 143 on SIGTERM. Any other error is a bug: a traceback."""
    quiet_libraries()
    signals = catch_signals()
    code = 1
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if not signals:
            code = _explain(error)
    if signals and code:
        say("stopped; nothing half-written is left")
        os._exit(128 + signals[0])  # all is cleaned up, and leaving torch takes seconds
    sys.exit(code)


def _explain(error: BaseException) -> int:
    """Say in one line what went wrong and return the exit code; raise what is a bug."""
    if isinstance(error, typer.TyperException):  # wrong usage
        say(f"{error.format_message().rstrip('.')}; see ropelens --help")
        return error.exit_code
    if isinstance(error, RopelensError):
        say(error.line)
    elif isinstance(error, BrokenPipeError):  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        say(f"{error.strerror}{where}")
    else:
        raise error
    return 1
