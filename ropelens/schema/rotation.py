"""The variables of a measured rotation, and of the comparison of two rotations."""

from ropelens.schema.rows import Variable

ROTATION = (
    Variable(
        name="inv_freq",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency, measured",
    ),
    Variable(
        name="inv_freq_stated",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency that the model states",
    ),
    Variable(
        name="inv_freq_configured",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency of the configuration",
    ),
    Variable(
        name="query_scale",
        dims=("layer", "position"),
        units="1",
        long_name="length of queries, relative to position 0",
    ),
    Variable(
        name="wavelength",
        dims=("layer", "frequency"),
        units="token",
        long_name="tokens per turn",
    ),
    Variable(
        name="residual",
        dims=("layer",),
        units="1",
        long_name="change with position that is not a rotation",
    ),
    Variable(
        name="rotary_dim",
        dims=("layer",),
        units="1",
        long_name="coordinates of a head that rotate",
    ),
    Variable(
        name="pairing",
        dims=("layer",),
        units="",
        long_name="which coordinates share a plane",
    ),
    Variable(
        name="layer_type",
        dims=("layer",),
        units="",
        long_name=(
            "kind of the layer: sliding, full, chunked, none (no rotation) or recurrent"
        ),
    ),
    Variable(
        name="base",
        dims=("layer",),
        units="1",
        long_name="base of the rotation",
    ),
    Variable(
        name="scaling",
        dims=("layer",),
        units="",
        long_name="type and factor of the scaling of the rotation",
    ),
    Variable(
        name="reach",
        dims=("layer",),
        units="token",
        long_name="window or chunk of the layer, or the trained context",
    ),
)


COMPARED_ROTATION = (
    Variable(
        name="angle",
        dims=("implementation", "layer", "frequency", "position"),
        units="rad",
        long_name="rotation since position 0",
    ),
    Variable(
        name="difference",
        dims=("layer", "frequency", "position"),
        units="rad",
        long_name="angle between the two implementations",
    ),
    Variable(
        name="residual",
        dims=("implementation", "layer"),
        units="1",
        long_name="change with position that is not a rotation",
    ),
    Variable(
        name="strength_ratio",
        dims=("layer",),
        units="1",
        long_name="size of scores, other relative to one",
    ),
    Variable(
        name="score_difference",
        dims=("layer", "frequency"),
        units="1",
        long_name="difference of the plane's parts of scores, relative to the scores",
    ),
)
