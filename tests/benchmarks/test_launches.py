"""The counter finds work of each kind, a layer keeps its ceilings, and peers are compared."""

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
    function = torch.jit.script(twice)
    for _ in range(3):  # torch would fuse operators after a few calls
        x = function(x)
    return x


def grow(x: Tensor) -> None:
    x += 1


def set_entry(x: Tensor) -> None:
    x[0, 0] = 2.0


WORK = {  # function of a tensor on the device: operations, waits
    "view": (lambda x: x.view(4)[1:].expand(2, 3).unfold(1, 2, 1), 0, 0),
    "transposed": (lambda x: x.mT.as_strided((2,), (1,)), 0, 0),
    "empty": (lambda x: [torch.empty(3, device="cuda"), x.new_empty(3)], 0, 0),
    "to its device": (lambda x: x.to("cuda").to(x.device).cuda(), 0, 0),
    "product": (lambda x: x @ x, 1, 0),
    "in place": (grow, 1, 0),
    "out": (lambda x: torch.mul(x, x, out=x.new_empty(2, 2)), 1, 0),
    "number": (lambda x: x * 2.0, 1, 0),
    "entry": (set_entry, 1, 0),
    "arange": (lambda x: torch.arange(3, device=x.device), 1, 0),
    "new_zeros": (lambda x: x.new_zeros(3), 1, 0),
    "ones_like": (lambda x: torch.ones_like(x), 1, 0),
    "dtype": (lambda x: x.to(torch.float64), 1, 0),
    "mask to a number": (lambda x: x.masked_fill(x > 1, 0.0), 2, 0),
    "custom operator": (doubled, 3, 0),
    "scripted": (scripted, 9, 0),
    "compiled": (lambda x: torch.compile(twice)(x), 3, 0),
    "vmap": (torch.vmap(lambda row: row * 2), 1, 0),
    "inference": (torch.inference_mode()(lambda x: x @ x.mT), 1, 0),
    "attention": (lambda x: attend(*[x[None, None]] * 3), 1, 0),
    "flash": (lambda x: flash(*[x[None, None]] * 3), 1, 0),
    "cpu": (lambda x: x.cpu(), 1, 1),
    "to cpu": (lambda x: x.to("cpu", torch.float64), 1, 1),
    "copy to the host": (lambda x: torch.empty(2, 2).copy_(x), 1, 1),
    "item": (lambda x: x[0, 0].item(), 1, 1),
    "float": (lambda x: float(x.sum()), 2, 1),
    "tolist": (lambda x: x.tolist(), 1, 1),
    "nonzero": (lambda x: x.nonzero(), 1, 1),
    "one argument of where": (lambda x: torch.where(x > 1), 2, 1),
    "mask": (lambda x: x[x > 1], 2, 1),
    "unique": (lambda x: x.unique(), 1, 1),
    "equal": (lambda x: torch.equal(x, x), 1, 1),
    "cholesky": (torch.linalg.cholesky, 2, 1),
    "unchecked cholesky": (lambda x: torch.linalg.cholesky_ex(x), 1, 0),
    "solve": (lambda x: torch.linalg.solve(x, x), 2, 1),
    "repeat": (lambda x: x.repeat_interleave(x[1].long(), 0), 3, 1),
    "to the device": (lambda x: ON_HOST.to(x.device), 1, 1),
    "like another": (lambda x: ON_HOST.to(x), 1, 1),
    "tensor": (lambda x: torch.tensor([1.0, 2.0], device="cuda:0"), 1, 1),
    "new_tensor": (lambda x: x.new_tensor([1.0, 2.0]), 1, 1),
    "copy to the device": (lambda x: x.copy_(ON_HOST), 1, 1),
    "index": (lambda x: x[:, torch.tensor([1, 0])], 1, 1),
    "number of the host": (lambda x: x * torch.tensor(2.0), 1, 1),
    "synchronize": (lambda x: torch.cuda.synchronize(), 0, 1),
}


@pytest.mark.parametrize("kind", WORK)
def test_work_is_counted(kind: str):
    function, operations, waits = WORK[kind]
    on_host = ON_HOST.clone()
    with LaunchCounter().active() as counter:
        function(counter.wrap(on_host))
    count = counter.counts["rest"]
    assert (count.operations, count.waits, count.host) == (operations, waits, 0)


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
    assert (count.bytes, count.peak) == (4_000 + 3 * 204_000, 204_000)


def test_a_profile_is_the_profile_of_the_cpu():
    model = tiny("llama_gqa", num_hidden_layers=1)
    tokens = random_tokens(sequences=2, length=40)
    expected = rl.profile(model, tokens, surrogates=1)
    with LaunchCounter().active() as counter:
        counter.place(model)
        assert isinstance(model.get_input_embeddings().weight, DeviceTensor)
        profile = rl.profile(model, tokens, surrogates=1)
    for name in ("q_norm", "selectivity", "offset_mass", "sink_mass", "total_bits"):
        wanted = expected[name].values
        atol = 1e-3 * float(np.nanmax(np.abs(wanted)))
        np.testing.assert_allclose(profile[name], wanted, atol=atol, err_msg=name)


FITS = ("fits", "surrogates")
CEILINGS = [
    *((FITS, "operations", 10_000), (FITS, "waits", 40), (FITS, "bytes", 90e9)),
    *(
        (("sums",), "operations", 150),
        (("sums",), "waits", 2),
        (("sums",), "bytes", 4e9),
    ),
    (("exchanged keys",), "operations", 40),
]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, int]]:
    counts = launches.count_profile("8b", 2048).counts
    return {row["stage"]: row for row in launches.rows_of("8b", 2048, counts)}


@pytest.mark.thorough
@pytest.mark.parametrize(("stages", "kind", "ceiling"), CEILINGS)
def test_a_layer_keeps_its_ceilings(
    rows, stages: tuple[str, ...], kind: str, ceiling: float
):
    """Operations include the operators on tensors of the host, for which a GPU waits."""
    kinds = ("operations", "host") if kind == "operations" else (kind,)
    assert sum(rows[stage][kind] for stage in stages for kind in kinds) <= ceiling


def test_dense_sums_are_those_of_a_profile():
    model = tiny_llama().eval()
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, model.config.vocab_size, (1, 48))
    with torch.no_grad():
        layers = dense.dense_sums(model, tokens)
    profile = rl.profile(model, tokens.repeat(2, 1), surrogates=0)
    compared = set(layers[0]) & set(profile)
    assert compared == set(layers[0]) - {"entropy", "information"}
    for name in compared:
        dense_sum = torch.stack([layer[name] for layer in layers]).numpy()
        wanted = profile[name].values[..., : dense_sum.shape[-1]]
        np.testing.assert_allclose(dense_sum, wanted, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "way", ["plain forward", "ropelens, all rows", "ropelens, 512 rows"]
)
def test_a_way_has_a_time_and_a_memory(way: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama(vocab_size=32000).eval().requires_grad_(False)
    monkeypatch.setattr(cost, "random_llama", lambda: model)
    measured = peers.cost_of(way, 16)
    assert measured["seconds"] > 0
    assert measured["peak_mib"] >= 0
