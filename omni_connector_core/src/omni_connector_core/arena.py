"""One block of registered memory, handed out in regions.

An engine reads and writes registered memory alone, and registering is slow (page pinning on RDMA), so a process registers
one arena and cuts every frame out of it. First fit at the lowest address, so that memory that was touched before is used again
(a first touch costs nine times a reuse, `facts/shared_memory`); neighbours are joined when they come back.

`Arena.release` runs in finalizers: in any thread, at any point, even inside `Arena.allocate` of the same thread. So it takes no
lock: it appends to a deque and rings the raw locks of those who wait.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from omni_connector_core.deadline import Deadline
from omni_connector_core.errors import CapacityError, PayloadTooLargeError
from omni_connector_core.lease import watch

if TYPE_CHECKING:
    from omni_connector_core.frame import Frame

__all__ = ["ALIGNMENT", "Arena", "HostMemory", "Pool", "Region"]

ALIGNMENT = 64
"""Bytes; a cache line, and what the codec aligns buffers to."""


class Pool(ABC):
    """The memory under an arena."""

    address: int
    """Where it starts."""

    nbytes: int
    """Its size in bytes."""

    @abstractmethod
    def part(self, offset: int, nbytes: int) -> Any:
        """Return a new writable buffer object with the bytes of a part, which keeps alive what it needs and can carry a finalizer."""

    def store(self, offset: int, frame: Frame) -> None:
        """Copy a frame into a part: one memcpy for each of its buffers."""
        frame.write_into(self.part(offset, frame.nbytes))


class HostMemory(Pool):
    """Anonymous host memory that lives until the last part of it is garbage collected.

    Pages are allotted on first touch, in huge pages where the kernel grants them.
    """

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without huge pages: small ones do
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def part(self, offset: int, nbytes: int) -> Any:
        """Return a ctypes array over a part."""
        return (ctypes.c_char * nbytes).from_buffer(self._map, offset)


class Region:
    """A part of an arena that was handed out.

    Attributes
    ----------
    offset, nbytes
        Where it lies in the arena, and how many bytes were asked for.
    address
        Where it lies in memory.
    """

    __slots__ = ("__weakref__", "_size", "address", "arena", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int, size: int) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.address = arena.address + offset
        self._size = size

    def buffer(self) -> Any:
        """Return a writable buffer object over the region, which does not free it."""
        return self.arena.pool.part(self.offset, self.nbytes)

    def store(self, frame: Frame) -> None:
        """Copy a frame to the region's start."""
        self.arena.pool.store(self.offset, frame)

    def lease(self) -> Any:
        """Return a writable buffer object over the region, which frees it when it is garbage collected."""
        own = self.buffer()
        watch(own, self.arena.release, self)
        return own

    @property
    def size(self) -> int:
        """Bytes taken from the arena: `nbytes`, rounded up."""
        return self._size


class Arena:
    """Hands out regions of a pool. Thread-safe.

    Parameters
    ----------
    pool
        The memory, registered with the engine by whoever owns both.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.address = pool.address
        self.nbytes = pool.nbytes - pool.nbytes % ALIGNMENT
        self._lock = threading.Lock()
        self._starts = [0]
        self._sizes = [self.nbytes]
        self._free = self.nbytes
        self._returned: deque[Region] = deque()
        self._bells: list[threading.Lock] = []

    def allocate(self, nbytes: int, deadline: Deadline) -> Region:
        """Take a region, waiting for room to the deadline.

        Raises
        ------
        PayloadTooLargeError
            It would not fit into the empty arena.
        CapacityError
            There was no room before the deadline.
        """
        while (region := self.try_allocate(nbytes)) is None:
            if deadline.expired():
                raise self.full(nbytes)
            self.wait(nbytes, deadline.at_s)
        return region

    def wait(self, nbytes: int, until_s: float) -> None:
        """Wait until something was given back, at most to a point of the monotonic clock; not at all if there is room."""
        bell = threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        try:
            if not self._returned and self._largest() < nbytes:
                bell.acquire(timeout=max(until_s - time.monotonic(), 0.0))
        finally:
            self._bells.remove(bell)

    def full(self, nbytes: int) -> CapacityError:
        """Return the error that says that there is no room."""
        return CapacityError(
            f"no {nbytes:,} contiguous bytes became free: {self.used_bytes:,} of {self.nbytes:,} are in use and the largest "
            f"free run has {self._largest():,}"
        )

    def _largest(self) -> int:
        with self._lock:
            return max(self._sizes, default=0)

    def try_allocate(self, nbytes: int) -> Region | None:
        """Take a region if there is room now.

        Raises
        ------
        PayloadTooLargeError
            It would not fit into the empty arena.
        """
        size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        if size > self.nbytes:
            raise PayloadTooLargeError(
                f"{nbytes:,} bytes do not fit into the arena of {self.nbytes:,}", hint="Raise the option that sizes it"
            )
        with self._lock:
            self._collect()
            index = next((index for index, free in enumerate(self._sizes) if free >= size), None)
            if index is None:
                return None
            offset = self._starts[index]
            if self._sizes[index] == size:
                del self._starts[index], self._sizes[index]
            else:
                self._starts[index] += size
                self._sizes[index] -= size
            self._free -= size
        return Region(self, offset, nbytes, size)

    def release(self, region: Region) -> None:
        """Give a region back, once; callable from finalizers."""
        self._returned.append(region)
        for bell in tuple(self._bells):
            with suppress(RuntimeError):  # it rings already
                bell.release()

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        with self._lock:
            self._collect()
            return self.nbytes - self._free

    def _collect(self) -> None:
        while self._returned:
            region = self._returned.popleft()
            self._free += region.size
            self._insert(region.offset, region.size)

    def _insert(self, start: int, size: int) -> None:
        starts, sizes = self._starts, self._sizes
        index = bisect.bisect_left(starts, start)
        if index < len(starts) and start + size == starts[index]:
            size += sizes[index]
            del starts[index], sizes[index]
        if index and starts[index - 1] + sizes[index - 1] == start:
            sizes[index - 1] += size
        else:
            starts.insert(index, start)
            sizes.insert(index, size)
