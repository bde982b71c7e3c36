"""Benchmarks of backends, in ratios to what the machine itself can do in the same run.

``python -m omni_connector_contract_tests.bench [--connector NAME] [--against SCRIPT]``

A script measures a backend beside the vendor's own calls for the same transfer. It is a Python file of one function, which
stays out of the backend's wheel::

    from omni_connector_contract_tests.bench import Bench, Ratio

    def measure(bench: Bench) -> Iterator[Ratio]: ...
"""

from omni_connector_contract_tests.bench.against import Bench
from omni_connector_contract_tests.bench.ratio import Ratio

__all__ = ["Bench", "Ratio"]
