"""KV caches from one group of ranks to another, layer by layer, whatever the two groups' shapes.

`KVSpec` describes a side, `plan` says who sends what to whom, `KVSender` and `KVReceiver` move it.
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
