"""The options that commands share: those of dataclasses, and what all of them take."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ropelens.models.loading import option


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
            hint = hints[field.name]
            if (option := get_args(hint)[1]).parser is not None:
                hint = Annotated[Any, option]  # typer takes no unions
            default = defaults.get(field.name, field.default)
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
                )
            )
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def name_of(text: str) -> Any:
    """The name of a model: an empty one is a shell variable that was not set."""
    if not text.strip():
        raise typer.BadParameter("it is empty")
    return text


def path_of(text: str) -> Any:
    """A path; an empty text is none, though `Path` takes it for the current folder."""
    return Path(name_of(text))


Model = Annotated[
    str,
    typer.Argument(
        parser=name_of,
        metavar="MODEL",
        help="A folder, a GGUF file, a Hub id, bundled, or bundled:NAME (ropelens list).",
    ),
]
Text = Annotated[
    list[Path] | None,
    option(
        "FILE",
        "Text file, or folder of *.txt, *.md and *.jsonl; may be repeated. A file is a "
        'document; a .jsonl file holds one a line, under "text". [default: for a '
        "bundled model, text sampled from it; needed for any other]",
        parser=path_of,
    ),
]
Tokenizer = Annotated[
    str | None,
    option(
        "NAME_OR_FOLDER",
        "Instead of the model's own: a folder with tokenizer.json, or a Hub id.",
    ),
]
Out = Annotated[Path, option("DIR", "Folder for the results.", parser=path_of)]
