"""``megapar translate`` over public argument lists and over scripts as they lie in their repositories."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.config.draft import Draft
from megapar.config.read import read_file, read_line
from megapar.files import uri
from megapar.tools.main import main
from megapar.tools.translate import NOTHING, OTHER_TRAINING, SAME_TRAINING, Translated, as_yaml, check, translate_line
from megapar.tools.translation import open_values
from megapar.tools.translation.source import read_source, take_apart
from megapar.tools.translation.translated import equivalent, framework_of, implicit_defaults, translate
from megapar.tools.translation.verdict import LEFT, OTHER, UNKNOWN, VERDICTS

FOLDER = Path(__file__).parent / "scripts"
SCRIPTS = sorted(FOLDER.glob("*.txt"))
# The least that Megatron-LM needs, of a run that means the same here.
PLAIN = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-3 --global-batch-size 4 --no-bias-gelu-fusion"
)


def arguments(name: str) -> list[str]:
    path = next(path for path in SCRIPTS if path.stem == name)
    lines = path.read_text(encoding="utf-8").splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def found(*words: str, framework: str = "megatron") -> dict[str, Translated]:
    return {item.flag: item for item in translate(words, framework)}


def added(*words: str, framework: str = "megatron") -> dict[str, Translated]:
    return {item.flag: item for item in implicit_defaults(translate(words, framework), framework)}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_argument_is_accounted_for(path: Path) -> None:
    words = arguments(path.stem)
    items = translate(words)
    assert [item.flag for item in items] == [word.partition("=")[0] for word in words if word.startswith("--")]
    for item in items:
        assert item.verdict in VERDICTS
        assert item.ours or item.reason, item
        assert item.verdict != UNKNOWN, item


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_file_sets_what_the_command_sets(path: Path, tmp_path: Path) -> None:
    translation = translate_line(take_apart(arguments(path.stem)))
    (tmp_path / "run.yaml").write_text(as_yaml(translation))
    written, typed = Draft(translation.kind), Draft(translation.kind)
    read_file(written, str(tmp_path / "run.yaml"))
    read_line(typed, [word for flags in equivalent(translation.items)[1] for word in shlex.split(flags)])
    assert typed.values.items() <= written.values.items()
    assert len(written.values) == len(typed.values)
    assert not written.complaints


def test_a_file_names_what_is_left_and_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"torchrun --nproc-per-node 4 pretrain_gpt.py {shlex.join(PLAIN)} --data-path $T --context-parallel-size 8\n"
    )
    main(["translate", str(script), "--yaml"])
    said = capsys.readouterr().out
    assert "# Start it by: megapar launch --nproc-per-node 4 pretrain_moe.py --config FILE\n" in said
    assert "# --data-path: the script takes it from $T\n" in said
    assert re.search(r"# \[\S+\] .*4", said)
    assert "\ncp_degree: 8\n" in said


def test_no_value_of_a_script_becomes_a_line_of_the_file(tmp_path: Path) -> None:
    """What cannot be read is a comment, also where sizes are left and no rule has looked at it."""
    words = [*PLAIN[2:], "--lr-decay-style", "x\nnum_layers: 7", "--clip-grad", "much\nseed: 8"]
    written = as_yaml(translate_line(take_apart(["pretrain_gpt.py", *words])))
    (tmp_path / "run.yaml").write_text(written)
    read = Draft("moe")
    read_file(read, str(tmp_path / "run.yaml"))
    assert not {"num_layers", "seed"} & read.values.keys()
    assert re.search(r"^# --clip-grad: .*much", written, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("gpt3_175b", 128),
        ("llama3_8b_fp8", 8),
        ("mixtral_8x7b", 32),
        ("deepspeed_llama2", 8),
        ("mindspeed_ampipe", 128),
        ("mindspeed_deepseek_v3", 512),
    ],
)
def test_what_is_supported_throughout_is_accepted_here(name: str, ranks: int) -> None:
    items = translate(arguments(name))
    launcher, trainer = equivalent([*items, *implicit_defaults(items, "megatron")])
    assert any(flag.startswith("--nproc-per-node") for flag in launcher)
    answer = check("moe", [f"--nproc-per-node {ranks}"], trainer)
    assert (answer.ranks, answer.complaints) == (ranks, ())
    assert {one.rule for one in answer.files} <= {"file-missing", "checkpoint-missing", "package"}  # wandb, for one


def test_meaning_is_kept() -> None:
    items = found(*arguments("mindspeed_ampipe"))
    assert items["--num-layers-per-virtual-pipeline-stage"].ours == "--vpp-degree 6 --pp-schedule interleaved"
    assert items["--moe-train-capacity-factor"].ours == "--moe-capacity-factor 1.1"
    assert items["--ampipe-degree"].verdict == "same"
    items = found(*arguments("gpt3_175b"))
    assert items["--lr-warmup-fraction"].ours == "--lr-warmup-iters 430"
    assert items["--rampup-batch-size"].ours == "--rampup-batch-size 16 16 5859375"
    items = found(*arguments("deepseek_v3"))
    assert items["--moe-layer-freq"].ours == "--first-k-dense 3"
    # The balance loss is one per sample, and is written once.
    assert items["--moe-aux-loss-coeff"].ours == "--moe-seq-aux-loss-coeff 1e-2 --moe-aux-loss-coeff 0"
    assert items["--moe-router-load-balancing-type"].verdict == "implied"
    items = found(*arguments("mindspeed_deepseek_v3"))
    assert items["--num-layers"].ours == "--num-layers 61"
    assert items["--moe-tp-extend-ep"].ours == "--expert-mp-degree 1"
    items = found(*arguments("llama3_8b_fp8"))
    assert items["--profile"].ours == items["--profile-step-end"].ours == "--profile 4:6"
    assert items["--mock-data"].ours == "--data-path mock"
    assert items["--rotary-percent"].verdict == "unnecessary"


def test_an_open_value_stays_with_its_argument() -> None:
    rate, path = open_values.mark("$LR"), open_values.mark("$DATA")
    items = found("--lr", rate, "--data-path", "0.3", path, "--train-data-path", "1", path)
    assert {flag: item.verdict for flag, item in items.items()} == dict.fromkeys(items, LEFT)
    assert list(items) == ["--lr", "--data-path", "--train-data-path"]


def test_the_last_of_two_values_counts() -> None:
    items = translate_line(take_apart([*PLAIN, "--lr", "2e-3", "--lr", "1e-3"])).items
    words = " ".join(equivalent(items)[1]).split()
    assert words.count("--lr") == 1
    assert parse("moe", words, {}).optimizer.lr == 1e-3


DIFFERING = """
--num-experts 0, --normalization layernorm, --position-embedding-type learned, --activation gelu, --add-bias-linear, \
--attention-dropout 0.1, --hidden-dropout 0.1, --adam-beta2 0.999, --weight-decay 0.01, --lr-decay-style linear, \
--dtype fp32, --eval-interval 0, --log-interval 100, --depth-scaled-init
"""


def test_defaults_that_differ_are_added() -> None:
    more = added(*PLAIN)
    assert {item.ours for item in more.values()} >= set(DIFFERING.strip().split(", "))
    assert "--initial-loss-scale" not in more
    assert "--moe-aux-loss-coeff" not in more  # there are no experts
    assert "--split" not in more  # there are no data to split
    said = "--swiglu --disable-bias-linear --num-experts 8 --fp16 --data-path d --eval-interval 5 --mtp-num-layers 1"
    more = added(*said.split())
    assert not {"--swiglu", "--add-bias-linear", "--num-experts", "--bf16"} & set(more)
    assert more["--moe-aux-loss-coeff"].ours == "--moe-aux-loss-coeff 0"
    assert more["--initial-loss-scale"].ours == "--initial-loss-scale 4294967296"
    assert more["--split"].ours == "--split 969,30,1"
    assert more["--eval-iters"].ours == "--eval-iters 100"
    assert more["--mtp-loss-scaling-factor"].ours == "--mtp-loss-weight 0.1"
    assert more["--micro-batch-size"].verdict == LEFT
    more = added("--fp16", "false", "--swiglu", "false", "--weight-decay", "none", "--add-bias-linear", "false")
    assert {"--bf16", "--swiglu", "--weight-decay"} <= set(more)
    assert "--add-bias-linear" not in more  # switched off is what it says
    assert added("--eod-mask-loss")["--calculate-per-token-loss"].verdict == OTHER
    assert "--adam-beta2 0.999" not in {item.ours for item in added("--optimizer", "sgd").values()}
    assert added("--lr-decay-style", "WSD")["--lr-wsd-decay-style"].ours == "--lr-wsd-decay-style exponential"


@pytest.mark.parametrize(
    ("line", "framework"),
    [
        ("pretrain_gpt.py --num-layers 4 --swiglu", "megatron"),
        ("pretrain_gpt.py --num-layers 4 --use-fused-rotary-pos-emb", "mindspeed"),
        ("pretrain_gpt.py --num-layers 4 --deepspeed --zero-stage 1", "deepspeed"),
        ("deepspeed pretrain_gpt.py --num-layers 4", "deepspeed"),
        ("python -m paddle.distributed.launch train.py --bf16 1", "paddle"),
        ("torchrun run_pretrain.py --bf16 1", "paddle"),
        ("posttrain_gpt.py --num-layers 4", "mindspeed"),
        ("--model.num_layers 24 --model.normalization LayerNorm --train.bf16 true", "megatron"),
        ("--language_model.num_layers 24 --language_model.gated_linear_unit false --bf16 true", "megatron"),
        ("--language_model.num_layers 24 --model_parallel.fp16 false --train_iters 5", "megatron"),
        ("--model.num_layers 24 --model.hidden_size 64 --seed 1", "megatron"),
        ("--num-layers 4 --ampipe-degree 2 --moe-alltoall-overlap-comm", "mindspeed"),
    ],
)
def test_the_framework_is_recognised(line: str, framework: str) -> None:
    assert framework_of(take_apart(line.split())) == framework


def assert_nothing_has_to_be_filled_in(said: str) -> None:
    """The command can be pasted as it is."""
    command = said[said.index("megapar launch") :].partition("\n\n")[0]
    assert not re.findall(r"\b[A-Z]{3,}\b|[<>$`]|your", command)
    assert command.count("\\\n") == command.count("\n")


def test_a_script_as_it_lies_there_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    main(["translate", str(FOLDER / "arrays.sh")])
    said = capsys.readouterr().out
    assert_nothing_has_to_be_filled_in(said)
    assert said.startswith("# Megatron-LM: pretrain_gpt.py, started by torchrun in line 56\n")
    command = "megapar launch --nproc-per-node 8 --nnodes 2 --rdzv-endpoint localhost:6000 pretrain_moe.py"
    assert command in said
    for flag in ("--global-batch-size 32", "--train-iters 100", "--dtype bf16", "--vocab-size 32000"):
        assert f"    {flag} \\\n" in said
    assert "--initial-loss-scale 4096: the loss is scaled only with fp16" in said
    assert "--save '$1': the script takes it from $1" in said
    assert "refused here" not in said
    main(["translate", str(FOLDER / "arrays.sh"), "SLURM_NNODES=1", "/ckpt", "corpus"])
    said = capsys.readouterr().out
    assert "--nnodes 1 pretrain_moe.py" in said
    assert "    --save /ckpt \\\n" in said
    assert "    --data-path corpus \\\n" in said
    assert "    --split 969,30,1 \\\n" in said
    for words in (["bash", str(FOLDER / "arrays.sh"), "/ckpt"], [f"bash {FOLDER / 'arrays.sh'} /ckpt"]):
        main(["translate", "--", *words])
        assert "    --save /ckpt \\\n" in capsys.readouterr().out
    main(["translate", str(FOLDER / "strings.sh")])
    said = capsys.readouterr().out
    assert_nothing_has_to_be_filled_in(said)
    assert said.startswith("# Megatron-DeepSpeed: pretrain_gpt.py, started by deepspeed in line ")
    assert "--data-path your data path: the script contains only a placeholder" in said
    assert "    --eval-interval 0 \\\n" in said
    assert "# Left to you: --data-path\n" in said
    assert "refused here" not in said


def test_a_slurm_script_says_its_nodes(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=1\n#SBATCH --gpus-per-node 8\n"
        "srun --ntasks-per-node 1 torchrun --nproc_per_node $SLURM_GPUS_PER_NODE --nnodes $SLURM_NNODES "
        "--rdzv_endpoint $HEAD:29500 pretrain_gpt.py --num-layers 4\n",
        encoding="utf-8",
    )
    for assigned, nodes in (({}, "4"), ({"SLURM_NNODES": "2"}, "2")):
        (line,) = read_source(script, assigned, ()).lines
        assert line.starters == ("srun", "torchrun")
        items = translate(line.arguments, "megatron", line.launcher)
        assert equivalent(items)[0] == ["--nproc-per-node 8", f"--nnodes {nodes}"]
        assert {item.flag: item for item in items}["--rdzv_endpoint"].verdict == LEFT


def test_what_is_left_is_named_by_the_flag_that_takes_it_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["torchrun", "--nproc_per_node", "8", "--nnodes", "2", "--node_rank", "0", "pretrain_gpt.py", *PLAIN]
    words += ["--vocab-file", "v.json", "--merge-file", "m.txt"]
    main(["translate", "--", *words, "--tokenizer-name-or-path", "your path", "--kv-channels", "your number"])
    said = capsys.readouterr().out
    assert "# LEFT TO YOU: --head-dim\n" in said
    assert "# Left to you: --node-rank --tokenizer-model\n" in said
    assert "  --tokenizer-name-or-path 'your path' -> --tokenizer-model: the script contains only a placeholder" in said


def test_the_same_training_is_said_and_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PLAIN, "--timing-log-level", "2", "--data-path", "your data path"]
    assert main(["translate", "--", *words]) == SAME_TRAINING
    said = capsys.readouterr().out
    assert "# The same training, except for random numbers" in said
    assert "# Left to you: --data-path\n" in said
    line = said[said.index("pretrain_moe.py") + len("pretrain_moe.py") :].partition("\n\n")[0].replace("\\\n", " ")
    config = parse("moe", shlex.split(line), {})
    assert (config.optimizer.adam_beta2, config.optimizer.weight_decay) == (0.999, 0.01)
    assert (config.optimizer.lr_decay_style, config.training.dtype) == ("linear", "fp32")


def test_rules_are_not_asked_of_a_part_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--", "--tensor-model-parallel-size", "8", "--swiglu"]) == SAME_TRAINING
    said = capsys.readouterr().out
    assert "# Not checked against the rules of the trainers, because sizes are left to you\n" in said
    assert "--hidden-size" in said.partition("\n\n")[0]
    assert "refused here" not in said


def test_other_ranks_are_named_where_the_scripts_are_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["torchrun", "--nproc_per_node", "4", "pretrain_gpt.py", *PLAIN, "--pipeline-model-parallel-size", "2"]
    assert main(["translate", "--", *words, "--tensor-model-parallel-size", "4"]) == OTHER_TRAINING
    said = capsys.readouterr().out
    assert "# REFUSED here for 4 ranks (as in the script); 8 ranks would be accepted: see the last section\n" in said
    assert "\nrefused here (1)\n  [world-size] " in said
    assert main(["translate", "--", *words, "--tensor-model-parallel-size", "2"]) == SAME_TRAINING


@pytest.mark.parametrize("entry", ["pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "pretrain_vlm.py"])
def test_scripts_of_other_models_are_not_translated(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--", "torchrun", "--nproc_per_node", "8", entry, *PLAIN]) == OTHER_TRAINING
    said = capsys.readouterr().out
    assert f"# NOT TRANSLATED: {entry} is for " in said
    assert "megapar launch" not in said.partition("renamed")[0]


def test_arguments_of_a_file_are_those_of_a_line(tmp_path: Path) -> None:
    nested = {"model": {"num_layers": 2, "bf16": True, "fp16": False, "load": None}, "data_path": ["1", "a b"]}
    plain = tmp_path / "run.json"
    plain.write_text(json.dumps(nested), encoding="utf-8")
    same = tmp_path / "run.yaml"
    same.write_text(
        "model:\n  num_layers: 2\n  bf16: true\n  fp16: False\n  load: null\ndata_path: ['1', a b]\n", encoding="utf-8"
    )
    for path in (plain, same):
        (line,) = read_source(path, {}, ()).lines
        items = {item.flag: item for item in translate(line.arguments, "megatron")}
        assert items["--model.num_layers"].ours == "--num-layers 2"
        assert items["--model.bf16"].ours == "--dtype bf16"
        assert (items["--model.fp16"].verdict, items["--model.fp16"].ours) == ("unnecessary", "")
        assert items["--model.load"].verdict == "unnecessary"
        assert items["--data_path"].ours == "--data-path 1 'a b'"


def test_json_has_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    main(["translate", "--json", "--", "--num-layers", "2", "--num-key-value-heads", "4", "--warp-speed", "9"])
    items = json.loads(capsys.readouterr().out)
    assert set(items[0]) == {"flag", "value", "verdict", "ours", "reason", "default", "decides", "here"}
    assert [item["verdict"] for item in items if not item["default"]] == ["same", "renamed", "unknown"]


def test_unreadable_and_empty_inputs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        "run.sh": "bash train.sh 8\n",
        "broken.sh": "if true; then\ntorchrun pretrain_gpt.py\n",
        "list.yaml": "- 1\n",
        "empty.json": "{}",
        "torn.json": '{"a": ',
        "other.sh": "python tools/preprocess_data.py --input x\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for words, message in (
        ([], "nothing to translate"),
        (["--"], "nothing to translate"),
        ([str(tmp_path / "none.sh")], "cannot be read"),
        ([str(tmp_path / "run.sh")], "Line 1 calls train.sh"),
        ([str(tmp_path / "broken.sh")], "line 1: fi is missing"),
        ([str(tmp_path / "list.yaml")], "has no keys with values"),
        ([str(tmp_path / "empty.json")], "has no keys with values"),
        ([str(tmp_path / "torn.json")], "cannot be read"),
        ([str(tmp_path / "other.sh")], "nothing in it starts a training script"),
        (["pretrain_gpt.py"], "pass the command that starts it after --"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["translate", *words])
        assert stopped.value.code == NOTHING, words
        assert message in capsys.readouterr().err


def test_the_page_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "translate.md").read_text(encoding="utf-8")
    script = tmp_path / "train.sh"
    script.write_text(page.partition("<<'EOF'\n")[2].partition("\nEOF\n")[0], encoding="utf-8")
    assert main(["translate", str(script)]) == SAME_TRAINING
    said = capsys.readouterr().out.splitlines()
    shown = [line for line in page.split("```")[3].splitlines()[1:] if line.strip() not in ("", "...", "... \\")]
    assert len(shown) > 20
    assert [line for line in shown if line not in said] == []


def test_trainers_take_the_aliases() -> None:
    line = ["--num-key-value-heads", "2", "--mock-data", "--moe-train-capacity-factor", "1.5"]
    config = parse("moe", [*line, "--moe-model-type", "deepspeed_moe"], {})
    assert config.model.num_query_groups == 2
    assert config.data.data_path == ("mock",)
    assert config.value("moe_capacity_factor") == 1.5


def test_a_missing_package_of_a_store_is_this_machine_s_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri, "find_spec", lambda name: None)
    translation = translate_line(take_apart(["pretrain_gpt.py", *PLAIN, "--mock-data", "--save", "s3://b/x"]))
    assert translation.answer is not None
    assert translation.starts
    assert [one.rule for one in translation.answer.files] == ["package"]


def test_a_loop_around_a_start_is_one_start(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("while true; do\ntorchrun pretrain_gpt.py --num-layers 2\nsleep 10\ndone\n", encoding="utf-8")
    assert len(read_source(script, {}, ()).lines) == 1


def test_arguments_of_a_script_need_no_dashes_between(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text('torchrun pretrain_gpt.py --hidden-size 64 "$@"\n', encoding="utf-8")
    main(["translate", str(script), "--num-layers", "4"])
    printed = capsys.readouterr().out
    assert "--hidden-size 64" in printed
    assert "--num-layers 4" in printed


def test_a_quotation_that_does_not_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["translate", "--", "torchrun x.py --save 'x"])
    assert "the command line cannot be read: No closing quotation" in capsys.readouterr().err


def test_arguments_behind_a_file_are_added_to_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("max_steps: 10\nmax_seq_length: 64\n", encoding="utf-8")
    for dashes in ([], ["--"]):
        main(["translate", str(tmp_path / "run.yaml"), *dashes, "--max_steps", "99"])
        assert "--train-iters 99" in capsys.readouterr().out
