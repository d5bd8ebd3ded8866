"""A small DeepSeek-V3 as transformers writes it: trained on two ranks, exported, generating in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from tests.support.ranks import run_ranks
from tests.support.training import train_rank

STEPS = 100
SIZES = {
    **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    **{"n_shared_experts": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
}
LINE = (
    f"--data-path builtin --seq-length 64 --micro-batch-size 4 --global-batch-size 8 --train-iters {STEPS} --lr 3e-3 "
    "--lr-warmup-iters 5 --eval-interval 0 --moe-router-bias-update-rate 1e-3 --cp-degree 2 --ep-degree 2"
)


def loss_of(model: DeepseekV3ForCausalLM, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


@pytest.mark.table
def test_it_is_trained_and_generates(tmp_path: Path) -> None:
    """The exported model has learned what the run's losses say, and writes text that its tokenizer reads."""
    torch.manual_seed(0)
    start, end = tmp_path / "start", tmp_path / "end"
    DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).save_pretrained(start)
    line = f"--load-hf {start} --save-hf {end} {LINE}"
    records = run_ranks(2, train_rank, "moe", line.split(), group=False, timeout=400)[0].records
    assert len(records) == STEPS
    assert records[0].lm_loss > 6.5
    assert records[-1].lm_loss < 5.5
    tokenizer = AutoTokenizer.from_pretrained(end)
    before, after = (DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (start, end))
    text = tokenizer("The function returns a list of all names in the current scope.", return_tensors="pt")["input_ids"]
    assert loss_of(after, text) < loss_of(before, text) - 1
    written = after.generate(text[:, :4], max_new_tokens=16, min_new_tokens=16, do_sample=False)
    assert written.shape == (1, 20)
    assert tokenizer.decode(written[0])
