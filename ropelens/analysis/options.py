"""What a measurement can be asked for: each option once, for Python and the commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from ropelens.models.loading import Loading, option


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

    prompts: Annotated[
        list[str] | None,
        option(
            "TEXT",
            "Text to look into, token by token, up to 256 tokens; may be repeated. "
            "[default: pieces of the text]",
            name="--prompt",
        ),
    ] = None
    attention_on: Annotated[
        list[str] | None,
        option(
            "TOKEN",
            'Search for heads by the tokens they attend to: a text such as "\'", '
            "punctuation, or repeated; may be repeated.",
        ),
    ] = None
    context: Annotated[
        int | None,
        option("N", "Tokens a sequence. [default: what the model allows, up to 2048]", min=3),
    ] = None
    sequences: Annotated[
        int | None,
        option("N", "Sequences; of more, a random sample. [default: up to 64]", min=1),
    ] = None
    rows: Annotated[
        int | Literal["all", "auto"],
        option(
            "N|all",
            "Rows of attention that are measured in each sequence: all, a random N of them,"
            " or auto: all of sequences of up to 2,048 tokens, 512 of longer ones.",
            parser=rows_of,
            min=1,
        ),
    ] = "auto"
    batch_size: Annotated[
        int | None,
        option("N", "Sequences that run together. [default: what the memory allows]", min=1),
    ] = None
    surrogates: Annotated[
        int,
        option(
            "N",
            "Random orders of the frequencies that the claim on wavelengths is tested "
            "against (39 or more for a verdict).",
            min=0,
        ),
    ] = 40
    seed: Annotated[int, option("N", "Of every random choice.", min=0, max=2**32 - 1)] = 0
    backend: Annotated[
        Literal["hf", "transformer-lens"], option(None, "The library that runs the model.")
    ] = "hf"
