"""Shared files without a name, and how they are mapped.

The pool is mapped at a multiple of 2 MiB and its pages are made huge: on small ones a copy takes up to 1.6 times as long
where a virtual machine has to walk page tables twice. `MADV_COLLAPSE` does that at our request, whatever the host's default
for shared memory is; where the kernel (before 6.1) or fragmentation does not let it, small pages stay and everything works.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Any

from omni_connector_core.errors import BackendUnavailableError
from omni_connector_core.mapping import advise, map_at, unmap

__all__ = ["HUGE_NBYTES", "anonymous_file", "make_huge", "map_aligned", "map_shared"]

HUGE_NBYTES = 2 << 20
FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PROT_NONE = 0
MAP_FIXED = 0x10
MADV_COLLAPSE = 25


def anonymous_file(name: str, nbytes: int, directory: str | None = None) -> int:
    """Create a sparse file that has no name anywhere, so that nothing is left when its last holder dies.

    Parameters
    ----------
    name
        Shown in ``/proc/<pid>/maps``.
    directory
        A folder on a tmpfs; None: no mount at all (memfd).

    Returns
    -------
    int
        File descriptor.

    Raises
    ------
    BackendUnavailableError
        The host does not let us.
    """
    try:
        if directory is None:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            if directory is None:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED_SIZE)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise BackendUnavailableError(
            f"no shared memory can be created in {directory or 'a memfd'}: {error.strerror}",
            hint="pool_dir names a folder on a tmpfs that this user may write to",
        ) from error
    return fd


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Map a small file for reading and writing, and leave it out of core dumps."""
    mapping = mmap.mmap(fd, nbytes)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def map_aligned(fd: int, nbytes: int) -> Any:
    """Map a large file for reading and writing, at a multiple of 2 MiB, and leave it out of core dumps.

    Returns
    -------
    ctypes array of char
        The memory; it is unmapped when the array and all that was made from it by `from_buffer` are gone.

    Raises
    ------
    OSError
        There is not so much address space.
    """
    reserved_nbytes = nbytes + HUGE_NBYTES
    reserved = map_at(None, reserved_nbytes, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // HUGE_NBYTES) * HUGE_NBYTES
    try:
        map_at(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd)
    except OSError:
        unmap(reserved, reserved_nbytes)
        raise
    before, after = address - reserved, reserved + reserved_nbytes - address - nbytes
    if before:
        unmap(reserved, before)
    if after:
        unmap(address + nbytes, after)
    advise(address, nbytes, mmap.MADV_DONTDUMP)
    memory = (ctypes.c_char * nbytes).from_address(address)
    # not at the interpreter's exit, where views may still be used
    weakref.finalize(memory, unmap, address, nbytes).atexit = False
    return memory


def make_huge(memory: Any, offset: int, nbytes: int) -> None:
    """Put a range of a mapping, whose pages are allocated, onto huge pages as far as it covers them whole; or not."""
    advise(ctypes.addressof(memory) + offset, nbytes, MADV_COLLAPSE)
