"""The counter finds work of each kind, a layer keeps its ceilings, and peers are compared."""

from collections.abc import Callable
from dataclasses import dataclass

import cost
import dense
import launches
import numpy as np
import peers
import pytest
import torch
from device_counter import DeviceTensor, LaunchCounter
from oracles.tiny import random_tokens, tiny
from tiny_checkpoints import tiny_llama
from torch import Tensor

import ropelens as rl

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
flash = torch.ops.aten._scaled_dot_product_flash_attention
ON_HOST = torch.tensor([[4.0, 1.0], [1.0, 3.0]])


@torch.library.custom_op("launches::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2 + torch.zeros(2, 2, device=x.device)


def attend(*heads: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)


def twice(x: Tensor) -> Tensor:
    return x * 2 + torch.zeros_like(x)


def scripted(x: Tensor) -> Tensor:
    """Call a function three times, because torch would fuse operators after a few calls."""
    function = torch.jit.script(twice)
    for _ in range(3):
        x = function(x)
    return x


def grow(x: Tensor) -> None:
    x += 1


def set_entry(x: Tensor) -> None:
    x[0, 0] = 2.0


@dataclass(frozen=True)
class Work:
    """A function of a tensor on the device, its operations, and its waits for the device."""

    function: Callable[[Tensor], object]
    operations: int
    waits: int


WORK = {
    "view": Work(
        lambda x: x.view(4)[1:].expand(2, 3).unfold(1, 2, 1), operations=0, waits=0
    ),
    "transposed": Work(lambda x: x.mT.as_strided((2,), (1,)), operations=0, waits=0),
    "empty": Work(
        lambda x: [torch.empty(3, device="cuda"), x.new_empty(3)], operations=0, waits=0
    ),
    "to its device": Work(
        lambda x: x.to("cuda").to(x.device).cuda(), operations=0, waits=0
    ),
    "product": Work(lambda x: x @ x, operations=1, waits=0),
    "in place": Work(grow, operations=1, waits=0),
    "out": Work(
        lambda x: torch.mul(x, x, out=x.new_empty(2, 2)), operations=1, waits=0
    ),
    "number": Work(lambda x: x * 2.0, operations=1, waits=0),
    "entry": Work(set_entry, operations=1, waits=0),
    "arange": Work(lambda x: torch.arange(3, device=x.device), operations=1, waits=0),
    "new_zeros": Work(lambda x: x.new_zeros(3), operations=1, waits=0),
    "ones_like": Work(lambda x: torch.ones_like(x), operations=1, waits=0),
    "dtype": Work(lambda x: x.to(torch.float64), operations=1, waits=0),
    "mask to a number": Work(
        lambda x: x.masked_fill(x > 1, 0.0), operations=2, waits=0
    ),
    "custom operator": Work(doubled, operations=3, waits=0),
    "scripted": Work(scripted, operations=9, waits=0),
    "compiled": Work(lambda x: torch.compile(twice)(x), operations=3, waits=0),
    "vmap": Work(torch.vmap(lambda row: row * 2), operations=1, waits=0),
    "inference": Work(
        torch.inference_mode()(lambda x: x @ x.mT), operations=1, waits=0
    ),
    "attention": Work(lambda x: attend(*[x[None, None]] * 3), operations=1, waits=0),
    "flash": Work(lambda x: flash(*[x[None, None]] * 3), operations=1, waits=0),
    "cpu": Work(lambda x: x.cpu(), operations=1, waits=1),
    "to cpu": Work(lambda x: x.to("cpu", torch.float64), operations=1, waits=1),
    "copy to the host": Work(
        lambda x: torch.empty(2, 2).copy_(x), operations=1, waits=1
    ),
    "item": Work(lambda x: x[0, 0].item(), operations=1, waits=1),
    "float": Work(lambda x: float(x.sum()), operations=2, waits=1),
    "tolist": Work(lambda x: x.tolist(), operations=1, waits=1),
    "nonzero": Work(lambda x: x.nonzero(), operations=1, waits=1),
    "one argument of where": Work(lambda x: torch.where(x > 1), operations=2, waits=1),
    "mask": Work(lambda x: x[x > 1], operations=2, waits=1),
    "unique": Work(lambda x: x.unique(), operations=1, waits=1),
    "equal": Work(lambda x: torch.equal(x, x), operations=1, waits=1),
    "cholesky": Work(torch.linalg.cholesky, operations=2, waits=1),
    "unchecked cholesky": Work(
        lambda x: torch.linalg.cholesky_ex(x), operations=1, waits=0
    ),
    "solve": Work(lambda x: torch.linalg.solve(x, x), operations=2, waits=1),
    "repeat": Work(
        lambda x: x.repeat_interleave(x[1].long(), 0), operations=3, waits=1
    ),
    "to the device": Work(lambda x: ON_HOST.to(x.device), operations=1, waits=1),
    "like another": Work(lambda x: ON_HOST.to(x), operations=1, waits=1),
    "tensor": Work(
        lambda x: torch.tensor([1.0, 2.0], device="cuda:0"), operations=1, waits=1
    ),
    "new_tensor": Work(lambda x: x.new_tensor([1.0, 2.0]), operations=1, waits=1),
    "copy to the device": Work(lambda x: x.copy_(ON_HOST), operations=1, waits=1),
    "index": Work(lambda x: x[:, torch.tensor([1, 0])], operations=1, waits=1),
    "number of the host": Work(lambda x: x * torch.tensor(2.0), operations=1, waits=1),
    "synchronize": Work(lambda x: torch.cuda.synchronize(), operations=0, waits=1),
}


@pytest.mark.parametrize("name", WORK)
def test_work_is_counted(name: str):
    expected = WORK[name]
    on_host = ON_HOST.clone()
    with LaunchCounter().active() as counter:
        on_device = counter.wrap(on_host)
        expected.function(on_device)
    count = counter.counts["rest"]
    assert count.operations == expected.operations
    assert count.waits == expected.waits
    assert count.host == 0


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + ON_HOST,
        lambda x: x @ ON_HOST,
        lambda x: x.gather(0, torch.zeros(1, 2, dtype=torch.long)),
        lambda x: torch.cat([x, ON_HOST]),
        lambda x: torch.add(x, x, out=ON_HOST.clone()),
        lambda x: ON_HOST.clone().add_(x.sum()),
        lambda x: ON_HOST[x.long()],
        lambda x: x.masked_fill(ON_HOST > 1, 0.0),
    ],
)
def test_mixed_devices_are_refused(mixed):
    with LaunchCounter().active() as counter:
        x = counter.wrap(ON_HOST.clone())
        with pytest.raises(RuntimeError, match="on the same device"):
            mixed(x)


def test_bytes_of_expanded_tensors_and_peak_memory():
    with LaunchCounter().active() as counter:
        x = torch.ones(1000, 1, device="cuda")
        for _ in range(3):
            x.expand(1000, 50) + 1
    count = counter.counts["rest"]
    # A number has 4 bytes. The program writes 1,000 numbers, and then reads these and writes
    # 50,000 numbers in each of three additions.
    assert count.bytes == 4_000 + 3 * 204_000
    assert count.peak == 204_000


def test_a_profile_is_the_profile_of_the_cpu():
    model = tiny("llama_gqa", num_hidden_layers=1)
    tokens = random_tokens(sequences=2, length=40)
    expected = rl.profile(model, tokens, surrogates=1)
    with LaunchCounter().active() as counter:
        counter.place(model)
        assert isinstance(model.get_input_embeddings().weight, DeviceTensor)
        profile = rl.profile(model, tokens, surrogates=1)
    for name in ("q_norm", "selectivity", "offset_mass", "sink_mass", "total_bits"):
        on_cpu = expected[name].values
        sizes = np.abs(on_cpu)
        atol = 1e-3 * float(np.nanmax(sizes))
        np.testing.assert_allclose(profile[name], on_cpu, atol=atol, err_msg=name)


@dataclass(frozen=True)
class Ceiling:
    """The most operations, waits or bytes of a layer in these stages together."""

    measure: str
    stages: tuple[str, ...]
    most: float


FITS = ("fits", "surrogates")
CEILINGS = [
    Ceiling("operations", FITS, most=10_000),
    Ceiling("waits", FITS, most=40),
    Ceiling("bytes", FITS, most=90e9),
    Ceiling("operations", ("sums",), most=150),
    Ceiling("waits", ("sums",), most=2),
    Ceiling("bytes", ("sums",), most=4e9),
    Ceiling("operations", ("exchanged keys",), most=40),
]


@pytest.fixture(scope="module")
def counts_by_stage() -> dict[str, dict[str, int]]:
    counts = launches.count_profile("8b", 2048).counts
    table = launches.rows_of("8b", 2048, counts)
    return {of_stage["stage"]: of_stage for of_stage in table}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "ceiling",
    CEILINGS,
    ids=lambda ceiling: f"{ceiling.measure} of {' and '.join(ceiling.stages)}",
)
def test_a_layer_keeps_its_ceilings(counts_by_stage, ceiling: Ceiling):
    """Operations include the operators on tensors of the host, for which a GPU waits."""
    total = 0
    for stage in ceiling.stages:
        counts = counts_by_stage[stage]
        total += counts[ceiling.measure]
        if ceiling.measure == "operations":
            total += counts["host"]
    assert total <= ceiling.most


def test_dense_sums_are_those_of_a_profile():
    model = tiny_llama().eval()
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, model.config.vocab_size, (1, 48))
    with torch.no_grad():
        layers = dense.dense_sums(model, tokens)
    profile = rl.profile(model, tokens.repeat(2, 1), surrogates=0)
    names = set(layers[0])
    compared = names & set(profile)
    assert compared == names - {"entropy", "information"}
    for name in compared:
        dense_sum = torch.stack([layer[name] for layer in layers]).numpy()
        size = dense_sum.shape[-1]
        expected = profile[name].values[..., :size]
        np.testing.assert_allclose(dense_sum, expected, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "way", ["plain forward", "ropelens, all rows", "ropelens, 512 rows"]
)
def test_a_way_has_a_time_and_a_memory(way: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama(vocab_size=32000).eval().requires_grad_(False)
    monkeypatch.setattr(cost, "random_llama", lambda: model)
    measured = peers.cost_of(way, 16)
    assert measured["seconds"] > 0
    assert measured["peak_mib"] >= 0
