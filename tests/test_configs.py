"""Every shipped configuration goes through the real command line at its rank count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megapar.arguments import SCRIPTS, Config, parse
from megapar.planning.assume import assumed
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.training.sizes import outline

FOLDER = Path(__file__).parents[1] / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))
RUNNABLE = ("quickstart", "ernie-quickstart")


def header(path: Path) -> dict[str, str]:
    found = dict(re.findall(r"^# (source|script|ranks): (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(found) == {"source", "script", "ranks"}, (
        f"{path.name} does not say where it comes from and how to start it"
    )
    return found


def load(path: Path) -> Config:
    said = header(path)
    kind = {script: kind for kind, script in SCRIPTS.items()}[said["script"]]
    return parse(kind, ["--config", str(path), "--validate-only", "--world-size", said["ranks"]], {})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_is_accepted_at_its_rank_count(path: Path) -> None:
    config = load(path)
    assert config.grid.world_size == int(header(path)["ranks"])
    assert config.warnings == ()


@pytest.mark.parametrize("name", RUNNABLE)
def test_quickstart_runs_on_what_is_built(name: str) -> None:
    assert load(FOLDER / f"{name}.yaml").notes == ()


@pytest.mark.parametrize(
    ("name", "sizes", "steps"),
    [
        ("sharding-32", (1, 32, 1), 1),
        ("sharding-8-dp-4", (4, 8, 1), 4),
        ("mp-8-sharding-4", (1, 4, 8), 1),
        ("mp-2-sharding-4-dp-4", (4, 4, 2), 1),
    ],
)
def test_the_seed_examples_have_the_seed_layouts(name: str, sizes: tuple[int, int, int], steps: int) -> None:
    config = load(FOLDER / f"{name}.yaml")
    assert (config.grid.dp, config.grid.sharding, config.grid.mp) == sizes
    assert config.sharding.gradient_merge_acc_step == steps
    assert config.sharding.segment_broadcast_mb == 32


def test_presets_by_name() -> None:
    names = {path.stem for path in FILES}
    assert {"quickstart", "ernie-3.0-base", "gpt-117m", "ernie-4.5-21b-a3b", "ernie-4.5-0.3b"} <= names


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
    assert config.notes == ()
    said = re.search(
        r"^parameters: ([\d.]+) B(?:, of which a token passes ([\d.]+) B)?$", outline(config), re.MULTILINE
    )
    assert said is not None
    assert float(said[1]) * 1e9 == pytest.approx(total, rel=0.02)
    assert float(said[2] or said[1]) * 1e9 == pytest.approx(active, rel=0.02)


def test_published_sizes_of_the_21b_model() -> None:
    config = load(FOLDER / "ernie-4.5-21b-a3b.yaml")
    assert config.model.head_dim == 128
    assert config.training.global_batch_size == 128
    assert config.grid.ep == 8


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_has_a_plan(path: Path) -> None:
    said = dict(re.findall(r"^# (\w+): (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    config = load(path)
    plan = Plan(config, device_kind(said.get("device", "h100-80g")), assumed(said.get("assume", "").split()))
    assert plan.fullest.peak > plan.fullest.parameters > 0
    assert plan.fits or plan.layout.assumed.said, plan.advice()
    assert 0 < plan.speed.mfu < 1
