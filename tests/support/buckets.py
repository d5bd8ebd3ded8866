"""Buckets for tests: S3 by moto's server and, on disk and without conditions, by rclone's; both choose their port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from megapar.files.bucket import _objects_of, objects_of
from megapar.files.location import Location, at
from megapar.files.objects import tried

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_DEFAULT_REGION": "us-east-1"}
_NUMBERS = count(1)


def environ_of(endpoint: str) -> dict[str, str]:
    """Return the variables by which the client of S3 finds a server."""
    return {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def served(command: list[str]) -> Iterator[str]:
    """Yield the endpoint of a server, which it reports on its standard error."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        assert server.stderr is not None
        rest = threading.Thread(target=deque, args=(server.stderr, 0), name="server-log", daemon=True)
        try:
            lines = []
            for line in server.stderr:
                lines.append(line)
                if found := re.search(r"https?://127\.0\.0\.1:([1-9][0-9]*)", line):
                    rest.start()  # a server that logs every request stops when its pipe is full
                    yield found[0]
                    return
            raise AssertionError("".join(lines))
        finally:
            server.kill()
            if rest.ident:
                rest.join()


@contextmanager
def moto() -> Iterator[str]:
    """Yield the endpoint of S3 in memory, which honours conditions."""
    with served([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]) as endpoint:
        yield endpoint


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """Yield the endpoint of S3 on a disk, which ignores conditions."""
    program = Path(sys.executable).with_name("rclone")
    with served([str(program), "serve", "s3", "--addr", "127.0.0.1:0", str(folder)]) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Provide the endpoint of one server for all tests of a process."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with moto() as endpoint:
        yield endpoint


@contextmanager
def asked_at(endpoint: str) -> Iterator[None]:
    """Have S3 be at this endpoint."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ_of(endpoint).items():
            patch.setenv(name, value)
        _objects_of.cache_clear()
        try:
            yield
        finally:
            _objects_of.cache_clear()


def new_bucket(folder: str = "") -> Location:
    """Make a bucket at the present endpoint and return a folder in it."""
    name = f"bucket-{os.getpid()}-{next(_NUMBERS)}"
    tried("a new bucket", lambda: objects_of("s3").ask("create_bucket", name))  # type: ignore[attr-defined]
    return at(f"s3://{name}/{folder or 'runs'}")


@pytest.fixture
def bucket(s3_server: str) -> Iterator[Location]:
    """Provide an empty folder in a new bucket."""
    with asked_at(s3_server):
        yield new_bucket()
