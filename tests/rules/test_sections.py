"""--section-timeouts as it is read."""

from __future__ import annotations

import pytest

from megapar.rules.sections import is_section_limits, origin_of_limit, section_limits


def test_limits_of_steps_come_from_either_flag() -> None:
    assert section_limits((), 600.0) == {"first-step": 600.0, "step": 600.0}
    assert section_limits(("save=5", " first-step = 1e3 "), 600.0) == {"save": 5.0, "first-step": 1000.0, "step": 600.0}
    assert section_limits(("step=7",), 600.0) == {"first-step": 7.0, "step": 7.0}
    assert section_limits(("step=0", "save=0"), 600.0) == {}
    limits = section_limits(("step=7", "save=5"), 600.0)
    assert origin_of_limit("step", limits, ("step=7", "save=5")) == "--section-timeouts has step=7"
    assert origin_of_limit("save", limits, ("step=7", "save=5")) == "--section-timeouts has save=5"
    assert origin_of_limit("step", section_limits((), 4.0), ()) == "--step-timeout-seconds is 4"
    assert origin_of_limit("load", limits, ()) == ""


@pytest.mark.parametrize("text", ["save", "save=", "save=-1", "save=inf", "save=nan", "saves=1", "=1", "save=1=2"])
def test_what_is_none_is_refused(text: str) -> None:
    assert not is_section_limits((text,))
    assert not is_section_limits(("save=1", "save=2"))
