"""A model as ropelens runs it: a public function creates it once and passes it on."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ropelens import config_facts
from ropelens.attention.call import AttentionCall
from ropelens.errors import UnsupportedModel
from ropelens.model import forward_patches
from ropelens.model.attention_hooks import attention_modules, wrapped_attention
from ropelens.model.hook_blocks import Hooks, Observer, hooked, hooks_of
from ropelens.model.intervention import Intervention
from ropelens.model.model_noise import Noise, measure_noise
from ropelens.model.output_check import OutputCheck
from ropelens.noise import allowed_residual, logit_change, noise_tokens
from ropelens.rope.select import HeadMask
from ropelens.runtime.devices import LOGITS_AT_ONCE, device_of
from ropelens.text.rows import Ids, Lengths, TokenMask
from ropelens.text.text import Text

NO_KEY = 'attn_implementation="sdpa" if some token sees no key, or another dtype'
CHECKED_TOKENS = 256  # length up to which observation is checked to change no logit
MORE_PASSES = 8  # further passes after a pass whose logits changed
ONE_PASS = 2**16  # tokens of the longest sequences that run in one pass

MASK_ELEMENTS = (
    2**25
)  # keys times rows of a chunk; a mask takes about 40 bytes for each
LOSS_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # logits whose loss is taken at once
LOGITS_OF_NOISE = 16  # last positions whose logits show noise

Recorded = TypeVar("Recorded")


class LiveModel:
    """A transformers model, run unmodified and observed through its attention interface."""

    in_chunks = (
        True  # whether `logits` can run the tokens in chunks, with a key-value cache
    )

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer  # without wrappers
        self._runner: Any = model  # the model, or a bridge around it
        self.config: PreTrainedConfig = model.config.get_text_config()
        self.class_name = type(model).__name__
        self.layers: int = getattr(self.config, "num_hidden_layers", 0)
        self.heads: int = getattr(self.config, "num_attention_heads", 0)  # query heads
        self.layer_types = config_facts.layer_types(self.config)
        self.attending = config_facts.attending_layers(self.config)  # indices of layers
        # Layers without attention keep a state instead of keys; "hybrid" layers keep both.
        stateless = not any(k.startswith("hybrid") for k in self.layer_types)
        self.in_chunks &= stateless and len(self.attending) == self.layers
        self.bos = self.config.to_dict().get("bos_token_id")
        self.vocabulary: int = self.config.vocab_size
        self.trained = config_facts.stated_context(model.config)  # in tokens, or None
        self.context = self.trained or 1024
        self.device = device_of(model)  # the device of the tokens
        self.eps = torch.finfo(model.dtype).eps
        self.depends_on_length = config_facts.depends_on_length(self.config)  # RoPE
        self._modules: list[Any] = attention_modules(model)
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument, and warns of the old name.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._takes_logits_to_keep &= model.base_model is not model
        self._compared: set[tuple[object, ...]] = set()
        self._checked: set[tuple[int, bool]] = set()

    def forward(
        self,
        tokens: Ids,
        positions: Int[Tensor, "*axis sequence position"] | None = None,
        *,
        hidden: TokenMask | None = None,
        last: int = 0,
    ) -> Float[Tensor, "sequence some token"]:
        """Logits of whole sequences, without a cache; `last=n`: at least the final n."""
        inputs = self._inputs(hidden, positions)
        if last and self._takes_logits_to_keep:
            # Pass indices, because Gemma 4 runs its last layers only on the requested rows if
            # it gets an integer.
            inputs["logits_to_keep"] = torch.arange(
                tokens.shape[1], device=self.device
            )[-last:]
        with forward_patches.without_dropout(self.model):
            result = self._runner(tokens.to(self.device), **inputs, use_cache=False)
        return result if isinstance(result, Tensor) else result.logits

    def _inputs(
        self,
        hidden: TokenMask | None,
        positions: Int[Tensor, "*axis sequence position"] | None,
    ) -> dict[str, Tensor]:
        mask = None if hidden is None else (~hidden).long()
        inputs = {"position_ids": positions, "attention_mask": mask}
        return {name: x.to(self.device) for name, x in inputs.items() if x is not None}

    @torch.no_grad()
    def record_calls(
        self,
        tokens: Ids,
        record: Callable[[AttentionCall], Recorded],
        positions: Int[Tensor, "*axis sequence position"] | None = None,
        *,
        hidden: TokenMask | None = None,
    ) -> dict[int, Recorded]:
        """Results of `record` for the attention call of each layer, on short sequences."""
        results: dict[int, Recorded] = {}

        def observe(call: AttentionCall) -> None:
            fault, rows, count = "", call.query.shape[2], tokens.shape[1]
            if rows > count:
                fault = "puts tokens of its own before its input"
                evidence = f"layer {call.layer}: {rows} rows for {count} tokens"
            elif call.layer in results:
                fault = "attends more than once in a layer"
                evidence = f"a second attention call of layer {call.layer} in one pass"
            if fault:
                hint = "a model that attends once to the tokens that it receives"
                raise UnsupportedModel(
                    f"{self.class_name} {fault}.", seen=evidence, hint=hint
                )
            results[call.layer] = record(call)

        with self.observe(observe):
            self.forward(tokens, positions, hidden=hidden, last=1)
        self.check_layers(set(results))
        return {layer: results[layer] for layer in sorted(results)}

    def logits(
        self, tokens: Ids, *, hidden: TokenMask | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "sequence some token"]]]:
        """All logits, in pieces of about `LOGITS_AT_ONCE`, with their first positions."""
        inputs: dict[str, Any] = self._inputs(hidden, None)
        chunk = self.chunk_length(tokens.shape[1])
        if chunk is None:
            yield from self._logits_in_pieces(tokens, inputs | {"use_cache": False})
            return
        past = DynamicCache()
        layer: Any = partial(forward_patches.PreallocatedLayer, tokens.shape[1])
        past.layer_class_to_replicate = layer
        for first in range(0, tokens.shape[1], chunk):
            part = tokens[:, first : first + chunk]
            options = {name: mask[:, : first + chunk] for name, mask in inputs.items()}
            options |= {self._cache_name: past, "use_cache": True}
            for begin, logits in self._logits_in_pieces(part, options):
                yield first + begin, logits

    @torch.no_grad()
    def losses(
        self, tokens: Ids, lengths: Lengths, hidden: TokenMask | None = None
    ) -> Float[Tensor, "sequence position"]:
        """Loss of the token at each position in nats; NaN at position 0 and in padding."""
        losses = torch.full(tokens.shape, torch.nan, dtype=torch.float64)
        for first, logits in self.logits(tokens, hidden=hidden):
            rows = max(1, LOSS_ELEMENTS[self.device.type] // logits.shape[-1])
            for sequence, length in enumerate(lengths.tolist()):
                last = min(length - 1, first + logits.shape[1])
                for begin in range(first, last, rows):
                    end = min(begin + rows, last)
                    target = tokens[sequence, begin + 1 : end + 1].to(
                        logits.device, torch.long
                    )
                    scores = logits[sequence, begin - first : end - first].float()
                    loss = cross_entropy(scores, target, reduction="none")
                    losses[sequence, begin + 1 : end + 1] = loss.double().cpu()
        return losses

    def chunk_length(self, context: int) -> int | None:
        """Tokens of a chunk if sequences have `context` tokens; None if they run in one pass.

        RoPE that changes with the length always runs in one pass, because a cache keeps the
        rotation that its keys had when the sequence was shorter.
        """
        if context <= ONE_PASS or self.depends_on_length or not self.in_chunks:
            return None
        return max(1, min(ONE_PASS, MASK_ELEMENTS // context))

    def forget_length(self) -> None:
        """Run one token: dynamic RoPE keeps the rotation of the longest sequence until then."""
        if self.depends_on_length:
            with self.without_hooks(), torch.no_grad():  # one token cannot be resampled
                self.forward(torch.zeros(1, 1, dtype=torch.long), last=1)

    def _logits_in_pieces(
        self, tokens: Tensor, inputs: dict[str, Any]
    ) -> Iterator[tuple[int, Tensor]]:
        """Logits of `tokens`, which follow the tokens in a cache among the `inputs`."""
        ids, context = tokens.to(self.device), tokens.shape[1]
        once = partial(
            forward_patches.cache_first_result, self.model.base_model, list[Any]()
        )
        at_once = LOGITS_AT_ONCE[self.device.type] // (len(tokens) * self.vocabulary)
        size = max(1, at_once) if self._takes_logits_to_keep else context
        for begin in range(0, context, size):
            piece = torch.arange(begin, min(begin + size, context), device=ids.device)
            options = {} if size >= context else {"logits_to_keep": piece}
            # Restore the model before the caller gets the piece and possibly stops.
            with forward_patches.without_dropout(self.model), once():
                logits = self.model(ids, **inputs, **options).logits
            yield begin, logits

    @cached_property
    def logits_cost(self) -> float:
        """Approximate time that logits take, compared with all layers of a plain pass."""
        head = self.vocabulary * config_facts.stated_number(
            self.config, "hidden_size", 1
        )
        other = [
            x.numel() for x in self.model.parameters() if self.vocabulary not in x.shape
        ]
        return head / max(1, sum(other))

    @cached_property
    def noise(self) -> Noise:
        """Rounding noise of the model without open blocks; see `measure_noise`."""

        def run(ids: Ids, observer: Observer) -> Tensor:
            with (
                self.without_hooks(),
                self._hooked(lambda _: Hooks(observers=(observer,))),
            ):
                return self.forward(ids, last=LOGITS_OF_NOISE)[:, -LOGITS_OF_NOISE:]

        return measure_noise(
            self.model, run, noise_tokens(self.vocabulary, self.context)
        )

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Call `observer` with every attention call while the block runs."""
        check = OutputCheck(self.class_name, self.noise.call, self._compared)
        return self._hooked(
            lambda hooks: replace(
                hooks, observers=(*hooks.observers, observer), output_check=check
            )
        )

    def intervene(self, *interventions: Intervention) -> AbstractContextManager[None]:
        """Apply interventions to the attention calls while the block runs.

        They follow the interventions of the open blocks; see `Intervention.rotates`.
        """
        return self._hooked(lambda hooks: hooks.intervene(*interventions))

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The interventions of the open blocks, in the order in which they are applied."""
        hooks = hooks_of(self._modules[0])
        return () if hooks is None else hooks.interventions

    def without_hooks(self) -> AbstractContextManager[None]:
        """Suspend every open intervention and observer while the block runs."""
        blocks = [module for module in self._modules if hooks_of(module) is not None]
        return hooked(blocks, lambda _: Hooks())

    @contextmanager
    def _hooked(self, change: Callable[[Hooks], Hooks]) -> Iterator[None]:
        with wrapped_attention(self.model), hooked(self._modules, change):
            yield

    @torch.no_grad()
    def check_observation_is_exact(self, text: Text) -> None:
        """Raise `UnsupportedModel` unless logits are bit-identical while observed.

        The check runs once for each length, on the first tokens of the longest sequence. If a
        model does not repeat its own logits, it may change by the noise of its passes.
        """
        if self.chunk_length(text.context) is not None:
            return
        # First, a sequence whose first token is hidden and sees no key.
        begins_hidden = 0 if text.hidden is None else text.hidden[:, 0] * text.context
        longest = text[[int((text.lengths + begins_hidden).argmax())]]
        tokens, hidden = longest.ids[:, :CHECKED_TOKENS], longest.hidden
        hidden = None if hidden is None else hidden[:, :CHECKED_TOKENS]
        case = (tokens.shape[1], hidden is None)
        if case in self._checked:
            return
        run = partial(self.forward, tokens, hidden=hidden, last=1)
        observing: Any = {"observers": (lambda call: None,), "output_check": None}

        def observed() -> Tensor:
            with self._hooked(lambda hooks: replace(hooks, **observing)):
                return run()

        fault, evidence = "", f"logits of {case[0]} tokens"
        with forward_patches.skip_mlp_work(self.model):
            plain, seen = [run()], [observed()]
            if plain[0].isnan().any():
                fault, hint = "NaN", NO_KEY
            elif not torch.equal(plain[0], seen[0]):
                plain += [run() for _ in range(MORE_PASSES)]
                seen += [observed() for _ in range(MORE_PASSES)]
                spread = max(_change(x[0], other) for x in (plain, seen) for other in x)
                change = min(_change(x, y) for x, y in product(plain, seen))
                evidence += (
                    f": a relative change of {change:.2g}; equal passes by {spread:.2g}"
                )
                if not spread or change > allowed_residual(spread, self.eps):
                    fault, hint = "something else while it is observed", ""
        if fault:
            what = f"{self.class_name} computes {fault}."
            raise UnsupportedModel(what, seen=evidence, hint=hint)
        self._checked.add(case)

    @cached_property
    def attending_heads(self) -> HeadMask:
        """The query heads that attention calls have, which are fewer in a pruned layer."""
        self.check_layers({*self.noise.heads})
        counts = torch.tensor(
            [self.noise.heads.get(layer, 0) for layer in range(self.layers)]
        )
        return torch.arange(self.heads) < counts[:, None]

    def check_layers(self, seen: set[int]) -> None:
        """Raise `UnsupportedModel` unless every layer that attends showed its attention."""
        missing, count = sorted(set(self.attending) - seen), len(self.attending)
        hint, means = (
            "a family of docs/families.md, such as Llama, Qwen, Gemma or GPT-NeoX",
            "",
        )
        fault, types = "has no attention", sorted({*self.layer_types})
        evidence = f"layers of {', '.join(types)}"
        if missing:
            fault = "hides its attention"
            evidence = f"{count - len(missing)} of {count} layers showed their queries and keys"
            evidence += f"; the first that did not is layer {missing[0]}"
            means = "they do not call an attention function that transformers registers"
            hint += "; a num_hidden_layers that counts the layers of the model"
        if missing or not count:
            raise UnsupportedModel(
                f"{self.class_name} {fault}.", seen=evidence, means=means, hint=hint
            )


def _change(one: Tensor, other: Tensor) -> float:
    return float(logit_change(one, other).max()) if one is not other else 0.0
