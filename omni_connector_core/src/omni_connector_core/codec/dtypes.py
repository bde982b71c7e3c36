"""Names of torch's dtypes by their code on the wire, so that a process without torch can read them too."""

from __future__ import annotations

from typing import Final

__all__ = ["NUMPY_NAMES", "TORCH_DTYPES", "TORCH_ITEMSIZES"]

#: the index is the code: append, never renumber. Quantized dtypes are not here: their scale is not in the bytes.
TORCH_DTYPES: Final = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
)

_WIDER: Final = {
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

#: bytes of one element, by code
TORCH_ITEMSIZES: Final = tuple(_WIDER.get(name, 1) for name in TORCH_DTYPES)

#: those that numpy has under the same name
NUMPY_NAMES: Final = frozenset((*TORCH_DTYPES[:9], "float16", "float32", "float64", "complex64", "complex128"))
