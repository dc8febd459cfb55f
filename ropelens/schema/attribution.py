"""The variables of attributions of planes."""

from ropelens.schema.rows import Variable

ATTRIBUTION = (
    Variable(
        name="attribution",
        dims=("layer", "head", "frequency"),
        units="1",
        long_name="gradient of the answer times the plane's contributions",
    ),
    Variable(
        name="pair_attribution",
        dims=("pair_head", "frequency", "query", "key"),
        units="1",
        long_name="the same, for each pair of tokens",
    ),
    Variable(
        name="dropped",
        dims=("layer", "head", "frequency"),
        units="1",
        long_name="change of the answer when only this plane is dropped",
    ),
    Variable(
        name="patched",
        dims=("layer", "head", "frequency"),
        units="1",
        long_name=(
            "change of the answer when only this plane takes its queries and "
            "keys from another prompt"
        ),
    ),
    Variable(
        name="pair_head",
        dims=("pair_head",),
        units="",
        long_name="layer.head",
    ),
    Variable(
        name="inv_freq",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency; negative: clockwise",
    ),
    Variable(
        name="wavelength",
        dims=("layer", "frequency"),
        units="token",
        long_name="tokens per turn",
    ),
)
