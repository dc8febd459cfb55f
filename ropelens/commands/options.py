"""The options that commands share: their names, types and help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def given(run: typer.Context) -> dict[str, str]:
    """The parameters that stand on the command line, by name, each as one writes it."""
    written = {param.name: param.opts[0] for param in run.command.params if param.name}
    return {
        name: flag
        for name, flag in written.items()
        if getattr(run.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def check_first(
    model: str,
    text: Sequence[Path] | None,
    ids: Path | None,
    *,
    device: str,
    dtype: str,
    device_map: str | None = None,
    quantize: str | None = None,
) -> None:
    """Refuse what is wrong by itself, before all that takes seconds to import and to load."""
    from ropelens.models.paths import check_paths

    check_paths(model, text or (), ids)
    from ropelens.models.loading import Loading  # which imports torch

    Loading(dtype=dtype, device=device, device_map=device_map, quantize=quantize).devices()


def rows_of(text: str) -> Any:
    """The value of --rows."""
    if text in ("all", "auto"):
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text)):
        shown = text if len(text) < 40 else f"{text[:40]}..."
        raise typer.BadParameter(
            f'{shown!r} is neither "auto", "all" nor a number from 1 to 9,999,999'
        )
    return int(text)


def name_of(text: str) -> Any:
    """The name of a model: an empty one is a shell variable that was not set."""
    if not text.strip():
        raise typer.BadParameter("it is empty")
    return text


def path_of(text: str) -> Any:
    """A path, which an empty text is not, though it would pass for the current folder."""
    return Path(name_of(text))


Model = Annotated[
    str,
    typer.Argument(
        parser=name_of,
        metavar="MODEL",
        help="A local folder, a Hub id, bundled, or bundled:NAME, which ropelens list names.",
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        parser=path_of,
        metavar="FILE",
        help="Text file, or folder of *.txt, *.md and *.jsonl; may be repeated. A file is a "
        'document; a .jsonl file holds one a line, under "text". [default: for a bundled '
        "model, text sampled from it; needed for any other]",
        show_default=False,
    ),
]
Ids = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Token ids in place of text, for a model without a tokenizer: .npy (whole "
        "numbers [sequence, position]) or .txt (a line a sequence).",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_FOLDER",
        help="In place of the model's own: a folder with tokenizer.json, or a Hub id.",
        show_default=False,
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Of every random choice.")
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="T",
        help="float32, float64, bfloat16, float16; auto: bfloat16 where a short measurement "
        "finds it faster than float32; saved: as the model is saved.",
    ),
]
Device = Annotated[
    str, typer.Option(metavar="D", help="cpu, cuda, cuda:1; auto: cuda where there is one.")
]
SpreadOver = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="auto",
        help="In place of --device: spread a large model over all GPUs, then main memory, "
        "then disk.",
        show_default=False,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="Q",
        help="Read the weights into fewer bits: int8 (torchao), bnb-int8 or bnb-nf4 "
        "(bitsandbytes).",
        show_default=False,
    ),
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
Out = Annotated[
    Path,
    typer.Option(parser=path_of, metavar="DIR", help="Folder for the results."),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=3,
        help="Tokens a sequence. [default: what the model allows, up to 2048]",
        show_default=False,
    ),
]
SequenceCount = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Sequences; of more, a random sample. [default: up to 64]",
        show_default=False,
    ),
]
Rows = Annotated[
    Any,
    typer.Option(
        parser=rows_of,
        metavar="N|all",
        help="Rows of attention looked at in each sequence: all, a random N of them, or "
        "auto: all of sequences of up to 2,048 tokens, 512 of longer ones.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Sequences that run together. [default: what the memory takes]",
        show_default=False,
    ),
]
