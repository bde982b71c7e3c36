"""Two workers, shared by all tests; a test that ends one leaves it to the next that asks to start it again."""

from __future__ import annotations

import uuid

import pytest

from omni_connector_core import Deadline, create_connector
from omni_connector_yuanrong.options import YuanrongOptions
from omni_connector_yuanrong.service import start
from omni_connector_yuanrong.store import YuanrongStore


class Cluster:
    """Two workers and what can be opened on them."""

    def __init__(self, service):
        self.service = service
        self.opened = []

    def config(self, worker=0, **options):
        host, port = self.service.addresses[worker]
        return {"host": host, "port": port, "timeout_s": 8.0, **options}

    def store(self, worker=0, **options):
        store = YuanrongStore(YuanrongOptions(**self.config(worker, **options)), deadline=Deadline(8))
        self.opened.append(store)
        return store

    def connector(self, worker=0, *, options=None, **arguments):
        connector = create_connector("yuanrong", self.config(worker, **(options or {})), **arguments)
        self.opened.append(connector)
        return connector

    def repair(self):
        for name, daemon in self.service.daemons.items():
            if not daemon.running:
                self.service.restart(name)


@pytest.fixture(scope="session")
def _service():
    with start(workers=2, memory="192MiB") as service:
        yield service


@pytest.fixture
def cluster(_service):
    cluster = Cluster(_service)
    cluster.repair()
    yield cluster
    for opened in reversed(cluster.opened):
        opened.close()


@pytest.fixture
def name():
    """A name, and with it a namespace, that nobody uses."""
    return f"yuanrong-{uuid.uuid4().hex[:12]}"
