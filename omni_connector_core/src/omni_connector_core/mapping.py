"""mmap(2) by address: for what Python's own cannot do, a mapping at a chosen place, and one that keeps no descriptor."""

from __future__ import annotations

import ctypes
import os

__all__ = ["advise", "map_at", "unmap"]

_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_at(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    """Map a file, or nothing, from its beginning; returns the address.

    Parameters
    ----------
    address
        Where; None: anywhere.
    protection, flags, fd
        See mmap(2).

    Raises
    ------
    OSError
    """
    found = _mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Tell the kernel how a range is used (madvise(2)); it may not care."""
    _madvise(address, nbytes, advice)


def unmap(address: int, nbytes: int) -> None:
    """End a mapping, or a part of one."""
    _munmap(address, nbytes)
