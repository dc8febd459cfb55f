"""How many tokens does a small model need before it copies, when there is little else to learn?

    python tools/formation.py [--documents phrases] [--words 300] [--layers 4] ...

Sequences are made as they are needed: a context of random tokens that come again, either
"phrases" (2 to 5 tokens each, in random order) or "periods" (one segment, again and again).
With `--prose ARRAY`, tokens of text (train.npy as `ropelens train` prepares it), a share of
sequences is text instead, and words are tokens in the order of how frequent they are. With
`--least N` a sequence draws from the first N words or more: few words are learnt from sooner.

Each look prints the loss on tokens that their phrase foretells, and on the second and later
rounds of segments of 8, 16 and 32 tokens. Who knows only which tokens were there has ln 8 =
2.08, 2.77 and 3.47 nats at best; who copies has 0.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from safetensors.torch import load_model, save_model
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from ropelens.train.sizes import Size, model_config

PERIODS = (8, 16, 32)
PHRASE = 5  # tokens of the longest phrase
HELD = 64  # rows of the text that are held out


@dataclass(frozen=True)
class Maker:
    """Makes sequences of `context` tokens: BOS (0), then repeated words or `prose`.

    A sequence draws from the first 2, 3, ... of the `words`: `least` at least, and as often
    from 50 to 100 of them as from 500 to 1,000.
    """

    documents: str
    words: np.ndarray
    least: int
    low: int  # phrases, or tokens of a segment, at least
    high: int  # at most
    context: int
    prose: np.ndarray | None
    share: float
    random: np.random.Generator

    def batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [sequence, position], and which of them an earlier copy foretells."""
        made = [self.sequence() for _ in range(count)]
        tokens, foretold = (np.stack(arrays) for arrays in zip(*made, strict=True))
        return torch.from_numpy(tokens), torch.from_numpy(foretold)

    def between(self, least: int, most: int) -> int:
        """A whole number, its logarithm uniform."""
        return int(np.exp(self.random.uniform(np.log(least), np.log(most + 1))))

    def sequence(self) -> tuple[np.ndarray, np.ndarray]:
        r, body = self.random, self.context - 1
        if self.prose is not None and r.random() < self.share:
            row = self.prose[r.integers(len(self.prose) - HELD)]
            start = r.integers(1, len(row) - body + 1)
            tokens, foretold = row[start : start + body], np.zeros(body, bool)
        else:
            words = self.words[: self.between(self.least, len(self.words))]
            tokens, foretold = getattr(self, self.documents)(
                words, self.between(self.low, self.high)
            )
        return np.r_[0, tokens[:body]].astype(np.int64), np.r_[False, foretold[:body]]

    def phrases(self, words: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        length = int(self.random.integers(2, PHRASE + 1))
        drawn = self.random.permutation(words)[: count * length].reshape(count, length)
        picks = self.random.integers(count, size=self.context)
        known = np.array([pick in picks[:at] for at, pick in enumerate(picks)])
        return drawn[picks].ravel(), (known[:, None] & (np.arange(length) > 0)).ravel()

    def periods(self, words: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        rounds = self.context // count + 1
        tokens = np.tile(self.random.choice(words, count), rounds)
        return tokens, np.arange(len(tokens)) > count


def main(
    documents: Annotated[str, typer.Option(help="phrases or periods")] = "phrases",
    words: Annotated[int, typer.Option(help="Tokens that are repeated.")] = 300,
    low: Annotated[int, typer.Option(help="Least phrases, or least tokens.")] = 2,
    high: Annotated[int, typer.Option(help="Most phrases, or most tokens.")] = 8,
    prose: Annotated[Path | None, typer.Option(help="Token array of text.")] = None,
    share: Annotated[float, typer.Option(help="Share of its sequences.")] = 0.2,
    vocabulary: Annotated[int, typer.Option(help="Tokens that there are.")] = 1024,
    layers: Annotated[int, typer.Option(help="Layers of 4 heads of 32.")] = 4,
    bias: Annotated[bool, typer.Option(help="Give queries and keys a bias.")] = False,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 16,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 2e-3,
    init: Annotated[float, typer.Option(help="Spread of the first weights.")] = 0.08,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 2000,
    look: Annotated[int, typer.Option(help="Steps between looks.")] = 200,
    start: Annotated[Path | None, typer.Option(help="Weights to go on from.")] = None,
    save: Annotated[Path | None, typer.Option(help="Where weights go, each look.")] = None,
    least: Annotated[
        int, typer.Option(help="Words that a sequence draws from, at least; 0: all.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Decides every random draw.")] = 0,
) -> None:
    if documents == "phrases" and (least or words) < high * PHRASE:
        raise typer.BadParameter(f"{high} phrases take up to {high * PHRASE} words")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rows = None if prose is None else by_frequency(np.load(prose))
    used = np.arange(2, 2 + words)
    random = np.random.default_rng(seed)
    maker = Maker(documents, used, least or words, low, high, context, rows, share, random)
    size = Size(layers, 128, 4, 4, 32, 384, batch, batch, rate)
    config = model_config(size, vocabulary=vocabulary, context=context)
    config.initializer_range, config.attention_bias = init, bias
    model = LlamaForCausalLM(config)
    if start is not None:
        load_model(model, start)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    began, losses = time.process_time(), []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / 30)
        tokens, _ = maker.batch(batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % look == 0:
            seconds = time.process_time() - began
            print(
                f"{step * batch * context:,} tokens, {seconds:.0f} s:",
                f"loss {np.mean(losses):.2f}, {report(model, maker)}",
                flush=True,
            )
            losses = []
            if save is not None:
                save_model(model, str(save))


def by_frequency(rows: np.ndarray) -> np.ndarray:
    """The same text, its tokens numbered by how frequent they are; 0 and 1 are BOS and EOS."""
    counts = np.bincount(rows[:4000].ravel(), minlength=int(rows.max()) + 1)
    order = 2 + np.argsort(-counts[2:], kind="stable")
    number = np.arange(len(counts))
    number[order] = np.arange(2, len(counts))
    return number[rows]


def report(model: LlamaForCausalLM, maker: Maker) -> str:
    """The losses of a look, in words."""
    tokens, foretold = maker.batch(64)
    said = [f"foretold {losses_of(model, tokens)[foretold[:, 1:]].mean():.2f}"]
    if maker.prose is not None:
        held = torch.from_numpy(maker.prose[-HELD:, : maker.context].astype(np.int64))
        said.append(f"prose {losses_of(model, held).mean():.2f}")
    for period in PERIODS:
        if 2 * period < maker.context:
            segments = [maker.random.permutation(maker.words)[:period] for _ in range(16)]
            tiled = [np.tile(s, math.ceil(maker.context / period)) for s in segments]
            tokens = torch.tensor(np.array([np.r_[0, t][: maker.context] for t in tiled]))
            said.append(
                f"period {period} {losses_of(model, tokens)[:, period + 1 :].mean():.2f}"
            )
    return ", ".join(said)


@torch.no_grad()
def losses_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of every predicted token, [sequence, position - 1]."""
    logits = model(input_ids=tokens).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


if __name__ == "__main__":
    typer.run(main)
