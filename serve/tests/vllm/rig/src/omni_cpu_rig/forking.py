# SPDX-License-Identifier: Apache-2.0
"""Stages and workers that need not import anything: they are forked from a process that has imported it all, once a server.

vllm-omni spawns each of its processes, and each then imports for fifteen seconds, before what a test wants to see begins. With
OMNI_CPU_RIG_FORK=1 they are forked from Python's own fork server, a process that does nothing but import and fork. What
vllm-omni passes to a process in its arguments and its environment comes as if it were spawned.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
from multiprocessing import context, forkserver, resource_tracker
from typing import Any

_ENVIRONMENT, _ADDRESS = "omni_cpu_rig_environment", "omni_cpu_rig_address"
_server: Any = forkserver._forkserver  # type: ignore[attr-defined]


def fork_what_is_spawned() -> None:
    """Have this process, and those that it starts, fork where they would spawn."""
    context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]  # type: ignore[attr-defined]
    if _server.get_inherited_fds() is None:  # not one of those that it starts
        forkserver.set_forkserver_preload(["omni_cpu_rig.imported"])
        forkserver.ensure_running()
        pass_environment()


def pass_environment() -> None:
    """Give a process the environment of the one that starts it, and the same fork server."""
    say, prepare = multiprocessing.spawn.get_preparation_data, multiprocessing.spawn.prepare

    @functools.wraps(say)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**say(name), _ENVIRONMENT: dict(os.environ), _ADDRESS: _server._forkserver_address}

    @functools.wraps(prepare)
    def prepare_with_environment(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data[_ENVIRONMENT])
        _server._forkserver_address = data[_ADDRESS]
        _server.ensure_running = resource_tracker.ensure_running
        prepare(data)

    multiprocessing.spawn.get_preparation_data = get_preparation_data
    multiprocessing.spawn.prepare = prepare_with_environment
