"""The variables of the excerpts of the text of a profile."""

from ropelens.schema.rows import Variable

EXCERPTS = (
    Variable(
        name="excerpt_token",
        dims=("excerpt", "excerpt_key"),
        units="",
        long_name="token of the excerpt",
    ),
    Variable(
        name="excerpt_length",
        dims=("excerpt",),
        units="token",
        long_name="number of tokens",
    ),
    Variable(
        name="excerpt_attention",
        dims=("excerpt", "layer", "head", "excerpt_query", "excerpt_key"),
        units="1",
        long_name="attention on the excerpt",
    ),
    Variable(
        name="excerpt_query_still",
        dims=("excerpt", "layer", "head", "excerpt_query", "coordinate"),
        units="1",
        long_name=(
            "query without its rotation: real parts, imaginary parts, and "
            "coordinates that do not rotate"
        ),
    ),
    Variable(
        name="excerpt_key_still",
        dims=("excerpt", "layer", "kv_head", "excerpt_key", "coordinate"),
        units="1",
        long_name=(
            "key without its rotation: real parts, imaginary parts, and "
            "coordinates that do not rotate"
        ),
    ),
    Variable(
        name="excerpt_score_gradient",
        dims=("excerpt", "layer", "head", "excerpt_query", "excerpt_key"),
        units="1",
        long_name="change of the lead if the score grows by one nat",
    ),
    Variable(
        name="excerpt_answer",
        dims=("excerpt", "excerpt_rank"),
        units="",
        long_name="the two tokens that are most likely to come next",
    ),
    Variable(
        name="excerpt_lead",
        dims=("excerpt",),
        units="nat",
        long_name="lead of the first of the two tokens",
    ),
    Variable(
        name="excerpt_scale",
        dims=("layer",),
        units="1",
        long_name="scale of the scores",
    ),
    Variable(
        name="excerpt_planes",
        dims=("layer",),
        units="",
        long_name="number of planes",
    ),
)
