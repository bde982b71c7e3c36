"""`Codec`: payload to frame and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from omni_connector_core import checksum as checksums
from omni_connector_core.codec.registry import TypeCodec, TypeRegistry, name_of
from omni_connector_core.codec.walk import Reader, UnencodableError, Writer
from omni_connector_core.codec.wire import pack, unpack
from omni_connector_core.errors import DecodeError, EncodeError
from omni_connector_core.frame import Frame, FrameLayout
from omni_connector_core.native import native

__all__ = ["Codec"]

T = TypeVar("T")

#: whose types the short way knows
_NATIVE_MODULES = ("builtins", "numpy", "torch")


class Codec:
    """Turns payloads into frames and frames into payloads, with exact types and bits.

    Covers None, bool, int of any size, float, complex, str; bytes, bytearray, memoryview; dict with any of these as
    keys, list, tuple, set, frozenset, nested to 100 levels; torch tensors, sizes and dtypes; numpy arrays, scalars and
    dtypes; PIL images; dataclasses, msgspec structs, enum members, named tuples (see `registry` for which); and what is
    registered. Whatever it does not know is an error, never something similar: a subclass of str does not become a str.
    An object that occurs twice crosses twice.

    Encoding copies no large buffer: the frame refers to it and copies it once, when it is written. Decoding copies no
    tensor, array or memoryview: these are views of the memory and keep it alive, until the last is collected. bytes
    and bytearray are one copy. No pickle, no eval; torch and PIL are imported when a frame holds something of theirs.

    Most payloads go a short way in C (see `omni_connector_core.native`): a dict with a tensor takes 1.3 us to encode and
    1.4 to decode, 12 and 13 when the caches are somebody else's; in Python 4 and 6, 37 and 48. What is not dicts, lists,
    tuples, atoms, bytes, and tensors and arrays as they lie in CPU memory, is done in Python whole.

    Thread-safe.

    Parameters
    ----------
    types
        More types, see `register`.
    checksum : {"none", "crc32", "xxh3"}
        Over the data; the head always has one. A frame says how it was summed, so both sides may differ.
    resolve_imported
        Whether dataclasses, structs, enums and named tuples cross unregistered, if both processes imported them.

    Raises
    ------
    ValueError
        If there is no such checksum.
    ImportError
        If it needs a package that is not installed.
    """

    def __init__(
        self, types: Iterable[TypeCodec[Any]] = (), *, checksum: str = "none", resolve_imported: bool = True
    ) -> None:
        self._checksum = checksums.algorithm(checksum)
        self._native = None if self._checksum else native
        self._types = TypeRegistry(resolve_imported=resolve_imported)
        for entry in types:
            self._register(entry)

    def register(self, type: type[T], name: str, to_state: Callable[[T], Any], from_state: Callable[[Any], T]) -> None:
        """Make one more type cross; do so on both sides.

        Parameters
        ----------
        type, name, to_state, from_state
            See `TypeCodec`.

        Raises
        ------
        ValueError
            If the name is taken by another type.
        """
        self._register(TypeCodec(type, name, to_state, from_state))

    def _register(self, entry: TypeCodec[Any]) -> None:
        self._types.register(entry)
        if entry.type.__module__ in _NATIVE_MODULES:
            self._native = None  # it would pass over what was registered

    def register_class(self, cls: type, name: str | None = None) -> None:
        """Make a dataclass, struct, enum or named tuple known by name; do so on both sides.

        Needed for a class that its qualified name does not lead to, such as one defined in a function, and for all
        where ``resolve_imported`` is off.

        Parameters
        ----------
        cls
            The class.
        name
            What it is called on the wire; its module and qualified name if not given.

        Raises
        ------
        TypeError
            If it is no such class.
        ValueError
            If the name is taken by another class.
        """
        self._types.register_class(cls, name_of(cls) if name is None else name)

    def encode(self, payload: Any) -> Frame:
        """Make a frame that refers to the payload's large buffers. Do not change these until it was written.

        Raises
        ------
        EncodeError
            If something in the payload cannot be encoded; the error names where it is.
        """
        if self._native is not None:
            made = self._native.encode(payload)
            if made is not self._native.PASS:
                return Frame.of_head(*made)
        try:
            try:
                writer = Writer(self._types)
                meta = pack(writer.lower(payload, 0))
            except (OverflowError, UnicodeEncodeError):
                writer = Writer(self._types, careful=True)
                meta = pack(writer.lower(payload, 0))
            return Frame(meta, writer.sources, self._checksum)
        except UnencodableError as error:
            raise EncodeError(str(error), path=error.path) from error.__cause__
        except (RuntimeError, ValueError, TypeError) as error:
            # a dict that another thread changes, a tensor that torch cannot read, a part above msgpack's 4 GiB
            raise EncodeError(f"{type(error).__name__}: {error}") from error

    def decode(self, memory: Any, *, copy: bool = False) -> Any:
        """Make the payload of a frame again.

        Parameters
        ----------
        memory
            A contiguous buffer that starts with the frame and may be longer. Tensors and arrays that are returned hold
            on to this very object, so that `weakref.finalize` on it (a ctypes array, for one) tells when they are
            gone; a payload without views does not.
        copy
            Make everything private. Else views, which are as writable as the memory is; tensors, which are always
            writable, are private if the memory is not.

        Raises
        ------
        DecodeError
            If this is not a frame, or one that was damaged or tampered with, or holds what this process does not know.
        TypeError
            If ``memory`` is no buffer.
        """
        if native is not None and not copy:
            payload = native.decode(memory)
            if payload is not native.PASS:
                return payload
        try:
            base = np.frombuffer(memory, np.uint8)
        except ValueError as error:
            raise DecodeError(f"no frame: {error}") from error
        layout = FrameLayout.parse_head(base)
        layout.verify(base)
        reader = Reader(self._types, base, layout, copy)
        try:
            return unpack(layout.meta, ext_hook=reader.lift)
        except DecodeError:
            raise
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError) as error:
            # what numpy, torch, PIL and msgspec raise for values that contradict each other
            raise DecodeError(f"the frame is malformed: {error}") from error
