"""Measurements of checkpoints, which are read again if their file belongs to the weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import xarray as xr
from transformers import PreTrainedModel

from ropelens.checkpoints.files import sha256_of
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.comparison.checkpoint_measures import measure, profile_run
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
    """A folder with a file for each checkpoint that was measured with these arguments."""

    def __init__(self, folder: Path, *, sequences: int, seed: int, device: str) -> None:
        self.folder = folder
        self.sequences = sequences
        self.seed = seed
        self.device = device

    def read_or_measure(
        self, run: ComparisonEntry, checkpoint: Path, *, step: int | None
    ) -> xr.Dataset:
        """Numbers of the checkpoint of a run after `step`, or of the finished run (None)."""
        final = step is None
        name = "final" if final else f"step-{step:06d}"
        file = self.folder / file_name(run.name) / f"{name}.nc"
        opened = None
        if (checkpoint / "model.safetensors").exists():
            opened = open_checkpoint(checkpoint, Loading(device=self.device))
        key = self._key(run, opened)

        def measured() -> xr.Dataset:
            if opened is None:
                raise without_weights(checkpoint, file)
            return self._measure(run, opened.read(), key, final=final)

        return saved_or_measured(file, key, measured)

    def _measure(
        self, run: ComparisonEntry, model: PreTrainedModel, key: Key, *, final: bool
    ) -> xr.Dataset:
        profiled = partial(
            profile_run,
            run,
            model,
            sequences=self.sequences,
            seed=self.seed,
            final=final,
        )
        if final:
            heads = saved_or_measured(self.profile_file(run), key, profiled)
        else:
            heads = profiled()
        return measure(
            run,
            model,
            heads,
            sequences=self.sequences,
            seed=self.seed,
            final=final,
        )

    def profile_file(self, run: ComparisonEntry) -> Path:
        """The file with the profile of a finished run, from which its page is drawn."""
        return self.folder / file_name(run.name) / "final-profile.nc"

    def _key(self, run: ComparisonEntry, opened: Opened | None) -> Key:
        """The key of a measurement. Without weights, only the arguments are compared."""
        arguments = {"sequences": self.sequences, "seed": self.seed}
        if opened is None:
            return Key(arguments)
        of_weights = {
            "weights": identity(opened),
            "text": sha256_of(run.data / DATA),
            "versions": versions(),
        }
        return Key(arguments | of_weights)
