"""The next token of a prompt, explained by heads and planes without an analysis."""

from dataclasses import dataclass
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
from ropelens.profiles.excerpt_choice import check_excerpts
from ropelens.profiles.measurement import one_sequence
from ropelens.profiles.profile import profile as measure
from ropelens.report.prompt import PromptResults
from ropelens.runtime.progress import ProgressOption, display_of, opening
from ropelens.runtime.run_record import this_command
from ropelens.text.prompts import TokenNames, token_names
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
    live = as_live_model(model, tokenizer)
    show = display_of(progress)
    tokenizer = tokenizer or live.tokenizer
    with opening(show, "reading the prompt"):
        question = Question.read(live, prompt, versus, tokenizer)
    text = question.text
    other = question.other
    with opening(show, "attributing"):
        attribution = attribute_planes(
            live, text, question.tokens, check=CHECKED, source=other
        )
    patches: list[xr.Dataset] = []
    if other is not None:
        for units in OVER:
            patched = patch_each(
                live,
                text,
                other,
                question.tokens,
                over=units,
                tokenizer=tokenizer,
                progress=show,
            )
            patches.append(patched)
    profile = measure(
        live,
        text.ids[:1],
        tokenizer=tokenizer,
        excerpts=[text.ids[0]],
        budget=False,
        surrogates=0,
        progress=show,
    )
    facts = {
        **question.words(tokenizer),
        "prompt": prompt,
        "versus": "" if other is None else versus,
        "answer": attribution.attrs.get("answer", 0.0),
        "source_answer": attribution.attrs.get("source_answer", 0.0),
        "share": float(question.chances.max()),
    }
    profile = profile.assign_attrs(command=this_command())
    return PromptResults(profile, attribution, patches, facts)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt, and the two next `tokens` whose logits are compared.

    `other` is the prompt that it is compared with, and `chances` has the probability of each
    token after the prompt.
    """

    text: Text
    other: Text | None
    chances: Float[Tensor, " token"]
    tokens: tuple[int, int]

    @classmethod
    def read(
        cls,
        live: LiveModel,
        prompt: str,
        versus: str | None,
        tokenizer: TokenNames | None,
    ) -> "Question":
        """Choose the tokens; see `explain_prompt`."""
        text = one_sequence(live, prompt, tokenizer).text
        check_excerpts(live.config, [text.ids[0]])
        chances = _chances(live, text)
        likely = chances.topk(LIKELY + 1).indices.tolist()
        rivals = [] if versus is None else encode(versus, tokenizer, prompt=True).ids
        other: Text | None = None
        if versus is None:
            tokens = (likely[0], likely[1])
        elif len(rivals) == 1:
            tokens = _likeliest_and(rivals[0], likely)
        else:
            other = _another_prompt(live, versus, text, tokenizer)
            others = _chances(live, other)
            tokens = _tokens_that_differ(likely[:LIKELY], chances, others)
        return cls(text=text, other=other, chances=chances, tokens=tokens)

    def words(self, tokenizer: TokenNames | None) -> dict[str, str]:
        """The names of the likeliest token and the two tokens."""
        likeliest = int(self.chances.argmax())
        ids = torch.tensor([likeliest, *self.tokens], dtype=torch.long, device="cpu")
        likeliest_name, first, second = token_names(ids, tokenizer)
        return {
            "next": visible_token(likeliest_name),
            "first": visible_token(first),
            "second": visible_token(second),
        }


@torch.no_grad()
def _chances(live: LiveModel, text: Text) -> Float[Tensor, " token"]:
    """Probability of each token after the text."""
    logits = live.forward(text.ids, hidden=text.hidden, last=1)[0, -1]
    return logits.float().softmax(-1).cpu()


def _another_prompt(
    live: LiveModel, versus: str, text: Text, tokenizer: TokenNames | None
) -> Text:
    """The prompt `versus` as tokens, which must differ from the `text`."""
    other = one_sequence(live, versus, tokenizer).text
    if torch.equal(other.ids, text.ids):
        raise BadArgument(
            "The two prompts are the same.", hint="another prompt, or one token"
        )
    return other


def _likeliest_and(second: int, likely: list[int]) -> tuple[int, int]:
    """The likeliest token other than `second`, and `second`."""
    first = likely[0] if likely[0] != second else likely[1]
    return first, second


def _tokens_that_differ(
    likely: list[int], chances: Float[Tensor, " token"], others: Float[Tensor, " token"]
) -> tuple[int, int]:
    """The likely token after each prompt that the other prompt makes least likely.

    `likely` are likely tokens after the first prompt, which gives tokens the `chances`. The
    second prompt gives them the chances `others`.
    """
    gain = (chances - others).tolist()
    likely_after_second = others.topk(LIKELY).indices.tolist()
    second = min(likely_after_second, key=gain.__getitem__)
    firsts = [token for token in likely if token != second]
    first = max(firsts, key=gain.__getitem__)
    return first, second
