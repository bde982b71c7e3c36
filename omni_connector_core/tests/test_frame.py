"""The frame by itself: writing, gathering, layout, scattering."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
from typing import Any

import codec_cases as cases
import numpy as np
import pytest
import torch

from omni_connector_core.codec import Codec
from omni_connector_core.errors import BufferMismatchError, DecodeError
from omni_connector_core.frame import Frame, FrameLayout, scatter, scatter_plan
from omni_connector_core.native import native

PAYLOAD = [
    np.arange(100, dtype=np.uint8),
    b"x" * 3000,
    np.zeros(0),
    torch.arange(12).view(3, 4).T,
    bytearray(b"y" * 1500),
]


def written(frame: Frame) -> bytearray:
    memory = bytearray(frame.nbytes)
    frame.write_into(memory)
    return memory


def raw_stream(frame: Frame) -> bytes:
    return b"".join(frame.buffers)


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda n: (ctypes.c_char * n)(),
        lambda n: (ctypes.c_ubyte * n)(),
        lambda n: memoryview(bytearray(n)),
        lambda n: np.zeros(n, np.uint8),
        lambda n: np.zeros((n // 64, 16), np.float32),
        lambda n: mmap.mmap(-1, n),
        lambda n: bytearray(n + 1000),
    ],
)
def test_any_writable_memory(make: Any) -> None:
    frame = Codec().encode(PAYLOAD)
    memory = make(frame.nbytes)
    frame.write_into(memory)
    assert bytes(memory)[: frame.nbytes] == bytes(written(frame))
    assert cases.same(Codec().decode(memory, copy=True), PAYLOAD)


def test_memory_that_cannot_be_written() -> None:
    frame = Codec().encode(PAYLOAD)
    with pytest.raises(BufferMismatchError, match=str(frame.nbytes)):
        frame.write_into(bytearray(frame.nbytes - 1))
    with pytest.raises(TypeError):
        frame.write_into(bytes(frame.nbytes))
    with pytest.raises((TypeError, BufferError, ValueError)):
        frame.write_into(np.zeros(2 * frame.nbytes, np.uint8)[::2])


def test_what_lies_behind_the_frame_stays() -> None:
    frame = Codec().encode(PAYLOAD)
    memory = bytearray(b"\xee" * (frame.nbytes + 100))
    frame.write_into(memory)
    assert memory[frame.nbytes :] == b"\xee" * 100


def test_alignment_and_sums_of_lengths() -> None:
    frame = Codec().encode(PAYLOAD)
    layout = FrameLayout.parse_head(frame.head)
    assert FrameLayout.parse_prefix(frame.head[:64]) == (len(frame.head), frame.nbytes)
    assert (layout.head_nbytes, layout.total_nbytes) == (len(frame.head), frame.nbytes)
    assert layout.lengths == [100, 3000, 0, 96, 1500]
    assert all(offset % 64 == 0 for offset in (*layout.offsets, frame.nbytes))
    memory = written(frame)
    found = [bytes(memory[at : at + n]) for at, n in zip(layout.offsets, layout.lengths, strict=True)]
    assert found == [bytes(buffer) for buffer in frame.buffers]


def test_segments_make_the_same_frame() -> None:
    frame = Codec().encode(PAYLOAD)
    memory = bytearray(frame.nbytes)
    end = 0
    for offset, address, nbytes in frame.segments():
        assert offset >= end
        end = offset + nbytes
        memory[offset:end] = ctypes.string_at(address, nbytes)
    assert cases.same(Codec().decode(memory), PAYLOAD)
    assert frame.segments() == frame.segments()
    assert written(frame) == memory


def test_buffers_are_read_only_and_keep_their_memory() -> None:
    buffers = Codec().encode([np.full(3000, 7, np.uint8)]).buffers
    assert buffers[0].readonly
    assert bytes(buffers[0]) == b"\7" * 3000


def test_a_frame_without_buffers() -> None:
    frame = Codec().encode({"a": 1})
    layout = FrameLayout.parse_head(frame.head)
    assert (layout.offsets, layout.lengths, layout.total_nbytes) == ([], [], len(frame.head))
    assert scatter(written(frame), []) == 0


@pytest.mark.parametrize("pieces", [1, 2, 7, 3000])
def test_scatter(pieces: int) -> None:
    frame = Codec().encode(PAYLOAD)
    stream = raw_stream(frame)
    numbers = random.Random(pieces)
    cuts = sorted(numbers.randrange(len(stream) + 1) for _ in range(pieces - 1))
    targets = [bytearray(b - a) for a, b in itertools.pairwise([0, *cuts, len(stream)])]
    assert scatter(written(frame), targets) == len(stream)
    assert b"".join(targets) == stream


def test_scatter_into_tensors_and_arrays() -> None:
    payload = [torch.arange(6.0), torch.arange(4)]
    targets = [torch.zeros(2, 3), np.zeros(4, np.int64)]
    scatter(memoryview(written(Codec().encode(payload))), targets)
    assert torch.equal(targets[0].view(-1), payload[0])
    assert targets[1].tolist() == [0, 1, 2, 3]


def test_scatter_refuses_what_does_not_fit() -> None:
    memory = written(Codec().encode([np.arange(100, dtype=np.uint8)]))
    target = bytearray(101)
    for wrong in ([target], [bytearray(99)], [], [bytearray(50), bytearray(51)]):
        with pytest.raises(BufferMismatchError, match="100"):
            scatter(memory, wrong)
    assert target == bytearray(101)
    with pytest.raises(TypeError):
        scatter(memory, [bytes(100)])
    with pytest.raises(ValueError, match="contiguous"):
        scatter(memory, [torch.zeros(10, 10, dtype=torch.uint8).T])


def test_scatter_checks_the_frame() -> None:
    memory = written(Codec(checksum="crc32").encode([np.arange(100, dtype=np.uint8)]))
    for broken in (memory[:-64], memory[:10], b"x" * 200):
        with pytest.raises(DecodeError):
            scatter(broken, [bytearray(100)])
    memory[-100] ^= 1
    with pytest.raises(DecodeError, match="corrupt"):
        scatter(memory, [bytearray(100)])


def test_scatter_plan_for_an_engine() -> None:
    frame = Codec().encode([np.arange(100, dtype=np.uint8), np.zeros(0), np.arange(50, dtype=np.uint8)])
    layout = FrameLayout.parse_head(frame.head)
    first, _, third = layout.offsets
    assert scatter_plan(layout, [60, 0, 60, 30]) == [
        (first, 0, 0, 60),
        (first + 60, 2, 0, 40),
        (third, 2, 40, 20),
        (third + 20, 3, 0, 30),
    ]


def test_thousands_of_buffers() -> None:
    payload = [np.full(17, i % 256, np.uint8) for i in range(4000)]
    frame = Codec().encode(payload)
    memory = written(frame)
    assert cases.same(Codec().decode(memory), payload)
    target = [bytearray(17 * 1000) for _ in range(4)]
    scatter(memory, target)
    assert b"".join(target) == raw_stream(frame)


def test_the_way_is_the_one_that_was_chosen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native is not None
    taken = []
    monkeypatch.setattr(native, "decode", lambda memory: taken.append(memory) or native.PASS)
    frame = Codec().encode(1)
    memory = bytearray(frame.nbytes)
    frame.write_into(memory)
    assert Codec().decode(memory) == 1
    assert bool(taken) == (way == "compiled")
