"""Multi-token prediction: one block behind the last layer that predicts the token after the next.

At position t it sees what the model made of tokens 0..t and the embedding of token t + 1, and predicts token t + 2:

    embedding of t + 1 -> norm -+
                                +-> proj [H, 2 H] -> block (dense) -> the model's final norm and head
    hidden of t        -> norm -+

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2) with the order of ERNIE 4.5: the embedding first, the hidden state
from behind the final norm, which the block's output passes too.

Shape letters: B batch, S sequence, H hidden, V vocabulary; S is cut over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import LayerOptions, Linear, look_up, vocabulary_range
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.layers.ampipe import Sliced, join
from megapar.model.layers.block import DecoderBlock
from megapar.model.layers.context import Context
from megapar.model.layers.loss import IGNORED
from megapar.model.layers.norm import make_norm
from megapar.moe.slicing import Slicing

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Mtp(nn.Module):
    """hidden [B, S(/mp), H], tokens t + 1 [B, S] -> [B, S(/mp), H].

    Ledger: embedding_norm, hidden_norm [H], proj [H, 2 H], whole on every mp rank, partial gradients under sequence
    parallelism; block.* a dense ``DecoderBlock``. The embedding's weight [V/mp, H] comes with the call.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        ep: Axis,
        emp: Axis,
        cp: ContextParallel,
        slicing: Slicing,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        H, norm, epsilon = sizes.hidden_size, sizes.normalization, sizes.layernorm_epsilon
        dtype, device, run = options["dtype"], options["device"], options.get("execution", DEFAULT).run
        self.mp, self.sequence_parallel = options["mp"], options["sequence_parallel"]
        self.start = vocabulary_range(sizes.vocab_size, self.mp)[0]
        self.embedding_norm = make_norm(norm, H, epsilon, dtype=dtype, device=device, run=run)
        self.hidden_norm = make_norm(norm, H, epsilon, dtype=dtype, device=device, run=run)
        self.proj = Linear(2 * H, H, bias=False, dtype=dtype, device=device)
        # Its number is that of a layer behind the last one: no experts, and dropout of its own.
        self.block = DecoderBlock(sizes, sizes.num_layers, ep=ep, emp=emp, cp=cp, slicing=slicing, **options)

    def forward(self, hidden: Tensor, tokens: Tensor, word: Tensor, context: Context) -> Tensor:
        """What the final norm and the head make predictions of. tokens: of ``following``."""
        embedded = look_up(tokens, word, self.start, self.mp, sequence_parallel=self.sequence_parallel)
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        x, _ = self.block(self.proj(both), context)
        return join(x, context) if isinstance(x, Sliced) else x


def following(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(token t + 1, label of t + 1) at every position t of [B, S].

    Nothing is asked for where t or t + 1 has no label, so that nothing is predicted across a border that the labels
    respect, and at the last position, whose next token nobody knows (nothing before it sees what stands there).
    """
    after = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), dim=1)
    asked = torch.where(labels == IGNORED, IGNORED, after)
    return torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1), asked
