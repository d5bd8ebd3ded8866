"""Published models with scaled rotary positions: both forms of config.json, logits and gradients of the class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megapar.arguments import parse
from megapar.checkpoints.export.from_hf import hf_to_megapar, published
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.config.published import Unsupported, flags_of, read_config
from megapar.errors import ConfigError
from megapar.model.architectures import ARCHITECTURES
from megapar.model.decoder.published import settings_of
from megapar.model.decoder.rope_keys import rope_settings
from megapar.model.hugging_face.save import config_of, save_hf
from megapar.model.rope_scaling import RopeScaling
from tests.checkpoints.export.test_convert import DECODER, SETTINGS, _expected
from tests.model import small
from tests.training.test_imports import _logits_of

LINEAR = {"rope_type": "linear", "factor": 2.5}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 7.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0},
    "original_max_position_embeddings": 9,
}
YARN = {"rope_type": "yarn", "factor": 4.5, "original_max_position_embeddings": 9, "beta_fast": 7.0}
MSCALED = {**YARN, "beta_slow": 0.5, "mscale": 1.25, "mscale_all_dim": 0.75, "truncate": False}
FACTORED = {**YARN, "attention_factor": 1.5}
BY_KIND = ("Olmo3", "Gemma3")  # test_alternating_keys
CLASSES = [name for name in SETTINGS if " " not in name and "For" not in name and name not in BY_KIND]
EVERY = [("Llama", LINEAR), ("Llama", YARN), ("Llama", MSCALED), ("Qwen3", FACTORED)]
EVERY += [(name, scaling) for name in CLASSES for scaling in (LLAMA3,)] + [("Mistral", YARN), ("Qwen2", YARN)]


def made(name: str, folder: Path, scaling: Mapping[str, Any]) -> Path:
    """A folder that the class itself wrote."""
    torch.manual_seed(0)
    parameters = {**scaling, "rope_theta": 300.0}
    config = getattr(transformers, f"{name}Config")(**SETTINGS[name], rope_parameters=parameters)
    getattr(transformers, f"{name}ForCausalLM")(config).eval().save_pretrained(folder)
    return folder


def config_json(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("name", "scaling"), EVERY)
def test_a_scaled_folder_gives_its_logits(name: str, scaling: Mapping[str, Any], tmp_path: Path) -> None:
    folder = made(name, tmp_path / "model", scaling)
    words, _ = _logits_of(folder, "moe")
    expected = _expected(name, folder)[0]
    assert float((words - expected).abs().max()) <= 1e-5
    config = read_config(folder)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 300.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert float((expected - _expected(name, folder)[0]).abs().max()) > 1e-3, "the scaling does nothing"


def test_the_way_there_and_back_keeps_the_scaling(tmp_path: Path) -> None:
    folder = made("Llama", tmp_path / "model", MSCALED)
    hf_to_megapar(folder, tmp_path / "made")
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    assert config_json(tmp_path / "back") == config_json(folder)


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, YARN, MSCALED, FACTORED])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_is_written_is_what_the_class_writes(name: str, scaling: Mapping[str, Any], tmp_path: Path) -> None:
    folder = made(name, tmp_path / "model", scaling)
    architecture, sizes = published(folder)
    assert config_of(architecture, sizes, torch.float32)["rope_parameters"] == config_json(folder)["rope_parameters"]


OLD = {
    "type": ({"type": "linear", "factor": 2}, LINEAR | {"factor": 2.0}),
    "rope_type": (dict(LLAMA3), LLAMA3),
    "both names": ({"type": "su", **YARN}, YARN),
    "ratio of the lengths": (
        {"type": "yarn", "factor": None, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "original length left out": (
        {"type": "yarn", "factor": 3.0, "beta_fast": None},
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("form", OLD)
def test_the_form_before_transformers_5(form: str, tmp_path: Path) -> None:
    written, meant = OLD[form]
    config = config_json(made("Llama", tmp_path / "model", {"rope_type": "default"}))
    old = {k: v for k, v in config.items() if k != "rope_parameters"} | {"rope_theta": 300.0, "rope_scaling": written}
    (tmp_path / "model" / "config.json").write_text(json.dumps(old))
    theirs = transformers.LlamaConfig.from_pretrained(tmp_path / "model").rope_parameters
    new = config | {"rope_parameters": {**meant, "rope_theta": 300.0}}
    assert flags_of(old) == flags_of(new)
    assert flags_of(old) == flags_of(config | {"rope_parameters": theirs})


def test_rope_scaling_goes_before_rope_parameters_as_in_transformers(tmp_path: Path) -> None:
    folder = made("Llama", tmp_path / "model", YARN)
    both = config_json(folder) | {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 70.0}
    (folder / "config.json").write_text(json.dumps(both))
    theirs = transformers.LlamaConfig.from_pretrained(folder).rope_parameters
    flags = flags_of(both)[1]
    assert (flags["rope_scaling_type"], flags["rope_scaling_factor"], flags["rope_theta"]) == ("linear", 3.0, 70.0)
    assert (theirs["rope_type"], theirs["factor"], theirs["rope_theta"]) == ("linear", 3.0, 70.0)


def test_training_on_longer_texts_keeps_what_the_scaling_depends_on(tmp_path: Path) -> None:
    """Without an original length it is ``max_position_embeddings``, which the exported folder has another value of."""
    folder = made("Llama", tmp_path / "model", YARN)
    config = config_json(folder)
    del config["rope_parameters"]
    config |= {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 300.0}
    (folder / "config.json").write_text(json.dumps(config))
    architecture, sizes = published(folder)
    assert sizes.rope_scaling is not None
    settings = {**settings_of(sizes), "max_position_embeddings": 999}
    changed = config | architecture.retrained(config, settings)
    assert flags_of(changed)[1] == flags_of(config)[1] | {"max_position_embeddings": 999}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "type dynamic is not supported; types are default, linear, llama3"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "type longrope is not supported"),
        ({"rope_type": "proportional"}, "type proportional is not supported"),
        ({"rope_type": "mrope", "mrope_section": [2, 2, 2]}, "type mrope is not supported"),
        ({"full_attention": {"rope_type": "default"}}, "but all layers have the same rotary positions"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 3.0}, "low_freq_factor must be below high_freq_factor"),
        ({**YARN, "rope_theta": 1.0}, "needs a rope_theta above 1"),
        ({**LINEAR, "mscale_all_dim": 1.0}, "mscale_all_dim is of the type yarn only"),
        ({**LINEAR, "partial_rotary_factor": 0.5}, "this class rotates whole heads"),
        ({**LINEAR, "factor": "2"}, "an object whose factor is a number above 0"),
        ({**YARN, "attention_factor": 0}, "an object whose attention_factor is a number above 0"),
        ({**YARN, "original_max_position_embeddings": 0.5}, "whose original_max_position_embeddings is a whole number"),
        ({**YARN, "truncate": None}, "whose truncate is true or false"),
    ],
)
def test_another_scaling_is_refused_by_name(parameters: Mapping[str, Any], message: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **DECODER, "intermediate_size": 48, "rope_theta": 1e4}
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(Unsupported, match=f"{key} is .*{message}"):
            flags_of({**config, key: parameters})


def test_a_partial_rotation_is_refused_where_the_class_has_none(tmp_path: Path) -> None:
    folder = made("Llama", tmp_path / "model", LLAMA3)
    with pytest.raises(ConfigError, match=r"--rotary-percent 0\.5 contradicts"):
        parse("moe", ["--load-hf", str(folder), "--seq-length", "16", "--rotary-percent", "0.5"], {})


def test_a_class_that_rotates_a_part_of_each_head() -> None:
    """The share inside of the object goes before that outside of it, and that before the class's own."""
    llama = ARCHITECTURES["LlamaForCausalLM"]
    keys = {one.name for one in rope_settings()}
    others = tuple(one for one in llama.settings if one.name not in keys)
    partial = replace(llama, settings=(*others, *rope_settings(0.5)))
    read = next(one for one in partial.settings if one.flag == "rotary_percent")
    inside, outside = {"rope_parameters": {"partial_rotary_factor": 0.25}}, {"partial_rotary_factor": 0.75}
    assert [read.flag_value(config) for config in ({}, outside, {**inside, **outside})] == [0.5, 0.75, 0.25]
    sizes = replace(small.DENSE, rotary_percent=0.5, rope_scaling=RopeScaling(rope_type="linear", factor=2.0))
    written = partial.config({**settings_of(sizes), "dtype": "float32"})["rope_parameters"]
    assert written == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5}
    main = next(one for one in partial.settings if one.name == "rope_parameters")
    assert main.reason({"rope_parameters": written, "rope_theta": 1e4}) == ""


def test_a_model_that_was_trained_here_is_read_by_its_class(tmp_path: Path) -> None:
    """The scaling of the flags becomes ``rope_parameters``, with which the class computes our logits."""
    for number, scaling in enumerate((RopeScaling(rope_type="llama3", factor=3.0), RopeScaling(rope_type="yarn"))):
        sizes = replace(small.DENSE, rope_scaling=scaling, rope_theta=50.0)
        model = small.build(sizes)
        folder = tmp_path / str(number)
        save_hf(folder, sizes, ((n, t.detach()) for n, t in small.named_tensors(model)), torch.float32)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(1))
        batch = {"tokens": tokens, "labels": tokens, "positions": torch.arange(16).expand(2, 16)}
        with torch.no_grad():
            assert float((model.logits(batch) - theirs(tokens).logits).abs().max()) <= 1e-5


def test_every_decoder_is_here() -> None:
    decoders = {name.removesuffix("ForCausalLM") for name in ARCHITECTURES if name.endswith("ForCausalLM")}
    assert {*CLASSES, *BY_KIND} == decoders
