"""Recalibrations as one dataset: gaps to the control, and models before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from transformers import PreTrainedModel

from ropelens.checkpoints.files import sha256_of
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.comparison.checkpoint_cache import saved_or_measured, without_weights
from ropelens.comparison.checkpoint_measures import ValidationText
from ropelens.comparison.entries import ComparisonEntry
from ropelens.comparison.join import join_entries
from ropelens.comparison.recalibration_measures import (
    VALID,
    heads_text,
    held_out_text,
    measure_change,
    measure_recalibrated,
    profile_of_heads,
)
from ropelens.comparison.recalibration_rates import rate_variables
from ropelens.comparison.recalibration_runs import (
    FoundRecalibrations,
    RecalibratedRun,
    RecordedLosses,
    read_losses,
)
from ropelens.comparison.recalibration_table import AFTER, BEFORE, COMPARED
from ropelens.comparison.recovery import Estimate, mean_change, measure_recovery
from ropelens.errors import BadArgument
from ropelens.profiles.measurement import versions
from ropelens.runtime.folder import file_name
from ropelens.runtime.keys import Key
from ropelens.runtime.progress import ShowProgress, Stage
from ropelens.train.base_model import Base, open_base
from ropelens.train.recalibration_settings import CONTROL

WEIGHTS = "model.safetensors"
OF_WEIGHTS = {"base", "variant", "weights"}  # values of keys that determine a model
SAVED_FORMAT = 2  # with follow scores, and tokens of excerpts
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
    runs = [*found.runs, *found.at_other_rates]
    losses = read_losses(runs)
    checkpoints = RecalibrationCache(
        cache, found.runs[0], sequences=sequences, seed=seed, device=device
    )
    models = _models(found, checkpoints)
    measured = _measure_models(models, checkpoints, show)
    dataset = measured.merge(recorded_gaps(found, losses[: len(found.runs)]))
    at_rates = rate_variables(
        runs, losses, found.variants, study_rate=found.runs[0].learning_rate
    )
    dataset = dataset.merge(at_rates)
    first = found.runs[0].record
    dataset.attrs = {"head_sequences": int(measured.attrs["sequences"])}
    return dataset.assign_attrs(
        compared=COMPARED,
        baseline=CONTROL,
        base=str(first["base"]["name"]),
        base_fingerprint=str(first["base"]["fingerprint"]),
        context=int(first["settings"]["context"]),
        trained_context=int(first["base"]["trained_context"] or 0),
        steps=int(first["settings"]["steps"]),
        tokens=int(first["tokens"]),
        learning_rate=float(first["settings"]["learning_rate"]),
        trained_parameters=str(first["settings"]["train"]),
        precision=found.runs[0].settings["precision"],
        parameters=int(first["parameters"]),
        sequences=dataset.sizes["sequence"],
        documents=len(np.unique(dataset["document"])),
        measured_sequences=sequences,
        unfinished=", ".join(found.unfinished),
        unpaired=", ".join(found.unpaired),
    )


# ---- losses that the runs recorded


def recorded_gaps(
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


@dataclass(frozen=True)
class ComparedModel:
    """A variant before the training (`opened` is None), or a finished run.

    `key` determines its measurements. A finished run without weights has them in the cache.
    """

    run: RecalibratedRun
    phase: str
    key: Key
    opened: Opened | None = None

    @property
    def is_before(self) -> bool:
        return self.phase == BEFORE

    @property
    def entry(self) -> str:
        return f"{self.run.variant} {BEFORE}" if self.is_before else self.run.name

    @property
    def seed(self) -> int:
        return NO_SEED if self.is_before else self.run.seed

    @property
    def file_stem(self) -> str:
        return BEFORE if self.is_before else f"seed-{self.seed}"

    def is_paired_with(self, other: "ComparedModel") -> bool:
        return (self.phase, self.seed) == (other.phase, other.seed)


class LazyModel:
    """A model whose weights are read if they are needed."""

    def __init__(self, compared: ComparedModel, cache: "RecalibrationCache") -> None:
        self.compared = compared
        self.cache = cache

    @cached_property
    def model(self) -> PreTrainedModel:
        return self.cache.read(self.compared)


class RecalibrationCache:
    """A folder with a file for each model, and for each pair of a model and its control.

    All runs have the held-out text and the base of `run`.
    """

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
        self.device = device

    @cached_property
    def text(self) -> ValidationText:
        return held_out_text(self.run)

    @cached_property
    def base(self) -> Base:
        """The base of all runs; refuses another checkpoint of the same name."""
        recorded = self.run.record["base"]
        loading = Loading(
            device=self.device,
            revision=recorded.get("revision"),
            trust_remote_code=bool(recorded.get("trust_remote_code")),
        )
        base = open_base(recorded["name"], loading)
        fingerprint = identity(base.opened)
        if fingerprint != recorded["fingerprint"]:
            raise BadArgument(
                f"{recorded['name']} is not the checkpoint from which {self.run.folder} "
                "started.",
                seen=f"fingerprint {fingerprint}, recorded {recorded['fingerprint']}",
                hint="the unchanged files of the base",
            )
        return base

    def before(self, run: RecalibratedRun) -> ComparedModel:
        """The base with the rotation of a variant."""
        values = {"base": run.record["base"]["fingerprint"], "variant": run.variant}
        if (run.folder / WEIGHTS).exists():
            values["versions"] = versions()
        return ComparedModel(run, BEFORE, self._key(values))

    def after(self, run: RecalibratedRun) -> ComparedModel:
        if not (run.folder / WEIGHTS).exists():
            return ComparedModel(run, AFTER, self._key({}))
        opened = open_checkpoint(run.folder, Loading(device=self.device))
        weights = {"weights": identity(opened), "versions": versions()}
        return ComparedModel(run, AFTER, self._key(weights), opened)

    def _key(self, weights: Mapping[str, Any]) -> Key:
        """The key of a measurement: arguments, weights, and the text if there is one."""
        values = {"sequences": self.sequences, "seed": self.seed, **weights}
        valid = self.run.data / VALID
        if valid.exists():
            values["text"] = sha256_of(valid)
        return Key(values, format=SAVED_FORMAT)

    def read(self, compared: ComparedModel) -> PreTrainedModel:
        if compared.is_before:
            return self.base.read(compared.run.variant).requires_grad_(False)
        if compared.opened is None:
            raise without_weights(compared.run.folder, self._file(compared))
        return compared.opened.read()

    def tokenizer(self, compared: ComparedModel) -> Any:
        if compared.opened is None:
            return self.base.opened.tokenizer
        return compared.opened.tokenizer

    def _file(self, compared: ComparedModel, suffix: str = "") -> Path:
        name = f"{compared.file_stem}{suffix}.nc"
        return self.folder / file_name(compared.run.variant) / name

    def profile(self, lazy: LazyModel) -> xr.Dataset:
        def measured() -> xr.Dataset:
            return profile_of_heads(
                lazy.model,
                self.text,
                tokenizer=self.tokenizer(lazy.compared),
                sequences=self.sequences,
                seed=self.seed,
            )

        file = self.profile_file(lazy.compared)
        return saved_or_measured(file, lazy.compared.key, measured)

    def profile_file(self, compared: ComparedModel) -> Path:
        return self._file(compared, "-profile")

    def measures(self, lazy: LazyModel) -> xr.Dataset:
        """The measures of a model by itself."""

        def measured() -> xr.Dataset:
            return measure_recalibrated(
                lazy.model,
                self.text,
                self.profile(lazy),
                sequences=self.sequences,
                seed=self.seed,
            )

        file = self._file(lazy.compared)
        return saved_or_measured(file, lazy.compared.key, measured)

    def change(self, control: LazyModel, lazy: LazyModel) -> xr.Dataset:
        """The changes of the heads of a model against its control."""

        def measured() -> xr.Dataset:
            return measure_change(
                control.model,
                lazy.model,
                heads_text(self.text, self.sequences),
                profiles=[self.profile(control), self.profile(lazy)],
                seed=self.seed,
            )

        values = dict(lazy.compared.key.values)
        for name in OF_WEIGHTS & control.compared.key.values.keys():
            values[f"control_{name}"] = control.compared.key.values[name]
        file = self._file(lazy.compared, "-change")
        key = Key(values, format=SAVED_FORMAT)
        return saved_or_measured(file, key, measured)


def _models(
    found: FoundRecalibrations, cache: RecalibrationCache
) -> list[ComparedModel]:
    """Each variant before the training and then its runs, the control first."""
    models = []
    for variant in found.variants:
        runs = [run for run in found.runs if run.variant == variant]
        models.append(cache.before(runs[0]))
        models += map(cache.after, runs)
    return models


def _measure_models(
    models: Sequence[ComparedModel], cache: RecalibrationCache, show: ShowProgress
) -> xr.Dataset:
    """The measures of the models over `entry`, next to their changes against the controls."""
    measured: dict[str, xr.Dataset] = {}
    controls = [model for model in models if model.run.variant == CONTROL]
    with show(Stage("comparing", len(models), "models")) as advance:
        for control in controls:
            lazy_control = LazyModel(control, cache)
            for model in filter(control.is_paired_with, models):
                lazy = lazy_control
                if model is not control:
                    lazy = LazyModel(model, cache)
                numbers = cache.measures(lazy)
                change = cache.change(lazy_control, lazy)
                measured[model.entry] = numbers.merge(change)
                advance(1)
    entries = []
    for model in models:
        run = model.run
        entry = ComparisonEntry(model.entry, run.variant, run.folder, seed=model.seed)
        entries.append(entry)
    in_order = [measured[model.entry] for model in models]
    dataset = join_entries(in_order, entries).drop_vars(["variant", "size", "seed"])
    pages = ["" if model.is_before else model.run.page for model in models]
    profiles = [str(cache.profile_file(model).resolve()) for model in models]
    return dataset.assign_coords(
        phase=("entry", np.array([model.phase for model in models], dtype=object)),
        entry_seed=("entry", [model.seed for model in models]),
        page=("entry", np.array(pages, dtype=object)),
        profile=("entry", np.array(profiles, dtype=object)),
        partner=("entry", _controls(models)),
    )


def _controls(models: Sequence[ComparedModel]) -> list[int]:
    """Index of the control of each model, which has the same phase and seed."""
    indices = []
    for model in models:
        for number, other in enumerate(models):
            if other.run.variant == CONTROL and other.is_paired_with(model):
                indices.append(number)
    return indices
