"""dict, list, tuple, set and frozenset."""

from __future__ import annotations

from typing import Any

from omni_connector_core.codec.walk import LIFTERS, Lowerer, Reader, UnencodableError, Writer, brief, check_depth
from omni_connector_core.codec.wire import FROZENSET, PAIRS, SET, TUPLE, Ext, pack
from omni_connector_core.errors import DecodeError

__all__ = ["LOWERERS"]

#: from how many values on a list is worth a look at whether it can be one group (see `TypeRegistry.grouper`)
MIN_GROUP = 8


def lower_list(writer: Writer, value: Any, depth: int) -> Any:
    if len(value) >= MIN_GROUP:
        grouper = writer.types.grouper(type(value[0]))
        if grouper is not None and (group := grouper(writer, value)) is not None:
            return group
    return writer.items(value, depth)


def lower_tuple(writer: Writer, value: Any, depth: int) -> Any:
    return Ext(TUPLE, pack(lower_list(writer, value, depth)))


def lower_dict(writer: Writer, value: Any, depth: int) -> Any:
    check_depth(depth)
    atoms = writer.atoms
    lowerers = writer.lowerers
    mark = len(writer.sources)
    lowered = {}
    key = None
    try:
        for key, item in value.items():
            if type(key) not in atoms and not _plain(writer, key, depth):
                break
            kind = type(item)
            lowered[key] = item if kind in atoms else lowerers[kind](writer, item, depth + 1)
        else:
            return lowered
    except UnencodableError as error:
        error.steps.append(f"[{brief(key)}]")
        raise
    return _lower_pairs(writer, value, depth, mark)


def _plain(writer: Writer, key: Any, depth: int) -> bool:
    """Whether msgpack holds a key that the careful walk does not let pass unseen."""
    return type(key) in (str, int) and writer.lower(key, depth) is key


def _lower_pairs(writer: Writer, value: Any, depth: int, mark: int) -> Any:
    # what was set aside before the first such key is set aside again
    del writer.sources[mark:]
    pairs: list[Any] = []
    key = None
    try:
        for key, item in value.items():
            pairs.append(writer.lower(key, depth + 1))
            pairs.append(writer.lower(item, depth + 1))
    except UnencodableError as error:
        error.steps.append(f"[{brief(key)}]" if len(pairs) % 2 else f"<key {brief(key)}>")
        raise
    return Ext(PAIRS, pack(pairs))


def _unordered(code: int) -> Lowerer:
    def lower(writer: Writer, value: Any, depth: int) -> Any:
        check_depth(depth)
        lowered = []
        item = None
        try:
            for item in value:
                lowered.append(writer.lower(item, depth + 1))
        except UnencodableError as error:
            error.steps.append(f"{{{brief(item)}}}")
            raise
        return Ext(code, pack(lowered))

    return lower


LOWERERS: dict[type, Lowerer] = {
    list: lower_list,
    tuple: lower_tuple,
    dict: lower_dict,
    set: _unordered(SET),
    frozenset: _unordered(FROZENSET),
}


def _lift_pairs(reader: Reader, data: memoryview) -> dict[Any, Any]:
    pairs = reader.sequence(data)
    if len(pairs) % 2:
        raise DecodeError("a dict has a key without a value")
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


LIFTERS[TUPLE] = lambda reader, data: tuple(reader.sequence(data))
LIFTERS[SET] = lambda reader, data: set(reader.sequence(data))
LIFTERS[FROZENSET] = lambda reader, data: frozenset(reader.sequence(data))
LIFTERS[PAIRS] = _lift_pairs
