"""Published models in and out: every tensor's bytes come back, logits agree, damage is named and leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megapar.arguments import Config, parse
from megapar.checkpoints.export.export import collect_all
from megapar.checkpoints.export.from_hf import hf_to_megapar, load_hf, published
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import train as train_tokenizer
from megapar.errors import CheckpointError, ConfigError
from megapar.files.location import Location, Place, at, read_locally
from megapar.model.decoder.model import Decoder
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.model import Ernie
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.hugging_face.save import save_hf
from megapar.tools.main import main
from megapar.trainer import Outcome, train
from megapar.training.building.parallelize import parallelize
from megapar.training.step.job import Job
from tests.model import small
from tests.support.damage import flip_bit
from tests.support.ranks import run_ranks
from tests.support.stores import copied, in_objects, names

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
ERNIE_MOE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
GRANITE = {
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 1.7}
}
LATENT = {
    **{"q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 16},
    **{"first_k_dense_replace": 1, "num_key_value_heads": 4, "pad_token_id": 0},
}
GLM = {
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
    **{"first_k_dense_replace": 1, "head_dim": 12, "attention_bias": True, "use_qk_norm": True},
}
SHARED = {**DECODER, **QWEN, "shared_expert_intermediate_size": 24}
SMALL_EXPERTS = {**DECODER, "intermediate_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "DeepseekV2": {**SIZES, **LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.5},
    "DeepseekV3": {**SIZES, **LATENT, "n_group": 3, "topk_group": 2},
    "ErnieForPreTraining": {**SIZES, "use_task_id": True},
    "ErnieForMaskedLM": SIZES,
    "Ernie4_5": {**DECODER, "head_dim": 12, "use_bias": True},
    "Ernie4_5_Moe": {**DECODER, **ERNIE_MOE},
    "Glm4Moe": {**DECODER, **GLM, "routed_scaling_factor": 1.5},
    "Granite": {**DECODER, **GRANITE},
    "Llama": {**DECODER, "head_dim": 12, "attention_bias": True, "mlp_bias": True},
    "Mistral": {**DECODER, "sliding_window": None},
    "Mixtral": {**DECODER, "num_local_experts": 4},
    "Olmo2": {**DECODER, "head_dim": 12},
    "Olmo3": {**DECODER, "sliding_window": 5},
    "Gemma3": {**DECODER, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 20},
    "SmolLM3": {**DECODER, "no_rope_layer_interval": 2},
    "Qwen2": DECODER,
    "Qwen3": {**DECODER, "head_dim": 12},
    "Qwen2Moe": {**SHARED, "norm_topk_prob": False},
    "Qwen2Moe with dense layers": {**SHARED, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "Ernie4_5_Moe with every second": {
        **{**DECODER, **ERNIE_MOE, "num_hidden_layers": 5},
        **{"moe_layer_interval": 2, "moe_layer_end_index": 3},
    },
    "Olmoe": {**SMALL_EXPERTS, "num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {
        **{**SMALL_EXPERTS, "num_local_experts": 4, "attention_multiplier": 0.3, "embedding_multiplier": 2.5},
        **{"residual_multiplier": 0.7, "logits_scaling": 1.5},
    },
    "GptOss": {**SMALL_EXPERTS, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
    "Qwen3Moe": {**DECODER, **QWEN, "head_dim": 12, "mlp_only_layers": [0]},
}


def _model(name: str) -> Any:
    """A model of transformers with the settings of that name, which begins with its class."""
    family = name.partition(" ")[0]
    head = "" if "For" in family else "ForCausalLM"
    kind = getattr(transformers, f"{family}{head}")
    return kind(kind.config_class(**SETTINGS[name]))


MODELS: dict[str, Callable[[], Any]] = {name: partial(_model, name) for name in SETTINGS}
UNUSUAL = {
    "Mixtral top-1": ("Mixtral", {"num_experts_per_tok": 1}),
    "Qwen3Moe unnormalized": ("Qwen3Moe", {"norm_topk_prob": False}),
    "Qwen3Moe top-1": ("Qwen3Moe", {"num_experts_per_tok": 1}),
    "Qwen3Moe top-1 unnormalized": ("Qwen3Moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "Ernie4_5_Moe top-1": ("Ernie4_5_Moe", {"moe_k": 1}),
}
"""The weights of another class, with another way to use them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every family, biases and norms off their trivial values; shards of 20 kB, bf16 where it is mixed."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, make in MODELS.items():
        model = make().eval()
        with torch.no_grad():
            for key, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_floating_point() and (tensor.ndim == 1 or "statics" in key) and "inv_freq" not in key:
                    tensor.add_(0.05 * torch.randn(tensor.shape))
        model.save_pretrained(root / name, max_shard_size="20KB")
    return {name: root / name for name in MODELS}


def _with(setting: dict[str, Any], source: Path, target: Path) -> Path:
    """A copy of a folder with these settings in its config.json."""
    config = shutil.copytree(source, target) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | setting))
    return target


def _kind(name: str) -> str:
    return "ernie" if name.startswith("ErnieFor") else "moe"


def _tensors(folder: Place) -> dict[str, tuple[str, str]]:
    found = {}
    with read_locally(at(folder)) as place:
        for path in sorted(place.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_tensor(name)
                    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                    found[name] = str(tensor.dtype), hashlib.sha256(raw).hexdigest()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_way_there_and_back_gives_every_tensor(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    done = hf_to_megapar(folders[name], tmp_path / "made")
    assert done.carried == ()
    megapar_to_hf(tmp_path / "made", tmp_path / "back", shard_bytes=20_000)
    assert _tensors(tmp_path / "back") == _tensors(folders[name])
    assert (tmp_path / "back" / "config.json").read_bytes() == (folders[name] / "config.json").read_bytes()
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    kind = getattr(transformers, published(folders[name])[0].name)
    _, info = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    there, back = (_expected(name, folder) for folder in (folders[name], tmp_path / "back"))
    for a, b in zip(there, back, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_dtypes_are_kept_and_unknown_tensors_carried_along(
    folders: dict[str, Path], tmp_path: Path, store_root: Location
) -> None:
    source = tmp_path / "mixed"
    shutil.copytree(folders["Ernie4_5_Moe"], source)
    tensors: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (source / "model.safetensors.index.json").unlink()
    exact = ("gate.weight", "e_score_correction_bias")
    tensors = {k: t if k.endswith(exact) else t.bfloat16() for k, t in tensors.items()}
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].half()
    tensors["model.mtp_block.0.weight"] = torch.arange(6, dtype=torch.int32).view(2, 3)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (source / "modeling.py").write_text("raise SystemExit")
    done = hf_to_megapar(source, store_root / "made")
    assert done.carried == ("model.mtp_block.0.weight",)
    megapar_to_hf(store_root / "made", store_root / "back", shard_bytes=20_000)
    assert _tensors(store_root / "back") == _tensors(source)
    assert {"tokenizer.json", "model.safetensors.index.json"} <= {*(store_root / "back").list()}
    assert "modeling.py" not in (store_root / "back").list()
    megapar_to_hf(store_root / "made", store_root / "half", dtype=torch.float16)
    kinds = {kind for name, (kind, _) in _tensors(store_root / "half").items() if not name.endswith(exact)}
    assert kinds == {"torch.float16", "torch.int32"}


def test_multi_token_prediction_is_part_of_the_model_where_the_folder_has_it(tmp_path: Path) -> None:
    sizes = replace(small.MOE, mtp_depth=1)
    model = small.build(sizes)
    save_hf(tmp_path / "folder", sizes, ((n, t.detach()) for n, t in small.named_tensors(model)), torch.float32)
    assert hf_to_megapar(tmp_path / "folder", tmp_path / "made").carried == ()
    megapar_to_hf(tmp_path / "made", tmp_path / "back")
    assert _tensors(tmp_path / "back") == _tensors(tmp_path / "folder")
    line = ["--load-hf", str(tmp_path / "folder"), "--seq-length", "16"]
    parsed = parse("moe", line, {})
    assert parsed.model.mtp_depth == 1
    assert parse("moe", [*line, "--mtp-depth", "0"], {}).model.mtp_depth == 0
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "mtp" not in name}
    save_file(kept, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    assert published(tmp_path / "folder")[1].mtp_depth == 0  # type: ignore[union-attr]


def _inputs(sizes: DecoderSizes | ErnieSizes | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(67, (2, 16), generator=generator)
    inputs = {"tokens": tokens, "positions": torch.arange(16).expand(2, 16)}
    if not isinstance(sizes, DecoderSizes):
        inputs["token_types"] = torch.randint(2, tokens.shape, generator=generator)
        inputs["task_types"] = torch.zeros_like(tokens)
    return inputs


Logits = tuple[Tensor, Tensor | None]


@contextmanager
def _job(rank: int, world_size: int, rendezvous: str, kind: str, flags: list[str]) -> Iterator[tuple[Config, Job]]:
    with patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}):
        config = parse(kind, [*flags, "--data-path", "mock", "--seq-length", "16"], dict(os.environ))
        world = World.start(config.grid, pick("cpu", 0), timedelta(seconds=60), f"file://{rendezvous}")
        yield config, parallelize(config, world)
        world.close()


def _logits(rank: int, world_size: int, rendezvous: str, kind: str, flags: list[str]) -> Logits | None:
    """(word logits [B, S, V], sentence-order logits or None) of ``_inputs``, from the rank that has the heads."""
    with _job(rank, world_size, rendezvous, kind, flags) as (config, job):
        load_hf(Path(config.checkpoint.load_hf), job)
        job.sharding.wait()
        job.model.eval()
        with torch.no_grad():
            return _of_whole(job.model) if job.pipeline is None else _of_pipeline(job)


def _of_whole(model: Decoder | Ernie) -> Logits:
    found = model.logits(_inputs(model.sizes))
    return found if isinstance(found, tuple) else (found, None)


def _of_pipeline(job: Job) -> Logits | None:
    """What the heads behind the last chunk are called with in an evaluation, turned into logits."""
    model, seen = job.model, {}
    for name in ("lm_head", "sop_head"):
        head = getattr(model, name, None)
        if head is not None:
            head.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
    batch = _inputs(model.sizes)
    samples, length = batch["tokens"].shape
    places = torch.arange(samples * length)
    batch |= {"labels": batch["tokens"], "sop_labels": torch.zeros(samples, dtype=torch.int64)}
    batch |= {"masked_index": places, "masked_labels": places * 0}
    job.pipeline.evaluate(batch, samples * length)
    if not seen or model.lm_head is None:
        return None
    x = seen["lm_head"][0] if isinstance(model, Decoder) else seen["lm_head"]
    order = model.sop_head.logits(seen["sop_head"]) if "sop_head" in seen else None
    return model.lm_head.logits(x, model.tied_weight).reshape(samples, length, -1), order


def _expected(name: str, folder: Path) -> Logits:
    model = getattr(transformers, published(folder)[0].name).from_pretrained(folder).eval()
    with torch.no_grad():
        if not name.startswith("ErnieFor"):
            return model(input_ids=_inputs()["tokens"]).logits, None
        inputs = _inputs()
        found = model(input_ids=inputs["tokens"], token_type_ids=inputs["token_types"])
        if name == "ErnieForMaskedLM":
            return found.logits, None
        return found.prediction_logits, found.seq_relationship_logits


LAYOUTS = {
    "one process": (1, []),
    "mp 2": (2, ["--mp-degree", "2"]),
    "pp 2": (2, ["--pp-degree", "2", "--global-batch-size", "4", "--micro-batch-size", "1"]),
    "ep 2": (2, ["--ep-degree", "2"]),
    "mp 2, sharding 2": (4, ["--mp-degree", "2", "--sequence-parallel", "--sharding-stage", "2"]),
}
DENSE = frozenset(name for name in MODELS if "moe" not in name.lower()) - {"DeepseekV2", "DeepseekV3", "Mixtral"}


# Whether ranks of mp share sequences makes no difference to what each loads, nor which model has the stages of a
# pipeline, so one dense and one other model do.
WITHOUT_SEQUENCES = ("ErnieForMaskedLM", "Llama", "Qwen3Moe")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            *(name, layout),
            marks=[pytest.mark.table] if layout in ("mp 2", "pp 2") and name not in WITHOUT_SEQUENCES else [],
        )
        for name in MODELS
        for layout in LAYOUTS
        if not (name in DENSE and layout == "ep 2")
    ],
)
def test_logits_on_every_layout(name: str, layout: str, folders: dict[str, Path]) -> None:
    world_size, flags = LAYOUTS[layout]
    results = run_ranks(world_size, _logits, _kind(name), ["--load-hf", str(folders[name]), *flags], group=False)
    (words, order), (their_words, their_order) = next(filter(None, results)), _expected(name, folders[name])
    assert float((words - their_words).abs().max()) <= 1e-5
    if their_order is not None:
        assert float((order - their_order).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", UNUSUAL)
def test_logits_of_routing_that_config_json_chooses(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    source, setting = UNUSUAL[name]
    folder = _with(setting, folders[source], tmp_path / "model")
    words = run_ranks(1, _logits, "moe", ["--load-hf", str(folder)], group=False)[0][0]
    assert float((words - _expected(source, folder)[0]).abs().max()) <= 1e-5


def _masters(rank: int, world_size: int, rendezvous: str, flags: list[str]) -> dict[str, Tensor]:
    with _job(rank, world_size, rendezvous, "moe", flags) as (config, job):
        load_hf(Path(config.checkpoint.load_hf or ""), job)
        masters = [shard.master for shard in job.sharding.master_shards]
        return dict(collect_all(job.world, job.table, job.sharding, masters))


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2", "Qwen3Moe"])
def test_pieces_of_rotated_tensors(name: str, folders: dict[str, Path]) -> None:
    """Sharding cuts where it likes, also inside of heads whose rows stand in another order in the files."""
    source = ["--load-hf", str(folders[name])]
    one = run_ranks(1, _masters, source, group=False)[0]
    experts = [] if name in DENSE else ["--ep-degree", "2"]
    for flags in (["--sharding-stage", "3", *experts], ["--sharding-stage", "2", "--mp-degree", "2"]):
        other = run_ranks(4, _masters, [*source, *flags], group=False)[0]
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def _run(kind: str, flags: list[str], tmp_path: Path, iterations: int = 2) -> Outcome:
    batch = "--micro-batch-size 1 --global-batch-size 2 --seq-length 16 --data-path mock --eval-interval 0"
    steps = f"--train-iters {iterations} --lr-decay-iters 2 --lr 1e-9"
    config = parse(kind, [*flags, *batch.split(), *steps.split()], {})
    return train(config, f"file://{tmp_path / 'meet'}", keep_records=True)


@pytest.mark.parametrize("name", ["Qwen3Moe", "ErnieForMaskedLM"])
def test_a_run_from_a_converted_checkpoint_starts_at_zero_and_is_resumed(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    kind, made = _kind(name), str(tmp_path / "made")
    hf_to_megapar(folders[name], made)
    load = ["--load", made, "--save", made]
    direct = _run(kind, ["--load-hf", str(folders[name])], tmp_path, iterations=1)
    first = _run(kind, load, tmp_path, iterations=1)
    assert [record.loss for record in first.records] == [record.loss for record in direct.records]
    assert first.iteration == 1
    second = _run(kind, [*load, "--save-hf", str(tmp_path / "out")], tmp_path)
    assert [record.iteration for record in second.records] == [2]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [{"Qwen3Moe": "Qwen3MoeForCausalLM"}.get(name, "ErnieForPreTraining")]
    with pytest.raises(ConfigError, match=r"--hidden-size 64 contradicts --load .*made \(its hf/config.json\): 32"):
        _run(kind, [*load, "--hidden-size", "64"], tmp_path)


def test_one_script_starts_from_a_folder_and_goes_on_from_its_checkpoints(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    runs = str(tmp_path / "runs")
    flags = ["--load-hf", str(folders["Mixtral"]), "--load", runs, "--save", runs]
    assert [[record.iteration for record in _run("moe", flags, tmp_path, n).records] for n in (1, 2)] == [[1], [2]]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "ErnieForMaskedLM"])
def test_training_from_a_model_writes_its_architecture(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    kind = _kind(name)
    _run(kind, ["--load-hf", str(folders[name]), "--save-hf", str(tmp_path / "out")], tmp_path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = "ErnieForPreTraining" if kind == "ernie" else published(folders[name])[0].name
    assert config["architectures"] == [expected]
    model, info = getattr(transformers, expected).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if kind == "moe":
        before = getattr(transformers, expected).from_pretrained(folders[name])
        tokens = _inputs()["tokens"]
        with torch.no_grad():
            a, b = (m.eval()(input_ids=tokens).logits for m in (model, before))
        assert float((a - b).abs().max()) < 1e-4


def _edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(source, target)
    path = sorted(target.glob("*.safetensors"))[0]
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return target


def test_damage_is_named_and_leaves_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["Mixtral"]
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    victim = next(name for name, file in sorted(index.items()) if file == min(index.values()))

    def misshape(tensors: dict[str, Tensor]) -> None:
        tensors[victim] = tensors[victim][..., :-1].contiguous()

    cases = {
        f"{victim} has shape": _edited(source, tmp_path / "misshaped", misshape),
        f"lacks {victim}": _edited(source, tmp_path / "missing", lambda tensors: tensors.__delitem__(victim)),
    }
    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    with open(cut / min(index.values()), "r+b") as file:
        file.truncate(os.path.getsize(file.name) - 10)
    cases["is damaged"] = cut
    gone = tmp_path / "gone"
    shutil.copytree(source, gone)
    (gone / min(index.values())).unlink()
    cases[f"lacks {min(index.values())}"] = gone
    for message, folder in cases.items():
        with pytest.raises((CheckpointError, ConfigError), match=message.replace(".", r"\.")):
            hf_to_megapar(folder, tmp_path / "out")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"misshaped", "missing", "cut", "gone"}


def test_a_damaged_checkpoint_is_not_exported(folders: dict[str, Path], store_root: Location) -> None:
    hf_to_megapar(folders["Mixtral"], store_root / "made")
    flip_bit(store_root / "made" / "iter_0000000" / "shard-00000.safetensors", 5000)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        megapar_to_hf(store_root / "made", store_root / "out")
    assert names(store_root) == ["made"]
    with pytest.raises(CheckpointError, match="already exists"):
        hf_to_megapar(folders["Mixtral"], store_root / "made")


def test_flags_that_contradict_the_model_are_complaints(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"--hidden-size 64 contradicts --load-hf .*: 32"):
        parse("moe", ["--load-hf", str(folders["Mixtral"]), "--seq-length", "16", "--hidden-size", "64"], {})
    with pytest.raises(ConfigError, match=r"is a model for pretrain_moe.py, not for pretrain_ernie.py"):
        parse("ernie", ["--load-hf", str(folders["Mixtral"]), "--seq-length", "16"], {})
    config = parse("moe", ["--load-hf", str(folders["Qwen3Moe"]), "--seq-length", "16"], {})
    assert (config.model.qk_norm, config.model.head_dim, config.model.first_k_dense) == (True, 12, 1)
    assert config.origins["hidden_size"] == "derived"


def test_the_command(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, back = str(tmp_path / "made"), str(tmp_path / "back")
    assert main(["convert", "hf-to-megapar", str(folders["Mixtral"]), made]) == 0
    assert "MixtralForCausalLM" in capsys.readouterr().out
    assert main(["convert", "megapar-to-hf", made, back]) == 0
    for name, ids in (("small", 60), ("large", 400)):
        words = (f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx")
        (tmp_path / name).write_bytes(train_tokenizer([" ".join(words)] * 3, ids))
    tokenizer = ["--tokenizer-model", str(tmp_path / "small")]
    assert main(["convert", "megapar-to-hf", made, back + "3", *tokenizer]) == 0
    assert len(transformers.AutoTokenizer.from_pretrained(back + "3")) == load_tokenizer(str(tmp_path / "small")).size
    assert main(["convert", "megapar-to-hf", made, back + "4", "--tokenizer-model", str(tmp_path / "large")]) == 2
    assert "ids and the model" in capsys.readouterr().err
    assert main(["convert", "megapar-to-hf", str(tmp_path / "nothing"), back + "2"]) == 2
    assert "nothing has no checkpoint" in capsys.readouterr().err


def test_a_model_in_an_object_store_is_that_on_a_disk(folders: dict[str, Path], tmp_path: Path) -> None:
    model, made, back = in_objects(), in_objects(), in_objects()
    copied(folders["Qwen3Moe"], model)
    assert main(["convert", "hf-to-megapar", str(model), str(made)]) == 0
    assert main(["convert", "megapar-to-hf", str(made), str(back)]) == 0
    assert _tensors(back) == _tensors(folders["Qwen3Moe"])
    runs = [_run("moe", ["--load-hf", str(place)], tmp_path, 1) for place in (folders["Qwen3Moe"], model)]
    assert [record.loss for record in runs[0].records] == [record.loss for record in runs[1].records]
    with pytest.raises(ConfigError, match=f"The sizes of the model are in --load-hf {model}, and --validate-only asks"):
        parse("moe", ["--load-hf", str(model), "--validate-only"], {})
    with pytest.raises(ConfigError, match=r"contains no config\.json"):
        parse("moe", ["--load-hf", str(in_objects())], {})


@pytest.mark.parametrize("target", ["/etc/hostname", "../secret.txt"])
def test_no_file_from_outside_of_the_folder_is_copied(target: str, folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    source = shutil.copytree(folders["Ernie4_5"], tmp_path / "source")
    (source / "inside.txt").symlink_to("config.json")
    hf_to_megapar(source, tmp_path / "allowed")
    (source / "notes.txt").symlink_to(target)
    with pytest.raises(CheckpointError, match=f"notes.txt is a link to {target}, which is not in that folder"):
        hf_to_megapar(source, tmp_path / "checkpoint")
    (tmp_path / "allowed" / "hf" / "notes.txt").symlink_to(target)
    with pytest.raises(CheckpointError, match="is a link to"):
        megapar_to_hf(tmp_path / "allowed", tmp_path / "back")
    assert not (tmp_path / "checkpoint").exists()
    assert not (tmp_path / "back").exists()


def test_a_snapshot_in_the_cache_of_the_hub_is_converted(folders: dict[str, Path], tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1a2b"
    shutil.copytree(folders["Ernie4_5"], blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    hf_to_megapar(snapshot, tmp_path / "checkpoint")
    copied = tmp_path / "checkpoint" / "hf" / "config.json"
    assert not copied.is_symlink()
    assert copied.read_bytes() == (blobs / "config.json").read_bytes()


def test_peak_memory_is_two_tensors(tmp_path: Path) -> None:
    """A model of 60 MB, 13 MB of it a layer's experts, whose largest tensor has 8 MB: converting adds less than two.

    Blocks are smaller than they are elsewhere, so that they do not hide what tensors take.
    """
    sizes = {**DECODER, "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
    model.save_pretrained(tmp_path / "model")
    del model
    # ru_maxrss of a new process begins at that of the one it was forked from; VmHWM is its own.
    code = (
        "import sys, torch\n"
        "from megapar.checkpoints.export.from_hf import hf_to_megapar, published\n"
        "from megapar.checkpoints.export.to_hf import megapar_to_hf\n"
        "def peak():\n"
        "    return next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
        "import megapar.checkpoints.format.shards as shards\n"
        "shards.BLOCK_BYTES = 1 << 20\n"
        "published(sys.argv[1])\n"
        "x = torch.zeros(1 << 20).sum()\n"
        "before = peak()\n"
        "hf_to_megapar(sys.argv[1], sys.argv[2])\n"
        "megapar_to_hf(sys.argv[2], sys.argv[3])\n"
        "print(peak() - before)\n"
    )
    paths = [str(tmp_path / name) for name in ("model", "made", "back")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) * 1024 <= 2 * (8192 * 256 * 4)
