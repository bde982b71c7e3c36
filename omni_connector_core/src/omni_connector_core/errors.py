"""Every failure of omni-connector.

::

    OmniConnectorError                 key, edge, backend, retryable, hint
    ├── ConfigError                    (ValueError)       the configuration is wrong
    │   ├── UnknownBackendError                           no installed plugin has that name
    │   └── OptionError                                   an option is unknown or has a bad value
    ├── PluginError                    (ImportError)      a plugin or its SDK cannot be loaded
    ├── InvalidKeyError                (ValueError)       empty, too long, not UTF-8
    ├── EncodeError                    (ValueError)       the payload cannot be encoded; names the path in it
    ├── DecodeError                    (ValueError)       the bytes are not a frame of ours
    ├── BufferMismatchError            (ValueError)       get_into: the buffers do not fit the payload
    ├── IncompatibleMetadataError      (ValueError)       ours, but of another version, transport or key
    ├── IncompatibleKVError            (ValueError)       two KV specs that cannot be bridged; names the field
    ├── PayloadConflictError           (ValueError)       the key is live and overwrite was not asked for
    ├── PayloadTooLargeError           (ValueError)       larger than the backend can ever hold
    ├── CapacityError                  (MemoryError)      no room until the deadline            retryable
    ├── TransferTimeoutError           (TimeoutError)     the deadline passed                   retryable
    ├── AmbiguousKeyError              (LookupError)      several producers hold the key
    ├── PayloadExpiredError            (LookupError)      its time-to-live ended unread
    ├── ProducerFailedError            (RuntimeError)     the producer called fail(key, reason)
    ├── RequestAbandonedError          (RuntimeError)     the request was cleaned up
    ├── PeerLostError                  (ConnectionError)  the process at the other end died
    ├── BackendUnavailableError        (ConnectionError)  the backend's service does not answer retryable
    ├── UnsupportedError               (NotImplementedError)  a capability the backend does not claim
    ├── RoleError                      (RuntimeError)     put at a consumer, get at a producer
    ├── ClosedError                    (RuntimeError)     used after close()
    └── ForkedError                    (RuntimeError)     used in a forked child
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from omni_connector_core.key import Edge, Key

__all__ = [
    "AmbiguousKeyError",
    "BackendUnavailableError",
    "BufferMismatchError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DecodeError",
    "EncodeError",
    "ForkedError",
    "IncompatibleKVError",
    "IncompatibleMetadataError",
    "InvalidKeyError",
    "OmniConnectorError",
    "OptionError",
    "PayloadConflictError",
    "PayloadExpiredError",
    "PayloadTooLargeError",
    "PeerLostError",
    "PluginError",
    "ProducerFailedError",
    "RequestAbandonedError",
    "RoleError",
    "TransferTimeoutError",
    "UnknownBackendError",
    "UnsupportedError",
    "error_from_code",
    "locate",
]


class OmniConnectorError(Exception):
    """Base of every error of omni-connector.

    Parameters
    ----------
    message
        What happened, in one sentence.
    key, edge, backend
        Where it happened. A backend may leave them out: the public methods of `Transport` and `OmniConnector`
        fill in what is missing.
    hint
        What to do about it; the class has a default.

    Attributes
    ----------
    retryable
        Whether the same call may succeed later with nothing changed by the caller.
    """

    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        message: str = "",
        *,
        key: Key | str | None = None,
        edge: Edge | None = None,
        backend: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.edge = edge
        self.backend = backend
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        known = (("key", self.key), ("edge", self.edge), ("backend", self.backend))
        where = ", ".join(f"{name}={_short(str(value))}" for name, value in known if value is not None)
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), dict(self.__dict__)))

    @property
    def code(self) -> str:
        """The name under which the error crosses a process border (see `error_from_code`)."""
        return type(self).__name__


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def _rebuild(cls: type[OmniConnectorError], state: dict[str, object]) -> OmniConnectorError:
    error = cls()  # not cls.__new__: which builtin's that would be depends on the subclass
    Exception.__init__(error, state.get("message", ""))
    error.__dict__.update(state)
    return error


class ConfigError(OmniConnectorError, ValueError):
    """The configuration is wrong; the message names file and line where there is a file."""


class UnknownBackendError(ConfigError):
    """No installed plugin has that name."""


class OptionError(ConfigError):
    """An option of a backend is unknown or has a bad value."""


class PluginError(OmniConnectorError, ImportError):
    """A plugin, or the vendor SDK under it, cannot be loaded."""


class InvalidKeyError(OmniConnectorError, ValueError):
    """A key is empty, too long, or not valid Unicode."""

    default_hint = "A key is a non-empty str of at most 1,024 UTF-8 bytes, or a Key built from one"


class EncodeError(OmniConnectorError, ValueError):
    """The payload holds something that cannot be encoded.

    Attributes
    ----------
    path
        Where in the payload, e.g. ``payload['a'][3].x``.
    """

    path: str = "payload"

    def __init__(self, message: str = "", *, path: str = "payload", **context: object) -> None:
        super().__init__(f"{path}: {message}", **context)  # type: ignore[arg-type]
        self.path = path


class DecodeError(OmniConnectorError, ValueError):
    """The bytes are not a frame that this version can decode."""


class BufferMismatchError(OmniConnectorError, ValueError):
    """The buffers given to `get_into` do not hold as many bytes as the payload."""


class IncompatibleMetadataError(OmniConnectorError, ValueError):
    """Metadata of ours, but of another version, transport or key."""

    default_hint = "Pass the metadata that this payload's put returned, or none to look it up by key"


class IncompatibleKVError(OmniConnectorError, ValueError):
    """Two sides of a KV-cache flow that cannot be bridged.

    Attributes
    ----------
    field
        The field of `KVSpec` that differs.
    """

    field: str = ""

    def __init__(self, message: str = "", *, field: str = "", **context: object) -> None:
        super().__init__(message, **context)  # type: ignore[arg-type]
        self.field = field


class PayloadConflictError(OmniConnectorError, ValueError):
    """The key is live: it was put and not yet read."""

    default_hint = "Use another key, or overwrite=True to replace the payload"


class PayloadTooLargeError(OmniConnectorError, ValueError):
    """The payload is larger than the backend can ever hold."""


class CapacityError(OmniConnectorError, MemoryError):
    """No room became free before the deadline; nothing was evicted and nothing was written."""

    retryable = True
    default_hint = "Consumers may be behind: read or clean up payloads, lower ttl, or raise the capacity option"


class TransferTimeoutError(OmniConnectorError, TimeoutError):
    """The deadline passed."""

    retryable = True


class AmbiguousKeyError(OmniConnectorError, LookupError):
    """Several producers hold the key and nothing said whose is meant."""

    default_hint = "Pass the metadata of the put, or producer=Producer(replica, rank)"


class PayloadExpiredError(OmniConnectorError, LookupError):
    """The payload was not read within its time-to-live and its memory was freed."""

    default_hint = "Raise ttl, or find out why the consumer came late"


class ProducerFailedError(OmniConnectorError, RuntimeError):
    """The producer declared that this payload will never come.

    Attributes
    ----------
    reason
        What the producer passed to `fail`; the same text as `message`.
    """

    @property
    def reason(self) -> str:
        """What the producer passed to `fail`."""
        return self.message


class RequestAbandonedError(OmniConnectorError, RuntimeError):
    """The request was cleaned up: its payloads are gone and no new one is taken."""


class PeerLostError(OmniConnectorError, ConnectionError):
    """The process at the other end died, and what it had not handed over died with it."""

    default_hint = "Restart the stage and retry the request under a new id"


class BackendUnavailableError(OmniConnectorError, ConnectionError):
    """The backend's own service (master, worker, engine) does not answer."""

    retryable = True


class UnsupportedError(OmniConnectorError, NotImplementedError):
    """The backend does not claim the capability that the call needs."""


class RoleError(OmniConnectorError, RuntimeError):
    """The operation belongs to the other end of the edge."""


class ClosedError(OmniConnectorError, RuntimeError):
    """The connector was closed."""

    default_hint = "Create a new connector"


class ForkedError(OmniConnectorError, RuntimeError):
    """The connector was made before a fork and is used in the child."""

    default_hint = "Create the connector in the child, or start processes with the 'spawn' method"


def error_from_code(code: str, message: str) -> OmniConnectorError:
    """Build the error that another process named by `OmniConnectorError.code`.

    Parameters
    ----------
    code
        A class name of this module; an unknown one (a newer peer's) gives the base class.
    message
        The other side's message.
    """
    cls = globals().get(code)
    if not (isinstance(cls, type) and issubclass(cls, OmniConnectorError)):
        return OmniConnectorError(f"{code}: {message}")
    error = cls()
    OmniConnectorError.__init__(error, message)
    return error


def locate(error: OmniConnectorError, *, key: Key | None, edge: Edge, backend: str) -> None:
    """Fill in what the error does not say yet about where it happened."""
    if error.key is None:
        error.key = key
    if error.edge is None:
        error.edge = edge
    if error.backend is None:
        error.backend = backend
