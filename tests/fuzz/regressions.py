"""What the fuzzer found, minimised. A row stays for ever; its name says what went wrong."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.case import GLOO, Case, case_of


@dataclass(frozen=True)
class Regression:
    """A case that once failed. line: model, ranks and flags, as behind ``scripts/fuzz_layouts.sh --case``.

    refused_by: the row that answers it now; without one the layout must give the numbers of one process.
    """

    name: str
    line: str
    refused_by: str = ""
    backend: str = GLOO

    def case(self) -> Case:
        """What is run."""
        kind, world_size, flags = self.line.split(" ", 2)
        return case_of(kind, int(world_size), flags, self.backend)


MOE = "--num-layers 1 --num-attention-heads 4 --hidden-size 16 --ffn-hidden-size 32 --seq-length 8 --init-std 0.1"
DENSE = f"{MOE} --num-experts 0"
FOUR_EXPERTS = f"{MOE} --vocab-size 101 --num-experts 4"
ERNIE = f"{MOE} --vocab-size 101 --attention-dropout 0 --hidden-dropout 0"
BRANCHES = (
    "--ernie-model ernie3 --task-type-vocab-size 5 --task-num-layers 1 --task-num-attention-heads 2 "
    "--task-hidden-size 8 --task-ffn-hidden-size 16"
)
IN_MODULES = "--sharding-segment-strategy segment_broadcast_MB --segment-broadcast-MB 0.001"

REGRESSIONS: tuple[Regression, ...] = (
    Regression(
        "the oracle of capacity per rank gave padding a place",
        f"moe 2 {MOE} --vocab-size 101 --num-experts 1 --moe-ffn-hidden-size 8 --moe-router-topk 1 --mp-degree 2 "
        "--sequence-parallel --moe-model-type deepspeed_moe --moe-capacity-scope rank --no-packing",
    ),
    Regression(
        "a rank without vocabulary failed while the model was built",
        f"moe 4 {DENSE} --mp-degree 4 --vocab-size 9",
        refused_by="mp-vocabulary",
    ),
    Regression(
        "a vocabulary that leaves the last rank one token is legal", f"moe 4 {DENSE} --mp-degree 4 --vocab-size 10"
    ),
    Regression(
        "ranks of ep across dp were sorted by number where sharding is launched outermost",
        f"moe 4 {FOUR_EXPERTS} --hybrid-dp --sharding-degree 2 --ep-degree 4 --rank-order sharding,dp,pp,cp,mp",
    ),
    Regression(
        "ranks of ep across mp were sorted by number where mp is launched outermost",
        f"moe 4 {FOUR_EXPERTS} --mp-degree 2 --sequence-parallel --expert-mp-degree 1 --ep-degree 4 "
        "--rank-order mp,cp,sharding,pp,dp",
    ),
    Regression(
        "ERNIE's shortest sample was refused by the corpus, after the parser",
        f"ernie 2 {ERNIE} --seq-length 5",
        refused_by="sentence-length",
    ),
    Regression(
        "slices that cp ranks share were cut once more to put their probabilities in order",
        f"moe 2 {FOUR_EXPERTS} --cp-degree 2 --ep-degree 2 --ampipe-degree 4 --ampipe-capacity slice "
        "--moe-drop-policy probs --moe-model-type deepspeed_moe --moe-capacity-factor 0.5 --moe-min-capacity 1",
    ),
    Regression(
        "the norms of queries and keys began a segment that only a call of theirs would have gathered",
        f"moe 2 {FOUR_EXPERTS} --qk-norm --sharding-stage 3 {IN_MODULES}",
    ),
    Regression(
        "gradients of which each had been taken already were copied together, and there was none to copy",
        "moe 1 --num-layers 2 --num-attention-heads 3 --hidden-size 18 --seq-length 8 --vocab-size 101 --num-experts 0 "
        "--init-std 0.1 --activation gelu --segment-broadcast-MB 0.01 --recompute-interval 1 --no-packing",
    ),
    Regression(
        "what an encoder remembers was projected by weights whose segment had been let go",
        f"ernie 2 {ERNIE} {BRANCHES} --seq-length 24 --generation-segments 2 --memory-length 4 --sharding-stage 3 "
        f"{IN_MODULES}",
    ),
    Regression(
        "weights that an encoder remembers by had a gradient before their turn, and their segment left early",
        f"ernie 4 {ERNIE} {BRANCHES} --num-layers 2 --seq-length 24 --generation-segments 2 --memory-length 4 "
        "--pp-degree 2 --use-nanopipe --sharding-degree 2 --gradient-merge-acc-step 4",
    ),
    Regression(
        "what one recomputed unit kept was waited for by another one, and once more by its own",
        "moe 6 --num-layers 3 --num-attention-heads 6 --hidden-size 24 --ffn-hidden-size 15 --init-std 0.1 "
        "--vocab-size 101 --seq-length 24 --num-experts 6 --ep-degree 2 --mp-degree 3 --recompute-interval 1 "
        "--recompute-partition --ampipe-degree 4 --ampipe-cross-layer --mtp-depth 1",
    ),
    Regression(
        "gathers of mp that slices hide took the attention's weights before a call had gathered them",
        f"moe 4 {FOUR_EXPERTS} --mp-degree 2 --sequence-parallel --ep-degree 2 --ampipe-degree 2 "
        f"--ampipe-tp-sp-comm-overlap --sharding-stage 3 {IN_MODULES}",
    ),
    Regression(
        "rank 0 told from its own piece of an unevenly cut vocabulary how stage 3 cuts the others'",
        "moe 6 --mp-degree 2 --sharding-stage 3 --num-layers 1 --num-attention-heads 8 --num-query-groups 4 "
        "--hidden-size 64 --seq-length 16 --vocab-size 17 --num-experts 2 --moe-ffn-hidden-size 6",
    ),
    Regression(
        "a module and one inside it were in one group of stage 3, and the outer one took what other groups have",
        f"moe 2 {FOUR_EXPERTS} --moe-shared-experts 1 --moe-shared-expert-gate --sharding-stage 3 "
        f"--recompute-granularity selective --segment-broadcast-MB 0.001",
    ),
    Regression(
        "a rank whose piece of an expert's tensor is empty could not take part when experts moved",
        "moe 6 --cp-degree 2 --sharding-degree 3 --dp-degree 1 --sharding-stage 1 --ep-degree 2 --rank-order "
        "pp,mp,dp,cp,sharding --num-layers 2 --num-attention-heads 1 --hidden-size 4 --ffn-hidden-size 3 "
        "--seq-length 24 --vocab-size 33 --init-std 0.1 --num-experts 4 --moe-ffn-hidden-size 4 --moe-router-topk 3 "
        "--first-k-dense 1 "
        "--sharding-segment-strategy segment_broadcast_MB --segment-broadcast-MB 0.001 --sharding-prefetch-segments 1 "
        "--overlap-grad-reduce --overlap-param-gather --micro-batch-size 3 --global-batch-size 27 "
        "--moe-rebalance-interval 2",
    ),
    Regression(
        "gradients that overflow on one process, too, were compared in fp16",
        f"moe 2 {MOE} --vocab-size 101 --num-experts 0 --norm-placement output --dtype fp16 --initial-loss-scale 65536",
    ),
)
