"""One-sided transports: everything but the engine.

For backends whose engine reads the memory of another process (Mooncake's Transfer Engine, NIXL). Such a backend implements
`Engine` (register, endpoint, connect, start, done, close) and subclasses `OneSidedTransport`; arena, control channel,
discovery, leases, quarantine and every guarantee of the contract are here.

=============== =====================================================================================
`engine`        what a backend implements
`hub`           the process' one engine and arena; retires an engine whose transfer was given up
`messages`      the control protocol
`wire`          a control connection: framing and authentication
`sockets`       addresses, listening, connecting, the shared secret
`server`        the producer's end of the control channel
`listener`      its connections
`early`         questions that came before their producer
`servers`       the control servers of this process
`channel`       the consumer's end
`discovery`     how processes of one host find each other
`producers`     whom to ask for a key
`fetch`         a consumer's way from a key to a claim
`reading`       and from the claim to memory
`device`        arenas in pinned and device memory
`transport`     all of it as a `Transport`
`options`       the options that every such backend has
=============== =====================================================================================
"""

from omni_connector_core.arena import HostMemory, Pool
from omni_connector_core.onesided.engine import Engine, Piece
from omni_connector_core.onesided.options import OneSidedOptions
from omni_connector_core.onesided.transport import OneSidedTransport

__all__ = ["Engine", "HostMemory", "OneSidedOptions", "OneSidedTransport", "Piece", "Pool"]
