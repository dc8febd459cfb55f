"""The check that this process holds the whole model.

With only some heads, layers or weights, results would have the numbers of other heads, and an
edit would change a head of each process. The check reads attributes, because an import of
torch.distributed.fsdp takes half a second.
"""

from typing import Any

from torch import Tensor, nn

from ropelens.errors import UnsupportedModel

WHOLE = (
    'the whole model in one process: rl.load(NAME, device_map="auto") spreads it over GPUs; in '
    "training DDP or ZeRO-2, or ropelens analyze with saved checkpoints"
)


def require_whole_weights(model: Any) -> None:
    """Raise `UnsupportedModel` if this process holds only a part of the model."""
    method = _method_of_parts(model)
    if method:
        raise UnsupportedModel(
            f"Each process holds only a part of {type(model).__name__}.",
            seen=method,
            hint=WHOLE,
        )


def _method_of_parts(model: nn.Module) -> str:
    """The method that spread the model over processes; "" if the model is whole."""
    for module in model.modules():
        if _is_sharded_by_fsdp(module):
            return "FSDP"
        stage = vars(module).get("_pp_stage")
        if stage is not None and stage.pp_size > 1:
            return f"pipeline parallelism over {stage.pp_size} processes"
        # transformers before 5.20 replaced the weights by parts without a mark.
        processes = vars(module).get("_tp_size") or 1
        if processes > 1:
            return f"tensor parallelism over {processes} processes"
    parameter: Any
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            return "DeepSpeed ZeRO-3"
        if hasattr(parameter, "placements") and _is_spread(parameter):
            processes = parameter.device_mesh.size()
            return f"weights that are spread over {processes} processes (DTensor)"
    return ""


def _is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether FSDP spreads the weights of the module. Each process may hold all (NO_SHARD)."""
    if hasattr(module, "_fsdp_wrapped_module"):
        strategy = getattr(module, "sharding_strategy", None)
        return getattr(strategy, "name", "") != "NO_SHARD"
    if not vars(module).get("_is_fsdp_managed_module"):
        return False
    # The weights of a module inside are flat, or have no memory.
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return False
    is_flat = isinstance(module, nn.Embedding | nn.Linear) and weight.ndim != 2
    return is_flat or weight.untyped_storage().size() == 0


def _is_spread(parameter: Any) -> bool:
    """Whether processes hold different parts of a DTensor, or summands of it."""
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and mesh.size(axis) > 1:
            return True
    return False
