"""Arenas in pinned host memory and in the memory of a CUDA device, for engines that can read those.

**Not run in this project's CI**, which has no GPU: written against torch 2.13 and reviewed, no more. `HostMemory` is what is tested.

Pinned memory is host memory that a GPU copies from and to at full speed; nothing else changes. Device memory is reached by the engine
alone (GPUDirect RDMA): a producer copies its frame there, a consumer what it received back to the host, where the codec reads it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from omni_connector_core.arena import HostMemory, Pool
from omni_connector_core.errors import OptionError

if TYPE_CHECKING:
    from omni_connector_core.frame import Frame

__all__ = ["make_pool"]


def make_pool(nbytes: int, device: str) -> Pool:
    """Make the memory of an arena.

    Parameters
    ----------
    device
        ``cpu``, ``pinned``, ``cuda`` or ``cuda:N``.

    Raises
    ------
    OptionError
        There is no such device, or no torch that knows it.
    """
    if device == "cpu":
        return HostMemory(nbytes)
    try:
        import torch
    except ImportError as error:
        raise OptionError(f"memory_pool_device {device} needs torch", hint="pip install torch") from error
    if not torch.cuda.is_available():
        raise OptionError(
            f"memory_pool_device {device}, but torch sees no CUDA device", hint="Use cpu, or a CUDA build of torch"
        )
    if device == "pinned":
        return PinnedMemory(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
    return DeviceMemory(torch.empty(nbytes, dtype=torch.uint8, device=device))


class PinnedMemory(Pool):
    """A pinned tensor, used like any host memory."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.address: int = tensor.data_ptr()
        self.nbytes: int = tensor.nbytes

    def part(self, offset: int, nbytes: int) -> Any:
        """Return a ctypes array over a part, which keeps the tensor."""
        array = (ctypes.c_char * nbytes).from_address(self.address + offset)
        array.owner = self._tensor  # type: ignore[attr-defined]
        return array


class DeviceMemory(Pool):
    """A tensor on a CUDA device; what leaves it is a private copy on the host."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.address: int = tensor.data_ptr()
        self.nbytes: int = tensor.nbytes

    def part(self, offset: int, nbytes: int) -> Any:
        """Return a copy of a part in host memory."""
        return self._tensor[offset : offset + nbytes].cpu().numpy()

    def store(self, offset: int, frame: Frame) -> None:
        """Copy a frame in, piece by piece, and wait until it is there: the engine knows no streams."""
        import torch

        for place, address, nbytes in frame.segments():
            host = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
            start = offset + place
            self._tensor[start : start + nbytes].copy_(host)
        torch.cuda.synchronize(self._tensor.device)
