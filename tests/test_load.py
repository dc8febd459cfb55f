"""Loading: what is good comes out ready to be measured, what is not is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from ropelens.bundled import BUNDLED, bundled_path
from ropelens.errors import BadArgument, BadCheckpoint, RopelensError, UnsupportedModel
from ropelens.models.checkpoint import locate
from ropelens.models.load import load, maximum_context
from ropelens.text import read_documents, tokenize

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}

NO_SPECIAL_TOKENS = dict.fromkeys(
    ["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"]
)


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 2} | changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint: a tiny Llama of std 0.3 and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_llama().save_pretrained(folder)
    letters = {"<s>": 0, "<unk>": 1} | {chr(97 + i): i + 2 for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_over(folder: Path, model: PreTrainedModel) -> None:
    shutil.rmtree(folder)
    model.save_pretrained(folder)


# What is good.


def test_a_folder_gives_the_saved_model_ready_to_measure(saved: Path) -> None:
    model, tokenizer = load(saved)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, tiny_llama().eval()(tokens).logits)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype is torch.float32
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._name_or_path == str(saved)
    assert maximum_context(model) == 64
    assert tokenizer is not None
    assert tokenizer("abc", add_special_tokens=False)["input_ids"] == [2, 3, 4]


def test_loading_leaves_the_random_state_alone(saved: Path) -> None:
    before = torch.random.get_rng_state()
    load(saved)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_loading_says_nothing_where_stderr_is_no_terminal(
    saved: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(saved)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", torch.float32),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float64", torch.float64),
        ("auto", torch.bfloat16),
    ],
)
def test_dtype_is_the_asked_one_and_auto_the_checkpoints(
    folder: Path, dtype: str, expected: torch.dtype
) -> None:
    save_over(folder, tiny_llama().to(torch.bfloat16))
    model, _ = load(folder, dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_a_model_without_a_tokenizer_has_none(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    _, tokenizer = load(folder)
    assert tokenizer is None


def test_a_sharded_checkpoint_is_one_model(folder: Path) -> None:
    save_over(folder, tiny_llama())
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("*.safetensors"))) > 1
    model, _ = load(folder)
    for name, parameter in tiny_llama().named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


def test_a_pickle_beside_safetensors_is_never_opened(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    load(folder)


FAMILIES = {
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    ),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, num_key_value_heads=2)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_causal_families_pass_the_check_of_causality(
    tmp_path: Path, family: str, dtype: str
) -> None:
    # GPT-2 and BLOOM do not rotate, which is not for loading to find out.
    FAMILIES[family]().save_pretrained(tmp_path)
    model, _ = load(tmp_path, dtype=dtype)
    assert model.config.model_type.startswith(family)


def test_a_file_called_by_its_home_is_found(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    assert locate(f"~/{saved.name}").path == saved


# The Hub.


def cached(folder: Path, hub: Path) -> None:
    """Lay `folder` into a Hub cache as the main revision of acme/tiny."""
    repository = hub / "models--acme--tiny"
    shutil.copytree(folder, repository / "snapshots" / ("c" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)


@pytest.mark.parametrize("local_files_only", [True, False])
def test_a_hub_id_is_read_from_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_files_only: bool
) -> None:
    cached(folder, tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model, tokenizer = load("acme/tiny", local_files_only=local_files_only)
    assert model.config._name_or_path == "acme/tiny"
    assert tokenizer is not None
    assert locate("acme/tiny", local_files_only=local_files_only).revision == "c" * 40


class Hub(ThreadingHTTPServer):
    """A Hub with one model, acme/tiny, on this machine: what the real client asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), HubRequest)


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        folder, commit = self.server.folder, "d" * 40
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        headers = {"X-Repo-Commit": commit}
        if path.startswith("/api/models/acme/tiny/tree"):
            answer = [
                {"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size}
                | {"oid": hashlib.sha1(f.read_bytes()).hexdigest()}
                for f in files
            ]
            body = json.dumps(answer).encode()
        elif path.startswith("/api/models/acme/tiny/revision"):
            body = json.dumps({"id": "acme/tiny", "sha": commit}).encode()
        elif f"/resolve/{commit}/" in path:
            body = (folder / path.split(f"{commit}/")[1]).read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_hub_id_is_fetched_without_its_pickles(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    program = (
        "from ropelens.models.load import load\n"
        "model, tokenizer = load('acme/tiny', revision='main')\n"
        "print(model.config._name_or_path, tokenizer is not None)"
    )
    with Hub(folder) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | settings,
        )
        hub.shutdown()
    assert (done.returncode, done.stdout, done.stderr) == (0, "acme/tiny True\n", "")
    wanted = {p.name for p in folder.iterdir() if p.suffix in {".json", ".safetensors"}}
    assert {Path(path).name for path in hub.asked if "/resolve/" in path} == wanted
    snapshot = tmp_path / "cache" / "models--acme--tiny" / "snapshots" / ("d" * 40)
    assert {p.name for p in snapshot.rglob("*")} == wanted


# What is not good: a table of damages, each with the error it must give.


def broken(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    return change


def truncate(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def only_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def bad_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[1, 2]")


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def overflowing(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"][:] = 3e38


DAMAGES: dict[str, tuple[Callable[[Path], object], type[RopelensError], list[str]]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        BadCheckpoint,
        ["has no config.json", "model.safetensors", "try:", "save_pretrained"],
    ),
    "an adapter": (adapter, BadCheckpoint, ["holds an adapter", "merge_and_unload"]),
    "config no JSON": (
        lambda f: (f / "config.json").write_text("{'model_type': "),
        BadCheckpoint,
        ["config.json is not readable JSON", "line 1 column 2"],
    ),
    "config a list": (
        lambda f: (f / "config.json").write_text("[]"),
        BadCheckpoint,
        ["config.json does not say what model", '"model_type"'],
    ),
    "unknown model type": (
        lambda f: edit_config(f, model_type="yeti"),
        UnsupportedModel,
        ["knows no model type 'yeti'", "upgrade"],
    ),
    "code of its own": (
        lambda f: edit_config(f, model_type="yeti", auto_map={"AutoConfig": "yeti.Yeti"}),
        UnsupportedModel,
        ["'yeti' brings its own code", "trust_remote_code=True"],
    ),
    "impossible config": (
        lambda f: edit_config(f, hidden_size=31),
        BadCheckpoint,
        ["config.json is refused by transformers", "31"],
    ),
    "truncated": (
        lambda f: truncate(f, 30_000),
        BadCheckpoint,
        ["model.safetensors is truncated or damaged", "30,000 bytes"],
    ),
    "empty weights": (
        lambda f: truncate(f, 0),
        BadCheckpoint,
        ["model.safetensors is truncated or damaged", "0 bytes"],
    ),
    "git-lfs pointer": (
        lambda f: (f / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
        ),
        BadCheckpoint,
        ["pointer of git-lfs", "git lfs pull"],
    ),
    "missing tensor": (
        lambda f: edit_weights(f, lambda w: w.pop("model.layers.0.self_attn.q_proj.weight")),
        BadCheckpoint,
        [
            "lacks weights of LlamaForCausalLM",
            "1 missing",
            "layers.0.self_attn.q_proj",
            "random",
        ],
    ),
    "missing head": (
        lambda f: edit_weights(f, lambda w: w.pop("lm_head.weight")),
        BadCheckpoint,
        ["lacks weights of LlamaForCausalLM", "lm_head.weight"],
    ),
    "more layers in config": (
        lambda f: edit_config(f, num_hidden_layers=3),
        BadCheckpoint,
        ["lacks weights of LlamaForCausalLM", "9 missing", "model.layers.2."],
    ),
    "mismatched": (
        lambda f: edit_config(f, intermediate_size=64),
        BadCheckpoint,
        ["do not fit the shapes", "layers.0.mlp.down_proj", "[32, 48]", "[32, 64]"],
    ),
    "NaN": (
        lambda f: edit_weights(f, broken(float("nan"))),
        BadCheckpoint,
        ["model.layers.1.mlp.up_proj.weight holds NaN or infinite", "1 of its 1,536 numbers"],
    ),
    "infinite": (
        lambda f: edit_weights(f, broken(float("-inf"))),
        BadCheckpoint,
        ["model.layers.1.mlp.up_proj.weight holds NaN or infinite"],
    ),
    "overflow": (
        lambda f: edit_weights(f, overflowing),
        BadCheckpoint,
        ["logits that are NaN or infinite", "all finite", "another dtype"],
    ),
    "pickle": (only_pickle, BadCheckpoint, ["pytorch_model.bin is a pickle", "convert once"]),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        BadCheckpoint,
        ["has no weights that ropelens reads", "it holds config.json"],
    ),
    "missing shard": (
        lose_a_shard,
        BadCheckpoint,
        ["weight files are missing", "names model-00002-of-"],
    ),
    "bad index": (bad_index, BadCheckpoint, ["is not an index of safetensors files"]),
    "bad tokenizer": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'),
        BadCheckpoint,
        ["tokenizer in", "cannot be read"],
    ),
    "BERT": (
        lambda f: save_over(f, BertForMaskedLM(BertConfig(**SIZES))),
        UnsupportedModel,
        ["BertForMaskedLM is not a causal language model", "what comes after them"],
    ),
    "BERT that says it generates": (
        lambda f: save_over(f, BertLMHeadModel(BertConfig(**SIZES))),
        UnsupportedModel,
        ["BertLMHeadModel is not a causal language model", "changes the logits before it"],
    ),
    "ModernBERT": (
        lambda f: save_over(
            f, ModernBertForMaskedLM(ModernBertConfig(**SIZES, **NO_SPECIAL_TOKENS))
        ),
        UnsupportedModel,
        ["model type modernbert is not a causal language model"],
    ),
    "a Llama that classifies": (
        lambda f: edit_config(f, architectures=["LlamaForSequenceClassification"]),
        UnsupportedModel,
        ["LlamaForSequenceClassification is not a causal language model"],
    ),
    "T5": (
        lambda f: save_over(
            f,
            T5ForConditionalGeneration(
                T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
            ),
        ),
        UnsupportedModel,
        ["encoder-decoder model is not a causal language model"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(
    folder: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    change, kind, words = DAMAGES[damage]
    change(folder)
    capfd.readouterr()
    with pytest.raises(kind) as caught:
        load(folder)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in caught.value.line
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "/no/such/folder",
            ["There is no checkpoint at /no/such/folder", "cannot be a Hub id"],
        ),
        ("./model", ["There is no checkpoint at ./model"]),
        ("stories.bin", ["There is no checkpoint at stories.bin"]),
        (
            "acme/none",
            ["There is no checkpoint called acme/none", "no folder", "HF_HUB_OFFLINE"],
        ),
        ("no--good", ["There is no checkpoint called no--good"]),
    ],
)
def test_a_name_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadCheckpoint) as caught:
        load(name)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in caught.value.line


def test_a_revision_that_is_not_cached_is_named() -> None:
    with pytest.raises(BadCheckpoint, match="called acme/none at revision v2"):
        load("acme/none", revision="v2")


def test_a_cache_without_the_weights_is_told_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").unlink()
    cached(folder, tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(BadCheckpoint, match="has no weights that ropelens reads"):
        load("acme/tiny")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt"])
def test_a_pickle_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save({"w": torch.zeros(2)}, path)
    with pytest.raises(BadCheckpoint, match="is a pickle, which ropelens never loads"):
        load(path)


def test_a_file_of_weights_points_to_its_folder(saved: Path) -> None:
    with pytest.raises(
        BadCheckpoint, match=r"pass the folder that holds config\.json"
    ) as caught:
        load(saved / "model.safetensors")
    assert str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "int8"}, "There is no dtype 'int8'.*float32, float16, bfloat16"),
        ({"device": "gpu"}, "There is no device 'gpu'.*auto, cpu, cuda"),
        ({"device": "meta"}, "There is no device 'meta'"),
        ({"revision": "main"}, "has no revision main.*only models on the Hub"),
    ],
)
def test_an_impossible_argument_is_refused(
    saved: Path, arguments: dict[str, str], words: str
) -> None:
    with pytest.raises(BadArgument) as caught:
        load(saved, **arguments)
    assert caught.match(f"(?s){words}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_that_is_not_there_is_named(saved: Path, device: str) -> None:
    with pytest.raises(BadArgument, match=f"'{device}' needs CUDA, which is not available"):
        load(saved, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_taken_where_there_is_one(saved: Path) -> None:
    model, _ = load(saved)
    assert model.device.type == "cuda"
    assert model.dtype is torch.float32
    with pytest.raises(BadArgument, match="'cuda:99' does not work here"):
        load(saved, device="cuda:99")


# What loads, with a warning.


def test_tensors_that_the_model_has_no_place_for_are_named(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)
    with pytest.warns(UserWarning, match=r"leaves them out: 9, model\.layers\.1\."):
        load(folder)


def test_a_partial_rotary_factor_without_effect_is_named(folder: Path) -> None:
    edit_config(folder, partial_rotary_factor=0.5)
    with pytest.warns(UserWarning, match=r"partial_rotary_factor=0\.5 has no effect.*all 8"):
        model, _ = load(folder)
    rotated = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
    assert (rotated > 0).all()


def test_a_partial_rotary_factor_with_effect_is_not(folder: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    edit_config(folder, rope_parameters=rope)
    GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).save_pretrained(tmp_path / "neox")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = load(folder)
        load(tmp_path / "neox")
    rotated = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
    assert (rotated > 0).tolist() == [True, True, False, False]


# Checkpoints that were trained.


def test_the_bundled_checkpoint_goes_by_its_name() -> None:
    if not (bundled_path() / "model.safetensors").is_file():
        pytest.skip("no checkpoint is bundled yet")
    for name in ("bundled", f"bundled:{BUNDLED[0]}"):
        model, tokenizer = load(name)
        assert model.config._name_or_path == name
        assert tokenizer is not None
        assert locate(name).path == bundled_path()


def test_what_is_not_bundled_is_refused() -> None:
    with pytest.raises(BadArgument, match="'yeti' is bundled"):
        load("bundled:yeti")


@pytest.mark.parametrize(
    ("name", "loss", "count"), [("babyllama105", 0.615, 1275), ("stories260k", 1.264, 1802)]
)
def test_real_checkpoints_predict_real_stories(
    shared: Path, name: str, loss: float, count: int
) -> None:
    model, tokenizer = load(shared / "checkpoints" / name)
    context = maximum_context(model)
    assert context is not None
    total, predicted = 0.0, 0
    for story in read_documents([shared / "corpora" / "tinystories"]):
        # The story from its start, cut at the model's context.
        length = 1 + len(tokenizer(story, add_special_tokens=False)["input_ids"])
        cut = tokenize([story], tokenizer, context=min(context, length))
        tokens = cut.tokens[:1]
        assert int(cut.lengths[0]) == tokens.shape[1]
        total += float(model(tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
        predicted += tokens.shape[1] - 1
    assert predicted == count
    assert total / predicted == pytest.approx(loss, abs=5e-4)
