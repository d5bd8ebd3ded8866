"""TensorBoard files: the loss first, experts in few cards, hyper-parameters, perplexity, seconds and tokens."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megapar.training.reports.tensorboard import LAYOUT, LOSS, TensorBoardLogger
from tests.support.record import record

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
