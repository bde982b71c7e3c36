"""Decode mutated and random frames in a process that may not allocate much: ``codec_fuzz_worker.py SEED COUNT``."""

from __future__ import annotations

import random
import resource
import struct
import sys
import warnings
import zlib
from typing import Any

import codec_cases as cases
import msgspec
import numpy as np
import torch
from PIL import Image

from omni_connector_core.codec import Codec, TypeCodec, wire
from omni_connector_core.errors import DecodeError
from omni_connector_core.native import native

ALLOWANCE_NBYTES = 256 << 20


class Registered:
    pass


def payloads() -> list[Any]:
    return [
        {"id": "r", "n": [1, 2.5, None, True, -7, 2**70], "t": (1, (2,)), "s": {1, "x"}, "f": frozenset({2}), 3: 4j},
        {(1, "k"): "\ud800", 2**65: b"small", b"key": bytearray(b"x" * 2000), "b": b"y" * 2000, "u": msgspec.UNSET},
        [torch.arange(12).view(3, 4), torch.zeros(5, dtype=torch.bool), torch.ones(2, 2).bfloat16(), torch.zeros(0, 3)],
        [torch.full((3,), float(i)) for i in range(9)],
        (torch.Size([2, 3]), torch.float8_e5m2, np.dtype([("a", "i4"), ("b", "U2", (2,))]), np.dtype(">M8[ns]")),
        [np.arange(6).reshape(2, 3), np.zeros(2, bool), np.zeros(2, [("x", "f4"), ("y", "S3")]), np.array(["ab"])],
        [np.float32(1), np.str_("text"), np.bytes_(b"b"), np.datetime64("2020"), np.bool_(True), np.void(b"xyz")],
        [memoryview(bytearray(24)).cast("i", (2, 3)), memoryview(b"plain"), memoryview(b"")],
        [cases.image("RGB"), cases.image("P"), cases.image("1"), cases.image("I;16")],
        [cases.Plain(1, cases.Frozen(1.5)), cases.Struct(1, cases.ChangingStruct(2)), cases.DictStruct(3)],
        [cases.Color.RED, cases.Rights(3), cases.Level.LOW, cases.Point(1, cases.Typed("a", cases.Point(1, 2)))],
        [Registered()],
        list(range(200)),
        *[_of_the_short_way()] * 4,
    ]


def _of_the_short_way() -> Any:
    """What is never left to Python by the compiled codec."""
    tensors = {
        "hidden": torch.arange(12.0).view(3, 4),
        "mask": torch.tensor([True, False]),
        7: torch.ones(2).bfloat16(),
    }
    arrays = [np.arange(6).reshape(2, 3), np.zeros(2, bool), np.ones(1, "f2")]
    return {**tensors, "arrays": arrays, "t": (1, (-2, "x" * 40)), "b": [b"y" * 2000, b"small", None, 1e9, 2**64 - 1]}


def resign(frame: bytearray) -> None:
    """Make the head's checksum right again, so that the mutation is met behind it."""
    if len(frame) < 64:
        return
    count, meta_nbytes = struct.unpack_from("<II", frame, 12)
    frame[4:8] = zlib.crc32(bytes(frame[8 : 64 + 8 * count + meta_nbytes])).to_bytes(4, "little")


def rebuilt(frame: bytearray, meta: bytes) -> bytearray:
    """The frame with another meta, everything else consistent."""
    count, meta_nbytes, total = struct.unpack_from("<IIQ", frame, 12)
    start = 64 + 8 * count
    old_head, new_head = ((start + n + 63) & -64 for n in (meta_nbytes, len(meta)))
    made = bytearray(frame[:start]) + meta + bytes(new_head - start - len(meta)) + frame[old_head:]
    struct.pack_into("<IIQ", made, 12, count, len(meta), total - old_head + new_head)
    return made


def mutate(numbers: random.Random, frame: bytearray) -> bytearray:
    count, meta_nbytes = struct.unpack_from("<II", frame, 12)
    start = 64 + 8 * count
    kind = numbers.randrange(8)
    meta = bytearray(frame[start : start + meta_nbytes])
    interesting = (0, 1, 0x7F, 0x80, 0xFF, 0xC1, 0xC7, 0xC9, 0xDD, 0xDF, 0xDB, 0xC6, numbers.randrange(256))
    if kind == 0:
        frame[numbers.randrange(len(frame))] ^= 1 << numbers.randrange(8)
    elif kind == 1:
        frame = frame[: numbers.randrange(len(frame))]
    elif kind == 2:
        frame[8 + numbers.randrange(max(start - 8, 1))] = numbers.choice(interesting)
    elif kind == 3 and meta:
        for _ in range(numbers.randrange(1, 4)):
            meta[numbers.randrange(len(meta))] = numbers.choice(interesting)
        frame = rebuilt(frame, bytes(meta))
    elif kind == 4 and meta:
        at = numbers.randrange(len(meta))
        meta[at : at + numbers.randrange(9)] = numbers.randbytes(numbers.randrange(9))
        frame = rebuilt(frame, bytes(meta))
    elif kind == 5 and len(meta) > 8:
        at = numbers.randrange(len(meta) - 8)
        width = numbers.choice((4, 8))
        meta[at : at + width] = numbers.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1)).to_bytes(width, "little")
        frame = rebuilt(frame, bytes(meta))
    elif kind == 6:
        codes = [value for name, value in vars(wire).items() if name.isupper() and type(value) is int and value < 64]
        data = numbers.choice((numbers.randbytes(numbers.randrange(40)), bytes(meta), msgspec.msgpack.encode([0, {}])))
        frame = rebuilt(frame, wire.pack(wire.Ext(numbers.choice(codes), data)))
    else:
        frame = rebuilt(frame, numbers.randbytes(numbers.randrange(60)))
    if numbers.random() < 0.9:
        resign(frame)
    return frame


def touch(value: Any) -> None:
    """Read every byte of what was decoded, so that a view out of bounds is met."""
    if isinstance(value, torch.Tensor):
        cases.tensor_bytes(value)
    elif isinstance(value, (np.ndarray, np.generic, memoryview, Image.Image)):
        value.tobytes()
    elif isinstance(value, dict):
        touch(list(value.values()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            touch(item)


def main(seed: int, count: int) -> None:
    warnings.simplefilter("ignore")
    numbers = random.Random(seed)
    codec = Codec([TypeCodec(Registered, "registered", lambda value: {}, lambda state: Registered())])
    frames = [bytearray(cases.write(codec, payload)) for payload in payloads()]
    for frame in frames:
        touch(codec.decode(frame))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + ALLOWANCE_NBYTES, -1))
    decoded = refused = short = 0
    for _ in range(count):
        if numbers.random() < 0.05:
            memory = bytearray(numbers.randbytes(numbers.randrange(300)))
        else:
            memory = mutate(numbers, bytearray(numbers.choice(frames)))
        if native is not None and (payload := native.decode(memory)) is not native.PASS:
            short += 1
            assert cases.same(payload, codec.decode(memory, copy=True))  # which is not asked of the compiled one
        try:
            touch(codec.decode(memory if numbers.random() < 0.8 else bytes(memory), copy=numbers.random() < 0.3))
        except DecodeError:
            refused += 1
        else:
            decoded += 1
    print(decoded, refused, short)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
