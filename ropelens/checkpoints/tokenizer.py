"""The tokenizer of a checkpoint."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ropelens.checkpoints.config import source_of
from ropelens.checkpoints.files import TOKENIZER_FILES, refuse_pointers
from ropelens.checkpoints.gguf_rope import begins_with_bos
from ropelens.checkpoints.load_options import Loading
from ropelens.errors import explained
from ropelens.text.tokenize import encode, first_tokens


def read_tokenizer(path: Path, loading: Loading) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer and encode a letter with it. Return None if its files are missing."""
    files = [file for pattern in TOKENIZER_FILES for file in path.glob(pattern)]
    if path.is_dir() and not files:
        return None  # AutoTokenizer would create an empty tokenizer of the family
    what = f"The tokenizer in {path} cannot be read."
    with explained(what, _hint(path)):
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source_of(path, loading))
            if path.is_file():
                _begin_as_stated(tokenizer, path)
            encode("a", tokenizer)
        except Exception:
            refuse_pointers(files)
            raise
    return tokenizer


def _begin_as_stated(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Begin texts with BOS or without, as a GGUF file states. transformers ignores this."""
    stated = begins_with_bos(path)
    begins = first_tokens(tokenizer) == [tokenizer.bos_token_id]
    if stated is not None and stated != begins:
        tokenizer.add_bos_token = stated


def _hint(path: Path) -> str:
    hint = "download its files again"
    if path.is_file() or (path / "tokenizer.json").is_file():
        return hint
    return f"pip install sentencepiece protobuf tiktoken (without tokenizer.json); or {hint}"
