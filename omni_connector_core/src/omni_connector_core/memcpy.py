"""Raw copies between addresses, and the addresses of buffers.

A slice assignment between memoryviews holds the GIL for its whole length (78 ms at 64 MB). These copies release it
when they are long; a short one keeps it, because taking it back from a busy thread may cost a switch interval (5 ms).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from omni_connector_core.native import native

__all__ = ["Region", "aligned_copy", "buffer_address", "bytes_address", "copy", "region"]

RELEASE_GIL_NBYTES = 1 << 21


def _memmove(library: ctypes.CDLL) -> Any:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


_holding_gil = _memmove(ctypes.PyDLL(None))
_releasing_gil = _memmove(ctypes.CDLL(None))


bytes_address = ctypes.PyDLL(None).PyBytes_AsString
bytes_address.argtypes = (ctypes.py_object,)
bytes_address.restype = ctypes.c_void_p


class Region(NamedTuple):
    """A piece of memory.

    Attributes
    ----------
    address, nbytes
        Where it is, and its length in bytes.
    owner
        Keeps the memory alive; the address is valid no longer than this object.
    """

    address: int
    nbytes: int
    owner: object


def copy(target: int, source: int | bytes, nbytes: int) -> None:
    """Copy ``nbytes`` bytes to the address ``target``; one memmove, without the GIL from 2 MiB on.

    Parameters
    ----------
    target, source
        Addresses, which the caller keeps valid; ``source`` may be a bytes object.
    """
    if nbytes < RELEASE_GIL_NBYTES:
        _holding_gil(target, source, nbytes)
    else:
        _releasing_gil(target, source, nbytes)


def aligned_copy(data: bytes) -> Any:
    """Return private, writable memory with the same bytes, at an address that is a multiple of 64."""
    memory = bytearray(len(data) + 63)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 64
    made = (ctypes.c_char * len(data)).from_buffer(memory, start)
    ctypes.memmove(made, data, len(data))
    return made


def region(buffer: Any, *, writable: bool = False) -> Region:
    """Where the bytes of a buffer lie.

    Parameters
    ----------
    buffer
        A contiguous object of the buffer protocol, or a contiguous CPU tensor.
    writable
        Whether the caller means to write there.

    Raises
    ------
    TypeError
        If the buffer is read-only but ``writable`` was asked for, or not a buffer at all.
    ValueError
        If it is not contiguous.
    """
    if type(buffer) is bytes and not writable:  # the frequent case; the way below takes 7 us
        return Region(bytes_address(buffer), len(buffer), buffer)
    if hasattr(buffer, "data_ptr"):
        if not (buffer.is_contiguous() and buffer.device.type == "cpu"):
            raise ValueError("the tensor is not contiguous in CPU memory")
        return Region(buffer.data_ptr(), buffer.nbytes, buffer)
    # ndarray, because a memoryview does not tell its address, and a ctypes export needs writable memory
    view = np.frombuffer(buffer, np.uint8) if memoryview(buffer).nbytes else np.empty(0, np.uint8)
    if writable and not view.flags.writeable:
        raise TypeError("the buffer is read-only")
    return Region(array_address(view), view.nbytes, view)


def buffer_address(buffer: Any) -> int:
    """Address of a contiguous buffer that the caller keeps; it may be read-only. As of `region`, in one call."""
    return region(buffer).address if native is None else int(native.address(buffer))


def array_address(array: np.ndarray[Any, Any]) -> int:
    """Address of the first element of an array of any dtype."""
    try:
        # four times faster than asking the array
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # read-only, empty, strided, or of a dtype that the buffer protocol does not know
        return int(array.__array_interface__["data"][0])
