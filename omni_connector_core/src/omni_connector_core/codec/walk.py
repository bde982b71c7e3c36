"""The walk over a payload, and the walk back.

`Writer` lowers a payload to what msgpack holds exactly, setting large bytes aside as sources of the frame; `Reader`
lifts it again. Both dispatch on a table: by exact type one way, by Ext code the other. The modules beside this one
fill the tables, each for the types it is named after.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omni_connector_core.codec.wire import MAX_DEPTH, unpack
from omni_connector_core.errors import DecodeError
from omni_connector_core.frame import FrameLayout, Source

if TYPE_CHECKING:
    from omni_connector_core.codec.registry import TypeRegistry

__all__ = ["LIFTERS", "Grouper", "Lifter", "Lowerer", "Reader", "UnencodableError", "Writer", "brief", "check_depth"]

Lowerer = Callable[["Writer", Any, int], Any]
Lifter = Callable[["Reader", memoryview], Any]
Grouper = Callable[["Writer", Any], Any]

#: what msgpack carries as it is
ATOMS: Final = frozenset({str, int, float, bool, type(None)})
#: the same without what it carries only mostly: ints of up to 64 bits, str without lone surrogates
EXACT_ATOMS: Final = ATOMS - {str, int}

#: Ext code -> function that makes the value
LIFTERS: dict[int, Lifter] = {}


class UnencodableError(Exception):
    """Raised where the walk meets something it cannot encode; containers add their step on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.steps: list[str] = []

    @property
    def path(self) -> str:
        """Where in the payload."""
        return "payload" + "".join(reversed(self.steps))


class Writer:
    """State of one encode.

    Attributes
    ----------
    sources
        The frame's buffers so far.
    atoms
        Types that pass as they are. The first walk trusts msgpack to refuse a large int or a lone surrogate; if it
        does, a second, careful one looks at each int and str.
    """

    __slots__ = ("atoms", "lowerers", "sources", "types")

    def __init__(self, types: TypeRegistry, *, careful: bool = False) -> None:
        self.types = types
        self.lowerers = types.lowerers
        self.atoms = EXACT_ATOMS if careful else ATOMS
        self.sources: list[Source] = []

    def lower(self, value: Any, depth: int) -> Any:
        """Make what stands for ``value`` in the meta."""
        kind = type(value)
        if kind in self.atoms:
            return value
        return self.lowerers[kind](self, value, depth)

    def items(self, values: Any, depth: int) -> Any:
        """Lower each of ``values``; the sequence itself if that changes nothing."""
        atoms = self.atoms
        if atoms.issuperset(map(type, values)):
            return values
        check_depth(depth)
        lowerers = self.lowerers
        lowered: list[Any] = []
        append = lowered.append
        try:
            for value in values:
                kind = type(value)
                append(value if kind in atoms else lowerers[kind](self, value, depth + 1))
        except UnencodableError as error:
            error.steps.append(f"[{len(lowered)}]")
            raise
        return lowered

    def attributes(self, state: dict[str, Any], depth: int) -> dict[str, Any]:
        """Lower the values of an object's state."""
        check_depth(depth)
        atoms = self.atoms
        lowerers = self.lowerers
        lowered = {}
        name = ""
        try:
            for name, value in state.items():
                kind = type(value)
                lowered[name] = value if kind in atoms else lowerers[kind](self, value, depth + 1)
        except UnencodableError as error:
            error.steps.append(f".{name}")
            raise
        return lowered

    def put(self, origin: Any, nbytes: int, owner: object = None) -> int:
        """Set bytes aside, see `Source`; returns the number of their buffer."""
        self.sources.append((origin, nbytes, owner))
        return len(self.sources) - 1


def check_depth(depth: int) -> None:
    """Refuse a container inside too many others."""
    if depth >= MAX_DEPTH:
        raise UnencodableError(f"nested deeper than {MAX_DEPTH}, or it contains itself")


#: repr for paths: short, and never raising
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
brief = _repr.repr


class Reader:
    """State of one decode.

    Attributes
    ----------
    base : ndarray of uint8
        The frame's memory. Views are made from it, because it keeps the memory's own object alive and exported:
        torch alone would let go of an mmap that is then closed under the tensor.
    writeable
        Whether the memory may be written to.
    private
        Whether values must not refer to the memory.
    """

    __slots__ = ("base", "depth", "lengths", "offsets", "private", "types", "writeable")

    def __init__(self, types: TypeRegistry, base: np.ndarray[Any, Any], layout: FrameLayout, private: bool) -> None:
        self.types = types
        self.base = base
        self.writeable = base.flags.writeable
        self.offsets = layout.offsets
        self.lengths = layout.lengths.copy()
        self.private = private
        self.depth = 0

    def lift(self, code: int, data: memoryview) -> Any:
        """Make the value of an Ext; msgspec calls this."""
        lifter = LIFTERS.get(code)
        if lifter is None:
            raise DecodeError(f"values of kind {code} are not known")
        return lifter(self, data)

    def unpack(self, data: memoryview) -> Any:
        """Make the value of the msgpack inside an Ext."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise DecodeError(f"nested deeper than {MAX_DEPTH}")
        value = unpack(data, ext_hook=self.lift)
        self.depth -= 1
        return value

    def sequence(self, data: memoryview, length: int | None = None) -> list[Any]:
        """Make a list of it, of ``length`` items if given."""
        value = self.unpack(data)
        if type(value) is not list or (length is not None and len(value) != length):
            raise DecodeError("a part of the meta has the wrong form")
        return value

    def span(self, index: Any) -> tuple[int, int]:
        """Take a buffer: its offset and length.

        Each is taken once, or a short message could ask for any number of copies of a long buffer.
        """
        if type(index) is not int or not 0 <= index < len(self.lengths):
            raise DecodeError(f"there is no buffer {index!r}")
        nbytes = self.lengths[index]
        if nbytes < 0:
            raise DecodeError(f"buffer {index} is used twice")
        self.lengths[index] = -1
        return self.offsets[index], nbytes

    def buffer(self, index: Any) -> np.ndarray[Any, Any]:
        """Take a buffer, as a view of the frame's memory."""
        offset, nbytes = self.span(index)
        return self.base[offset : offset + nbytes]
