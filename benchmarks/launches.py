"""Count the work that a GPU would do for a profile: operations, waits and bytes, without a GPU.

    python benchmarks/launches.py [--shape 8b] [--context 2048] [--json] [--lines 5]

A random Llama with one layer is profiled on one sequence, on 512 rows. Its tensors hold their
data on the CPU and report the device `cuda:0`, so ropelens runs the code that it runs on a GPU,
with the sizes of blocks of a GPU. No CUDA library is called. Each row counts one layer:

    operations  operators that start a kernel or a copy; views and empty tensors start none
    waits       copies between host and device, operators that need a number from the device
                (nonzero, indices of bools, `equal`, checks of linear algebra), and operators
                that use tensors of the host and of the device together
    bytes       sizes of all inputs and outputs of the operations
    host        operators on tensors of the host, while which a GPU usually waits
    peak        bytes of the largest set of tensors on the device, above the start of a stage

An operator counts as one, even if a GPU needs several kernels for it. Operators inside custom
operators, scripted functions and functions for torch.compile are counted one by one. "plain" is
the pass of the model over the text, with the hooks of ropelens but without its observer; "rest"
is everything that `rl.profile` does outside this pass (rotation, noise, excerpts, repeats).
"rl.profile" is the sum. With --lines, the lines of ropelens with the most operations and waits
follow.

Takes a minute for all shapes and contexts on one core.
"""

import argparse
import json
import pkgutil
import re
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM, LlamaConfig

import ropelens as rl
from ropelens.attention import exchange, fast_products

STAGES = {  # functions whose work belongs to a stage, unless an inner function has its own
    "ropelens.profiles.profile.fit_layers": "plain",
    "ropelens.profiles.profile.collect": "plain",
    "ropelens.budget.held_out.LayerFit.score": "scoring",
    "ropelens.budget.held_out.Sample.fit": "fits",
    "ropelens.budget.held_out.draw_surrogates": "surrogates",
    "ropelens.budget.held_out.follow_sums": "exchanged keys",
}
OBSERVERS = {"ropelens.profiles.passes.observer_of_chunks": "sums"}  # functions that return one
NAMES = ("plain", "sums", "scoring", "fits", "surrogates", "exchanged keys", "rest")

SUMMED = ("operations", "waits", "bytes", "host")

SHAPES = {
    "8b": {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
    "1b": {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048},
    "smollm2": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
}
CONTEXTS = (512, 2048, 4096)
ROWS = 512
GPU, META = torch.device("cuda:0"), torch.device("meta")

NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_KERNEL |= {"_unsafe_view", "resize_", "lift_fresh"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"}
WAITS |= {"_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
WAITS |= {"_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq"}
WRITTEN = {"copy_", "fill_", "zero_", "uniform_", "normal_"}  # they do not read what they write
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
TAKE_SCALARS = {"fill_", "masked_fill", "masked_fill_", "fill"}  # as pointwise operators do


class DeviceTensor(Tensor):
    """A tensor that holds data of the CPU and reports that it is on a GPU.

    To the C++ code of torch it is on the device "meta", which exists without CUDA.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    data_on_host: Tensor
    sets_number = False  # while Python sets entries to a number, which torch makes a tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "DeviceTensor":
        layout: Any = {"strides": data.stride(), "storage_offset": data.storage_offset()}
        options: Any = {"dtype": data.dtype, "device": META, **layout}
        made = Tensor._make_wrapper_subclass(cls, data.shape, **options)
        made.data_on_host = data
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} got a tensor of a LaunchCounter that is no longer active.")

    def __setitem__(self, index: Any, value: Any) -> None:
        number = not isinstance(value, Tensor)  # a kernel receives it as an argument
        DeviceTensor.sets_number = number
        try:
            super().__setitem__(index, torch.tensor(value) if number else value)
        finally:
            DeviceTensor.sets_number = False

    def get_device(self) -> int:
        return 0

    def tolist(self) -> Any:
        return self.cpu().tolist()


class DeviceNames(TorchFunctionMode):
    """Tells the C++ code of torch the device "meta" where Python says "cuda"."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to(META)
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor):
            like = args[0].device if func is Tensor.new_tensor else None
            device = kwargs.pop("device", None) or like
            if func is Tensor.new_tensor:
                func, kwargs, args = torch.tensor, {"dtype": args[0].dtype} | kwargs, args[1:]
            made = func(*args, **kwargs)
            return made if device is None else made.to(device)
        args = [META if _is_gpu(x) else x for x in args]
        return func(*args, **{key: META if _is_gpu(x) else x for key, x in kwargs.items()})


def _is_gpu(x: Any) -> bool:
    return isinstance(x, str | torch.device) and re.fullmatch(r"cuda(:\d+)?", str(x)) is not None


@dataclass
class Count:
    """Work of a stage; `peak` is in bytes above the bytes at its start."""

    operations: int = 0
    waits: int = 0
    bytes: int = 0
    host: int = 0
    peak: int = 0


class LaunchCounter(TorchDispatchMode):
    """Counts the work on the device by stage, while it is active.

    `lines` has the operations and waits by stage and by line of ropelens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Count] = defaultdict(Count)
        self.lines: Counter[tuple[str, str, str]] = Counter()
        self.stage, self._start = "rest", 0
        self._live: dict[int, int] = {}
        self._allocated = 0

    @contextmanager
    def active(self) -> Iterator["LaunchCounter"]:
        """Count in this block. Compiled and scripted functions run operator by operator."""
        patches: dict[str, Any] = {
            "torch.cuda._lazy_init": lambda: None,  # in a backward pass the names stay "cuda"
            "torch.cuda.mem_get_info": lambda device=None: (2**36, 2**36),
            "torch.nn.functional.scaled_dot_product_attention": _fused_attention,
        }
        with ExitStack() as blocks:
            for target, patch in patches.items():
                blocks.enter_context(mock.patch(target, patch))
            blocks.enter_context(torch.compiler.set_stance("force_eager"))
            blocks.enter_context(torch.jit.optimized_execution(False))
            blocks.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*CUDA is not available.*")
            blocks.enter_context(DeviceNames())
            blocks.enter_context(self)
            yield self

    @contextmanager
    def in_stage(self, name: str) -> Iterator[None]:
        """Count what happens in this block for the stage `name`."""
        before = self.stage, self._start
        self.stage, self._start = name, self._allocated
        try:
            yield
        finally:
            self.stage, self._start = before

    def staged(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function`, which counts for the stage `name`."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            with self.in_stage(name):
                return function(*arguments, **options)

        return run

    def place(self, model: nn.Module) -> None:
        """Move the weights and buffers of a model to the device."""
        moved: dict[int, Tensor] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, x in table.items():
                    if x is not None and id(x) not in moved:
                        held = self._wrap(x.detach())
                        is_weight = isinstance(x, nn.Parameter)
                        moved[id(x)] = nn.Parameter(held, False) if is_weight else held
                    if x is not None:
                        table[name] = moved[id(x)]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, facts = dict(kwargs or {}), _facts(func)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in inputs if isinstance(x, DeviceTensor)]
        if facts.inside is not None:  # run what is inside, and count it
            with self, torch._C.DisableTorchFunction():
                return facts.inside(*args, **kwargs)
        if facts.redispatch:
            key = DispatchKey.CUDA if on_device else DispatchKey.CPU
            with self:
                return func.redispatch(DispatchKeySet(key), *args, **kwargs)
        device = kwargs.get("device")
        to_device = bool(on_device) if device is None else device.type in ("cuda", "meta")
        if not on_device and not to_device:
            self.counts[self.stage].host += facts.kernel
            return func(*args, **kwargs)
        if device is not None:
            kwargs |= {"device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        waits = self._waits(facts.name, args, inputs, on_device, to_device, func)
        by_data = {id(x.data_on_host): x for x in on_device}
        by_data |= {id(x): x for x in inputs if not isinstance(x, DeviceTensor)}
        result = facts.run(*tree_map(_data, args), **tree_map(_data, kwargs))
        if facts.name == "_conj":  # a GPU seldom has kernels that read conjugated numbers
            result = result.resolve_conj()
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if facts.kernel:
            read = inputs[1:] if facts.name in WRITTEN else inputs
            read = [x for x in read if all(x is not kwargs.get(name) for name in facts.out)]
            count = self.counts[self.stage]
            count.operations += 1
            count.waits += waits
            count.bytes += sum(map(_size, [*map(_data, read), *outputs]))
            line = _line()
            self.lines[self.stage, "operations", line] += 1
            self.lines[self.stage, "waits", line] += waits

        def give(x: Any) -> Any:
            if not isinstance(x, Tensor) or not to_device:
                return by_data.get(id(x), x)
            made = by_data.get(id(x))
            if made is not None and made.shape != x.shape:
                raise NotImplementedError(f"{func} changed the shape of its argument.")
            return self._wrap(x) if made is None else made

        return tree_map(give, result)

    def _waits(
        self,
        name: str,
        args: Sequence[Any],
        inputs: list[Tensor],
        on_device: list[DeviceTensor],
        to_device: bool,
        func: OpOverload,
    ) -> int:
        """Number of waits of an operator; raises the error of torch for mixed devices."""
        waits = int(name in WAITS)
        if name == "repeat_interleave" and func._schema.arguments[-1].name == "output_size":
            waits = 1
        hosts = [x for x in inputs if not isinstance(x, DeviceTensor)]
        if name == "_to_copy":
            return int(bool(hosts) == to_device)
        if name in INDEXED:
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            fills = name.startswith("index_put") and args[2].numel() == 1
            fills = fills and not isinstance(args[2], DeviceTensor)  # torch calls masked_fill
            is_bool = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
            waits += is_bool and not fills
            if isinstance(args[0], DeviceTensor):  # torch copies indices
                waits += sum(not isinstance(x, DeviceTensor) for x in indices)
                hosts = [x for x in hosts if all(x is not index for index in indices)]
        if not hosts or not on_device:
            return waits
        if name == "copy_":
            return waits + int(not (hosts[0].ndim == 0 and DeviceTensor.sets_number))
        numbers = all(x.ndim == 0 for x in hosts) and not isinstance(args[0], Tensor | list)
        if isinstance(args[0], DeviceTensor) or (
            isinstance(args[0], Tensor) and torch.Tag.pointwise in func.tags
        ):
            numbers = all(x.ndim == 0 for x in hosts)
        known = torch.Tag.pointwise in func.tags or name in TAKE_SCALARS | INDEXED
        writes = any(x.alias_info is not None for x in func._schema.arguments[:1])
        if not (numbers and known) or (writes and not isinstance(args[0], DeviceTensor)):
            what = "Expected all tensors to be on the same device, but found at least two "
            raise RuntimeError(f"{what}devices, {GPU} and cpu! (in {func})")
        return waits + int(not DeviceTensor.sets_number)

    def _wrap(self, data: Tensor) -> DeviceTensor:
        storage = data.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self._allocated += storage.nbytes()
            weakref.finalize(storage, self._free, key)
            count = self.counts[self.stage]
            count.peak = max(count.peak, self._allocated - self._start)
        return DeviceTensor(data)

    def _free(self, key: int) -> None:
        self._allocated -= self._live.pop(key)


_attention_of_torch = nn.functional.scaled_dot_product_attention


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of torch, as the kernel that a GPU would choose."""
    if not isinstance(query, DeviceTensor):
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return _attention_of_torch(query, key, value, attn_mask, dropout_p, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            ~attn_mask, -torch.inf
        )
    fused = torch.ops.aten._scaled_dot_product_efficient_attention.default
    options = (attn_mask, False, dropout_p, is_causal)
    return fused(query, key, value, *options, scale=scale)[0]


@dataclass(frozen=True)
class Facts:
    """An operator: its name, the function to run on the CPU, and what it does on a device."""

    name: str
    run: Callable[..., Any]
    kernel: bool
    redispatch: bool
    inside: Callable[..., Any] | None
    out: tuple[str, ...]


@cache
def _facts(func: OpOverload) -> Facts:
    name = func._schema.name.split("::")[1]
    aten = func.namespace in ("aten", "prims")
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    arguments = func._schema.arguments
    return Facts(
        name,
        FUSED.get(name, func),
        kernel=aten and not func.is_view and name not in NO_KERNEL,
        redispatch=not aten and func.namespace not in ("prim", "profiler"),
        inside=func.decompose if composite and name not in WAITS else None,
        out=tuple(x.name for x in arguments if x.kwarg_only and x.alias_info is not None),
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False,
           return_debug_mask: bool = False, *, scale: float | None = None) -> tuple[Any, ...]:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result, log_norm = fused(q, k, v, dropout, causal, scale=scale)
    empty = q.new_empty(0)
    return result, log_norm, None, None, q.shape[2], k.shape[2], empty, empty, empty


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, log_norm: bool,
               dropout: float = 0.0, causal: bool = False, *, scale: float | None = None
               ) -> tuple[Tensor, ...]:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    made = fused(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
    return (*made, q.new_empty(0), q.new_empty(0))


FUSED = {  # kernels that only a GPU has
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
}


def _data(x: Any) -> Any:
    return x.data_on_host if isinstance(x, DeviceTensor) else x


def _size(x: Tensor) -> int:
    """Bytes of the entries that are in memory: expanded dimensions have one."""
    entries = prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return min(entries * x.element_size() * bool(x.numel()), x.untyped_storage().nbytes())


def _line() -> str:
    """The innermost line of ropelens that is running."""
    frame, folder = sys._getframe(2), str(Path(rl.__file__).parent)
    while frame is not None:
        if frame.f_code.co_filename.startswith(folder):
            where = Path(frame.f_code.co_filename).relative_to(folder)
            return f"{where}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def count_profile(shape: str, context: int, rows: int = ROWS) -> LaunchCounter:
    """Count `rl.profile` of a random Llama with one layer, on one sequence."""
    torch.manual_seed(0)
    small = {"vocab_size": 1000, "intermediate_size": 128, "max_position_embeddings": 8192}
    config = LlamaConfig(**small, **SHAPES[shape], num_hidden_layers=1, initializer_range=0.05)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    ids = torch.randint(3, config.vocab_size, (1, context))
    counter = LaunchCounter()
    with ExitStack() as blocks:
        for target, name in STAGES.items():
            function = _look_up(target)
            blocks.enter_context(mock.patch(target, counter.staged(function, name)))
        for target, name in OBSERVERS.items():
            staged = _staged_observers(counter, _look_up(target), name)
            blocks.enter_context(mock.patch(target, staged))
        blocks.enter_context(counter.active())
        counter.place(model)
        rl.profile(model, ids, rows=rows)
    return counter


def _staged_observers(
    counter: LaunchCounter, function: Callable[..., Any], name: str
) -> Callable[..., Any]:
    return lambda *args, **kwargs: counter.staged(function(*args, **kwargs), name)


def _look_up(target: str) -> Callable[..., Any]:
    return pkgutil.resolve_name(target)


def rows_of(shape: str, context: int, counts: dict[str, Count]) -> list[dict[str, Any]]:
    """Rows of the table: the stages, and their sum."""
    table = [{"stage": name, **vars(counts[name])} for name in NAMES]
    total = {key: sum(row[key] for row in table) for key in SUMMED}
    peak = max(row["peak"] for row in table)
    table.append({"stage": "rl.profile", **total, "peak": peak})
    return [{"shape": shape, "context": context, **row} for row in table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--json", action="store_true", help="print one list of rows")
    parser.add_argument("--lines", type=int, default=0, help="lines of each stage to print")
    options = parser.parse_args()
    rows, lines = [], []
    for shape in options.shape or SHAPES:
        for context in options.context or CONTEXTS:
            counter = count_profile(shape, context)
            rows += rows_of(shape, context, counter.counts)
            most = counter.lines.most_common()
            for name in NAMES:
                for what in ("operations", "waits"):
                    of_stage = [row for row in most if row[0][:2] == (name, what) and row[1]]
                    lines += [(shape, context, *row) for row in of_stage[: options.lines]]
    if options.json:
        print(json.dumps(rows))
        return
    blocks = f"BLOCK_ELEMENTS {fast_products.BLOCK_ELEMENTS['cuda']:,}, BLOCK_ROWS "
    blocks += f"{fast_products.BLOCK_ROWS['cuda']:,}, AT_ONCE {exchange.AT_ONCE['cuda']}"
    table = Table(title=f"one layer, one sequence, {ROWS} rows; {blocks}")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading in ("shape", "stage") else "right")
    for row in rows:
        table.add_row(*(f"{x:,}" if isinstance(x, int) else x for x in row.values()))
        if row["stage"] == "rl.profile":
            table.add_section()
    console = Console(width=120)
    console.print(table)
    for shape, context, (stage, what, line), number in lines:
        console.print(f"{shape} {context:,} {stage}: {number:,} {what} {line}", highlight=False)


if __name__ == "__main__":
    main()
