"""Runs that are stopped and resumed."""

from pathlib import Path

import pytest
from trained import OPTIONS, metrics, train

from ropelens.errors import BadText
from ropelens.train import loop


@pytest.mark.parametrize("step", [24, 60])
def test_a_stop_after_any_step(
    run: Path, prose: Path, tmp_path: Path, step: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stop between two rows of metrics.csv, which cover ten steps each, and after the last."""
    save = loop.save_checkpoint

    def save_and_stop(path: Path, *state: object) -> None:
        save(path, *state)
        if state[-1][0] == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", save_and_stop)
        patch.setattr(loop, "CHECKPOINT_SECONDS", 0)
        with pytest.raises(KeyboardInterrupt):
            train([prose], out=tmp_path, **OPTIONS)
    assert not (tmp_path / "model.safetensors").exists()
    train([prose], out=tmp_path, **OPTIONS)
    assert f"resuming from step {step}\n" in capfd.readouterr().err
    assert not (tmp_path / loop.CHECKPOINT).exists()
    assert metrics(tmp_path) == metrics(run)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()
    history, expected = ((out / "history").iterdir() for out in (tmp_path, run))
    assert {folder.name for folder in history} == {folder.name for folder in expected}


def test_files_of_a_failed_start_are_not_used(prose: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(BadText, match=r"0 sequences for train\.npy, which needs 4"):
        train([tmp_path / "short.txt"], out=out, **OPTIONS)
    with pytest.raises(BadText, match=r"too short at a context of 32[\s\S]*for valid\.npy"):
        train([prose], valid=[tmp_path / "short.txt"], out=out, **OPTIONS)
    assert (out / "data" / "train.npy").exists()
    train([prose], out=out, **OPTIONS | {"steps": 2})
    assert metrics(out)[-1]["valid_loss"]
