# SPDX-License-Identifier: Apache-2.0
"""Where in the deployment this process is, and the ports that the engine expects there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vllm_omni.distributed.omni_connectors.utils.initialization import compute_connector_zmq_port
from vllm_omni.distributed.omni_connectors.utils.local_rank import get_connector_local_rank

from omni_connector_core import Edge


@dataclass(frozen=True)
class Place:
    """Which of its stage's processes this is.

    Attributes
    ----------
    replica, rank
        The stage's replica, and the tensor-parallel rank in it.
    """

    replica: int
    rank: int

    def control_port(self, base: int, edge: Edge, *, kv: bool) -> int:
        """The port at which the engine tells consumers to find this producer.

        Parameters
        ----------
        base
            ``zmq_port`` of the deploy file.
        kv
            Whether KV caches go there, which the engine keeps apart from payloads.
        """
        return int(
            compute_connector_zmq_port(
                base,
                purpose="kv_transfer" if kv else "request_forwarding",
                from_stage=int(edge.producer),
                local_rank=self.rank,
                replica_id=self.replica,
            )
        )


def this_place() -> Place:
    """Ask the engine where this process is."""
    return Place(max(int(os.environ.get("VLLM_OMNI_REPLICA_ID", "0")), 0), get_connector_local_rank())
