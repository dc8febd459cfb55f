"""Cost of measuring 512 rows on long sequences, compared with a plain forward pass.

Uses the model and the sums of cost.py with a chosen number of layers and one sequence. Each way
runs once, after a run of 4,096 tokens. Up to 65,536 tokens run in one pass. Longer sequences
run in chunks with a key-value cache, and without a plain pass, which has no memory for its
logits. Peaks are above the memory that the process held before.

    python benchmarks/long.py [--lengths 32768,131072] [--layers 8]

On two threads 32,768 tokens take 5 minutes, and 131,072 tokens with 8 layers take 20 and more.
"""

import argparse

import cost
import torch

from ropelens.model.live_model import ONE_PASS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="32768,131072")
    parser.add_argument("--layers", type=int, default=cost.SMALL["num_hidden_layers"])
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    proportions = dict(cost.SMALL)
    proportions["num_hidden_layers"] = arguments.layers
    model = cost.random_llama(**proportions, max_position_embeddings=2**17)
    with torch.no_grad():
        for length in (4096, *lengths):
            ids = torch.randint(model.config.vocab_size, (1, length))
            plain = None
            for name, way in cost.ways_of(model, ids, rows=(512,)).items():
                if name == "plain forward" and length > ONE_PASS:
                    continue
                measured = cost.run_once(way, torch.device("cpu"))
                plain = plain or (measured.seconds if name == "plain forward" else None)
                ratio = f" ({measured.seconds / plain:.2f} of plain)" if plain else ""
                if length in lengths:
                    memory = f"{measured.peak / cost.MIB:,.0f} MiB"
                    print(
                        f"{length:,} {name}: {measured.seconds:,.1f} s{ratio}, {memory}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
