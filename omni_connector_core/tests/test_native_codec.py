"""The compiled way does what the Python does, or leaves it to the Python; it decides nothing."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import codec_cases as cases
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from omni_connector_core import EncodeError
from omni_connector_core.codec import Codec, TypeCodec
from omni_connector_core.codec.dtypes import TORCH_DTYPES
from omni_connector_core.native import native

assert native is not None
Codec().encode(torch.zeros(1))  # the first tensor of a process goes the long way, and tells the short one of torch


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Codec:
    with monkeypatch.context() as patch:
        patch.setattr("omni_connector_core.codec.codec.native", None)
        return Codec()


DTYPES = [getattr(torch, name) for name in TORCH_DTYPES if hasattr(torch, name)]
SHAPES = [(), (1,), (3,), (2, 3), (1, 5, 1), (2, 1, 3, 1, 2)]

SHORT = [
    None,
    [True, False, 1.5, -0.0, math.inf, "", "grün", "x" * 31, "x" * 32, "x" * 255, "x" * 256, "x" * 70_000],
    [b"", b"x" * 255, b"x" * 256, b"x" * 1024, b"x" * 1025, b"y" * 3_000_000],
    [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1],
    [-1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63)],
    [list(range(15)), list(range(16)), list(range(70_000))],
    {str(n): n for n in range(15)},
    {n: str(n) for n in range(16)},
    {str(n): [] for n in range(66_000)},
    ((), (1, (2, ("x" * 300,))), [(3,)]),
    {"hidden": torch.arange(12.0).view(3, 4), "step": 3, "ids": [1, 2], "embeds": np.arange(6).reshape(2, 3)},
    [torch.ones(2, 3).requires_grad_(), torch.zeros(4, 4)[1:3], torch.ones(1, 3).expand(1, 3)],
    [torch.zeros(n + 1) for n in range(7)],
    [cases.tensor(dtype, (4,)) for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e5m2)],
    [np.arange(5, dtype=letter) for letter in "bBhHiIlLqQefd"],
    [np.array(3), np.ones((1, 2, 1)), np.array([True, False])],
]


@pytest.mark.parametrize("payload", SHORT, ids=range(len(SHORT)))
def test_the_short_way_is_taken_and_ends_where_the_long_one_does(payload: Any, in_python: Codec) -> None:
    made = native.encode(payload)
    assert made is not native.PASS
    codec = Codec()
    memory, expected = cases.write(codec, payload), cases.write(in_python, payload)
    assert bytes(memory) == bytes(expected)
    found = native.decode(memory)
    assert found is not native.PASS
    assert cases.same(found, in_python.decode(expected))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_the_same_either_way(dtype: torch.dtype, shape: tuple[int, ...], in_python: Codec) -> None:
    payload = [cases.tensor(dtype, shape), cases.tensor(dtype, (0, *shape))]
    memory = cases.write(Codec(), payload)
    assert bytes(memory) == bytes(cases.write(in_python, payload))
    assert cases.same(Codec().decode(memory), in_python.decode(memory))


LEFT = [
    torch.ones(2, dtype=torch.complex64).conj(),
    torch.ones(2, dtype=torch.complex64).conj().imag,  # its signs are not in its memory
    torch.zeros(4, 4).T,
    torch.zeros(2, 2).to_sparse(),
    torch.nn.Parameter(torch.zeros(2)),
    torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8),
    torch.empty(2, device="meta"),
    [torch.zeros(2) for _ in range(8)],
    np.zeros((4, 4)).T,
    np.zeros(2, ">i4"),
    np.zeros(2, "M8[s]"),
    np.zeros(2, [("a", "i4")]),
    np.float64(1.5),
    np.zeros(2).view(np.recarray),
    "lone \ud800",
    2**64,
    -(2**63) - 1,
    {1.5: 2},
    {(1, 2): 3},
    {1},
    1j,
    bytearray(b"x"),
    cases.Plain(1),
    object(),
]


@pytest.mark.parametrize("payload", LEFT, ids=lambda payload: type(payload).__name__)
@pytest.mark.filterwarnings("ignore")
def test_the_rest_is_left_to_python(payload: Any) -> None:
    assert native.encode(payload) is native.PASS
    assert native.encode([1, {"deep": [payload]}]) is native.PASS


def test_nested_too_deep() -> None:
    payload: Any = "bottom"
    for _ in range(100):
        payload = [payload]
    assert Codec().decode(cases.write(Codec(), payload)) == payload
    for _ in range(100):
        payload = [payload]
    with pytest.raises(EncodeError):
        Codec().encode(payload)
    endless: list[Any] = []
    endless.append(endless)
    assert native.encode(endless) is native.PASS


def test_a_type_that_was_registered_is_not_passed_over() -> None:
    codec = Codec([TypeCodec(torch.Tensor, "squeezed", torch.Tensor.tolist, torch.tensor)])
    frame = codec.encode({"hidden": torch.tensor([1.0, 2.0])})
    assert not frame.buffers
    codec = Codec()
    codec.register(np.ndarray, "listed", np.ndarray.tolist, np.array)
    assert not codec.encode(np.zeros(3)).buffers


class Meddling(TorchFunctionMode):
    """Runs while the codec asks a tensor something."""

    def __init__(self, meddle: Any) -> None:
        super().__init__()
        self.meddle = meddle

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meddle()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make", [lambda: {n: torch.zeros(n) for n in range(5)}, lambda: [torch.zeros(n) for n in range(5)]]
)
@pytest.mark.parametrize("meddle", ["clear", "grow"])
def test_a_payload_that_changes_while_it_is_encoded_harms_nobody(make: Any, meddle: str) -> None:
    payload = make()

    def change() -> None:
        if meddle == "clear":
            payload.clear()
        elif type(payload) is dict:
            payload[len(payload)] = torch.zeros(1)
        else:
            payload.append(torch.zeros(1))
        gc.collect()

    with Meddling(change):
        assert native.encode(payload) is native.PASS


def test_a_tensor_that_changes_while_it_is_asked_is_taken_as_it_is_then() -> None:
    tensor = torch.arange(4)

    def change() -> None:
        tensor.resize_(2, 3, 1, 1, 1, 1, 1)

    with Meddling(change):
        _, _, ((address, nbytes, owner),) = native.encode(tensor)
    assert (address, nbytes) == (tensor.data_ptr(), tensor.nbytes)
    assert owner is tensor
    assert Codec().decode(cases.write(Codec(), tensor)).shape == tensor.shape


def test_what_a_meddler_raises_is_not_lost_on_python() -> None:
    def refuse() -> None:
        raise ValueError("not now")

    payload = {"hidden": torch.zeros(1)}
    with Meddling(refuse), pytest.raises(EncodeError, match="not now"):
        Codec().encode(payload)


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    memory = mmap.mmap(-1, 1 << 16)
    yield memory
    memory.close()


def test_tensors_keep_the_memory_exported(mapping: mmap.mmap) -> None:
    frame = Codec().encode({"a": torch.arange(100), "b": np.arange(100)})
    frame.write_into(mapping)
    for name in "ab":
        value = Codec().decode(mapping)[name]
        with pytest.raises(BufferError):
            mapping.close()
        value[3] = -1
        assert Codec().decode(mapping)[name][3] == -1
        del value


def test_tensors_are_dropped_in_any_thread_and_leave_nothing() -> None:
    frame = Codec().encode([torch.arange(1000)])
    memory = (ctypes.c_char * frame.nbytes)()
    frame.write_into(memory)
    before = sys.getrefcount(memory)
    for _ in range(50):
        values = [Codec().decode(memory) for _ in range(20)]
        thread = threading.Thread(target=values.clear)
        thread.start()
        thread.join()
    gc.collect()
    assert sys.getrefcount(memory) == before


def test_a_tensor_may_outlive_everything_to_the_end_of_the_process() -> None:
    code = "import torch; from omni_connector_core.codec import Codec; f = Codec().encode([torch.ones(9)])\n"
    code += "m = bytearray(f.nbytes); f.write_into(m); kept = Codec().decode(m)[0]; torch.kept = kept"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_payload_that_cannot_be_refcounted_away_is_not_leaked() -> None:
    payload = {"hidden": torch.zeros(10), "rest": [object()], "name": b"x" * 5000}
    before = [sys.getrefcount(value) for value in payload.values()]
    for _ in range(100):
        assert native.encode(payload) is native.PASS
    assert [sys.getrefcount(value) for value in payload.values()] == before


def test_python_alone_does_the_same_without_it() -> None:
    code = "from omni_connector_core.native import native; assert native is None"
    subprocess.run([sys.executable, "-c", code], check=True, env={"OMNI_CONNECTOR_PURE_PYTHON": "1"}, timeout=60)
