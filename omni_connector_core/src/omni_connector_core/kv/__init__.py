"""KV caches from one group of ranks to another, layer by layer, whatever the two groups' shapes.

`KVSpec` describes a side, `plan` says who sends what to whom, `KVSender` and `KVReceiver` move it.

Copies: one at the producer, from the cache's blocks into transport memory, however many consumers need it; one at each consumer,
from transport memory into its blocks, or none but the transfer itself where the backend reads into registered memory. Messages: a
put and a get per layer and tile (one tile, unless the two sides cut heads or tokens differently), and per request one small
head from each producer rank, which is compared before any bytes move. Held by tests.
"""

from omni_connector_core.kv.plan import Plan, Tile, plan
from omni_connector_core.kv.receive import KVReceive, KVReceiver
from omni_connector_core.kv.send import KVSend, KVSender
from omni_connector_core.kv.spec import KVSpec, Rank, check_compatible

__all__ = [
    "KVReceive",
    "KVReceiver",
    "KVSend",
    "KVSender",
    "KVSpec",
    "Plan",
    "Rank",
    "Tile",
    "check_compatible",
    "plan",
]
