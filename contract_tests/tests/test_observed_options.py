"""Every option has a test that shows an effect of it: how that is found out, and that it is so for the reference backend."""

from dataclasses import dataclass
from types import ModuleType

from omni_connector_contract_tests.observed import observes, unobserved
from omni_connector_core.memory.transport import MemoryOptions
from omni_connector_core.options import Options, option


@dataclass(frozen=True, kw_only=True)
class TwoOptions(Options):
    colour: str = option(default="red", doc="Its colour.")
    size: int = option(default=1, doc="Its size.")


def module_of(**functions):
    module = ModuleType("tests")
    vars(module).update(functions)
    return module


def test_the_contract_observes_what_every_backend_has():
    assert unobserved(Options) == []
    assert unobserved(MemoryOptions) == []


def test_an_option_without_a_test_is_found():
    @observes("colour")
    def test_colour(): ...

    assert unobserved(TwoOptions, module_of(test_colour=test_colour)) == ["no test observes the option size"]


def test_methods_inherited_ones_too_and_parametrized_tests_count():
    class TestBase:
        @observes("size")
        def test_size(self): ...

    class TestOwn(TestBase):
        @observes("colour", "ttl_s")
        def test_colour(self): ...

    assert unobserved(TwoOptions, module_of(TestOwn=TestOwn)) == []


def test_only_tests_count():
    @observes("size", "colour")
    def helper(): ...

    assert len(unobserved(TwoOptions, module_of(helper=helper))) == 2


def test_an_option_that_is_not_there_any_more_is_found():
    @observes("size", "colour", "shape")
    def test_all(): ...

    assert unobserved(TwoOptions, module_of(test_all=test_all)) == ["a test observes shape, which is no option"]
