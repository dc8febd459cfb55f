"""Options of a measurement, for Python and for the commands."""

import dataclasses
import inspect
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ropelens.checkpoints.load_options import Loading, option, setting
from ropelens.checkpoints.local import local_path
from ropelens.checkpoints.optional_packages import TRANSFORMER_LENS


def names_in(text: str) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(text.replace(" ", "").split(","))


@dataclass(frozen=True, kw_only=True)
class Options(Loading):
    """Options of `analyze`. The options of `Loading` apply if the model is given by name."""

    prompts: list[str] | None = setting(
        None,
        "TEXT",
        "Text of up to 256 tokens to show. Can be repeated. [default: pieces of the text]",
        name="--prompt",
    )
    attention_on: list[str] | None = setting(
        None,
        "TOKEN",
        "Find heads by the tokens that they attend to: punctuation, newline, digits, "
        'capital, repeated, a token such as "\'", or a pattern such as "*\'*"; with '
        '"after:" in front, the tokens that follow. Can be repeated.',
    )
    statistics: Any = setting(
        None,
        "NAME,NAME,...",
        "Also measure: reversal, uniform_reversal, locality, position_sensitivity.",
        parser=names_in,
    )
    context: int | None = setting(
        None,
        "N",
        "Tokens in a sequence. [default: up to 2048, and more for truncate]",
        min=3,
    )
    sequences: int | None = setting(
        None,
        "N",
        "Number of random sequences. [default: up to 64, fewer if long]",
        min=1,
    )
    bos: Literal["tokenizer", "always", "never"] = setting(
        "tokenizer",
        None,
        "Begin sequences as the tokenizer begins a text, always with BOS, or never.",
    )
    rows: int | Literal["all", "auto"] = setting(
        "auto",
        "N|all|auto",
        "Rows of attention to measure in each sequence: all, N random rows, or auto (512 rows "
        "of sequences with more than 2,048 tokens).",
        parser=lambda text: text if text in ("all", "auto") else int(text),
        min=1,
    )
    batch_size: int | None = setting(
        None, "N", "Sequences in a batch. [default: as many as fit into memory]", min=1
    )
    surrogates: int = setting(
        40,
        "N",
        "Random orders of the frequencies; a verdict on wavelengths needs 39.",
        min=0,
    )
    seed: int = setting(0, "N", "Seed of all random choices.", min=0, max=2**32 - 1)
    backend: Literal["hf", "transformer-lens"] = setting(
        "hf", None, "The library that runs the model."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uses_bridge:
            TRANSFORMER_LENS.require(
                "The backend transformer-lens is an optional package."
            )

    @property
    def uses_bridge(self) -> bool:
        """Whether TransformerLens runs a model that is loaded."""
        return self.backend == "transformer-lens"


def with_options(
    options_type: Any, *, only: Collection[str] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a dataclass, which becomes its `options`.

    `only` selects fields, and `defaults` replaces default values.
    """
    hints = get_type_hints(options_type)
    inherited: list[inspect.Parameter] = []
    own: list[inspect.Parameter] = []  # come first in the help
    for field in dataclasses.fields(options_type):
        if only is not None and field.name not in only:
            continue
        parameter = _parameter_of(field, hints[field.name], defaults)
        if field.name in options_type.__annotations__:
            own.append(parameter)
        else:
            inherited.append(parameter)
    added = own + inherited

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**arguments: Any) -> None:
            values = {option.name: arguments.pop(option.name) for option in added}
            command(**arguments, options=options_type(**values))

        signature = inspect.signature(command, eval_str=True)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.name != "options"
        ]
        call.__signature__ = signature.replace(parameters=parameters + added)  # type: ignore[attr-defined]
        return call

    return decorate


def _parameter_of(
    field: dataclasses.Field[Any], hint: Any, defaults: dict[str, Any]
) -> inspect.Parameter:
    """The parameter of a command for an option, as typer reads it."""
    described = copy(field.metadata["option"])
    default = field.default
    if field.name in defaults:  # typer adds the new default
        default = defaults[field.name]
        described.help = described.help.partition(" [default:")[0]
    if described.parser is not None:
        hint = Any  # typer refuses unions
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, described],
    )


def path_of(text: str) -> Any:
    """Convert to a path; refuses an empty text, which an unset shell variable gives."""
    if not text:
        raise typer.BadParameter("it is empty")
    return Path(text)


def check_names(names: Any) -> Any:
    """Refuse local checkpoints that cannot be read, before torch is imported."""
    for name in [names] if isinstance(names, str) else names or ():
        local_path(name)
    return names


MODEL_HELP = (
    "A folder, a GGUF file, a Hub id, bundled, or bundled:NAME (ropelens list)."
)
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=MODEL_HELP, callback=check_names)
]
TextOption = Annotated[
    list[Path] | None,
    option(
        "FILE",
        "Text file, or folder of *.txt, *.md, *.jsonl (a document in each line, under "
        '"text") and *.parquet (in the column "text"). Can be repeated. [default: text '
        "sampled from a bundled model]",
        parser=path_of,
    ),
]
OutOption = Annotated[Path, option("DIR", "Folder for the results.", parser=path_of)]


def _own_out(name: str) -> Any:
    """The option --out of a command that chooses a folder by itself."""
    words = "Folder for the results. "
    words += f"[default: {name}; {name}-2, ... if another command wrote there]"
    return option("DIR", words, parser=path_of)


AnalysisOut = Annotated[Path | None, _own_out("out")]
ClaimsOut = Annotated[Path | None, _own_out("claims")]
ComparisonOut = Annotated[Path | None, _own_out("compared")]
PromptOut = Annotated[Path | None, _own_out("prompt")]
