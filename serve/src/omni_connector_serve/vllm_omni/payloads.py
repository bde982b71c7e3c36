# SPDX-License-Identifier: Apache-2.0
"""What the engine passes to `put`, and what it expects from `get`."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np
import torch

__all__ = ["RawBuffer", "delivered", "nbytes_of", "wire_payload"]


class RawBuffer:
    """A KV cache in transport memory, in the form in which the engine takes one: it copies out, then releases.

    Attributes
    ----------
    tensor
        The bytes, uint8, shape ``(nbytes,)``; a view that keeps the transport's memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def release(self) -> None:
        """Let go of the transport's memory."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


def wire_payload(data: Any) -> Any:
    """Make a payload of what the engine passes to `put`: structs become dicts, bytes a uint8 array; nothing is copied."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return np.frombuffer(data, dtype=np.uint8)
    return _without_structs(data)


def _without_structs(value: Any) -> Any:
    """Replace structs by dicts of the fields that differ from their default, as the engine's own serialisation does.

    A call for each container, none for what is in it: the thread that puts is a cold one.
    """
    if isinstance(value, msgspec.Struct):
        plain = {}
        for name, default in _fields(type(value)):
            inner = getattr(value, name)
            if inner is not default:
                plain[name] = _without_structs(inner) if isinstance(inner, _CONTAINERS) else inner
        return plain
    if type(value) is dict:
        plain = {}
        for name, inner in value.items():
            plain[name] = _without_structs(inner) if isinstance(inner, _CONTAINERS) else inner
        return plain
    if type(value) is list and not _PLAIN.issuperset(map(type, value)):
        return [_without_structs(inner) for inner in value]
    return value


_CONTAINERS = (msgspec.Struct, dict, list)
_PLAIN = frozenset({int, float, str, bool, torch.Tensor})


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    """Names and defaults; msgspec evaluates every annotation anew when it is asked, a millisecond for each struct."""
    return tuple((field.name, field.default) for field in msgspec.structs.fields(struct))


def delivered(payload: Any) -> tuple[Any, int]:
    """Make what `get` returns of a payload."""
    nbytes = nbytes_of(payload)
    if isinstance(payload, np.ndarray):
        payload = torch.from_numpy(payload)
    return (RawBuffer(payload) if isinstance(payload, torch.Tensor) else payload), nbytes


def nbytes_of(payload: Any) -> int:
    """Bytes in a payload's tensors, arrays and byte strings; the engine logs it."""
    nbytes, values = 0, [payload]
    for value in values:
        if isinstance(value, (torch.Tensor, np.ndarray, memoryview)):
            nbytes += value.nbytes
        elif isinstance(value, (bytes, bytearray)):
            nbytes += len(value)
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value
    return nbytes
