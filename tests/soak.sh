#!/usr/bin/env bash
# What a night on a shared machine does to a run, in fast motion (not part of the tests; about half an hour on two cores):
#
#     bash tests/soak.sh [STEPS] [KILLS]            500 steps of the tiny mix, 50 kills of the tiny expert
#
# 1. The tiny expert is killed KILLS times at random moments and resumed: its end must be that of an undisturbed run.
# 2. The tiny mix runs STEPS steps with 64 file descriptors, while it is killed (-9), asked to stop (TERM) and resumed, and
#    its verifier workers are killed and frozen. Reported: the memory of the training process against its steps, zombies,
#    folders and files left over. Exit code 1 where a step is lost or there twice, or anything is left over.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
steps="${1:-500}" kills="${2:-50}"

if [ "$kills" -gt 0 ]; then
    RLVR_KILLS="$kills" python -m pytest -q tests/test_faults.py -k random_moments --durations=1
fi

ulimit -n 64
python - "$steps" <<'END'
import glob
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

steps, draw, folder = int(sys.argv[1]), random.Random(0), tempfile.mkdtemp(prefix="soak-")
out = f"{folder}/mix"
flags = f"--tasks tiny:train --steps {steps} --prompts_per_step 8 --num_generations 4 --eval_limit 2 --save_every 3"
command = [sys.executable, "mix_rl.py", *flags.split(), "--out", out, "--resume"]
before, did, lives, zombies, start = set(os.listdir(tempfile.gettempdir())), {}, [], 0, time.time()
ours, frozen = set(), set()  # pids of workers


def processes():
    """{pid: (parent, state, resident MB)} of the machine."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in open(path).read().splitlines())
            memory = int(lines.get("VmRSS", "0 kB").split()[0]) / 1024
            found[int(path.split("/")[2])] = (int(lines["PPid"]), lines["State"].split()[0], memory)
        except OSError:
            pass  # it has ended in between
    return found


def below(pid, table):
    children = [child for child, (parent, *_) in table.items() if parent == pid]
    return children + [one for child in children for one in below(child, table)]


def done():
    try:
        return open(f"{out}/metrics.jsonl").read().count("\n")
    except FileNotFoundError:
        return 0


code = None
while code != 0:
    with open(f"{folder}/log", "a") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
    first, life, end = done(), [], time.time() + draw.uniform(15, 120)
    while run.poll() is None and time.time() < end:
        time.sleep(1)
        table = processes()
        workers = below(run.pid, table)
        ours.update(workers)
        zombies = max(zombies, sum(table[pid][1] == "Z" for pid in workers))
        if done() > first + 2 and table.get(run.pid, (0, "Z", 0))[1] != "Z":
            life.append((done(), table[run.pid][2]))
        if workers and draw.random() < 0.05:
            number = draw.choice([signal.SIGKILL, signal.SIGSTOP])
            did[f"worker {number.name}"] = did.get(f"worker {number.name}", 0) + 1
            try:
                os.kill(chosen := draw.choice(workers), number)
                frozen.update({chosen} if number == signal.SIGSTOP else ())
            except ProcessLookupError:
                pass
    if run.poll() is None:
        number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        did[f"run {number.name}"] = did.get(f"run {number.name}", 0) + 1
        run.send_signal(number)
    code = run.wait()
    lives.append(life)
    if code not in (0, 3, -signal.SIGKILL, -signal.SIGTERM):  # TERM before the first step or after the last just ends it
        sys.exit(open(f"{folder}/log").read()[-3000:] + f"\nexit code {code}; {folder} holds all")
for pid in frozen & processes().keys():  # a worker that is frozen cannot see that its run was killed
    os.kill(pid, signal.SIGCONT)
time.sleep(2)

seen = [json.loads(line)["step"] for line in open(f"{out}/metrics.jsonl")]
life = max(lives, key=len)
x, y = np.array(life, float).T
slope = 100 * np.polyfit(x, y, 1)[0] if len(set(x)) > 1 else 0.0
left = sorted(set(os.listdir(tempfile.gettempdir())) - before)
partial = glob.glob(f"{out}/**/*.tmp", recursive=True) + glob.glob(f"{out}/state/model")
alive = ours & processes().keys()
print(f"{len(seen)} steps in {time.time() - start:.0f} s and {len(lives)} lives; what was done to them: {did}")
print(f"memory in the longest life: {y[0]:.0f} MB at step {x[0]:.0f}, {y[-1]:.0f} MB at step {x[-1]:.0f}, {slope:+.1f} MB per 100 steps")
print(f"zombies at most: {zombies}; workers left: {len(alive)}; temporary folders left: {left}; half files left: {partial}")
shutil.rmtree(folder)
sys.exit(seen != list(range(1, steps + 1)) or bool(left or partial or alive))
END
