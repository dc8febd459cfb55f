"""The text of a measurement: sequences of tokens, their groups, folds and known sinks.

A sink is a key that takes attention regardless of its content. Sequences of one document are
alike, so intervals that resample single sequences are far too narrow. They resample groups.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.errors import BadArgument, explained
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.text.batches import PackedRow, split_batch
from ropelens.text.rows import Ids, Lengths, TokenMask

GROUPS = 64
"""Largest number of groups; neighbouring documents share one if there are more."""

BLOCKS = 16
"""Largest number of stretches of neighbours that a text of few documents forms."""

SINKS = ("first", "named", "found")
"""Kinds of sinks, numbered 1, 2, 3 in tables."""

LONG = 0.75
"""Least length of a long sequence, as a share of the token-weighted median length."""


@dataclass(frozen=True, eq=False)
class Text:
    """Sequences of token ids, padded on the right.

    `ids` [sequence, position] are token ids, or a BatchEncoding. `lengths` [sequence] are the
    numbers of tokens; by default no sequence is padded. `documents` [sequence] are the document
    numbers, by which intervals resample. Without them intervals describe this text only. With
    `documents` [row, position] the ids are packed rows, which are split into one sequence per
    document (negative: padding). `hidden` [sequence, position] marks tokens inside a sequence
    that a mask hides. They are not used as keys, rows or predictions. `source` is a sentence
    about the origin of the text, `beginning` is how its sequences begin ("begins with <s>") and
    `documents_sha256` is the SHA-256 of its documents. They are "" if they are unknown.

    Raises `BadArgument` for values that do not fit each other.
    """

    ids: Ids
    lengths: Lengths = None  # type: ignore[assignment]
    documents: Int[Tensor, " sequence"] | None = None
    hidden: TokenMask | None = None
    source: str = field(default="", kw_only=True)
    beginning: str = field(default="", kw_only=True)
    documents_sha256: str = field(default="", kw_only=True)
    packed: PackedRow | None = field(default=None, kw_only=True, repr=False)
    bos: int | None = field(default=None, kw_only=True, repr=False)
    sink_ids: tuple[int, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        ids = own_copy("ids", self.ids)
        lengths = own_copy("lengths", self.lengths)
        documents = own_copy("documents", self.documents)
        hidden = own_copy("hidden", self.hidden)
        packed = self.packed
        is_batch = isinstance(ids, Mapping)
        if is_batch or (documents is not None and documents.ndim == 2):
            if lengths is not None or (is_batch and hidden is not None):
                raise BadArgument(
                    "lengths and hidden are only for plain token ids.",
                    seen="a BatchEncoding or packed rows",
                    hint="an attention_mask, or negative documents for padding",
                )
            encoding = ids if is_batch else {"input_ids": ids}
            if hidden is not None:
                encoding["attention_mask"] = ~hidden
            split = split_batch(encoding, documents)
            ids = own_copy("ids", split.ids)
            lengths = split.lengths
            documents = split.documents
            hidden = split.hidden
            packed = split.packed
        lengths = checked_lengths(ids, lengths)
        check_shape("documents", documents, ids)
        check_shape("hidden", hidden, ids)
        check_range(lengths, ids)
        if hidden is not None and not hidden.any():
            hidden = None
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "documents", documents)
        object.__setattr__(self, "hidden", hidden)
        object.__setattr__(self, "packed", packed)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<Text of {len(self):,} sequences of up to {self.context:,} tokens>"

    def __getitem__(self, sequences: slice | Sequence[int]) -> "Text":
        """Some of the sequences, as a text by themselves."""
        return replace(self._select(sequences), packed=None)

    def part(self, sequences: slice | list[int], *, width: int | None = None) -> "Text":
        """Some of the sequences, with the groups, folds and sinks of the whole text."""
        part = self._select(sequences, width)
        vars(part).update(  # instead of the properties of the part by itself
            group=self.group[sequences],
            fold=self.fold[sequences],
            long=self.long[sequences],
            sinks=self.sinks[sequences, :, : part.ids.shape[1]],
            single_long_sequence=self.single_long_sequence,
        )
        return part

    def _select(
        self, sequences: slice | Sequence[int], width: int | None = None
    ) -> "Text":
        lengths = self.lengths[sequences]
        if not width:
            width = int(lengths.max()) if lengths.numel() else 0
        documents = None if self.documents is None else self.documents[sequences]
        hidden = None if self.hidden is None else self.hidden[sequences, :width]
        return replace(
            self,
            ids=self.ids[sequences, :width],
            lengths=lengths,
            documents=documents,
            hidden=hidden,
        )

    @property
    def context(self) -> int:
        """Number of tokens of the longest sequence."""
        return int(self.lengths.max())

    @property
    def first_token(self) -> int:
        """First token of the first sequence; prompts begin with it too."""
        return int(self.ids[0, 0])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the tokens without padding."""
        digest = hashlib.sha256()
        ids = self.ids.cpu().where(self.real, -1).numpy()
        for sequence, length in zip(ids, self.lengths.tolist(), strict=True):
            digest.update(np.int64(length).tobytes())
            digest.update(sequence[:length].astype("<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def real(self) -> TokenMask:
        """Tokens that are neither padding nor hidden by a mask."""
        within = torch.arange(self.ids.shape[1], device="cpu") < self.lengths[:, None]
        return within if self.hidden is None else within & ~self.hidden

    @cached_property
    def predicted(self) -> TokenMask:
        """Real tokens that directly follow a real token."""
        return self.real & pad(self.real, (1, -1))

    @cached_property
    def seen_before(self) -> TokenMask:
        """Predicted tokens that occurred earlier in their sequence."""
        return seen_before(self.ids.cpu().where(self.real, -1)) & self.predicted

    @cached_property
    def group(self) -> Int[Tensor, " sequence"]:
        """Group of each sequence; the bootstrap resamples groups."""
        return assign_groups(self.documents, len(self))

    @cached_property
    def fold(self) -> Int[Tensor, " sequence"]:
        """Fold (0 or 1) of each sequence: groups alternate, by their longest sequence."""
        count = int(self.group.max()) + 1
        zeros = self.lengths.new_zeros(count)
        longest = zeros.scatter_reduce(0, self.group, self.lengths, "amax")
        order = longest.argsort(descending=True, stable=True)
        fold = torch.zeros(count, dtype=torch.long, device="cpu")
        fold[order] = torch.arange(count, device="cpu") % 2
        return fold[self.group]

    @cached_property
    def long(self) -> Bool[Tensor, " sequence"]:
        """Long sequences, to which models are fitted. Short sequences lack far offsets."""
        ordered = self.lengths.sort(descending=True).values
        half = (2 * ordered.cumsum(0) < ordered.sum()).sum()
        return self.lengths >= LONG * ordered[half].float()

    @cached_property
    def single_long_sequence(self) -> bool:
        """Whether a fold has no long sequence. Rows are then folded instead of sequences."""
        return len(self.fold[self.long].unique()) < 2

    @cached_property
    def sinks(self) -> Int[Tensor, "sequence 1 position"]:
        """Kind of sink of each key (see `known_sinks`); 0 for other keys and padding."""
        sinks = known_sinks(self.ids, bos=self.bos, named=self.sink_ids)
        return sinks.masked_fill(~self.real[:, None], 0)


def own_copy(name: str, values: Any) -> Any:
    """A copy of an argument of a `Text`, so that later changes of `values` do not reach it."""
    if isinstance(values, Mapping):
        return dict(values)
    if values is None and name != "ids":
        return None
    fault = f"{name} must be whole numbers, in rows of equal length."
    hint = "lengths= for the number of tokens of each row; rl.tokenize for strings"
    with explained(fault, hint, error=BadArgument):
        if not isinstance(values, Tensor):
            values = torch.from_numpy(np.array(values))
        copy = values.detach().to_dense().clone()
    if name == "hidden":
        return copy.bool()
    whole = not (
        copy.is_floating_point() or copy.is_complex() or copy.dtype == torch.bool
    )
    if not whole or copy.is_quantized or copy.is_meta:
        raise BadArgument(fault, seen=f"{copy.dtype} on {copy.device}", hint=hint)
    return copy.long()


def checked_lengths(ids: Tensor, lengths: Tensor | None) -> Tensor:
    """The lengths on the CPU, by default whole rows; raises BadArgument for other shapes."""
    if ids.ndim != 2 or not len(ids) or ids.shape[1] < 2:
        raise BadArgument(
            "Token ids must be [sequence, position], 2 or more per sequence.",
            seen=f"shape {tuple(ids.shape)}",
        )
    if lengths is None:
        return torch.full(ids.shape[:1], ids.shape[1], dtype=torch.long, device="cpu")
    check_shape("lengths", lengths, ids)
    return lengths.cpu()


def check_shape(name: str, values: Tensor | None, ids: Ids) -> None:
    """Raise `BadArgument` unless `hidden` has a value for every token, others a sequence."""
    if values is None:
        return
    axes = 2 if name == "hidden" else 1
    of_each = "token" if name == "hidden" else "sequence"
    if values.shape != ids.shape[:axes]:
        raise BadArgument(
            f"{name} must have a value for every {of_each}.",
            seen=f"shape {tuple(values.shape)} for ids {tuple(ids.shape)}",
        )


def check_range(lengths: Lengths, ids: Ids) -> None:
    """Raise `BadArgument` for lengths below 2 or beyond the rows."""
    if int(lengths.min()) < 2 or int(lengths.max()) > ids.shape[1]:
        raise BadArgument(
            f"lengths must be from 2 to {ids.shape[1]}, the number of tokens in a row.",
            seen=str(lengths.tolist())[:200],
        )


def assign_groups(
    documents: Int[Tensor, " sequence"] | None, sequences: int
) -> Int[Tensor, " sequence"]:
    """Group of each sequence: its document, or a stretch of neighbours if documents are few."""
    if documents is not None and len(documents.unique()) >= ENOUGH_DOCUMENTS:
        _, rank = torch.unique(documents.cpu(), return_inverse=True)
        count = int(rank.max()) + 1
        return rank * min(count, GROUPS) // count
    blocks = min(sequences, BLOCKS)
    return torch.arange(sequences, device="cpu") * blocks // sequences


def seen_before(tokens: Ids) -> TokenMask:
    """Tokens that occurred earlier in their sequence."""
    ordered, order = tokens.sort(dim=1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter_(1, order, again)


def known_sinks(
    ids: Ids, *, bos: int | None, named: Iterable[int] = ()
) -> Int[Tensor, "sequence 1 position"]:
    """Kind of sink of each key by its place and token (see `SINKS`), or 0.

    The first kind includes position 0, and every copy of the token with which all of several
    sequences begin, or a single sequence if this token is `bos`.
    """
    ids = ids.cpu()
    first_tokens = ids[:, 0]
    token = first_tokens[0]
    is_named = torch.isin(ids, torch.tensor(list(named), dtype=ids.dtype, device="cpu"))
    kinds = (1 + SINKS.index("named")) * is_named.long()
    first = 1 + SINKS.index("first")
    begin_alike = bool((first_tokens == token).all())
    if begin_alike and (len(first_tokens) > 1 or int(token) == bos):
        kinds[ids == token] = first
    kinds[:, 0] = first
    return kinds[:, None]
