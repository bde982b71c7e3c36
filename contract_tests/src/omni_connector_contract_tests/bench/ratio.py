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
        How many times the reference it may take.
    """

    name: str
    measured_s: float
    reference_s: float
    bar: float

    @property
    def ratio(self) -> float:
        """How many times the reference it took."""
        return self.measured_s / self.reference_s

    @property
    def held(self) -> bool:
        """Whether it took no more than it may."""
        return self.ratio <= self.bar

    def __str__(self) -> str:
        verdict = "ok" if self.held else "MISSED"
        return f"{self.name:<58}{self.measured_s * 1e3:>10.3f} ms {self.ratio:>7.2f} x (at most {self.bar:g}) {verdict}"
