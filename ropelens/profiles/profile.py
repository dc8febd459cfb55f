"""A model and some tokens become a profile: labelled arrays that can be saved and shown."""

from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import xarray as xr
from jaxtyping import Int
from torch import Tensor

from ropelens.arguments import Count, Positive, Whole, check_count, public
from ropelens.budget.held_out import Sample
from ropelens.budget.surrogates import DRAWS
from ropelens.errors import BadArgument
from ropelens.profiles.excerpts import EXCERPTED, excerpt_variables, read_excerpts
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.measures import MEASURES, STATISTICS, find_statistics
from ropelens.profiles.passes import collect, fit_layers
from ropelens.profiles.summary import kind_coordinates, summarize
from ropelens.profiles.tasks import repeats
from ropelens.runtime.processes import gather, place, shard
from ropelens.runtime.progress import ProgressOption, Stage, display_of
from ropelens.runtime.savepoint import begin_stage
from ropelens.schema import AXES, Statistic, labelled
from ropelens.text.prompts import TokenNames
from ropelens.text.rows import HowMany
from ropelens.text.tokenize import TextInput


@public
def profile(
    model: Measured,
    text: TextInput,
    *,
    tokenizer: TokenNames | None = None,
    excerpts: Sequence[Int[Tensor, " position"]] = (),
    statistics: str | Sequence[Statistic | str] = (),
    sinks: Sequence[Whole] = (),
    budget: bool = True,
    surrogates: Count = DRAWS,
    rows: HowMany = "auto",
    seed: Whole = 0,
    batch_size: Positive | None = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Measure how `model` uses its rotary frequencies on `text`.

    Parameters
    ----------
    model
        A transformers model or a TransformerLens `TransformerBridge`. It is not changed.
    text
        A `Text`, token ids [sequence, position], a BatchEncoding, or a string (with
        `tokenizer`). If the `position_ids` of a BatchEncoding begin anew, its rows are split
        there. Tokens that the `attention_mask` hides on either side are padding. Tokens hidden
        inside a sequence are not keys, rows or predictions. Intervals resample the documents.
    tokenizer
        Names the tokens of excerpts, and tokenizes a string.
    excerpts
        Short sequences of token ids to look into; by default the three pieces of the text on
        which the heads choose their keys most sharply.
    statistics
        Statistics that are added to the profile: your own, or by name "reversal",
        "uniform_reversal", "locality" and "position_sensitivity" (see docs/measures.md).
    sinks
        Ids of further tokens that are sinks. Position 0, the token that sequences begin with,
        and keys that are found to be sinks are sinks in any case.
    budget
        Whether to fit the attention budget and exchange the contents of keys, which labels and
        claims need. The fits take most of the time if the text is short.
    surrogates
        Number of models with frequencies in a random order, for the claim about wavelengths.
    rows
        Rows of attention that are measured per sequence: "all", a number of rows drawn with
        `seed` (unbiased), or "auto": all rows of sequences of up to 2,048 tokens, or 512. The
        budget has its own rows.
    batch_size
        Sequences that run together; by default as many as the memory allows.
    progress
        True shows the progress on stderr, as commands do.

    Returns
    -------
    Dataset over layer, head, kv_head, frequency (0 rotates fastest), offset_bin, group (of
    sequences, for the bootstrap) and draw (of surrogates; 0 is the model). docs/measures.md
    defines the variables. Layers that do not attend (linear attention, convolutions) are NaN.

    `layer_type` (layer) is the kind of the layer by its mask and its rotation as measured:
    "sliding", "full", "chunked", "none" (no rotation), "recurrent" (no attention), or "full-2"
    for another rotation. `base`, `scaling` and `reach` (tokens, the window or the trained
    context) describe it.

    If an edit makes the heads of a layer rotate differently, `head_wavelength` gives the
    wavelengths of each head, and `wavelength` those of the fastest head. If heads that share a
    key differ, each query head of the layer has its own `kv_head`.

    Raises `UnsupportedModel` for a model without RoPE or with hidden attention.
    """
    options: dict[str, Any] = {"rows": rows, "seed": seed, "batch_size": batch_size}
    check_count(surrogates, "surrogates")
    statistics = find_statistics(statistics)
    measurement = Measurement.of(
        model, text, tokenizer=tokenizer, sinks=sinks, **options
    )
    live, text = measurement.live, measurement.text
    taken = {name for row in (*MEASURES, *AXES) for name in (row.name, *row.dims)}
    for row in statistics:
        if row.name in taken:
            raise BadArgument(f"There is a variable {row.name!r} already.")
        if row.name in ("", ".") or {*"/\0"} & {*row.name}:
            raise BadArgument(
                f"A file cannot have a variable {row.name!r}.", hint="letters"
            )
        taken.add(row.name)
    planes = measurement.rotation.planes(text.context)
    live.check_observation_is_exact(text)
    repeated = repeats(measurement, planes)
    stage, measured = begin_stage(), [*STATISTICS, *statistics]
    fits, sums = stage.state or (None if budget else {}, None)
    # One process fits and sums in the same pass, so the sequences of the sample come first.
    together = budget and place()[1] == 1
    first = Sample.draw(text, seed=measurement.seed).chosen if together else []
    chosen = [*first, *(n for n in shard(len(text)) if n not in first)]
    left = chosen[0 if sums is None else sums.sequences :]
    share = len(shard(len(live.attending))) if fits is None else 0
    stages = (
        Stage("measuring", int(text.real[left].sum())),
        Stage("probing", EXCERPTED + repeated.tokens),
        Stage("fitting the budget", share, "layers"),
    )
    with display_of(progress)(*stages) as step:
        read = read_excerpts(measurement, excerpts, planes, tokenizer)
        step(EXCERPTED, stage=1)
        answers = repeated.measure(partial(step, stage=1))
        if fits is None:
            options = {"surrogates": surrogates, "progress": partial(step, stage=2)}
            options |= {"statistics": measured, "summed": step} if together else {}
            fits, sums = fit_layers(measurement, planes, **options)
            stage.save([fits, sums])
        options = {"statistics": measured, "fits": fits, "chosen": chosen, "sums": sums}
        options |= {"progress": step, "save": lambda sums: stage.save([fits, sums])}
        sums = collect(measurement, planes, **options)
    dataset = summarize(reduce(add, gather(sums)), planes, fits, extra=statistics)
    scores = {
        name: x.numpy() for name, x in answers.items() if not name.endswith("loss")
    }
    sharp = dataset.get("total_bits", -dataset["entropy_bits"]).values
    variables = labelled(scores, MEASURES) | excerpt_variables(read, sharp)
    dataset = dataset.assign(variables).set_coords("excerpt_token")
    dataset = dataset.assign_coords(kind_coordinates(measurement.rotation.kinds))
    pairing = " ".join(sorted({layer.pairing for layer in planes}))
    return dataset.assign_attrs(
        {"kind": "profile", "pairing": pairing} | measurement.facts
    )
