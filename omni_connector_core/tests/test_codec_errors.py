"""What cannot be encoded is refused, with its path; what is not ours is refused when decoding."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import struct
import subprocess
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any

import codec_cases as cases
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from omni_connector_core.codec import Codec
from omni_connector_core.codec.walk import Writer
from omni_connector_core.codec.wire import (
    DATACLASS,
    ENUM,
    NAMEDTUPLE,
    NUMPY_DTYPE,
    PAIRS,
    REGISTERED,
    SET,
    STRUCT,
    TORCH_SIZE,
    TUPLE,
    Ext,
    pack,
)
from omni_connector_core.errors import DecodeError, EncodeError
from omni_connector_core.frame import Frame


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Mapping(dict[str, int]):
    pass


@dataclasses.dataclass
class MappingDataclass(dict):  # type: ignore[type-arg]
    x: int


@dataclasses.dataclass
class Collected:
    x: int

    def __del__(self) -> None:
        pass


class Ours:
    pass


@dataclasses.dataclass
class Renamed:
    x: int


def made_in_function() -> object:
    @dataclasses.dataclass
    class Local:
        x: int

    return Local(1)


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        (object(), "payload"),
        ({"a": [0, 1, 2, cases.Frozen(0.0, object())]}, "payload['a'][3].y"),
        ([(1, {"k": cases.Struct(1, {object})})], "payload[0][1]['k'].b{<class 'object'>}"),
        ({(1, 2): [Text("s")]}, "payload[(1, 2)][0]"),
        ([cases.Point(0, object())], "payload[0][1]"),
        ([Number(1)], "payload[0]"),
        ([Mapping()], "payload[0]"),
        ([collections.OrderedDict()], "payload[0]"),
        ([collections.defaultdict(list)], "payload[0]"),
        ([MappingDataclass(1)], "payload[0]"),
        ([Collected(1)], "payload[0]"),
        ([made_in_function()], "payload[0]"),
        ([Ours], "payload[0]"),
        ([len], "payload[0]"),
        ([iter(())], "payload[0]"),
        ([datetime.datetime(2020, 1, 1)], "payload[0]"),
        ([np.array([object()])], "payload[0]"),
        ([np.zeros(1, [("a", "O")])], "payload[0]"),
        ([np.array(["a"], np.dtypes.StringDType())], "payload[0]"),
        ([np.ma.masked_array([1])], "payload[0]"),
        ([np.zeros(1, np.dtype([]))], "payload[0]"),
        ([torch.nn.Parameter(torch.zeros(1))], "payload[0]"),
        ([torch.zeros(2, 2).to_sparse()], "payload[0]"),
        ([torch.zeros(2, device="meta")], "payload[0]"),
        ([torch.zeros(2, device="meta")] * 9, "payload[0]"),
        ([torch.zeros(2).max(0)], "payload[0]"),
        ([torch.quint8], "payload[0]"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_path_of_what_cannot_be_encoded(payload: object, path: str) -> None:
    with pytest.raises(EncodeError) as caught:
        Codec().encode(payload)
    assert caught.value.path == path
    assert str(caught.value).startswith(path + ": ")


def test_a_set_element_and_a_key_are_in_the_path_too() -> None:
    with pytest.raises(EncodeError, match=r"payload\['s'\]\{"):
        Codec().encode({"s": {Ours()}})
    with pytest.raises(EncodeError, match="payload<key "):
        Codec().encode({Ours(): 1})


def test_what_contains_itself() -> None:
    ring: list[Any] = []
    ring.append([ring, ring])
    mapping: dict[str, Any] = {}
    mapping["self"] = (mapping, mapping)
    node = cases.Plain(1)
    node.b = [node, node]
    for payload in (ring, mapping, node):
        with pytest.raises(EncodeError, match="contains itself"):
            Codec().encode(payload)


@pytest.mark.parametrize("wrap", [lambda x: [x, 1], lambda x: (x,), lambda x: {"k": x}, cases.Plain, lambda x: {1j: x}])
def test_how_deep_a_payload_may_be(wrap: Any) -> None:
    payload: Any = "leaf"
    for _ in range(100):
        payload = wrap(payload)
    assert cases.same(cases.round_trip(payload), payload)
    for _ in range(2000):
        payload = [payload, None]
    with pytest.raises(EncodeError, match="nested deeper"):
        Codec().encode(payload)


def test_tensors_that_torch_only_pretends_to_have() -> None:
    def refused(batched: torch.Tensor) -> torch.Tensor:
        for payload in ([0, batched], [0, [batched] * 9]):
            with pytest.raises(EncodeError, match=r"payload\[1\]: a tensor without memory"):
                Codec().encode(payload)
        return batched

    torch.vmap(refused)(torch.zeros(2, 3))
    refused(torch._efficientzerotensor(3))


def test_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    cases.image("RGB", (200, 200)).save(tmp_path / "image.png")
    raw = (tmp_path / "image.png").read_bytes()
    (tmp_path / "image.png").write_bytes(raw[: len(raw) // 2])
    with Image.open(tmp_path / "image.png") as opened, pytest.raises(EncodeError, match=r"payload\[0\]: an image"):
        Codec().encode([opened])


def test_a_failing_to_state_is_an_encode_error() -> None:
    codec = Codec()
    codec.register(Ours, "tests.ours", lambda ours: 1 // 0, lambda state: Ours())
    with pytest.raises(EncodeError, match=r"payload\[0\].*ZeroDivisionError") as caught:
        codec.encode([Ours()])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_failing_from_state_is_a_decode_error() -> None:
    codec = Codec()
    codec.register(Ours, "tests.ours", lambda ours: None, lambda state: 1 // 0)  # type: ignore[arg-type,return-value]
    memory = cases.write(codec, Ours())
    with pytest.raises(DecodeError, match="ZeroDivisionError"):
        codec.decode(memory)
    with pytest.raises(DecodeError, match=r"tests\.ours"):
        Codec().decode(memory)


def test_names_are_taken_once() -> None:
    codec = Codec()
    codec.register(Ours, "n", lambda ours: None, lambda state: Ours())
    with pytest.raises(ValueError, match="'n'"):
        codec.register(Text, "n", str, Text)
    codec.register_class(Renamed, "r")
    codec.register_class(Renamed, "r")
    with pytest.raises(ValueError, match="'r'"):
        codec.register_class(cases.Plain, "r")
    with pytest.raises(TypeError):
        codec.register_class(Ours)


@pytest.mark.parametrize("code", [TUPLE, SET, PAIRS, TORCH_SIZE])
def test_a_frame_that_is_nested_without_end_is_refused(code: int) -> None:
    levels = 300_000  # each in the one before, with no list between
    meta = b"".join(struct.pack(">BIB", 0xC9, 6 * (levels - 1 - n), code) for n in range(levels))
    with pytest.raises(DecodeError):
        Codec().decode(bytearray(frame_bytes(Frame(meta, []))[0]))


def test_lists_that_claim_to_be_long_get_no_room_for_it() -> None:
    nbytes = 1 << 20
    meta = b"".join(struct.pack(">BI", 0xDD, nbytes) for _ in range(90)) + bytes([0xC0]) * (nbytes + 1000)
    memory = bytearray(frame_bytes(Frame(meta, []))[0])
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            Codec().decode(memory)
        assert tracemalloc.get_traced_memory()[1] < 32 * nbytes
    finally:
        tracemalloc.stop()


def decode_meta(meta: object, codec: Codec | None = None) -> Any:
    """Decode a frame whose meta was made by hand, with a right checksum."""
    return (codec or Codec()).decode(bytearray(b"".join(frame_bytes(Frame(pack(meta), [])))))


def frame_bytes(frame: Frame) -> list[bytes]:
    memory = bytearray(frame.nbytes)
    frame.write_into(memory)
    return [bytes(memory)]


def test_a_name_reaches_only_classes_that_hold_data() -> None:
    here = __name__
    for code in (DATACLASS, STRUCT, ENUM, NAMEDTUPLE, REGISTERED):
        for name in (
            "os:system",
            "subprocess:Popen",
            "builtins:eval",
            "builtins:dict",
            f"{here}:Ours",
            f"{here}:Collected",
            f"{here}:MappingDataclass",
            f"{here}:made_in_function.<locals>.Local",
            f"{here}:dataclasses",
            f"{here}:",
            ":",
            "",
            5,
            None,
            [],
        ):
            with pytest.raises(DecodeError):
                decode_meta(Ext(code, pack([name, {"x": 1}])))


def test_a_name_is_not_looked_up_through_other_modules_or_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy_module")
    touched = []
    lazy.__getattr__ = touched.append  # type: ignore[method-assign]
    lazy.Plain = cases.Plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    for name in ("lazy_module:Missing", "lazy_module:Plain", "not_imported_module_x:Plain"):
        with pytest.raises(DecodeError):
            decode_meta(Ext(DATACLASS, pack([name, {"a": 1, "b": 2}])))
    assert not touched
    assert "not_imported_module_x" not in sys.modules


def test_decoding_imports_nothing() -> None:
    code = """
import struct
import sys
from omni_connector_core.codec import Codec
from omni_connector_core.codec.wire import DATACLASS, Ext, pack
from omni_connector_core.frame import Frame
from omni_connector_core.errors import DecodeError
frame = Frame(pack(Ext(DATACLASS, pack(["this:Zen", {}]))), [])
memory = bytearray(frame.nbytes)
frame.write_into(memory)
try:
    Codec().decode(memory)
except DecodeError as error:
    assert "this:Zen" in str(error)
else:
    raise AssertionError
assert "this" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kind_cannot_be_taken_for_another() -> None:
    name = f"{cases.__name__}:Plain"
    with pytest.raises(DecodeError):
        decode_meta(Ext(STRUCT, pack([name, {"a": 1, "b": 2}])))


@pytest.mark.parametrize(
    "state",
    [{"a": 1}, {"a": 1, "b": 2, "__class__": 3}, [1, 2], None, {1: 2}, {"a": 1, "b": 2, "__dict__": {}}],
    ids=str,
)
def test_the_state_of_another_version_of_a_class(state: object) -> None:
    if state == {"a": 1}:
        # a default of the class stands in for a field that is missing
        assert decode_meta(Ext(DATACLASS, pack([f"{cases.__name__}:Plain", state]))) == cases.Plain(1)
        state = {"b": 1}
    with pytest.raises(DecodeError):
        decode_meta(Ext(DATACLASS, pack([f"{cases.__name__}:Plain", state])))


def test_slots_of_another_version() -> None:
    for state in ({"x": 1.0}, {"x": 1.0, "y": [], "z": 1}):
        with pytest.raises(DecodeError, match="Frozen"):
            decode_meta(Ext(DATACLASS, pack([f"{cases.__name__}:Frozen", state])))


def test_without_imported_classes() -> None:
    strict = Codec(resolve_imported=False)
    with pytest.raises(EncodeError, match="register"):
        strict.encode(cases.Plain(1))
    with pytest.raises(DecodeError, match="Plain"):
        strict.decode(cases.write(Codec(), cases.Plain(1)))
    strict.register_class(cases.Plain)
    assert strict.decode(cases.write(Codec(), cases.Plain(1))) == cases.Plain(1)


def test_damage_is_found() -> None:
    memory = bytearray(cases.write(Codec(checksum="crc32"), {"t": torch.arange(100), "b": b"x" * 3000}))
    frame = Codec().encode(Codec().decode(memory))
    padding = set(range(len(frame.head) - 64, len(frame.head))) | set(
        range(len(frame.head) + 800, len(frame.head) + 832)
    )
    padding |= set(range(len(memory) - 64, len(memory)))
    for position in set(range(len(memory))) - padding:
        memory[position] ^= 0x10
        with pytest.raises(DecodeError):
            Codec().decode(memory)
        memory[position] ^= 0x10
    for length in (0, 1, 63, 64, 100, len(memory) - 1):
        with pytest.raises(DecodeError):
            Codec().decode(memory[:length])
    Codec().decode(memory)


def test_a_frame_of_another_version_says_so() -> None:
    memory = bytearray(cases.write(Codec(), 1))
    memory[8] = 2
    with pytest.raises(DecodeError, match="format 2"):
        Codec().decode(memory)


def test_no_such_checksum_and_no_such_package() -> None:
    with pytest.raises(ValueError, match="crc32"):
        Codec(checksum="md5")
    code = """
import struct
import sys
sys.modules["xxhash"] = None
from omni_connector_core.codec import Codec
try:
    Codec(checksum="xxh3")
except ImportError as error:
    assert "pip install" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flags_and_enums_from_elsewhere() -> None:
    for state in (4, "READ", None, [], 2**80):
        with pytest.raises(DecodeError):
            decode_meta(Ext(ENUM, pack([f"{cases.__name__}:Rights", state if state != 2**80 else 1.5])))
    for state in ("BLUE", 1, None, []):
        with pytest.raises(DecodeError):
            decode_meta(Ext(ENUM, pack([f"{cases.__name__}:Color", state])))


@pytest.mark.parametrize("payload", [torch.ones(5000), np.ones(5000), b"x" * 5000, memoryview(b"y" * 5000)], ids=type)
def test_a_short_message_cannot_ask_for_many_copies(payload: Any) -> None:
    codec = Codec()
    writer = Writer(codec._types)
    lowered = writer.lower(payload, 0)
    memory = frame_bytes(Frame(pack([lowered] * 1000), writer.sources))[0]
    with pytest.raises(DecodeError, match="used twice"):
        codec.decode(memory, copy=True)


@pytest.mark.parametrize(
    "text",
    ["04b1", "|04b1", "(2,)i4", "i4,f8", "<i4,<i4", "O", "|O8", "|O", "float", "<T16", "", "<f3", "U5", "\ud800"],
)
def test_text_that_is_no_dtype_of_ours(text: str) -> None:
    lowered = {"names": ["a"], "formats": [text], "offsets": [0], "titles": [None], "itemsize": 8} | {
        "aligned": False,
        "record": False,
    }
    for description in (text, [text, [2]], lowered):
        raw = msgspec.msgpack.encode(description) if text.isascii() else b"\xa3\xed\xa0\x80"
        with pytest.raises(DecodeError):
            decode_meta(Ext(NUMPY_DTYPE, raw))


def test_a_key_that_cannot_be_one() -> None:
    for meta in (Ext(PAIRS, pack([{}, 1])), Ext(PAIRS, pack([1])), Ext(SET, pack([[1]])), Ext(SET, pack(1))):
        with pytest.raises(DecodeError):
            decode_meta(meta)


def test_a_class_with_slots_that_are_not_set() -> None:
    blank = object.__new__(cases.Frozen)
    with pytest.raises(EncodeError, match="not set"):
        Codec().encode([blank])


def test_members_without_a_name() -> None:
    class Open(enum.Enum):
        A = 1

    codec = Codec()
    codec.register_class(Open, "open")
    stranger = object.__new__(Open)
    stranger._name_ = "B"
    stranger._value_ = 2
    with pytest.raises(EncodeError, match="not a member"):
        codec.encode(stranger)


def test_a_dict_that_changes_while_it_is_encoded() -> None:
    payload: dict[str, Any] = {}

    def grow(_: Ours) -> None:
        payload["more"] = 1

    codec = Codec()
    codec.register(Ours, "tests.ours", grow, lambda state: Ours())
    payload["ours"] = Ours()
    with pytest.raises(EncodeError, match="changed size"):
        codec.encode(payload)


def test_messages_of_msgspec_are_not_ours_to_pass_on() -> None:
    for raw in (b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\xc7\x00\x7f", b""):
        with pytest.raises(DecodeError):
            Codec().decode(bytearray(frame_bytes(Frame(raw, []))[0]))
    assert issubclass(msgspec.DecodeError, ValueError)
