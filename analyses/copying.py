"""Which variants of RoPE learn to copy, how far, and through which planes?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), section 6: p-RoPE
stops the slowest planes, so that a match by meaning survives any distance. Copying is such a
match: an induction head looks for what followed the same token before, however far back.

Expectation: previous-token heads appear first and induction heads later. Variants that keep
fast planes learn both; nope learns neither, or learns them late. The planes that p-rope:0.75
stops carry a larger share of its induction heads than they carry in rope, and p-rope:0.75
copies farther past the context. Copying suffers if induction heads are silenced, but not if
random heads of the same layers are silenced.

    python analyses/copying.py [--runs runs/copying]...

Reads the finished runs of analyses/copying.toml. A second --runs adds the runs of
copying-more.toml. Writes reports/copying/<study>/: the comparison, heads.csv and costs.csv. The
first folder of runs keeps all measurements, so the weights of a measured run may be deleted.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer
import xarray as xr

import ropelens as rl
from ropelens.analysis.answer import Answer
from ropelens.commands.terminal import run_script
from ropelens.intervals import paired_interval
from ropelens.report import write_index

REPORTS = Path(__file__).parent.parent / "reports"
RUN = ["variant", "seed"]
ROLES = {"induction": 3, "previous_token": 2}  # largest number of heads of each role
LEAST = 0.3  # smallest score of a head with a role
COPIES = 0.5  # smallest induction score of the best head of a model that copies
NO_ROLE = 0.1  # scores of a head without a role are below
DRAWS = 3  # sets of random heads
INDUCTION = "induction heads silent"
RANDOM = "as many random heads as deep, without a role, silent"
TASKS = {
    "measures": ("copying", "retrieval"),
    "distances": (16, 64, 240),
    "prompt_lengths": (128, 512),
}


def main(
    runs: list[Path] = typer.Option([Path("runs/copying")], help="Folders of studies."),
    sequences: int = typer.Option(
        512, help="Sequences of validation text for the loss."
    ),
) -> None:
    cache = runs[0] / "measured"
    comparison = rl.compare(runs, cache=cache, sequences=sequences)
    weights = comparison["fingerprint"].set_index(entry=RUN).to_series()
    measured = []
    for folder in sorted(run for study in runs for run in study.glob("*/*/seed-*")):
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if "finished" in record:
            run = {name: record["settings"][name] for name in RUN}
            file = cache / f"{folder.parent.name}-{folder.name}.json"
            model = {"folder": folder, "data": folder / record["data"], "run": run}
            measured.append(rows_of_run(file, weights[*run.values()], **model))
    tables = {
        f"{name}.csv": pd.DataFrame([row for rows in measured for row in rows[name]])
        for name in ("heads", "costs")
    }
    answer = Answer(
        "Which variants of RoPE learn to copy, how far, and through which planes?",
        findings=[
            *what_comes_first(comparison),
            *how_far(comparison),
            *which_planes(tables["heads.csv"]),
            *what_it_costs(tables["costs.csv"]),
        ],
        figures={},
        more=tables,
    )
    lead = who_copies(comparison)
    page = answer.save(REPORTS / "copying" / runs[0].name, comparison, lead=lead)
    write_index(REPORTS)
    typer.echo(page)


def rows_of_run(file: Path, weights: str, **model: Any) -> dict:
    """Rows of heads.csv and costs.csv, from `file` if it was measured on the same weights."""
    if file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))
        if rows["weights"] == weights:
            return rows
    rows = {"weights": weights} | measure_run(**model)
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def measure_run(folder: Path, *, data: Path, run: dict) -> dict[str, list]:
    """Rows of heads.csv and costs.csv."""
    model, _ = rl.load(folder)
    held_out = np.load(data / "valid.npy")
    text = rl.Text(torch.from_numpy(held_out[-16:].astype(np.int64)))
    profile = rl.profile(model, text, surrogates=0)
    names = {
        role: best_heads(profile[role].values, most) for role, most in ROLES.items()
    }
    scores = np.maximum(*(profile[role].values for role in ROLES))
    turns = np.isfinite(profile["wavelength"]).any("layer").values
    rows = {
        "heads": heads_of(names, profile),
        "costs": costs_of(model, text, names, scores, turns),
    }
    return {name: [run | row for row in table] for name, table in rows.items()}


def best_heads(scores: np.ndarray, most: int) -> list[str]:
    """The heads of highest `scores` [layer, head] that have a role, as layer.head."""
    order = scores.argsort(axis=None)[::-1][:most]
    best = [divmod(int(index), scores.shape[1]) for index in order]
    return [f"{layer}.{head}" for layer, head in best if scores[layer, head] >= LEAST]


def heads_of(names: dict[str, list[str]], profile: xr.Dataset) -> Iterator[dict]:
    """Each head with a role, and the share of slow planes in its push."""
    push = profile["selectivity_keys"].clip(min=0)
    share = push[..., push.sizes["frequency"] * 3 // 4 :].sum("frequency") / push.sum(
        "frequency"
    )
    for role, heads in names.items():
        for name in heads:
            place = dict(zip(("layer", "head"), map(int, name.split(".")), strict=True))
            yield {
                "role": role,
                "head": name,
                "score": float(profile[role].sel(place)),
                "share_of_slow_quarter": float(share.sel(place)),
            }


def costs_of(
    model,
    text: rl.Text,
    names: dict[str, list[str]],
    scores: np.ndarray,
    turns: np.ndarray,
) -> Iterator[dict]:
    """Loss of copies and share of needles found, without some heads or planes of the model."""
    chosen = names["induction"]
    quarters = {
        f"planes {planes[0]} to {planes[-1]} of induction heads stop": rl.stop(
            rl.PlaneNumbers(planes.tolist()), heads=",".join(chosen)
        )
        for planes in np.array_split(np.arange(len(turns)), min(4, len(turns)))
        if chosen and turns[planes].any()
    }
    plain = rl.evaluate(model, text, edits=quarters, **TASKS)
    measured = [(name, "", plain.sel(edit=name)) for name in plain["edit"].values]
    silences = [
        (f"{role} heads silent", heads) for role, heads in names.items() if heads
    ]
    silences += [(RANDOM, heads) for heads in random_heads(scores, chosen)]
    for name, heads in silences:
        with rl.silence_heads(model, ",".join(heads), to="mean", text=text):
            without = rl.evaluate(model, text, **TASKS).isel(edit=0)
        measured.append((name, ",".join(heads), without))
    for name, heads, values in measured:
        yield {
            "what": name,
            "heads": heads,
            "copy_loss": float(values["copy_loss"].mean()),
            "retrieval": float(values["retrieval"].mean()),
        }


def random_heads(scores: np.ndarray, chosen: list[str]) -> list[list[str]]:
    """`DRAWS` random sets of heads without a role, each of the size of `chosen`.

    The heads come from the layers of `chosen` and later layers, because all later heads depend
    on early heads. Earlier layers are added, the nearest first, until there are enough heads.
    If the model has too few heads without a role, there are no sets.
    """
    without = np.argwhere(scores < NO_ROLE)
    first = min((int(name.split(".")[0]) for name in chosen), default=0)
    while first > 0 and (without[:, 0] >= first).sum() < len(chosen):
        first -= 1
    free = [f"{layer}.{head}" for layer, head in without if layer >= first]
    random, draws = (
        np.random.default_rng(0),
        DRAWS if len(free) >= len(chosen) > 0 else 0,
    )
    return [
        random.choice(free, len(chosen), replace=False).tolist() for _ in range(draws)
    ]


def who_copies(comparison: xr.Dataset) -> str:
    """How many seeds of each variant copy, and the mean number of tokens before they do."""
    since = first_seen(best_by_step(comparison, "induction") >= COPIES)
    counts = []
    for group, runs in groups(since):
        copies = runs.dropna("entry").values
        when = f", after {copies.mean():.1f} million tokens" if len(copies) else ""
        counts.append(f"{group} {len(copies)} of {len(runs)}{when}")
    return f"Runs that copy (best induction score of {COPIES} or more): {'; '.join(counts)}."


def what_comes_first(comparison: xr.Dataset) -> list[str]:
    """When labels and roles first appear, compared with the first induction head."""
    label = comparison["growth_label"]
    firsts = {
        f"{name} heads": first_seen((label == name).any(("layer", "head")))
        for name in ("positional", "semantic")
    }
    best = best_by_step(comparison, "previous_token")
    present = best >= LEAST
    firsts["a previous-token head"] = first_seen(present)
    reverse = {"step": slice(None, None, -1)}
    stays = (present | best.isnull()).isel(reverse).cumprod("step").isel(reverse)
    firsts["a previous-token head that stays"] = first_seen(present & (stays > 0))
    copying = first_seen(best_by_step(comparison, "induction") >= LEAST)
    runs = int(copying.notnull().sum())
    if not runs:
        return []
    leads = []
    for what, since in firsts.items():
        earlier = (copying - since).set_index(entry=RUN).to_series()
        leads.append(
            f"{what} in {(earlier >= 0).sum()} of {runs}, {say(by_seed(earlier))}"
        )
    return [
        f"Before an induction head ({LEAST} or more), or at the same checkpoint, there are "
        f"{'; '.join(leads)} million tokens earlier (a mean over seeds)."
    ]


def best_by_step(comparison: xr.Dataset, role: str) -> xr.DataArray:
    """The best head's score of `role` at each step, [entry, step]."""
    return comparison[f"growth_{role}"].max(("layer", "head"))


def first_seen(present: xr.DataArray) -> xr.DataArray:
    """Million tokens at the first checkpoint with `present` [entry, step]; NaN for never."""
    return (present["tokens_seen"] / 1e6).where(present).min("step")


def groups(compared):
    """Each group of a comparison or of one variable, and its entries."""
    names = compared["group"].values
    for group in dict.fromkeys(names.tolist()):
        yield group, compared.isel(entry=np.flatnonzero(names == group))


def how_far(comparison: xr.Dataset) -> list[str]:
    """Copies and needles of variants compared with the baseline, in the context and past it."""
    context = int(comparison.attrs["context"])
    copies = comparison["copy_loss"].mean("trial")
    near = copies["copy_distance"] < context / 2
    needles = comparison["far_retrieval"]
    within = needles["prompt_length"] <= context
    copying = best_by_step(comparison, "induction") >= COPIES
    means = {
        "Loss of copies within the context": copies.where(near).mean("copy_distance"),
        "Loss of copies past it": copies.where(~near).mean("copy_distance"),
        "Needles within the context": needles.where(within).mean("prompt_length"),
        "Needles past it": needles.where(~within).mean("prompt_length"),
        "Million tokens until a run copies": first_seen(copying),
    }
    return [
        line for name, mean in means.items() for line in against_baseline(name, mean)
    ]


def against_baseline(name: str, values: xr.DataArray) -> list[str]:
    """How `values` [entry] of each variant differ from the paired values of the baseline."""
    changes, partners = [], set()
    for group, runs in groups(values):
        pairs = rl.paired_changes(values, group)
        change = pairs.dropna("entry")
        if len(change):
            count = f" in {len(change)} of {len(pairs)} pairs"
            changes.append(
                f"{group} {say(change.values)}{count * (len(change) < len(pairs))}"
            )
            partners.update(runs["partner"].values.tolist())
    if not changes:
        return []
    base = values[sorted(partners - {-1})]
    return [
        f"{name}, compared with {base['group'].values[0]} ({base.mean():.2f}): "
        f"{'; '.join(changes)}."
    ]


def which_planes(heads: pd.DataFrame) -> list[str]:
    """Share of the induction heads' push in the quarter of planes that is slowest in rope."""
    induction = heads if heads.empty else heads[heads["role"] == "induction"]
    if induction.empty:
        return ["No run has an induction head, so its planes are not testable."]
    by_run = induction.groupby(["variant", "seed"], sort=False)[
        "share_of_slow_quarter"
    ].mean()
    parts = []
    for variant, shares in by_run.groupby("variant", sort=False):
        beyond = say(shares.values - 0.25)
        parts.append(f"{variant} {shares.mean():.0%}, {beyond}")
    sentences = [
        "The quarter of planes that is slowest in rope carries this share of the induction "
        f"heads' push toward keys (an even share is 25%): {'; '.join(parts)}."
    ]
    wide = by_run.unstack("variant")
    if {"rope", "p-rope:0.75"} <= set(wide):
        change = (wide["p-rope:0.75"] - wide["rope"]).dropna().values
        sentences.append(
            "The share in p-rope:0.75, in which these planes do not rotate, compared with "
            f"rope: {say(change)}."
        )
    return sentences


def what_it_costs(costs: pd.DataFrame) -> list[str]:
    """Cost of missing heads or planes for copying and retrieval, over runs that have them."""
    if set(costs["what"]) <= {"none"}:
        return []
    sentences = []
    for column, measure in (
        ("copy_loss", "loss of copies"),
        ("retrieval", "needles found"),
    ):
        wide = costs.pivot_table(column, ["variant", "seed"], "what", sort=False)
        change = wide.sub(wide["none"], axis="index").drop(columns="none")
        parts = [f"{name}: {say(by_seed(change[name]))}" for name in change]
        if {INDUCTION, RANDOM} <= set(change):
            beyond = say(by_seed(change[INDUCTION] - change[RANDOM]))
            parts.append(f"induction heads minus random heads: {beyond}")
        sentences.append(f"Change of the {measure}, over runs: {'; '.join(parts)}.")
    return sentences


def by_seed(values: pd.Series) -> np.ndarray:
    """Mean over the runs of each seed, for the variants that all seeds have."""
    wide = values.dropna().unstack("variant").dropna(axis="columns")
    return wide.mean(axis="columns").dropna().to_numpy()


def say(change: np.ndarray) -> str:
    """The mean change with its interval over seeds; "more" or "less" if it excludes 0."""
    if not len(change):
        return "not testable"
    mean, low, high = paired_interval(change)
    if len(change) == 1:
        return f"not testable ({mean:+.3f}, of one seed)".replace("-", "−")
    word = "more" if low > 0 else "less" if high < 0 else "unresolved"
    return f"{word} ({mean:+.3f}, {low:+.3f} to {high:+.3f})".replace("-", "−")


if __name__ == "__main__":
    run_script(main)
