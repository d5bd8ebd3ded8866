"""The models of this benchmark."""

from __future__ import annotations

SEQ_LENGTH = 1024
# Dense decoder of about 17 M parameters, for the link and for one machine. With many tokens per parameter, gloo's use
# of the computing cores is small relative to what it sends.
DECODER = (
    *("--num-layers", "8", "--hidden-size", "384", "--num-attention-heads", "6", "--ffn-hidden-size", "1152"),
    *("--vocab-size", "4096", "--seq-length", str(SEQ_LENGTH), "--num-experts", "0"),
)
TRAINING = (
    *("--data-path", "mock", "--micro-batch-size", "1", "--train-iters", "100000", "--clip-grad", "0"),
    *("--log-interval", "100000", "--eval-interval", "0"),
)
# Timed steps of a turn, after an untimed one: messages that are in flight at the end of a turn arrive for free during
# the turns of others, so the timed part must begin and end with equally many in flight.
TIMED_STEPS = 2
SERIAL = "stage 1, nothing overlapped"
# Flags of megapar's contestants.
OURS = {
    "stage 1": ("--sharding-stage", "1"),
    SERIAL: ("--sharding-stage", "1", "--no-overlap-grad-reduce", "--no-overlap-param-gather"),
    "stage 2": ("--sharding-stage", "2"),
    "stage 3": ("--sharding-stage", "3"),
}
