"""The numbers of a study are kept without its weights, and its pages are drawn from them."""

import json
import shutil
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import study
from trained import story

import ropelens as rl
from ropelens.errors import BadArgument

ROOT = Path(__file__).parents[2]
ARCHIVES = sorted((ROOT / "tools/study").glob("*.tar.xz"))
LARGEST = 6_000_000  # bytes of all archives

TINY = """\
variants = ["rope", "nope"]
sizes = ["2x32x2x1"]
context = 32
vocabulary = 300
steps = 2
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts, in which reports and archives are written."""
    shutil.copytree(ROOT / "analyses", tmp_path / "analyses")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    return tmp_path


def findings_in(folder: Path) -> list[str]:
    return json.loads((folder / "run.json").read_text())["findings"]


def test_a_study_without_an_archive_names_the_command(workplace: Path):
    with pytest.raises(BadArgument, match="study variants is not finished") as refused:
        study.main(["variants"])
    assert "make study NOVELS=FOLDER" in str(refused.value)


@pytest.mark.thorough
def test_a_study_is_trained_and_its_pages_are_drawn_again(workplace, monkeypatch):
    (workplace / "analyses/variants.toml").write_text(TINY)
    more = TINY.replace("sizes", "seeds = [1]\nsizes")
    (workplace / "analyses/variants-more.toml").write_text(more)
    for name, lines in (("train", 900), ("valid", 300)):
        (workplace / "novels" / name).mkdir(parents=True)
        (workplace / "novels" / name / "story.txt").write_text(story(lines))
    study.main(["variants"], novels=Path("novels"))
    assert [*workplace.glob("runs/variants/**/model.safetensors")]
    page = workplace / "reports/variants/variants"
    findings = findings_in(page)
    losses = rl.open(page)["sequence_loss"].values
    assert losses.dtype == np.float32
    with tarfile.open(workplace / "tools/study/variants.tar.xz") as archive:
        for name in archive.getnames():
            file = archive.extractfile(name)
            if name.endswith(".json") and file is not None:
                assert str(workplace).encode() not in file.read()

    shutil.rmtree(workplace / "runs")
    shutil.rmtree(workplace / "reports")
    study.main(["variants"])
    assert findings_in(page) == findings
    np.testing.assert_array_equal(rl.open(page)["sequence_loss"], losses)

    # The archive has all runs, so that nothing is trained again
    study.main(["variants"], novels=Path("novels"))
    assert findings_in(page) == findings
    assert not [*workplace.glob("runs/**/model.safetensors")]

    # The archive has the first part, so that only the second is trained
    study.keep([Path("runs/variants")], study.KEPT / "variants.tar.xz")
    shutil.rmtree(workplace / "runs")
    study.main(["variants"], novels=Path("novels"))
    assert not [*workplace.glob("runs/variants/**/model.safetensors")]
    assert [*workplace.glob("runs/variants-more/**/model.safetensors")]
    np.testing.assert_allclose(rl.open(page)["sequence_loss"], losses, rtol=1e-4)


def keep_two_seeds(archive: Path, copy: Path) -> None:
    """Copy an archive of a study without its further seeds, which take long to read."""
    with TemporaryDirectory() as folder:
        study.unpack(archive, Path(folder))
        for run in Path(folder).glob("*/*/*/seed-*"):
            if run.name not in ("seed-0", "seed-1"):
                shutil.rmtree(run)
        with tarfile.open(copy, "w:xz", preset=0) as tar:
            for part in Path(folder).iterdir():
                tar.add(part, part.name)


@pytest.mark.thorough
def test_the_pages_of_finished_studies_are_drawn_from_their_archives(workplace):
    kept = workplace / "tools/study"
    kept.mkdir(parents=True)
    for archive in ARCHIVES:
        keep_two_seeds(archive, kept / archive.name)
        name = archive.name.removesuffix(".tar.xz")
        study.draw(name, workplace / "runs")
        for script in study.STUDIES[name].scripts:
            page = workplace / "reports" / Path(script).stem / name / "index.html"
            assert page.exists()


def test_archives_of_studies_are_small():
    sizes = [archive.stat().st_size for archive in ARCHIVES]
    assert sum(sizes) <= LARGEST


def test_each_study_has_its_file_and_its_scripts():
    for name, row in study.STUDIES.items():
        assert row.parts[0] == name
        for part in row.parts:
            assert (ROOT / "analyses" / f"{part}.toml").exists()
        for script in row.scripts:
            assert (ROOT / "analyses" / script).exists()


def test_a_stopped_archive_leaves_the_archive_before(workplace, monkeypatch):
    archive = workplace / "tools/study/variants.tar.xz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"the archive before")

    def stop(folder: Path, kept: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "copy_study", stop)
    with pytest.raises(KeyboardInterrupt):
        study.keep([workplace / "runs/variants"], archive)
    assert [*archive.parent.iterdir()] == [archive]
    assert archive.read_bytes() == b"the archive before"


def test_an_archive_that_is_no_archive_is_named(workplace):
    archive = workplace / "tools/study/variants.tar.xz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"half of an archive")
    with pytest.raises(BadArgument, match=r"variants\.tar\.xz cannot be unpacked"):
        study.main(["variants"])


@pytest.mark.parametrize("changed", [False, True])
def test_only_the_archive_of_an_equal_study_is_continued(workplace, changed: bool):
    """A study with more seeds, for example, begins anew instead of being refused."""
    file = workplace / "analyses/variants.toml"
    file.write_text(TINY)
    recorded = study.read_study(file)
    (workplace / "analyses/variants-more.toml").write_text(TINY)
    folder = workplace / "runs/variants"
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(recorded))
    study.keep([folder], workplace / study.KEPT / "variants.tar.xz")
    shutil.rmtree(workplace / "runs")
    if changed:
        file.write_text(TINY.replace("steps = 2", "steps = 3"))
    study.restore("variants", workplace / "runs")
    assert (folder / "study.json").exists() is not changed
    left = {path.name for path in (workplace / "runs").iterdir()}
    assert left <= {"variants", ".variants.lock"}
