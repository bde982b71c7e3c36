"""bytes, bytearray and memoryview."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from omni_connector_core.codec.walk import LIFTERS, Lowerer, Reader, UnencodableError, Writer
from omni_connector_core.codec.wire import (
    BYTEARRAY,
    BYTES,
    INDEX,
    INLINE_NBYTES,
    MEMORYVIEW,
    SMALL_BYTEARRAY,
    Ext,
    pack,
)
from omni_connector_core.errors import DecodeError
from omni_connector_core.memcpy import RELEASE_GIL_NBYTES, array_address, copy, region

__all__ = ["LOWERERS"]


def _lower_bytes(writer: Writer, value: bytes, depth: int) -> Any:
    nbytes = len(value)
    if nbytes <= INLINE_NBYTES:
        return value
    return Ext(BYTES, INDEX.pack(writer.put(value, nbytes)))


def _lower_bytearray(writer: Writer, value: bytearray, depth: int) -> Any:
    nbytes = len(value)
    if nbytes <= INLINE_NBYTES:
        return Ext(SMALL_BYTEARRAY, bytes(value))
    # the region holds an export, so nobody can resize the bytearray while the frame is alive
    place = region(value)
    return Ext(BYTEARRAY, INDEX.pack(writer.put(place.address, nbytes, place)))


def _lower_memoryview(writer: Writer, value: memoryview, depth: int) -> Any:
    if value.format.lstrip("@") not in set("bBhHiIlLqQnNfd?c"):
        raise UnencodableError(f"a memoryview of format {value.format!r}; cast it to 'B' or wrap it in numpy.asarray")
    if not value.nbytes and value.ndim != 1:
        raise UnencodableError("an empty memoryview of several dimensions, which Python cannot make again")
    if value.c_contiguous:
        place = region(value)
        index = writer.put(place.address, place.nbytes, place)
    else:
        flat = value.tobytes()
        index = writer.put(flat, len(flat))
    shape = None if value.format == "B" and value.ndim == 1 else value.shape
    return Ext(MEMORYVIEW, pack([index, value.format, shape, value.readonly]))


LOWERERS: dict[type, Lowerer] = {
    bytes: _lower_bytes,
    bytearray: _lower_bytearray,
    memoryview: _lower_memoryview,
}


def _maker(name: str) -> Callable[[None, int], Any]:
    function: Any = getattr(ctypes.pythonapi, name)
    function.restype = ctypes.py_object
    function.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    made: Callable[[None, int], Any] = function
    return made


# CPython's own way to make an object and fill it before anybody else sees it: one copy, and without the GIL
_new_bytes = _maker("PyBytes_FromStringAndSize")
_new_bytearray = _maker("PyByteArray_FromStringAndSize")


def _buffer_of(reader: Reader, data: memoryview) -> np.ndarray[Any, Any]:
    if data.nbytes != INDEX.size:
        raise DecodeError("a buffer number has the wrong length")
    return reader.buffer(INDEX.unpack(data)[0])


def _lift_bytes(reader: Reader, data: memoryview) -> bytes:
    source = _buffer_of(reader, data)
    made: bytes = source.tobytes() if source.nbytes < RELEASE_GIL_NBYTES else _filled(_new_bytes, source)
    return made


def _lift_bytearray(reader: Reader, data: memoryview) -> bytearray:
    source = _buffer_of(reader, data)
    made: bytearray = bytearray(source) if source.nbytes < RELEASE_GIL_NBYTES else _filled(_new_bytearray, source)
    return made


def _filled(new: Callable[[None, int], Any], source: np.ndarray[Any, Any]) -> Any:
    made = new(None, source.nbytes)
    copy(region(made).address, array_address(source), source.nbytes)
    return made


def _lift_memoryview(reader: Reader, data: memoryview) -> memoryview:
    index, code, shape, readonly = reader.sequence(data, 4)
    source = reader.buffer(index)
    if reader.private or not source.nbytes:
        source = source.copy()
    view = source.data
    if shape is not None:
        view = view.cast(code, shape) if view.nbytes else view.cast(code)
    return view.toreadonly() if readonly else view


LIFTERS[BYTES] = _lift_bytes
LIFTERS[BYTEARRAY] = _lift_bytearray
LIFTERS[SMALL_BYTEARRAY] = lambda reader, data: bytearray(data)
LIFTERS[MEMORYVIEW] = _lift_memoryview
