"""What a run says of itself at its start."""

from __future__ import annotations

import pytest

from megapar.arguments import parse
from megapar.core.device.base import Device
from megapar.training.reports.messages import expert_products
from megapar.training.reports.terminal import describe
from tests.support.record import record

EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 32"
PIECES = f"{EXPERTS} --moe-model-type deepspeed_moe"
SMALL = "--hidden-size 64 --num-attention-heads 4 --num-layers 2"


class Without(Device):
    """Has no kernel for grouped products."""

    def grouped_lacks(self, dtype, widths):
        """Says what it was asked."""
        return f"asked for {dtype} of {list(widths)}"


@pytest.mark.parametrize(
    ("flags", "device", "said"),
    [
        (f"{EXPERTS} --bf16", Device(), "experts: one grouped GEMM for all experts of a rank"),
        (f"{EXPERTS} --dtype fp64", Device(), "reads once per layer: no kernel takes float64"),
        (f"{EXPERTS} --fp16", Without(), "reads once per layer: asked for torch.float16 of [32, 64]"),
        (f"{EXPERTS} --bf16 --mp-degree 2 --expert-mp-degree 2", Without(), "of [16, 64]"),
        (
            f"{EXPERTS} --ep-degree 2 --moe-model-type deepspeed_moe --use-pipe-experts",
            Without(),
            "one product per expert and piece of its rows",
        ),
        ("--num-experts 0", Without(), ""),
    ],
)
def test_the_form_of_the_experts_products_is_said(flags, device, said):
    world = 2 if "degree" in flags else 1
    config = parse("moe", f"{SMALL} {flags}".split(), {"WORLD_SIZE": str(world), "RANK": "0"})
    found = expert_products(config, config.model, device)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize(("tokens", "said"), [(0, True), (1, False)])
def test_a_step_whose_tokens_are_all_masked_says_so(tokens, said):
    assert ("every token is masked" in describe(record(3, predicted_tokens=tokens), 8)) is said
