"""torch tensors. Imports torch, and is itself imported when the first tensor is met.

A tensor crosses as its values: like `Tensor.detach`, without gradient, graph or hooks, on the CPU, in row-major order.
It decodes to a view of the frame's memory; torch knows no read-only tensors, so from read-only memory to a private one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from omni_connector_core.codec.arrays import array_head, check_bool
from omni_connector_core.codec.dtypes import NUMPY_NAMES, TORCH_DTYPES, TORCH_ITEMSIZES
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
from omni_connector_core.memcpy import array_address, copy
from omni_connector_core.native import native

__all__ = ["GROUPERS", "LIFTERS", "LOWERERS"]

#: code -> dtype, None where this torch is too old for it
_DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in TORCH_DTYPES)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
#: code -> numpy dtype of the same width, the same dtype if there is one: from_numpy is half as dear as frombuffer and view
_AS_NUMPY = tuple(
    np.dtype(name if name in NUMPY_NAMES else f"i{itemsize}")
    for name, itemsize in zip(TORCH_DTYPES, TORCH_ITEMSIZES, strict=True)
)
_IN_NUMPY = tuple(name in NUMPY_NAMES for name in TORCH_DTYPES)
#: itemsize -> dtype as which any bits can be copied; some dtypes have no copy of their own
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _lower_tensor(writer: Writer, value: torch.Tensor, depth: int) -> Any:
    dtype = value.dtype
    code = _CODES.get(dtype)
    if code is None or value.layout is not torch.strided:
        raise UnencodableError(f"a tensor of dtype {dtype} and layout {value.layout}; make it dense and not quantized")
    if not value.is_cpu:
        value = stage(value)
    shape = value.shape
    ndim = len(shape)
    nbytes = value.nbytes
    # Each question gives the GIL away, and taking it back from a busy thread takes 0.2 ms: none that has but one answer.
    if value.is_contiguous() and not (dtype.is_complex and value.is_conj()) and not value.is_neg():
        index = writer.put(_address(value, nbytes), nbytes, value)
    else:
        index = writer.put(functools.partial(_fill, value), nbytes)
    return Ext(TENSOR, ARRAY_HEADS[ndim].pack(code, ndim, index, *shape))


def _address(value: torch.Tensor, nbytes: int) -> int:
    try:
        address = value.data_ptr()
    except RuntimeError as error:
        raise UnencodableError(f"a tensor without memory of its own: {error}") from error
    if nbytes and not address:
        raise UnencodableError("a tensor without memory")
    return address


def stage(value: torch.Tensor) -> torch.Tensor:
    """Bring a tensor of a device to the CPU, from CUDA through pinned memory, which its DMA engines reach directly."""
    if value.is_meta:
        raise UnencodableError("a tensor on the meta device has no values")
    if not value.is_cuda:
        return value.detach().cpu()
    pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return pinned.copy_(value.detach())


def _target(target: np.ndarray[Any, Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(target, dtype=dtype).view(shape)


def _fill(value: torch.Tensor, target: np.ndarray[Any, Any]) -> None:
    value = value.detach()
    if not (value.is_conj() or value.is_neg()):
        value = value.view(_BITS[value.itemsize])
    _target(target, value.dtype, value.shape).copy_(value)


def _group(writer: Writer, values: Sequence[torch.Tensor]) -> Any:
    """Lower many small tensors of one shape and dtype as one; None if they are not.

    For 500 tensors a tenth of the time that 500 descriptors and copies take.
    """
    first = values[0]
    if first.layout is not torch.strided or first.dtype not in _CODES or first.is_meta:
        return None
    if not 0 < first.nbytes <= GROUPED_NBYTES or first.ndim >= MAX_NDIM:
        return None
    count = len(values)
    if list(map(type, values)).count(torch.Tensor) != count:
        return None
    for alike in _ALIKE:
        found = list(map(alike, values))
        if found.count(found[0]) != count:
            return None
    _address(first, first.nbytes)
    if not first.is_cpu:
        staged = stage(torch.stack(tuple(values)))
        index = writer.put(staged.data_ptr(), staged.nbytes, staged)
    else:
        index = writer.put(functools.partial(_stack, values), count * first.nbytes)
    shape = (count, *first.shape)
    return Ext(TENSOR_GROUP, ARRAY_HEADS[len(shape)].pack(_CODES[first.dtype], len(shape), index, *shape))


_ALIKE = tuple(map(attrgetter, ("dtype", "shape", "device", "layout")))


def _stack(values: Sequence[torch.Tensor], target: np.ndarray[Any, Any]) -> None:
    first = values[0]
    with torch.no_grad():
        torch.stack(tuple(values), out=_target(target, first.dtype, (len(values), *first.shape)))


def _lift_tensor(reader: Reader, data: memoryview) -> torch.Tensor:
    code, index, shape, _ = array_head(data)
    dtype = _DTYPES[code] if code < len(_DTYPES) else None
    if dtype is None:
        raise DecodeError(f"torch dtype {code} is not known here")
    offset, nbytes = reader.span(index)
    if math.prod(shape) * TORCH_ITEMSIZES[code] != nbytes:
        raise DecodeError(f"a tensor of shape {shape} and dtype {dtype} in {nbytes} bytes")
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    base = reader.base
    if dtype is torch.bool:
        check_bool(base[offset : offset + nbytes])
    if reader.private or not reader.writeable:
        tensor = torch.empty(shape, dtype=dtype)
        copy(tensor.data_ptr(), array_address(base) + offset, nbytes)
        return tensor
    tensor = torch.from_numpy(np.ndarray(shape, _AS_NUMPY[code], base, offset))
    return tensor if _IN_NUMPY[code] else tensor.view(dtype)


def _lift_group(reader: Reader, data: memoryview) -> list[torch.Tensor]:
    group = _lift_tensor(reader, data)
    if not group.ndim or not group.numel():
        # without elements a short message could ask for any number of tensors
        raise DecodeError("a group of tensors without a dimension or elements")
    return list(group.unbind(0))


def _lift_dtype(reader: Reader, data: memoryview) -> torch.dtype:
    dtype = _DTYPES[data[0]] if data.nbytes == 1 and data[0] < len(_DTYPES) else None
    if dtype is None:
        raise DecodeError("a torch dtype that is not known here")
    return dtype


def _lower_dtype(writer: Writer, value: torch.dtype, depth: int) -> Any:
    if value not in _CODES:
        raise UnencodableError(f"torch dtype {value}")
    return Ext(TORCH_DTYPE, bytes((_CODES[value],)))


#: what DLPack calls a dtype: its code, and bits. Complex tensors are left out: they may be conjugated lazily.
_DLPACK = {
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "bool": (6, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}
if native is not None and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):  # torch 2.10
    native.use_torch(
        torch.Tensor,
        torch.Tensor.__dlpack_c_exchange_api__,
        tuple(
            (dtype if name in _DLPACK else None, *_DLPACK.get(name, (0, 0)))
            for name, dtype in zip(TORCH_DTYPES, _DTYPES, strict=True)
        ),
    )

LOWERERS: dict[type, Lowerer] = {
    torch.Tensor: _lower_tensor,
    torch.Size: lambda writer, value, depth: Ext(TORCH_SIZE, pack(writer.items(list(value), depth))),
    torch.dtype: _lower_dtype,
}
GROUPERS: dict[type, Grouper] = {torch.Tensor: _group}
LIFTERS: dict[int, Lifter] = {
    TENSOR: _lift_tensor,
    TENSOR_GROUP: _lift_group,
    TORCH_SIZE: lambda reader, data: torch.Size(reader.sequence(data)),
    TORCH_DTYPE: _lift_dtype,
}
