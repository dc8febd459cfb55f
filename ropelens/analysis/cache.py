"""What an analysis keeps of itself until it is whole, and what it knows it by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ropelens.analysis.plan import Source
from ropelens.errors import BadArgument
from ropelens.measure.profile import versions
from ropelens.measure.savepoint import savepoint
from ropelens.models.texts import Sequences


def kept_in(
    cache: str | Path | None,
    source: Source,
    digest: str | None,
    read: Sequences,
    arguments: Mapping[str, Any],
) -> AbstractContextManager[None]:
    """The measurement, kept in `cache` under all that decides its numbers."""
    if cache is None:
        return nullcontext()
    if digest is None:
        raise BadArgument(
            "Only a model that is named can be measured with a cache.",
            means="one in memory has no files by which it is known again",
            attempt="its folder or Hub id, or no cache",
        )
    tokens = (read.tokens, read.lengths, read.documents)
    key = {
        "weights": digest,
        "config": source.config.to_dict(),
        "tokens": [None if of is None else _sha256(of) for of in tokens],
        "arguments": arguments,
        "device": ", ".join(map(str, source.devices)),
        "versions": versions(),
    }
    return savepoint(Path(cache), key)


def _sha256(numbers: Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers.cpu()).tobytes()).hexdigest()
