"""Files from strangers: whatever they hold, reading them ends in what was asked for or in the parser's own error.

Checkpoints have theirs in tests/checkpoints, indexed data and safetensors in tests/data and tests/training.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megapar.arguments import FLAGS, Config, parse
from megapar.checkpoints.format import layout
from megapar.checkpoints.format.faults import read_fault
from megapar.checkpoints.format.names import stored_facts, stored_scalars, stored_schedule
from megapar.checkpoints.ownership.owner import highest_epoch, read_lease
from megapar.checkpoints.save_load.folder import candidates
from megapar.config.check_data import check_data
from megapar.config.files import check_files
from megapar.config.published import Unsupported, flags_of, wrong_values
from megapar.config.published import read_config as read_published
from megapar.data.fingerprint import fingerprint_of_dataset
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokens.parts import claims
from megapar.data.tokens.prepared import read_hashes
from megapar.errors import CheckpointError, ConfigError, DataError, MegaparError
from megapar.files.manifest import Manifest
from megapar.files.tokenizer_files import BadTokenizer, stored_fingerprint, vocabulary_of
from megapar.model.architectures import ARCHITECTURES
from megapar.planning.assume import recorded_imbalance
from megapar.tools.launcher.failures import failed_ranks, first_failure
from megapar.tools.translation.source import UnreadableError, read_source
from megapar.training.reports.file_loggers import JsonLinesLogger
from megapar.training.reports.run_facts import _earlier_starts

YAML = st.text(alphabet=st.sampled_from("num_layers: \n[]{}-!&*'\"#|>lr1e0?,"), max_size=60)
ONE_FILE = [HealthCheck.function_scoped_fixture]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FLAG_VALUES = st.dictionaries(st.sampled_from(sorted(FLAGS)) | st.text(max_size=8), JSON, max_size=6)


def read_config(path: Path) -> None:
    with suppress(ConfigError):
        assert isinstance(parse("moe", ["--config", str(path)], {}), Config)


@settings(max_examples=300, deadline=None, suppress_health_check=ONE_FILE)
@given(st.binary(max_size=120) | (st.text(max_size=60) | YAML).map(lambda text: text.encode("utf-8", "surrogatepass")))
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


def test_aliases_are_refused_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    lines = ["a0: &a0 [lol, lol]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    path.write_text("\n".join([*lines, "seed: *a59"]))
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"line 2, column 10: aliases \(\*a0\) are not supported") as caught:
        parse("moe", ["--config", str(path)], {})
    assert len(str(caught.value)) < 1000
    with pytest.raises(UnreadableError, match="aliases"):
        read_source(path, {}, ())
    assert time.monotonic() - start < 10


def test_a_value_of_any_size_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for value in ("[" * 400 + "]" * 400, "x" * 10**4, "[" + "1, " * 1000 + "1]"):
        path.write_text(f"seed: {value}\nlr: {value}\n")
        with pytest.raises(ConfigError) as caught:
            parse("moe", ["--config", str(path)], {})
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("kind", ["pipe", "device", "too large"])
def test_special_and_endless_files_are_refused_at_once(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    place = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "too large": _huge}[kind]
    for name in ("c.yaml", "config.json", "iter_0000001/layout.json", "iter_0000001/scalars.json", "latest"):
        place(tmp_path / name)
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"c\.yaml cannot be read"):
        parse("moe", ["--config", str(tmp_path / "c.yaml")], {})
    with pytest.raises(Unsupported, match="cannot be read"):
        read_published(tmp_path)
    assert stored_facts(tmp_path, 1) is None
    assert stored_scalars(folder) == {}
    with pytest.raises(CheckpointError, match=r"layout\.json"):
        layout.read_layout(folder)
    found, problem = candidates(tmp_path)
    assert "latest" in problem or not found
    assert time.monotonic() - start < 10


DAMAGE = {
    "bytes": b"\xff\x00{",
    "deep": b'{"a": ' + b"[" * 200_000,
    "list": b"[]",
    "number": b"5\n",
    "values": b'{"layers": [[{}]], "step": 1e999, "iteration": 1%b, "features": 3, "weight_map": [[]]}\n'
    % (b"0" * 400),
    "zeros": b'{"layers": [{"min": 0, "p50": 0, "p90": 0, "max": 0}], "starts": 3, "own": 1, "lost": 1}',
}
READERS: dict[str, Callable[[Path], object]] = {
    "corruption.json": lambda path: read_fault(path.parent),
    "latest": lambda path: (highest_epoch(path.parent), candidates(path.parent)),
    "owner/1.json": lambda path: read_lease(path.parents[1], 1),
    "run.json": lambda path: _earlier_starts(path, 3),
    "metrics.jsonl": lambda path: path.is_file() and JsonLinesLogger(path, 3).close(),
    "x.experts.jsonl": lambda path: recorded_imbalance(path, 8, 4),
    "dataset_info.json": lambda path: list(check_data({"hf_dataset": str(path.parent), "data_source": "hf"})),
    "model.safetensors.index.json": lambda path: list(check_files({"load_hf": str(path.parent)})),
    "vocab.txt": lambda path: vocabulary_of(path.parent),
    "vocab.json": lambda path: vocabulary_of(path.parent),
    "a.model": lambda path: vocabulary_of(path.parent),
    "key": lambda path: claims(path.parent, "a"),
    "datasets--a--b/refs/main": lambda path: fingerprint_of_dataset("a/b"),
    "note.json": lambda path: (first_failure([str(path)]), failed_ranks({0: 1}, {0: str(path)}, "")),
    "c.hashes": lambda path: read_hashes(str(path.with_suffix("")), 1),
    "manifest.json": Manifest.read,
    "megapar.json": lambda path: stored_fingerprint(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_a_file_of_a_folder_is_its_reader_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    raw = []
    for kind in ("folder", "pipe", *DAMAGE):
        path = tmp_path / kind / name
        path.parent.mkdir(parents=True)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / kind))
        (tmp_path / kind / "w.safetensors").touch()
        if kind in DAMAGE:
            path.write_bytes(DAMAGE[kind])
        else:
            (os.mkfifo if kind == "pipe" else os.mkdir)(path)
        try:
            READERS[name](path)
        except (MegaparError, BadTokenizer):
            continue
        except Exception as error:
            raw.append(f"{kind}: {error!r}")
    assert raw == []


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


SMALL_MODEL = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "num_attention_heads": 4, "hidden_size": 64},
    **{"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 256},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e4, "tie_word_embeddings": False, "norm_topk_prob": True},
}


KEYS = sorted({one.name for architecture in ARCHITECTURES.values() for one in architecture.settings})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("architectures", [["x"]], "architectures is"),
        ("architectures", 3, "architectures is 3"),
        ("hidden_size", "a", "hidden_size is 'a', where a whole number of at least 1 is needed"),
        ("rope_scaling", [1], "rope_scaling is [1], where an object or null is needed"),
        ("sliding_window", "a", "sliding_window is 'a'"),
        ("rms_norm_eps", "a", "rms_norm_eps is 'a', where a number from 0 to 1"),
        ("num_experts_per_tok", "a", "num_experts_per_tok is 'a'"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_hidden_layers", -3, "num_hidden_layers is -3"),
        ("num_hidden_layers", 2.5, "num_hidden_layers is 2.5, where a whole number"),
        ("num_hidden_layers", 95994301, "num_hidden_layers is 95994301, where a whole number from 1 to 10000"),
        ("vocab_size", None, "vocab_size is None"),
        pytest.param("hidden_size", 10**399, "a number of about 400 digits", id="400 digits"),
        ("rope_theta", float("nan"), "rope_theta is nan, where a number above 0"),
        ("rope_theta", float("inf"), "rope_theta is inf"),
        pytest.param("rope_theta", 10**400, "rope_theta is a number of about 401 digits", id="theta of 401 digits"),
        ("rope_parameters", {"rope_theta": float("nan")}, "an object whose rope_theta is a number above 0"),
        ("rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06"),
        ("num_hidden_layers", True, "num_hidden_layers is True"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no', where true or false is needed"),
        ("mlp_only_layers", {"a": 1}, "mlp_only_layers is {'a': 1}, where a list of whole numbers"),
        ("attention_dropout", 7, "attention_dropout is 7, where a number from 0 to 1"),
        ("hidden_act", ["silu"], "hidden_act is ['silu'], where a string"),
    ],
)
def test_one_odd_value_of_a_published_model_is_refused(tmp_path: Path, key: str, value: object, said: str) -> None:
    path = tmp_path / "config.json"
    model = {**SMALL_MODEL, "use_sliding_window": True, "sliding_window": 256}
    path.write_text(json.dumps(model), encoding="utf-8")
    assert flags_of(read_published(tmp_path))[1]["vocab_size"] == 100
    path.write_text(json.dumps({**model, key: value}), encoding="utf-8")
    with pytest.raises(ConfigError, match="load-hf") as caught:
        parse("moe", ["--load-hf", str(tmp_path)], {})
    assert said in str(caught.value)


def test_as_many_layers_as_no_memory_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--num-layers.* 10000"):
        parse("moe", ["--num-layers", "1000000000", "--rules-only"], {})


def test_all_wrong_values_of_a_published_model_are_told_at_once() -> None:
    with pytest.raises(Unsupported) as caught:
        flags_of({**SMALL_MODEL, "hidden_size": "a" * 10**6, "vocab_size": -1, "rope_theta": [[[[[[1]]]]]]})
    said = str(caught.value)
    assert "hidden_size is" in said
    assert "vocab_size is -1" in said
    assert "rope_theta is [[[[...]]]]" in said
    assert len(said) < 1000


@settings(max_examples=200, deadline=None)
@example(values={"num_hidden_layers": 95994301})
@example(values={"num_hidden_layers": 821941107, "num_experts_per_tok": 821941107, "num_key_value_heads": 93156})
@example(values={"num_hidden_layers": 2**40, "mlp_only_layers": [0], "decoder_sparse_step": 2**40})
@given(values=st.dictionaries(st.sampled_from(KEYS), JSON | st.integers(0, 2**40), max_size=3))
def test_any_values_of_a_published_model_are_taken_or_refused(values: dict[str, object]) -> None:
    with suppress(Unsupported):
        assert flags_of({**SMALL_MODEL, **values})[1].keys() >= {"num_layers", "hidden_size"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_whatever_a_class_leaves_out_has_a_value_that_is_right(name: str) -> None:
    assert wrong_values(ARCHITECTURES[name], ARCHITECTURES[name].defaults) == []


def test_a_setting_of_another_class_means_nothing() -> None:
    assert flags_of({**SMALL_MODEL, "moe_k": None, "moe_num_experts": 0})[1]["num_experts"] == 4


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
    with suppress(DataError):
        assert load_tokenizer(path).size > 0


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


ADDED = {
    **{"content": "<x>", "single_word": False, "lstrip": False, "rstrip": False},
    **{"normalized": False, "special": True},
}


@settings(max_examples=80, deadline=None, suppress_health_check=ONE_FILE)
@given(key=st.sampled_from(sorted(SOUND)), value=JSON)
def test_one_wrong_spot_in_a_tokenizer_is_refused_or_harmless(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**SOUND, key: value}), encoding="utf-8")
    read_tokenizer(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", {**SOUND["model"], "vocab": {"a": 0, "[UNK]": 4 * 10**9}}, "the id 4,000,000,000"),  # type: ignore[dict-item]
        ("model", {**SOUND["model"], "vocab": {"a": 0, "[UNK]": 2 * 10**8}}, "the id 200,000,000"),  # type: ignore[dict-item]
        ("added_tokens", [{**ADDED, "id": 4 * 10**9}], "the id 4,000,000,000"),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
            "",
        ),
    ],
)
def test_a_tokenizer_of_a_stranger_is_refused_by_name(tmp_path: Path, key: str, value: object, said: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**SOUND, key: value}), encoding="utf-8")
    if said:
        with pytest.raises(BadTokenizer, match=said):
            vocabulary_of(path)
    with pytest.raises(DataError, match=f"tokenizer.json.*{said}"):
        load_tokenizer(path).encode("a" * 10**5 + "b")


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
