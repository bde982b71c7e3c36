"""Things that tests let a peer do which are more than one call: functions whose first argument is an `Acting`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import psutil

from omni_connector_contract_tests.harness.payloads import Bulk, build, fingerprint
from omni_connector_contract_tests.harness.worker import Acting, Run
from omni_connector_core import NOT_READY, Capabilities, DecodeError, Key, OmniConnectorError
from omni_connector_core.codec import Codec

# ---- putting


def put_and_scribble(acting: Acting, key: str, nbytes: int) -> str:
    """Put an array, overwrite it at once, and return the fingerprint that it had."""
    array = Bulk(nbytes, seed=nbytes).build()
    before = fingerprint(array)
    acting.connector.put(key, array)
    array[:] = 0xEE
    return before


def put_many(acting: Acting, prefix: str, count: int, threads: int) -> None:
    """Put `count` payloads from several threads at once; the n-th is a `Bulk` of seed n."""
    _in_threads(threads, count, lambda n: acting.connector.put(f"{prefix}{n}", Bulk(500 + 37 * n, seed=n).build()))


def get_many(acting: Acting, prefix: str, count: int, threads: int) -> list[str]:
    """Get what `put_many` puts, in several threads at once; returns the fingerprints in order."""
    found = [""] * count

    def get(n: int) -> None:
        found[n] = fingerprint(acting.connector.get(f"{prefix}{n}"))

    _in_threads(threads, count, get)
    return found


def put_for_ever(acting: Acting, nbytes: int) -> None:
    """Put k0, k1, ... until killed; the n-th is a `Bulk` of seed n % 4."""
    arrays = [Bulk(nbytes, seed=n).build() for n in range(4)]
    for n in range(1_000_000):
        acting.connector.put(f"k{n}", arrays[n % 4], timeout=60.0)


def put_and_end_at_once(acting: Acting, key: str, payload: Bulk, threads: int, count: int) -> None:
    """Put `count` payloads a thread and end each at once, failed or cleaned up by turns; then put others, where they lay."""

    def work(n: int) -> None:
        connector = acting.connector
        connector.put(f"{key}-{n}", payload.build())
        if n % 2:
            connector.fail(f"{key}-{n}", "at once")
        else:
            connector.cleanup(f"{key}-{n}")
        connector.put(f"other {key}-{n}", bytes(payload.nbytes), ttl=0.1)

    _in_threads(threads, count, work)


def get_each(acting: Acting, key: str, threads: int, count: int) -> list[str]:
    """Get what `put_and_end_at_once` puts, waiting for each; returns fingerprints, or the names of errors."""
    found = [""] * count

    def work(n: int) -> None:
        try:
            found[n] = fingerprint(acting.connector.get(f"{key}-{n}"))
        except OmniConnectorError as error:
            found[n] = type(error).__name__

    _in_threads(threads, count, work)
    return found


def consumed(acting: Acting, key: str, timeout: float | None = None) -> bool:
    """Wait until a payload is consumed; says whether it is."""
    return acting.connector.transport.consumed(Key(key), deadline=acting.connector.deadline(timeout))


def put_and_die_once_consumed(acting: Acting, key: str, payload: Bulk) -> None:
    """Put, wait until the payload is consumed, and be killed at that moment."""
    acting.connector.put(key, payload.build())
    consumed(acting, key)
    os.kill(os.getpid(), signal.SIGKILL)


def _in_threads(threads: int, count: int, work: Any) -> None:
    errors: list[BaseException] = []

    def run(start: int) -> None:
        try:
            for n in range(start, count, threads):
                work(n)
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    started = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


# ---- between transport and codec


def damage_is_found(acting: Acting, key: str) -> bool:
    """Take a payload as it lies in the transport, change a bit of its data, and say whether decoding it is an error."""
    memory = bytearray(acting.connector.transport.get(Key(key), deadline=acting.connector.deadline(None)))
    memory[len(memory) // 2] ^= 1
    try:
        Codec().decode(memory)
    except DecodeError:
        return True
    return False


# ---- holding what was got


def hold(acting: Acting, name: str, key: Any, metadata: Any = None, **options: Any) -> str:
    """Get a payload and keep it under a name."""
    acting.kept[name] = acting.connector.get(key, metadata, **options)
    return fingerprint(acting.kept[name])


def look(acting: Acting, name: str) -> str:
    """Return the fingerprint of what is kept."""
    return fingerprint(acting.kept[name])


def drop(acting: Acting, name: str) -> None:
    """Let go of what is kept."""
    del acting.kept[name]
    gc.collect()


def keep_only_a_slice(acting: Acting, name: str, start: int) -> str:
    """Keep only the end of an array that is kept; returns the fingerprint of that."""
    acting.kept[name] = acting.kept[name][start:]
    gc.collect()
    return fingerprint(acting.kept[name])


def write_into_kept(acting: Acting, name: str) -> bool:
    """Overwrite a kept array; says whether that was allowed."""
    try:
        acting.kept[name][...] = 0x55
    except ValueError:
        return False
    return True


def close_and_look(acting: Acting, name: str) -> str:
    """Close the connector and return the fingerprint of what is kept."""
    acting.connector.close()
    gc.collect()
    return fingerprint(acting.kept[name])


def get_after_reuse(acting: Acting, keys: list[str]) -> list[str]:
    """Get several payloads, keep all, and only then look at them."""
    kept = [acting.connector.get(key) for key in keys]
    return [fingerprint(payload) for payload in kept]


# ---- measuring


def timed(acting: Acting, method: str, *args: Any, **kwargs: Any) -> tuple[float, Any, OmniConnectorError | None]:
    """Call a method; returns seconds taken, result, error."""
    args = tuple(build(argument) for argument in args)
    result, error = None, None
    start_s = time.monotonic()
    try:
        result = getattr(acting.connector, method)(*args, **kwargs)
    except OmniConnectorError as raised:
        error = raised
    return time.monotonic() - start_s, result, error


def share_of_a_core(acting: Acting, method: str, *args: Any, **kwargs: Any) -> float:
    """Call a method that waits and fails; returns the CPU it used, as a part of what a loop without pause gets here now."""
    start_s, cpu_s = time.monotonic(), time.process_time()
    with contextlib.suppress(OmniConnectorError):
        getattr(acting.connector, method)(*[build(argument) for argument in args], **kwargs)
    waiting = (time.process_time() - cpu_s) / (time.monotonic() - start_s)
    start_s, cpu_s = time.monotonic(), time.process_time()
    while time.monotonic() < start_s + 0.2:
        pass
    return waiting * (time.monotonic() - start_s) / (time.process_time() - cpu_s)


def put_and_tell_that_it_began(acting: Acting, name: str, key: Any, payload: Any) -> Any:
    """Put; as long as that has not begun, nothing is kept under the name."""
    payload = build(payload)
    acting.kept[name] = True
    return acting.connector.put(key, payload)


def is_kept(acting: Acting, name: str) -> bool:
    """Whether something is kept under a name."""
    return name in acting.kept


def get_and_tell_when(acting: Acting, key: Any, **kwargs: Any) -> tuple[float, OmniConnectorError | None]:
    """Get; returns when it ended (CLOCK_MONOTONIC, the same in every process of a host) and the error."""
    try:
        acting.connector.get(key, **kwargs)
    except OmniConnectorError as error:
        return time.monotonic(), error
    return time.monotonic(), None


def call_and_tell_when(acting: Acting, method: str, *args: Any) -> float:
    """Call a method; returns when that began (CLOCK_MONOTONIC)."""
    at_s = time.monotonic()
    getattr(acting.connector, method)(*args)
    return at_s


def median_poll_s(acting: Acting, key: Any, count: int) -> float:
    """Poll for something that is not there; returns the median time of a poll, seconds."""
    times = []
    for _ in range(count):
        start_s = time.perf_counter()
        assert acting.connector.poll(key) is NOT_READY
        times.append(time.perf_counter() - start_s)
    return sorted(times)[count // 2]


def poll_until_there(acting: Acting, key: Any, within_s: float) -> Any:
    """Poll until the payload is there, or until the time is over."""
    end_s = time.monotonic() + within_s
    while (payload := acting.connector.poll(key)) is NOT_READY and time.monotonic() < end_s:
        time.sleep(0.001)
    return payload


def news(acting: Acting) -> int | None:
    """See `Transport.news`."""
    return acting.connector.transport.news()


def poll_at_news(acting: Acting, key: Any, seen: int | None, within_s: float) -> Any:
    """Poll until the payload is there, but only when `Transport.news` is not what was seen before the poll before."""
    end_s = time.monotonic() + within_s
    payload: Any = NOT_READY
    while payload is NOT_READY and time.monotonic() < end_s:
        now = acting.connector.transport.news()
        if now is None or now != seen:
            payload, seen = acting.connector.poll(key), now
        time.sleep(0.001)
    return payload


# ---- the caller's own memory


def get_into(acting: Acting, key: Any, sizes: list[int], *, register: bool, **kwargs: Any) -> tuple[int, str]:
    """Get into slices of one array, of these sizes; returns the count of bytes and a fingerprint of all of them.

    Between the slices lies a byte that must stay as it is.
    """
    arena = np.full(sum(sizes) + len(sizes), 0xEE, np.uint8)
    if register:
        acting.connector.register(arena)
    buffers, guards, offset = [], [], 0
    for size in sizes:
        buffers.append(arena[offset : offset + size])
        guards.append(offset + size)
        offset += size + 1
    nbytes = acting.connector.get_into(key, buffers, **kwargs)
    assert (arena[guards] == 0xEE).all(), "get_into wrote outside the buffers"
    whole = np.concatenate(buffers) if buffers else np.empty(0, np.uint8)
    return nbytes, fingerprint(whole)


def get_into_misfit(acting: Acting, key: Any, nbytes: int) -> bool:
    """Get into a buffer of the wrong size; says whether it stayed untouched. The error is raised on."""
    buffer = np.full(nbytes, 0xEE, np.uint8)
    try:
        acting.connector.get_into(key, [buffer])
    finally:
        assert (buffer == 0xEE).all(), "a refused get_into wrote"
    return True


# ---- handles


def submit_puts(acting: Acting, payloads: dict[str, Any]) -> dict[str, Any]:
    """Submit all puts, then wait for all; returns their metadata."""
    handles = {key: acting.connector.submit_put(key, build(payload)) for key, payload in payloads.items()}
    return {key: handle.result() for key, handle in handles.items()}


def submit_get(acting: Acting, name: str, key: Any) -> bool:
    """Submit a get and keep its handle; says whether it is done."""
    acting.kept[name] = acting.connector.submit_get(key)
    return bool(acting.kept[name].done())


def handle_done(acting: Acting, name: str) -> bool:
    """Whether a kept handle is done."""
    return bool(acting.kept[name].done())


def handle_result(acting: Acting, name: str, timeout: float | None = None) -> Any:
    """Wait for a kept handle."""
    return acting.kept[name].result(timeout)


def handle_cancel(acting: Acting, name: str) -> None:
    """Cancel a kept handle."""
    acting.kept[name].cancel()


# ---- places from which a connector is used


def in_event_loop(acting: Acting, method: str, *args: Any) -> Any:
    """Call a method from inside a running event loop."""

    async def call() -> Any:
        return getattr(acting.connector, method)(*args)

    return asyncio.run(call())


def in_forked_child(acting: Acting) -> list[str]:
    """Fork, try put, get, poll and health there, close, and return what came of each."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:  # os._exit in any case: the child must not run the parent's code
        try:
            told = []
            for method, args in (("put", ("k", 1)), ("get", ("k",)), ("poll", ("k",))):
                try:
                    getattr(acting.connector, method)(*args)
                    told.append("nothing")
                except OmniConnectorError as error:
                    told.append(error.code)
            acting.connector.close()
            os.write(writer, " ".join(told).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode().split()
    os.waitpid(pid, 0)
    return answer


def listening_ports() -> list[tuple[str, int]]:
    """List the TCP ports that this process listens on, with the address."""
    connections = psutil.Process().net_connections("tcp")
    return sorted((c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN)


RUN_LISTENING = Run(None, listening_ports, (), {})
"""The request for `listening_ports`."""


def capabilities_of_transport(acting: Acting) -> Capabilities:
    """Return what the transport itself claims."""
    return acting.connector.transport.capabilities


def put_unencodable(acting: Acting, key: str) -> None:
    """Put something that no codec can encode, inside something that it can."""
    acting.connector.put(key, {"fine": 1, "inside": [0, 1, threading.Lock()]})
