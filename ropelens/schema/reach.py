"""The variables of the reach of heads."""

from ropelens.schema.rows import Variable

REACH = (
    Variable(
        name="found_share",
        dims=("variant", "layer", "head", "run_distance"),
        units="1",
        long_name=(
            "share of rows that find the key after the first occurrence of "
            "their token, at this distance"
        ),
    ),
    Variable(
        name="found_by_draw",
        dims=("variant", "layer", "head", "run_distance", "draw"),
        units="1",
        long_name="the same share in each draw",
    ),
    Variable(
        name="found_low",
        dims=("variant", "layer", "head", "run_distance"),
        units="1",
        long_name="lower end of its 95 % interval over draws",
    ),
    Variable(
        name="found_high",
        dims=("variant", "layer", "head", "run_distance"),
        units="1",
        long_name="upper end of its 95 % interval over draws",
    ),
    Variable(
        name="foretold_share",
        dims=("variant", "layer", "head", "run_distance"),
        units="1",
        long_name=(
            "the same share as predicted by the run at the distance before, "
            "with the key turned to this distance"
        ),
    ),
    Variable(
        name="extrapolated_share",
        dims=("variant", "layer", "head", "distance"),
        units="1",
        long_name="the same share as predicted by the farthest run",
    ),
    Variable(
        name="distance",
        dims=("distance",),
        units="token",
        long_name="distance that the key is turned to, beyond the farthest run",
    ),
    Variable(
        name="run_distance",
        dims=("run_distance",),
        units="token",
        long_name="distance between the copies of a run",
    ),
)
