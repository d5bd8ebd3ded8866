"""Requests to S3 that fail on their way: repeated, never done twice, and told apart from answers."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megapar.files import bucket as bucket_module
from megapar.files import objects, s3_objects
from megapar.files.bucket import _objects_of, objects_of
from megapar.files.location import Location, at
from megapar.files.objects import ChangedError, tried
from tests.support.bucket_proxy import Asked, Harm, Proxy, proxied
from tests.support.buckets import asked_at, new_bucket, rclone
from tests.support.stores import put


@pytest.fixture
def through(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Proxy, Location]]:
    """Provide a proxy, and a folder in a new bucket behind it. Pauses are short, and two seconds are a stall."""
    monkeypatch.setattr(objects, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(objects, "STALL_SECONDS", 2.0)
    with proxied(s3_server) as (proxy, endpoint), asked_at(endpoint):
        folder = new_bucket()
        proxy.passed.asked.clear()
        yield proxy, folder


def of(verb: str) -> Callable[[Asked], bool]:
    """Return whether a request is of this verb."""
    return lambda asked: asked.verb == verb


PASSING = ("503", "cut", "stall", "lost answer")


@pytest.mark.parametrize("kind", PASSING)
def test_a_read_is_repeated_until_all_of_it_came(kind: str, through: tuple[Proxy, Location]) -> None:
    proxy, folder = through
    content = os.urandom(1000)
    objects_of("s3").put(str((folder / "a").path), content)
    proxy.harms = [Harm(kind, of("get"), times=2), Harm(kind, of("list"), times=1)]
    assert (folder / "a").content() == content
    assert folder.list() == {"a": 1000}
    assert len(proxy.passed.struck) == 3


@pytest.mark.parametrize("kind", [*PASSING, "412 after success"])
@pytest.mark.parametrize("new", [False, True])
def test_a_small_object_is_written_once(kind: str, new: bool, through: tuple[Proxy, Location]) -> None:
    proxy, folder = through
    store, key = objects_of("s3"), str((folder / "a").path)
    proxy.harms = [Harm(kind, of("put"))]
    if kind == "412 after success" and not new:
        return  # a server refuses only what was asked for on a condition
    etag = store.put(key, b"mine", new=new)
    assert store.get(key) == b"mine"
    assert store.head(key).etag == etag
    with pytest.raises(FileExistsError):
        store.put(key, b"another's", new=True)
    assert store.get(key) == b"mine"


@pytest.mark.parametrize("kind", [*PASSING, "412 after success"])
def test_a_heartbeat_replaces_its_own_last_one_alone(kind: str, through: tuple[Proxy, Location]) -> None:
    proxy, folder = through
    store, key = objects_of("s3"), str((folder / "a").path)
    first = store.exchange(key, b"1", "")
    proxy.harms = [Harm(kind, of("put"))]
    second = store.exchange(key, b"2", first)
    assert store.get(key) == b"2"
    for late in (first, ""):
        with pytest.raises(ChangedError):
            store.exchange(key, b"3", late)
    store.delete([key])
    with pytest.raises(ChangedError):
        store.exchange(key, b"3", second)


def test_a_heartbeat_goes_on_after_the_store_was_away(through: tuple[Proxy, Location]) -> None:
    proxy, folder = through
    lock = (folder / "1.json").lock(lambda known: b"{}")
    assert lock is not None
    lock.renew(b"1")
    proxy.harms = [Harm("lost answer", of("put")), Harm("503", of("put"), times=1000)]
    for content in (b"2", b"3"):  # the first one was written, and no answer came
        with pytest.raises(OSError, match="attempts"):
            lock.renew(content)
    assert (folder / "1.beat").content() == b"2"
    proxy.harms = []
    lock.renew(b"4")
    assert (folder / "1.beat").content() == b"4"
    proxy.harms = [Harm("lost answer", of("put"), times=1000)]
    for content in (b"5", b"6"):  # both were written
        with pytest.raises(OSError, match="attempts"):
            lock.renew(content)
    proxy.harms = []
    lock.renew(b"7")
    assert (folder / "1.beat").content() == b"7"
    put(folder / "1.beat", b"another's")
    with pytest.raises(ChangedError):
        lock.renew(b"5")


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("verb", ["begin", "part", "complete"])
def test_an_object_of_several_parts_is_complete(
    kind: str, verb: str, through: tuple[Proxy, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_objects, "BLOCK_BYTES", 5 << 20)  # the least that S3 takes for a part
    proxy, folder = through
    content = os.urandom((12 << 20) + 5)
    proxy.harms = [Harm(kind, of(verb))]
    file = (folder / "a").write()
    for start in range(0, len(content), 3 << 20):
        file.write(memoryview(content)[start : start + (3 << 20)])
    assert not (folder / "a").is_file()
    file.finish()
    assert (folder / "a").content() == content
    (folder / "b").remove()
    lost = verb == "begin" and kind in (
        "cut",
        "lost answer",
    )  # a second upload was begun: the next start ends the first
    assert len(objects_of("s3").unfinished(str(folder.path))) == int(lost)
    folder.store.end_uploads(folder.path, lambda name: True)
    assert objects_of("s3").unfinished(str(folder.path)) == ()


def test_an_upload_that_fails_leaves_nothing(through: tuple[Proxy, Location], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_objects, "BLOCK_BYTES", 5 << 20)
    proxy, folder = through
    proxy.harms = [Harm("503", of("part"), times=1000)]
    file = (folder / "a").write()
    with pytest.raises(OSError, match=r"write of .*/a: .*attempts"):
        file.write(memoryview(bytes(40 << 20)))
    assert folder.list() == {}
    assert objects_of("s3").unfinished(str(folder.path)) == ()


def test_an_upload_holds_three_blocks_and_a_read_four(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    block = 8 << 20
    monkeypatch.setattr(s3_objects, "BLOCK_BYTES", block)
    monkeypatch.setattr(bucket_module, "_READ_BYTES", block)
    data = memoryview(bytes(block))
    tracemalloc.start()
    try:
        file = (bucket / "a").write()
        for _ in range(10):
            file.write(data)
        file.finish()
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert sum(len(read) for read in (bucket / "a").blocks()) == 10 * block
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert block < written < 3.5 * block
    assert block < read < 4.5 * block + len(data)


def test_parts_grow_so_that_ten_thousand_hold_a_shard() -> None:
    sizes = [s3_objects.part_bytes(number) for number in range(10_000)]
    assert sizes[0] == 64 << 20
    assert sum(sizes) > 3 << 40


def test_a_store_that_does_not_answer_is_named_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PAUSE_SECONDS", 0.0)
    asked = []

    def call() -> None:
        asked.append(1)
        raise ConnectionError("no route to http://me:pass@host")

    with pytest.raises(OSError, match=r"read of b/a: ConnectionError: no route to http://\*\*\*@host \(9 attempts\)"):
        tried("read of b/a", call)
    assert len(asked) == objects.ATTEMPTS


@pytest.mark.parametrize("error", [PermissionError("no"), FileNotFoundError("none"), FileExistsError("there")])
def test_an_answer_is_not_asked_for_again(error: OSError) -> None:
    asked = []

    def call() -> None:
        asked.append(1)
        raise error

    with pytest.raises(type(error)):
        tried("read of b/a", call)
    assert len(asked) == 1


def test_a_store_without_credentials_is_not_asked_again(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    _objects_of.cache_clear()
    with pytest.raises(OSError, match=r"NoCredentialsError.*1 attempts"):
        bucket.list()


def test_only_what_is_needed_of_an_object_comes(through: tuple[Proxy, Location]) -> None:
    proxy, folder = through
    objects_of("s3").put(str((folder / "a").path), bytes(100_000))
    proxy.passed.sent.clear()
    with (folder / "a").read() as file:
        file.seek(40_000)
        assert file.read(1000) == bytes(1000)
    assert proxy.passed.sent["get"] == 1000
    assert (folder / "a").sha256() == hashlib.sha256(bytes(100_000)).hexdigest()


def excludes(folder: Location) -> bool:
    """Return whether a store lets one of two create a file."""
    return folder.store.excludes((folder / "probe").path)


def test_a_store_that_ignores_conditions_is_found_out(bucket: Location, tmp_path: Path) -> None:
    assert excludes(bucket)
    assert excludes(at(f"memory://{tmp_path.name}"))
    assert not excludes(at("gs://bucket/runs"))  # heartbeats have no condition there; nothing is asked
    with rclone(tmp_path) as endpoint, asked_at(endpoint):
        other = new_bucket()
        assert not excludes(other)
        assert objects_of("s3").unfinished(str(other.path)) == ()  # it lists none
        assert other.list() == {}
