"""The secret that the launchers of a job share, from MEGAPAR_SECRET or from a private file; read without torch."""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping

from megapar.errors import Complaint, ConfigError

VARIABLE = "MEGAPAR_SECRET"
MIN_BYTES = 16
MAX_BYTES = 4096
NO_SECRET = (
    "the nodes' rendezvous is not authenticated: anyone who can reach its port can end the job. Give every node the "
    f"same secret with {VARIABLE} or --secret-file; with --require-secret, the job does not start without one"
)
_CREATE = "Create one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def take(file: str, environ: MutableMapping[str, str], *, required: bool = False) -> bytes | None:
    """Return the secret of ``--secret-file``, or of MEGAPAR_SECRET, or None.

    Removes the variable from ``environ``, because ranks and their child processes do not need it. Raises ConfigError
    if other users may read or write the file, if the secret is too short or too long, or if it is required and missing.
    """
    variable = environ.pop(VARIABLE, None)
    if file:
        return _checked(_read(file), f"--secret-file {file}")
    if required and variable is None:
        fix = f"Pass one with --secret-file FILE or {VARIABLE}. {_CREATE}"
        raise _refused("--require-secret is set, but there is no secret.", fix)
    return None if variable is None else _checked(os.fsencode(variable).strip(), VARIABLE)


def _read(file: str) -> bytes:
    try:
        # Non-blocking, because opening a pipe would wait for its writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(f"--secret-file {file} cannot be read: {error.strerror}.", _CREATE) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(f"--secret-file {file} is not a regular file.", _CREATE)
        if status.st_uid != os.geteuid():
            raise _refused(f"--secret-file {file} belongs to user {status.st_uid}, not to {os.geteuid()}.", _CREATE)
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise _refused(f"--secret-file {file} is open to other users (mode {mode:04o}).", f"Run chmod 600 {file}.")
        return os.read(descriptor, MAX_BYTES + 1).strip()
    finally:
        os.close(descriptor)


def _checked(secret: bytes, name: str) -> bytes:
    if not MIN_BYTES <= len(secret) <= MAX_BYTES:
        message = f"{name} contains {len(secret)} bytes; a secret has {MIN_BYTES} to {MAX_BYTES}."
        raise _refused(message, _CREATE.replace("FILE", "secret"))
    return secret


def _refused(message: str, fix: str) -> ConfigError:
    return ConfigError([Complaint("secret", message, fix)])
