"""What every part of the suite shares: the ends, the claims, and the right to deviate with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.probes import FileProbe

__all__ = ["ContractTests", "deviation", "observes", "requires", "without"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def requires(capability: str) -> pytest.MarkDecorator:
    """Run the test only on a backend that claims the capability (a field of `Capabilities`)."""
    return pytest.mark.omni_capability(capability, claimed=True)


def without(capability: str) -> pytest.MarkDecorator:
    """Run the test only on a backend that does not claim the capability."""
    return pytest.mark.omni_capability(capability, claimed=False)


def observes(*options: str) -> pytest.MarkDecorator:
    """Say which options the test shows an effect of; every option of a backend needs one (`observed.unobserved`)."""
    return pytest.mark.omni_option(*options)


def deviation(reason: str) -> Callable[[FunctionT], FunctionT]:
    """Say why a backend's own tests replace a test of the contract; shown in the result of every run.

    Parameters
    ----------
    reason
        What the backend does otherwise, and why its users are served by that.
    """
    if not reason.strip():
        raise ValueError("a deviation has a reason")

    def mark(function: FunctionT) -> FunctionT:
        function.__omni_deviation__ = reason  # type: ignore[attr-defined]
        return function

    return mark


@pytest.mark.usefixtures("contract_leaks_nothing")
class ContractTests:
    """A part of the contract. Its tests get two ends of an edge in processes of their own.

    Every test ends with a look at what it left behind on the host, every class with one at what the processes still hold.
    """

    level: ClassVar[int] = 1

    @pytest.fixture(autouse=True)
    def _only_as_claimed(self, request: pytest.FixtureRequest, connector_backend: Backend) -> None:
        for mark in request.node.iter_markers("omni_capability"):
            (capability,), claimed = mark.args, mark.kwargs["claimed"]
            if getattr(connector_backend.capabilities, capability) is not claimed:
                request.node.stash[SKIPPED_FOR] = capability
                pytest.skip(f"capability {capability} is {'not ' if claimed else ''}claimed")

    @pytest.fixture
    def ends(self, connector_backend: Backend, contract_peers: Peers) -> Iterator[Ends]:
        """Two ends of an edge, in a namespace of their own."""
        probe = FileProbe(contract_peers)
        ends = Ends(connector_backend, contract_peers)
        try:
            yield ends
        finally:
            ends.close()
        if not ends.violence:
            probe.check()


SKIPPED_FOR = pytest.StashKey[str]()
"""The capability for which a test was skipped."""
