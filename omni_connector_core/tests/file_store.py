"""The file store that the template for new backends brings, for tests of what stands on a store."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import omni_connector_contract_tests

FILES = Path(omni_connector_contract_tests.__file__).parent / "template/src/omni_connector_my_backend/files.py"


def file_store_class() -> Any:
    """Load the class, which is in no installed package."""
    spec = importlib.util.spec_from_file_location("files_of_the_template", FILES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FileStore
