"""Edits that give planes of heads of a live model a new frequency or a gain in a block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ropelens.arguments import Bounds, Number, check_value, public
from ropelens.errors import BadArgument
from ropelens.interventions.plane_edits import Edit, Rescale, Scale, Stop
from ropelens.interventions.rotation_edit import place_edits
from ropelens.interventions.save_warning import warned_if_saved
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.profiles.measures import complete_profile
from ropelens.rope.select import ALL_HEADS, ALL_PLANES, Selection, Slowest


@public
def stop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes stop rotating: they add the same amount to a score at every distance.

    `heads` is a list such as "3.5,4.*", or "full.*" for all heads of a kind of layers
    (`layer_type` of a profile).
    """
    return Stop(select=select, heads=heads)


@public
def stop_slowest(fraction: Number, *, heads: str = ALL_HEADS) -> Edit:
    """Stop the slowest `fraction` of the planes: p-RoPE with p = 1 - fraction.

    With all heads, a model of `rope_type` "default" then equals the same weights loaded as
    `rope_type` "proportional" with p (Barbero et al. 2024, arXiv 2410.06205).
    """
    return stop(Slowest(fraction), heads=heads)


@public
def drop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes add nothing to the scores, because their queries become 0.

    A head without any plane (and without coordinates that never rotate) attends evenly.
    """
    return scale(select, by=0, heads=heads)


@public
def scale(
    select: Selection,
    *,
    by: Number,
    keep_length: xr.Dataset | None = None,
    heads: str = ALL_HEADS,
) -> Edit:
    """Multiply the terms that the planes add to the scores by `by` (arXiv 2609.39929).

    0 is `drop`, and 1 changes nothing. If a plane is scaled twice, its factors multiply.

    With a profile of the model as `keep_length`, all terms of a head get one more factor. It
    keeps the length sqrt(sum_f |c_f|^2) of the coefficients of a score, for |c_f| = `q_norm` *
    `k_norm` of the profile, which are means over its text.
    """
    check_value("scale: by", by, Number, bounds=Bounds())
    if keep_length is not None:
        if not {"q_norm", "k_norm"} <= set(keep_length.variables):
            raise BadArgument(
                "scale needs the lengths of queries and keys to keep a length.",
                seen=f"a dataset of {', '.join(map(str, keep_length.data_vars))}"[:80],
                hint="keep_length=rl.profile(model, text)",
            )
        keep_length = complete_profile(keep_length)
    return Scale(select=select, heads=heads, by=float(by), keep_length=keep_length)


@public
def rescale(
    inv_freq: Sequence[Number]
    | Float[Tensor, " frequency"]
    | Float[np.ndarray, " frequency"],
    *,
    attention_factor: Number = 1.0,
    select: Selection = ALL_PLANES,
    heads: str = ALL_HEADS,
) -> Edit:
    """The planes rotate at `inv_freq` (rad/token, one frequency for every plane of a layer).

    Queries and keys in these planes are multiplied by `attention_factor`, as in YaRN.
    """
    return Rescale(
        select=select,
        heads=heads,
        inv_freq=torch.as_tensor(inv_freq, dtype=torch.float32, device="cpu"),
        gain=float(attention_factor),
    )


@public
@contextmanager
def edit_rope(model: Model, *edits: Edit | str) -> Iterator[None]:
    """Change the rotation of `model` by `edits` while the block runs.

    An edit may also be the name of a RoPE variant, such as "p-rope:0.75". Blocks nest, and
    their edits add up. Everything that runs the model uses the edited model: calls, generation
    with a cache, `profile`, `measure_rope`. Planes that no edit chooses keep every bit. The
    model is restored on exit, also after an error. The block belongs to the thread or task that
    opened it, and other threads and tasks cannot call the model. The weights do not change, so
    `model.save_pretrained` in the block warns and saves the model without the edits; `export`
    saves the edited model.

    Raises `UnsupportedModel` for a model that does not rotate or hides its attention, and
    `BadArgument` for planes, heads or a variant that do not exist. When the model runs, a cache
    that drops keys raises `UnsupportedModel`, as does a bridge with a key-value cache, or with
    edits that make query heads differ that share a key-value head.
    """
    live = as_live_model(model)
    rotation_edit = place_edits(RotationProbe(live), edits)
    with live.intervene(rotation_edit), warned_if_saved(live.model):
        yield
