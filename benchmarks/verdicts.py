"""The claims of the ledger, tested in random models, in which no claim is true.

    python benchmarks/verdicts.py [--random N] [--sequences N] [--context N] [--draws N]

Prints a line per claim: how many of N Llamas with random weights have each verdict. The models
differ in seed, size and initial scale. Frequencies have no meaning in them, so a claim may hold
in 1 of 40. Token 5 of their text is an apostrophe.
"""

import argparse
import time

import pandas as pd
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import ropelens as rl
from ropelens.claims.verdict import VERDICTS

SIZES = ((4, 8, 8, 32), (6, 6, 2, 32), (4, 8, 4, 64), (10, 4, 4, 16))
"""Layers, heads, key-value heads, and coordinates of a head."""
SCALES = (0.02, 0.1, 0.3, 1.0)
VOCABULARY = 64
APOSTROPHE = 5


class Letters:
    """A tokenizer with one letter per token."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join("'" if i == APOSTROPHE else chr(1000 + i) for i in token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=40, metavar="N")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--draws", type=int, default=1000)
    options = parser.parse_args()
    tables = []
    for seed in range(options.random):
        begin = time.process_time()
        model = random_model(seed)
        tokens = random_tokens(seed, (options.sequences, options.context))
        profile = rl.profile(model, tokens, seed=seed)
        table = rl.test_claims(
            profile,
            model=model,
            text=tokens,
            tokenizer=Letters(),
            draws=options.draws,
            seed=seed,
        )
        tables.append(table)
        holding = table.loc[table["verdict"] == "holds", "claim"].tolist()
        layers, heads, _, size = SIZES[seed % 4]
        name = f"random {seed}: {layers} x {heads} of {size}, {SCALES[seed // 4 % 4]}"
        print(f"{name}: {holding} ({time.process_time() - begin:.0f} s)", flush=True)
    print_counts(pd.concat(tables))


def print_counts(table: pd.DataFrame) -> None:
    """Print the number of models with each verdict, by claim."""
    counts = table.groupby("claim", sort=False)["verdict"].value_counts()
    by_verdict = counts.unstack(fill_value=0)
    print(by_verdict.reindex(columns=VERDICTS, fill_value=0).to_string())


def random_tokens(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, shape, generator=generator)
    tokens[:, 0] = 1
    return tokens


def random_model(seed: int) -> PreTrainedModel:
    """An untrained Llama; the seed decides its size and the scale of its weights."""
    layers, heads, kv_heads, size = SIZES[seed % 4]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * size,
        intermediate_size=2 * heads * size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        max_position_embeddings=256,
        bos_token_id=1,
        initializer_range=SCALES[seed // 4 % 4],
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


if __name__ == "__main__":
    main()
