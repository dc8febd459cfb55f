"""The variables and the coordinates of a capture."""

from ropelens.schema.rows import Variable

CAPTURE = (
    Variable(
        name="q_still",
        dims=("head", "query", "frequency", "part"),
        units="1",
        long_name="query without its rotation",
    ),
    Variable(
        name="k_still",
        dims=("head", "key", "frequency", "part"),
        units="1",
        long_name="key without its rotation",
    ),
    Variable(
        name="q_norm",
        dims=("head", "query", "frequency"),
        units="1",
        long_name="length of the query in the plane",
    ),
    Variable(
        name="k_norm",
        dims=("head", "key", "frequency"),
        units="1",
        long_name="length of the key in the plane",
    ),
    Variable(
        name="score",
        dims=("head", "query", "key"),
        units="nat",
        long_name="score of the key, before a soft-cap",
    ),
    Variable(
        name="contribution",
        dims=("head", "frequency", "query", "key"),
        units="nat",
        long_name="contribution of the plane to the score",
    ),
    Variable(
        name="contrast",
        dims=("head", "frequency", "query", "key"),
        units="nat",
        long_name="contribution beyond that to the row's other keys",
    ),
    Variable(
        name="attention",
        dims=("head", "query", "key"),
        units="1",
        long_name="attention of the query on the key",
    ),
    Variable(
        name="value_norm",
        dims=("head", "key"),
        units="1",
        long_name="length of the value",
    ),
    Variable(
        name="write_norm",
        dims=("head", "key"),
        units="1",
        long_name="length of v W_O, the output of the head if it reads only this key",
    ),
    Variable(
        name="written_norm",
        dims=("head", "query"),
        units="1",
        long_name="length of the output of the head",
    ),
    Variable(
        name="logit",
        dims=("head", "answer", "query", "key"),
        units="1",
        long_name="amount that reading the key adds to the logit of the answer",
    ),
    Variable(
        name="inv_freq",
        dims=("head", "frequency"),
        units="rad/token",
        long_name="angular frequency; negative: clockwise",
    ),
    Variable(
        name="wavelength",
        dims=("head", "frequency"),
        units="token",
        long_name="tokens per turn",
    ),
    Variable(
        name="scale",
        dims=("head",),
        units="1",
        long_name="scale of the scores",
    ),
)
"""The variables of a capture; `CapturedHead` fills them."""


CAPTURE_INDICES = (
    Variable(
        name="head",
        dims=("head",),
        units="",
        long_name="layer.head",
    ),
    Variable(
        name="layer",
        dims=("head",),
        units="",
        long_name="layer of the head",
    ),
    Variable(
        name="head_of_layer",
        dims=("head",),
        units="",
        long_name="number of the head in its layer",
    ),
    Variable(
        name="query",
        dims=("query",),
        units="token",
        long_name="position of the query",
    ),
    Variable(
        name="key",
        dims=("key",),
        units="token",
        long_name="position of the key",
    ),
    Variable(
        name="query_token",
        dims=("query",),
        units="",
        long_name="token of the query",
    ),
    Variable(
        name="key_token",
        dims=("key",),
        units="",
        long_name="token of the key",
    ),
    Variable(
        name="answer",
        dims=("answer",),
        units="",
        long_name="token whose logit is looked at",
    ),
)
