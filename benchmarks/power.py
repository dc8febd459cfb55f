"""How small an effect each claim of the ledger would still find in a model of this size.

    python benchmarks/power.py PROFILE.nc [--trials N]

Of every claim about a profile: its number; the number from which it would hold; the share of
the model's effect that is found four times in five (arrays are the model's mixed with one draw
of their null, in this share); and how many of its layers, drawn at random, show it as often.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import numpy as np

import ropelens as rl
from ropelens.claims.arrays import claim_arrays
from ropelens.claims.claims import CLAIMS
from ropelens.claims.ledger import ledger
from ropelens.claims.nulls import FREQUENCIES, OFFSETS
from ropelens.claims.verdict import Claim, judge

DRAWS, OFTEN = 120, 0.8
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--trials", type=int, default=30)
    options = parser.parse_args()
    profile = rl.open(options.profile)
    arrays, rows = claim_arrays(profile), ledger(profile).set_index("claim")
    print("claim | number | holds from | share of the effect found | layers that show it")
    for claim in CLAIMS:
        if claim.null is FREQUENCIES or not arrays.keys() >= {*claim.arrays}:
            continue
        of, row = [arrays[name] for name in claim.arrays], rows.loc[claim.name]
        found, layers = smallest(claim, of, options.trials)
        print(
            f"{claim.name} | {row['number']:.3g} | {row['threshold']:.3g} | {found} | {layers}"
        )


def smallest(claim: Claim, of: list[np.ndarray], trials: int) -> tuple[str, str]:
    """The least share of the effect, and the fewest layers, with which the claim holds."""
    random = np.random.default_rng(0)

    def often(trial) -> bool:
        return sum(holds(claim, trial(), random) for _ in range(trials)) >= OFTEN * trials

    drawn = [*claim.null.draw(tuple(of), random, 10 * trials)]

    def mixed(share: float) -> list[np.ndarray]:
        other = drawn[random.integers(len(drawn))]
        return [share * x + (1 - share) * y for x, y in zip(of, other, strict=True)]

    def some(count: int) -> list[np.ndarray]:
        at = np.sort(random.choice(len(of[0]), count, replace=False))
        return [x[at] for x in of]

    shares = SHARES if claim.null is not OFFSETS else ()  # a draw of it is another offset
    found = next((s for s in shares if often(lambda s=s: mixed(s))), None)
    counts = range(2, len(of[0]) + 1)
    layers = next((n for n in counts if often(lambda n=n: some(n))), None)
    return (f"{found:.0%}" if found else "–"), (str(layers) if layers else "–")


def holds(claim: Claim, of: list[np.ndarray], random: np.random.Generator) -> bool:
    with contextlib.suppress(IndexError):  # of fewer layers than the number is made of
        named = dict(zip(claim.arrays, of, strict=True))
        return judge(claim, named, random, DRAWS)["verdict"] == "holds"
    return False


if __name__ == "__main__":
    main()
