"""A plausible profile without a model: the same dims, names, units and attributes.

Positional heads are in early layers and use short wavelengths. All numbers are made up, but
shares sum to one and bits to the total.
"""

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
STORY = (
    " Once upon a time , there was a little girl named Lily . She loved to play in the park"
    " with her big red ball .\n One day , Lily saw a small cat in the park . The cat loved"
    " the big red ball too . Lily and the cat played in the park all day .\n They were"
    " happy ."
)
Array = np.ndarray
Random = np.random.Generator
UNITS = dict.fromkeys(("wavelength", "offset_start", "offset_stop"), "tokens")
UNITS["selectivity"] = "nats"
UNITS["predicted_kernel"] = "nats"
UNITS["inv_freq"] = "rad/token"


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
    kinds = np.empty((layers, heads), dtype=object)
    for layer in range(layers):
        depth = layer / max(layers - 1, 1)
        weights = np.array([0.6 - 0.45 * depth, 0.12 + 0.45 * depth, 0.13, 0.08, 0.07])
        kinds[layer] = rng.choice(KINDS, size=heads, p=weights / weights.sum())
    looks_back = rng.integers(0, 5, size=(layers, heads))
    rotated = frequencies - unrotated
    wavelength = 2 * np.pi * BASE ** (np.arange(rotated) / rotated)
    wavelength = np.tile(np.append(wavelength, [np.inf] * unrotated), (layers, 1))
    edges = offset_edges(context).clip(max=context).numpy()
    start = edges[:-1]
    stop = edges[1:]
    data = _planes(kinds, kv_heads, wavelength, rng) | _budget(kinds, rng)
    data |= _offsets(kinds, looks_back, start, stop, rng)
    data |= _excerpts(kinds, kv_heads, wavelength, excerpt, rng)
    data |= _groups(data, rng) | _surrogates(data, wavelength, rng)
    profile = xr.Dataset(
        data,
        coords={
            "inv_freq": (("layer", "frequency"), 2 * np.pi / wavelength),
            "wavelength": (("layer", "frequency"), wavelength),
            "offset_start": ("offset_bin", start),
            "offset_stop": ("offset_bin", stop),
        },
        attrs={
            **{"kind": "profile", "model": "toy/llama-5l", "revision": "0123abcd"},
            **{
                "dtype": "float32",
                "seed": 0,
                "context": context,
                "trained_context": context,
            },
            **{"sequences": 32, "rows": "all", "tokens": 32 * context},
            **{"loss": 1.2345, "loss_se": 0.0123},
            "versions": '{"ropelens": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}',
            "command": "ropelens analyze toy/llama-5l --text stories --out out",
            "text": "stories (5 files, 16,384 tokens)",
            "created": "2026-01-02T03:04:05+00:00",
        },
    ).set_coords("excerpt_token")
    for row in missing_measures(profile):  # measures that no function below describes
        shape = [profile.sizes.get(dim, 2) for dim in row.saved_dims]  # "part" has 2
        profile[row.name] = (row.saved_dims, np.full(shape, 0.5))
    for name, variable in profile.variables.items():
        bits = str(name).endswith(("_bits", "_gain"))
        units = "bits" if bits else UNITS.get(str(name), "1")
        variable.attrs = {"long_name": str(name).replace("_", " "), "units": units}
    table = rl.classify_heads(profile, resamples=2)
    table["confidence"] = np.round(0.45 + 0.55 * rng.beta(4, 0.7, size=len(table)), 3)
    return profile, table


def excerpt_tokens(count: int) -> list[str]:
    words = STORY.replace("\n", " \n").split(" ")[1:]
    tokens = ["<s>"] + [word if word in ",.\n" else f" {word}" for word in words]
    return (tokens * (count // len(tokens) + 1))[:count]


def by_kind(kinds: Array, otherwise: object, **values: object) -> Array:
    return np.select([kinds == kind for kind in values], [*values.values()], otherwise)


def _planes(kinds: Array, kv_heads: int, wavelength: Array, rng: Random) -> dict:
    place = np.linspace(0, 1, wavelength.shape[1])
    centre = by_kind(kinds, 0.78, positional=0.22, mixed=0.45)[..., None]
    noise = rng.gamma(8, 1 / 8, size=(*kinds.shape, len(place)))
    bump = np.exp(-(((place - centre) / 0.16) ** 2)) * noise
    strength = by_kind(kinds, 1.0, diffuse=0.05, sink=0.4)[..., None]
    coherence = by_kind(kinds, 0.15, positional=0.85, mixed=0.5)[..., None]
    push = strength * (1.6 * bump - 0.06)
    by_head = {
        "q_norm": 0.5 * noise + 2.2 * bump * strength,
        "q_coherence": np.clip(coherence * bump + 0.1 * noise, 0, 1),
        **{
            "selectivity": 1.1 * push,
            "selectivity_keys": push,
            "selectivity_sink": 0.1 * push,
        },
    }
    shape = (len(kinds), kv_heads, -1, len(place))
    by_key = {
        f"k_{x}": by_head[f"q_{x}"].reshape(shape).mean(2)
        for x in ("norm", "coherence")
    }
    by_key["v_norm"] = np.ones_like(by_key["k_norm"])
    of_keys = {
        name: (("layer", "kv_head", "frequency"), x) for name, x in by_key.items()
    }
    return of_keys | {name: (PLANE, x) for name, x in by_head.items()}


def _budget(kinds: Array, rng: Random) -> dict:
    total = np.where(
        kinds == "diffuse", 0.06, 1.0 + 3.5 * rng.beta(2, 2, size=kinds.shape)
    )
    sink = np.where(
        kinds == "sink", 0.95, 0.04 + 0.3 * rng.beta(1, 3, size=kinds.shape)
    )
    lean = by_kind(kinds, 0.02, positional=0.72, mixed=0.4) + 0.25 * rng.random(
        kinds.shape
    )
    share = rng.random(kinds.shape)
    per_head = {
        "total_bits": total,
        "sink_bits": total * sink,
        "position_bits": total * (1 - sink) * lean,
        "content_bits": total * (1 - sink) * (1 - lean) * 0.98,
        "interaction_bits": total * (1 - sink) * (1 - lean) * 0.02,
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
    trials = per_head["induction"] * np.linspace(0.9, 1.1, 8)[:, None, None]
    named = {name: (HEAD, values) for name, values in per_head.items()}
    return named | {"trial_induction": (("trial", *HEAD), trials)}


def _offsets(
    kinds: Array, looks_back: Array, start: Array, stop: Array, rng: Random
) -> dict:
    context = int(stop[-1])
    width = stop - start
    peak = np.exp(-np.abs(start - looks_back[..., None]) * 1.8)
    decay = (1.0 + start) ** -1.1
    height = by_kind(kinds, 0.03, positional=6.0, mixed=1.0)[..., None]
    kernel = height * peak + decay * rng.gamma(
        20, 1 / 20, size=(*kinds.shape, len(start))
    )
    sink = np.where(kinds == "sink", 0.9, 0.1)
    kernel *= ((1 - sink) / (kernel * width).sum(-1))[..., None]
    mass = kernel * width * (1 - start / context)
    share = kernel / (kernel * width).sum(-1, keepdims=True)
    below = (share * width).cumsum(-1)
    per_head = {
        "offset": start[kernel.argmax(-1)],
        "offset_weight": share.max(-1),
        "offset_low": start[(below < 0.25).sum(-1)],
        "offset_high": stop[(below < 0.75).sum(-1)] - 1,
    }
    mass = mass / mass.sum(-1, keepdims=True) * (1 - sink)[..., None]
    predicted = np.log(height * peak + decay)
    per_bin = {"kernel": kernel, "offset_mass": mass, "predicted_kernel": predicted}
    return {
        **{name: (HEAD, values) for name, values in per_head.items()},
        **{name: ((*HEAD, "offset_bin"), values) for name, values in per_bin.items()},
        "offset_share": ("offset_bin", 1 - start / context),
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
    plain = (kinds == "positional")[None, :, :, None, None]
    query = np.where(plain, query.mean(3, keepdims=True) + 0.2 * query, query)
    query, key = [x.astype(np.float16).astype(np.float32) for x in (query, key)]
    turns = np.exp(2j * np.pi * np.arange(count)[:, None] / wavelength[0, :planes])
    q, k = [
        _turned(x, turns)
        for x in (query, key[:, :, np.arange(heads) * kv_heads // heads])
    ]
    scores = SCALE * (q @ k.conj().swapaxes(-1, -2)).real
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(count)
    attention = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    tokens = np.array([excerpt_tokens(count)] * 2, dtype=object)
    tokens[1, count // 2 :] = ""
    for x, axis in ((query, 3), (key, 3), (attention, 3), (attention, 4)):
        x[1].swapaxes(0, axis - 1)[count // 2 :] = np.nan
    sides = ("excerpt", "layer", "head", "excerpt_query", "excerpt_key", "coordinate")
    return {
        "excerpt_token": (sides[::4], tokens),
        "excerpt_length": ("excerpt", np.array([count, count // 2])),
        "excerpt_planes": ("layer", np.full(layers, planes)),
        "excerpt_scale": ("layer", np.full(layers, SCALE)),
        "excerpt_attention": (sides[:5], attention),
        "excerpt_query_still": ((*sides[:4], "coordinate"), query),
        "excerpt_key_still": (("excerpt", "layer", "kv_head", *sides[4:]), key),
    }


def _turned(still: Array, turns: Array) -> Array:
    """Complex vectors with rotated planes, followed by the coordinates without rotation."""
    count = turns.shape[1]
    planes = (still[..., :count] + 1j * still[..., count : 2 * count]) * turns
    return np.concatenate([planes, still[..., 2 * count :]], axis=-1)


def _groups(data: dict, rng: Random) -> dict:
    names = ("total", "sink", "position", "content")
    total, sink, position, content = [data[f"{name}_bits"][1] for name in names]
    gains = (total, sink, sink + position, sink + content, sink + position + content)
    spread = rng.gamma(60, 1 / 60, (8, *total.shape))
    pairs = zip(GAINS, gains, strict=True)
    named = {f"group_{name}": (("group", *HEAD), x * spread) for name, x in pairs}
    rows = {"group_rows": 2044, "group_scored": 256}
    return named | {name: ("group", np.full(8, count)) for name, count in rows.items()}


def _surrogates(data: dict, wavelength: Array, rng: Random) -> dict:
    """Numbers of the model, and of 40 surrogates with noise added to the wavelengths."""
    push = data["selectivity_keys"][1].clip(min=1e-9) * np.isfinite(wavelength)[:, None]
    log = np.log(np.where(np.isfinite(wavelength), wavelength, 1.0))[:, None]
    mean = (push * log).sum(-1) / push.sum(-1)
    total, sink, position = [
        data[f"{name}_bits"][1] for name in ("total", "sink", "position")
    ]
    counts = (total >= 0.1) & (sink <= 0.9 * total)
    noise = rng.normal(0, 1, (41, *mean.shape))
    noise[0] = 0
    values = {
        "surrogate_offset_fraction": np.broadcast_to(
            position / (total - sink), noise.shape
        ),
        "surrogate_log_wavelength": mean + noise,
    }
    return {
        name: (("draw", *HEAD), np.where(counts, x, np.nan))
        for name, x in values.items()
    }
