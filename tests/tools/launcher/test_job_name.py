"""A job without a name gets one that no other has, on all of its nodes."""

from __future__ import annotations

import pytest
from torch.distributed import DistNetworkError, HashStore

from megapar.errors import DistributedError
from megapar.tools.launcher.job_name import launch_name


class Lost(HashStore):
    """A store whose other end is gone."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise DistNetworkError("Connection reset by peer")


def test_nodes_that_meet_have_one_name_and_other_launches_have_others() -> None:
    store, another = HashStore(), HashStore()
    assert launch_name(2, "", store) == launch_name(2, "", store)
    assert len({launch_name(2, "", store), launch_name(2, "", another), launch_name(2, "job", store)}) == 3


def test_one_node_needs_no_store_and_several_cannot_do_without() -> None:
    assert launch_name(1, "", None) != launch_name(1, "", None)
    assert launch_name(2, "", None) == ""


@pytest.mark.parametrize("written", ["unsigned ../../home", "unsigned", "\xff", "unsigned " + "A" * 32])
def test_a_name_that_no_launcher_has_written_is_refused(written: str) -> None:
    """It becomes the name of a folder, which is removed at the end."""
    store = HashStore()
    store.set("megapar/launch/job", written)
    with pytest.raises(DistributedError, match="launch of job job"):
        launch_name(2, "job", store)


def test_a_store_that_does_not_answer_is_told() -> None:
    with pytest.raises(DistributedError, match="the launch of job x does not answer: Connection reset by peer"):
        launch_name(2, "x", Lost())


def test_a_name_is_signed_where_there_is_a_secret() -> None:
    store = HashStore()
    name = launch_name(2, "job", store, b"x" * 16)
    assert launch_name(2, "job", store, b"x" * 16) == name
    for other in (b"y" * 16, None):
        with pytest.raises(DistributedError):
            launch_name(2, "job", store, other)
