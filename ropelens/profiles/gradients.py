"""Gradients of an answer with respect to the scores of heads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.errors import BadArgument
from ropelens.model.forward_patches import gradients_enabled
from ropelens.model.intervention import HeadInputs, HeadOutputs, Intervention
from ropelens.model.live_model import LiveModel
from ropelens.rope.select import HeadMask
from ropelens.text.prompts import Token, TokenNames, token_id
from ropelens.text.text import Text

OfLogits = Callable[[Tensor], Tensor]
AnswerDefinition = Token | tuple[Token, Token] | OfLogits


@dataclass(frozen=True)
class Number:
    """An answer as a function of logits [position, token] of the `last` positions (0: all)."""

    of: OfLogits
    last: int = 0


def answer_number(
    answer: AnswerDefinition, tokenizer: TokenNames | None, vocabulary: int
) -> Number:
    """The logit of a token, the difference of the logits of two, or a function of logits."""
    if callable(answer):
        return Number(answer)
    tokens = answer if isinstance(answer, tuple) else (answer,)
    ids = [token_id(token, tokenizer, vocabulary) for token in tokens]

    def difference(logits: Float[Tensor, "position token"]) -> Float[Tensor, ""]:
        return logits[-1, ids[0]] - logits[-1, ids[1:]].sum()

    return Number(difference, last=1)


@dataclass(frozen=True)
class ScoreGradient:
    """Gradient of an answer with respect to every score of some heads, and their vectors.

    Queries have the scale of the scores. Each head has the keys that it reads.
    """

    slope: Float[Tensor, "batch head row key"]
    query: Float[Tensor, "batch head row coordinate"]
    key: Float[Tensor, "batch head key coordinate"]


@dataclass(frozen=True)
class LayerGradient:
    """The attention call of a layer, and the gradient with respect to its outputs."""

    call: AttentionCall
    of_output: Float[Tensor, "batch row heads feature"]

    def of_scores(self, heads: Int[Tensor, " head"]) -> ScoreGradient:
        """Gradient with respect to every score of `heads`: A (g . v - g . o).

        g is the gradient with respect to the outputs o.
        """
        call = self.call.of_heads(heads)
        attention = attention_map(call)
        query = call.query.to(attention)
        key = call.key.to(attention)
        value = call.value.to(attention)
        of_output = self.of_output[:, :, heads.to(self.of_output.device)]
        g = of_output.to(attention).transpose(1, 2)
        output = call.output.to(attention).transpose(1, 2)
        slope = attention * (g @ value.mT - (g * output).sum(-1, keepdim=True))
        query = call.scale * query
        if call.softcap is not None:
            squashed = (query @ key.mT / call.softcap).tanh()
            slope = slope * (1 - squashed.square())
        return ScoreGradient(slope, query, key)


@dataclass(frozen=True)
class Derivative:
    """An answer, and its gradient by layer."""

    answer: float
    layers: dict[int, LayerGradient]


class OutputRecorder(Intervention):
    """Keeps the attention call and the outputs of each layer of a pass."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.outputs: dict[int, Tensor] = {}

    def keep_call(self, call: AttentionCall) -> None:
        self.calls.setdefault(call.layer, call)  # layers run again in the backward pass

    def replace_output(self, outputs: HeadOutputs) -> None:
        """Keep the outputs, whose gradients are known, and do not replace them."""
        self.outputs.setdefault(outputs.layer, outputs.output)

    def clear(self) -> None:
        self.calls.clear()
        self.outputs.clear()


def differentiate(
    live: LiveModel,
    text: Text,
    number: Number,
    chosen: HeadMask,
    *,
    size: float = 1.0,
    recomputed: bool = True,
) -> Derivative:
    """The answer to `text`, and its gradient with respect to the outputs of each layer.

    Scores of `chosen` heads are multiplied by `size`. Layers are `recomputed` in the backward
    pass, except if their experts get other tokens then, because of rounding.
    """
    recorder = OutputRecorder()
    factor = torch.tensor(size, requires_grad=True, dtype=torch.float32, device="cpu")
    scaled = ScaledQueries(chosen, factor)
    enabled = gradients_enabled(live.model, recomputed=recomputed)
    try:
        with (
            enabled,
            live.observe(recorder.keep_call),
            live.intervene(scaled, recorder),
        ):
            answer = value_of(live, text, number)
            check_answer(answer)
            gradients = torch.autograd.grad(
                answer, [*recorder.outputs.values()], materialize_grads=True
            )
        layers = {}
        for layer, gradient in zip(recorder.outputs, gradients, strict=True):
            layers[layer] = LayerGradient(recorder.calls[layer], gradient)
        return Derivative(float(answer.detach()), layers)
    except CheckpointError:
        return differentiate(live, text, number, chosen, size=size, recomputed=False)
    finally:  # the graph has checkpoints, which have the functions and dicts of the recorder
        recorder.clear()


def check_answer(answer: object) -> None:
    """Raise `BadArgument` unless a gradient of `answer` exists."""
    if isinstance(answer, Tensor) and answer.numel() == 1 and answer.requires_grad:
        return
    raise BadArgument("answer must give one number that depends on the logits.")


def value_of(live: LiveModel, text: Text, number: Number) -> Float[Tensor, "*axis"]:
    """The answer of a sequence, or the sum of the answers of several sequences."""
    logits = live.forward(text.ids, hidden=text.hidden, last=number.last)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return reduce(add, map(number.of, logits))


@dataclass(frozen=True)
class ScaledQueries(Intervention):
    """Multiply the queries of `chosen` heads by `size`; 1 changes no bit."""

    chosen: HeadMask
    size: Float[Tensor, ""]

    def change_input(self, inputs: HeadInputs) -> Float[Tensor, "batch head slot _"]:
        x = inputs.vectors
        if inputs.name != "query":
            return x
        heads = self.chosen[inputs.layer][: x.shape[1]]
        return x * torch.where(heads, self.size, 1.0)[:, None, None].to(x)
