#!/usr/bin/env bash
# Three experts of SmolLM2-135M-Instruct, their merge, Mix RL and MOPD, and the table over all of them, on one CPU core:
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
science() { # science FOLDER N: a mirror of OpenBookQA with its first N questions
    mkdir -p "$1/openbookqa"
    head -n "$2" "$DATA/openbookqa/train.jsonl" >"$1/openbookqa/train.jsonl"
    cp "$DATA/openbookqa/test.jsonl" "$1/openbookqa/"
}
science "$OUT/data" 960
science "$OUT/pool" 320 # beside 320 constraints and 244 sums and products
train="--model $MODEL --learning_rate 2e-5 --lr_scheduler_type constant --tokens_per_microbatch 2048 --device cpu
    --eval_samples 2 --eval_limit 40 --save_every 5 --resume"
pool="--data_dir $OUT/pool --max_completion_length 48 --tasks $OUT/constraints-train.jsonl $OUT/arithmetic-train.jsonl openbookqa:train"
tests="$OUT/constraints-test.jsonl $OUT/arithmetic-test.jsonl openbookqa:test"

once() { # once NAME COMMAND...
    [ -e "$OUT/$1.done" ] || { "${@:2}" >>"$OUT/$1.log" 2>&1 && touch "$OUT/$1.done"; }
}

once constraints python grpo_expert.py $train --tasks "$OUT/constraints-train.jsonl" --eval_tasks "$OUT/constraints-test.jsonl" \
    --steps 24 --prompts_per_step 8 --num_generations 6 --max_completion_length 48 --out "$OUT/constraints"
once arithmetic python grpo_expert.py $train --tasks "$OUT/arithmetic-train.jsonl" --eval_tasks "$OUT/arithmetic-test.jsonl" \
    --steps 48 --prompts_per_step 8 --num_generations 12 --max_completion_length 8 --out "$OUT/arithmetic"
once science python grpo_expert.py $train --tasks openbookqa:train --eval_tasks openbookqa:test --data_dir "$OUT/data" \
    --steps 72 --prompts_per_step 8 --num_generations 6 --max_completion_length 48 --out "$OUT/science"
once merge python merge.py --base "$MODEL" --experts "$OUT/constraints" "$OUT/arithmetic" "$OUT/science" --scale 1.0 --out "$OUT/merge"
once mix python mix_rl.py $train $pool --eval_tasks $tests \
    --steps 24 --prompts_per_step 20 --num_generations 6 --out "$OUT/mix"
once mopd python mopd.py $train $pool --eval_tasks $tests --steps 36 --prompts_per_step 16 --num_generations 1 --out "$OUT/mopd" \
    --teachers constraints="$OUT/constraints" arithmetic="$OUT/arithmetic" science="$OUT/science"
models="base=$MODEL constraints=$OUT/constraints arithmetic=$OUT/arithmetic science=$OUT/science
    merge=$OUT/merge mix=$OUT/mix mopd=$OUT/mopd"
once eval python eval.py --models $models --tasks $tests --data_dir "$DATA" \
    --limit 120 --k 4 --max_completion_length 48 --out "$OUT/eval"
once other python eval.py --models $models --tasks gsm8k:test svamp:test ifeval --data_dir "$DATA" \
    --limit 24 --k 1 --temperature 0 --max_completion_length 128 --out "$OUT/other"
once ifeval python eval.py --models base="$MODEL" --tasks ifeval --data_dir "$DATA" \
    --k 1 --temperature 0 --max_completion_length 512 --slots 180 --out "$OUT/ifeval"
