"""Folders and files of text that people have: copies, links, pipes, encodings, tables."""

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from ropelens.errors import BadText
from ropelens.text.documents import read_documents

STORY = "Once there was a cat – it slept by the fire."


def refusal(path: Path) -> str:
    """The words with which the path is refused."""
    with pytest.raises(BadText) as refused:
        read_documents([path])
    assert "\n" not in refused.value.line
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one text."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "story.txt").write_text(STORY)
    return texts


def test_names_that_begin_with_a_dot_are_skipped_and_counted(folder: Path):
    for hidden in (".ipynb_checkpoints", ".git/objects"):
        (folder / hidden).mkdir(parents=True)
        (folder / hidden / "story-checkpoint.txt").write_text(STORY)
    (folder / "._story.txt").write_bytes(b"\0\5\26\7")
    words = (
        r"names that begin with a dot: 3 \(\._story\.txt, \.git, \.ipynb_checkpoints\)"
    )
    with pytest.warns(UserWarning, match=words) as warned:
        assert read_documents([folder]) == [STORY]
    assert len(warned) == 1


def test_a_hidden_folder_that_is_named_is_read(folder: Path):
    hidden = folder.rename(folder.with_name(".texts"))
    assert read_documents([hidden]) == [STORY]


def test_other_files_are_counted_in_one_line(folder: Path):
    (folder / "part").mkdir()
    for name in ("a.png", "part/b.PNG", "part/README"):
        (folder / name).write_bytes(b"\x89PNG\0")
    (folder / "again").symlink_to(folder, target_is_directory=True)
    (folder / "gone.png").symlink_to("nothing")
    words = r"other files: 5 \(\.PNG, \.png, links to folders, without an ending\)"
    with pytest.warns(UserWarning, match=words) as warned:
        assert read_documents([folder]) == [STORY]
    assert len(warned) == 1


def test_endings_in_upper_case_are_read(folder: Path):
    (folder / "A.TXT").write_text("first")
    (folder / "B.Md").write_text("second")
    (folder / "C.JSONL").write_text('{"text": "third"}\n')
    assert read_documents([folder]) == ["first", "second", "third", STORY]
    assert read_documents([folder / "C.JSONL"]) == ["third"]


def test_a_folder_whose_name_ends_like_a_text_is_a_folder(folder: Path):
    (folder / "old.txt").mkdir()
    (folder / "old.txt" / "a.txt").write_text("first")
    assert read_documents([folder]) == ["first", STORY]


def test_a_folder_without_text_names_the_accepted_endings(tmp_path: Path):
    (tmp_path / "paper.pdf").write_bytes(b"%PDF")
    words = refusal(tmp_path)
    assert "contains no text" in words
    assert "other files: 1 (.pdf)" in words
    assert "*.txt, *.md, *.jsonl and *.parquet" in words


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing.txt")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_to_unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")  # no reader has the permission, not even root


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            link_to_nothing,
            ["does not exist", "leads to nothing.txt", "remove the link"],
        ),
        (link_to_itself, ["does not exist", "remove the link"]),
        (link_to_unreadable, ["cannot be read", "the permission to read it"]),
        (link_to_device, ["is a device", "may never end"]),
        (os.mkfifo, ["is a named pipe", "may never end"]),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_at_once(
    folder: Path, make: Callable[[Path], None], words: list[str]
):
    path = folder / "strange.txt"
    make(path)
    seen = refusal(folder)
    for part in [str(path), *words]:
        assert part in seen


def test_a_pipe_without_an_ending_in_a_folder_is_refused(folder: Path):
    os.mkfifo(folder / "pipe")
    assert "is a named pipe" in refusal(folder)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused_as_a_text(device: str):
    words = refusal(Path(device))
    assert f"{device} is a device" in words
    assert "--text <(COMMAND)" in words


def test_a_folder_inside_that_cannot_be_listed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    words = refusal(folder)
    assert f"{folder / 'locked'} cannot be read" in words
    assert "Permission denied" in words


MARKED = ["utf-8-sig", "utf-16", "utf-32"]


@pytest.mark.parametrize("encoding", MARKED)
def test_text_with_a_byte_order_mark_is_read(tmp_path: Path, encoding: str):
    path = tmp_path / "a.txt"
    path.write_text(f"{STORY}\r\n{STORY}\r\n", encoding=encoding)
    assert read_documents([path]) == [f"{STORY}\n{STORY}"]
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": STORY}), encoding=encoding)
    assert read_documents([lines]) == [STORY]


@pytest.mark.parametrize("encoding", ["utf-16-be", "utf-32-be"])
def test_a_byte_order_mark_states_the_order(tmp_path: Path, encoding: str):
    path = tmp_path / "a.txt"
    path.write_text(f"\ufeff{STORY}", encoding=encoding)
    assert read_documents([path]) == [STORY]


@pytest.mark.parametrize(
    ("order", "text"), [("LE", "cat"), ("BE", "cat"), ("LE", STORY)]
)
def test_utf_16_without_a_mark_is_refused_with_its_name(
    tmp_path: Path, order: str, text: str
):
    path = tmp_path / "a.txt"
    path.write_text(text, encoding=f"utf-16-{order}")
    words = refusal(path)
    assert str(path) in words
    assert f"iconv -f UTF-16{order} -t UTF-8" in words
    assert "LATIN1" not in words


def test_utf_16_that_is_cut_off_is_refused_with_its_name(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes("cat".encode("utf-16")[:-1])
    words = refusal(path)
    assert "cannot be read as text in UTF-16" in words
    assert "iconv" not in words


def test_nul_characters_in_a_file_are_refused(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"cat\0dog")
    words = refusal(path)
    assert f"{path} contains NUL characters" in words
    assert f"tr -d '\\000' < {path}" in words
    path.write_bytes(b"%PDF-1.7 \xe9\xff \0 stream")
    assert "cannot be read as text in UTF-8" in refusal(path)
    assert "convert it to plain text" in refusal(path)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "cat"}\n{"text": "a\\u0000b"}\n')
    assert f"Line 2 of {lines} contains NUL characters" in refusal(lines)


ROWS = [{"id": "7", "content": STORY}, {"id": "8", "content": "The end."}]


def follow_remedy(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the line of Python that an error recommends, and return the file that it writes."""
    line = words[words.index("pandas.") : words.index(" in Python")]
    monkeypatch.chdir(folder)
    exec(line, {"pandas": pd})
    return folder / "texts.jsonl"


def test_a_jsonl_file_without_text_names_its_keys_and_a_remedy_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    words = refusal(path)
    assert f"Line 1 of {path} holds no text" in words
    assert 'its keys are "id", "content"' in words
    written = follow_remedy(words, tmp_path, monkeypatch)
    assert read_documents([written]) == [STORY, "The end."]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ('{"text": null}', '"text" is NoneType: None'),
        ('{"text": ["a"]}', "\"text\" is list: ['a']"),
        ("[1]", "list instead of an object"),
        ('{"id": 3}', 'its keys are "id"'),
        ("{}", "its keys are"),
    ],
)
def test_a_line_without_a_string_states_what_it_has(
    tmp_path: Path, line: str, seen: str
):
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    words = refusal(path)
    assert seen in words
    assert 'an object such as {"text": "Once"}' in words


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.TSV"])
def test_a_table_is_refused_with_a_remedy_that_works(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    path = folder / name
    table = pd.DataFrame({"id": ["7"], "text": ["12"]})
    if name == "a.json":
        table.to_json(path, orient="records")
    else:
        table.to_csv(path, index=False, sep="\t" if name == "a.TSV" else ",")
    words = refusal(path)
    assert f"{path} is not a file of text" in words
    assert refusal(folder) == words
    written = follow_remedy(words, folder.parent, monkeypatch)
    assert read_documents([written]) == ["12"]


COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".XZ": lzma.compress}


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_compressed_files_are_read(folder: Path, ending: str):
    compress = COMPRESSORS[ending]
    (folder / f"a.txt{ending}").write_bytes(compress(b"first\n"))
    (folder / f"b.jsonl{ending}").write_bytes(compress(b'{"text": "second"}'))
    assert read_documents([folder]) == ["first", "second", STORY]


def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(STORY.encode())[:-9])
    assert f"{path} cannot be read" in refusal(path)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a.jsonl.zst", "zstd -d"),
        ("a.txt.zip", "unzip"),
        ("a.tar.gz", "tar -xf"),
        ("a.tgz", "tar -xf"),
    ],
)
def test_other_compressed_files_are_refused_with_a_command(
    tmp_path: Path, name: str, command: str
):
    path = tmp_path / name
    path.write_bytes(b"\x28\xb5\x2f\xfd")
    assert f"{command} {path}" in refusal(path)


def test_parquet_is_read(folder: Path):
    pytest.importorskip("pyarrow")
    table = pd.DataFrame({"id": [1, 2, 3], "text": ["first", " ", "second"]})
    table.to_parquet(folder / "a.parquet")
    assert read_documents([folder]) == ["first", "second", STORY]


def test_parquet_without_texts_is_refused(tmp_path: Path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    pd.DataFrame({"content": ["first"]}).to_parquet(path)
    words = refusal(path)
    assert f'{path} cannot be read as a table with the column "text"' in words
    assert f"pandas.read_parquet('{path}').columns" in words
    pd.DataFrame({"text": ["first", None]}).to_parquet(path)
    assert f"Row 1 of {path} holds no text" in refusal(path)


def test_parquet_without_pyarrow_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Unable to find a usable engine")

    monkeypatch.setattr(pd, "read_parquet", missing)
    path = tmp_path / "a.parquet"
    path.touch()
    assert "pip install pyarrow" in refusal(path)
