"""Documents of any length to rows of one length, in random access.

documents, in the order of the epoch    a a a a e b b e c c c c c c e
rows of six tokens                     |a a a a e b|b e c c c c|c c e: less than a row, left out
segments                               |1 1 1 1 1 2|1 1 2 2 2 2|
positions                              |0 1 2 3 4 0|0 1 0 1 2 3|
targets (-: none)                      |a a a e - b|e - c c c c|
"""

import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import numpy as np

from maxds.data.sources import Documents


def pack(pieces: Iterable[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Lays pieces of documents end to end in one row, and cuts off what does not fit.

    Args:
        pieces: int32 [tokens] each: what is left of a document, up to its end.
        length: of the row.

    Returns:
        int32 [length] each: `tokens`; `targets`, the next token of the same document, seen also where
        it lies beyond the row, or -1 where there is none; `segments`, 1 for the first piece, 2 for the
        second, …, 0 where the row is empty; `positions`, counted from the start of the piece.
    """
    row = {name: np.zeros(length, np.int32) for name in ("tokens", "segments", "positions")}
    row["targets"] = np.full(length, -1, np.int32)
    start = 0
    for segment, piece in enumerate(pieces, start=1):
        end = min(start + len(piece), length)
        following = piece[1 : end - start + 1]
        row["tokens"][start:end] = piece[: end - start]
        row["targets"][start : start + len(following)] = following
        row["segments"][start:end] = segment
        row["positions"][start:end] = np.arange(end - start)
        start = end
    return row


def cut(rows: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Cuts rows at multiples of `length`: between two of them lies what a row of that length holds.

    Args:
        rows: int32 [rows, S] each, as of `pack`.
        length: divides S.

    Returns:
        int32 [rows, S] each: tokens and targets as they were; `segments`, of which another begins at each cut,
        numbered through the row; `positions`, counted from their starts.
    """
    segments, place = rows["segments"], np.arange(rows["segments"].shape[1], dtype=np.int32)
    real = segments > 0
    begins = real & ((np.diff(segments, prepend=0) != 0) | (place % length == 0))
    start = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    numbers = np.cumsum(begins, axis=1, dtype=np.int32)
    return rows | {"segments": np.where(real, numbers, 0), "positions": np.where(real, place - start, 0)}


class PackedRows(grain.MapDataset):
    """The rows of some documents; each epoch concatenates them in an order of its own.

    Row `len(self) * epoch + i` is row i of that epoch. It holds every token of the epoch's
    concatenation from `length * i` on: a pure function of the documents, the seed and the index.
    """

    def __init__(self, documents: Documents, members: np.ndarray, length: int, seed: int):
        """`members`: int64 [documents], the indices of the documents to read."""
        super().__init__()
        self._documents, self._members, self._length, self._seed = documents, members, length, seed
        self.num_tokens = int(documents.lengths[members].sum())
        self._lock = threading.Lock()
        # Reading ahead crosses into the next epoch while threads still read the last one.
        self._order_of = functools.lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return self.num_tokens // self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, row = divmod(index, len(self))
        return pack(self._pieces(epoch, row * self._length), self._length)

    def _pieces(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """Yields the documents of the row at token `start`, without what earlier rows hold of the first."""
        with self._lock:
            order, ends = self._order_of(epoch)
        first = np.searchsorted(ends, start, side="right")
        last = np.searchsorted(ends, start + self._length)
        skipped = start - (ends[first] - self._documents.lengths[order[first]])
        for document in order[first : last + 1]:
            yield self._documents.read(document)[skipped:]
            skipped = 0

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the documents in this epoch's order, and the token at which each of them ends."""
        # The raw bits of Philox, unlike `permutation`, are the same in every version of NumPy.
        bits = np.random.Philox(key=[self._seed, epoch]).random_raw(len(self._members))
        order = self._members[np.argsort(bits, kind="stable")]
        return order, np.cumsum(self._documents.lengths[order])
