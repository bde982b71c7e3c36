"""Collected by `pytest --pyargs omni_connector_contract_tests --connector NAME`."""

from omni_connector_contract_tests.suite import *  # noqa: F403 - the whole contract
