"""Which types a codec knows, and which classes a name on the wire may stand for.

A name never makes anything be imported, and nothing is looked up through ``__getattr__``. It stands for

- a class registered with this codec under that name, or
- if the codec allows it (it does by default), a class that this process has already imported, that is found in its
  module under exactly its own qualified name, and is a dataclass, a `msgspec.Struct`, an enum or a named tuple without
  ``__del__``.

Why the second is safe enough to be the default: such classes hold data, and their instances are made without running
``__init__`` or ``__post_init__`` (a struct's ``__post_init__`` does run). So bytes from a hostile peer can make objects
with wrong values, as they can with dicts, but choose no code to run. What they cannot do is reach a class that the
process did not load, a function, or a class that acts when it is collected. ``__hash__`` and ``__eq__`` of a class do
run if it is the key of a dict. A process that wants less uses ``Codec(resolve_imported=False)`` and registers what it
expects.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from omni_connector_core.codec import arrays, blobs, containers, raw_tensors, scalars
from omni_connector_core.codec.objects import Kind, kind_of
from omni_connector_core.codec.walk import LIFTERS, Grouper, Lowerer, Reader, UnencodableError, Writer
from omni_connector_core.codec.wire import (
    DATACLASS,
    ENUM,
    IMAGE,
    NAMEDTUPLE,
    REGISTERED,
    STRUCT,
    TENSOR,
    TENSOR_GROUP,
    TORCH_DTYPE,
    TORCH_SIZE,
    Ext,
    pack,
)
from omni_connector_core.errors import DecodeError

__all__ = ["TypeCodec", "TypeRegistry", "name_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class TypeCodec(Generic[T]):
    """How one more type crosses.

    Attributes
    ----------
    type
        The class; exactly it, not its subclasses.
    name
        What it is called on the wire; the same on both sides. Prefix it with your package's name.
    to_state
        Turns an instance into anything the codec can encode.
    from_state
        Makes an instance of that again. It is given what came over the wire: check it, and raise `ValueError`.
    """

    type: type[T]
    name: str
    to_state: Callable[[T], Any]
    from_state: Callable[[Any], T]


class _Lowerers(dict[type, Lowerer]):
    """The table of an encode; finds a type's entry when the type is first met."""

    def __init__(self, find: Callable[[type], Lowerer]) -> None:
        super().__init__(arrays.LOWERERS | blobs.LOWERERS | containers.LOWERERS | scalars.LOWERERS)
        self.update(raw_tensors.LOWERERS)
        self.find = find

    def __missing__(self, kind: type) -> Lowerer:
        lowerer = self[kind] = self.find(kind)
        return lowerer


class TypeRegistry:
    """The types of one codec.

    Attributes
    ----------
    lowerers
        Type -> function that lowers its instances.
    """

    def __init__(self, *, resolve_imported: bool = True) -> None:
        self.resolve_imported = resolve_imported
        self.lowerers = _Lowerers(self._find)
        self._groupers: dict[type, Grouper] = dict(raw_tensors.GROUPERS)
        self._codecs: dict[str, TypeCodec[Any]] = {}
        self._named: dict[str, Kind] = {}
        self._kinds: dict[type, Kind | None] = {}

    def register(self, entry: TypeCodec[Any]) -> None:
        """Add a type with functions of its own; see `TypeCodec`."""
        if self._codecs.setdefault(entry.name, entry).type is not entry.type:
            raise ValueError(f"the name {entry.name!r} is already that of {self._codecs[entry.name].type!r}")
        self._codecs[entry.name] = entry

        def lower(writer: Writer, value: Any, depth: int) -> Any:
            with _foreign(UnencodableError, f"to_state of {entry.name!r}"):
                state = entry.to_state(value)
            return Ext(REGISTERED, pack([entry.name, *writer.items([state], depth)]))

        self.lowerers[entry.type] = lower

    def register_class(self, cls: type, name: str) -> None:
        """Let ``name`` stand for a dataclass, struct, enum or named tuple."""
        kind = kind_of(cls)
        if kind is None:
            raise TypeError(
                f"{cls!r} is no dataclass, struct, enum or named tuple; give functions to register() instead"
            )
        if self._named.setdefault(name, kind).cls is not cls:
            raise ValueError(f"the name {name!r} is already that of {self._named[name].cls!r}")
        self.lowerers[cls] = _object_lowerer(kind, name)

    def grouper(self, kind: type) -> Grouper | None:
        """Find the function that lowers a list of such instances as one (or returns None), if there is one."""
        if kind.__module__ == "torch" and kind not in self._groupers:
            self._add_torch()
        return self._groupers.get(kind)

    def kind_named(self, name: Any, code: int) -> Kind:
        """Find what a name on the wire stands for."""
        if type(name) is not str:
            raise DecodeError("a class without a name")
        kind = self._named.get(name)
        if kind is None and self.resolve_imported and (cls := _imported(name)) is not None:
            kind = self._kind(cls)
        if kind is None or kind.code != code:
            raise DecodeError(
                f"the name {name!r} stands for no class here",
                hint="Import its module in this process before decoding, or register the class with the codec",
            )
        return kind

    def codec_named(self, name: Any) -> TypeCodec[Any]:
        """Find the functions registered under a name on the wire."""
        entry = self._codecs.get(name) if type(name) is str else None
        if entry is None:
            raise DecodeError(f"no type {name!r} is registered here", hint="Register it with the codec on both sides")
        return entry

    def _kind(self, cls: type) -> Kind | None:
        if cls not in self._kinds:
            self._kinds[cls] = None if hasattr(cls, "__del__") else kind_of(cls)
        return self._kinds[cls]

    def _add_torch(self) -> dict[type, Lowerer]:
        """Add torch's types; it is loaded already, for here is an instance of one."""
        from omni_connector_core.codec import tensors

        self._groupers.update(tensors.GROUPERS)
        return tensors.LOWERERS

    def _find(self, kind: type) -> Lowerer:
        package = kind.__module__.partition(".")[0]
        if package == "torch" and (lowerer := self._add_torch().get(kind)) is not None:
            return lowerer
        if package == "PIL":
            from omni_connector_core.codec import images

            if (lowerer := images.lowerer(kind)) is not None:
                return lowerer
        if (lowerer := arrays.scalar_lowerer(kind) or arrays.dtype_lowerer(kind)) is not None:
            return lowerer
        if self.resolve_imported and (cls_kind := self._kind(kind)) is not None:
            name = name_of(kind)
            if _imported(name) is not kind:
                raise UnencodableError(f"{name} cannot be found by that name; register_class() gives it another")
            return _object_lowerer(cls_kind, name)
        raise UnencodableError(_reason(kind))


def _reason(kind: type) -> str:
    known = next((base for base in kind.__mro__[1:-1] if base.__module__ in ("builtins", "torch", "numpy")), None)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if known is None:
        return f"{name} is not a type that the codec knows; register() it"
    return f"{name} would come back as a mere {known.__name__}; convert it, or register() it"


def _object_lowerer(kind: Kind, name: str) -> Lowerer:
    return lambda writer, value, depth: Ext(kind.code, pack([name, kind.state(writer, value, depth)]))


def name_of(cls: type) -> str:
    """Name a class as the wire does; a spawned child knows its parent's ``__main__`` by another name."""
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}:{cls.__qualname__}"


def _imported(name: str) -> type | None:
    """Find the class of this name, without importing or running anything."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
    return found if isinstance(found, type) and name_of(found) == name else None


@contextmanager
def _foreign(error_class: type[Exception], what: str) -> Iterator[None]:
    """Turn what other people's code raises into an error of ours."""
    try:
        yield
    except (UnencodableError, DecodeError):
        raise
    except Exception as error:
        raise error_class(f"{what} raised {type(error).__name__}: {error}") from error


def _object_lifter(code: int) -> Callable[[Reader, memoryview], Any]:
    def lift(reader: Reader, data: memoryview) -> Any:
        name, state = reader.sequence(data, 2)
        kind = reader.types.kind_named(name, code)
        with _foreign(DecodeError, f"making a {name}"):
            return kind.make(state)

    return lift


def _lift_registered(reader: Reader, data: memoryview) -> Any:
    name, state = reader.sequence(data, 2)
    entry = reader.types.codec_named(name)
    with _foreign(DecodeError, f"from_state of {name!r}"):
        return entry.from_state(state)


def _load_torch() -> None:
    try:
        from omni_connector_core.codec import tensors
    except (ImportError, OSError) as error:
        if getattr(error, "name", None) != "torch" or not isinstance(error, ModuleNotFoundError):
            raise DecodeError(f"the payload holds a tensor, and torch is broken here: {error}") from error
        LIFTERS.update(raw_tensors.LIFTERS)
    else:
        LIFTERS.update(tensors.LIFTERS)


def _load_pil() -> None:
    try:
        from omni_connector_core.codec import images
    except ImportError as error:
        raise DecodeError("the payload holds an image", hint="pip install pillow") from error
    LIFTERS.update(images.LIFTERS)


def _deferred(codes: Sequence[int], load: Callable[[], None]) -> None:
    """Import a big package only when a frame holds something of it."""
    for code in codes:

        def lift(reader: Reader, data: memoryview, code: int = code) -> Any:
            load()
            return LIFTERS[code](reader, data)

        LIFTERS[code] = lift


LIFTERS |= {code: _object_lifter(code) for code in (DATACLASS, STRUCT, ENUM, NAMEDTUPLE)}
LIFTERS[REGISTERED] = _lift_registered
_deferred((TENSOR, TENSOR_GROUP, TORCH_SIZE, TORCH_DTYPE), _load_torch)
_deferred((IMAGE,), _load_pil)
