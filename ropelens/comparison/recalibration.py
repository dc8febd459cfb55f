"""Recalibrations as one dataset: gaps to the control, and models before and after."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool
from transformers import PreTrainedModel

from ropelens.checkpoints.files import sha256_of
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.comparison.checkpoint_cache import saved_or_measured, without_weights
from ropelens.comparison.checkpoint_measures import ValidationText
from ropelens.comparison.join import join_datasets
from ropelens.comparison.recalibration_measures import (
    VALID,
    held_out_text,
    measure_change,
    measure_recalibrated,
)
from ropelens.comparison.recalibration_runs import (
    CONTROL,
    FoundRecalibrations,
    RecalibratedRun,
    RecordedLosses,
    read_losses,
)
from ropelens.comparison.recovery import Estimate, mean_change, measure_recovery
from ropelens.errors import BadArgument
from ropelens.profiles.measurement import versions
from ropelens.runtime.folder import file_name
from ropelens.runtime.keys import Key
from ropelens.runtime.progress import ShowProgress, Stage
from ropelens.train.base_model import Base

COMPARED = "recalibrations"
"""Attribute `compared` of a comparison of runs that start from one checkpoint."""

BEFORE = "before"
AFTER = "after"
NO_SEED = -1  # of models before training, which all seeds share


def compare_recalibrations(
    found: FoundRecalibrations,
    *,
    cache: Path,
    sequences: int,
    seed: int,
    device: str,
    show: ShowProgress,
) -> xr.Dataset:
    """The dataset of `compare` for recalibrations."""
    losses = read_losses(found.runs)
    checkpoints = RecalibrationCache(
        cache, found.runs[0], sequences=sequences, seed=seed, device=device
    )
    models = _models(found, checkpoints)
    first = found.runs[0].record
    dataset = xr.merge(
        [_measure_models(models, checkpoints, show), _gaps(found, losses)],
        combine_attrs="drop",
    )
    return dataset.assign_attrs(
        compared=COMPARED,
        base=str(first["base"]["name"]),
        base_fingerprint=str(first["base"]["fingerprint"]),
        context=int(first["settings"]["context"]),
        trained_context=int(first["base"]["trained_context"] or 0),
        steps=int(first["settings"]["steps"]),
        tokens=int(first["tokens"]),
        learning_rate=float(first["settings"]["learning_rate"]),
        trained_parameters=str(first["settings"]["train"]),
        parameters=int(first["parameters"]),
        sequences=int(dataset.sizes["sequence"]),
        documents=len(np.unique(dataset["document"])),
        measured_sequences=sequences,
        unfinished=", ".join(found.unfinished),
        unpaired=", ".join(found.unpaired),
    )


# ---- losses that the runs recorded


def _gaps(
    found: FoundRecalibrations, recorded: Sequence[RecordedLosses]
) -> xr.Dataset:
    """Losses over (variant, seed, step, sequence), and the numbers that follow from them."""
    first = recorded[0]
    shape = (len(found.variants), len(found.seeds))
    losses = np.full((*shape, *first.losses.shape), np.nan)
    train_loss = np.full((*shape, len(first.steps)), np.nan)
    for run, of_run in zip(found.runs, recorded, strict=True):
        place = (found.variants.index(run.variant), found.seeds.index(run.seed))
        losses[place] = of_run.losses
        train_loss[place] = of_run.train_loss
    tokens_per_step = int(found.runs[0].record["tokens_per_step"])
    by_step = ("variant", "seed", "step")
    dataset = xr.Dataset(
        {
            "heldout_loss": ((*by_step, "sequence"), losses),
            "train_loss": (by_step, train_loss),
        },
        {
            "variant": np.array(found.variants, dtype=object),
            "seed": np.array(found.seeds),
            "step": first.steps,
            "tokens_seen": ("step", first.steps * tokens_per_step),
            "document": ("sequence", first.documents),
        },
    )
    return dataset.assign(recovery_variables(dataset))


def recovery_variables(dataset: xr.Dataset) -> dict[str, xr.DataArray]:
    """Gaps, recovered shares and tokens to recover of each variant, with their intervals."""
    losses = dataset["heldout_loss"].transpose("variant", "seed", "step", "sequence")
    documents = dataset["document"].values
    tokens = dataset["tokens_seen"].values
    control = losses.values[0]
    estimates: dict[str, list[Estimate]] = {}
    for variant in losses.values:
        change = variant - control
        paired = np.isfinite(change).all((1, 2))
        recovery = measure_recovery(change[paired], documents, tokens)
        trained = np.isfinite(variant).all((1, 2))
        of_training = variant[trained, -1] - variant[trained, 0]
        for name, estimate in {
            "gap": recovery.gap,
            "recovered": recovery.recovered,
            "tokens_to_half": recovery.tokens_to_half,
            "tokens_to_90": recovery.tokens_to_90,
            "loss_change": mean_change(of_training, documents),
        }.items():
            estimates.setdefault(name, []).append(estimate)
    variables = {}
    for name, of_variants in estimates.items():
        dims = ("variant", "step")[: 1 + of_variants[0].value.ndim]
        for end, values in (
            ("", [estimate.value for estimate in of_variants]),
            ("_low", [estimate.low for estimate in of_variants]),
            ("_high", [estimate.high for estimate in of_variants]),
        ):
            variables[f"{name}{end}"] = xr.DataArray(np.stack(values), dims=dims)
    variables["gap_of_seed"] = (losses - losses[0]).mean("sequence")
    return variables


# ---- models before training and after it


@dataclass
class MeasuredModel:
    """A model of a comparison: a variant before the training, or a finished run."""

    run: RecalibratedRun
    phase: str
    opened: Opened | None
    weights: Key

    @property
    def entry(self) -> str:
        return f"{self.run.variant} {BEFORE}" if self.is_before else self.run.name

    @property
    def is_before(self) -> bool:
        return self.phase == BEFORE

    @property
    def seed(self) -> int:
        return NO_SEED if self.is_before else self.run.seed

    @property
    def file(self) -> str:
        """Name of the file of this model in the folder of its variant."""
        return BEFORE if self.is_before else f"seed-{self.seed}"

    def is_control_of(self, other: "MeasuredModel") -> bool:
        same_seed = (self.phase, self.seed) == (other.phase, other.seed)
        return self.run.variant == CONTROL and same_seed


class LazyModel:
    """A model whose weights are read if they are needed."""

    def __init__(self, measured: MeasuredModel, cache: "RecalibrationCache") -> None:
        self.measured = measured
        self.cache = cache

    @cached_property
    def model(self) -> PreTrainedModel:
        return self.cache.read(self.measured)


class RecalibrationCache:
    """A folder with a file for each model, and for each pair of a model and its control."""

    def __init__(
        self,
        folder: Path,
        run: RecalibratedRun,
        *,
        sequences: int,
        seed: int,
        device: str,
    ) -> None:
        self.folder = folder
        self.run = run
        self.sequences = sequences
        self.seed = seed
        self.loading = Loading(device=device)

    @cached_property
    def text(self) -> ValidationText:
        return held_out_text(self.run)

    @cached_property
    def base(self) -> Base:
        """The base of all runs; refuses another checkpoint of the same name."""
        recorded = self.run.record["base"]
        loading = Loading(
            device=self.loading.device,
            revision=recorded.get("revision"),
            trust_remote_code=bool(recorded.get("trust_remote_code")),
        )
        base = Base(open_checkpoint(recorded["name"], loading))
        fingerprint = identity(base.opened)
        if fingerprint != recorded["fingerprint"]:
            raise BadArgument(
                f"{recorded['name']} is not the checkpoint from which {self.run.folder} "
                "started.",
                seen=f"fingerprint {fingerprint}, recorded {recorded['fingerprint']}",
                hint="the files of the base as they were at the training",
            )
        return base

    def read(self, measured: MeasuredModel) -> PreTrainedModel:
        if measured.is_before:
            model = self.base.read(measured.run.variant)
            return model.requires_grad_(False)
        if measured.opened is None:
            raise without_weights(measured.run.folder, self.file_of(measured))
        return measured.opened.read()

    def file_of(self, measured: MeasuredModel, suffix: str = "") -> Path:
        name = f"{measured.file}{suffix}.nc"
        return self.folder / file_name(measured.run.variant) / name

    def before(self, run: RecalibratedRun) -> MeasuredModel:
        """The base with the rotation of a variant. Its weights are the weights of the base."""
        recorded = run.record["base"]["fingerprint"]
        weights = {"base": recorded, "variant": run.variant}
        return MeasuredModel(run, BEFORE, None, self._key(weights))

    def after(self, run: RecalibratedRun) -> MeasuredModel:
        """The finished run. Without weights, only a result in the cache can be used."""
        if not (run.folder / "model.safetensors").exists():
            return MeasuredModel(run, AFTER, None, self._key({}))
        opened = open_checkpoint(run.folder, self.loading)
        weights = {"weights": identity(opened), "versions": versions()}
        return MeasuredModel(run, AFTER, opened, self._key(weights))

    def _key(self, weights: dict[str, Any]) -> Key:
        """The key of a measurement: its arguments, its text if it is there, and weights."""
        values = {"sequences": self.sequences, "seed": self.seed, **weights}
        valid = self.run.data / VALID
        if valid.exists():
            values["text"] = sha256_of(valid)
        return Key(values)

    def measures(self, lazy: LazyModel) -> xr.Dataset:
        def measured() -> xr.Dataset:
            return measure_recalibrated(
                lazy.model, self.text, sequences=self.sequences, seed=self.seed
            )

        file = self.file_of(lazy.measured)
        return saved_or_measured(file, lazy.measured.weights, measured)

    def change(self, control: LazyModel, lazy: LazyModel) -> xr.Dataset:
        """The change of the attention of each head against the control, in bits."""

        def measured() -> xr.Dataset:
            return measure_change(
                control.model, lazy.model, self.text, sequences=self.sequences
            )

        of_control = control.measured.weights.recorded
        key = Key({**lazy.measured.weights.recorded, "control": of_control})
        file = self.file_of(lazy.measured, "-change")
        return saved_or_measured(file, key, measured)


def _models(
    found: FoundRecalibrations, cache: RecalibrationCache
) -> list[MeasuredModel]:
    """Each variant before the training and then its runs, the control first."""
    models = []
    for variant in found.variants:
        runs = [run for run in found.runs if run.variant == variant]
        models.append(cache.before(runs[0]))
        models += map(cache.after, runs)
    return models


def _measure_models(
    models: Sequence[MeasuredModel], cache: RecalibrationCache, show: ShowProgress
) -> xr.Dataset:
    """The measures of the models over `entry`, with their changes against their controls."""
    measured: dict[str, xr.Dataset] = {}
    controls = [model for model in models if model.run.variant == CONTROL]
    with show(Stage("comparing", len(models), "models")) as advance:
        for control in controls:
            lazy_control = LazyModel(control, cache)
            for model in filter(control.is_control_of, models):
                measured[model.entry] = cache.measures(lazy_control)
            for model in models:
                pass
    del partial, advance
    return measured
