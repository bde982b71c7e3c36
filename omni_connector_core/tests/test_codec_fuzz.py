"""20,000 mutated and random frames: a value or `DecodeError`; no crash, no hang, no large allocation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("codec_fuzz_worker.py")


@pytest.mark.parametrize("seed", [1, int(os.environ.get("OMNI_CONNECTOR_FUZZ_SEED", "2"))])
def test_nothing_but_values_and_decode_errors(seed: int, way: str) -> None:
    command = [sys.executable, "-X", "faulthandler", str(WORKER), str(seed), "10000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    decoded, refused, short = map(int, done.stdout.split())
    assert decoded + refused == 10_000
    # or the mutations never got as far as what they are to try
    assert decoded > 500
    assert refused > 5_000
    assert short > 300 if way == "compiled" else short == 0
