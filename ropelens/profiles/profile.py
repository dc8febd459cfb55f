"""A model and some tokens become a profile: labelled arrays that can be saved and shown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from ropelens.attention.variables import Statistic, labelled
from ropelens.budget.surrogates import DRAWS
from ropelens.errors import Count, Positive, Whole, public
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.profiles.capture import TokenNames
from ropelens.profiles.excerpts import EXCERPTED, excerpt_variables, read_excerpts
from ropelens.profiles.induction import repeats
from ropelens.profiles.measurement import Lengths, Measurement, Tokens
from ropelens.profiles.measures import AXES, MEASURES, STATISTICS, check_new
from ropelens.profiles.passes import OBSERVED, collect, cost_of_fit, fit_layers
from ropelens.profiles.summary import summarize
from ropelens.runtime.processes import gather, place, shard
from ropelens.runtime.progress import ShowProgress, Stage, silent
from ropelens.runtime.savepoint import begin_stage
from ropelens.text.corpus import Documents
from ropelens.text.rows import HowMany


@public
def profile(
    model: Model,
    tokens: Tokens,
    *,
    lengths: Lengths | None = None,
    documents: Documents | None = None,
    tokenizer: TokenNames | None = None,
    excerpts: Sequence[Int[Tensor, " position"]] = (),
    statistics: Sequence[Statistic] = (),
    sinks: Sequence[Whole] = (),
    budget: bool = True,
    surrogates: Count = DRAWS,
    rows: HowMany = "auto",
    seed: Whole = 0,
    batch_size: Positive | None = None,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Measure how `model` uses its rotary frequencies on `tokens`.

    `model` is a transformers model or a TransformerLens `TransformerBridge`; it is left as it
    was. The options:

    - `tokens` are padded on the right; of sequence s the first `lengths[s]` count (all,
      without `lengths`). Of a BatchEncoding the sequences are those that its `attention_mask`
      shows, on whichever side the padding is, and that begin anew in its `position_ids` (packed
      rows). Tokens that it hides inside a sequence are no keys, rows or predictions.
    - `documents[s]` numbers the document that sequence s was cut from; `documents[s, i]` the
      one of each token of packed rows, which are measured as documents alone (below 0:
      padding). Intervals resample documents; without them they speak of this text alone.
    - `rows` of each sequence's attention are looked at: "all", a number drawn with `seed`
      (unbiased), or "auto": all of sequences of up to 2,048 tokens, 512 of longer ones. The
      attention budget has rows of its own, the same for any `rows`.
    - `excerpts` are short sequences of tokens to look into, by default three pieces of the
      text on which heads choose their keys most sharply. `tokenizer` names their tokens.
    - `statistics` are measured beside those that every profile has.
    - `sinks` are ids of tokens that are sinks wherever they stand, beside position 0, the
      token that sequences begin with, and keys that are found to be sinks.
    - `budget=False` leaves out the attention budget, and with it labels and claims. Its fits
      take most of the time where text is short.
    - `surrogates`, with frequencies in a random order, are what the claim on wavelengths is
      compared with.
    - `batch_size` sequences run together, by default as many as memory takes.
    - `progress` shows the stages; see `show_progress`.

    Returns a dataset over layer, head, kv_head, frequency (0 turns fastest), offset_bin,
    group (of sequences, for the bootstrap) and draw (of surrogates; 0 is the model). Each
    variable has `long_name` and `units`; docs/measures.md defines them. Layers that do not
    attend (linear attention, convolutions, experts) are NaN; `layer_type` then says which.

    Under an edit that makes heads of a layer rotate differently, every head is measured as it
    rotates: `head_wavelength` (layer, head, frequency) says how, `wavelength` is that of the
    head that turns fastest in the plane. Where heads that share a key differ, each of the
    layer has a `kv_head` of its own.

    Raises `UnsupportedModel` for a model without RoPE or with hidden attention.
    """
    live, show = as_live_model(model, tokenizer), progress or silent
    common: dict[str, Any] = {"documents": documents, "sinks": sinks, "rows": rows}
    common |= {"seed": seed, "batch_size": batch_size}
    measurement = Measurement.of(live, tokens, lengths, **common)
    check_new(statistics)
    planes = measurement.rotation.planes(measurement.text.context)
    measurement.check_observation_is_exact()
    repeated = repeats(measurement, planes)
    stage, measured = begin_stage(), [*STATISTICS, *statistics]
    fits, sums = stage.state or (None if budget else {}, None)
    # One process fits and sums in the same pass, so the sequences of the sample come first.
    together = budget and place()[1] == 1
    first = measurement.sample.chosen if together else []
    chosen = [*first, *(n for n in shard(len(measurement.text)) if n not in first)]
    left = chosen[0 if sums is None else sums.sequences :]
    count = int(measurement.text.real[left].sum())
    share = len(shard(len(live.attending))) if fits is None else 0
    fitting = Stage("fitting the budget", share, "layers", cost_of_fit(measurement, surrogates))
    probing = Stage("probing", EXCERPTED + repeated.tokens)
    with show(Stage("measuring", count, cost=OBSERVED), probing, fitting) as step:
        read = read_excerpts(measurement, excerpts, planes, tokenizer)
        step(EXCERPTED, stage=1)
        answers = repeated.measure(partial(step, stage=1))
        if fits is None:
            fits, sums = fit_layers(
                measurement,
                planes,
                surrogates=surrogates,
                progress=partial(step, stage=2),
                statistics=measured if together else None,
                summed=step,
            )
            stage.save([fits, sums])
        sums = collect(
            measurement,
            planes,
            statistics=measured,
            fits=fits,
            chosen=chosen,
            progress=step,
            sums=sums,
            save=lambda sums: stage.save([fits, sums]),
        )
    dataset = summarize(reduce(add, gather(sums)), planes, fits, extra=statistics)
    scores = {name: x.numpy() for name, x in answers.items() if not name.endswith("loss")}
    dataset = dataset.assign(labelled(scores, MEASURES))
    sharp = dataset.get("total_bits", -dataset["entropy_bits"]).values
    dataset = dataset.assign(excerpt_variables(read, sharp)).set_coords("excerpt_token")
    if len(live.attending) < live.layers:
        kinds = {"layer_type": np.array(live.layer_types, dtype=object)}
        dataset = dataset.assign_coords(labelled(kinds, AXES))
    return dataset.assign_attrs({"kind": "profile"} | measurement.facts)
