"""What an encode and a decode may cost, beside a yardstick measured in the same run."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from omni_connector_core.codec import Codec
from omni_connector_core.frame import scatter

CONTROL = {
    "request_id": "req-0123456789",
    "step": 12,
    "finished": False,
    "tokens": list(range(40)),
    "sampling": {"temperature": 0.7, "top_k": 40, "seed": None, "stop": ["</s>", "<|end|>"]},
    "text": "x" * 300,
}


def best_s(function: Callable[[], Any], repeat: int) -> float:
    """CPU time of one call: the least of many, so that other load on the machine does not count."""
    found = []
    for _ in range(30):
        start_s = time.thread_time()
        for _ in range(repeat):
            function()
        found.append((time.thread_time() - start_s) / repeat)
    return min(found)


def yardstick() -> list[int]:
    """About 4 us of plain Python on the machine the numbers of the issue are from."""
    return [i * i for i in range(100)]


def both_s(payload: Any, repeat: int) -> float:
    """Encode, and decode from where it was written to; the memcpy between is not counted."""
    codec = Codec()
    frame = codec.encode(payload)
    memory = (ctypes.c_char * frame.nbytes)()
    frame.write_into(memory)
    return best_s(lambda: (codec.encode(payload), codec.decode(memory)), repeat)


@pytest.mark.parametrize(
    ("payload", "bound_us", "repeat"),
    [
        (CONTROL, 10, 300),
        ({"hidden": torch.zeros(256)}, 12, 300),
        ({name: torch.zeros(128, 128) for name in "abc"}, 25, 200),
        ([torch.zeros(128) for _ in range(500)], 1000, 5),
    ],
    ids=["control dict", "1 KB", "3 x 64 KB", "500 x 512 B"],
)
def test_encode_and_decode(payload: Any, bound_us: float, repeat: int) -> None:
    measured_us = both_s(payload, repeat) * 1e6
    slower = max(best_s(yardstick, 200) * 1e6 / 4, 1)
    assert measured_us < 3 * bound_us * slower


def test_a_group_costs_a_fraction_of_its_tensors() -> None:
    alike = [torch.zeros(128) for _ in range(500)]
    # the lengths differ, so that these are 500 buffers
    unlike = [torch.zeros(128 + i % 2) for i in range(500)]
    assert both_s(alike, 3) * 2 < both_s(unlike, 3)


def test_large_buffers_cost_nothing_until_they_are_written() -> None:
    small, large = torch.zeros(256), torch.zeros(16 << 20)
    assert both_s([large], 50) < 5 * both_s([small], 50)


@pytest.fixture
def only_voluntary_switches() -> Iterator[None]:
    """Nobody is made to give up the interpreter's lock."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("only_voluntary_switches")
@pytest.mark.parametrize("name", ["write", "bytes", "bytearray", "scatter"])
def test_a_large_copy_releases_the_interpreter(name: str) -> None:
    codec = Codec()
    nbytes = 64 << 20
    frame = codec.encode(bytes(nbytes) if name != "bytearray" else bytearray(nbytes))
    memory = (ctypes.c_char * frame.nbytes)()
    frame.write_into(memory)
    target = bytearray(nbytes)
    work: Callable[[], Any] = {
        "write": lambda: frame.write_into(memory),
        "bytes": lambda: codec.decode(memory),
        "bytearray": lambda: codec.decode(memory),
        "scatter": lambda: scatter(memory, [target]),
    }[name]
    ticks = 0
    stop = False

    def count() -> None:
        nonlocal ticks
        while not stop:
            ticks += 1
            time.sleep(0)  # gives up the lock, which the other thread does nowhere but in the copy

    thread = threading.Thread(target=count)
    thread.start()
    ticked = 0
    for _ in range(50):
        before = ticks
        work()
        ticked += ticks - before
        if ticked:
            break
    stop = True
    thread.join()
    assert ticked
