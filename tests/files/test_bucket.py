"""Folders of an object store: published by a manifest, safe from old listings, and whole after a death anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.ownership.owner import Owner, acquire
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load import folder as folders
from megapar.core.box import Box
from megapar.errors import CheckpointError, FolderLostError
from megapar.files import bucket
from megapar.files.bucket import MANIFEST, PUBLISHED, objects_of
from megapar.files.location import Location, at, read_locally
from megapar.files.objects import Objects
from tests.checkpoints.ownership.owners import Waiting, claim, save
from tests.checkpoints.save_load.states import LAYOUT, MODEL, SCALARS, make_state, same_model, wrong
from tests.support.bucket_proxy import proxied
from tests.support.buckets import asked_at, new_bucket
from tests.support.process import clean_environ
from tests.support.stores import copied, in_objects, names, put

NEVER = 1e9  # seconds between heartbeats


class Killed(BaseException):
    """The process is dead."""


@dataclass
class Mortal:
    """Objects whose process dies when a request is done. asked: names of the requests."""

    objects: Objects
    dies_at: int = -1
    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a request."""

        def ask(*arguments: Any, **named: Any) -> Any:
            self.asked.append(name)
            number = len(self.asked) - 1
            if 0 <= self.dies_at < number:
                raise Killed
            try:
                return getattr(self.objects, name)(*arguments, **named)
            finally:
                if number == self.dies_at:
                    raise Killed

        return ask


@contextmanager
def mortal(**settings: Any) -> Iterator[Mortal]:
    """Have every request pass objects that die."""
    dying = Mortal(objects_of("memory"), **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "objects_of", lambda scheme: dying)
        yield dying


def own(root: Location) -> Owner:
    """Become the owner of a folder at once."""
    return acquire(root, claim(), Waiting().watch, NEVER)


def keys(root: Location) -> set[str]:
    """Return the name of every object below a folder."""
    return set(objects_of("memory").walk(str(root.path)))


def orphans(root: Location) -> set[str]:
    """Return the objects that no manifest names, and that are not those of owners."""
    every = keys(root)
    manifests = [name for name in every if name.endswith(MANIFEST)]
    named = {json.loads((root / name).content())["folder"] for name in manifests}
    return {name for name in every - {*manifests} if name.partition("/")[0] not in {*named, "owner", "latest"}}


def content_of(folder: Location) -> str:
    """Load a checkpoint and return which of the two states it is."""
    state = make_state("one", 0, filled=False)
    collective_io.load(folder, state, expect_model=same_model(MODEL), group=None)
    found = [name for name, salt in (("old", 0), ("new", 1)) if not wrong(state, salt)]
    assert len(found) == 1, f"{folder} is neither"
    return found[0]


def steps_of_a_save(root: Location) -> int:
    """Return the number of requests of a start and of a save that keeps one checkpoint."""
    save(own(root), 2)
    with mortal() as counting:
        save(own(root), 4, salt=1, keep=1)
    return len(counting.asked)


def test_a_death_after_any_request_of_a_save_loses_nothing() -> None:
    count = steps_of_a_save(in_objects())
    assert count > 20
    for number in range(count):
        root = in_objects()
        save(own(root), 2)
        with mortal(dies_at=number), pytest.raises(Killed):
            save(own(root), 4, salt=1, keep=1)
        every = folders.every_checkpoint(root)
        found = {iteration: content_of(paths[-1]) for iteration, paths in every.items()}
        assert found
        assert found.items() <= {2: "old", 4: "new"}.items()
        assert content_of(folders.candidates(root)[0][0]) in found.values()
        save(own(root), 6, salt=1, keep=1)
        assert orphans(root) == set(), number
        assert content_of(folders.candidates(root)[0][0]) == "new"


def hide(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have listings lack the names that end with a text."""
    real = Objects.list

    def listed(self: Objects, folder: str) -> dict[str, Any]:
        return {name: head for name, head in real(self, folder).items() if not name.endswith(part)}

    monkeypatch.setattr(Objects, "list", listed)


def test_a_listing_that_lacks_a_manifest_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    root = in_objects()
    save(own(root), 2)
    hide(MANIFEST, monkeypatch)
    visible = [name for name in root.list() if name.startswith("iter_")]
    assert len(visible) == 1
    assert ".tmp-" in visible[0]
    folders.remove_left_over(folders.iteration_folder(root, 4), own(root))
    monkeypatch.undo()
    assert content_of(folders.latest(root) or root) == "old"


def test_a_listing_that_lacks_owners_hides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    root = in_objects()
    first = own(root)
    second = own(root)
    hide("2.json", monkeypatch)
    with pytest.raises(FolderLostError):
        first.check()
    second.check()
    third = own(root)
    assert third.epoch == 3


def test_an_owner_that_slept_is_lost_at_its_next_heartbeat(bucket: Location) -> None:
    first = own(bucket)
    first.beat()
    second = own(bucket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megapar.checkpoints.ownership.owner.newest_epoch", lambda root: first.epoch)
        first.beat()  # no listing shows it the other one
        assert first.lost
        with pytest.raises(FolderLostError):
            first.check()
    second.beat()
    assert not second.lost
    first.release()
    second.release()


def test_only_uploads_of_owners_before_are_ended_at_the_start_and_own_ones_at_the_end(bucket: Location) -> None:
    store, other = objects_of("s3"), bucket.with_name("other")

    def begin(folder: Location, epoch: int) -> str:
        name = f"iter_0000002.tmp-0123456789ab-e{epoch}/shard-00000.safetensors"
        store.ask("create_multipart_upload", f"{folder.path}/{name}")  # type: ignore[attr-defined]
        return name

    def left(folder: Location) -> list[str]:
        return [name for name, _ in store.unfinished(str(folder.path))]

    own(bucket)
    begin(bucket, 1)
    kept = begin(bucket, 3)
    foreign = begin(other, 1)
    store.ask("create_multipart_upload", f"{bucket.path}/notes.txt")  # type: ignore[attr-defined]
    second = own(bucket)
    assert left(bucket) == [kept, "notes.txt"]
    begin(bucket, 2)
    second.release()
    assert (left(bucket), left(other)) == ([kept, "notes.txt"], [foreign])
    assert len(store.unfinished(str(bucket.path.parent))) == 3


def test_two_that_come_at_once_have_one_owner(bucket: Location) -> None:
    record = bucket / "owner" / "1.json"
    locks = [record.lock(lambda known, who=who: who) for who in (b"one", b"other")]
    assert [lock is None for lock in locks] == [False, True]
    assert record.content() == b"one"


def test_a_damaged_manifest_is_reported_and_its_folder_kept() -> None:
    root = in_objects()
    owner = own(root)
    save(owner, 2)
    save(owner, 4)
    put(root / f"iter_0000004{MANIFEST}", b'{"folder": "iter')
    kept = keys(root)
    with pytest.raises(CheckpointError, match="the manifest is damaged"):
        content_of(root / "iter_0000004")
    assert content_of(root / "iter_0000002") == "old"
    folders.remove_left_over(folders.iteration_folder(root, 6), own(root))
    assert keys(root) >= kept


def test_a_part_that_vanished_is_reported() -> None:
    root = in_objects()
    save(own(root), 2)
    (root / "iter_0000002" / "shard-00000.safetensors").remove()
    with pytest.raises(CheckpointError, match=r"shard-00000\.safetensors is missing"):
        content_of(root / "iter_0000002")


def test_a_folder_that_was_copied_from_a_disk_is_read_as_it_is(bucket: Location, tmp_path: Path) -> None:
    save(own(at(tmp_path)), 2)
    copied(tmp_path, bucket)
    assert content_of(folders.latest(bucket) or bucket) == "old"


def test_a_checkpoint_that_is_set_aside_keeps_its_files_where_they_are(bucket: Location) -> None:
    owner = own(bucket)
    save(owner, 2)
    save(owner, 4, salt=1)
    moved = folders.set_aside(bucket, 2, 4, owner)
    assert [path.name for path in moved] == ["iter_0000004.suspect"]
    assert content_of(folders.find(bucket, 4)) == "new"
    assert content_of(folders.latest(bucket) or bucket) == "old"
    assert list(folders.checkpoints(bucket)) == [2]


def test_names_of_the_store_itself_are_not_listed() -> None:
    root = in_objects()
    save(own(root), 2)
    assert names(root) == ["iter_0000002", "latest", "owner"]
    assert PUBLISHED not in (root / "iter_0000002").list()
    with pytest.raises(OSError, match="different folders"):
        (root / "iter_0000002").publish(root / "deeper" / "iter_0000002")


def test_a_process_that_ranks_are_forked_from_has_opened_no_store() -> None:
    program = (
        "import sys, megapar.trainer; from megapar.files.bucket import _objects_of\n"
        "assert not {'s3fs', 'gcsfs', 'megapar.files.s3_objects'} & set(sys.modules), 'a store runs a thread'\n"
        "assert _objects_of.cache_info().currsize == 0"
    )
    assert subprocess.run([sys.executable, "-c", program], env=clean_environ()).returncode == 0


def test_a_forked_process_has_objects_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = objects_of("memory")
    assert objects_of("memory") is mine
    monkeypatch.setattr("megapar.files.bucket.os.getpid", lambda: -1)
    assert objects_of("memory") is not mine


def test_a_load_on_another_layout_reads_only_the_ranges_that_it_needs(s3_server: str) -> None:
    whole = torch.randn(1024, 256)
    quarter = Shard("model/x", (1024, 256), Box((256, 0), (256, 256)), torch.zeros(256, 256))
    with proxied(s3_server) as (proxy, endpoint), asked_at(endpoint):
        folder = new_bucket() / "iter_0000002"
        state = {"model/x": Shard.whole("model/x", whole)}
        collective_io.save(folder, state, SCALARS, layout=LAYOUT, group=None)
        proxy.passed.sent.clear()
        collective_io.load(folder, {"model/x": quarter}, expect_model=None, verify="size", group=None)
        assert torch.equal(quarter.tensor, whole[256:512])
        assert quarter.tensor.nbytes < proxy.passed.sent["get"] < quarter.tensor.nbytes + 16_384


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a//x", "."])
def test_a_name_that_leaves_its_folder_is_no_file_of_it(name: str) -> None:
    root = in_objects()
    put(root / "made" / "a", b"a")
    content = json.dumps({"folder": "made", "files": {name: 1}}).encode()
    put(root / f"final{MANIFEST}", content)
    with pytest.raises(OSError, match="is not a name in a folder"), read_locally(root / "final", below=True):
        pass
