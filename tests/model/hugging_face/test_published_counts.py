"""The shipped configurations of published models have as many parameters as their class, to the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers.initialization import no_init_weights

from megapar.arguments import parse
from megapar.model.spec import parameter_counts, table_of
from megapar.tools.preset_table import CONFIGS

FILES = sorted((Path(__file__).parent / "published").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_has_the_parameters_of_its_class(path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["config"]
    name = content["architectures"][0]
    kind = getattr(transformers, name)
    ours = {key: value for key, value in content.items() if key not in ("auto_map", "quantization_config")}
    settings = kind.config_class.from_dict({**ours, "model_type": kind.config_class.model_type})
    with torch.device("meta"), no_init_weights():
        theirs = sum(parameter.numel() for parameter in kind(settings).parameters())
    line = ["--config", str(CONFIGS / path.name), "--validate-only"]
    sizes = parse("moe", line, {}, planning=True).model.without_training_blocks()
    table = table_of(sizes)
    assert sum(row.numel for row in table if row.trainable) == theirs
    assert parameter_counts(sizes, table).total == theirs
