"""Reading and cutting text: nothing lost, nothing counted twice, every refusal by its words."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import save_tiny
from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

import ropelens as rl
from ropelens.analysis.plan import plan_analysis
from ropelens.errors import BadArgument, BadText
from ropelens.measured_rotation.load import load
from ropelens.text.documents import read_documents
from ropelens.text.text import Text
from ropelens.text.tokenize import encode, find_beginning, pieces, tokenize


def letters(*, bos: bool = True) -> PreTrainedTokenizerFast:
    """A token a character, ids from its code; BOS is 1, EOS 2 and added where asked for."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for code in range(3, 128):
        vocabulary[chr(code)] = code
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    ends = [("<s>", 1), ("</s>", 2)]
    template = "<s> $A </s>" if bos else "$A </s>"
    added = processors.TemplateProcessing(single=template, special_tokens=ends)
    tokenizer.post_processor = added
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>" if bos else None,
        model_max_length=8,  # shorter than the documents, as in real tokenizers
    )


WITH_BOS = letters()
WITHOUT_BOS = letters(bos=False)


def sequences_of(text: Text) -> list[list[int]]:
    """The ids of each sequence, without padding."""
    pairs = zip(text.ids.tolist(), text.lengths.tolist(), strict=True)
    return [ids[:length] for ids, length in pairs]


def test_files_and_folders_in_order(tmp_path: Path):
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "a.md").write_text("first\n\n")
    (tmp_path / "c").mkdir()
    lines = '{"text": "third\\n", "id": 3}\n\n{"text": "fourth"}\n'
    (tmp_path / "c" / "d.jsonl").write_text(lines)
    (tmp_path / "e.py").write_text("not text")
    (tmp_path / "z").write_text("any name will do")
    with pytest.warns(UserWarning, match=r"other files: 2 \(\.py, without an ending\)"):
        documents = read_documents([tmp_path])
    assert documents == ["first", "second", "third\n", "fourth"]
    chosen = [tmp_path / "z", str(tmp_path / "a.md")]
    assert read_documents(chosen) == ["any name will do", "first"]


def test_line_ends_and_marks_are_read_as_python_does(tmp_path: Path):
    path = tmp_path / "windows.txt"
    path.write_bytes("\ufeffé\r\ntwo\rthree\u2028\r\n".encode())
    lines = tmp_path / "a.jsonl"
    document = "a\u2028b\u0085c\r\nd"
    line = json.dumps({"text": document}, ensure_ascii=False)
    lines.write_text(f"{line}\n")
    assert read_documents([path, lines]) == ["é\ntwo\nthree\u2028", document]


@dataclass(frozen=True)
class BadFile:
    """A file (none without `data`), and words of the error."""

    name: str
    data: bytes | None
    words: list[str]


BAD_FILES = {
    "missing": BadFile(
        "no.txt", None, ["no.txt cannot be read", "No such file", "*.txt"]
    ),
    "empty": BadFile("a.txt", b"", ["contains no text"]),
    "empty folder": BadFile("", None, ["contains no text"]),
    "Latin-1": BadFile(
        "a.txt",
        b"caf\xe9 au lait",
        ["cannot be read as text in UTF-8", "byte 0xe9 in position 3", "iconv"],
    ),
    "jsonl malformed": BadFile(
        "a.jsonl",
        b'{"text": "good"}\n\n{"text": bad}\n',
        ["Line 3 of", "a.jsonl holds no text: '{\"text\": bad}'.", "JSONDecodeError"],
    ),
    "jsonl a number": BadFile(
        "a.jsonl", b'{"text": 3}\n', ["Line 1 of", "holds no text"]
    ),
}


@pytest.mark.parametrize("bad", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_refused_by_name(tmp_path: Path, bad: BadFile):
    path = tmp_path / bad.name
    if bad.data is not None:
        path.write_bytes(bad.data)
    with pytest.raises(BadText) as refused:
        read_documents([path])
    for words in [*bad.words, str(path)]:
        assert words in str(refused.value)
    assert "\n" not in refused.value.line


def test_a_text_in_the_place_of_a_path_is_refused():
    with pytest.raises(BadText, match="cannot be read"):
        read_documents("Once upon a time " * 300)


def test_a_pipe_is_read(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(pipe.write_text, "é\r\n" * 100_000)
        assert read_documents([pipe]) == ["é\n" * 99_999 + "é"]
        writing.result()


def test_bos_as_the_tokenizer_itself_adds_it():
    with_bos = tokenize("ab", WITH_BOS, context=2, bos="tokenizer")
    assert sequences_of(with_bos) == [[1, 97], [1, 98]]
    adds_no_bos = letters()
    end = [("</s>", 2)]
    added = processors.TemplateProcessing(single="$A </s>", special_tokens=end)
    adds_no_bos.backend_tokenizer.post_processor = added
    assert adds_no_bos.bos_token_id == 1
    without_bos = tokenize("ab", adds_no_bos, context=2)
    assert sequences_of(without_bos) == [[97, 98]]
    assert without_bos.beginning == "begins with the text"
    always = tokenize("ab", adds_no_bos, context=2, bos="always")
    assert sequences_of(always) == [[1, 97], [1, 98]]
    assert always.beginning == "begins with <s>"


def test_a_text_without_bos():
    never = tokenize("ab", WITH_BOS, context=2, bos="never")
    assert sequences_of(never) == [[97, 98]]


def two_in_front() -> PreTrainedTokenizerFast:
    """A tokenizer that begins each text with two special tokens, as that of GLM does."""
    tokenizer = letters()
    specials = [("<s>", 1), ("</s>", 2)]
    added = processors.TemplateProcessing(single="<s> </s> $A", special_tokens=specials)
    tokenizer.backend_tokenizer.post_processor = added
    return tokenizer


def test_several_tokens_that_a_tokenizer_puts_in_front():
    text = tokenize("ab", two_in_front(), context=3)
    assert sequences_of(text) == [[1, 2, 97], [1, 2, 98]]
    assert text.beginning == "begins with <s> </s>"


def test_a_beginning_without_room_for_the_text_is_refused():
    tokenizer = two_in_front()
    with pytest.raises(BadArgument, match="no room for the text"):
        tokenize("abcdef", tokenizer, context=2)
    text = tokenize("abc", tokenizer, context=2, bos="never")
    assert sequences_of(text) == [[97, 98]]


def test_a_tokenizer_that_drops_the_letter_a_begins_as_it_does():
    tokenizer = letters()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    assert tokenize("bcd", tokenizer, context=4).ids[0, 0] == 1


def test_a_tokenizer_without_a_decoder_is_enough():
    @dataclass
    class OnlyCalls:
        bos_token_id: int = 1

        def __call__(self, text: str, *, add_special_tokens: bool = True, **_):
            begin = [1] if add_special_tokens else []
            return {"input_ids": [*begin, *map(ord, text)]}

    text = tokenize("bcd", OnlyCalls(), context=4)
    assert sequences_of(text) == [[1, 98, 99, 100]]
    assert text.beginning == "begins with token 1"


def test_the_beginning_of_given_tokens_is_found():
    special = Text([[1, 97], [1, 98]])
    assert find_beginning(special, WITH_BOS) == "begins with <s>"
    assert find_beginning(special, None) == ""
    assert find_beginning(Text([[97, 98]]), WITH_BOS) == "begins with the text"


@given(
    documents=st.lists(st.text("abc ", max_size=30), min_size=1, max_size=5),
    context=st.integers(2, 12),
    bos=st.booleans(),
)
@settings(deadline=None)
def test_sequences_joined_are_the_documents(
    documents: list[str], context: int, bos: bool
):
    expected = []
    for document in documents:
        expected += cut_by_hand(document, context, bos=bos)
    tokenizer = WITH_BOS if bos else WITHOUT_BOS
    count = sum(len(sequence) for sequence in expected)
    if count < context:
        with pytest.raises(BadText):
            tokenize(documents, tokenizer, context=context)
        return
    text = tokenize(documents, tokenizer, context=context)
    assert sequences_of(text) == expected
    assert not text.ids[~text.real].any()
    joined = "\0".join(documents)
    assert text.documents_sha256 == hashlib.sha256(joined.encode()).hexdigest()
    characters = sum(len(document) for document in documents)
    counts = f"(documents: {len(documents)}, characters: {characters})"
    assert text.source.endswith(counts)


def cut_by_hand(document: str, context: int, *, bos: bool) -> list[list[int]]:
    """Sequences of two tokens or more; the id of a character is its code."""
    begin = [1] if bos else []
    step = context - len(begin)
    sequences = []
    for start in range(0, len(document), step):
        codes = [ord(letter) for letter in document[start : start + step]]
        sequence = begin + codes
        if len(sequence) > 1:
            sequences.append(sequence)
    return sequences


def test_a_sample_is_seeded_ordered_and_without_replacement():
    text = "".join(chr(33 + i) for i in range(60))  # no character twice
    everything = tokenize([text], WITH_BOS, context=3)
    some = tokenize([text], WITH_BOS, context=3, sequences=10, seed=3)
    in_order = sequences_of(everything)
    numbers = [in_order.index(sequence) for sequence in sequences_of(some)]
    assert len(numbers) == 10
    assert numbers == sorted(set(numbers))
    again = tokenize([text], WITH_BOS, context=3, sequences=10, seed=3)
    other = tokenize([text], WITH_BOS, context=3, sequences=10, seed=4)
    assert sequences_of(again) == sequences_of(some)
    assert sequences_of(other) != sequences_of(some)
    assert some.documents_sha256 == everything.documents_sha256
    assert some.source.startswith("10 of 30 sequences")


def test_short_tails_are_drawn_only_where_there_are_too_few_others():
    # Tails of 2, 2 and 9 tokens; 4 tokens are a document.
    documents = ["a" * 33, "bcd", "e" * 33, "f" * 40]

    def drawn_lengths(sequences: int | None, seed: int) -> list[int]:
        text = tokenize(documents, WITH_BOS, context=17, sequences=sequences, seed=seed)
        return sorted(text.lengths.tolist())

    for seed in range(20):
        assert drawn_lengths(8, seed) == [4, 9, 17, 17, 17, 17, 17, 17]
        assert 2 in drawn_lengths(9, seed)
    everything = [2, 2, 4, 9, 17, 17, 17, 17, 17, 17]
    assert drawn_lengths(None, 0) == everything
    assert drawn_lengths(10, 0) == everything


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
    words = "all 2 sequences of the text are used: 9 were asked"
    with pytest.warns(UserWarning, match=words):
        assert len(tokenize(["abcd"], WITH_BOS, context=3, sequences=9)) == 2
    assert len(tokenize(["abcd"], WITH_BOS, context=3, sequences=2)) == 2


TOO_SHORT = r"one context of 8 tokens[\s\S]*7 tokens \(documents: 2\)"
TWO_OR_MORE = "tokenize: context must be a whole number, 2 or more"


@pytest.mark.parametrize(
    ("documents", "context", "error", "words"),
    [
        (["abc", "de"], 8, BadText, TOO_SHORT),
        ([], 2, BadText, "0 tokens"),
        (["abc"], 1, BadArgument, TWO_OR_MORE),
        (["abc"], "64", BadArgument, TWO_OR_MORE),
    ],
)
def test_a_bad_cut_is_refused(documents, context, error, words):
    with pytest.raises(error, match=words) as refused:
        tokenize(documents, WITH_BOS, context=context)
    assert "\n" not in refused.value.line


def test_a_text_needs_a_tokenizer():
    with pytest.raises(BadArgument, match="needs the tokenizer of the model"):
        tokenize(["abc"], None, context=2)


def test_a_long_line_is_tokenized_in_pieces_with_the_tokens_of_the_whole():
    tokenizer = load("bundled")[1]
    text = "Once upon  a time, there   was a well-known fox;\n\n it ran.  " * 40
    expected = encode(text, tokenizer).ids
    for longest in range(30, 60):
        ids = []
        parts = list(pieces(text, longest=longest))
        for part in parts:
            assert len(part) <= longest
            ids += encode(part, tokenizer).ids
        assert "".join(parts) == text
        assert ids == expected
    assert list(pieces("a" * 25, longest=10)) == ["a" * 10, "a" * 10, "a" * 5]


def test_a_model_without_a_tokenizer_is_analyzed_on_tokens(tmp_path: Path):
    whole = save_tiny(tmp_path / "whole")
    bare = save_tiny(tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    text = "the quick brown fox " * 20
    options = rl.Options(context=24, surrogates=0)
    tokens = torch.arange(90).reshape(3, 30) % 40
    of_tokens = rl.analyze(bare, tokens, options)
    assert of_tokens.profile.attrs["tokens"] == 90
    with pytest.raises(BadArgument, match="A text needs the tokenizer"):
        rl.analyze(bare, text, options)
    _, tokenizer = load(whole)
    of_text = rl.analyze(bare, text, options, tokenizer=tokenizer)
    assert of_text.profile.attrs["tokens_sha256"]


SHAPE = r"documents must have a value(.|\n)*shape \(2,\) for ids \(1, 3\)"
WHOLE_NUMBERS = "ids must be whole numbers, in rows of equal length"
BAD_FIELDS = [
    ({"ids": "Once upon"}, r"rl\.tokenize for strings"),
    ({"ids": [[1.5, 2.0]]}, WHOLE_NUMBERS),
    ({"ids": [[1, 2, 3], [4, 5]]}, WHOLE_NUMBERS),
    ({"ids": [["a", "b"]]}, WHOLE_NUMBERS),
    ({"ids": [[True, False]]}, WHOLE_NUMBERS),
    ({"ids": None}, WHOLE_NUMBERS),
    ({"lengths": [3.0]}, "must be whole numbers"),
    ({"lengths": ["a"]}, "must be whole numbers"),
    ({"lengths": [4]}, "lengths must be from 2 to 3"),
    ({"lengths": [3, 3]}, "lengths must have a value"),
    ({"documents": [0.5]}, "documents must be whole numbers"),
    ({"documents": [0, 1]}, SHAPE),
    ({"hidden": "x"}, "hidden must be whole numbers"),
    ({"hidden": [[0, 1]]}, "hidden must have a value"),
    ({"documents": [[0, 0, 1]], "lengths": [3]}, "only for plain"),
]


@pytest.mark.parametrize(("fields", "words"), BAD_FIELDS)
def test_a_text_of_fields_that_do_not_fit_is_refused(fields: dict, words: str):
    fields = {"ids": [[1, 2, 3]], **fields}
    with pytest.raises(BadArgument, match=words):
        Text(**fields)


def test_a_text_is_built_from_lists_and_split_like_an_array():
    ids = [[1, 2, 3, 4], [5, 6, 7, 0]]
    hidden = [[0, 1, 0, 0], [0, 0, 0, 0]]
    text = Text(ids, lengths=[4, 3], hidden=hidden)
    assert text.real.tolist() == [[True, False, True, True], [True, True, True, False]]
    assert text[[0]].ids.tolist() == [[1, 2, 3, 4]]
    second = text[1:]
    assert second.context == 3
    assert second.hidden is None
    with pytest.raises(BadArgument, match=r"must be \[sequence, position\]"):
        text[:0]


def test_a_packed_row_is_split_into_its_documents():
    packed = Text([[1, 2, 3, 4, 5, 6]], documents=[[0, 0, 0, 1, 1, 1]])
    assert packed.ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert packed.documents.tolist() == [0, 1]


CHAT = "<s>the dog</s> ran"  # as a chat template writes it


@pytest.mark.parametrize("text", [CHAT, CHAT.removeprefix("<s>"), "</s> ran"])
def test_functions_read_special_tokens_in_a_prompt(text: str):
    model, tokenizer = rl.load("bundled")
    begin = [] if text.startswith("<") else [tokenizer.bos_token_id]
    ids_of_text = tokenizer(text, add_special_tokens=False).input_ids
    ids = torch.tensor(begin + ids_of_text)
    assert tokenizer.eos_token_id in ids
    of_document = encode(text, tokenizer).ids
    assert tokenizer.eos_token_id not in of_document
    seen = rl.capture(model, text, heads="0.0", tokenizer=tokenizer)
    assert seen.sizes["query"] == len(ids)
    plan = plan_analysis("bundled", None, rl.Options(prompts=[text]))
    assert torch.equal(plan.excerpts[0], ids)

    def answer(prompt: str | torch.Tensor) -> float:
        attribution = rl.attribute_planes(
            model, prompt, "</s>", heads="0.0", tokenizer=tokenizer
        )
        return attribution.answer

    @torch.no_grad()
    def patched_logits(source: str | torch.Tensor) -> torch.Tensor:
        with rl.patch_planes(model, source, heads="0.0", tokenizer=tokenizer):
            return model(torch.arange(20)[None]).logits

    assert answer(text) == answer(ids)
    assert torch.equal(patched_logits(text), patched_logits(ids))


def test_documents_that_a_chat_template_wrote_are_named():
    """The name of a special token is text in a document, which is rarely meant here."""
    tokenizer = letters()
    named = "2 of 3 documents begin with the name of a special token, such as <s>"
    with pytest.warns(UserWarning, match=named):
        tokenize(["<s>abcabc", "abcabc", "<s>abc"], tokenizer, context=4)
    tokenize(["abc<s>abc"], tokenizer, context=4)  # no warning


def test_sequences_that_begin_with_bos_twice_are_named():
    model, _ = load("bundled")
    bos = model.config.bos_token_id
    ids = torch.arange(5, 37).view(2, 16)
    ids[:, 0] = bos
    rl.profile(model, ids, budget=False)  # no warning
    ids[:, 1] = bos
    twice = r"2 of 2 sequences begin with BOS twice \(id 0\)"
    with pytest.warns(UserWarning, match=twice):
        rl.profile(model, ids, budget=False)
