"""Sample, score and compare models: avg@k, pass@k, what each gained over the base and kept of its expert, and the cost.

For each task n completions are drawn and c of them are right; everything in the tables follows from these counts:

    avg@n  = mean over tasks of c/n                      one try
    pass@k = mean over tasks of 1 - C(n-c, k)/C(n, k)    one right in k tries, unbiased (arXiv 2107.03374)

    python eval.py                                                    the tiny base on the tiny test tasks
    python eval.py --models base=tiny/base math=runs/math --tasks tiny:test --out runs/eval
    python eval.py --models base=Qwen/Qwen2.5-0.5B-Instruct --tasks gsm8k:test --k 4 --max_completion_length 512

A model named like a domain (math=...) counts as that domain's expert. Held-out domains are those whose task rows say
so; they stay out of the average. A model scored before under the same settings is read from --out, not sampled again,
so an evaluation continues after an interruption and grows by a model. Left out: intervals, pictures.
"""

import argparse
import dataclasses
import difflib
import json
import math
import os
import resource
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, HfArgumentParser
from transformers.hf_argparser import HfArg
from transformers.utils.logging import disable_progress_bar

from verifiers import TaskError, load_tasks, verify_batch

# Letters are dimensions only: P prompts, G samples a prompt, B = P*G rows, T completion tokens, V vocabulary.


def stop(message):
    """End as bad input should: one line on stderr that says what to do, and exit code 2."""
    print(f"{os.path.basename(sys.argv[0])}: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


@dataclass
class Args:
    # fmt: off
    models: list[str] = HfArg(default_factory=lambda: ["base=tiny/base"], help="NAME=folder or hub id, the base first; an expert is named like its domain")
    tasks: list[str] = HfArg(default_factory=lambda: ["tiny:test"], help="presets (tiny:test, gsm8k:test) or files (.jsonl .json .parquet .csv)")
    k: int = HfArg(default=16, help="completions a task; time grows with it")
    limit: int = HfArg(default=0, help="tasks of each entry of --tasks, drawn with --seed; 0: all")
    temperature: float = HfArg(default=1.0, help="sampling temperature; 0 is greedy")
    top_p: float = HfArg(default=1.0, help="sample from the smallest set of tokens with this mass; 1: off")
    top_k: int = HfArg(default=0, help="sample from this many most likely tokens; 0: off")
    max_prompt_length: int = HfArg(default=2048, help="tokens; tasks with longer prompts are left out, and counted")
    max_completion_length: int = HfArg(default=48, help="tokens sampled at the most; the default suits the tiny world")
    out: str = HfArg(default="", help="folder of eval.json, eval.md and samples.jsonl; empty: runs/eval-<time>")
    seed: int = HfArg(default=0, help="seed of every draw; the same for each model")
    slots: int = HfArg(default=512, help="completions sampled side by side; lower it when memory runs out")
    sampler: Literal["fast", "hf"] = HfArg(default="fast", help="fast: the sampler in this file; hf: model.generate, the slow reference")
    data_dir: str = HfArg(default="", help="folder with local copies of the presets: DATA_DIR/<preset>/<split>.jsonl|json|parquet")
    device: str = HfArg(default="", help="cuda, cpu or mps; empty: cuda where there is one, else cpu")
    dtype: Literal["auto", "float32", "bfloat16"] = HfArg(default="auto", help="of the weights while sampling; auto: bfloat16 where the GPU has it")
    # fmt: on

    def __post_init__(self):
        if self.k < 1 or self.max_completion_length < 1 or self.max_prompt_length < 1 or self.slots < 1:
            stop("--k, --max_completion_length, --max_prompt_length and --slots must be 1 or more")
        if self.seed < 0 or self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.limit < 0:
            stop("--seed, --temperature, --top_k and --limit must be 0 or more, and --top_p in (0, 1]")
        names = [model.partition("=")[0] for model in self.models]
        if not all("=" in model for model in self.models) or len(set(names)) < len(names):
            stop("--models takes NAME=folder pairs with different names, e.g. base=tiny/base math=runs/math")
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            stop(f"--device {self.device}: this PyTorch sees no GPU; leave --device out, or install a CUDA build")
        if self.dtype == "auto":
            bfloat16 = self.device.startswith("cuda") and torch.cuda.is_bf16_supported()
            self.dtype = "bfloat16" if bfloat16 else "float32"
        self.out = self.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}"


def parse_args(args_class, description):
    """The flags of a script as its dataclass; a wrong flag or value ends with one line, not with a page of usage."""
    parser = HfArgumentParser(args_class, description=description, allow_abbrev=False)
    parser.formatter_class = type(
        "Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {}
    )
    parser.error = lambda message: stop(f"{message} (see --help)")
    args, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0], flags, n=1, cutoff=0.7)
        stop(f"unknown argument {unknown[0]}" + (f": did you mean {near[0]}?" if near else " (see --help)"))
    return args


# ---------------------------------------------------------------------------------------------- model and tasks


def model_folder(name):
    """The folder of a model given as a folder or as a hub id (downloaded once, and never a pickle)."""
    if os.path.isdir(name):
        if not os.path.exists(os.path.join(name, "config.json")):
            stop(f"{name} holds no config.json: give the folder of a model in the Hugging Face format")
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except (OSError, ValueError) as error:
        stop(f"no model at {name}: give a folder, or a hub id that this machine can reach ({type(error).__name__})")


def load_model(name, device):
    """A causal language model in float32 with dropout off -> (model, tokenizer, ids that end a completion, pad id).

    Padding is never told from content by its id, so the pad id may be one that ends.
    """
    folder = model_folder(name)
    disable_progress_bar()  # of loading; the runs show their own
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        stop(f"cannot load a causal language model from {name}: {str(error).splitlines()[0]}")
    listed = model.generation_config.eos_token_id
    eos_ids = sorted({tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None})
    if not eos_ids:
        stop(f"{name} names no end-of-sequence token: set eos_token_id in its generation_config.json")
    return (
        model.to(device).eval(),
        tokenizer,
        eos_ids,
        (eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id),
    )


def encode_prompt(tokenizer, prompt):
    """Token ids of a task's prompt (text or messages), through the chat template where the tokenizer has one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tokenizer("\n\n".join(message["content"] for message in messages)).input_ids


def load_prompts(specs, tokenizer, max_prompt_length, data_dir, limit=None, seed=0):
    """The tasks of `specs`, each with its prompt's token ids under "ids"; prompts that are too long are left out."""
    tasks = []
    for spec in specs:
        try:
            rows = load_tasks(spec, limit=limit, seed=seed, data_dir=data_dir or None)
        except TaskError as error:
            stop(error)
        rows = [{**row, "ids": encode_prompt(tokenizer, row["prompt"])} for row in rows]
        kept = [row for row in rows if 0 < len(row["ids"]) <= max_prompt_length]
        if len(kept) < len(rows):
            print(f"{spec}: {len(rows) - len(kept)} of {len(rows)} prompts exceed {max_prompt_length} tokens: left out")
        if not kept:
            stop(f"{spec}: no task is left; raise --max_prompt_length or name other tasks")
        tasks += kept
    return tasks


# ------------------------------------------------------------------------------------------------------ sampler


class Rollouts(NamedTuple):
    """B = P*G completions, prompt by prompt; T is the largest max_completion_length."""

    tokens: torch.Tensor  # (B, T) int64, pad_id after the end
    lengths: torch.Tensor  # (B,) int64 completion tokens, the EOS counted
    logprobs: torch.Tensor  # (B, T) float32, of each token under the distribution it was drawn from; 0 after the end
    finished: torch.Tensor  # (B,) bool: ended by itself, not cut at max_completion_length


def draw(logits, uniforms, temperature=1.0, top_p=1.0, top_k=0):
    """One token a row by inverting the CDF: the first token whose cumulative probability passes the row's uniform.

    logits (b, V) float32, uniforms (b,) float64 in [0, 1) -> tokens (b,), their log-probabilities (b,).
    """
    if temperature == 0:  # all the mass is on one token, whose log-probability is 0
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:  # keep the smallest set of tokens whose mass reaches top_p
        ordered, index = logits.sort(descending=True)
        mass = ordered.softmax(-1)
        dropped = mass.cumsum(-1) - mass >= top_p
        dropped[:, 0] = False
        logits = logits.masked_fill(dropped.scatter(-1, index, dropped), -math.inf)
    weights = (logits - logits.max(-1, keepdim=True).values).exp()  # (b, V), softmax before it is normalised
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:].clone()
    tokens = torch.searchsorted(cdf, (uniforms.to(cdf)[:, None] * total), right=True)
    # Rounding can carry u * total up to total itself; the last token that still adds mass is then the right one.
    tokens = torch.minimum(tokens, torch.searchsorted(cdf, total)).squeeze(-1)
    return tokens, (weights.gather(-1, tokens[:, None]) / total).log().squeeze(-1)


@torch.no_grad()
def sample(
    model, prompts, *, num_generations, max_completion_length, eos_ids, pad_id, temperature=1.0, top_p=1.0, top_k=0,
    seed=0, first_row=0, slots=None,
):  # fmt: skip
    """Sample num_generations completions of each prompt (a list of token ids) -> Rollouts.

    What makes it faster than model.generate: a prompt goes through the model once and its KV is expanded to the group,
    rows leave the batch as soon as they end, and only the last position goes through the lm_head. Row r draws its t-th
    token with the t-th uniform of the generator (seed, first_row + r), so a completion depends neither on `slots`
    (rows side by side, None: all) nor on who shares the batch, up to floating point.
    """
    B, device = len(prompts) * num_generations, model.device
    caps = torch.as_tensor(max_completion_length).expand(B)  # an int, or one per row
    T = int(caps.max())
    uniforms = [np.random.Generator(np.random.Philox(key=[seed, first_row + row])).random(T) for row in range(B)]
    uniforms, caps = torch.from_numpy(np.stack(uniforms)), caps.to(device)
    uniforms = uniforms.to(device, torch.float32 if device.type == "mps" else torch.float64)
    eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
    tokens = torch.full((B, T), pad_id, device=device)  # (B, T)
    logprobs = torch.zeros((B, T), device=device)  # (B, T)
    lengths = torch.zeros(B, dtype=torch.long, device=device)
    finished = torch.zeros(B, dtype=torch.bool, device=device)

    for start in range(0, B, slots or B):
        rows = torch.arange(start, min(start + (slots or B), B), device=device)
        owner = rows // num_generations - start // num_generations  # the row's prompt, counted within this chunk
        batch = prompts[start // num_generations :][: int(owner[-1]) + 1]
        longest = max(map(len, batch))
        ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in batch], device=device)  # padded on the left
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=device)
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        forward = dict(cache=cache, use_cache=True, logits_to_keep=1)
        logits = model(ids, attention_mask=mask, position_ids=position, **forward).logits[:, -1]
        cache.batch_select_indices(owner)  # prefilled once a prompt, now one copy a sample
        logits, mask, position = logits[owner], mask[owner], position[owner, -1:]
        for t in range(T):
            token, logprob = draw(logits.float(), uniforms[rows, t], temperature, top_p, top_k)
            ended = torch.isin(token, eos)
            tokens[rows, t], logprobs[rows, t], lengths[rows], finished[rows] = token, logprob, t + 1, ended
            going = (~ended & (t + 1 < caps[rows])).nonzero().squeeze(-1)
            if len(going) == 0:
                break
            if len(going) < len(rows):  # finished rows leave, and take their KV along
                rows, token, mask, position = rows[going], token[going], mask[going], position[going]
                cache.batch_select_indices(going)
            mask, position = F.pad(mask, (0, 1), value=1), position + 1
            logits = model(token[:, None], attention_mask=mask, position_ids=position, **forward).logits[:, -1]
    return Rollouts(tokens, lengths, logprobs, finished)


@torch.no_grad()
def sample_hf(
    model, prompts, *, num_generations, max_completion_length, eos_ids, pad_id, temperature=1.0, top_p=1.0, top_k=0,
    seed=0, first_row=0, slots=None,
):  # fmt: skip
    """`sample` by model.generate: the readable reference. Its draws depend on the batch, and slots is not used."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    caps = torch.as_tensor(max_completion_length, device=model.device).expand(len(prompts) * num_generations)
    T = int(caps.max())
    how = (
        dict(do_sample=True, temperature=temperature, top_p=top_p, top_k=top_k) if temperature else {"do_sample": False}
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed + first_row)
        out = model.generate(
            ids, attention_mask=mask, num_return_sequences=num_generations if temperature else 1, max_new_tokens=T,
            eos_token_id=eos_ids or None, pad_token_id=pad_id, repetition_penalty=1.0, output_scores=True, return_dict_in_generate=True, **how,
        )  # fmt: skip
    repeat = 1 if temperature else num_generations  # greedy samples of a prompt are all the same
    drawn = out.sequences[:, longest:].repeat_interleave(repeat, 0)
    ended = torch.isin(drawn, torch.tensor(eos_ids, dtype=torch.long, device=model.device))
    first_end = torch.where(ended.any(-1), ended.float().argmax(-1) + 1, drawn.shape[1])
    lengths = torch.minimum(first_end, caps)
    mask = torch.arange(T, device=model.device) < lengths[:, None]  # (B, T)
    tokens = F.pad(drawn, (0, T - drawn.shape[1]), value=pad_id).masked_fill(~mask, pad_id)
    logprobs = torch.zeros(tokens.shape, device=model.device)
    for t, scores in enumerate(out.scores if temperature else ()):
        logprobs[:, t] = scores.float().log_softmax(-1).gather(-1, drawn[:, t : t + 1]).squeeze(-1)
    return Rollouts(tokens, lengths, logprobs.masked_fill(~mask, 0), (ended & mask[:, : drawn.shape[1]]).any(-1))


def decode(tokenizer, rollouts):
    """The text of each completion, special tokens left out."""
    rows = [row[:n].tolist() for row, n in zip(rollouts.tokens.cpu(), rollouts.lengths.tolist())]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


# -------------------------------------------------------------------------------------------------------- score


def evaluate(model, tasks, tokenizer, *, samples, slots=512, draw_completions=sample, **how):
    """Sample each task `samples` times and score every completion -> ({domain: result}, [one row a completion]).

    A result holds n (samples a task), counts (right ones, a task: a score of 1), ids, held_out, length (mean tokens),
    truncated (share cut at max_completion_length) and tokens. `tasks` carry their prompt's token ids (load_prompts);
    `how` goes to the sampler.
    """
    results, completions, block = {}, [], max(1, slots // samples)
    bar = tqdm(total=len(tasks) * samples, unit="completion", desc="sampling", leave=False, dynamic_ncols=True)
    for domain in dict.fromkeys(task["domain"] for task in tasks):
        members = [task for task in tasks if task["domain"] == domain]
        texts, lengths, finished = [], [], []
        for start in range(0, len(members), block):
            prompts = [task["ids"] for task in members[start : start + block]]
            rows = {"num_generations": samples, "first_row": start * samples, "slots": slots}
            rollouts = draw_completions(model, prompts, **rows, **how)
            texts += decode(tokenizer, rollouts)
            lengths, finished = lengths + rollouts.lengths.tolist(), finished + rollouts.finished.tolist()
            bar.update(len(prompts) * samples)
        owners = [task for task in members for _ in range(samples)]
        scores = verify_batch([(task["verifier"], text, task["answer"]) for task, text in zip(owners, texts)])
        results[domain] = {
            "n": samples,
            "counts": [sum(s == 1 for s in scores[i : i + samples]) for i in range(0, len(scores), samples)],
            "ids": [task["id"] for task in members],
            "held_out": any(task.get("held_out", False) for task in members),
            "length": sum(lengths) / len(lengths),
            "truncated": 1 - sum(finished) / len(finished),
            "tokens": sum(lengths),
        }
        for task, text, score in zip(owners, texts, scores):
            completions.append({"domain": domain, "id": task["id"], "completion": text, "score": score})
    bar.close()
    return results, completions


def pass_at_k(n, c, k):
    """Probability that one of k completions is right, from c right ones of n: 1 - C(n-c, k)/C(n, k), as a product.

    Unbiased where 1 - (1 - c/n)^k is not (arXiv 2107.03374, section 2.1). k may not exceed n.

    >>> pass_at_k(4, 1, 2)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    0.5
    >>> pass_at_k(4, 3, 2), pass_at_k(4, 0, 4)
    (1.0, 0.0)
    """
    if not 0 < k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 0 < k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 1.0


def score(result, k=1):
    """Mean pass@k over the tasks of a result, in points (0 to 100); k = 1 is avg@n."""
    return 100 * sum(pass_at_k(result["n"], c, k) for c in result["counts"]) / len(result["counts"])


def own_flops(cost):
    """Compute of one run: 2N FLOPs a token sampled or scored, 6N a token trained on (arXiv 2001.08361), N parameters.

    >>> own_flops({"parameters": 10, "tokens_sampled": 3, "tokens_trained": 5})
    360
    """
    forward = sum(cost.get(key, 0) for key in ("tokens_sampled", "tokens_scored", "teacher_tokens"))
    return cost.get("parameters", 0) * (2 * forward + 6 * cost.get("tokens_trained", 0))


def own_seconds(cost):
    """Seconds of one run, its validation left out."""
    return sum(value for phase, value in cost.get("seconds", {}).items() if phase not in ("eval", "total"))


def end_to_end(cost, measure):
    """`measure` of a run and of all that it reused: the experts of a merge or of a distillation."""
    return measure(cost) + sum(end_to_end(reused or {}, measure) for reused in cost.get("reused", {}).values())


def markdown(header, rows):
    """A Markdown table; numbers get one decimal, None an empty cell."""
    cells = [["" if c is None else f"{c:.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_own_expert(models, trained):
    """`models`, and behind the experts the row "own expert": each domain's expert on its domain, at the cost of all."""
    experts = [domain for domain in trained if domain in models]
    if not experts:
        return models
    own = {
        "domains": {domain: models[domain]["domains"][domain] for domain in experts},
        "cost": {"reused": {domain: models[domain]["cost"] for domain in experts}},
    }
    rows = list(models.items())
    place = 1 + max(list(models).index(domain) for domain in experts)
    return dict(rows[:place] + [("own expert", own)] + rows[place:])


def report(settings, models):
    """The tables of eval.md out of nothing but the content of eval.json; the first model is the base."""
    n, base = settings["k"], next(iter(models))
    start = models[base]["domains"]
    trained = [domain for domain in start if not start[domain]["held_out"]]
    held_out = [domain for domain in start if start[domain]["held_out"]]
    models = with_own_expert(models, trained)
    unit = next((name for name in models if name.startswith("merge")), "own expert" if "own expert" in models else None)

    def cells(model, domains, cell):
        results = model["domains"]
        return [cell(results[domain], start[domain]) if domain in results else None for domain in domains]

    def mean(values):
        return sum(values) / len(values) if values and None not in values else None

    def relative_cost(name, measure):
        whole = end_to_end(models[unit]["cost"], measure) if unit and models[name]["cost"] else 0
        return f"{end_to_end(models[name]['cost'], measure) / whole:.2f}" if whole else None

    scores, coverage, gains, kept = [], [], [], []
    for name, model in models.items():
        avg, rest = (cells(model, domains, lambda now, _: score(now)) for domains in (trained, held_out))
        cover = cells(model, trained + held_out, lambda now, _: score(now, n))
        costs = [relative_cost(name, own_flops), relative_cost(name, own_seconds)]
        scores.append([name, *avg, mean(avg), mean(rest), mean(cover[: len(trained)]), *costs])
        coverage.append([name, *cover])
        if name != base:
            avg, rest = (cells(model, ds, lambda now, was: score(now) - score(was)) for ds in (trained, held_out))
            gains.append([name, *avg, mean(avg), *rest, mean(rest)])
        if name not in (base, "own expert", *trained):
            row = [name]
            for domain in (d for d in trained if d in models):
                first, mine, own = (score(m["domains"][domain]) for m in (models[base], model, models[domain]))
                # Below a point of gain the share is noise over noise.
                row.append(
                    f"{mine - own:+.1f}"
                    + (f" ({100 * (mine - first) / (own - first):.0f} %)" if own - first > 1 else "")
                )
            kept.append(row)

    draws = f"temperature {settings['temperature']}, top-p {settings['top_p']}, top-k {settings['top_k']}, seed {settings['seed']}"
    note = f"{n} completions a task at {draws}. Average and pass@{n}: over the domains that are not held out."
    note += f" Cost: training from end to end, experts included, relative to `{unit}`." if unit else ""
    header = ["model", *trained, "average", "held-out", f"pass@{n}", "cost (FLOPs)", "cost (s)"]
    text = [f"## Scores: avg@{n}, in points", note, markdown(header, scores)]
    text += [f"## Coverage: pass@{n}, in points", markdown(["model", *trained, *held_out], coverage)]
    if gains:
        header = ["model", *trained, "average", *held_out, "held-out"]
        text += ["## Difference to the base, in points", markdown(header, gains)]
    if kept and len(kept[0]) > 1:
        header = ["model", *(domain for domain in trained if domain in models)]
        text += ["## Difference to the domain's expert, in points (share of its gain kept)", markdown(header, kept)]
    return "\n\n".join(text) + "\n"


# --------------------------------------------------------------------------------------------------- run folder


def write_json(path, value):
    """Write a JSON file so that it is never seen half written."""
    Path(f"{path}.tmp").write_text(json.dumps(value, indent=1) + "\n")
    os.replace(f"{path}.tmp", path)


def peak_gb(device):
    """Peak memory in GB: of the GPU where there is one, else of the process (ru_maxrss is KB on Linux, bytes on macOS)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def add_json(path, *values):
    """Append JSON lines."""
    with open(path, "a") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)


@contextmanager
def timed(seconds, phase, device):
    """Add the seconds spent inside to seconds[phase]; CUDA works on after the call returns, so wait for it."""
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


def run_cost(folder):
    """The cost.json of the run that made a model, {} where there is none (a model that was not trained here)."""
    path = Path(folder) / "cost.json"
    return json.loads(path.read_text()) if path.exists() else {}


def main():
    args = parse_args(Args, __doc__)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    folders = {name: model_folder(path) for name, _, path in (model.partition("=") for model in args.models)}
    (out := Path(args.out)).joinpath("models").mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("models", "out", "slots", "device")}
    models, completions = {}, []
    for name, folder in tqdm(folders.items(), unit="model", dynamic_ncols=True):
        # A model is sampled once: it is read again while settings, folder and weights are the same as they were.
        part = out / "models" / f"{name}.json"
        key = {**settings, "folder": os.path.realpath(folder)}
        key["files"] = [os.path.getmtime(spec) for spec in args.tasks if os.path.exists(spec)]
        key["weights"] = max((path.stat().st_mtime for path in Path(folder).glob("*.safetensors")), default=0)
        if part.exists() and (saved := json.loads(part.read_text()))["key"] == key:
            tqdm.write(f"{name}: scored before, read from {part}")
        else:
            model, tokenizer, eos_ids, pad_id = load_model(folder, device)
            context = getattr(model.config, "max_position_embeddings", None) or math.inf
            longest = int(min(args.max_prompt_length, context - args.max_completion_length))
            tasks = load_prompts(args.tasks, tokenizer, longest, args.data_dir, args.limit or None, args.seed)
            seconds = {}
            with timed(seconds, "eval", device):
                domains, rows = evaluate(
                    model.to(dtype), tasks, tokenizer, samples=args.k, temperature=args.temperature,
                    top_p=args.top_p, top_k=args.top_k, max_completion_length=args.max_completion_length,
                    seed=args.seed, eos_ids=eos_ids, pad_id=pad_id, slots=args.slots,
                    draw_completions=sample if args.sampler == "fast" else sample_hf,
                )  # fmt: skip
            saved = {"key": key, "domains": domains, "seconds": seconds["eval"], "samples": rows}
            write_json(part, saved)
            scores = "  ".join(f"{domain} {score(result):.1f}" for domain, result in domains.items())
            tqdm.write(f"{name}: {scores}  ({seconds['eval']:.0f} s)")
        models[name] = {"domains": saved["domains"], "cost": run_cost(folder), "seconds": saved["seconds"]}
        completions += [{"model": name, **row} for row in saved["samples"]]
    settings["models"] = args.models
    write_json(out / "eval.json", {"settings": settings, "models": models})
    (out / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in completions))
    (out / "eval.md").write_text(text := report(settings, models))
    print(f"\n{text}\nWritten to {out}: eval.md, eval.json (every count) and samples.jsonl (read some)")


if __name__ == "__main__":
    main()
