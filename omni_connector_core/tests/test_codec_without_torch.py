"""The core imports no torch, and what a process without torch does with tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import codec_cases as cases
import torch

from omni_connector_core.codec import Codec


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_nothing_big_is_imported_until_it_is_met() -> None:
    code = """
import sys
import omni_connector_core, omni_connector_core.codec, omni_connector_core.frame
from omni_connector_core.codec import Codec
import numpy as np
codec = Codec()
for payload in ({"a": [1, (2, b"x" * 5000)], "n": np.arange(3), 3: {4}}, np.float32(1)):
    frame = codec.encode(payload)
    memory = bytearray(frame.nbytes)
    frame.write_into(memory)
    codec.decode(memory)
print(sorted({"torch", "PIL", "vllm", "xxhash"} & set(sys.modules)))
"""
    assert run(code).strip() == "[]"


def test_tensors_without_torch_encode_to_the_same_frame(tmp_path: Path) -> None:
    payload = {
        "t": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        "z": torch.tensor(2.5),
        "e": torch.zeros(0, 3),
        "g": [torch.full((3,), float(i)) for i in range(12)],
        "large": [torch.zeros(17_000) for _ in range(8)],
        "s": torch.Size([2, 3]),
        "d": (torch.float8_e4m3fn, torch.bool),
    }
    original = bytes(cases.write(Codec(), payload))
    (tmp_path / "in").write_bytes(original)
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from pathlib import Path
from omni_connector_core.codec import Codec, RawDtype, RawSize, RawTensor
folder = Path(sys.argv[1])
for copy in (False, True):
    payload = Codec().decode((folder / "in").read_bytes(), copy=copy)
    assert (payload["t"].dtype, payload["t"].shape) == ("bfloat16", (3, 4))
    assert len(payload["g"]) == 12 and type(payload["g"][3]) is RawTensor and payload["g"][3].shape == (3,)
    assert payload["s"] == RawSize((2, 3)) and payload["d"] == (RawDtype("float8_e4m3fn"), RawDtype("bool"))
    frame = Codec().encode(payload)
    memory = bytearray(frame.nbytes)
    frame.write_into(memory)
    (folder / f"out{int(copy)}").write_bytes(memory)
"""
    run(code, str(tmp_path))
    for name in ("out0", "out1"):
        again = (tmp_path / name).read_bytes()
        assert again == original
        assert cases.same(Codec().decode(again), payload)
