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

Reads the finished runs of analyses/copying.toml (tools/README.md). A second --runs adds the
runs of another study, such as other seeds. Writes reports/copying/<study>/: the comparison,
heads.csv and costs.csv. The first folder of runs keeps all measurements, so the weights of a
measured run may be deleted.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import typer
import xarray as xr

import ropelens as rl
from ropelens.analysis.answer import Answer, comparison_folder
from ropelens.commands.terminal import run_script
from ropelens.intervals import paired_interval
from ropelens.report import write_index
from ropelens.report.sentences.compared_heads import compared_heads_sentences

REPORTS = Path(__file__).parent.parent / "reports"
RUN = ["variant", "seed"]
ROLES = {"induction": 3, "previous_token": 2}  # largest number of heads of each role
LEAST = 0.3  # smallest score of a head with a role
COPIES = 0.5  # smallest induction score of the best head of a model that copies
NO_ROLE = 0.1  # scores of a head without a role are below
SHORTEST = 32  # tokens of a prompt that can hide needles
DRAWS = 3  # sets of random heads
INDUCTION = "induction heads silent"
RANDOM = "as many random heads as deep, without a role, silent"


def main(
    runs: list[Path] = typer.Option([Path("runs/copying")], help="Folders of studies."),
    sequences: int = typer.Option(
        512, help="Sequences of validation text for the loss."
    ),
    out: Path | None = typer.Option(
        None, help="Folder of the page. [default: a free name in reports/copying]"
    ),
) -> None:
    cache = runs[0] / "measured"
    finished = finished_runs(runs)  # another run may end while these are measured
    comparison = rl.compare(runs, cache=cache, sequences=sequences)
    comparison = comparison.drop_vars("profile")  # the reports do not have the runs
    fingerprints = comparison["fingerprint"].set_index(entry=RUN).to_series()
    heads: list[dict] = []
    costs: list[dict] = []
    for folder in finished:
        measured = measure_once(folder, cache, fingerprints)
        heads += measured["heads"]
        costs += measured["costs"]
    tables = {"heads.csv": pd.DataFrame(heads), "costs.csv": pd.DataFrame(costs)}
    answer = Answer(
        "Which variants of RoPE learn to copy, how far, and through which planes?",
        findings=[
            who_copies(comparison),
            *what_comes_first(comparison),
            *how_far(comparison),
            *which_planes(tables["heads.csv"]),
            *what_it_costs(tables["costs.csv"]),
            *compared_heads_sentences(comparison),
        ],
        figures={},
        more=tables,
    )
    folder = REPORTS / "copying" / runs[0].name
    page = answer.save(
        out or comparison_folder(folder, comparison),
        comparison,
        lead=who_finds_most(comparison),
        picture="copying",
    )
    write_index(REPORTS)
    typer.echo(page)


def finished_runs(studies: list[Path]) -> list[Path]:
    """The folders of the finished runs of all studies."""
    finished = []
    for study in studies:
        for record in study.glob("*/*/seed-*/run.json"):
            if "finished" in record_of(record.parent):
                finished.append(record.parent)
    return sorted(finished)


def record_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def measure_once(folder: Path, cache: Path, fingerprints: pd.Series) -> dict:
    """Rows of heads.csv and costs.csv of a run, saved in `cache` with its fingerprint."""
    record = record_of(folder)
    run = {name: record["settings"][name] for name in RUN}
    weights = fingerprints[*run.values()]
    file = cache / f"{folder.parent.name}-{folder.name}.json"
    if file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))
        if rows["weights"] == weights:
            return rows
    measured = measure_run(folder, data=folder / record["data"])
    rows = {"weights": weights}
    for name, table in measured.items():
        rows[name] = [run | row for row in table]
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)
    return rows


def measure_run(folder: Path, *, data: Path) -> dict[str, list[dict]]:
    """Rows of heads.csv and costs.csv, without the columns that name the run."""
    model, _ = rl.load(folder)
    held_out = np.load(data / "valid.npy")
    last = held_out[-16:].astype(np.int64)
    text = rl.Text(torch.from_numpy(last))
    profile = rl.profile(model, text, surrogates=0)
    names = {
        role: best_heads(profile[role].values, most) for role, most in ROLES.items()
    }
    scores = np.maximum(profile["induction"].values, profile["previous_token"].values)
    turns = np.isfinite(profile["wavelength"]).any("layer").values
    return {
        "heads": heads_of(names, profile),
        "costs": costs_of(model, text, names, scores=scores, turns=turns),
    }


def best_heads(scores: np.ndarray, most: int) -> list[str]:
    """The heads of highest `scores` [layer, head] that have a role, as layer.head."""
    best = scores.argsort(axis=None)[::-1][:most]
    names = []
    for layer, head in np.transpose(np.unravel_index(best, scores.shape)):
        if scores[layer, head] >= LEAST:
            names.append(f"{layer}.{head}")
    return names


def heads_of(names: dict[str, list[str]], profile: xr.Dataset) -> list[dict]:
    """Each head with a role, and the share of slow planes in its push."""
    push = profile["selectivity_keys"].clip(min=0)
    first_slow = push.sizes["frequency"] * 3 // 4
    share = push[..., first_slow:].sum("frequency") / push.sum("frequency")
    rows = []
    for role, heads in names.items():
        for name in heads:
            layer, head = map(int, name.split("."))
            score = profile[role].sel(layer=layer, head=head)
            share_of_head = share.sel(layer=layer, head=head)
            rows.append(
                {
                    "role": role,
                    "head": name,
                    "score": float(score),
                    "share_of_slow_quarter": float(share_of_head),
                }
            )
    return rows


def costs_of(
    model,
    text: rl.Text,
    names: dict[str, list[str]],
    *,
    scores: np.ndarray,
    turns: np.ndarray,
) -> list[dict]:
    """Loss of copies and share of needles found, without some heads or planes of the model."""
    chosen = names["induction"]
    edited = evaluate_tasks(model, text, edits=quarters_stop(chosen, turns))
    rows = []
    for name in edited["edit"].values:
        evaluated = edited.sel(edit=name)
        rows.append(cost_row(name, "", evaluated))
    for role, heads in names.items():
        if heads:
            rows.append(cost_without(model, text, heads, name=f"{role} heads silent"))
    for heads in random_heads(scores, chosen):
        rows.append(cost_without(model, text, heads, name=RANDOM))
    return rows


def quarters_stop(heads: list[str], turns: np.ndarray) -> dict[str, Any]:
    """Edits that stop a quarter of the planes of `heads`, for each quarter that turns."""
    edits: dict[str, Any] = {}
    if not heads:
        return edits
    planes_of_head = np.arange(len(turns))
    for planes in np.array_split(planes_of_head, min(4, len(turns))):
        if turns[planes].any():
            name = f"planes {planes[0]} to {planes[-1]} of induction heads stop"
            numbers = rl.PlaneNumbers(planes.tolist())
            edits[name] = rl.stop(numbers, heads=",".join(heads))
    return edits


def cost_without(model: Any, text: rl.Text, heads: list[str], *, name: str) -> dict:
    """The row of some silent heads."""
    listed = ",".join(heads)
    with rl.silence_heads(model, listed, to="mean", text=text):
        without = evaluate_tasks(model, text)
    return cost_row(name, listed, without.isel(edit=0))


def evaluate_tasks(
    model: Any, text: rl.Text, edits: dict[str, Any] | None = None
) -> xr.Dataset:
    context = text.context
    return rl.evaluate(
        model,
        text,
        edits=edits,
        measures=("copying", "retrieval"),
        distances=(16, 64, context * 15 // 32),
        prompt_lengths=(max(SHORTEST, context // 4), max(2 * SHORTEST, context)),
    )


def cost_row(name: str, heads: str, evaluated: xr.Dataset) -> dict:
    return {
        "what": name,
        "heads": heads,
        "copy_loss": float(evaluated["copy_loss"].mean()),
        "retrieval": float(evaluated["retrieval"].mean()),
    }


def random_heads(scores: np.ndarray, chosen: list[str]) -> list[list[str]]:
    """`DRAWS` random sets of heads without a role, each of the size of `chosen`.

    The heads come from the layers of `chosen` and later layers, because all later heads depend
    on early heads. Earlier layers are added, the nearest first, until there are enough heads.
    A model with too few heads without a role gets an empty list.
    """
    without = np.argwhere(scores < NO_ROLE)
    layers = [int(name.split(".")[0]) for name in chosen]
    first = min(layers, default=0)
    while first > 0 and (without[:, 0] >= first).sum() < len(chosen):
        first -= 1
    free = [f"{layer}.{head}" for layer, head in without if layer >= first]
    if not chosen or len(free) < len(chosen):
        return []
    random = np.random.default_rng(0)
    return [
        random.choice(free, len(chosen), replace=False).tolist() for _ in range(DRAWS)
    ]


def who_finds_most(comparison: xr.Dataset) -> str:
    """The variant that finds most needles past the context, compared with the baseline."""
    needles = mean_needles(comparison, past=True)
    within = mean_by_group(mean_needles(comparison, past=False))
    past = mean_by_group(needles)
    baseline = str(comparison.attrs["baseline"])
    best = str(past.idxmax())
    sentence = (
        f"Past the trained context, {best} finds the most needles: {past[best]:.0%}"
    )
    change = rl.paired_changes(needles, best).dropna("entry").values
    if best == baseline or not len(change):
        return f"{sentence}; within the context, it finds {within[best]:.0%}."
    return (
        f"{sentence}, and {baseline} {past[baseline]:.0%} ({points(change)}); "
        f"within the context, they find {within[best]:.0%} and {within[baseline]:.0%}."
    )


def mean_needles(comparison: xr.Dataset, *, past: bool) -> xr.DataArray:
    """The needles found [entry], a mean over prompts within the context, or past it."""
    needles = comparison["far_retrieval"]
    is_past = needles["prompt_length"] > int(comparison.attrs["context"])
    return needles.where(is_past == past).mean("prompt_length")


def mean_by_group(values: xr.DataArray) -> pd.Series:
    """The mean of `values` [entry] of each group."""
    return pd.Series({group: float(runs.mean()) for group, runs in groups(values)})


def points(change: np.ndarray) -> str:
    """The mean change of a share in percentage points, with its interval over seeds."""
    mean, low, high = 100 * np.array(paired_interval(change))
    words = f"{mean:+.0f} percentage points"
    if len(change) == 1:
        return f"{words}, one seed".replace("-", "−")
    interval = f"95% interval {low:+.0f} to {high:+.0f}, over {len(change)} seeds"
    return f"{words}, {interval}".replace("-", "−")


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
        count = f"{what} in {(earlier >= 0).sum()} of {runs} runs"
        leads.append(f"{count}, {in_common_variants(earlier)}")
    return [
        f"Before an induction head ({LEAST} or more), or at the same checkpoint, there are "
        f"{'; '.join(leads)}. These are million tokens earlier, a mean over the variants that "
        "have both in every seed."
    ]


def best_by_step(comparison: xr.Dataset, role: str) -> xr.DataArray:
    """The best head's score of `role` at each step, [entry, step]."""
    return comparison[f"growth_{role}"].max(("layer", "head"))


def first_seen(present: xr.DataArray) -> xr.DataArray:
    """Million tokens at the first checkpoint with `present` [entry, step]; NaN for never."""
    return (present["tokens_seen"] / 1e6).where(present).min("step")


def groups(compared):
    """Each group of a comparison or a variable, with its entries."""
    names = compared["group"].values
    for group in dict.fromkeys(names.tolist()):
        yield group, compared.isel(entry=np.flatnonzero(names == group))


def how_far(comparison: xr.Dataset) -> list[str]:
    """Copies and needles of variants compared with the baseline, in the context and past it."""
    context = int(comparison.attrs["context"])
    copies = comparison["copy_loss"].mean("trial")
    near = copies["copy_distance"] < context / 2
    copying = best_by_step(comparison, "induction") >= COPIES
    means = {
        "Loss of copies within the context": copies.where(near).mean("copy_distance"),
        "Loss of copies past it": copies.where(~near).mean("copy_distance"),
        "Needles within the context": mean_needles(comparison, past=False),
        "Needles past it": mean_needles(comparison, past=True),
        "Million tokens until a run copies": first_seen(copying),
    }
    return [
        line for name, mean in means.items() for line in against_baseline(name, mean)
    ]


def against_baseline(name: str, values: xr.DataArray) -> list[str]:
    """How `values` [entry] of each variant differ from the paired values of the baseline."""
    changes = []
    partners: set[int] = set()
    for group, runs in groups(values):
        pairs = rl.paired_changes(values, group)
        change = pairs.dropna("entry")
        if len(change):
            count = ""
            if len(change) < len(pairs):
                count = f" in {len(change)} of {len(pairs)} pairs"
            changes.append(f"{group} {say(change.values)}{count}")
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
    """Cost of missing heads or planes for copying and retrieval, in runs that have them."""
    if set(costs["what"]) <= {"none"}:
        return []
    sentences = []
    for column, measure in (
        ("copy_loss", "loss of copies"),
        ("retrieval", "needles found"),
    ):
        wide = costs.pivot_table(column, ["variant", "seed"], "what", sort=False)
        change = wide.sub(wide["none"], axis="index").drop(columns="none")
        parts = []
        for name in change:
            parts.append(f"{name}: {in_common_variants(change[name])}")
        if {INDUCTION, RANDOM} <= set(change):
            beyond = in_common_variants(change[INDUCTION] - change[RANDOM])
            parts.append(f"induction heads minus random heads: {beyond}")
        sentences.append(
            f"Change of the {measure}, a mean over the variants that have it in every seed, "
            "so that two of these numbers may be of other variants: "
            f"{'; '.join(parts)}."
        )
    return sentences


def in_common_variants(change: pd.Series) -> str:
    """The mean `change` of the variants that have it in every seed, and their names."""
    wide = change.unstack("variant").dropna(axis="columns")
    of_seeds = wide.mean(axis="columns").dropna().to_numpy()
    variants = ", ".join(
        name for name in change.index.unique("variant") if name in wide
    )
    return f"{say(of_seeds)} in {variants or 'no variant'}"


def say(change: np.ndarray) -> str:
    """The mean change with its interval over seeds; "more" or "less" if it excludes 0."""
    if not len(change):
        return "not testable"
    mean, low, high = paired_interval(change)
    if len(change) == 1:
        return f"not testable ({mean:+.3f}, of one seed)".replace("-", "−")
    if low == high:  # steps between checkpoints are coarse
        return f"{mean:+.3f} in all {len(change)} seeds".replace("-", "−")
    word = "unresolved"
    if low > 0:
        word = "more"
    elif high < 0:
        word = "less"
    return f"{word} ({mean:+.3f}, {low:+.3f} to {high:+.3f})".replace("-", "−")


if __name__ == "__main__":
    run_script(main)
