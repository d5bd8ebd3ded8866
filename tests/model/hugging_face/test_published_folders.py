"""Published folders as their public index has them: their model reads every tensor, and has no other parameter.

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
import torch
import transformers
import yaml
from transformers.initialization import no_init_weights

from megapar.arguments import parse
from megapar.config.published import architecture_of
from megapar.config.yaml_file import FOLDER
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.spec import parameter_counts, table_of

FILES = sorted((Path(__file__).parent / "published").glob("*.yaml"))
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
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


WITH_BLOCK = [path for path in FILES if path.stem in ("deepseek-v3", "glm-4.5-air")]
APART = re.compile(r"\.(embed_tokens|shared_head\.head)\.weight$|weight_scale_inv$|e_score_correction_bias$")


@pytest.mark.parametrize("path", WITH_BLOCK, ids=lambda path: path.stem)
def test_the_block_of_multi_token_prediction_is_counted_apart(path: Path) -> None:
    """As many as its tensors in the index have, without its copies of embedding and head, buffers and scales."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    own = f"model.layers.{content['config']['num_hidden_layers']}."
    shapes = {name: shape for name, (_, shape) in tensors_of(content).items() if name.startswith(own)}
    published = sum(math.prod(shape) for name, shape in shapes.items() if not APART.search(name))
    sizes = parse("moe", ["--config", str(FOLDER / path.name), "--validate-only"], {}, planning=True).model
    block = sum(row.numel for row in table_of(sizes) if row.trainable and row.name.startswith("mtp."))
    assert block == published
    assert sum(row.numel for row in table_of(sizes) if row.trainable) - parameter_counts(sizes).total == block


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_has_the_parameters_of_its_class(path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["config"]
    name = content["architectures"][0]
    kind = getattr(transformers, name)
    ours = {key: value for key, value in content.items() if key not in ("auto_map", "quantization_config")}
    settings = kind.config_class.from_dict({**ours, "model_type": kind.config_class.model_type})
    with torch.device("meta"), no_init_weights():
        theirs = sum(parameter.numel() for parameter in kind(settings).parameters())
    line = ["--config", str(FOLDER / path.name), "--validate-only"]
    sizes = parse("moe", line, {}, planning=True).model.without_training_blocks()
    table = table_of(sizes)
    assert sum(row.numel for row in table if row.trainable) == theirs
    assert parameter_counts(sizes, table).total == theirs
