"""Matrix products with the rounding of another processor, and of TF32."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten._scaled_dot_product_flash_attention_for_cpu.default, aten._grouped_mm.default),
}


class Noisy(TorchDispatchMode):
    """Add noise to every matrix product, as a share `size` of its root mean square.

    `repeatable` noise depends on the numbers, as on a real processor. Else two passes differ.
    """

    def __init__(self, size: float, *, repeatable: bool = False) -> None:
        super().__init__()
        self.size, self.repeatable = size, repeatable
        self.random = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        result = operation(*args, **(kwargs or {}))
        if operation in PRODUCTS:
            product = result[0] if isinstance(result, tuple) else result
            x = product.double()
            if self.repeatable:
                content = hash((product.shape, *(float(x.sum()), float(x.square().sum()))))
                self.random.manual_seed(content % 2**63)
            noise = torch.randn(x.shape, generator=self.random, dtype=x.dtype)
            product.add_(self.size * x.square().mean().sqrt() * noise)
        return result
