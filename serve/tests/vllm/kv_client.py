# SPDX-License-Identifier: Apache-2.0
"""Run the KV pipeline through vllm-omni's Python API (its chat endpoint ends in an error of its own with KV transfer).

    python kv_client.py DEPLOY MODEL

Prints one line of JSON per output that has audio: {"prompt", "frames", "sha256"}.
"""

from __future__ import annotations

import hashlib
import json
import sys


def main(deploy: str, model: str) -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # the command line does this while it parses its arguments; the Python API does not
    from vllm_omni import Omni

    omni = Omni(model=model, deploy_config=deploy)
    for number in range(2):
        prompt = f"<|im_start|>user\nhello {number}<|im_end|>\n<|im_start|>assistant\n"
        for output in omni.generate([{"prompt": prompt}], use_tqdm=False):
            if output.final_output_type == "audio":
                [audio] = [value for value in output.multimodal_output.values() if hasattr(value, "numpy")]
                samples = audio.float().cpu().numpy()
                digest = hashlib.sha256(samples.tobytes()).hexdigest()[:16]
                print(json.dumps({"prompt": number, "frames": samples.size, "sha256": digest}), flush=True)
    omni.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
