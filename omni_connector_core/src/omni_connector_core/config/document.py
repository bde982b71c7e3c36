"""YAML as plain dicts and lists that remember the file and line of everything in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omni_connector_core.errors import ConfigError

__all__ = ["Mapped", "Position", "Sequenced", "placed", "plain", "read_yaml"]


@dataclass(frozen=True, slots=True)
class Position:
    """A line of a file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = Position("<config>", 1)


class Mapped(dict[Any, Any]):
    """A mapping of a document; `at(key)` is where that key stands, `position` where the mapping begins."""

    position: Position = NOWHERE

    def __init__(self) -> None:
        super().__init__()
        self._positions: dict[Any, Position] = {}

    def at(self, key: Any) -> Position:
        """Where a key stands; where the mapping begins when the key is not from a file."""
        return self._positions.get(key, self.position)

    def put(self, key: Any, value: Any, position: Position) -> None:
        """Set a key that stands at a position."""
        self[key] = value
        self._positions[key] = position


class Sequenced(list[Any]):
    """A sequence of a document; `at(index)` is where that item stands."""

    position: Position = NOWHERE

    def __init__(self) -> None:
        super().__init__()
        self._positions: list[Position] = []

    def at(self, index: int) -> Position:
        """Where an item stands."""
        return self._positions[index] if index < len(self._positions) else self.position

    def put(self, value: Any, position: Position) -> None:
        """Append an item that stands at a position."""
        self.append(value)
        self._positions.append(position)

    def placed(self) -> Iterator[tuple[Any, Position]]:
        """Iterate over the items with where they stand."""
        return ((item, self.at(index)) for index, item in enumerate(self))


def read_yaml(path: Path) -> Mapped:
    """Read a file whose top level is a mapping.

    Raises
    ------
    ConfigError
        It cannot be read, is not YAML, repeats a key, or its top level is something else; with file and line.
    """
    try:
        loader = yaml.SafeLoader(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason}") from error
    try:
        node = loader.get_single_node()
        tree = Mapped() if node is None else _Builder(loader, str(path)).build(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {error.problem}") from error
    finally:
        loader.dispose()
    if not isinstance(tree, Mapped):
        raise ConfigError(f"{path}:1: the top level is a mapping, not {type(tree).__name__}")
    return tree


_MERGE = "tag:yaml.org,2002:merge"
"""The tag of the key ``<<``."""


class _Builder:
    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self._loader, self._file = loader, file

    def build(self, node: yaml.Node) -> Any:
        position = self._position(node)
        if isinstance(node, yaml.MappingNode):
            mapped = Mapped()
            mapped.position = position
            self._refuse_repeated_keys(node)
            self._loader.flatten_mapping(node)  # resolves `<<`, putting what is merged in first
            for key_node, value_node in node.value:
                mapped.put(self._key(key_node), self.build(value_node), self._position(key_node))
            return mapped
        if isinstance(node, yaml.SequenceNode):
            sequenced = Sequenced()
            sequenced.position = position
            for item in node.value:
                sequenced.put(self.build(item), self._position(item))
            return sequenced
        return self._loader.construct_object(node, deep=True)

    def _key(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{self._position(node)}: a key is a scalar")
        return self._loader.construct_object(node, deep=True)

    def _refuse_repeated_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self._key(key_node)
            if key in lines:
                raise ConfigError(f"{self._position(key_node)}: {key!r} is given twice, first at line {lines[key]}")
            lines[key] = key_node.start_mark.line + 1

    def _position(self, node: yaml.Node) -> Position:
        return Position(self._file, node.start_mark.line + 1)


def placed(value: Any, position: Position = NOWHERE) -> Any:
    """Turn plain dicts and lists into placed ones, all at one position; the given ones are not changed."""
    if isinstance(value, Mapped | Sequenced):
        return value
    if isinstance(value, dict):
        mapped = Mapped()
        mapped.position = position
        for key, item in value.items():
            mapped.put(key, placed(item, position), position)
        return mapped
    if isinstance(value, list | tuple):
        sequenced = Sequenced()
        sequenced.position = position
        for item in value:
            sequenced.put(placed(item, position), position)
        return sequenced
    return value


def plain(value: Any) -> Any:
    """Turn placed mappings and sequences into fresh plain dicts and lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value
