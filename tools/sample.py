"""Sample text from a model, in documents of exactly one context."""

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROUNDS = 2  # each samples the requested number of documents


def sample_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    documents: int,
    context: int,
    temperature: float = 0.9,
    seed: int = 0,
) -> list[str]:
    """Texts sampled from `model`, each of which encodes to exactly `context` tokens.

    The count includes BOS. A text is rejected if it encodes to other tokens than the sampled
    tokens, or if it has a broken character. There are two rounds, so fewer than `documents`
    texts come back if more than half are rejected.
    """
    texts: list[str] = []
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        for _ in range(ROUNDS):
            tokens = _sample(
                model, rows=documents, context=context, temperature=temperature
            )
            for row in tokens.tolist():
                text = _cut(_text(row, tokenizer), tokenizer, tokens=context)
                if text is not None:
                    texts.append(text)
            if len(texts) >= documents:
                break
    return texts[:documents]


def _sample(
    model: PreTrainedModel, *, rows: int, context: int, temperature: float
) -> Int64[Tensor, "row position"]:
    """A context of tokens after BOS, and an eighth more, continued from its second half.

    The model never sees positions beyond its context, and the surplus leaves room to cut. EOS
    and a second BOS are not sampled, so all rows have the same length.
    """
    bos = model.config.bos_token_id
    eos = model.config.eos_token_id
    start = torch.full((rows, 1), bos, device=model.device)
    first = _continue(
        model, start, new=context - 1, temperature=temperature, barred=[bos, eos]
    )
    prompt = torch.cat([start, first[:, -(context // 2) :]], dim=1)
    more = _continue(
        model, prompt, new=context // 8, temperature=temperature, barred=[bos, eos]
    )
    return torch.cat([first, more[:, prompt.shape[1] :]], dim=1)


def _continue(
    model: PreTrainedModel,
    prompt: Int64[Tensor, "row position"],
    *,
    new: int,
    temperature: float,
    barred: list[int],
) -> Int64[Tensor, "row position"]:
    return model.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=new,
        suppress_tokens=barred,
        pad_token_id=barred[0],
    )


def _cut(text: str, tokenizer: PreTrainedTokenizerFast, *, tokens: int) -> str | None:
    """The start of `text` that encodes to exactly `tokens` with BOS, or None."""
    ids = tokenizer(text, verbose=False).input_ids  # longer than the context by design
    cut = _text(ids[:tokens], tokenizer)
    exact = len(ids) >= tokens and len(tokenizer(cut).input_ids) == tokens
    return cut if exact and "\ufffd" not in cut else None


def _text(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text
