"""A job without a name gets one that no other has, on all of its nodes."""

from __future__ import annotations

from torch.distributed import HashStore

from megapar.tools.job_name import launch_name


def test_nodes_that_meet_have_one_name_and_other_launches_have_others() -> None:
    store, another = HashStore(), HashStore()
    assert launch_name(2, "", store) == launch_name(2, "", store)
    assert len({launch_name(2, "", store), launch_name(2, "", another), launch_name(2, "job", store)}) == 3


def test_one_node_needs_no_store_and_several_cannot_do_without() -> None:
    assert launch_name(1, "", None) != launch_name(1, "", None)
    assert launch_name(2, "", None) == ""
