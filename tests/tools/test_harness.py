"""``megapar evaluate --lm-eval``: lm-evaluation-harness itself, whose scores are those of ``--eval-tasks``."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.data.eval_tasks import EvalTask, open_tasks
from megapar.data.tokenizers.load import load_tokenizer
from megapar.errors import ConfigError
from megapar.tools import evaluate, harness
from megapar.tools.main import main
from megapar.trainer import Trainer, train
from megapar.training.loop.callbacks import TrainerCallback
from megapar.training.step.evaluate import row_scores
from tests.support.quiz import Files
from tests.support.training import COMMON, SMALL, last_wins

YAML = {
    "choices": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold",
    "completions": "output_type: loglikelihood\ndoc_to_target: completion",
}
METRICS = {"choices": ("acc", "acc_norm"), "completions": ("acc", "perplexity")}


def test_the_harness_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files, found = Files(tmp_path), dict[str, list[float]]()
    records = [json.loads(line) for line in files.task.read_text().splitlines()]
    paths = {}
    for name, text in YAML.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        own = [record for record in records if ("gold" in record) == (name == "choices")]
        paths[name].write_text("".join(json.dumps(record) + "\n" for record in own))
        metrics = "".join(f"  - metric: {metric}\n" for metric in METRICS[name])
        data = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {paths[name]}}}\ntest_split: test\n"
        rest = f"doc_to_text: context\ntarget_delimiter: ''\n{text}\nmetric_list:\n{metrics}"
        (tmp_path / f"{name}.yaml").write_text(f"task: quiz_{name}\n{data}{rest}")

    class Rows(TrainerCallback):
        def begin(self, trainer: Trainer) -> None:
            self.trainer = trainer

        def after_step(self, iteration: int) -> None:
            for task in self.trainer.corpus.eval_tasks:
                rows = row_scores(self.trainer.config, self.trainer.job, task, self.trainer.collate)
                found[task.name] = rows[0].tolist()

    flags = (
        *files.flags("--save", str(tmp_path / "saved"), "--dtype", "fp32"),
        "--eval-tasks",
        *map(str, paths.values()),
    )
    outcome = train(parse("moe", last_wins((*SMALL["moe"], *COMMON), flags), {}), callbacks=[Rows()])
    kept: list[Any] = []
    run = harness.evaluated
    monkeypatch.setattr(harness, "evaluated", lambda *given: kept.append(run(*given)) or kept[0])
    line = [str(tmp_path / "saved"), "--lm-eval", *(str(tmp_path / f"{name}.yaml") for name in YAML)]
    assert evaluate.main([*line, "--device", "cpu", "--micro-batch-size", "4"]) == 0
    (theirs,), ours = kept, outcome.evaluation
    assert ours is not None
    results = theirs["results"]
    for name in ("acc", "acc_norm"):
        assert results["quiz_choices"][f"{name},none"] == ours[f"score/choices/{name}"]
    assert results["quiz_completions"]["acc,none"] == ours["score/completions/greedy"]
    perplexity = ours["score/completions/perplexity"]
    assert results["quiz_completions"]["perplexity,none"] == pytest.approx(perplexity, rel=1e-5)
    for name in YAML:
        samples = sorted(theirs["samples"][f"quiz_{name}"], key=lambda sample: sample["doc_id"])
        said = [float(answer[0][0]) for sample in samples for answer in sample["resps"]]
        assert said == pytest.approx(found[name], abs=1e-5)
        assert len(said) == len(opened(paths[name], files).rows)


def opened(path: Path, files: Files) -> EvalTask:
    (task,) = open_tasks([str(path)], load_tokenizer(files.model), 48)
    return task


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_the_harness_it_says_how_to_install_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path), "--lm-eval", "arc_easy"]) == 2
    assert "pip install 'megapar[eval]'" in capsys.readouterr().err


def test_what_the_harness_does_not_take_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path), "--data-path", "mock", "--lm-eval", "arc_easy"]) == 2
    assert "--data-path has no effect" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--lm-eval runs in a single process"):
        evaluate.trainer_line([str(tmp_path), "--lm-eval", "arc_easy"])
    (tmp_path / "empty.yaml").write_text("group: x\n")
    for name, said in (("empty", "names no task"), ("none", "does not exist")):
        with pytest.raises(ConfigError, match=said):
            harness._tasks([str(tmp_path / f"{name}.yaml")])
    (tmp_path / "named.yaml").write_text("include: other.yaml\ntask: 'mine'  # a note\n")
    assert harness._tasks(["arc_easy,piqa", str(tmp_path / "named.yaml")]) == (
        ["arc_easy", "piqa", "mine"],
        [str(tmp_path)],
    )
