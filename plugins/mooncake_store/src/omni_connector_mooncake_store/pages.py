"""Huge pages for memory that Mooncake allocates itself, and of which it does not say where it lies.

A put into a segment of huge pages takes 13 to 24 % less time (16 MB, four runs of two segments in one process: 1.65 to 1.71 ms where
small pages took 1.91 to 2.20). The first touch of either takes as long.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

from omni_connector_core.mapping import advise

__all__ = ["huge_pages"]


@contextlib.contextmanager
def huge_pages(nbytes: int) -> Iterator[None]:
    """Ask the kernel for huge pages in anonymous memory of at least so many bytes that is mapped meanwhile, by whomever.

    Where it grants none, small ones do. The kernel may have joined a mapping with its neighbour, which then gets them as well. Memory
    that was touched or pinned already stays as it is.
    """
    before = set(_anonymous(nbytes))
    yield
    for start, end in set(_anonymous(nbytes)) - before:
        advise(start, end - start, mmap.MADV_HUGEPAGE)


def _anonymous(nbytes: int) -> Iterator[tuple[int, int]]:
    """List the private, writable mappings of no file (proc_pid_maps(5)) that are at least so long."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            extent, permissions, _, _, inode, *path = line.split(maxsplit=5)
            start, end = (int(address, 16) for address in extent.split("-"))
            if end - start >= nbytes and permissions == "rw-p" and inode == "0" and not path:
                yield start, end
