"""Packs of conversations as pieces of samples, each conversation whole and apart, with the weights of its targets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megapar.data.cache import hash_parts, make_once
from megapar.data.lazy_numpy import np
from megapar.data.sampling.packing_plan import VERSION, PackingPlan, best_fit, one_each
from megapar.data.sampling.samples import WeightedPiece
from megapar.data.tokens.conversations import ConversationStore

BEST_FIT, PAD = "best_fit", "pad"
"""The ways to place conversations in samples: as many as fit, or one in each."""

TOKEN, CONVERSATION = "token", "conversation"
"""What counts equally in the loss: each target, or each conversation, whose targets share its weight."""


@dataclass(frozen=True, eq=False)
class Packs:
    """The packs of a store, as pieces that samples are made of. ``loss`` is TOKEN or CONVERSATION."""

    store: ConversationStore
    plan: PackingPlan
    loss: str

    def __len__(self) -> int:
        return self.plan.packs

    def __getitem__(self, number: int) -> np.ndarray:
        return self.weighted(number).ids

    def items(self, number: int) -> np.ndarray:
        """Return the numbers of the conversations of a pack, in their order there."""
        begin, end = self.plan.offsets[number : number + 2]
        return self.plan.items[begin:end]

    def weighted(self, number: int) -> WeightedPiece:
        """See samples.Weighted. A target counts 1, or by conversation 1 / n if its conversation has n of them."""
        items = self.items(number)
        read = [self.store.read(int(item)) for item in items]
        shares = [max(1, int(targets.sum())) if self.loss == CONVERSATION else 1 for _, targets in read]
        weights = [targets / np.float32(share) for (_, targets), share in zip(read, shares, strict=True)]
        lengths = self.store.lengths[items]
        ids = np.concatenate([ids for ids, _ in read])
        return WeightedPiece(ids, np.concatenate(weights).astype(np.float32), np.cumsum(lengths) - lengths)

    def digest(self) -> str:
        """Return a hash of the conversations and of the plan."""
        return hash_parts(self.store.digest(), self.plan.digest())


def plan_of(store: ConversationStore, packing: str, longest: int, seed: int) -> PackingPlan:
    """Return the plan of a store for packs of at most ``longest`` tokens, from the cache if it is there."""
    if packing == PAD:
        return one_each(len(store.lengths))
    name = hash_parts(f"packs {VERSION}", store.digest(), str(longest), str(seed))

    def make(folder: Path) -> None:
        folder.mkdir()
        plan = best_fit(store.lengths, longest, seed)
        np.save(folder / "items.npy", plan.items)
        np.save(folder / "offsets.npy", plan.offsets)

    folder = make_once(f"packs/{name}", make)
    items, offsets = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("items", "offsets"))
    return PackingPlan(np.asarray(items), np.asarray(offsets))
