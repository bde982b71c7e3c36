"""Benchmarks of backends, in ratios to what the machine itself can do in the same run.

``python -m omni_connector_contract_tests.bench [--connector NAME]``
"""
