"""Rotary positions of other frameworks' lines: the formula that they scale by, and its numbers."""

from __future__ import annotations

import shlex

import pytest

from megapar.arguments import parse
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.rope_scaling import RopeScaling
from megapar.tools.translation.translated import equivalent, implicit_defaults, translate
from megapar.tools.translation.verdict import ANOTHER, CHANGING, IMPLIED, UNNECESSARY

# As scripts of Llama 3.1 8B are written for Megatron-LM; the batch, data and layout are left out.
LLAMA_3_1 = """
--swiglu --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072 --use-rotary-position-embeddings
--disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 --rotary-base 500000 --vocab-size 128256
--kv-channels 128 --use-rope-scaling --rope-scaling-factor 8.0 --rotary-percent 1.0 --micro-batch-size 1
--untie-embeddings-and-output-weights --train-iters 10 --lr 1e-4 --mock-data --attention-dropout 0 --hidden-dropout 0
"""
LATENT = "--multi-latent-attention"
YARN = f"{LATENT} --rotary-scaling-factor 40"
SCALED = "--rope-scaling-type yarn --rope-scaling-factor 40"


def verdicts(line: str, framework: str) -> dict[str, tuple[str, str]]:
    return {item.flag: (item.verdict, item.ours) for item in translate(line.split(), framework)}


def test_llama_3_1_is_the_published_model() -> None:
    items = translate(LLAMA_3_1.split(), "megatron")
    items += implicit_defaults(items, "megatron")
    assert [item for item in items if item.verdict in CHANGING] == []
    model = parse("moe", [word for text in equivalent(items)[1] for word in shlex.split(text)], {}).model
    assert isinstance(model, DecoderSizes)
    published = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert model.rope_scaling == RopeScaling(rope_type="llama3", original_max_position_embeddings=8192, **published)
    assert (model.rope_theta, model.rotary_dim, model.max_position_embeddings) == (500000.0, 128, 131072)


@pytest.mark.parametrize(
    ("framework", "line", "flag", "ours"),
    [
        ("megatron", "--use-rope-scaling", "--use-rope-scaling", "--rope-scaling-type llama3"),
        ("megatron", "--rotary-percent 0.5", "--rotary-percent", "--rotary-percent 0.5"),
        (
            *("megatron", "--rotary-seq-len-interpolation-factor 4", "--rotary-seq-len-interpolation-factor"),
            "--rope-scaling-type linear --rope-scaling-factor 4",
        ),
        ("megatron", YARN, "--rotary-scaling-factor", SCALED),
        ("megatron", f"{YARN} --rope-type yarn", "--rotary-scaling-factor", SCALED),
        ("megatron", f"{YARN} --mscale 0.7 --mscale-all-dim 0.7", "--mscale", "--mscale 0.7"),
        ("megatron", f"{YARN} --mscale 0.7 --mscale-all-dim 0.7", "--mscale-all-dim", "--mscale-all-dim 0.7"),
        ("megatron", f"{YARN} --mscale-all-dim 1.0", "--mscale-all-dim", "--mscale 1.0 --mscale-all-dim 1.0"),
        ("megatron", f"{YARN} --mscale 0.5", "--mscale", "--rope-attention-factor 1.1844439727056968"),
        (
            *("megatron", f"{YARN} --original-max-position-embeddings 512", "--original-max-position-embeddings"),
            "--original-max-position-embeddings 512",
        ),
        ("mindspeed", SCALED, "--rope-scaling-type", "--rope-scaling-type yarn"),
        ("mindspeed", SCALED, "--rope-scaling-factor", "--rope-scaling-factor 40"),
        ("mindspeed", f"{SCALED} --rope-scaling-beta-fast 16", "--rope-scaling-beta-fast", "--beta-fast 16"),
        (
            *("mindspeed", f"{SCALED} --rope-scaling-original-max-position-embeddings 4096"),
            *("--rope-scaling-original-max-position-embeddings", "--original-max-position-embeddings 4096"),
        ),
        (
            *("mindspeed", "--rope-scaling-type llama3 --low-freq-factor 1.0", "--low-freq-factor"),
            "--low-freq-factor 1.0",
        ),
        ("mindspeed", "--partial-rotary-factor 0.5", "--partial-rotary-factor", "--rotary-percent 0.5"),
    ],
)
def test_what_a_line_becomes(framework: str, line: str, flag: str, ours: str) -> None:
    verdict, written = verdicts(line, framework)[flag]
    assert written == ours
    assert verdict not in CHANGING


@pytest.mark.parametrize(
    ("framework", "line", "flag", "verdict"),
    [
        ("megatron", "--rotary-scaling-factor 40", "--rotary-scaling-factor", UNNECESSARY),
        ("megatron", f"{LATENT} --rotary-scaling-factor 1.0", "--rotary-scaling-factor", UNNECESSARY),
        ("megatron", f"{YARN} --rope-type rope", "--rotary-scaling-factor", UNNECESSARY),
        ("megatron", f"{YARN} --rope-type yarn", "--rope-type", IMPLIED),
        ("megatron", "--rope-type yarn", "--rope-type", UNNECESSARY),
        ("megatron", f"{LATENT} --rope-type yarn", "--rope-type", UNNECESSARY),
        ("megatron", f"{YARN} --mscale 1.0", "--mscale", UNNECESSARY),
        ("megatron", f"{YARN} --mscale 1.0 --mscale-all-dim 0.0", "--mscale-all-dim", UNNECESSARY),
        ("megatron", "--mscale 0.7", "--mscale", UNNECESSARY),
        ("megatron", "--mscale-all-dim 0.7", "--mscale-all-dim", UNNECESSARY),
        ("megatron", f"{LATENT} --use-rope-scaling", "--use-rope-scaling", UNNECESSARY),
        ("megatron", f"{LATENT} --rotary-percent 0.5", "--rotary-percent", ANOTHER),
        ("megatron", "--original-max-position-embeddings 512", "--original-max-position-embeddings", UNNECESSARY),
        ("megatron", "--rotary-seq-len-interpolation-factor 1", "--rotary-seq-len-interpolation-factor", UNNECESSARY),
        (
            *("megatron", "--use-rope-scaling --rotary-seq-len-interpolation-factor 4"),
            *("--rotary-seq-len-interpolation-factor", ANOTHER),
        ),
        ("mindspeed", "--rope-scaling-type longrope", "--rope-scaling-type", ANOTHER),
        ("mindspeed", "--beta-fast 16", "--beta-fast", UNNECESSARY),
        ("mindspeed", "--partial-rotary-factor 0.0", "--partial-rotary-factor", UNNECESSARY),
        ("mindspeed", "--long-mscale 1.2", "--long-mscale", UNNECESSARY),
    ],
)
def test_what_has_no_effect_or_is_another_model(framework: str, line: str, flag: str, verdict: str) -> None:
    assert verdicts(line, framework)[flag][0] == verdict
