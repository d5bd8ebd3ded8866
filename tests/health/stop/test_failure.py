"""Which exceptions tell of another rank's end, and what is said of them."""

from __future__ import annotations

import pytest

from megapar.health.stop.failure import WAITED, is_lost_peer, report_lost_peer

GLOO = (
    "[/w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:11955: Connection reset by peer. This is typically "
    "caused by a remote worker hanging or bugs in the application."
)


def test_a_lost_rank_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_lost_peer(RuntimeError(GLOO), {"WORLD_SIZE": "2", "RANK": "1"})
    assert capsys.readouterr().err == (
        "rank 1: another rank is gone, see its error (Read error [127.0.0.1]:11955: Connection reset by peer)\n"
    )


@pytest.mark.parametrize("error", [ValueError(GLOO), RuntimeError("shape"), OSError(5, "Input/output error")])
def test_what_is_a_rank_s_own_keeps_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_lost_peer(error)
    assert not report_lost_peer(error, {"WORLD_SIZE": "2", "RANK": "1"})
    assert capsys.readouterr().err == ""


def test_a_run_of_one_rank_has_no_other() -> None:
    assert not report_lost_peer(RuntimeError(GLOO), {})


def test_a_rank_that_waited_for_a_late_one_has_lost_it() -> None:
    assert is_lost_peer(ConnectionError(WAITED))
