"""What store backends share: a transport out of named objects. A plugin subclasses `StoreTransport` and `ObjectStore`."""

from omni_connector_core.store.objects import SMALL_NBYTES, NewObject, NoRoomError, ObjectStore
from omni_connector_core.store.transport import StoreTransport

__all__ = ["SMALL_NBYTES", "NewObject", "NoRoomError", "ObjectStore", "StoreTransport"]
