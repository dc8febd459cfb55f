"""Compare the confidence of labels with how often other draws of sequences keep them.

    python benchmarks/confidence.py [MODEL] --text FILE_OR_FOLDER ... [--draws N]

Every draw is a profile. Prints a row per band of confidence: the number of heads of all draws
in the band, their mean confidence, and the share of the remaining draws that give the same
label.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import pandas as pd

import ropelens as rl

BANDS = (0, 0.5, 0.8, 0.9, 0.99, 1.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=9)
    options = parser.parse_args()

    heads = heads_of_draws(options)
    label = np.array([table["label"] for table in heads])
    confidence = np.array([table["confidence"] for table in heads])
    share = ((label[:, None] == label).sum(1) - 1) / (len(label) - 1)
    print(f"all heads: confidence {confidence.mean():.3f}, share {share.mean():.3f}")
    for low, high in itertools.pairwise(BANDS):
        band = (confidence >= low) & (confidence < high)
        if band.any():
            means = f"confidence {confidence[band].mean():.3f}, share {share[band].mean():.3f}"
            print(f"{low:.2f} to {min(high, 1):.2f}: {band.sum():5} heads, {means}")


def heads_of_draws(options: argparse.Namespace) -> list[pd.DataFrame]:
    """A table of the heads for each draw of sequences."""
    model, tokenizer = rl.load(options.model)
    documents = rl.read_documents(options.text)
    tables = []
    for seed in range(options.draws):
        text = rl.tokenize(
            documents,
            tokenizer,
            context=options.context,
            sequences=options.sequences,
            seed=seed,
        )
        profile = rl.profile(model, text, surrogates=0, seed=seed)
        tables.append(rl.classify_heads(profile))
    return tables


if __name__ == "__main__":
    main()
