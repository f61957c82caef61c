"""Mix RL: one GRPO run on the pooled tasks of several domains, and nothing else.

Everything but the choice of prompts is grpo_expert.py (`diff grpo_expert.py mix_rl.py` is the lesson): a step draws its
P prompts by domain with weights w, and the group baseline keeps domains of different difficulty apart.

    natural        w_d = n_d / sum n          the pool as it is
    uniform        w_d = 1 / D                every domain alike
    temperature=t  w_d ~ n_d^(1/t)            between the two
    math=2 code=1  w_d as given               the paper (arXiv 2608.27409) finds that these proportions decide what is learnt
    dads           w_d ~ exp((1 - r_d)/tau)   more of what still fails (RuleReasoner, arXiv 2506.08672)

Left out: asynchronous rollouts, models that need several GPUs each.

    python mix_rl.py                                               the four tiny domains, about three minutes
    python mix_rl.py --proportions math=2 code=1 science=1 instruction=1 --out runs/mix-math
    python mix_rl.py --model Qwen/Qwen2.5-0.5B-Instruct --tasks gsm8k:train mbpp:train --learning_rate 1e-6 \\
        --max_completion_length 512 --tokens_per_microbatch 8192
"""

import copy
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.hf_argparser import HfArg
from transformers.modeling_layers import GradientCheckpointingLayer

from eval import (
    Saves, add_json, add_lora, bad_step, cache_fits, check_bounds, evaluate, gather, hold_out, join_processes,
    load_model, load_prompts, next_command, open_run, output_head, parse_args, peak_gb, read_lines, run, sample_hf,
    save_model, say_doubts, settle_device, stop, sum_gradients, sum_numbers, timed, tracker, write_json,
)  # fmt: skip
from verifiers import is_test_set, verify_batch

# Letters are dimensions only: P prompts a step, G samples a prompt, B = P*G rows, T completion tokens, V vocabulary.


@dataclass
class Args:
    # fmt: off
    model: str = HfArg(default="tiny/base", help="folder or hub id of the model to start from")
    tasks: list[str] = HfArg(default_factory=lambda: ["tiny:math", "tiny:code", "tiny:science", "tiny:instruction"], help="training tasks: presets (tiny:math, gsm8k:train) or files (.jsonl .json .parquet .csv)")
    # new to mix_rl:
    proportions: list[str] = HfArg(default_factory=lambda: ["natural"], help="how often each domain is drawn: natural (by its number of tasks), uniform, temperature=2 (flatter than natural), dads (by what still fails), or weights: math=2 code=1 ...")
    reward_weights: list[str] = HfArg(default_factory=list, help="math=2 ...: factor on a domain's advantages, 1 where none is given (on rewards themselves a division by their deviation would cancel it)")
    length_caps: list[str] = HfArg(default_factory=list, help="math=32 ...: tokens sampled at the most in a domain, max_completion_length where none is given")
    eval_tasks: list[str] = HfArg(default_factory=list, help="tasks scored before and after training; empty: the validation split of a tiny preset, else none")
    out: str = HfArg(default="", help="run folder; empty: runs/<script>-<time>")
    seed: int = HfArg(default=0, help="seed of the domains drawn, the task order and every sample")
    steps: int = HfArg(default=80, help="sample-verify-update rounds")
    prompts_per_step: int = HfArg(default=32, help="P, prompts a step; the batch is P * num_generations completions")
    num_generations: int = HfArg(default=8, help="G, completions a prompt: the group that is the baseline")
    num_iterations: int = HfArg(default=1, help="optimizer updates on each batch; above 1 the clip matters")
    max_prompt_length: int = HfArg(default=512, help="tokens; tasks with longer prompts are left out, and counted")
    max_completion_length: int = HfArg(default=48, help="tokens sampled at the most; time and memory grow with it")
    temperature: float = HfArg(default=1.0, help="sampling temperature, also of the log-probabilities that are trained")
    learning_rate: float = HfArg(default=7e-4, help="peak AdamW rate; the default suits the tiny world, real models want about 1e-6")
    warmup_steps: int = HfArg(default=3, help="steps of linear warm-up")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = HfArg(default="linear", help="decay after the warm-up, down to 0 where a next step would be")
    lora_rank: int = HfArg(default=0, help="train a LoRA adapter of this rank instead of all weights (pip install peft; arXiv 2608.27409: 32); 0: all weights")
    lora_alpha: float = HfArg(default=0, help="LoRA: the adapter is scaled by alpha / rank; 0: twice the rank")
    max_grad_norm: float = HfArg(default=1.0, help="the gradient is scaled down to this norm")
    weight_decay: float = HfArg(default=0.0, help="AdamW's decoupled weight decay")
    beta: float = HfArg(default=0.0, help="weight of the KL to the starting model; above 0 a second, frozen copy is in memory (with LoRA none)")
    epsilon: float = HfArg(default=0.2, help="lower clip: no push below ratio 1 - epsilon")
    epsilon_high: float = HfArg(default=0.28, help="upper clip: no push above ratio 1 + epsilon_high (DAPO's clip-higher)")
    scale_rewards: Literal["none", "group", "batch", "domain"] = HfArg(default="group", help="divide advantages by this standard deviation, domain: of all rewards of the domain in the batch (the paper: none)")
    loss_norm: Literal["token", "sequence", "constant"] = HfArg(default="token", help="DAPO: tokens of the batch | GRPO: mean a row | Dr. GRPO: rows * max_completion_length")
    dynamic_sampling: bool = HfArg(default=False, help="replace groups whose rewards are all equal by new prompts, in up to 4 rounds (DAPO)")
    mask_truncated: bool = HfArg(default=False, help="completions cut at max_completion_length carry no loss")
    overlong_cache: int = HfArg(default=0, help="tokens before the cap over which the reward falls by up to 1 (DAPO's soft overlong penalty); 0: off")
    tis_cap: float = HfArg(default=2.0, help="cap of the importance weight that corrects a bfloat16 sampler; unused in float32")
    gradient_checkpointing: bool = HfArg(default=False, help="keep one activation a layer and compute the others again in the backward pass: far less memory, a third more time")
    tokens_per_microbatch: int = HfArg(default=8192, help="padded tokens in one forward/backward; lower it when training runs out of memory")
    slots: int = HfArg(default=256, help="completions sampled side by side; lower it when sampling runs out of memory")
    sampler: Literal["fast", "hf"] = HfArg(default="fast", help="fast: the sampler in this file; hf: model.generate, the slow reference")
    data_dir: str = HfArg(default="", help="folder with local copies of the presets: DATA_DIR/<preset>/<split>.jsonl|json|parquet")
    system_prompt: str = HfArg(default="", help="system message put before every prompt that brings none")
    prompt_suffix: list[str] = HfArg(default_factory=list, help="VERIFIER=text ...: a paragraph behind the prompts of a verifier, e.g. 'math=Put the answer in \\boxed{}.'; presets bring theirs")
    enable_thinking: Literal["", "on", "off"] = HfArg(default="", help="for chat templates that know it (Qwen3); empty: the template's default")
    train_on_test_sets: bool = HfArg(default=False, help="allow presets that the field keeps for testing in --tasks")
    device: str = HfArg(default="", help="cuda, cpu or mps; empty: cuda where there is one, else cpu")
    dtype: Literal["auto", "float32", "bfloat16"] = HfArg(default="auto", help="of sampling and of the matrix products in training; the trained weights stay float32. auto: bfloat16 where the GPU has it")
    validation_share: float = HfArg(default=0, help="share of --tasks that is held out, by a hash of the prompt, and scored together with eval_tasks")
    eval_samples: int = HfArg(default=4, help="completions a task, at temperature 1, when eval_tasks are scored")
    eval_limit: int = HfArg(default=64, help="tasks scored of each entry of eval_tasks")
    eval_every: int = HfArg(default=0, help="score eval_tasks every so many steps too; 0: before and after only")
    save_every: int = HfArg(default=20, help="steps between saves of the state that --resume continues from; 0: never")
    save_minutes: float = HfArg(default=0, help="minutes after which a save is due, too; 0: by --save_every only")
    keep: int = HfArg(default=1, help="saves that are kept, the newest; each takes three times the weights' bytes")
    max_minutes: float = HfArg(default=0, help="save and stop, with exit code 3, before the run has taken so long; 0: no limit")
    max_bad_steps: int = HfArg(default=3, help="stop after so many steps in a row whose gradient is not finite; such a step makes no update")
    track: Literal["", "wandb", "tensorboard"] = HfArg(default="", help="send the metrics there too (pip install wandb or tensorboard)")
    resume: bool = HfArg(default=False, help="continue the run in --out, or start it when nothing is saved there")
    overwrite: bool = HfArg(default=False, help="start anew in an --out that holds a run, which is deleted")
    # fmt: on

    def __post_init__(self):
        least = dict(num_generations=2, prompts_per_step=1, num_iterations=1, steps=1, max_completion_length=1, slots=1)
        least |= dict(eval_samples=1, tokens_per_microbatch=1, seed=0, warmup_steps=0, weight_decay=0, overlong_cache=0)
        least |= dict(max_prompt_length=1, eval_limit=1, eval_every=0, save_every=0, save_minutes=0, keep=1)
        least |= dict(max_minutes=0, lora_rank=0, lora_alpha=0, validation_share=0, max_bad_steps=1, beta=0)
        above_0 = ["temperature", "learning_rate", "max_grad_norm", "tis_cap", "epsilon", "epsilon_high"]
        check_bounds(self, least, above_0)
        if self.dynamic_sampling and self.length_caps:
            stop("--length_caps and --dynamic_sampling exclude each other")
        if self.epsilon >= 1:
            stop(f"--epsilon must be below 1, not {self.epsilon}")
        if self.lora_alpha and not self.lora_rank:
            stop("--lora_alpha has no effect without --lora_rank: give both")
        settle_device(self)
        self.out = self.out or f"runs/mix_rl-{time.strftime('%Y%m%d-%H%M%S')}"


# ------------------------------------------------------------------------------------------------------ sampler


class Rollouts(NamedTuple):
    """B = P*G completions, prompt by prompt; T is the largest max_completion_length."""

    tokens: torch.Tensor  # (B, T) int64, pad_id after the end
    lengths: torch.Tensor  # (B,) int64 completion tokens, the EOS counted
    logprobs: torch.Tensor  # (B, T) float32, of each token under the distribution it was drawn from; 0 after the end
    finished: torch.Tensor  # (B,) bool: ended by itself, not cut at max_completion_length


def custom_mask_fits(model):
    """Whether every layer attends to all before it and takes a (b, 1, queries, keys) mask as it is.

    Sliding windows, recurrent layers and ALiBi do not; flash attention and models older than sdpa know no such mask.
    """
    config = model.config.get_text_config(decoder=True)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    odd = getattr(config, "sliding_window", None) or getattr(config, "alibi", None)
    known = model._supports_sdpa and config._attn_implementation in ("sdpa", "eager")
    return bool(known and not odd and layers == {"full_attention"})


class Slots(DynamicLayer):
    """One layer's keys and values, (slots, heads, room, size) each: a token writes one column, and nothing else moves.

    transformers' own DynamicLayer copies all it holds for every token (torch.cat), which was half the time of a step
    with 128 rows of the tiny model.
    """

    def update(self, key_states, value_states, *args, **kwargs):
        """Append columns -> views of the filled part. `keys` and `values` always are these views."""
        new, start = (key_states, value_states), self.get_seq_length()
        rows, end = len(key_states), start + key_states.shape[-2]
        if not self.is_initialized or end > self.buffers[0].shape[-2]:  # make room for these and 64 tokens more
            old = (self.keys, self.values)
            self.buffers = [part.new_empty(rows, part.shape[1], end + 64, part.shape[-1]) for part in new]
            for buffer, part in zip(self.buffers, old if start else ()):
                buffer[:, :, :start] = part
            self.is_initialized = True
        for buffer, part in zip(self.buffers, new):
            buffer[:rows, :, start:end] = part
        self.keys, self.values = (buffer[:rows, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        """Row i becomes what row indices[i] was; rows that stay where they are, are not copied."""
        if len(indices) > len(self.keys):  # a prompt's KV, once a sample; the next token brings the room
            self.buffers = self.keys, self.values = self.keys[indices], self.values[indices]
            return
        moved = (indices != torch.arange(len(indices), device=indices.device)).nonzero().squeeze(-1)
        for part in (self.keys, self.values):
            part[moved] = part[indices[moved]]
        self.keys, self.values = self.keys[: len(indices)], self.values[: len(indices)]


def draw(logits, uniforms, temperature=1.0, top_p=1.0, top_k=0):
    """One token a row by inverting the CDF: the first token whose cumulative probability passes the row's uniform.

    logits (b, V) float32, uniforms (b,) float64 in [0, 1) -> tokens (b,), their log-probabilities (b,).
    """
    if temperature == 0:  # all the mass is on one token, whose log-probability is 0
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    V = logits.shape[-1]
    logits = logits if temperature == 1 else logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, V)).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:  # keep the smallest set of tokens whose mass reaches top_p
        for size in (1024, V):  # the most likely 1,024 nearly always hold it, and sorting all takes ten times as long
            ordered, index = logits.topk(min(size, V))
            mass = (ordered - logits.logsumexp(-1, keepdim=True)).exp()
            if (mass.sum(-1) >= top_p).all():
                break
        dropped = mass.cumsum(-1) - mass >= top_p
        dropped[:, 0] = False
        logits = torch.full_like(logits, -math.inf).scatter(-1, index, ordered.masked_fill(dropped, -math.inf))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()  # (b, V), softmax before it is normalised
    # The CDF in two levels, over blocks of 256 tokens and within one: a third of the time of one cumsum over V.
    blocks = F.pad(weights, (0, -V % 256)).view(len(weights), -1, 256)
    block_mass = blocks.sum(-1).to(uniforms)  # (b, V/256)
    block, target = first_above(block_mass, uniforms * block_mass.sum(-1))
    inside = blocks[torch.arange(len(blocks), device=block.device), block].to(uniforms)  # (b, 256)
    token, _ = first_above(inside, target)
    logprobs = (inside.gather(-1, token[:, None]).squeeze(-1) / block_mass.sum(-1)).log()
    return block * 256 + token, logprobs.float()


def first_above(mass, target):
    """First place where the running sum of mass (b, n) exceeds target (b,) -> places (b,), target less what is before.

    >>> first_above(torch.tensor([[0.5, 0.0, 1.0, 0.0]]), torch.tensor([0.75]))
    (tensor([2]), tensor([0.2500]))
    """
    cdf = mass.cumsum(-1)
    place = torch.searchsorted(cdf, target[:, None], right=True)
    # Rounding can carry the target up to the total itself; the last place that still adds mass is then the right one.
    place = torch.minimum(place, torch.searchsorted(cdf, cdf[:, -1:].clone()))
    before = (cdf - mass).gather(-1, place).squeeze(-1)
    return place.squeeze(-1), target - before


@torch.no_grad()
def sample(
    model, prompts, *, num_generations, max_completion_length, eos_ids, pad_id, temperature=1.0, top_p=1.0, top_k=0,
    seed=0, first_row=0, slots=None,
):  # fmt: skip
    """Sample num_generations completions of each prompt (a list of token ids) -> Rollouts.

    What makes it faster than model.generate: a prompt goes through the model once and its KV is expanded to the group,
    rows leave the batch as soon as they end, the KV stays where it is (Slots), and only the last position goes through
    the lm_head. Row r draws its t-th token with the t-th uniform of the generator (seed, first_row + r), so a
    completion depends neither on `slots` (rows side by side, None: all) nor on who shares the batch, up to floating
    point.
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
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * (len(p) + T) for p in batch], device=device)
        position = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
        cache = Cache(layer_class_to_replicate=Slots)
        forward = dict(cache=cache, use_cache=True, logits_to_keep=1)
        logits = model(ids, attention_mask=mask[:, :longest], position_ids=position, **forward).logits[:, -1]
        cache.batch_select_indices(owner)  # prefilled once a prompt, now one copy a sample
        logits, mask, position = logits[owner], mask[owner], position[owner, -1:]
        if custom_mask_fits(model):  # a mask that is ready to be added to the scores saves a tenth of a tiny step
            zero = torch.zeros(mask.shape, dtype=model.dtype, device=device)
            mask = zero.masked_fill(mask == 0, -math.inf)[:, None, None]
        going = torch.ones(len(rows), dtype=torch.bool, device=device)
        for t in range(T):
            token, logprob = draw(logits.float(), uniforms[rows, t], temperature, top_p, top_k)
            ended = torch.isin(token, eos)
            tokens[rows, t], logprobs[rows, t] = token.where(going, pad_id), logprob * going
            lengths[rows] += going
            finished[rows] |= going & ended
            going &= ~ended & (t + 1 < caps[rows])
            if device.type == "cpu" or t % 8 == 7 or t + 1 == T:  # to ask a GPU who is left is to wait for it
                left = int(going.sum())
                if left == 0:
                    break
                if left < len(rows):  # a row that ended gives its slot to one from the end of the batch
                    order = torch.arange(left, device=device)
                    order[~going[:left]] = left + going[left:].nonzero().squeeze(-1)
                    rows, token, mask, position, going = (x[order] for x in (rows, token, mask, position, going))
                    cache.batch_select_indices(order)
            position = position + 1
            seen = mask[..., : longest + t + 1]
            logits = model(token[:, None], attention_mask=seen, position_ids=position, **forward).logits[:, -1]
    return Rollouts(tokens, lengths, logprobs, finished)


# -------------------------------------------------------------------------------------------------------- maths


def compute_advantages(rewards, scale_rewards="none"):
    """How much better each sample did than its group: A = r - mean_G(r), (P, G) -> (P, G).

    scale_rewards: "none" (Dr. GRPO, arXiv 2503.20783) | "group": / (std_G + 1e-4) (GRPO, 2402.03300; Bessel's n-1,
    as TRL) | "batch": / (std of all P*G + 1e-4).

    >>> compute_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])).tolist()
    [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    >>> compute_advantages(torch.tensor([[1.0, 0.0]]), "group")  # std = sqrt(1/2) = .7071; .5 / .7072 = .7070
    tensor([[ 0.7070, -0.7070]])
    """
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if scale_rewards == "group":
        return advantages / (rewards.std(-1, keepdim=True) + 1e-4)
    if scale_rewards == "batch":
        return advantages / (rewards.std() + 1e-4)
    return advantages


def policy_loss(logprobs, old_logprobs, advantages, mask, *, epsilon, epsilon_high, normalizer, weights=1.0):
    """PPO's clipped surrogate (arXiv 1707.06347), summed over the masked tokens and divided by `normalizer`.

    logprobs, old_logprobs, mask (B, T), advantages (B,) -> scalar. `normalizer` is a number, or (B, 1) for a mean by
    row; it belongs to the whole batch, so micro-batches add up to the same gradient however the batch is split.
    `weights` (B, T) is the truncated importance weight of a sampler that is not quite the learner.

    >>> one = torch.ones(1, 2)  # ratios 1.5 and 1.0, A = 1, clipped at 1.28: -(1.28 + 1.0) / 2
    >>> ratio = torch.tensor([[1.5, 1.0]])
    >>> policy_loss(ratio.log(), 0 * one, torch.ones(1), one, epsilon=0.2, epsilon_high=0.28, normalizer=2)
    tensor(-1.1400)
    """
    ratio = (logprobs - old_logprobs).exp()  # (B, T)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    # min, not clip alone: a token that moved the wrong way keeps its gradient, whatever its ratio
    surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -(weights * surrogate * mask / normalizer).sum()


def reference_kl(logprobs, ref_logprobs):
    """Schulman's k3 estimate of KL(pi || pi_ref) by token, (B, T) -> (B, T): exp(q-p) - (q-p) - 1, never negative.

    Source: joschu.net/blog/kl-approx.html; here p = log pi, q = log pi_ref.

    >>> reference_kl(torch.zeros(2), torch.tensor([0.0, math.log(2.0)]))  # 2 - log 2 - 1
    tensor([0.0000, 0.3069])
    """
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def token_logprobs(hidden, lm_head, targets, temperature=1.0, chunk=1024):
    """log softmax(lm_head(hidden) / temperature)[target] by token: (N, H), (N,) -> (N,) float32.

    The (N, V) logits are never held: they are made `chunk` tokens at a time and made again in the backward pass. At
    V = 150,000 and N = 8,192 they would be 4.9 GB in float32, and their gradient as much again.

    >>> head = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.zeros_(head.weight)
    >>> token_logprobs(torch.ones(3, 1), head, torch.tensor([0, 1, 0]), chunk=2).exp()
    tensor([0.5000, 0.5000, 0.5000], grad_fn=<ExpBackward0>)
    """

    def logprobs_of(hidden, targets):
        logits = lm_head(hidden).float()  # (chunk, V)
        logits = logits if temperature == 1 else logits / temperature
        return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)

    if len(targets) <= chunk:
        return logprobs_of(hidden, targets)
    pieces = zip(hidden.split(chunk), targets.split(chunk))
    return torch.cat([checkpoint(logprobs_of, h, t, use_reentrant=False) for h, t in pieces])


def completion_hidden(model, prompts, tokens, lengths, pad_id, counts=None):
    """Hidden states that predict the completion tokens -> (N, H), row by row, N = lengths.sum(); and their mask (b, T).

    prompts: lists of token ids, the i-th followed by counts[i] of the rows in tokens (b, T) and lengths (b,), by default
    one. Each makes one sequence, padded on the right: the prompt, computed once, and behind it its completions, whose
    positions all start where the prompt ends. A block mask lets a completion see the prompt and itself.
    """
    counts = counts or [1] * len(prompts)
    device, T = tokens.device, int(lengths.max())
    completions = iter([row[:n].tolist() for row, n in zip(tokens.cpu(), lengths.tolist())])
    sequences, positions, blocks, where = [], [], [], []
    for place, (prompt, count) in enumerate(zip(prompts, counts)):
        ids, position, block = list(prompt), list(range(len(prompt))), [0] * len(prompt)
        for number in range(1, count + 1):
            completion = next(completions)
            # The position before a token predicts it, and before the first of a completion stands the prompt's last.
            where += [(place, len(prompt) - 1)] + [(place, len(ids) + t) for t in range(len(completion) - 1)]
            position += range(len(prompt), len(prompt) + len(completion))
            block += [number] * len(completion)
            ids += completion
        sequences, positions, blocks = [*sequences, ids], [*positions, position], [*blocks, block]
    width = max(map(len, sequences))
    fill = ((sequences, pad_id), (positions, 0), (blocks, -1))
    ids, position, block = (torch.tensor([r + [v] * (width - len(r)) for r in rows], device=device) for rows, v in fill)
    forward = dict(attention_mask=(block >= 0).long(), use_cache=False)
    if max(counts) > 1:
        seen = (block[:, None, :] == 0) | (block[:, None, :] == block[:, :, None])
        seen &= torch.ones(width, width, dtype=torch.bool, device=device).tril()
        forward |= dict(attention_mask=seen[:, None], position_ids=position)  # (sequences, 1, width, width)
    hidden = model.base_model(ids, **forward).last_hidden_state
    mask = torch.arange(T, device=device) < lengths[:, None]  # (b, T), from lengths: pad_id may equal the EOS
    place, t = torch.tensor(where, device=device).T
    return hidden[place, t], mask


def completion_logprobs(model, prompts, tokens, lengths, pad_id, temperature, counts=None):
    """Log-probabilities of completion tokens in one forward -> (b, T) float32, 0 after the end; and their mask."""
    hidden, mask = completion_hidden(model, prompts, tokens, lengths, pad_id, counts)
    values = token_logprobs(hidden, output_head(model), tokens[:, : mask.shape[1]][mask], temperature)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values), mask


def pack_groups(model, rows, prompts, lengths, num_generations, budget):
    """Rows into packs that go through the model as one sequence -> lists of rows, the tokens of each.

    prompts and lengths are by row, and so is the group, row // num_generations. L tokens cost 2*L*weights FLOPs in the
    layers and 4*L^2*layers*width in attention: a row joins its group's pack where the prompt that is saved outweighs
    the attention that the block mask hides, as long as the pack stays within `budget` tokens.
    """
    config = model.config.get_text_config(decoder=True)
    weights = (
        sum(weight.numel() for weight in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    )

    def flops(count):
        return 2 * count * weights + 4 * count**2 * config.num_hidden_layers * config.hidden_size

    packs, sizes, fits = [], [], custom_mask_fits(model)
    for row in rows:
        alone, joined = len(prompts[row]) + lengths[row], math.inf
        if fits and packs and packs[-1][0] // num_generations == row // num_generations:
            joined = sizes[-1] + lengths[row]
        if joined <= budget and flops(joined) - flops(sizes[-1]) < flops(alone):
            packs[-1].append(row)
            sizes[-1] = joined
        else:
            packs.append([row])
            sizes.append(alone)
    return packs, sizes


def micro_batches(lengths, budget):
    """Split sequences into lists of indices, sorted by length, each at most `budget` tokens when padded to its longest.

    None is padded to more than 4/3 of its length: what padding costs soon outweighs another call.

    >>> micro_batches([5, 1, 2, 4, 4], budget=8)
    [[1], [2], [3, 4], [0]]
    """
    batches = [[]]
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        batch = batches[-1]
        if batch and ((len(batch) + 1) * lengths[place] > budget or 3 * lengths[place] > 4 * lengths[batch[0]]):
            batches.append([])
        batches[-1].append(place)
    return [batch for batch in batches if batch]


def lr_factor(step, steps, warmup_steps, kind):
    """Share of the peak learning rate at `step` (0 is the first, and it already moves).

    >>> [lr_factor(step, 4, 2, "linear") for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[kind]


# new to mix_rl:
def by_domain(flag, pairs, domains, default):
    """{domain: number} of a flag's DOMAIN=NUMBER pairs, `default` where none is given.

    >>> by_domain("reward_weights", ["code=2"], ["math", "code"], 1.0)
    {'math': 1.0, 'code': 2.0}
    """
    try:
        given = {domain: float(number) for domain, number in (pair.split("=") for pair in pairs)}
    except ValueError:
        stop(f"--{flag} takes DOMAIN=NUMBER pairs, not {' '.join(pairs)}")
    if wrong := [domain for domain in given if domain not in domains or not 0 <= given[domain] < math.inf]:
        stop(f"--{flag} {wrong[0]}=...: give finite numbers of 0 or more to the domains {', '.join(domains)}")
    return {domain: given.get(domain, default) for domain in domains}


# new to mix_rl:
def domain_weights(proportions, sizes):
    """Share of each domain in the prompts drawn; sizes: {domain: number of tasks}. dads starts with equal shares.

    >>> domain_weights(["natural"], {"math": 30, "code": 10})
    {'math': 0.75, 'code': 0.25}
    >>> domain_weights(["temperature=2"], {"math": 90, "code": 10})  # sqrt(90) : sqrt(10) = 3 : 1
    {'math': 0.75, 'code': 0.25}
    >>> domain_weights(["math=1", "code=4"], {"math": 30, "code": 10})
    {'math': 0.2, 'code': 0.8}
    """
    kind, _, number = proportions[0].partition("=")
    if len(proportions) == 1 and kind in ("natural", "uniform", "dads", "temperature") and kind not in sizes:
        try:
            power = {"natural": 1, "uniform": 0, "dads": 0}[kind] if kind != "temperature" else 1 / float(number)
        except (ValueError, ZeroDivisionError):
            stop(f"--proportions temperature=t takes a number above 0, not {number!r}")
        weights = {domain: size**power for domain, size in sizes.items()}
    else:
        weights = by_domain("proportions", proportions, sizes, 0.0)
        if missing := [domain for domain in sizes if domain not in {pair.partition("=")[0] for pair in proportions}]:
            stop(f"--proportions gives no weight to {missing[0]}: write {missing[0]}=0 to leave it out")
    if not 0 < sum(weights.values()) < math.inf:
        stop("--proportions must leave a weight above 0 to at least one domain")
    return {domain: weights[domain] / sum(weights.values()) for domain in sizes}


# new to mix_rl:
def smooth_rewards(mean_rewards, smoothed, alpha=0.5):
    """r_d <- alpha*r_d + (1 - alpha)*mean reward of the step; a domain that was not drawn keeps its r_d.

    >>> smooth_rewards({"math": 1.0}, {"math": 0.0, "code": 0.2})
    {'math': 0.5, 'code': 0.2}
    """
    return {d: alpha * old + (1 - alpha) * mean_rewards[d] if d in mean_rewards else old for d, old in smoothed.items()}


# new to mix_rl:
def dads_weights(mean_rewards, smoothed, alpha=0.5, tau=0.25, eps=0.1):
    """Domain-aware dynamic sampling: w_d = (exp(v_d/tau) + eps) / sum of all, v_d = 1 - r_d (arXiv 2506.08672).

    mean_rewards: of the step, by domain drawn; smoothed: r_d before it. The paper has tau = 0.5 for rewards of +-1; the
    same weights need 0.25 for rewards in [0, 1]. eps keeps a domain from dying out.

    >>> dads_weights({}, {"math": 0.0, "code": 0.0})
    {'math': 0.5, 'code': 0.5}
    >>> dads_weights({"math": 1.0, "code": 0.0}, {"math": 1.0, "code": 0.0}, eps=0)["code"]  # e^4 / (e^4 + e^0)
    0.9820137900379085
    """
    rewards = smooth_rewards(mean_rewards, smoothed, alpha)
    weights = {domain: math.exp((1 - reward) / tau) + eps for domain, reward in rewards.items()}
    return {domain: weight / sum(weights.values()) for domain, weight in weights.items()}


# new to mix_rl:
def scale_by_domain(advantages, rewards, domains):
    """Advantages (P, G) over the standard deviation of all rewards (P, G) of their domain; domains: P names.

    >>> scale_by_domain(torch.tensor([[0.5, -0.5]]), torch.tensor([[1.0, 0.0]]), ["math"])  # std = sqrt(1/2)
    tensor([[ 0.7070, -0.7070]])
    """
    scaled = torch.zeros_like(advantages)
    for domain in set(domains):
        mine = torch.tensor([name == domain for name in domains], device=rewards.device)
        scaled[mine] = advantages[mine] / (rewards[mine].std() + 1e-4)
    return scaled


# new to mix_rl:
def draw_domains(weights, count, uniform):
    """`count` domains, each as often as its weight says to within one (systematic sampling: one uniform, even steps).

    >>> draw_domains({"math": 0.75, "code": 0.25}, 4, 0.5)
    ['math', 'math', 'math', 'code']
    """
    edges = np.cumsum(list(weights.values()))
    places = np.searchsorted(edges, (np.arange(count) + uniform) / count * edges[-1], side="right")
    return [list(weights)[min(place, len(weights) - 1)] for place in places]


def nth_task(tasks, position, seed):
    """The task at `position` of an endless sequence: every epoch holds each task once, in an order of its own."""
    epoch, index = divmod(position, len(tasks))
    return tasks[np.random.default_rng([seed, epoch]).permutation(len(tasks))[index]]


def main():
    args = parse_args(Args, __doc__)
    rank, world = join_processes(args)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    P, G = args.prompts_per_step, args.num_generations

    model, tokenizer, eos_ids, pad_id = load_model(args.model, device)
    context = getattr(model.config, "max_position_embeddings", None) or math.inf
    max_prompt_length = int(min(args.max_prompt_length, context - args.max_completion_length))
    if max_prompt_length < 1:
        stop(f"--max_completion_length leaves no room for a prompt in the model's context of {context} tokens")
    if not args.train_on_test_sets and (test_sets := [spec for spec in args.tasks if is_test_set(spec)]):
        stop(f"--tasks {test_sets[0]} is a test set: train on another split, or say --train_on_test_sets")
    tasks, held = hold_out(load_prompts(args.tasks, tokenizer, max_prompt_length, args), args.validation_share)
    tiny = all(spec.split(":")[0] == "tiny" for spec in args.tasks)  # the tiny world brings its validation split along
    domains = dict.fromkeys(task["domain"] for task in tasks)
    # new to mix_rl: a pool a domain, each with a place of its own in an order of its own
    pools = {domain: [task for task in tasks if task["domain"] == domain] for domain in domains}
    weights = domain_weights(args.proportions, {domain: len(pool) for domain, pool in pools.items()})
    smoothed = dict.fromkeys(pools, 0.0)  # rewards, as dads remembers them
    reward_weights = by_domain("reward_weights", args.reward_weights, pools, 1.0)
    caps = by_domain("length_caps", args.length_caps, pools, args.max_completion_length)
    caps = {domain: int(cap) for domain, cap in caps.items()}
    if args.length_caps and world > 1:
        stop("--length_caps takes one process: start it without torchrun")
    if not all(1 <= cap <= args.max_completion_length for cap in caps.values()):
        stop(f"--length_caps must lie between 1 and --max_completion_length, {args.max_completion_length}")
    eval_specs = args.eval_tasks or [f"tiny:{domain}:validation" for domain in domains if tiny]
    eval_tasks = load_prompts(eval_specs, tokenizer, max_prompt_length, args, args.eval_limit) + held[: args.eval_limit]
    say_doubts(args, model, tasks, eval_tasks)

    adapter = add_lora(model, args) if args.lora_rank else None
    learnt = [name for name, weight in model.named_parameters() if weight.requires_grad]
    adamw = dict(lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=device.type != "mps")
    optimizer = torch.optim.AdamW(map(model.get_parameter, learnt), **adamw)
    cost = {"tokens_sampled": 0, "tokens_trained": 0, "tokens_scored": 0, "teacher_tokens": 0, "seconds": {}}
    done, bad_steps, position = 0, 0, dict.fromkeys(pools, 0)
    out, state = Path(args.out), open_run(args)
    if state:
        model.load_state_dict(state["model"], strict=False)  # what is frozen is not saved
        optimizer.load_state_dict(state["optimizer"])
        done, bad_steps, position, cost = (state[key] for key in ("step", "bad_steps", "position", "cost"))
        smoothed = state["smoothed"]
    reference = (model if adapter else load_model(args.model, device)[0]) if args.beta > 0 else None
    # The learner keeps float32 weights: a bfloat16 weight would swallow updates 256 times smaller than itself.
    actor = model if dtype == torch.float32 or adapter else copy.deepcopy(model).to(dtype)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
        for layer in model.modules():  # it asks for training mode, and dropout below the layers is to stay off
            layer.training = isinstance(layer, GradientCheckpointingLayer)
    sampler = dict(max_completion_length=args.max_completion_length, eos_ids=eos_ids, pad_id=pad_id, slots=args.slots)
    draw_completions = sample if args.sampler == "fast" and cache_fits(model) else sample_hf

    def validate():
        """Mean score by domain on eval_tasks; the same seed each time, so that models meet the same draws."""
        with timed(cost["seconds"], "eval", device):
            how = dict(samples=args.eval_samples, seed=args.seed, draw_completions=draw_completions, **sampler)
            domains, _ = evaluate(actor, eval_tasks, tokenizer, **how)
        return {name: sum(d["counts"]) / (d["n"] * len(d["counts"])) for name, d in domains.items()}

    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{out}: {len(tasks)} tasks, {parameters:,} parameters, {args.dtype} on {device}. The first prompt:")
    print(tokenizer.decode(nth_task(tasks, 0, args.seed)["ids"]))
    if done == 0:
        add_json(out / "evals.jsonl", {"step": 0, **validate()})
    gap_checked, saves, track = False, Saves(args), tracker(args)
    bar = dict(initial=done, total=args.steps, unit="step", dynamic_ncols=True) | ({"disable": True} if rank else {})
    progress = tqdm(range(done, args.steps), **bar)
    for step in progress:
        step_start, seconds = time.perf_counter(), {}

        # 1. Sample a group of completions for each prompt, and let the verifier score them.
        groups = []  # (task, the parts of Rollouts, texts, scores), G rows each
        for attempt in range(4 if args.dynamic_sampling else 1):
            if args.proportions == ["dads"]:
                weights = dads_weights({}, smoothed)
            batch, uniform = [], np.random.default_rng([args.seed, step, attempt]).random()
            for domain in draw_domains(weights, P, uniform):
                batch.append(nth_task(pools[domain], position[domain], args.seed))
                position[domain] += 1
            mine = batch[P * rank // world : P * (rank + 1) // world]  # torchrun: this process's prompts, whole groups
            longest = torch.tensor([caps[task["domain"]] for task in mine]).repeat_interleave(G)  # of each row
            with timed(seconds, "sample", device):
                drawn = draw_completions(
                    actor, [task["ids"] for task in mine], num_generations=G, temperature=args.temperature,
                    seed=(args.seed << 32) + step, first_row=(attempt * P + P * rank // world) * G,
                    **{**sampler, "max_completion_length": longest},
                )  # fmt: skip
                texts = [tokenizer.decode(t[:n], skip_special_tokens=True) for t, n in zip(drawn.tokens, drawn.lengths)]
            with timed(seconds, "verify", device):
                owners = [task for task in mine for _ in range(G)]
                scores = verify_batch([(task["verifier"], text, task["answer"]) for task, text in zip(owners, texts)])
            shares = gather([(mine, [part.cpu() for part in drawn], texts, scores)])  # of all processes
            for share, parts, texts, scores in shares:
                for task, start in zip(share, range(0, len(texts), G)):
                    rows = slice(start, start + G)
                    groups.append((task, [part[rows] for part in parts], texts[rows], scores[rows]))
            if args.dynamic_sampling:  # groups that teach something come first
                groups.sort(key=lambda group: len(set(group[-1])) == 1)
                if len(set(groups[P - 1][-1])) > 1:
                    break
        sampled = sum(int(lengths.sum()) for _, (_, lengths, *_), *_ in groups)
        batch, parts, texts, scores = zip(*groups[:P])
        rollouts = Rollouts(*(torch.cat(part).to(device) for part in zip(*parts)))

        # 2. Advantages. A group whose rewards are all equal has none: at beta 0 its rows need no forward and backward.
        rewards = torch.tensor(scores, device=device)  # (P, G)
        names = [task["domain"] for task in batch]
        ends = torch.tensor([[caps[name]] for name in names], device=device)  # (P, 1)
        over = rollouts.lengths.view(-1, G) - (ends - args.overlong_cache)
        shaped = rewards - (over / max(1, args.overlong_cache)).clamp(0, 1) * (args.overlong_cache > 0)
        advantages = compute_advantages(shaped, args.scale_rewards)
        if args.scale_rewards == "domain":
            advantages = scale_by_domain(advantages, shaped, names)
        advantages = advantages * torch.tensor([[reward_weights[name]] for name in names], device=device)
        advantages = advantages.flatten()  # (B,)
        zero_variance = shaped.amax(-1) == shaped.amin(-1)  # (P,)
        counted = rollouts.finished | (not args.mask_truncated)  # (B,) rows that carry loss
        needed = (counted & (~zero_variance | (args.beta > 0)).repeat_interleave(G)).nonzero().squeeze(-1)
        normalizer = {  # of the whole batch, so that neither skipped rows nor micro-batches change the gradient
            "token": (rollouts.lengths * counted).sum().clamp(min=1).expand(len(counted), 1),
            "sequence": (counted.sum().clamp(min=1) * rollouts.lengths)[:, None],
            "constant": torch.full((len(counted), 1), len(counted) * args.max_completion_length, device=device),
        }[args.loss_norm]  # (B, 1)

        # 3. Update. The first pass over the batch meets the policy that sampled it, so its log-probabilities are the
        # old ones; in float32 they equal the sampler's, and a gap between the two is a bug.
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * lr_factor(step, args.steps, args.warmup_steps, args.lr_scheduler_type)
        prompt_ids = [task["ids"] for task in batch for _ in range(G)]
        shared = (prompt_ids, rollouts.lengths.tolist(), G, args.tokens_per_microbatch)
        packs, pack_tokens = pack_groups(model, needed.tolist(), *shared)
        forwards = args.num_iterations * sum(pack_tokens)
        packs, pack_tokens = packs[rank::world], pack_tokens[rank::world]  # torchrun: this process's share
        totals = dict.fromkeys(("loss", "kl", "clipped", "gap", "tokens", "padded"), 0.0)
        grad_norm, old_logprobs = 0.0, rollouts.logprobs.clone()
        with timed(seconds, "train", device):
            for iteration in range(args.num_iterations if len(needed) else 0):
                for index in micro_batches(pack_tokens, args.tokens_per_microbatch):
                    chosen = [packs[i] for i in index]
                    rows = torch.tensor(sum(chosen, []), device=device)  # (b,)
                    counts, first = list(map(len, chosen)), [prompt_ids[pack[0]] for pack in chosen]
                    which = (first, rollouts.tokens[rows], rollouts.lengths[rows], pad_id)
                    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                        logprobs, mask = completion_logprobs(model, *which, args.temperature, counts)  # (b, T)
                        if reference:
                            with torch.no_grad(), adapter.disable_adapter() if adapter else nullcontext():
                                ref_logprobs, _ = completion_logprobs(reference, *which, args.temperature, counts)
                    width = mask.shape[1]
                    sampler_logprobs = rollouts.logprobs[rows, :width]
                    if iteration == 0:
                        totals["gap"] += float(((logprobs.detach() - sampler_logprobs).abs() * mask).sum())
                        if dtype != torch.float32:
                            old_logprobs[rows, :width] = logprobs.detach()
                    old = old_logprobs[rows, :width]
                    loss = policy_loss(
                        logprobs, old, advantages[rows], mask, epsilon=args.epsilon, epsilon_high=args.epsilon_high,
                        normalizer=normalizer[rows], weights=(old - sampler_logprobs).exp().clamp(max=args.tis_cap),
                    )  # fmt: skip
                    kl = reference_kl(logprobs, ref_logprobs if reference else old)  # (b, T)
                    if reference:
                        loss = loss + args.beta * (kl * mask / normalizer[rows]).sum()
                    loss.backward()
                    ratio, sign = (logprobs.detach() - old).exp(), advantages[rows, None].sign()
                    clipped = ((ratio > 1 + args.epsilon_high) & (sign > 0)) | ((ratio < 1 - args.epsilon) & (sign < 0))
                    totals["loss"] += float(loss.detach())
                    totals["kl"] += float((kl.detach() * mask).sum())
                    totals["clipped"] += float((clipped & mask).sum())
                    totals["tokens"] += int(mask.sum())
                    totals["padded"] += len(index) * max(pack_tokens[i] for i in index)
                sum_gradients(model)
                grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm))
                if math.isfinite(grad_norm):
                    optimizer.step()
                optimizer.zero_grad()
            if actor is not model:
                for low, full in zip(actor.parameters(), model.parameters()):
                    low.data.copy_(full.data)
        bad_steps = 0 if math.isfinite(grad_norm) else bad_steps + 1
        if bad_steps:
            bad_step(out, step + 1, bad_steps, zip(batch, texts, scores), args.max_bad_steps)
        totals = sum_numbers(totals)
        trained = max(1, totals["tokens"])
        gap = totals["gap"] / max(1, trained / args.num_iterations)
        if not gap_checked and len(needed) and not gap <= (1e-3 if dtype == torch.float32 else 0.05):
            stop(
                f"the sampler's log-probabilities differ from a fresh forward's by {gap:.2g} on average: what samples is "
                "not what is trained. Likely causes: logits scaled or capped in a new way (output_head in eval.py), a kind "
                "of cache or attention that the sampler does not know (try --sampler hf), a too coarse --dtype"
            )
        gap_checked = gap_checked or len(needed) > 0

        # 4. Write down what happened.
        cost["tokens_sampled"] += sampled
        cost["tokens_trained"] += forwards
        cost["tokens_scored"] += forwards if reference else 0
        for phase, value in seconds.items():
            cost["seconds"][phase] = cost["seconds"].get(phase, 0.0) + value
        mean_reward = float(rewards.mean())
        scores_of = {}
        for task, row in zip(batch, rewards.mean(-1).tolist()):
            scores_of.setdefault(task["domain"], []).append(row)
        mean_rewards = {domain: sum(values) / len(values) for domain, values in scores_of.items()}
        smoothed = smooth_rewards(mean_rewards, smoothed)
        metrics = {
            "step": step + 1,
            "reward/mean": mean_reward,
            **{f"reward/{domain}": value for domain, value in mean_rewards.items()},
            **{f"proportion/{domain}": len(values) / len(batch) for domain, values in scores_of.items()},
            "groups/zero_variance": float(zero_variance.float().mean()),
            "completion/length": float(rollouts.lengths.float().mean()),
            "completion/truncated": float((~rollouts.finished).float().mean()),
            "policy/loss": totals["loss"],
            # On policy, -log pi of the sampled tokens averages to the entropy (over all rows; the rest: rows trained on).
            "policy/entropy": float(-rollouts.logprobs.sum() / rollouts.lengths.sum()),
            "policy/kl": totals["kl"] / trained,
            "policy/clip_fraction": totals["clipped"] / trained,
            "policy/sampler_gap": gap,
            "policy/grad_norm": grad_norm,
            "policy/learning_rate": optimizer.param_groups[0]["lr"],
            **{f"time/{phase}": value for phase, value in seconds.items()},
            "time/step": time.perf_counter() - step_start,
            "tokens/sampled": sampled,
            "tokens/trained": forwards,
            "tokens/padding": 1 - forwards / max(1, totals["padded"]),
            "memory/peak_gb": peak_gb(device),
        }
        add_json(out / "metrics.jsonl", metrics)
        track(metrics)
        shown = {"step": step + 1, "prompt": batch[0]["prompt"], "completion": texts[0][0], "reward": scores[0][0]}
        add_json(out / "samples.jsonl", {**shown, "domain": batch[0]["domain"], "answer": batch[0]["answer"]})
        tqdm.write(
            f"step {step + 1:4d}  reward {mean_reward:.3f}  length {metrics['completion/length']:5.1f}  "
            f"kl {abs(metrics['policy/kl']):.4f}  entropy {metrics['policy/entropy']:.3f}  {metrics['time/step']:.2f} s"
        )
        if step + 1 == args.steps or args.eval_every and (step + 1) % args.eval_every == 0:
            add_json(out / "evals.jsonl", {"step": step + 1, **validate()})
        if saves.due(step + 1):
            saved = {"model": {name: model.get_parameter(name).detach() for name in learnt}, "step": step + 1}
            saved |= {
                "optimizer": optimizer.state_dict(),
                "cost": cost,
                "position": position,
                "bad_steps": bad_steps,
                "smoothed": smoothed,
            }
            saves.write(saved)

    if rank > 0:
        return
    save_model(adapter or model, tokenizer, out)
    cost["seconds"]["total"] = sum(cost["seconds"].values())
    cost |= {"parameters": parameters, "peak_memory_gb": peak_gb(device), "device": str(device), "reused": {}}
    write_json(out / "cost.json", cost)
    rewards = [row["reward/mean"] for row in read_lines(out / "metrics.jsonl")]
    few = min(5, (len(rewards) + 1) // 2)
    first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
    before, *_, after = read_lines(out / "evals.jsonl")
    change = ", ".join(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in after if name != "step")
    print(
        f"Learnt: reward {first:.3f} -> {last:.3f} on training prompts (means of {few} steps)"
        + (f"; validation avg@{args.eval_samples} {change}" if change else "")
        + f"\nThe model lies in {out}. Next: {next_command(args, f'mix={out}')}"
    )


if __name__ == "__main__":
    run(main)
