"""Instances of classes: dataclasses, msgspec structs, enum members and named tuples.

Each kind says how to read the state of an instance and how to make one from it. Which class a name on the wire may
stand for is decided in `registry`.

An instance of a dataclass is made without ``__init__`` and ``__post_init__``: its state is what crosses. msgspec has no
such way; a struct is constructed, with ``__post_init__`` if it has one, and then given its fields' exact values.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any

import msgspec

from omni_connector_core.codec.walk import UnencodableError, Writer
from omni_connector_core.codec.wire import DATACLASS, ENUM, NAMEDTUPLE, STRUCT
from omni_connector_core.errors import DecodeError

__all__ = ["Kind", "kind_of"]


class Kind:
    """How instances of one class cross.

    Attributes
    ----------
    code
        Ext code of the kind, so that the two sides agree on more than the name.
    """

    code: int

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def state(self, writer: Writer, value: Any, depth: int) -> Any:
        """Lower the state of an instance."""
        raise NotImplementedError

    def make(self, state: Any) -> Any:
        """Make an instance from its lifted state, which is not to be trusted; raises ValueError or TypeError."""
        raise NotImplementedError


class _Attributes(Kind):
    """State is a dict of attributes."""

    def __init__(self, cls: type, fields: tuple[str, ...]) -> None:
        super().__init__(cls)
        self.fields = fields
        self.slots = {
            name: member
            for base in reversed(cls.__mro__)
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        self.has_dict = bool(cls.__dictoffset__)

    def read(self, value: Any) -> dict[str, Any]:
        state = {}
        for name, member in self.slots.items():
            try:
                state[name] = member.__get__(value)
            except AttributeError:
                raise UnencodableError(f"attribute {name!r} of {self.cls.__qualname__} is not set") from None
        if self.has_dict:
            state.update(value.__dict__)
        return state

    def state(self, writer: Writer, value: Any, depth: int) -> Any:
        return writer.attributes(self.read(value), depth)

    def check(self, state: Any) -> dict[str, Any]:
        """Refuse the state of another version of the class."""
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise DecodeError(f"the state of a {self.cls.__qualname__} has the wrong form")
        for name in (*self.fields, *self.slots):
            # a field that was never set falls back to the default, which is an attribute of the class
            if name not in state and (name in self.slots or not hasattr(self.cls, name)):
                raise self._skew(f"lacks {name!r}")
        if not self.has_dict and (more := state.keys() - self.slots.keys() - set(self.fields)):
            raise self._skew(f"has {', '.join(map(repr, sorted(more)))} too")
        if self.has_dict and any(name.startswith("__") and name.endswith("__") for name in state):
            raise self._skew("has special attributes")
        return state

    def _skew(self, what: str) -> DecodeError:
        return DecodeError(
            f"a {self.cls.__module__}.{self.cls.__qualname__} of the producer {what}",
            hint="Run the same version of this class on both sides",
        )


class Dataclass(_Attributes):
    """Any dataclass of pure Python: frozen, with slots, with attributes that are no fields."""

    code = DATACLASS

    def __init__(self, cls: type) -> None:
        super().__init__(cls, tuple(field.name for field in dataclasses.fields(cls)))

    def make(self, state: Any) -> Any:
        state = self.check(state)
        value: Any = object.__new__(self.cls)
        for name, member in self.slots.items():
            member.__set__(value, state.pop(name))
        if self.has_dict:
            value.__dict__.update(state)
        return value


class Struct(_Attributes):
    """A `msgspec.Struct`."""

    code = STRUCT

    def __init__(self, cls: type[msgspec.Struct]) -> None:
        super().__init__(cls, cls.__struct_fields__)
        self.has_post_init = hasattr(cls, "__post_init__")

    def make(self, state: Any) -> Any:
        state = self.check(state)
        fields = {name: state[name] for name in self.fields if name in state}
        value = self.cls(**fields)
        if self.has_post_init:
            for name, item in fields.items():
                msgspec.structs.force_setattr(value, name, item)
        if len(state) > len(fields):
            value.__dict__.update((name, item) for name, item in state.items() if name not in fields)
        return value


class Enum(Kind):
    """A member, by its name; of flags, by its value, because combinations have no name."""

    code = ENUM

    def state(self, writer: Writer, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Flag):
            return writer.lower(value._value_, depth)
        if value._name_ not in self.cls.__members__:  # type: ignore[attr-defined]
            raise UnencodableError(f"{value!r} is not a member of {self.cls.__qualname__} by name")
        return value._name_

    def make(self, state: Any) -> Any:
        if issubclass(self.cls, enum.Flag):
            if type(state) is not int:
                raise DecodeError(f"a {self.cls.__qualname__} without a number")
            return self.cls(state)
        member = self.cls.__members__.get(state)  # type: ignore[attr-defined]
        if member is None:
            raise DecodeError(f"{self.cls.__qualname__} has no member {state!r}")
        return member


class NamedTuple(Kind):
    """An instance of what `collections.namedtuple` or `typing.NamedTuple` made."""

    code = NAMEDTUPLE

    def state(self, writer: Writer, value: Any, depth: int) -> Any:
        if getattr(value, "__dict__", None):
            raise UnencodableError(f"a {self.cls.__qualname__} with attributes beside its fields")
        return writer.items(list(value), depth)

    def make(self, state: Any) -> Any:
        if type(state) is not list or len(state) != len(self.cls._fields):  # type: ignore[attr-defined]
            raise DecodeError(f"a {self.cls.__qualname__} of the producer has other fields")
        return tuple.__new__(self.cls, state)


def kind_of(cls: type) -> Kind | None:
    """Tell the kind of a class; None if it is none of these, or is one and something else besides, such as a dict."""
    if issubclass(cls, enum.Enum):
        return Enum(cls)
    if issubclass(cls, msgspec.Struct):
        return Struct(cls)
    if issubclass(cls, tuple):
        return NamedTuple(cls) if isinstance(getattr(cls, "_fields", None), tuple) else None
    if dataclasses.is_dataclass(cls) and all(base is object or _is_python(base) for base in cls.__mro__):
        return Dataclass(cls)
    return None


def _is_python(cls: type) -> bool:
    return bool(cls.__flags__ & (1 << 9))  # Py_TPFLAGS_HEAPTYPE: made by a class statement, holds no C state
