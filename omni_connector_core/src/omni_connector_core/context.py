"""What the runtime tells an end that opens: which edge, which end of it, and who else there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from omni_connector_core.key import Edge, Producer
from omni_connector_core.options import Options

__all__ = ["Peer", "Role", "TransportContext"]


class Role(Enum):
    """Which end of an edge a process is. The runtime says so, never the YAML."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"


class Peer(NamedTuple):
    """Names a process of the pipeline: a stage's replica and rank."""

    stage: str
    replica: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """Everything that the runtime tells an opening transport.

    Attributes
    ----------
    backend
        The name under which the backend is registered.
    options
        The backend's own options, checked.
    namespace
        Keeps deployments apart; nothing is read or written outside it.
    edge, role, producer
        Which edge this is, which end of it this process is, and, for a producing end, which replica and rank.
    peers
        Control addresses (``host:port``) of processes on other hosts, where the runtime knows them.
    """

    backend: str
    options: Options
    namespace: str
    edge: Edge = Edge("0", "1")
    role: Role = Role.BOTH
    producer: Producer = Producer()
    peers: Mapping[Peer, str] = field(default_factory=dict)
