"""Make the bundled checkpoints from a finished study: python tools/bundle.py runs/bundled

Each checkpoint gets a folder: half-precision safetensors, tokenizer, text sampled from the
checkpoint, and a model card. Every number of the card is read from the run or measured here.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from card import loss_curve, model_card, read_metrics
from sample import sample_documents
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ropelens.checkpoints.bundled import BUNDLED
from ropelens.commands.terminal import run_script
from ropelens.errors import BadArgument
from ropelens.runtime.folder import write_whole
from ropelens.runtime.records import write_json
from ropelens.train.checkpoint import write_model
from ropelens.train.data import held_out_sequences, spread
from ropelens.train.steps import VALID_SEQUENCES

LARGEST = 6_000_000  # bytes of a bundled folder, with sampled text and card
MEASURED = 512  # held-out sequences on which the two precisions are compared
TEMPERATURE = 0.9
BUNDLES = Path("ropelens/bundled")
RECIPE = """\
python tools/mixture.py novels/train novels/valid runs/mixture --recipe bundled
ropelens train --study tools/bundled.toml --tokens runs/mixture --out runs/bundled
python tools/bundle.py runs/bundled"""
TEXT = (
    "85 public-domain English novels of 1815-1930, 67 million characters (from "
    "computationalstylistics/100_english_novels)"
)


@dataclass(frozen=True)
class Measured:
    """The cost of storing the weights in half precision; losses in nats per predicted token.

    `vanished` counts weights that are zero in float16 but not in float32.
    """

    parameters: int
    vanished: int
    largest: float
    full_loss: float
    half_loss: float
    sequences: int


def main(
    study: Annotated[Path, typer.Argument(help="Folder of the study.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = BUNDLES,
    recipe: Annotated[
        str, typer.Option(help="The commands that made the checkpoints.")
    ] = RECIPE,
    text: Annotated[
        str, typer.Option(help="A description of the training text.")
    ] = TEXT,
) -> None:
    for name in BUNDLED:
        variant, _, step = name.partition("-step-")
        (run,) = study.glob(f"*/{variant}/seed-0")
        measured = write_bundle(
            run,
            out=out / name,
            recipe=recipe,
            text=text,
            step=int(step) if step else None,
        )
        typer.echo(f"{name}: validation loss {measured.half_loss:.4f}")


def write_bundle(
    run: Path,
    *,
    out: Path,
    recipe: str,
    text: str,
    step: int | None = None,
    documents: int = 64,
    seed: int = 0,
) -> Measured:
    """Fill the folder `out` from the finished run folder `run`; return the measured losses.

    The card contains `recipe` (the commands that made the run, one per line) and `text` (a
    description of its text). `out` gets config, safetensors in float16, tokenizer, sample.jsonl
    (text sampled from these weights with `seed`), metrics.csv, loss.svg, bundle.json and
    README.md. With `step`, the weights are the weights of that step from the history of the
    run, and no text is sampled: early models read the text of the finished model.

    Raises:
        BadArgument: `run` is not finished, did not keep `step`, or the folder would be
            larger than 6 MB.
    """
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    if "finished" not in record:
        raise BadArgument(
            f"the run in {run} is not finished.", hint="its command again"
        )
    steps = record["settings"]["steps"] if step is None else step
    context = record["settings"]["context"]
    model = _model(run, step)
    held_out = held_out_sequences(run / record["data"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run, local_files_only=True)
    measured = measure_half(model, spread(held_out, MEASURED))
    out.mkdir(parents=True, exist_ok=True)
    write_model(model.half(), out)
    samples = 0
    if step is None:
        samples = _write_sample(out, model.float(), tokenizer, documents, context, seed)
    for name in ("tokenizer.json", "tokenizer_config.json", "metrics.csv"):
        shutil.copyfile(run / name, out / name)
    rows = read_metrics(run / "metrics.csv")
    write_whole(out / "loss.svg", loss_curve(rows))
    tokens = record["tokens"] * steps // record["settings"]["steps"]
    facts = {"tokens": tokens, "step": steps, "validation_loss": measured.full_loss}
    write_json(out / "bundle.json", facts)
    card = model_card(
        record,
        rows,
        measured,
        rope_parameters=model.config.to_dict()["rope_parameters"],
        vocabulary=model.config.vocab_size,
        name=out.name,
        recipe=recipe,
        text=text,
        step=steps,
        tokens=tokens,
        samples=samples,
        sample_seed=seed,
        temperature=TEMPERATURE,
        seen=min(VALID_SEQUENCES, len(held_out)),
    )
    write_whole(out / "README.md", card)
    size = sum(file.stat().st_size for file in out.iterdir())
    if size > LARGEST:
        raise BadArgument(f"{out} is {size:,} bytes; at most {LARGEST:,} are bundled.")
    return measured


def _model(run: Path, step: int | None) -> LlamaForCausalLM:
    """The finished model of `run`, or its model at `step`, in float32."""
    folder = run if step is None else run / "history" / f"step-{step:06d}"
    if not folder.is_dir():
        raise BadArgument(f"the run in {run} did not keep step {step}.")
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )


def _write_sample(
    out: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: int,
    context: int,
    seed: int,
) -> int:
    """Write text sampled from `model` to sample.jsonl; return the number of documents."""
    texts = sample_documents(
        model,
        tokenizer,
        documents=documents,
        context=context,
        temperature=TEMPERATURE,
        seed=seed,
    )
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    write_whole(out / "sample.jsonl", "".join(lines))
    return len(texts)


def measure_half(
    model: LlamaForCausalLM, rows: np.ndarray, *, batch: int = 16
) -> Measured:
    """Compare `model` (float32) with its own weights rounded to float16.

    Both losses are computed in float32, on all of `rows`, uint16 [sequence, context].
    """
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    rounded = LlamaForCausalLM(model.config).eval()
    halved = {name: x.half().float() for name, x in model.state_dict().items()}
    rounded.load_state_dict(halved)
    return Measured(
        parameters=len(weights),
        vanished=int(((weights.half() == 0) & (weights != 0)).sum()),
        largest=float(weights.abs().max()),
        full_loss=mean_loss(model, rows, batch=batch),
        half_loss=mean_loss(rounded, rows, batch=batch),
        sequences=len(rows),
    )


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, rows: np.ndarray, *, batch: int) -> float:
    """Mean loss of `model` per predicted token of `rows`, nats."""
    total = 0.0
    for start in range(0, len(rows), batch):
        tokens = torch.from_numpy(rows[start : start + batch].astype(np.int64))
        total += float(model(input_ids=tokens, labels=tokens).loss) * len(tokens)
    return total / len(rows)


if __name__ == "__main__":
    run_script(main)
