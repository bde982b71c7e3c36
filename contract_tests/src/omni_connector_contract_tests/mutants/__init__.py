"""Transports that are broken on purpose, one way each, and the test of the contract that must find it.

They show that the suite can fail. A mutant is a class derived from a right transport; its docstring says what is broken.
"""

from omni_connector_contract_tests.mutants import of_payloads, of_state, of_waits  # noqa: F401 - they enter their mutants
from omni_connector_contract_tests.mutants.registry import MUTANTS, Mutant, caught_by

__all__ = ["MUTANTS", "Mutant", "caught_by"]
