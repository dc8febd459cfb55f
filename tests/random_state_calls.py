"""Calls of all public functions. The program prints the calls that change random states.

It is not a test module, because the checks of shapes draw from `random` as well.
"""

import pickle
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from tiny_checkpoints import save_tiny
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import ropelens as rl

WORDS = "the quick brown fox jumps over the lazy dog " * 20
PROMPT = "the cat"
EDITS = {"both": [rl.stop(rl.PlaneNumbers([1])), "p-rope:0.5"]}
FEW = rl.Options(prompts=[PROMPT, "the dog"], attention_on=["t", "e"], surrogates=2)


def random_states() -> bytes:
    """The states of all generators that a program can share with ropelens."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state().numpy())
    return pickle.dumps(states)


@dataclass(frozen=True)
class Work:
    """A small model, and what was measured on it."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: rl.Text
    profile: xr.Dataset
    evaluation: xr.Dataset
    truncation: xr.Dataset
    attribution: xr.Dataset
    reach: xr.Dataset


def measured_work(folder: Path) -> Work:
    (folder / "text.txt").write_text(WORDS)
    for name in ("one", "other"):
        checkpoint = save_tiny(folder / name)
        rl.analyze(checkpoint, WORDS, FEW).save(folder / f"results of {name}")
    model, tokenizer = rl.load(folder / "one")
    text = rl.tokenize([WORDS, WORDS[::-1]], tokenizer, context=32)[:6]
    profile = rl.profile(model, text, tokenizer=tokenizer, surrogates=2)
    rl.save(profile, folder / "profile.nc")
    return Work(
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        text=text,
        profile=profile,
        evaluation=rl.evaluate(model, text, edits={"nope": "nope"}, measures=["loss"]),
        truncation=truncate(model, text),
        attribution=rl.attribute_planes(model, text.ids[0], answer=5),
        reach=rl.reach(model, text, copied=4, copies=[8]),
    )


def truncate(model: PreTrainedModel, text: rl.Text) -> xr.Dataset:
    return rl.truncate(model, text, keep=[0.5], ends=["slow"], measures=["loss"])


def blocks(work: Work) -> None:
    """Run the model in each kind of block that changes or observes it."""
    ids = work.text.ids[:2]
    source = work.text.ids[0]
    with rl.edit_rope(work.model, *EDITS["both"]):
        work.model(ids)
    with rl.silence_heads(work.model, "1.*", to="resample"):
        work.model(ids)
    with rl.silence_heads(work.model, "0.1", to="mean", text=work.text):
        work.model(ids)
    with rl.patch_planes(work.model, source, positions=[2, 3]):
        work.model(ids)
    with rl.observe(work.model, lambda call, planes: None):
        work.model(ids)
    with rl.watch(
        work.model, work.text, measures=["reversal"], out=work.folder / "watch"
    ) as watching:
        watching.step()


def figures(work: Work) -> None:
    """Draw each figure."""
    profile = work.profile
    heads = rl.classify_heads(profile)
    rl.plot_attention(profile, layer=0, head=0)
    rl.plot_claim(profile, heads, selected=(0, 1))
    rl.plot_effects(work.attribution)
    rl.plot_follow(profile, heads)
    rl.plot_head_map(profile, heads)
    rl.plot_kernel(profile, layer=0, head=0)
    rl.plot_norms(profile)
    rl.plot_position_losses(work.evaluation)
    rl.plot_selectivity(profile, layer=0, head=0)
    rl.plot_top_planes(work.attribution)
    rl.plot_truncation(work.truncation, measures=["loss"])


def pages(work: Work) -> None:
    """Write and read results."""
    rl.write_report(work.profile, work.folder / "report.html")
    rl.show(work.profile)._repr_html_()
    rl.save(work.profile, work.folder / "again.nc")
    rl.open(work.folder / "again.nc")
    rl.open(work.folder / "results of one").report(work.folder / "page.html")


def tables(work: Work) -> None:
    """Make tables from results."""
    rl.classify_heads(work.profile)
    rl.test_claims(work.profile, draws=20)
    rl.top_planes(work.attribution)
    rl.position_losses(work.evaluation)
    rl.paired_changes(work.evaluation)


def edits(work: Work) -> None:
    """Make edits, and the configuration and the checkpoint of one."""
    rl.stop_slowest(0.25)
    rl.drop(rl.Fastest(0.5))
    rl.scale(rl.Slowest(0.5), by=0.5)
    rl.rescale([0.1, 0.2, 0.3, 0.4])
    rl.variant_config(work.model.config, "p-rope:0.5")
    rl.export(work.model, "p-rope:0.5", out=work.folder / "exported")


def prompts(work: Work) -> None:
    """Explain prompts."""
    ids = work.text.ids[0]
    rl.capture(work.model, [ids[:8], ids[8:16]], heads="1.*", logits_of=[5, 6])
    rl.attribute_planes(work.model, ids, answer=(5, 6))
    rl.patch_each(work.model, ids, source=work.text.ids[1], answer=(5, 6))
    rl.explain_prompt(work.model, PROMPT, tokenizer=work.tokenizer)


def texts(work: Work) -> None:
    """Read a checkpoint and texts."""
    path = work.folder / "text.txt"
    documents = rl.read_documents([path, path])
    _, tokenizer = rl.load(work.folder / "one")
    text = rl.tokenize(documents, tokenizer, context=16, sequences=8, seed=3)
    text[[1, 3]].fingerprint  # noqa: B018
    rl.Text(text.ids, documents=[0] * len(text))


def profiles(work: Work) -> None:
    """Measure a model on a text."""
    before, after = rl.attention_on(work.text, ["t", "e"], tokenizer=work.tokenizer)
    rl.measure_rope(work.model)
    rl.compare_rope(work.model, work.model)
    rl.profile(work.model, work.text, statistics=[before, after, "reversal"])
    rl.evaluate(work.model, work.text, edits=EDITS, measures=["loss", "copying"])
    truncate(work.model, work.text)
    rl.reach(work.model, work.text, copied=4, copies=[8], variants=["own", "nope"])


def analyses(work: Work) -> None:
    """Analyze a model by its name, and compare results."""
    texts = [work.folder / "text.txt", WORDS]
    sweep = {"keep": [0.5], "ends": ["slow"], "measures": ["loss"]}
    rl.analyze(work.folder / "one", texts, FEW, truncation=sweep)
    compared = [work.folder / "results of one", work.folder / "results of other"]
    rl.compare(compared, cache=work.folder / "cache", sequences=8)


CALLS: list[Callable[[Work], None]] = [
    blocks,
    figures,
    pages,
    tables,
    edits,
    prompts,
    texts,
    profiles,
    analyses,
]


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    work = measured_work(folder)
    for calls in CALLS:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        expected = random_states()
        calls(work)
        if random_states() != expected:
            print(calls.__name__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
