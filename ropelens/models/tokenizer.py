"""The tokenizer of a checkpoint, read without its weights and tried once."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ropelens.errors import BadCheckpoint, words_of
from ropelens.models.checkpoint import HUB_ID, locate
from ropelens.models.paths import at_home, check_utf8
from ropelens.models.quiet import quiet_transformers
from ropelens.models.texts import encode

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "*.tiktoken"),
)


def load_tokenizer(
    name: str | Path, *, local_files_only: bool = False, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, a bundled checkpoint or a Hub id, without its weights.

    Raises BadCheckpoint where there is none.
    """
    place = at_home(name)
    check_utf8(place)
    with quiet_transformers():
        if str(name).partition(":")[0] == "bundled":
            place = locate(str(name)).path
        if place.is_dir():
            found = read_tokenizer(place, trust_remote_code)
            if found is not None:
                return found
            raise BadCheckpoint(
                f"There is no tokenizer in {name}.", attempt="a folder with tokenizer.json"
            )
        if place.exists() or not HUB_ID.fullmatch(str(name)):
            raise BadCheckpoint(
                f"There is no tokenizer at {name}.",
                attempt="the folder that holds tokenizer.json, or a Hub id",
            )
        try:
            return _tokenizer(
                str(name),
                trust_remote_code=trust_remote_code,
                local_files_only=local_files_only,
            )
        except Exception as error:  # whatever the Hub or a damaged file makes it raise
            raise BadCheckpoint(
                f"There is no tokenizer called {name}.",
                seen="no folder of that name here; " + words_of(error, kind=True),
                attempt="check the spelling; what is not in the Hub's cache needs the network",
            ) from error


def read_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, None where it has none; BadCheckpoint for a damaged one."""
    # Without any of these files AutoTokenizer makes an empty tokenizer of the model's family.
    if not any(found for pattern in TOKENIZER_FILES for found in folder.glob(pattern)):
        return None
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        if file.is_file():
            _check_is_object(file, f"The tokenizer in {folder} cannot be read.")
    try:
        return _tokenizer(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever a damaged file makes its class raise
        raise BadCheckpoint(
            f"The tokenizer in {folder} cannot be read.",
            seen=words_of(error, kind=True),
            attempt="fetch its files again, or remove them to work with token ids",
        ) from error


def _check_is_object(file: Path, what: str) -> None:
    """Raise BadCheckpoint, saying `what`, where a file is not a JSON object."""
    seen = f"{file.name} is not a JSON object"
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise BadCheckpoint(what, seen=f"{seen}: {words_of(error)}") from error
    if not isinstance(written, dict):
        raise BadCheckpoint(what, seen=f"{seen}, but {repr(written)[:100]}")


def _tokenizer(name: str | Path, **options: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of `name`, tried once: what it was given may only fail it at work."""
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    encode("a", tokenizer)
    return tokenizer
