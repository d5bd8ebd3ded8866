"""Rotary positions by layer: what the flags say, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapar.model.decoder.layer_ropes import (
    no_rope_text,
    rope_or_same,
    rope_text,
    roped_layers,
    roped_or_all,
    to_rope,
)
from megapar.model.rope import Rope
from megapar.model.rope_scaling import RopeScaling
from tests.model.small import DENSE, LATENT

LINEAR = RopeScaling(rope_type="linear", factor=8)


@pytest.mark.parametrize(
    ("text", "rope"),
    [
        ("same", None),
        ("10000", Rope(1e4)),
        ("1e4", Rope(1e4)),
        ("0.5", Rope(0.5)),
        ('{"rope_theta":50}', Rope(50.0)),
        ('{"rope_type": "linear", "rope_theta": 50, "factor": 8}', Rope(50.0, LINEAR)),
        (
            '{"rope_type":"yarn","rope_theta":50,"factor":4,"original_max_position_embeddings":9,"truncate":false}',
            Rope(50.0, RopeScaling(rope_type="yarn", factor=4, original_max_position_embeddings=9, truncate=False)),
        ),
    ],
)
def test_a_rope_is_one_value(text: str, rope: Rope | None) -> None:
    assert to_rope(text) == rope
    assert to_rope(rope_text(rope)) == rope


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("none", "neither same, a base, nor an object"),
        ("[1]", "neither same"),
        ("[" * 100_000, "neither same"),
        ("-3", "rope_theta is a number above 0"),
        ("NaN", "rope_theta is a number above 0"),
        ('{"rope_type":"linear","factor":8}', "lacks rope_theta"),
        ('{"rope_type":"yarn","rope_theta":50,"factor":8}', "lacks original_max_position_embeddings"),
        ('{"rope_type":"dynamic","rope_theta":50}', "type dynamic is not supported"),
        ('{"rope_theta":50,"factor":8}', "factor, which rope of the type default does not read"),
        ('{"rope_theta":50,"theta":8}', "theta, which rope"),
        (
            '{"rope_type":"yarn","rope_theta":10000,"factor":8,"original_max_position_embeddings":64,"beta_fast":1,'
            '"beta_slow":8}',
            "beta_slow must be at most",
        ),
    ],
)
def test_what_does_not_say_all_of_a_rope_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        to_rope(text)
    assert rope_or_same(text) is None


@pytest.mark.parametrize(
    ("text", "layers", "roped"),
    [
        ("0", 3, "1111"),
        ("4", 8, "111011100"),  # as Megatron-LM's --no-rope-freq 4
        ("[0,0,0,1]*2", 8, "111011100"),
        ("[1,0]*2", 4, "01011"),
        ("[0,1]*2", 4, "10100"),
        ("[1,0]*2+[1]", 4, "01010"),  # a number of the block's own
        ("[1]*3", 3, "0000"),
    ],
)
def test_layers_without_rope_are_those_of_megatron(text: str, layers: int, roped: str) -> None:
    found = roped_layers(text, layers)
    assert "".join(str(int(own)) for own in found) == roped
    assert roped_layers(no_rope_text(found), layers) == found


def test_a_wrong_list_has_rope_everywhere_until_a_rule_refuses_it() -> None:
    assert roped_or_all("[2]", 2) == (True, True, True)


def test_a_layer_has_the_rope_of_its_kind() -> None:
    plain, other = Rope(DENSE.rope_theta), Rope(50.0, LINEAR)
    sizes = replace(DENSE, num_layers=4, window_size=99, window_attn_skip_freq="2", window_rope=other)
    assert [sizes.rope_at(layer) for layer in range(4)] == [other, plain, other, plain]
    sizes = replace(sizes, no_rope_freq="3")
    assert [sizes.attention_at(layer).rope for layer in range(4)] == [other, plain, None, plain]
    assert replace(DENSE, position_embedding_type="learned").rope_at(0) is None
    with pytest.raises(ValueError, match="no_rope_freq must be 0"):
        replace(LATENT, no_rope_freq="2")


def test_two_spellings_are_one_model() -> None:
    sizes = replace(DENSE, num_layers=4, window_size=3, window_rope=Rope(DENSE.rope_theta), no_rope_freq="[0,1]*2")
    assert sizes.facts() == replace(sizes, window_rope=None, no_rope_freq="2").facts()
    other = replace(sizes, window_rope=Rope(50.0, LINEAR), no_rope_freq="2")
    read = type(sizes).from_facts(other.facts())
    assert (read.window_rope, read.no_rope_freq) == (other.window_rope, "2")
    assert read.facts() == other.facts()
