"""The bytes of format version 1. If this fails, raise the version: processes of two releases may meet."""

from __future__ import annotations

import zlib
from typing import Any

import codec_cases as cases
import numpy as np
import pytest
import torch
from PIL import Image

from omni_connector_core.codec import Codec
from omni_connector_core.frame import FORMAT_VERSION

#: payload, and its frame behind the header: lengths, meta, buffers
GOLDEN: list[tuple[Any, str]] = [
    ({"a": 1, "b": [None, True, -1.5, "é"], 2: b"bytes"}, "83a16101a16294c0c3cbbff8000000000000a2c3a902c4056279746573"),
    ((1, (2,), {3}, frozenset({4})), "c70e019401d5019102d5029103d5039104"),
    (
        [2**64, -(2**80), 1 - 2j, "\ud800"],
        "94c70908000000000000000001c70b0800000000000000000000ffd809000000000000f03f00000000000000c0c7030aeda080",
    ),
    (
        [bytearray(b"ab"), memoryview(b"cd")],
        "020000000000000092d5126162c706139400a142c0c300000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000006364",
    ),
    (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16),
        "0800000000000000c716200a0200000000020000000000000002000000000000000000000000000000000000000000000000"
        "0000000000000000000000000000803f004040408040",
    ),
    (
        [torch.full((2,), i, dtype=torch.int16) for i in range(8)],
        "2000000000000000c71621030200000000080000000000000002000000000000000000000000000000000000000000000000"
        "000000000000000000000000000000000000010001000200020003000300040004000500050006000600070007",
    ),
    ([torch.Size([2, 3]), torch.float8_e4m3fn], "92c70322920203d42310"),
    (
        np.arange(3, dtype="<i4"),
        "0c00000000000000c70e18060100000000030000000000000000000000000000000000000000000000000000000000000000"
        "0000000000000000000000000000000000000100000002",
    ),
    (
        np.zeros(1, [("a", ">u2"), ("b", "<U1", (2,))]),
        "0a00000000000000c75e18000100000000010000000000000087a56e616d657392a161a162a7666f726d61747392a33e7532"
        "92a33c55319102a76f666673657473920002a67469746c657392c0c0a86974656d73697a650aa7616c69676e6564c2a67265"
        "636f7264c2",
    ),
    (
        [np.float32(1), np.str_("s"), np.bytes_(b"b"), np.dtype("<M8[ns]")],
        "94c70b1992a33c6634c4040000803fd41a73c7051992c0c40162d71ba73c4d385b6e735d",
    ),
    (
        cases.Plain(1, cases.Frozen(2.0, [])),
        "c73f3192b1636f6465635f63617365733a506c61696e82a16101a162c7233192b2636f6465635f63617365733a46726f7a65"
        "6e82a178cb4000000000000000a17990",
    ),
    (
        [cases.Struct(1, None), cases.Color.RED, cases.Rights.READ, cases.Point(1, 2)],
        "94c71b3292b2636f6465635f63617365733a53747275637482a16101a162c0c7173392b1636f6465635f63617365733a436f"
        "6c6f72a3524544c7153392b2636f6465635f63617365733a52696768747301c7163492b1636f6465635f63617365733a506f"
        "696e74920102",
    ),
    (Image.new("P", (2, 2)), "0400000000000000c70e289600a150020292a3524742c40080"),
]

#: the frame of the str "frame", whole
WHOLE = (
    "4f4d4e46816dbd3e010000000000000006000000800000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000"
    "a56672616d650000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000"
)


@pytest.mark.parametrize(("payload", "golden"), GOLDEN, ids=lambda value: repr(value)[:30])
def test_the_bytes_behind_the_header(payload: Any, golden: str) -> None:
    memory = bytes(cases.write(Codec(), payload))
    assert memory[64:].rstrip(b"\0").hex() == golden
    assert cases.same(Codec().decode(memory, copy=True), payload)


def test_the_whole_frame() -> None:
    assert FORMAT_VERSION == 1
    assert bytes(cases.write(Codec(), "frame")).hex() == WHOLE
    assert Codec().decode(bytes.fromhex(WHOLE)) == "frame"


def test_the_header_by_its_description() -> None:
    """Read it as its documentation says, independently of the code."""
    memory = bytes(cases.write(Codec(checksum="crc32"), [torch.arange(5), b"z" * 2000]))
    number = lambda at, width: int.from_bytes(memory[at : at + width], "little")  # noqa: E731
    assert memory[:4] == b"OMNF"
    assert (number(8, 2), memory[10], memory[11]) == (1, 0, 1)
    count, meta_nbytes, total = number(12, 4), number(16, 4), number(20, 8)
    assert (count, total) == (2, len(memory))
    assert [number(64 + 8 * i, 8) for i in range(count)] == [40, 2000]
    assert number(4, 4) == zlib.crc32(memory[8 : 64 + 8 * count + meta_nbytes])
    assert number(28, 8) == zlib.crc32(b"z" * 2000, zlib.crc32(np.arange(5).tobytes()))
    assert memory[36:64] == bytes(28)
    first = (64 + 8 * count + meta_nbytes + 63) // 64 * 64
    assert memory[first : first + 40] == np.arange(5).tobytes()
    assert memory[first + 64 : first + 2064] == b"z" * 2000
