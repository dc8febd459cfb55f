"""A device that counts its work: tensors with data on the CPU that report the device "cuda".

    with LaunchCounter().active() as counter:
        counter.place(model)
        ...
    counter.counts["rest"].operations

Code under test runs as on a GPU, and no CUDA library is called. An operator counts as one
operation, even if a GPU needs several kernels for it. Operators inside custom operators,
scripted functions and functions for torch.compile count one by one. The counter
raises the error of torch if an operator gets tensors of the host and of the device that a GPU
cannot use together.
"""

import re
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from device_operators import INDEXED, OVERWRITE, WAIT, facts_of
from torch import Tensor, nn
from torch._C import DisableTorchFunction, DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ropelens as rl

GPU = torch.device("cuda:0")
META = torch.device("meta")
PACKAGE = Path(rl.__file__).parent


@dataclass
class Count:
    """Work of a stage; `peak` is in bytes above the bytes at its start.

    `host` is the number of operators that use only tensors of the host.
    """

    operations: int = 0
    waits: int = 0
    bytes: int = 0
    host: int = 0
    peak: int = 0


class DeviceTensor(Tensor):
    """A tensor that holds data of the CPU and reports that it is on a GPU.

    To the C++ code of torch it is on the device "meta", which exists without CUDA.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    data_on_host: Tensor
    sets_number = (
        False  # while Python sets entries to a number, which torch makes a tensor
    )

    @staticmethod
    def __new__(cls, data: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.shape,
            dtype=data.dtype,
            device=META,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
        )
        made.data_on_host = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, *_: Any) -> Any:
        raise RuntimeError(f"{func} got a tensor of a counter that is not active here.")

    def __setitem__(self, index: Any, value: Any) -> None:
        number = not isinstance(
            value, Tensor
        )  # an argument of the kernel, without a copy
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
    """Replace the device "cuda" by "meta" in the arguments of functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to(META)
        if func is Tensor.new_tensor:
            like = {"dtype": args[0].dtype, "device": args[0].device}
            func = torch.tensor
            args = args[1:]
            kwargs = like | kwargs
        if func in (
            torch.tensor,
            torch.as_tensor,
            torch.asarray,
        ):  # "meta" would lose the data
            device = kwargs.pop("device", None)
            made = func(*args, **kwargs)
            return (
                made if device is None else made.to(META if _is_gpu(device) else device)
            )
        args = [META if _is_gpu(x) else x for x in args]
        return func(
            *args, **{key: META if _is_gpu(x) else x for key, x in kwargs.items()}
        )


def _is_gpu(x: Any) -> bool:
    named = isinstance(x, str | torch.device)
    return named and re.fullmatch(r"cuda(:\d+)?", str(x)) is not None


class LaunchCounter(TorchDispatchMode):
    """Counts the work on the device by stage, while it is `active`.

    `lines` has the work by stage, kind ("operations", "waits" or "host") and line of ropelens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Count] = defaultdict(Count)
        self.lines: Counter[tuple[str, str, str]] = Counter()
        self.stage = "rest"
        self._start = 0
        self._allocated = 0
        self.counting = True
        self._storages: dict[int, int] = {}  # bytes

    @contextmanager
    def active(self) -> Iterator["LaunchCounter"]:
        """Count in this block. Compiled and scripted functions run operator by operator."""
        patches: dict[str, Callable[..., object]] = {
            # A backward pass keeps the name "cuda".
            "torch.cuda._lazy_init": lambda: None,
            "torch.cuda.mem_get_info": lambda device=None: (2**36, 2**36),
            "torch.cuda.synchronize": lambda device=None: self._add({"waits": 1}),
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

    def staged(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function`, whose work counts for the stage `name`."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            before = self.stage, self._start
            self.stage, self._start = name, self._allocated
            try:
                return function(*arguments, **options)
            finally:
                self.stage, self._start = before

        return run

    def uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose work does not count."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            self.counting = False
            try:
                return function(*arguments, **options)
            finally:
                self.counting = True

        return run

    def place(self, model: nn.Module) -> None:
        """Move the weights and buffers of a model to the device."""
        moved: dict[int, Tensor] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, x in table.items():
                    if x is None:
                        continue
                    if id(x) not in moved:
                        weight = isinstance(x, nn.Parameter)
                        there = self.wrap(x.detach())
                        moved[id(x)] = (
                            nn.Parameter(there, x.requires_grad) if weight else there
                        )
                    table[name] = moved[id(x)]

    def wrap(self, data: Tensor) -> DeviceTensor:
        """The device's tensor that holds `data`."""
        storage = data.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._storages:
            self._storages[key] = size
            self._allocated += size
            weakref.finalize(storage, self._free, key)
            count = self.counts[self.stage]
            count.peak = max(count.peak, self._allocated - self._start)
        return DeviceTensor(data)

    def _free(self, key: int) -> None:
        self._allocated -= self._storages.pop(key)

    def _add(self, work: Mapping[str, int]) -> None:
        line = _line()
        for kind, number in work.items() if self.counting else ():
            vars(self.counts[self.stage])[kind] += number
            if number and kind != "bytes":
                self.lines[self.stage, kind, line] += number

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        facts = facts_of(func)
        inputs = _tensors([*args, *kwargs.values()])
        there = [x for x in inputs if isinstance(x, DeviceTensor)]
        if facts.composite:  # count the operators that it calls
            with self, DisableTorchFunction():
                return func.decompose(*args, **kwargs)
        if facts.foreign:
            key = DispatchKey.CUDA if there else DispatchKey.CPU
            with self:
                return func.redispatch(DispatchKeySet(key), *args, **kwargs)
        device = kwargs.get("device")
        to_device = bool(there) if device is None else device.type != "cpu"
        if not there and not to_device:
            if facts.kernel:
                self._add({"host": 1})
            with DisableTorchFunction():
                return func(*args, **kwargs)
        waits = _waits(func, args, kwargs, inputs, to_device)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        given = {id(_data(x)): x for x in inputs}
        with DisableTorchFunction():
            result = facts.run(*_map(_data, args), **_map(_data, kwargs))
            if (
                facts.name == "_conj"
            ):  # few kernels of a GPU read conjugates without a copy
                result = result.resolve_conj()
        outputs = _tensors([result])
        if facts.kernel and any(x.numel() for x in (*inputs, *outputs)):
            written = [kwargs.get(name) for name in facts.out]
            written += args[:1] if facts.name in OVERWRITE else []
            read = [_data(x) for x in inputs if all(x is not y for y in written)]
            size = sum(map(_size, [*read, *outputs]))
            self._add({"operations": 1, "waits": waits, "bytes": size})

        def give(x: Any) -> Any:
            if id(x) not in given:
                return self.wrap(x) if to_device else x
            if given[id(x)].shape != x.shape:
                raise NotImplementedError(f"{func} changes the shape of its argument.")
            return given[id(x)]

        return _map(give, result)


def _waits(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Tensor],
    to_device: bool,
) -> int:
    """Number of waits of an operator; raises the error of torch for mixed devices."""
    facts = facts_of(func)
    hosts = [x for x in inputs if not isinstance(x, DeviceTensor)]
    waits = int(facts.name in WAIT)
    if facts.name == "repeat_interleave":
        waits = int(kwargs.get("output_size") is None)
    elif facts.name == "_to_copy":
        return int(bool(hosts) == to_device)
    elif facts.name == "copy_":
        return int(len(hosts) == 1 and not DeviceTensor.sets_number)
    elif facts.name in INDEXED and isinstance(args[0], DeviceTensor):
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        number = (
            len(args) > 2
            and args[2].numel() == 1
            and not isinstance(args[2], DeviceTensor)
        )
        if not number:  # otherwise torch calls masked_fill
            waits += any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        hosts = [x for x in hosts if all(x is not index for index in indices)]
        waits += sum(
            not isinstance(x, DeviceTensor) for x in indices
        )  # torch copies them
    if not hosts or len(hosts) == len(inputs):
        return waits
    outputs = [*args[: facts.in_place], *(kwargs.get(name) for name in facts.out)]
    numbers = all(x.ndim == 0 for x in hosts) and facts.takes_numbers
    if not numbers or any(x is y for x in hosts for y in outputs):
        what = "Expected all tensors to be on the same device, but found at least two devices"
        raise RuntimeError(f"{what}, {GPU} and cpu! (in {func})")
    return waits + (not DeviceTensor.sets_number)


def _data(x: Tensor) -> Tensor:
    return x.data_on_host if isinstance(x, DeviceTensor) else x


def _tensors(x: Sequence[Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    _map(tensors.append, x)
    return tensors


def _map(function: Callable[[Tensor], Any], x: Any) -> Any:
    """`x` after `function` replaced each tensor (pytrees of torch take a third of the time)."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, list | tuple):
        return type(x)([_map(function, entry) for entry in x])
    return (
        {key: _map(function, y) for key, y in x.items()} if isinstance(x, dict) else x
    )


def _size(x: Tensor) -> int:
    """Bytes of the entries that are in memory: expanded dimensions have one entry."""
    entries = prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return min(
        entries * x.element_size() * bool(x.numel()), x.untyped_storage().nbytes()
    )


@cache
def _line_in(code: Any, line: int) -> str | None:
    path = Path(code.co_filename)
    if PACKAGE not in path.parents:
        return None
    return f"{path.relative_to(PACKAGE)}:{line} {code.co_name}"


def _line() -> str:
    """The innermost line of ropelens that is running."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if (line := _line_in(frame.f_code, frame.f_lineno)) is not None:
            return line
        frame = frame.f_back
    return ""


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
    """Attention of torch, by one kernel on the device."""
    if not isinstance(query, DeviceTensor):
        return _attention_of_torch(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = hidden.masked_fill_(~attn_mask, -torch.inf)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return fused(
        query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale
    )[0]
