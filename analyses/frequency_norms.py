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

from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class Shares:
    """Shares of planes in |q||k|, in layers of one kind.

    - by_layer [layer, frequency]: shares of each layer; they sum to one.
    - wavelength [frequency]: tokens per turn; planes that do not turn have none.
    """

    by_layer: np.ndarray
    wavelength: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return self.by_layer.mean(axis=0)

    @property
    def peak(self) -> int:
        return int(np.nanargmax(self.mean))

    @property
    def planes(self) -> int:
        """Number of planes that turn."""
        return int(np.isfinite(self.wavelength).sum())

    @property
    def quarter(self) -> int:
        return max(self.planes // 4, 1)


def shares_of(profile: xr.Dataset) -> Shares:
    product = products(profile)
    by_layer = product / product.sum("frequency")
    return Shares(by_layer.values, wavelength=profile["wavelength"].values[0])


def findings(profile: xr.Dataset) -> list[str]:
    """Planes with the largest share of |q||k| in layers of one kind, and the prediction."""
    shares = shares_of(profile)
    sentences = [
        about_peak(shares),
        about_slow_planes(shares, context=profile.attrs["context"]),
        about_layers(shares),
        about_lengths(profile),
    ]
    band = predicted_band(profile)
    if band is not None:
        sentences.append(about_prediction(profile, band, peak=shares.peak))
    return sentences


def about_peak(shares: Shares) -> str:
    peak = shares.peak
    wavelength = shares.wavelength[peak]
    return (
        f"The norms peak at plane {peak} of {shares.planes}, wavelength {wavelength:,.0f} "
        f"tokens, with {shares.mean[peak]:.0%} of |q||k| "
        f"(evenly spread: {1 / shares.planes:.0%})."
    )


def about_slow_planes(shares: Shares, *, context: int) -> str:
    mean = shares.mean
    turn_less_than_once = mean[shares.wavelength > context].sum()
    slowest = mean[shares.planes - shares.quarter : shares.planes].sum()
    fastest = mean[: shares.quarter].sum()
    return (
        f"Planes that turn less than once in {context:,} tokens hold "
        f"{turn_less_than_once:.0%} of |q||k|; the slowest quarter of all planes "
        f"holds {slowest:.0%}, the fastest {fastest:.0%}."
    )


def about_layers(shares: Shares) -> str:
    fastest = shares.by_layer[:, : shares.quarter].sum(axis=1)
    percentages = [f"{share:.0%}" for share in fastest]
    return f"The fastest quarter's share by layer: {', '.join(percentages)}."


def about_lengths(profile: xr.Dataset) -> str:
    return (
        "The lengths of a head's planes vary (sd over mean, a mean over heads) by "
        f"{uneven(profile['q_norm']):.0%} in queries and {uneven(profile['k_norm']):.0%} in "
        f"keys; in values, which do not rotate, by {uneven(profile['v_norm']):.0%}."
    )


def about_prediction(profile: xr.Dataset, band: float, *, peak: int) -> str:
    window = window_of(profile, [0])
    length = window.name if window else "trained context"
    return (
        f"Oka et al. predict the band at plane {band:.1f}, given a {length} of "
        f"{profile.attrs['trained_context']:,} tokens; measured over predicted: "
        f"{peak / band:.2f}."
    )


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
