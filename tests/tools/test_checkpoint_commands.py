"""``megapar evaluate`` and ``megapar generate``: on one small run with a tokenizer, and on edited copies of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from megapar.arguments import FLAGS, SCRIPTS, parse, resolved_values
from megapar.checkpoints.export import export as exported
from megapar.checkpoints.ownership.data_facts import DataFacts
from megapar.checkpoints.ownership.identity import DataPhase, Identity, flags_of
from megapar.compatibility import check
from megapar.config.read import about
from megapar.config.yaml_file import preset_names
from megapar.data.fingerprint import Fingerprint
from megapar.data.tokenizers.sentencepiece_tokenizer import train as train_tokenizer
from megapar.errors import CheckpointError, Complaint, ConfigError
from megapar.tools import evaluate
from megapar.tools.generate import loaded, prompt_ids
from megapar.tools.main import main
from megapar.trainer import Outcome, train
from tests.support.training import SMALL

TEXT = "a rank holds a part of every layer and sends the rest of its rows to the others in turn"


class Run(NamedTuple):
    """A finished run. folder: of everything; saved: its checkpoints; data: its text; outcome: its result."""

    folder: Path
    saved: Path
    data: Path
    outcome: Outcome


def small(kind: str, folder: Path, *flags: str) -> Outcome:
    batch = f"--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --eval-interval 2 --save {folder / 'saved'}"
    line = [*SMALL[kind], *batch.split(), *flags]
    return train(parse(kind, line, {}), f"file://{folder / 'meet'}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    words = TEXT.split()
    texts = [" ".join(words[(7 * i + j * (1 + i % 5)) % len(words)] for j in range(30)) for i in range(60)]
    data, model = folder / "my.jsonl", folder / "my.model"
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    model.write_bytes(train_tokenizer(texts, 90))
    line = f"--data-path {data} --split 80,20 --tokenizer-model {model} --untie-embeddings-and-output-weights"
    layout = "--sharding-stage 2 --recompute-interval 1"
    return Run(folder, folder / "saved", data, small("moe", folder, *f"{line} {layout}".split()))


def again(run: Run, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the checkpoints whose record of the run is changed."""
    copy = tmp_path / "copy"
    shutil.copytree(run.saved, copy)
    path = copy / "iter_0000002" / "scalars.json"
    scalars = json.loads(path.read_text(encoding="utf-8"))
    change(scalars["identity"])
    path.write_text(json.dumps(scalars), encoding="utf-8")
    return copy


def test_an_evaluation_finds_the_loss_that_the_run_found(run: Run, tmp_path: Path) -> None:
    kind, *flags = evaluate.trainer_line([str(run.saved), "--data-path", str(run.data)])
    done = train(parse(kind, flags, {}), f"file://{tmp_path / 'meet'}")
    assert done.evaluation == pytest.approx(run.outcome.evaluation, rel=1e-6)
    assert done.iteration == 0


def test_the_line_has_the_model_and_no_layout(run: Run) -> None:
    line = evaluate.trainer_line([str(run.saved / "iter_0000002"), "--data-path", "x.jsonl", "--mp-degree", "2"])
    assert line[0] == "moe"
    assert {"--num-experts", "--hidden-size", "--untie-embeddings-and-output-weights"} <= set(line)
    assert not {"--sharding-stage", "--recompute-interval", "--save"} & set(line)
    assert line[line.index("--ckpt-step") + 1] == "2"
    assert line[line.index("--split") + 1] == "80,20"
    assert line[-2:] == ("--mp-degree", "2")


@pytest.mark.parametrize("name", preset_names())
def test_the_record_of_every_configuration_gives_its_model_on_one_rank(name: str) -> None:
    kind = {script: kind for kind, script in SCRIPTS.items()}[about([name]).script]
    config = parse(kind, ["--config", name, "--rules-only"], {"WORLD_SIZE": "2"}, planning=True)
    data = DataFacts((Fingerprint("x", "1", None, ""),), "98,2", config.training.seed, config.model.seq_length)
    identity = Identity("adamw", None, (DataPhase(0, ("x",), data),), {}, flags_of(config))
    line = [
        *evaluate._recorded(kind, identity, config.model.seq_length),
        "--data-path",
        "mock",
        *evaluate.NO_TRAINING,
        "--rules-only",
    ]
    again = flags_of(parse(kind, [*line, "--load", "runs/a"], {}, planning=True))
    model = [name for name in identity.flags if FLAGS[name].group in ("model", "moe", "data")]
    assert {name: again[name] for name in model} == {name: identity.flags[name] for name in model}


def test_text_is_read_as_the_run_read_it(run: Run, tmp_path: Path) -> None:
    def whole(identity: dict[str, Any]) -> None:
        identity["flags"]["document_per"] = "file"

    def older(identity: dict[str, Any]) -> None:
        del identity["flags"]["document_per"]

    for change, per in ((whole, "file"), (older, "paragraph")):
        line = [str(again(run, tmp_path / per, change)), "--data-path"]
        found = evaluate.trainer_line([*line, "texts"])
        assert found[found.index("--document-per") + 1] == per
        assert "--document-per" not in evaluate.trainer_line([*line, "my.jsonl"])
        assert evaluate.trainer_line([*line, "texts", "--document-per", "auto"]).count("--document-per") == 1


def test_other_text_is_held_out_as_a_whole(run: Run) -> None:
    line = evaluate.trainer_line([str(run.saved), "--eval-data-path", "0.5", "a.jsonl", "0.5", "b.jsonl"])
    at = line.index("--eval-data-path")
    assert line[at + 1 : at + 5] == ("0.5", "a.jsonl", "0.5", "b.jsonl")
    assert line[line.index("--data-path") + 1 :][:4] == line[at + 1 : at + 5]
    assert "--split" not in line


def test_data_that_is_not_known_is_asked_for(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Pass --eval-data-path PATH, all of which is evaluated, or --data-path"):
        evaluate.trainer_line([str(run.saved)])
    apart = again(run, tmp_path, lambda identity: identity["phases"][-1].update(split="apart"))
    with pytest.raises(ConfigError, match=r"separate held-out text \(--eval-data-path\)"):
        evaluate.trainer_line([str(apart), "--data-path", str(run.data)])


@pytest.mark.parametrize("word", ["--eval-tasks=a.jsonl", "--eval_tasks", "--Eval-Tasks"])
def test_tasks_alone_need_no_data_however_they_are_spelled(run: Run, word: str) -> None:
    line = evaluate.trainer_line([str(run.saved), word, *([] if "=" in word else ["a.jsonl"])])
    assert line[line.index("--data-path") + 1] == "mock"


def test_data_of_the_package_needs_no_path(run: Run, tmp_path: Path) -> None:
    def mock(identity: dict[str, Any]) -> None:
        identity["phases"][-1]["sources"][0]["name"] = "mock"

    line = evaluate.trainer_line([str(again(run, tmp_path, mock))])
    assert line[line.index("--data-path") + 1] == "mock"
    assert "--split" not in line


def test_a_tokenizer_with_other_ids_is_refused(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer(["quite another text, with other words"] * 3, 40))
    line = [str(run.saved), "--data-path", str(run.data), "--tokenizer-model"]
    with pytest.raises(ConfigError, match=r"other\.model has other ids"):
        evaluate.trainer_line([*line, str(other)])
    mine = str(run.folder / "my.model")
    assert evaluate.trainer_line([*line, mine]).count(mine) == 1
    older = again(run, tmp_path, dict.clear)  # a checkpoint that does not record its run
    assert evaluate.trainer_line([str(older), *line[1:], mine]).count(mine) == 1


def test_documents_that_may_have_been_trained_on_are_reported(run: Run, tmp_path: Path) -> None:
    kind, *flags = evaluate.trainer_line([str(run.saved), "--data-path", str(run.data)])
    assert list(evaluate._other_data(parse(kind, flags, {}))) == []
    grown = tmp_path / "grown.jsonl"
    grown.write_text(run.data.read_text(encoding="utf-8") * 2, encoding="utf-8")
    (note,) = evaluate._other_data(parse(kind, [*flags, "--data-path", str(grown)], {}))
    assert "grown.jsonl is read here only" in note
    assert "may have been trained on" in note


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "contains no readable checkpoint. Pass the folder of --save" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "has no checkpoint that was published" in capsys.readouterr().err


def test_a_checkpoint_that_was_saved_again_is_not_mistaken_for_the_older_one(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.saved, copy)
    shutil.copytree(copy / "iter_0000002", copy / "iter_0000002.e3")
    with pytest.raises(CheckpointError, match=r"iter_0000002 was saved again, as .*iter_0000002\.e3"):
        evaluate.trainer_line([str(copy / "iter_0000002"), "--data-path", str(run.data)])


def test_the_result_is_a_number_per_line() -> None:
    lines = evaluate.result_lines({"lm": math.log(2.0), "mtp": 1.0, "loss": 1.5})
    assert " | ".join(lines) == "loss 1.500000 | lm 0.693147 | mtp 1.000000 | perplexity 2"
    assert list(evaluate.result_lines({"mlm": 2.0, "loss": 2.0})) == ["loss 2.000000", "mlm 2.000000"]
    assert list(evaluate.result_lines({"lm": 800.0, "loss": 800.0}))[-1] == "perplexity inf"
    assert list(evaluate.result_lines({"lm": math.nan, "loss": math.nan}))[-1] == "perplexity nan"
    assert list(evaluate.result_lines({"lm": 2.0, "loss": 2.0}, causal=False))[-1] == "lm 2.000000"


def generate(run: Run, *options: str) -> int:
    return main(["generate", str(run.saved), "--max-new-tokens", "3", *options])


def test_generate_continues_prompts_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exported.tempfile, "tempdir", str(tmp_path))
    assert generate(run, "--prompt", "a rank", "--prompt", "the rest", "--temperature", "0") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a rank")
    assert "\nthe rest" in printed
    assert list(tmp_path.iterdir()) == []


def test_draws_are_from_all_tokens_unless_the_line_says_otherwise(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def drawn(self: Any, given: torch.Tensor, **asked_for: Any) -> torch.Tensor:
        asked.append(asked_for)
        return given

    monkeypatch.setattr(transformers.GenerationMixin, "generate", drawn)
    assert generate(run, "--prompt", "a rank", "--temperature", "2") == 0
    assert generate(run, "--prompt", "a rank", "--top-k", "3", "--top-p", "0.5") == 0
    assert [(one["top_k"], one["top_p"]) for one in asked] == [(0, 1.0), (3, 0.5)]


@pytest.mark.parametrize("widths", [(16, 8), (18, 8), (16, 6)])
def test_experts_of_any_width_continue_a_prompt(tmp_path: Path, widths: tuple[int, int]) -> None:
    """torch's grouped product takes rows of a multiple of 16 bytes only: in fp32 not those of 18 and 6 features."""
    hidden, ffn = widths
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4, max_position_embeddings=16)
    model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    prompt = torch.arange(3, 9)[None]
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    found = loaded(tmp_path, torch.device("cpu")).generate(prompt, max_new_tokens=6, do_sample=False)
    assert found.tolist() == expected.tolist()


def test_a_cache_keeps_the_export(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompt", "a rank", "--seed", "3", "--hf-cache", str(tmp_path))
    assert generate(run, *options) == 0
    first = capsys.readouterr().out
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("saved-iter_0000002-")
    monkeypatch.setattr(exported, "megapar_to_hf", None)
    assert generate(run, *options) == 0
    assert capsys.readouterr().out == first
    tokenizer = transformers.AutoTokenizer.from_pretrained(kept)
    assert prompt_ids(tokenizer, "a rank") == tokenizer("a rank", add_special_tokens=False)["input_ids"]
    assert generate(run, "--prompt", "a rank " * 40, "--hf-cache", str(tmp_path)) == 2
    assert "the model has positions for 16" in capsys.readouterr().err
    assert generate(run, "--prompt", "a rank", "--hf-cache", str(tmp_path), "--max-new-tokens", "50") == 0
    left = 16 - len(prompt_ids(tokenizer, "a rank"))
    assert f"note: the model has positions for 16, so at most {left} tokens follow" in capsys.readouterr().err


def test_a_prompt_is_a_message_of_a_chat(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", "a rank", "--temperature", "0", "--hf-cache", str(tmp_path))
    assert generate(run, *options, "--chat") == 2
    assert "--chat: the tokenizer has no chat template" in capsys.readouterr().err
    (kept,) = tmp_path.iterdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(kept)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %} in turn{% endif %}"
    tokenizer.save_pretrained(kept)
    assert generate(run, "--prompt", "user a rank in turn", *options[2:]) == 0
    raw = capsys.readouterr()
    assert "note: prompts are continued as they are; --chat puts them into" in raw.err
    assert generate(run, *options, "--chat") == 0
    answered = capsys.readouterr()
    assert (raw.out.removeprefix("user a rank in turn").strip(), "") == (answered.out.strip(), answered.err)


def test_a_disk_without_room_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert generate(run, "--prompt", "a", "--hf-cache", str(tmp_path / "new")) == 2
    assert f"GiB in {tmp_path / 'new'}, where 0.00 GiB are free. Choose another disk" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_tokenizer_asks_for_one(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.saved, copy, ignore=shutil.ignore_patterns("tokenizer"))
    line = ["generate", str(copy), "--prompt", "a", "--max-new-tokens", "1", "--hf-cache", str(tmp_path / "kept")]
    assert main(line) == 2
    assert "Pass that of the run with --tokenizer-model PATH" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
    assert main([*line, "--tokenizer-model", str(run.folder / "my.model")]) == 0


def test_an_encoder_continues_no_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small("ernie", tmp_path, "--data-path", "mock")
    assert main(["generate", str(tmp_path / "saved"), "--prompt", "a"]) == 2
    assert "an ERNIE encoder" in capfd.readouterr().err


def refused(line: Sequence[str]) -> tuple[Complaint, ...]:
    return check(resolved_values(line[0], line[1:], {})).refused


def test_named_sets_are_evaluated_without_training_data(run: Run) -> None:
    line = evaluate.trainer_line([str(run.saved), "--eval-data-path", "wiki=a.jsonl", "code=b.jsonl"])
    at = line.index("--data-path")
    assert line[at + 1 : at + 3] == ("a.jsonl", "b.jsonl")
    assert not refused(line)


@pytest.mark.parametrize("flags", [{"task": "sft"}, {"data_source": "hf"}, {"text_field": "content"}])
def test_tasks_alone_need_no_data_of_any_run(run: Run, tmp_path: Path, flags: dict[str, str]) -> None:
    other = again(run, tmp_path, lambda identity: identity["flags"].update(flags))
    line = evaluate.trainer_line([str(other), "--eval-tasks", "a.jsonl"])
    assert line[line.index("--data-path") + 1] == "mock"
    assert not refused(line)


def test_a_run_on_a_dataset_is_evaluated_on_files(run: Run, tmp_path: Path) -> None:
    hf = again(run, tmp_path, lambda identity: identity["flags"].update(data_source="hf"))
    assert not refused(evaluate.trainer_line([str(hf), "--eval-data-path", "held.jsonl"]))


def test_an_evaluation_sees_the_day_of_the_training(run: Run, tmp_path: Path) -> None:
    def resumed_later(identity: dict[str, Any]) -> None:
        identity["flags"].update(task="sft", chat_date="2026-01-05")
        identity["phases"][-1]["chat"] = {"day": "2026-01-01", "template": "x"}

    line = evaluate.trainer_line([str(again(run, tmp_path, resumed_later)), "--data-path", "c.jsonl"])
    assert line[line.index("--chat-date") + 1] == "2026-01-01"
