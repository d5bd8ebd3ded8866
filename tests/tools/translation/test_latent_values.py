"""Arguments of multi-latent attention in Megatron-LM and MindSpeed, and DeepSeek-V3's launch lines."""

from __future__ import annotations

import pytest

from megapar.arguments import parse
from megapar.tools.translate import equivalent, implicit_defaults, translate
from tests.tools.test_translate import arguments, check

SIZES = {
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 192,
    "qk_norm": False,
}


@pytest.mark.parametrize("name", ["deepseek_v3", "mindspeed_deepseek_v3"])
def test_a_launch_line_of_deepseek_v3_has_its_attention(name: str) -> None:
    """The line's source is in its file, ``tests/tools/scripts``."""
    items = translate(arguments(name))
    _, trainer = equivalent([*items, *implicit_defaults(items, "megatron")])
    given = " ".join(word for word in trainer if not word.startswith("--world-size")).split()
    # The first line's batch is too small for its own stages on the ranks of its experts.
    config = parse("moe", ["--rules-only", "--world-size", "1024", *given, "--global-batch-size", "3840"], {})
    assert {key: config.value(key) for key in SIZES} == SIZES
    by_flag = {item.flag: item for item in items}
    assert by_flag["--qk-layernorm"].verdict == "implied"


def test_the_line_is_accepted() -> None:
    items = translate(arguments("mindspeed_deepseek_v3"))
    _, trainer = equivalent([*items, *implicit_defaults(items, "megatron")])
    answer = check("moe", ["--nproc-per-node 512"], trainer)
    assert (answer.ranks, answer.complaints) == (512, ())


@pytest.mark.parametrize("flag", ["--kv-lora-rank", "--qk-rope-head-dim", "--padded-base-length"])
def test_sizes_without_latent_attention_are_unnecessary(flag: str) -> None:
    (item,) = translate([flag, "64"])
    assert (item.verdict, item.ours) == ("unnecessary", "")


def test_the_size_of_plain_heads_is_kept() -> None:
    assert translate(["--kv-channels", "64"])[0].ours == "--head-dim 64"
    assert translate(["--multi-latent-attention", "--kv-channels", "64"])[1].ours == ""
