"""Every published architecture is what its class in transformers is: the table of architectures and checks.

fp64 on both sides: what differs is an error, not rounding. No bound is wider than those of ``checks.py``; a class that
needs a wider one is refused instead of listed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from megapar.arguments import FLAGS, parse
from megapar.config.published import flags_of
from megapar.config.yaml_file import config_path, preset_names
from megapar.model.architectures import ARCHITECTURES, own_architecture
from megapar.rules.model import export_class
from tests.model.conformance.case import Case
from tests.model.conformance.checks import CHECKS, Figure
from tests.model.conformance.report import _write
from tests.model.conformance.rows import ROWS, Row

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def _parts(row: Row) -> set[tuple[str, object]]:
    """The parts of a row's class: its implied flags, whether it rotates halves, the factors that it has."""
    architecture = ARCHITECTURES[row.architecture]
    factors = {(name, "given") for name in row.settings if name.endswith(("multiplier", "scaling", "factor"))}
    return {*architecture.flags.items(), ("rotary_halves", architecture.rotary_halves), ("kind", row.kind), *factors}


def _covering() -> list[Row]:
    """First rows of architectures that together have every part of all of them, most new parts first."""
    first = {row.architecture: row for row in reversed(ROWS)}
    missing, chosen = set.union(*map(_parts, first.values())), []
    while missing:
        chosen.append(max(first.values(), key=lambda row: len(_parts(row) & missing)))
        missing -= _parts(chosen[-1])
    return chosen


# What a setting or another mixture of the same parts does to these the suite measures for every row. The other checks
# of rows without a part of their own are in ``-m table``.
FOR_EVERY_ROW = ("logits", "loss", "gradients", "refusals")
COVERING = _covering()
CELLS = [
    pytest.param(
        *(row, check),
        id=f"{row.name}-{check}",
        marks=[] if check in FOR_EVERY_ROW or row in COVERING else [pytest.mark.table],
    )
    for row in ROWS
    for check in CHECKS
]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One row after the other, so that all checks of one share its models."""
    return Case(request.param, tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize(("case", "check"), CELLS, indirect=["case"], scope="module")
def test_conformance(case: Case, check: str) -> None:
    found = CHECKS[check](case)
    figures = found if isinstance(found, dict) else {check: found}
    assert {name: f for name, f in figures.items() if isinstance(f, Figure) and not f.holds} == {}


# What a model is saved as that was not loaded from a folder, where it is not the row's own class.
_SAVED = {
    "Llama": "Ernie4_5ForCausalLM",
    "Llama, biases": "Ernie4_5ForCausalLM",
    "Llama, llama3 rope": "Ernie4_5ForCausalLM",
    "Mistral": "Ernie4_5ForCausalLM",
    "Mistral, linear rope": "Ernie4_5ForCausalLM",
    "Mixtral": "Ernie4_5_MoeForCausalLM",
    "Mixtral, one choice": "Ernie4_5_MoeForCausalLM",
    "Ernie, masked LM": "ErnieForPreTraining",
}
_PRESETS = {
    "": "ernie-3.0-10b ernie-3.0-titan-260b",
    "ErnieForPreTraining": """
        ernie-100b ernie-3.0-base ernie-quickstart mp-2-sharding-4-dp-4 mp-8-sharding-4 sharding-32 sharding-8-dp-4""",
    "Ernie4_5ForCausalLM": """
        ernie-4.5-0.3b gpt-117m gpt-117m-recompute gpt-117m-recompute-offload gpt-117m-recompute-offload-partition
        gpt-117m-recompute-partition gpt3-175b llama-3-8b megatron-h100-119b megatron-h100-177b megatron-h100-314b
        megatron-h100-32b megatron-h100-7b""",
    "Ernie4_5_MoeForCausalLM": """
        ampipe-paper ernie-4.5-21b-a3b ernie-4.5-300b-a47b mindspeed-ampipe mindspeed-pipe-experts mixtral-8x7b moe-10m
        quickstart tiny""",
    "DeepseekV3ForCausalLM": "deepseek-v3 kimi-k2 moonlight-16b-a3b",
    "Glm4MoeForCausalLM": "glm-4.5-air",
    "GptOssForCausalLM": "gpt-oss-120b gpt-oss-20b",
    "Gemma3ForCausalLM": "gemma-3-1b",
    "Olmo3ForCausalLM": "olmo-3-7b",
    "SmolLM3ForCausalLM": "smollm3-3b",
    "OlmoeForCausalLM": "olmoe-1b-7b",
    "Qwen3ForCausalLM": "qwen3-8b",
    "Qwen3MoeForCausalLM": "qwen3-30b-a3b",
}


def test_every_row_is_saved_as_its_class() -> None:
    saved = {}
    for row in ROWS:
        config = transformers.AutoConfig.for_model(ARCHITECTURES[row.architecture].model_type, **row.settings)
        kind, flags = flags_of({**config.to_dict(), "architectures": [row.architecture]})
        defaults = {name: flag.defaults[kind] for name, flag in FLAGS.items()}
        saved[row.name] = export_class({**defaults, **flags, "kind": kind}, None)
    assert saved == {row.name: _SAVED.get(row.name, row.architecture) for row in ROWS}


def test_every_preset_is_saved_as_its_class() -> None:
    saved = {}
    for name in preset_names():
        kind = "ernie" if "script: pretrain_ernie.py" in Path(config_path(name)).read_text(encoding="utf-8") else "moe"
        own = own_architecture(parse(kind, ["--config", name, "--rules-only"], {}).model)
        saved[name] = "" if own is None else own.name
    assert saved == {name: own for own, names in _PRESETS.items() for name in names.split()}


def test_every_architecture_has_a_row() -> None:
    assert {row.architecture for row in ROWS} == ARCHITECTURES.keys()


def test_the_page_has_every_row_and_keeps_those_that_were_not_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "conformance.md"
    rows = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows[1:]] == [row.name for row in ROWS]
    copy = tmp_path / "page.md"
    copy.write_text(page.read_text("utf-8"), "utf-8")
    again = f"| {ROWS[1].name} | 7 |"
    _write(copy, ["| class | x |", "| --- | --- |", "| at most | 1 |", again])
    kept = copy.read_text("utf-8").splitlines()
    assert [line for line in rows[1:] if line not in kept] == [rows[2]]
    assert again in kept


def test_the_table_is_of_the_pinned_transformers() -> None:
    pinned = re.search(r'"transformers==(\d+\.\d+)\.\*"', PYPROJECT.read_text(encoding="utf-8"))
    assert pinned is not None
    installed = ".".join(transformers.__version__.split(".")[:2])
    assert installed == pinned[1], (
        f"transformers {installed} is installed, and the table is of {pinned[1]}. Install that one (scripts/setup.sh "
        "dev), or compare with the new one: change the pin in pyproject.toml, run scripts/conformance.sh --write "
        "docs/conformance.md, and mend or refuse what differs"
    )
