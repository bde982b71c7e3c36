"""The tests of the contract, level by level."""

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.suite.base import ContractTests, deviation, requires, without
from omni_connector_contract_tests.suite.endings import TestCleanup, TestExpiry, TestFail
from omni_connector_contract_tests.suite.reads import TestReads, TestReplacing
from omni_connector_contract_tests.suite.transfer import TestMetadata, TestTransfer
from omni_connector_contract_tests.suite.waiting import TestHandles, TestWaiting

__all__ = [
    "Backend",
    "ContractTests",
    "TestCleanup",
    "TestExpiry",
    "TestFail",
    "TestHandles",
    "TestMetadata",
    "TestReads",
    "TestReplacing",
    "TestTransfer",
    "TestWaiting",
    "deviation",
    "requires",
    "without",
]
