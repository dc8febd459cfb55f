"""Measurements of checkpoints, which are read again if their file belongs to the weights."""

from pathlib import Path

import xarray as xr

from ropelens.checkpoints.files import sha256_of
from ropelens.checkpoints.identity import identity
from ropelens.checkpoints.load import Opened, open_checkpoint
from ropelens.checkpoints.load_options import Loading
from ropelens.comparison.checkpoint_measures import measure
from ropelens.comparison.entries import ComparisonEntry
from ropelens.errors import BadArgument
from ropelens.profiles.measurement import versions
from ropelens.runtime.folder import file_name
from ropelens.runtime.keys import Key
from ropelens.runtime.netcdf import read_if_fits, save, with_key
from ropelens.runtime.processes import all_agree, process_index
from ropelens.train.data import DATA


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
        name = "final" if step is None else f"step-{step:06d}"
        file = self.folder / file_name(run.name) / f"{name}.nc"
        opened = None
        if (checkpoint / "model.safetensors").exists():
            opened = open_checkpoint(checkpoint, Loading(device=self.device))
        key = self._key(run, opened)
        saved = read_if_fits(file, "measurement", key)
        # Either all processes use the cached file, or none does.
        in_cache = all_agree(saved is not None)
        if saved is not None and in_cache:
            return saved
        if opened is None:
            raise BadArgument(
                f"{checkpoint} has no weights, and {file} has no results for these "
                "settings.",
                hint="the settings of the earlier comparison, or the folder with its "
                "weights",
            )
        measured = measure(
            run,
            opened.read(),
            sequences=self.sequences,
            seed=self.seed,
            final=step is None,
        )
        measured = with_key(measured.assign_attrs(kind="measurement"), key)
        if process_index() == 0:
            save(measured, file)
        return measured

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
