"""Figure of the attention of one head on an excerpt or a prompt."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import get_colorscale

from ropelens.arguments import Count, public
from ropelens.figures import style
from ropelens.figures.formats import plotly_text, visible_token
from ropelens.figures.inputs import Head, Layer, head_of
from ropelens.profiles.measures import complete_profile

MAX_TOKENS_WITH_GAPS = 32  # gaps between the cells of more tokens would cover too much
MAX_DISTANCE = 1024  # of a moved key (tokens)
COLOR_BAR = {  # in the empty half above the diagonal
    "x": 1,
    "xanchor": "right",
    "y": 1,
    "yanchor": "top",
    "orientation": "h",
    "tickvals": [0, 0.5, 1],
    "tickformat": ".0%",
    "thickness": 10,
    "len": 0.42,
    "title": {"text": "attention (% of row)", "side": "top", "font": {"size": 11}},
}


@public
def plot_attention(
    profile: xr.Dataset, *, layer: Layer = None, head: Head, excerpt: Count = 0
) -> go.Figure:
    """Attention of each query token (row) to the keys (columns) that it sees, in an excerpt.

    The weights of a row, with a learned sink, sum to 1. The colour grows with the square root
    of the weight, so that small weights are visible. `excerpt` is the number of a prompt if
    `profile` is a capture. The head is "2.3", or layer=2, head=3.
    """
    profile = complete_profile(profile)
    drawn = head_of(profile, layer, head)
    tokens = excerpt_tokens(drawn.dataset, excerpt)
    names = [plotly_text(visible_token(token)) for token in tokens]
    names_of_cells = np.array(names, dtype=object)
    positions = np.arange(len(tokens))
    of_head = drawn.dataset["excerpt_attention"].isel(
        excerpt=excerpt, layer=drawn.layer, head=drawn.index
    )
    weights = of_head.transpose("excerpt_query", "excerpt_key").values
    weights = weights[positions][:, positions]
    title = f"Attention of layer {drawn.name_of_layer}, head {drawn.name_of_head}"
    figure = style.new_figure(f"{title} on an excerpt", height=640)
    gap = 1 if len(tokens) <= MAX_TOKENS_WITH_GAPS else 0
    figure.add_heatmap(
        x=positions,
        y=positions,
        z=np.where(positions[None] <= positions[:, None], weights, np.nan),
        # Texts of a cell: [query token, key token].
        customdata=np.stack(
            np.meshgrid(names_of_cells, names_of_cells, indexing="ij"), axis=-1
        ),
        colorscale=[[at**2, color] for at, color in get_colorscale(style.SEQUENTIAL)],
        colorbar=COLOR_BAR,
        xgap=gap,
        ygap=gap,
        zmin=0,
        zmax=1,
        meta={"z": "attention"},
        hovertemplate="%{customdata[0]} → %{customdata[1]}: %{z:.1%}<extra></extra>",
    )
    _name_tokens(figure, tokens)
    return style.note_missing(figure, "this head has no attention on the excerpt")


def _name_tokens(figure: go.Figure, tokens: list[str]) -> None:
    """Write the tokens along both axes; the first token is at the top left."""
    positions = np.arange(len(tokens))
    names = [plotly_text(visible_token(token, longest=12)) for token in tokens]
    figure.update_xaxes(
        title_text="key (token)",
        tickfont={"size": 10},
        showgrid=False,
        ticks="",
        tickvals=positions,
        ticktext=names,
        tickangle=-90,
    )
    figure.update_yaxes(
        title_text="query (token)",
        tickfont={"size": 10},
        showgrid=False,
        ticks="",
        tickvals=positions,
        ticktext=names,
        range=[len(tokens) - 0.5, -0.5],
    )


def excerpt_tokens(profile: xr.Dataset, excerpt: int) -> list[str]:
    length = int(profile["excerpt_length"][excerpt])
    return profile["excerpt_token"].values[excerpt, :length].astype(str).tolist()


def farthest_distance(profile: xr.Dataset, layer: int) -> int:
    """Largest distance of keys on a page: to the context, 1,023 tokens or a sliding window."""
    context = int(profile.attrs["context"])
    limit = max(profile.sizes["excerpt_key"], min(context, MAX_DISTANCE)) - 1
    if "farthest_offset" not in profile:
        return limit
    visible = profile["farthest_offset"].values[layer]
    if visible < context - 1:  # False for a layer without attention, which has NaN
        return min(limit, int(visible))
    return limit
