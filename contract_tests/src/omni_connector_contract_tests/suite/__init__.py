"""The tests of the contract, level by level."""

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.suite.base import ContractTests, deviation, observes, requires, without
from omni_connector_contract_tests.suite.buffers import TestBatch, TestGetInto, TestViews
from omni_connector_contract_tests.suite.capacity import TestCapacity, TestState
from omni_connector_contract_tests.suite.configuration import TestDeployFaults, TestDeployFile
from omni_connector_contract_tests.suite.endings import TestCleanup, TestExpiry, TestFail, TestRaces
from omni_connector_contract_tests.suite.hygiene import TestHostileBytes, TestLeaks
from omni_connector_contract_tests.suite.identity import TestEdgesAndProducers, TestKeys
from omni_connector_contract_tests.suite.kv_flow import TestKVEndings, TestKVFlow
from omni_connector_contract_tests.suite.processes import TestDeath, TestStandstill
from omni_connector_contract_tests.suite.reads import TestReads, TestReplacing
from omni_connector_contract_tests.suite.stages import TestReplicas, TestStageFlow
from omni_connector_contract_tests.suite.streams import TestStreamEndings, TestStreams
from omni_connector_contract_tests.suite.transfer import TestMetadata, TestTransfer
from omni_connector_contract_tests.suite.usage import TestLifecycle, TestOptions, TestThreads
from omni_connector_contract_tests.suite.waiting import TestHandles, TestWaiting

__all__ = [
    "Backend",
    "ContractTests",
    "TestBatch",
    "TestCapacity",
    "TestCleanup",
    "TestDeath",
    "TestDeployFaults",
    "TestDeployFile",
    "TestEdgesAndProducers",
    "TestExpiry",
    "TestFail",
    "TestGetInto",
    "TestHandles",
    "TestHostileBytes",
    "TestKVEndings",
    "TestKVFlow",
    "TestKeys",
    "TestLeaks",
    "TestLifecycle",
    "TestMetadata",
    "TestOptions",
    "TestRaces",
    "TestReads",
    "TestReplacing",
    "TestReplicas",
    "TestStageFlow",
    "TestStandstill",
    "TestState",
    "TestStreamEndings",
    "TestStreams",
    "TestThreads",
    "TestTransfer",
    "TestViews",
    "TestWaiting",
    "deviation",
    "observes",
    "requires",
    "without",
]
