#!/usr/bin/env bash
# The whole comparison on the tiny world: base -> experts -> merge, mix, MOPD -> one table.
#
#   bash speedrun.sh                     results under runs/speedrun, about 9 minutes on 2 cores
#   SEED=1 OUT=runs/seed1 bash speedrun.sh
#   STEPS=6 bash speedrun.sh             a tenth of the training: does everything run?
#   METHODS="ties sce" MIXES="uniform dads" KLS="full sampled" bash speedrun.sh    other variants of each paradigm
#   bash tiny/study.sh                   all variants, three seeds: tiny/STUDY.md
#
# Run it again after an interruption and it goes on where it was: a finished stage is not repeated.
set -euo pipefail
cd "$(dirname "$0")"

SEED=${SEED:-0}
STEPS=${STEPS:-60}       # steps of an expert (16 prompts each) and of MOPD (64); Mix RL takes 4/3 as many (32)
OUT=${OUT:-runs/speedrun}
JOBS=${JOBS:-2}          # runs side by side; each uses one core (on one GPU they share it)
DOMAINS="math code science instruction"
METHODS=${METHODS:-task_arithmetic ties}
SCALES="0.4 0.6 0.8 1.0" # merge scales tried on the validation split
MIXES=${MIXES:-natural}  # proportions of Mix RL; skewed: math=4 and 1 for the others
KLS=${KLS:-full}         # forms of MOPD
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"
[ "$(cat "$OUT/settings" 2>/dev/null || echo "SEED=$SEED STEPS=$STEPS")" = "SEED=$SEED STEPS=$STEPS" ] || {
    echo "speedrun.sh: $OUT holds a run with $(cat "$OUT/settings"): choose another OUT, or remove it" >&2
    exit 2
}
echo "SEED=$SEED STEPS=$STEPS" > "$OUT/settings"
trap 'trap - INT TERM; kill 0' INT TERM # Ctrl-C reaches the runs in the background too

# stage NAME COMMAND...: run it in the background unless it has been done; its output goes to $OUT/NAME.log
stage() {
    local name=$1
    shift
    if [ -e "$OUT/$name.done" ]; then
        echo "$name: done before"
        return
    fi
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do sleep 0.2; done # not wait -n: macOS has an old bash
    echo "$name: $* > $OUT/$name.log"
    { "$@" > "$OUT/$name.log" 2>&1 && touch "$OUT/$name.done"; } &
}

# finish NAME...: wait for the stages, and stop if one of them failed
finish() {
    wait
    for name in "$@"; do
        [ -e "$OUT/$name.done" ] || { echo "$name failed; its last lines:" >&2; tail -n 5 "$OUT/$name.log" >&2; exit 1; }
        grep -ao "Learnt: .*" "$OUT/$name.log" | sed "s/^/$name: /" || true
    done
}

# merged METHOD: merge the experts at every scale, and score each on the validation split
merged() {
    local candidates=(base=tiny/base) scale
    for scale in $SCALES; do candidates+=("$1-$scale=$OUT/merges/$1-$scale"); done
    # shellcheck disable=SC2086
    python merge.py --experts "${experts[@]}" --method "$1" --scale $SCALES --seed "$SEED" \
        --out "$OUT/merges/$1-{scale}" --overwrite &&
        python eval.py --models "${candidates[@]}" --tasks "${validation[@]}" --k 4 --limit 64 --seed "$SEED" \
            --out "$OUT/choose-$1"
}

# best DIR: of the merges scored in DIR/eval.json, the folder of the one with the best average over the domains
best() {
    python - "$1" <<'PY'
import json, sys
result = json.load(open(f"{sys.argv[1]}/eval.json"))
folders = dict(model.split("=", 1) for model in result["settings"]["models"])
mean = lambda domains: sum(sum(d["counts"]) / d["n"] / len(d["counts"]) for d in domains.values())
print(folders[max((name for name in folders if name != "base"), key=lambda name: mean(result["models"][name]["domains"]))])
PY
}

# scored FOLDER NAME=FOLDER...: sample models on the test split into a folder of their own, as two runs cannot share one
scored() {
    python eval.py --tasks tiny:test --k 16 --seed "$SEED" --out "$1" --models "${@:2}"
}

# 1. One expert a domain, and Mix RL on all domains; neither needs the other.
experts=() teachers=() train=() validation=()
for domain in $DOMAINS; do
    experts+=("$OUT/$domain")
    teachers+=("$domain=$OUT/$domain")
    train+=("tiny:$domain")
    validation+=("tiny:$domain:validation")
done
mixes=()
for mix in $MIXES; do
    name=mix-$mix proportions=$mix
    [ "$mix" = natural ] && name=mix
    [ "$mix" = skewed ] && proportions="math=4 code=1 science=1 instruction=1"
    mixes+=("$name")
    # shellcheck disable=SC2086
    stage "$name" python mix_rl.py --tasks "${train[@]}" --proportions $proportions --steps "$((STEPS * 4 / 3))" \
        --seed "$SEED" --out "$OUT/$name" --resume
done
for domain in $DOMAINS; do
    stage "$domain" python grpo_expert.py --tasks "tiny:$domain" --steps "$STEPS" --seed "$SEED" --out "$OUT/$domain" --resume
done
stage score-base scored "$OUT/scores/base" base=tiny/base
finish "${mixes[@]}" $DOMAINS score-base

# 2. Merges, and MOPD with the experts as teachers.
mopds=()
for kl in $KLS; do
    name=mopd-$kl
    [ "$kl" = full ] && name=mopd
    mopds+=("$name")
    stage "$name" python mopd.py --teachers "${teachers[@]}" --tasks "${train[@]}" --kl "$kl" --steps "$STEPS" --seed "$SEED" \
        --out "$OUT/$name" --resume
done
for method in $METHODS; do stage "merge-$method" merged "$method"; done
finish "${mopds[@]}" $(printf "merge-%s " $METHODS)

# 3. Everything on the test split.
models=(base=tiny/base "${teachers[@]}") chosen_by=()
for method in $METHODS; do
    models+=("merge-$method=$(best "$OUT/choose-$method")")
    chosen_by+=("merge-$method=$OUT/choose-$method") # choosing costs tokens, too
done
for name in "${mixes[@]}" "${mopds[@]}"; do models+=("$name=$OUT/$name"); done
scores=()
for model in "${models[@]}"; do
    scores+=("score-${model%%=*}")
    stage "score-${model%%=*}" scored "$OUT/scores/${model%%=*}" "$model"
done
finish "${scores[@]}"
mkdir -p "$OUT/eval/models"
cp "$OUT"/scores/*/models/*.json "$OUT/eval/models/" # so that the last call samples nothing
stage eval scored "$OUT/eval" "${models[@]}" --chosen_by "${chosen_by[@]}"
finish eval
cat "$OUT/eval/eval.md"
