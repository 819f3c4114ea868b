"""Sources to tokenized documents, in random access.

`text` is read and tokenized once, into memory, two or four bytes a token: it is for what fits there.
`tfds` and `arrayrecord` are tokenized as they are read, a document as a whole for each row that
holds a part of it. The lengths of their documents are found by one pass over all of them, of which each
process makes a part. What it finds is cached, some documents after the others, under a hash of the
tokenizer and of the files' names, sizes and modification times.
"""

import dataclasses
import difflib
import fnmatch
import functools
import hashlib
import json
import resource
import sysconfig
import uuid
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from maxds import config
from maxds.data.error import DataError, UnreadableError
from maxds.data.tokenizer import Tokenizer

_PART = 2**16  # documents that are measured, and cached, together
_READ = 64  # of them, that are read at a time

Texts = Callable[[Sequence[int]], list[bytes]]


class Processes(NamedTuple):
    """Those that open the same data, and can read what the others have cached."""

    index: int = 0  # of this one
    count: int = 1
    meet: Callable[[], object] = lambda: None  # returns once all have called it


ALONE = Processes()


@dataclasses.dataclass(frozen=True)
class Documents:
    """Tokenized documents in random access, from any number of threads."""

    lengths: np.ndarray  # uint32 [documents]: in tokens, the end-of-document token included
    checksums: np.ndarray  # uint32 [documents]: of the tokens; of synthetic ones a number drawn
    digest: str  # of all tokens
    read: Callable[[int], np.ndarray]  # index -> int32 [tokens], the last one the end of the document


def open_documents(
    source: config.Source,
    tokenizer: Tokenizer,
    vocab_size: int,
    cache_dir: epath.Path | None,
    workers: int,
    processes: Processes = ALONE,
) -> Documents:
    """Opens one source; `workers` threads of each process tokenize or measure it.

    Raises:
        DataError: files are absent, unreadable or not of the source's kind, or a document is not UTF-8.
    """
    if source.kind == "synthetic":
        return _synthetic(source.documents, vocab_size)
    if source.kind == "text":
        return _text(source, tokenizer, workers)
    return _records(source, tokenizer, cache_dir, workers, processes)


def reach_source(source: config.Source, tokenizer: Tokenizer) -> str:
    """Reads and tokenizes the first document of a source; returns what was found there.

    Raises:
        DataError: as `open_documents`, as far as that document shows.
    """
    if source.kind == "synthetic":
        return "synthetic"
    files = _find_files(source.path, source.pattern)
    origin, found = f"{source.kind} {', '.join(source.path)}", f"{len(files):,} files"
    if source.kind == "text":
        _tokenize(tokenizer, _read_file(files[0][1]), str(files[0][1]))
    else:
        count, texts = _open_tfds(source) if source.kind == "tfds" else _open_arrayrecord(files)
        found += f", {count:,} records"
        if count:
            _tokenize_records(tokenizer, texts, [0], origin)
    return f"{origin}: {found}"


def stable_hash(text: str) -> int:
    """Returns 64 bits that depend on `text` only."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _measures(documents: Sequence[np.ndarray]) -> np.ndarray:
    """Returns uint32 [documents, 2]: the length of each document, and a checksum of its tokens, int32."""
    return np.array([(len(document), zlib.crc32(document)) for document in documents], np.uint32)


def _tokenize(tokenizer: Tokenizer, text: bytes, name: str) -> np.ndarray:
    try:
        return np.append(tokenizer.encode(text), np.int32(tokenizer.eos))
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text ({error}); convert it, or use tokenizer=bytes") from error


# ------------------------------------------------------------------------------ synthetic


def _synthetic(count: int, vocab_size: int) -> Documents:
    """Documents of 64 to 511 tokens and an end, in which nine tokens out of ten follow from the one before.

    The rule: 7 more, modulo the alphabet, which is bounded so that a short run can learn it.
    """
    alphabet = min(256, vocab_size - 1)
    drawn = (np.random.Philox(key=0).random_raw(count) // 2**32).astype(np.uint32)
    lengths = drawn % 448 + 65

    def read(index: int) -> np.ndarray:
        bits = np.random.Philox(key=[index, 1]).random_raw(lengths[index]) // 2**16
        surprising = bits % 10 == 0
        surprising[0] = True
        steps = np.where(surprising, bits // 10 % alphabet, 7).astype(np.int64)
        tokens = (np.cumsum(steps) % alphabet).astype(np.int32)
        tokens[-1] = alphabet  # the end of the document
        return tokens

    return Documents(lengths, drawn, f"synthetic/{count}/{alphabet}", read)


# ------------------------------------------------------------------------------ text


def _text(source: config.Source, tokenizer: Tokenizer, workers: int) -> Documents:
    files = _find_files(source.path, source.pattern)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32

    def load(file: Path) -> tuple[np.ndarray, np.ndarray]:
        tokens = _tokenize(tokenizer, _read_file(file), str(file))
        return tokens.astype(dtype), _measures([tokens])

    with ThreadPoolExecutor(workers) as pool:
        documents, measured = zip(*pool.map(load, [file for _, file in files]), strict=True)
    lengths, checksums = np.concatenate(measured).T.copy()
    digest = hashlib.sha256()
    for part in (lengths, *documents):
        digest.update(part)
    return Documents(lengths, checksums, digest.hexdigest(), lambda index: documents[index].astype(np.int32))


def _read_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot read {file} ({error.strerror}); make it readable, or exclude it") from error


def _find_files(paths: tuple[str, ...], pattern: str) -> list[tuple[str, Path]]:
    """Returns the files among and under `paths`, each with its name: its path within the folder it was found in."""
    found = [match for path in paths for match in _find_under(path, pattern)]
    if not found:
        raise DataError(f"no file under {', '.join(paths)} matches pattern={pattern}; correct one of them")
    return found


def _find_under(path: str, pattern: str) -> list[tuple[str, Path]]:
    if path == "stdlib":
        return _find_stdlib(pattern)
    root = Path(path).expanduser()
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        remedy = (
            "mount the bucket, and give the path of the mount" if "://" in path else "correct the path of the source"
        )
        raise DataError(f"{path} is neither a file nor a folder; {remedy}")
    return _walk(root, pattern)


def _find_stdlib(pattern: str) -> list[tuple[str, Path]]:
    """Returns the modules of the standard library, without its tests: some of those are not UTF-8 by design."""
    excluded = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    files = _walk(Path(sysconfig.get_path("stdlib")), pattern)
    return [(name, file) for name, file in files if file.suffix == ".py" and not excluded & set(name.split("/"))]


def _walk(root: Path, pattern: str) -> list[tuple[str, Path]]:
    """Returns the files under `root` that match, sorted by name; what is hidden is left out."""
    named = sorted((file.relative_to(root).as_posix(), file) for file in root.rglob("*"))
    shown = [(name, file) for name, file in named if not any(part.startswith(".") for part in name.split("/"))]
    for _, file in shown:
        if file.is_symlink() and file.is_dir():
            raise DataError(f"{file} is a link to a folder, and not followed; give that folder as a path of the source")
    return [(name, file) for name, file in shown if fnmatch.fnmatch(name, pattern) and file.is_file()]


# ------------------------------------------------------------------------------ tfds, arrayrecord


def _records(
    source: config.Source, tokenizer: Tokenizer, cache_dir: epath.Path | None, workers: int, processes: Processes
) -> Documents:
    files = _find_files(source.path, source.pattern)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each file stays open once it is read from
    count, texts = _open_tfds(source) if source.kind == "tfds" else _open_arrayrecord(files)
    origin = f"{source.kind} {', '.join(source.path)}"

    def tokens(which: Sequence[int]) -> list[np.ndarray]:
        return _tokenize_records(tokenizer, texts, which, origin)

    cache = cache_dir and cache_dir / f"lengths-{_identity(source, files, tokenizer)}"
    lengths, checksums, digest = _measured(functools.partial(_measure, tokens, workers), count, cache, processes)

    def read(index: int) -> np.ndarray:
        (document,) = tokens([index])
        if len(document) != lengths[index]:
            raise DataError(
                f"record {index} of {origin} has {len(document)} tokens, not the {lengths[index]} that were measured; "
                f"its file has changed: start again" + (f" without {cache}" if cache else "")
            )
        return document

    return Documents(lengths, checksums, digest, read)


def _tokenize_records(tokenizer: Tokenizer, texts: Texts, which: Sequence[int], origin: str) -> list[np.ndarray]:
    try:
        documents = texts(which)
    except Exception as error:  # whatever the library makes of a file that is damaged, or gone
        if len(which) > 1:  # one by one, to name it
            return [document for i in which for document in _tokenize_records(tokenizer, texts, [i], origin)]
        name = f"record {which[0]} of {origin}"
        raise UnreadableError(f"{name} cannot be read ({error}); bring its file back, or leave it out") from error
    return [_tokenize(tokenizer, text, f"record {i} of {origin}") for i, text in zip(which, documents, strict=True)]


def _open_tfds(source: config.Source) -> tuple[int, Texts]:
    """Returns the number of records of a prepared dataset, and a function that reads the texts of some."""
    import tensorflow_datasets as tfds

    folder, feature = source.path[0], source.feature
    try:
        builder: Any = tfds.builder_from_directory(str(Path(folder).expanduser()))
        features, records = builder.info.features, builder.as_data_source(source.split)
    except Exception as error:  # anything, from an absent dataset_info.json to an unknown split
        raise DataError(f"cannot open split={source.split} of the tfds folder {folder}: {error}") from error
    if feature not in (known := sorted(features)):
        close = difflib.get_close_matches(feature, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
        raise DataError(f"feature={feature} is not in the tfds folder {folder}; {hint}")
    if not isinstance(features[feature], tfds.features.Text):
        raise DataError(f"feature={feature} of the tfds folder {folder} is not text; name one that is")
    return len(records), lambda which: [record[feature] for record in _fetched(records, which)]


def _open_arrayrecord(files: list[tuple[str, Path]]) -> tuple[int, Texts]:
    """Returns the number of records in all files together, and a function that reads some."""
    from grain.sources import ArrayRecordDataSource

    try:
        records: Any = ArrayRecordDataSource([str(file) for _, file in files])
        return len(records), functools.partial(_fetched, records)
    except (RuntimeError, ValueError) as error:
        names = ", ".join(str(file) for _, file in files[:3]) + (", …" if len(files) > 3 else "")
        raise UnreadableError(f"cannot read {names} as array_record files: {error}; narrow path or pattern") from error


def _fetched(records: Any, which: Sequence[int]) -> list:
    """Array_record goes through a file's index for each reading, be it of many records; for many it starts threads."""
    return records.__getitems__(which) if len(which) > 1 else [records[i] for i in which]


def _identity(source: config.Source, files: list[tuple[str, Path]], tokenizer: Tokenizer) -> str:
    """Returns a hash of what decides the lengths of the documents."""
    stats = [(name, file.stat().st_size, file.stat().st_mtime_ns) for name, file in files]
    decisive = [source.kind, source.split, source.feature, tokenizer.digest, stats]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


def _measured(
    measure: Callable[[range], np.ndarray],
    count: int,
    cache: epath.Path | None,
    processes: Processes,
) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns lengths and checksums of all documents, uint32, and a digest of both.

    Each process measures some parts of them, and reads the others.
    """
    parts = [range(first, min(first + _PART, count)) for first in range(0, count, _PART)]

    def found(part: range) -> np.ndarray:
        return _cached(cache and cache / f"{part.start}.npy", lambda: measure(part))

    for part in parts[processes.index :: processes.count] if cache else ():
        found(part)
    processes.meet()
    lengths, checksums, digest = np.empty(count, np.uint32), np.empty(count, np.uint32), hashlib.sha256()
    with ThreadPoolExecutor(1 if cache is None else None) as pool:  # they wait for a bucket, not for each other
        for part, measured in zip(parts, pool.map(found, parts), strict=True):
            lengths[part.start : part.stop], checksums[part.start : part.stop] = measured.T
            digest.update(measured)
    return lengths, checksums, digest.hexdigest()


def _measure(tokens: Callable[[Sequence[int]], list[np.ndarray]], workers: int, part: range) -> np.ndarray:
    """Returns the measures of a part's documents."""
    with ThreadPoolExecutor(workers) as pool:
        together = (part[first : first + _READ] for first in range(0, len(part), _READ))
        return np.concatenate([*pool.map(lambda which: _measures(tokens(which)), together)])


def _cached(path: epath.Path | None, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns what `path` holds, or else computes it and writes it there, whole or not at all."""
    if path is None:
        return compute()
    if not path.exists():
        computed = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.parent / f"{uuid.uuid4().hex}.partial"  # other processes may be writing the same
        with partial.open("wb") as file:
            np.save(file, computed)
        partial.replace(path)
    with path.open("rb") as file:
        return np.load(file)
