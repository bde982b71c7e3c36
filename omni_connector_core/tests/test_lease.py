"""Memory that was handed out is watched until nobody uses it."""

import ctypes
import os

import numpy as np

from omni_connector_core.lease import watch


def test_it_ends_with_the_last_view():
    ended = []
    memory = (ctypes.c_char * 64)()
    watch(memory, ended.append, "what")
    view = np.frombuffer(memory, np.uint8)[8:16]
    del memory
    assert not ended
    del view
    assert ended == ["what"]


def test_each_ends_by_itself():
    ended = []
    memories = [(ctypes.c_char * 8)() for _ in range(100)]
    for number, memory in enumerate(memories):
        watch(memory, ended.append, number)
    del memory
    while memories:
        memories.pop()
    assert sorted(ended) == list(range(100))


def test_a_forked_child_ends_nothing():
    ended = []
    memory = (ctypes.c_char * 8)()
    watch(memory, ended.append, 1)
    pid = os.fork()
    if not pid:
        del memory
        os._exit(len(ended))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    del memory
    assert ended == [1]
