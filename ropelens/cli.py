"""The command line: `ropelens analyze`, `rope`, `report`, `train`."""

from __future__ import annotations

import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ropelens.errors import RopelensError

app = typer.Typer(
    name="ropelens",
    help="See how a language model uses the frequencies of its rotary position embedding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Backend(StrEnum):
    """The library that runs the model."""

    hf = "hf"
    transformer_lens = "transformer-lens"


Model = Annotated[
    str,
    typer.Argument(
        help='A local folder, a llama2.c .bin file, a Hub id, or "bundled".', show_default=True
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text file or folder; may be repeated. A file is a document; a .jsonl file "
        'holds one a line under "text". Without it, text sampled from the bundled model.',
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as saved.")]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: CUDA if there is one.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")]
Offline = Annotated[
    bool, typer.Option("--local-files-only", help="Never ask the Hub, use its cache.")
]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]


@app.command()
def analyze(
    model: Model = "bundled",
    *,
    out: Out,
    text: Text = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens a sequence. [default: what the model allows, up to 2048]",
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            help="Sequences, a random sample if there are more. [default: up to 64]",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        str, typer.Option(help='Rows of attention looked at per sequence: a number, or "all".')
    ] = "all",
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
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
    head) and run.json (how to run it again) to DIR.
    """
    from ropelens.analyze import Job, run

    job = Job(
        model=model,
        out=out,
        text=tuple(text or ()),
        context=context,
        sequences=sequences,
        rows=_rows(rows),
        seed=seed,
        device=device,
        dtype=dtype,
        backend=backend.value,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )
    typer.echo(run(job, command=_command()))


@app.command()
def rope(
    model: Model = "bundled",
    *,
    context: Annotated[
        int | None, typer.Option(help="Tokens, for variants that change with the length.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Every layer, also those that rotate alike.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    revision: Revision = None,
    local_files_only: Offline = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure how each layer of a model rotates, and print it as a table."""
    from ropelens.models.load import load
    from ropelens.models.rotation import measure_rope
    from ropelens.tables import rotation_tables

    loaded, _ = load(
        model,
        dtype=dtype,
        device=device,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )
    console = Console(highlight=False)
    for table in rotation_tables(measure_rope(loaded, context=context), verbose=verbose):
        console.print(table)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that ropelens analyze wrote.")],
) -> None:
    """Make the page of a folder again, from its saved results."""
    from ropelens.heads import classify_heads
    from ropelens.report import write_report
    from ropelens.results import open_profile

    profile = open_profile(folder / "profile.nc")
    typer.echo(write_report(profile, folder / "index.html", heads=classify_heads(profile)))


@app.command()
def train(
    *,
    text: Annotated[list[Path], typer.Option(help="Text file or folder; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command resumes it.")],
    valid: Annotated[
        list[Path] | None, typer.Option(help="Validation text; else 2% of the sequences.")
    ] = None,
    size: Annotated[str, typer.Option(help="Size of the model, by name.")] = "tiny",
    context: Annotated[int, typer.Option(help="Tokens a sequence.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the BPE tokenizer.")] = 2048,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2500,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
) -> None:
    """Train a small LLaMA-style model on text; the same command goes on where it stopped."""
    from ropelens.train import train as train_model

    typer.echo(
        train_model(
            text,
            out=out,
            valid=valid or (),
            size=size,
            context=context,
            vocabulary=vocabulary,
            steps=steps,
            seed=seed,
        )
    )


def main() -> None:
    """Entry point: exit 0 done, 1 with one line on stderr for what a user can cause, 2 for
    wrong usage, 130 on Ctrl-C."""
    warnings.showwarning = _warn
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = _fail("stopped; nothing half-written is left", 130)
    except KeyboardInterrupt:
        code = _fail("stopped; nothing half-written is left", 130)
    except RopelensError as error:
        code = _fail(error.line, 1)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        code = _fail(" ".join(str(error).split()), 1)
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        error.show()  # a usage error of click's, which says what is wrong
        code = error.exit_code
    sys.exit(code or 0)


def _fail(line: str, code: int) -> int:
    print(f"ropelens: {line}", file=sys.stderr)
    return code


def _warn(message: Warning | str, *_: Any) -> None:
    """A warning as one line, without the place in our code that raised it."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _command() -> str:
    """The command line as typed, for run.json."""
    import shlex

    return shlex.join(["ropelens", *sys.argv[1:]])


def _rows(text: str) -> Any:
    """The value of --rows."""
    if text == "all":
        return text
    if not text.isdigit() or int(text) < 1:
        raise typer.BadParameter(f'{text!r} is neither "all" nor a number of rows, 1 or more')
    return int(text)
