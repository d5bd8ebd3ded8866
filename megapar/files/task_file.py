"""Files of evaluation tasks: JSONL, whose records are checked by line and field.

a choice       {"context": "2 + 2 =", "choices": [" 3", " 4"], "gold": 1}
a completion   {"context": "The capital of France is", "completion": " Paris"}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapar.errors import DataError
from megapar.files.data_files import split_name


@dataclass(frozen=True)
class TaskRecord:
    """A checked record.

    Attributes:
        place: Its file and line, for messages.
        choices: The texts that may follow the context, none of them empty; of a completion, that alone.
        gold: Index of the right choice; None for a completion.
    """

    place: str
    context: str
    choices: tuple[str, ...]
    gold: int | None


def named_tasks(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, path) of words NAME=FILE or FILE, whose name is the file's up to its first dot."""
    pairs = map(split_name, words)
    return [(name or Path(path).name.partition(".")[0], path) for name, path in pairs]


def read_tasks(path: str | Path) -> tuple[TaskRecord, ...]:
    """Read a file. Raises DataError with the line and field of the first bad record, and for a file without one."""
    try:
        content = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    lines = enumerate(content.split(b"\n"), 1)
    records = tuple(_record(line, f"{path}, line {number}") for number, line in lines if line.strip())
    if not records:
        raise DataError(f"{path} contains no record")
    return records


def _record(line: bytes, place: str) -> TaskRecord:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a JSON record ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: the record is of type {type(record).__name__}, not an object")
    context = _text(record.get("context"), f"{place}: context")
    if ("choices" in record) == ("completion" in record):
        raise DataError(f"{place}: a record has either choices and gold, or completion")
    if "completion" in record:
        return TaskRecord(place, context, (_text(record["completion"], f"{place}: completion", empty=False),), None)
    choices, gold = record["choices"], record.get("gold")
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f"{place}: choices is not a list of at least two texts")
    texts = [_text(choice, f"{place}: choices[{number}]", empty=False) for number, choice in enumerate(choices)]
    if type(gold) is not int or not 0 <= gold < len(texts):
        raise DataError(f"{place}: gold is {gold!r}, not the number of a choice, 0 to {len(texts) - 1}")
    return TaskRecord(place, context, tuple(texts), gold)


def _text(value: Any, field: str, *, empty: bool = True) -> str:
    if not isinstance(value, str):
        raise DataError(f"{field} is of type {type(value).__name__}, not a text")
    if not value and not empty:
        raise DataError(f"{field} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{field} contains half a surrogate pair, which cannot be encoded") from error
    return value
