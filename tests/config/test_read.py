"""Files as they are pasted: nothing, blocks, several of them, and paths as shells write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.arguments import Config, parse, parse_or_exit
from megapar.errors import ConfigError
from megapar.schema.phase_plan import RateTarget

EXAMPLE = """
    "sharding_segment_strategy": "segment_broadcast_MB",
    "segment_broadcast_MB": 32,
    "segment_anchors": None,
    "sharding_degree": {sharding},
    "mp_degree": {mp},
    "hybrid_dp": {hybrid},
    "gradient_merge_acc_step": {steps},
"""


def read(folder: Path, text: str, *line: str, world: int = 1, environ: dict[str, str] | None = None) -> Config:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return parse("ernie", ["--config", str(path), *line], {"WORLD_SIZE": str(world), **(environ or {})})


def complaints(folder: Path, text: str, *line: str, world: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, text, *line, world=world)
    return "\n".join(map(str, caught.value.complaints))


@pytest.mark.parametrize("form", ["{{{keys}}}", "sharding: True\nsharding_configs: {{{keys}}}"])
@pytest.mark.parametrize(
    ("sharding", "mp", "hybrid", "steps", "dp"),
    [(32, 1, False, 1, 1), (8, 1, True, 4, 4), (4, 8, False, 1, 1), (4, 2, True, 1, 4)],
)
def test_the_dictionaries_of_the_sharding_pull_request_are_pasted_as_they_are(
    tmp_path: Path, form: str, sharding: int, mp: int, hybrid: bool, steps: int, dp: int
) -> None:
    keys = EXAMPLE.format(sharding=sharding, mp=mp, hybrid=hybrid, steps=steps)
    config = read(tmp_path, form.format(keys=keys), "--num-attention-heads", "8", world=32)
    assert (config.grid.dp, config.grid.sharding, config.grid.mp) == (dp, sharding, mp)
    assert config.sharding.gradient_merge_acc_step == steps
    assert config.sharding.sharding_segment_strategy == "segment_broadcast_MB"
    assert config.sharding.segment_anchors == ()
    assert any("sharding_stage: 3" in warning for warning in config.warnings)
    line = ("--num-attention-heads", "8", "--sharding-stage", "3")
    assert read(tmp_path, form.format(keys=keys), *line, world=32).warnings == ()


def test_the_degrees_of_fleet_are_pasted(tmp_path: Path) -> None:
    text = (
        'hybrid_configs: {"dp_degree": 2, "mp_degree": 2, "pp_degree": 2, "sharding_degree": 4, "sep_degree": 1}\n'
        'pipeline_configs: {"accumulate_steps": 4, "micro_batch_size": 2}\n'
    )
    config = read(tmp_path, text, world=32)
    assert {axis: config.grid.size(axis) for axis in ("dp", "pp", "sharding", "mp")} == {
        **{"dp": 2, "pp": 2, "sharding": 4, "mp": 2}
    }
    assert config.parallel.hybrid_dp
    assert (config.sharding.gradient_merge_acc_step, config.training.micro_batch_size) == (4, 2)
    assert read(tmp_path, "gradient_merge_configs: {k_steps: 3, avg: true}").sharding.gradient_merge_acc_step == 3


@pytest.mark.parametrize(
    ("text", "group", "name", "value"),
    [
        ("sharding_group_size: 4", "parallel", "sharding_degree", 4),
        ("sharding_parallel_degree: 4", "parallel", "sharding_degree", 4),
        ("tensor_parallel_degree: 4", "parallel", "mp_degree", 4),
        ("num_stages: 4\naccumulate_steps: 4", "parallel", "pp_degree", 4),
        ("num_stages: 2\naccumulate_steps: 8", "sharding", "gradient_merge_acc_step", 8),
        ("num_stages: 2\naccumulate_steps: 8\nseg_method: balanced", "pipeline", "pp_seg_method", "balanced"),
        ("dp_degree: 2", "parallel", "hybrid_dp", True),
        ("dp_degree: 2", "parallel", "sharding_degree", 2),
        ("dp_degree: 1", "parallel", "hybrid_dp", False),
    ],
)
def test_names_of_paddle(tmp_path: Path, text: str, group: str, name: str, value: object) -> None:
    config = read(tmp_path, text, world=4)
    assert config.to_dict()[group][name] == value


def test_groups_may_be_written(tmp_path: Path) -> None:
    config = read(tmp_path, "model:\n  num_layers: 3\noptimizer: {lr: 1e-4}\n")
    assert (config.model.num_layers, config.optimizer.lr) == (3, 1e-4)


@pytest.mark.parametrize("text", ["optimizer: sgd\nlr: 2.0", "optimizer: {optimizer: sgd, lr: 2.0}"])
def test_a_group_may_have_the_name_of_a_flag(tmp_path: Path, text: str) -> None:
    config = read(tmp_path, text)
    assert (config.optimizer.optimizer, config.optimizer.lr) == ("sgd", 2.0)


def test_an_unknown_block_is_told_with_what_stands_in_it(tmp_path: Path) -> None:
    said = complaints(tmp_path, "vision: {num_layers: 2}\nhybrid_configs: {sep_degree: 2, nonsense: 1}\n")
    assert "key vision is unknown. It is not a group of flags: write the keys under it (num_layers)" in said
    assert "key hybrid_configs.sep_degree is unknown. Did you mean --cp-degree with" in said
    assert "key hybrid_configs.nonsense is unknown" in said


@pytest.mark.parametrize(
    "text",
    [
        "training:\n  # lr: 1e-4\n",
        "optimizer:\n  # lr: 1e-4\n",
        "hybrid_configs: null",
        "hybrid_configs: None",
        "strategy: {hybrid_configs: }",
    ],
)
def test_a_block_in_which_nothing_is_set_is_passed_over(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).origins["lr"] == "default"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("gradient_merge: {enable: false}", "leave the whole block out"),
        ("gradient_merge_configs: {avg: false}", "only true is supported"),
        ("amp_configs: {init_loss_scaling: 1}", "Write its keys as flags: --dtype fp16"),
        ("strategy: {amp_configs: {init_loss_scaling: 1}}", "Write its keys as flags: --dtype fp16"),
        ("tokenizer: {vocab_size: 1}", "write the keys under it (vocab_size) at the left margin"),
        ("pipeline_configs: {schedule_mode: F-then-B}", "Did you mean gpipe?"),
        ("nonsense_of_nobody: 1", "those of Megatron-LM, MindSpeed, DeepSpeed and PaddlePaddle"),
    ],
)
def test_settings_of_paddle_that_are_not_built_are_told_what_to_do(tmp_path: Path, text: str, fix: str) -> None:
    assert fix in complaints(tmp_path, text)


def test_nothing_is_nothing_where_that_is_the_default(tmp_path: Path) -> None:
    text = "save: None\nload: null\ntokenizer_model: None\nsegment_anchors: ~\nglobal_batch_size: None\n"
    config = read(tmp_path, text, "--save-hf", "None")
    assert (config.checkpoint.save, config.checkpoint.load, config.data.tokenizer_model) == (None, None, None)
    assert config.checkpoint.save_hf is None
    assert config.training.global_batch_size == config.training.micro_batch_size
    assert config.origins["save"] == "default"
    said = complaints(tmp_path, "num_layers: None\nbf16: null\n")
    assert (
        "key num_layers takes a whole number (layers), got None. Leave the key out to get the default of --num-layers"
        in said
    )
    assert "key bf16 takes" in said


def test_of_several_files_the_later_wins_and_the_line_over_all(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("hidden_size: 128\nnum_layers: 2\nlr: 1e-4\nsave: runs/a\n", encoding="utf-8")
    second.write_text("num_layers: 3\nlr: 2e-4\nsave: null\n", encoding="utf-8")
    config = parse("moe", ["--config", str(first), "--lr", "3e-4", f"--config={second}"], {})
    assert (config.model.hidden_size, config.model.num_layers, config.optimizer.lr) == (128, 3, 3e-4)
    assert config.checkpoint.save is None
    assert config.runtime.config == (str(first), str(second))
    names = ("hidden_size", "num_layers", "lr", "seed")
    assert [config.origins[name] for name in names] == [f"file {first}", f"file {second}", "flag", "default"]


def test_the_split_of_one_of_several_files_gives_way_to_mock_data(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("split: 969,30,1\n", encoding="utf-8")
    second.write_text("num_layers: 3\n", encoding="utf-8")
    line = ["--config", str(first), "--config", str(second), "--data-path", "mock"]
    assert parse("moe", line, {}).data.split is None


@pytest.mark.parametrize("spelling", ["--CONFIG", "--Config"])
def test_a_file_is_read_in_any_spelling_of_its_flag(spelling: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("num_layers: 3\n", encoding="utf-8")
    for line in ([spelling, str(path)], [f"{spelling}={path}"]):
        assert parse("moe", line, {}).model.num_layers == 3


def test_merge_keys_are_told_with_their_line(tmp_path: Path) -> None:
    said = complaints(tmp_path, "moe:\n  <<: {num_layers: 2}\n")
    assert "line 2, column 3: merge keys (<<) are not supported, write the keys out: '  <<: {num_layers: 2}'" in said


def test_paths_are_expanded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    environ = {"HOME": str(tmp_path), "DATA": str(tmp_path)}
    text = "save: ${HOME}/runs\ntensorboard_dir: ~/board\ndata_path: [$DATA/a.txt]\n"
    config = read(tmp_path, text, "--metrics-jsonl=~/m.jsonl", environ=environ)
    assert config.checkpoint.save == f"{tmp_path}/runs"
    assert config.logging.tensorboard_dir == f"{tmp_path}/board"
    assert config.logging.metrics_jsonl == f"{tmp_path}/m.jsonl"
    assert config.data.data_path == (f"{tmp_path}/a.txt",)
    assert parse("ernie", ["--config", "$DATA/run.yaml"], environ).checkpoint.save == f"{tmp_path}/runs"


def test_sources_and_phases_are_mappings_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "sources: {web: ~/web.jsonl, code: $DATA/code.jsonl}\n"
        "phases:\n- {at: 0, sources: {web: 3, code: 0.5}}\n"
        "- {at: 1.5k, unit: samples, sources: {web: 1}, seq_length: 512, lr: {to: 0.0001, style: cosine}}\n"
    )
    line, environ = ["--config", str(path), "--rules-only"], {"HOME": "/home/a", "DATA": "/data"}
    config = parse("moe", line, environ)
    assert config.data.data_path == ("web=/home/a/web.jsonl", "code=/data/code.jsonl")
    first, second = config.phases.spans
    assert (first.first_sample, second.first_sample, second.first_step) == (0, 1500, 375)
    assert (second.seq_length, second.rate, config.model.max_position_embeddings) == (
        512,
        RateTarget(1e-4, "cosine"),
        512,
    )
    assert parse("moe", [*line, "--data-phases", "0: web=1,code=1"], environ).phases.spans[0].batch.final == 4
    for more, words in (
        ("seq_length: 511\ncp_degree: 2\n", "must divide --seq-length (--cp-degree 2"),
        ("lr_decay_style: wsd\n", "[phases-lr]"),
    ):
        other = tmp_path / "more.yaml"
        other.write_text(more)
        with pytest.raises(ConfigError) as caught:
            parse("moe", [*line, "--config", str(other), "--world-size", "2"], environ)
        assert words in str(caught.value)
    for text, words in (
        ("sources: {my data: a}\n", "A name has letters"),
        ("phases: [{at: 0, source: {a: 1}}]\n", "phase 1 has the unknown key source"),
        ("phases: 0\n", "does not begin with a place"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            parse("moe", line, environ)


def test_every_rule_holds_in_every_phase() -> None:
    base = ["--data-path", "a=builtin", "--rules-only", "--world-size", "2", "--cp-degree", "2"]
    for phase, words in (
        ("seq-length=62", "[cp-ring-length] in the phase from 8 samples on: "),
        ("global-batch-size=6", "[batch-divides] in the phase from 8 samples on: "),
    ):
        with pytest.raises(ConfigError) as caught:
            parse("moe", [*base, "--data-phases", f"0: a=1; 8 samples: a=1 {phase}"], {})
        assert words in str(caught.value)
        assert len(caught.value.complaints) == 1
    assert parse("moe", [*base, "--data-phases", "0: a=1; 8 samples: a=1 seq-length=64"], {}).model.seq_length == 256


def test_a_variable_that_is_not_set_is_refused(tmp_path: Path) -> None:
    said = complaints(tmp_path, "save: ${NO_SUCH_PLACE}/runs\n", "--metrics-jsonl", "$NOR_THIS/m.jsonl")
    assert "[undefined-variable] --save ${NO_SUCH_PLACE}/runs: $NO_SUCH_PLACE is not set" in said
    assert "$NOR_THIS is not set" in said
    with pytest.raises(ConfigError, match=r"--config .*NO_SUCH_PLACE is not set"):
        parse("moe", ["--config", "$NO_SUCH_PLACE/run.yaml"], {})


def test_a_bad_value_of_phases_is_the_only_complaint() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("moe", ["--data-path", "a=builtin", "b=builtin", "--data-phases", "0: a=1,b=1; 500: a=1"], {})
    assert [complaint.rule for complaint in caught.value.complaints] == ["value"]


def test_blanks_beside_commas_are_none_of_a_name() -> None:
    order = parse("moe", {"rank_order": "dp, pp, sharding, cp, mp"}, {}).parallel.rank_order
    assert order == ("dp", "pp", "sharding", "cp", "mp")


def test_a_script_is_that_of_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("script: pretrain_ernie.py\n")
    (tmp_path / "b.yaml").write_text("hidden_size: 64\n")
    with pytest.raises(ConfigError) as failure:
        parse("moe", ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")], {})
    assert [complaint.message.count("a.yaml") for complaint in failure.value.complaints] == [1]


def test_a_lifted_rule_holds_in_a_phase_with_strict_seed_rules(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    line = (
        "--world-size 2 --ep-degree 2 --sharding-degree 2 --moe-model-type deepspeed_moe --num-experts 4 --rules-only"
    )
    phases = "0: web=1; 5 iterations: web=1 seq-length=1001"
    words = [*line.split(), "--ampipe-degree", "2", "--seq-length", "1024", "--data-path", f"web={tmp_path}/a.jsonl"]
    words += ["--data-phases", phases]
    parse("moe", words, {})
    with pytest.raises(ConfigError, match=r"\[ampipe-length\] in the phase from 5 iterations on"):
        parse("moe", [*words, "--strict-seed-rules"], {})


def test_help_before_a_flag_with_its_value_explains_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_or_exit("moe", ["--help", "--lr=1e-3"], {})
    assert end.value.code == 0
    assert "--lr FLOAT" in capsys.readouterr().out
