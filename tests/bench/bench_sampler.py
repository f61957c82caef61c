"""Tokens per second of the sampler beside model.generate on the same work, one thread, medians of alternating runs.

    python tests/bench/bench_sampler.py                          the tiny model
    python tests/bench/bench_sampler.py --model SMOLLM2_DIR      4 x 8 and 32 x 8 completions of a real model
    python tests/bench/bench_sampler.py --scaling                rows and lengths against tokens per second, ours alone

Both sides sample the same prompts with the same weights to the same lengths: ours has no EOS and a
max_completion_length a row, generate a stopping criterion a row. Only tokens within a row's length count.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from eval import load_model, sample  # noqa: E402
from verifiers import load_tasks  # noqa: E402


class Lengths(StoppingCriteria):
    """Ends each row at its own length, as if an EOS had come up."""

    def __init__(self, start, lengths):
        self.start, self.lengths = start, torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] - self.start >= self.lengths


def ours(model, prompts, lengths, samples, pad_id, slots=None):
    how = dict(max_completion_length=torch.tensor(lengths), eos_ids=[], pad_id=pad_id, slots=slots)
    return sample(model, prompts, num_generations=samples, **how).lengths.tolist()


@torch.no_grad()
def generate(model, prompts, lengths, samples, pad_id, batch):
    """model.generate on `batch` rows at a time, left-padded: each prompt repeated once a sample, as its users do."""
    rows, done = [prompt for prompt in prompts for _ in range(samples)], []
    for start in range(0, len(rows), batch):
        part, wanted = rows[start : start + batch], lengths[start : start + batch]
        longest = max(map(len, part))
        ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in part])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part])
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad_id,
            eos_token_id=None, max_new_tokens=max(wanted), stopping_criteria=StoppingCriteriaList([Lengths(longest, wanted)]),
        )  # fmt: skip
        done += [min(n, out.shape[1] - longest) for n in wanted]
    return done


def continuous(model, prompts, lengths, samples, pad_id):
    """transformers' continuous batching (generate_batch), one token limit for all rows: equal lengths only."""
    from transformers import GenerationConfig

    how = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=pad_id)
    out = model.generate_batch(inputs=[p for p in prompts for _ in range(samples)], generation_config=how)
    return [len(result.generated_tokens) for result in out.values()]


def compare(name, sides, tokens, repeats, warmup=True):
    """Run the sides in turn and print tokens per second, min / median / max, and the ratio of ours to each peer."""
    seconds = {side: [] for side in sides}
    for repeat in range(not warmup, repeats + 1):
        for side, run in sides.items():
            start = time.perf_counter()
            assert sum(run()) == tokens, f"{side} did other work"
            seconds[side] += [time.perf_counter() - start] if repeat else []  # the first round warms up
    rates = {side: sorted(tokens / s for s in values) for side, values in seconds.items()}
    ratios = {
        side: statistics.median(theirs / mine for theirs, mine in zip(seconds[side], seconds["ours"])) for side in sides
    }
    for side, values in rates.items():
        low, mid, high = values[0], statistics.median(values), values[-1]
        print(
            f"{name:42s} {side:22s} {low:8.0f} {mid:8.0f} {high:8.0f} tokens/s   ours x{ratios[side]:.2f}", flush=True
        )
    return {"work": name, "tokens": tokens, "tokens_per_second": rates, "ours_times_faster": ratios}


def geometric(rows, mean, most, seed=11):
    return np.minimum(np.random.default_rng(seed).geometric(1 / mean, rows), most).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny/base")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--only", default="", help="run the comparisons whose name holds this text")
    parser.add_argument("--json", default="", help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer, _, pad_id = load_model(args.model, torch.device("cpu"))
    tiny = model.num_parameters() < 10e6
    tasks = load_tasks("tiny:train" if tiny else "tiny:instruction:train", limit=256)
    texts = [task["prompt"] for task in tasks]
    if not tiny:
        texts = [f"Please answer in your own words, and say why you think so. {text}" for text in texts]
    encode = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], **encode) for text in texts]

    results = []
    if args.scaling:
        for rows, new in [(1, 64), (8, 64), (64, 64), (256, 64), (8, 256), (8, 1024), (64, 256), (64, 1024)]:
            if not tiny and rows * new > 8192:
                continue
            work = (prompts[: max(1, rows // 8)], [new] * rows, min(8, rows), pad_id)
            results.append(
                compare(
                    f"{rows} rows, {new} tokens", {"ours": lambda w=work: ours(model, *w)}, rows * new, args.repeats
                )
            )
    works = [  # name, prompts, samples a prompt, lengths, rows of generate's batch
        ("128 ragged rows, generate by 32", 16, 8, geometric(128, 48, 128), 32),
        ("128 ragged rows, generate all at once", 16, 8, geometric(128, 48, 128), 128),
        ("32 prompts x 1, 64 tokens each", 32, 1, [64] * 32, 32),
    ] if tiny else [
        ("4 x 8 ragged rows", 4, 8, geometric(32, 48, 128), 32),
        ("32 x 8 ragged rows, generate by 32", 32, 8, geometric(256, 48, 128), 32),
    ]  # fmt: skip
    for name, count, samples, lengths, batch in works if not args.scaling else ():
        if args.only not in name:
            continue
        work = (prompts[:count], lengths, samples, pad_id)
        sides = {"ours": lambda w=work: ours(model, *w), "generate": lambda w=work, b=batch: generate(model, *w, b)}
        if samples == 1 and tiny:
            sides["continuous batching"] = lambda w=work: continuous(model, *w)
        results.append(compare(name, sides, sum(lengths), args.repeats, warmup=tiny))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
