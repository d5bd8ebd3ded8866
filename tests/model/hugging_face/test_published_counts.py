"""The shipped configurations of published models have as many parameters as their class, to the last one."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers.initialization import no_init_weights

from megapar.arguments import parse
from megapar.config.yaml_file import FOLDER
from megapar.model.spec import parameter_counts, table_of
from tests.model.hugging_face.test_published_folders import tensors_of

FILES = sorted((Path(__file__).parent / "published").glob("*.yaml"))


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
