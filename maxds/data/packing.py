"""Documents of any length to rows of one length, in random access.

documents, in the order of the epoch    a a a a e b b e c c c c c c e
rows of six tokens                     |a a a a e b|b e c c c c|c c e: less than a row, left out
segments                               |1 1 1 1 1 2|1 1 2 2 2 2|
positions                              |0 1 2 3 4 0|0 1 0 1 2 3|
targets (-: none)                      |a a a e - b|e - c c c c|
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import numpy as np

from maxds.data.sources import Documents

_PART = 2**12  # documents that are shuffled among themselves; an order of all would take some 30 bytes of each


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
        if (start := end) == length:
            break
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

    Documents are shuffled in parts, and the parts as wholes: so the host's memory holds no order of
    all of them. What shares a row comes from one part or two; rows are for others to shuffle.
    """

    def __init__(self, documents: Documents, chosen: Callable[[slice], np.ndarray], length: int, seed: int):
        """`chosen` tells of documents side by side which to read, bool [documents]."""
        super().__init__()
        self.documents, self._chosen, self._length, self._seed = documents, chosen, length, seed
        parts = map(self._part, range(-(-len(documents.lengths) // _PART)))
        self._sizes = np.array([documents.lengths[p][chosen(p)].sum(dtype=np.int64) for p in parts], np.int64)
        self.num_tokens = int(self._sizes.sum())
        self._lock = threading.Lock()
        # Reading ahead crosses into the next epoch while threads still read the last one.
        self._parts_of = functools.lru_cache(maxsize=2)(self._shuffled_parts)

    def __len__(self) -> int:
        return self.num_tokens // self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, row = divmod(index, len(self))
        return pack(self._pieces(epoch, row * self._length), self._length)

    def _pieces(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        """Yields what follows in an epoch from token `start` on, document by document."""
        with self._lock:
            parts, ends = self._parts_of(epoch)
        first = np.searchsorted(ends, start, side="right")
        skipped = start - (ends[first] - self._sizes[parts[first]])
        for part in parts[first:]:
            order = self._shuffled(epoch, part)
            starts = np.cumsum(self.documents.lengths[order], dtype=np.int64) - self.documents.lengths[order]
            at = np.searchsorted(starts, skipped, side="right") - 1
            for document, of_document in zip(order[at:], starts[at:], strict=True):
                yield self.documents.read(document)[max(skipped - of_document, 0) :]
            skipped = 0

    def _shuffled_parts(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the parts in this epoch's order, and the token at which each of them ends."""
        order = self._order(epoch, [0, 0, 1, 0], len(self._sizes))
        return order, np.cumsum(self._sizes[order])

    def _shuffled(self, epoch: int, part: int) -> np.ndarray:
        """Returns the documents of a part in this epoch's order."""
        members = _PART * part + np.flatnonzero(self._chosen(self._part(part)))
        return members[self._order(epoch, [0, 0, 0, part], len(members))]

    def _order(self, epoch: int, counter: list[int], count: int) -> np.ndarray:
        # The raw bits of Philox, unlike `permutation`, are the same in every version of NumPy.
        bits = np.random.Philox(key=[self._seed, epoch], counter=counter).random_raw(count)
        return np.argsort(bits, kind="stable")

    def _part(self, number: int) -> slice:
        return slice(_PART * number, _PART * (number + 1))
