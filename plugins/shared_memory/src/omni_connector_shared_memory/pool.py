"""The producer's memory: one file without a name, mapped whole, that takes memory in steps and reuses it for ever.

The file has its full size from the start but holds only the pages that were allocated (`posix_fallocate`), so a consumer maps
it once and growing needs no word to anybody. Nothing is ever written to a page that is not allocated: a full host is
ENOSPC here and never SIGBUS there. Seals keep every holder of the file from cutting it short.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from omni_connector_core.errors import BackendUnavailableError, ClosedError
from omni_connector_shared_memory.allocator import FreeSpace
from omni_connector_shared_memory.mapping import anonymous_file, make_huge, map_aligned

__all__ = ["LARGE_NBYTES", "Block", "Pool"]

LARGEST_STEP_NBYTES = 256 << 20
LARGE_NBYTES = 256 << 10
"""From here on it pays to start on a page: a copy to an address that is, modulo the page size, a little above the
source's, is up to a third slower."""
FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


class Block(msgspec.Struct, frozen=True):
    """Memory of the pool: where it starts, and at which offset in the pool the payload in it begins."""

    start: int
    offset: int


class Pool:
    """Memory for payloads, taken and given back by offset. Thread-safe.

    Parameters
    ----------
    capacity_nbytes
        The most that the pool grows to; rounded up to whole pages.
    step_nbytes
        The least by which it grows.
    directory
        See `anonymous_file`.
    """

    def __init__(self, capacity_nbytes: int, step_nbytes: int, directory: str | None = None) -> None:
        self.capacity_nbytes = -(-capacity_nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.refusal = ""
        """Why the pool could not grow the last time it tried, when that was not its own capacity."""
        self._step = step_nbytes
        self._space = FreeSpace()
        self._lock = threading.Lock()
        self._closed = False
        self.fd = anonymous_file("omni-connector-pool", self.capacity_nbytes, directory)
        try:
            self._memory: Any = map_aligned(self.fd, self.capacity_nbytes)
        except OSError as error:
            os.close(self.fd)
            raise BackendUnavailableError(
                f"{self.capacity_nbytes:,} bytes of address space cannot be had: {error.strerror}",
                hint="Lower capacity_bytes, or raise the limit on address space",
            ) from error
        self._view = memoryview(self._memory).cast("B")

    @property
    def taken_nbytes(self) -> int:
        """Bytes of blocks that are taken."""
        return self._space.taken

    def take(self, nbytes: int, head_nbytes: int = 0) -> Block | None:
        """Take a block, growing if needed and possible; None when there is no room now.

        Parameters
        ----------
        head_nbytes
            What lies behind so many bytes of a large payload starts on a page.
        """
        room = nbytes
        if nbytes >= LARGE_NBYTES and nbytes + mmap.PAGESIZE <= self.capacity_nbytes:
            room += mmap.PAGESIZE
        with self._lock:
            start = self._space.take(room)
            if start is None and self._grow(room):
                start = self._space.take(room)
        if start is None:
            return None
        skipped = -(start + head_nbytes) % mmap.PAGESIZE if room > nbytes else 0
        return Block(start, start + skipped)

    def give(self, start: int) -> None:
        """Give a block back."""
        with self._lock:
            self._space.give(start)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the pool's writable memory from an offset on.

        Raises
        ------
        ClosedError
        """
        try:
            return self._view[offset : offset + nbytes]
        except ValueError as error:  # released
            raise ClosedError("the connector is closed") from error

    def close(self) -> None:
        """Close the file; the memory goes when the last mapping of it goes, here or elsewhere."""
        with self._lock:
            self._closed = True
            os.close(self.fd)
            self._view.release()
            self._memory = None  # a put that is under way has a view, which keeps the mapping

    def abandon(self) -> None:
        """Close the file in a forked child, taking no lock."""
        os.close(self.fd)

    def _grow(self, nbytes: int) -> bool:
        if self._closed:
            return False
        end = self._space.end
        needed = -(-self._space.lacking(nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        room = self.capacity_nbytes - end
        if needed > room:
            return False
        generous = min(max(needed, self._step, min(end, LARGEST_STEP_NBYTES)), room)
        generous = -(-generous // mmap.PAGESIZE) * mmap.PAGESIZE
        return any(self._allocate(end, size) for size in dict.fromkeys((generous, needed)))

    def _allocate(self, end: int, nbytes: int) -> bool:
        free = free_memory_nbytes()
        if nbytes > free:
            self.refusal = f"the host has {free:,} bytes of memory left"
            return False
        try:
            os.posix_fallocate(self.fd, end, nbytes)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.refusal = f"the host refuses {nbytes:,} bytes more: {error.strerror}"
            return False
        make_huge(self._memory, end, nbytes)
        self.refusal = ""
        self._space.grow(nbytes)
        return True


def free_memory_nbytes() -> int:
    """How much memory the kernel thinks it can give out without swapping (``MemAvailable``).

    Asked before the pool grows, because what a full host does with a memfd is not ENOSPC but the OOM killer.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62
