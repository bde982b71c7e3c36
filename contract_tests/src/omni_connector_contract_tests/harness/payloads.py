"""Payloads by recipe, and the oracle: a hash of what a payload is, which passes through no backend and no codec.

A recipe is small and crosses to a peer in its place; the peer builds the payload there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Bulk", "Recipe", "build", "fingerprint", "has_torch"]


def has_torch() -> bool:
    """Whether torch is installed; it is not imported to find out."""
    return importlib.util.find_spec("torch") is not None


class Recipe:
    """Something that builds a payload, always the same one."""

    def build(self) -> Any:
        """Build the payload."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bulk(Recipe):
    """Random bytes that depend on `seed`: no two seeds and no two positions look alike.

    Parameters
    ----------
    nbytes
        Size of the raw data; a multiple of 8 for a tensor.
    seed
        Another seed, another payload.
    kind
        ``array``, ``bytes``, ``tensor`` or ``dict`` (of a name and an array).
    """

    nbytes: int
    seed: int = 0
    kind: str = "array"

    def build(self) -> Any:
        """Build it."""
        raw = np.random.Generator(np.random.SFC64(self.seed)).integers(0, 256, self.nbytes, dtype=np.uint8)
        if self.kind == "array":
            return raw
        if self.kind == "bytes":
            return raw.tobytes()
        if self.kind == "dict":
            return {"name": f"bulk {self.seed}", "data": raw}
        import torch

        torch.set_num_threads(1)  # its pool of threads would look like a leak
        return torch.from_numpy(raw.view(np.int64))


def build(payload: Any) -> Any:
    """Build a recipe; anything else is already a payload."""
    return payload.build() if isinstance(payload, Recipe) else payload


def fingerprint(payload: Any) -> str:
    """Hash a payload (or a recipe's), its exact types included, down to the last bit."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest.update, build(payload))
    return digest.hexdigest()


def _feed(update: Callable[[Any], None], value: Any) -> None:
    kind = type(value)
    update(f"<{kind.__module__}.{kind.__qualname__}>".encode())
    torch = sys.modules.get("torch")
    if isinstance(value, np.ndarray):
        update(f"{value.dtype.str}{value.shape}".encode())
        update(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif torch is not None and isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, bytes | bytearray | memoryview):
        update(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _feed(update, key)
            _feed(update, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(update, item)
    elif isinstance(value, set | frozenset):
        for item in sorted(fingerprint(item) for item in value):
            update(item.encode())
    elif isinstance(value, float):
        update(struct.pack("<d", value))
    elif isinstance(value, str):
        update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, int) or value is None:
        update(repr(value).encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            _feed(update, getattr(value, item.name))
    else:
        raise TypeError(f"no fingerprint for {kind}")
    update(b"</>")
