"""What a tensor is in a process without torch: its bytes, under a name, which encode to the same frame again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_connector_core.codec.arrays import array_head
from omni_connector_core.codec.dtypes import TORCH_DTYPES, TORCH_ITEMSIZES
from omni_connector_core.codec.walk import Grouper, Lifter, Lowerer, Reader, UnencodableError, Writer
from omni_connector_core.codec.wire import (
    ARRAY_HEADS,
    GROUPED_NBYTES,
    MAX_NDIM,
    TENSOR,
    TENSOR_GROUP,
    TORCH_DTYPE,
    TORCH_SIZE,
    Ext,
    pack,
)
from omni_connector_core.errors import DecodeError
from omni_connector_core.memcpy import array_address

__all__ = ["GROUPERS", "LIFTERS", "LOWERERS", "RawDtype", "RawSize", "RawTensor"]


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor decoded without torch.

    Attributes
    ----------
    dtype
        Name of the torch dtype, e.g. ``"bfloat16"``.
    shape
        Length of each dimension.
    data : ndarray of uint8, flat
        The elements' bytes in row-major order; a view of the frame's memory unless it was decoded with ``copy=True``.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class RawDtype:
    """A `torch.dtype` decoded without torch, by its name."""

    name: str


class RawSize(tuple[int, ...]):
    """A `torch.Size` decoded without torch."""

    __slots__ = ()


def _code(name: str) -> int:
    if name not in TORCH_DTYPES:
        raise UnencodableError(f"torch dtype {name!r}")
    return TORCH_DTYPES.index(name)


def _lower_tensor(writer: Writer, value: RawTensor, depth: int) -> Any:
    index = writer.put(array_address(value.data), value.data.nbytes, value.data)
    ndim = len(value.shape)
    return Ext(TENSOR, ARRAY_HEADS[ndim].pack(_code(value.dtype), ndim, index, *value.shape))


def _group(writer: Writer, values: Sequence[RawTensor]) -> Any:
    """Group what torch would group, so that the frame is the same."""
    first = values[0]
    nbytes = first.data.nbytes
    if not 0 < nbytes <= GROUPED_NBYTES or len(first.shape) >= MAX_NDIM:
        return None
    for value in values:
        if type(value) is not RawTensor or (value.dtype, value.shape) != (first.dtype, first.shape):
            return None

    def fill(target: np.ndarray[Any, Any]) -> None:
        for row, value in zip(target.reshape(len(values), nbytes), values, strict=True):
            row[:] = value.data

    shape = (len(values), *first.shape)
    index = writer.put(fill, len(values) * nbytes)
    return Ext(TENSOR_GROUP, ARRAY_HEADS[len(shape)].pack(_code(first.dtype), len(shape), index, *shape))


def _lift_tensor(reader: Reader, data: memoryview) -> RawTensor:
    code, index, shape, _ = array_head(data)
    if code >= len(TORCH_DTYPES):
        raise DecodeError(f"torch dtype {code} is not known")
    source = reader.buffer(index)
    if math.prod(shape) * TORCH_ITEMSIZES[code] != source.nbytes:
        raise DecodeError(f"a tensor of shape {shape} and dtype {TORCH_DTYPES[code]} in {source.nbytes} bytes")
    return RawTensor(TORCH_DTYPES[code], shape, source.copy() if reader.private else source)


def _lift_group(reader: Reader, data: memoryview) -> list[RawTensor]:
    group = _lift_tensor(reader, data)
    if not group.shape or not group.data.nbytes:
        raise DecodeError("a group of tensors without a dimension or elements")
    pieces = group.data.reshape(group.shape[0], -1)
    return [RawTensor(group.dtype, group.shape[1:], piece) for piece in pieces]


def _lift_dtype(reader: Reader, data: memoryview) -> RawDtype:
    if data.nbytes != 1 or data[0] >= len(TORCH_DTYPES):
        raise DecodeError("a torch dtype that is not known")
    return RawDtype(TORCH_DTYPES[data[0]])


LOWERERS: dict[type, Lowerer] = {
    RawTensor: _lower_tensor,
    RawSize: lambda writer, value, depth: Ext(TORCH_SIZE, pack(list(value))),
    RawDtype: lambda writer, value, depth: Ext(TORCH_DTYPE, bytes((_code(value.name),))),
}
GROUPERS: dict[type, Grouper] = {RawTensor: _group}
LIFTERS: dict[int, Lifter] = {
    TENSOR: _lift_tensor,
    TENSOR_GROUP: _lift_group,
    TORCH_SIZE: lambda reader, data: RawSize(reader.sequence(data)),
    TORCH_DTYPE: _lift_dtype,
}
