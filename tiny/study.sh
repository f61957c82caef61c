#!/usr/bin/env bash
# The study of tiny/STUDY.md: speedrun.sh with every variant, once a seed, and the tables over all seeds.
#
#   bash tiny/study.sh                   three seeds, about 15 minutes each on 2 cores
#   SEEDS="3 4" bash tiny/study.sh       other seeds
#
# No uniform mix: the four pools are of equal size, so that it is the natural one, draw for draw.
set -euo pipefail
cd "$(dirname "$0")/.."

SEEDS=${SEEDS:-0 1 2}
OUT=${OUT:-runs/study}
export METHODS="linear task_arithmetic ties dare_linear sce" MIXES="natural skewed dads" KLS="full sampled"
folders=()
for seed in $SEEDS; do
    start=$(date +%s)
    SEED=$seed OUT=$OUT/seed$seed bash speedrun.sh > "$OUT-seed$seed.log" 2>&1 || { tail -n 5 "$OUT-seed$seed.log" >&2; exit 1; }
    echo "seed $seed: $((($(date +%s) - start) / 60)) minutes"
    folders+=("$OUT/seed$seed")
done
python tiny/study.py "${folders[@]}"
