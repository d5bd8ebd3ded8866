"""A job's secret, which its launchers share and nobody else has: in MEGAPAR_SECRET, or in a file of one's own.

Nodes prove by it that what they say in the rendezvous is theirs (tools/launcher/rendezvous.py).
"""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping

from megapar.errors import Complaint, ConfigError

VARIABLE = "MEGAPAR_SECRET"
LEAST_BYTES = 16
MOST_BYTES = 4096
NONE = (
    "the nodes' rendezvous is not authenticated: who reaches its port can end the job. Give every node the same "
    f"secret by {VARIABLE} or --secret-file; --require-secret refuses to go without"
)
_MAKE = "Make one by: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def take(file: str, environ: MutableMapping[str, str]) -> bytes | None:
    """The secret of ``--secret-file``, else of MEGAPAR_SECRET; None where there is neither.

    The variable is removed from ``environ``: ranks, and what they start, need not know it. Raises ConfigError for a
    file that others may read or write, and for a secret that could be guessed.
    """
    variable = environ.pop(VARIABLE, None)
    if file:
        return _long_enough(_read(file), f"--secret-file {file}")
    return None if variable is None else _long_enough(variable.encode().strip(), VARIABLE)


def require(secret: bytes | None, backend: str) -> None:
    """Refuse, for --require-secret, what would not be authenticated. Raises ConfigError."""
    if backend != "c10d":
        message = f"--require-secret, but the rendezvous is torch's {backend}, which knows no secret."
        raise _refused(message, "Leave out --rdzv-backend.")
    if secret is None:
        raise _refused("--require-secret, but there is none.", f"Give it by --secret-file FILE or {VARIABLE}. {_MAKE}")


def _read(file: str) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
    except OSError as error:
        raise _refused(f"--secret-file {file} cannot be read: {error.strerror}.", _MAKE) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _refused(f"--secret-file {file} is no file.", _MAKE)
        if found.st_uid != os.geteuid():
            raise _refused(f"--secret-file {file} belongs to user {found.st_uid}, not to {os.geteuid()}.", _MAKE)
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise _refused(f"--secret-file {file} is open to others (mode {mode:04o}).", f"chmod 600 {file}")
        return os.read(descriptor, MOST_BYTES + 1).strip()
    finally:
        os.close(descriptor)


def _long_enough(secret: bytes, name: str) -> bytes:
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        allowed = f"a secret has {LEAST_BYTES} to {MOST_BYTES}"
        raise _refused(f"{name} holds {len(secret)} bytes, {allowed}.", _MAKE.replace("FILE", "secret"))
    return secret


def _refused(message: str, fix: str) -> ConfigError:
    return ConfigError([Complaint("secret", message, fix)])
