"""The attention budget of every layer is fitted in one pass over a sample of the text."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from ropelens.attention.call import AttentionCall
from ropelens.budget.held_out import LayerFit, Sample
from ropelens.checkpoints.not_finite import in_dtype, remedy
from ropelens.errors import UnsupportedModel
from ropelens.model.observation_check import NO_KEY
from ropelens.profiles.chunks import observer_of_chunks
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import BatchPass, Progress
from ropelens.rope.planes import Planes
from ropelens.runtime.processes import gather, shard
from ropelens.schema.rows import Statistic
from ropelens.text.rows import Rows


class LayerFitter:
    """Fits the budget of each layer to its attention call on a sample of the text."""

    def __init__(
        self,
        measurement: Measurement,
        planes: Sequence[Planes],
        *,
        surrogates: int,
        progress: Progress = lambda _: None,
    ) -> None:
        self.measurement = measurement
        self.planes = planes
        self.surrogates = surrogates
        self.progress = progress
        self.sample = Sample.draw(measurement.text, seed=measurement.seed)
        attending = measurement.live.attending
        self.own_layers = [attending[index] for index in shard(len(attending))]
        self.fits: dict[int, LayerFit] = {}

    @property
    def rows(self) -> tuple[Rows, Rows]:
        return (self.sample.rows, self.sample.surrogate_rows)

    def fit(self, call: AttentionCall) -> LayerFit:
        """Fit the models of a layer. Raise `UnsupportedModel` if numbers are not finite."""
        layer_fit = self.sample.fit(
            call,
            self.planes[call.layer],
            surrogates=self.surrogates,
            seed=self.measurement.seed,
        )
        if not layer_fit.weights.isfinite().all():
            query = f"{float(call.query.abs().max()):.0e}"
            key = f"{float(call.key.abs().max()):.0e}"
            raise UnsupportedModel(
                f"The attention budget of layer {call.layer} cannot be fitted.",
                seen=f"queries up to {query}, keys up to {key}; "
                f"their squares are not finite {in_dtype(call.query.dtype)}",
                hint=remedy(call.query.dtype, NO_KEY),
            )
        self.fits[call.layer] = layer_fit
        self.progress(1)
        return layer_fit

    def fit_layers(self) -> dict[int, LayerFit]:
        """Fit the budget of every layer; each process fits some, and gets all fits."""
        self._fit_own_layers()
        return self.fits_of_all_processes()

    def _fit_own_layers(self) -> None:
        """Fit the layers of this process in a pass that ends after its last layer."""
        if not self.own_layers:
            return
        live = self.measurement.live
        text = self.sample.text
        width = text.ids.shape[1]
        observer = observer_of_chunks(
            live.chunk_length(width), self.rows, width, self._fit_or_end
        )
        with suppress(_AllFitted), torch.no_grad(), live.observe(observer):
            for _ in live.logits(text.ids, hidden=text.hidden):
                pass

    def _fit_or_end(self, call: AttentionCall) -> None:
        if call.layer not in self.own_layers:
            return
        self.fit(call)
        if len(self.fits) == len(self.own_layers):
            raise _AllFitted

    def fits_of_all_processes(self) -> dict[int, LayerFit]:
        """The fits of all layers, by layer in ascending order."""
        fits: dict[int, LayerFit] = {}
        for fits_of_process in gather(self.fits):
            fits.update(fits_of_process)
        self.measurement.live.check_layers(set(fits))
        return {layer: fits[layer] for layer in sorted(fits)}


class _AllFitted(Exception):
    """Ends a pass before its logits, which are its largest part and are not needed."""


class FittingPass(BatchPass):
    """A pass over the sample that fits each layer, and then scores and sums it."""

    def __init__(
        self,
        fitter: LayerFitter,
        *,
        statistics: Sequence[Statistic],
        progress: Progress,
    ) -> None:
        sample = fitter.sample
        width = sample.text.ids.shape[1]
        super().__init__(
            fitter.measurement.live,
            fitter.measurement.batch(sample.chosen, width=width),
            fitter.planes,
            statistics=statistics,
            fits=fitter.fits,
            progress=progress,
        )
        self.fitter = fitter

    def kept_rows(self) -> Sequence[Rows]:
        return (*super().kept_rows(), *self.fitter.rows)

    def fit_of(self, call: AttentionCall) -> LayerFit:
        return self.fitter.fit(call)
