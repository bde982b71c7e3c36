# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni over any omni-connector backend.

vLLM-Omni makes a connector by name, in processes and for edges of its choosing, and calls it as listed here (0.30.0, read in
its code and seen in its runs; `test_vllm_drift.py` holds the list against the installed version).

Construction: ``constructor(extra)``, from ``OmniConnectorFactory``.
    Full payload: one per worker rank. Async chunks: one in the scheduler's process, one idle in each worker. KV: one more in each
    sending worker, one lazily in the diffusion worker. `extra` is the YAML's, plus ``stage_id`` and ``role`` (not for KV). An
    out-of-tree name gets no edge and no port; a middle stage has ``role=receiver`` and one connector for gets and puts. So this
    adapter takes edge and role from each call, and opens what the call needs.

Calls, all with stage ids as str and `put_key` / `get_key` as str:
    ``put(from_stage, to_stage, put_key, data) -> (bool, nbytes, metadata | None)``
        From a saver thread; for KV from the worker's main thread, by keyword, at most three tries. `data` is a dict, an
        ``OmniPayloadStruct``, or for KV bytes, a uint8 tensor (``supports_raw_data``) or a dict. False: full payload, three more
        tries within milliseconds, then HTTP 500; async chunk, none, and the next chunk goes out under the same key.
    ``get(from_stage, to_stage, get_key[, metadata]) -> (payload, nbytes) | None``
        Polled: about every 5 ms (full payload), 1 ms (async chunk), 10 to 500 ms (KV, by keyword). The payload is a plain dict;
        for KV also an object with ``.tensor`` and ``.release()``. Raising is logged, with a traceback, on every poll.
        `metadata` is None or ``{"source_host", "source_port"}``: the head process' guess at the producer's address.
    ``get_with_deadline(from_stage, to_stage, get_key, metadata, *, deadline)``
        By a diffusion stage; `deadline` is on the monotonic clock. ``abandon_get(get_key)`` follows, whatever came of it.
    ``cleanup(put_key)``
        On abort of a stream, from the saver thread, for each chunk put, and only to an instance of ``SharedMemoryConnector``:
        this adapter is registered as a virtual subclass of it. The key may be put again by a later request.
    ``reap_consumed()`` about every 100 ms from the chunk saver; ``close()`` on shutdown of a chunk scheduler or worker.
    ``update_sender_info(host, port)`` for a KV receiver, before its gets.
    ``health()``: never. Attributes read: ``stage_id``, ``config`` (the pipelines' own options are in it), ``supports_raw_data``.

Keys: full payload and chunks ``{request}_{from}_{chunk}``; KV ``omni_{from}_to_{to}_kv_cache_{request}``, with tensor parallelism
``{request}_{from}_{chunk}_{from_rank}_{to_rank}``. They are unique on an edge and taken as they are.
"""
