"""The doors in: settings that a folder leaves out, states twice or has no place for here, against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapar.arguments import parse
from megapar.checkpoints.export.from_hf import hf_to_megapar, published
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.errors import CheckpointError, ConfigError
from megapar.model.architectures import ARCHITECTURES
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.published_tensors import pieces_of
from megapar.model.spec import table_of
from tests.checkpoints.export.test_convert import MODELS, _expected, _logits
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every family, all of one file."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, make in MODELS.items():
        make().eval().save_pretrained(root / name)
    return {name: root / name for name in MODELS}


def changed(source: Path, target: Path, settings: Mapping[str, Any], without: tuple[str, ...] = ()) -> Path:
    """A copy of a folder with other settings in config.json."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | settings
    for name in without:
        config.pop(name, None)
    (target / "config.json").write_text(json.dumps(config))
    return target


def kind_of(name: str) -> str:
    return "ernie" if name.startswith("ErnieFor") else "moe"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_class_defaults_are_those_of_transformers(name: str) -> None:
    config = getattr(transformers, name).config_class()
    theirs = config.to_dict()
    theirs["rope_theta"] = theirs.get("rope_parameters", {}).get("rope_theta")
    ours = ARCHITECTURES[name].defaults
    assert {key: theirs[key] for key in ours} == ours


# What the fixture's models have at other values than the class, or that decides shapes, stays in config.json.
LEFT_OUT = {
    "Ernie4_5": ("rope_theta", "rope_parameters", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
    "Ernie4_5_Moe": ("rope_theta", "rope_parameters", "rms_norm_eps", "moe_norm_min", "moe_layer_interval"),
    "Llama": ("rope_theta", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "attention_dropout"),
    "Mistral": ("rope_theta", "rope_parameters", "rms_norm_eps", "sliding_window", "hidden_act"),
    "Qwen2": ("rope_theta", "rope_parameters", "rms_norm_eps", "use_sliding_window", "tie_word_embeddings"),
    "Qwen3": ("rope_theta", "rope_parameters", "rms_norm_eps", "attention_bias", "layer_types"),
    "Mixtral": ("rope_theta", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "num_experts_per_tok"),
    "Qwen3Moe": ("rope_theta", "rope_parameters", "rms_norm_eps", "decoder_sparse_step", "attention_bias"),
    "ErnieForPreTraining": ("layer_norm_eps", "task_type_vocab_size", "hidden_act", "is_decoder"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_config_json_leaves_out_is_the_class_s(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders[name], tmp_path / "bare", {}, without=LEFT_OUT[name])
    words, _ = _logits_of(folder, kind_of(name))
    assert float((words - _expected(name, folder)[0]).abs().max()) <= 1e-5


def _logits_of(folder: Path, kind: str) -> tuple[Tensor, Tensor | None]:
    found = run_ranks(1, _logits, kind, ["--load-hf", str(folder)], group=False)[0]
    assert found is not None
    return found


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("ErnieForMaskedLM", {"is_decoder": True}, "is_decoder is True"),
        ("ErnieForPreTraining", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("ErnieForPreTraining", {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ("Ernie4_5_Moe", {"moe_norm_min": 0.9}, r"moe_norm_min is 0\.9"),
        (
            "Mixtral",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "the quant_method 'gptq', and only FP8",
        ),
        ("Mixtral", {"quantization_config": {"quant_method": "fp8"}}, "the weight_block_size None, and only FP8"),
        ("Mixtral", {"quantization_config": {**FP8, "weight_block_size": [64, 128]}}, r"weight_block_size \[64, 128\]"),
        ("Mixtral", {"quantization_config": {**FP8, "fmt": "e5m2"}}, "the fmt 'e5m2', and only FP8"),
        ("Mixtral", {"quantization_config": [1]}, r"quantization_config is \[1\], where an object"),
        ("Mixtral", {"architectures": ["KimiLinearForCausalLM"]}, "linear attention is not built; supported are Deep"),
        ("Mixtral", {"architectures": ["DeepseekV32ForCausalLM"]}, "sparse attention is not built; supported are"),
        ("Mixtral", {"architectures": ["PhimoeForCausalLM"]}, r"samples them in training \(SparseMixer\)"),
        ("Mixtral", {"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]}, "reads images; supported are"),
        ("Mixtral", {"architectures": ["DeepseekV9ForCausalLM"]}, r"\['DeepseekV9ForCausalLM'\]; supported are"),
    ],
)
def test_another_model_is_refused_with_the_setting(
    name: str, setting: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(folders[name], tmp_path / "model", setting)
    with pytest.raises(ConfigError, match=message):
        parse(kind_of(name), ["--load-hf", str(folder)], {})
    with pytest.raises(CheckpointError, match=message):
        hf_to_megapar(folder, tmp_path / "out")


def test_noise_on_the_router_is_said_to_be_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["Mixtral"], tmp_path / "model", {"router_jitter_noise": 0.1})
    config = parse("moe", ["--load-hf", str(folder), "--seq-length", "16"], {})
    assert any("router_jitter_noise is 0.1" in warning for warning in config.warnings)


def test_dropout_is_the_folder_s_unless_a_flag_says_otherwise(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.25}
    folder = str(changed(folders["ErnieForPreTraining"], tmp_path / "model", settings))
    model = parse("ernie", ["--load-hf", folder, "--seq-length", "16"], {}).model
    assert (model.hidden_dropout, model.attention_dropout) == (0.0, 0.25)
    asked = parse("ernie", ["--load-hf", folder, "--seq-length", "16", "--hidden-dropout", "0.3"], {}).model
    assert (asked.hidden_dropout, asked.attention_dropout) == (0.3, 0.25)


@pytest.mark.parametrize(
    "flag", ["--moe-shared-experts 1", "--first-k-dense 1", "--qk-norm", "--add-bias-linear", "--mtp-depth 1"]
)
def test_what_a_mixtral_has_not_is_refused_before_the_ranks(flag: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=f"{flag.split()[0]} .*contradicts"):
        parse("moe", ["--load-hf", str(folders["Mixtral"]), "--seq-length", "16", *flag.split()], {})


def _store_other(folder: Path, copy: str, original: str, change: float) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[copy] = tensors[original].clone()
    tensors[copy].flatten()[-1] += change
    save_file(tensors, path, metadata={"format": "pt"})


COPIES = [
    ("Ernie4_5", "lm_head.weight", "model.embed_tokens.weight"),
    ("ErnieForPreTraining", "cls.predictions.decoder.weight", "ernie.embeddings.word_embeddings.weight"),
    ("ErnieForMaskedLM", "cls.predictions.decoder.bias", "cls.predictions.bias"),
]


@pytest.mark.parametrize(("name", "copy", "original"), COPIES)
def test_a_stored_copy_that_is_another_tensor_is_refused(
    name: str, copy: str, original: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    same, other = (changed(folders[name], tmp_path / one, {}) for one in ("same", "other"))
    _store_other(same, copy, original, 0.0)
    _store_other(other, copy, original, 1e-3)
    hf_to_megapar(same, tmp_path / "made")
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (same, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    message = rf"ties {copy} to {original}, but the {copy} stored there differs".replace(".", r"\.")
    with pytest.raises(CheckpointError, match=message):
        hf_to_megapar(other, tmp_path / "out")
    with pytest.raises(Exception, match=message):
        _logits_of(other, kind_of(name))
    assert not (tmp_path / "out").exists()


def test_the_way_that_the_refusal_names(folders: dict[str, Path], tmp_path: Path) -> None:
    """With tie_word_embeddings false the stored output weights are taken, as transformers takes them either way."""
    folder = changed(folders["Ernie4_5"], tmp_path / "model", {"tie_word_embeddings": False})
    _store_other(folder, "lm_head.weight", "model.embed_tokens.weight", 5.0)
    words, _ = _logits_of(folder, "moe")
    assert float((words - _expected("Ernie4_5", folder)[0]).abs().max()) <= 1e-5


def test_blocks_of_a_copy_are_shared_out_among_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["Ernie4_5"], tmp_path / "model", {})
    _store_other(folder, "lm_head.weight", "model.embed_tokens.weight", 1.0)
    architecture, sizes = published(folder)
    own = pieces_of(table_of(sizes), architecture)
    weights = HfFolder(folder)
    refused = []
    for rank in range(3):
        try:
            # 67 rows of 32: blocks of 20, of which there are 4.
            weights.check_tied(architecture, own, rank, 3, block_bytes=32 * 4 * 20)
        except CheckpointError:
            refused.append(rank)
    assert refused == [0]  # the last element is in the fourth block


TRACKER, STEP = "latest_checkpointed_iteration.txt", "iter_0000100"
FOREIGN = {
    "a Megatron-LM checkpoint with a file per rank": (
        "latest_checkpointed_iteration.txt",
        "iter_0000100/mp_rank_00_000/model_optim_rng.pt",
    ),
    "a distributed Megatron-LM checkpoint": (
        "latest_checkpointed_iteration.txt",
        "iter_0000100/metadata.json",
        "iter_0000100/__0_0.distcp",
    ),
    "a Megatron-LM checkpoint folder": (TRACKER,),
    "a DeepSpeed checkpoint": ("latest", "global_step10/mp_rank_00_model_states.pt"),
}


@pytest.mark.parametrize("form", FOREIGN)
def test_checkpoints_of_others_are_told_what_they_are(form: str, tmp_path: Path) -> None:
    for name in FOREIGN[form]:
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).write_text("100")
    folders = [tmp_path / "runs", *(path for path in (tmp_path / "runs").glob("iter_*"))]
    for folder in folders:
        for flags in ([], ["--save", str(folder)]):
            with pytest.raises(ConfigError) as error:
                parse("moe", ["--load", str(folder), *flags], {})
            (complaint,) = error.value.complaints
            assert complaint.rule == "checkpoint-foreign"
            assert f"{folder} is {form}." in str(complaint)
            assert "--load-hf" in str(complaint)
        for convert in (hf_to_megapar, megapar_to_hf):
            with pytest.raises(CheckpointError, match=form):
                convert(folder, tmp_path / "out")
