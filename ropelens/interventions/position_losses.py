"""Table of the loss by position under edits."""

import pandas as pd
import xarray as xr

from ropelens.arguments import public
from ropelens.errors import BadArgument

COLUMNS = ("position_start", "position_stop", "loss", "loss_se", "change")


@public
def position_losses(results: xr.Dataset) -> pd.DataFrame:
    """Table of the loss by position, from a result of `evaluate` or `truncate`.

    A row is an edit and a bin of positions, from `position_start` up to `position_stop`. The
    columns `loss` and `loss_se` (nats/token) are the mean loss and its standard error, and
    `change` is the difference from the unmodified model. Raises `BadArgument` without "loss".
    """
    if "position_loss" not in results or "edit" not in results["position_loss"].dims:
        hint = 'evaluate(model, text, measures="loss")'
        raise BadArgument("These results have no loss by position.", hint=hint)
    loss = results["position_loss"]
    columns = xr.Dataset(
        {
            "position_start": results["position_start"],
            "position_stop": results["position_stop"],
            "loss": loss,
            "loss_se": results["position_loss_se"],
            "change": loss - loss.isel(edit=0, drop=True),
        }
    )
    table = columns.to_dataframe(["edit", "position_bin"]).reset_index()
    return table[["edit", *COLUMNS]]
