"""The instruments of the table find what they are for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.model.conformance import checks, folders, theirs
from tests.model.conformance.case import Case
from tests.model.conformance.checks import OUTPUTS, RAW
from tests.model.conformance.exact import NarrowMade
from tests.model.conformance.rows import ROWS


def test_without_the_mode_a_class_in_fp64_is_not_exact(tmp_path: Path) -> None:
    """What the exact column is for, and that it sees what is narrower than fp64."""
    case = Case(ROWS[0], tmp_path)
    batch, seen = case.batches[0], NarrowMade()
    double = theirs.Published(case.row, case.exact().model).answer(batch, seen)
    error = float((double.logits - case.exact_answers[0].logits).abs().max())
    assert OUTPUTS < error / float(double.logits.abs().max()) < RAW
    assert any("float32" in name for name in seen.operators)


@pytest.mark.parametrize("setting", ["rms_norm_eps", "rope_theta"])
def test_a_model_that_is_a_little_different_is_found(setting: str, tmp_path: Path) -> None:
    case = Case(ROWS[0], tmp_path)
    value = 1.0001 * (case.model.config.rms_norm_eps if setting == "rms_norm_eps" else 50.0)
    other = Case(replace(case.row, settings={**case.row.settings, setting: value}), tmp_path)
    vars(case)["exact_answers"] = other.exact_answers
    assert case.model.config.to_dict() != other.model.config.to_dict()
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), other.model.parameters(), strict=True))
    assert not any(check(case).holds for check in (checks.logits, checks.loss, checks.gradients))


def test_a_folder_that_is_a_little_different_is_found(tmp_path: Path) -> None:
    case = Case(ROWS[0], tmp_path)
    made = case.folder
    assert folders.tensor_differences(made, made) == []
    with torch.no_grad():
        case.model.model.norm.weight[3] += 2.0**-20
    case.model.save_pretrained(tmp_path / "other", max_shard_size="60KB")
    assert folders.tensor_differences(made, tmp_path / "other") == ["model.norm.weight: other bits"]
    assert folders.config_differences(made, tmp_path / "other") == []


def test_a_refusal_that_does_not_name_its_setting_is_found(tmp_path: Path) -> None:
    row = replace(ROWS[0], refused=({"use_cache": False}, {"use_cache": False, "hidden_act": "gelu"}))
    found = checks.refusals(Case(row, tmp_path))
    assert not found.holds
    assert found.what[0] == "{'use_cache': False} is not refused"
    assert found.what[1].startswith("use_cache: ")
