"""The model card of a bundled checkpoint: a text and a curve with measured numbers."""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ropelens.figures.formats import plural
from ropelens.rope.variant_config import frequencies
from ropelens.rope.variants import OWN, Shape, parse_variant

if TYPE_CHECKING:
    from bundle import Measured

Row = Mapping[str, float]

CARD = """\
---
license: mit
language: en
library_name: transformers
tags: [rope, llama, interpretability]
---

# {name}: a checkpoint bundled with ropelens

A small LLaMA-style decoder {embeddings}. ropelens trained it from
random weights, so that its analyses can run without a download. It is a test model: it
{able}. Do not use it for anything else.

- architecture: LlamaForCausalLM: RMSNorm before each block, SwiGLU, {attention}
  attention, tied embeddings
- shape: {layers} layers, width {width}, {heads} query and {kv_heads} key-value heads of
  {head_dim} dimensions, MLP {mlp}; {parameters:,} parameters
- rotation: {variant} ({rope}), {turning} of {planes} planes turn
- context: {context} tokens, of which the first is always BOS
- tokenizer: byte-level BPE of {vocabulary:,} tokens, trained on the same text
- trained on: {text}
- tokens seen: {tokens:,} ({step:,} steps of {per_step:,}{early}), {sequences_of}
- optimizer: AdamW (0.9, 0.95), peak rate {learning_rate:g}, {warmup_steps} steps of
  warm-up, cosine to zero over the last {falling} of the remaining steps; weight decay 0.1,
  gradients clipped at norm 1; {precision}
- seed: {seed}
- made with: {versions}
- licence: MIT
{needs}
## Recipe

{recipe}

## Loss

Nats per predicted token, on {sequences:,} sequences ({valid_tokens:,} tokens) spread over text
outside the training text; a uniform guess has {uniform:.3f}.

| weights | validation loss |
|---|---|
| float32, as trained | {full_loss:.5f} |
| float16, as stored | {half_loss:.5f} |

The largest weight is {largest:.2f}, far from overflow; {vanished:,} of {parameters:,} weights
round to zero.

![loss over tokens](loss.svg)

The run{part}:

{table}

Validation during training uses the first {seen} held-out sequences, in the precision of
training. `metrics.csv` has all rows. Median rate {rate:,} tokens/s on {threads}.
{sample}"""

SAMPLE = """
## Sampled text

`sample.jsonl`: {samples} documents sampled from these weights (temperature {temperature},
no top-k, seed {sample_seed}), each exactly one context of tokens. ropelens analyses it by
default.
"""

EARLY = """
## Text

This checkpoint has no sampled text. By default, ropelens analyses the text that was sampled
from the finished model.
"""


NEEDS_ROPELENS = """
transformers does not know this variant of RoPE. `import ropelens` registers it; import it
before you load the checkpoint.
"""


def model_card(
    record: Mapping[str, Any],
    rows: Sequence[Row],
    measured: Measured,
    *,
    rope_parameters: Mapping[str, Any],
    vocabulary: int,
    name: str,
    recipe: str,
    text: str,
    step: int,
    tokens: int,
    samples: int,
    sample_seed: int,
    temperature: float,
    seen: int,
) -> str:
    """README.md of a bundled checkpoint, from `record` of run.json and `rows` of metrics.csv.

    The weights were trained for `step` steps on `tokens` tokens. Early models have no
    `samples`.
    """
    settings = record["settings"]
    rates = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    variant = parse_variant(settings["variant"])
    inv_freq, _ = frequencies(
        variant, Shape(settings["size"]["head_dim"], 10_000.0, 2048)
    )
    drawn = {"samples": samples, "sample_seed": sample_seed, "temperature": temperature}
    return CARD.format(
        **settings["size"]
        | {k: v for k, v in settings.items() if k != "size"}
        | {
            "vocabulary": vocabulary
        },  # smaller than in the settings if the text is short
        **vars(measured),
        name=name,
        able="copies words that came before, and writes like a bad novel"
        if "mixture" in settings
        else "writes the semblance of a novel",
        attention="grouped-query"
        if settings["size"]["kv_heads"] < settings["size"]["heads"]
        else "multi-head",
        per_step=settings["size"]["batch"] * settings["context"],
        sequences_of=sequences_of(settings),
        falling=f"{settings.get('decay', 1):.0%}",
        embeddings="without position embeddings"
        if variant.usage == "nope"
        else "with rotary position embeddings",
        rope=", ".join(f"{key} {value}" for key, value in rope_parameters.items()),
        needs=NEEDS_ROPELENS if variant.rope_type.startswith(OWN) else "",
        turning=int(inv_freq.count_nonzero()),
        planes=len(inv_freq),
        text=text,
        step=step,
        early=""
        if samples
        else f", of {settings['steps']:,} steps in the whole training",
        tokens=tokens,
        versions=", ".join(
            f"{package} {v}" for package, v in record["versions"].items()
        ),
        recipe=textwrap.indent(recipe, "    "),
        valid_tokens=measured.sequences * settings["context"],
        uniform=math.log(vocabulary),
        part=""
        if samples
        else f"; this checkpoint has the weights after step {step:,}",
        table=loss_table(rows),
        seen=seen,
        rate=round(median(rates)),
        threads=plural(record["threads"], "CPU thread"),
        sample=SAMPLE.format(**drawn) if samples else EARLY,
    )


def sequences_of(settings: Mapping[str, Any]) -> str:
    """A description of the sequences: their length, or the stages of a mixture in order."""
    if "mixture" not in settings:
        return f"in sequences of {settings['context']}"
    parts = []
    for stage in map(settings["mixture"].get, settings["stages"]):
        kinds = stage["shares"]
        least, most = stage["pool"]
        parts.append(
            f"{stage['sequences'] * stage['length'] / 1e6:.1f} million in sequences of "
            f"{stage['length']}, documents of "
            + ", ".join(
                f"{name} ({share:.0%})" if len(kinds) > 1 else name
                for name, share in sorted(kinds.items(), key=lambda kind: -kind[1])
            )
            + f" over {least:,}"
            + (f" to {most:,}" if most > least else "")
            + " words"
        )
    return (
        f"in {len(parts)} stages (tools/mixture.py explains the documents):\n  "
        + ";\n  ".join(parts)
    )


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics.csv, without empty cells."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [
            {name: float(cell) for name, cell in row.items() if cell}
            for row in csv.DictReader(stream)
        ]


def loss_table(rows: Sequence[Row]) -> str:
    """A Markdown table of the steps with a validation loss."""
    lines = ["| step | tokens | training loss | validation loss |", "|---|---|---|---|"]
    lines += [
        f"| {row['step']:.0f} | {row['tokens']:,.0f} | {row['train_loss']:.3f} "
        f"| {row['valid_loss']:.3f} |"
        for row in rows
        if "valid_loss" in row and "train_loss" in row
    ]
    return "\n".join(lines)


def loss_curve(rows: Sequence[Row], *, width: int = 640, height: int = 320) -> str:
    """An SVG of training and validation loss (nats/token) over tokens seen."""
    left = 50
    right = 15
    top = 15
    bottom = 40
    most = max(row["tokens"] for row in rows)
    losses = [
        row[key] for row in rows for key in ("train_loss", "valid_loss") if key in row
    ]
    low = math.floor(min(losses))
    high = math.ceil(max(losses))

    def point(tokens: float, loss: float) -> tuple[float, float]:
        x = left + tokens / most * (width - left - right)
        y = top + (high - loss) / (high - low) * (height - top - bottom)
        return round(x, 1), round(y, 1)

    def line(key: str, colour: str) -> str:
        points = " ".join(
            "{},{}".format(*point(r["tokens"], r[key])) for r in rows if key in r
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    def label(
        x: float, y: float, text: str, *, anchor: str = "middle", ink: str = "#333"
    ) -> str:
        return (
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{ink}">{text}</text>'
        )

    parts = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for loss in range(low, high + 1):
        _, y = point(0, loss)
        parts.append(f'<path d="M{left} {y}H{width - right}" stroke="#ddd"/>')
        parts.append(label(left - 8, y + 4, str(loss), anchor="end"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = point(share * most, low)
        parts.append(label(x, y + 16, f"{share * most / 1e6:.1f}"))
    parts += [
        label(width / 2, height - 6, "million tokens seen; loss in nats per token"),
        line("train_loss", "#888"),
        line("valid_loss", "#c0392b"),
        label(width - right, top + 12, "training", anchor="end", ink="#888"),
        label(width - right, top + 28, "validation", anchor="end", ink="#c0392b"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"
    )
