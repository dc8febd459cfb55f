"""Which rotary frequencies does a model put its queries and keys on?

Source: Barbero et al. 2024, "Round and Round We Go!" (arXiv 2410.06205), the figures of
mean query and key norms by layer and by head: in Gemma 7B the slowest planes dominate
every layer, and the fastest are used in the first and last layers.

Expectation: a band of long queries and keys, inside the axis where the base is large
beside the trained context: planes slower than the band never turn within the context,
were of no use in training, and stay short. Oka et al. (ICLR 2026) put the band at plane
(D/2) log_base(L / 3.657) for a trained context of L tokens.

    python analyses/frequency_norms.py [MODEL] [--text FILE]... [--context N]

Writes reports/frequency_norms/<model>/. Takes seconds for the bundled checkpoint, a few
minutes for a billion parameters on a GPU.
"""

from pathlib import Path

import numpy as np
import typer
import xarray as xr

import ropelens as rl

REPORTS = Path(__file__).parents[1] / "reports"


def main(
    model: str = typer.Argument("bundled", help="A folder, a Hub id, or bundled."),
    text: list[Path] = typer.Option([], help="Text files or folders; else the bundled text."),
    context: int = typer.Option(512, help="Tokens a sequence."),
    sequences: int | None = typer.Option(None, help="Sequences, a sample; else all."),
) -> None:
    loaded, tokenizer = rl.load(model)
    documents = rl.read_documents(text or [rl.sample_path()])
    chosen = rl.tokenize(documents, tokenizer, context=context, sequences=sequences)
    profile = rl.profile(loaded, chosen.tokens, lengths=chosen.lengths, tokenizer=tokenizer)
    profile.attrs["text"] = chosen.source
    heads = rl.classify_heads(profile)
    loudest = int(layer_norms(profile).max("frequency").argmax("layer"))
    page = rl.write_answer(
        REPORTS / "frequency_norms",
        question="Which frequencies carry the queries and keys?",
        findings=findings(profile),
        figures={
            "The mean over heads, a row a layer, queries above keys. Fast planes are on the "
            "left; planes right of the dotted line turn less than once in the context.":
                rl.plot_norms(profile),
            "The layer with the longest queries, a row a head: heads of one layer need not "
            "agree.": rl.plot_head_norms(profile, layer=loudest),
        },
        profile=profile,
        heads=heads,
    )  # fmt: skip
    rl.write_index(REPORTS)
    typer.echo(page)


def layer_norms(profile: xr.Dataset) -> xr.DataArray:
    """|q||k| of every layer and plane, mean over heads: what bounds a plane's scores."""
    return profile["q_norm"].mean("head") * profile["k_norm"].mean("kv_head")


def findings(profile: xr.Dataset) -> list[str]:
    """What the norms say, in sentences with numbers."""
    product = layer_norms(profile)
    share = (product / product.sum("frequency")).values
    mean = share.mean(axis=0)
    wavelength = profile["wavelength"].values[0]
    peak, planes = int(np.nanargmax(mean)), int(np.isfinite(wavelength).sum())
    quarter = max(planes // 4, 1)
    context, trained = profile.attrs["context"], profile.attrs["trained_context"]
    beyond = mean[wavelength > context].sum()
    slow, fast = mean[planes - quarter : planes].sum(), mean[:quarter].sum()
    by_layer = ", ".join(f"{value:.0%}" for value in share[:, :quarter].sum(axis=1))
    said = [
        f"The norms peak at plane {peak} of {planes}, wavelength {wavelength[peak]:,.0f} "
        f"tokens, with {mean[peak]:.0%} of |q||k| (evenly spread: {1 / planes:.0%}).",
        f"Planes that turn less than once in {context} tokens hold {beyond:.0%} of |q||k|; "
        f"the slowest quarter of all planes holds {slow:.0%}, the fastest {fast:.0%}.",
        f"The fastest quarter's share by layer: {by_layer}.",
    ]
    predicted = band(profile)
    if predicted is not None:
        said.append(
            f"The band was predicted at plane {predicted:.1f} (Oka et al., for a trained "
            f"context of {trained}); measured over predicted: {peak / predicted:.2f}."
        )
    return said


def band(profile: xr.Dataset) -> float | None:
    """The plane that Oka et al. predict, where frequencies are a power law of one base."""
    inv_freq = profile["inv_freq"].isel(layer=0).values
    steps = np.diff(np.log(inv_freq[inv_freq > 0]))
    if len(steps) < 2 or np.ptp(steps) > 1e-3:
        return None
    return float(np.log(profile.attrs["trained_context"] / 3.657) / -steps.mean())


if __name__ == "__main__":
    rl.run_script(main)
