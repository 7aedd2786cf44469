#!/usr/bin/env bash
# RL of SmolLM2-135M-Instruct on JSON extraction, from nothing to the curve: README.md beside this file.
#   examples/json_extraction/run.sh [OUT_DIR] [further flags of `molt rl`]
# Two CPU cores and 8 GB of free memory. PYTHON names the interpreter that molt is installed in.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=examples/json_extraction out=${1:-./ckpt/json}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
export OMP_NUM_THREADS=1 # one core for the engine, one for the trainer

[ -f "$out/model/config.json" ] || "$python" $here/convert_smollm2.py "$out/model"
"$python" $here/make_data.py "$out/data"
"$python" -m molt rl \
    --train.agent_path $here/agent.py \
    --actor.model_name_or_path "$out/model" \
    --actor.gradient_checkpoint none \
    --actor.adam.lr 1e-5 \
    --data.prompt_dataset "$out/data/train.jsonl" \
    --data.label_key label \
    --data.apply_chat_template \
    --data.max_len 192 \
    --fsdp.packing_samples \
    --algo.advantage.estimator grpo \
    --rollout.batch_size 4 \
    --rollout.n_samples_per_prompt 8 \
    --rollout.max_new_tokens 28 \
    --train.micro_batch_size 8 \
    --train.max_steps 24 \
    --eval.dataset "$out/data/held_out.jsonl" \
    --eval.eval_at_start \
    --eval.steps 8 \
    --eval.n_samples_per_prompt 1 \
    --ckpt.output_dir "$out/rl" \
    --ckpt.save_steps -1 \
    "${@:2}"
