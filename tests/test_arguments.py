"""The door: names, values, files, origins, derived values, reports and statuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megapar.arguments import FLAGS, GROUPS, KINDS, SCRIPTS, Config, parse, parse_or_exit
from megapar.config.files import check_files
from megapar.config.hints import plain_number
from megapar.config.read import normal, spellings
from megapar.config.report import EXAMPLES, help_text, phase_lines
from megapar.errors import ConfigError
from megapar.schema.batch_size import BatchSize
from megapar.schema.flag import Flag, from_flags
from tests.support.token_files import write_tokens

ROOT = Path(__file__).parents[1]


def accept(line: str, kind: str = "moe", world: int = 1) -> Config:
    return parse(kind, line.split(), {"WORLD_SIZE": str(world)})


def rules(line: str | list[str], kind: str = "moe", world: int = 1) -> dict[str, str]:
    argv = line.split() if isinstance(line, str) else line
    with pytest.raises(ConfigError) as caught:
        parse(kind, argv, {"WORLD_SIZE": str(world)})
    return {complaint.rule: str(complaint) for complaint in caught.value.complaints}


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_field_of_every_group_is_a_flag_or_a_fact_and_names_are_unique() -> None:
    classes = [cls for group in GROUPS.values() for cls, _ in group.classes]
    own = [item for cls in classes for item in fields(cls) if item.name in vars(cls)["__annotations__"]]
    names = [item.metadata["flag"].get("name", item.name) for item in own if "flag" in item.metadata]
    assert sorted(names) == sorted(FLAGS)
    assert [item.name for item in own if "fact" in item.metadata] == ["data_ranks"]


@pytest.mark.parametrize("line", ["", "--num-experts 0", "--num-layers 2 --moe-layer-ffn-hidden-sizes 64 32"])
def test_sizes_and_flags_are_each_others_inverse(line: str) -> None:
    config = accept(line)
    assert from_flags(type(config.model), config.values()) == config.model
    assert replace(config, model=config.model.with_layers(1, 0)).value("num_layers") == 1


def test_no_spelling_means_two_things() -> None:
    written = [normal(flag.spelling[2:]) for flag in FLAGS.values()]
    written += [normal(alias.name) for flag in FLAGS.values() for alias in flag.aliases]
    assert len(set(written)) == len(written)
    for flag in FLAGS.values():
        assert spellings()[normal(flag.spelling[2:])].flag is flag


@pytest.mark.parametrize(
    ("line", "group", "name", "value"),
    [
        ("--tensor-model-parallel-size 1", "parallel", "mp_degree", 1),
        ("--expert-tensor-parallel-size 1", "parallel", "expert_mp_degree", 1),
        ("--swiglu", "model", "activation", "swiglu"),
        ("--bf16", "training", "dtype", "bf16"),
        ("--disable-bias-linear", "model", "add_bias_linear", False),
        ("--use-distributed-optimizer", "sharding", "sharding_stage", 1),
        ("--num-moe-experts 4", "moe", "num_experts", 4),
        ("--norm-epsilon 1e-6", "model", "layernorm_epsilon", 1e-6),
        ("--normalization RMSNorm", "model", "normalization", "rmsnorm"),
        ("--overlap-grad-reduce", "sharding", "overlap_grad_reduce", "on"),
        ("--no-overlap-grad-reduce", "sharding", "overlap_grad_reduce", "off"),
        ("--overlap-param-gather off", "sharding", "overlap_param_gather", "off"),
        ("--no-use-flash-attn", "model", "use_flash_attn", False),
        ("--hidden_size=64", "model", "hidden_size", 64),
        ("--ampipe-degree 1", "ampipe", "ampipe_degree", 1),
        ("--rank-order sharding,dp,pp,cp,mp", "parallel", "rank_order", ("sharding", "dp", "pp", "cp", "mp")),
        ("--rampup-batch-size 4 4 100 --global-batch-size 8", "training", "rampup_batch_size", (4, 4, 100)),
        ("--sharding-degree -1", "parallel", "sharding_degree", 1),
        ("--train-iters 1e3", "training", "train_iters", 1000),
    ],
)
def test_spellings_set_their_field(line: str, group: str, name: str, value: Any) -> None:
    config = accept(line)
    assert config.value(name) == value
    assert name in config.to_dict()[group]


def test_standard_negative_names_are_primary() -> None:
    config = accept(f"--load {ROOT} --no-load-optim --no-load-rng --rules-only")
    assert config.checkpoint.no_load_optim
    assert config.checkpoint.no_load_rng
    assert accept(f"--load {ROOT} --no-load-optim --load-optim --rules-only").checkpoint.no_load_optim is False


def test_old_name_works_with_a_note() -> None:
    config = parse("moe", ["--fuse-broadcast-MB", "32"], {})
    assert config.sharding.segment_broadcast_mb == 32
    assert any("old name" in warning for warning in config.warnings)


def test_last_of_repeated_flags_wins_and_contradicting_names_do_not() -> None:
    assert accept("--lr 1e-3 --lr 1e-4").optimizer.lr == 1e-4
    assert accept("--hybrid-dp --no-hybrid-dp").parallel.hybrid_dp is False
    assert "contradiction" in rules("--bf16 --fp16")
    assert "contradiction" in rules("--micro-batch-size 1 --mp-degree 1 --tensor-model-parallel-size 2")


def test_unknown_flag_names_the_nearest_ones() -> None:
    found = rules("--micro-batchsize 2")
    assert "--micro-batch-size" in found["unknown-flag"]


def test_flags_of_the_other_trainer_are_refused_unless_they_change_nothing() -> None:
    assert "pretrain_moe.py" in rules("--num-experts 4", kind="ernie")["wrong-model"]
    assert accept("--num-experts 0", kind="ernie").value("num_experts") == 0
    assert "pretrain_ernie.py" in rules("--mlm-probability 0.3")["wrong-model"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("--lr fast", "value"),
        ("--lr nan", "value"),
        ("--lr 0", "bound"),
        ("--num-layers 2.5", "value"),
        pytest.param(f"--hidden-size {'9' * 400}", "bound", id="400 digits"),
        ("--num-layers", "missing-value"),
        ("--num-layers --lr 1", "missing-value"),
        ("--sharding-stage 4", "choice"),
        ("--hidden-dropout 1.5", "bound"),
        ("--rampup-batch-size 4 4", "value"),
        ("--bf16=yes", "value"),
        ("stray", "unexpected"),
        ("-x", "unexpected"),
        ("--hybrid-dp=maybe", "value"),
    ],
)
def test_bad_values(line: str, rule: str) -> None:
    assert rule in rules(line)


def test_bad_world_size_in_the_environment() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        parse("moe", [], {"WORLD_SIZE": "many"})


def test_all_complaints_at_once_and_good_inputs_still_judged() -> None:
    found = rules(
        "--micro-batchsize 2 --lr x --num-experts 4 --moe-router-topk 5 --data-path /no/such.txt --sharding-stage 9"
    )
    assert {"unknown-flag", "value", "choice", "topk", "file-missing"} <= set(found)


def test_rows_with_a_bad_input_stay_silent() -> None:
    found = rules("--hidden-size x --num-attention-heads 7")
    assert set(found) == {"value"}


def test_yaml_takes_the_same_names_and_the_line_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "num-layers: 2\nhidden_size: 128\nlr: 1e-4\nbf16: true\nhybrid_dp: false\nhead_dim: null\n")
    config = accept(f"--config {path} --hidden-size 64")
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (2, 64, 1e-4)
    assert config.training.dtype == "bf16"
    assert config.model.head_dim == 16
    origins = [config.origins[name] for name in ("num_layers", "hidden_size", "head_dim", "seed")]
    assert origins == ["file", "flag", "derived", "default"]


def test_what_the_line_leaves_without_an_effect_in_a_file_is_left_out(tmp_path: Path) -> None:
    """A dense decoder of the sizes of a mixture of experts needs one flag. What contradicts itself is refused."""
    path = write(tmp_path, "num_experts: 4\nfirst_k_dense: 2\nmoe_ffn_hidden_size: 64\nadam_beta2: 0.9\n")
    config = accept(f"--config {path} --num-experts 0")
    said = "left out of --config, without an effect beside --num-experts 0: --first-k-dense 2, --moe-ffn-hidden-size 64"
    assert config.warnings == (said,)
    assert (config.origins["first_k_dense"], config.origins["adam_beta2"]) == ("default", "file")
    assert "--adam-beta2 0.9" in accept(f"--config {path} --optimizer sgd").warnings[0]
    assert "experts-unused" in rules(f"--config {path} --num-experts 0 --first-k-dense 2")
    assert "experts-unused" in rules(["--config", write(tmp_path, "num_experts: 0\nfirst_k_dense: 2\n")])


def test_yaml_lists_switches_and_aliases(tmp_path: Path) -> None:
    data = tmp_path / "a.txt"
    data.write_text("text", encoding="utf-8")
    path = write(tmp_path, f"data_path: [{data}]\noverlap_grad_reduce: off\ndisable_bias_linear: false\nfp16: false\n")
    config = accept(f"--config {path}")
    assert config.data.data_path == (str(data),)
    assert config.sharding.overlap_grad_reduce == "off"
    assert config.model.add_bias_linear is True
    assert config.training.dtype == "auto"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("num_layrs: 2", "unknown-flag"),
        ("num_layers: 2\nnum-layers: 3", "duplicate-key"),
        ("num_layers: 2\nnum_layers: 3", "duplicate-key"),
        ("num_layers: [2", "config-file"),
        ("- 1\n- 2", "config-file"),
        ("!!python/object/apply:os.system ['true']", "config-file"),
        ("lr: !!python/name:os.system ''", "config-file"),
        ("validate_only: true", "config-file"),
        ("num_layers: true", "value"),
        ("num_layers: 2020-01-01", "value"),
        ("lr: 2020-01-01", "value"),
        ("num_layers: [1, 2]", "value"),
        ("lr: {a: 1}", "value"),
        ("swiglu: 3", "value"),
        ("data_path: []", "value"),
        ("tokenizer_model: ''", "value"),
        ("a: &a {lr: 1}\nmodel:\n  <<: *a", "config-file"),
    ],
)
def test_bad_yaml_is_a_complaint(tmp_path: Path, text: str, rule: str) -> None:
    assert rule in rules(["--config", write(tmp_path, text)])


def test_a_check_by_the_launcher_compares_the_ranks_that_it_would_start() -> None:
    line = ["--data-path", "mock", "--world-size", "4", "--validate-only"]
    assert parse("moe", line, {}).runtime.world_size == 4
    with pytest.raises(ConfigError, match="world-size-launched"):
        parse("moe", line, {"WORLD_SIZE": "2", "RANK": "0"})


def test_fine_tuning_without_a_chat_template_is_refused_before_a_start(tmp_path: Path) -> None:
    line = ["--task", "sft", "--data-path", str(tmp_path / "chat.jsonl"), "--tokenizer-model", str(tmp_path)]
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n', encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text("{}", encoding="utf-8")
    lacks = "needs a chat template, which the tokenizer"
    with pytest.raises(ConfigError, match=lacks):
        parse("moe", [*line, "--validate-only"], {})
    for path, text in ((settings, '{"chat_template": "{{ messages }}"}'), (tmp_path / "chat_template.jinja", "")):
        settings.write_text("{}", encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as refused:
            parse("moe", [*line, "--validate-only", "--mp-degree", "3"], {})
        assert lacks not in str(refused.value)


def test_a_text_or_another_trainer_is_named_as_such() -> None:
    with pytest.raises(TypeError, match="parse takes words or a mapping, not a text"):
        parse("moe", "--lr 1e-3")
    with pytest.raises(ConfigError, match=r"'gpt' is not a trainer\. Trainers are"):
        parse("gpt", {})


YARN = "--rope-scaling-type yarn --rope-scaling-factor 4 --seq-length 128"


def reminders(line: str) -> list[str]:
    return [text[1 : text.index("]")] for text in parse("moe", [*line.split(), "--rules-only"], {}).reminders]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", ["data-builtin"]),
        ("--data-path builtin", []),
        ("--data-path mock --train-iters 999", []),
        ("--data-path mock --train-iters 1000", ["no-save"]),
        ("--data-path a.jsonl --hidden-size 4096 --num-layers 32", ["tokenizer-trained"]),
        ("--data-path 0.5 web=a.jsonl.gz --hidden-size 4096 --num-layers 32", ["tokenizer-trained"]),
        ("--data-path tokens/a --hidden-size 4096 --num-layers 32", []),
        ("--data-path a.bin --hidden-size 4096 --num-layers 32", []),
        ("--data-path a.txt --hidden-size 4096 --num-layers 32", ["tokenizer-trained"]),
        ("--data-path a.txt", []),
        ("--data-path mock --recompute-granularity full", ["recompute-nothing"]),
        ("--data-path mock --recompute-granularity full --recompute-interval 1", []),
        (f"--data-path mock {YARN} --original-max-position-embeddings 31", ["yarn-length"]),
        (f"--data-path mock {YARN} --original-max-position-embeddings 32", []),
        ("--data-path mock --train-iters 1000 --save-hf out", ["no-save"]),
        ("--data-path mock --train-iters 1000 --save out", ["no-save-interval"]),
        ("--data-path mock --train-iters 1000 --save out --save-interval-minutes 30", []),
        ("--data-path mock --train-iters 1000 --save out --exit-interval 50", []),
        ("--data-source hf --hf-dataset corpus --train-iters 2000", ["no-save"]),
        ("--train-iters 2000", ["data-builtin", "no-save"]),
    ],
)
def test_what_a_run_does_because_nothing_was_said_is_told(line: str, wanted: list[str]) -> None:
    assert reminders(line) == wanted


def test_reminders_are_printed_by_a_start_and_by_validate_only(capsys: pytest.CaptureFixture[str]) -> None:
    parse_or_exit("moe", ["--train-iters", "2000"], {})
    said = capsys.readouterr().err
    assert "megapar: note: [data-builtin] Without --data-path, a run trains on the built-in text" in said
    assert "megapar: note: [no-save] 2,000 steps without --save: Nothing is saved. Set --save" in said
    with pytest.raises(SystemExit):
        parse_or_exit("moe", ["--train-iters", "2000", "--validate-only"], {})
    notes = capsys.readouterr().out.partition("notes\n")[2]
    assert "[data-builtin]" in notes
    assert "[no-save]" in notes


@pytest.mark.parametrize(
    ("text", "more", "refused"),
    [
        ("world_size: 2\n", "", True),
        ("world_size: 2\n", "--data-path builtin", False),
        ("world_size: 2\ndata_path: builtin\n", "", False),
        ("num_layers: 4\n", "", False),
        ("num_layers: 20\nhidden_size: 2048\n", "", True),
        ("num_layers: 19\nhidden_size: 2048\n", "", False),
    ],
)
@pytest.mark.parametrize("files", [1, 2])
def test_a_published_run_does_not_start_on_built_in_text(
    tmp_path: Path, text: str, more: str, refused: bool, files: int
) -> None:
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    line = ["--config", write(tmp_path, text), *["--config", f"{tmp_path}/empty.yaml"] * (files - 1), *more.split()]
    place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    complaints: list[str] = []
    try:
        parse("moe", line, place, starting=True)
    except ConfigError as error:
        complaints = [complaint.rule for complaint in error.complaints]
    assert ("data-builtin" in complaints) == refused
    assert any("data-builtin" in text for text in parse("moe", [*line, "--rules-only"], place).reminders) == (
        "builtin" not in text + more
    )
    asked = [*line, "--validate-only"]
    if refused:
        with pytest.raises(ConfigError, match="data-builtin"):
            parse("moe", asked, place)
    else:
        assert parse("moe", asked, place).grid.world_size == 2


def test_missing_files_are_complaints_unless_the_rules_alone_are_asked(tmp_path: Path) -> None:
    line = f"--data-path {tmp_path}/no.jsonl --tokenizer-model {tmp_path}/no.model --load {tmp_path}/no"
    for asking in ([], ["--validate-only"]):
        with pytest.raises(ConfigError) as caught:
            parse("moe", [*line.split(), *asking], {})
        assert [complaint.rule for complaint in caught.value.complaints] == ["file-missing"] * 3
    config = parse("moe", [*line.split(), "--rules-only"], {})
    assert config.notes == (
        f"--vocab-size 4096 is assumed: --tokenizer-model {tmp_path}/no.model cannot be read here. Set --vocab-size.",
    )


def test_missing_config_file(tmp_path: Path) -> None:
    assert "config-file" in rules(f"--config {tmp_path}/none.yaml")
    assert "missing-value" in rules("--config")


def test_save_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("", encoding="utf-8")
    assert "file" in rules(f"--save {blocker}/run")
    assert accept(f"--save {tmp_path}/a/b/c").checkpoint.save == f"{tmp_path}/a/b/c"
    assert not (tmp_path / "a").exists()


def test_megatron_prefix_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "corpus.idx").write_bytes(b"")
    half = rules(f"--data-path {tmp_path}/corpus")["file-missing"]
    assert f"{tmp_path}/corpus.idx exists, but {tmp_path}/corpus.bin does not" in half
    write_tokens(tmp_path / "corpus", [])
    assert "corpus.bin: the corpus contains no tokens" in rules(f"--data-path {tmp_path}/corpus")["file"]
    write_tokens(tmp_path / "corpus", [[5, 6, 7]])
    for path in ("corpus", "corpus.bin", "corpus.idx"):
        mixed = [f"--data-path=0.7 {tmp_path}/{path} 0.3 {tmp_path}/corpus"]
        assert f"write a list: [0.7, {tmp_path}/{path}, 0.3," in rules(mixed)["file-missing"]
        assert (
            accept(f"--data-path 0.7 {tmp_path}/{path} .3 {tmp_path}/corpus").data.data_path[1] == f"{tmp_path}/{path}"
        )
    assert "data-weights" in rules(f"--data-path 0.7 {tmp_path}/corpus builtin")
    assert "file-missing" in rules(f"--data-path 1 {tmp_path}/corpus 2 {tmp_path}/other")


def test_weights_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data-path: [0.7, builtin, 3, mock2]\nsplit: 969,30,1\n")
    config = accept(f"--config {tmp_path}/run.yaml --rules-only")
    assert config.data.data_path == ("0.7", "builtin", "3", "mock2")
    assert config.data.split == "969,30,1"


def test_sharding_takes_what_the_others_leave() -> None:
    config = accept("", world=6)
    assert (config.parallel.sharding_degree, config.parallel.dp_degree, config.runtime.world_size) == (6, 1, 6)
    assert config.origins["sharding_degree"] == "derived"


def test_hybrid_dp_layout() -> None:
    config = accept("--sharding-degree 2 --hybrid-dp", world=6)
    assert (config.grid.dp, config.grid.sharding, config.runtime.data_ranks) == (3, 2, 6)


@pytest.mark.parametrize(
    ("line", "world", "batch", "steps"),
    [
        ("--micro-batch-size 2", 4, 8, 1),
        ("--micro-batch-size 2 --gradient-merge-acc-step 3", 4, 24, 3),
        ("--micro-batch-size 2 --global-batch-size 24", 4, 24, 3),
        ("--micro-batch-size 2 --global-batch-size 24 --gradient-merge-acc-step 3", 4, 24, 3),
    ],
)
def test_batch_and_accumulation_derive_each_other(line: str, world: int, batch: int, steps: int) -> None:
    config = accept(line, world=world)
    assert (config.training.global_batch_size, config.sharding.gradient_merge_acc_step) == (batch, steps)


def test_sizes_derive() -> None:
    config = accept("--hidden-size 128 --num-attention-heads 8 --gradient-merge-acc-step 2")
    assert (config.model.head_dim, config.model.num_query_groups) == (16, 8)
    assert config.model.ffn_hidden_size == 320
    assert config.value("moe_ffn_hidden_size") == 320
    assert accept("--hidden-size 128", kind="ernie").model.ffn_hidden_size == 512
    assert config.model.max_position_embeddings == config.model.seq_length
    assert config.optimizer.lr_decay_iters == config.training.train_iters
    assert accept("--sharding-stage 3").sharding.gradient_merge_mode == "micro_batch"


def test_nothing_is_left_open() -> None:
    for kind in SCRIPTS:
        config = accept("", kind=kind)
        classes = [cls for group in GROUPS.values() for cls, _ in group.classes]
        optional = {n for cls in classes for n, t in cls.__annotations__.items() if t.endswith("None")}
        optional.add("moe_layer_ffn_hidden_sizes")  # () in sizes
        for name, group in config.to_dict().items():
            if name != "kind":
                assert {key for key, value in group.items() if value is None} <= optional


def test_config_is_frozen_and_plain() -> None:
    config = accept("")
    with pytest.raises(FrozenInstanceError):
        config.model.hidden_size = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.origins["lr"] = "flag"  # type: ignore[index]
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_a_warning_that_cannot_be_written_ends_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        assert parse_or_exit("moe", ["--fuse-broadcast-MB", "32"], {}).warnings
        with pytest.raises(OSError, match="No space left"):  # it is still in the buffer of the file
            full.close()


def test_help_has_every_flag_with_its_default_and_unit() -> None:
    for kind in SCRIPTS:
        page = help_text(kind, "all")
        for flag in FLAGS.values():
            assert bool(re.search(rf"^  {flag.spelling}(?![\w-])", page, re.MULTILINE)) == (kind in flag.models)
        assert page.count("(default:") == sum(kind in flag.models for flag in FLAGS.values())


def test_help_begins_with_examples_and_lists_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in SCRIPTS:
        page, every = help_text(kind), help_text(kind, "all")
        assert page.startswith("examples:\n  megapar pretrain ")
        assert len(page.splitlines()) < 40
        for group in {flag.group for flag in FLAGS.values() if kind in flag.models}:
            assert re.search(rf"^  {group} +\d+  \w", page, re.MULTILINE)
            assert help_text(kind, group) in every
    assert help_text("moe", "--lr") == help_text("moe", "lr")
    assert help_text("moe", "--no-memory-check") == help_text("moe", "memory-check")
    assert _printed("-h", capsys) == (0, help_text("moe"), "")


@pytest.mark.parametrize(
    ("argv", "told", "not_told"),
    [
        ("--help recompute", "--recompute-method {uniform,block}", "--seq-length"),
        ("--lr 1 --help=recompute", "--recompute-method {uniform,block}", "--seq-length"),
        ("--help Seq_Length", "  --seq-length INT", "--hidden-size"),
        ("--help segment-broadcast-MB", "--segment-broadcast-MB FLOAT", "--segment-anchors VALUE"),
        ("--help all", "--seq-length", "examples:"),
        ("--help --lr 1", "examples:", "--seq-length"),
        ("--help --seq-length", "  --seq-length INT", "--hidden-size"),
        ("--help --no-memory-check", "  --memory-check", "examples:"),
        ("--help --tensor-model-parallel-size", "  --mp-degree", "examples:"),
    ],
)
def test_help_tells_a_group_or_a_flag(argv: str, told: str, not_told: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _printed(argv, capsys)
    assert (status, err) == (0, "")
    assert told in out
    assert not_told not in out


@pytest.mark.parametrize(
    ("topic", "near"),
    [
        ("optimiser", "Did you mean optimizer or optimizer-offload?"),
        ("checkpoints", "Did you mean checkpoint"),
        ("router", "Did you mean moe-router-topk, "),
        ("zzz", "has this name. Groups: parallel, sharding,"),
    ],
)
def test_help_of_an_unknown_group_names_near_ones(topic: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = _printed(f"--help {topic}", capsys)
    assert (status, out) == (2, "")
    assert near in err


def _printed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    """Status, output and errors of a command line that starts nothing."""
    with pytest.raises(SystemExit) as left:
        parse_or_exit("moe", line.split(), {})
    return left.value.code, *capsys.readouterr()


@pytest.mark.parametrize("kind", KINDS)
def test_examples_of_help_are_accepted(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.jsonl").write_text('{"text": "a rank holds a part of every layer"}\n')
    for command, _ in EXAMPLES[kind]:
        words = command.split()
        at = words.index("pretrain")
        assert words[at + 1] == kind
        environ = {"WORLD_SIZE": words[words.index("--nproc-per-node") + 1]} if words[1] == "launch" else {}
        assert parse(kind, words[at + 2 :], environ).kind == kind


def test_validate_only_prints_what_is_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--validate-only --data-path mock --num-layers 3"
    shown = {full: _printed(f"{line} {'--log-start full' if full else ''}", capsys)[1] for full in (False, True)}
    rows = {full: dict(re.findall(r"^  (--\S+) .* (\w+)$", text, re.MULTILINE)) for full, text in shown.items()}
    assert rows[False]["--num-layers"] == "flag"
    assert rows[False]["--head-dim"] == "derived"
    assert "default" not in rows[False].values()
    assert rows[False].items() <= rows[True].items()
    hidden = {name for name, origin in rows[True].items() if origin == "default"}
    assert f"\n{len(hidden) + 1} values are defaults; --log-start full prints them as well\n" in shown[False]
    assert len(rows[True]) == sum("moe" in flag.models for flag in FLAGS.values())
    assert "values are defaults" not in shown[True]


def test_groups_of_a_huge_world_are_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--validate-only --world-size 100000 --sharding-degree 500 --mp-degree 4 --hybrid-dp --ep-degree 4"
    with pytest.raises(SystemExit) as left:
        parse_or_exit("moe", line.split(), {})
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "dp 50: 2000 groups: 0 2000 4000 ... 98000 | 1 2001" in printed
    assert "ep 4: 25000 groups: 0 4 8 12 | 1 5 9 13" in printed
    assert max(len(row) for row in printed.splitlines()) < 400


def test_shortened_groups_are_the_grid_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--validate-only --world-size 32 --sharding-degree 4 --mp-degree 2 --hybrid-dp --ep-degree 4"
    order = "--rank-order sharding,pp,dp,mp,cp"
    for extra in ("", order):
        config = parse("moe", f"{line} {extra}".split(), {})
        with pytest.raises(SystemExit):
            parse_or_exit("moe", f"{line} {extra}".split(), {})
        printed = capsys.readouterr().out
        for axis in ("dp", "sharding", "mp", "edp", "ep", "emp"):
            row = next(r for r in printed.splitlines() if r.startswith(f"  {axis} {config.grid.size(axis)}:"))
            groups = {tuple(map(int, text.split())) for text in row.split(": ", 2)[2].split(" | ")}
            assert groups == set(config.grid.groups(axis))


def words() -> st.SearchStrategy[str]:
    names = [flag.spelling for flag in FLAGS.values()] + ["--bf16", "--no-such", "--no-hybrid-dp", "-h1", "--"]
    values = ["0", "1", "2", "3", "4", "-1", "7", "64", "1e-3"]
    values += ["x", "", "on", "builtin", "uniform", "1f1b", "nan", "inf"]
    choices = sorted({str(choice) for flag in FLAGS.values() for choice in flag.choices})
    return st.one_of(st.sampled_from(names), st.sampled_from(names), st.sampled_from(values), st.sampled_from(choices))


@st.composite
def plausible(draw: st.DrawFn) -> list[str]:
    """Few flags with values of their own type: most of these lines reach the rows, many are accepted."""
    argv = ["--validate-only"]
    for flag in draw(st.lists(st.sampled_from(list(FLAGS.values())), max_size=6, unique_by=lambda flag: flag.name)):
        if flag.name in ("config", "world_size", "validate_only"):
            continue
        number = draw(st.sampled_from([1, 1, 2, 2, 3, 4, 8, 64]))
        typed = {
            "int": [number],
            "float": [number / 8],
            "str": ["text"],
            "strings": ["builtin"],
            "integers": [4] * flag.count,
        }
        if flag.comma:
            typed["strings"] = [",".join(draw(st.permutations(["dp", "pp", "sharding", "cp", "mp"])))]
        values = [draw(st.sampled_from(flag.choices))] if flag.choices else typed.get(flag.type, [])
        argv += [flag.spelling, *(str(value) for value in values)]
    return argv


def judge(kind: str, argv: list[str], world: int) -> Config | ConfigError:
    try:
        return parse(kind, argv, {"WORLD_SIZE": str(world)})
    except ConfigError as error:
        return error


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(SCRIPTS)), st.lists(words(), max_size=24), st.sampled_from([1, 2, 6, 8, 32]))
def test_any_line_is_accepted_or_refused_with_reasons(kind: str, argv: list[str], world: int) -> None:
    outcome = judge(kind, argv, world)
    if isinstance(outcome, Config):
        assert outcome.grid.world_size == outcome.runtime.world_size
    else:
        assert outcome.complaints
        assert all(complaint.rule and complaint.message for complaint in outcome.complaints)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(SCRIPTS)), plausible(), st.sampled_from([1, 2, 4, 6, 8, 32]))
def test_plausible_lines_resolve_whole_or_are_refused(kind: str, argv: list[str], world: int) -> None:
    outcome = judge(kind, argv, world)
    if isinstance(outcome, Config):
        assert outcome.grid.world_size == world
        batch = outcome.training.micro_batch_size * outcome.sharding.gradient_merge_acc_step * outcome.grid.data_ranks
        assert outcome.training.global_batch_size == batch
    else:
        assert outcome.complaints


INTEGERS = [flag for flag in FLAGS.values() if flag.type == "int" and flag.name not in ("world_size", "config")]


@settings(deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(list(SCRIPTS)),
    numbers=st.lists(
        st.tuples(st.sampled_from(INTEGERS), st.sampled_from([0, -1, 1, 2, 3, 5, 8, 10**6])),
        max_size=6,
        unique_by=lambda pair: pair[0].name,
    ),
    world=st.sampled_from([1, 2, 3, 6, 64]),
)
@example(kind="moe", numbers=[(FLAGS["ep_degree"], 3), (FLAGS["dp_degree"], 0)], world=4)
@example(kind="moe", numbers=[(FLAGS["ep_degree"], 2), (FLAGS["sharding_degree"], 0)], world=2)
def test_a_complaint_about_one_number_does_not_fail_over_another(
    kind: str, numbers: list[tuple[Flag, int]], world: int
) -> None:
    """Degrees of 0, which have no divisors and divide nothing, are complaints as well."""
    argv = ["--validate-only", *(str(word) for flag, number in numbers for word in (flag.spelling, number))]
    outcome = judge(kind, argv, world)
    assert isinstance(outcome, Config) or outcome.complaints


def test_a_mapping_is_read_as_a_command_line(tmp_path: Path) -> None:
    own = {"config": "tiny", "lr": 1e-3, "train-iters": 3, "bf16": True, "data_path": ("mock",), "load": None}
    line = ["--config", "tiny", "--lr", "1e-3", "--train-iters", "3", "--bf16", "--data-path", "mock"]
    assert parse("moe", {**own, "save": tmp_path}, {}) == parse("moe", [*line, "--save", str(tmp_path)], {})
    assert parse("moe", {"untie_embeddings_and_output_weights": False}, {}).model.tie_embeddings


def test_what_is_wrong_in_a_mapping_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("moe", {"num_layer": 2, "lr": "fast", "sequence_parallel": 3}, {})
    assert [str(complaint) for complaint in caught.value.complaints] == [
        "[unknown-flag] setting num_layer is unknown. Did you mean num_layers?",
        "[value] --lr takes a number, got 'fast'.",
        "[value] --sequence-parallel takes true or false, got 3.",
    ]


def test_a_phase_with_a_ramp_says_its_batches() -> None:
    phases = ["--data-path", "a=builtin", "--data-phases", "0: a=1; 50 iterations: a=2", "--seq-length", "64"]
    line = [*phases, "--train-iters", "60", "--global-batch-size", "16", "--rampup-batch-size", "4", "4", "300"]
    first, second = phase_lines(parse("moe", line, {}))
    assert first == "from the start: a 1; 50 steps of 4 to 16 x 64, 23,296 positions"
    assert second.endswith("a 2; 10 steps of 16 x 64, 10,240 positions")


@pytest.mark.parametrize("environ", [{"RANK": "", "WORLD_SIZE": "8"}, {"RANK": "", "WORLD_SIZE": ""}])
def test_an_empty_rank_is_none_and_prints(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_or_exit("moe", ["--train-iters", "none"], environ)
    assert "is refused" in capsys.readouterr().err


def test_a_folder_is_the_same_however_it_is_spelled() -> None:
    line = "--rules-only --load runs/a/ --load-hf m --save"
    assert parse("moe", [*line.split(), "runs/a"], {}).checkpoint.load_hf == "m"
    with pytest.raises(ConfigError, match="load-twice"):
        parse("moe", [*line.split(), "runs/b"], {})


def test_tasks_with_a_name_are_no_urls_either() -> None:
    with pytest.raises(ConfigError, match="remote-paths"):
        parse("moe", ["--rules-only", "--eval-tasks", "easy=s3://b/arc.jsonl"], {})


def test_a_ramp_that_is_refused_ends_the_parser() -> None:
    line = (
        "--rampup-batch-size 100 5 1000 --global-batch-size 4 --micro-batch-size 1 --data-path a=a.jsonl --rules-only"
    )
    with pytest.raises(ConfigError, match="rampup-steps"):
        parse("moe", [*line.split(), "--data-phases", "0: a=1; 2000 samples: a=1"], {})
    assert BatchSize(4, 100, 5, 1000).steps_until(0, 2000) == 500


def test_a_number_with_a_comma_is_no_whole_one() -> None:
    assert plain_number("10,50", "steps", whole=True) == ""
    assert plain_number("10,50", "", whole=False) == "Write it with a decimal point: 10.50."


def test_published_weights_are_not_replaced_by_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to("m")
    for name in ("m", "m/", str(tmp_path / "m"), "link"):
        found = check_files({"load_hf": "m", "save_hf": name})
        assert any("also the folder of --load-hf" in complaint.message for complaint in found)
