"""Folders of the DeepSeek family: their keys, what is refused, and blocks of multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megapar.arguments import parse
from megapar.checkpoints.export.from_hf import hf_to_megapar, published
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.errors import CheckpointError, ConfigError
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.hugging_face.save import config_of, save_hf
from tests.checkpoints.export.test_convert import MODELS, SIZES, _tensors
from tests.model.small import build, named_tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each class, in one file."""
    root = tmp_path_factory.mktemp("deepseek")
    torch.manual_seed(0)
    for name in ("DeepseekV2", "DeepseekV3", "Glm4Moe"):
        MODELS[name]().save_pretrained(root / name)
    return {path.name: path for path in root.iterdir()}


def changed(folder: Path, other: Path, **settings: Any) -> Path:
    """The folder with other keys in config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    (other / "model.safetensors").hardlink_to(folder / "model.safetensors")
    return other


COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


def with_block(folder: Path, other: Path, blocks: int = 1, stale: str = "") -> tuple[Path, set[str]]:
    """The folder with a block of multi-token prediction, whose names are those of DeepSeek-V3's index, and these names.

    blocks: what config.json counts. stale: a copy that differs from its original.
    """
    made = changed(folder, other, num_nextn_predict_layers=blocks)
    tensors = load_file(made / "model.safetensors")
    block, H, last = f"model.layers.{SIZES['num_hidden_layers']}", SIZES["hidden_size"], "model.layers.1"
    more = {f"{block}{name.removeprefix(last)}": t.clone() for name, t in tensors.items() if name.startswith(last)}
    more |= {f"{block}.{name}.weight": torch.randn(H) for name in ("enorm", "hnorm", "shared_head.norm")}
    more |= {f"{block}.eh_proj.weight": torch.randn(H, 2 * H)}
    for copy, original in COPIES.items():
        more[f"{block}.{copy}.weight"] = tensors[f"{original}.weight"] + (copy == stale)
    (made / "model.safetensors").unlink()
    save_file({**tensors, **more}, made / "model.safetensors", metadata={"format": "pt"})
    return made, set(more)


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe"])
def test_the_block_of_multi_token_prediction_is_read_and_written(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder, _ = with_block(folders[name], tmp_path / "model")
    done = hf_to_megapar(folder, tmp_path / "made")
    assert done.carried == ()
    sizes = published(folder)[1]
    assert isinstance(sizes, DecoderSizes)
    assert (sizes.mtp_depth, sizes.mtp_block) == (1, "layer")
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    assert _tensors(tmp_path / "back") == _tensors(folder)
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_a_block_that_config_json_does_not_count_is_carried_along(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, names = with_block(folders["DeepseekV3"], tmp_path / "model", blocks=0, stale="embed_tokens")
    assert set(hf_to_megapar(folder, tmp_path / "made").carried) == names
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    assert _tensors(tmp_path / "back") == _tensors(folder)


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_differs_is_refused(copy: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder, _ = with_block(folders["DeepseekV3"], tmp_path / "model", stale=copy)
    with pytest.raises(CheckpointError, match=rf"{copy}.weight differs from {COPIES[copy]}.weight, with which"):
        hf_to_megapar(folder, tmp_path / "made")


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe"])
def test_an_export_has_the_tensors_of_the_published_folder(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """A model of its own, without a published folder: names, shapes and copies are those of one with a block."""
    folder, _ = with_block(folders[name], tmp_path / "model")
    sizes = published(folder)[1]
    assert isinstance(sizes, DecoderSizes)
    model = build(sizes)
    save_hf(tmp_path / "out", sizes, named_tensors(model), torch.float32)
    written, wanted = (load_file(one / "model.safetensors") for one in (tmp_path / "out", folder))
    assert {key: value.shape for key, value in written.items()} == {key: value.shape for key, value in wanted.items()}
    block = f"model.layers.{SIZES['num_hidden_layers']}"
    for copy, original in COPIES.items():
        assert torch.equal(written[f"{block}.{copy}.weight"], written[f"{original}.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["num_nextn_predict_layers"] == 1
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.startswith(f"{block}.") for key in info["unexpected_keys"]), "the class does not build the block"


def test_kimi_has_another_model_type(folders: dict[str, Path], tmp_path: Path) -> None:
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    folder = changed(folders["DeepseekV3"], tmp_path / "model", model_type="kimi_k2", auto_map=code)
    architecture, sizes = published(folder)
    assert sizes == published(folders["DeepseekV3"])[1]
    exported = config_of(architecture, sizes, torch.bfloat16, json.loads((folder / "config.json").read_text("utf-8")))
    assert exported["model_type"] == "deepseek_v3"
    assert "auto_map" not in exported
    hf_to_megapar(folder, tmp_path / "own")
    megapar_to_hf(tmp_path / "own", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "deepseek_v3"
    assert "auto_map" not in config, "the code is not copied"
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("DeepseekV3", {"attention_bias": True}, "attention_bias is True"),
        ("DeepseekV3", {"rope_interleave": False}, "rope_interleave is False"),
        (
            "DeepseekV3",
            {"num_key_value_heads": 2},
            "num_key_value_heads is 2, but each of the 4 heads has its own keys",
        ),
        ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("DeepseekV3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("DeepseekV3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
    ],
)
def test_what_the_layer_cannot_be_is_refused(
    name: str, settings: dict[str, Any], said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(folders[name], tmp_path / "model", **settings)
    with pytest.raises(ConfigError, match=said):
        parse("moe", ["--load-hf", str(folder), "--data-path", "mock"], {})


@pytest.mark.parametrize(("name", "groups"), [("DeepseekV3", (3, 2, 2)), ("Glm4Moe", (1, 1, 0))])
def test_groups_of_experts(name: str, groups: tuple[int, int, int], folders: dict[str, Path]) -> None:
    moe = published(folders[name])[1].moe
    assert (moe.groups, moe.group_topk, moe.group_score_topk) == groups
    assert moe.score == "sigmoid"


def test_what_is_written_is_read_as_the_same_class(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        architecture, sizes = published(folder)
        config = config_of(architecture, sizes, torch.float32)
        theirs = transformers.AutoConfig.from_pretrained(folder).to_dict()
        for key, value in config.items():
            if key not in ("architectures", "dtype", "initializer_range", "num_nextn_predict_layers"):
                assert theirs.get(key, value) == value, (name, key)
