"""One thing measured, beside what it is measured by."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Ratio"]


class Ratio(NamedTuple):
    """One thing measured.

    Attributes
    ----------
    name
        What was measured.
    measured_s, reference_s
        Its time, and the time of what it is measured by (or a bound in time), seconds.
    bar
        How many times the reference it may take ("at least 0.9 of the reference's speed" is 1 / 0.9); None: not judged.
    """

    name: str
    measured_s: float
    reference_s: float
    bar: float | None = None

    @property
    def ratio(self) -> float:
        """How many times the reference it took."""
        return self.measured_s / self.reference_s

    @property
    def held(self) -> bool | None:
        """Whether it took no more than it may; None when nothing was asked for."""
        return None if self.bar is None else self.ratio <= self.bar

    @property
    def verdict(self) -> str:
        """The same in a word."""
        return {True: "held", False: "missed", None: ""}[self.held]

    def __str__(self) -> str:
        asked = "" if self.bar is None else f"(at most {self.bar:.3g})"
        return f"{self.name:<66}{self.measured_s * 1e3:>10.3f} ms {self.ratio:>7.2f} x {asked} {self.verdict}".rstrip()
