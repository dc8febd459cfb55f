"""The public `test_claims`, and the further runs of a model that some claims need."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from transformers import PreTrainedConfig

from ropelens.arguments import Positive, Whole, public
from ropelens.claims.arrays import ALL_LAYERS, parts_by_kind
from ropelens.claims.attention_pass import read_attention
from ropelens.claims.far_copies import far_tokens
from ropelens.claims.layers_of_kind import LayersOfKind
from ropelens.claims.ledger import ledger
from ropelens.claims.run_arrays import SETS, RunArrays, join_runs
from ropelens.claims.stopped_heads import (
    RUNS,
    distance_of_copies,
    far_distance,
    induction_arrays,
    repeated_tokens,
)
from ropelens.claims.stopped_planes import loss_arrays
from ropelens.config_facts import layer_types, stated_context
from ropelens.errors import BadArgument
from ropelens.interventions.reach import COPIED
from ropelens.measured_rotation.conformance import asked_rotations
from ropelens.measured_rotation.layer_kinds import stated_windows
from ropelens.profiles.heads import require_budget
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.measures import complete_profile
from ropelens.profiles.tasks import REPEATS
from ropelens.runtime.progress import ProgressOption, display_of
from ropelens.text.rows import rows_for
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput

MAX_SEQUENCES = 4  # for evaluations in which planes stop or drop out
ROWS_READ = 64  # of each sequence, for attention on sets of tokens and for reversals


@public
def test_claims(
    profile: xr.Dataset,
    *,
    model: Measured | None = None,  # noqa: PT028
    text: TextInput | None = None,  # noqa: PT028
    tokenizer: Any = None,  # noqa: PT028
    draws: Positive = 1000,  # noqa: PT028
    seed: Whole = 0,  # noqa: PT028
    progress: ProgressOption = None,  # noqa: PT028
) -> pd.DataFrame:
    """Test published claims about RoPE on the model of a profile: one row for each claim.

    - `number` is the number that the claim is about, and `what` names it. `low` to `high` is
      the 95 % interval by the jackknife over layers or documents (`over`); NaN for too few.
    - `null` describes how the number is drawn again if only chance and geometry matter.
      `null_low` to `null_high` holds 95 % of the `null_draws` (at most `draws`, with `seed`).
    - `p_value` is the share of the number and its draws that are as far on the claimed side.
      `q_value` is the false discovery rate at which the claim would count among all tested
      claims (Benjamini and Hochberg 1995).
    - `verdict` is "holds" if the number is beyond `threshold`: then `p_value` is at most 2.5 %.
      It is "contradicted" if at most 2.5 % are as far on the other side, "unresolved" if
      neither is true, and "not testable" if such a number is impossible, or if stopped planes
      cannot turn within the tested length. `why` gives the reason, and `call` shows the data.
    - `layers` is the kind of layers that are tested, or "all" if layers of one kind rotate.
    - `original` is the number of the paper (`doi`, `figure`), measured on `original_model`
      under `conditions`. `nearness` is "direct", "close" or "conceptual", and `deviation` says
      how the test differs. `floor` is what counts as none since the commit of `floor_day`, and
      `other` another reasonable statistic.

    With `model` and `text` (as for `profile`), the model also runs again for more claims: under
    80 edits on 4 sequences, on copies up to 2,048 tokens apart and, with `tokenizer`, to find a
    head that attends to apostrophes. docs/measures.md defines each number.
    """
    profile = complete_profile(profile)
    require_budget(profile)
    if (model is None) != (text is None):
        raise BadArgument(
            "Claims of runs need model and text.", hint="both, or neither"
        )
    runs = None
    if model is not None and text is not None:
        runs = run_for_claims(
            profile,
            model,
            text,
            tokenizer=tokenizer,
            seed=int(seed),
            progress=progress,
        )
    return ledger(profile, draws=draws, seed=int(seed), runs=runs)


test_claims.__test__ = False  # type: ignore[attr-defined]  # or pytest collects it as a test


def run_for_claims(
    profile: xr.Dataset,
    model: Measured,
    text: TextInput,
    *,
    tokenizer: Any,
    seed: int,
    progress: ProgressOption,
) -> dict[str, RunArrays]:
    """The argument `runs` of `ledger`: arrays by the name of the kind of layers.

    "all" always has the apostrophes. If the model has one kind of layers, it has all arrays.
    """
    measurement = Measurement.of(
        model, text, tokenizer=tokenizer, rows=ROWS_READ, seed=seed
    )
    few = few_sequences(measurement.text)
    of_edits = replace(measurement, text=few, rows=rows_for("auto", few.context))
    runs = {ALL_LAYERS: RunArrays()}
    kinds = {}
    for name, part in parts_by_kind(profile).items():
        kind = LayersOfKind(part, every=name == ALL_LAYERS, seed=measurement.seed)
        losses = loss_arrays(kind, of_edits, progress)
        inductions = induction_arrays(kind, of_edits, progress)
        runs[name] = join_runs(losses, inductions)
        kinds[name] = kind
    attention = read_attention(measurement, tokenizer, display_of(progress))
    for name, kind in kinds.items():
        reversal = RunArrays(arrays={"reversal": attention.reversals_in(kind.layers)})
        runs[name] = join_runs(runs[name], reversal)
    runs[ALL_LAYERS] = join_runs(runs[ALL_LAYERS], attention.apostrophes)
    return runs


def few_sequences(text: Text) -> Text:
    """`MAX_SEQUENCES` sequences at most, evenly spread over the text."""
    step = -(-len(text) // MAX_SEQUENCES)
    return text[::step]


def count_run_tokens(text: Text, config: PreTrainedConfig) -> int:
    """Number of tokens that pass the model in `run_for_claims`."""
    edits = 4 + 2 * SETS  # none, slow, fast and longest planes, and the random sets
    tokens_of_edits = edits * int(few_sequences(text).real.sum())
    context = stated_context(config) or text.context
    distance = distance_of_copies(context)
    copies = 2 * RUNS * (distance + COPIED + 1)
    tokens = int(text.real.sum())
    for layer in _layers_of_types(config):
        induction = count_induction_tokens(config, layer, context)
        tokens += tokens_of_edits + induction + copies
    return tokens


def count_induction_tokens(config: PreTrainedConfig, layer: int, context: int) -> int:
    """Number of tokens in which induction is measured, in layers that rotate as `layer` does.

    The slowest planes and the strongest planes of each head stop, and random planes for each.
    If the configuration states slow planes, copies are far apart while they stop.
    """
    repeated = repeated_tokens(context)
    near = (2 + SETS) * REPEATS * repeated
    far = _stated_far_distance(config, layer, context)
    if far <= repeated:
        return 2 * near
    return near + (2 + SETS) * far_tokens(far)


def _layers_of_types(config: PreTrainedConfig) -> list[int]:
    """The first layer of each type that the configuration names."""
    types = layer_types(config)
    return [types.index(name) for name in dict.fromkeys(types)]


def _stated_far_distance(config: PreTrainedConfig, layer: int, context: int) -> int:
    """The distance of far copies by the stated frequencies; 0 if none are needed or known."""
    text_config = config.get_text_config()
    asked = asked_rotations(text_config, layers=layer + 1)[layer]
    if asked.inv_freq is None:
        return 0
    if layer_types(config)[layer] == "sliding_attention":
        context = min([context, *stated_windows(text_config, context)])
    inv_freq = asked.inv_freq[asked.inv_freq > 0].numpy()
    slowest = inv_freq[len(inv_freq) - len(inv_freq) // 4 :]
    return far_distance(2 * np.pi / slowest[None], context)
