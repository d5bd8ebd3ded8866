"""Loggers of files: metrics once over restarts, whatever a kill has left; TensorBoard's cards, the loss first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megapar.errors import FolderLostError
from megapar.files.paths import EXPERTS
from megapar.training.reports.file_loggers import LAYOUT, LOSS, JsonLinesLogger, TensorBoardLogger
from tests.support.record import record
from tests.training.reports.test_chosen_loggers import iterations


def test_repeated_and_broken_lines_go_and_the_others_stay(tmp_path: Path) -> None:
    path, experts = tmp_path / "m.jsonl", tmp_path / f"m{EXPERTS}"
    whole = "".join(json.dumps({"iteration": number, "loss": 1.5}) + "\n" for number in (1, 2, 3, 4))
    path.write_text(whole + '{"iter')
    experts.write_text("".join(json.dumps({"iteration": number, "layers": [[1]]}) + "\n" for number in (1, 2, 3)))
    JsonLinesLogger(path, 3).close()
    assert iterations(path) == iterations(experts) == [1, 2]
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:2])
    assert sorted(tmp_path.iterdir()) == sorted([path, experts])
    JsonLinesLogger(path, 1).close()
    assert path.read_text() == ""
    assert not experts.exists()


def test_a_file_of_another_run_is_not_touched(tmp_path: Path) -> None:
    path, lost = tmp_path / "m.jsonl", [False]

    def check() -> None:
        if lost[0]:
            raise FolderLostError("another run")

    logger = JsonLinesLogger(path, 1, check)
    logger.log(record(1))
    logger.flush()
    logger.log(record(2))
    lost[0] = True
    for call in (logger.flush, lambda: JsonLinesLogger(path, 1, check), logger.close):
        with pytest.raises(FolderLostError):
            call()
    assert iterations(path) == [1]


def test_seconds_tokens_and_perplexity_are_in_every_line(tmp_path: Path) -> None:
    logger = JsonLinesLogger(tmp_path / "m.jsonl", 1)
    logger.log(record(1, eval_lm_loss=0.0))
    logger.close()
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert (line["iteration_seconds"], line["consumed_tokens"], line["eval_perplexity"]) == (0.5, 1024, 1.0)
    assert line["perplexity"] == pytest.approx(4.481689)


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").write_text('{"iteration": 1}\n{"iteration": 2}\n')
    (tmp_path / "m.jsonl").symlink_to(tmp_path / "there")
    JsonLinesLogger(tmp_path / "m.jsonl", 2).close()
    assert (tmp_path / "m.jsonl").is_symlink()
    assert iterations(tmp_path / "there") == [1]


LAYERS = [{"min": 0.5, "p50": 1.0, "p90": 1.5, "max": 2.0}, {"min": 0.0, "p50": 0.5, "p90": 2.5, "max": 4.0}]
FLAGS = {"kind": "moe", "lr": 0.1, "data_path": ["a|b"], "load": None, "sequence_parallel": True}


def board(folder: Path) -> EventAccumulator:
    logger = TensorBoardLogger(folder, 3, FLAGS)
    for iteration in (3, 4):
        logger.log(record(iteration, expert_load=LAYERS, exposed_seconds={"shard/all_gather": 0.1}, eval_loss=2.0))
    logger.flush()
    logger.close()
    read = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    read.Reload()
    return read


def test_the_loss_is_first_and_experts_share_cards(tmp_path: Path) -> None:
    read = board(tmp_path)
    names = read.Tags()["scalars"]
    cards = sorted({name.partition("/")[0] for name in names})
    assert cards[0] == LOSS.partition("/")[0] == "loss"
    assert [name for name in names if name.startswith("moe/load")] == [f"moe/load_{p}" for p in LAYERS[0]]
    values = {name: read.Scalars(name)[-1].value for name in names}
    assert [values[f"moe/load_{p}"] for p in ("min", "p50", "p90", "max")] == [0.0, 0.75, 2.0, 4.0]
    assert values["run/consumed_tokens"] == 4096
    assert values["speed/step_seconds"] == 0.5
    assert abs(values["loss/perplexity"] - 4.481689) < 1e-5
    assert [event.step for event in read.Scalars(LOSS)] == [3, 4]
    assert [event.step for event in read.Histograms("moe/load_of_layers")] == [4]


def test_the_configuration_is_there_as_text_and_hyper_parameters(tmp_path: Path) -> None:
    read = board(tmp_path)
    text = read.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| lr | 0.1 |" in text
    assert r"a\|b" in text
    plugin = read.PluginTagToContent("hparams")
    assert b"sequence_parallel" in plugin["_hparams_/session_start_info"]
    assert LOSS.encode() in plugin["_hparams_/experiment"]
    assert all("Multiline" in chart for charts in LAYOUT.values() for chart in charts.values())


def test_a_number_too_large_for_a_perplexity_has_none() -> None:
    assert record(1, lm_loss=1e4).perplexity is None
    assert record(1, lm_loss=float("nan")).to_dict()["perplexity"] is None
    assert "eval_perplexity" not in record(1).to_dict()
