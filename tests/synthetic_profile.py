"""A plausible profile without a model: the same dims, names, units and attributes.

Positional heads are in early layers and use short wavelengths. All numbers are made up, but
shares sum to one and bits to the total.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

import ropelens as rl
from ropelens.attention.formulas import GAINS
from ropelens.attention.visibility import offset_edges
from ropelens.profiles.measures import missing_measures

BASE = 10_000.0
SCALE = 0.4
GROUPS = 8
SURROGATES = 40
LABELS = ("positional", "semantic", "mixed", "sink", "diffuse")
HEAD = ("layer", "head")
PLANE = ("layer", "head", "frequency")
KEY_PLANE = ("layer", "kv_head", "frequency")
OFFSET = ("layer", "head", "offset_bin")
STORY = (
    " Once upon a time , there was a little girl named Lily . She loved to play in the park"
    " with her big red ball .\n One day , Lily saw a small cat in the park . The cat loved"
    " the big red ball too . Lily and the cat played in the park all day .\n They were"
    " happy ."
)
UNITS = {
    "wavelength": "tokens",
    "offset_start": "tokens",
    "offset_stop": "tokens",
    "selectivity": "nats",
    "predicted_kernel": "nats",
    "inv_freq": "rad/token",
}
Array = np.ndarray
Random = np.random.Generator
Variables = dict[str, tuple[str | tuple[str, ...], Array]]
"""Dimensions and values by name."""


def synthetic_profile(
    *,
    layers: int = 5,
    heads: int = 8,
    kv_heads: int | None = None,
    frequencies: int = 16,
    unrotated: bool = False,
    context: int = 512,
    excerpt: int = 48,
    seed: int = 0,
) -> tuple[xr.Dataset, pd.DataFrame]:
    """A seeded profile and its heads. `unrotated` adds an entry for partial rotary."""
    rng = np.random.default_rng(seed)
    kv_heads = kv_heads or max(1, heads // 2)
    drawn = _draw_heads(layers, heads, rng)
    wavelength = _wavelengths(layers, frequencies, unrotated=unrotated)
    edges = offset_edges(context).clip(max=context).numpy()
    # All functions below draw from `rng`, so their order matters.
    data: Variables = {}
    data.update(_planes(drawn.labels, kv_heads, wavelength, rng))
    data.update(_budget(drawn.labels, rng))
    data.update(_offsets(drawn, edges, rng))
    data.update(_excerpts(drawn.labels, kv_heads, wavelength, excerpt, rng))
    data.update(_groups(data, rng))
    data.update(_surrogates(data, wavelength, rng))
    data.update(_axes(wavelength, edges))
    profile = xr.Dataset(data, attrs=_attributes(context)).set_coords(
        ["inv_freq", "wavelength", "offset_start", "offset_stop", "excerpt_token"]
    )
    _fill_missing_measures(profile)
    _describe(profile)
    table = rl.classify_heads(profile, resamples=2)
    table["confidence"] = _confidences(len(table), rng)
    return profile, table


@dataclass(frozen=True, eq=False)
class DrawnHeads:
    """The label [layer, head] that each head is made for, and the offset at which it looks."""

    labels: Array
    looks_back: Array


def _draw_heads(layers: int, heads: int, rng: Random) -> DrawnHeads:
    """Draw heads: from layer to layer, fewer are positional and more are semantic."""
    labels = np.empty((layers, heads), dtype=object)
    for layer in range(layers):
        depth = layer / max(layers - 1, 1)
        positional = 0.6 - 0.45 * depth
        semantic = 0.12 + 0.45 * depth
        weights = np.array([positional, semantic, 0.13, 0.08, 0.07])
        labels[layer] = rng.choice(LABELS, size=heads, p=weights / weights.sum())
    looks_back = rng.integers(0, 5, size=(layers, heads))
    return DrawnHeads(labels, looks_back)


def _wavelengths(layers: int, frequencies: int, *, unrotated: bool) -> Array:
    """Wavelengths [layer, frequency] of RoPE, the same in all layers."""
    rotated = frequencies - 1 if unrotated else frequencies
    of_layer = 2 * np.pi * BASE ** (np.arange(rotated) / rotated)
    if unrotated:
        of_layer = np.append(of_layer, np.inf)
    return np.tile(of_layer, (layers, 1))


def excerpt_tokens(count: int) -> list[str]:
    tokens = ["<s>"]
    words = STORY.replace("\n", " \n").split(" ")[1:]
    for word in words:
        tokens.append(word if word in ",.\n" else f" {word}")
    repeats = count // len(tokens) + 1
    return (tokens * repeats)[:count]


def by_label(labels: Array, otherwise: object, **values: object) -> Array:
    """The value of each head's label, or `otherwise`."""
    conditions = [labels == label for label in values]
    return np.select(conditions, list(values.values()), otherwise)


def _axes(wavelength: Array, edges: Array) -> Variables:
    return {
        "inv_freq": (("layer", "frequency"), 2 * np.pi / wavelength),
        "wavelength": (("layer", "frequency"), wavelength),
        "offset_start": ("offset_bin", edges[:-1]),
        "offset_stop": ("offset_bin", edges[1:]),
    }


def _attributes(context: int) -> dict[str, object]:
    return {
        "kind": "profile",
        "model": "toy/llama-5l",
        "revision": "0123abcd",
        "dtype": "float32",
        "seed": 0,
        "context": context,
        "trained_context": context,
        "sequences": 32,
        "rows": "all",
        "tokens": 32 * context,
        "loss": 1.2345,
        "loss_se": 0.0123,
        "versions": '{"ropelens": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}',
        "command": "ropelens analyze toy/llama-5l --text stories --out out",
        "text": "stories (5 files, 16,384 tokens)",
        "created": "2026-01-02T03:04:05+00:00",
    }


def _fill_missing_measures(profile: xr.Dataset) -> None:
    """Add the measures that no function of this file makes."""
    for measure in missing_measures(profile):
        # The profile lacks the dimension "part", which has a size of 2.
        shape = [profile.sizes.get(dim, 2) for dim in measure.saved_dims]
        profile[measure.name] = (measure.saved_dims, np.full(shape, 0.5))


def _describe(profile: xr.Dataset) -> None:
    """Write names and units."""
    for key, variable in profile.variables.items():
        name = str(key)
        units = UNITS.get(name, "1")
        if name.endswith(("_bits", "_gain")):
            units = "bits"
        variable.attrs = {"long_name": name.replace("_", " "), "units": units}


def _confidences(count: int, rng: Random) -> Array:
    return np.round(0.45 + 0.55 * rng.beta(4, 0.7, size=count), 3)


def _planes(labels: Array, kv_heads: int, wavelength: Array, rng: Random) -> Variables:
    """Norms, coherences and pushes of each head; they are large in a bump of planes."""
    position = np.linspace(0, 1, wavelength.shape[1])
    centre = by_label(labels, 0.78, positional=0.22, mixed=0.45)[..., None]
    noise = rng.gamma(8, 1 / 8, size=(*labels.shape, len(position)))
    bump = np.exp(-(((position - centre) / 0.16) ** 2)) * noise
    strength = by_label(labels, 1.0, diffuse=0.05, sink=0.4)[..., None]
    coherence = by_label(labels, 0.15, positional=0.85, mixed=0.5)[..., None]
    push = strength * (1.6 * bump - 0.06)
    q_norm = 0.5 * noise + 2.2 * bump * strength
    q_coherence = np.clip(coherence * bump + 0.1 * noise, 0, 1)
    k_norm = _mean_of_groups(q_norm, kv_heads)
    return {
        "k_norm": (KEY_PLANE, k_norm),
        "k_coherence": (KEY_PLANE, _mean_of_groups(q_coherence, kv_heads)),
        "v_norm": (KEY_PLANE, np.ones_like(k_norm)),
        "q_norm": (PLANE, q_norm),
        "q_coherence": (PLANE, q_coherence),
        "selectivity": (PLANE, 1.1 * push),
        "selectivity_keys": (PLANE, push),
        "selectivity_sink": (PLANE, 0.1 * push),
    }


def _mean_of_groups(by_head: Array, kv_heads: int) -> Array:
    """Mean over the heads that share a key-value head."""
    layers, _, planes = by_head.shape
    return by_head.reshape(layers, kv_heads, -1, planes).mean(2)


@dataclass(frozen=True, eq=False)
class Traits:
    """Numbers [layer, head] from which the budget and the scores of a head follow.

    - total: bits in the choice of keys.
    - sink: share of sinks in these bits.
    - lean: share of the position in the bits without sinks.
    - chance: a number between 0 and 1 without a meaning.
    """

    total: Array
    sink: Array
    lean: Array
    chance: Array


def _draw_traits(labels: Array, rng: Random) -> Traits:
    size = labels.shape
    total = 1.0 + 3.5 * rng.beta(2, 2, size=size)
    sink = 0.04 + 0.3 * rng.beta(1, 3, size=size)
    lean = by_label(labels, 0.02, positional=0.72, mixed=0.4)
    return Traits(
        total=np.where(labels == "diffuse", 0.06, total),
        sink=np.where(labels == "sink", 0.95, sink),
        lean=lean + 0.25 * rng.random(size),
        chance=rng.random(size),
    )


def _budget(labels: Array, rng: Random) -> Variables:
    traits = _draw_traits(labels, rng)
    per_head = {**_bits(traits), **_follows(traits), **_scores(labels, traits)}
    data: Variables = {name: (HEAD, values) for name, values in per_head.items()}
    factors = np.linspace(0.9, 1.1, 8)[:, None, None]
    data["trial_induction"] = (("trial", *HEAD), per_head["induction"] * factors)
    return data


def _bits(traits: Traits) -> dict[str, Array]:
    total = traits.total
    sink = traits.sink
    lean = traits.lean
    besides_sinks = total * (1 - sink)
    return {
        "total_bits": total,
        "sink_bits": total * sink,
        "position_bits": besides_sinks * lean,
        "content_bits": besides_sinks * (1 - lean) * 0.98,
        "interaction_bits": besides_sinks * (1 - lean) * 0.02,
        "shared_bits": 0.3 * total * (1 - sink) * (1 - lean),
    }


def _follows(traits: Traits) -> dict[str, Array]:
    lean = traits.lean
    chance = traits.chance
    return {
        "follows_position": 0.05 + 0.7 * lean + 0.2 * chance,
        "follows_content": 0.85 - 0.7 * lean - 0.1 * chance,
        "follows_chance": 0.05 + 0.1 * chance,
        "follow_score": (1.4 * lean + 0.3 * chance - 0.8) / (0.95 - 0.1 * chance),
    }


def _scores(labels: Array, traits: Traits) -> dict[str, Array]:
    chance = traits.chance
    semantic = labels == "semantic"
    return {
        "entropy_bits": np.maximum(0.2, 7.4 - traits.total) + 0.1 * chance,
        "sink_mass": np.clip(traits.sink, 0.01, 0.95),
        "self_mass": 0.2 * chance,
        "previous_token": 0.3 * (1 - chance) * traits.lean,
        "induction": np.where(semantic, chance**2, 0.02),
        "duplicate_token": np.where(semantic, (1 - chance) ** 2, 0.01),
        "learned_sink_mass": np.zeros(labels.shape),
    }


def _peak(offset: Array, looks_back: Array) -> Array:
    """Height of a peak [layer, head, offset] at the offset at which a head looks."""
    distance = np.abs(offset - looks_back[..., None])
    return np.exp(-distance * 1.8)


def _offsets(drawn: DrawnHeads, edges: Array, rng: Random) -> Variables:
    """Kernels with a peak at the offset at which a head looks, over a slow decay."""
    start = edges[:-1]
    width = edges[1:] - start
    labels = drawn.labels
    peak = _peak(start, drawn.looks_back)
    height = by_label(labels, 0.03, positional=6.0, mixed=1.0)[..., None]
    decay = (1.0 + start) ** -1.1
    noise = rng.gamma(20, 1 / 20, size=(*labels.shape, len(start)))
    curve = height * peak + decay * noise
    besides_sinks = 1 - np.where(labels == "sink", 0.9, 0.1)
    kernel = curve * (besides_sinks / (curve * width).sum(-1))[..., None]
    visible = 1 - start / edges[-1]
    share = _shares(kernel * width * visible)
    return {
        **_typical_offsets(kernel, edges),
        "kernel": (OFFSET, kernel),
        "offset_mass": (OFFSET, share * besides_sinks[..., None]),
        "predicted_kernel": (OFFSET, np.log(height * peak + decay)),
        "offset_share": ("offset_bin", visible),
    }


def _shares(mass: Array) -> Array:
    return mass / mass.sum(-1, keepdims=True)


def _typical_offsets(kernel: Array, edges: Array) -> Variables:
    """The offset with the largest weight, and the middle half of the weights."""
    start = edges[:-1]
    stop = edges[1:]
    width = stop - start
    share = kernel / (kernel * width).sum(-1, keepdims=True)
    below = (share * width).cumsum(-1)
    first = (below < 0.25).sum(-1)
    last = (below < 0.75).sum(-1)
    return {
        "offset": (HEAD, start[kernel.argmax(-1)]),
        "offset_weight": (HEAD, share.max(-1)),
        "offset_low": (HEAD, start[first]),
        "offset_high": (HEAD, stop[last] - 1),
    }


@dataclass(frozen=True, eq=False)
class Vectors:
    """Vectors without rotation of excerpts.

    - query: [excerpt, layer, head, position, coordinate].
    - key: [excerpt, layer, kv_head, position, coordinate].
    """

    query: Array
    key: Array


def _draw_vectors(
    labels: Array, kv_heads: int, *, count: int, size: int, rng: Random
) -> Vectors:
    """Draw vectors in half precision; the queries of a positional head are nearly equal."""
    layers, heads = labels.shape
    query = rng.normal(0, 1, (2, layers, heads, count, size))
    key = rng.normal(0, 1, (2, layers, kv_heads, count, size))
    is_positional = (labels == "positional")[None, :, :, None, None]
    nearly_equal = query.mean(3, keepdims=True) + 0.2 * query
    query = np.where(is_positional, nearly_equal, query)
    return Vectors(_in_half_precision(query), _in_half_precision(key))


def _in_half_precision(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float32)


def _attention(vectors: Vectors, rotating: Array) -> Array:
    """Attention [excerpt, layer, head, query, key] for the wavelengths of rotating planes."""
    heads = vectors.query.shape[2]
    kv_heads = vectors.key.shape[2]
    count = vectors.query.shape[3]
    key_of_head = vectors.key[:, :, np.arange(heads) * kv_heads // heads]
    positions = np.arange(count)[:, None]
    turns = np.exp(2j * np.pi * positions / rotating)
    q = _turned(vectors.query, turns)
    k = _turned(key_of_head, turns)
    scores = SCALE * (q @ k.conj().swapaxes(-1, -2)).real
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest) * np.tri(count)
    attention = weights / weights.sum(-1, keepdims=True)
    return attention.astype(np.float32)


def _turned(still: Array, turns: Array) -> Array:
    """Complex vectors with rotated planes, followed by the coordinates without rotation."""
    count = turns.shape[1]
    real = still[..., :count]
    imaginary = still[..., count : 2 * count]
    unrotated = still[..., 2 * count :]
    turned = (real + 1j * imaginary) * turns
    return np.concatenate([turned, unrotated], axis=-1)


def _excerpts(
    labels: Array, kv_heads: int, wavelength: Array, count: int, rng: Random
) -> Variables:
    """Two excerpts with attention computed from queries and keys. The second is shorter."""
    layers = len(labels)
    half = count // 2
    rotating = wavelength[0][np.isfinite(wavelength[0])]
    size = 2 * wavelength.shape[1]
    vectors = _draw_vectors(labels, kv_heads, count=count, size=size, rng=rng)
    attention = _attention(vectors, rotating)
    tokens = np.array([excerpt_tokens(count)] * 2, dtype=object)
    tokens[1, half:] = ""
    vectors.query[1, :, :, half:] = np.nan
    vectors.key[1, :, :, half:] = np.nan
    attention[1, :, :, half:] = np.nan
    attention[1, :, :, :, half:] = np.nan
    queries = ("excerpt", "layer", "head", "excerpt_query")
    keys = ("excerpt", "layer", "kv_head", "excerpt_key")
    return {
        "excerpt_token": (("excerpt", "excerpt_key"), tokens),
        "excerpt_length": ("excerpt", np.array([count, half])),
        "excerpt_planes": ("layer", np.full(layers, len(rotating))),
        "excerpt_scale": ("layer", np.full(layers, SCALE)),
        "excerpt_attention": ((*queries, "excerpt_key"), attention),
        "excerpt_query_still": ((*queries, "coordinate"), vectors.query),
        "excerpt_key_still": ((*keys, "coordinate"), vectors.key),
    }


def _values(data: Variables, name: str) -> Array:
    _, values = data[name]
    return values


def _groups(data: Variables, rng: Random) -> Variables:
    """Gains of each group of sequences, which differ by a few percent."""
    total = _values(data, "total_bits")
    sink = _values(data, "sink_bits")
    position = _values(data, "position_bits")
    content = _values(data, "content_bits")
    gains = {
        "total": total,
        "sink_gain": sink,
        "position_gain": sink + position,
        "content_gain": sink + content,
        "both_gain": sink + position + content,
    }
    spread = rng.gamma(60, 1 / 60, (GROUPS, *total.shape))
    by_group: Variables = {}
    for name in GAINS:
        by_group[f"group_{name}"] = (("group", *HEAD), gains[name] * spread)
    by_group["group_rows"] = ("group", np.full(GROUPS, 2044))
    by_group["group_scored"] = ("group", np.full(GROUPS, 256))
    return by_group


def _surrogates(data: Variables, wavelength: Array, rng: Random) -> Variables:
    """A draw for the model, and draws for surrogates with noise added to the wavelengths."""
    rotates = np.isfinite(wavelength)[:, None]
    push = _values(data, "selectivity_keys").clip(min=1e-9) * rotates
    log = np.log(np.where(rotates, wavelength[:, None], 1.0))
    mean = (push * log).sum(-1) / push.sum(-1)
    total = _values(data, "total_bits")
    sink = _values(data, "sink_bits")
    counts = (total >= 0.1) & (sink <= 0.9 * total)
    noise = rng.normal(0, 1, (1 + SURROGATES, *mean.shape))
    noise[0] = 0
    fraction = _values(data, "position_bits") / (total - sink)
    fractions = np.broadcast_to(fraction, noise.shape)
    draws = ("draw", *HEAD)
    return {
        "surrogate_offset_fraction": (draws, np.where(counts, fractions, np.nan)),
        "surrogate_log_wavelength": (draws, np.where(counts, mean + noise, np.nan)),
    }
