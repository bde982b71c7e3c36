"""One absolute point in time that bounds discovery, transfer and synchronisation together."""

from __future__ import annotations

from time import monotonic

from omni_connector_core.errors import ConfigError

__all__ = ["LONGEST_S", "Deadline"]

LONGEST_S = 1e6
"""Whatever lasts longer, for ever included, lasts so long: what the system calls that wait can take, seconds."""


class Deadline:
    """An absolute deadline on the monotonic clock.

    Parameters
    ----------
    timeout_s
        Seconds from now; negative counts as zero, more than `LONGEST_S` as that.

    Raises
    ------
    ConfigError
        It is no number.
    """

    __slots__ = ("at_s", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        try:
            if not 0.0 <= timeout_s <= LONGEST_S:  # as NaN is not
                timeout_s = LONGEST_S if timeout_s > 0 else 0.0
        except TypeError as error:
            raise ConfigError(f"timeout is a number of seconds, not {timeout_s!r}") from error
        self.timeout_s = timeout_s
        self.at_s = monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left; 0.0 once it has passed."""
        return max(self.at_s - monotonic(), 0.0)

    def expired(self) -> bool:
        """Whether it has passed."""
        return monotonic() >= self.at_s

    def __repr__(self) -> str:
        return f"Deadline({self.remaining_s():.3f} s left of {self.timeout_s:g} s)"
