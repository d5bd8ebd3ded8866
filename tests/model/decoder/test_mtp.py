"""Multi-token prediction: what it sees, what it is asked for, and a plain double of its arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention.mask import DeviceMask
from megapar.model.decoder.block import DecoderBlock
from megapar.model.decoder.mtp import Mtp, following
from megapar.model.layers.context import Context
from megapar.model.layers.rotary import RotaryEmbedding
from tests.model.small import DENSE, batch_for, build

AHEAD = replace(DENSE, mtp_depth=1)


def test_what_follows_and_what_is_asked_for() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]])
    # The second sample's third position ends a document whose border is not predicted across.
    labels = torch.tensor([[6, 7, 8, 9, 10], [2, 3, -100, 0, -100]])
    then, asked = following(tokens, labels)
    assert then[:, :4].tolist() == [[6, 7, 8, 9], [2, 3, 4, 0]]
    assert asked.tolist() == [[7, 8, 9, 10, -100], [3, -100, -100, -100, -100]]


def test_loss_by_hand() -> None:
    model = build(AHEAD, dtype=torch.float64)
    batch = batch_for(AHEAD)
    batch["labels"] = torch.cat((batch["tokens"][:, 1:], batch["tokens"][:, :1]), dim=1)
    got = model(batch).sums["mtp"]

    x, _, context = model._run(batch, None)
    word, mtp = model.tied_weight, model.mtp
    assert isinstance(mtp, Mtp)
    assert isinstance(mtp.block, DecoderBlock)
    then = batch["tokens"].roll(-1, 1)
    merged = torch.cat((mtp.embedding_norm(F.embedding(then, word)), mtp.hidden_norm(x)), -1) @ mtp.proj.weight.T
    logits = model.final_norm(mtp.block(merged, context)[0]) @ word.T
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)


def test_a_position_sees_the_next_token_and_none_behind_it() -> None:
    model = build(AHEAD, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 8, 32, dtype=torch.float64, generator=generator)
    tokens = torch.randint(67, (1, 8), generator=generator)
    angles = RotaryEmbedding(8, 1e4, torch.float64).angles(torch.arange(8)[None])
    context = Context(DeviceMask(AttentionMask(1, 8, causal=True)), None, 8, {AHEAD.attention.rope: angles})
    then, _ = following(tokens, tokens)
    plain, _ = model.mtp(hidden, then, model.tied_weight, context)
    tokens[0, 5] += 1
    changed, _ = model.mtp(hidden, following(tokens, tokens)[0], model.tied_weight, context)
    same = (plain == changed).all(-1)[0]
    assert same.tolist() == [True] * 4 + [False] * 4


def test_its_gradients_reach_the_embedding_the_layers_and_the_head() -> None:
    model = build(replace(AHEAD, tie_embeddings=False), dtype=torch.float64)
    model(batch_for(AHEAD)).sums["mtp"].backward()
    touched = {name for name, parameter in model.named_parameters() if float(parameter.grad.abs().sum()) > 0}
    assert touched == {name for name, _ in model.named_parameters()}


def test_at_most_one_block() -> None:
    with pytest.raises(ValueError, match="it must be 0 or 1"):
        replace(DENSE, mtp_depth=2)
