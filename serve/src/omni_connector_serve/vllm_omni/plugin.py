# SPDX-License-Identifier: Apache-2.0
"""Entry points, called by vLLM and vLLM-Omni in each of their processes, more than once in some."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["register", "register_if_omni"]


def register_if_omni() -> None:
    """The `vllm.general_plugins` entry point: the only one that some of vLLM-Omni's processes load.

    A plain vLLM, which loads it too, is left alone: nothing is imported.
    """
    if "vllm_omni" in sys.modules:
        register()


@functools.cache
def register() -> None:
    """The `vllm_omni.general_plugins` entry point: make every installed backend a connector that a deploy file can name.

    Raises
    ------
    ConfigError
        In the process that was given the deploy file: the file cannot work as it is.
    """
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    from omni_connector_serve.vllm_omni.aborted import send_nothing_of_aborted_requests
    from omni_connector_serve.vllm_omni.adapter import ConnectorAdapter
    from omni_connector_serve.vllm_omni.backends import drop_in_names, our_names
    from omni_connector_serve.vllm_omni.deployment import adopt_command_line
    from omni_connector_serve.vllm_omni.stalled import hear_of_losses, refuse_missing_kv
    from omni_connector_serve.vllm_omni.startup import check_deploy_file

    stand_ins = drop_in_names()
    taken = OmniConnectorFactory.list_registered_connectors()
    for name in sorted(our_names() - stand_ins.keys()):
        if name not in taken:
            OmniConnectorFactory.register_connector(name, _constructor(name))
    for name in stand_ins:
        # The factory has no way to replace a name; to replace built-in ones is what drop-in is for.
        OmniConnectorFactory._registry[name] = _constructor(name)
    # On abort the engine cleans up what a stream had put, but only in instances of this class.
    SharedMemoryConnector.register(ConnectorAdapter)
    hear_of_losses()
    refuse_missing_kv()
    send_nothing_of_aborted_requests()
    deploy = adopt_command_line(sys.argv)
    if deploy is not None and deploy.exists():  # else the engine says so
        check_deploy_file(deploy)


def _constructor(name: str) -> Callable[[Mapping[str, Any]], Any]:
    def construct(config: Mapping[str, Any]) -> Any:
        from omni_connector_serve.vllm_omni.adapter import ConnectorAdapter

        return ConnectorAdapter(name, config)

    return construct
