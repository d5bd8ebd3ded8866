"""What both sides are asked: batches, and what a model makes of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = (13, 9, 4)  # of the samples, the others end in padding
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Samples of unlike lengths.

    Attributes:
        tokens: [B, S] int64.
        valid: [B, S] bool, False for padding.
    """

    tokens: Tensor
    valid: Tensor

    @property
    def labels(self) -> Tensor:
        """[B, S], each token itself, as transformers wants them; no label for padding."""
        return self.tokens.masked_fill(~self.valid, IGNORED)

    @property
    def token_types(self) -> Tensor:
        """[B, S], one of two types, for encoders."""
        return self.tokens % 2

    @property
    def orders(self) -> Tensor:
        """[B], whether two sentences are swapped, for encoders."""
        return self.tokens[:, 0] % 2

    @property
    def next_labels(self) -> Tensor:
        """[B, S], the token after each one, as megapar wants them."""
        return torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class Answer:
    """What a model makes of a batch.

    Attributes:
        logits: Of tokens that are not padding, and of an encoder's second head, flat.
        loss: Mean cross-entropy, of an encoder the sum over its heads.
        gradients: By the names of the class's folders.
    """

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def batches(count: int, vocab_size: int) -> list[Batch]:
    """Draw batches, the same ones every time."""
    generator = torch.Generator().manual_seed(5)
    length = max(LENGTHS)
    valid = torch.arange(length) < torch.tensor(LENGTHS)[:, None]
    shape = (len(LENGTHS), length)
    drawn = [torch.randint(3, vocab_size, shape, generator=generator) for _ in range(count)]
    return [Batch(tokens.masked_fill(~valid, 0), valid) for tokens in drawn]


def norm(tensors: dict[str, Tensor]) -> float:
    """Norm of all tensors together."""
    return float(torch.stack([tensor.double().norm() for tensor in tensors.values()]).norm())
