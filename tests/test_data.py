"""Sources, tokenizers, packing, and the order of batches."""

import dataclasses
import itertools
import json
import os
import re
import resource
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from maxds import config
from maxds.data import DataError, Processes, load_tokenizer, open_data, packing, sources
from maxds.data.packing import PackedRows, cut, pack
from maxds.data.sources import Documents, open_documents, stable_hash

EOS = 256  # of the bytes tokenizer
FIELDS = ("tokens", "targets", "segments", "positions")
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "mix",
    "punch",
)


def make_config(*sources: config.Source, **changes) -> config.Data:
    defaults: dict = {"sequence_length": 16, "global_batch": 4, "workers": 2}
    return config.Data(sources=sources or (config.Source(kind="synthetic", documents=40),), **(defaults | changes))


def opened(*sources: config.Source, vocab_size: int = 257, seed: int = 0, cache_dir=None, **changes):
    return open_data(make_config(*sources, **changes), vocab_size, seed, cache_dir)


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(batches, count))


def assert_same(some, others) -> None:
    for one, other in zip(some, others, strict=True):
        for field in FIELDS:
            np.testing.assert_array_equal(one[field], other[field])


def sentence(index: int) -> str:
    picked = np.random.default_rng(index).choice(WORDS, 3 + index % 9)
    return f"{index:02}: {' '.join(picked)}é\n"


@pytest.fixture
def corpus(tmp_path) -> Path:
    root = tmp_path / "corpus"
    for i in range(40):
        file = root / f"part{i % 3}" / f"{i:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(sentence(i), "utf-8")
    return root


def text(path, **changes) -> config.Source:
    return config.Source(kind="text", path=(str(path),), **changes)


def documents_of(lengths) -> Documents:
    """Documents whose tokens count on from one document to the next, so that each tells where it is."""
    starts = np.cumsum([0, *lengths])
    return Documents(
        np.array(lengths),
        np.zeros(len(lengths), np.uint32),
        "",
        lambda i: np.arange(starts[i], starts[i + 1], dtype=np.int32),
    )


# ------------------------------------------------------------------------------ packing


def naive_rows(documents: list[np.ndarray], length: int) -> list[dict[str, list[int]]]:
    """One token at a time over the concatenation."""
    stream = [(d, i) for d, tokens in enumerate(documents) for i in range(len(tokens))]
    rows = []
    for start in range(0, len(stream) - length + 1, length):
        row = {field: [] for field in FIELDS}
        for at in range(start, start + length):
            d, i = stream[at]
            new = at == start or stream[at - 1][0] != d
            ended = i + 1 == len(documents[d])
            row["tokens"].append(int(documents[d][i]))
            row["targets"].append(-1 if ended else int(documents[d][i + 1]))
            row["segments"].append((row["segments"][-1] if row["segments"] else 0) + new)
            row["positions"].append(0 if new else row["positions"][-1] + 1)
        rows.append(row)
    return rows


def all_of(documents: Documents, length: int, seed: int, leave_out=()) -> PackedRows:
    indices = np.arange(len(documents.lengths))
    return PackedRows(documents, lambda which: ~np.isin(indices[which], leave_out), length, seed)


@pytest.mark.parametrize("part", [1, 3, 100])
@pytest.mark.parametrize("length", [1, 5, 8, 33])
def test_rows_equal_a_naive_packing_in_the_order_of_each_epoch(length, part, monkeypatch):
    monkeypatch.setattr(packing, "_PART", part)
    documents, left_out = documents_of([3, 1, 8, 40, 2, 2, 17, 1, 1, 5, 4, 7]), [2, 6, 7, 8]
    rows = all_of(documents, length, 5, left_out)
    orders = set()
    for epoch in range(3):
        parts, _ = rows._shuffled_parts(epoch)
        order = [d for of_part in parts for d in rows._shuffled(epoch, of_part)]
        orders.add(tuple(order))
        assert sorted(order) == sorted({*range(12)} - {*left_out})
        expected = naive_rows([documents.read(d) for d in order], length)
        assert_same([rows[epoch * len(rows) + i] for i in range(len(rows))], expected)
    assert len(orders) == 3


def test_documents_are_shuffled_among_thousands_and_these_in_the_epoch():
    documents = documents_of([1] * 20_000)
    order = np.concatenate([all_of(documents, 1000, 5)[i]["tokens"] for i in range(20)])
    assert sorted(order) == list(range(20_000))
    parts = {part: list(of_part) for part, of_part in itertools.groupby(order, lambda document: document // 2**12)}
    assert sorted(parts) == list(range(5)) != list(parts)
    for of_part in parts.values():
        assert abs(np.corrcoef(of_part, range(len(of_part)))[0, 1]) < 0.1


def test_a_row_fits_together_by_hand():
    row = pack([np.array([7, 8, EOS]), np.array([5, EOS]), np.array([1, 2, 3])], 7)
    assert row["tokens"].tolist() == [7, 8, EOS, 5, EOS, 1, 2]
    assert row["targets"].tolist() == [8, EOS, -1, EOS, -1, 2, 3]
    assert row["segments"].tolist() == [1, 1, 1, 2, 2, 3, 3]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1]


def test_what_is_left_of_a_row_is_segment_0_without_targets():
    row = pack([np.array([7, EOS])], 4)
    assert [row[field].tolist() for field in FIELDS] == [[7, EOS, 0, 0], [EOS, -1, -1, -1], [1, 1, 0, 0], [0, 1, 0, 0]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 6))
def test_rows_that_are_cut_are_the_shorter_rows_of_the_same_documents(lengths, length, pieces):
    shorter, longer = (all_of(documents_of(lengths), size, 5) for size in (length, pieces * length))
    for epoch in range(2):
        for i in range(len(longer)):
            row = cut({field: a[None] for field, a in longer[epoch * len(longer) + i].items()}, length)
            assert all(a.dtype == np.int32 for a in row.values())
            assert np.diff(row["segments"][0]).min(initial=0) >= 0 and row["segments"][0, 0] == 1
            found = {field: a.reshape(pieces, length) for field, a in row.items()}
            found["segments"] = found["segments"] - found["segments"][:, :1] + 1  # those of a row are counted on
            first = epoch * len(shorter) + i * pieces
            expected = [shorter[first + piece] for piece in range(pieces)]
            assert_same([{field: a[piece] for field, a in found.items()} for piece in range(pieces)], expected)


def test_cuts_count_segments_on_and_positions_anew_and_leave_padding_as_it_is():
    row = pack([np.array([7, 8, 9, EOS]), np.array([5, EOS]), np.array([1, 2, EOS])], 12)
    found = cut({field: np.stack([a, a]) for field, a in row.items()}, 3)
    assert found["segments"].tolist() == 2 * [[1, 1, 1, 2, 3, 3, 4, 4, 4, 0, 0, 0]]
    assert found["positions"].tolist() == 2 * [[0, 1, 2, 0, 0, 1, 0, 1, 2, 0, 0, 0]]
    assert found["targets"].tolist() == 2 * [[8, 9, EOS, -1, EOS, -1, 2, EOS, -1, -1, -1, -1]]


# ------------------------------------------------------------------------------ order


def test_batches_have_the_documented_shapes_and_dtypes():
    for batch in take(opened().batches(process_count=2), 2):
        assert set(batch) == set(FIELDS)
        assert all((x.shape, x.dtype) == ((2, 16), np.int32) for x in batch.values())


@pytest.mark.parametrize("start", [1, 7, 1000])
def test_batches_from_any_step_continue_the_sequence(start, corpus):
    data = opened(text(corpus), config.Source(kind="synthetic", documents=40), global_batch=2)
    assert_same(take(data.batches(start), 3), take(data.batches(), start + 3)[start:])


def test_a_far_step_is_reached_without_replaying():
    assert take(opened().batches(10**12), 1)[0]["tokens"].shape == (4, 16)


@pytest.mark.parametrize("processes", [2, 4])
def test_the_processes_parts_make_up_the_same_global_batch(processes):
    data = opened(eval_fraction=0.3)
    for batches in (data.batches, lambda *a: data.eval_batches(8, *a[1:])):
        parts = [take(batches(0, p, processes), 8) for p in range(processes)]
        joined = [{f: np.concatenate([part[f] for part in step]) for f in FIELDS} for step in zip(*parts, strict=True)]
        assert_same(joined, take(batches(0, 0, 1), 8))


RAMP = (
    config.Ramp(until_step=2, global_batch=2, sequence_length=4),
    config.Ramp(until_step=5, global_batch=4),
    config.Ramp(until_step=7, sequence_length=8),
)


@pytest.mark.parametrize("start", [0, 1, 2, 4, 7])
def test_a_ramp_s_batches_are_the_rows_one_after_another_cut_as_it_says(start):
    sizes, lengths = [2, 2, 4, 4, 4, 6, 6, 6, 6, 6], {0: 4, 1: 4, 5: 8, 6: 8}
    ends = np.cumsum(sizes)
    rows = take(opened(global_batch=1).batches(), ends[-1])
    expected = [
        {f: np.concatenate([row[f] for row in rows[end - size : end]]) for f in FIELDS}
        for size, end in zip(sizes, ends, strict=True)
    ]
    expected = [cut(batch, lengths[i]) if i in lengths else batch for i, batch in enumerate(expected)]
    data = opened(global_batch=6, ramp=RAMP)
    assert_same(take(data.batches(start), 10 - start), expected[start:])
    shares = [take(data.batches(start, p, 2), 10 - start) for p in range(2)]
    for one, other, whole in zip(*shares, expected[start:], strict=True):
        assert len(one["tokens"]) == len(other["tokens"])
        found = np.concatenate([one["tokens"], other["tokens"]])
        assert sorted(found.tolist()) == sorted(whole["tokens"].tolist())


def test_a_ramp_leaves_evaluation_as_it_is():
    ramped, even = (opened(global_batch=6, ramp=ramp, eval_fraction=0.3) for ramp in (RAMP, ()))
    assert_same(ramped.eval_batches(5), even.eval_batches(5))


def test_the_sequences_before_a_batch_are_those_of_all_before_it():
    ramped, even = make_config(global_batch=6, ramp=RAMP), make_config(global_batch=6)
    for number in range(9):
        assert ramped.sequences_before(number) == sum(map(ramped.sequences, range(number)))
        assert even.sequences_before(number) == 6 * number


def test_the_number_of_workers_changes_nothing():
    one, eight = (opened(workers=n) for n in (1, 8))
    assert_same(take(one.batches(), 30), take(eight.batches(), 30))
    assert one.fingerprint == eight.fingerprint


def test_opening_again_yields_the_same_and_another_seed_does_not():
    first, again, other = opened(seed=1), opened(seed=1), opened(seed=2)
    assert_same(take(first.batches(), 5), take(again.batches(), 5))
    assert any(
        (a["tokens"] != b["tokens"]).any() for a, b in zip(first.batches(), take(other.batches(), 5), strict=False)
    )


def test_an_epoch_of_batches_holds_each_row_once_and_the_next_is_another(corpus):
    data = opened(text(corpus), global_batch=1)
    documents = open_documents(text(corpus), data.tokenizer, 257, None, 1)
    packed = all_of(documents, 16, stable_hash("train/0/0"))
    batches = take(data.batches(), 2 * len(packed))
    epochs = [[bytes(batch["tokens"]) for batch in batches[e * len(packed) :][: len(packed)]] for e in range(2)]
    for epoch, rows in enumerate(epochs):
        expected = [bytes(packed[epoch * len(packed) + i]["tokens"]) for i in range(len(packed))]
        assert sorted(rows) == sorted(expected)
        assert rows != expected
    assert sorted(epochs[0]) != sorted(epochs[1])


def test_an_epoch_covers_each_token_once():
    documents = documents_of([10, 3, 25, 7, 19])
    rows = all_of(documents, 4, 0).shuffle(seed=3).repeat()
    for epoch in range(3):
        tokens = np.concatenate([rows[epoch * 16 + i]["tokens"] for i in range(16)])
        assert sorted(tokens) == list(range(64))


def test_data_that_begins_later_begins_with_its_first_batch():
    changes = {"ramp": (config.Ramp(until_step=6, global_batch=2),)}
    whole, later = opened(**changes), opened(**changes, since_step=4)
    rows = [row for batch in take(whole.batches(), 9) for row in batch["tokens"]]
    found = take(later.batches(5), 3)
    assert [len(batch["tokens"]) for batch in found] == [2, 4, 4]
    np.testing.assert_array_equal(np.concatenate([batch["tokens"] for batch in found]), rows[2:12])
    assert whole.fingerprint != later.fingerprint


def test_how_often_each_source_is_read_is_told(tmp_path):
    for letter in "ab":
        (tmp_path / letter).write_text(letter * 319)
    data = opened(text(tmp_path / "a", weight=3.0), text(tmp_path / "b"), global_batch=4, since_step=10)
    assert data.told(50) == [
        f"text {tmp_path}/a: 320 tokens of 1 documents, read 6 times by step 50",
        f"text {tmp_path}/b: 320 tokens of 1 documents, read 2 times by step 50",
    ]


def test_sources_are_mixed_in_proportion_to_their_weights(tmp_path):
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    for letter in weights:
        (tmp_path / letter).write_text(letter * 200)
    data = opened(*(text(tmp_path / letter, weight=weight) for letter, weight in weights.items()), global_batch=8)
    first = [chr(token) for batch in take(data.batches(), 100) for token in batch["tokens"][:, 0]]
    assert {letter: first.count(letter) for letter in weights} == {"a": 100, "b": 200, "c": 500}


def test_sources_of_the_same_documents_are_read_in_orders_of_their_own(tmp_path):
    for letter in "abcdefghijklmnop":
        (tmp_path / letter).write_text(letter * 15)
    batches = take(opened(text(tmp_path), text(tmp_path), global_batch=2).batches(), 16)
    first, second = zip(*[batch["tokens"][:, 0].tolist() for batch in batches], strict=True)
    assert sorted(first) == sorted(second) and first != second


# ------------------------------------------------------------------------------ held-out documents


def numbers(data, batches: list) -> set[str]:
    """The numbers at the start of the documents that begin in these batches."""
    return {
        n for batch in batches for row in batch["tokens"] for n in re.findall(r"(\d\d): ", data.tokenizer.decode(row))
    }


def test_no_document_is_both_trained_on_and_held_out(corpus):
    data = opened(text(corpus), eval_fraction=0.3, sequence_length=32, global_batch=2)
    trained = numbers(data, take(data.batches(), 100))
    evaluated = numbers(data, list(data.eval_batches(4)))
    assert trained and evaluated and not trained & evaluated


def test_evaluation_is_the_same_every_time_and_for_every_seed(corpus):
    one, other = (opened(text(corpus), eval_fraction=0.3, seed=s) for s in (1, 2))
    assert_same(one.eval_batches(2), one.eval_batches(2))
    assert_same(one.eval_batches(2), other.eval_batches(2))


def test_more_synthetic_documents_leave_the_split_of_the_others_as_it_was():
    few, many = (
        open_documents(config.Source(kind="synthetic", documents=n), load_tokenizer("bytes"), 257, None, 1).checksums
        for n in (11, 40)
    )
    np.testing.assert_array_equal(few, many[:11])


def test_evaluation_mixes_what_is_held_out_by_weight_and_leaves_out_what_fills_no_row(tmp_path):
    lengths, weights = {"a": [15] * 300, "b": [15] * 300, "c": [400, *[1] * 5]}, {"a": 1.0, "b": 3.0, "c": 5.0}
    for letter in lengths:
        (tmp_path / letter).mkdir()
        for i, length in enumerate(lengths[letter]):
            (tmp_path / letter / f"{i:03}").write_text(letter + f"{i:04}" * (length // 4) + "." * (length % 4 - 1))
    c = open_documents(text(tmp_path / "c"), load_tokenizer("bytes"), 257, None, 1)
    longest = c.checksums[0] / 2**32  # the others are less than a row; what is held out is below it
    assert longest > 0.1
    found = opened(*(text(tmp_path / x, weight=w) for x, w in weights.items()), eval_fraction=min(longest, 0.5))
    first = [chr(token) for batch in found.eval_batches(4) for token in batch["tokens"][:, 0]]
    assert {letter: first.count(letter) for letter in weights} == {"a": 4, "b": 12, "c": 0}


def split(source) -> set[tuple[str, bool]]:
    """Each document, and whether it is held out of the source."""
    tokenizer = load_tokenizer("bytes")
    documents = open_documents(source, tokenizer, 257, None, 1)
    texts = [tokenizer.decode(documents.read(i)) for i in range(len(documents.lengths))]
    return set(zip(texts, (documents.checksums < 0.3 * 2.0**32).tolist(), strict=True))


def test_a_new_file_leaves_the_split_of_the_others_as_it_was(corpus):
    before = split(text(corpus))
    (corpus / "part0" / "00a.txt").write_text("new")
    after = split(text(corpus))
    assert len(after) == len(before) + 1 and before < after


def test_records_are_on_their_sides_wherever_they_lie_and_however_often(tmp_path):
    source = config.Source(kind="arrayrecord", path=(str(tmp_path),))
    texts = [sentence(i).encode() for i in range(40)]
    write_arrayrecord(tmp_path / "b.array_record", texts)
    before = split(source)
    assert {held_out for _, held_out in before} == {True, False}
    write_arrayrecord(tmp_path / "a.array_record", texts[::-3])
    assert split(source) == before


def test_too_little_held_out_says_how_much_there_is(corpus):
    documents = open_documents(text(corpus), load_tokenizer("bytes"), 257, None, 1)
    rows = int(documents.lengths[documents.checksums < 0.3 * 2.0**32].sum()) // 16
    data = opened(text(corpus), eval_fraction=0.3)
    assert len(list(data.eval_batches(rows // 4))) == rows // 4
    message = (
        f"eval.batches=99 of data.global_batch=4 need 396 rows, but data.eval_fraction=0.3 holds out {rows}; "
        f"lower eval.batches, or raise data.eval_fraction"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        data.eval_batches(99)
    with pytest.raises(DataError, match="holds out 0"):
        opened(text(corpus)).eval_batches(1)


# ------------------------------------------------------------------------------ sources


def read_all(source: config.Source, tokenizer="bytes", cache_dir=None) -> list[str]:
    """Opens a source and returns the text of its documents, after checking their form."""
    loaded = load_tokenizer(tokenizer)
    documents = open_documents(source, loaded, 10**6, cache_dir, 2)
    tokens = [documents.read(i) for i in range(len(documents.lengths))]
    assert [len(t) for t in tokens] == documents.lengths.tolist()
    assert all(t.dtype == np.int32 and t[-1] == loaded.eos for t in tokens)
    return [loaded.decode(t[:-1]) for t in tokens]


def test_text_reads_files_sorted_by_their_path_within_the_folder(corpus):
    files = sorted(corpus.rglob("*.txt"))
    assert read_all(text(corpus)) == [file.read_text("utf-8") for file in files]
    assert read_all(text(files[3])) == [files[3].read_text("utf-8")]


def test_a_linked_folder_is_not_left_out_unnoticed(corpus, tmp_path):
    (tmp_path / "more").mkdir()
    (corpus / "linked").symlink_to(tmp_path / "more")
    with pytest.raises(DataError, match=r"/linked is a link to a folder, and not followed; give that folder as a path"):
        read_all(text(corpus))
    (corpus / "linked").rename(corpus / ".linked")
    assert len(read_all(text(corpus))) == 40


def test_text_takes_the_files_that_match_and_are_not_hidden(corpus):
    (corpus / "part0" / "notes.md").write_text("notes")
    (corpus / ".git").mkdir()
    for hidden in (corpus / ".git" / "head.md", corpus / "part1" / ".notes.md"):
        hidden.write_text("hidden")
    assert read_all(text(corpus, pattern="*.md")) == ["notes"]
    assert len(read_all(text(corpus, pattern="part1/*"))) == 13


def test_a_path_may_begin_at_home(corpus, monkeypatch):
    monkeypatch.setenv("HOME", str(corpus.parent))
    assert read_all(text("~/corpus")) == read_all(text(corpus))


def test_tokens_of_a_large_vocabulary_are_kept_whole(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    wide = dataclasses.replace(load_tokenizer("bytes"), vocab_size=2**16 + 300, encode=lambda b: np.array([*b]) + 2**16)
    assert open_documents(text(tmp_path), wide, 2**17, None, 1).read(0).tolist() == [2**16 + 97, 2**16 + 98, EOS]


def test_of_the_stdlib_nothing_is_taken_but_sources_and_no_tests():
    names = {name for name, _ in sources._find_files(("stdlib",), "*")}
    assert {"ast.py", "json/decoder.py"} <= names
    assert all(name.endswith(".py") for name in names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)


def test_stdlib_is_the_running_pythons_own_source():
    documents = open_documents(text("stdlib", pattern="[a-d]*"), load_tokenizer("bytes"), 257, None, 2)
    everything = b"".join(bytes(documents.read(i)[:-1].astype(np.uint8)) for i in range(len(documents.lengths)))
    assert Path(dataclasses.__file__).read_bytes() in everything


def test_synthetic_documents_follow_their_rule():
    documents = open_documents(config.Source(kind="synthetic", documents=50), load_tokenizer("bytes"), 300, None, 1)
    followed = []
    for i in range(50):
        tokens = documents.read(i)
        assert len(tokens) == documents.lengths[i] and tokens[-1] == 256 and tokens.min() >= 0
        followed += ((tokens[1:-1] - tokens[:-2]) % 256 == 7).tolist()
        np.testing.assert_array_equal(tokens, documents.read(i))
    assert 0.88 < np.mean(followed) < 0.92


def test_synthetic_fits_any_vocabulary():
    assert max(batch["tokens"].max() for batch in take(opened(vocab_size=20).batches(), 20)) == 19


def write_arrayrecord(path: Path, records: list[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


@pytest.fixture
def records(tmp_path) -> config.Source:
    folder = tmp_path / "records"
    folder.mkdir()
    for part in range(2):
        write_arrayrecord(folder / f"{part}.array_record", [sentence(20 * part + i).encode() for i in range(20)])
    return config.Source(kind="arrayrecord", path=(str(folder),))


def test_arrayrecord_reads_a_document_a_record(records):
    assert read_all(records) == [sentence(i) for i in range(40)]
    assert_same(take(opened(records).batches(3), 2), take(opened(records).batches(), 5)[3:])


def test_more_files_are_read_than_a_process_may_open_by_default(tmp_path):
    for i in range(40):
        write_arrayrecord(tmp_path / f"{i:02}.array_record", [sentence(i).encode()])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        assert read_all(config.Source(kind="arrayrecord", path=(str(tmp_path),))) == [sentence(i) for i in range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> str:
    import tensorflow_datasets as tfds

    class Tiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "number": tfds.features.Scalar(np.int32)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from ((i, {"text": sentence(i), "number": i}) for i in range(30))

    builder = Tiny(data_dir=str(tmp_path_factory.mktemp("tfds")), file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_dir)


def test_tfds_reads_a_feature_of_a_prepared_dataset(prepared):
    source = config.Source(kind="tfds", path=(prepared,))
    assert sorted(read_all(source)) == sorted(sentence(i) for i in range(30))
    half = opened(dataclasses.replace(source, split="train[:50%]"))
    assert half.fingerprint != opened(source).fingerprint


def test_tfds_errors_say_what_there_is(prepared):
    def error(**changes) -> str:
        with pytest.raises(DataError) as raised:
            opened(config.Source(**({"kind": "tfds", "path": (prepared,)} | changes)))
        return str(raised.value)

    assert error(feature="tekst") == f"feature=tekst is not in the tfds folder {prepared}; did you mean text?"
    assert error(feature="zzz") == f"feature=zzz is not in the tfds folder {prepared}; it has number, text"
    assert error(feature="number") == f"feature=number of the tfds folder {prepared} is not text; name one that is"
    assert error(split="test").startswith(f"cannot open split=test of the tfds folder {prepared}: Unknown split")
    parent = str(Path(prepared).parent)
    assert error(path=(parent,)).startswith(f"cannot open split=train of the tfds folder {parent}: Could not read")


# ------------------------------------------------------------------------------ the cache of lengths


def test_lengths_are_cached_once_and_whole(records, tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "data"
    first = opened(records, cache_dir=cache)
    (part,) = cache.glob("*/*")
    assert part.name == "0.npy"
    monkeypatch.setattr("maxds.data.sources._measure", lambda *_: pytest.fail("measured again"))
    again = opened(records, cache_dir=cache)
    assert again.fingerprint == first.fingerprint
    assert_same(take(first.batches(), 5), take(again.batches(), 5))


def test_documents_are_measured_many_at_a_reading_and_one_that_cannot_be_read_is_named(records, monkeypatch):
    readings = []

    def fetched(source, which):
        readings.append(list(which))
        if 37 in which:
            raise RuntimeError("torn")
        return [source[i] for i in which]

    monkeypatch.setattr(sources, "_fetched", fetched)
    with pytest.raises(DataError, match=r"^record 37 of arrayrecord .* cannot be read \(torn\)"):
        opened(records)
    assert readings == [list(range(40)), *([i] for i in range(38))]


def test_each_process_measures_some_parts_of_the_documents_and_reads_the_others(records, tmp_path, monkeypatch):
    alone, measured = opened(records), []
    measure = sources._measure
    monkeypatch.setattr(sources, "_PART", 7)
    monkeypatch.setattr(sources, "_measure", lambda *args: measured.append(args[-1].start) or measure(*args))

    def of_process(index, meet):
        processes = Processes(index, 2, meet)
        return open_data(make_config(records), 257, 0, tmp_path / "cache", processes)

    other = []
    first = of_process(0, lambda: other.append(of_process(1, lambda: None)))
    assert measured[0] == 0 and len(measured) > 2
    assert measured == [*range(0, max(measured) + 1, 14), *range(7, max(measured) + 1, 14)]
    assert {found.fingerprint for found in (first, *other)} == {alone.fingerprint}


def test_all_cores_measure_documents(records, monkeypatch):
    measure, seen = sources._measure, []
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(
        sources, "_measure", lambda tokens, workers, part: seen.append(workers) or measure(tokens, workers, part)
    )
    opened(records, workers=2)
    assert seen == [7]


def test_a_changed_file_is_measured_again(records, tmp_path):
    before = opened(records, cache_dir=tmp_path / "cache")
    write_arrayrecord(Path(records.path[0]) / "0.array_record", [b"x" * 500] * 20)
    after = opened(records, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert before.fingerprint != after.fingerprint


def test_records_of_the_same_lengths_and_other_text_are_other_data(records, tmp_path):
    before = opened(records)
    changed = [sentence(i).replace("é", "è").encode() for i in range(20)]
    write_arrayrecord(Path(records.path[0]) / "0.array_record", changed)
    assert opened(records).fingerprint != before.fingerprint


def test_many_documents_are_measured_each_once():
    lengths = np.random.default_rng(0).integers(1, 9, 2500)
    found = sources._measure(lambda which: [np.full(lengths[i], i, np.int32) for i in which], 3, range(100, 2400))
    np.testing.assert_array_equal(found[:, 0], lengths[100:2400])
    assert found.shape == (2300, 2) and len(set(found[:, 1].tolist())) == 2300


def test_each_kind_split_and_feature_has_lengths_of_its_own():
    bytes_, one = load_tokenizer("bytes"), config.Source(kind="tfds", path=("a",))
    others = [dataclasses.replace(one, **{key: value}) for key, value in (("split", "b"), ("feature", "b"))]
    found = [one, *others, dataclasses.replace(one, kind="arrayrecord")]
    assert len({sources._identity(source, [], bytes_) for source in found}) == 4


def test_each_tokenizer_has_lengths_of_its_own(records, hugging_face, tmp_path):
    for tokenizer in ("bytes", str(hugging_face)):
        read_all(records, tokenizer, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_file_that_changed_unnoticed_is_an_error(records, tmp_path):
    file = Path(records.path[0]) / "0.array_record"
    stat = file.stat()
    opened(records, cache_dir=tmp_path / "cache")
    write_arrayrecord(file, [b"short"] * 20)
    with file.open("ab") as grown:
        grown.truncate(stat.st_size)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(
        DataError,
        match=r"^record \d+ of arrayrecord .* has 6 tokens, not the \d+ that were measured; .*: start again without ",
    ):
        take(opened(records, cache_dir=tmp_path / "cache").batches(), 50)


# ------------------------------------------------------------------------------ tokenizers


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory) -> Path:
    import sentencepiece

    prefix = tmp_path_factory.mktemp("sp") / "tiny"
    lines = iter([sentence(i) for i in range(50)])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(prefix), vocab_size=330, byte_fallback=True, hard_vocab_limit=False,
        model_type="bpe", minloglevel=2,
    )  # fmt: skip
    return prefix.with_suffix(".model")


def test_bytes_are_their_own_ids():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, EOS)
    assert tokenizer.encode("aé").tolist() == tokenizer.encode("aé".encode()).tolist() == [97, 195, 169]
    assert tokenizer.decode([97, 195, 169, EOS, 98, 300]) == "aéb"
    assert tokenizer.encode("a").dtype == np.int32


def test_hugging_face_tokenizers_round_trip(hugging_face, corpus):
    tokenizer = load_tokenizer(str(hugging_face))
    assert tokenizer.eos == 1
    assert tokenizer.encode(sentence(3)).tolist() == tokenizer.encode(sentence(3).encode()).tolist()
    assert tokenizer.decode([*tokenizer.encode(sentence(3)), tokenizer.eos]) == sentence(3)
    assert read_all(text(corpus), str(hugging_face))[0] == sentence(0)
    assert opened(text(corpus), tokenizer=str(hugging_face), vocab_size=tokenizer.vocab_size).batches()


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_documents_are_whole_whatever_length_a_tokenizer_was_last_used_with(setting, hugging_face, tmp_path):
    from tokenizers import Tokenizer

    model, path = Tokenizer.from_file(str(hugging_face)), tmp_path / "tokenizer.json"
    model.enable_truncation(4) if setting == "truncation" else model.enable_padding(length=500)
    model.save(str(path))
    found, expected = (load_tokenizer(str(file)).encode(sentence(8)).tolist() for file in (path, hugging_face))
    assert found == expected


def test_every_text_begins_with_the_token_that_tokenizer_config_adds(hugging_face, records, tmp_path):
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(hugging_face.read_bytes())
    settings, plain, digests = tmp_path / "tokenizer_config.json", load_tokenizer(str(copy)), set()
    for adds, begin in ((True, [1]), (False, [])):
        settings.write_text(json.dumps({"add_bos_token": adds, "bos_token": {"content": "</s>"}, "eos_token": "<end>"}))
        found = load_tokenizer(str(copy))
        assert found.encode("any").tolist() == [*begin, *plain.encode("any")]
        documents = open_documents(records, found, 10**6, None, 2)
        assert documents.read(3).tolist() == [*begin, *plain.encode(sentence(3)), 0]
        digests.add(found.digest)
    assert len(digests) == 2
    settings.write_text('{"add_bos_token": true, "bos_token": "<none>"}')
    message = f"{settings} has bos_token '<none>', which tokenizer.json has not; name one of its tokens"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load_tokenizer(str(copy))


def test_tokenizer_config_names_the_end_of_a_document(hugging_face, tmp_path):
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(hugging_face.read_bytes())
    settings, usual = tmp_path / "tokenizer_config.json", load_tokenizer(str(copy))
    for named in ("<end>", {"content": "<end>"}):
        settings.write_text(json.dumps({"eos_token": named}))
        assert (found := load_tokenizer(str(copy))).eos == 0
        assert found.digest != usual.digest  # for documents end otherwise
    settings.write_text('{"eos_token": "<none>"}')
    message = (
        f"data.tokenizer={copy} has no end-of-document token <none>; name one of its tokens as `eos_token` in "
        f"tokenizer_config.json beside it"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load_tokenizer(str(copy))


@pytest.fixture
def words(tmp_path):
    """Makes a tokenizer of whole words, which puts the end of a document before each text by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    def make(vocab: dict[str, int]) -> str:
        model = Tokenizer(models.WordLevel(vocab, unk_token="a"))
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        model.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", vocab["</s>"])])
        model.save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path / "tokenizer.json")

    return make


def test_a_document_is_its_text_and_one_end_whatever_the_tokenizer_would_add(words, tmp_path):
    (tmp_path / "a.txt").write_text("b a")
    tokenizer = load_tokenizer(words({"a": 0, "b": 1, "</s>": 2}))
    assert open_documents(text(tmp_path, pattern="a.txt"), tokenizer, 3, None, 1).read(0).tolist() == [1, 0, 2]


def test_ids_may_have_holes_and_all_are_below_the_size(words):
    assert load_tokenizer(words({"a": 0, "b": 9, "</s>": 4})).vocab_size == 10


def test_of_the_usual_ends_of_a_document_deepseek_s_comes_first_and_others_by_their_order(words):
    usual = ["<｜end▁of▁sentence｜>", "<|endoftext|>", "<eos>", "</s>"]  # noqa: RUF001
    for first in range(4):
        vocab = {"a": 0} | {name: 9 - n for n, name in enumerate(usual) if n >= first}
        assert load_tokenizer(words(vocab)).eos == 9 - first


def test_a_sentencepiece_model_without_an_end_of_document_is_refused(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS), model_prefix=str(tmp_path / "m"), vocab_size=40, eos_id=-1, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    with pytest.raises(DataError, match="has no end-of-document token; train it with an eos_id"):
        load_tokenizer(str(tmp_path / "m.model"))


def test_sentencepiece_models_round_trip(sentencepiece_model, records):
    tokenizer = load_tokenizer(str(sentencepiece_model))
    assert tokenizer.eos == 2
    assert tokenizer.decode([*tokenizer.encode(sentence(3)), tokenizer.eos, 10**6]) == sentence(3).strip()
    assert read_all(records, str(sentencepiece_model))[5] == sentence(5).strip()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vocab.txt",
            "data.tokenizer=vocab.txt is of an unknown kind; use `bytes`, or the path of a Hugging Face tokenizer.json "
            "or of a SentencePiece .model",
        ),
        ("none/a.json", "data.tokenizer=none/a.json is not a file; correct the path, or use `bytes`"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(name, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        opened(tokenizer=name)


@pytest.mark.parametrize(
    ("suffix", "kind"), [(".json", "a Hugging Face tokenizer.json"), (".model", "a SentencePiece model")]
)
def test_a_damaged_tokenizer_is_named(suffix, kind, tmp_path):
    path = tmp_path / f"damaged{suffix}"
    path.write_text("nonsense")
    with pytest.raises(DataError, match=f"^{re.escape(f'data.tokenizer={path} is not {kind}: ')}"):
        load_tokenizer(str(path))


# ------------------------------------------------------------------------------ other errors


def message_of(*args, **kwargs) -> str:
    with pytest.raises(DataError) as raised:
        opened(*args, **kwargs)
    return str(raised.value)


def test_too_little_data_is_an_error(corpus, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("abc")
    assert message_of(text(file)) == (
        f"data.sources[0] (text {file}) has 4 tokens to train on, less than a row of data.sequence_length=16; add "
        f"documents, or lower data.sequence_length or data.eval_fraction"
    )
    file.write_text("a" * 50)
    assert message_of(text(file)) == (
        "the documents to train on fill 3 rows of data.sequence_length=16, less than data.global_batch=4; add "
        "documents, or lower one of them"
    )


def test_files_that_cannot_be_read_are_named(corpus, tmp_path, monkeypatch):
    assert (
        message_of(text(tmp_path / "no"))
        == f"{tmp_path}/no is neither a file nor a folder; correct the path of the source"
    )
    assert (
        message_of(text("gs://bucket/corpus"))
        == "gs://bucket/corpus is neither a file nor a folder; mount the bucket, and give the path of the mount"
    )
    assert (
        message_of(text(corpus, pattern="*.md")) == f"no file under {corpus} matches pattern=*.md; correct one of them"
    )
    (tmp_path / "bad.array_record").write_bytes(b"nonsense")
    source = config.Source(kind="arrayrecord", path=(str(tmp_path / "bad.array_record"),))
    assert re.match(
        f"cannot read {tmp_path}/bad.array_record as array_record files: .*; narrow path", message_of(source)
    )

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert message_of(text(corpus)) == (
        f"cannot read {corpus}/part0/00.txt (Permission denied); make it readable, or exclude it"
    )


def test_a_document_that_is_not_utf8_is_named(hugging_face, tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes(b"\xe9" * 200)
    found = message_of(text(file), tokenizer=str(hugging_face), vocab_size=1000)
    assert re.match(f"{file} is not UTF-8 text \\(.*\\); convert it, or use tokenizer=bytes$", found)
    assert opened(text(file)).fingerprint  # bytes are bytes
    write_arrayrecord(tmp_path / "a.array_record", [b"fine", b"\xe9"])
    source = config.Source(kind="arrayrecord", path=(str(tmp_path / "a.array_record"),))
    assert message_of(source, tokenizer=str(hugging_face), vocab_size=1000).startswith(
        f"record 1 of arrayrecord {tmp_path}"
    )


def test_a_tokenizer_larger_than_the_model_is_an_error(corpus):
    assert message_of(text(corpus), vocab_size=256) == (
        "data.tokenizer=bytes has ids up to 256, beyond model.vocab_size=256; raise it to 257 or more"
    )


def test_a_batch_must_divide_among_the_processes():
    message = "data.global_batch=4 is not divisible by the 3 processes; make it a multiple"
    with pytest.raises(DataError, match=f"^{message}$"):
        opened().batches(0, 0, 3)


def test_tfds_takes_one_folder():
    with pytest.raises(ValueError, match="kind=tfds takes one path"):
        config.Source(kind="tfds", path=("a", "b"))


@pytest.mark.parametrize(
    ("kind", "key", "kinds"),
    [
        ("arrayrecord", {"feature": "content"}, "tfds"),
        ("text", {"split": "validation"}, "tfds"),
        ("tfds", {"pattern": "*.tfrecord*"}, "text and arrayrecord"),
        ("text", {"documents": 9}, "synthetic"),
    ],
)
def test_a_key_that_a_kind_of_source_does_not_have_is_an_error(kind, key, kinds):
    ((name, value),) = key.items()
    message = f"{name}={value} is of kind={kinds} only, not of {kind}; drop it"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        config.Source(kind=kind, path=("a",), **key)


# ------------------------------------------------------------------------------ fingerprint


def test_the_fingerprint_changes_with_whatever_changes_the_batches(corpus, hugging_face):
    def fingerprint(seed=0, **changes) -> str:
        source = text(corpus, weight=changes.pop("weight", 1.0))
        return opened(source, seed=seed, vocab_size=1000, **changes).fingerprint

    seen = [
        fingerprint(),
        fingerprint(seed=1),
        fingerprint(sequence_length=8),
        fingerprint(global_batch=2),
        fingerprint(ramp=(config.Ramp(until_step=2, global_batch=2),)),
        fingerprint(ramp=(config.Ramp(until_step=2, sequence_length=2),)),
        fingerprint(ramp=(config.Ramp(until_step=2, global_batch=2, sequence_length=2),)),
        fingerprint(eval_fraction=0.1),
        fingerprint(tokenizer=str(hugging_face)),
        fingerprint(weight=2.0),
    ]
    file = corpus / "part0" / "00.txt"
    content = file.read_bytes()
    file.write_bytes(content[::-1])
    seen.append(fingerprint())
    file.write_bytes(content)
    renamed = file.rename(file.with_name("zz.txt"))  # it comes last now
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)

    renamed.rename(file.with_name("00b.txt"))  # it comes first, as before
    assert seen[0] == fingerprint() == fingerprint(workers=7)


def test_fingerprints_in_checkpoints_of_earlier_versions_hold():
    assert opened().fingerprint.startswith("c250b2aab1d65566")
    assert opened(ramp=(config.Ramp(until_step=2, global_batch=2),)).fingerprint.startswith("dea0848774d883ab")


def test_the_fingerprint_does_not_depend_on_where_the_files_are(corpus):
    before = opened(text(corpus)).fingerprint
    moved = corpus.rename(corpus.with_name("moved"))
    assert opened(text(moved)).fingerprint == before
