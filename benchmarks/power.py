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
NEVER = "–"
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
        trials = Trials(claim, values, options.trials)
        share = trials.smallest_share()
        layers = trials.fewest_layers()
        print(
            f"{claim.name} | {row['number']:.3g} | {row['threshold']:.3g} | {share} | {layers}"
        )


class Trials:
    """Trials of a claim with weaker effects or fewer layers than in the model."""

    def __init__(self, claim: Claim, arrays: list[np.ndarray], number: int) -> None:
        self.claim = claim
        self.arrays = arrays
        self.number = number
        self.random = np.random.default_rng(0)
        draws = claim.null.draw(tuple(arrays), self.random, 10 * number)
        self.without_effect = list(draws)

    def smallest_share(self) -> str:
        """The smallest share of the effect with which the claim holds."""
        if self.claim.null is OFFSETS:  # draws of OFFSETS cannot be mixed
            return NEVER
        for share in SHARES:
            if self.holds_often(partial(self.mixed, share)):
                return f"{share:.0%}"
        return NEVER

    def fewest_layers(self) -> str:
        """The fewest layers with which the claim holds."""
        for count in range(2, len(self.arrays[0]) + 1):
            if self.holds_often(partial(self.random_layers, count)):
                return str(count)
        return NEVER

    def holds_often(self, trial: Callable[[], list[np.ndarray]]) -> bool:
        held = 0
        for _ in range(self.number):
            held += holds(self.claim, trial(), self.random)
        return held >= OFTEN * self.number

    def mixed(self, share: float) -> list[np.ndarray]:
        """The arrays of the model, mixed with one draw of their null."""
        other = self.without_effect[self.random.integers(len(self.without_effect))]
        pairs = zip(self.arrays, other, strict=True)
        return [share * x + (1 - share) * y for x, y in pairs]

    def random_layers(self, count: int) -> list[np.ndarray]:
        layers = self.random.choice(len(self.arrays[0]), count, replace=False)
        layers.sort()
        return [x[layers] for x in self.arrays]


def holds(claim: Claim, arrays: list[np.ndarray], random: np.random.Generator) -> bool:
    with contextlib.suppress(IndexError):  # the claim needs more layers
        named = dict(zip(claim.arrays, arrays, strict=True))
        return judge(claim, named, random, DRAWS)["verdict"] == "holds"
    return False


if __name__ == "__main__":
    main()
