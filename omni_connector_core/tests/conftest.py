"""What the core's tests share: the codec's are run twice, over the compiled way and in Python alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_connector_core import frame
from omni_connector_core.codec import codec
from omni_connector_core.native import native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.startswith(("test_codec_", "test_frame")):
        metafunc.parametrize("way", ["compiled", "python"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which way payloads go in the tests of a module."""
    chosen = getattr(request, "param", "compiled")
    assert native is not None, "omni-connector-core was installed without a C compiler"
    with pytest.MonkeyPatch.context() as patch:
        if chosen == "python":
            patch.setattr(codec, "native", None)
            patch.setattr(frame, "native", None)
            patch.setenv("OMNI_CONNECTOR_PURE_PYTHON", "1")
        yield chosen
