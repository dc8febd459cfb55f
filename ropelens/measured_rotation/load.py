"""`load` reads a checkpoint and returns a model that can be measured."""

from contextlib import suppress
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ropelens.arguments import public
from ropelens.checkpoints.load import open_checkpoint
from ropelens.checkpoints.load_options import Dtype, Loading, Quantization
from ropelens.errors import UnsupportedModel
from ropelens.measured_rotation.row_order import warn_of_row_order
from ropelens.model.as_live_model import as_live_model


@public
def load(
    name: str | Path,
    *,
    dtype: Dtype = "float32",
    device: str = "auto",
    device_map: Literal["auto"] | None = None,
    quantize: Quantization | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a causal language model and its tokenizer, to measure the model.

    The model is in evaluation mode, and its weights do not require gradients. To train it, call
    `model.requires_grad_(True)` and `model.train()` first.

    `name` is a local folder, a GGUF file, "bundled", "bundled:NAME", or a Hub id with an
    optional `revision`. Weights are read from safetensors or GGUF, never from a pickle. If a
    folder has an adapter (peft), the adapter is added to the model that it names, or to the
    model in the same folder. The tokenizer is None if the checkpoint has no tokenizer; the
    model then takes only token ids.

    The default `dtype` is float32, so that a measurement does not depend on the machine. "auto"
    is bfloat16 on a GPU that supports it, and float32 elsewhere. The `device` "auto" is CUDA if
    it is available. Instead of a device, `device_map="auto"` spreads a large model over all
    GPUs, then main memory, then disk. `quantize` reads weights in fewer bits: "int8" (torchao),
    "bnb-int8" or "bnb-nf4" (bitsandbytes).

    Raises BadCheckpoint if files or weights are missing or broken, if weights lack their
    scales, or if a GGUF file states a RoPE that transformers does not have. Raises
    UnsupportedModel if the model is not a causal language model, and BadArgument for other
    wrong arguments. Warns if the model does not use all tensors of the checkpoint, and if it
    predicts a short story better with the rows of q and k in another order.
    """
    loading = Loading(
        dtype=dtype,
        device=device,
        device_map=device_map,
        quantize=quantize,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    opened = open_checkpoint(name, loading)
    model = opened.read()
    with suppress(UnsupportedModel):  # such a model can still be run
        warn_of_row_order(as_live_model(model, opened.tokenizer), stacklevel=3)
    return model, opened.tokenizer
