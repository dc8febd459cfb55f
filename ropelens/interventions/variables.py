"""The variables of evaluations and truncation sweeps."""

from __future__ import annotations

from dataclasses import replace

from ropelens.attention.variables import table
from ropelens.profiles.measures import MEASURES

# fmt: off
EVALUATED = (
    *table("""
edit (edit): name of the edit
control_of (edit): the edit whose heads it has replaced by random ones
loss (edit, sequence) nat/token: mean loss of the sequence's predicted tokens
seen_loss (edit, sequence) nat/token: mean loss of predicted tokens that the sequence had before
class_loss (edit, sequence, token_class) nat/token: mean loss of its tokens of a class
class_tokens (sequence, token_class) token: predicted tokens of the sequence of a class
token_class (token_class): class of tokens
predicted_tokens (sequence) token: predicted tokens of the sequence
seen_tokens (sequence) token: predicted tokens that the sequence had before
far_loss (edit, sequence) nat/token: mean loss in bins in the second half of the context
far_tokens (sequence) token: predicted tokens of the sequence there
group (sequence): sequences that are drawn together: those of a document, or of a stretch
mean_loss (edit) nat/token: mean loss of all predicted tokens
mean_loss_se (edit) nat/token: its standard error over groups of sequences
position_loss (edit, position_bin) nat/token: mean loss of the tokens at the bin's positions
position_loss_se (edit, position_bin) nat/token: its standard error over groups of sequences
position_start (position_bin) token: first position of the bin
position_stop (position_bin) token: first position beyond the bin
first_loss (edit, trial) nat/token: mean loss of random tokens, the first time
repeat_loss (edit, trial) nat/token: mean loss of the same tokens, repeated
copy_loss (edit, copy_distance, trial) nat/token: mean loss of random tokens that come again,
    but for the first
copy_distance (copy_distance) token: tokens from a token to its copy
attention_change (edit, layer, head) bit: divergence from the attention of the model as it is
class_change (edit, layer, head, token_class) bit: the same over rows of a class of tokens
label (edit, layer, head): label of the head
class_label (edit, layer, head, token_class): the same over rows of a class of tokens
labels_changed_resampled (edit, resample) 1: heads with another label, groups drawn again
positional_fraction (edit, layer, head) 1: share of the bits that sinks do not explain which
    only the offset explains
retrieval (edit, retrieval_length, depth) 1: share of needles whose value was found
retrieval_hit (edit, retrieval_length, depth, retrieval_trial) 1: whether the value was found
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
"""The variables of an evaluation, beside those of the planes of the model as it is."""

SWEEP = table("""
edit (edit): what was done to the model
kind (edit): what stopped: nothing, one end, a band, or random planes as control
kept (edit) 1: share of the model's rotating planes that still rotate
planes (edit): numbers of the stopped planes, 0 the fastest
planes_stopped (edit) 1: number of stopped planes of a layer, the largest of all layers
wavelength_low (edit) token: shortest wavelength that stopped
wavelength_high (edit) token: longest wavelength that stopped
draw (edit) 1: number of the random draw, -1 where nothing is random
band (edit) 1: number of the band, 0 the fastest, -1 outside bands
""")
"""What a truncation sweep says of each of its edits."""

NEEDLES = 8  # needles of a prompt, of which one is asked for: chance is 1 in 8
OWN = "own"  # the variant of a reach that is the model as it rotates by itself
# fmt: on
