"""A model as ropelens runs it: a public function creates it once and passes it on."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from ropelens import config_facts
from ropelens.attention.call import AttentionCall
from ropelens.compatibility import cache_argument, newer_transformers
from ropelens.errors import UnsupportedModel
from ropelens.model import forward_patches
from ropelens.model.attention_hooks import attention_modules, wrapped_attention
from ropelens.model.hook_blocks import ChangeOfHooks, Hooks, Observer, hooked, hooks_of
from ropelens.model.intervention import Intervention
from ropelens.model.model_noise import Noise, measure_noise
from ropelens.model.observation_check import check_same_logits
from ropelens.model.output_check import NoiseNeeded, OutputCheck
from ropelens.model.user_hooks import explained_user_hooks, without_user_hooks
from ropelens.noise import noise_tokens
from ropelens.rope.select import HeadMask
from ropelens.runtime.devices import LOGITS_AT_ONCE, device_of
from ropelens.text.rows import Ids, Lengths, TokenMask
from ropelens.text.text import Text

CHECKED_TOKENS = 256  # length up to which observation is checked to change no logit
ONE_PASS = 2**16  # tokens of the longest sequences that run in one pass
MASK_ELEMENTS = 2**25  # keys times rows of a chunk, whose mask takes 40 bytes for each
LOSS_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # logits whose loss is taken at once
LOGITS_OF_NOISE = 16  # last positions whose logits show noise

ONE_CALL = "a model that attends once to the tokens that it receives"

Recorded = TypeVar("Recorded")
Positions = Int[Tensor, "*axis sequence position"]


class LiveModel:
    """A transformers model, run unmodified and observed through its attention interface."""

    in_chunks = True
    """Whether `logits` can run the tokens in chunks, with a key-value cache."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        self.model = model  # without wrappers
        self.tokenizer = tokenizer
        self._runner: Any = model  # the model, or a bridge around it
        self.config: PreTrainedConfig = model.config.get_text_config()
        self.class_name = type(model).__name__
        self.layers: int = getattr(self.config, "num_hidden_layers", 0)
        self.heads: int = getattr(self.config, "num_attention_heads", 0)  # query heads
        self.layer_types = config_facts.layer_types(self.config)
        self.attending = config_facts.attending_layers(self.config)  # indices of layers
        # Layers without attention keep a state instead of keys; "hybrid" layers keep both.
        keeps_state = any(name.startswith("hybrid") for name in self.layer_types)
        if keeps_state or len(self.attending) != self.layers:
            self.in_chunks = False
        self.bos = self.config.to_dict().get("bos_token_id")
        self.vocabulary: int = self.config.vocab_size
        self.trained = config_facts.stated_context(model.config)  # in tokens, or None
        self.context = self.trained or 1024
        self.device = device_of(model)  # the device of the tokens
        self.eps = torch.finfo(model.dtype).eps
        self.depends_on_length = config_facts.depends_on_length(self.config)  # RoPE
        self._modules: list[Any] = attention_modules(model)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(parameters)
        has_head = model.base_model is not model
        self._takes_logits_to_keep = has_head and "logits_to_keep" in parameters
        self._compared: set[tuple[object, ...]] = set()
        self._checked: set[tuple[int, bool]] = set()

    def forward(
        self,
        tokens: Ids,
        positions: Positions | None = None,
        *,
        hidden: TokenMask | None = None,
        last: int = 0,
    ) -> Float[Tensor, "sequence some token"]:
        """Logits of whole sequences, without a cache; `last=n`: at least the final n."""
        inputs = self._inputs(hidden)
        if positions is not None:
            inputs["position_ids"] = positions.to(self.device)
        if last and self._takes_logits_to_keep:
            # Pass indices, because Gemma 4 runs its last layers only on the requested rows if
            # it gets an integer.
            every = torch.arange(tokens.shape[1], device=self.device)
            inputs["logits_to_keep"] = every[-last:]
        with (
            forward_patches.without_dropout(self.model),
            explained_user_hooks(self.model),
        ):
            result = self._runner(tokens.to(self.device), **inputs, use_cache=False)
        return result if isinstance(result, Tensor) else result.logits

    def _inputs(self, hidden: TokenMask | None) -> dict[str, Any]:
        """The arguments of the model that hide tokens."""
        if hidden is None:
            return {}
        return {"attention_mask": (~hidden).long().to(self.device)}

    @torch.no_grad()
    def record_calls(
        self,
        tokens: Ids,
        record: Callable[[AttentionCall], Recorded],
        positions: Positions | None = None,
        *,
        hidden: TokenMask | None = None,
    ) -> dict[int, Recorded]:
        """Results of `record` for the attention call of each layer, on short sequences.

        The noise of the model is measured only if its output misses recomputed attention.
        """
        run = partial(self.forward, tokens, positions, hidden=hidden, last=1)
        recorder = CallRecorder(self.class_name, tokens.shape[1], record)
        try:
            with self._observe(recorder.add, noise=None):
                run()
        except NoiseNeeded:
            recorder.results.clear()
            with self.observe(recorder.add):
                run()
        results = recorder.results
        self.check_layers(set(results))
        return {layer: results[layer] for layer in sorted(results)}

    def logits(
        self, tokens: Ids, *, hidden: TokenMask | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "sequence some token"]]]:
        """All logits, in pieces of about `LOGITS_AT_ONCE`, with their first positions."""
        length = tokens.shape[1]
        chunk = self.chunk_length(length)
        if chunk is None:
            yield from self._logits_in_pieces(tokens, hidden)
            return
        cache = DynamicCache()
        layer: Any = partial(forward_patches.PreallocatedLayer, length)
        cache.layer_class_to_replicate = layer
        for first in range(0, length, chunk):
            last = first + chunk
            hidden_so_far = None if hidden is None else hidden[:, :last]
            pieces = self._logits_in_pieces(tokens[:, first:last], hidden_so_far, cache)
            for begin, logits in pieces:
                yield first + begin, logits

    def _logits_in_pieces(
        self, tokens: Ids, hidden: TokenMask | None, cache: Cache | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Logits of `tokens`, which follow the tokens in a `cache`."""
        inputs = self._inputs(hidden)
        inputs["use_cache"] = cache is not None
        if cache is not None:
            inputs[self._cache_name] = cache
        ids = tokens.to(self.device)
        length = tokens.shape[1]
        size = length
        if self._takes_logits_to_keep:
            logits_of_position = len(tokens) * self.vocabulary
            size = max(1, LOGITS_AT_ONCE[self.device.type] // logits_of_position)
        hidden_states: list[Any] = []  # of the first piece, for all pieces
        for begin in range(0, length, size):
            if size < length:
                end = min(begin + size, length)
                inputs["logits_to_keep"] = torch.arange(begin, end, device=ids.device)
            # Restore the model before the caller gets the piece and possibly stops.
            with (
                forward_patches.without_dropout(self.model),
                explained_user_hooks(self.model),
                forward_patches.cache_first_result(
                    self.model.base_model, hidden_states
                ),
            ):
                logits = self.model(ids, **inputs).logits
            yield begin, logits

    @torch.no_grad()
    def losses(
        self, tokens: Ids, lengths: Lengths, hidden: TokenMask | None = None
    ) -> Float[Tensor, "sequence position"]:
        """Loss of the token at each position in nats; NaN at position 0 and in padding."""
        losses = torch.full(tokens.shape, torch.nan, dtype=torch.float64, device="cpu")
        for first, logits in self.logits(tokens, hidden=hidden):
            rows = max(1, LOSS_ELEMENTS[self.device.type] // logits.shape[-1])
            for sequence, length in enumerate(lengths.tolist()):
                last = min(length - 1, first + logits.shape[1])
                for begin in range(first, last, rows):
                    end = min(begin + rows, last)
                    losses[sequence, begin + 1 : end + 1] = _losses_of(
                        tokens[sequence, begin + 1 : end + 1],
                        logits[sequence, begin - first : end - first],
                    )
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
                self.forward(torch.zeros(1, 1, dtype=torch.long, device="cpu"), last=1)

    @cached_property
    def logits_cost(self) -> float:
        """Approximate time that logits take, compared with all layers of a plain pass."""
        width = config_facts.stated_number(self.config, "hidden_size", 1)
        other_weights = 0
        for weight in self.model.parameters():
            if self.vocabulary not in weight.shape:
                other_weights += weight.numel()
        return self.vocabulary * width / max(1, other_weights)

    @cached_property
    def noise(self) -> Noise:
        """Rounding noise of the model without open blocks; see `measure_noise`."""

        def run(ids: Ids, observer: Observer) -> Tensor:
            only_observer = Hooks(observers=(observer,))
            with self.without_hooks(), self._hooked(lambda _: only_observer):
                return self.forward(ids, last=LOGITS_OF_NOISE)[:, -LOGITS_OF_NOISE:]

        tokens = noise_tokens(self.vocabulary, self.context)
        return measure_noise(self.model, run, tokens)

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Call `observer` with every attention call while the block runs."""
        return self._observe(observer, noise=self.noise.call)

    def _observe(
        self, observer: Observer, *, noise: Mapping[int, float] | None
    ) -> AbstractContextManager[None]:
        check = OutputCheck(self.class_name, noise, self._compared)
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

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Suspend open interventions and observers, and hooks of the user, in the block.

        It is for passes on tokens that the user did not choose; see `without_user_hooks`.
        """
        modules = [module for module in self._modules if hooks_of(module) is not None]
        with without_user_hooks(self.model), hooked(modules, lambda _: Hooks()):
            yield

    @contextmanager
    def _hooked(self, change: ChangeOfHooks) -> Iterator[None]:
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
        sequence = _longest_sequence(text)
        tokens = sequence.ids[:, :CHECKED_TOKENS]
        hidden = sequence.hidden
        if hidden is not None:
            hidden = hidden[:, :CHECKED_TOKENS]
        case = (tokens.shape[1], hidden is None)
        if case in self._checked:
            return
        run = partial(self.forward, tokens, hidden=hidden, last=1)
        with (
            without_user_hooks(self.model),
            forward_patches.skip_mlp_work(self.model),
        ):
            check_same_logits(
                run,
                partial(self._run_observed, run),
                model=self.model,
                tokens=tokens.shape[1],
                eps=self.eps,
            )
        self._checked.add(case)

    def _run_observed(self, run: Callable[[], Tensor]) -> Tensor:
        """The result of `run` with an observer that does nothing."""

        def observe_nothing(hooks: Hooks) -> Hooks:
            return replace(hooks, observers=(lambda call: None,), output_check=None)

        with self._hooked(observe_nothing):
            return run()

    @cached_property
    def attending_heads(self) -> HeadMask:
        """The query heads that attention calls have, which are fewer in a pruned layer."""
        seen = {*self.noise.heads}
        if self.noise.repeated and not seen >= {*self.attending}:
            # A layer in the place of another one
            raise attends_again(self.class_name, min(self.noise.repeated))
        self.check_layers(seen)
        heads = [self.noise.heads.get(layer, 0) for layer in range(self.layers)]
        number = torch.tensor(heads, dtype=torch.long, device="cpu")
        return torch.arange(self.heads, device="cpu") < number[:, None]

    def check_layers(self, seen: set[int]) -> None:
        """Raise `UnsupportedModel` unless every layer that attends showed its attention."""
        count = len(self.attending)
        missing = sorted(set(self.attending) - seen)
        hint = "a family of docs/families.md, such as Llama, Qwen, Gemma or GPT-NeoX"
        if not count:
            raise UnsupportedModel(
                f"{self.class_name} has no attention.",
                seen=f"layers of {', '.join(sorted(set(self.layer_types)))}",
                hint=hint,
            )
        if missing:
            newer = newer_transformers(self.config.model_type)
            other = f"{hint}; a num_hidden_layers that counts the layers of the model; "
            other += "or a newer transformers"
            raise UnsupportedModel(
                f"{self.class_name} hides its attention.",
                seen=f"{count - len(missing)} of {count} layers showed their queries and "
                f"keys; the first that did not is layer {missing[0]}",
                means="they do not call an attention function that transformers registers",
                hint=newer or other,
            )


@dataclass(frozen=True)
class CallRecorder(Generic[Recorded]):
    """An observer that records something of the one call of each layer in a pass.

    The pass has so many `tokens` in each sequence. Results are by layer.
    """

    class_name: str
    tokens: int
    record: Callable[[AttentionCall], Recorded]
    results: dict[int, Recorded] = field(default_factory=dict)

    def add(self, call: AttentionCall) -> None:
        """Record a call; refuse a second call of its layer, and rows that are no tokens."""
        rows = call.query.shape[2]
        if rows > self.tokens:
            raise UnsupportedModel(
                f"{self.class_name} puts tokens of its own before its input.",
                seen=f"layer {call.layer}: {rows} rows for {self.tokens} tokens",
                hint=ONE_CALL,
            )
        if call.layer in self.results:
            raise attends_again(self.class_name, call.layer)
        self.results[call.layer] = self.record(call)


def attends_again(class_name: str, layer: int) -> UnsupportedModel:
    """The error for a model that uses a layer twice."""
    return UnsupportedModel(
        f"{class_name} attends more than once in a layer.",
        seen=f"a second attention call of layer {layer} in one pass",
        hint=ONE_CALL,
    )


def _losses_of(
    targets: Int[Tensor, " row"], logits: Float[Tensor, "row token"]
) -> Float[Tensor, " row"]:
    """Loss of each target in nats."""
    targets = targets.to(logits.device, torch.long)
    return cross_entropy(logits.float(), targets, reduction="none").double().cpu()


def _longest_sequence(text: Text) -> Text:
    """The longest sequence; first, a sequence whose first token is hidden and sees no key."""
    length = text.lengths
    if text.hidden is not None:
        length = length + text.hidden[:, 0] * text.context
    return text[[int(length.argmax())]]
