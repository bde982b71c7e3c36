"""The transport: the rules are those of every store (`omni_connector_core.store.transport`), the objects Yuanrong's."""

from __future__ import annotations

import dataclasses
from typing import Any

from omni_connector_core.capabilities import Capabilities
from omni_connector_core.context import TransportContext
from omni_connector_core.deadline import Deadline
from omni_connector_core.onesided import OneSidedOptions
from omni_connector_core.options import Options
from omni_connector_core.store import StoreTransport
from omni_connector_core.transport import Transport
from omni_connector_yuanrong.ascend import AscendTransport, require_ascend
from omni_connector_yuanrong.options import YuanrongOptions
from omni_connector_yuanrong.plugin import CAPABILITIES
from omni_connector_yuanrong.store import YuanrongStore

__all__ = ["YuanrongTransport", "open_transport"]


class YuanrongTransport(StoreTransport):
    """Payloads in datasystem workers; consumers of a worker's host read them where they lie.

    Copies: one at put; at get none on the producer's host, one (between workers) on another.
    """

    capabilities: Capabilities = CAPABILITIES
    options: YuanrongOptions

    def _connect(self, *, deadline: Deadline) -> YuanrongStore:
        return YuanrongStore(self.options, deadline=deadline)


def open_transport(context: TransportContext) -> Transport:
    """Open the transport that the option `engine` names.

    Raises
    ------
    BackendUnavailableError
        ``engine: transfer`` without Ascend hardware.
    """
    options = context.options
    assert isinstance(options, YuanrongOptions)
    if options.engine == "store":
        return YuanrongTransport(context)
    require_ascend()
    shared: dict[str, Any] = {field.name: getattr(options, field.name) for field in dataclasses.fields(Options)}
    one_sided = OneSidedOptions(**shared, host=options.host)
    if options.capacity_bytes is not None:
        one_sided = dataclasses.replace(one_sided, capacity_bytes=options.capacity_bytes)
    return AscendTransport(dataclasses.replace(context, options=one_sided))
