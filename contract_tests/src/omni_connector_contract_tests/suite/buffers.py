"""Level 1: the caller's own memory, many pieces, many keys (point 16), and the lifetime of views (point 12)."""

from __future__ import annotations

import numpy as np
import pytest

from omni_connector_contract_tests.harness import acts
from omni_connector_contract_tests.harness.ends import Ends
from omni_connector_contract_tests.harness.eventually import eventually
from omni_connector_contract_tests.harness.payloads import Bulk, fingerprint
from omni_connector_contract_tests.suite.base import ContractTests, requires, without
from omni_connector_core import BufferMismatchError, Key, TransferTimeoutError

__all__ = ["TestBatch", "TestGetInto", "TestViews"]


class TestGetInto(ContractTests):
    """`get_into` fills the caller's buffers with a payload's raw bytes, in order, to the last one."""

    @pytest.mark.parametrize("register", [False, True], ids=["plain", "registered"])
    @pytest.mark.parametrize("sizes", [[300_001], [1, 100_000, 200_000], [100_000, 0, 200_000, 1]], ids=str)
    def test_the_bytes_arrive_in_order(self, ends: Ends, sizes: list[int], register: bool) -> None:
        total = sum(sizes)
        metadata = ends.producer.put("k", Bulk(total, seed=9))
        nbytes, found = ends.consumer.act(acts.get_into, "k", sizes, register=register, metadata=metadata)
        assert (nbytes, found) == (total, fingerprint(Bulk(total, seed=9)))

    def test_by_key_alone_and_by_a_waiting_consumer(self, ends: Ends) -> None:
        waiting = ends.consumer.start_act(acts.get_into, "k", [50_000], register=False)
        ends.producer.put("k", Bulk(50_000, seed=2))
        assert waiting.result() == (50_000, fingerprint(Bulk(50_000, seed=2)))

    def test_several_arrays_flow_into_other_pieces(self, ends: Ends) -> None:
        arrays = [Bulk(n, seed=n).build() for n in (1000, 64, 7, 4000)]
        ends.producer.put("k", {"arrays": arrays})
        nbytes, found = ends.consumer.act(acts.get_into, "k", [500, 1500, 3071], register=False)
        whole = b"".join(array.tobytes() for array in arrays)
        assert nbytes == len(whole)
        assert found == fingerprint(np.frombuffer(whole, np.uint8))

    def test_thousands_of_pieces(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(4096 * 33, seed=4))
        nbytes, found = ends.consumer.act(acts.get_into, "k", [33] * 4096, register=True)
        assert (nbytes, found) == (4096 * 33, fingerprint(Bulk(4096 * 33, seed=4)))

    @pytest.mark.parametrize("wrong", [99_999, 100_001])
    def test_buffers_that_do_not_fit_are_refused_untouched(self, ends: Ends, wrong: int) -> None:
        ends.producer.put("k", Bulk(200_000))
        with pytest.raises(BufferMismatchError):
            ends.consumer.act(acts.get_into_misfit, "k", wrong)

    def test_get_into_is_a_read(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(50_000))
        ends.consumer.act(acts.get_into, "k", [50_000], register=False)
        with pytest.raises(TransferTimeoutError):
            ends.consumer.get("k", timeout=0.2)
        eventually(lambda: ends.producer.usage().bytes_held == 0)
        eventually(lambda: ends.consumer.usage().bytes_held == 0)

    def test_get_into_times_out(self, ends: Ends) -> None:
        with pytest.raises(TransferTimeoutError):
            ends.consumer.act(acts.get_into, "k", [10], register=False, timeout=0.2)


class TestBatch(ContractTests):
    """Questions about many keys at once."""

    def test_exists_answers_for_each_key(self, ends: Ends) -> None:
        ends.producer.put("a", 1)
        ends.producer.put(Key("b", 2), 1)
        keys = ["a", "b", Key("b", 2), "c"]
        assert ends.producer.exists(*keys) == [True, False, True, False]
        eventually(lambda: ends.consumer.exists(*keys) == [True, False, True, False])
        assert ends.consumer.exists() == []

    def test_exists_takes_no_read(self, ends: Ends) -> None:
        ends.producer.put("k", "payload")
        for _ in range(3):
            ends.consumer.exists("k")
        assert ends.consumer.get("k") == "payload"

    def test_what_was_read_does_not_exist(self, ends: Ends) -> None:
        ends.producer.put("k", 1)
        ends.consumer.get("k")
        eventually(lambda: ends.producer.exists("k") == [False])
        eventually(lambda: ends.consumer.exists("k") == [False])


class TestViews(ContractTests):
    """What was got is the consumer's for as long as it looks at it."""

    def test_a_view_stays_while_the_memory_around_it_is_reused(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.act(acts.hold, "view", "k")
        for n in range(2, 8):
            ends.producer.put("k", Bulk(200_000, seed=n))
            assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(200_000, seed=n))
        assert ends.consumer.act(acts.look, "view") == fingerprint(Bulk(200_000, seed=1))

    def test_a_slice_keeps_the_memory(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.act(acts.hold, "view", "k")
        before = ends.consumer.act(acts.keep_only_a_slice, "view", 150_000)
        for n in range(2, 6):
            ends.producer.put("k", Bulk(200_000, seed=n))
            ends.consumer.get_fingerprint("k")
        assert ends.consumer.act(acts.look, "view") == before

    def test_a_view_outlives_the_consumers_close(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.act(acts.hold, "view", "k")
        assert ends.consumer.act(acts.close_and_look, "view") == fingerprint(Bulk(200_000, seed=1))
        for n in range(2, 4):
            ends.producer.put(f"k{n}", Bulk(200_000, seed=n))
        assert ends.consumer.act(acts.look, "view") == fingerprint(Bulk(200_000, seed=1))

    def test_a_view_outlives_the_producers_close(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.act(acts.hold, "view", "k")
        ends.producer.call("close")
        again = ends.open("producer")
        again.put("k", Bulk(200_000, seed=2))
        assert ends.consumer.act(acts.look, "view") == fingerprint(Bulk(200_000, seed=1))
        assert ends.consumer.get_fingerprint("k") == fingerprint(Bulk(200_000, seed=2))

    def test_a_copy_is_private_and_writable(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.act(acts.hold, "array", "k", copy=True)
        eventually(lambda: ends.producer.usage().bytes_held == 0)
        eventually(lambda: ends.consumer.usage().bytes_held == 0)
        assert ends.consumer.act(acts.write_into_kept, "array")

    @requires("zero_copy")
    def test_zero_copy_a_view_holds_transport_memory_and_its_end_frees_it(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.act(acts.hold, "view", "k")
        eventually(lambda: ends.producer.usage().pending == 0)
        assert ends.producer.usage().bytes_held + ends.consumer.usage().bytes_held >= 200_000
        ends.consumer.act(acts.drop, "view")
        eventually(lambda: ends.producer.usage().bytes_held == 0)
        eventually(lambda: ends.consumer.usage().bytes_held == 0)

    @without("zero_copy")
    def test_without_zero_copy_a_result_holds_no_transport_memory(self, ends: Ends) -> None:
        ends.producer.put("k", Bulk(200_000, seed=1))
        ends.consumer.act(acts.hold, "array", "k")
        eventually(lambda: ends.producer.usage().bytes_held == 0)
        eventually(lambda: ends.consumer.usage().bytes_held == 0)
        assert ends.consumer.act(acts.look, "array") == fingerprint(Bulk(200_000, seed=1))

    def test_writing_into_what_was_got_changes_nothing_else(self, ends: Ends) -> None:
        ends.producer.put("a", Bulk(200_000, seed=1))
        ends.producer.put("b", Bulk(200_000, seed=2))
        ends.consumer.act(acts.hold, "a", "a")
        ends.consumer.act(acts.write_into_kept, "a")
        assert ends.consumer.get_fingerprint("b") == fingerprint(Bulk(200_000, seed=2))
