"""Folders in FP8 by blocks: every weight is its product with its scale, on every rank; damage is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapar.arguments import parse
from megapar.checkpoints.export.from_hf import hf_to_megapar, published
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.core.box import Box
from megapar.errors import CheckpointError
from megapar.model.architectures import ARCHITECTURES
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.hugging_face.tensors import dequantized, stored_rows
from megapar.model.published_tensors import BLOCK, scale_shape
from megapar.model.spec import table_of
from tests.checkpoints.export.test_convert import _logits
from tests.support.ranks import run_ranks

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
NAME = "model.layers.0.self_attn.q_proj.weight"


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values in FP8, scales) by the formula of the publication, block by block."""
    values, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(scale_shape(x.shape))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = x[block].abs().max() / 448 + 1e-9
            values[block] = (x[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def restored(values: Tensor, scales: Tensor) -> Tensor:
    """The weights by their definition, element by element."""
    rows, columns = (torch.arange(size) // BLOCK for size in values.shape)
    return values.float() * scales[rows][:, columns]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Qwen3Moe with sizes that are no multiples of a block: (in FP8, the same weights in float32)."""
    root = tmp_path_factory.mktemp("fp8")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{"vocab_size": 67, "hidden_size": 152, "intermediate_size": 136, "num_hidden_layers": 2, "head_dim": 76},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 130, "norm_topk_prob": True, "mlp_only_layers": [0]},
        **{"initializer_range": 0.1, "tie_word_embeddings": False},
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(root / "plain")
    shutil.copytree(root / "plain", root / "fp8")
    plain, stored = load_file(root / "plain" / "model.safetensors"), {}
    for name, tensor in plain.items():
        stored[name] = tensor.bfloat16()
        if "proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = quantized(tensor)
            plain[name] = restored(stored[name], stored[f"{name}_scale_inv"])
        else:
            plain[name] = stored[name].float()
    save_file(plain, root / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, root / "fp8" / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((root / "fp8" / "config.json").read_text())
    # Folders with code of their own are recognized by the name of their class; the code is never run.
    settings |= {"quantization_config": FP8, "auto_map": {"AutoModelForCausalLM": "modeling.Own"}, "model_type": "own"}
    (root / "fp8" / "config.json").write_text(json.dumps(settings))
    (root / "fp8" / "modeling.py").write_text("raise SystemExit")
    return root / "fp8", root / "plain"


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 256), (300, 130)])
def test_an_element_is_its_value_times_its_scale(shape: tuple[int, int]) -> None:
    values, scales = quantized(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    whole, want = Box.whole(shape), restored(values, scales)
    assert torch.equal(dequantized(values, scales, stored_rows(whole, whole), 0), want)
    for low, high in ((0, shape[1]), (shape[1] // 3, shape[1]), (shape[1] // 2, shape[1] // 2 + 1)):
        part = Box((shape[0] // 2, low), (shape[0] - shape[0] // 2, high - low))
        found = dequantized(values[part.slices], scales, stored_rows(whole, part), low)
        assert torch.equal(found, want[part.slices])


def test_rows_of_a_part_in_the_parameter_s_dims() -> None:
    """A stored matrix [12, 5] that is [2, 3, 2, 5] of its parameter, at group 4."""
    region = Box((4, 1, 0, 0), (2, 3, 2, 5))
    part = Box((5, 2, 0, 1), (1, 2, 2, 3))
    rows = torch.arange(12).view(2, 3, 2)
    assert torch.equal(stored_rows(region, part), rows[1:, 1:].flatten())


@pytest.mark.parametrize("pieces", [1, 3])
def test_every_parameter_is_the_one_of_the_plain_folder(pieces: int, folders: tuple[Path, Path]) -> None:
    architecture, sizes = published(folders[0])
    coded, plain = HfFolder(folders[0]), HfFolder(folders[1])
    assert coded.quantized == {"FP8": sum("proj" in name for name in plain.tensors)}
    assert set(coded.tensors) == set(plain.tensors)
    assert coded.check(table_of(sizes), architecture) == []
    for spec in table_of(sizes):
        numel = max(1, -(-spec.numel // pieces))
        for box in Box.whole(spec.shape).slabs(numel):
            ours, theirs = (torch.empty(box.sizes) for _ in range(2))
            coded.fill(ours, spec, box, architecture)
            plain.fill(theirs, spec, box, architecture)
            assert torch.equal(ours, theirs), (spec.name, box)
    columns = table_of(sizes)
    for spec in (spec for spec in columns if spec.name.endswith("proj.weight")):  # a rank of mp has columns of it
        box = Box((0, 50), (spec.shape[0], 101))
        ours, theirs = (torch.empty(box.sizes) for _ in range(2))
        coded.fill(ours, spec, box, architecture)
        plain.fill(theirs, spec, box, architecture)
        assert torch.equal(ours, theirs), spec.name


def test_a_run_has_the_logits_of_the_plain_folder(folders: tuple[Path, Path]) -> None:
    found = [run_ranks(1, _logits, "moe", ["--load-hf", str(folder)], group=False)[0] for folder in folders]
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0][0], found[1][0])


def test_it_is_written_in_bf16_without_the_setting(folders: tuple[Path, Path], tmp_path: Path) -> None:
    done = hf_to_megapar(folders[0], tmp_path / "made")
    assert done.quantized["FP8"] > 0
    assert done.carried == ()
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    plain, back = (load_file(folder / "model.safetensors") for folder in (folders[1], tmp_path / "back"))
    assert {name: tensor.dtype for name, tensor in back.items()} == dict.fromkeys(plain, torch.bfloat16)
    assert all(torch.equal(back[name], tensor.bfloat16()) for name, tensor in plain.items())
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in settings
    assert not (tmp_path / "back" / "modeling.py").exists()


def test_tensors_without_a_place_are_carried_along_in_bf16(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    values, scales = quantized(torch.randn(140, 130))
    tensors |= {"model.layers.2.extra.weight": values, "model.layers.2.extra.weight_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert hf_to_megapar(folder, tmp_path / "made").carried == ("model.layers.2.extra.weight",)
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["model.layers.2.extra.weight"], restored(values, scales).bfloat16())
    assert not [name for name in back if name.endswith("_scale_inv")]


def test_the_class_is_known_by_its_name(folders: tuple[Path, Path]) -> None:
    assert published(folders[0])[0] == ARCHITECTURES["Qwen3MoeForCausalLM"]
    assert parse("moe", ["--load-hf", str(folders[0]), "--seq-length", "16"], {}).model.vocab_size == 67


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(f"{NAME}_scale_inv"), f"lacks its scales {NAME}_scale_inv"),
    "too few": (
        lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(2, 2)}),
        r"q_proj.weight_scale_inv is F32 \(2, 2\), where F32 \(3, 2\) is needed",
    ),
    "another dtype": (
        lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(3, 2, dtype=torch.bfloat16)}),
        r"q_proj.weight_scale_inv is BF16 \(3, 2\), where F32 \(3, 2\) is needed",
    ),
    "no matrix": (
        lambda tensors: tensors.update({NAME: torch.zeros(4, 76, 152).to(torch.float8_e4m3fn)}),
        r"is in FP8 and has shape \(4, 76, 152\), not that of a matrix",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_scales_that_do_not_fit_are_named(damage: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    change, message = DAMAGE[damage]
    folder = shutil.copytree(folders[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        HfFolder(folder)
    with pytest.raises(CheckpointError, match=message):
        hf_to_megapar(folder, tmp_path / "out")
