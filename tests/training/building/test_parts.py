"""What a run is made of, as far as it depends on the device."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.accelerators import Accelerator
from megapar.core.device.base import Device
from megapar.data.batches import Loader
from megapar.errors import ConfigError
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_collate, make_corpus
from megapar.training.step.dtypes import compute_dtype, make_loss_scale

FLAGS = "--data-path mock --hidden-size 16 --num-attention-heads 2 --num-layers 1 --seq-length 32 --vocab-size 512"


class Pinning(Device):
    """Remembers what was put into memory that a device reads by itself, and on which thread."""

    def __init__(self):
        super().__init__()
        self.pinned = {}

    def pin(self, x):
        """A copy, as an accelerator's is."""
        copy = x.clone()
        self.pinned[id(copy)] = copy, threading.current_thread()
        return copy


@pytest.mark.parametrize("extra", ["", "--reset-attention-mask"])
def test_every_tensor_of_a_batch_is_pinned_where_it_is_made(extra):
    config = parse("moe", f"{FLAGS} --num-experts 0 {extra}".split(), {})
    device, corpus = Pinning(), make_corpus(config)
    collate = make_collate(config, World.pretend(config.grid, device, 0), corpus)
    with closing(Loader(corpus.train, collate, 2)) as loader:
        loader.step(0, 1)
        (batch,) = loader.step(2, 1)  # made ahead
    assert {*batch.tensors} >= ({"tokens", "labels", "ends"} if extra else {"tokens", "labels"})
    for tensor in batch.tensors.values():
        copy, thread = device.pinned[id(tensor)]
        assert copy is tensor
        assert thread.name.startswith("megapar-loader")


def test_an_accelerator_pins_on_its_own_device(monkeypatch):
    """A thread's current device is the first one: a context there would cost every rank's first device memory."""
    inside = []

    class Module:
        current = 0

        class device:
            def __init__(self, index):
                self.index = index

            def __enter__(self):
                Module.current = self.index

            def __exit__(self, *_):
                Module.current = 0

    device = object.__new__(Accelerator)
    device.module, device.local_rank = Module, 3
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: (inside.append(Module.current), x.clone())[1])
    x = torch.arange(3)
    assert torch.equal(device.pin(x), x)
    assert (inside, Module.current) == ([3], 0)
    assert Device().pin(x) is x


class Volta(Device):
    """Has no products in bf16."""

    default_dtype = torch.float16
    name = "Tesla V100-SXM2-32GB"


def test_fp16_that_the_device_chooses_has_a_loss_scale_too():
    config = parse("moe", ["--initial-loss-scale", "4096", "--fp16"], {})
    assert make_loss_scale(config, Device()).value == 4096
    auto = parse("moe", [], {})
    assert make_loss_scale(auto, Device()) is None
    assert make_loss_scale(auto, Volta()).value == 65536
    with pytest.raises(ConfigError, match="reduce-dtype-wide"):
        compute_dtype(parse("moe", ["--grad-reduce-dtype", "bf16"], {}), Volta())


def test_a_run_on_a_device_without_bf16_scales_its_loss(monkeypatch):
    config = parse("moe", [*FLAGS.split(), "--num-experts", "0", "--train-iters", "2", "--eval-interval", "0"], {})
    monkeypatch.setattr(Device, "default_dtype", torch.float16)
    trainer = Trainer(config, World.pretend(config.grid, Device(), 0), make_corpus(config))
    trainer.start()
    with closing(trainer.loader):
        trainer.monitor.add(trainer.step())
        (record,) = trainer.monitor.flush()
    assert record.loss_scale == 65536
    assert {parameter.dtype for parameter in trainer.job.model.parameters()} == {torch.float16}
