"""What the compiled module asks of the system is what Python would have been told."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_connector_core import liveness, memcpy
from omni_connector_core.native import native
from omni_connector_core.store import bell

assert native is not None


@pytest.mark.parametrize("readable", [native.readable, liveness._poll])
def test_readable(readable: Callable[[int], bool]) -> None:
    one, other = socket.socketpair()
    with one:
        assert readable(one.fileno()) is False
        other.send(b"x")
        assert readable(one.fileno()) is True
        one.recv(1)
        other.close()
        assert readable(one.fileno()) is True  # its end can be read


@pytest.mark.parametrize("wrong", [2**40, -(2**40), -1, "1", None])
def test_what_is_no_descriptor_is_an_error(wrong: Any) -> None:
    with pytest.raises((OverflowError, TypeError, ValueError)):
        native.readable(wrong)


@pytest.mark.parametrize("modified_ns", [native.modified_ns, bell._stat])
def test_modified(modified_ns: Callable[[str], int], tmp_path: Path) -> None:
    assert modified_ns(str(tmp_path)) == tmp_path.stat().st_mtime_ns
    os.utime(tmp_path, ns=(1, 1_234_567_890_123_456_789))
    assert modified_ns(str(tmp_path)) == 1_234_567_890_123_456_789
    with pytest.raises(FileNotFoundError):
        modified_ns(str(tmp_path / "missing"))


@pytest.mark.parametrize("way", [native, None], ids=["compiled", "python"])
def test_the_address_of_a_buffer_is_where_its_bytes_lie(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memcpy, "native", way)
    for buffer in (
        b"some bytes",
        bytearray(b"some bytes"),
        np.frombuffer(b"some bytes", np.uint8),
        memoryview(b"some bytes"),
    ):
        assert ctypes.string_at(memcpy.buffer_address(buffer), 10) == b"some bytes"
    with pytest.raises((ValueError, BufferError)):
        memcpy.buffer_address(np.ones(10, np.uint8)[::2])
    with pytest.raises(TypeError):
        memcpy.buffer_address(object())
