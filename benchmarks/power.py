"""How small an effect would each claim of the ledger still find in a model of this size?

    python benchmarks/power.py PROFILE.nc [--trials N]

Prints for every claim about a profile: its number; the number from which it would hold; the
smallest share of the effect that is found four times in five (the arrays of the model are mixed
with one draw of their null in this share); and the smallest number of layers, drawn at random,
that shows the claim equally often.
"""

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import ropelens as rl
from ropelens.claims.arrays import claim_arrays
from ropelens.claims.claim import Claim
from ropelens.claims.claims import CLAIMS
from ropelens.claims.ledger import ledger
from ropelens.claims.nulls import FREQUENCIES, OFFSETS
from ropelens.claims.verdict import judge

DRAWS = 120
OFTEN = 0.8
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--trials", type=int, default=30)
    options = parser.parse_args()
    profile = rl.open(options.profile)
    arrays = claim_arrays(profile)
    rows = ledger(profile).set_index("claim")
    print(
        "claim | number | holds from | share of the effect found | layers that show it"
    )
    for claim in CLAIMS:
        if claim.null is FREQUENCIES or not arrays.keys() >= {*claim.arrays}:
            continue
        values = [arrays[name] for name in claim.arrays]
        row = rows.loc[claim.name]
        share, layers = smallest(claim, values, options.trials)
        print(
            f"{claim.name} | {row['number']:.3g} | {row['threshold']:.3g} | {share} | {layers}"
        )


def smallest(claim: Claim, arrays: list[np.ndarray], trials: int) -> tuple[str, str]:
    """The smallest share of the effect, and the fewest layers, with which the claim holds."""
    random = np.random.default_rng(0)

    def often(trial: Callable[[], list[np.ndarray]]) -> bool:
        held = [holds(claim, trial(), random) for _ in range(trials)]
        return sum(held) >= OFTEN * trials

    drawn = [*claim.null.draw(tuple(arrays), random, 10 * trials)]

    def mixed(share: float) -> list[np.ndarray]:
        other = drawn[random.integers(len(drawn))]
        return [share * x + (1 - share) * y for x, y in zip(arrays, other, strict=True)]

    def random_layers(count: int) -> list[np.ndarray]:
        layers = random.choice(len(arrays[0]), count, replace=False)
        layers.sort()
        return [x[layers] for x in arrays]

    smallest_share = "–"
    if claim.null is not OFFSETS:  # draws of OFFSETS cannot be mixed
        for share in SHARES:
            if often(partial(mixed, share)):
                smallest_share = f"{share:.0%}"
                break
    fewest_layers = "–"
    for count in range(2, len(arrays[0]) + 1):
        if often(partial(random_layers, count)):
            fewest_layers = str(count)
            break
    return smallest_share, fewest_layers


def holds(claim: Claim, arrays: list[np.ndarray], random: np.random.Generator) -> bool:
    with contextlib.suppress(IndexError):  # the claim needs more layers
        named = dict(zip(claim.arrays, arrays, strict=True))
        return judge(claim, named, random, DRAWS)["verdict"] == "holds"
    return False


if __name__ == "__main__":
    main()
