"""Gradients of an answer with respect to the scores of heads."""

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.errors import BadArgument
from ropelens.model import attention_hooks
from ropelens.model.attention_hooks import AttentionInput
from ropelens.model.forward_patches import gradients_enabled
from ropelens.model.live_model import LiveModel
from ropelens.rope.select import HeadMask
from ropelens.text.prompts import Token, TokenNames, token_id
from ropelens.text.text import Text

OfLogits = Callable[[Tensor], Tensor]
AnswerDefinition = Token | tuple[Token, Token] | OfLogits


class Number(NamedTuple):
    """An answer as a function of logits [position, token] of the `last` positions (0: all)."""

    of: OfLogits
    last: int = 0


def answer_number(
    answer: AnswerDefinition, tokenizer: TokenNames | None, vocabulary: int
) -> Number:
    if callable(answer):
        return Number(answer)
    pair = answer if isinstance(answer, tuple) else (answer,)
    first, *second = [token_id(token, tokenizer, vocabulary) for token in pair]
    return Number(lambda logits: logits[-1, first] - logits[-1, second].sum(), last=1)


def differentiate(
    live: LiveModel,
    text: Text,
    number: Number,
    chosen: HeadMask,
    *,
    size: float = 1.0,
    recomputed: bool = True,
) -> tuple[float, dict[int, tuple[AttentionCall, Tensor]]]:
    """The answer, and for each layer its call and the gradient with respect to its outputs.

    Scores of `chosen` heads are multiplied by `size`. Layers are `recomputed` in the backward
    pass, except if their experts get other tokens then, because of rounding.
    """
    calls: dict[int, AttentionCall] = {}
    outputs: dict[int, Tensor] = {}

    def keep_call(call: AttentionCall) -> None:
        calls.setdefault(call.layer, call)  # layers run again in the backward pass

    def keep_output(layer: int, output: Tensor, real: Tensor, tokens: Tensor) -> None:
        outputs.setdefault(layer, output)

    scaled = live.patch(scale_queries(chosen, torch.tensor(size, requires_grad=True)))
    enabled = gradients_enabled(live.model, recomputed=recomputed)
    try:
        with enabled, scaled, live.observe(keep_call), live.silence(keep_output):
            value = value_of(live, text, number)
            if (
                not isinstance(value, Tensor)
                or value.numel() != 1
                or not value.requires_grad
            ):
                raise BadArgument(
                    "answer must give one number that depends on the logits."
                )
            of_outputs = torch.autograd.grad(
                value, [*outputs.values()], materialize_grads=True
            )
        gradients = zip(outputs, of_outputs, strict=True)
        return float(value.detach()), {
            layer: (calls[layer], x) for layer, x in gradients
        }
    except CheckpointError:
        return differentiate(live, text, number, chosen, size=size, recomputed=False)
    finally:  # the graph has checkpoints, which have the functions above and their dicts
        calls.clear()
        outputs.clear()


def score_gradient(
    call: AttentionCall,
    of_output: Float[Tensor, "batch row heads feature"],
    heads: Int[Tensor, " head"],
) -> tuple[
    Float[Tensor, "batch head row key"], Float[Tensor, "batch head row _"], Tensor
]:
    """Gradient with respect to every score, A (g . v - g . o), scaled queries, and keys.

    g is the gradient with respect to the outputs o.
    """
    call = call.of_heads(heads)
    attention = attention_map(call)
    q, k, v = (x.to(attention) for x in (call.query, call.key, call.value))
    of_heads = of_output[:, :, heads.to(of_output.device)]
    g, output = (x.to(attention).transpose(1, 2) for x in (of_heads, call.output))
    slope, q = (
        attention * (g @ v.mT - (g * output).sum(-1, keepdim=True)),
        call.scale * q,
    )
    if call.softcap is not None:
        slope = slope * (1 - (q @ k.mT / call.softcap).tanh().square())
    return slope, q, k


def value_of(live: LiveModel, text: Text, number: Number) -> Float[Tensor, "*axis"]:
    """The answer of a sequence, or the sum of the answers of several sequences."""
    logits = live.forward(text.ids, hidden=text.hidden, last=number.last)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return reduce(add, map(number.of, logits))


def scale_queries(
    chosen: HeadMask, size: Float[Tensor, ""]
) -> attention_hooks.InputPatch:
    """A patch that multiplies the queries of chosen heads; by 1 it changes no bit."""

    def scale(
        layer: int, side: AttentionInput, x: Tensor, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        if side != "query":
            return x
        heads = chosen[layer][: x.shape[1]]
        return x * torch.where(heads, size, 1.0)[:, None, None].to(x)

    return scale
