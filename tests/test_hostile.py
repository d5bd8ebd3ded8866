"""Files from strangers: whatever they hold, reading them ends in what was asked for or in the parser's own error.

Checkpoints have theirs in tests/core/checkpoint, indexed data and safetensors in tests/data and tests/training.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapar.arguments import FLAGS, parse
from megapar.config.published import flags_of
from megapar.config.published import read_config as read_published
from megapar.config.stored import stored_schedule
from megapar.data.tokenizer import load_tokenizer
from megapar.errors import ConfigError, DataError

ONE_FILE = [HealthCheck.function_scoped_fixture]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FLAG_VALUES = st.dictionaries(st.sampled_from(sorted(FLAGS)) | st.text(max_size=8), JSON, max_size=6)


def read_config(path: Path) -> None:
    try:
        parse("moe", ["--config", str(path)], {})
    except ConfigError:
        return


@settings(max_examples=150, deadline=None, suppress_health_check=ONE_FILE)
@given(content=st.binary(max_size=120) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_configuration_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    read_config(path)


@settings(max_examples=150, deadline=None, suppress_health_check=ONE_FILE)
@given(values=FLAG_VALUES)
def test_any_value_of_any_flag_is_taken_or_refused(tmp_path: Path, values: dict[str, object]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    read_config(path)


def test_a_configuration_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    made = tmp_path / "made"
    path.write_text(f"seed: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{made}']]\n")
    with pytest.raises(ConfigError):
        parse("moe", ["--config", str(path)], {})
    assert not made.exists()


def test_a_configuration_that_doubles_itself_takes_no_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 [lol, lol]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError):
        parse("moe", ["--config", str(path)], {})


SMALL_MODEL = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "num_attention_heads": 4, "hidden_size": 64},
    **{"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 256},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e4, "tie_word_embeddings": False, "norm_topk_prob": True},
}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("architectures", [["x"]], "architectures is"),
        ("architectures", 3, "architectures is 3"),
        ("hidden_size", "a", "of another kind"),
        ("rope_scaling", [1], "of another kind"),
        ("sliding_window", "a", "of another kind"),
        ("rms_norm_eps", "a", "of another kind"),
        ("num_experts_per_tok", "a", "of another kind"),
        ("num_attention_heads", 0, "of another kind"),
        ("num_hidden_layers", -3, "--num-layers is at least 1"),
        ("num_hidden_layers", 2.5, "--num-layers takes a whole number"),
        ("vocab_size", None, "--vocab-size takes a whole number"),
        pytest.param("hidden_size", 10**399, "--hidden-size takes a whole number", id="400 digits"),
    ],
)
def test_one_odd_value_of_a_published_model_is_refused(tmp_path: Path, key: str, value: object, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL_MODEL, "use_sliding_window": True}), encoding="utf-8")
    assert flags_of(read_published(tmp_path))[1]["vocab_size"] == 100
    path.write_text(json.dumps({**SMALL_MODEL, "use_sliding_window": True, key: value}), encoding="utf-8")
    with pytest.raises(ConfigError, match="load-hf") as caught:
        parse("moe", ["--load-hf", str(tmp_path)], {})
    assert said in str(caught.value)


def test_a_published_model_as_deep_as_a_well_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 200_000, encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("moe", ["--load-hf", str(tmp_path)], {})


def test_a_schedule_of_other_things_than_numbers_and_texts_is_none(tmp_path: Path) -> None:
    for style, read in (("cosine", True), (None, True), ([1], False), ({"a": 1}, False)):
        schedule = {"style": style, "peak": 1.0}
        (tmp_path / "scalars.json").write_text(json.dumps({"schedule": schedule}), encoding="utf-8")
        assert stored_schedule(tmp_path) == (schedule if read else None)


def read_tokenizer(path: Path) -> None:
    try:
        assert load_tokenizer(path).size > 0
    except DataError:
        return


@settings(max_examples=60, deadline=None, suppress_health_check=ONE_FILE)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_sentencepiece_model_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.model"
    path.write_bytes(content)
    read_tokenizer(path)


SOUND = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}


@settings(max_examples=80, deadline=None, suppress_health_check=ONE_FILE)
@given(key=st.sampled_from(sorted(SOUND)), value=JSON)
def test_one_wrong_spot_in_a_tokenizer_is_refused_or_harmless(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**SOUND, key: value}), encoding="utf-8")
    read_tokenizer(path)


def test_a_tokenizer_folder_with_code_runs_none(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / "evil.py").write_text(f"open({str(made)!r}, 'w')\nclass T: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.T"}}))
    with pytest.raises(DataError):
        load_tokenizer(tmp_path)
    assert not made.exists()
