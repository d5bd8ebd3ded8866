"""``megapar translate`` over the argument lists of public example scripts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.tools.main import main
from megapar.tools.translate import Translated, equivalent, translate
from megapar.tools.translation.verdict import VERDICTS

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


def arguments(name: str) -> list[str]:
    path = next(path for path in SCRIPTS if path.stem == name)
    lines = path.read_text(encoding="utf-8").splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def found(*words: str) -> dict[str, Translated]:
    return {item.flag: item for item in translate(words)}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_argument_is_accounted_for(path: Path) -> None:
    words = arguments(path.stem)
    items = translate(words)
    assert [item.flag for item in items] == [word.partition("=")[0] for word in words if word.startswith("--")]
    for item in items:
        assert item.verdict in VERDICTS
        assert item.ours or item.reason, item
        assert "no such flag" not in item.reason, item


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
def test_what_is_supported_throughout_is_accepted_here(name: str, ranks: int, tmp_path: Path) -> None:
    launcher, trainer, more = equivalent(translate(arguments(name)))
    assert any(flag.startswith("--nproc-per-node") for flag in launcher)
    line = [word for flags in (*trainer, *more) for word in shlex.split(flags)]
    config = parse("moe", [*line, "--rules-only", "--world-size", str(ranks)], {})
    assert config.grid.world_size == ranks


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
    assert items["--q-lora-rank"].verdict == "unsupported"
    assert items["--multi-latent-attention"].verdict == "unsupported"
    # The balance loss is one per sample, and is written once.
    assert items["--moe-aux-loss-coeff"].ours == "--moe-seq-aux-loss-coeff 1e-2 --moe-aux-loss-coeff 0"
    assert items["--moe-router-load-balancing-type"].verdict == "implied"
    items = found(*arguments("mindspeed_deepseek_v3"))
    assert items["--num-layers"].ours == "--num-layers 61"
    assert items["--moe-tp-extend-ep"].ours == "--expert-mp-degree 1"
    items = found(*arguments("llama3_8b_fp8"))
    assert items["--profile"].ours == items["--profile-step-end"].ours == "--profile 4:6"
    assert items["--mock-data"].ours == "--data-path mock"
    assert items["--master_port"].ours == "megapar launch --rdzv-endpoint localhost:6000"
    assert items["--rotary-percent"].verdict == "unnecessary"
    assert found("--moe-layer-freq", "([0]+[1]*15)")["--moe-layer-freq"].ours == "--first-k-dense 1"
    assert found("--zero-stage", "3")["--zero-stage"].ours == "--sharding-stage 3"
    assert found("--swiglu")["--swiglu"].ours == "--activation swiglu"


def test_defaults_that_differ_are_said() -> None:
    _, _, more = equivalent(translate(["--num-layers", "2", "--hidden-size", "64"]))
    assert {"--activation gelu", "--position-embedding-type learned", "--num-experts 0"} <= set(more)
    assert "--moe-aux-loss-coeff 0" not in more  # there are no experts
    _, _, more = equivalent(translate(["--swiglu", "--disable-bias-linear", "--num-experts", "8"]))
    assert not {"--activation gelu", "--add-bias-linear", "--num-experts 0"} & set(more)
    assert "--moe-aux-loss-coeff 0" in more


def test_the_command_prints_a_page_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-layers", "2", "--num-key-value-heads", "4", "--warp-speed", "9"]
    assert main(["translate", "--", *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("megapar launch pretrain_moe.py \\\n    --num-layers 2 \\\n    --num-query-groups 4")
    assert "--warp-speed 9: no such flag here" in said
    assert main(["translate", "--json", "--", *words]) == 0
    items = json.loads(capsys.readouterr().out)
    assert set(items[0]) == {"flag", "value", "verdict", "ours", "reason"}
    assert [item["verdict"] for item in items] == ["same", "renamed", "unsupported"]
    with pytest.raises(SystemExit) as stopped:
        main(["translate"])
    assert stopped.value.code == 2


def test_trainers_take_the_aliases() -> None:
    line = [
        "--num-key-value-heads",
        "2",
        "--mock-data",
        "--moe-train-capacity-factor",
        "1.5",
        "--moe-model-type",
        "deepspeed_moe",
    ]
    config = parse("moe", line, {})
    assert config.model.num_query_groups == 2
    assert config.data.data_path == ("mock",)
    assert config.moe.moe_capacity_factor == 1.5
