"""Packs of conversations as pieces of samples, each conversation whole and apart, with the weights of its targets."""

from __future__ import annotations

from pathlib import Path

from megapar.data.cache import hash_parts, make_once
from megapar.data.lazy_numpy import np
from megapar.data.sampling.packing_plan import VERSION, PackingPlan, best_fit, one_each
from megapar.data.tokens.conversations import ConversationStore

BEST_FIT, PAD = "best_fit", "pad"
"""The ways to place conversations in samples: as many as fit, or one in each."""

TOKEN, CONVERSATION = "token", "conversation"
"""What counts equally in the loss: each target, or each conversation, whose targets share its weight."""


class Packs:
    """The packs of a store, as pieces that samples are made of."""

    def __init__(self, store: ConversationStore, plan: PackingPlan, loss: str) -> None:
        self._store = store
        self._plan = plan
        self._by_conversation = loss == CONVERSATION

    def __len__(self) -> int:
        return self._plan.packs

    def __getitem__(self, number: int) -> np.ndarray:
        return self.weighted(number)[0]

    def items(self, number: int) -> np.ndarray:
        """Return the numbers of the conversations of a pack, in their order there."""
        begin, end = self._plan.offsets[number : number + 2]
        return self._plan.items[begin:end]

    def starts(self, number: int) -> np.ndarray:
        """Return [conversations] int64, the index in the pack where each of them begins; see samples.JoinedPieces."""
        lengths = self._store.lengths[self.items(number)]
        return np.cumsum(lengths) - lengths

    def weighted(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """See samples.Weighted. A target counts 1, or by conversation 1 / n if its conversation has n of them."""
        read = [self._store.read(int(item)) for item in self.items(number)]
        shares = [max(1, int(targets.sum())) if self._by_conversation else 1 for _, targets in read]
        weights = [targets / np.float32(share) for (_, targets), share in zip(read, shares, strict=True)]
        return np.concatenate([ids for ids, _ in read]), np.concatenate(weights).astype(np.float32)


def plan_of(store: ConversationStore, packing: str, longest: int, seed: int, key: str) -> PackingPlan:
    """Return the plan of a store, from the cache if it is there.

    Args:
        longest: Most tokens of a pack.
        key: Name of the content of the store.
    """
    if packing == PAD:
        return one_each(len(store.lengths))
    name = hash_parts(f"packs {VERSION}", key, str(longest), str(seed))

    def make(folder: Path) -> None:
        folder.mkdir()
        plan = best_fit(store.lengths, longest, seed)
        np.save(folder / "items.npy", plan.items)
        np.save(folder / "offsets.npy", plan.offsets)

    folder = make_once(f"packs/{name}", make)
    items, offsets = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("items", "offsets"))
    return PackingPlan(np.asarray(items), np.asarray(offsets))
