"""transformers without messages, and with quick functions for GGUF files."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from transformers import modeling_gguf_pytorch_utils as gguf_weights
from transformers.utils import logging as transformers_logging

from ropelens.compatibility import replaced


@contextmanager
def quiet_transformers(*, bars: bool = True) -> Iterator[None]:
    """Hide messages of libraries except errors, and show progress `bars` only on a terminal."""
    bars = bars and sys.stderr is not None and sys.stderr.isatty()
    with ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        if transformers_logging.is_progress_bar_enabled() and not bars:
            stack.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        # This bar obeys disable_progress_bar.
        bar = transformers_logging.tqdm
        stack.enter_context(replaced(gguf_weights, "tqdm", bar))
        yield


@contextmanager
def quick_gguf(path: Path) -> Iterator[None]:
    """Let transformers read `path` with quick functions if it is a GGUF file."""
    if path.is_dir():  # gguf may be missing
        yield
        return
    import gguf

    from ropelens.checkpoints.gguf_reader import FastReader, parse_value

    # transformers reads the file several times, and maps names once for each module.
    names = cache(gguf.get_tensor_name_map)
    with (
        replaced(gguf_weights, "_gguf_parse_value", parse_value),
        replaced(gguf, "GGUFReader", cache(FastReader)),
        replaced(gguf, "get_tensor_name_map", names),
    ):
        yield
