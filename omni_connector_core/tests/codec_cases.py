"""Payloads for the codec's tests, and a comparison that takes nothing for equal that is not the same."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import math
import struct
from collections import namedtuple
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from PIL import Image

from omni_connector_core.codec import Codec, RawTensor

T = TypeVar("T")


@dataclasses.dataclass
class Plain:
    a: int
    b: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: float
    y: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Guarded:
    """Would count, and change, if it were made by calling it."""

    value: int
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1
        self.value += 1
        self.beside = "not a field"


@dataclasses.dataclass
class Child(Plain, Generic[T]):
    c: T | None = None


@dataclasses.dataclass
class WithClassDefault:
    x: int
    never_set: int = dataclasses.field(default=7, init=False)


class Struct(msgspec.Struct):
    a: int
    b: Any = None


class FrozenStruct(msgspec.Struct, frozen=True, kw_only=True, tag="frozen"):
    a: int
    b: Any


class ChangingStruct(msgspec.Struct):
    a: int

    def __post_init__(self) -> None:
        self.a += 1


class DictStruct(msgspec.Struct, dict=True):
    a: int


class Color(enum.Enum):
    RED = "red"
    GREEN = (1, 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    name: str
    at: Point


class Outer:
    @dataclasses.dataclass
    class Inner:
        x: int


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def same(a: Any, b: Any) -> bool:
    """Whether two payloads have the same types, the same bits and the same order, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and tensor_bytes(a) == tensor_bytes(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, RawTensor):
        return (a.dtype, a.shape, a.data.tobytes()) == (b.dtype, b.shape, b.data.tobytes())
    if type(a) is float:
        return bits(a) == bits(b)
    if type(a) is complex:
        return bits(a.real) == bits(b.real) and bits(a.imag) == bits(b.imag)
    if isinstance(a, memoryview):
        return (a.format, a.shape, a.readonly, a.tobytes()) == (b.format, b.shape, b.readonly, b.tobytes())
    if isinstance(a, dict):
        return same(list(a.keys()), list(b.keys())) and same(list(a.values()), list(b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if dataclasses.is_dataclass(a):
        return same(state_of(a), state_of(b))
    if isinstance(a, msgspec.Struct):
        return all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, Image.Image):
        return bool(a == b)
    return bool(a == b)


def state_of(value: Any) -> dict[str, Any]:
    state = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return state | getattr(value, "__dict__", {})


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    # as integers, because some dtypes have no copy of their own
    alike = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(alike[tensor.itemsize]).contiguous().numpy().tobytes()


def write(codec: Codec, payload: Any) -> Any:
    """Encode into a ctypes array, as a transport does."""
    frame = codec.encode(payload)
    memory = (ctypes.c_char * frame.nbytes)()
    frame.write_into(memory)
    return memory


def round_trip(payload: Any, codec: Codec | None = None, *, copy: bool = False) -> Any:
    codec = codec or Codec()
    return codec.decode(write(codec, payload), copy=copy)


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of any dtype, of random bits (a bool of random bools)."""
    numbers = np.random.default_rng(seed)
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.from_numpy(numbers.integers(0, 2, count).astype(bool)).view(shape)
    raw = numbers.integers(0, 256, max(count * dtype.itemsize, dtype.itemsize), dtype=np.uint8)
    return torch.frombuffer(bytearray(raw.tobytes()), dtype=dtype)[:count].view(shape)


def image(mode: str, size: tuple[int, int] = (13, 7)) -> Image.Image:
    """An image of a mode, of random pixels."""
    empty = Image.new(mode, size)
    raw = np.random.default_rng(1).integers(0, 256, len(empty.tobytes()), dtype=np.uint8).tobytes()
    made = Image.frombytes(mode, size, raw)
    if mode in ("P", "PA"):
        made.putpalette(bytes(range(48)))
    return made
