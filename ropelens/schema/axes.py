"""The coordinates of a profile."""

from ropelens.schema.rows import Variable

AXES = (
    Variable(
        name="layer",
        dims=("layer",),
        units="",
        long_name="index of the layer",
    ),
    Variable(
        name="head",
        dims=("head",),
        units="",
        long_name="index of the query head in its layer",
    ),
    Variable(
        name="kv_head",
        dims=("kv_head",),
        units="",
        long_name="index of the key-value head in its layer",
    ),
    Variable(
        name="frequency",
        dims=("frequency",),
        units="",
        long_name="index of the plane; plane 0 rotates fastest",
    ),
    Variable(
        name="inv_freq",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency of the plane",
    ),
    Variable(
        name="wavelength",
        dims=("layer", "frequency"),
        units="token",
        long_name="tokens per turn of the plane",
    ),
    Variable(
        name="head_wavelength",
        dims=("layer", "head", "frequency"),
        units="token",
        long_name="tokens per turn of the plane in the head",
    ),
    Variable(
        name="offset_start",
        dims=("offset_bin",),
        units="token",
        long_name="first offset of the bin",
    ),
    Variable(
        name="offset_stop",
        dims=("offset_bin",),
        units="token",
        long_name="first offset beyond the bin",
    ),
    Variable(
        name="distance_start",
        dims=("distance_bin",),
        units="token",
        long_name="first distance of the bin",
    ),
    Variable(
        name="distance_stop",
        dims=("distance_bin",),
        units="token",
        long_name="first distance beyond the bin",
    ),
    Variable(
        name="farthest_offset",
        dims=("layer",),
        units="token",
        long_name="farthest offset that a row of the layer sees",
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
