"""Which variants of RoPE learn to copy, how far, and through which planes?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), section 6: p-RoPE
stops the slowest planes, so that a match by meaning survives any distance. Copying is such a
match: an induction head looks for what followed the same token before, however far back.

Expectation: previous-token heads come first, induction heads after them. Variants that keep
fast planes learn both; nope learns neither, or late. The planes that p-rope:0.75 stops carry
more of its induction heads than they carry of rope's, and it copies farther past the context.
Silencing induction heads costs copying; silencing as many random heads as deep does not.

    python analyses/copying.py [--runs runs/copying]...

Reads the finished runs of analyses/copying.toml, and those of copying-more.toml from a second
--runs. Writes reports/copying/<study>/: the comparison, heads.csv and costs.csv. The first
folder of runs keeps all measurements, so a run whose weights are deleted still counts.
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
from ropelens.commands.terminal import run_script
from ropelens.intervals import paired_interval
from ropelens.report import write_index

REPORTS = Path(__file__).parent.parent / "reports"
RUN = ["variant", "seed"]
ROLES = {"induction": 3, "previous_token": 2}  # heads of each role, at most
LEAST = 0.3  # score of a head that has a role
COPIES = 0.5  # best induction score of a model that copies
NO_ROLE = 0.1  # scores of a head that has none
DRAWS = 3  # of random heads
INDUCTION = "induction heads silent"
RANDOM = "as many random heads as deep, without a role, silent"
TASKS = {
    "measures": ("copying", "retrieval"),
    "distances": (16, 64, 240),
    "prompt_lengths": (128, 512),
}


def main(
    runs: list[Path] = typer.Option([Path("runs/copying")], help="Folders of studies."),
    sequences: int = typer.Option(512, help="Sequences of validation text for the loss."),
) -> None:
    cache = runs[0] / "measured"
    comparison = rl.compare(runs, cache=cache, sequences=sequences)
    weights = comparison["fingerprint"].set_index(entry=RUN).to_series()
    looks = []
    for folder in sorted(run for study in runs for run in study.glob("*/*/seed-*")):
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if "finished" in record:
            run = {name: record["settings"][name] for name in RUN}
            file = cache / f"{folder.parent.name}-{folder.name}.json"
            model = {"folder": folder, "data": folder / record["data"], "run": run}
            looks.append(look(file, weights[*run.values()], **model))
    tables = {
        f"{name}.csv": pd.DataFrame([row for rows in looks for row in rows[name]])
        for name in ("heads", "costs")
    }
    answer = rl.Answer(
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


def look(file: Path, weights: str, **model: Any) -> dict:
    """Rows of heads.csv and costs.csv of a model, from `file` where it is of these weights."""
    if file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))
        if rows["weights"] == weights:
            return rows
    rows = {"weights": weights} | look_into(**model)
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def look_into(folder: Path, *, data: Path, run: dict) -> dict[str, list]:
    """Rows of heads.csv and of costs.csv."""
    model, _ = rl.load(folder)
    held_out = np.load(data / "valid.npy")
    tokens = torch.from_numpy(held_out[-16:].astype(np.int64))
    profile = rl.profile(model, tokens, surrogates=0)
    names = {role: best_heads(profile[role].values, most) for role, most in ROLES.items()}
    scores = np.maximum(*(profile[role].values for role in ROLES))
    turns = np.isfinite(profile["wavelength"]).any("layer").values
    rows = {
        "heads": heads_of(names, profile),
        "costs": costs_of(model, tokens, names, scores, turns),
    }
    return {name: [run | row for row in of] for name, of in rows.items()}


def best_heads(scores: np.ndarray, most: int) -> list[str]:
    """Of `scores` [layer, head] the best that have a role, as layer.head."""
    order = scores.argsort(axis=None)[::-1][:most]
    best = [divmod(int(at), scores.shape[1]) for at in order]
    return [f"{layer}.{head}" for layer, head in best if scores[layer, head] >= LEAST]


def heads_of(names: dict[str, list[str]], profile: xr.Dataset) -> Iterator[dict]:
    """Each head that has a role, and the slow planes' share of it."""
    push = profile["selectivity_keys"].clip(min=0)
    share = push[..., push.sizes["frequency"] * 3 // 4 :].sum("frequency") / push.sum(
        "frequency"
    )
    for role, of_role in names.items():
        for name in of_role:
            at = dict(zip(("layer", "head"), map(int, name.split(".")), strict=True))
            yield {
                "role": role,
                "head": name,
                "score": float(profile[role].sel(at)),
                "share_of_slow_quarter": float(share.sel(at)),
            }


def costs_of(
    model, tokens, names: dict[str, list[str]], scores: np.ndarray, turns: np.ndarray
) -> Iterator[dict]:
    """Loss of copies and needles found, without some heads or planes of the model's."""
    chosen = names["induction"]
    quarters = {
        f"planes {of[0]} to {of[-1]} of induction heads stop": rl.stop(
            rl.PlaneNumbers(of.tolist()), heads=",".join(chosen)
        )
        for of in np.array_split(np.arange(len(turns)), min(4, len(turns)))
        if chosen and turns[of].any()
    }
    plain = rl.evaluate(model, tokens, edits=quarters, **TASKS)
    measured = [(name, "", plain.sel(edit=name)) for name in plain["edit"].values]
    silences = [(f"{role} heads silent", heads) for role, heads in names.items() if heads]
    silences += [(RANDOM, heads) for heads in random_heads(scores, chosen)]
    for name, heads in silences:
        with rl.silence_heads(model, ",".join(heads), to="mean", tokens=tokens):
            without = rl.evaluate(model, tokens, **TASKS).isel(edit=0)
        measured.append((name, ",".join(heads), without))
    for name, heads, values in measured:
        yield {
            "what": name,
            "heads": heads,
            "copy_loss": float(values["copy_loss"].mean()),
            "retrieval": float(values["retrieval"].mean()),
        }


def random_heads(scores: np.ndarray, chosen: list[str]) -> list[list[str]]:
    """`DRAWS` times as many random heads without a role as are `chosen`, if there are so many.

    Of their layers and later ones, since what early heads give, all later ones need; of the
    nearest earlier ones too where those have too few.
    """
    without = np.argwhere(scores < NO_ROLE)
    first = min((int(name.split(".")[0]) for name in chosen), default=0)
    while first > 0 and (without[:, 0] >= first).sum() < len(chosen):
        first -= 1
    free = [f"{layer}.{head}" for layer, head in without if layer >= first]
    random, draws = np.random.default_rng(0), DRAWS if len(free) >= len(chosen) > 0 else 0
    return [random.choice(free, len(chosen), replace=False).tolist() for _ in range(draws)]


def who_copies(comparison: xr.Dataset) -> str:
    """How many seeds of each variant copy, and since when in the mean."""
    since = first_seen(best_by_step(comparison, "induction") >= COPIES)
    counts = []
    for group, of_group in groups(since):
        copies = of_group.dropna("entry").values
        when = f", after {copies.mean():.1f} million tokens" if len(copies) else ""
        counts.append(f"{group} {len(copies)} of {len(of_group)}{when}")
    return f"Runs that copy (best induction score of {COPIES} or more): {'; '.join(counts)}."


def what_comes_first(comparison: xr.Dataset) -> list[str]:
    """When labels and roles first appear, and whether before the heads that copy."""
    label = comparison["growth_label"]
    firsts = {
        f"{name} heads": first_seen((label == name).any(("layer", "head")))
        for name in ("positional", "semantic")
    }
    best = best_by_step(comparison, "previous_token")
    looks = best >= LEAST
    firsts["a previous-token head"] = first_seen(looks)
    back = {"step": slice(None, None, -1)}
    stays = (looks | best.isnull()).isel(back).cumprod("step").isel(back)
    firsts["one that stays"] = first_seen(looks & (stays > 0))
    copying = first_seen(best_by_step(comparison, "induction") >= LEAST)
    runs = int(copying.notnull().sum())
    if not runs:
        return []
    leads = []
    for what, since in firsts.items():
        earlier = (copying - since).set_index(entry=RUN).to_series()
        leads.append(f"{what} in {(earlier >= 0).sum()} of {runs}, {say(by_seed(earlier))}")
    return [
        f"Before an induction head ({LEAST} or more), or at the same look, there are "
        f"{'; '.join(leads)} million tokens earlier (a mean over seeds)."
    ]


def best_by_step(comparison: xr.Dataset, role: str) -> xr.DataArray:
    """The best head's score of `role` at each step, [entry, step]."""
    return comparison[f"growth_{role}"].max(("layer", "head"))


def first_seen(there: xr.DataArray) -> xr.DataArray:
    """Million tokens at the first look at which it is `there` [entry, step]; NaN for never."""
    return (there["tokens_seen"] / 1e6).where(there).min("step")


def groups(compared):
    """Each group of a comparison, or of one of its variables, and its entries."""
    names = compared["group"].values
    for group in dict.fromkeys(names.tolist()):
        yield group, compared.isel(entry=np.flatnonzero(names == group))


def how_far(comparison: xr.Dataset) -> list[str]:
    """Copies and needles of each variant against the baseline's, in the context and past it."""
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
    return [line for name, of in means.items() for line in against_baseline(name, of)]


def against_baseline(name: str, values: xr.DataArray) -> list[str]:
    """How `values` [entry] of each variant differ from those that they are paired with."""
    changes, partners = [], set()
    for group, of_group in groups(values):
        pairs = rl.paired_changes(values, group)
        change = pairs.dropna("entry")
        if len(change):
            some = (
                f" in {len(change)} of {len(pairs)} pairs" if len(change) < len(pairs) else ""
            )
            changes.append(f"{group} {say(change.values)}{some}")
            partners.update(of_group["partner"].values.tolist())
    if not changes:
        return []
    base = values[sorted(partners - {-1})]
    return [
        f"{name}, against {base['group'].values[0]} ({base.mean():.2f}): {'; '.join(changes)}."
    ]


def which_planes(heads: pd.DataFrame) -> list[str]:
    """How much of the induction heads' push the planes carry that are slowest in rope."""
    induction = heads if heads.empty else heads[heads["role"] == "induction"]
    if induction.empty:
        return ["No run has an induction head, so the planes of one are not testable."]
    by_run = induction.groupby(["variant", "seed"], sort=False)["share_of_slow_quarter"].mean()
    parts = []
    for variant, shares in by_run.groupby("variant", sort=False):
        beyond = say(shares.values - 0.25)
        parts.append(f"{variant} {shares.mean():.0%}, {beyond}")
    sentences = [
        "The quarter of planes that is slowest in rope carries this share of the induction "
        f"heads' push toward keys, against an even 25%: {'; '.join(parts)}."
    ]
    wide = by_run.unstack("variant")
    if {"rope", "p-rope:0.75"} <= set(wide):
        change = (wide["p-rope:0.75"] - wide["rope"]).dropna().values
        sentences.append(
            f"More of it in p-rope:0.75, where they stand still, than in rope: {say(change)}."
        )
    return sentences


def what_it_costs(costs: pd.DataFrame) -> list[str]:
    """What copying and retrieval lose without heads or planes, over the runs that have them."""
    if set(costs["what"]) <= {"none"}:
        return []
    sentences = []
    for column, name in (("copy_loss", "loss of copies"), ("retrieval", "needles found")):
        wide = costs.pivot_table(column, ["variant", "seed"], "what", sort=False)
        change = wide.sub(wide["none"], axis="index").drop(columns="none")
        parts = [f"{what}: {say(by_seed(change[what]))}" for what in change]
        if {INDUCTION, RANDOM} <= set(change):
            beyond = say(by_seed(change[INDUCTION] - change[RANDOM]))
            parts.append(f"induction heads beyond random ones: {beyond}")
        sentences.append(f"Change of the {name}, over runs: {'; '.join(parts)}.")
    return sentences


def by_seed(values: pd.Series) -> np.ndarray:
    """A mean over the runs of each seed, which began alike, of variants that all seeds have."""
    wide = values.dropna().unstack("variant").dropna(axis="columns")
    return wide.mean(axis="columns").dropna().to_numpy()


def say(change: np.ndarray) -> str:
    """The mean change with its interval over seeds, and whether the interval excludes 0."""
    if not len(change):
        return "not testable"
    mean, low, high = paired_interval(change)
    if len(change) == 1:
        return f"not testable ({mean:+.3f}, of one seed)".replace("-", "−")
    word = "more" if low > 0 else "less" if high < 0 else "unresolved"
    return f"{word} ({mean:+.3f}, {low:+.3f} to {high:+.3f})".replace("-", "−")


if __name__ == "__main__":
    run_script(main)
