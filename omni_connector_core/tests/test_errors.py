"""The error tree: what each error is, says, and keeps on its way through a process border."""

import pickle
import re

import pytest

from omni_connector_core import Edge, Key, errors

CLASSES = [getattr(errors, name) for name in errors.__all__ if name[0].isupper()]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling(cls):
    error = cls("what happened", key=Key("r", 1), edge=Edge("0", "1"), backend="some", hint="do this")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is cls
    assert vars(twin) == vars(error)
    assert str(twin) == str(error)
    assert twin.args == error.args


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_is_rebuilt_from_its_code(cls):
    twin = errors.error_from_code(cls.__name__, "what happened")
    assert type(twin) is cls
    assert twin.message == "what happened"
    assert twin.hint == cls.default_hint


def test_an_unknown_code_gives_the_base_class():
    error = errors.error_from_code("ErrorOfTomorrow", "what happened")
    assert type(error) is errors.OmniConnectorError
    assert "ErrorOfTomorrow" in str(error)
    assert type(errors.error_from_code("annotations", "x")) is errors.OmniConnectorError


def test_an_error_says_what_where_and_what_to_do():
    error = errors.CapacityError("no room", key=Key("r", 2, "s"), edge=Edge("enc", "dec"), backend="some", hint="read")
    assert str(error) == "no room [key='r'/2/s, edge=enc->dec, backend=some]. read"


def test_locate_fills_in_only_what_is_missing():
    error = errors.PeerLostError("gone", key=Key("mine"))
    errors.locate(error, key=Key("other"), edge=Edge("0", "1"), backend="some")
    assert (error.key, error.edge, error.backend) == (Key("mine"), Edge("0", "1"), "some")


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = re.findall(r"[├└]── (\w+)(?: +\((\w+)\))?", errors.__doc__)
    assert {name for name, _ in drawn} | {"OmniConnectorError"} == {cls.__name__ for cls in CLASSES}
    for name, builtin in drawn:
        if builtin:
            assert issubclass(getattr(errors, name), __builtins__[builtin])
    marked = set(re.findall(r"── (\w+) .*retryable", errors.__doc__))
    assert marked == {cls.__name__ for cls in CLASSES if cls.retryable}
