"""Windows of layers: what the flags say, what Megatron-LM's pair says, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapar.model.decoder.windows import (
    skip_text,
    to_window,
    window_or_none,
    window_text,
    windowed_layers,
    windowed_or_all,
)
from tests.model.small import DENSE


@pytest.mark.parametrize(
    ("text", "window"),
    [("128", 128), ("1", 1), ("127,0", 128), ("(127, 0)", 128), ("0,0", 1), ("none", 0), ("-1", 0), ("-1,0", 0)],
)
def test_a_window_is_read_as_megatron_s_or_as_a_number_of_keys(text: str, window: int) -> None:
    assert to_window(text) == window
    assert to_window(window_text(window)) == window


@pytest.mark.parametrize("text", ["0", "-2", "127,1", "127,-1", "-2,0", "1.5", "", "4,4,0", "all"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"keys after a position|not a number of at least 1"):
        to_window(text)
    assert window_or_none(text) == 0


@pytest.mark.parametrize(
    ("text", "layers", "found"),
    [
        ("0", 3, "1111"),
        ("2", 4, "10100"),  # layers 2 and 4, from 1, are full, and the block is like the last one
        ("3", 4, "11011"),
        ("1", 2, "000"),
        ("[1,0]*2", 4, "10100"),
        ("[1,0]*2+[1]", 4, "10101"),  # a number of the block's own
        ("[0]+[1]*3", 4, "01111"),
    ],
)
def test_layers_are_counted_from_one(text: str, layers: int, found: str) -> None:
    windowed = windowed_layers(text, layers)
    assert "".join(str(int(own)) for own in windowed) == found
    assert windowed_layers(skip_text(windowed), layers) == windowed


def test_a_wrong_list_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or 1"):
        windowed_layers("[1,2]", 2)
    assert windowed_or_all("[1,2]", 2) == (True, True, True)


def test_layers_have_the_window_by_their_global_number() -> None:
    sizes = replace(DENSE, num_layers=4, window_size=3, window_attn_skip_freq="2")
    assert [sizes.window_at(layer) for layer in range(4)] == [3, 0, 3, 0]
    assert [sizes.attention_at(layer).window for layer in range(2)] == [3, 0]
    assert sizes.windows == (3, 0, 3, 0)
    ahead = replace(sizes, mtp_depth=1, window_attn_skip_freq="[1,0,1,0,1]")
    assert ahead.windows == (3, 0, 3, 0, 3)
    assert DENSE.windows == (0,) * DENSE.num_layers


def test_two_spellings_are_one_model() -> None:
    facts = replace(DENSE, num_layers=4, window_size=3, window_attn_skip_freq="[1,0]*2").facts()
    assert facts == replace(DENSE, num_layers=4, window_size=3, window_attn_skip_freq="2").facts()
    assert (facts["window_size"], facts["window_attn_skip_freq"]) == (3, "2")


def test_sizes_refuse_a_negative_window() -> None:
    with pytest.raises(ValueError, match="window_size is -1"):
        replace(DENSE, window_size=-1)


@pytest.mark.parametrize("text", ["[1]*0", "0*[1]", "[1]*0+[0]*0"])
def test_a_list_of_no_layers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no layers"):
        windowed_layers(text, 4)
    assert windowed_or_all(text, 4) == (True,) * 5
