"""The deploy file: one schema for vLLM-Omni and for everyone else, checked before any model is loaded."""

from omni_connector_core.config.check import check_backends
from omni_connector_core.config.deploy import (
    ConnectorConfig,
    DeployConfig,
    EdgeConfig,
    StageConfig,
    faults,
    load,
    parse,
)
from omni_connector_core.config.document import Position
from omni_connector_core.config.wiring import End, ends_of, open_ends

__all__ = [
    "ConnectorConfig",
    "DeployConfig",
    "EdgeConfig",
    "End",
    "Position",
    "StageConfig",
    "check_backends",
    "ends_of",
    "faults",
    "load",
    "open_ends",
    "parse",
]
