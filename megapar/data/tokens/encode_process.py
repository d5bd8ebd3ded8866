"""Encoding by workers of a separate process, which is started and not forked.

A trainer has threads and a device, which forked workers must not inherit, and processes that multiprocessing spawns
would run the user's script again. The process here is a plain Python: it reads one job as JSON from standard input,
forks its workers, and writes the result as JSON to standard output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megapar
from megapar.data.text.chunks import TextChunk
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokens.encode import EncodeJob, Encoding, encode
from megapar.data.tokens.parts import Done
from megapar.errors import DataError
from megapar.health.stop.parent import die_with_parent


def encode_in_process(job: EncodeJob, workers: int) -> Done:
    """Run ``encode`` in a process that ends with this one. Raises its DataError or OSError."""
    root = str(Path(megapar.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        input=json.dumps({"job": asdict(job), "workers": workers}),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if ended.returncode != 0:
        raise DataError(
            f"{job.names}: the process that encodes it ended with status {ended.returncode}"
            f"{', possibly out of memory' if ended.returncode == -signal.SIGKILL else ''}; the same command "
            "resumes from its finished parts"
        )
    answer = json.loads(ended.stdout)
    if "system" in answer:
        raise OSError(*answer["system"])
    if "error" in answer:
        raise DataError(answer["error"])
    return Done(**{**answer["done"], "first_bad": tuple(answer["done"]["first_bad"])})


def _job(found: Mapping[str, Any]) -> EncodeJob:
    chunks = tuple(TextChunk(**chunk) for chunk in found["chunks"])
    return EncodeJob(**{**found, "chunks": chunks, "encoding": Encoding(**found["encoding"])})


def main() -> None:
    """Run the job on standard input, and write its result to standard output."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it as well, and ends this process
    request = json.load(sys.stdin)
    job = _job(request["job"])
    try:
        tokenizer = load_tokenizer(job.tokenizer)
        answer: dict[str, Any] = {
            "done": asdict(encode(job, tokenizer, workers=request["workers"], keep_parts=False)),
        }
    except DataError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"system": [error.errno, error.strerror, error.filename]}
    sys.stdout.write(json.dumps(answer))
