"""Two hosts, with the master on the consumer's: cuts, resets, loss, and bytes that must not arrive late."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from omni_connector_contract_tests.harness.two_hosts import ADDRESS
from omni_connector_contract_tests.network import HELD_S, NetworkBackend, TestNetwork, network_ends, two_hosts  # noqa: F401
from omni_connector_core import (
    BackendUnavailableError,
    CapacityError,
    PeerLostError,
    TransferTimeoutError,
    create_connector,
)

pytest.importorskip("mooncake.store", exc_type=ImportError)

SERVE = """
import json, sys
from omni_connector_mooncake_store.service import start
with start(host=sys.argv[1], client_ttl_s=60) as service:
    print(json.dumps(service.config()), flush=True)
    sys.stdin.read()
"""
FILLER_NBYTES = 4 << 20
SETTLED_S = 3.0


@pytest.fixture(scope="module")
def network_backend(two_hosts):  # noqa: F811
    command = [*two_hosts.prefix("b"), sys.executable, "-c", SERVE, ADDRESS["b"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        config = json.loads(service.stdout.readline())
        yield NetworkBackend(
            "mooncake_store", lambda _: {**config, "capacity_bytes": "600MiB", "arena_bytes": "600MiB"}
        )
        service.stdin.close()


class TestStoreNetwork(TestNetwork):
    @pytest.mark.parametrize("fault", ["cut", "blackhole"])
    def test_a_deadline_holds_through_a_cut_and_no_byte_comes_late(self, fault):
        """As in the class above; but what a store puts does not lie where it receives, so views of gets fill the arena."""
        getting = self.start_large_get(timeout=3.0)
        with getattr(self.hosts, fault)():
            seconds, error, _ = getting.result()
            assert isinstance(error, TransferTimeoutError | PeerLostError)
            assert seconds < HELD_S
            assert self.consumer.act(fill_the_arena) > 50
        time.sleep(SETTLED_S)  # whatever is on its way arrives
        assert self.consumer.act(look_at_the_arena) == [], "bytes arrived late in memory that was handed out again"
        self.works_again()

    def test_a_producer_that_is_cut_off_from_the_master_comes_back(self):
        with self.hosts.cut():
            error = self.producer.act(failed_put, 2.0)
            assert isinstance(error, BackendUnavailableError)
        metadata = self.producer.put("k", np.arange(1000), timeout=30.0)
        assert (self.consumer.get("k", metadata, timeout=30.0) == np.arange(1000)).all()


del TestNetwork  # or it would run twice


def failed_put(acting, timeout):
    start_s = time.monotonic()
    with pytest.raises(BackendUnavailableError) as caught:
        acting.connector.put("cut", 1, timeout=timeout)
    assert time.monotonic() - start_s < HELD_S
    return caught.value


def fill_the_arena(acting):
    """Receive payloads in the consumer's process until its arena is full, and keep the views."""
    context = acting.connector.transport.context
    config = {name: getattr(context.options, name) for name in ("master", "host", "capacity_bytes", "arena_bytes")}
    filler = create_connector(context.backend, config, namespace=context.namespace, edge=("filler", "nobody"))
    views = acting.kept["views"] = []
    payload = np.full(FILLER_NBYTES, 0x5A, np.uint8)
    while True:
        filler.put(f"filler{len(views)}", payload)
        try:
            views.append(filler.get(f"filler{len(views)}", timeout=0.5))
        except CapacityError:
            break
    filler.close()
    return len(views)


def look_at_the_arena(acting):
    """Return the numbers of the views that changed, and let all of them go."""
    views = acting.kept.pop("views")
    return [number for number, view in enumerate(views) if not (view == 0x5A).all()]
