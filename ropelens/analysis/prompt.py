"""The next token of a prompt, explained by heads and planes without an analysis."""

from typing import Any, Literal

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.figures.formats import visible_token
from ropelens.interventions.attribute import attribute_planes
from ropelens.interventions.patch_each import patch_each
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles.capture import one_sequence
from ropelens.profiles.excerpt_choice import check_excerpts
from ropelens.profiles.profile import profile as measure
from ropelens.report.prompt import PromptResults
from ropelens.runtime.progress import ProgressOption, display_of, opening
from ropelens.runtime.run_record import this_command
from ropelens.text.prompts import token_names
from ropelens.text.text import Text
from ropelens.text.tokenize import encode

CHECKED = 10  # planes of largest attribution, and random planes, that are dropped by themselves
LIKELY = 10  # next tokens of each prompt that are compared
OVER: tuple[Literal["head", "position"], ...] = ("head", "position")


@public
def explain_prompt(
    model: Model,
    prompt: str,
    versus: str | None = None,
    *,
    tokenizer: Any = None,
    progress: ProgressOption = None,
) -> PromptResults:
    """Attribute the next token of a prompt to heads and planes; no analysis is needed.

    The answer is a difference of two logits at the last position. `versus` selects them:

    - None: the likeliest next token and the second likeliest.
    - one token: the likeliest other token, and this token.
    - another prompt: each prompt selects, among its ten likeliest next tokens, the one that the
      other prompt makes least likely. Each head and position is also patched from that prompt.

    Raises `BadText` for a prompt of fewer than 3 tokens, `BadArgument` for a prompt that is too
    long and for equal prompts, and the errors of `attribute_planes`.
    """
    live, show = as_live_model(model, tokenizer), display_of(progress)
    tokenizer = tokenizer or live.tokenizer
    other: Text | None = None
    with opening(show, "reading the prompt"):
        text = one_sequence(live, prompt, tokenizer).text
        (ids,) = check_excerpts(live.config, [text.ids[0]])
        rival = [] if versus is None else encode(versus, tokenizer, prompt=True)[1]
        chances = _chances(live, text)
        likely = chances.topk(LIKELY + 1).indices.tolist()
        if versus is not None and len(rival) != 1:
            other = one_sequence(live, versus, tokenizer).text
            others = _chances(live, other)
            rivals = others.topk(LIKELY).indices.tolist()
            likely = sorted(
                likely[:LIKELY], key=lambda token: others[token] - chances[token]
            )
            rival = sorted(rivals, key=lambda token: chances[token] - others[token])
        first = next(token for token in likely if token not in rival[:1])
        pair = first, (rival or likely[1:])[0]
    if other is not None and torch.equal(other.ids, text.ids):
        raise BadArgument(
            "The two prompts are the same.", hint="another prompt, or one token"
        )
    with opening(show, "attributing"):
        attribution = attribute_planes(live, text, pair, check=CHECKED, source=other)
    options: dict[str, Any] = {"tokenizer": tokenizer, "progress": show}
    patches: list[xr.Dataset] = []
    if other is not None:
        patches = [patch_each(live, text, other, pair, over=x, **options) for x in OVER]
    options |= {"excerpts": [ids], "budget": False, "surrogates": 0}
    profile = measure(live, ids[None], **options).assign_attrs(command=this_command())
    names = token_names(torch.tensor([int(chances.argmax()), *pair]), tokenizer)
    facts: dict[str, Any] = {
        "prompt": prompt,
        "versus": versus if other is not None else "",
    }
    facts |= zip(("next", "first", "second"), map(visible_token, names), strict=True)
    facts |= {
        name: attribution.attrs.get(name, 0.0) for name in ("answer", "source_answer")
    }
    return PromptResults(
        profile, attribution, patches, facts | {"share": float(chances.max())}
    )


@torch.no_grad()
def _chances(live: LiveModel, text: Text) -> Float[Tensor, " token"]:
    """Probability of each token after the text."""
    return (
        live.forward(text.ids, hidden=text.hidden, last=1)[0, -1]
        .float()
        .softmax(-1)
        .cpu()
    )
