"""Which rotary frequencies does a model put its queries and keys on?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), the figures of
mean query and key norms by layer and by head: in Gemma 7B the slowest planes dominate
every layer, and the fastest are used in the first and last layers.

Expectation: if the base is large compared with the trained context, a band of planes has long
queries and keys. Slower planes never turn within the context, so training has no use for them,
and their queries and keys stay short. Oka et al. (ICLR 2026) predict the band at plane (D/2)
log_base(L / 3.657) for a trained context of L tokens. Values do not rotate. They are split into
the same planes as a control, and should have the same length in each plane.

    python analyses/frequency_norms.py [MODEL] [--text FILE]... [--context N]

Writes reports/frequency_norms/<model>/. Takes seconds for the bundled checkpoint, a few
minutes for a billion parameters on a GPU.
"""

import numpy as np
import xarray as xr

import ropelens as rl
from ropelens.analysis.answer import Answer
from ropelens.claims.arrays import parts_by_kind
from ropelens.commands.terminal import run_analysis
from ropelens.profiles.kinds import window_of


def answer(analysis: rl.Analysis) -> Answer:
    profile = analysis.profile
    loudest = int(products(profile).max("frequency").argmax("layer"))
    figures = {
        "The mean over heads, a row per layer: queries, keys, and values, which do not rotate. "
        "Fast planes are on the left; planes right of the dotted line turn less than once in "
        "the context.": rl.plot_norms(profile),
        "The layer with the longest queries, a row per head: heads of one layer may "
        "differ.": rl.plot_norms(profile, layer=loudest),
    }  # fmt: skip
    question = "Which frequencies carry the queries and keys?"
    sentences: list[str] = []
    for kind, part in parts_by_kind(profile).items():
        of_kind = findings(part)
        if kind != "all":
            of_kind[0] = f"{kind.capitalize()} layers: {of_kind[0]}"
        sentences += of_kind
    return Answer(question, sentences, figures)


def products(profile: xr.Dataset) -> xr.DataArray:
    """|q||k| of every layer and plane, mean over heads. It bounds the scores of a plane."""
    return profile["q_norm"].mean("head") * profile["k_norm"].mean("kv_head")


def findings(profile: xr.Dataset) -> list[str]:
    """Planes with the largest share of |q||k| in layers of one kind, and the prediction."""
    product = products(profile)
    share = (product / product.sum("frequency")).values  # [layer, frequency]
    mean = share.mean(axis=0)
    wavelength = profile["wavelength"].values[0]
    context = profile.attrs["context"]
    planes = int(np.isfinite(wavelength).sum())
    peak = int(np.nanargmax(mean))
    quarter = max(planes // 4, 1)
    fast_by_layer = share[:, :quarter].sum(axis=1)
    slow = mean[planes - quarter : planes].sum()
    by_layer = ", ".join(f"{fast:.0%}" for fast in fast_by_layer)
    sentences = [
        f"The norms peak at plane {peak} of {planes}, wavelength {wavelength[peak]:,.0f} "
        f"tokens, with {mean[peak]:.0%} of |q||k| (evenly spread: {1 / planes:.0%}).",
        f"Planes that turn less than once in {context:,} tokens hold "
        f"{mean[wavelength > context].sum():.0%} of |q||k|; the slowest quarter of all planes "
        f"holds {slow:.0%}, the fastest {mean[:quarter].sum():.0%}.",
        f"The fastest quarter's share by layer: {by_layer}.",
        "The lengths of a head's planes vary (sd over mean, a mean over heads) by "
        f"{uneven(profile['q_norm']):.0%} in queries and {uneven(profile['k_norm']):.0%} in "
        f"keys; in values, which do not rotate, by {uneven(profile['v_norm']):.0%}.",
    ]
    band = predicted_band(profile)
    if band is not None:
        window = window_of(profile, [0])
        length = window.name if window else "trained context"
        sentences.append(
            f"Oka et al. predict the band at plane {band:.1f}, given a {length} of "
            f"{profile.attrs['trained_context']:,} tokens; measured over predicted: "
            f"{peak / band:.2f}."
        )
    return sentences


def predicted_band(profile: xr.Dataset) -> float | None:
    """Plane of the band by Oka et al.; None unless one base sets the frequencies."""
    inv_freq = profile["inv_freq"].values[0]
    steps = np.diff(np.log(inv_freq[inv_freq > 0]))
    if len(steps) < 2 or np.ptp(steps) > 1e-3:
        return None
    return float(np.log(profile.attrs["trained_context"] / 3.657) / -steps.mean())


def uneven(norm: xr.DataArray) -> float:
    """How much the lengths of a head's planes vary: sd over mean, a mean over heads."""
    return float((norm.std("frequency") / norm.mean("frequency")).mean())


if __name__ == "__main__":
    run_analysis(answer)
