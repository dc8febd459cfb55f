"""A model of which this process holds only a part is refused, and a whole model is not."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from oracles.tiny import random_tokens, tiny
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ropelens as rl
from ropelens.errors import UnsupportedModel
from ropelens.model.whole_weights import require_whole_weights

TOKENS = random_tokens(sequences=1, length=16)
# torch 2.6 warns of random numbers on a CPU, which the tests do not draw.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")


@pytest.fixture
def two_processes() -> Iterator[DeviceMesh]:
    """The first one of two processes, whose other process does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def spread(model: nn.Module, mesh: DeviceMesh, placement: object) -> None:
    """Make the parameter of each projection a DTensor."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = distribute_tensor(module.weight.detach(), mesh, [placement])
            module.weight = nn.Parameter(weight)


def test_weights_that_are_spread_are_refused(two_processes: DeviceMesh):
    model = tiny("llama_gqa")
    spread(model, two_processes, Shard(0))
    with pytest.raises(
        UnsupportedModel, match="only a part of LlamaForCausalLM"
    ) as refused:
        rl.profile(model, TOKENS)
    assert refused.value.parts["seen"].endswith("spread over 2 processes (DTensor)")


def test_weights_that_each_process_holds_are_whole(two_processes: DeviceMesh):
    model = tiny("llama_gqa")
    spread(model, two_processes, Replicate())
    require_whole_weights(model)
    require_whole_weights(nn.parallel.DistributedDataParallel(tiny("llama_gqa")))


def with_parts(attribute: str, value: object) -> nn.Module:
    model = tiny("llama_gqa")
    setattr(model, attribute, value)
    return model


def test_marks_of_libraries():
    wrapped = nn.Module()
    wrapped._fsdp_wrapped_module = tiny("llama_gqa")
    sharded = tiny("llama_gqa")
    sharded.lm_head.weight.ds_id = 1
    models = {
        "FSDP": wrapped,
        "DeepSpeed ZeRO-3": sharded,
        "tensor parallelism over 2 processes": with_parts("_tp_size", 2),
        "pipeline parallelism over 4 processes": with_parts(
            "_pp_stage", SimpleNamespace(pp_size=4)
        ),
    }
    for method, model in models.items():
        with pytest.raises(UnsupportedModel) as refused:
            require_whole_weights(model)
        assert refused.value.parts["seen"] == method
    require_whole_weights(with_parts("_tp_size", 1))


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "analyze": lambda model: rl.analyze(model, TOKENS),
    "attribute_planes": lambda model: rl.attribute_planes(
        model, TOKENS, 3, heads="0.0"
    ),
    "capture": lambda model: rl.capture(model, TOKENS, heads="0.0"),
    "edit_rope": lambda model: rl.edit_rope(model, "nope").__enter__(),
    "evaluate": lambda model: rl.evaluate(model, TOKENS, edits={}, measures=["loss"]),
    "export": lambda model: rl.export(model, "nope", out="unused"),
    "measure_rope": rl.measure_rope,
    "observe": lambda model: rl.observe(model, print).__enter__(),
    "profile": lambda model: rl.profile(model, TOKENS),
    "reach": lambda model: rl.reach(model, TOKENS),
    "silence_heads": lambda model: rl.silence_heads(model, "0.0").__enter__(),
    "truncate": lambda model: rl.truncate(model, TOKENS),
    "watch": lambda model: rl.watch(model, TOKENS).__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_public_functions_refuse_a_part(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedModel, match="Each process holds only a part"):
        CALLS[name](with_parts("_tp_size", 2))
    assert not list(tmp_path.iterdir())


PROCESS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
import ropelens as rl

dist.init_process_group("gloo")

def load(**more):
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **more)

def fsdp(strategy):
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(load(), sharding_strategy=strategy, device_id=cpu)

whole = fsdp(ShardingStrategy.NO_SHARD)
sharded = fsdp(ShardingStrategy.FULL_SHARD)
by_layer = load()
for layer in by_layer.model.layers:
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
models = {
    "DDP": DistributedDataParallel(load()),
    "copies by FSDP": whole,
    "inside of copies": whole.module,
    "FSDP": sharded,
    "inside of FSDP": sharded.module,
    "FSDP2": by_layer,
    "tensor parallel": load(tp_plan="auto"),
}
tokens = torch.arange(1, 17)[None]
for name, model in models.items():
    try:
        rl.profile(model, tokens, budget=False)
        verdict = "measured"
    except rl.UnsupportedModel as error:
        verdict = "refused" if "only a part" in str(error) else str(error)
    if dist.get_rank() == 0:
        print(f"{name}: {verdict}")
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_two_processes(tmp_path: Path):
    tiny("llama_gqa").save_pretrained(tmp_path / "model")
    (tmp_path / "process.py").write_text(PROCESS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--standalone", str(tmp_path / "process.py"), str(tmp_path / "model")]
    ended = subprocess.run(launch, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        "DDP: measured",
        "copies by FSDP: measured",
        "inside of copies: measured",
        "FSDP: refused",
        "inside of FSDP: refused",
        "FSDP2: refused",
        "tensor parallel: refused",
    ]
