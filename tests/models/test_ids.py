"""Token ids from a file: what is read, what is refused, and nothing unpickled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import save_tiny

import ropelens as rl
from ropelens.errors import BadArgument, BadCheckpoint, BadText
from ropelens.models.checkpoint import load_tokenizer
from ropelens.models.loading import Loading
from ropelens.models.texts import read_ids


def test_arrays_are_cut_to_the_context(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(14, dtype=np.uint16).reshape(2, 7))
    read = read_ids(tmp_path / "ids.npy", context=5)
    first, second = [0, 1, 2, 3, 4], [7, 8, 9, 10, 11]
    assert read.tokens.tolist() == [first, [5, 6, 0, 0, 0], second, [12, 13, 0, 0, 0]]
    assert read.lengths.tolist() == [5, 2, 5, 2]
    assert read.documents is None
    # One token predicts nothing.
    assert read_ids(tmp_path / "ids.npy", context=6).lengths.tolist() == [6, 6]
    np.save(tmp_path / "one.npy", np.arange(6))
    assert len(read_ids(tmp_path / "one.npy", context=6).tokens) == 1
    assert len(read_ids(tmp_path / "ids.npy", context=5, sequences=3).tokens) == 3


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("exploded"),)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("none.npy", None, "holds no token ids"),
        ("ids.pt", b"", "holds no token ids"),
        ("ids.npy", b"nonsense", "holds no token ids"),
        ("ids.npy", np.array([Bomb()], dtype=object), "holds no token ids"),
        ("ids.npy", np.zeros((2, 3)), "float64 of shape"),
        ("ids.npy", np.zeros((2, 3, 4), int), "of shape"),
        ("ids.npy", np.zeros((0, 4), int), "holds no token ids"),
    ],
)
def test_what_holds_no_ids_is_refused(
    tmp_path: Path,
    name: str,
    values: bytes | np.ndarray | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(values, bytes):
        (tmp_path / name).write_bytes(values)
    elif values is not None:
        np.save(tmp_path / name, values, allow_pickle=True)
    with pytest.raises(BadText, match=words):
        read_ids(tmp_path / name, context=8)
    assert not (tmp_path / "exploded").exists()


def test_a_model_without_a_tokenizer_is_analyzed(tmp_path: Path) -> None:
    whole = save_tiny(tmp_path / "whole")
    bare = save_tiny(tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    text, context = "the quick brown fox " * 20, rl.Options(context=24)
    np.save(tmp_path / "ids.npy", np.arange(90).reshape(3, 30) % 40)
    of_ids = rl.analyze(bare, options=rl.Options(context=24, ids=tmp_path / "ids.npy"))
    assert "of token ids, up to 24 each" in of_ids.profile.attrs["text"]
    with pytest.raises(BadArgument, match="A text needs the tokenizer"):
        rl.analyze(bare, text, context)
    with pytest.raises(BadCheckpoint, match="There is no tokenizer in"):
        rl.analyze(bare, text, context, tokenizer=bare)
    assert load_tokenizer(whole, Loading())(text)["input_ids"]
    np.save(tmp_path / "high.npy", np.full((2, 9), 40))
    with pytest.raises(BadArgument, match="not in the model's vocabulary"):
        rl.analyze(bare, options=rl.Options(context=24, ids=tmp_path / "high.npy"))
