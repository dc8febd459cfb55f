"""Which variants of RoPE learn to copy, how far, and through which planes?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), section 6: p-RoPE
stops the slowest planes, so that what depends on meaning alone survives any distance. Copying
does: an induction head looks for what followed the same token before, however far back.

Expectation: previous-token heads come first, induction heads after them. Variants that keep
fast planes learn both, nope neither or late. The planes that p-rope:0.75 stops carry more of
its induction heads than the same planes carry of rope's, and it copies farther past the
context. Silencing induction heads costs copying, random heads of their layers do not; and
where a head's horizon ends (`rl.reach`), needles are no longer found.

    python analyses/copying.py [--runs runs/copying]...

Takes the runs of analyses/copying.toml (and of copying-more.toml, whose folder is another
--runs), those that are done, and writes reports/copying/<study>/: the comparison, heads.csv and
costs.csv. What was measured is kept in the first folder of runs, and stands for weights that
are deleted.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import typer
import xarray as xr
from scipy import stats

import ropelens as rl

REPORTS = Path(__file__).parent.parent / "reports"
ROLES = {"induction": 3, "previous_token": 2}  # heads of each role, at most
LEAST = 0.3  # score of a head that has a role
COPIES = 0.5  # best induction score of a model that copies
HALF = 0.5  # of the needles, found
TASKS = {
    "measures": ("copying", "retrieval"),
    "distances": (16, 64, 240),
    "retrieval": rl.Retrieval(lengths=(128, 512)),
}


def main(
    runs: list[Path] = typer.Option([Path("runs/copying")], help="Folders of studies."),
    sequences: int = typer.Option(512, help="Sequences of validation text for the loss."),
) -> None:
    cache = runs[0] / "measured"
    comparison = rl.compare(runs, cache=cache, sequences=sequences, progress=rl.show_progress)
    names = ("variant", "seed", "fingerprint")
    columns = (comparison[name].values.tolist() for name in names)
    weights = {(variant, seed): digest for variant, seed, digest in zip(*columns, strict=True)}
    looks = []
    for folder in sorted(run for study in runs for run in study.glob("*/*/seed-*")):
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if "finished" in record:
            run = {name: record["settings"][name] for name in ("variant", "seed")}
            kept = cache / f"{folder.parent.name}-{folder.name}.json"
            digest = weights[*run.values()]
            looks.append(kept_look(kept, folder, folder / record["data"], digest, run))
    tables = {
        f"{name}.csv": pd.DataFrame([row for look in looks for row in look[name]])
        for name in ("heads", "costs")
    }
    page = rl.write_comparison(
        REPORTS / "copying" / runs[0].name,
        comparison,
        question="Which variants of RoPE learn to copy, how far, and through which planes?",
        lead=who_copies(comparison),
        findings=[
            *what_comes_first(comparison),
            *how_far(comparison),
            *which_planes(tables["heads.csv"]),
            *what_horizons_foretell(tables["heads.csv"], comparison),
            *what_it_costs(tables["costs.csv"]),
        ],
        more=tables,
    )
    rl.write_index(REPORTS)
    typer.echo(page)


def kept_look(kept: Path, folder: Path, data: Path, weights: str, run: dict) -> dict:
    """Rows of heads.csv and costs.csv, from the file `kept` where it is of these weights."""
    if kept.exists():
        look = json.loads(kept.read_text(encoding="utf-8"))
        if look["weights"] == weights:
            return look
    heads, costs = look_into(folder, data)
    look = {
        "weights": weights,
        "heads": [run | row for row in heads],
        "costs": [run | row for row in costs],
    }
    kept.write_text(json.dumps(look, indent=1) + "\n", encoding="utf-8")
    return look


def look_into(folder: Path, data: Path) -> tuple[list[dict], list[dict]]:
    """The heads of one model that copy, and what it costs to silence or to slow them."""
    model, _ = rl.load(folder)
    # Where no validation text was given, the last of the text was held out.
    text = next(path for name in ("valid", "train") if (path := data / f"{name}.npy").exists())
    rows = np.load(text, allow_pickle=False)[-2 if text.stem == "train" else -16 :]
    tokens = torch.from_numpy(rows.astype(np.int64))
    profile = rl.profile(model, tokens, surrogates=0)
    planes = profile.sizes["frequency"]
    slow = profile["selectivity_keys"].clip(min=0)
    share = slow[..., planes * 3 // 4 :].sum("frequency") / slow.sum("frequency")
    heads, names = [], {}
    for role, most in ROLES.items():
        best = best_heads(profile[role].values, most)
        names[role] = ",".join(f"{layer}.{head}" for layer, head in best)
        for layer, head in best:
            name = f"{layer}.{head}"
            horizon = rl.reach(model, tokens, heads=name, variants=("own",), resamples=0)
            heads.append(
                {
                    "role": role,
                    "head": name,
                    "score": float(profile[role][layer, head]),
                    "share_of_slow_quarter": float(share[layer, head]),
                    "horizon": float(horizon["horizon"][0, layer, head]),
                }
            )
    return heads, list(costs_of(model, tokens, names, planes))


def best_heads(scores: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Of `scores` [layer, head] the best that have a role, as (layer, head)."""
    order = scores.argsort(axis=None)[::-1][:most]
    found = [divmod(int(at), scores.shape[1]) for at in order]
    return [place for place in found if scores[place] >= LEAST]


def costs_of(model, tokens, names: dict[str, str], planes: int) -> Iterator[dict]:
    """Loss of copies and needles found, without some heads or planes of the model's."""
    chosen = names["induction"]
    quarters = {
        f"planes {start} to {start + planes // 4 - 1} of induction heads stop": rl.stop_planes(
            list(range(start, start + planes // 4)), heads=chosen
        )
        for start in range(0, planes, max(1, planes // 4))
        if chosen
    }
    plain = rl.evaluate(model, tokens, edits=quarters, **TASKS)
    found = {name: plain.sel(edit=name) for name in plain["edit"].values}
    silent = {f"{role} heads silent": heads for role, heads in names.items() if heads}
    if random := others(model, chosen):
        silent["random heads of the layers of induction heads silent"] = random
    for name, heads in silent.items():
        with rl.silence_heads(model, heads, to="mean", tokens=tokens):
            found[name] = rl.evaluate(model, tokens, **TASKS).isel(edit=0)
    for name, values in found.items():
        yield {
            "what": name,
            "heads": silent.get(name, ""),
            "copy_loss": float(values["copy_loss"].mean()),
            "retrieval": float(values["retrieval"].mean()),
        }


def others(model, chosen: str) -> str:
    """As many random others of each layer as are chosen there, or all that are left."""
    taken = [tuple(map(int, name.split("."))) for name in chosen.split(",") if name]
    layers = [layer for layer, _ in taken]
    count = model.config.num_attention_heads
    random, drawn = np.random.default_rng(0), []
    for layer in sorted(set(layers)):
        free = [head for head in range(count) if (layer, head) not in taken]
        many = min(len(free), layers.count(layer))
        drawn += [f"{layer}.{head}" for head in random.choice(free, many, replace=False)]
    return ",".join(drawn)


def who_copies(comparison: xr.Dataset) -> str:
    """How many seeds of each variant copy, and since when."""
    best = best_by_step(comparison, "induction")
    seen = comparison["tokens_seen"].values / 1e6
    told = []
    for group in dict.fromkeys(comparison["group"].values.tolist()):
        at = np.flatnonzero(comparison["group"].values == group)
        copies = at[best[at, -1] >= COPIES]
        when = ""
        if len(copies):
            since = [seen[n, (best[n] >= COPIES).argmax()] for n in copies]
            ends = dict.fromkeys(f"{look:.1f}" for look in (min(since), max(since)))
            when = f", after {' to '.join(ends)} million tokens"
        told.append(f"{group} {len(copies)} of {len(at)}{when}")
    return f"Runs that copy (best induction score of {COPIES} or more): {'; '.join(told)}."


def what_comes_first(comparison: xr.Dataset) -> list[str]:
    """Whether heads that look one token back appear before those that need them."""
    best = {role: best_by_step(comparison, role) for role in ROLES}
    first = []
    for n in range(comparison.sizes["entry"]):
        if all((best[role][n] >= LEAST).any() for role in ROLES):
            since = {role: (best[role][n] >= LEAST).argmax() for role in ROLES}
            first.append(since["previous_token"] <= since["induction"])
    if not first:
        return []
    return [
        f"Of {len(first)} runs with heads of both roles ({LEAST} or more), the "
        f"previous-token head was at that score first, or at the same look, in {sum(first)}."
    ]


def best_by_step(comparison: xr.Dataset, role: str) -> np.ndarray:
    """The best head's score of `role` at each step, [entry, step]."""
    return comparison[f"growth_{role}"].max(("layer", "head")).values


def how_far(comparison: xr.Dataset) -> list[str]:
    """Copies and needles of each variant against the baseline's, in the context and past it."""
    context = int(comparison.attrs["context"])
    copies = comparison["copy_loss"].mean("trial")
    needles = comparison["far_retrieval"]
    panels = {
        "loss of copies within the context": copies.sel(
            copy_distance=copies["copy_distance"] < context / 2
        ).mean("copy_distance"),
        "loss of copies past it": copies.sel(
            copy_distance=copies["copy_distance"] >= context / 2
        ).mean("copy_distance"),
        "needles within the context": needles.sel(
            prompt_length=needles["prompt_length"] <= context
        ).mean("prompt_length"),
        "needles past it": needles.sel(prompt_length=needles["prompt_length"] > context).mean(
            "prompt_length"
        ),
    }
    said = []
    partner, group = comparison["partner"].values, comparison["group"].values
    paired = (partner >= 0) & (partner != np.arange(len(partner)))
    if not paired.any():
        return []
    for name, values in panels.items():
        told = []
        for other in dict.fromkeys(group[paired].tolist()):
            at = np.flatnonzero((group == other) & paired)
            told.append(f"{other} {say(values.values[at] - values.values[partner[at]])}")
        baseline = values.values[np.unique(partner[paired])].mean()
        said.append(
            f"{name[0].upper()}{name[1:]}, against {comparison.attrs['baseline']} "
            f"({baseline:.2f}): {'; '.join(told)}."
        )
    return said


def which_planes(heads: pd.DataFrame) -> list[str]:
    """How much of the induction heads' push the slowest quarter of planes carries."""
    said = []
    if heads.empty or not (heads["role"] == "induction").any():
        return ["No run has an induction head, so planes and horizons of one are not testable."]
    induction = heads[heads["role"] == "induction"]
    by_run = induction.groupby(["variant", "seed"], sort=False)["share_of_slow_quarter"].mean()
    shares = by_run.groupby("variant", sort=False).mean()
    said.append(
        "The slowest quarter of planes carries this share of the induction heads' push toward "
        f"keys: {', '.join(f'{variant} {share:.0%}' for variant, share in shares.items())}; "
        "evenly spread: 25%."
    )
    wide = by_run.unstack("variant")
    if {"rope", "p-rope:0.75"} <= set(wide):
        change = (wide["p-rope:0.75"] - wide["rope"]).dropna().values
        said.append(
            f"More of it in p-rope:0.75, where they stand still, than in rope: {say(change)}."
        )
    return said


def what_horizons_foretell(heads: pd.DataFrame, comparison: xr.Dataset) -> list[str]:
    """Whether runs whose induction heads reach farther find needles in longer prompts."""
    pairs = []
    needles = comparison["far_retrieval"].transpose("entry", "prompt_length").values
    lengths = comparison["prompt_length"].values
    far = {} if heads.empty else heads[heads["role"] == "induction"]
    far = {} if not len(far) else far.groupby(["variant", "seed"])["horizon"].max().to_dict()
    for n, of in enumerate(comparison["entry"]):
        run = (of["variant"].item(), of["seed"].item())
        if run in far and (needles[n] >= HALF).any():
            pairs.append((far[run], lengths[needles[n] >= HALF].max()))
    if len(pairs) < 5:  # the ranks of four cannot agree beyond chance
        return [
            "Whether horizons foretell where retrieval fails is not testable: too few runs."
        ]
    rank = stats.spearmanr(*zip(*pairs, strict=True))
    return [
        "Rank correlation of the horizon of a run's induction heads with the longest prompt in "
        f"which half of the needles are found, over {len(pairs)} runs: {rank.statistic:+.2f} "
        f"(p {rank.pvalue:.2f}).".replace("-", "−")
    ]


def what_it_costs(costs: pd.DataFrame) -> list[str]:
    """What copying and retrieval lose without heads or planes, over the runs that have them."""
    wide = costs.pivot(index=["variant", "seed"], columns="what", values="copy_loss")
    told = []
    for what in [name for name in dict.fromkeys(costs["what"]) if name != "none"]:
        change = (wide[what] - wide["none"]).dropna().values
        told.append(f"{what}: {say(change)}")
    return [f"Change of the loss of copies, over runs: {'; '.join(told)}."] if told else []


def say(change: np.ndarray) -> str:
    """The mean change with its interval over seeds, and whether it is told apart from none."""
    if not len(change):
        return "not testable"
    mean, low, high = rl.paired_interval(change)
    if len(change) == 1:
        return f"not testable ({mean:+.3f}, of one seed)".replace("-", "−")
    word = "more" if low > 0 else "less" if high < 0 else "unresolved"
    return f"{word} ({mean:+.3f}, {low:+.3f} to {high:+.3f})".replace("-", "−")


if __name__ == "__main__":
    rl.run_script(main)
