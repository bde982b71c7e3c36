"""What a backend can do, as data: the suite tests each claim, and its absence, without asking for a name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capabilities", "Health", "Usage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do beyond the contract that all share.

    Attributes
    ----------
    cross_process
        Producer and consumer may be two processes. Only the in-process reference cannot.
    cross_host
        Producer and consumer may be on two hosts.
    fan_out
        ``put(readers=N)`` with N > 1.
    overwrite
        ``put(overwrite=True)``.
    outlives_producer
        An unread payload can still be read after its producer died. Without it the consumer gets `PeerLostError`.
    zero_copy
        Decoded tensors and arrays are views of transport memory.
    direct_get_into
        `get_into` moves bytes straight into the caller's buffers, with no buffer of the backend's in between.
    device_memory
        Frames may hold device tensors that are moved without staging through host memory.
    bounded
        Capacity is finite and enforced: `CapacityError`, `PayloadTooLargeError`.
    loopback_only
        Every port that the process opens is on loopback unless an option says otherwise. Some vendors' engines listen on all
        interfaces; behind them a firewall is the operator's part.
    hardened_ports
        Whatever arrives on any port of the process does no harm. Without it that holds for our own control port, but the
        vendor's engine opens ports of its own that do not bear it.
    """

    cross_process: bool = True
    cross_host: bool = False
    fan_out: bool = True
    overwrite: bool = True
    outlives_producer: bool = False
    zero_copy: bool = True
    direct_get_into: bool = False
    device_memory: bool = False
    bounded: bool = True
    loopback_only: bool = True
    hardened_ports: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one open transport holds; cheap to ask for.

    Attributes
    ----------
    pending
        Payloads put by this process that have a read left.
    oldest_age_s
        Age of the oldest pending payload, seconds; 0.0 when none is pending.
    bytes_held
        Bytes of transport memory in use by this process: pending payloads, leases, quarantine.
    capacity_bytes
        The most that `bytes_held` can become; None when the backend sets no bound of its own.
    expired
        Payloads of this process that expired unread, so far.
    """

    pending: int = 0
    oldest_age_s: float = 0.0
    bytes_held: int = 0
    capacity_bytes: int | None = None
    expired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of one open transport, found by probing it.

    Attributes
    ----------
    ok
        Whether a put or get would work now.
    detail
        Why not, or what was probed.
    usage
        What it holds.
    """

    ok: bool
    detail: str
    usage: Usage
