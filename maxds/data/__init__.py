"""Training data: sources -> tokens -> packed rows -> batches that depend on the seed and the step only.

Each source's documents are shuffled, and so are the rows that they fill, anew in every epoch, and the sources'
rows are mixed by weight into one endless stream. The batch of step n is rows [n G, (n + 1) G) of that stream, or where
batches grow those after batch n - 1, however many processes and threads read it and wherever they
start. So the data has no state to save: a run resumes at its step, or as many batches later as it has
left out, and `Data.fingerprint` tells whether the data is still the same.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator

import grain
import numpy as np
from etils import epath

from maxds import config as config_lib
from maxds.data.error import DataError, UnreadableError
from maxds.data.packing import PackedRows, cut
from maxds.data.sources import ALONE, Documents, Processes, open_documents, reach_source, stable_hash
from maxds.data.tokenizer import Tokenizer, classes, load_tokenizer

__all__ = [
    "Batch", "Data", "DataError", "Processes", "Tokenizer", "UnreadableError", "classes", "load_tokenizer", "open_data",
    "reach",
]  # fmt: skip

Batch = dict[str, np.ndarray]

# Part of the fingerprint: raise it when the same configuration yields other batches than before.
_ORDER_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Data:
    """Batches of packed rows, as this process's share of them.

    A batch holds int32 [global_batch / process_count, sequence_length] `tokens`, `targets` (-1: none),
    `segments` and `positions`; `packing.pack` describes them. Those of a ramp hold fewer rows, or rows that are cut.
    """

    fingerprint: str  # of everything that determines the batches
    tokenizer: Tokenizer
    _config: config_lib.Data
    _train: grain.MapDataset
    _eval: grain.MapDataset | None
    _rows: list[PackedRows]  # to train on, of each source

    def told(self, steps: int) -> list[str]:
        """Of each source, in words, how much it is, and how often a run of so many steps reads it."""
        config, weights = self._config, sum(source.weight for source in self._config.sources)
        count = config.sequences_before(steps) - config.sequences_before(config.since_step)
        return [
            f"{' '.join([source.kind, *source.path])}: {rows.num_tokens:,} tokens of {len(rows.documents.lengths):,} "
            f"documents, read {count * source.weight / weights / len(rows):.3g} times by step {steps}"
            for source, rows in zip(config.sources, self._rows, strict=True)
        ]

    def batches(self, start_step: int = 0, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """Returns an endless iterator over the batches of steps start_step, start_step + 1, …

        This data's first batch is that of step `since_step`; there are none of earlier steps.
        The shares of all processes, concatenated in the order of their indices, are the global batch.

        Raises:
            DataError: global_batch is not divisible by process_count.
        """
        config = self._config
        unit = math.gcd(*config.batch_sizes)
        first = (config.sequences_before(start_step) - config.sequences_before(config.since_step)) // unit
        units = self._read(self._train, unit, slice(first, None), process_index, process_count)

        def batch(number: int) -> Batch:
            joined = _joined(list(itertools.islice(units, config.sequences(number) // unit)))
            length = config.length(number)
            return joined if length == config.sequence_length else cut(joined, length)

        return map(batch, itertools.count(start_step))

    def eval_batches(self, count: int, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """Returns an iterator over the first `count` batches of held-out documents, which no seed changes.

        No row is repeated. A source that holds out less than a row is left out.

        Raises:
            DataError: too little is held out, or global_batch is not divisible by process_count.
        """
        rows, needed = 0 if self._eval is None else len(self._eval), count * self._config.global_batch
        if self._eval is None or rows < needed:
            raise DataError(
                f"eval.batches={count} of data.global_batch={self._config.global_batch} need {needed} rows, but "
                f"data.eval_fraction={self._config.eval_fraction} holds out {rows}; lower eval.batches, or raise "
                f"data.eval_fraction"
            )
        return self._read(self._eval, self._config.global_batch, slice(count), process_index, process_count)

    def _read(
        self, rows: grain.MapDataset, size: int, which: slice, process_index: int, process_count: int
    ) -> Iterator[Batch]:
        share, left = divmod(size, process_count)
        if left:
            raise DataError(
                f"data.global_batch={size} is not divisible by the {process_count} processes; make it a multiple"
            )
        mine = rows.batch(share, drop_remainder=True)[process_index::process_count][which]
        workers = self._config.workers
        return iter(mine.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)))


def _joined(shares: list[Batch]) -> Batch:
    return shares[0] if len(shares) == 1 else {name: np.concatenate([s[name] for s in shares]) for name in shares[0]}


def open_data(
    config: config_lib.Data,
    vocab_size: int,
    seed: int,
    cache_dir: epath.PathLike | None,
    processes: Processes = ALONE,
) -> Data:
    """Opens and measures every source, and splits it into documents to train on and documents held out.

    Whether a document is held out depends on its tokens only: what is there twice is on one side, and files that come,
    go or get other names leave the others where they are.

    Args:
        config: what to read.
        vocab_size: of the model; every token id is below it.
        seed: of the order of the training rows.
        cache_dir: a folder (or gs://…) where the lengths of documents are kept for other processes and later runs;
            None: nowhere.
        processes: those that open the data together, and share `cache_dir`.

    Raises:
        DataError: a source or the tokenizer cannot be used, or there is too little data for a batch.
    """
    tokenizer = _open_tokenizer(config, vocab_size)
    cache = epath.Path(cache_dir) if cache_dir else None
    workers = max(config.workers, os.cpu_count() or 1)  # while there is nothing else to do
    sources = [open_documents(s, tokenizer, vocab_size, cache, workers, processes) for s in config.sources]
    train = [_rows(config, documents, f"train/{seed}/{i}") for i, documents in enumerate(sources)]
    _check_enough(config, train)
    return Data(
        fingerprint=_fingerprint(config, tokenizer, sources, seed),
        tokenizer=tokenizer,
        _config=config,
        _train=_mix_endless(config, train, seed),
        _eval=_mix_held_out(config, sources),
        _rows=train,
    )


def reach(config: config_lib.Data, vocab_size: int) -> list[str]:
    """Reads a little of every source, where `open_data` measures all; returns what was found.

    Raises:
        DataError: a source or the tokenizer cannot be used.
    """
    tokenizer = _open_tokenizer(config, vocab_size)
    return [reach_source(source, tokenizer) for source in config.sources]


def _open_tokenizer(config: config_lib.Data, vocab_size: int) -> Tokenizer:
    tokenizer = load_tokenizer(config.tokenizer)
    reads_text = any(source.kind != "synthetic" for source in config.sources)
    if reads_text and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer={config.tokenizer} has ids up to {tokenizer.vocab_size - 1}, beyond "
            f"model.vocab_size={vocab_size}; raise it to {tokenizer.vocab_size} or more"
        )
    return tokenizer


def _rows(config: config_lib.Data, documents: Documents, order: str, *, held_out: bool = False) -> PackedRows:
    """Returns the rows of one side of the split, their documents in an order that depends on `order`."""

    def chosen(which: slice) -> np.ndarray:
        return (documents.checksums[which] < config.eval_fraction * 2.0**32) == held_out

    return PackedRows(documents, chosen, config.sequence_length, stable_hash(order))


def _mix_endless(config: config_lib.Data, train: list[PackedRows], seed: int) -> grain.MapDataset:
    shuffled = [rows.shuffle(seed=stable_hash(f"rows/{seed}/{i}") % 2**32).repeat() for i, rows in enumerate(train)]
    return grain.MapDataset.mix(shuffled, [source.weight for source in config.sources])


def _mix_held_out(config: config_lib.Data, sources: list[Documents]) -> grain.MapDataset | None:
    held_out = [_rows(config, documents, f"eval/{i}", held_out=True) for i, documents in enumerate(sources)]
    weighted = [(rows, source.weight) for rows, source in zip(held_out, config.sources, strict=True) if len(rows)]
    return grain.MapDataset.mix(*zip(*weighted, strict=True)) if weighted else None


def _check_enough(config: config_lib.Data, train: list[PackedRows]) -> None:
    """Raises DataError unless every source fills a row, and all of them together a batch."""
    for i, (source, rows) in enumerate(zip(config.sources, train, strict=True)):
        if not len(rows):
            raise DataError(
                f"data.sources[{i}] ({' '.join([source.kind, *source.path])}) has {rows.num_tokens} tokens to train "
                f"on, less than a row of data.sequence_length={config.sequence_length}; add documents, or lower "
                f"data.sequence_length or data.eval_fraction"
            )
    if (total := sum(map(len, train))) < config.global_batch:
        raise DataError(
            f"the documents to train on fill {total} rows of data.sequence_length={config.sequence_length}, less than "
            f"data.global_batch={config.global_batch}; add documents, or lower one of them"
        )


def _fingerprint(config: config_lib.Data, tokenizer: Tokenizer, sources: list[Documents], seed: int) -> str:
    weighted = [(documents.digest, source.weight) for documents, source in zip(sources, config.sources, strict=True)]
    sizes = [config.sequence_length, config.global_batch, config.eval_fraction]
    if config.ramp:
        # An entry without a length is as it was before entries could have one.
        sizes.append([[e.until_step, e.global_batch, *filter(None, [e.sequence_length])] for e in config.ramp])
    if config.since_step:
        sizes.append(config.since_step)
    decisive = json.dumps([_ORDER_VERSION, seed, tokenizer.digest, sizes, weighted])
    return hashlib.sha256(decisive.encode()).hexdigest()
