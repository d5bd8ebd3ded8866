#!/bin/bash
# The form of Megatron-LM's example scripts: arrays, defaults, conditions, positional arguments.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
MASTER_ADDR=${MASTER_ADDR:-"localhost"}
NNODES=${SLURM_NNODES:-"2"}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
CHECKPOINTS=$1 # where to save
DATA=${2:-"MOCK"}
PRETRAIN="pretrain_gpt.py"
DTYPE="bf16"

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank ${RANK:-0}
    --master_addr $MASTER_ADDR
    --master_port 6000
)
MODEL_ARGS=(
    --num-layers 8   # few
    --hidden-size 512
    --num-attention-heads 8
    # --num-experts 4
    --seq-length 1024
    --max-position-embeddings 1024
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size $((WORLD_SIZE * 2))
    --train-samples 3200
    --lr 3e-4
    --tensor-model-parallel-size 2
)
if [[ "$DTYPE" == "bf16" ]]; then
    TRAINING_ARGS+=("--bf16" "--initial-loss-scale 4096")
fi
if [ "$DATA" == "MOCK" ]; then
    DATA_ARGS=(--mock-data "--vocab-size 32000" "--split '99,1,0'")
else
    DATA_ARGS=("--data-path $DATA")
fi
if [ -n "${WANDB_API_KEY}" ]; then
    TRAINING_ARGS+=(--wandb-project p)
fi
if [ ! -f "$PRETRAIN" ]; then
    echo "torchrun cannot start pretrain_gpt.py"
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} "$PRETRAIN" \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${DATA_ARGS[@]} \
    --save "$CHECKPOINTS" --save-interval 100 2>&1 | tee train.log
