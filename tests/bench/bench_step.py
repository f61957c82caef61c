"""Seconds and peak memory of a training step beside TRL's trainers on the same work, one thread.

    python tests/bench/bench_step.py                                     grpo_expert.py and GRPOTrainer, the tiny model
    python tests/bench/bench_step.py --model SMOLLM2_DIR --work 4x8x128  the same on a real model
    python tests/bench/bench_step.py --task mopd --work 32x1x32          mopd.py and DistillationTrainer
    python tests/bench/bench_step.py --beta 0.04

Both sides train the same weights on the same prompts, P x G completions a step, whose lengths are forced to the same
values (mean 3/8 of the longest) and whose rewards are coins. Float32, no gradient checkpointing, AdamW, one update a
step. Every run is a process of its own, the sides alternate, and the first step of each run is not counted, unless it is the only one.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from bench_sampler import Lengths, geometric  # noqa: E402

from verifiers import load_tasks  # noqa: E402


def coins(count, seed):
    """Rewards of `count` completions, half of them 1, in any group of two or more both kinds."""
    return [float((row + seed) % 2) for row in range(count)]


def ours(args, P, G, T, lengths, rows, folder):
    """Seconds of each step of the script itself, its sampler told the lengths and its verifier replaced by coins."""
    script = __import__("mopd" if args.task == "mopd" else "grpo_expert")
    sample = script.sample

    def forced(*positional, **how):
        return sample(*positional, **{**how, "max_completion_length": torch.tensor(lengths), "eos_ids": []})

    script.sample, script.verify_batch = forced, lambda rows: coins(len(rows), 0)
    Path(folder, "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = dict(
        model=args.model, tasks=f"{folder}/tasks.jsonl", out=f"{folder}/run", prompts_per_step=P, steps=args.steps
    )
    flags |= dict(num_generations=G, max_completion_length=T, learning_rate=1e-6, save_every=0, max_prompt_length=512)
    if args.task == "mopd":
        flags |= dict(kl="full")
    else:
        flags |= dict(beta=args.beta)
    sys.argv = [script.__name__, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
    if args.task == "mopd":
        sys.argv += ["--teachers", f"bench={args.teacher}"]
    script.main()
    metrics = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return [{name: row.get(f"time/{name}") for name in ("step", "sample", "train")} for row in metrics]


def trl(args, P, G, T, lengths, rows, folder):
    """Seconds of each optimizer step of TRL's trainer, generation included."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList, TrainerCallback

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    eos = tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    generate, seconds = model.generate, {"sample": 0.0}

    def forced(*positional, input_ids=None, **how):
        start, began = input_ids.shape[1], time.perf_counter()
        order = lengths[: len(input_ids)]
        out = generate(input_ids=input_ids, stopping_criteria=StoppingCriteriaList([Lengths(start, order)]), **how)
        out[:, start:][out[:, start:] == eos] = (eos + 1) % tokenizer.vocab_size
        for row, length in enumerate(
            order
        ):  # an EOS where the row was ended, which is how the trainer finds its length
            out[row, start + length - 1 :] = eos
        seconds["sample"] += time.perf_counter() - began
        return out

    model.generate = forced
    steps = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start, seconds["sample"] = time.perf_counter(), 0.0

        def on_step_end(self, *_, **__):
            whole = time.perf_counter() - self.start
            steps.append({"step": whole, "sample": seconds["sample"], "train": whole - seconds["sample"]})

    common = dict(
        output_dir=folder, max_steps=args.steps, per_device_train_batch_size=P * G, learning_rate=1e-6, report_to=[],
        max_completion_length=T, gradient_checkpointing=False, bf16=False, use_cpu=True, save_strategy="no", logging_steps=100,
        disable_tqdm=True, shuffle_dataset=False, generation_kwargs={"eos_token_id": None}, dataloader_num_workers=0,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    if args.task == "mopd":
        from trl import DistillationConfig, DistillationTrainer

        data = Dataset.from_list([row for row in data for _ in range(G)])
        teacher = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.float32)
        trainer = DistillationTrainer(
            model,
            teacher,
            DistillationConfig(**common),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
    else:
        from trl import GRPOConfig, GRPOTrainer

        config = GRPOConfig(**common, num_generations=G, beta=args.beta, temperature=1.0, loss_type="dapo")
        trainer = GRPOTrainer(
            model, reward_funcs=lambda completions, **_: coins(len(completions), 0), args=config, train_dataset=data,
            processing_class=tokenizer, callbacks=[Clock()],
        )  # fmt: skip
    trainer.train()
    return steps


def one_run(args):
    """A side in this process: prints a JSON line with the steps' seconds and the peak of the resident memory."""
    torch.set_num_threads(1)
    P, G, T = map(int, args.work.split("x"))
    tiny = "tiny" in args.model
    tasks = load_tasks("tiny:train" if tiny else "tiny:instruction:train", limit=P)
    lead = "" if tiny else "Please answer in your own words, and say why you think so. "
    rows = [{**task, "prompt": lead + task["prompt"], "domain": "bench"} for task in tasks]
    lengths = [T] * (P * G) if args.task == "mopd" and G == 1 else geometric(P * G, 3 * T / 8, T)
    with tempfile.TemporaryDirectory() as folder:
        steps = {"ours": ours, "trl": trl}[args.side](args, P, G, T, lengths, rows, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"steps": steps[1:] or steps, "peak_gb": peak}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "tiny/base"))
    parser.add_argument("--teacher", default="", help="default: the model itself")
    parser.add_argument("--task", choices=["grpo", "mopd"], default="grpo")
    parser.add_argument("--work", default="16x8x32", help="prompts x completions x longest")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a run")
    parser.add_argument("--json", default="", help="write the figures to this file")
    parser.add_argument("--side", default="")
    args = parser.parse_args()
    args.teacher = args.teacher or args.model
    if args.side:
        return one_run(args)
    found = {"ours": [], "trl": []}
    for _ in range(args.runs):
        for side, results in found.items():
            flags = [
                x
                for name, value in vars(args).items()
                if name not in ("side", "json")
                for x in (f"--{name}", str(value))
            ]
            command = [sys.executable, __file__, "--side", side, *flags]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            if done.returncode:
                sys.exit(f"{side} failed:\n{done.stderr[-2000:]}")
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(side, results[-1], flush=True)
    print(f"{args.task} {args.work} beta {args.beta}, {args.runs} runs: seconds min / median / max")
    medians = {}
    for side, results in found.items():
        for part in ("step", "sample", "train"):
            values = sorted(step[part] for run in results for step in run["steps"])
            medians[side, part] = statistics.median(values)
            print(f"{side:5s} {part:7s} {values[0]:8.3f} {statistics.median(values):8.3f} {values[-1]:8.3f}")
        medians[side, "peak_gb"] = statistics.median(run["peak_gb"] for run in results)
        print(f"{side:5s} peak    {medians[side, 'peak_gb']:8.2f} GB")
    ratios = {part: medians["trl", part] / medians["ours", part] for part in ("step", "sample", "train", "peak_gb")}
    print("TRL / ours: " + "  ".join(f"{part} {ratio:.2f}" for part, ratio in ratios.items()))
    if args.json:
        Path(args.json).write_text(
            json.dumps({"work": vars(args), "runs": found, "trl_over_ours": ratios}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
