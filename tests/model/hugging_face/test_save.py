"""Against transformers, both ways: our export in its classes gives our logits, and its folders load here exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5ForCausalLM,
    ErnieForPreTraining,
)

from megapar.core.box import Box
from megapar.errors import CheckpointError
from megapar.model.architectures import ARCHITECTURES, not_exportable, own_architecture
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.hugging_face.save import save_hf
from megapar.model.hugging_face.tensors import export_piece, to_halves, to_pairs
from megapar.model.layers.rotary import RotaryEmbedding, rotate
from megapar.model.spec import table_of
from megapar.moe.sizes import MoeSizes
from tests.model.small import DENSE, ERNIE, MOE, VARIETIES, batch_for, build, named_tensors

DECODERS = {
    "dense tied": DENSE,
    "dense untied, biases": replace(DENSE, tie_embeddings=False, add_bias_linear=True),
    "dense head dim": replace(DENSE, head_dim=12, rope_theta=500000.0),
    "moe": MOE,
    "moe, multi-token prediction": replace(MOE, mtp_depth=1),
    "moe tied, no shared, head dim": replace(
        MOE, head_dim=12, first_k_dense=0, tie_embeddings=True, moe=MoeSizes(32, 16, num_experts=4, topk=3)
    ),
}


def whole_tensors(model):
    return ((name, tensor.detach()) for name, tensor in named_tensors(model))


def load_folder(folder, sizes):
    """Every parameter of the table, made of a folder's tensors as ``--load-hf`` and convert make it."""
    weights, architecture, table = HfFolder(folder), own_architecture(sizes), table_of(sizes)
    foreign = weights.check(table, architecture)
    assert all("mtp" in name for name in foreign), foreign
    found = {spec.name: torch.full(spec.shape, torch.nan) for spec in table}
    for spec in table:
        weights.fill(found[spec.name], spec, Box.whole(spec.shape), architecture)
    return found


def move_biases(model):
    """Correction biases that change the choice."""
    for i, bias in enumerate(model.correction_biases()):
        bias.copy_(0.05 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(i)))


def hf_logits(folder, batch):
    config = AutoConfig.from_pretrained(folder)
    kinds = {"ernie4_5": Ernie4_5ForCausalLM, "ernie4_5_moe": Ernie4_5_MoeForCausalLM}
    theirs, info = kinds[config.model_type].from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    mask = batch.get("valid")
    with torch.no_grad():
        return theirs.eval()(
            input_ids=batch["tokens"],
            position_ids=batch["positions"],
            attention_mask=None if mask is None else mask.long(),
        ).logits


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", DECODERS.values(), ids=DECODERS)
def test_exported_decoder_gives_our_logits(sizes, padded, tmp_path):
    model = build(sizes).eval()
    move_biases(model)
    save_hf(tmp_path, sizes, whole_tensors(model), torch.float32)
    batch = batch_for(sizes, padded=padded)
    difference = hf_logits(tmp_path, batch) - model.logits(batch).detach()
    own = batch.get("valid", torch.ones(2, 16, dtype=torch.bool))
    assert float(difference[own].abs().max()) <= 1e-5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("flash", [False, True])
def test_exported_ernie_gives_our_logits(flash, padded, tmp_path):
    sizes = replace(ERNIE, use_flash_attn=flash)
    model = build(sizes).eval()
    save_hf(tmp_path, sizes, whole_tensors(model), torch.float32)
    check_ernie(model, tmp_path, padded)


def check_ernie(model, folder, padded):
    theirs, info = ErnieForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = batch_for(ERNIE, padded=padded)
    mask = batch.get("valid")
    with torch.no_grad():
        expected = theirs.eval()(
            input_ids=batch["tokens"],
            token_type_ids=batch["token_types"],
            task_type_ids=batch["task_types"],
            position_ids=batch["positions"],
            attention_mask=None if mask is None else mask.long(),
        )
        words, order = model.logits(batch)
        terms = model(batch)
    own = torch.ones(2, 16, dtype=torch.bool) if mask is None else mask
    assert float((words - expected.prediction_logits)[own].abs().max()) <= 1e-5
    assert float((order - expected.seq_relationship_logits).abs().max()) <= 1e-5
    masked = expected.prediction_logits.flatten(0, 1)[batch["masked_index"]]
    loss = torch.nn.functional.cross_entropy(masked, batch["masked_labels"], reduction="sum")
    assert float(terms.sums["lm"]) == pytest.approx(float(loss), rel=1e-5)


def test_shards_are_cut_by_bytes_and_read_back(tmp_path):
    model = build(MOE)
    save_hf(tmp_path, MOE, whole_tensors(model), torch.float32, shard_bytes=20_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert all((tmp_path / file).stat().st_size < 25_000 for file in files)
    batch = batch_for(MOE)
    assert float((hf_logits(tmp_path, batch) - model.logits(batch)).abs().max()) <= 1e-5
    tensors = load_folder(tmp_path, MOE)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in named_tensors(model))
    save_hf(tmp_path, MOE, whole_tensors(model), torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_router_stays_fp32_in_16_bit_files(tmp_path):
    save_hf(
        tmp_path, MOE, whole_tensors(build(MOE, dtype=torch.bfloat16)), torch.bfloat16, token_ids={"eos_token_id": 3}
    )
    tensors = load_file(tmp_path / "model.safetensors")
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in tensors if name.endswith("mlp.gate.weight") or "moe_statics" in name}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["eos_token_id"]) == ("bfloat16", 3)


def test_the_exported_model_generates(tmp_path):
    save_hf(tmp_path, MOE, whole_tensors(build(MOE)), torch.float32, token_ids={"eos_token_id": 66, "pad_token_id": 0})
    theirs = Ernie4_5_MoeForCausalLM.from_pretrained(tmp_path)
    out = theirs.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
    assert out.shape[1] > 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layernorm", "normalization layernorm"),
        ("learned positions", "position_embedding_type learned"),
        ("gelu", "activation gelu"),
        ("moe gelu with biases", "the experts of this class have no biases"),
    ],
)
def test_models_without_a_form_are_refused_before_anything_is_written(name, reason, tmp_path):
    sizes = VARIETIES[name]
    with pytest.raises(CheckpointError, match=reason):
        save_hf(tmp_path / "out", sizes, whole_tensors(build(sizes)), torch.float32)
    assert not (tmp_path / "out").exists()


def as_class(name):
    """A save_hf that writes this class."""
    return partial(save_hf, architecture=ARCHITECTURES[name])


@pytest.mark.parametrize(
    ("sizes", "name", "reason"),
    [
        (VARIETIES["ernie without sentence order"], "ErnieForPreTraining", "sentence-order head"),
        (ERNIE, "ErnieForMaskedLM", "has no sentence-order head"),
        (DENSE, "MixtralForCausalLM", "this class has experts .num_experts 0"),
        (MOE, "Ernie4_5ForCausalLM", "this class has no experts .num_experts 4.*Ernie4_5_MoeForCausalLM can, and"),
        (MOE, "Qwen3MoeForCausalLM", "this class has norms of queries and keys"),
        (DENSE, "ErnieForMaskedLM", "ErnieForMaskedLM is not a decoder"),
    ],
)
def test_another_class_than_the_model_s_is_refused_with_the_reason(sizes, name, reason, tmp_path):
    with pytest.raises(CheckpointError, match=reason):
        as_class(name)(tmp_path / "out", sizes, whole_tensors(build(sizes)), torch.float32)
    assert not (tmp_path / "out").exists()


def test_an_undivided_weight_of_one_expert_is_only_qwen_s():
    one = replace(MOE, moe=replace(MOE.moe, topk=1))
    assert "also that of a single one" in (not_exportable(one) or "")
    assert not_exportable(replace(one, moe=replace(one.moe, norm_topk_prob="on"))) is None
    assert not_exportable(replace(one, qk_norm=True, moe=replace(one.moe, shared_experts=0))) is None


def test_an_incomplete_export_leaves_nothing(tmp_path):
    tensors = list(whole_tensors(build(DENSE)))
    for wrong, message in (
        (tensors[:-1], "lacks final_norm.weight"),
        ([*tensors, tensors[0]], "occurs twice"),
        ([(tensors[0][0], tensors[1][1])], "the model's is"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_hf(tmp_path, DENSE, wrong, torch.float32)
        assert not list(tmp_path.iterdir())


def test_broken_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        load_folder(tmp_path, DENSE)
    save_hf(tmp_path, DENSE, whole_tensors(build(DENSE)), torch.float32)
    with pytest.raises(CheckpointError, match=r"lacks model.layers.2.input_layernorm.weight"):
        load_folder(tmp_path, replace(DENSE, num_layers=3))
    one_layer = replace(DENSE, num_layers=1)
    foreign = HfFolder(tmp_path).check(table_of(one_layer), own_architecture(one_layer))
    assert foreign[0] == "model.layers.1.input_layernorm.weight"
    assert all(name.startswith("model.layers.1.") for name in foreign)
    with pytest.raises(CheckpointError, match=r"has shape \(67, 32\), the model's is \(68, 32\)"):
        load_folder(tmp_path, replace(DENSE, vocab_size=68))
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_folder(tmp_path, DENSE)


def test_tied_copies_and_mtp_layers_are_left_out(tmp_path):
    model = build(DENSE)
    save_hf(tmp_path, DENSE, whole_tensors(model), torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.mtp_block.0.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load_folder(tmp_path, DENSE)["embedding.word.weight"], model.embedding.word.weight)


def test_multi_token_prediction_goes_out_and_comes_back(tmp_path):
    sizes = replace(MOE, mtp_depth=1)
    model = build(sizes)
    save_hf(tmp_path, sizes, whole_tensors(model), torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    names = {name for name in load_file(tmp_path / "model.safetensors") if "mtp" in name}
    assert {"model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight", "model.mtp_linear_proj.0.weight"} < names
    assert "model.mtp_block.0.mlp.down_proj.weight" in names
    back = load_folder(tmp_path, sizes)
    for name, tensor in whole_tensors(model):
        assert torch.equal(back[name], tensor), name


def test_only_the_rotated_rows_of_a_head_are_in_another_order() -> None:
    """Scores of a class that rotates halves of the leading features are those of the exported rows."""
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    sizes = replace(DENSE, head_dim=12, rotary_percent=0.67)  # 8 of 12
    G, Q, D, H, R = sizes.num_query_groups, 2, 12, sizes.hidden_size, 8
    spec = next(row for row in table_of(sizes) if row.name.endswith("attention.qkv.weight"))
    assert spec.rotated == R
    generator = torch.Generator().manual_seed(0)
    whole, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (spec.shape, (1, 16, H)))
    llama = ARCHITECTURES["LlamaForCausalLM"]
    q, k = (
        (x @ export_piece(llama, spec, piece, whole)[1].reshape(-1, H).T).unflatten(-1, (-1, D)).transpose(1, 2)
        for piece in spec.pieces[:2]
    )
    positions = torch.arange(16)[None]
    cos, sin = RotaryEmbedding(R, 50.0, torch.float64).angles(positions)
    q, k = apply_rotary_pos_emb(q, k, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))
    theirs = q.unflatten(1, (G, Q)) @ k.unsqueeze(2).mT
    qkv = torch.einsum("bsh,gqdh->bsgqd", x, whole)
    angles = RotaryEmbedding(R, 50.0, torch.float64, head_dim=D).angles(positions)
    ours_q, ours_k = rotate(qkv[:, :, :, :Q].flatten(2, 3), angles), rotate(qkv[:, :, :, Q], angles)
    ours = torch.einsum("bsgqd,btgd->bgqst", ours_q.unflatten(2, (G, Q)), ours_k)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_pairs_and_halves_are_inverse() -> None:
    rows = torch.arange(11)
    assert to_halves(rows, 0, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8, 9, 10]
    assert torch.equal(to_pairs(to_halves(rows, 0, 6), 0, 6), rows)
