"""Micro-batches (samples as torch tensors, with the counts that the host needs) and the loader that makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from megapar.data.lazy_numpy import np
from megapar.data.sampling.samples import NO_LOSS, WEIGHTS, Sample, Samples

if TYPE_CHECKING:
    import torch


# The host reads these tensors, so they are never copied to the device.
ENDS, LENGTHS = "ends", "lengths"
STARTS = "starts"


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of B samples of S positions on this rank.

    With context parallelism, S in ``tensors`` is the number of positions of this rank (see
    ``data.reduced_batch``), except in ``ends``. The other attributes always describe whole samples.

    Attributes:
        tensors: Inputs of the model's forward pass, int64 except ``valid`` and ``weights``.
            Decoder: tokens, labels (NO_LOSS: not predicted), positions [B, S]; weights [B, S] fp32, those of the labels
            in the loss, only if some are neither 0 (NO_LOSS) nor 1; ends [documents], only with attention inside
            documents: the index after each document, flat into B * S, ascending, the last one of a sample at its end.
            ERNIE: tokens, token_types, task_types, positions [B, S]; masked_index [M], flat into B * S;
            masked_labels [M]; sop_labels [B]. ERNIE 3.0: see ``tasks.build.collate_tasks``.
            Both: valid [B, S] bool, only if some position is padding.
            ERNIE without its padding (see ``data.reduced_batch``): one sample of all positions, no valid; ends
            [documents] of the samples in it and starts [documents + 1] int32, 0 and the same ends, for the device.
            Context parallelism adds lengths [B], the valid positions of whole samples, next to valid, and for a
            decoder tokens_ahead, labels_ahead, weights_ahead [B, S]: those of the next position, which may be on
            another rank.
        counts: Items of each loss term: {"lm": .., "mtp": .., "sequences": B} for a decoder ("mtp": positions whose
            token and next token are both predicted), {"lm": M, "sop": B} for ERNIE. With weights, their sums in fp64.
        valid_tokens: Number of positions that are not padding.
        tokens: Number of all positions, B * S.
    """

    tensors: dict[str, torch.Tensor]
    counts: dict[str, float]
    valid_tokens: int
    tokens: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Return a copy with its tensors on ``device``, except those that the host reads."""
        moved = {
            name: tensor if name in (ENDS, LENGTHS) else tensor.to(device, non_blocking=non_blocking)
            for name, tensor in self.tensors.items()
        }
        return MicroBatch(moved, self.counts, self.valid_tokens, self.tokens)


Collate = Callable[[Sequence[Sample]], MicroBatch]


def pinned(collate: Collate, pin: Callable[[torch.Tensor], torch.Tensor]) -> Collate:
    """Return ``collate`` with each tensor passed through ``pin``, so that copies to the device do not block."""

    def collate_pinned(samples: Sequence[Sample]) -> MicroBatch:
        batch = collate(samples)
        return replace(batch, tensors={name: pin(tensor) for name, tensor in batch.tensors.items()})

    return collate_pinned


def collate_decoder(samples: Sequence[Sample]) -> MicroBatch:
    """Collate the samples of DecoderSamples into one micro-batch."""
    tokens = np.stack([sample["tokens"] for sample in samples])
    labels = np.stack([sample["labels"] for sample in samples])
    valid = np.stack([sample.get("valid", np.ones(tokens.shape[1], dtype=bool)) for sample in samples])
    arrays = {"tokens": tokens, "labels": labels}
    if "positions" in samples[0]:
        arrays["positions"] = np.stack([sample["positions"] for sample in samples])
    if "ends" in samples[0]:
        arrays[ENDS] = np.concatenate([sample["ends"] + i * tokens.shape[1] for i, sample in enumerate(samples)])
    predicted = weights = labels != NO_LOSS
    if any(WEIGHTS in sample for sample in samples):
        pairs = zip(samples, predicted, strict=True)
        arrays[WEIGHTS] = np.stack([sample.get(WEIGHTS, counted.astype(np.float32)) for sample, counted in pairs])
        weights = arrays[WEIGHTS].astype(np.float64)
    mtp = (predicted[:, :-1] * weights[:, 1:]).sum().item()
    return micro_batch(arrays, valid, {"lm": weights.sum().item(), "mtp": mtp, "sequences": len(samples)})


def collate_ernie(samples: Sequence[Sample]) -> MicroBatch:
    """Collate the samples of ErnieSamples into one micro-batch."""
    stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    labels, valid = stacked["labels"].reshape(-1), stacked["valid"]
    masked = np.flatnonzero(labels != NO_LOSS)
    arrays = {
        "tokens": stacked["tokens"],
        "token_types": stacked["token_types"],
        "task_types": np.zeros_like(stacked["tokens"]),
        "masked_index": masked,
        "masked_labels": labels[masked],
        "sop_labels": stacked["label"],
    }
    return micro_batch(arrays, valid, {"lm": len(masked), "sop": len(samples)})


def micro_batch(arrays: dict[str, np.ndarray], valid: np.ndarray, counts: dict[str, float]) -> MicroBatch:
    """Return a micro-batch of these arrays; it contains ``valid`` [B, S] only if some position is padding."""
    import torch

    shape = valid.shape
    arrays.setdefault("positions", np.broadcast_to(np.arange(shape[1], dtype=np.int64), shape))
    valid_tokens = int(valid.sum())
    if valid_tokens < valid.size:
        arrays["valid"] = valid
    tensors = {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}
    return MicroBatch(tensors, counts, valid_tokens, valid.size)


class _Request(NamedTuple):
    consumed_samples: int
    num_micro_batches: int
    length: int | None


@dataclass(eq=False)
class Loader:
    """Loads the micro-batches of one rank.

    It keeps no position: the samples of a step follow from the number of samples consumed before it.

    A step of K micro-batches per rank that starts after ``consumed_samples`` splits its global batch of
    K * R * mbs samples into micro-batches j = 0, 1, .. of mbs consecutive samples. Data rank r of R
    takes j = r, R + r, 2 R + r, ..

        R = 2, K = 2:   j     0   1   2   3
                        rank  0   1   0   1

    so that its k-th is j = k R + r. K may change from step to step (batch size ramp-up).

    During a step, a thread prefetches the next one, assuming the same K and sequence length. If the next step differs,
    the same thread makes its micro-batches when they are requested: samples may keep a file's position. The thread
    holds at most one step. Its errors are raised by the step that needs the prefetched micro-batches.

    Attributes:
        data_rank: r, this rank's index over all axes whose ranks read different data.
        data_ranks: R, the size of these axes.
        prefetch: False makes every step when it is requested.
    """

    samples: Samples
    collate: Collate
    micro_batch_size: int
    data_rank: int = 0
    data_ranks: int = 1
    prefetch: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1 or not 0 <= self.data_rank < self.data_ranks:
            raise ValueError(
                f"micro-batch size {self.micro_batch_size}, data rank {self.data_rank} of {self.data_ranks}"
            )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="megapar-loader") if self.prefetch else None
        self._prefetched: tuple[_Request, Future[list[MicroBatch]]] | None = None

    def step(self, consumed_samples: int, num_micro_batches: int, length: int | None = None) -> list[MicroBatch]:
        """Return this rank's ``num_micro_batches`` micro-batches of the step after ``consumed_samples`` global samples.

        ``length`` crops each sample to its first positions and does not change which samples are drawn; None keeps
        them whole.
        """
        request = _Request(consumed_samples, num_micro_batches, length)
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == request:
            batches = prefetched[1].result()
        else:
            if prefetched is not None:
                prefetched[1].cancel()
            batches = self._read(request)
        if self._worker is not None:
            global_batch = num_micro_batches * self.data_ranks * self.micro_batch_size
            following = _Request(consumed_samples + global_batch, num_micro_batches, length)
            self._prefetched = following, self._worker.submit(self._made, following)
        return batches

    def first_of(self, data_rank: int, consumed_samples: int, length: int | None = None) -> MicroBatch:
        """Return the first micro-batch of another data rank in the step after ``consumed_samples``."""
        return self._read(_Request(consumed_samples, 1, length), data_rank)[0]

    def settle(self) -> None:
        """Wait until the thread reads no sample, so that another one may."""
        if self._prefetched is not None:
            wait([self._prefetched[1]])

    def _read(self, request: _Request, data_rank: int | None = None) -> list[MicroBatch]:
        """Return micro-batches that were not prefetched."""
        if self._worker is None:
            return self._made(request, data_rank)
        return self._worker.submit(self._made, request, data_rank).result()

    def _made(self, request: _Request, data_rank: int | None = None) -> list[MicroBatch]:
        rank = self.data_rank if data_rank is None else data_rank
        first = request.consumed_samples + rank * self.micro_batch_size
        stride = self.data_ranks * self.micro_batch_size
        starts = (first + k * stride for k in range(request.num_micro_batches))
        return [
            self.collate([_cropped(self.samples[start + i], request.length) for i in range(self.micro_batch_size)])
            for start in starts
        ]

    def close(self) -> None:
        """End the prefetch thread and drop its work. Later steps are made without prefetching."""
        worker, self._worker, self._prefetched = self._worker, None, None
        if worker is not None:
            worker.shutdown(wait=True, cancel_futures=True)


def _cropped(sample: Sample, length: int | None) -> Sample:
    """Return the sample with each array cropped to its first ``length`` positions; scalars stay as they are."""
    if length is None:
        return sample
    return {name: array[:length] if array.ndim else array for name, array in sample.items()}
