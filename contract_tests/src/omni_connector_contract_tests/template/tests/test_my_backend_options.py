"""Every option of the backend changes something that can be seen."""

import sys
from pathlib import Path

from omni_connector_my_backend.options import MyBackendOptions

from omni_connector_contract_tests.observed import observes, unobserved
from omni_connector_core import create_connector


def test_every_option_has_a_test() -> None:
    assert unobserved(MyBackendOptions, sys.modules[__name__]) == []


@observes("folder")
def test_the_files_lie_in_the_folder(tmp_path: Path) -> None:
    with create_connector("my_backend", {"folder": str(tmp_path)}) as connector:
        connector.put("k", b"payload")
        assert list(tmp_path.rglob("*"))
        assert connector.get("k") == b"payload"
