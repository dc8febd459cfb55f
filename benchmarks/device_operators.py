"""Facts about the operators of torch on a GPU, for device_counter.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_KERNEL |= {"_unsafe_view", "resize_"}
WAIT = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "bincount",
    "_unique2",
}
WAIT |= {"unique_dim", "unique_consecutive", "_linalg_check_errors", "_linalg_eigh"}
WAIT |= {"_linalg_svd", "linalg_eig", "linalg_lstsq", "cholesky"}
OVERWRITE = {
    "copy_",
    "fill_",
    "zero_",
    "uniform_",
    "normal_",
    "random_",
    "exponential_",
}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
TAKE_NUMBERS = {
    "fill",
    "fill_",
    "masked_fill",
    "masked_fill_",
    "floor_divide",
    *INDEXED,
}


@dataclass(frozen=True)
class Facts:
    """Facts about one operator. `run` computes it on the CPU.

    `out` are the names of its arguments `out=`. An operator that is not `kernel` only makes a
    view or empty memory. A `foreign` operator is not part of torch.
    """

    name: str
    run: Callable[..., Any]
    kernel: bool
    foreign: bool
    composite: bool
    takes_numbers: bool
    in_place: bool
    out: tuple[str, ...]


@cache
def facts_of(func: OpOverload) -> Facts:
    name = func._schema.name.split("::")[1]
    arguments = func._schema.arguments
    written = [
        x for x in arguments if x.alias_info is not None and x.alias_info.is_write
    ]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return Facts(
        name,
        run=FUSED.get(name, func),
        kernel=not func.is_view and name not in NO_KERNEL,
        foreign=func.namespace not in ("aten", "prim", "profiler"),
        composite=has_kernel(func.name(), "CompositeImplicitAutograd"),
        takes_numbers=torch.Tag.pointwise in func.tags or name in TAKE_NUMBERS,
        in_place=any(not x.kwarg_only for x in written),
        out=tuple(x.name for x in written if x.kwarg_only),
    )


def _flash(*arguments: Any, scale: float | None = None) -> tuple[Any, ...]:
    query, key, value, *options = arguments
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    made = fused(query, key, value, *options[:2], scale=scale)
    empty = [query.new_empty(0)] * 3
    return (*made, None, None, query.shape[2], key.shape[2], *empty)


def _efficient(*arguments: Any, scale: float | None = None) -> tuple[Any, ...]:
    query, key, value, bias, _, *options = arguments
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    made = fused(query, key, value, *options, attn_mask=bias, scale=scale)
    return (*made, query.new_empty(0), query.new_empty(0))


FUSED: dict[str, Callable[..., tuple]] = {  # kernels that only a GPU has
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
}
