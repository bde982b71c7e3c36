"""What the tests let other processes do; each function's first argument is the peer's `Acting`."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Any

from omni_connector_core import OmniConnectorError, create_connector


def get_beside_a_ticking_thread(acting: Any, key: str, nothing_s: float) -> tuple[Any, list[float], list[float]]:
    """Get a payload that comes late; returns it, and how late a thread ran that wanted to every millisecond.

    Returns
    -------
    payload, alone, beside
        Lateness in seconds of each tick, before the get (for `nothing_s` seconds) and beside it.
    """
    alone: list[float] = []
    beside: list[float] = []
    lists, stop = [alone], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            began_s = time.perf_counter()
            time.sleep(1e-3)
            lists[-1].append(time.perf_counter() - began_s - 1e-3)

    thread = threading.Thread(target=tick)
    thread.start()
    stop.wait(nothing_s)
    lists.append(beside)
    payload = acting.connector.get(key, timeout=20)
    stop.set()
    thread.join()
    return payload, alone, beside


def fork_and_get(acting: Any, config: dict[str, Any], namespace: str, key: str) -> tuple[str, Any]:
    """Fork; in the child use the parent's connector, then a new one. Returns the error's name and the payload."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            acting.connector.get(key, timeout=1)
            error = "none"
        except OmniConnectorError as raised:
            error = type(raised).__name__
        try:
            payload = create_connector("yuanrong", config, namespace=namespace).get(key, timeout=8)
        except OmniConnectorError as raised:
            payload = str(raised)
        theirs.send((error, payload))
        os._exit(0)
    answer: tuple[str, Any] = ours.recv() if ours.poll(20) else ("hung", None)
    if answer[0] == "hung":
        os.kill(pid, 9)
    os.waitpid(pid, 0)
    return answer
