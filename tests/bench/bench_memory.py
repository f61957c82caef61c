"""What a step of grpo_expert.py or mopd.py needs in memory, by a formula; and the formula beside what was measured.

    python tests/bench/bench_memory.py                             the table of the README: models x settings, by formula
    python tests/bench/bench_memory.py --measure SMOLLM2_DIR ...   measured peaks of models on a CPU, float32
    python tests/bench/bench_memory.py --teachers SMOLLM2_DIR      anonymous memory of mopd.py with 1, 2 and 4 teachers

Each measured run is a process of its own, whose peak (ru_maxrss) is told less what it held before the model was loaded.
It gives large blocks back as soon as they are free (MALLOC_MMAP_THRESHOLD_), as a GPU's allocator can use them again: glibc
by itself keeps up to as much again.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

# layers, hidden size, intermediate size, heads, key-value heads, head size, vocabulary; all tie their embeddings
SHAPES = {
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 64, 151936),
    "Llama-3.2-1B": (16, 2048, 8192, 32, 8, 64, 128256),
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 128, 151936),
    "Qwen3-1.7B": (28, 2048, 6144, 16, 8, 128, 151936),
    "Qwen3-4B": (36, 2560, 9728, 32, 8, 128, 151936),
}


def memory(shape, *, slots, length, tokens, bf16=True, lora_rank=0, beta=0.0, teacher=False, checkpointing=False):
    """Bytes by what holds them, and the peak of a step.

    slots: completions side by side; length: tokens of prompt and completion; tokens: --tokens_per_microbatch.
    """
    layers, hidden, inner, heads, kv_heads, size, vocabulary = shape
    q, kv, low = heads * size, kv_heads * size, 2 if bf16 else 4
    matrices = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
    N = layers * sum(a * b for a, b in matrices) + vocabulary * hidden
    learnt = layers * sum(lora_rank * (a + b) for a, b in matrices) if lora_rank else N
    frozen = N if lora_rank else 0
    parts = {
        "weights": 4 * learnt + low * frozen,
        "Adam": 8 * learnt,
        "bfloat16 copy": 2 * N if bf16 and not lora_rank else 0,
        "reference": 4 * N if beta and not lora_rank else 0,
        "teacher": (low if lora_rank else 4) * N if teacher else 0,
    }
    # Kept for the backward pass, a token and layer: residuals and norms, queries, keys, values and attention, the MLP.
    norms, linear = 4 * 4 * hidden, low * (2 * hidden + 3 * q + 2 * kv + 4 * inner)
    linear += low * 7 * lora_rank + 4 * (3 * hidden + q + inner) * (
        bf16 and lora_rank > 0
    )  # the adapter's float32 inputs
    a_layer = tokens * (norms + linear)
    kept = tokens * 4 * hidden * layers + a_layer if checkpointing else a_layer * layers
    head = 3 * 4 * 1024 * vocabulary  # logits of 1,024 tokens, their softmax and its gradient
    parts |= {
        "gradients": 4 * learnt,
        "autocast's casts": 2 * N if bf16 and not lora_rank else 0,
        "activations": kept,
        "logits": head,
        "keys and values": slots * length * layers * 2 * kv * low,
        "logits while sampling": slots * vocabulary * (low + 3 * 4),
    }
    names = list(parts)
    always, train, sample = (sum(parts[name] for name in part) for part in (names[:5], names[5:9], names[9:]))
    return {**parts, "peak": always + max(train, sample)}


GPUS = (16, 24, 48, 80)  # GB
SETTINGS = {  # from roomy to tight, by the name that the README gives them
    "A": dict(slots=256, tokens=16384),
    "B": dict(slots=64, tokens=8192),
    "C": dict(slots=256, tokens=16384, lora_rank=32),
    "D": dict(slots=64, tokens=8192, lora_rank=32),
    "E": dict(slots=16, tokens=4096, lora_rank=32),
}


def recipes():
    """The README's table: for each model and GPU the roomiest setting that leaves a tenth of the memory free, and its peak."""
    lines = [
        "| model | run | " + " | ".join(f"{size} GB" for size in GPUS) + " |",
        "| --- | --- |" + " --- |" * len(GPUS),
    ]
    for name, shape in SHAPES.items():
        for run, extra in {"RL": {"beta": 0.001}, "MOPD": {"teacher": True}}.items():
            peaks = {
                label: memory(shape, length=1536, checkpointing=True, **extra, **how)["peak"] / 1e9
                for label, how in SETTINGS.items()
            }
            fits = [[f"{label}, {peak:.1f}" for label, peak in peaks.items() if peak <= 0.9 * size] for size in GPUS]
            lines.append(f"| {name} | {run} | " + " | ".join((cell or ["none"])[0] for cell in fits) + " |")
    return "\n".join(lines)


CASES = {  # of --measure: script and flags; a step of P x G completions of T tokens each
    "all weights": ("grpo_expert", dict(P=4, G=8, T=96), {}),
    "all weights, beta": ("grpo_expert", dict(P=4, G=8, T=96), {"beta": 0.04}),
    "gradient checkpointing": ("grpo_expert", dict(P=4, G=8, T=96), {"gradient_checkpointing": None}),
    "LoRA": ("grpo_expert", dict(P=4, G=8, T=96), {"lora_rank": 32}),
    "many slots": ("grpo_expert", dict(P=8, G=32, T=64), {"lora_rank": 8, "gradient_checkpointing": None}),
    "MOPD": ("mopd", dict(P=8, G=4, T=96), {"kl": "sampled"}),
}


def measured(model, case):
    """One step in this process -> its peak in bytes above what was there before, tokens of the largest micro-batch."""
    import torch

    torch.set_num_threads(1)
    script_name, size, flags = CASES[case]
    script = __import__(script_name)
    sample, split, tokens, longest = script.sample, script.micro_batches, [0], [0]

    def forced(model, prompts, **how):
        longest[0] = max(map(len, prompts)) + size["T"]
        return sample(model, prompts, **{**how, "eos_ids": []})

    def counted(lengths, budget):
        batches = split(lengths, budget)
        tokens.extend(len(batch) * max(lengths[place] for place in batch) for batch in batches)
        return batches

    script.sample, script.micro_batches = forced, counted
    script.verify_batch = lambda rows: [float(row % 2) for row in range(len(rows))]
    folder = tempfile.mkdtemp()
    words = ["--model", model, "--tasks", "tiny:instruction:train", "--out", f"{folder}/run", "--steps", "1"]
    words += ["--prompts_per_step", size["P"], "--num_generations", size["G"], "--max_completion_length", size["T"]]
    words += "--device cpu --save_every 0 --tokens_per_microbatch 2048 --eval_limit 1 --eval_samples 1".split()
    words += [part for name, value in flags.items() for part in (f"--{name}", value) if part is not None]
    words += ["--teachers", f"instruction={model}"] if script_name == "mopd" else []
    sys.argv = [script_name, *map(str, words)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    saved, script.save_model = script.save_model, lambda *args: None
    script.main()
    script.save_model = saved
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, max(tokens), longest[0]


def anonymous_peak(model, count):
    """Peak of the anonymous memory in bytes of two steps of mopd.py on four domains, taught by `count` different folders."""
    domains = ("math", "code", "science", "instruction")
    with tempfile.TemporaryDirectory(dir=Path(model).resolve().parent) as folder:
        for name in range(count):  # links, as equal folders would be loaded once
            shutil.copytree(model, f"{folder}/{name}", copy_function=os.link)
        words = (
            f"--model {model} --steps 2 --prompts_per_step 8 --max_completion_length 16 --save_every 0 --eval_limit 1"
        )
        words += f" --eval_samples 1 --device cpu --tokens_per_microbatch 1024 --out {folder}/run"
        words += " --tasks " + " ".join(f"tiny:{domain}" for domain in domains)
        words += " --teachers " + " ".join(f"{domain}={folder}/{place % count}" for place, domain in enumerate(domains))
        run = subprocess.Popen([sys.executable, "mopd.py", *words.split()], cwd=ROOT, stdout=subprocess.DEVNULL)
        peak = 0
        while run.poll() is None:
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{run.pid}/status").read_text())
            peak = max(peak, 1024 * int(found[1]) if found else 0)
            time.sleep(0.02)
        if run.returncode:
            sys.exit(f"mopd.py ended with {run.returncode}")
    return peak


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", default=[])
    parser.add_argument("--teachers", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", default="")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("measured:", json.dumps(measured(args.measure[0], args.one)))
        return
    results = []
    for count in (1, 2, 4) if args.teachers else ():
        peak = anonymous_peak(args.teachers, count)
        print(f"{count} teachers: {peak / 1e9:.3f} GB of anonymous memory", flush=True)
        results.append({"teachers": count, "anonymous": peak})
    for model in args.measure:
        config = json.loads((Path(model) / "config.json").read_text())
        heads = config["num_attention_heads"]
        shape = [config[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size")]
        size = config.get("head_dim") or config["hidden_size"] // heads
        shape += [heads, config["num_key_value_heads"], size, config["vocab_size"]]
        for case, (script, step, flags) in CASES.items():
            if args.only not in case:
                continue
            command = [sys.executable, __file__, "--measure", model, "--one", case]
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            peak, tokens, length = json.loads(done.stdout.split("measured:")[1])
            how = dict(slots=step["P"] * step["G"], length=length, tokens=tokens, bf16=False, teacher=script == "mopd")
            how |= dict(
                lora_rank=flags.get("lora_rank", 0),
                beta=flags.get("beta", 0),
                checkpointing="gradient_checkpointing" in flags,
            )
            parts = memory(shape, **how)
            print(
                f"{model} {case:24s} measured {peak / 1e9:6.2f} GB  formula {parts['peak'] / 1e9:6.2f} GB  x{parts['peak'] / peak:.2f}",
                flush=True,
            )
            results.append({"model": Path(model).name, "case": case, "measured": peak, "formula": parts})
    if not (args.measure or args.teachers):
        print(recipes())
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
