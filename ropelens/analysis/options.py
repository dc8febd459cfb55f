"""What a measurement can be asked for: each option once, for Python and the commands."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ropelens.checkpoints.load_options import Loading, option


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
            'Search for heads by the tokens they attend to: "\'" is that token, "*\'*" any '
            'that contains it; or punctuation, newline, digits, capital, repeated; or "after:" '
            "and one of these; may be repeated.",
        ),
    ] = None
    context: Annotated[
        int | None,
        option("N", "Tokens in a sequence. [default: up to 2048; a sweep has more]", min=3),
    ] = None
    sequences: Annotated[
        int | None,
        option("N", "Sequences, drawn at random. [default: up to 64, fewer long ones]", min=1),
    ] = None
    bos: Annotated[
        Literal["always", "tokenizer"],
        option(
            None,
            "Sequences and prompts begin with BOS: always, where the tokenizer has one; or "
            "only where the tokenizer itself adds it.",
        ),
    ] = "always"
    rows: Annotated[
        int | Literal["all", "auto"],
        option(
            "N|all",
            "Rows of attention that are measured in each sequence: all, a random N of them,"
            " or auto: all of sequences of up to 2,048 tokens, 512 of longer ones.",
            parser=lambda text: text if text in ("all", "auto") else int(text),
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
    seed: Annotated[int, option("N", "Seed of all random choices.", min=0, max=2**32 - 1)] = 0
    backend: Annotated[
        Literal["hf", "transformer-lens"], option(None, "The library that runs the model.")
    ] = "hf"


def with_options(
    kind: Any, *, only: Collection[str] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command, whose `options` of the dataclass `kind` become an option a field.

    A field's type, metavar and help are in its annotation. `only` names the fields that the
    command has, all if None; `defaults` replace theirs.
    """
    hints = get_type_hints(kind, include_extras=True)
    fields = [f for f in dataclasses.fields(kind) if only is None or f.name in only]
    fields.sort(key=lambda field: field.name not in kind.__annotations__)  # inherited ones last

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**given: Any) -> None:
            options = {field.name: given.pop(field.name) for field in fields}
            command(**given, options=kind(**options))

        signature = inspect.signature(command, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.name != "options"]
        for field in fields:
            hint, default = hints[field.name], defaults.get(field.name, field.default)
            info = copy(hint.__metadata__[0])
            if field.name in defaults:  # typer names it
                info.help = info.help.partition(" [default:")[0]
            hint = Annotated[hint.__origin__, info]
            if info.parser is not None:
                hint = Annotated[Any, info]  # typer takes no unions
            parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY)
            parameters.append(parameter.replace(default=default, annotation=hint))
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def path_of(text: str) -> Any:
    """A path; an empty text, of a shell variable that is not set, is not the current folder."""
    if not text:
        raise typer.BadParameter("it is empty")
    return Path(text)


NAMED = "A folder, a GGUF file, a Hub id, bundled, or bundled:NAME (ropelens list)."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=NAMED)]
TextOption = Annotated[
    list[Path] | None,
    option(
        "FILE",
        "Text file, or folder of *.txt, *.md and *.jsonl; may be repeated. A file is a "
        'document; a .jsonl file holds one a line, under "text". [default: for a '
        "bundled model, text sampled from it; needed for any other]",
        parser=path_of,
    ),
]
Out = Annotated[Path, option("DIR", "Folder for the results.", parser=path_of)]
