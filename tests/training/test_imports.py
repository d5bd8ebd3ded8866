"""The doors in: settings that a folder leaves out, states twice or has no place for here, and the DeepSeek family's."""

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
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from megapar.arguments import parse
from megapar.checkpoints.export.from_hf import hf_to_megapar, published
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.errors import CheckpointError, ConfigError
from megapar.model.architectures import ARCHITECTURES
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.hugging_face.save import config_of, save_hf
from megapar.model.published_tensors import pieces_of
from megapar.model.spec import table_of
from tests.checkpoints.export.test_convert import MODELS, SIZES, _expected, _logits, _tensors
from tests.model.small import build, named_tensors
from tests.support.ranks import run_ranks
from tests.support.training import train_rank


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
    "GptOss": ("rope_parameters", "rms_norm_eps", "layer_types", "swiglu_limit", "attention_bias", "hidden_act"),
    "Qwen3Moe": ("rope_theta", "rope_parameters", "rms_norm_eps", "decoder_sparse_step", "attention_bias"),
    "ErnieForPreTraining": ("layer_norm_eps", "task_type_vocab_size", "hidden_act", "is_decoder"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_config_json_leaves_out_is_the_class_s(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders[name], tmp_path / "bare", {}, without=LEFT_OUT[name])
    words, _ = _logits_of(folder, kind_of(name))
    assert float((words - _expected(name, folder)[0]).abs().max()) <= 1e-5


def _logits_of(folder: Path, kind: str) -> tuple[Tensor, Tensor | None]:
    return run_ranks(1, _logits, kind, ["--load-hf", str(folder)], group=False)[0]


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
        ("Qwen3Moe", {"mlp_only_layers": [0, 1]}, r"mlp_only_layers is \[0, 1\], but at least one layer"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("GraniteMoe", {"attention_bias": True}, "attention_bias is True"),
        ("Mixtral", {"sliding_window": 0}, "sliding_window is 0"),
        ("Mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "the quant_method 'mxfp4', and only FP8"),
        ("GptOss", {"quantization_config": {"quant_method": "awq"}}, "the quant_method 'awq', and only FP8"),
        ("GptOss", {"swiglu_limit": 6.0}, r"swiglu_limit is 6\.0, and only 7\.0"),
        ("GptOss", {"attention_bias": False}, "attention_bias is False"),
        ("GptOss", {"layer_types": ["full_attention"]}, "and only a list of full_attention and sliding_attention"),
        ("Ernie4_5_Moe", {"moe_layer_interval": 3}, "moe_layer_start_index is 1, but at least one layer"),
        ("Llama", {"mlp_bias": False}, "attention_bias is True, but biases here are in all linear layers"),
        ("Mistral", {"sliding_window": 8, "layer_types": ["full_attention"]}, "layers of this class are all alike"),
        ("Qwen2", {"use_sliding_window": True}, "sliding_window does not say how many keys"),
        ("Qwen2", {"layer_types": ["sliding_attention"]}, "and only a list of full_attention and sliding_attention"),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window does not say how many keys"),
        ("Qwen3Moe", {"layer_types": ["sliding_attention"]}, "layers of this class are all alike"),
        ("Qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types is"),
        ("Qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("Granite", {"logits_scaling": 0}, "logits_scaling is 0, where a number above 0 is needed"),
        ("Olmo2", {"attention_bias": True}, "attention_bias is True"),
        ("ErnieForMaskedLM", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
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


BLOCK_COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


def with_block(folder: Path, other: Path, blocks: int = 1, stale: str = "") -> tuple[Path, set[str]]:
    """The folder with a block of multi-token prediction, whose names are those of DeepSeek-V3's index, and these names.

    blocks: what config.json counts. stale: a copy that differs from its original.
    """
    made = changed(folder, other, {"num_nextn_predict_layers": blocks})
    tensors = load_file(made / "model.safetensors")
    block, H, last = f"model.layers.{SIZES['num_hidden_layers']}", SIZES["hidden_size"], "model.layers.1"
    more = {f"{block}{name.removeprefix(last)}": t.clone() for name, t in tensors.items() if name.startswith(last)}
    more |= {f"{block}.{name}.weight": torch.randn(H) for name in ("enorm", "hnorm", "shared_head.norm")}
    more |= {f"{block}.eh_proj.weight": torch.randn(H, 2 * H)}
    for copy, original in BLOCK_COPIES.items():
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
    assert (sizes.mtp_depth, sizes.mtp_block) == (1, "layer")
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    assert _tensors(tmp_path / "back") == _tensors(folder)
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_a_block_that_config_json_does_not_count_is_carried_along(folders: dict[str, Path], tmp_path: Path) -> None:
    folder, names = with_block(folders["DeepseekV3"], tmp_path / "model", blocks=0, stale="embed_tokens")
    assert set(hf_to_megapar(folder, tmp_path / "made").carried) == names
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    assert _tensors(tmp_path / "back") == _tensors(folder)


@pytest.mark.parametrize("copy", BLOCK_COPIES)
def test_a_copy_that_differs_is_refused(copy: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder, _ = with_block(folders["DeepseekV3"], tmp_path / "model", stale=copy)
    with pytest.raises(CheckpointError, match=rf"{copy}.weight differs from {BLOCK_COPIES[copy]}.weight, with which"):
        hf_to_megapar(folder, tmp_path / "made")


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe"])
def test_an_export_has_the_tensors_of_the_published_folder(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """A model of its own, without a published folder: names, shapes and copies are those of one with a block."""
    folder, _ = with_block(folders[name], tmp_path / "model")
    sizes = published(folder)[1]
    model = build(sizes)
    save_hf(tmp_path / "out", sizes, named_tensors(model), torch.float32)
    written, wanted = (load_file(one / "model.safetensors") for one in (tmp_path / "out", folder))
    assert {key: value.shape for key, value in written.items()} == {key: value.shape for key, value in wanted.items()}
    block = f"model.layers.{SIZES['num_hidden_layers']}"
    for copy, original in BLOCK_COPIES.items():
        assert torch.equal(written[f"{block}.{copy}.weight"], written[f"{original}.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["num_nextn_predict_layers"] == 1
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert all(key.startswith(f"{block}.") for key in info["unexpected_keys"]), "the class does not build the block"


def test_kimi_has_another_model_type(folders: dict[str, Path], tmp_path: Path) -> None:
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    folder = changed(folders["DeepseekV3"], tmp_path / "model", {"model_type": "kimi_k2", "auto_map": code})
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


@pytest.mark.parametrize(("name", "groups"), [("DeepseekV3", (3, 2, 2)), ("Glm4Moe", (1, 1, 0))])
def test_groups_of_experts(name: str, groups: tuple[int, int, int], folders: dict[str, Path]) -> None:
    moe = published(folders[name])[1].moe
    assert (moe.groups, moe.group_topk, moe.group_score_topk) == groups
    assert moe.score == "sigmoid"


def test_what_is_written_is_read_as_the_same_class(folders: dict[str, Path]) -> None:
    for name in ("DeepseekV2", "DeepseekV3", "Glm4Moe"):
        folder = folders[name]
        architecture, sizes = published(folder)
        config = config_of(architecture, sizes, torch.float32)
        theirs = transformers.AutoConfig.from_pretrained(folder).to_dict()
        for key, value in config.items():
            if key not in ("architectures", "dtype", "initializer_range", "num_nextn_predict_layers"):
                assert theirs.get(key, value) == value, (name, key)


STEPS = 100
SMALL_V3 = {
    **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    **{"n_shared_experts": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
}
LINE = (
    f"--data-path builtin --seq-length 64 --micro-batch-size 4 --global-batch-size 8 --train-iters {STEPS} --lr 3e-3 "
    "--lr-warmup-iters 5 --eval-interval 0 --moe-router-bias-update-rate 1e-3 --cp-degree 2 --ep-degree 2"
)


def loss_of(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


@pytest.mark.table
def test_it_is_trained_and_generates(tmp_path: Path) -> None:
    """The exported model has learned what the run's losses say, and writes text that its tokenizer reads."""
    torch.manual_seed(0)
    start, end = tmp_path / "start", tmp_path / "end"
    DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL_V3)).save_pretrained(start)
    line = f"--load-hf {start} --save-hf {end} {LINE}"
    records = run_ranks(2, train_rank, "moe", line.split(), group=False, timeout=400)[0].records
    assert len(records) == STEPS
    assert records[0].lm_loss > 6.5
    assert records[-1].lm_loss < 5.5
    tokenizer = AutoTokenizer.from_pretrained(end)
    before, after = (DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (start, end))
    text = tokenizer("The function returns a list of all names in the current scope.", return_tensors="pt")["input_ids"]
    assert loss_of(after, text) < loss_of(before, text) - 1
    written = after.generate(text[:, :4], max_new_tokens=16, min_new_tokens=16, do_sample=False)
    assert written.shape == (1, 20)
    assert tokenizer.decode(written[0])
