"""Classes with two kinds of layers: both forms of config.json are read as the class reads them, and written back."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from megapar.config.published import Unsupported, flags_of
from megapar.model.architectures import ARCHITECTURES

SIZES = {
    **{"vocab_size": 64, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 6, "num_attention_heads": 6},
    **{"head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
OWN = {"sliding_attention": {"rope_type": "linear", "rope_theta": 30.0, "factor": 2.0}}


def of_folder(name: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], **SIZES, **keys}


@pytest.mark.parametrize(
    ("name", "keys", "window", "skipped", "other"),
    [
        ("Olmo3", {}, "4096", "4", "same"),
        ("Olmo3", {"rope_theta": 500000, "rope_scaling": YARN}, "4096", "4", "500000"),
        ("Olmo3", {"rope_parameters": OWN}, "4096", "4", '{"rope_type":"linear","rope_theta":30.0,"factor":2.0}'),
        ("Olmo3", {"layer_types": ["full_attention"] * 6, "rope_parameters": OWN}, "none", "0", "same"),
        ("Olmo3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}, "4096", "4", "same"),
        ("Gemma3", {}, "4096", "6", "10000"),
        ("Gemma3", {"rope_theta": 300.0, "rope_local_base_freq": 70.0}, "4096", "6", "70"),
        ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "4096", "6", "10000"),
        ("Gemma3", {"sliding_window_pattern": 3, "sliding_window": 5}, "5", "3", "10000"),
        ("Gemma3", {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 50.0}}}, "4096", "6", "10000"),
    ],
)
def test_a_folder_is_read_as_by_its_class(
    name: str, keys: dict[str, Any], window: str, skipped: str, other: str
) -> None:
    folder = of_folder(name, **keys)
    flags = flags_of(folder)[1]
    assert [flags[key] for key in ("window_size", "window_attn_skip_freq", "window_rope")] == [window, skipped, other]
    kind = getattr(transformers, f"{name}ForCausalLM").config_class
    theirs = kind(**{key: value for key, value in folder.items() if key != "architectures"}).to_dict()
    assert flags_of({**theirs, "architectures": folder["architectures"]})[1] == flags
    settings = {**flags, "dtype": "float32", "init_std": 0.02}
    written = ARCHITECTURES[f"{name}ForCausalLM"].config(settings)
    assert flags_of(written)[1] == flags
    assert ARCHITECTURES[f"{name}ForCausalLM"].continued(folder, settings) == {**folder, "dtype": "float32"}


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("Olmo3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "only an object for each of"),
        ("Olmo3", {"rope_parameters": {**YARN, "rope_theta": 500000.0}}, "only an object for each of"),
        ("Gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "only an object for each of"),
        ("Olmo3", {"rope_theta": 10000.0}, "versions of transformers differ in the base of sliding_attention"),
        ("Olmo3", {"sliding_window": None}, "layers with a window need to know of how many keys"),
        ("Olmo3", {"layer_types": ["full_attention"]}, "list of full_attention and sliding_attention for its 6 layers"),
        ("Olmo3", {"layer_types": [["full_attention"]] * 6}, "list of full_attention and sliding_attention"),
        ("Olmo3", {"rope_parameters": {"sliding_attention": 5}}, "object whose sliding_attention is an object"),
        ("Gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "su"}}}, "type su is not supported"),
        ("Gemma3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type dynamic is not supported"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, but it is not capped here"),
        ("Gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("Gemma3", {"use_bidirectional_attention": True}, "sees earlier positions only"),
        ("Gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("Gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "reads images"),
    ],
)
def test_what_is_not_built_is_refused(name: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        flags_of(of_folder(name, **keys))


def test_the_scale_of_scores_is_that_of_the_class() -> None:
    for scalar, scale in ((8, 0.0), (20, 20**-0.5), (256, 0.0625)):
        folder = of_folder("Gemma3", query_pre_attn_scalar=scalar)
        flags = flags_of(folder)[1]
        assert flags["softmax_scale"] == scale
        settings = {**flags, "dtype": "float32", "init_std": 0.02}
        assert ARCHITECTURES["Gemma3ForCausalLM"].config(settings)["query_pre_attn_scalar"] == scalar


def test_training_on_longer_texts_keeps_what_a_scaling_depends_on() -> None:
    """Without an original length it is ``max_position_embeddings``, which the exported folder has another value of."""
    short = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0}
    folder = of_folder("Olmo3", rope_parameters={"full_attention": short, "sliding_attention": short})
    flags = flags_of(folder)[1]
    assert flags["window_rope"] == "same"
    settings = {**flags, "dtype": "float32", "init_std": 0.02, "max_position_embeddings": 256}
    again = ARCHITECTURES["Olmo3ForCausalLM"].continued(folder, settings)
    assert again["max_position_embeddings"] == 256
    assert flags_of(again)[1] == {**flags, "max_position_embeddings": 256}
