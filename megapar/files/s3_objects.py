"""Objects of S3, asked in its own words: conditions on ETags, parts sent side by side, uploads that never ended."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import fsspec

from megapar.files import objects
from megapar.files.objects import BLOCK_BYTES, ChangedError, ObjectHead, Objects, Upload, status_of, tried

_IN_FLIGHT = 2  # parts that are sent while the next one is filled
_DOUBLES_AFTER = 2000  # parts; the 10,000 that S3 takes hold 3.8 TiB
_LEAST_RATE = 1 << 20  # bytes per second, below which a request is one that stalls


class S3Objects(Objects):
    """Objects of S3 and of stores that speak its protocol. Keys are BUCKET/NAME."""

    def __init__(self) -> None:
        limits = {"read_timeout": objects.STALL_SECONDS, "connect_timeout": objects.STALL_SECONDS}
        config = {**limits, "retries": {"total_max_attempts": 1}, "max_pool_connections": 32}
        super().__init__(
            fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=config)
        )
        self._fs.retries = 1  # ``tried`` knows which requests may be repeated

    def ask(self, method: str, key: str, content: int = 0, **arguments: Any) -> Any:
        """Send one request about an object, with this many bytes of content."""
        bucket, _, name = key.partition("/")

        async def answer() -> Any:
            found = await self._fs._call_s3(method, Bucket=bucket, **({"Key": name} if name else {}), **arguments)
            if "Body" in found:
                async with found["Body"] as body:
                    return await body.read()
            return found

        limit = objects.STALL_SECONDS * 3 + content / _LEAST_RATE
        try:
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(answer(), limit), self._fs.loop).result()
        except FileNotFoundError as error:
            raise FileNotFoundError(2, "no such object", key) from error
        except OSError as error:
            if status_of(error)[0] == 412:
                refused = FileExistsError if arguments.get("IfNoneMatch") else ChangedError
                raise refused(17, "the store has another object of this name", key) from error
            raise

    def _head(self, key: str) -> ObjectHead:
        found = self.ask("head_object", key)
        return ObjectHead(int(found["ContentLength"]), str(found["ETag"]))

    def _get(self, key: str, start: int, end: int | None, etag: str) -> bytes:
        wanted = ({} if end is None else {"Range": f"bytes={start}-{end - 1}"}) | ({"IfMatch": etag} if etag else {})
        return self.ask("get_object", key, 0 if end is None else end - start, **wanted)

    def _send(self, key: str, content: bytes, over: str | None) -> str:
        condition = {} if over is None else {"IfNoneMatch": "*"} if over == "*" else {"IfMatch": over}
        return str(self.ask("put_object", key, len(content), Body=content, **condition)["ETag"])

    def upload(self, key: str) -> Upload:
        """Begin an object of any size."""
        return S3Upload(self, key)

    def unfinished(self, folder: str) -> tuple[tuple[str, str], ...]:
        """Return (name in the folder, id) of the uploads below it that have not ended."""
        bucket, _, name = folder.partition("/")
        below, found = f"{name}/" if name else "", []
        after: dict[str, Any] | None = {}
        while after is not None:
            ask = partial(self.ask, "list_multipart_uploads", bucket, Prefix=below, **after)
            try:
                page = tried(f"list of {folder}", ask)
            except OSError as error:
                if isinstance(error, FileNotFoundError) or status_of(error)[0] == objects.NOT_IMPLEMENTED:
                    break  # the store does not list them
                raise
            found += [(one["Key"].removeprefix(below), one["UploadId"]) for one in page.get("Uploads", ())]
            marks = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            after = marks if page.get("IsTruncated") else None
        return tuple(found)

    def abort(self, key: str, upload: str) -> None:
        """End an upload and free its parts."""
        with suppress(FileNotFoundError):
            tried(f"end of {key}", lambda: self.ask("abort_multipart_upload", key, UploadId=upload))


class S3Upload(Upload):
    """An upload whose blocks are sent while the next one is filled: three blocks in memory at most."""

    def __init__(self, store: S3Objects, key: str) -> None:
        super().__init__(key, None)
        self._store = store
        self._block = io.BytesIO()
        self._size = 0
        self._upload = ""
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, "megapar-upload")
        self._parts: list[Future[str]] = []

    def write(self, data: memoryview) -> None:
        """Append all of these bytes."""
        view = data.cast("B")
        while len(view):
            if self._block.tell() >= part_bytes(len(self._parts)):
                with self._guarded():
                    self._flush()
            part = view[: part_bytes(len(self._parts)) - self._block.tell()]
            self._block.write(part)
            self._size += len(part)
            view = view[len(part) :]

    def finish(self, *, durable: bool = True) -> None:
        """Make the object appear."""
        if not self._upload:
            self._store.put(self.path, self._block.getvalue())
            return
        with self._guarded():
            self._flush()
            self._complete([part.result() for part in self._parts])
        self._pool.shutdown()

    def _flush(self) -> None:
        if not self._upload:
            begun = tried(f"write of {self.path}", lambda: self._store.ask("create_multipart_upload", self.path))
            self._upload = begun["UploadId"]
        if len(self._parts) >= _IN_FLIGHT:
            self._parts[-_IN_FLIGHT].result()
        self._parts.append(self._pool.submit(self._send, len(self._parts) + 1, self._block))
        self._block = io.BytesIO()

    def _send(self, number: int, block: io.BytesIO) -> str:
        def send() -> str:
            block.seek(0)
            names = {"UploadId": self._upload, "PartNumber": number}
            return str(self._store.ask("upload_part", self.path, len(block.getbuffer()), Body=block, **names)["ETag"])

        return tried(f"write of {self.path}", send)

    def _complete(self, etags: Sequence[str]) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, start=1)]
        joined: dict[str, Any] = {"UploadId": self._upload, "MultipartUpload": {"Parts": parts}}
        try:
            tried(f"write of {self.path}", lambda: self._store.ask("complete_multipart_upload", self.path, **joined))
        except FileNotFoundError:  # the upload has ended: an earlier attempt did it, and its answer was lost
            if self._store.head(self.path).size != self._size:
                raise

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Leave no upload behind if something fails."""
        try:
            yield
        except BaseException:
            self._pool.shutdown(cancel_futures=True)
            with suppress(OSError):
                if self._upload:
                    self._store.abort(self.path, self._upload)
            raise


def part_bytes(number: int) -> int:
    """Return the bytes of the part after ``number`` parts. They grow, as S3 takes 10,000 parts at most."""
    return BLOCK_BYTES << (number // _DOUBLES_AFTER)
