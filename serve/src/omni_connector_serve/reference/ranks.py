"""The tensor-parallel ranks of a stage, as a process group of torch over gloo."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor

from omni_connector_serve.reference.transformer import Alone, Group
from omni_connector_serve.runtime.stage import StageContext

__all__ = ["Gloo", "join"]


def join(context: StageContext) -> Group:
    """Meet the stage's other ranks, if there are any."""
    return Gloo(context) if context.size > 1 else Alone()


class Gloo:
    """Ranks in processes of one host."""

    def __init__(self, context: StageContext) -> None:
        self.rank, self.size = context.rank, context.size
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = f"file://{context.directory}/ranks"
        dist.init_process_group("gloo", init_method=store, rank=context.rank, world_size=context.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place; exact in whatever order, as all sums of the model are."""
        dist.all_reduce(x)
        return x
