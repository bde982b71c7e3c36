"""Reads a pipeline file and finds all that is wrong with it, with file and line, before any process is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from omni_connector_core import ConfigError, plugin_manager
from omni_connector_core.config import DeployConfig, Position, check_backends, faults, load
from omni_connector_core.options import suggestion
from omni_connector_serve.runtime.messages import EdgeSpec
from omni_connector_serve.runtime.pipeline import ConnectorSpec, Pipeline, ServeSettings, StageSpec, connect
from omni_connector_serve.runtime.stage import REQUEST, RESPONSE
from omni_connector_serve.vllm_omni.check import faults_of

__all__ = ["load_pipeline", "pipeline_faults"]

# Of vLLM-Omni's own top-level keys a pipeline of ours has just the name.
_TOP_KEYS = ("pipeline", "serve")
_StructT = TypeVar("_StructT", bound=msgspec.Struct)


def load_pipeline(
    path: str | Path, *, connector: str | None = None, options: Mapping[str, Any] | None = None
) -> Pipeline:
    """Read a pipeline file.

    Parameters
    ----------
    path
        The file.
    connector, options
        A backend, and its options, that replace those of all edges.

    Raises
    ------
    ConfigError
        Whatever is wrong, a line each.
    """
    config = load(path)
    override = ConnectorSpec(type=connector, extra=dict(options or {})) if connector else None
    reader = _Reader(config, override)
    pipeline = reader.read()
    if reader.faults:
        raise ConfigError("\n".join(str(fault) for fault in reader.faults))
    return pipeline


def pipeline_faults(path: str | Path) -> list[ConfigError]:
    """Return everything that is wrong with a deploy or pipeline file.

    A file whose stages name no ``class`` is vLLM-Omni's: its connector part is checked, and no more.
    """
    found = faults(path)
    if found:
        return found
    config = load(path)
    if "serve" in config.extra or any("class" in stage.extra for stage in config.stages):
        reader = _Reader(config, None)
        reader.read()
        return reader.faults
    return faults_of(Path(path))


class _Reader:
    """Reads one file, going on after a fault so that all are found."""

    def __init__(self, config: DeployConfig, override: ConnectorSpec | None) -> None:
        self._config = config
        self._override = override
        self.faults: list[ConfigError] = []

    def read(self) -> Pipeline:
        config = self._config
        for key in config.extra:
            if key not in _TOP_KEYS:
                self._fault(config.positions[key], f"unknown key {key!r}{suggestion(key, _TOP_KEYS)}")
        stages = [self._stage(stage.stage_id, stage.extra, stage.positions, stage.position) for stage in config.stages]
        where = config.positions.get("serve", config.stages[0].position)
        settings = self._struct(ServeSettings, "serve", config.extra.get("serve") or {}, {}, where)
        edges = [
            EdgeSpec(producer=edge.producer, consumer=edge.consumer, backend=used.name, options=used.options)
            for edge, used in ((item.edge, item.connector) for item in config.edges)
        ]
        self._refuse_circles(edges)
        if self._override:
            default = self._override
            edges = [msgspec.structs.replace(edge, backend=default.type, options=default.extra) for edge in edges]
        else:
            self.faults += check_backends(config)
            default = self._default(settings.connector, edges, where)
        complete = connect(stages, edges, default.type, default.extra)
        if not self.faults:
            self._refuse_incapable(complete)
        name = str(config.extra.get("pipeline", "pipeline"))
        return Pipeline(name, {stage.stage_id: stage for stage in stages}, complete, settings)

    def _stage(
        self, stage_id: str, extra: dict[str, Any], positions: Mapping[str, Position], at: Position
    ) -> StageSpec:
        if stage_id in (REQUEST, RESPONSE):
            self._fault(at, f"stage_id {stage_id!r} stands for the client: choose another")
        path = extra.get("class")
        if not isinstance(path, str) or path.count(":") != 1:
            self._fault(
                positions.get("class", at),
                f"stage {stage_id!r} needs its class, as in class: my_package.stages:MyStage",
            )
        elif not _importable(path.partition(":")[0]):
            self._fault(
                positions["class"], f"stage {stage_id!r}: there is no module {path.partition(':')[0]!r} to import"
            )
        return self._struct(
            StageSpec, f"stage {stage_id!r}", {"stage_id": stage_id, "class": "", **extra}, positions, at
        )

    def _struct(
        self, kind: type[_StructT], what: str, given: Any, positions: Mapping[str, Position], at: Position
    ) -> _StructT:
        """Convert field by field, so that each fault has its line; a bad value is replaced by the default to read on."""
        if not isinstance(given, dict):
            self._fault(at, f"{what} is a mapping")
            given = {}
        hints = get_type_hints(kind, include_extras=True)
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        values = {}
        for key, value in given.items():
            position = positions.get(key, at)
            if key not in fields:
                self._fault(position, f"{what}: unknown key {key!r}{suggestion(key, fields)}")
                continue
            try:
                values[fields[key].name] = msgspec.convert(value, hints[fields[key].name])
            except msgspec.ValidationError as error:
                self._fault(position, f"{what}: {key}: {str(error)[0].lower()}{str(error)[1:]}, got {value!r}")
        return kind(**values)

    def _default(self, named: ConnectorSpec | None, edges: list[EdgeSpec], at: Position) -> ConnectorSpec:
        if named is not None:
            return named
        if edges:
            return ConnectorSpec(type=edges[0].backend, extra=edges[0].options)
        self._fault(at, "a pipeline without edges needs serve: {connector: {type: BACKEND}}")
        return ConnectorSpec(type="")

    def _refuse_circles(self, edges: list[EdgeSpec]) -> None:
        left = list(edges)
        while ends := [edge for edge in left if edge.producer not in {other.consumer for other in left}]:
            left = [edge for edge in left if edge not in ends]
        if left:
            at = next(item.position for item in self._config.edges if item.edge == (left[0].producer, left[0].consumer))
            self._fault(at, f"the edges go in a circle: {', '.join(edge.name for edge in left)}")

    def _refuse_incapable(self, edges: tuple[EdgeSpec, ...]) -> None:
        positions = {tuple(edge.edge): edge.connector.position for edge in self._config.edges}
        for backend in dict.fromkeys(edge.backend for edge in edges):
            carried = [edge for edge in edges if edge.backend == backend]
            at = positions.get((carried[0].producer, carried[0].consumer), self._config.stages[0].position)
            capabilities = plugin_manager.spec(backend).capabilities
            if not capabilities.cross_process:
                self._fault(at, f"{backend} stays within one process, and stages are processes of their own")
            wide = [edge.name for edge in carried if edge.readers > 1]
            if wide and not capabilities.fan_out:
                self._fault(
                    at, f"{backend} has one reader a payload; {', '.join(wide)} has as many as its consumer has ranks"
                )

    def _fault(self, position: Position, message: str) -> None:
        self.faults.append(ConfigError(f"{position}: {message}"))


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
