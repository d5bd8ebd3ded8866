"""The doors out: what a published class cannot be is refused by all of them, and what goes out computes the same."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megapar.arguments import FLAGS, parse, resolved_values
from megapar.checkpoints.export.export import UNDROPPED
from megapar.checkpoints.export.from_hf import hf_to_megapar
from megapar.checkpoints.export.to_hf import megapar_to_hf
from megapar.compatibility import RULES, check
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import train as train_tokenizer
from megapar.data.tokenizers.tokenizer import NoTokenizer, token_ids
from megapar.errors import CheckpointError, ConfigError
from megapar.model.architectures import ARCHITECTURES
from megapar.model.decoder.published import OWN, PUBLISHED
from megapar.rules.model import EXPORTS, LIMITS, UNREACHED
from megapar.tools.main import main
from megapar.trainer import Outcome, train
from megapar.training.reports.terminal import PlainTerminal
from tests.checkpoints.export.test_convert import MODELS, SIZES
from tests.flags.table import other
from tests.model.test_architectures import settings_of

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 48 --vocab-size 67 "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --init-std 0.2"
)
BATCH = "--micro-batch-size 1 --global-batch-size 2 --seq-length 16 --eval-interval 0 --lr-decay-iters 2 --dtype fp32"
CANNOT = {
    "--qk-norm --moe-shared-experts 1": "no shared experts (moe_shared_experts 1",
    "--qk-norm --moe-router-score-function sigmoid": "has shared experts (moe_shared_experts 0",
    "--qk-norm --moe-router-topk-scaling-factor 2.5": "moe_router_topk_scaling_factor 2.5",
    "--qk-norm --moe-router-num-groups 2 --moe-router-group-topk 1": "moe_router_num_groups 2",
    "--moe-router-topk 1": "moe_router_topk 1",
    "--no-norm-topk-prob": "norm_topk_prob off",
    "--qk-norm --add-bias-linear": "no biases (add_bias_linear on)",
    "--qk-norm --normalization layernorm": "normalization layernorm",
    "--qk-norm --position-embedding-type learned": "position_embedding_type learned",
    "--qk-norm --activation gelu": "activation gelu",
    "--qk-norm --mtp-depth 1": "--finetune --mtp-depth 0",
    "--mtp-depth 1 --mtp-block layer": "mtp_block layer",
    "--moe-router-score-function sigmoid --moe-shared-experts 1 --mtp-depth 1 --mtp-block dense": "mtp_block dense",
    "--moe-router-score-function sigmoid": "has shared experts (moe_shared_experts 0",
    "--num-layers 2 --moe-layer-ffn-hidden-sizes 16 8": "moe_layer_ffn_hidden_sizes 16 8",
    "--num-experts 0 --qk-norm --add-qkv-bias": "qk_norm on",
    "--num-experts 0 --qk-norm --add-bias-linear": "no biases in all linear layers (add_bias_linear on)",
    "--num-experts 0 --qk-norm --qk-norm-scope width": "qk_norm_scope width",
    "--num-experts 0 --norm-placement output": "norm_placement output",
    "--num-experts 0 --qk-norm --logits-scaling 8": "logits_scaling 8",
    "--add-qkv-bias": "no biases of queries, keys and values alone",
}


def small(flags: str) -> str:
    """The sizes that ``flags`` do not give themselves."""
    pairs = re.findall(r"(--\S+) (\S+)", SMALL)
    widths = ("--moe-ffn-hidden-size",) if "--moe-layer-ffn" in flags else ()
    kept = [pair for pair in pairs if pair[0] not in (*flags.split(), *widths)]
    if "--num-experts 0" in flags:
        kept = [pair for pair in kept if "moe" not in pair[0]]
    return " ".join(" ".join(pair) for pair in kept)


def run(flags: str, tmp_path: Path, iterations: int = 1, kind: str = "moe", data: str = "mock") -> Outcome:
    sizes = small(flags) if kind == "moe" and "--load-hf" not in flags and "/made" not in flags else ""
    line = f"{sizes} {BATCH} --train-iters {iterations} --lr 1e-3 --data-path {data} {flags}"
    return train(parse(kind, line.split(), {}), f"file://{tmp_path / 'meet'}", keep_records=True)


def logits(folder: Path) -> torch.Tensor:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = model.eval()(input_ids=tokens)
    return found.logits if "logits" in found else found.prediction_logits


@pytest.mark.parametrize("flags", CANNOT)
def test_what_the_class_cannot_be_is_refused_by_both_doors(flags: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        parse("moe", [*f"{small(flags)} {flags}".split(), "--save-hf", str(tmp_path / "out")], {})
    assert {one.rule for one in refused.value.complaints} <= {rule.id for rule in EXPORTS}
    assert all("keep every weight" in str(one) for one in refused.value.complaints)
    run(f"{flags} --save {tmp_path}/runs", tmp_path)
    with pytest.raises(CheckpointError) as error:
        megapar_to_hf(tmp_path / "runs", tmp_path / "out")
    assert CANNOT[flags] in str(error.value)
    assert "No supported class can represent it; the checkpoint keeps every weight" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--qk-norm",
        "--qk-norm --first-k-dense 1",
        "--head-dim 12",
        "--moe-shared-experts 1",
        "--num-experts 0 --qk-norm",
        "--num-experts 0 --add-qkv-bias",
        "--num-experts 0 --qk-norm --qk-norm-scope width --norm-placement output",
        "--num-experts 0 --softmax-scale 0.2 --residual-multiplier 0.6",
    ],
)
def test_both_doors_write_the_same_model_and_it_is_read_again(flags: str, tmp_path: Path) -> None:
    run(f"{flags} --save {tmp_path}/runs --save-hf {tmp_path}/direct", tmp_path)
    megapar_to_hf(tmp_path / "runs", tmp_path / "converted")
    direct = logits(tmp_path / "direct")
    assert torch.equal(direct, logits(tmp_path / "converted"))
    hf_to_megapar(tmp_path / "direct", tmp_path / "again")  # what --load-hf reads
    megapar_to_hf(tmp_path / "again", tmp_path / "again-out")
    assert torch.equal(direct, logits(tmp_path / "again-out"))
    config = parse("moe", ["--load-hf", str(tmp_path / "direct"), "--seq-length", "16"], {})
    assert config.model.head_dim == (12 if "head-dim" in flags else 8)
    assert config.model.qk_norm == ("qk-norm" in flags)


def test_evaluations_and_exports_say_how_far_they_are(tmp_path: Path) -> None:
    heard: list[tuple[str, int, int, str]] = []

    def hears(*now: Any) -> None:
        heard.append(now)

    with patch.object(PlainTerminal, "status", lambda self: nullcontext(hears)):
        run(f"--qk-norm --eval-interval 1 --eval-iters 2 --save-hf {tmp_path}/direct", tmp_path)
    assert heard[:4] == [("evaluating", done, 4, "samples") for done in (1, 2, 3, 4)]
    total = heard[4][2]
    assert heard[4:] == [("exporting", done, total, "tensors") for done in range(total)]
    heard.clear()
    hf_to_megapar(tmp_path / "direct", tmp_path / "made", hears)
    total = heard[0][2]
    assert heard == [("converting", done, total, "tensors") for done in range(total)]
    heard.clear()
    made = megapar_to_hf(tmp_path / "made", tmp_path / "out", status=hears)
    assert heard == [("converting", done, made.tensors, "tensors") for done in range(made.tensors)]


def beyond(ids: Collection[str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(class, limit) -> flags with which a model is saved as this class and is beyond this limit, the fewest ones.

    Each flag that decides on the class has each of its choices, or two values.
    """
    base, own = resolved_values("moe", ["--save-hf", "out"], {}), PUBLISHED.own
    names = dict.fromkeys(["qk_norm_scope", *(limit.reads[0] for form in OWN for limit in form.specific)])
    values = {name: FLAGS[name].choices or (base[name], other(FLAGS[name], "moe")) for name in names}
    values["num_experts"] = (base["num_experts"], 0)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for combination in itertools.product(*values.values()):
        flags = {name: value for name, value in zip(names, combination, strict=True) if value != base[name]}
        architecture = ARCHITECTURES[str(own({**base, **flags}))]
        for limit in architecture.limits:
            if limit.id in ids and not limit.within(SimpleNamespace(**{**base, **flags})):
                found.setdefault((architecture.name, limit.id), []).append(flags)
    return {
        place: [one for one in several if not any(less.items() < one.items() for less in several)]
        for place, several in found.items()
    }


def test_every_limit_has_an_example_or_no_model_is_beyond_it_alone() -> None:
    """Whatever is beyond a limit without an example, other rows refuse too: also a model that else fits the class."""
    without = {rule.id for rule in UNREACHED}
    assert without | {rule.id for rule in EXPORTS} == {limit.id for limit in LIMITS}
    assert not without & {rule.id for rule in RULES}
    default = resolved_values("moe", [], {})
    for (name, limit), several in beyond(without).items():
        fitting = {flag: value for flag, value in settings_of(name).items() if flag in FLAGS and value != default[flag]}
        for flags in several:
            with pytest.raises(ConfigError) as refused:
                parse("moe", {**fitting, **flags, "save_hf": "out"}, {})
            assert {one.rule for one in refused.value.complaints} - without, f"{limit} needs an example, as {flags}"


@pytest.mark.parametrize("latent", [(), ("--multi-latent-attention",)])
def test_a_score_that_no_class_has_is_refused_before_the_start(latent: tuple[str, ...]) -> None:
    values = resolved_values("moe", ["--save-hf", "out", *latent], {})
    refused = {complaint.rule for complaint in check({**values, "moe_router_score_function": "another"}).refused}
    assert refused & {"hf-softmax-scores", "hf-moe-routing"}


def test_without_its_prediction_block_a_model_with_norms_goes_out(tmp_path: Path) -> None:
    """The way that the refusal names."""
    run(f"--qk-norm --mtp-depth 1 --save {tmp_path}/runs", tmp_path)
    run(f"--qk-norm --mtp-depth 0 --load {tmp_path}/runs --finetune --save-hf {tmp_path}/out", tmp_path, iterations=0)
    assert logits(tmp_path / "out").shape == (2, 16, 67)


def test_the_published_prediction_block_is_trained_from_its_folder_and_goes_out(tmp_path: Path) -> None:
    """With its copies of embedding and head; or it is left out."""
    glm = "--moe-router-score-function sigmoid --moe-shared-experts 1 --untie-embeddings-and-output-weights"
    folders = {name: tmp_path / name for name in ("own", "out", "converted", "bare")}
    run(f"{glm} --mtp-depth 1 --save-hf {folders['own']}", tmp_path)
    rate = "--moe-router-bias-update-rate 0.01"
    run(f"--load-hf {folders['own']} {rate} --save {tmp_path}/runs --save-hf {folders['out']}", tmp_path)
    megapar_to_hf(tmp_path / "runs", folders["converted"])
    run(f"--load-hf {folders['own']} --mtp-depth 0 --save-hf {folders['bare']}", tmp_path)
    own, out, converted, bare = (load_file(folder / "model.safetensors") for folder in folders.values())
    assert own.keys() == out.keys() == converted.keys()
    assert all(torch.equal(out[name], converted[name]) for name in out)
    block, bias = "model.layers.2", "mlp.gate.e_score_correction_bias"
    for part in (
        "eh_proj.weight",
        "shared_head.norm.weight",
        "mlp.gate.weight",
        "mlp.shared_experts.up_proj.weight",
        bias,
    ):
        assert not torch.equal(own[f"{block}.{part}"], out[f"{block}.{part}"]), part
    for part, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(out[f"{block}.{part}.weight"], out[f"{original}.weight"])
    assert bare.keys() == {name for name in own if not name.startswith(f"{block}.")}
    counted = [
        json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] for folder in folders.values()
    ]
    assert counted == [1, 1, 1, 0]


def test_a_moved_correction_bias_goes_out_where_the_class_has_one(tmp_path: Path) -> None:
    moving = "--moe-router-bias-update-rate 0.01"
    run(f"--save-hf {tmp_path}/own", tmp_path)  # an Ernie4_5_Moe
    run(f"--load-hf {tmp_path}/own {moving} --save {tmp_path}/runs --save-hf {tmp_path}/out", tmp_path)
    megapar_to_hf(tmp_path / "runs", tmp_path / "converted")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "converted"))


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_a_moved_correction_bias_has_a_way_out_or_is_said_to_have_none(family: str, tmp_path: Path) -> None:
    MODELS[family]().save_pretrained(tmp_path / "hf")
    moving = f"--load-hf {tmp_path}/hf --moe-router-bias-update-rate 0.01"
    with pytest.raises(ConfigError, match="hf-router-bias"):
        parse("moe", f"{moving} --seq-length 16 --save-hf {tmp_path}/out".split(), {})
    hf_to_megapar(tmp_path / "hf", tmp_path / "made")
    moving = f"--load {tmp_path}/made --save {tmp_path}/made --moe-router-bias-update-rate 0.01"
    run(moving, tmp_path)
    if family == "Qwen3Moe":
        with pytest.raises(CheckpointError, match="No class known here has one; the checkpoint keeps every weight"):
            megapar_to_hf(tmp_path / "made", tmp_path / "out")
        return
    with pytest.raises(CheckpointError, match="Ernie4_5_MoeForCausalLM has one"):
        megapar_to_hf(tmp_path / "made", tmp_path / "out")
    (tmp_path / "made" / "hf").rename(tmp_path / "made" / "hf-before")
    assert megapar_to_hf(tmp_path / "made", tmp_path / "out").architecture.name == "Ernie4_5_MoeForCausalLM"
    assert logits(tmp_path / "out").shape == (2, 16, 67)


@pytest.mark.parametrize("name", ["ErnieForPreTraining", "ErnieForMaskedLM", "ErnieForMaskedLM with task types"])
def test_an_encoder_without_task_types_comes_back_after_training(name: str, tmp_path: Path) -> None:
    """hf-to-megapar, --load and --save of one folder, megapar-to-hf: both heads and task types were trained."""
    config = transformers.ErnieConfig(**SIZES, use_task_id="with" in name)
    getattr(transformers, name.partition(" ")[0])(config).save_pretrained(tmp_path / "hf")
    made = tmp_path / "made"
    hf_to_megapar(tmp_path / "hf", made)
    run(f"--load {made} --save {made} --save-hf {tmp_path}/direct", tmp_path, kind="ernie")
    megapar_to_hf(made, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["architectures"], written["use_task_id"]) == (["ErnieForPreTraining"], True)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "direct"))


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, Path]:
    """(text, a tokenizer of it)."""
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(words[i:] + words[:i]) for i in range(12)))
    (tmp_path / "mine.model").write_bytes(train_tokenizer([" ".join(words)] * 3, 60))
    return tmp_path / "text.txt", tmp_path / "mine.model"


def test_a_run_keeps_its_tokenizer_and_convert_writes_it(
    corpus: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, mine = corpus
    runs = tmp_path / "runs"
    run(f"--save {runs} --tokenizer-model {mine} --save-hf {tmp_path}/direct", tmp_path, data=f"{text} --split 100,0")
    own, line = load_tokenizer(mine), "aiq bjr chx"
    assert load_tokenizer(runs / "tokenizer").fingerprint() == own.fingerprint()
    assert not list(runs.glob(".tokenizer*"))
    assert main(["convert", "megapar-to-hf", str(runs), str(tmp_path / "out")]) == 0
    for folder in ("out", "direct"):
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / folder).encode(line) == own.encode(line)
    out, direct = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "direct"))
    assert {**out, "initializer_range": 0.2} == direct  # a checkpoint does not know of the first
    assert out["eos_token_id"] == own.special.eos
    capsys.readouterr()
    (runs / "tokenizer").rename(tmp_path / "away")
    assert main(["convert", "megapar-to-hf", str(runs), str(tmp_path / "without")]) == 0
    assert "no tokenizer was written" in capsys.readouterr().out


def test_another_tokenizer_in_the_same_folder_is_said_and_neither_is_lost(
    corpus: tuple[Path, Path], tmp_path: Path
) -> None:
    text, mine = corpus
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer([text.read_text()[:900]] * 3, 64))
    runs = tmp_path / "runs"
    for model, more in ((mine, ""), (mine, ""), (other, "--finetune")):
        line = f"--save {runs} --load {runs} --tokenizer-model {model} {more}"
        run(line, tmp_path, data=f"{text} --split 100,0")
    assert load_tokenizer(runs / "tokenizer").fingerprint() == load_tokenizer(other).fingerprint()
    (before,) = runs.glob("tokenizer-*")
    assert load_tokenizer(before).fingerprint() == load_tokenizer(mine).fingerprint()


def test_an_export_without_a_tokenizer_keeps_the_ids_of_the_folder_it_started_from() -> None:
    kept = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}
    published = json.loads(transformers.Ernie4_5Config(**kept).to_json_string())
    assert token_ids(NoTokenizer(67), published) == kept


def test_a_run_keeps_the_config_of_its_folder_but_for_what_it_changed(tmp_path: Path) -> None:
    more = {"use_task_id": True, "initializer_range": 0.3, "attention_probs_dropout_prob": 0.125}
    config = transformers.ErnieConfig(**SIZES | more)
    transformers.ErnieForMaskedLM(config).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    before = json.loads(path.read_text()) | {"note": "of its authors"}
    path.write_text(json.dumps(before))
    run(f"--load-hf {tmp_path}/hf --hidden-dropout 0.25 --save-hf {tmp_path}/out", tmp_path, kind="ernie")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")  # of the run's tokenizer
    changed = {"architectures": ["ErnieForPreTraining"], "hidden_dropout_prob": 0.25}
    assert after == before | changed | {name: after[name] for name in ids}


@pytest.mark.parametrize("family", ["Qwen3Moe", "Ernie4_5_Moe"])
def test_gates_are_written_in_fp32_where_the_class_keeps_them_so(family: str, tmp_path: Path) -> None:
    norms = "--qk-norm" if family == "Qwen3Moe" else ""
    run(f"{norms} --dtype bf16 --save {tmp_path}/runs --save-hf {tmp_path}/direct", tmp_path)
    megapar_to_hf(tmp_path / "runs", tmp_path / "converted", dtype=torch.bfloat16)
    for folder in ("direct", "converted"):
        tensors = load_file(tmp_path / folder / "model.safetensors")
        wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
        routers = {name for name in tensors if name.endswith(("gate.weight", "correction_bias"))}
        assert wide == (routers if family == "Ernie4_5_Moe" else set())
        assert logits(tmp_path / folder).isfinite().all()


def test_that_the_exported_model_drops_no_tokens_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, said in (("deepspeed_moe", True), ("megatron_moe", False)):
        flags = f"{small('')} {BATCH} --train-iters 1 --data-path mock --moe-model-type {kind} --save {tmp_path}/{kind}"
        config = parse("moe", f"{flags} --save-hf {tmp_path}/{kind}-hf".split(), {})
        with patch.object(PlainTerminal, "print_message") as say:
            train(config, f"file://{tmp_path / 'meet'}")
        assert ((UNDROPPED,) in [call.args for call in say.call_args_list]) == said
        assert main(["convert", "megapar-to-hf", str(tmp_path / kind), str(tmp_path / f"{kind}-out")]) == 0
        assert (UNDROPPED in capsys.readouterr().out) == said
