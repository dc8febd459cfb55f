"""Sentences about a profile: kinds of layers, searched tokens, and the scope of its text."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from ropelens.figures.formats import in_words, number, plural, ranges
from ropelens.figures.inputs import idle_layers
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.profiles.kinds import layers_by_kind
from ropelens.report.sentences.wording import one_line


def attention_sentences(profile: xr.Dataset) -> list[str]:
    """Sentences that name the head with most attention on each searched set of tokens."""
    sentences = []
    for name in map(str, profile):
        control_name = name.replace("attention", "control", 1)
        if name.startswith("attention_on_") and control_name in profile:
            sentences.append(_attention_on(profile[name], profile[control_name]))
    return sentences


def _attention_on(attention: xr.DataArray, control: xr.DataArray) -> str:
    """The head that attends most to a set of tokens, compared with other tokens."""
    difference = attention.values - control.values
    layer, head = np.unravel_index(np.nanargmax(difference), difference.shape)
    on_tokens = number(float(attention.values[layer, head]), ".3f")
    on_others = number(float(control.values[layer, head]), ".3f")
    meaning = attention.attrs["long_name"].removeprefix("attention on ")
    tokens = meaning.rpartition(", ")[0]  # without "where one is seen"
    return one_line(
        f"Head {layer}.{head} attends most to {tokens}. In rows that see such tokens, "
        f"{on_tokens} of its attention outside sinks goes to them, and {on_others} goes to "
        "other tokens of the same frequency and distance."
    )


def kinds_sentence(profile: xr.Dataset) -> str:
    """The kinds of layers and their rotations; "" if the profile lacks them."""
    if "reach" not in profile.coords:
        return ""
    parts = []
    for layer_type, layers in layers_by_kind(profile).items():
        if layer_type != "recurrent":
            first = profile[["base", "scaling", "reach"]].isel(layer=layers[0])
            count = plural(len(layers), f"{layer_type} layer")
            parts.append(f"{count} ({_rotation(layer_type, first)})")
    if not parts:
        return ""
    return one_line(f"{in_words(parts)}.")


def _rotation(layer_type: str, layer: xr.Dataset) -> str:
    """The base, the scaling and the reach of a layer."""
    parts = []
    base = layer["base"].item()
    if not np.isnan(base):
        parts.append(f"base {number(base, ',.7g')}")
        if layer["scaling"].item():
            parts.append(f"scaling {layer['scaling'].item()}")
    length = "context"
    if layer_type.startswith("sliding"):
        length = "window"
    elif layer_type.startswith("chunked"):
        length = "chunks"
    tokens = layer["reach"].item()
    parts.append(f"{length} of {plural(tokens, 'token')}")
    return ", ".join(parts)


def idle_sentence(profile: xr.Dataset) -> str:
    """The layers without attention; "" if all layers attend."""
    idle = idle_layers(profile)
    if not idle:
        return ""
    verb = "has" if len(idle) == 1 else "have"
    noun = "layer" if len(idle) == 1 else "layers"
    return (
        f"{len(idle)} of {profile.sizes['layer']} layers {verb} no attention "
        f"({noun} {ranges(idle)})."
    )


def scope_sentence(attrs: Mapping[Any, Any]) -> str:
    """Sentences about short or uniform text, from the attributes of results; "" if neither."""
    documents = int(attrs.get("documents", ENOUGH_DOCUMENTS))
    trained = int(attrs.get("trained_context", 0))
    context = int(attrs.get("context", trained))
    sentences = []
    if documents < ENOUGH_DOCUMENTS:
        source = "The text was not split into documents"
        if documents:
            source = f"All text is from {plural(documents, 'document')}"
        sentences.append(
            f"{source}: the numbers and intervals describe only this text, and not "
            "similar text."
        )
    if context < trained:
        sentences.append(
            f"Sequences have up to {context:,} tokens, but the model was trained for "
            f"{trained:,}. Longer text may give other numbers."
        )
    return " ".join(sentences)
