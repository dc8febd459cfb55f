"""The claim on wavelengths, judged where the answer is known: trained and random models.

    python benchmarks/verdicts.py [--random N] [--checkpoints FOLDER] [--corpora FOLDER]

Per model the rank correlation of what the offset explains with the mean log wavelength, the
surrogates' median and 95 %, the heads by label and the verdict. Random models differ in
seed, size and initial scale: frequencies mean nothing to them, so it may hold of 1 in 40.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import ropelens as rl
from ropelens.statistics.budget.claim import Claim
from ropelens.statistics.budget.surrogates import DRAWS
from ropelens.statistics.labels import LABELS

BUNDLED = Path(rl.__file__).parent / "bundled" / "rope"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=20, metavar="N")
    parser.add_argument("--checkpoints", type=Path, help="holds stories260k and babyllama105")
    parser.add_argument("--corpora", type=Path, help="holds tinystories/ and novels/valid/")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.checkpoints and options.corpora:
        stories = sorted((options.corpora / "tinystories").glob("*.txt"))
        novels = sorted((options.corpora / "novels/valid").glob("*.txt"))
        for place, texts in (
            (options.checkpoints / "stories260k", stories),
            (options.checkpoints / "babyllama105", stories),
            (BUNDLED, novels),
        ):
            model, tokenizer = rl.load(str(place))
            tokens = text_tokens(model, tokenizer, texts, sequences=options.sequences)
            say(place.name, model, tokens, options)
    for seed in range(options.random):
        model, name = random_model(seed)
        tokens = torch.randint(3, 512, (options.sequences, 192))
        tokens[:, 0] = 1
        say(name, model, tokens, options)


def say(name: str, model: PreTrainedModel, tokens: Tensor, options: argparse.Namespace) -> None:
    """One line on one model."""
    begin = time.process_time()
    profile = rl.profile(
        model, tokens, surrogates=options.draws, rows=options.rows, seed=options.seed
    )
    heads = rl.classify_heads(profile, seed=options.seed)
    claim, labels = Claim(**heads.attrs["claim"]), heads["label"].value_counts()
    counts = " ".join(f"{labels[each]} {each}" for each in LABELS if each in labels)
    print(
        f"{name:28} {tuple(tokens.shape)} rho {claim.rank_correlation:+.2f}"
        f" [{claim.low:+.2f}, {claim.high:+.2f}]; surrogates {claim.null_median:+.2f}"
        f" [{claim.null_low:+.2f}, {claim.null_high:+.2f}], p {claim.p_value:.3f};"
        f" {counts}: {claim.verdict} ({time.process_time() - begin:.0f} s)",
        flush=True,
    )


def text_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[Path],
    *,
    sequences: int,
) -> Tensor:
    """Sequences of a model's context, at most 512, that each begin with BOS, from all texts."""
    context = min(512, model.config.max_position_embeddings)
    ids: list[int] = []
    share = -(-sequences * context // len(texts))
    for text in texts:
        some = text.read_text()[: share * 16]
        ids += tokenizer(some, add_special_tokens=False)["input_ids"][:share]
    sequences = min(sequences, len(ids) // (context - 1))
    table = torch.tensor(ids[: sequences * (context - 1)]).view(sequences, context - 1)
    first = torch.full((sequences, 1), model.config.bos_token_id)
    return torch.cat([first, table], dim=1)


def random_model(seed: int) -> tuple[PreTrainedModel, str]:
    """A Llama that was never trained; size and scale of its weights go with the seed."""
    layers, heads, kv_heads, dim = [(4, 8, 8, 32), (6, 6, 2, 32), (4, 8, 4, 64), (8, 4, 4, 16)][
        seed % 4
    ]
    std = [0.02, 0.05, 0.1, 0.3][seed // 4 % 4]
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=heads * dim,
        intermediate_size=2 * heads * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=512,
        bos_token_id=1,
        initializer_range=std,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    return model, f"random {seed}: {layers} x {heads} of {dim}, {std}"


if __name__ == "__main__":
    main()
