"""What a profile keeps of its excerpts: tokens, and queries and keys without their rotation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.inputs import check_head, kv_heads


class Vectors(NamedTuple):
    """Queries and keys of a head on an excerpt, [position, coordinate], and how they turn.

    Coordinates are the planes' real parts, their imaginary parts, and what does not rotate;
    `inv_freq` (rad/token) is that of the planes, `scale` that of the scores.
    """

    query: np.ndarray
    key: np.ndarray
    inv_freq: np.ndarray
    scale: float

    def terms(self, query: int, key: int, distance: np.ndarray | int) -> np.ndarray:
        """What each plane adds to the score of a pair, in nats, were it `distance` apart.

        The last term is that of what does not rotate, where there is any. Shape: that of
        `distance`, then term.
        """
        count = len(self.inv_freq)
        q, k = (self.scale * self.query[query], self.key[key])
        product = (q[:count] + 1j * q[count : 2 * count]) * (
            k[:count] - 1j * k[count : 2 * count]
        )
        angle = np.multiply.outer(np.asarray(distance, float), self.inv_freq)
        turned = (product * np.exp(1j * angle)).real
        if len(q) == 2 * count:
            return turned
        rest = np.full((*turned.shape[:-1], 1), q[2 * count :] @ k[2 * count :])
        return np.concatenate([turned, rest], axis=-1)


def excerpt_tokens(profile: xr.Dataset, excerpt: int) -> list[str]:
    """The tokens of an excerpt. Raises `BadArgument` where the profile has no such excerpt."""
    if "excerpt_planes" not in profile:
        raise BadArgument(
            "This profile has no excerpts to look into: it is one of an earlier version.",
            attempt="measure it again: ropelens analyze, or ropelens.profile",
        )
    count = profile.sizes["excerpt"]
    if not 0 <= excerpt < count:
        raise BadArgument(f"There is no excerpt {excerpt}.", seen=f"{count}, counted from 0")
    length = int(profile["excerpt_length"][excerpt])
    return [str(token) for token in profile["excerpt_token"].values[excerpt, :length]]


def head_vectors(profile: xr.Dataset, *, layer: int, head: int, excerpt: int = 0) -> Vectors:
    """Queries and keys of a head; NaN where the profile does not keep them."""
    count = len(excerpt_tokens(profile, excerpt))
    check_head(profile, layer=layer, head=head)
    one = profile.isel(excerpt=excerpt, layer=layer)
    kv_head = int(kv_heads(profile)[layer, head])
    key = one["excerpt_key_still"].isel(kv_head=kv_head).values[:count]
    own = np.isfinite(key).all(0)  # layers of smaller heads end in NaN
    query = one["excerpt_query_still"].isel(head=head).values[:count]
    inv_freq = one["inv_freq"].values[: int(one["excerpt_planes"])]
    return Vectors(query[:, own], key[:, own], inv_freq, float(one["excerpt_scale"]))
