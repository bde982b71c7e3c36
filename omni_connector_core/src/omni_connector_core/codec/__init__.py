"""The codec: payloads to frames and back, exactly, without pickle. See `Codec`."""

from omni_connector_core.codec.arrays import Written
from omni_connector_core.codec.codec import Codec
from omni_connector_core.codec.raw_tensors import RawDtype, RawSize, RawTensor
from omni_connector_core.codec.registry import TypeCodec

__all__ = ["Codec", "RawDtype", "RawSize", "RawTensor", "TypeCodec", "Written"]
