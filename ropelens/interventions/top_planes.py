"""Table of the planes with the largest attribution."""

import pandas as pd
import xarray as xr

from ropelens.arguments import Positive, public
from ropelens.errors import BadArgument


@public
def top_planes(attribution: xr.Dataset, count: Positive = 12) -> pd.DataFrame:
    """Table of the planes with the largest absolute attribution, the largest first.

    Columns are `head` ("2.3"), `plane` (0 rotates fastest; the last one is the part that RoPE
    does not rotate), `wavelength` (tokens), and the variables `attribution`, and `dropped` and
    `patched` if they were measured, of the result of `attribute_planes`.
    """
    if "attribution" not in attribution:
        raise BadArgument(
            "These results have no attribution of planes.",
            hint="the result of rl.attribute_planes",
        )
    names = []
    for name in ("wavelength", "attribution", "dropped", "patched"):
        if name in attribution.variables:
            names.append(name)
    variables = attribution.reset_coords()[names]
    planes = variables.to_dataframe(["layer", "head", "frequency"])[names]
    planes = planes.dropna(subset="attribution")
    size = planes["attribution"].abs()
    largest_first = size.sort_values(ascending=False, kind="stable").index
    table = planes.loc[largest_first[:count]].reset_index()
    heads = table["layer"].astype(str) + "." + table["head"].astype(str)
    table = table.drop(columns="layer").assign(head=heads)
    return table.rename(columns={"frequency": "plane"})
