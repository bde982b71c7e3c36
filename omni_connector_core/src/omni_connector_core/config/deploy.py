"""The connector part of a deploy file: which backend, with which options, carries which edge.

It is the schema of vLLM-Omni's deploy YAML, so that one file serves both, and a short form::

    connectors:
      fast: {name: shared_memory, extra: {ttl_s: 60}}
    stages:
      - stage_id: 0
        output_connectors: {to_stage_1: fast}
      - stage_id: 1
        input_connectors: {from_stage_0: fast}

    connector: {type: shared_memory}          # the short form: one connector on every edge of `edges`
    edges: [{from: 0, to: 1}]
    stages: [{stage_id: 0}, {stage_id: 1}]

It is role-neutral: no role, port or peer address stands in it; `omni_connector_core.config.wiring` derives which end of
which edge a process is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_connector_core.config.document import Mapped, Position, Sequenced, placed, plain
from omni_connector_core.config.merge import read_with_bases
from omni_connector_core.errors import ConfigError
from omni_connector_core.key import Edge
from omni_connector_core.options import suggestion

__all__ = ["ConnectorConfig", "DeployConfig", "EdgeConfig", "StageConfig", "faults", "load", "parse"]

CONNECTOR_KEYS = ("name", "type", "extra", "pipeline_options")
TOP_KEYS = ("connectors", "connector", "edges", "stages")
STAGE_KEYS = ("stage_id", "input_connectors", "output_connectors")
EDGE_KEYS = ("from", "to", "window_size", "max_inflight")
RUNTIME_KEYS = ("role", "is_sender", "sender_host", "sender_zmq_port")
SIDES = (("output_connectors", "to_stage_"), ("input_connectors", "from_stage_"))


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """One connector as the file describes it.

    Attributes
    ----------
    name
        The backend.
    options
        The backend's own options.
    pipeline_options
        Names among `options` that belong to the pipeline's models and not to the backend.
    position, options_position
        Where it stands, and where each option does.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    pipeline_options: tuple[str, ...] = ()
    position: Position = field(default=Position("<config>", 1), compare=False)
    options_position: Mapping[str, Position] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """One edge and the connector that carries it."""

    edge: Edge
    connector: ConnectorConfig
    position: Position = field(default=Position("<config>", 1), compare=False)


@dataclass(frozen=True, slots=True)
class StageConfig:
    """One stage: its id, and everything about it that is not of connectors.

    Attributes
    ----------
    extra
        The stage's other keys, as plain data.
    positions
        Where each of the stage's keys stands.
    """

    stage_id: str
    extra: dict[str, Any] = field(default_factory=dict)
    position: Position = field(default=Position("<config>", 1), compare=False)
    positions: Mapping[str, Position] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class DeployConfig:
    """A deploy file, checked.

    Attributes
    ----------
    extra
        The file's other top-level keys, as plain data.
    positions
        Where each top-level key stands.
    """

    stages: tuple[StageConfig, ...]
    edges: tuple[EdgeConfig, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    positions: Mapping[str, Position] = field(default_factory=dict, compare=False)

    def stage(self, stage_id: str | int) -> StageConfig:
        """Return a stage by its id.

        Raises
        ------
        ConfigError
            There is none; lists what there is.
        """
        for stage in self.stages:
            if stage.stage_id == str(stage_id):
                return stage
        known = [stage.stage_id for stage in self.stages]
        raise ConfigError(f"there is no stage {stage_id!r}{suggestion(stage_id, known)}; stages: {', '.join(known)}")


def load(path: str | Path) -> DeployConfig:
    """Read and check a deploy file.

    Raises
    ------
    ConfigError
        Whatever is wrong, all of it, a line each, with file and line.
    """
    document = read_with_bases(Path(path))
    reader = _Reader(document)
    return _checked(reader)


def parse(document: Mapping[str, Any]) -> DeployConfig:
    """Check a deploy config given as plain data; it is not changed. Raises as `load` does."""
    return _checked(_Reader(placed(dict(document))))


def faults(path: str | Path) -> list[ConfigError]:
    """Return everything that is wrong with a deploy file, instead of raising it."""
    try:
        reader = _Reader(read_with_bases(Path(path)))
    except ConfigError as error:
        return [error]
    reader.read()
    return reader.faults


def _checked(reader: _Reader) -> DeployConfig:
    config = reader.read()
    if reader.faults:
        raise ConfigError("\n".join(fault.message for fault in reader.faults))
    return config


class _Reader:
    """Reads one document, going on after a fault so that all are found."""

    def __init__(self, document: Mapped) -> None:
        self._document = document
        self.faults: list[ConfigError] = []
        self._definitions: dict[str, ConnectorConfig] = {}
        self._edges: dict[Edge, EdgeConfig] = {}

    def read(self) -> DeployConfig:
        document = self._document
        self._refuse_near_misses(document, TOP_KEYS)
        if "stage_args" in document:
            self._fault(document.at("stage_args"), "stage_args is the schema of older releases: use stages")
        stages = self._stages()
        self._definitions = self._connectors()
        default = document.get("connector")
        short = self._connector("connector", default, document.at("connector")) if default is not None else None
        ids = [stage.stage_id for stage, _ in stages]
        for stage, mapped in stages:
            for side, prefix in SIDES:
                self._side(stage.stage_id, mapped, side, prefix, ids)
        self._listed_edges(short, ids)
        own = (*TOP_KEYS, "base_config")
        return DeployConfig(
            stages=tuple(stage for stage, _ in stages),
            edges=tuple(self._edges.values()),
            extra={key: plain(value) for key, value in document.items() if key not in own},
            positions={key: document.at(key) for key in document},
        )

    def _stages(self) -> list[tuple[StageConfig, Mapped]]:
        listed = self._document.get("stages")
        if not isinstance(listed, Sequenced) or not listed:
            self._fault(self._document.at("stages"), "stages is a list with at least one stage")
            return []
        stages: list[tuple[StageConfig, Mapped]] = []
        for item, position in listed.placed():
            if not isinstance(item, Mapped) or not isinstance(item.get("stage_id"), str | int):
                self._fault(position, "a stage is a mapping with a stage_id")
                continue
            self._refuse_near_misses(item, STAGE_KEYS)
            stage_id = str(item["stage_id"])
            if any(stage.stage_id == stage_id for stage, _ in stages):
                self._fault(item.at("stage_id"), f"a second stage with stage_id {stage_id}")
                continue
            extra = {key: plain(value) for key, value in item.items() if key not in STAGE_KEYS}
            stage = StageConfig(stage_id, extra, position, {key: item.at(key) for key in item})
            stages.append((stage, item))
        return stages

    def _connectors(self) -> dict[str, ConnectorConfig]:
        named = self._document.get("connectors")
        if named is None:
            return {}
        if not isinstance(named, Mapped):
            self._fault(self._document.at("connectors"), "connectors maps names to {name: BACKEND, extra: {...}}")
            return {}
        found = {}
        for name, definition in named.items():
            connector = self._connector(f"connectors.{name}", definition, named.at(name))
            if connector is not None:
                found[str(name)] = connector
        return found

    def _connector(self, what: str, given: Any, position: Position) -> ConnectorConfig | None:
        if not isinstance(given, Mapped):
            self._fault(position, f"{what} is a mapping: {{name: BACKEND, extra: {{...}}}}")
            return None
        for key in given:
            if key in RUNTIME_KEYS:
                self._fault(given.at(key), f"{what}: {key!r} does not belong in a file: the runtime says who is who")
            elif key not in CONNECTOR_KEYS:
                self._fault(
                    given.at(key),
                    f"{what}: unknown key {key!r}{suggestion(key, CONNECTOR_KEYS)}; options of the backend go into extra",
                )
        names = [given[key] for key in ("name", "type") if key in given]
        if len(names) != 1 or not isinstance(names[0], str):
            self._fault(position, f"{what} names its backend once: name: shared_memory")
            return None
        extra = given.get("extra")
        if extra is None:
            extra = Mapped()
        if not isinstance(extra, Mapped):
            self._fault(given.at("extra"), f"{what}: extra is a mapping of options")
            return None
        for key in extra:
            if key in RUNTIME_KEYS:
                self._fault(extra.at(key), f"{what}: {key!r} does not belong in a file: the runtime says who is who")
        options = plain(extra)
        # in extra too, which is all that vLLM-Omni passes on
        pipeline_options = options.pop("pipeline_options", None) or plain(given.get("pipeline_options")) or ()
        where = {str(key): extra.at(key) for key in extra}
        return ConnectorConfig(names[0], options, tuple(pipeline_options), position, where)

    def _side(self, stage_id: str, stage: Mapped, side: str, prefix: str, ids: list[str]) -> None:
        named = stage.get(side)
        if named is None:
            return
        if not isinstance(named, Mapped):
            self._fault(stage.at(side), f"{side} maps {prefix}N to a connector")
            return
        for slot, reference in named.items():
            position = named.at(slot)
            other = str(slot).removeprefix(prefix)
            if not str(slot).startswith(prefix):
                near = suggestion(slot, [prefix + name for name in ids])
                self._fault(position, f"{side}: {slot!r} is not of the form {prefix}N{near}")
                continue
            if other not in ids:
                self._fault(position, f"{side}: there is no stage {other!r}{suggestion(other, ids)}")
                continue
            edge = Edge(stage_id, other) if side == "output_connectors" else Edge(other, stage_id)
            connector = self._resolve(f"{side}.{slot}", reference, position)
            if connector is not None:
                self._add(edge, connector, position)

    def _resolve(self, what: str, reference: Any, position: Position) -> ConnectorConfig | None:
        if isinstance(reference, Mapped):
            return self._connector(what, reference, position)
        connector = self._definitions.get(str(reference))
        if connector is None:
            known = self._document.get("connectors") or {}
            if str(reference) not in map(str, known):  # else its own fault is reported already
                self._fault(
                    position,
                    f"{what}: there is no connector {reference!r} in connectors{suggestion(reference, map(str, known))}",
                )
        return connector

    def _add(self, edge: Edge, connector: ConnectorConfig, position: Position) -> None:
        if edge.producer == edge.consumer:
            self._fault(position, f"the edge {edge} leads from a stage to itself")
            return
        other = self._edges.setdefault(edge, EdgeConfig(edge, connector, position))
        if other.connector.name != connector.name:
            what = f"{other.connector.name} at line {other.position.line}, {connector.name} here"
            self._fault(position, f"the two sides of edge {edge} disagree: {what}")
        elif other.connector != connector:
            differ = sorted(
                name
                for name in {*other.connector.options, *connector.options}
                if other.connector.options.get(name) != connector.options.get(name)
            )
            what = f"options {', '.join(differ)} differ from line {other.position.line}"
            self._fault(position, f"the two sides of edge {edge} disagree: {what}")

    def _listed_edges(self, short: ConnectorConfig | None, ids: list[str]) -> None:
        listed = self._document.get("edges")
        if listed is None:
            if short is not None and not self._edges:
                self._fault(self._document.at("connector"), "connector needs edges: [{from: 0, to: 1}, ...]")
            return
        if not isinstance(listed, Sequenced):
            self._fault(self._document.at("edges"), "edges is a list of {from: 0, to: 1}")
            return
        seen: set[Edge] = set()
        for item, position in listed.placed():
            if not isinstance(item, Mapped) or "from" not in item or "to" not in item:
                self._fault(position, "an edge is {from: STAGE, to: STAGE}")
                continue
            for key in item:
                if key not in EDGE_KEYS:
                    self._fault(item.at(key), f"unknown key {key!r} of an edge{suggestion(key, EDGE_KEYS)}")
            ends = [str(item["from"]), str(item["to"])]
            unknown = [end for end in ends if end not in ids]
            for end in unknown:
                self._fault(position, f"edges: there is no stage {end!r}{suggestion(end, ids)}")
            if unknown:
                continue
            edge = Edge(*ends)
            if edge in seen:
                self._fault(position, f"the edge {edge} is listed twice")
            seen.add(edge)
            if short is not None and edge not in self._edges:
                self._add(edge, short, position)
            elif edge not in self._edges:
                self._fault(
                    position,
                    f"the edge {edge} has no connector: name one in output_connectors of stage {edge.producer}, "
                    "or connector: {type: shared_memory} for all edges",
                )

    def _refuse_near_misses(self, mapped: Mapped, keys: Iterable[str]) -> None:
        """Find a misspelt key of ours among keys that may be anyone's."""
        for key in mapped:
            if key not in keys:
                near = difflib.get_close_matches(str(key), [name for name in keys if name not in mapped], 1, 0.85)
                if near:
                    self._fault(mapped.at(key), f"unknown key {key!r}; did you mean {near[0]!r}?")

    def _fault(self, position: Position, message: str) -> None:
        self.faults.append(ConfigError(f"{position}: {message}"))
