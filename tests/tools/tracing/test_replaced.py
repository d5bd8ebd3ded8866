"""What is replaced for a while comes back, whatever happens."""

from __future__ import annotations

import types

import pytest

from megapar.tools.tracing.replaced import replaced


class Thing:
    size = 1

    def double(self) -> int:
        return 2 * self.size


def test_an_attribute_of_a_module_comes_back_after_an_error():
    module = types.SimpleNamespace(name="own")

    def look() -> None:
        with replaced(module, "name", "other"):
            raise KeyError(module.name)

    with pytest.raises(KeyError, match="other"):
        look()
    assert module.name == "own"


def test_a_method_of_one_object_is_its_class_s_again():
    thing = Thing()
    with replaced(thing, "double", lambda: 7):
        assert thing.double() == 7
        assert Thing().double() == 2
    assert vars(thing) == {}
    assert thing.double() == 2


def test_what_is_not_there_cannot_be_replaced():
    with pytest.raises(AttributeError), replaced(Thing(), "missing", 1):
        pass
