"""Messages between launchers: checked JSON, signed where there is a secret, with the times of clocks that differ."""

from __future__ import annotations

import base64
import json
import pickle
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState, create_handler

from megapar.errors import DistributedError
from megapar.tools.launcher.rendezvous import Clocks, JsonBackend, from_json, to_json
from megapar.tools.launcher.secret import SignedStore, StateRefusedError
from tests.support.intruder import Payload
from tests.tools.launcher.test_secret import Lost

SECRET = b"a secret of sixteen bytes or more"
KEY = "megapar.rendezvous.job"


def a_state(round_number: int = 2) -> _RendezvousState:
    state = _RendezvousState()
    first, second, third = (_NodeDesc("10.0.0.1", number, 0) for number in (1, 2, 3))
    state.round, state.complete = round_number, True
    state.deadline = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
    state.participants = {first: 0, second: 1}
    state.wait_list, state.redundancy_list = {third}, {second}
    state.last_heartbeats = {first: datetime(2026, 1, 2, tzinfo=UTC), third: datetime(2026, 1, 3, tzinfo=UTC)}
    return state


def write(backend: JsonBackend, state: _RendezvousState) -> bool:
    found = backend.get_state()
    told = backend.set_state(pickle.dumps(state), found[1] if found else None)
    assert told is not None
    return told[2]


def test_a_state_is_the_same_after_its_journey() -> None:
    again = from_json(json.loads(json.dumps(to_json(a_state()))))
    assert again.__dict__ == a_state().__dict__
    assert from_json(to_json(_RendezvousState())).__dict__ == _RendezvousState().__dict__


@pytest.mark.parametrize("secret", [None, SECRET])
def test_nodes_see_what_others_write_and_never_write_over_it(secret: bytes | None) -> None:
    store = HashStore()
    first, second = (JsonBackend(store, "job", secret) for _ in range(2))
    assert first.get_state() is None
    assert write(first, a_state())
    seen = second.get_state()
    assert seen is not None
    told, wrote = pickle.loads(seen[0]).__dict__, a_state().__dict__  # noqa: S301 (of this process)
    times = ("deadline", "last_heartbeats")  # by the reader's clock
    assert {k: v for k, v in told.items() if k not in times} == {k: v for k, v in wrote.items() if k not in times}
    assert write(first, a_state(3))
    late = second.set_state(pickle.dumps(a_state(4)), seen[1])
    assert late is not None
    assert (pickle.loads(late[0]).round, late[2]) == (3, False)  # noqa: S301
    assert write(second, a_state(4))


def wrong(change: dict[str, Any]) -> dict[str, Any]:
    return {"job": "job", "number": 1, "state": to_json(a_state()) | change}


WRONG: dict[str, Any] = {
    "no object": [1],
    "another job": {**wrong({}), "job": "other"},
    "no number": {**wrong({}), "number": "1"},
    "a truth for a number": {**wrong({}), "number": True},
    "more fields": {**wrong({}), "more": 1},
    "an unknown field": wrong({"more": 1}),
    "a round below 0": wrong({"round": -1}),
    "a fraction": wrong({"round": 1.5}),
    "no truth": wrong({"closed": 0}),
    "a time that is none": wrong({"deadline": float("nan")}),
    "a time too late": wrong({"deadline": 1e300}),
    "nodes of three": wrong({"participants": [["a", 1, 2]]}),
    "an address that is none": wrong({"wait_list": [[["a"], 1, 2]]}),
    "an address with control characters": wrong({"wait_list": [["\x1b[2J", 1, 2]]}),
    "nodes that are no list": wrong({"last_heartbeats": {"a": 1}}),
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_no_state_is_refused(body: Any) -> None:
    store = HashStore()
    backend = JsonBackend(store, "job", None)
    store.set(KEY, f"unsigned {json.dumps(body)}")
    with pytest.raises(StateRefusedError, match="the rendezvous of job job is invalid"):
        backend.get_state()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(field=st.sampled_from(sorted(to_json(a_state()))), value=json_values)
def test_any_json_is_a_state_or_refused(field: str, value: Any) -> None:
    try:
        found = from_json(to_json(a_state()) | {field: value})
    except ValueError:
        return
    assert from_json(json.loads(json.dumps(to_json(found)))).__dict__ == found.__dict__


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("prefix", [b"", b"unsigned ", b"0" * 64 + b" "])
@pytest.mark.parametrize("encode", [base64.b64encode, bytes])
def test_a_pickle_in_the_store_is_not_read(tmp_path: Path, secret: bytes | None, prefix: bytes, encode: Any) -> None:
    store = HashStore()
    backend = JsonBackend(store, "job", secret)
    write(backend, a_state())
    store.set(KEY, prefix + encode(pickle.dumps(Payload(str(tmp_path / "ran")))))  # type: ignore[arg-type]
    with pytest.raises(StateRefusedError):
        backend.get_state()
    assert not list(tmp_path.iterdir())


def test_an_older_state_that_is_brought_again_is_refused() -> None:
    store = HashStore()
    backend = JsonBackend(store, "job", SECRET)
    write(backend, a_state())
    old = store.get(KEY)
    write(backend, a_state())
    store.set(KEY, old.decode())
    with pytest.raises(StateRefusedError, match="is number 1 of round 2, after number 2 of round 2"):
        backend.get_state()
    store.set(KEY, "-")
    with pytest.raises(StateRefusedError, match="is gone"):
        backend.get_state()


def test_a_second_state_of_one_number_is_refused() -> None:
    """Launchers write each number once: whoever else does stands beside them."""
    store = HashStore()
    backend = JsonBackend(store, "job", None)
    write(backend, a_state())
    store.set(KEY, f"unsigned {json.dumps(wrong({'closed': True}))}")
    with pytest.raises(StateRefusedError, match="number 1"):
        backend.get_state()


@pytest.mark.parametrize(
    ("writer", "reader", "told"),
    [
        (SECRET, b"another secret of 16 bytes", "was not written with this job's secret"),
        (None, SECRET, "is not signed"),
        (SECRET, None, "other nodes have a secret, which this one needs as well"),
    ],
)
def test_nodes_without_the_same_secret_do_not_meet(writer: bytes | None, reader: bytes | None, told: str) -> None:
    store = HashStore()
    write(JsonBackend(store, "job", writer), a_state())
    with pytest.raises(StateRefusedError, match=told):
        JsonBackend(store, "job", reader).get_state()


def test_a_state_of_another_job_with_the_same_secret_is_refused() -> None:
    store = HashStore()
    write(JsonBackend(store, "other", SECRET), a_state())
    backend = JsonBackend(store, "job", SECRET)
    store.set(KEY, store.get("megapar.rendezvous.other").decode())
    with pytest.raises(StateRefusedError):
        backend.get_state()


def test_a_store_that_does_not_answer_is_an_error_of_ours() -> None:
    with pytest.raises(DistributedError, match="rendezvous of job job does not answer: Connection reset by peer"):
        JsonBackend(Lost(), "job", None)


def test_what_nodes_tell_each_other_in_a_round_is_signed() -> None:
    plain = HashStore()
    first, second = (SignedStore(PrefixStore("1", plain), "round 1 of job a", SECRET) for _ in range(2))
    made = RendezvousStoreInfo.build(0, first, "10.0.0.1", 4711)  # type: ignore[arg-type]
    assert RendezvousStoreInfo.build(1, second, None) == made  # type: ignore[arg-type]
    first.multi_set(["a", "b"], ["1", "2"])
    assert second.multi_get(["a", "b"]) == [b"1", b"2"]
    plain.set("1/a", plain.get("1/b").decode())  # signed, but for another place
    with pytest.raises(StateRefusedError, match="a of round 1 of job a"):
        second.get("a")
    with pytest.raises(StateRefusedError):
        SignedStore(PrefixStore("1", plain), "round 2 of job a", SECRET).get("b")


@pytest.mark.parametrize("secret", [None, SECRET])
def test_torch_meets_by_it(secret: bytes | None) -> None:
    store, worlds, both = HashStore(), {}, threading.Barrier(2)

    def node(number: int) -> None:
        parameters = RendezvousParameters("megapar", "", "job", 2, 2, local_addr="127.0.0.1", last_call_timeout=1)
        handler = create_handler(store, JsonBackend(store, "job", secret), parameters)
        handler._create_tcp_store_server = lambda address, port: PortOnly()  # type: ignore[assignment,return-value]
        met = handler.next_rendezvous()
        worlds[number] = (met.rank, met.world_size)
        both.wait(30)  # the first to go would close it for the other
        handler.shutdown()

    threads = [threading.Thread(target=node, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(worlds.values()) == [(0, 2), (1, 2)]


class PortOnly:
    """Of a store, what torch asks for."""

    port = 1


HERE, THERE = _NodeDesc("here", 1, 0), _NodeDesc("there", 2, 0)
NOW = datetime(2026, 1, 2, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def a_beat(deadline: datetime | None = None, **beats: datetime) -> _RendezvousState:
    made = _RendezvousState()
    made.last_heartbeats = {node: beats[node.addr] for node in (HERE, THERE) if node.addr in beats}
    made.deadline = deadline
    return made


@pytest.mark.parametrize("apart", [timedelta(0), timedelta(hours=-1), timedelta(hours=1)])
def test_a_beat_is_new_when_it_changes_and_goes_on_as_it_came(apart: timedelta) -> None:
    clocks = Clocks()
    seen = clocks.ours(a_beat(there=NOW + apart), NOW)
    assert seen.last_heartbeats == {THERE: NOW}
    seen = clocks.ours(a_beat(there=NOW + apart), NOW + 9 * SECOND)
    assert seen.last_heartbeats == {THERE: NOW}
    seen = clocks.ours(a_beat(there=NOW + apart + 10 * SECOND), NOW + 11 * SECOND)
    assert seen.last_heartbeats == {THERE: NOW + 11 * SECOND}
    seen.last_heartbeats[HERE] = NOW + 12 * SECOND
    wrote = clocks.theirs(seen)
    assert wrote.last_heartbeats == {THERE: NOW + apart + 10 * SECOND, HERE: NOW + 12 * SECOND}
    again = clocks.ours(a_beat(here=NOW + 12 * SECOND, there=NOW + apart + 10 * SECOND), NOW + 20 * SECOND)
    assert again.last_heartbeats == {THERE: NOW + 11 * SECOND, HERE: NOW + 12 * SECOND}


def test_the_last_call_of_another_node_is_counted_from_when_it_is_seen() -> None:
    clocks = Clocks(30.0)
    theirs = NOW - timedelta(hours=1)
    seen = clocks.ours(a_beat(theirs), NOW)
    assert seen.deadline == NOW + 30 * SECOND
    assert clocks.ours(a_beat(theirs), NOW + SECOND).deadline == NOW + 30 * SECOND
    assert clocks.theirs(seen).deadline == theirs
    assert clocks.ours(a_beat(None), NOW).deadline is None
    own = clocks.theirs(a_beat(NOW + 5 * SECOND))
    assert own.deadline == NOW + 5 * SECOND
    assert clocks.ours(a_beat(NOW + 5 * SECOND), NOW + SECOND).deadline == NOW + 5 * SECOND
