"""Multi-token prediction: one block after the last layer that predicts the token after the next.

At position t its inputs are the model's hidden state of tokens 0..t and the embedding of token t + 1. It predicts
token t + 2:

    embedding of t + 1 -> norm -+
                                +-> proj [H, 2 H] -> block -> final norm -> the model's head
    hidden of t        -> norm -+

The embedding comes first, and the hidden state is the output of the model's final norm. There are two blocks:

    dense    ERNIE 4.5: a dense MLP; the model's final norm also normalizes the block's output
    layer    DeepSeek-V3, GLM-4.5: like the last layer, usually with experts; the final norm is the block's own

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2), in the order of its published weights.

Shape letters: B batch, S sequence, H hidden, V vocabulary; S is split over mp under sequence parallelism, written
S(/mp).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import LayerOptions, Linear, look_up, vocabulary_range
from megapar.model.ampipe import Sliced, join
from megapar.model.decoder.block import DecoderBlock
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.layers.context import Context
from megapar.model.layers.norm import make_norm
from megapar.model.sizes import NO_LOSS
from megapar.moe.layer import MoeParts
from megapar.moe.stats import MoeStats

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Mtp(nn.Module):
    """Multi-token prediction block: hidden [B, S(/mp), H], tokens t + 1 [B, S] -> [B, S(/mp), H].

    Ledger: embedding_norm, hidden_norm [H], proj [H, 2 H], replicated over mp, with partial gradients under sequence
    parallelism; block.* a ``DecoderBlock``; final_norm [H], None if the model's final norm follows the block. The
    caller passes the embedding's weight [V/mp, H].
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        ep: Axis,
        emp: Axis,
        cp: ContextParallel,
        moe_parts: MoeParts | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        H, norm, epsilon = sizes.hidden_size, sizes.normalization, sizes.layernorm_epsilon
        dtype, device, run = options["dtype"], options["device"], options.get("execution", DEFAULT).run
        self.mp, self.sequence_parallel = options["mp"], options["sequence_parallel"]
        self.first_token = vocabulary_range(sizes.vocab_size, self.mp)[0]
        one_plus = sizes.apply_layernorm_1p
        make = partial(make_norm, norm, H, epsilon, dtype=dtype, device=device, run=run, one_plus=one_plus)
        self.embedding_norm, self.hidden_norm = make(), make()
        self.proj = Linear(2 * H, H, bias=False, dtype=dtype, device=device)
        # The block has the number after the last layer's, so it has a separate dropout stream.
        self.block = DecoderBlock(sizes, sizes.num_layers, ep=ep, emp=emp, cp=cp, moe_parts=moe_parts, **options)
        self.final_norm: nn.Module | None = None
        if sizes.ends_as_layer:
            self.final_norm = make()

    def forward(self, hidden: Tensor, tokens: Tensor, word: Tensor, context: Context) -> tuple[Tensor, MoeStats | None]:
        """Return the input of the head, [B, S(/mp), H], and the routing statistics of a block with experts.

        After a block without a norm, the caller applies the model's final norm. The arguments are the output
        of the model's final norm [B, S(/mp), H], tokens from ``following`` [B, S] and the embedding's weight [V/mp, H].
        """
        embedded = look_up(tokens, word, self.first_token, self.mp, sequence_parallel=self.sequence_parallel)
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        x, stats = self.block(self.proj(both), context)
        x = join(x, context) if isinstance(x, Sliced) else x
        return (x if self.final_norm is None else self.final_norm(x)), stats


def following(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (token t + 1, label of t + 1) for each position t of [B, S].

    The label is ignored if t or t + 1 has none, so that no prediction crosses a document border. It is also ignored
    at the last position, whose next token is unknown; the token there is arbitrary, because attention is causal.
    """
    after = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], NO_LOSS)), dim=1)
    next_labels = torch.where(labels == NO_LOSS, NO_LOSS, after)
    return of_next(tokens), next_labels


def of_next(values: Tensor) -> Tensor:
    """Return the value of the next position for each of [B, S]; the last one, without a label, keeps its own."""
    return torch.cat((values[:, 1:], values[:, -1:]), dim=1)
