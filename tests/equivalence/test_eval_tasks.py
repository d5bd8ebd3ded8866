"""Scores of tasks and bits per byte: on every layout those of one process, which are those of transformers, in fp64."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from megapar.arguments import parse
from megapar.checkpoints.export.export import exported
from megapar.data.eval_tasks import open_tasks
from megapar.data.tokenizers.load import load_tokenizer
from megapar.trainer import Outcome, Trainer, train
from megapar.training.loop.callbacks import TrainerCallback
from megapar.training.step.evaluate import row_scores
from tests.model.conformance.exact import widened
from tests.support.quiz import Files
from tests.support.training import COMMON, SMALL, last_wins, run

LAYOUTS = {
    "sharding mp": (4, "--mp-degree 2 --sequence-parallel --sharding-stage 2"),
    "stage 3": (2, "--sharding-stage 3"),
    "mp windows": (2, "--mp-degree 2 --window-size 8"),
    "cp": (2, "--cp-degree 2"),
    "cp ulysses": (2, "--cp-degree 2 --context-parallel-algo ulysses_cp_algo"),
    "pp": (2, "--pp-degree 2"),
    "pp interleaved": (2, "--pp-degree 2 --pp-schedule interleaved --vpp-degree 2 --num-layers 4"),
    "pp zero bubble": (2, "--pp-degree 2 --pp-schedule zero_bubble"),
    "ep": (2, "--ep-degree 2"),
    "ep capacity": (2, "--ep-degree 2 --moe-capacity-factor 1.0"),
    "cp mtp": (2, "--cp-degree 2 --mtp-depth 1"),
    "ampipe": (2, "--ep-degree 2 --ampipe-degree 2"),
}
OF_THE_MODEL = ("--num-layers", "--window-size", "--moe-capacity-factor", "--mtp-depth")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tasks"))


class Rows(TrainerCallback):
    """Keeps the scores of all rows after the last step."""

    def begin(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def after_step(self, iteration: int) -> None:
        trainer = self.trainer
        (task,) = trainer.corpus.eval_tasks
        self.found = row_scores(trainer.config, trainer.job, task, trainer.collate)


def evaluated(world_size: int, flags: Sequence[str]) -> dict[str, float]:
    outcome = run(world_size, "moe", *flags)
    assert outcome.evaluation is not None
    return outcome.evaluation


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("cp", "sharding mp") else [pytest.mark.table]) for name in LAYOUTS]
)
def test_scores_on_a_layout_are_those_of_one_process(files: Files, name: str) -> None:
    world_size, layout = LAYOUTS[name]
    words = layout.split()
    model = [word for i, flag in enumerate(words) if flag in OF_THE_MODEL for word in words[i : i + 2]]
    got, want = evaluated(world_size, files.flags(*words)), evaluated(1, files.flags(*model))
    assert {"score/quiz/acc", "score/quiz/acc_norm", "score/quiz/greedy", "score/quiz/perplexity"} < set(want)
    assert got == pytest.approx(want, rel=1e-10)


def test_log_likelihoods_are_those_of_transformers(files: Files, tmp_path: Path) -> None:
    rows, flags = Rows(), files.flags("--save", str(tmp_path / "saved"))
    train(parse("moe", last_wins((*SMALL["moe"], *COMMON), flags), {}), callbacks=[rows])
    (task,) = open_tasks([str(files.task)], load_tokenizer(files.model), 48)
    with exported(tmp_path / "saved", None, dtype=torch.float64) as folder, widened():
        forms = {"attn_implementation": "eager", "experts_implementation": "eager"}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        model = type(loaded)._from_config(loaded.config, dtype=torch.float64, **forms).eval()  # with exact frequencies
        model.load_state_dict(loaded.state_dict())
        for name, weight in rows.trainer.job.model.named_parameters():  # which the class loads in float32
            if name.endswith("router.weight"):
                model.model.layers[1].mlp.gate.weight.data.copy_(weight)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for number, (ids, own) in enumerate(task.rows):
        with torch.no_grad(), widened():
            logits = model(torch.from_numpy(ids[None, :-1])).logits[0, -own:]
        targets = torch.from_numpy(ids[-own:])
        wanted = logits.log_softmax(-1)[range(own), targets].sum().item()
        assert rows.found[0, number].item() == pytest.approx(wanted, abs=1e-10)
        assert rows.found[1, number].item() == (logits.argmax(-1) != targets).sum().item()
    texts = [json.loads(line) for line in files.task.read_text().splitlines()]
    whole = [record["context"] + text for record in texts for text in record.get("choices", [record.get("completion")])]
    for text, (ids, own) in zip(whole[3:], task.rows[3:], strict=True):
        assert tokenizer(text, add_special_tokens=False)["input_ids"][-own:] == ids[-own:].tolist()


def test_evaluations_move_nothing_of_a_run(files: Files) -> None:
    base = ("--hidden-dropout", "0.1", "--train-iters", "4", "--eval-interval", "1")
    quiet = tuple(word for word in files.flags(*base) if word not in ("--eval-tasks", str(files.task)))
    runs = [run(1, "moe", *files.flags(*base)), run(1, "moe", *quiet), run(1, "moe", *quiet, "--eval-interval", "0")]
    assert len({tuple((one.loss, one.grad_norm) for one in outcome.records) for outcome in runs}) == 1
    last = runs[0].records[-1]
    assert last.eval_scores == {k.removeprefix("score/"): v for k, v in (runs[0].evaluation or {}).items() if "/" in k}
    assert last.scalars()["eval_scores/quiz/acc"] == last.eval_scores["quiz/acc"]
    assert "eval_scores" not in runs[1].records[-1].to_dict()


def test_bits_per_byte_of_sets_and_of_all(files: Files, tmp_path: Path) -> None:
    """Documents' ends add to the loss and no byte, so that the bits are those of the text; weights of sets by bytes."""
    texts = {"one": ["a rank holds a part", "in turn"], "two": ["the rest of its rows to the others"] * 3}
    for name, lines in texts.items():
        content = "".join(json.dumps({"text": f"{text} " * 9}) + "\n" for text in lines * 9)
        (tmp_path / f"{name}.jsonl").write_text(content)
    words = [f"{name}={tmp_path / name}.jsonl" for name in texts]
    flags = [word for word in files.flags() if word not in ("--split", "80,20")]

    def found(world: int, *paths: str) -> Outcome:
        return run(world, "moe", *flags, "--eval-iters", "99", "--eval-data-path", *paths)

    record = found(1, *words).records[-1]
    again = found(2, *words).records[-1]
    assert again.eval_sets_bits_per_byte == pytest.approx(record.eval_sets_bits_per_byte, rel=1e-12)
    assert again.eval_bits_per_byte == pytest.approx(record.eval_bits_per_byte, rel=1e-12)
    encode = load_tokenizer(files.model).encode
    sums, sizes = {}, {}
    for name, lines in texts.items():
        ids = [len(encode(f"{text} " * 9)) + 1 for text in lines * 9]
        windows = (sum(ids) - 1) // 48
        bits = record.eval_sets_bits_per_byte[name]
        sums[name] = record.eval_sets[name] * windows * 48
        sizes[name] = sums[name] / (math.log(2) * bits)
        whole = sum(len(f"{text} " * 9) for text in lines * 9)
        assert sizes[name] == pytest.approx(round(sizes[name]), rel=1e-9)
        assert whole * 0.85 < sizes[name] <= whole
    overall = sum(sums.values()) / (math.log(2) * sum(sizes.values()))
    assert record.eval_bits_per_byte == pytest.approx(overall, rel=1e-12)
    assert record.scalars()["eval_bits_per_byte/one"] == record.eval_sets_bits_per_byte["one"]
