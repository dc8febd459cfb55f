"""The variables of evaluations and truncation sweeps that are not measures of a profile."""

from ropelens.schema.rows import Variable

EVALUATION = (
    Variable(
        name="edit",
        dims=("edit",),
        units="",
        long_name="name of the edit",
    ),
    Variable(
        name="control_of",
        dims=("edit",),
        units="",
        long_name="the edit for which random heads are the control",
    ),
    Variable(
        name="silenced",
        dims=("edit", "layer", "head"),
        units="1",
        long_name="1 if the edit silences the head, else 0",
    ),
    Variable(
        name="loss",
        dims=("edit", "sequence"),
        units="nat/token",
        long_name="mean loss of the sequence's predicted tokens",
    ),
    Variable(
        name="seen_loss",
        dims=("edit", "sequence"),
        units="nat/token",
        long_name="mean loss of predicted tokens that the sequence had before",
    ),
    Variable(
        name="class_loss",
        dims=("edit", "sequence", "token_class"),
        units="nat/token",
        long_name="mean loss of tokens of a class",
    ),
    Variable(
        name="class_tokens",
        dims=("sequence", "token_class"),
        units="token",
        long_name="predicted tokens of the sequence of a class",
    ),
    Variable(
        name="token_class",
        dims=("token_class",),
        units="",
        long_name="class of tokens",
    ),
    Variable(
        name="predicted_tokens",
        dims=("sequence",),
        units="token",
        long_name="predicted tokens of the sequence",
    ),
    Variable(
        name="seen_tokens",
        dims=("sequence",),
        units="token",
        long_name="predicted tokens that the sequence had before",
    ),
    Variable(
        name="far_loss",
        dims=("edit", "sequence"),
        units="nat/token",
        long_name="mean loss in bins in the second half of the context",
    ),
    Variable(
        name="far_tokens",
        dims=("sequence",),
        units="token",
        long_name="predicted tokens in these bins",
    ),
    Variable(
        name="group",
        dims=("sequence",),
        units="",
        long_name=(
            "group of sequences that are drawn together: a document, or a "
            "stretch of text"
        ),
    ),
    Variable(
        name="mean_loss",
        dims=("edit",),
        units="nat/token",
        long_name="mean loss of all predicted tokens",
    ),
    Variable(
        name="mean_loss_se",
        dims=("edit",),
        units="nat/token",
        long_name="standard error of mean_loss over groups of sequences",
    ),
    Variable(
        name="position_loss",
        dims=("edit", "position_bin"),
        units="nat/token",
        long_name="mean loss of the tokens at the bin's positions",
    ),
    Variable(
        name="position_loss_se",
        dims=("edit", "position_bin"),
        units="nat/token",
        long_name="standard error over groups of sequences",
    ),
    Variable(
        name="position_start",
        dims=("position_bin",),
        units="token",
        long_name="first position of the bin",
    ),
    Variable(
        name="position_stop",
        dims=("position_bin",),
        units="token",
        long_name="first position beyond the bin",
    ),
    Variable(
        name="first_loss",
        dims=("edit", "trial"),
        units="nat/token",
        long_name="mean loss of random tokens, the first time",
    ),
    Variable(
        name="repeat_loss",
        dims=("edit", "trial"),
        units="nat/token",
        long_name="mean loss of the same tokens, repeated",
    ),
    Variable(
        name="copy_loss",
        dims=("edit", "copy_distance", "trial"),
        units="nat/token",
        long_name=(
            "mean loss of random tokens that are repeated, without the first token"
        ),
    ),
    Variable(
        name="copy_distance",
        dims=("copy_distance",),
        units="token",
        long_name="distance between a token and its copy",
    ),
    Variable(
        name="attention_change",
        dims=("edit", "layer", "head"),
        units="bit",
        long_name="divergence from the attention of the unmodified model",
    ),
    Variable(
        name="class_change",
        dims=("edit", "layer", "head", "token_class"),
        units="bit",
        long_name="the same over rows of a class of tokens",
    ),
    Variable(
        name="label",
        dims=("edit", "layer", "head"),
        units="",
        long_name="label of the head",
    ),
    Variable(
        name="class_label",
        dims=("edit", "layer", "head", "token_class"),
        units="",
        long_name="label of the head from rows of a class of tokens",
    ),
    Variable(
        name="label_change_confidence",
        dims=("edit", "layer", "head"),
        units="1",
        long_name=(
            "share of bootstrap resamples in which the label differs from the label "
            "without an edit"
        ),
    ),
    Variable(
        name="class_label_change_confidence",
        dims=("edit", "layer", "head", "token_class"),
        units="1",
        long_name="the same for the label from rows of a class of tokens",
    ),
    Variable(
        name="labels_changed_resampled",
        dims=("edit", "resample"),
        units="1",
        long_name="heads with another label in a bootstrap resample",
    ),
    Variable(
        name="positional_fraction",
        dims=("edit", "layer", "head"),
        units="1",
        long_name=(
            "share of the offset in the bits that sinks do not explain, with "
            "its part of the shared bits"
        ),
    ),
    Variable(
        name="retrieval",
        dims=("edit", "retrieval_length", "depth"),
        units="1",
        long_name="share of needles whose value was found",
    ),
    Variable(
        name="retrieval_hit",
        dims=("edit", "retrieval_length", "depth", "retrieval_trial"),
        units="1",
        long_name="1 if the value was found",
    ),
    Variable(
        name="retrieval_length",
        dims=("retrieval_length",),
        units="token",
        long_name="tokens of the prompt",
    ),
    Variable(
        name="depth",
        dims=("depth",),
        units="1",
        long_name="share of the prompt's text before the needle",
    ),
)
"""The variables of an evaluation that are not measures of a profile."""


SWEEP = (
    Variable(
        name="edit",
        dims=("edit",),
        units="",
        long_name="name of the edit",
    ),
    Variable(
        name="layers",
        dims=("edit",),
        units="",
        long_name="kind of the layers whose planes stopped, or all",
    ),
    Variable(
        name="kind",
        dims=("edit",),
        units="",
        long_name=(
            "which planes stopped: none, one end, a band, or random planes as a control"
        ),
    ),
    Variable(
        name="kept",
        dims=("edit",),
        units="1",
        long_name="share of the model's rotating planes that still rotate",
    ),
    Variable(
        name="planes",
        dims=("edit",),
        units="",
        long_name="numbers of the stopped planes; plane 0 is the fastest",
    ),
    Variable(
        name="planes_stopped",
        dims=("edit",),
        units="1",
        long_name="number of stopped planes of a layer, the largest of all layers",
    ),
    Variable(
        name="wavelength_low",
        dims=("edit",),
        units="token",
        long_name="shortest wavelength that stopped",
    ),
    Variable(
        name="wavelength_high",
        dims=("edit",),
        units="token",
        long_name="longest wavelength that stopped",
    ),
    Variable(
        name="draw",
        dims=("edit",),
        units="1",
        long_name="number of the random draw, -1 if nothing is random",
    ),
    Variable(
        name="band",
        dims=("edit",),
        units="1",
        long_name="number of the band, 0 the fastest, -1 outside bands",
    ),
)
"""The variables that a truncation sweep adds to its evaluation."""
