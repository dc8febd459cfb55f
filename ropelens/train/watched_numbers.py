"""About twelve numbers of a profile that is measured during training, and their folder."""

from pathlib import Path

import xarray as xr

from ropelens.budget.labels import LABELS
from ropelens.profiles.heads import head_values
from ropelens.profiles.measures import REQUESTED, open_profile

MAXIMA = ("previous_token", "induction", "duplicate_token", "max_score")  # of all heads
MEANS = ("sink_mass", "self_mass", "entropy_bits", *REQUESTED)  # over all heads
MAPS = ("previous_token", "induction", "q_norm", "k_norm")  # over steps


def plane_lengths(profile: xr.Dataset) -> xr.DataArray:
    """|q||k| of each plane [layer, frequency]: mean length of queries times that of keys."""
    return profile["q_norm"].mean("head") * profile["k_norm"].mean("kv_head")


def watched_numbers(profile: xr.Dataset) -> dict[str, float]:
    """About twelve numbers of a profile; docs/training.md defines them."""
    planes = plane_lengths(profile)
    slow = planes["frequency"] >= planes.notnull().sum("frequency") / 2
    longest = planes.fillna(-1).argmax("frequency")
    longest = longest.where(planes.notnull().any("frequency"))
    numbers = {"text_loss": float(profile.attrs["loss"])}
    for name in MAXIMA:
        numbers[name] = float(profile[name].max())
    for name in MEANS:
        if name in profile:
            numbers[name] = float(profile[name].mean())
    numbers["slow_share"] = float(planes.where(slow).sum() / planes.sum())
    numbers["band_plane"] = float(longest.median())
    if "total_bits" in profile:
        label_of_head = head_values(profile)["label"]
        for label in LABELS:
            numbers[f"{label}_heads"] = float((label_of_head == label).sum())
    return numbers


def step_folders(folder: Path) -> dict[int, Path]:
    """Folders of the measured steps, by step in order."""
    folders = {}
    for file in folder.glob("step-*/profile.nc"):
        step = int(file.parent.name.removeprefix("step-"))
        folders[step] = file.parent
    return dict(sorted(folders.items()))


def open_steps(folder: Path) -> xr.Dataset:
    """Numbers [step, number] and maps of the profiles in the folder of a watch, over `step`."""
    folders = step_folders(folder)
    steps = []
    for path in folders.values():
        profile = open_profile(path / "profile.nc")
        numbers = watched_numbers(profile)
        by_name = xr.DataArray([*numbers.values()], {"number": [*numbers]})
        step = profile[[*MAPS]].assign(
            numbers=by_name, plane_lengths=plane_lengths(profile)
        )
        steps.append(step.reset_coords(drop=True))
    index = xr.Variable("step", [*folders])
    joined = xr.concat(steps, index, combine_attrs="drop")
    return joined.assign_attrs(profile.attrs)
