"""What the leak probe takes for left behind, in the folders that a backend's options name and in its own."""

import os
import time

import pytest

from omni_connector_contract_tests.harness.backend import Backend
from omni_connector_contract_tests.harness.peers import Peers
from omni_connector_contract_tests.harness.probes import RECORD_NBYTES, files_of


@pytest.fixture
def peers(tmp_path):
    backend = Backend("any", {"folder": str(tmp_path / "files"), "shared": "/dev/shm", "size": 3, "name": "x"})
    peers = Peers(processes=False, patience_s=1, folders=backend.folders)
    yield peers
    peers.shutdown()


def test_a_folder_of_the_options_is_looked_into_also_when_it_comes_later(peers, tmp_path):
    before = files_of(peers)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "payload").write_bytes(b"x")
    (tmp_path / "elsewhere").write_bytes(b"x")
    assert files_of(peers) - before == {str(tmp_path / "files" / "payload")}


@pytest.mark.parametrize(
    ("nbytes", "expires_in_s", "counts"), [(9, 60, False), (9, -60, True), (RECORD_NBYTES, 60, True)]
)
def test_a_small_file_that_says_when_it_expires_is_a_record(peers, nbytes, expires_in_s, counts):
    before = files_of(peers)
    path = peers.folder / "file"
    path.write_bytes(bytes(nbytes))
    os.utime(path, (time.time() + expires_in_s,) * 2)
    assert files_of(peers) - before == ({str(path)} if counts else set())
