"""The frame: what a transport carries.

::

    0    4s   magic "OMNF"
    4    u32  CRC-32 of the head from offset 8 to the end of the meta
    8    u16  format version
    10   u8   flags, 0
    11   u8   checksum algorithm of the data (see `checksum`)
    12   u32  number of buffers
    16   u32  length of the meta
    20   u64  length of the frame
    28   u64  sum of the data, 0 without an algorithm
    36        0
    64   u64  length of each buffer
         ...  meta: msgpack, the payload with its large parts replaced by buffer numbers (see `codec.wire`)
              0 to a multiple of 64; here ends the head
         ...  buffer 0, padding, buffer 1, ...: raw bytes, each starts at a multiple of 64

All numbers are little-endian, and so are the machines this is for: buffers cross as they lie in memory. Offsets are
derived from lengths and never sent. The head always carries a CRC-32 of itself; the data a sum if the codec was asked
for one. Buffer padding is not written: it is in no sum and nobody reads it.

A producer has a `Frame` (bytes that still lie in the payload's own objects) and copies it once into memory of its
transport, or hands its `Frame.segments` to an engine that gathers. A consumer has memory, and a `FrameLayout` that says
where in it the buffers are, without decoding anything.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from omni_connector_core import checksum
from omni_connector_core.errors import BufferMismatchError, DecodeError
from omni_connector_core.memcpy import RELEASE_GIL_NBYTES, Region, array_address, bytes_address, copy, region
from omni_connector_core.native import native

__all__ = [
    "ALIGNMENT",
    "FORMAT_VERSION",
    "PREFIX_NBYTES",
    "Frame",
    "FrameLayout",
    "Segment",
    "Source",
    "scatter",
    "scatter_plan",
]

ALIGNMENT: Final = 64
PREFIX_NBYTES: Final = 64
FORMAT_VERSION: Final = 1
MAGIC: Final = b"OMNF"

#: magic, CRC-32 of the head from the next field on, version, flags (0), checksum algorithm, number of buffers, length of
#: the meta, length of the frame, sum of the data, reserved (0)
_HEADER = struct.Struct("<4sIHBBIIQQ28x")
_START = struct.Struct("<4sI")
_COUNTS = struct.Struct("<12xII")
_PADDING: Final = bytes(ALIGNMENT)
_SUMMED_FROM: Final = _START.size
assert _HEADER.size == PREFIX_NBYTES


@lru_cache(maxsize=64)
def _after_sum(count: int) -> struct.Struct:
    """What follows the sum in the head of a frame of so many buffers: the rest of the header, and the lengths."""
    return struct.Struct(f"<HBBIIQQ28x{count}Q")


@lru_cache(maxsize=64)
def _lengths(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


#: A contiguous piece of a frame: (offset, address, nbytes). So many bytes at the address in this process belong at the offset of
#: the frame. A plain tuple, as `Source`.
Segment = tuple[int, int, int]


#: Where the bytes of one buffer come from: (origin, nbytes, owner). The origin is an address that ``owner`` keeps valid, or
#: a bytes object, or a flat view of less than `RELEASE_GIL_NBYTES` (copied from three times as fast as from an address), or a
#: function that writes the bytes into an array of uint8 that is given to it (a strided tensor, many small tensors in one
#: buffer), so that these too are copied only once. A plain tuple, because there is one per tensor.
Source = tuple[int | bytes | memoryview | Callable[[np.ndarray[Any, Any]], None], int, object]


class Frame:
    """An encoded payload whose buffers still lie where the payload has them.

    The payload must not be changed until the frame was written.

    Attributes
    ----------
    head : bytes
        Header, lengths and meta, padded to a multiple of 64.
    nbytes : int
        Length of the whole frame, padding included.
    """

    __slots__ = ("_sources", "head", "nbytes")

    @classmethod
    def of_head(cls, head: bytes, nbytes: int, sources: list[Source]) -> Frame:
        """Make a frame of ``nbytes`` bytes whose head exists."""
        frame = cls.__new__(cls)
        frame.head = head
        frame.nbytes = nbytes
        frame._sources = sources
        return frame

    def __init__(self, meta: bytes, sources: list[Source], checksum_algorithm: checksum.Algorithm = 0) -> None:
        count, meta_nbytes = len(sources), len(meta)
        if meta_nbytes >= 1 << 32:
            raise ValueError("the values beside the buffers are longer than 4 GiB")
        lengths: list[int] = []
        unpadded = PREFIX_NBYTES + 8 * count + meta_nbytes
        head_nbytes = nbytes = (unpadded + 63) & -64
        for _, length, _ in sources:
            lengths.append(length)
            nbytes += (length + 63) & -64
        self.nbytes = nbytes
        self._sources = sources
        total = checksum.data_sum(checksum_algorithm, self.buffers) if checksum_algorithm else 0
        fields = _after_sum(count).pack(
            FORMAT_VERSION, 0, checksum_algorithm, count, meta_nbytes, nbytes, total, *lengths
        )
        head_sum = zlib.crc32(meta, zlib.crc32(fields))
        self.head = b"".join((_START.pack(MAGIC, head_sum), fields, meta, _PADDING[: head_nbytes - unpadded]))

    @property
    def buffers(self) -> list[memoryview]:
        """The raw buffers in order, read-only and flat; each view keeps its memory alive."""
        return [_view(self._place(index)) for index in range(len(self._sources))]

    def write_into(self, dest: Any) -> None:
        """Copy the frame into ``dest``: the head, then one memcpy for each buffer. Large ones run without the GIL.

        Parameters
        ----------
        dest
            Writable contiguous memory of at least `nbytes`; what lies behind the frame stays as it is.

        Raises
        ------
        BufferMismatchError
            If ``dest`` is too small.
        TypeError
            If ``dest`` is not writable.
        """
        if native is not None and native.write(self.head, self._sources, dest):
            return
        view = memoryview(dest).cast("B")
        if view.nbytes < self.nbytes:
            raise BufferMismatchError(f"the frame has {self.nbytes} bytes, the destination {view.nbytes}")
        offset = len(self.head)
        view[:offset] = self.head
        start = 0
        for origin, nbytes, _owner in self._sources:
            if callable(origin):
                origin(np.frombuffer(view, np.uint8, nbytes, offset))
            elif isinstance(origin, memoryview) or (nbytes < RELEASE_GIL_NBYTES and isinstance(origin, bytes)):
                view[offset : offset + nbytes] = origin
            else:
                start = start or ctypes.addressof(ctypes.c_char.from_buffer(view))
                copy(start + offset, origin, nbytes)
            offset += (nbytes + 63) & -64

    def segments(self) -> list[Segment]:
        """List the frame's pieces of memory, head first, for an engine that gathers them itself.

        Nothing is copied, save buffers that exist nowhere in one piece yet (strided tensors, groups of small ones):
        these are made once and kept. Addresses are valid while the frame is alive. Empty buffers are left out.
        """
        head = self.head
        offset = len(head)
        pieces: list[Segment] = [(0, bytes_address(head), offset)]
        for index, (origin, nbytes, _owner) in enumerate(self._sources):
            if nbytes:
                address = origin if type(origin) is int else self._place(index).address
                pieces.append((offset, address, nbytes))
                offset += (nbytes + 63) & -64
        return pieces

    def _place(self, index: int) -> Region:
        """Give a buffer an address, which from here on is its origin."""
        origin, nbytes, owner = self._sources[index]
        if isinstance(origin, int):
            return Region(origin, nbytes, owner)
        if isinstance(origin, bytes | memoryview):
            place = region(origin)
        else:
            made = np.empty(nbytes, np.uint8)
            origin(made)
            place = Region(array_address(made), nbytes, made)
        self._sources[index] = place
        return place


def _view(place: Region) -> memoryview:
    if not place.nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * place.nbytes).from_address(place.address)
    array.owner = place.owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B").toreadonly()


def _parse_header(header: Any) -> tuple[int, int, int, int, int, int]:
    """Return sum of the head, checksum algorithm, number of buffers, length of the meta, of the frame, sum of the data."""
    try:
        magic, head_sum, version, flags, algorithm, count, meta_nbytes, total, data_sum = _HEADER.unpack_from(header)
    except struct.error as error:
        raise DecodeError(f"a frame starts with {PREFIX_NBYTES} bytes; there are fewer") from error
    if magic != MAGIC:
        raise DecodeError(f"not a frame: it starts with {magic!r} instead of {MAGIC!r}")
    if version != FORMAT_VERSION or flags:
        raise DecodeError(
            f"frame format {version}.{flags}, this codec reads {FORMAT_VERSION}.0",
            hint="Install the same version of omni-connector-core on both sides",
        )
    head_nbytes = (PREFIX_NBYTES + 8 * count + meta_nbytes + 63) & -64
    if total < head_nbytes:
        raise DecodeError(f"a head of {head_nbytes} bytes in a frame of {total}")
    return head_sum, algorithm, count, meta_nbytes, total, data_sum


class FrameLayout:
    """Where things are in a frame; made from its head alone.

    Attributes
    ----------
    offsets, lengths : list of int
        Of each raw buffer, in bytes from the start of the frame.
    meta : memoryview
        The msgpack meta.
    head_nbytes, total_nbytes : int
        Length of the head, and of the whole frame.
    checksum_algorithm, data_sum : int
        What the data should add up to, see `verify`.
    """

    __slots__ = ("checksum_algorithm", "data_sum", "head_nbytes", "lengths", "meta", "offsets", "total_nbytes")

    def __init__(
        self, offsets: list[int], lengths: list[int], meta: memoryview, total_nbytes: int, sums: tuple[int, int]
    ) -> None:
        self.total_nbytes = total_nbytes
        self.head_nbytes = offsets[0] if offsets else total_nbytes
        self.offsets = offsets
        self.lengths = lengths
        self.meta = meta
        self.checksum_algorithm, self.data_sum = sums

    @staticmethod
    def parse_prefix(prefix: Any) -> tuple[int, int]:
        """Lengths of the head and of the whole frame, from the first 64 bytes.

        Nothing is proven yet: the sum over the head is checked by `parse_head`.

        Raises
        ------
        DecodeError
            If this is not the start of a frame of this version.
        """
        _, _, count, meta_nbytes, total, _ = _parse_header(prefix)
        return (PREFIX_NBYTES + 8 * count + meta_nbytes + 63) & -64, total

    @classmethod
    def parse_head(cls, head: Any) -> FrameLayout:
        """Read a head from a flat buffer of bytes, which may be longer; the head is copied.

        The copy is what makes checks hold: the producer may still write to memory that is shared with it.

        Raises
        ------
        DecodeError
            If the head is cut short, its sum is wrong, or its parts contradict each other.
        """
        raw = memoryview(head)
        try:
            count, meta_nbytes = _COUNTS.unpack_from(raw)
        except struct.error:
            count = meta_nbytes = 0  # too short even for the header, which says so below
        own = raw[: (PREFIX_NBYTES + 8 * count + meta_nbytes + 63) & -64].tobytes()
        head_sum, algorithm, count, meta_nbytes, total, data_sum = _parse_header(own)
        meta_start = PREFIX_NBYTES + 8 * count
        meta_end = meta_start + meta_nbytes
        end = (meta_end + 63) & -64
        if end != len(own):
            raise DecodeError(f"a head of {end} bytes, of which {len(own)} are there")
        view = memoryview(own)
        if zlib.crc32(view[_SUMMED_FROM:meta_end]) != head_sum:
            raise DecodeError("the head of the frame is corrupt: its checksum is wrong")
        lengths: list[int] = []
        offsets: list[int] = []
        if count:
            lengths.extend(_lengths(count).unpack_from(own, PREFIX_NBYTES))
            for length in lengths:
                offsets.append(end)
                end += (length + 63) & -64
        if end != total:
            raise DecodeError(f"the parts of the frame add up to {end} bytes, its header says {total}")
        return cls(offsets, lengths, view[meta_start:meta_end], total, (algorithm, data_sum))

    def verify(self, memory: Any) -> None:
        """Check that ``memory`` holds the frame whole, and its data sum if it has one.

        Raises
        ------
        DecodeError
            If it is cut short or the sum is wrong, or this process lacks the algorithm.
        """
        view = memoryview(memory)
        if view.nbytes < self.total_nbytes:
            raise DecodeError(f"the frame has {self.total_nbytes} bytes, of which {view.nbytes} are there")
        if not self.checksum_algorithm:
            return
        view = view.cast("B")
        spans = zip(self.offsets, self.lengths, strict=True)
        try:
            found = checksum.data_sum(self.checksum_algorithm, (view[at : at + n] for at, n in spans))
        except LookupError as error:
            raise DecodeError(f"checksum algorithm {self.checksum_algorithm} is not known") from error
        except ImportError as error:
            raise DecodeError(str(error)) from error
        if found != self.data_sum:
            raise DecodeError("the data of the frame is corrupt: its checksum is wrong")


def scatter(memory: Any, buffers: Iterable[Any]) -> int:
    """Copy the raw buffers of a frame, in order and without padding, into the caller's buffers.

    One memcpy for each piece; a piece ends where a buffer ends on either side. About 1 us a small piece.

    Parameters
    ----------
    memory
        The frame, whole; it may be followed by anything.
    buffers
        Writable contiguous buffers or CPU tensors, together as long as the frame's buffers.

    Returns
    -------
    int
        How many bytes were copied.

    Raises
    ------
    BufferMismatchError
        If the lengths differ; nothing was copied then.
    DecodeError
        If this is no frame, or it is cut short or corrupt.
    """
    source = region(memory)
    layout = FrameLayout.parse_head(memory)
    layout.verify(memory)
    targets = [region(buffer, writable=True) for buffer in buffers]
    for frame_offset, index, buffer_offset, nbytes in scatter_plan(layout, [target.nbytes for target in targets]):
        copy(targets[index].address + buffer_offset, source.address + frame_offset, nbytes)
    return sum(layout.lengths)


def scatter_plan(layout: FrameLayout, sizes: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Which bytes of a frame go where, if its raw buffers are read as one stream into buffers of ``sizes`` bytes.

    Returns
    -------
    list of (frame_offset, buffer_index, buffer_offset, nbytes)
        In order; no empty pieces.

    Raises
    ------
    BufferMismatchError
        If the sums of the lengths differ.
    """
    have, room = sum(layout.lengths), sum(sizes)
    if have != room:
        raise BufferMismatchError(
            f"the payload has {have} raw bytes in {len(layout.lengths)} buffers, the {len(sizes)} given hold {room}"
        )
    plan = []
    index, used = 0, 0
    for start, length in zip(layout.offsets, layout.lengths, strict=True):
        done = 0
        while done < length:
            left = sizes[index] - used
            if not left:
                index, used = index + 1, 0
                continue
            step = min(left, length - done)
            plan.append((start + done, index, used, step))
            done += step
            used += step
    return plan
