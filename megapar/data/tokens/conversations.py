"""Stores of conversations: files of tokens whose sequences are runs that are learned, or are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megapar.data.cache import hash_parts
from megapar.data.lazy_numpy import np
from megapar.data.tokens.indexed import TARGETS, IndexedDataset
from megapar.data.tokens.prepared import index_hash, read_hashes
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.store import DocumentOffsets
from megapar.errors import DataError

STOP, DROP, TRUNCATE = "stop", "drop", "truncate"
"""What happens to conversations that are longer than a sample."""
HELD_OUT = "held-out"


@dataclass(frozen=True, eq=False)
class ConversationStore:
    """The training or the held-out conversations of one source.

    Attributes:
        name: That of the source.
        dataset: The file of all conversations of the source, whose modes say the targets.
        numbers: [D] int64, the conversations of this side in the file.
        lengths: [D] int64, the tokens of each that are used, from its first on.
        side: "training" or "held-out", for messages.
        place: Says where a conversation of the source is, for messages.
    """

    name: str
    dataset: IndexedDataset
    numbers: np.ndarray
    lengths: np.ndarray
    side: str = "training"
    place: Callable[[int], str] = "conversation {} from 0".format

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids [T] int64 of conversation ``number`` of the store, and [T] bool, True for targets."""
        dataset, document, length = self.dataset, int(self.numbers[number]), int(self.lengths[number])
        assert dataset.modes is not None
        first, last = (int(n) for n in dataset.document_indices[document : document + 2])
        start = dataset.document_start(document)
        targets = np.repeat(dataset.modes[first:last] & TARGETS, dataset.lengths[first:last])
        targets[0] = 0  # no token before it predicts it
        return dataset.tokens[start : start + length].astype(np.int64), targets[:length].astype(bool)

    def digest(self) -> str:
        """Return a hash of the conversations, their targets and what is used of them."""
        return hash_parts(index_hash(self.dataset.prefix), self.numbers.tobytes(), self.lengths.tobytes())

    def fitted(self, longest: int, overlong: str) -> tuple[ConversationStore, str]:
        """Return the store without conversations of more than ``longest`` tokens, and a note about them or "".

        Raises DataError if there are some and ``overlong`` is STOP, and if none remains. What is left of a truncated
        conversation needs a target.
        """
        long, name = np.flatnonzero(self.lengths > longest), f"{self.name}, {self.side}"
        if not len(long):
            return self, ""
        if overlong == STOP:
            raise DataError(
                f"{name}: {len(long):,} conversations have more than {longest:,} tokens; the first one, "
                f"{self.place(int(self.numbers[long[0]]))}, has {int(self.lengths[long[0]]):,}; raise --seq-length, "
                "with --max-position-embeddings if that is less, or set --sft-overlong drop or truncate"
            )
        store = replace(self, lengths=np.minimum(self.lengths, longest))
        kept = np.ones(len(self.lengths), dtype=bool)
        kept[long] = [overlong == TRUNCATE and store.read(int(number))[1].any() for number in long]
        store = replace(store, numbers=self.numbers[kept], lengths=store.lengths[kept])
        if not len(store.numbers):
            raise DataError(f"{name}: no conversation remains of those with more than {longest:,} tokens")
        dropped = int((~kept).sum())
        counts = [(len(long) - dropped, "truncated"), (dropped, "dropped")]
        changes = " and ".join(f"{count:,} {what}" for count, what in counts if count)
        return store, f"{name}: of conversations with more than {longest:,} tokens, {changes}"


def conversation_stores(name: str, dataset: IndexedDataset, split: Split | None) -> TrainHeldout[ConversationStore]:
    """Return the training and the held-out conversations of a source; without a split, all are for training.

    They are split by the hashes of their texts, or without a file of these by their numbers. Raises DataError if the
    file is of text, or if none are for training.
    """
    if dataset.modes is None:
        raise DataError(
            f"{dataset.prefix} contains text, whose index does not say what is learned; prepare the conversations with "
            "megapar data prepare --task sft"
        )
    lengths = np.diff(DocumentOffsets(dataset, 0, dataset.documents)[: dataset.documents + 1])
    if split is None or split.trains_all:
        return TrainHeldout(ConversationStore(name, dataset, np.arange(dataset.documents), lengths), None)
    hashes = read_hashes(dataset.prefix, dataset.documents)
    if hashes is not None:
        sides = split.sides(hashes.astype(np.float64) / 2.0**64)
    else:
        first, last = split.cuts(dataset.documents)
        sides = np.repeat([0, 1, -1], [first, last - first, dataset.documents - last])
    train, heldout = (np.flatnonzero(sides == side) for side in (0, 1))
    if not len(train):
        raise DataError(f"{name}: the split leaves none of {dataset.documents} conversations for training")
    held = ConversationStore(name, dataset, heldout, lengths[heldout], HELD_OUT) if len(heldout) else None
    return TrainHeldout(ConversationStore(name, dataset, train, lengths[train]), held)
