"""Runs in which experts are on other ranks than in the order of their numbers, for comparisons with one process.

    update 1        all experts of a rank move to the next rank, and change places there
    later ones      what their load asks for, as in any run
    after step 2    into the order of their numbers, as before a save; the next update moves them back
    end             into their order, as at the end of any run

A few steps of a small model need not move anything by load.
"""

from __future__ import annotations

from torch import Tensor

from megapar.moe.placement import PlacementRoom, slots_of
from megapar.trainer import Trainer
from megapar.training.loop.callbacks import TrainerCallback

RETURN = 2  # the step


def turned(room: PlacementRoom) -> list[int]:
    """Return a placement on the next ranks, each block of slots reversed: with several ranks, every expert moves."""
    found: list[int] = []
    for first in range(0, room.local, room.block):
        found += reversed(range(first, min(first + room.block, room.local)))
    return [(rank * room.local + slot - room.local) % room.experts for rank in range(room.ranks) for slot in found]


def begin(trainer: Trainer) -> None:
    """Make the first update move all experts, if the run moves any."""
    if trainer.places.interval:
        layers = trainer.job.sizes.routed_layers
        trainer.places.restore({"next": [turned(trainer.places.room(layer)) for layer in layers]})


class Away(TrainerCallback):
    """Moves the experts of a run, and returns them once.

    Attributes:
        moved: True once they were away.
    """

    def begin(self, trainer: Trainer) -> None:
        """Make the first update move all experts, if the run moves any."""
        self.moved, self._trainer = False, trainer
        begin(trainer)

    def before_step(self, iteration: int) -> None:
        """Restore the order after step ``RETURN``."""
        if iteration == RETURN + 1:
            self._trainer.stepper.resolve_pending()
            self._trainer._order_experts()

    def after_step(self, iteration: int) -> None:
        """Look at the places."""
        self.moved |= bool(self._trainer.places._moved_at)


def by_number(trainer: Trainer, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return whole parameters or gradients, whose rows are slots, with experts in order."""
    places = trainer.places
    for layer, row in zip(trainer.job.sizes.routed_layers, places.rows, strict=True):
        for spec in trainer.job.table:
            if spec.expert and spec.name.startswith(places._prefix(layer)):
                whole[spec.name] = whole[spec.name][slots_of(row)]
    return whole
