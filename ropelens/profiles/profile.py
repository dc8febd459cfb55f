"""A model and some tokens become a profile: labelled arrays that can be saved and shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from ropelens.arguments import Count, Positive, Whole, check_count, public
from ropelens.attention.sums import Sums
from ropelens.budget.held_out import LayerFit, Sample
from ropelens.budget.surrogates import DRAWS
from ropelens.errors import BadArgument
from ropelens.profiles.excerpt_choice import EXCERPTED
from ropelens.profiles.excerpts import excerpt_variables, read_excerpts
from ropelens.profiles.finite import warn_unless_finite
from ropelens.profiles.layer_fits import FittingPass, LayerFitter
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.measures import MEASURES, STATISTICS, find_statistics
from ropelens.profiles.passes import BatchPass
from ropelens.profiles.summary import kind_coordinates, summarize
from ropelens.profiles.tasks import Repeats
from ropelens.rope.planes import Planes
from ropelens.runtime.processes import gather, process_count, shard
from ropelens.runtime.progress import Advance, ProgressOption, Stage, display_of
from ropelens.runtime.savepoint import resume
from ropelens.schema.axes import AXES
from ropelens.schema.excerpts import EXCERPTS
from ropelens.schema.rows import Statistic, labelled
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

    Raises `UnsupportedModel` for a model without RoPE, with hidden attention, or with numbers
    that are not finite, such as an overflow of float16. Warns if only other tokens than the
    first 256 of the longest sequence make the loss or the attention not finite.
    """
    check_count(surrogates, "surrogates")
    requested = find_statistics(statistics)
    measurement = Measurement.of(
        model,
        text,
        tokenizer=tokenizer,
        sinks=sinks,
        rows=rows,
        seed=seed,
        batch_size=batch_size,
    )
    check_statistics(requested)
    planes = measurement.rotation.planes(measurement.text.context)
    measurement.live.check_observation_is_exact(measurement.text)
    run = ProfileRun(
        measurement, planes, requested, budget=budget, surrogates=surrogates
    )
    with display_of(progress)(*run.stages()) as advance:
        read = read_excerpts(measurement, excerpts, planes, tokenizer)
        advance(EXCERPTED, stage=PROBING)
        answers = run.repeats.measure(partial(advance, stage=PROBING))
        run.fit_budget(advance)
        run.sum_text(partial(advance, stage=MEASURING))
    dataset = run.dataset(answers, read).assign_attrs(measurement.result_attributes())
    attending = measurement.live.attending_heads.numpy()
    of_heads = dataset["entropy_bits"].values[attending]
    results = {"loss": dataset["group_loss"].values, "entropy_bits": of_heads}
    warn_unless_finite(measurement.runs(), measurement.live.model, results)
    return dataset


MEASURING, PROBING, FITTING = range(3)  # the stages of a profile, in their order


@dataclass
class ProfileProgress:
    """The finished parts of a profile. They are saved after the fits and after each batch.

    `fits` has the budget of each layer (none without a budget), and `sums` the sums over the
    first `sums.sequences` of the sequences that this process measures.
    """

    fits: dict[int, LayerFit] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)


class ProfileRun:
    """The steps of a profile, which continue from saved progress if there is any."""

    def __init__(
        self,
        measurement: Measurement,
        planes: Sequence[Planes],
        requested: Sequence[Statistic],
        *,
        budget: bool,
        surrogates: int,
    ) -> None:
        self.measurement = measurement
        self.requested = requested
        self.statistics = [*STATISTICS, *requested]
        self.surrogates = surrogates
        self.planes = planes
        self.repeats = Repeats(measurement, self.planes)
        self.saved = resume(ProfileProgress)
        self.progress: ProfileProgress = self.saved.state or ProfileProgress()
        self.unfitted = budget and self.saved.state is None
        # One process fits and sums the sample in the same pass.
        self.sums_sample = budget and process_count() == 1
        self.sequences = self._order_of_sequences()

    def _order_of_sequences(self) -> list[int]:
        """The sequences of this process; if it sums the sample, the sample comes first."""
        text = self.measurement.text
        own = shard(len(text))
        if not self.sums_sample:
            return list(own)
        sample = Sample.draw(text, seed=self.measurement.seed).chosen
        return [*sample, *(sequence for sequence in own if sequence not in sample)]

    def unmeasured(self) -> list[int]:
        """The sequences that are not in the sums yet."""
        return self.sequences[self.progress.sums.sequences :]

    def stages(self) -> list[Stage]:
        """The stages with the tokens and layers that are left to do."""
        tokens = int(self.measurement.text.real[self.unmeasured()].sum())
        layers = len(self.measurement.live.attending)
        own_layers = len(shard(layers)) if self.unfitted else 0
        return [
            Stage("measuring", tokens),
            Stage("probing", EXCERPTED + self.repeats.tokens),
            Stage("fitting the budget", own_layers, "layers"),
        ]

    def fit_budget(self, advance: Advance) -> None:
        """Fit the budget of every layer, unless saved progress has the fits."""
        if not self.unfitted:
            return
        fitter = LayerFitter(
            self.measurement,
            self.planes,
            surrogates=self.surrogates,
            progress=partial(advance, stage=FITTING),
        )
        if self.sums_sample:
            fitting_pass = FittingPass(
                fitter, statistics=self.statistics, progress=advance
            )
            self.progress.sums = fitting_pass.run().sums
            self.progress.fits = fitter.fits_of_all_processes()
        else:
            self.progress.fits = fitter.fit_layers()
        self.saved.save(self.progress)

    def sum_text(self, advance: Advance) -> None:
        """Add the sums over the sequences that are not yet measured, batch by batch."""
        for batch in self.measurement.batches(self.unmeasured()):
            batch_pass = BatchPass(
                self.measurement.live,
                batch,
                self.planes,
                statistics=self.statistics,
                fits=self.progress.fits,
                progress=advance,
            )
            self.progress.sums += batch_pass.run().sums
            self.saved.save(self.progress)

    def dataset(
        self, answers: Mapping[str, Tensor], read: dict[str, np.ndarray]
    ) -> xr.Dataset:
        """The profile, with the `answers` of repeated tokens and the excerpts as read."""
        sums = reduce(add, gather(self.progress.sums))
        dataset = summarize(sums, self.planes, self.progress.fits, extra=self.requested)
        attention = {
            name: x.numpy() for name, x in answers.items() if not name.endswith("loss")
        }
        sharpness = dataset.get("total_bits", -dataset["entropy_bits"]).values
        dataset = dataset.assign(labelled(attention, MEASURES))
        dataset = dataset.assign(excerpt_variables(read, sharpness))
        dataset = dataset.set_coords("excerpt_token")
        kinds = self.measurement.rotation.kinds
        dataset = dataset.assign_coords(kind_coordinates(kinds))
        pairings = sorted({layer.pairing for layer in self.planes})
        return dataset.assign_attrs(kind="profile", pairing=" ".join(pairings))


def check_statistics(statistics: Sequence[Statistic]) -> None:
    """Raise `BadArgument` for a bad name, or a column of heads.csv that is not by head."""
    taken: set[str] = set()
    for row in (*MEASURES, *AXES, *EXCERPTS):
        taken.update((row.name, *row.dims))
    for row in statistics:
        if row.name in taken:
            raise BadArgument(f"There is a variable {row.name!r} already.")
        if row.name in ("", ".") or "/" in row.name or "\0" in row.name:
            raise BadArgument(
                f"A file cannot have a variable {row.name!r}.", hint="letters"
            )
        by_head = tuple(row.dims) in {
            ("layer", "head"),
            ("layer", "head", "distance_bin"),
        }
        if row.column and not by_head:
            raise BadArgument(
                f"heads.csv cannot have a column {row.name!r}.",
                seen=f"dims {', '.join(row.dims)}",
                hint='dims=("layer", "head"), or column=""',
            )
        taken.add(row.name)
