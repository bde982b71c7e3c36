"""Measure a backend: ``python -m omni_connector_contract_tests.bench [--connector NAME]``; fails when a bar is missed."""

from __future__ import annotations

import argparse
import sys

from omni_connector_contract_tests.bench import flows
from omni_connector_contract_tests.harness.backend import Backend


def main() -> int:
    """Measure, print one line for each ratio, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m omni_connector_contract_tests.bench", description=__doc__)
    parser.add_argument("--connector", default="shared_memory", metavar="NAME", help="the backend (%(default)s)")
    missed = 0
    for ratio in flows.measure(Backend(parser.parse_args().connector)):
        print(ratio, flush=True)
        missed += ratio.ratio > ratio.bar
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
