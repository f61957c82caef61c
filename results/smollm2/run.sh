#!/usr/bin/env bash
# Two experts of SmolLM2-135M-Instruct, their merge, Mix RL and MOPD, and the table over all of them, on one CPU core:
#
#     MODEL=folder DATA=folder OUT=folder bash results/smollm2/run.sh
#
# DATA holds openbookqa/{train,test}.jsonl, gsm8k, svamp and ifeval as --data_dir reads them. Every step can be repeated:
# a run that is whole is left as it is, another one goes on.
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TQDM_DISABLE=1
mkdir -p "$OUT"
python results/smollm2/tasks.py "$OUT"
mkdir -p "$OUT/data/openbookqa" # 960 questions beside 320 constraints, so that a pool holds both as the experts see them: 3 to 1
head -n 960 "$DATA/openbookqa/train.jsonl" >"$OUT/data/openbookqa/train.jsonl"
cp "$DATA/openbookqa/test.jsonl" "$OUT/data/openbookqa/"
rules="$OUT/constraints-train.jsonl"
train="--model $MODEL --data_dir $OUT/data --learning_rate 2e-5 --lr_scheduler_type constant --num_generations 6
    --max_completion_length 48 --tokens_per_microbatch 2048 --device cpu --eval_samples 2 --eval_limit 40 --save_every 5 --resume"
tests="--eval_tasks $OUT/constraints-test.jsonl openbookqa:test"

once() { # once NAME COMMAND...
    [ -e "$OUT/$1.done" ] || { "${@:2}" >>"$OUT/$1.log" 2>&1 && touch "$OUT/$1.done"; }
}

once constraints python grpo_expert.py $train --tasks "$rules" --eval_tasks "$OUT/constraints-test.jsonl" \
    --steps 24 --prompts_per_step 8 --out "$OUT/constraints"
once science python grpo_expert.py $train --tasks openbookqa:train --eval_tasks openbookqa:test \
    --steps 72 --prompts_per_step 8 --out "$OUT/science"
once merge python merge.py --base "$MODEL" --experts "$OUT/constraints" "$OUT/science" --scale 1.0 --out "$OUT/merge"
once mopd python mopd.py $train --num_generations 1 --tasks "$rules" openbookqa:train $tests \
    --teachers constraints="$OUT/constraints" science="$OUT/science" --steps 48 --prompts_per_step 16 --out "$OUT/mopd"
once mix python mix_rl.py $train --tasks "$rules" openbookqa:train $tests \
    --steps 48 --prompts_per_step 16 --out "$OUT/mix"
models="base=$MODEL constraints=$OUT/constraints science=$OUT/science merge=$OUT/merge mix=$OUT/mix mopd=$OUT/mopd"
once eval python eval.py --models $models --tasks "$OUT/constraints-test.jsonl" openbookqa:test --data_dir "$DATA" \
    --limit 120 --k 4 --max_completion_length 48 --out "$OUT/eval"
once other python eval.py --models $models --tasks gsm8k:test svamp:test ifeval --data_dir "$DATA" \
    --limit 24 --k 1 --temperature 0 --max_completion_length 128 --out "$OUT/other"
once ifeval python eval.py --models base="$MODEL" --tasks ifeval --data_dir "$DATA" \
    --k 1 --temperature 0 --max_completion_length 512 --slots 180 --out "$OUT/ifeval"
