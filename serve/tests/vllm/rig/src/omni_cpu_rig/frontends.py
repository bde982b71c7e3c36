# SPDX-License-Identifier: Apache-2.0
"""``--api-server-count N`` with pipelines that a plugin brings.

vllm-omni 0.30.0's frontends look the pipeline up before they load a plugin, and end in a KeyError. The process that starts them has
loaded the plugins, and names what they are to run by a global of its module.
"""

from __future__ import annotations

import sys
from typing import Any


def load_plugins_in_frontends() -> None:
    """Have the frontends that this process starts load the plugins first."""
    serve = sys.modules.get("vllm_omni.entrypoints.cli.serve")
    if serve is not None:
        serve.run_omni_api_server_worker_proc = run_frontend  # type: ignore[attr-defined]


def run_frontend(*args: Any, **kwargs: Any) -> None:
    """Load the plugins, then do as vllm-omni does."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm_omni.entrypoints.openai.api_server import run_omni_api_server_worker_proc

    run_omni_api_server_worker_proc(*args, **kwargs)
