"""Folders of GPT-OSS in MXFP4: every weight is that of transformers, bit by bit, on every rank; damage is named."""

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
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megapar.checkpoints.export.from_hf import hf_to_megapar, published
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.core.box import Box
from megapar.errors import CheckpointError
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.hugging_face.tensors import reversed_dims, unpacked
from megapar.model.spec import table_of
from tests.checkpoints.export.test_convert import _logits
from tests.support.ranks import run_ranks

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def drawn(experts: int, inputs: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """(blocks, scales) of a tensor, of moderate numbers."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(120, 126, blocks.shape[:-1], generator=generator).to(torch.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GPT-OSS whose experts are in MXFP4, and the same weights in bf16 by transformers."""
    root = tmp_path_factory.mktemp("mxfp4")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{"vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 3},
        **{"num_experts_per_tok": 2, "initializer_range": 0.1, "sliding_window": 5},
    )
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "plain")
    shutil.copytree(root / "plain", root / "packed")
    plain, stored = load_file(root / "plain" / "model.safetensors"), {}
    for number, (name, tensor) in enumerate(plain.items()):
        stored[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = drawn(*tensor.shape, number)
            plain[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    save_file(plain, root / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, root / "packed" / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((root / "packed" / "config.json").read_text()) | {"quantization_config": MXFP4}
    (root / "packed" / "config.json").write_text(json.dumps(settings))
    return root / "packed", root / "plain"


def test_every_code_with_every_scale_has_the_bits_of_transformers() -> None:
    """The largest overflow, the smallest vanish, and 0 with the largest scale is NaN, there and here."""
    blocks = torch.arange(256).to(torch.uint8).view(1, 16, 1, 16).expand(256, 16, 1, 16).contiguous()
    scales = torch.arange(256).to(torch.uint8).view(256, 1, 1).expand(256, 16, 1).contiguous()
    found, want = unpacked(blocks, scales), convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert found.shape == want.shape == (256, 16, 32)
    assert torch.equal(found.contiguous().view(torch.int16), want.contiguous().view(torch.int16))
    assert (found[127, 0, :4] == torch.tensor([0.0, 0.0, 0.5, 0.0])).all(), "the low bits are the first number"


@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_every_parameter_is_the_one_of_the_plain_folder(pieces: int, folders: tuple[Path, Path]) -> None:
    architecture, sizes = published(folders[0])
    packed, plain = HfFolder(folders[0]), HfFolder(folders[1])
    assert packed.quantized == {"MXFP4": 4}
    assert {name: (t.code, t.shape) for name, t in packed.tensors.items()} == {
        name: (t.code, t.shape) for name, t in plain.tensors.items()
    }
    assert packed.check(table_of(sizes), architecture) == []
    for spec in table_of(sizes):
        for box in Box.whole(spec.shape).slabs(max(1, -(-spec.numel // pieces))):
            ours, theirs = (torch.empty(box.sizes) for _ in range(2))
            packed.fill(ours, spec, box, architecture)
            plain.fill(theirs, spec, box, architecture)
            assert torch.equal(ours, theirs), (spec.name, box)


def test_a_part_of_an_expert_is_where_transformers_has_it(folders: tuple[Path, Path]) -> None:
    """Rows of up of the second expert: gate and up of a feature are beside each other in the folder."""
    architecture, sizes = published(folders[1])
    spec = next(spec for spec in table_of(sizes) if spec.name == "layers.0.moe.experts.gate_up")
    found, stored = torch.empty(1, 1, 10, 20), load_file(folders[1] / "model.safetensors")[NAME]
    HfFolder(folders[1]).fill(found, spec, Box((1, 1, 7, 30), (1, 1, 10, 20)), architecture)
    assert torch.equal(found[0, 0], stored[1, 30:50, 1::2][:, 7:17].T.float())
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(reversed_dims(x)[1, 4, 3], x[1, :, 3, 4])
    assert torch.equal(reversed_dims(reversed_dims(x)), x)


def test_square_experts_are_transposed_too(tmp_path: Path) -> None:
    """Both widths of the published ones are 2,880: their shapes do not say in which order the dims are."""
    config = transformers.GptOssConfig(
        **{"vocab_size": 67, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    )
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    architecture, sizes = published(tmp_path)
    spec = next(spec for spec in table_of(sizes) if spec.name == "layers.0.moe.experts.down")
    found, stored = torch.empty(spec.shape), load_file(tmp_path / "model.safetensors")
    HfFolder(tmp_path).fill(found, spec, Box.whole(spec.shape), architecture)
    assert torch.equal(found, stored["model.layers.0.mlp.experts.down_proj"].transpose(1, 2))


def test_a_run_has_the_logits_of_the_plain_folder(folders: tuple[Path, Path]) -> None:
    found = [run_ranks(1, _logits, "moe", ["--load-hf", str(folder)], group=False)[0] for folder in folders]
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0][0], found[1][0])


def test_it_is_written_in_bf16_without_the_setting(folders: tuple[Path, Path], tmp_path: Path) -> None:
    done = hf_to_megapar(folders[0], tmp_path / "made")
    assert (done.quantized, done.carried) == ({"MXFP4": 4}, ())
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    plain, back = (load_file(folder / "model.safetensors") for folder in (folders[1], tmp_path / "back"))
    assert {*back} == {*plain}
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in plain.items())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}_scales"), f"{NAME} is in MXFP4 and its scales {NAME}_scales are None"),
        (lambda t: t.update({f"{NAME}_scales": t[f"{NAME}_scales"][:, 1:]}), r"_scales are \('U8', \(3, 191, 2\)\)"),
        (lambda t: t.update({f"{NAME}_blocks": t[f"{NAME}_blocks"][..., :8]}), "experts, rows, blocks and 16 bytes"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], message: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        HfFolder(folder)
