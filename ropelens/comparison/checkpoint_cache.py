"""Measurements of checkpoints, which are read again if their file belongs to the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xarray as xr
from transformers import PreTrainedModel

from ropelens.checkpoints.files import sha256_of
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.comparison.checkpoint_measures import (
    head_measures,
    measure,
    profile_of_heads,
)
from ropelens.comparison.entries import ComparisonEntry
from ropelens.errors import BadArgument
from ropelens.profiles.measurement import versions
from ropelens.runtime.folder import file_name
from ropelens.runtime.keys import Key
from ropelens.runtime.netcdf import read_if_fits, save, with_key
from ropelens.runtime.processes import all_agree, process_index
from ropelens.train.data import DATA


def saved_or_measured(
    file: Path, key: Key, measured: Callable[[], xr.Dataset]
) -> xr.Dataset:
    """The results in `file` if they fit the key; otherwise measure them and save them."""
    saved = read_if_fits(file, "measurement", key)
    # Either all processes use the cached file, or none does.
    in_cache = all_agree(saved is not None)
    if saved is not None and in_cache:
        return saved
    results = measured()
    results = with_key(results.assign_attrs(kind="measurement"), key)
    if process_index() == 0:
        save(results, file)
    return results


def without_weights(checkpoint: Path, file: Path) -> BadArgument:
    return BadArgument(
        f"{checkpoint} has no weights, and {file} has no results for these settings.",
        hint="the settings of the earlier comparison, or the folder with its weights",
    )


class CheckpointCache:
    """A folder with files for each checkpoint that was measured with these arguments."""

    def __init__(self, folder: Path, *, sequences: int, seed: int, device: str) -> None:
        self.folder = folder
        self.sequences = sequences
        self.seed = seed
        self.device = device

    def read_or_measure(
        self, run: ComparisonEntry, checkpoint: Path, *, step: int | None
    ) -> xr.Dataset:
        """Numbers of the checkpoint of a run after `step`, or of the finished run (None).

        The heads of a finished run follow from its saved profile, so that they have the
        labels of this version.
        """
        cached = CachedCheckpoint(self, run, checkpoint, step)
        numbers = cached.numbers()
        if not cached.is_final or not cached.has_profile:
            return numbers
        heads = head_measures(cached.profile())
        return numbers.assign(heads.drop_vars(["loss", "loss_se"]))

    def profile_file(self, run: ComparisonEntry) -> Path:
        """The file with the profile of a finished run."""
        return CachedCheckpoint(self, run, run.folder, step=None).profile_file


@dataclass(frozen=True)
class CachedCheckpoint:
    """The checkpoint of a `run` after `step`, or the finished run (None), with its files."""

    cache: CheckpointCache
    run: ComparisonEntry
    folder: Path
    step: int | None

    @property
    def is_final(self) -> bool:
        return self.step is None

    @property
    def file(self) -> Path:
        name = "final" if self.step is None else f"step-{self.step:06d}"
        return self.cache.folder / file_name(self.run.name) / f"{name}.nc"

    @property
    def profile_file(self) -> Path:
        return self.file.with_name("profile.nc")

    @property
    def has_profile(self) -> bool:
        """Whether the profile is saved or can be measured. Older caches have none."""
        return self.opened is not None or self.profile_file.exists()

    @cached_property
    def opened(self) -> Opened | None:
        if not (self.folder / "model.safetensors").exists():
            return None
        return open_checkpoint(self.folder, Loading(device=self.cache.device))

    @cached_property
    def model(self) -> PreTrainedModel:
        if self.opened is None:
            raise without_weights(self.folder, self.file)
        return self.opened.read()

    @cached_property
    def key(self) -> Key:
        """The key of a measurement. Without weights, only the arguments are compared."""
        arguments = {"sequences": self.cache.sequences, "seed": self.cache.seed}
        if self.opened is None:
            return Key(arguments)
        of_weights = {
            "weights": identity(self.opened),
            "text": sha256_of(self.run.data / DATA),
            "versions": versions(),
        }
        return Key(arguments | of_weights)

    def numbers(self) -> xr.Dataset:
        return saved_or_measured(self.file, self.key, self._measure)

    def profile(self) -> xr.Dataset:
        """The profile of the finished run."""
        return saved_or_measured(self.profile_file, self.key, self._measure_profile)

    def _measure(self) -> xr.Dataset:
        return measure(
            self.run,
            self.model,
            self.profile() if self.is_final else self._measure_profile(),
            sequences=self.cache.sequences,
            seed=self.cache.seed,
            final=self.is_final,
        )

    def _measure_profile(self) -> xr.Dataset:
        return profile_of_heads(
            self.run,
            self.model,
            tokenizer=None if self.opened is None else self.opened.tokenizer,
            sequences=self.cache.sequences,
            seed=self.cache.seed,
            final=self.is_final,
        )
