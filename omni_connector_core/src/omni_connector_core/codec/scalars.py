"""Single values that msgpack has no exact form for."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from omni_connector_core.codec.walk import LIFTERS, Lowerer, Reader, Writer
from omni_connector_core.codec.wire import BIGINT, COMPLEX, SURROGATES, UNSET, Ext
from omni_connector_core.errors import DecodeError

__all__ = ["LOWERERS"]

_COMPLEX = struct.Struct("<dd")


def _lower_int(writer: Writer, value: int, depth: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return Ext(BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _lower_str(writer: Writer, value: str, depth: int) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return Ext(SURROGATES, value.encode("utf-8", "surrogatepass"))
    return value


LOWERERS: dict[type, Lowerer] = {
    # the careful walk only; the first one lets both pass
    int: _lower_int,
    str: _lower_str,
    complex: lambda writer, value, depth: Ext(COMPLEX, _COMPLEX.pack(value.real, value.imag)),
    msgspec.UnsetType: lambda writer, value, depth: Ext(UNSET, b""),
}


def _lift_complex(reader: Reader, data: memoryview) -> complex:
    if data.nbytes != _COMPLEX.size:
        raise DecodeError("a complex number has the wrong length")
    return complex(*_COMPLEX.unpack(data))


LIFTERS[BIGINT] = lambda reader, data: int.from_bytes(data, "little", signed=True)
LIFTERS[COMPLEX] = _lift_complex
LIFTERS[SURROGATES] = lambda reader, data: bytes(data).decode("utf-8", "surrogatepass")
LIFTERS[UNSET] = lambda reader, data: msgspec.UNSET
