"""Every shipped configuration goes through the real command line at its rank count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megapar.arguments import SCRIPTS, Config, parse
from megapar.config.read import about
from megapar.errors import ConfigError
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.planning.variation import nearest
from megapar.training.loop.outline import outline

FOLDER = Path(__file__).parents[1] / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))
# Files whose start says something, and how that begins.
SAID = {
    "ampipe-paper": ["[ampipe-fine]"]  # eight slices, as published
}
ANYWHERE = ("ernie-quickstart", "tiny", "moe-10m")  # on as many ranks as there are


def kind_of(path: Path) -> str:
    """Of the trainer that the file names."""
    return {script: kind for kind, script in SCRIPTS.items()}[about([str(path)]).script]


def load(path: Path) -> Config:
    """At its own number of ranks, and what says none at two."""
    ranks = () if "world_size:" in path.read_text(encoding="utf-8") else ("--world-size", "2")
    return parse(kind_of(path), ["--config", str(path), "--validate-only", *ranks], {}, planning=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_is_accepted_at_its_rank_count(path: Path) -> None:
    config = load(path)
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config.grid.world_size == said.get("world_size", 2)
    assert ("world_size" in said) == (path.stem not in ANYWHERE)
    assert [text.split()[0] for text in config.warnings] == SAID.get(path.stem, [])
    assert config.notes == ()
    assert re.search(r"^# source: .+$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert about([str(path)]).script


@pytest.mark.parametrize(
    ("name", "ranks", "total", "active"),
    [
        ("ernie-4.5-300b-a47b", 2016, 299.5e9, 47.9e9),
        ("ernie-4.5-21b-a3b", 8, 21.8e9, 3.35e9),
        ("ernie-3.0-10b", 384, 10e9, 10e9),
        ("ernie-3.0-titan-260b", 1920, 260.9e9, 260.9e9),
    ],
)
def test_counts_of_published_models_are_printed(name: str, ranks: int, total: float, active: float) -> None:
    config = load(FOLDER / f"{name}.yaml")
    assert config.grid.world_size == ranks
    said = re.search(r"^parameters: ([\d.]+) B(?:, ([\d.]+) B active per token)?$", outline(config), re.MULTILINE)
    assert float(said[1]) * 1e9 == pytest.approx(total, rel=0.02)
    assert float(said[2] or said[1]) * 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_has_a_plan(path: Path) -> None:
    """It fits the device that it names as it starts: without what only a plan assumes."""
    plan = Plan(load(path), device_kind(about([str(path)]).device_kind or "h100-80g"))
    assert plan.fullest.peak > plan.fullest.parameters > 0
    assert plan.fits, plan.advice()
    assert 0 < plan.speed.mfu < 1


@pytest.fixture
def four(tmp_path: Path) -> str:
    """A file of four ranks."""
    path = tmp_path / "four.yaml"
    text = "script: pretrain_moe.py\nworld_size: 4\nmp_degree: 2\nglobal_batch_size: 16\ndata_path: mock\n"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(kind: str, *line: str, ranks: int = 1) -> str:
    """The complaints about a start, on so many ranks."""
    with pytest.raises(ConfigError) as error:
        parse(kind, line, {"WORLD_SIZE": str(ranks)})
    return "\n".join(map(str, error.value.complaints))


def test_a_file_has_a_number_of_ranks(four: str) -> None:
    asked = parse("moe", ["--config", four, "--validate-only"], {"WORLD_SIZE": "1"})
    assert (asked.grid.world_size, asked.grid.sharding) == (4, 2)
    assert parse("moe", ["--config", four, "--validate-only", "--world-size", "8"], {}).grid.sharding == 4
    assert parse("moe", ["--config", four], {"WORLD_SIZE": "4"}).grid.world_size == 4
    said = refused("moe", "--config", four, ranks=2)
    assert "--world-size 4, WORLD_SIZE 2" in said
    assert "Start 4 ranks (on one node: `megapar launch --nproc-per-node 4` ..), or set --world-size 2" in said
    assert parse("moe", ["--config", four, "--world-size", "2"], {"WORLD_SIZE": "2"}).grid.world_size == 2


def test_the_quickstart_in_one_process_says_what_to_type() -> None:
    config = str(FOLDER / "quickstart.yaml")
    said = refused("moe", "--config", config)
    assert "[world-size-launched]" in said
    assert "megapar launch --nproc-per-node 2" in said
    assert parse("moe", ["--config", config, "--validate-only"], {}).grid.ep == 2


@pytest.mark.parametrize("name", ["glm-4.5-air", "kimi-k2", "moonlight-16b-a3b"])
def test_a_model_that_was_trained_with_muon_is_trained_with_it(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    found = parse("moe", ["--config", str(path), "--data-path", "mock", "--validate-only"], {}).optimizer
    assert (found.optimizer, found.muon_scale_mode, found.muon_extra_scale_factor) == ("muon", "spectral", 0.2)
    assert "arXiv" in path.read_text(encoding="utf-8").partition("\nscript:")[0]


def test_an_elastic_job_finds_a_layout_for_fewer_ranks_than_its_file_says(four: str) -> None:
    found = nearest("moe", ["--config", four, "--micro-batch-size", "1"], 4, 2)
    assert parse("moe", found.flags, {"WORLD_SIZE": "2"}).grid.world_size == 2


def test_a_file_of_the_other_trainer_is_told_by_its_name(four: str) -> None:
    said = refused("ernie", "--config", four, "--no-such-flag")
    assert f"[script] {four} is for pretrain_moe.py, and this is pretrain_ernie.py. Start pretrain_moe.py," in said
    assert "[unknown-flag]" in said
    assert len(said.splitlines()) == 2  # nothing that only follows from the missing file
    Path(four).write_text("script: pretrain_gpt.py\n", encoding="utf-8")
    assert "not one of pretrain_moe.py, pretrain_ernie.py" in refused("moe", "--config", four)


def test_what_only_a_plan_knows_is_said(four: str) -> None:
    text = Path(four).read_text(encoding="utf-8")
    Path(four).write_text(text + "assume: fp8 dualpipe\n", encoding="utf-8")
    config = parse("moe", ["--config", four, "--validate-only"], {})
    assert config.warnings[0].startswith("the file assumes fp8, dualpipe, which only `megapar plan` supports")


def test_a_name_that_others_begin_with_is_understood() -> None:
    assert f"Did you mean {FOLDER}/mixtral-8x7b.yaml?" in refused("moe", "--config", str(FOLDER / "mixtral"))


V100 = device_kind("v100-32g")


def at_ranks(name: str, ranks: int, *more: str) -> Config:
    """A configuration of PaddlePaddle's pull request on sharding: its four layouts, and the size it was made for."""
    line = ["--config", str(FOLDER / f"{name}.yaml"), "--validate-only", "--world-size", str(ranks), *more]
    return parse("ernie", line, {}, planning=True)


@pytest.mark.parametrize(
    ("name", "sizes", "steps"),
    [
        ("sharding-32", (1, 32, 1), 1),
        ("sharding-8-dp-4", (4, 8, 1), 4),
        ("mp-8-sharding-4", (1, 4, 8), 1),
        ("mp-2-sharding-4-dp-4", (4, 4, 2), 1),
    ],
)
def test_the_four_layouts_shard_parameters(name: str, sizes: tuple[int, int, int], steps: int) -> None:
    config = at_ranks(name, 32)
    assert (config.grid.dp, config.grid.sharding, config.grid.mp) == sizes
    assert config.sharding.gradient_merge_acc_step == steps
    assert config.sharding.sharding_stage == 3
    assert config.sharding.sharding_segment_strategy == "segment_broadcast_MB"
    assert config.sharding.segment_broadcast_mb == 32


def test_a_model_that_fits_no_rank_is_cut_by_the_first_layout() -> None:
    """98 B parameters over 32 ranks: what a rank keeps of them is what stage 3 says."""
    large = ("--num-layers", "64", "--hidden-size", "11264", "--num-attention-heads", "88")
    large = (*large, "--recompute-interval", "1", "--micro-batch-size", "1")
    whole, cut = (Plan(at_ranks("sharding-32", 32, *large, "--sharding-stage", stage), V100).fullest for stage in "13")
    assert whole.parameters == pytest.approx(98.2e9 * 2, rel=0.02)  # in fp16, as a V100 has it
    assert cut.parameters == pytest.approx(98.2e9 * 4 / 32, rel=0.02)  # masters are the parameters
    assert cut.peak < whole.peak / 8


def test_the_100_b_model_fits_its_64_gpus_and_not_the_32_of_the_examples() -> None:
    config = at_ranks("ernie-100b", 64)
    plan = Plan(config, V100)
    assert sum(row.numel for row in plan.run.table) == pytest.approx(98.2e9, rel=0.01)
    assert config.training.dtype == "fp16"
    assert (config.grid.mp, config.grid.sharding, config.sharding.sharding_stage) == (8, 8, 3)
    assert plan.fits, plan.advice()
    few = Plan(at_ranks("ernie-100b", 32, "--sharding-degree", "4"), V100)
    assert not few.fits
    assert "64 ranks" in few.advice()
