"""The same transfers by vllm-omni's own MooncakeTransferEngineConnector; started by bench_mooncake_te.py with a Python that has it.

python bench_upstream.py SITE_PACKAGES_OF_MOONCAKE producer|consumer PORT

Reads ``put KEY NBYTES`` or ``get KEY METADATA`` lines and answers each with a JSON line.
"""

import json
import os
import sys
import time

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ["MC_FORCE_TCP"] = "1"
sys.path.append(sys.argv[1])

import mooncake.engine  # noqa: F401 - before vllm, or loading it ends in a segmentation fault
import torch
from vllm_omni.distributed.omni_connectors.connectors.mooncake_transfer_engine_connector import (
    MooncakeTransferEngineConnector,
)

torch.Tensor.pin_memory = lambda self: self  # it pins its pool, which needs a GPU; without that it would not start here


def main() -> None:
    """Serve one end."""
    role, port = sys.argv[2], int(sys.argv[3])
    config = {"host": "127.0.0.1", "protocol": "tcp", "memory_pool_size": 700 << 20, "zmq_port": port}
    if role == "consumer":
        config |= {"zmq_port": port + 1, "role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port}
    connector = MooncakeTransferEngineConnector(config)
    source = torch.ones(256 << 20, dtype=torch.uint8)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, key, argument = line.split(maxsplit=2)
        start_s = time.perf_counter()
        if what == "put":
            done, _, metadata = connector.put("0", "1", key, {"x": source[: int(argument)]})
            seconds = time.perf_counter() - start_s
            assert done
            print(json.dumps([seconds, metadata]), flush=True)
        else:
            payload = connector.get("0", "1", key, json.loads(argument))
            seconds = time.perf_counter() - start_s
            assert payload is not None
            print(json.dumps([seconds, None]), flush=True)
            del payload
    connector.close()


if __name__ == "__main__":
    main()
