"""Two ranks on a separate link."""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.distributed as dist


def join() -> tuple[int, str]:
    """Meet the other rank as the command line says. Return (this rank, the kind of device)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous")
    parser.add_argument("--device")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if options.device == "cuda":
        torch.cuda.set_device(options.rank)
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=options.rendezvous, rank=options.rank, world_size=2)
    return options.rank, options.device
