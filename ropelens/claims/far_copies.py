"""Attention of induction heads on copies that are so far apart that slow planes turn."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import by_layer, sum_attention
from ropelens.interventions.entries import Edits, entries_of
from ropelens.interventions.entry_runs import run_entries
from ropelens.interventions.reach import COPIED, two_copies
from ropelens.interventions.token_split import TokenSplit
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import Progress
from ropelens.profiles.tasks import OFFSET_MASS, whole_lengths
from ropelens.rope.planes import Planes
from ropelens.runtime.progress import ProgressOption
from ropelens.text.rows import Rows

FAR_DRAWS = 2  # draws of random tokens: 42 passes of the model for each kind of layers
TASK = "far induction"


def far_tokens(distance: int) -> int:
    """Number of tokens in which far copies are measured once."""
    return FAR_DRAWS * (1 + distance + COPIED)


class FarCopies:
    """Attention on the token after the earlier occurrence, `distance` tokens before the row.

    `reach` measures the same sequences: random tokens, text, and the random tokens again.
    """

    def __init__(
        self, measurement: Measurement, planes: Sequence[Planes], distance: int
    ) -> None:
        self.live = measurement.live
        self.planes = planes
        self.distance = distance
        draws = []
        for draw in range(FAR_DRAWS):
            draws.append(two_copies(measurement, distance, COPIED, draw))
        self.ids = torch.cat(draws)
        last = self.ids.shape[1] - 1  # no token follows its second occurrence
        row = torch.arange(last + 1 - COPIED, last, device="cpu")
        position = row.expand(FAR_DRAWS, -1)
        weight = torch.full(
            position.shape, 1 / len(row), dtype=torch.float32, device="cpu"
        )
        lengths = whole_lengths(self.ids)
        self.rows = Rows(position, weight, lengths, dense=False)
        self.tokens = self.ids.numel()
        self.coordinates: dict[str, np.ndarray] = {}

    def measure(self, progress: Progress) -> dict[str, Tensor]:
        """`far_induction` [layer, head], the mean over the rows and the draws."""
        self.live.forget_length()
        attention = self.live.record_calls(self.ids, self._attention_on_next)
        progress(self.tokens)
        scores = by_layer(attention, self.live.layers)
        return {"far_induction": scores.mean(1)}

    def _attention_on_next(self, call: AttentionCall) -> Float[Tensor, "draw head"]:
        sampled = SampledCall(call, self.rows, self.planes[call.layer])
        by_offset = sum_attention(sampled, OFFSET_MASS)["offset_mass"]
        return by_offset[..., self.distance - 1]


def far_induction(
    measurement: Measurement,
    edits: Edits,
    distance: int,
    progress: ProgressOption,
) -> Float[np.ndarray, "entry layer head"]:
    """Induction scores without an edit and under each of `edits`, at this distance."""
    entries = entries_of(measurement, edits, controls=0)
    task = FarCopies(measurement, entries[0].planes, distance)
    split = TokenSplit.plan(
        measurement.text, trained=measurement.live.trained, tokenizer=None
    )
    done = run_entries(
        measurement,
        entries,
        measures=(),
        tasks={TASK: task},
        split=split,
        progress=progress,
    )
    scores = [answers[TASK]["far_induction"].numpy() for answers in done.answers]
    return np.stack(scores)
