"""Who keeps the frame's memory alive, how often bytes are copied, and what several threads see."""

from __future__ import annotations

import collections
import ctypes
import gc
import mmap
import threading
import weakref
from typing import Any

import codec_cases as cases
import numpy as np
import pytest
import torch

from omni_connector_core.codec import Codec


def leased(payload: Any, codec: Codec | None = None) -> tuple[Any, collections.deque[int]]:
    """Memory with the frame in it, and where it is noted that the memory was let go."""
    memory = cases.write(codec or Codec(), payload)
    released: collections.deque[int] = collections.deque()
    weakref.finalize(memory, released.append, 1)
    return memory, released


VIEWS = {
    "tensor": torch.arange(100),
    "matrix": torch.ones(3, 4),
    "bfloat16": torch.ones(3, 4).bfloat16(),
    "scalar tensor": torch.tensor(1.5),
    "array": np.arange(9.0),
    "dates": np.zeros(3, "M8[s]"),
    "memoryview": memoryview(b"z" * 2000),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_keeps_the_memory_until_its_last_slice_is_gone(name: str) -> None:
    memory, released = leased({"v": VIEWS[name], "b": b"x" * 5000})
    payload = Codec().decode(memory)
    del memory
    view = payload["v"]
    part = view[1:] if name != "scalar tensor" else view.view(1)
    expected = cases.tensor_bytes(part) if isinstance(part, torch.Tensor) else part.tobytes()
    del payload, view
    gc.collect()
    assert not released
    found = cases.tensor_bytes(part) if isinstance(part, torch.Tensor) else part.tobytes()
    assert found == expected
    del part
    # without a collection: nothing here is in a cycle
    assert list(released) == [1]


def test_each_of_a_group_keeps_the_memory() -> None:
    memory, released = leased([torch.full((4,), float(i)) for i in range(10)])
    last = Codec().decode(memory)[7]
    del memory
    assert not released
    assert last.tolist() == [7.0] * 4
    del last
    assert list(released) == [1]


@pytest.mark.parametrize(
    "payload",
    [
        {"b": b"x" * 5000, "l": [1, (2,)], "ba": bytearray(5000), "s": "s"},
        [cases.Plain(1, cases.Struct(2)), cases.Color.RED],
        [cases.image("RGB"), np.float32(1), np.zeros(1, [("a", "i4")])[0], np.dtype("f4"), torch.float32],
        [torch.zeros(0, 3), np.zeros((0, 2)), memoryview(b"")],
        None,
    ],
    ids=str,
)
def test_a_payload_without_views_lets_the_memory_go(payload: Any) -> None:
    memory, released = leased(payload)
    gc.collect()
    gc.disable()
    try:
        made = Codec().decode(memory)
        del memory
        assert list(released) == [1]
    finally:
        gc.enable()
    assert cases.same(made, payload)


@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_lets_the_memory_go(name: str) -> None:
    memory, released = leased([VIEWS[name]] * 10)
    made = Codec().decode(memory, copy=True)
    del memory
    assert list(released) == [1]
    assert cases.same(made[3], VIEWS[name])


def test_an_error_lets_the_memory_go() -> None:
    memory, released = leased([torch.ones(3), cases.Plain(1)])
    with pytest.raises(ValueError, match="Plain") as caught:
        Codec(resolve_imported=False).decode(memory)
    del memory, caught
    gc.collect()
    assert list(released) == [1]


def test_the_last_view_may_be_dropped_in_any_thread() -> None:
    memory, released = leased(torch.arange(1000))
    views = [Codec().decode(memory)]
    del memory
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert list(released) == [1]


def test_a_mapping_cannot_be_closed_under_a_view() -> None:
    for payload in (torch.arange(100), torch.ones(3, 3).bfloat16(), np.arange(100)):
        frame = Codec().encode(payload)
        mapping = mmap.mmap(-1, frame.nbytes)
        frame.write_into(mapping)
        view = Codec().decode(mapping)
        with pytest.raises(BufferError):
            mapping.close()
        assert cases.same(view, payload)
        del view
        mapping.close()


def test_read_only_memory() -> None:
    payload = {"t": torch.arange(4), "a": np.arange(4), "m": memoryview(bytearray(8)), "g": [torch.ones(2)] * 9}
    memory = bytes(cases.write(Codec(), payload))
    before = bytes(memory)
    made = Codec().decode(memory)
    assert not made["a"].flags.writeable
    assert made["m"].readonly
    made["t"].fill_(9)
    made["g"][0].fill_(9)
    assert memory == before
    assert Codec().decode(memory, copy=True)["a"].flags.writeable


def address_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int(np.asarray(value).__array_interface__["data"][0])


def test_encoding_copies_nothing_and_decoding_makes_views() -> None:
    payload = {
        "t": torch.arange(100_000),
        "v": torch.arange(100_000)[500:],
        "a": np.arange(100_000),
        "b": b"x" * 100_000,
        "ba": bytearray(100_000),
        "m": memoryview(bytearray(100_000)),
        "l": [torch.zeros(50_000) for _ in range(9)],
    }
    frame = Codec().encode(payload)
    sources = [*map(address_of, [payload[k] for k in "tva"]), address_of(np.frombuffer(payload["b"], np.uint8))]
    sources += [address_of(np.frombuffer(payload[k], np.uint8)) for k in ("ba", "m")]
    sources += map(address_of, payload["l"])
    assert [address for _, address, _ in frame.segments()[1:]] == sources
    memory = (ctypes.c_char * frame.nbytes)()
    frame.write_into(memory)
    start = ctypes.addressof(memory)
    made = Codec().decode(memory)
    for name in ("t", "v", "a", "m"):
        assert start < address_of(made[name]) < start + frame.nbytes
        assert address_of(made[name]) % 64 == start % 64
    for piece in made["l"]:
        assert start < address_of(piece) < start + frame.nbytes
    made["t"][0] = 42
    assert Codec().decode(memory)["t"][0] == 42


def test_a_bytearray_cannot_move_while_a_frame_refers_to_it() -> None:
    payload = bytearray(5000)
    frame = Codec().encode([payload])
    with pytest.raises(BufferError):
        payload.extend(b"more")
    del frame
    payload.extend(b"more")


def test_a_frame_keeps_its_sources() -> None:
    codec = Codec()
    frame = codec.encode([torch.full((1000,), 3.0), np.full(1000, 4.0), b"x" * 2000, torch.ones(3, 4).T])
    segments = frame.segments()
    gc.collect()
    memory = bytearray(frame.nbytes)
    for offset, address, nbytes in segments:
        memory[offset : offset + nbytes] = ctypes.string_at(address, nbytes)
    assert cases.same(codec.decode(memory)[:2], [torch.full((1000,), 3.0), np.full(1000, 4.0)])


def test_one_codec_in_many_threads() -> None:
    codec = Codec()
    payloads = [
        {
            "i": i,
            "t": torch.full((50,), float(i)),
            "d": cases.Plain(i, (cases.Color.RED,)),
            "n": np.full(3, i),
            "b": 2**70 + i,
        }
        for i in range(8)
    ]
    wrong = []
    start = threading.Barrier(len(payloads))

    def work(payload: Any) -> None:
        start.wait()
        for _ in range(200):
            if not cases.same(cases.round_trip(payload, codec), payload):
                wrong.append(payload)

    threads = [threading.Thread(target=work, args=(payload,)) for payload in payloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
