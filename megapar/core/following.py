"""What multi-token prediction reads and is asked for, from whole sequences.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_LOSS = -100


def following(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(token t + 1, label of t + 1) at every position t of [B, S].

    Nothing is asked for where t or t + 1 has no label, so that nothing is predicted across a border that the labels
    respect, and at the last position, whose next token nobody knows (nothing before it sees what stands there).
    """
    after = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], NO_LOSS)), dim=1)
    asked = torch.where(labels == NO_LOSS, NO_LOSS, after)
    return torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1), asked
