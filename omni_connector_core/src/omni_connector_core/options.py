"""A backend's options: a frozen dataclass whose fields carry their own documentation and check.

::

    @dataclass(frozen=True, kw_only=True)
    class SharedMemoryOptions(Options):
        pool_bytes: int = option(parse=byte_size, default="64MiB", doc="Size of the first pool segment.")

The option tables of the documentation are generated from the same fields (`option_table`).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from omni_connector_core.errors import OptionError

__all__ = ["Options", "at_least", "byte_size", "one_of", "option", "option_table", "parse_options", "suggestion"]

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)} | {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

OptionsT = TypeVar("OptionsT", bound="Options")


def option(*, default: Any, doc: str, parse: Callable[[Any], Any] | None = None) -> Any:
    """Declare an option.

    Parameters
    ----------
    default
        What holds when the option is not given, in the form in which a user would write it.
    doc
        One or two sentences for the option table, with the unit.
    parse
        Turns what the user wrote into the value, raising ValueError with the reason; also run on the default.
    """
    value = default if parse is None else parse(default)
    metadata = {"doc": doc, "parse": parse, "shown": default}
    if isinstance(value, dict | list):
        return dataclasses.field(default_factory=lambda: type(value)(value), metadata=metadata)
    return dataclasses.field(default=value, metadata=metadata)


def byte_size(value: Any) -> int:
    """Parse a size in bytes: an int, or text such as ``"512MiB"`` or ``"1.5 GB"``."""
    if type(value) is int and value > 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("a size is a positive int of bytes, or text such as '512MiB' or '1.5 GB'")
    nbytes = int(float(match[1]) * unit)
    if nbytes <= 0:
        raise ValueError("a size is more than zero")
    return nbytes


def at_least(minimum: float) -> Callable[[Any], Any]:
    """Make a parser for a number that is not below `minimum`."""

    def parse(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= minimum:
            raise ValueError(f"expected a number of at least {minimum:g}")
        return value

    return parse


def one_of(*choices: str) -> Callable[[Any], str]:
    """Make a parser for one of a few words."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}{suggestion(value, choices)}")
        return str(value)

    return parse


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every backend can be told. A backend's own options inherit from this."""

    timeout_s: float = option(
        parse=at_least(0), default=30.0, doc="Deadline of a put or get that names no timeout, seconds."
    )
    ttl_s: float = option(parse=at_least(0), default=300.0, doc="An unread payload is freed after this many seconds.")
    checksum: str = option(
        parse=one_of("none", "crc32", "xxh3"),
        default="none",
        doc="Checksum over payload bytes; header and structure always carry one. xxh3 needs the xxhash package.",
    )
    stream_window: int = option(
        parse=at_least(1), default=64, doc="Chunks of one stream that may be unread before its writer waits."
    )


def parse_options(options: type[OptionsT], config: Mapping[str, Any] | None, *, backend: str) -> OptionsT:
    """Check a backend's config and build its options; the mapping is not changed.

    Raises
    ------
    OptionError
        An unknown option (lists the known ones and suggests the nearest), a wrong type, or a bad value.
    """
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        raise OptionError(f"config is a mapping of options, not {type(config).__name__}", backend=backend)
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    values = {}
    for name, given in config.items():
        field = fields.get(name)
        if field is None:
            raise OptionError(
                f"unknown option {name!r}{suggestion(name, fields)}",
                backend=backend,
                hint=f"Known options: {', '.join(sorted(fields))}",
            )
        try:
            parse = field.metadata["parse"]
            value = given if parse is None else parse(given)
            values[name] = _typed(value, hints[name])
        except ValueError as error:
            raise OptionError(
                f"option {name}: {error}, got {given!r}", backend=backend, hint=field.metadata["doc"]
            ) from error
    return options(**values)


def _typed(value: Any, hint: Any) -> Any:
    """Check a value against the few kinds of annotation that options use."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for arm in typing.get_args(hint):
            try:
                return _typed(value, arm)
            except ValueError:
                continue
    elif origin is Literal:
        if value in typing.get_args(hint):
            return value
    elif hint is Any or hint in (None, type(None)):
        if hint is Any or value is None:
            return value
    elif hint is float and type(value) is int:
        return float(value)
    elif isinstance(value, origin or hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise ValueError(f"expected {_name(hint)}")


def _name(hint: Any) -> str:
    return "nothing" if hint in (None, type(None)) else getattr(hint, "__name__", str(hint))


def suggestion(given: object, known: typing.Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` when one of `known` is close to `given`, else an empty string."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def option_table(options: type[Options]) -> str:
    """Render the options as a Markdown table: name, default, meaning."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    fields = dataclasses.fields(options)
    own = [f for f in fields if f.name not in Options.__dataclass_fields__]
    for field in [*own, *(f for f in fields if f.name in Options.__dataclass_fields__)]:
        shown = field.metadata["shown"]
        lines.append(f"| `{field.name}` | `{'-' if shown is None else shown}` | {field.metadata['doc']} |")
    return "\n".join(lines) + "\n"
