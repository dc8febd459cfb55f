"""torch's random numbers of a seed."""

from __future__ import annotations

import numpy as np
import torch

from ropelens.statistics.seeds import whole_seed


def generator_of(seed: int, *key: int) -> torch.Generator:
    """torch's generator of a seed; with a `key`, such as a sequence's number, one of its own.

    torch takes 32 bits of a seed, so seed and key are mixed into these.
    """
    seed = whole_seed(seed)
    if not key:
        return torch.Generator().manual_seed(seed % 2**63)
    mixed = np.random.SeedSequence(seed % 2**64, spawn_key=key)
    return torch.Generator().manual_seed(int(mixed.generate_state(1)[0]))
