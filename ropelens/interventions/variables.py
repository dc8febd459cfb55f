"""The variables of evaluations and truncation sweeps."""

from dataclasses import replace

from ropelens.attention.variables import table
from ropelens.profiles.measures import MEASURES

# fmt: off
EVALUATED = (
    *table("""
edit (edit): name of the edit
control_of (edit): the edit for which random heads are the control
silenced (edit, layer, head) 1: 1 if the edit silences the head, else 0
loss (edit, sequence) nat/token: mean loss of the sequence's predicted tokens
seen_loss (edit, sequence) nat/token: mean loss of predicted tokens that the sequence had before
class_loss (edit, sequence, token_class) nat/token: mean loss of tokens of a class
class_tokens (sequence, token_class) token: predicted tokens of the sequence of a class
token_class (token_class): class of tokens
predicted_tokens (sequence) token: predicted tokens of the sequence
seen_tokens (sequence) token: predicted tokens that the sequence had before
far_loss (edit, sequence) nat/token: mean loss in bins in the second half of the context
far_tokens (sequence) token: predicted tokens in these bins
group (sequence): group of sequences that are drawn together: a document, or a stretch of text
mean_loss (edit) nat/token: mean loss of all predicted tokens
mean_loss_se (edit) nat/token: standard error of mean_loss over groups of sequences
position_loss (edit, position_bin) nat/token: mean loss of the tokens at the bin's positions
position_loss_se (edit, position_bin) nat/token: standard error over groups of sequences
position_start (position_bin) token: first position of the bin
position_stop (position_bin) token: first position beyond the bin
first_loss (edit, trial) nat/token: mean loss of random tokens, the first time
repeat_loss (edit, trial) nat/token: mean loss of the same tokens, repeated
copy_loss (edit, copy_distance, trial) nat/token: mean loss of random tokens that are repeated,
    without the first token
copy_distance (copy_distance) token: distance between a token and its copy
attention_change (edit, layer, head) bit: divergence from the attention of the unmodified model
class_change (edit, layer, head, token_class) bit: the same over rows of a class of tokens
label (edit, layer, head): label of the head
class_label (edit, layer, head, token_class): label of the head from rows of a class of tokens
labels_changed_resampled (edit, resample) 1: heads with another label in a bootstrap resample
positional_fraction (edit, layer, head) 1: share of the offset in the bits that sinks do not
    explain, with its part of the shared bits
retrieval (edit, retrieval_length, depth) 1: share of needles whose value was found
retrieval_hit (edit, retrieval_length, depth, retrieval_trial) 1: 1 if the value was found
retrieval_length (retrieval_length) token: tokens of the prompt
depth (depth) 1: share of the prompt's text before the needle
"""),
    *(
        replace(row, dims=("edit", *row.dims))
        for row in MEASURES
        if row.column == "budget"
        or row.name in ("induction", "trial_induction", "duplicate_token")
    ),
)
"""The variables of an evaluation. The planes of the unmodified model come in addition."""

SWEEP = table("""
edit (edit): name of the edit
layers (edit): kind of the layers whose planes stopped, or all
kind (edit): which planes stopped: none, one end, a band, or random planes as a control
kept (edit) 1: share of the model's rotating planes that still rotate
planes (edit): numbers of the stopped planes; plane 0 is the fastest
planes_stopped (edit) 1: number of stopped planes of a layer, the largest of all layers
wavelength_low (edit) token: shortest wavelength that stopped
wavelength_high (edit) token: longest wavelength that stopped
draw (edit) 1: number of the random draw, -1 if nothing is random
band (edit) 1: number of the band, 0 the fastest, -1 outside bands
""")

OWN_ROTATION = "own"  # the variant of a reach that keeps the rotation of the model
# fmt: on
