"""What a measurement can be asked for: each option once, for Python and the commands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import typer
from beartype.door import is_bearable

from ropelens.errors import BadArgument
from ropelens.models.loading import Loading


def rows_of(text: str) -> int | str:
    """The value of --rows."""
    if text in ("all", "auto"):
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text)):
        shown = text if len(text) < 40 else f"{text[:40]}..."
        raise typer.BadParameter(
            f'{shown!r} is neither "auto", "all" nor a number from 1 to 9,999,999'
        )
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """What `analyze` measures, and (those of `Loading`) how it reads a model that is named."""

    ids: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Token ids instead of text, for a model without a tokenizer: .npy (whole "
            "numbers [sequence, position]) or .txt (a line a sequence).",
            show_default=False,
        ),
    ] = None
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="Text to look into, token by token, up to 256 tokens; may be repeated. "
            "[default: pieces of the text]",
            show_default=False,
        ),
    ] = None
    attention_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help='Search for heads by the tokens they attend to: a text such as "\'", '
            "punctuation, or repeated; may be repeated.",
            show_default=False,
        ),
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=3,
            help="Tokens a sequence. [default: what the model allows, up to 2048]",
            show_default=False,
        ),
    ] = None
    sequences: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Sequences; of more, a random sample. [default: up to 64]",
            show_default=False,
        ),
    ] = None
    rows: Annotated[
        int | Literal["all", "auto"],
        typer.Option(
            parser=rows_of,
            metavar="N|all",
            min=1,
            help="Rows of attention that are measured in each sequence: all, a random N of "
            "them, or auto: all of sequences of up to 2,048 tokens, 512 of longer ones.",
        ),
    ] = "auto"
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Sequences that run together. [default: what the memory allows]",
            show_default=False,
        ),
    ] = None
    surrogates: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Random orders of the frequencies that the claim on wavelengths is tested "
            "against (39 or more for a verdict).",
        ),
    ] = 40
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Of every random choice.")
    ] = 0
    backend: Annotated[
        Literal["hf", "transformer-lens"], typer.Option(help="The library that runs the model.")
    ] = "hf"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value, option = getattr(self, name), hint.__metadata__[0]
            least = option.min if option.min is not None else -math.inf
            if not is_bearable(value, hint) or (isinstance(value, int) and value < least):
                kind = str(hint.__origin__).removeprefix("<class '").removesuffix("'>")
                raise BadArgument(
                    f"The option {name} cannot be {value!r}."[:80],
                    attempt=kind + f", at least {option.min}" * (option.min is not None),
                )
