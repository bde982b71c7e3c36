"""Which parts of a pool are free: best fit with coalescing, and a shelf of blocks ready for reuse.

Pure bookkeeping over offsets. A block that is given back is the first to be taken again: its pages are mapped and, with
luck, in the cache. Of large ones only a few stay on the shelf, or payloads of many sizes would go round the whole pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["ALIGNMENT", "FreeSpace"]

ALIGNMENT = 64
PAGE_NBYTES = 4096
SMALL_NBYTES = 64 * 1024
LARGE_SHELVED = 8
"""So many blocks above `SMALL_NBYTES` are kept for reuse."""


def block_nbytes(nbytes: int) -> int:
    """Round up to the size of a block: to 1/8 of its own magnitude, but at most to whole pages."""
    if nbytes <= 1024:
        return (nbytes + ALIGNMENT - 1) & -ALIGNMENT or ALIGNMENT
    grain = PAGE_NBYTES if nbytes >= 1 << 15 else 1 << (nbytes.bit_length() - 4)
    return (nbytes + grain - 1) & -grain


class FreeSpace:
    """Free and taken blocks of one contiguous range that only grows. Not thread-safe.

    Attributes
    ----------
    end
        Size of the range in bytes.
    taken
        Bytes in blocks that are taken.
    """

    def __init__(self) -> None:
        self.end = 0
        self.taken = 0
        self._taken: dict[int, int] = {}
        self._shelf: dict[int, list[int]] = {}
        self._large_shelf: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    def take(self, nbytes: int) -> int | None:
        """Take a block of at least `nbytes`; its offset (a multiple of 64), or None when nothing free is large enough."""
        size = block_nbytes(nbytes)
        start = self._shelved(size)
        if start is None:
            start = self._fit(size)
        if start is None:
            return None
        self._taken[start] = size
        self.taken += size
        return start

    def give(self, start: int) -> None:
        """Give a taken block back."""
        size = self._taken.pop(start)
        self.taken -= size
        if size <= SMALL_NBYTES:
            shelved = self._shelf.get(size)
            if shelved is None:
                self._shelf[size] = [start]
            else:
                shelved.append(start)
        else:
            self._large_shelf[start] = size
            if len(self._large_shelf) > LARGE_SHELVED:
                oldest = next(iter(self._large_shelf))
                self._merge(oldest, self._large_shelf.pop(oldest))

    def grow(self, nbytes: int) -> None:
        """Append free bytes to the range."""
        self._merge(self.end, nbytes)
        self.end += nbytes

    def lacking(self, nbytes: int) -> int:
        """By how many bytes the range has to grow so that a block of `nbytes` fits at its end."""
        tail = self._free_ends.get(self.end)
        free = 0 if tail is None else self.end - tail
        return max(block_nbytes(nbytes) - free, 0)

    def _shelved(self, size: int) -> int | None:
        if size <= SMALL_NBYTES:
            starts = self._shelf.get(size)
            return starts.pop() if starts else None
        for start, large in reversed(self._large_shelf.items()):
            if large == size:
                del self._large_shelf[start]
                return start
        return None

    def _fit(self, size: int) -> int | None:
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            if not self._clear_shelf():
                return None
            at = bisect_left(self._by_size, (size, 0))
            if at == len(self._by_size):
                return None
        found, start = self._by_size[at]
        self._remove(start, found)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def _clear_shelf(self) -> bool:
        """Merge what was kept for quick reuse; whether there was any."""
        shelf, self._shelf = self._shelf, {}
        large, self._large_shelf = self._large_shelf, {}
        for size, starts in shelf.items():
            for start in starts:
                self._merge(start, size)
        for start, size in large.items():
            self._merge(start, size)
        return bool(shelf or large)

    def _merge(self, start: int, size: int) -> None:
        before = self._free_ends.get(start)
        if before is not None:
            self._remove(before, start - before)
            size += start - before
            start = before
        after = self._free.get(start + size)
        if after is not None:
            self._remove(start + size, after)
            size += after
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_ends[start + size] = start
        insort(self._by_size, (size, start))

    def _remove(self, start: int, size: int) -> None:
        del self._free[start]
        del self._free_ends[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
