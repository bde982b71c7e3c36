"""What tests of streams and stages let a peer do: functions whose first argument is an `Acting`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from omni_connector_contract_tests.harness.payloads import build, fingerprint
from omni_connector_contract_tests.harness.worker import Acting
from omni_connector_core import Key, OmniConnectorError, Producer

# ---- streams


def write_stream(
    acting: Acting, request_id: str, chunks: list[Any], *, mark_last: bool = False, stop_after: int = -1, **options: Any
) -> int:
    """Write a whole stream; returns how many chunks were written.

    Parameters
    ----------
    mark_last
        Let the last chunk carry the end.
    stop_after
        Leave the writer open after so many chunks, kept under the request id.
    """
    writer = acting.connector.writer(request_id, **options)
    acting.kept[f"writer {request_id}"] = writer
    for n, chunk in enumerate(chunks):
        if n == stop_after:
            return writer.written
        writer.write(build(chunk), last=mark_last and n == len(chunks) - 1)
    writer.end()
    return writer.written


def write_on(acting: Acting, request_id: str, chunk: Any, *, last: bool = False, timeout: float | None = None) -> None:
    """Write one more chunk with a kept writer."""
    acting.kept[f"writer {request_id}"].write(build(chunk), last=last, timeout=timeout)


def fail_stream(acting: Acting, request_id: str, reason: str) -> None:
    """Fail a stream with a kept writer."""
    acting.kept[f"writer {request_id}"].fail(reason)


def read_stream(acting: Acting, request_id: str, **options: Any) -> list[str]:
    """Read a whole stream; returns the fingerprints of its chunks."""
    return [fingerprint(chunk) for chunk in acting.connector.reader(request_id, **options)]


def read_some(acting: Acting, request_id: str, count: int, *, leave: bool = False, **options: Any) -> list[str]:
    """Read some chunks with a reader that is kept; `leave` abandons the stream then."""
    name = f"reader {request_id}"
    reader = acting.kept.get(name) or acting.connector.reader(request_id, **options)
    acting.kept[name] = reader
    read = [fingerprint(next(reader)) for _ in range(count)]
    if leave:
        reader.close()
    return read


def read_to_the_end(acting: Acting, request_id: str) -> tuple[list[str], OmniConnectorError | None, float]:
    """Read the rest with a kept reader; returns what came, the error that ended it, and when (CLOCK_MONOTONIC)."""
    read: list[str] = []
    reader = acting.kept[f"reader {request_id}"]
    try:
        read.extend(fingerprint(chunk) for chunk in reader)
    except OmniConnectorError as error:
        return read, error, time.monotonic()
    return read, None, time.monotonic()


def most_pending_while_writing(acting: Acting, request_id: str, chunks: int, nbytes: int, window: int) -> int:
    """Write a stream and say how many unread payloads there ever were."""
    most = 0
    with acting.connector.writer(request_id, window=window) as writer:
        for n in range(chunks):
            writer.write(np.full(nbytes, n % 251, np.uint8))
            most = max(most, acting.connector.transport.usage().pending)
    return most


# ---- stages


def transform(value: np.ndarray[Any, Any], stage: str) -> np.ndarray[Any, Any]:
    """Do what a stage does: different for every stage, and not commutative."""
    return np.roll(value, len(stage)) ^ np.uint8(sum(stage.encode()) % 251)


def run_stage(
    acting: Acting,
    stage: str,
    request_id: str,
    then: dict[str, Any] | None,
    *,
    chunked: bool,
    producer: int | None = None,
) -> str:
    """Take a request's input from this edge, transform it, and hand it to the next edge.

    Parameters
    ----------
    then
        Arguments for `create_connector` of the outgoing edge; None at the last stage.
    chunked
        Whether both edges carry a stream.
    producer
        Replica of the stage before.

    Returns
    -------
    str
        Fingerprint of what the stage made.
    """
    whose = None if producer is None else Producer(producer)
    if chunked:
        parts = [transform(part, stage) for part in acting.connector.reader(request_id, producer=whose)]
    else:
        parts = [transform(acting.connector.get(request_id, producer=whose), stage)]
    if then is not None:
        hand_over(acting, request_id, parts, then, chunked=chunked)
    return fingerprint(np.concatenate(parts))


def hand_over(acting: Acting, request_id: str, parts: list[Any], then: dict[str, Any], *, chunked: bool) -> None:
    """Put parts on an outgoing edge, whose connector is kept."""
    from omni_connector_core import create_connector

    outgoing = acting.kept.get("outgoing")
    if outgoing is None:
        outgoing = acting.kept["outgoing"] = create_connector(acting.connector.backend, **then)
    if chunked:
        with outgoing.writer(request_id) as writer:
            for part in parts:
                writer.write(part)
    else:
        outgoing.put(Key(request_id), np.concatenate(parts))


def close_outgoing(acting: Acting) -> int:
    """Close the outgoing edge; returns how many payloads were still unread there."""
    outgoing = acting.kept.pop("outgoing")
    pending: int = outgoing.stats()["pending"]
    outgoing.close()
    return pending
