"""The list of mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from omni_connector_core import BackendSpec, Transport

__all__ = ["MUTANTS", "Mutant", "caught_by"]

TransportT = TypeVar("TransportT", bound=type[Transport])


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutant.

    Attributes
    ----------
    transport
        Its class.
    test
        ``Class::test`` of the contract that must fail.
    options
        ``module:Class`` of the options that it takes.
    """

    transport: type[Transport]
    test: str
    options: str

    @property
    def name(self) -> str:
        """The name under which it is registered as a backend."""
        return f"mutant_{self.transport.__name__}"

    def spec(self) -> BackendSpec:
        """Describe it as a plugin would."""
        cls = self.transport
        return BackendSpec(
            name=self.name,
            summary=(cls.__doc__ or "").strip(),
            transport=f"{cls.__module__}:{cls.__name__}",
            options=self.options,
            capabilities=cls.capabilities,
            install="pip install omni-connector-contract-tests",
        )


MUTANTS: dict[str, Mutant] = {}
"""Every mutant by class name; filled when the modules with mutants are imported."""


def caught_by(test: str, *, options: str) -> Callable[[TransportT], TransportT]:
    """Enter a transport as a mutant that the test ``Class::test`` must catch."""

    def enter(cls: TransportT) -> TransportT:
        MUTANTS[cls.__name__] = Mutant(cls, test, options)
        return cls

    return enter
