#!/bin/bash
# The form of MindSpeed-LLM's and Megatron-DeepSpeed's example scripts: arguments in strings, a command that is built up.
NPUS_PER_NODE=8
DATA_PATH="your data path"
TP=1
DIR=`pwd`
MOE_ARGS="
    --num-experts 8 \
    --expert-model-parallel-size 4 \
    --moe-router-topk 2 \
    --moe-router-load-balancing-type aux_loss \
    --moe-aux-loss-coeff 0.01 \
    --moe-layer-freq -1 \
    --first-k-dense-replace -1 \
"
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --num-layers 4 \
    --hidden-size 256 \
    --num-attention-heads 4 \
    --seq-length 512 \
    --micro-batch-size 1 \
    --global-batch-size 16 \
    --train-iters 100 \
    --eval-interval 100 \
    --eval-iters 0 \
    --fp16 \
    --lr 1.0e-4
"
options=""
options=" --deepspeed ${options}"
options=" --zero-stage=1 ${options}"
cat <<EOT > config.json
{ "train_batch_size": 16 }
EOT
run_cmd="deepspeed --num_gpus $NPUS_PER_NODE ${DIR}/../pretrain_gpt.py $GPT_ARGS $MOE_ARGS --data-path $DATA_PATH \
    --split 100,0,0 $options &> run.log"
echo ${run_cmd}
eval ${run_cmd}
