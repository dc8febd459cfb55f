"""What transformers and accelerate say of their own accord while they load, left out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No reports of transformers: they are checked here. No progress bars in a log file."""
    verbosity = transformers_logging.get_verbosity()
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    hide_bars = transformers_logging.is_progress_bar_enabled() and not on_terminal
    transformers_logging.set_verbosity_error()
    accelerate = logging.getLogger("accelerate")
    its_level = accelerate.level
    accelerate.setLevel(logging.ERROR)  # what lies on disk was asked for
    if hide_bars:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        accelerate.setLevel(its_level)
        if hide_bars:
            transformers_logging.enable_progress_bar()
