"""Assumptions about a model: where each is checked, and the error if it does not hold.

To support a family that breaks an assumption, change the function that checks it and the code
that relies on it. docs/families.md shows this table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """An assumption, the function that checks it, and the first line of its error."""

    statement: str
    checked_by: str
    error: str


# fmt: off
ASSUMPTIONS = (
    Assumption("The model is a causal language model of transformers, or wraps one",
        "model.as_live_model:as_live_model", "{model} is not a model that ropelens can run."),
    Assumption("All layers have the same number of heads",
        "model.as_live_model:as_live_model",
        "Layers of {model} have different numbers of heads."),
    Assumption("The weights are on a CPU or a CUDA device",
        "model.as_live_model:as_live_model",
        "{model} is on meta, where ropelens does not run."),
    Assumption("Some layers attend",
        "model.live_model:LiveModel.check_layers", "{model} has no attention."),
    Assumption("Every layer that attends calls the attention function that transformers "
        "registers",
        "model.live_model:LiveModel.check_layers", "{model} hides its attention."),
    Assumption("A layer attends once in a pass",
        "model.live_model:LiveModel.record_calls",
        "{model} attends more than once in a layer."),
    Assumption("The attention function receives its mask as a tensor, or needs none",
        "model.attention_hooks:wrapped_attention",
        "This attention implementation hides its mask."),
    Assumption("The output is softmax(softcap(scale q k)) v over the keys that the mask "
        "shows; all heads have the same mask, and some families add a sink logit",
        "model.output_check:OutputCheck.__call__",
        "{model} attends in a way that ropelens does not know."),
    Assumption("Logits do not change while the model is observed",
        "model.live_model:LiveModel.check_observation_is_exact",
        "{model} computes something else while it is observed."),
    Assumption("Queries and keys are finite",
        "rotation.probe:probe_single_tokens",
        "{model} has queries or keys that are NaN or infinite."),
    Assumption("Queries and keys change with their position",
        "rotation.probe:_check_rotates", "{model} does not rotate its queries."),
    Assumption("This change is a rotation in planes of two coordinates",
        "rotation.probe:_check_rotates",
        "{model} changes its queries with position, but not by a rotation."),
    Assumption("Values do not change with their position",
        "rotation.probe:_check_values", "{model} rotates its values too."),
    Assumption("A buffer `inv_freq` of the model, if there is one, has the frequencies",
        "rotation.stated:match_stated", "{model} does not rotate as it states."),
    Assumption("To become a RoPE variant: all rotary modules have one attention factor",
        "rotation.probe:RotationProbe.attention_factor",
        "{model} scales its queries in more than one way: [1.0, 2.0]."),
    Assumption("To become a RoPE variant: the configuration states the base",
        "rotation.stated:shape_of", "{model} does not state the base of its RoPE."),
    Assumption("For the parts of heads in logits: the path from the heads to the logits "
        "is linear",
        "model.output_projection:logit_directions",
        "The path from the heads of {model} to the logits is not linear."),
)
# fmt: on
