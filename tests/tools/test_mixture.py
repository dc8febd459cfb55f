"""The sequences of the mixture are as its docstring describes."""

import json
import random
from collections import Counter

import mixture
import numpy as np
from scipy import stats
from transformers import AutoTokenizer

LINE_END = 999
WORDS = np.arange(200, 900)
"""Words of documents; prose has tokens below 200."""


def made(kind: str, *, count: int, length: int = 512) -> np.ndarray:
    """Documents of one kind, [document, token] without BOS."""
    r = np.random.default_rng(0)
    text = mixture.Text(r.integers(2, 200, (50, 600)), WORDS, LINE_END)
    stage = mixture.Stage(0, length, (130, 700), 40, {kind: 1.0})
    rows = mixture.Maker(text, stage, r).sequences(count)
    assert rows.shape == (count, length)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_repeats_come_back_at_one_distance():
    """Half of them have no break; their distances are log-uniform."""
    distances = []
    for row in made("repeats", count=300):
        returns = [d for d in range(4, 341) if (row[d : d + 2] == row[:2]).all()]
        assert returns
        distances += [d for d in returns if (row[d:] == row[:-d]).all()][:1]
    assert 0.4 < len(distances) / 300 < 0.65
    uniform = stats.uniform(np.log(4), np.log(85)).cdf
    assert stats.kstest(np.log(distances), uniform).pvalue > 0.001


def test_needles_occur_two_or_three_times_in_prose():
    for row in made("needles", count=30):
        hidden = row >= 200
        assert set(Counter(row[hidden].tolist()).values()) <= {2, 3}
        assert 6 <= hidden.sum() <= 12 * 5 * 3
        assert hidden.mean() < 0.4


def test_lists_repeat_the_same_values():
    for row in made("lists", count=30):
        lines = [tuple(line) for line in np.split(row, np.flatnonzero(row == LINE_END) + 1)]
        (*complete, _) = lines  # the last may be cut
        value = {line[:-2]: line[-2] for line in complete}
        assert all(value[line[:-2]] == line[-2] for line in complete)
        assert {len(line) for line in complete} in ({3}, {4})
        first = complete[: len(value)]
        assert len(set(first)) == len(value)  # every key comes once before a key repeats
        assert len(complete) >= 2 * len(value) - 1


def test_a_folder_to_train_on(tmp_path):
    r = random.Random(0)
    words = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    for name in ("text.txt", "valid.txt"):
        lines = [" ".join(r.choices(words, k=10)) for _ in range(1_000)]
        (tmp_path / name).write_text("\n".join(lines))
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        texts = (tmp_path / "text.txt", tmp_path / "valid.txt")
        mixture.main(*texts, folder, seed=seed, share=0.002)
    stages = [sorted(folder.glob("stage-*.npy")) for folder in folders]
    one, two, three = ({path.name: path.read_bytes() for path in x} for x in stages)
    assert one == two
    assert all(one[name] != three[name] for name in one)
    record = json.loads((folders[0] / "data.json").read_text())
    assert record["stages"] == sorted(one)
    lengths = [record["mixture"][name]["length"] for name in sorted(one)]
    assert lengths == [stage.length for stage in mixture.STAGES]
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    lines = np.load(folders[0] / record["stages"][-1])
    assert (lines[:, 0] == tokenizer.bos_token_id).all()
    assert lines.max() < len(tokenizer)
    valid = tokenizer.decode(np.load(folders[0] / "valid.npy")[0, 1:])
    assert set(valid.split()[1:-1]) <= set(words)
