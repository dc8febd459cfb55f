"""Reading and cutting text: nothing lost, nothing counted twice, every refusal by its words."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import save_tiny
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import ropelens as rl
from ropelens.analysis.plan import plan_analysis
from ropelens.errors import BadArgument, BadText
from ropelens.measured_rotation.load import load
from ropelens.text.documents import read_documents
from ropelens.text.text import Text
from ropelens.text.tokenize import encode, pieces, tokenize


def letters(*, bos: bool = True) -> PreTrainedTokenizerFast:
    """A token a character, ids from its code; BOS is 1, EOS 2 and added where asked for."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
        chr(code): code for code in range(3, 128)
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    ends = [("<s>", 1), ("</s>", 2)]
    added = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.post_processor = added
    names = {"unk_token": "<unk>"} | ({"bos_token": "<s>"} if bos else {})
    names["model_max_length"] = (
        8  # as real tokenizers state it, below the documents' lengths
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


WITH_BOS = letters()
WITHOUT_BOS = letters(bos=False)


def rows(text: Text) -> list[list[int]]:
    pairs = zip(text.ids.tolist(), text.lengths.tolist(), strict=True)
    return [row[:length] for row, length in pairs]


def test_files_and_folders_in_order(tmp_path: Path):
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "a.md").write_text("first\n\n")
    (tmp_path / "c").mkdir()
    lines = '{"text": "third\\n", "id": 3}\n\n{"text": "fourth"}\n'
    (tmp_path / "c" / "d.jsonl").write_text(lines)
    (tmp_path / "e.py").write_text("not text")
    (tmp_path / "z").write_text("any name will do")
    assert read_documents([tmp_path]) == ["first", "second", "third\n", "fourth"]
    chosen = [tmp_path / "z", str(tmp_path / "a.md")]
    assert read_documents(chosen) == ["any name will do", "first"]


def test_line_ends_and_marks_are_read_as_python_does(tmp_path: Path):
    path = tmp_path / "windows.txt"
    path.write_bytes("\ufeffé\r\ntwo\rthree\u2028\r\n".encode())
    lines = tmp_path / "a.jsonl"
    lines.write_text(
        json.dumps({"text": "a\u2028b\u0085c\r\nd"}, ensure_ascii=False) + "\n"
    )
    assert read_documents([path, lines]) == [
        "é\ntwo\nthree\u2028",
        "a\u2028b\u0085c\r\nd",
    ]


def write(name: str, data: bytes):
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


# fmt: off
BAD_FILES = {
    "missing": (lambda f: f / "no.txt", ["no.txt cannot be read", "No such file", "*.txt"]),
    "empty": (write("a.txt", b""), ["contains no text"]),
    "empty folder": (lambda f: f, ["contains no text"]),
    "Latin-1": (write("a.txt", b"caf\xe9 au lait"),
        ["cannot be read as text in UTF-8", "byte 0xe9 in position 3", "iconv"]),
    "jsonl malformed": (write("a.jsonl", b'{"text": "good"}\n\n{"text": bad}\n'),
        ["Line 3 of", "a.jsonl holds no text: '{\"text\": bad}'.", "JSONDecodeError"]),
    "jsonl a number": (write("a.jsonl", b'{"text": 3}\n'), ["Line 1 of", "holds no text"]),
}
# fmt: on


@pytest.mark.parametrize("bad", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path, bad: str):
    make, words = BAD_FILES[bad]
    path = make(tmp_path)
    with pytest.raises(BadText) as caught:
        read_documents([path])
    assert all(word in str(caught.value) for word in [*words, str(path)]), caught.value
    assert "\n" not in caught.value.line


def test_a_pipe_is_read(tmp_path: Path):
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(pipe.write_text, "é\r\n" * 100_000)
        assert read_documents([pipe]) == ["é\n" * 99_999 + "é"]
        writing.result()


def test_bos_as_the_tokenizer_itself_adds_it():
    plain = letters()
    added = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    plain.backend_tokenizer.post_processor = added
    assert plain.bos_token_id == 1
    texts = [tokenize("ab", of, context=2, bos="tokenizer") for of in (WITH_BOS, plain)]
    assert [rows(of) for of in texts] == [[[1, 97], [1, 98]], [[97, 98]]]


@given(
    documents=st.lists(st.text("abc ", max_size=30), min_size=1, max_size=5),
    context=st.integers(2, 12),
    bos=st.booleans(),
)
@settings(deadline=None)
def test_sequences_joined_are_the_documents(
    documents: list[str], context: int, bos: bool
):
    step = context - bos
    expected = []
    for text in documents:
        parts = [text[start : start + step] for start in range(0, len(text), step)]
        expected += [
            [1] * bos + list(map(ord, part)) for part in parts if len(part) + bos > 1
        ]
    tokenizer = WITH_BOS if bos else WITHOUT_BOS
    if sum(map(len, expected)) < context:
        with pytest.raises(BadText):
            tokenize(documents, tokenizer, context=context)
        return
    cut = tokenize(documents, tokenizer, context=context)
    assert rows(cut) == expected
    assert not cut.ids[~cut.real].any()
    assert (
        cut.documents_sha256
        == hashlib.sha256("\0".join(documents).encode()).hexdigest()
    )
    characters = sum(map(len, documents))
    assert cut.source.endswith(
        f"(documents: {len(documents)}, characters: {characters})"
    )


def test_a_sample_is_seeded_ordered_and_without_replacement():
    text = ["".join(chr(33 + i) for i in range(60))]  # no character twice
    everything = tokenize(text, WITH_BOS, context=3)
    some = tokenize(text, WITH_BOS, context=3, sequences=10, seed=3)
    places = [rows(everything).index(row) for row in rows(some)]
    assert len(places) == 10
    assert places == sorted(set(places))
    again = tokenize(text, WITH_BOS, context=3, sequences=10, seed=3)
    other = tokenize(text, WITH_BOS, context=3, sequences=10, seed=4)
    assert rows(again) == rows(some) != rows(other)
    assert some.documents_sha256 == everything.documents_sha256
    assert some.source.startswith("10 of 30 sequences")


def test_short_tails_are_drawn_only_where_there_are_too_few_others():
    text = [
        "a" * 33,
        "bcd",
        "e" * 33,
        "f" * 40,
    ]  # tails of 2, 2 and 9 tokens; 4 are a document

    def drawn(sequences: int | None, seed: int) -> list[int]:
        cut = tokenize(text, WITH_BOS, context=17, sequences=sequences, seed=seed)
        return sorted(cut.lengths.tolist())

    assert all(drawn(8, seed) == [4, 9, 17, 17, 17, 17, 17, 17] for seed in range(20))
    assert all(2 in drawn(9, seed) for seed in range(20))
    assert drawn(None, 0) == drawn(10, 0) == [2, 2, 4, 9, 17, 17, 17, 17, 17, 17]


@given(st.integers(4, 30), st.integers(0, 99))
def test_documents_are_drawn_from_evenly(sequences: int, seed: int):
    """However long they are: as many of each, as far as it has so many."""
    text = ["a" * 8, "b" * 800, "c" * 80, "d" * 16]  # 4, 400, 40 and 8 sequences
    cut = tokenize(text, WITH_BOS, context=3, sequences=sequences, seed=seed)
    counts = torch.bincount(cut.documents, minlength=4)
    assert counts.sum() == sequences
    free = counts[counts < torch.tensor([4, 400, 40, 8])]
    assert free.max() - free.min() <= 1
    assert counts.max() == free.max()


def test_more_sequences_than_there_are_gives_all_with_a_warning():
    with pytest.warns(
        UserWarning, match="all 2 sequences of the text are used: 9 were asked"
    ):
        assert len(tokenize(["abcd"], WITH_BOS, context=3, sequences=9)) == 2
    assert len(tokenize(["abcd"], WITH_BOS, context=3, sequences=2)) == 2


@pytest.mark.parametrize(
    ("documents", "context", "kind", "words"),
    [
        (
            ["abc", "de"],
            8,
            BadText,
            r"one context of 8 tokens[\s\S]*7 tokens \(documents: 2\)",
        ),
        ([], 2, BadText, "0 tokens"),
        (
            ["abc"],
            1,
            BadArgument,
            "tokenize: context must be a whole number, 2 or more",
        ),
        (
            ["abc"],
            "64",
            BadArgument,
            "tokenize: context must be a whole number, 2 or more",
        ),
    ],
)
def test_a_bad_cut_is_refused(documents, context, kind, words):
    with pytest.raises(kind, match=words) as caught:
        tokenize(documents, WITH_BOS, context=context)
    assert "\n" not in caught.value.line
    with pytest.raises(BadArgument, match="needs the tokenizer of the model"):
        tokenize(["abc"], None, context=2)


def test_a_long_line_is_tokenized_in_pieces_with_the_tokens_of_the_whole():
    tokenizer = load("bundled")[1]
    text = "Once upon  a time, there   was a well-known fox;\n\n it ran.  " * 40
    whole = encode(text, tokenizer).ids
    for longest in range(30, 60):
        parts = list(pieces(text, longest=longest))
        assert "".join(parts) == text
        assert max(map(len, parts)) <= longest
        assert [i for part in parts for i in encode(part, tokenizer).ids] == whole
    assert list(pieces("a" * 25, longest=10)) == ["a" * 10, "a" * 10, "a" * 5]


def test_a_model_without_a_tokenizer_is_analyzed_on_tokens(tmp_path: Path):
    whole = save_tiny(tmp_path / "whole")
    bare = save_tiny(tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    text = "the quick brown fox " * 20
    options = rl.Options(context=24, surrogates=0)
    found = rl.analyze(bare, torch.arange(90).reshape(3, 30) % 40, options)
    assert found.profile.attrs["tokens"] == 90
    with pytest.raises(BadArgument, match="A text needs the tokenizer"):
        rl.analyze(bare, text, options)
    read = rl.analyze(bare, text, options, tokenizer=load(whole)[1])
    assert read.profile.attrs["tokens_sha256"]


SHAPE = r"documents must have a value(.|\n)*shape \(2,\) for ids \(1, 3\)"
BAD_FIELDS = [
    ({"ids": "Once upon"}, r"rl\.tokenize for strings"),
    *(
        ({"ids": ids}, "ids must be whole numbers, in rows of equal length")
        for ids in (
            [[1.5, 2.0]],
            [[1, 2, 3], [4, 5]],
            [["a", "b"]],
            [[True, False]],
            None,
        )
    ),
    *(({"lengths": lengths}, "must be whole numbers") for lengths in ([3.0], ["a"])),
    ({"lengths": [4]}, "lengths must be from 2 to 3"),
    ({"lengths": [3, 3]}, "lengths must have a value"),
    ({"documents": [0.5]}, "documents must be whole numbers"),
    ({"documents": [0, 1]}, SHAPE),
    ({"hidden": "x"}, "hidden must be whole numbers"),
    ({"hidden": [[0, 1]]}, "hidden must have a value"),
    ({"documents": [[0, 0, 1]], "lengths": [3]}, "only for plain"),
]


@pytest.mark.parametrize(("fields", "words"), BAD_FIELDS)
def test_a_text_of_parts_that_do_not_fit_is_refused(fields: dict, words: str):
    with pytest.raises(BadArgument, match=words):
        Text(**{"ids": [[1, 2, 3]]} | fields)


def test_a_text_is_built_from_lists_and_split_like_an_array():
    text = Text(
        [[1, 2, 3, 4], [5, 6, 7, 0]], lengths=[4, 3], hidden=[[0, 1, 0, 0], [0] * 4]
    )
    assert text.real.tolist() == [[True, False, True, True], [True, True, True, False]]
    parts = (text[1:].context, text[1:].hidden, text[[0]].ids.tolist())
    assert parts == (3, None, [[1, 2, 3, 4]])
    with pytest.raises(BadArgument, match=r"must be \[sequence, position\]"):
        text[:0]
    packed = Text([[1, 2, 3, 4, 5, 6]], documents=[[0, 0, 0, 1, 1, 1]])
    assert (packed.ids.tolist(), packed.documents.tolist()) == (
        [[1, 2, 3], [4, 5, 6]],
        [0, 1],
    )


CHAT = "<s>the dog</s> ran"  # as a chat template writes it


@pytest.mark.parametrize("text", [CHAT, CHAT.removeprefix("<s>"), "</s> ran"])
def test_functions_read_special_tokens_in_a_prompt(text: str):
    model, tokenizer = rl.load("bundled")
    bos = [] if text.startswith("<") else [tokenizer.bos_token_id]
    ids = torch.tensor(bos + tokenizer(text, add_special_tokens=False).input_ids)
    assert tokenizer.eos_token_id in ids
    assert rl.capture(model, text, heads="0.0", tokenizer=tokenizer).sizes[
        "query"
    ] == len(ids)
    plan = plan_analysis("bundled", None, rl.Options(prompts=[text]))
    assert torch.equal(plan.excerpts[0], ids)
    answers = []
    logits = []
    for prompt in (text, ids):
        answers.append(
            rl.attribute_planes(
                model, prompt, "</s>", heads="0.0", tokenizer=tokenizer
            ).answer
        )
        with rl.patch_planes(model, prompt, heads="0.0", tokenizer=tokenizer):
            logits.append(model(torch.arange(20)[None]).logits)
    assert answers[0] == answers[1]
    assert torch.equal(*logits)
    assert tokenizer.eos_token_id not in encode(text, tokenizer).ids  # a document
