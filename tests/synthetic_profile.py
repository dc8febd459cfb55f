"""A plausible profile without a model: the same dims, names, units and attributes.

Positional heads are in early layers and use short wavelengths. All numbers are made up, but
shares sum to one and bits to the total.
"""

from dataclasses import dataclass

import numpy as np
import xarray as xr

import ropelens as rl
from ropelens.attention.formulas import GAINS
from ropelens.attention.visibility import offset_edges
from ropelens.profiles.measures import missing_measures

BASE = 10_000.0
SCALE = 0.4
KINDS = ("positional", "semantic", "mixed", "sink", "diffuse")
HEAD = ("layer", "head")
PLANE = ("layer", "head", "frequency")
KEY_PLANE = ("layer", "kv_head", "frequency")
STORY = (
    " Once upon a time , there was a little girl named Lily . She loved to play in the park"
    " with her big red ball .\n One day , Lily saw a small cat in the park . The cat loved"
    " the big red ball too . Lily and the cat played in the park all day .\n They were"
    " happy ."
)
Array = np.ndarray
Random = np.random.Generator
UNITS = {
    "wavelength": "tokens",
    "offset_start": "tokens",
    "offset_stop": "tokens",
    "selectivity": "nats",
    "predicted_kernel": "nats",
    "inv_freq": "rad/token",
}


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
):
    """A seeded profile and its heads. `unrotated` adds an entry for partial rotary."""
    rng = np.random.default_rng(seed)
    kv_heads = kv_heads or max(1, heads // 2)
    kinds = _kinds(layers, heads, rng)
    looks_back = rng.integers(0, 5, size=(layers, heads))
    wavelength = _wavelengths(layers, frequencies, unrotated=unrotated)
    edges = offset_edges(context).clip(max=context).numpy()
    offsets = Offsets(start=edges[:-1], stop=edges[1:])
    variables = {
        **_planes(kinds, kv_heads, wavelength, rng),
        **_budget(kinds, rng),
        **_offsets(kinds, looks_back, offsets, rng),
        **_excerpts(kinds, kv_heads, wavelength, excerpt, rng),
    }
    variables.update(_groups(variables, rng))
    variables.update(_surrogates(variables, wavelength, rng))
    coordinates = {
        "inv_freq": (("layer", "frequency"), 2 * np.pi / wavelength),
        "wavelength": (("layer", "frequency"), wavelength),
        "offset_start": ("offset_bin", offsets.start),
        "offset_stop": ("offset_bin", offsets.stop),
    }
    profile = xr.Dataset(variables, coords=coordinates, attrs=_attributes(context))
    profile = profile.set_coords("excerpt_token")
    _add_missing_measures(profile)
    _describe(profile)
    table = rl.classify_heads(profile, resamples=2)
    table["confidence"] = np.round(0.45 + 0.55 * rng.beta(4, 0.7, size=len(table)), 3)
    return profile, table


@dataclass(frozen=True, eq=False)
class Offsets:
    """The first offset of each bin, and the first one after it."""

    start: Array
    stop: Array

    @property
    def width(self) -> Array:
        return self.stop - self.start

    @property
    def share_of_queries(self) -> Array:
        """Share of the queries that have a key at the offset."""
        return 1 - self.start / int(self.stop[-1])


def _kinds(layers: int, heads: int, rng: Random) -> Array:
    """The kind of each head: more are positional in early layers."""
    kinds = np.empty((layers, heads), dtype=object)
    for layer in range(layers):
        depth = layer / max(layers - 1, 1)
        weights = np.array([0.6 - 0.45 * depth, 0.12 + 0.45 * depth, 0.13, 0.08, 0.07])
        kinds[layer] = rng.choice(KINDS, size=heads, p=weights / weights.sum())
    return kinds


def _wavelengths(layers: int, frequencies: int, *, unrotated: bool) -> Array:
    """Wavelengths [layer, plane]; infinity for coordinates that do not rotate."""
    rotated = frequencies - 1 if unrotated else frequencies
    wavelength = 2 * np.pi * BASE ** (np.arange(rotated) / rotated)
    if unrotated:
        wavelength = np.append(wavelength, np.inf)
    return np.tile(wavelength, (layers, 1))


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


def _add_missing_measures(profile: xr.Dataset) -> None:
    """Add 0.5 for the measures that no function below describes."""
    for measure in missing_measures(profile):
        shape = [profile.sizes.get(dim, 2) for dim in measure.saved_dims]  # 2 parts
        profile[measure.name] = (measure.saved_dims, np.full(shape, 0.5))


def _describe(profile: xr.Dataset) -> None:
    """Add a description and units to each variable."""
    for name, variable in profile.variables.items():
        is_in_bits = str(name).endswith(("_bits", "_gain"))
        variable.attrs = {
            "long_name": str(name).replace("_", " "),
            "units": "bits" if is_in_bits else UNITS.get(str(name), "1"),
        }


def excerpt_tokens(count: int) -> list[str]:
    """The first tokens of the story, which is repeated as often as necessary."""
    tokens = ["<s>"]
    for word in STORY.replace("\n", " \n").split(" ")[1:]:
        tokens.append(word if word in ",.\n" else f" {word}")
    repeats = count // len(tokens) + 1
    return (tokens * repeats)[:count]


def by_kind(kinds: Array, otherwise: object, **values: object) -> Array:
    """The value of the kind of each head."""
    conditions = [kinds == kind for kind in values]
    return np.select(conditions, list(values.values()), otherwise)


def _planes(kinds: Array, kv_heads: int, wavelength: Array, rng: Random) -> dict:
    place = np.linspace(0, 1, wavelength.shape[1])
    centre = by_kind(kinds, 0.78, positional=0.22, mixed=0.45)[..., None]
    noise = rng.gamma(8, 1 / 8, size=(*kinds.shape, len(place)))
    bump = np.exp(-(((place - centre) / 0.16) ** 2)) * noise
    strength = by_kind(kinds, 1.0, diffuse=0.05, sink=0.4)[..., None]
    coherence = by_kind(kinds, 0.15, positional=0.85, mixed=0.5)[..., None]
    push = strength * (1.6 * bump - 0.06)
    q_norm = 0.5 * noise + 2.2 * bump * strength
    q_coherence = np.clip(coherence * bump + 0.1 * noise, 0, 1)
    k_norm = _mean_of_group(q_norm, kv_heads)
    k_coherence = _mean_of_group(q_coherence, kv_heads)
    return {
        "k_norm": (KEY_PLANE, k_norm),
        "k_coherence": (KEY_PLANE, k_coherence),
        "v_norm": (KEY_PLANE, np.ones_like(k_norm)),
        "q_norm": (PLANE, q_norm),
        "q_coherence": (PLANE, q_coherence),
        "selectivity": (PLANE, 1.1 * push),
        "selectivity_keys": (PLANE, push),
        "selectivity_sink": (PLANE, 0.1 * push),
    }


def _mean_of_group(by_head: Array, kv_heads: int) -> Array:
    """Mean over the heads that share a key head."""
    layers, _, planes = by_head.shape
    return by_head.reshape(layers, kv_heads, -1, planes).mean(2)


def _budget(kinds: Array, rng: Random) -> dict:
    bits = 1.0 + 3.5 * rng.beta(2, 2, size=kinds.shape)
    total = np.where(kinds == "diffuse", 0.06, bits)
    little = 0.04 + 0.3 * rng.beta(1, 3, size=kinds.shape)
    sink = np.where(kinds == "sink", 0.95, little)
    lean = by_kind(kinds, 0.02, positional=0.72, mixed=0.4)
    lean = lean + 0.25 * rng.random(kinds.shape)
    share = rng.random(kinds.shape)
    keys = total * (1 - sink)
    by_head = {
        "total_bits": total,
        "sink_bits": total * sink,
        "position_bits": keys * lean,
        "content_bits": keys * (1 - lean) * 0.98,
        "interaction_bits": keys * (1 - lean) * 0.02,
        "shared_bits": 0.3 * total * (1 - sink) * (1 - lean),
        "follows_position": 0.05 + 0.7 * lean + 0.2 * share,
        "follows_content": 0.85 - 0.7 * lean - 0.1 * share,
        "follows_chance": 0.05 + 0.1 * share,
        "follow_score": (1.4 * lean + 0.3 * share - 0.8) / (0.95 - 0.1 * share),
        "entropy_bits": np.maximum(0.2, 7.4 - total) + 0.1 * share,
        "sink_mass": np.clip(sink, 0.01, 0.95),
        "self_mass": 0.2 * share,
        "previous_token": 0.3 * (1 - share) * lean,
        "induction": np.where(kinds == "semantic", share**2, 0.02),
        "duplicate_token": np.where(kinds == "semantic", (1 - share) ** 2, 0.01),
        "learned_sink_mass": np.zeros(kinds.shape),
    }
    variables: dict[str, object] = {}
    for name, values in by_head.items():
        variables[name] = (HEAD, values)
    factor = np.linspace(0.9, 1.1, 8)[:, None, None]
    trials = by_head["induction"] * factor
    variables["trial_induction"] = (("trial", *HEAD), trials)
    return variables


def _offsets(kinds: Array, looks_back: Array, offsets: Offsets, rng: Random) -> dict:
    start = offsets.start
    stop = offsets.stop
    width = offsets.width
    peak = np.exp(-np.abs(start - looks_back[..., None]) * 1.8)
    decay = (1.0 + start) ** -1.1
    height = by_kind(kinds, 0.03, positional=6.0, mixed=1.0)[..., None]
    noise = rng.gamma(20, 1 / 20, size=(*kinds.shape, len(start)))
    kernel = height * peak + decay * noise
    on_sinks = np.where(kinds == "sink", 0.9, 0.1)[..., None]
    kernel *= (1 - on_sinks) / (kernel * width).sum(-1, keepdims=True)
    mass = kernel * width * offsets.share_of_queries
    mass = mass / mass.sum(-1, keepdims=True) * (1 - on_sinks)
    share = kernel / (kernel * width).sum(-1, keepdims=True)
    below = (share * width).cumsum(-1)
    by_bin = (*HEAD, "offset_bin")
    return {
        "offset": (HEAD, start[kernel.argmax(-1)]),
        "offset_weight": (HEAD, share.max(-1)),
        "offset_low": (HEAD, start[(below < 0.25).sum(-1)]),
        "offset_high": (HEAD, stop[(below < 0.75).sum(-1)] - 1),
        "kernel": (by_bin, kernel),
        "offset_mass": (by_bin, mass),
        "predicted_kernel": (by_bin, np.log(height * peak + decay)),
        "offset_share": ("offset_bin", offsets.share_of_queries),
    }


def _excerpts(
    kinds: Array, kv_heads: int, wavelength: Array, count: int, rng: Random
) -> dict:
    """Two excerpts, the second half as long, with attention computed from queries and keys."""
    layers, heads = kinds.shape
    planes = int(np.isfinite(wavelength[0]).sum())
    size = 2 * wavelength.shape[1]
    query = rng.normal(0, 1, (2, layers, heads, count, size))
    key = rng.normal(0, 1, (2, layers, kv_heads, count, size))
    positional = (kinds == "positional")[None, :, :, None, None]
    alike = query.mean(3, keepdims=True) + 0.2 * query
    query = _rounded(np.where(positional, alike, query))
    key = _rounded(key)
    key_of_head = key[:, :, np.arange(heads) * kv_heads // heads]
    turns = np.exp(2j * np.pi * np.arange(count)[:, None] / wavelength[0, :planes])
    q = _turned(query, turns)
    k = _turned(key_of_head, turns)
    scores = SCALE * (q @ k.conj().swapaxes(-1, -2)).real
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(count)
    attention = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    tokens = np.array([excerpt_tokens(count)] * 2, dtype=object)
    half = count // 2
    tokens[1, half:] = ""
    query[1, :, :, half:] = np.nan
    key[1, :, :, half:] = np.nan
    attention[1, :, :, half:] = np.nan
    attention[1, :, :, :, half:] = np.nan
    by_query = ("excerpt", "layer", "head", "excerpt_query")
    return {
        "excerpt_token": (("excerpt", "excerpt_key"), tokens),
        "excerpt_length": ("excerpt", np.array([count, half])),
        "excerpt_planes": ("layer", np.full(layers, planes)),
        "excerpt_scale": ("layer", np.full(layers, SCALE)),
        "excerpt_attention": ((*by_query, "excerpt_key"), attention),
        "excerpt_query_still": ((*by_query, "coordinate"), query),
        "excerpt_key_still": (
            ("excerpt", "layer", "kv_head", "excerpt_key", "coordinate"),
            key,
        ),
    }


def _rounded(vectors: Array) -> Array:
    """Vectors as a profile saves them."""
    return vectors.astype(np.float16).astype(np.float32)


def _turned(still: Array, turns: Array) -> Array:
    """Complex vectors with rotated planes, followed by the coordinates without rotation."""
    count = turns.shape[1]
    planes = (still[..., :count] + 1j * still[..., count : 2 * count]) * turns
    return np.concatenate([planes, still[..., 2 * count :]], axis=-1)


def _groups(variables: dict, rng: Random) -> dict:
    total = variables["total_bits"][1]
    sink = variables["sink_bits"][1]
    position = variables["position_bits"][1]
    content = variables["content_bits"][1]
    gains = (total, sink, sink + position, sink + content, sink + position + content)
    spread = rng.gamma(60, 1 / 60, (8, *total.shape))
    by_group: dict[str, object] = {}
    for name, values in zip(GAINS, gains, strict=True):
        by_group[f"group_{name}"] = (("group", *HEAD), values * spread)
    by_group["group_rows"] = ("group", np.full(8, 2044))
    by_group["group_scored"] = ("group", np.full(8, 256))
    return by_group


def _surrogates(variables: dict, wavelength: Array, rng: Random) -> dict:
    """Numbers of the model, and of 40 surrogates with noise added to the wavelengths."""
    rotates = np.isfinite(wavelength)
    push = variables["selectivity_keys"][1].clip(min=1e-9) * rotates[:, None]
    log = np.log(np.where(rotates, wavelength, 1.0))[:, None]
    mean = (push * log).sum(-1) / push.sum(-1)
    total = variables["total_bits"][1]
    sink = variables["sink_bits"][1]
    position = variables["position_bits"][1]
    counts = (total >= 0.1) & (sink <= 0.9 * total)
    noise = rng.normal(0, 1, (41, *mean.shape))
    noise[0] = 0
    fraction = np.broadcast_to(position / (total - sink), noise.shape)
    by_draw = ("draw", *HEAD)
    return {
        "surrogate_offset_fraction": (by_draw, np.where(counts, fraction, np.nan)),
        "surrogate_log_wavelength": (by_draw, np.where(counts, mean + noise, np.nan)),
    }
