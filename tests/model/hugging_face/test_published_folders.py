"""Published folders as their public index has them: every tensor is one that the model of their config.json reads.

A folder here has the names, shapes and dtypes of the published one, in a file whose data is a hole: reading its headers
needs no memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megapar.arguments import parse
from megapar.config.published import architecture_of
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.spec import table_of

FILES = sorted((Path(__file__).parent / "published").glob("*.yaml"))
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
UNREAD = re.compile(
    r"\.rotary_emb\.inv_freq$|\.weight_scale_inv$"
)  # a buffer that is computed; scales of other tensors


def expanded(name: str) -> Iterator[str]:
    """All names of a pattern such as a.{0..3}.{q,k}."""
    found = re.search(r"\{([^{}]+)\}", name)
    if found is None:
        yield name
        return
    first, dots, last = found[1].partition("..")
    for choice in map(str, range(int(first), int(last) + 1)) if dots else found[1].split(","):
        yield from expanded(name[: found.start()] + choice + name[found.end() :])


def tensors_of(published: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor of an index."""
    found = {}
    for pattern, text in published["index"].items():
        dtype, *shape = text.split()
        found |= {name: (dtype, [int(size) for size in shape]) for name in expanded(pattern)}
    return found


def write_folder(folder: Path, published: dict[str, Any]) -> None:
    """Write config.json and one file of safetensors without data."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors_of(published).items():
        start, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(published["config"]), encoding="utf-8")


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def published(request: pytest.FixtureRequest) -> dict[str, Any]:
    """One published configuration."""
    content: dict[str, Any] = yaml.safe_load(request.param.read_text(encoding="utf-8"))
    return content


def test_the_list_has_the_published_number_of_tensors_and_bytes(published: dict[str, Any]) -> None:
    tensors = tensors_of(published)
    assert len(tensors) == published.get("tensors", len(tensors))
    total = sum(math.prod(shape) * BYTES[dtype] for dtype, shape in tensors.values())
    assert total == published.get("bytes", total)


def test_every_tensor_is_read(tmp_path: Path, published: dict[str, Any]) -> None:
    write_folder(tmp_path, published)
    config = parse("moe", ["--load-hf", str(tmp_path), "--validate-only", "--data-path", "mock"], {})
    folder = HfFolder(tmp_path)
    left = folder.check(table_of(config.model), architecture_of(published["config"]))
    assert [name for name in left if not UNREAD.search(name)] == []
    assert config.model.mtp_depth == published["config"].get("num_nextn_predict_layers", 0)
