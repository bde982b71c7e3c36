# SPDX-License-Identifier: Apache-2.0
"""Run the KV pipeline through vllm-omni's Python API (its chat endpoint ends in an error of its own with KV transfer).

    python kv_client.py DEPLOY MODEL < PROMPTS

Answers each line with a line of JSON: {"prompt", "seconds"} and {"frames", "sha256"} of its audio or {"error"}. The first line says
that it is {"ready"}.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any


def main(deploy: str, model: str) -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # the command line does this while it parses its arguments; the Python API does not
    from vllm_omni import Omni
    from vllm_omni.entrypoints.omni_base import OmniEngineDeadError

    omni = Omni(model=model, deploy_config=deploy)
    print(json.dumps({"ready": True}), flush=True)
    for text in map(str.rstrip, sys.stdin):
        start = time.monotonic()
        try:
            report = audio_of(omni, f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        except (RuntimeError, OmniEngineDeadError) as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"prompt": text, "seconds": time.monotonic() - start, **report}), flush=True)
    omni.close()


def audio_of(omni: Any, prompt: str) -> dict[str, Any]:
    for output in omni.generate([{"prompt": prompt}], use_tqdm=False):
        if output.final_output_type == "audio":
            [audio] = [value for value in output.multimodal_output.values() if hasattr(value, "numpy")]
            samples = audio.float().cpu().numpy()
            return {"frames": samples.size, "sha256": hashlib.sha256(samples.tobytes()).hexdigest()[:16]}
    return {"error": "no audio"}


if __name__ == "__main__":
    main(*sys.argv[1:])
