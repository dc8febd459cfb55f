"""The page of a prompt: the heads and planes that make its next token, without an analysis."""

from typing import Any, Literal

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ropelens.analysis.plan import this_command
from ropelens.errors import BadArgument, public
from ropelens.figures.formats import visible_token
from ropelens.interventions.attribute import attribute_planes
from ropelens.interventions.patch_each import patch_each
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles.capture import one_sequence, token_names
from ropelens.profiles.excerpts import check_excerpts
from ropelens.profiles.profile import profile as measure
from ropelens.report.prompt import PromptResults
from ropelens.runtime.progress import ProgressOption, display_of, opening
from ropelens.text.text import Text
from ropelens.text.tokenize import encode

CHECKED = 10  # planes of largest attribution, and random planes, that are dropped by themselves
OVER: tuple[Literal["head", "position"], ...] = ("head", "position")
LIKELY = 10  # next tokens of each prompt that are compared


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
    - another prompt: of the ten likeliest next tokens of each prompt, the token whose
      probability falls most if the other prompt is read instead. Every head and position is
      then patched from the other prompt.

    Raises `BadText` for a prompt of fewer than 3 tokens, `BadArgument` for a prompt that is too
    long or for equal prompts, and the errors of `attribute_planes`.
    """
    live, show = as_live_model(model, tokenizer), display_of(progress)
    tokenizer = tokenizer or live.tokenizer
    with opening(show, "reading the prompt"):
        text = one_sequence(live, prompt, tokenizer).text
        (ids,) = check_excerpts(live.config, [text.ids[0]])
        other = None
        if versus is not None and len(encode(versus, tokenizer, prompt=True)[1]) != 1:
            other = one_sequence(live, versus, tokenizer).text
        chances = _chances(live, text)
        likely = chances.topk(min(LIKELY, len(chances))).indices
        if other is not None:
            change = chances.exp() - (others := _chances(live, other)).exp()
            rivals = others.topk(len(likely)).indices
            likely, rivals = likely[change[likely].argmax()], rivals[change[rivals].argmin()]
            pair = int(likely), int(rivals)
        elif versus is not None:
            rival = encode(versus, tokenizer, prompt=True)[1][0]
            pair = int(likely[likely != rival][0]), rival
        else:
            pair = int(likely[0]), int(likely[1])
    if pair[0] == pair[1]:
        raise BadArgument("Both prompts have the same next token.", hint="versus: one token")
    with opening(show, "attributing"):
        attribution = attribute_planes(live, text, pair, check=CHECKED, source=other)
    patches: list[xr.Dataset] = []
    options: dict[str, Any] = {"tokenizer": tokenizer, "progress": show}
    if other is not None:
        patches = [patch_each(live, text, other, pair, over=x, **options) for x in OVER]
    options |= {"excerpts": [ids], "budget": False, "surrogates": 0}
    profile = measure(live, ids[None], **options)
    profile.attrs["command"] = this_command()
    names = token_names(torch.tensor([int(chances.argmax()), *pair]), tokenizer)
    facts = dict(zip(("next", "first", "second"), map(visible_token, names), strict=True))
    facts |= {"prompt": prompt, "versus": versus if other is not None else ""}
    facts |= {"share": float(chances.max().exp())}
    return PromptResults(profile, attribution, patches, facts)


@torch.no_grad()
def _chances(live: LiveModel, text: Text) -> Float[Tensor, " token"]:
    """Log probability of each token after the text."""
    return (
        live.forward(text.ids, hidden=text.hidden, last=1)[0, -1].float().log_softmax(-1).cpu()
    )
