"""numpy arrays, scalars and dtypes.

Exactly `numpy.ndarray`: subclasses carry meaning of their own. Any dtype without Python objects in it, byte order and
structure included; as with `numpy.save`, a dtype's ``metadata`` is dropped, and C's names for one type (long, long
long) are not told apart. Memory order is C afterwards. Arrays decode to views of the frame's memory, read-only if that
is.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from omni_connector_core.codec.walk import LIFTERS, Lowerer, Reader, UnencodableError, Writer
from omni_connector_core.codec.wire import (
    ARRAY_HEADS,
    MAX_NDIM,
    NDARRAY,
    NUMPY_DTYPE,
    NUMPY_SCALAR,
    NUMPY_TEXT,
    Ext,
    pack,
)
from omni_connector_core.errors import DecodeError
from omni_connector_core.memcpy import RELEASE_GIL_NBYTES, array_address
from omni_connector_core.native import native

__all__ = ["LOWERERS", "Written", "array_head", "check_bool", "dtype_lowerer", "scalar_lowerer"]

#: dtype code -> dtype; code 0 is any other, described behind the shape
_COMMON: Final = tuple(
    np.dtype(name)
    for name in ("V1", "?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
)
_CODES: Final = {dtype: code for code, dtype in enumerate(_COMMON) if code}
_DTYPE_STR: Final = re.compile(r"[<>|](?:[biufcSUV][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)", re.ASCII)
_STRUCTURE: Final = {"names", "formats", "offsets", "titles", "itemsize", "aligned", "record"}


def _lower_array(writer: Writer, value: np.ndarray[Any, Any], depth: int) -> Any:
    dtype = value.dtype
    code = _CODES.get(dtype, 0)
    tail = b"" if code else _described(dtype)
    nbytes = value.nbytes
    if value.flags.c_contiguous:
        index = writer.put(_origin(value, nbytes), nbytes, value)
    else:
        index = writer.put(functools.partial(_fill, value), nbytes)
    return Ext(NDARRAY, ARRAY_HEADS[value.ndim].pack(code, value.ndim, index, *value.shape) + tail)


def _origin(value: np.ndarray[Any, Any], nbytes: int) -> int | memoryview:
    """Where the bytes of a contiguous array come from."""
    if nbytes < RELEASE_GIL_NBYTES:
        try:
            return value.data.cast("B")
        except (TypeError, ValueError):  # empty, or of a dtype that the buffer protocol does not know
            pass
    return array_address(value)


def _fill(value: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    np.ndarray(value.shape, value.dtype, target)[...] = value


@functools.lru_cache(maxsize=256)
def _described(dtype: np.dtype[Any]) -> bytes:
    """Make msgpack of a dtype: its str, a map for a structured one, a list for one with a shape of its own."""
    description = _describe(dtype)
    if _dtype_of(description) != dtype:
        raise UnencodableError(f"dtype {dtype!r} is another package's; view the array as bytes or integers")
    return pack(description)


def _describe(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject or dtype.kind == "T":
        raise UnencodableError(f"dtype {dtype!r} holds Python objects; convert it to a list or a fixed-width dtype")
    if not dtype.itemsize:
        raise UnencodableError(f"dtype {dtype!r} has no width")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_describe(base), list(shape)]
    if dtype.fields is None or dtype.names is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_describe(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
        "record": dtype.type is np.record,
    }


def _dtype_of(description: Any, depth: int = 0) -> np.dtype[Any]:
    """Make the dtype that `_describe` described; ValueError, TypeError or DecodeError for anything else."""
    if depth > 16:
        raise DecodeError("a dtype is nested too deep")
    if type(description) is str:
        # numpy takes a good deal more, and compiles some of it
        if not _DTYPE_STR.fullmatch(description):
            raise DecodeError(f"{description!r} is not a dtype")
        dtype = np.dtype(description)
    elif type(description) is list and len(description) == 2:
        dtype = np.dtype((_dtype_of(description[0], depth + 1), tuple(description[1])))
    elif type(description) is dict and description.keys() == _STRUCTURE:
        titles = description["titles"]
        layout = {
            "names": description["names"],
            "formats": [_dtype_of(part, depth + 1) for part in description["formats"]],
            "offsets": description["offsets"],
            "itemsize": description["itemsize"],
        }
        if any(title is not None for title in titles):
            layout["titles"] = titles
        dtype = np.dtype(layout, align=description["aligned"] is True)  # type: ignore[call-overload]
        if description["record"] is True:
            dtype = np.dtype((np.record, dtype))
    else:
        raise DecodeError("a dtype has an unknown form")
    if dtype.hasobject or dtype.kind == "T":
        raise DecodeError(f"dtype {dtype!r} holds Python objects")
    if not dtype.itemsize:
        # numpy makes it one byte wide: a short message could ask for an array of any size
        raise DecodeError(f"dtype {dtype!r} has no width")
    return dtype


def array_head(data: memoryview) -> tuple[int, int, tuple[int, ...], memoryview]:
    """Take apart dtype code, buffer number and shape of an array, and what is behind them."""
    if data.nbytes < 2 or data[1] > MAX_NDIM or data.nbytes < ARRAY_HEADS[data[1]].size:
        raise DecodeError("the head of an array has the wrong length")
    head = ARRAY_HEADS[data[1]]
    code, _ndim, index, *shape = head.unpack_from(data)
    return code, index, tuple(shape), data[head.size :]


def check_bool(bits: np.ndarray[Any, Any]) -> None:
    """Refuse bytes that are no bool: what computes with them later is undefined."""
    if bits.size and bits.max() > 1:
        raise DecodeError("a bool is neither 0 nor 1")


def _lift_array(reader: Reader, data: memoryview) -> np.ndarray[Any, Any]:
    code, index, shape, tail = array_head(data)
    if code >= len(_COMMON):
        raise DecodeError(f"numpy dtype {code} is not known")
    dtype = _COMMON[code] if code else _dtype_of(reader.unpack(tail))
    offset, nbytes = reader.span(index)
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise DecodeError(f"an array of shape {shape} and dtype {dtype} in {nbytes} bytes")
    if not nbytes:
        return np.empty(shape, dtype)
    if dtype.kind == "b":
        check_bool(reader.base[offset : offset + nbytes])
    if reader.private:
        # bytes are copied, because a copy of the array may leave out what lies between fields
        return np.ndarray(shape, dtype, reader.base[offset : offset + nbytes].copy())
    return np.ndarray(shape, dtype, reader.base, offset)


def scalar_lowerer(kind: type) -> Lowerer | None:
    """How to lower a numpy scalar of exactly this type, if it is one."""
    if not issubclass(kind, np.generic) or kind.__module__ != "numpy":
        return None
    if kind is np.str_:
        return lambda writer, value, depth: Ext(NUMPY_TEXT, str.encode(value, "utf-8", "surrogatepass"))
    if kind is np.bytes_:
        return lambda writer, value, depth: Ext(NUMPY_SCALAR, pack([None, bytes(value)]))
    return lambda writer, value, depth: Ext(NUMPY_SCALAR, pack([_describe(value.dtype), value.tobytes()]))


def _lift_scalar(reader: Reader, data: memoryview) -> Any:
    description, raw = reader.sequence(data, 2)
    if type(raw) is not bytes:
        raise DecodeError("a numpy scalar without its bytes")
    if description is None:
        return np.bytes_(raw)
    dtype = _dtype_of(description)
    if dtype.itemsize != len(raw) or dtype.kind in "SU" or dtype.subdtype is not None:
        raise DecodeError(f"a scalar of dtype {dtype} in {len(raw)} bytes")
    if dtype.kind == "b":
        check_bool(np.frombuffer(raw, np.uint8))
    # a copy that can be written: a structured scalar is a view of the array it comes from
    return np.ndarray((1,), dtype, bytearray(raw))[0]


@dataclass(frozen=True, slots=True)
class Written:
    """An array that does not exist yet and is written straight into the frame; it decodes to an ordinary array.

    Attributes
    ----------
    shape, dtype
        Of the array.
    write
        Called once per frame, with the array in transport memory, to set every element of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    write: Callable[[np.ndarray[Any, Any]], None]


def _lower_written(writer: Writer, value: Written, depth: int) -> Any:
    code = _CODES.get(value.dtype, 0)
    tail = b"" if code else _described(value.dtype)
    ndim = len(value.shape)
    if ndim > MAX_NDIM:
        raise UnencodableError(f"an array of {ndim} dimensions; at most {MAX_NDIM} are allowed")
    nbytes = math.prod(value.shape) * value.dtype.itemsize
    index = writer.put(functools.partial(_write, value), nbytes)
    return Ext(NDARRAY, ARRAY_HEADS[ndim].pack(code, ndim, index, *value.shape) + tail)


def _write(value: Written, target: np.ndarray[Any, Any]) -> None:
    value.write(np.ndarray(value.shape, value.dtype, target))


if native is not None:
    #: of each its letter in the buffer protocol; NUL for what has none of its own
    letters = (np.empty(1, dtype).data.format for dtype in _COMMON)
    native.use_numpy(
        np.ndarray,
        tuple(
            (dtype, letter if len(letter) == 1 else "\0", dtype.itemsize)
            for dtype, letter in zip(_COMMON, letters, strict=True)
        ),
        functools.partial(np.frombuffer, dtype=np.uint8),
    )

LOWERERS: dict[type, Lowerer] = {np.ndarray: _lower_array, Written: _lower_written}

LIFTERS[NDARRAY] = _lift_array
LIFTERS[NUMPY_SCALAR] = _lift_scalar
LIFTERS[NUMPY_TEXT] = lambda reader, data: np.str_(bytes(data).decode("utf-8", "surrogatepass"))
LIFTERS[NUMPY_DTYPE] = lambda reader, data: _dtype_of(reader.unpack(data))


def dtype_lowerer(kind: type) -> Lowerer | None:
    """How to lower a numpy dtype object, if it is one."""
    if not issubclass(kind, np.dtype):
        return None
    return lambda writer, value, depth: Ext(NUMPY_DTYPE, _described(value))
