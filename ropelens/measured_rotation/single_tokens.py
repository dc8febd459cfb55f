"""Queries, keys and values of single tokens, each as a sequence of its own, at any position."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall
from ropelens.checkpoints.not_finite import in_dtype, remedy
from ropelens.errors import UnsupportedModel
from ropelens.measured_rotation.read import MeasuredRotation, read_rotation
from ropelens.model.live_model import LiveModel
from ropelens.model.model_noise import CHANGED_WEIGHT, changed_embeddings
from ropelens.noise import allowed_residual


@dataclass(frozen=True)
class ProbeSettings:
    """Numbers of runs of a probe, and further work.

    Each of the different `tokens` runs again at the first position, which shows noise: first
    `repeats` times, then `rounded` times with embeddings that are rounded otherwise. If the
    probe `forgets_length`, RoPE that depends on the length first gets the rotation of a short
    sequence. If it `finds_axes`, three more passes find the axis of each plane of M-RoPE.
    """

    tokens: int
    repeats: int
    rounded: int
    forgets_length: bool
    finds_axes: bool


FULL = ProbeSettings(
    tokens=4, repeats=4, rounded=4, forgets_length=True, finds_axes=True
)
BRIEF = ProbeSettings(
    tokens=2, repeats=2, rounded=2, forgets_length=False, finds_axes=False
)
"""One pass of at most 60 tokens. The sequence that the model ran before must be short."""


@dataclass(frozen=True)
class SingleTokenProbe:
    """Queries and keys (`vectors`) and values of one layer for sequences of one token.

    Some models scale queries by their position (Ministral 3, Llama 4). `vectors` are divided by
    this factor, `query_scale`.
    """

    positions: Int[Tensor, "*axis position"]
    vectors: Float[Tensor, "vector position coordinate"]
    values: Float[Tensor, "token position kv_head feature"]
    scale: float
    query_scale: Float[Tensor, " position"]
    noise: Float[Tensor, " coordinate"]  # rounding noise of `vectors`, in their units
    value_noise: float  # relative to the size of the values

    def query_scales(self) -> dict[int, float]:
        """`query_scale` by position."""
        scales = zip(self.positions.tolist(), self.query_scale.tolist(), strict=True)
        return dict(scales)

    def rotation(self, counts: list[int]) -> MeasuredRotation:
        """The rotation of the vectors; `counts` are the numbers of planes to try first."""
        return read_rotation(
            self.vectors, self.positions, noise=self.noise, counts=counts
        )


def probe_tokens(vocabulary: int, count: int) -> Int[Tensor, " token"]:
    """The different tokens of a probe."""
    number = torch.arange(1, 1 + count, device="cpu")
    return number * vocabulary // 6


@torch.no_grad()
def probe_single_tokens(
    live: LiveModel,
    positions: Int[Tensor, "*axis position"],
    *,
    settings: ProbeSettings = FULL,
) -> dict[int, SingleTokenProbe]:
    """Run a few tokens, each as a sequence of its own at each of `positions`, without edits.

    The differences of several runs at the first position are noise. Some of them have rounded
    embeddings, because a few models (gpt-oss in half precision) amplify such rounding.
    """
    runs = TokenRuns(
        class_name=live.class_name,
        tokens=probe_tokens(live.vocabulary, settings.tokens),
        settings=settings,
        given=positions,
        row_scales=_row_scales(live.model, positions),
        eps=live.eps,
    )
    tokens = runs.tokens.repeat_interleave(runs.count)[:, None]
    position_ids = torch.cat([runs.positions] * settings.tokens, dim=-1)[..., None]
    is_rounded = torch.arange(runs.count, device="cpu") >= runs.first_rounded
    change = live.eps / 2 * is_rounded.float().repeat(settings.tokens)
    with live.without_hooks(), _autocast(live.model, live.device.type):
        if live.depends_on_length and settings.forgets_length:
            live.forward(tokens[:1])  # a short sequence resets dynamic RoPE
        with changed_embeddings(live.model, change):
            return live.record_calls(tokens, runs.read, position_ids)


def _autocast(model: PreTrainedModel, device: str) -> AbstractContextManager:
    """The autocast that is open, for a model of several dtypes, which runs only under it."""
    dtypes = {x.dtype for x in model.parameters() if x.is_floating_point()}
    enabled = len(dtypes) > 1 and torch.is_autocast_enabled(device)
    return torch.autocast(device, torch.get_autocast_dtype(device), enabled=enabled)


@dataclass(frozen=True)
class Repeats:
    """Runs at the first position whose change, multiplied by `weight`, is noise."""

    runs: slice
    weight: float


@dataclass(frozen=True)
class TokenRuns:
    """Runs of each token: at the `given` positions, and then again at the first position."""

    class_name: str
    tokens: Int[Tensor, " token"]
    settings: ProbeSettings
    given: Int[Tensor, "*axis position"]
    row_scales: dict[int, Float[Tensor, "*axis position"]]  # by layer
    eps: float

    @property
    def first_repeat(self) -> int:
        """Number of the first run that shows noise."""
        return self.given.shape[-1]

    @property
    def first_rounded(self) -> int:
        """Number of the first run whose embeddings are rounded otherwise."""
        return self.first_repeat + self.settings.repeats

    @property
    def count(self) -> int:
        """Number of runs of each token."""
        return self.first_rounded + self.settings.rounded

    @property
    def positions(self) -> Int[Tensor, "*axis run"]:
        first = self.given[..., :1]
        count = self.settings.repeats + self.settings.rounded
        repeats = first.expand(*first.shape[:-1], count)
        return torch.cat([self.given, repeats], dim=-1)

    @property
    def repeats(self) -> tuple[Repeats, Repeats]:
        return (
            Repeats(slice(self.first_repeat, self.first_rounded), weight=1.0),
            Repeats(slice(self.first_rounded, None), weight=CHANGED_WEIGHT),
        )

    def read(self, call: AttentionCall) -> SingleTokenProbe:
        query = self._by_token(call.query)
        key = self._by_token(call.key)
        values = self._by_token(call.value)
        if not (query.isfinite().all() and key.isfinite().all()):
            what = f"{self.class_name} has queries or keys that are NaN or infinite."
            dtype = call.query.dtype
            hint = remedy(
                dtype,
                "finite weights; others are in [name for name, weight in "
                "model.named_parameters() if not weight.isfinite().all()]",
            )
            seen = f"layer {call.layer} {in_dtype(dtype)}"
            raise UnsupportedModel(what, seen=seen, hint=hint)
        query_scale = self._query_scale(query)
        query = query / query_scale[:, None, None]
        vectors = torch.cat([query, key], dim=2).transpose(1, 2).flatten(0, 1)
        row_scale = self.row_scales.get(call.layer, 1)
        return SingleTokenProbe(
            positions=self.given,
            vectors=vectors[:, : self.first_repeat],
            values=values[:, : self.first_repeat],
            scale=float(call.scale),
            query_scale=query_scale[: self.first_repeat] * row_scale,
            noise=self._noise(vectors),
            value_noise=self._value_noise(values),
        )

    def _by_token(
        self, x: Float[Tensor, "sequence head 1 coordinate"]
    ) -> Float[Tensor, "token run head coordinate"]:
        return x[:, :, 0].double().cpu().unflatten(0, (self.settings.tokens, -1))

    def _query_scale(
        self, query: Float[Tensor, "token run head coordinate"]
    ) -> Float[Tensor, " run"]:
        """Length of the queries relative to the first position; 1 if noise explains it."""
        length = query.square().sum((0, 2, 3)).sqrt()
        scale = (length / length[0]).nan_to_num(1)
        change = (scale - 1).abs()
        noise = [
            repeats.weight * float(change[repeats.runs].max())
            for repeats in self.repeats
        ]
        allowed = allowed_residual(max(noise), self.eps)
        return scale.where(change > allowed, 1)

    def _noise(
        self, vectors: Float[Tensor, "vector run coordinate"]
    ) -> Float[Tensor, " coordinate"]:
        noise = []
        for repeats in self.repeats:
            change = vectors[:, repeats.runs] - vectors[:, :1]
            noise.append((repeats.weight * change).square().mean((0, 1)).sqrt())
        smallest = self.eps * vectors.square().mean().sqrt()
        return torch.stack(noise).amax(0).clamp(min=smallest)

    def _value_noise(self, values: Float[Tensor, "token run kv_head feature"]) -> float:
        return max(
            repeats.weight * relative_change(values[:, repeats.runs], values[:, :1])
            for repeats in self.repeats
        )


def _row_scales(
    model: PreTrainedModel, positions: Int[Tensor, "*axis position"]
) -> dict[int, Float[Tensor, "*axis position"]]:
    """Factor on queries of some layers of Llama 4, which depends on the row of the query.

    Sequences of one token have only the first row.
    """
    scales = {}
    for module in model.modules():
        settings = vars(module)
        if settings.get("attn_temperature_tuning") and not settings["use_rope"]:
            steps = (positions + 1) // settings["floor_scale"]
            scale = 1 + settings["attn_scale"] * steps.double().log1p()
            scales[settings["layer_idx"]] = scale
    return scales


def relative_change(x: Tensor, reference: Tensor) -> float:
    """Root mean square difference, relative to the size of `reference`."""
    size = reference.square().mean().sqrt().clamp(min=1e-30)
    return float((x - reference).square().mean().sqrt() / size)
