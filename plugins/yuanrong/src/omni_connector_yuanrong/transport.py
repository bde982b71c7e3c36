"""The transport: the rules are those of every store (`omni_connector_core.store.transport`), the objects Yuanrong's."""

from __future__ import annotations

from typing import ClassVar, cast

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.deadline import Deadline
from omni_connector_core.store import StoreTransport
from omni_connector_yuanrong.options import YuanrongOptions
from omni_connector_yuanrong.plugin import CAPABILITIES
from omni_connector_yuanrong.store import YuanrongStore

__all__ = ["YuanrongTransport"]


class YuanrongTransport(StoreTransport):
    """Payloads in datasystem workers; consumers of a worker's host read them where they lie.

    Copies: one at put; at get none on the producer's host, one (between workers) on another.
    """

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    def _connect(self, *, deadline: Deadline) -> YuanrongStore:
        return YuanrongStore(cast(YuanrongOptions, self.options))
