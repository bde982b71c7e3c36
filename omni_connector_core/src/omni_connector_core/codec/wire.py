"""What is in the meta: msgpack, with an Ext for everything that msgpack would lose.

An Ext's code is the kind of the value. Marker dicts were not used: with them a user's own dict can turn into something
else. Codes are part of the format: append, never renumber.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

__all__ = ["Ext", "pack", "unpack"]

Ext = msgspec.msgpack.Ext
pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.decode

# containers: a nested msgpack list each
TUPLE: Final = 1
SET: Final = 2
FROZENSET: Final = 3
PAIRS: Final = 4  # a dict whose keys msgpack cannot hold: [key, value, key, value, ...]
# scalars
BIGINT: Final = 8  # signed little-endian
COMPLEX: Final = 9  # two doubles
SURROGATES: Final = 10  # a str with lone surrogates, as UTF-8 that passes them
UNSET: Final = 11  # msgspec.UNSET
# bytes-like; a buffer number
BYTES: Final = 16
BYTEARRAY: Final = 17
SMALL_BYTEARRAY: Final = 18  # the bytes themselves
MEMORYVIEW: Final = 19
# numpy
NDARRAY: Final = 24
NUMPY_SCALAR: Final = 25
NUMPY_TEXT: Final = 26
NUMPY_DTYPE: Final = 27
# torch
TENSOR: Final = 32
TENSOR_GROUP: Final = 33  # a list of tensors of one shape and dtype, in one buffer
TORCH_SIZE: Final = 34
TORCH_DTYPE: Final = 35
# others
IMAGE: Final = 40
# instances of named types: [type name, state]
REGISTERED: Final = 48
DATACLASS: Final = 49
STRUCT: Final = 50
ENUM: Final = 51
NAMEDTUPLE: Final = 52

#: containers and objects inside each other; a cycle runs into it too
MAX_DEPTH: Final = 100
#: bytes of at most this length lie in the meta, where a buffer of their own would cost more than the second copy
INLINE_NBYTES: Final = 1024
#: tensors above this are not grouped: gathering each from where it lies costs less than the copy of a group
GROUPED_NBYTES: Final = 64 << 10
MAX_NDIM: Final = 64

INDEX: Final = struct.Struct("<I")
#: of an array with ndim dimensions: dtype code, ndim, buffer number, shape
ARRAY_HEADS: Final = tuple(struct.Struct(f"<BBI{ndim}Q") for ndim in range(MAX_NDIM + 1))
