"""Every type that the codec covers comes back with its exact type and bits."""

from __future__ import annotations

import math
import sys
import typing
import warnings

import codec_cases as cases
import msgspec
import numpy as np
import pytest
import torch
from codec_cases import round_trip, same, tensor
from PIL import Image

from omni_connector_core.codec import Codec
from omni_connector_core.codec.dtypes import TORCH_DTYPES, TORCH_ITEMSIZES

warnings.filterwarnings("ignore", message="ComplexHalf")

SCALARS = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**400,
    -(10**400),
    0.0,
    -0.0,
    math.pi,
    math.inf,
    -math.inf,
    math.nan,
    -math.nan,
    5e-324,
    sys.float_info.max,
    0j,
    complex(-0.0, math.nan),
    "",
    "grüße 🎨\0",
    "lone \ud800 and \udfff",
    b"",
    b"\0" * 1024,
    b"x" * 1025,
    b"y" * 3_000_000,
    bytearray(),
    bytearray(b"small"),
    bytearray(b"z" * 5000),
    bytearray(b"z" * 2_000_000),
    msgspec.UNSET,
]

CONTAINERS = [
    [],
    (),
    {},
    set(),
    frozenset(),
    [1, (2, [3, (4,)])],
    ((), [], {}, ((),)),
    {"a": {"b": {"c": [None, {"d": ()}]}}},
    {1: "int", "1": "str", None: 0, 2.5: 0, (1, 2): [3], b"k": b"v", frozenset({1}): {2}, True and 7: 7},
    {True: 1, False: 0},
    {-(2**70): 2**70, "\ud800": "\udc00", "plain": 2**65, 5: 6},
    {(1, (2, "x")): {(3,): 4}},
    {"type": "tensor", "data": b"", "__ext__": 33},
    {1, 2.5, "x", None, (1, 2), frozenset({3})},
    frozenset({(1,), b"bytes", -(2**80)}),
    [list(range(300)), [str(i) for i in range(300)], [i / 7 for i in range(300)]],
    [[2**64]] * 3,
    msgspec.msgpack.encode({"not": "ours"}),
]

OBJECTS = [
    cases.Plain(1, cases.Plain(2, [cases.Plain(3)])),
    cases.Frozen(-0.0, (1, b"x" * 2000)),
    cases.Guarded(5),
    cases.Child(1, "b", {"c"}),
    cases.WithClassDefault(1),
    cases.Outer.Inner(4),
    cases.Struct(1, [cases.Struct(2, None)]),
    cases.FrozenStruct(a=1, b=(2, {3})),
    cases.ChangingStruct(1),
    cases.Color.RED,
    cases.Color.GREEN,
    cases.Level.HIGH,
    cases.Word.YES,
    cases.Rights.READ | cases.Rights.WRITE,
    cases.Rights(0),
    cases.Point(1, [2]),
    cases.Typed("n", cases.Point((), {})),
    [cases.Level.LOW, 1, cases.Word.YES, "yes"],
    {cases.Color.RED: cases.Frozen(1.0), cases.Point(1, 2): 3},
]

MEMORYVIEWS = [
    memoryview(b""),
    memoryview(b"bytes"),
    memoryview(bytearray(b"w" * 4000)),
    memoryview(bytearray(24)).cast("i"),
    memoryview(bytearray(24)).cast("i", (2, 3)),
    memoryview(np.arange(6.0).reshape(2, 3)),
    memoryview(bytearray(4)).cast("i", ()),
    memoryview(bytearray(range(40)))[::3],
]


@pytest.mark.parametrize("payload", SCALARS + CONTAINERS, ids=lambda p: repr(p)[:40])
def test_builtins(payload: object) -> None:
    assert same(round_trip(payload), payload)
    assert same(round_trip([payload, (payload,)]), [payload, (payload,)])
    assert same(round_trip(payload, copy=True), payload)


def test_the_bits_of_a_nan_survive() -> None:
    for raw in (b"\x01\x02\x03\x04\x05\x06\xf0\x7f", b"\x01\0\0\0\0\0\xf8\xff"):
        (value,) = np.frombuffer(raw, "<f8").tolist()
        assert cases.bits(value) == raw
        assert cases.bits(round_trip(value)) == raw


@pytest.mark.parametrize("payload", OBJECTS, ids=repr)
def test_objects(payload: object) -> None:
    assert same(round_trip(payload), payload)


def test_a_dataclass_is_not_made_by_calling_it() -> None:
    made = round_trip(cases.Guarded(5))
    assert (made.value, made.made, made.beside) == (6, 1, "not a field")


def test_a_struct_keeps_its_values_and_attributes() -> None:
    assert round_trip(cases.ChangingStruct(1)).a == 2
    payload = cases.DictStruct(1)
    payload.extra = (2, 3)
    assert round_trip(payload).extra == (2, 3)


@pytest.mark.parametrize("payload", MEMORYVIEWS, ids=lambda view: f"{view.format}{view.shape}")
def test_memoryviews(payload: memoryview) -> None:
    assert same(round_trip(payload), payload)
    assert same(round_trip(payload, copy=True), payload)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_tensors(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    assert dtype.itemsize == TORCH_ITEMSIZES[TORCH_DTYPES.index(name)]
    payload = tensor(dtype, shape)
    assert same(round_trip(payload), payload)
    assert same(round_trip({"t": [payload, payload]}, copy=True)["t"][1], payload)


def test_the_table_has_every_dtype_of_torch() -> None:
    known = {getattr(torch, name) for name in TORCH_DTYPES}
    all_of_torch = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {dtype for dtype in all_of_torch if str(dtype).startswith(("torch.q", "torch.quint"))}
    assert all_of_torch - quantized == known


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_tensors_that_are_not_contiguous(name: str) -> None:
    base = tensor(getattr(torch, name), (6, 8))
    for view in (base.T, base[::2, 1::3], base[:, 3], base[2].expand(4, 8), base.view(2, 3, 8).transpose(0, 2)):
        assert same(round_trip(view), view)


def test_conjugated_and_negated_tensors() -> None:
    base = torch.randn(4, 5, dtype=torch.complex64)
    for view in (base.conj(), base.conj().imag, base.T.conj(), base.conj().T.imag):
        assert same(round_trip(view), view)


def test_a_tensor_crosses_as_its_values() -> None:
    payload = torch.randn(3, requires_grad=True)
    for value in (payload, payload * 2, payload.expand(2, 3)):
        made = round_trip(value)
        assert torch.equal(made, value)
        assert not made.requires_grad
    assert not round_trip([payload * i for i in range(10)])[3].requires_grad


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("shape", [(), (1,), (64,), (3, 5)], ids=str)
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_groups_of_tensors(name: str, shape: tuple[int, ...], kind: type) -> None:
    payload = kind(tensor(getattr(torch, name), shape, seed) for seed in range(20))
    assert same(round_trip(payload), payload)
    assert same(round_trip(payload, copy=True), payload)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_come_back_on_the_cpu() -> None:
    payload = {
        "one": torch.arange(1000, device="cuda"),
        "strided": torch.arange(12.0, device="cuda").view(3, 4).T,
        "group": [torch.full((64,), float(i), device="cuda") for i in range(20)],
    }
    on_cpu = {
        "one": payload["one"].cpu(),
        "strided": payload["strided"].cpu(),
        "group": [t.cpu() for t in payload["group"]],
    }
    assert same(round_trip(payload), on_cpu)


def test_a_group_is_one_buffer_and_only_alike_tensors_are_one() -> None:
    codec = Codec()
    alike = [tensor(torch.float32, (4,), seed) for seed in range(8)]
    assert len(codec.encode(alike).buffers) == 1
    for other in (
        torch.zeros(5),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(2, 2),
        None,
        np.zeros(4, np.float32),
        [torch.zeros(4)],
    ):
        payload = [*alike, other]
        assert len(codec.encode(payload).buffers) >= 8
        assert same(round_trip(payload), payload)
    for payload in ([t.T for t in [torch.randn(3, 4)] * 9], [torch.randn(4, dtype=torch.cfloat).conj()] * 9):
        assert same(round_trip(payload), payload)
    assert same(round_trip([torch.zeros(0, 3)] * 9), [torch.zeros(0, 3)] * 9)
    large = [torch.zeros(20_000)] * 9
    assert len(codec.encode(large).buffers) == 9


def test_torch_values() -> None:
    payload = [torch.Size([2, 3]), torch.Size([]), torch.float8_e4m3fn, torch.bool, {"dtype": torch.bfloat16}]
    assert same(round_trip(payload), payload)


ARRAYS = [
    np.zeros((), np.float32),
    np.zeros((0, 3), np.int16),
    *(np.arange(12).astype(dtype).reshape(3, 4) for dtype in "?bBhHiIlLefdgFDG"),
    *(np.arange(5, dtype=dtype) for dtype in (">i2", ">f8", ">u4", ">c16")),
    np.array(["a", "grüße", ""]),
    np.array([b"a", b"\0b", b""]),
    np.array(["2020-01-01", "NaT"], "M8[ns]"),
    np.array([1, 2], "m8[25s]"),
    np.array([3], "m8"),
    np.zeros(3, [("a", "i4"), ("b", "<U3"), ("c", ">f8", (2, 2))]),
    np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.zeros(2, np.dtype({"names": ["x"], "formats": ["i2"], "offsets": [5], "itemsize": 16})),
    np.zeros(2, [(("title", "name"), "i4"), ("nested", [("q", "V5")])]),
    np.zeros(2, np.dtype((np.record, [("r", "f4")]))),
    np.frombuffer(b"abcdef", "V3"),
    np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(24)[::-2],
    np.broadcast_to(np.float32(2), (3, 3)),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.frombuffer(b"read-only", np.uint8),
    np.random.default_rng(0).random((300, 301)),
]


@pytest.mark.parametrize("payload", ARRAYS, ids=lambda a: f"{a.dtype.str}{a.shape}")
def test_arrays(payload: np.ndarray[typing.Any, typing.Any]) -> None:
    for copy in (False, True):
        made = round_trip({"a": payload}, copy=copy)["a"]
        assert same(made, payload)
        assert made.dtype.type is payload.dtype.type
        assert made.dtype.isalignedstruct == payload.dtype.isalignedstruct
        assert made.flags.writeable


NUMPY_SCALARS = [
    *(np.dtype(code).type(1) for code in "?bBhHiIlLefdgFDG"),
    np.float32("nan"),
    np.str_("grüße\0"),
    np.str_(""),
    np.str_("\ud800"),
    np.bytes_(b"b\0"),
    np.bytes_(b""),
    np.datetime64("2020-01-01T00:00", "m"),
    np.datetime64("NaT"),
    np.timedelta64(5, "D"),
    np.timedelta64(7),
    np.void(b"raw"),
    np.zeros(1, [("a", "i4"), ("b", "f8")])[0],
]


@pytest.mark.parametrize("payload", NUMPY_SCALARS, ids=lambda s: f"{type(s).__name__}-{s!r}")
def test_numpy_scalars(payload: np.generic) -> None:
    assert same(round_trip(payload), payload)
    assert same(round_trip([payload]), [payload])


@pytest.mark.parametrize("dtype", ["<f4", ">i8", "M8[us]", "U5", [("a", "i4", (2,))], "?"], ids=str)
def test_numpy_dtypes(dtype: typing.Any) -> None:
    payload = np.dtype(dtype)
    assert round_trip(payload) == payload
    assert type(round_trip(payload)) is type(payload)


@pytest.mark.parametrize(
    "mode",
    ["1", "L", "P", "PA", "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"],
)
def test_images(mode: str) -> None:
    payload = cases.image(mode)
    payload.info = {"dpi": (72, 72), "exif": b"x" * 3000, "note": "text", "dropped": object()}
    made = round_trip(payload)
    assert type(made) is Image.Image
    assert (made.mode, made.size, made.tobytes()) == (mode, payload.size, payload.tobytes())
    assert made.getpalette() == payload.getpalette()
    assert made.info == {"dpi": (72, 72), "exif": b"x" * 3000, "note": "text"}


def test_an_image_from_a_file_and_one_without_pixels(tmp_path: typing.Any) -> None:
    cases.image("P").save(tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as opened:
        made = round_trip([opened])[0]
        assert type(made) is Image.Image
        assert made.convert("RGB").tobytes() == opened.convert("RGB").tobytes()
    assert round_trip(Image.new("RGB", (0, 5))).size == (0, 5)


def test_registered_types() -> None:
    class Secret:
        def __init__(self, value: object) -> None:
            self.value = value

    def codec() -> Codec:
        made = Codec()
        made.register(Secret, "tests.secret", lambda s: {"v": s.value}, lambda state: Secret(state["v"]))
        return made

    memory = cases.write(codec(), [Secret(torch.ones(3)), Secret(Secret((1,)))])
    first, second = codec().decode(memory)
    assert torch.equal(first.value, torch.ones(3))
    assert second.value.value == (1,)


def test_a_registered_class_has_the_name_it_was_given() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Local:
        x: int

    codec = Codec(resolve_imported=False)
    codec.register_class(Local, "tests.local")
    assert round_trip([Local(1)], codec) == [Local(1)]


@pytest.mark.parametrize("checksum", ["none", "crc32", "xxh3"])
def test_checksums(checksum: str) -> None:
    if checksum == "xxh3":
        pytest.importorskip("xxhash")
    payload = {"t": torch.randn(100, 100).T, "b": b"x" * 5000, "g": [torch.randn(3)] * 10, "e": np.zeros(0)}
    codec = Codec(checksum=checksum)
    memory = cases.write(codec, payload)
    # the header says how it was summed, so any codec reads it
    made = Codec().decode(memory)
    assert same(made["t"], payload["t"])
    assert same(made["g"], payload["g"])
    assert made["b"] == payload["b"]
