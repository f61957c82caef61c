"""Multi-teacher on-policy distillation (MOPD): the student samples, and each domain's expert corrects it token by token.

Every completion goes to the teacher of its domain and to no other. With d_t = log pi_student - log pi_teacher of the
tokens the student itself drew, the reverse KL to the teacher falls in one of three ways:

    sampled   loss = -1/N * sum_t w_t * A_t * log pi_student(token_t),   A_t = -sg[d_t] clipped,  w_t = sg[pi/mu]
    topk      loss =  1/N * sum_t sum_v p_s(v) * (log p_s(v) - log p_t(v)) - p_s(v) + p_t(v)      the student's top k
    full      loss =  1/N * sum_t sum_v p_s(v) * (log p_s(v) - log p_t(v))                        all of the vocabulary

A_t is the teacher's verdict on one token; d_t itself is never differentiated: its expected gradient is zero and does
not see the teacher. Rewards are only logged (unless --alpha mixes them in), and no group is needed: one completion a
prompt will do. Sources: the paper arXiv 2608.27409 (sampled), Nemotron-Cascade 2 2603.19220 (the gate on w).

Left out: teachers behind a server, models that need several GPUs each. Prompts come from the pool as it is, as with
mix_rl.py's natural.

    python mopd.py --teachers math=runs/math code=runs/code --tasks tiny:math tiny:code
    python mopd.py                                     teachers from runs/speedrun, about 90 seconds
"""

import copy
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, Cache
from transformers.cache_utils import DynamicLayer
from transformers.hf_argparser import HfArg
from transformers.modeling_layers import GradientCheckpointingLayer

from eval import (
    Saves, add_json, add_lora, bad_step, base_folder, cache_fits, check_bounds, evaluate, gather, hold_out,
    join_processes, load_model, load_prompts, loading, model_folder, next_command, open_run, output_head, parse_args,
    peak_gb, peft, read_lines, run, run_cost, sample_hf, save_model, say_doubts, settle_device, stop, sum_gradients,
    sum_numbers, timed, tokenizer_folder, tracker, write_json,
)  # fmt: skip
from verifiers import is_test_set, verify_batch

# Letters are dimensions only: P prompts, G samples a prompt, B = P*G rows, T completion tokens, N tokens, V vocabulary.


@dataclass
class Args:
    # fmt: off
    model: str = HfArg(default="tiny/base", help="folder or hub id of the model to start from")
    tasks: list[str] = HfArg(default_factory=lambda: ["tiny:math", "tiny:code", "tiny:science", "tiny:instruction"], help="training tasks: presets (tiny:math, gsm8k:train) or files (.jsonl .json .parquet .csv)")
    # new to mopd:
    teachers: list[str] = HfArg(default_factory=lambda: [f"{d}=runs/speedrun/{d}" for d in ("math", "code", "science", "instruction")], help="DOMAIN=folder or hub id, one for each domain of --tasks; experts that started from --model")
    kl: Literal["sampled", "topk", "full"] = HfArg(default="full", help="sampled: the drawn token's log-ratio as its advantage (the paper); topk: the KL on the student's likeliest tokens; full: the exact KL")
    kl_top_k: int = HfArg(default=64, help="k of topk, and of the logged overlap of the student's and the teacher's likeliest tokens (at most the vocabulary)")
    alpha: float = HfArg(default=0.0, help="weight of the verifier's advantages r - mean(r) beside the teacher's in the sampled form; needs num_generations of 2 or more (arXiv 2601.02780)")
    advantage_clip: float = HfArg(default=5.0, help="bound of the sampled form's advantages, in nats")
    domain_weight: Literal["tokens", "rows", "equal"] = HfArg(default="tokens", help="who weighs what: each token alike (long domains weigh more), each row alike, or each domain alike")
    eval_tasks: list[str] = HfArg(default_factory=list, help="tasks scored before and after training; empty: the validation split of a tiny preset, else none")
    out: str = HfArg(default="", help="run folder; empty: runs/<script>-<time>")
    seed: int = HfArg(default=0, help="seed of the task order and of every sample")
    steps: int = HfArg(default=60, help="sample-score-update rounds")
    prompts_per_step: int = HfArg(default=64, help="P, prompts a step; the batch is P * num_generations completions")
    num_generations: int = HfArg(default=1, help="G, completions a prompt; more prompts usually teach more than more completions")
    max_prompt_length: int = HfArg(default=512, help="tokens; tasks with longer prompts are left out, and counted")
    max_completion_length: int = HfArg(default=48, help="tokens sampled at the most; time and memory grow with it")
    temperature: float = HfArg(default=1.0, help="sampling temperature; the KL is taken at 1 whatever it is")
    learning_rate: float = HfArg(default=7e-4, help="peak AdamW rate; the default suits the tiny world, real models want about 1e-6")
    warmup_steps: int = HfArg(default=3, help="steps of linear warm-up")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = HfArg(default="linear", help="decay after the warm-up, down to 0 where a next step would be")
    lora_rank: int = HfArg(default=0, help="train a LoRA adapter of this rank instead of all weights (pip install peft; arXiv 2608.27409: 32); 0: all weights")
    lora_alpha: float = HfArg(default=0, help="LoRA: the adapter is scaled by alpha / rank; 0: twice the rank")
    max_grad_norm: float = HfArg(default=1.0, help="the gradient is scaled down to this norm")
    weight_decay: float = HfArg(default=0.0, help="AdamW's decoupled weight decay")
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
        least = dict(num_generations=1, prompts_per_step=1, steps=1, max_completion_length=1, slots=1, eval_samples=1)
        least |= dict(tokens_per_microbatch=1, seed=0, warmup_steps=0, weight_decay=0, kl_top_k=1, alpha=0)
        least |= dict(max_prompt_length=1, eval_limit=1, eval_every=0, save_every=0, save_minutes=0, keep=1)
        least |= dict(max_minutes=0, lora_rank=0, lora_alpha=0, validation_share=0, max_bad_steps=1)
        check_bounds(self, least, ["temperature", "learning_rate", "max_grad_norm", "advantage_clip"])
        if self.alpha and (self.kl != "sampled" or self.num_generations < 2):
            stop("--alpha needs --kl sampled and a --num_generations of 2 or more: a group is the rewards' baseline")
        pairs = [teacher.partition("=") for teacher in self.teachers]
        if not all(domain and folder for domain, _, folder in pairs) or len({domain for domain, *_ in pairs}) < len(
            pairs
        ):
            stop("--teachers takes DOMAIN=folder pairs, one a domain: math=runs/math code=runs/code")
        if self.lora_alpha and not self.lora_rank:
            stop("--lora_alpha has no effect without --lora_rank: give both")
        settle_device(self)
        self.out = self.out or f"runs/mopd-{time.strftime('%Y%m%d-%H%M%S')}"


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


def sampled_kl_loss(
    logprobs, teacher_logprobs, sampler_logprobs, mask, *, normalizer, advantage_clip=5.0, outcome_advantages=0.0
):
    """Policy gradient of the reverse KL from the drawn tokens alone, all (B, T) -> scalar.

    A = -sg[log pi_s - log pi_t], clipped; its gradient is unbiased for that of KL(pi_s || pi_t) by token (future tokens
    are not credited). To backpropagate the difference itself would be wrong: its expected gradient is 0, whatever the
    teacher. w = sg[pi_s / mu] corrects for the sampler mu inside [0.5, 2] and drops the token outside (arXiv 2603.19220,
    section 4.4). `outcome_advantages`, alpha * A of the verifier's rewards, are added to A (arXiv 2601.02780).
    `normalizer` as in GRPO: a number or (B, 1), of the whole batch.

    >>> p = torch.tensor([[0.5]]).log()  # the teacher finds the token twice as likely: A = log 2, pushed up
    >>> sampled_kl_loss(p, p + math.log(2), p, torch.ones(1, 1), normalizer=1)  # -log(2) * log(0.5)
    tensor(0.4805)
    """
    advantages = (teacher_logprobs - logprobs).detach().clamp(-advantage_clip, advantage_clip)  # (B, T)
    weights = (logprobs.detach() - sampler_logprobs).exp()
    weights = weights * ((weights >= 0.5) & (weights <= 2))
    return -(weights * (advantages + outcome_advantages) * logprobs * mask / normalizer).sum()


def full_kl_loss(hidden, teacher_hidden, lm_head, teacher_head, chunk=512):
    """KL(p_s || p_t) by token over the whole vocabulary, (N, H) twice -> (N,): sum_v p_s (log p_s - log p_t).

    The (N, V) distributions are never held: they are made `chunk` tokens at a time and again in the backward pass.

    >>> same = torch.nn.Identity()  # logits as they are: p_s = (1/2, 1/2), p_t = (1/4, 3/4)
    >>> full_kl_loss(torch.zeros(1, 2), torch.tensor([[0.0, math.log(3.0)]]), same, same)  # log(2)/2 + log(2/3)/2
    tensor([0.1438])
    """

    def kl_of(hidden, teacher_hidden):
        student = lm_head(hidden).float().log_softmax(-1)  # (chunk, V)
        teacher = teacher_head(teacher_hidden).float().log_softmax(-1)
        # The other half of the derivative, sum_v p_s grad log p_s, is zero; without it the gradient is exactly 0 where
        # student and teacher agree, and not a rounding error that Adam would scale up.
        return (student.exp() * (student - teacher).detach()).sum(-1)

    pieces = zip(hidden.split(chunk), teacher_hidden.split(chunk))
    return torch.cat([checkpoint(kl_of, s, t, use_reentrant=False) for s, t in pieces])


def topk_kl_loss(hidden, teacher_hidden, lm_head, teacher_head, k=64, chunk=512):
    """The KL on the student's k likeliest tokens, (N, H) twice -> (N,): sum_k p_s (log p_s - log p_t) - p_s + p_t.

    The last two terms make each summand a Bregman divergence: never negative, and 0 only where p_s = p_t, so that mass
    outside the k stays constrained (arXiv 2606.30406). At k = V it is full_kl_loss.

    >>> same = torch.nn.Identity()  # p_s = (2/3, 1/3), p_t = (1/3, 2/3): 2/3 log 2 - 2/3 + 1/3
    >>> topk_kl_loss(torch.tensor([[math.log(2.0), 0.0]]), torch.tensor([[0.0, math.log(2.0)]]), same, same, k=1)
    tensor([0.1288])
    """

    def kl_of(hidden, teacher_hidden):
        student, top = lm_head(hidden).float().log_softmax(-1).topk(k)
        teacher = teacher_head(teacher_hidden).float().log_softmax(-1).gather(-1, top)
        # The derivative is (log p_s - log p_t) grad p_s; what else the terms give cancels.
        difference = (student - teacher).detach()
        return (student.exp() * difference + (teacher.exp() - student.exp()).detach()).sum(-1)

    pieces = zip(hidden.split(chunk), teacher_hidden.split(chunk))
    return torch.cat([checkpoint(kl_of, s, t, use_reentrant=False) for s, t in pieces])


@torch.no_grad()
def top_overlap(hidden, teacher_hidden, lm_head, teacher_head, k):
    """Share of the student's k likeliest tokens that are among the teacher's k likeliest: (N, H) twice -> a number.

    >>> same = torch.nn.Identity()
    >>> top_overlap(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 3.0, 2.0]]), same, same, k=2)  # {0, 1}, {1, 2}
    0.5
    """
    tops = [
        head(states).float().topk(k).indices for states, head in ((hidden, lm_head), (teacher_hidden, teacher_head))
    ]
    return float((tops[0][:, :, None] == tops[1][:, None, :]).any(-1).float().mean())


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


# new to mopd:
def teacher_folders(teachers, model, tokenizer, domains):
    """{domain: folder} of --teachers; each must speak the student's language: same vocabulary, same chat template."""
    folders = {domain: model_folder(name) for domain, _, name in (teacher.partition("=") for teacher in teachers)}
    if missing := [domain for domain in domains if domain not in folders]:
        stop(f"--teachers names none for {', '.join(missing)}: add {missing[0]}=FOLDER, or leave its tasks out")
    for domain, folder in folders.items():
        with loading(folder):
            other = AutoTokenizer.from_pretrained(tokenizer_folder(folder), trust_remote_code=False)
            vocab_size = AutoConfig.from_pretrained(base_folder(folder), trust_remote_code=False).vocab_size
        if other.get_vocab() != tokenizer.get_vocab() or other.chat_template != tokenizer.chat_template:
            stop(
                f"the {domain} teacher {folder} has another vocabulary or chat template than the student: no distillation"
            )
        if vocab_size != model.config.vocab_size:
            stop(f"the {domain} teacher {folder} has another vocabulary size than the student: no distillation")
    return {domain: os.path.realpath(folders[domain]) for domain in domains}


# new to mopd:
@torch.no_grad()
def load_weights(module, folder):
    """Copy the weights in `folder` into the one resident teacher, from memory-mapped files, tensor by tensor."""
    if (base := base_folder(folder)) != folder:  # a LoRA adapter, on top of its base
        load_weights(module, base)
        with loading(folder):
            peft().PeftModel.from_pretrained(module, folder).merge_and_unload()
        return
    targets, loaded = module.state_dict(), set()
    for path in sorted(Path(folder).glob("*.safetensors")):
        with loading(path), safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if name not in targets or targets[name].shape != tensor.shape:
                    stop(f"{path}: {name} {tuple(tensor.shape)} does not fit the student's architecture")
                targets[name].copy_(tensor)
                loaded.add(targets[name].data_ptr())  # tied weights are stored once and share their memory
    if missing := [name for name, tensor in targets.items() if tensor.data_ptr() not in loaded]:
        stop(
            f"{folder} lacks {len(missing)} of the teacher's tensors, {missing[0]} for one: is it whole, in safetensors?"
        )


# new to mopd:
def recovery(before, after):
    """Share of a teacher's lead that the student has gained, (student - base) / (teacher - base), where there is a lead.

    >>> recovery({"math": 0.25, "teacher/math": 0.75, "code": 0.5}, {"math": 0.5, "code": 0.75})
    {'recovery/math': 0.5}
    """
    leads = {domain: before[f"teacher/{domain}"] - before[domain] for domain in after if f"teacher/{domain}" in before}
    return {f"recovery/{domain}": (after[domain] - before[domain]) / lead for domain, lead in leads.items() if lead > 0}


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
    top_k = min(args.kl_top_k, model.config.get_text_config().vocab_size)
    if not args.train_on_test_sets and (test_sets := [spec for spec in args.tasks if is_test_set(spec)]):
        stop(f"--tasks {test_sets[0]} is a test set: train on another split, or say --train_on_test_sets")
    tasks, held = hold_out(load_prompts(args.tasks, tokenizer, max_prompt_length, args), args.validation_share)
    tiny = all(spec.split(":")[0] == "tiny" for spec in args.tasks)  # the tiny world brings its validation split along
    domains = dict.fromkeys(task["domain"] for task in tasks)
    eval_specs = args.eval_tasks or [f"tiny:{domain}:validation" for domain in domains if tiny]
    eval_tasks = load_prompts(eval_specs, tokenizer, max_prompt_length, args, args.eval_limit) + held[: args.eval_limit]
    say_doubts(args, model, tasks, eval_tasks)

    # new to mopd: one teacher's weights in memory at a time, whatever the number of teachers
    teachers = teacher_folders(args.teachers, model, tokenizer, domains)
    teacher = copy.deepcopy(model).requires_grad_(False).to(dtype if args.lora_rank else torch.float32)
    for resident in teachers.values():  # each once, so that a damaged one is found before anything is sampled
        load_weights(teacher, resident)
        if not all(weight.isfinite().all() for weight in teacher.parameters()):
            stop(f"the teacher {resident} holds NaN or infinite values: take an earlier save")
    adapter = add_lora(model, args) if args.lora_rank else None
    learnt = [name for name, weight in model.named_parameters() if weight.requires_grad]
    adamw = dict(lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=device.type != "mps")
    optimizer = torch.optim.AdamW(map(model.get_parameter, learnt), **adamw)
    cost = {"tokens_sampled": 0, "tokens_trained": 0, "tokens_scored": 0, "teacher_tokens": 0, "seconds": {}}
    done, bad_steps, position = 0, 0, 0
    out, state = Path(args.out), open_run(args)
    if state:
        model.load_state_dict(state["model"], strict=False)  # what is frozen is not saved
        optimizer.load_state_dict(state["optimizer"])
        done, bad_steps, position, cost = (state[key] for key in ("step", "bad_steps", "position", "cost"))
    # The learner keeps float32 weights: a bfloat16 weight would swallow updates 256 times smaller than itself.
    actor = model if dtype == torch.float32 or adapter else copy.deepcopy(model).to(dtype)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
        for layer in model.modules():  # it asks for training mode, and dropout below the layers is to stay off
            layer.training = isinstance(layer, GradientCheckpointingLayer)
    sampler = dict(max_completion_length=args.max_completion_length, eos_ids=eos_ids, pad_id=pad_id, slots=args.slots)
    draw_completions = sample if args.sampler == "fast" and cache_fits(model) else sample_hf

    def validate(model=actor, tasks=eval_tasks):
        """Mean score by domain on eval_tasks; the same seed each time, so that models meet the same draws."""
        with timed(cost["seconds"], "eval", device):
            how = dict(samples=args.eval_samples, seed=args.seed, draw_completions=draw_completions, **sampler)
            domains, _ = evaluate(model, tasks, tokenizer, **how)
        return {name: sum(d["counts"]) / (d["n"] * len(d["counts"])) for name, d in domains.items()}

    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{out}: {len(tasks)} tasks, {parameters:,} parameters, {args.dtype} on {device}. The first prompt:")
    print(tokenizer.decode(nth_task(tasks, 0, args.seed)["ids"]))
    if done == 0:
        scores = {"step": 0, **validate()}
        for domain, resident in teachers.items():  # what each teacher reaches in its domain is what can be recovered
            if own := [task for task in eval_tasks if task["domain"] == domain]:
                load_weights(teacher, resident)
                scores[f"teacher/{domain}"] = validate(teacher, own)[domain]
        add_json(out / "evals.jsonl", scores)
    before = scores if done == 0 else read_lines(out / "evals.jsonl")[0]
    gap_checked, saves, track = False, Saves(args), tracker(args)
    bar = dict(initial=done, total=args.steps, unit="step", dynamic_ncols=True) | ({"disable": True} if rank else {})
    progress = tqdm(range(done, args.steps), **bar)
    for step in progress:
        step_start, seconds = time.perf_counter(), {}

        # 1. The student samples; the verifier's reward is only logged.
        batch = [nth_task(tasks, position + i, args.seed) for i in range(P)]
        position += P
        mine = batch[P * rank // world : P * (rank + 1) // world]  # torchrun: this process's prompts, whole groups
        with timed(seconds, "sample", device):
            drawn = draw_completions(
                actor, [task["ids"] for task in mine], num_generations=G, temperature=args.temperature,
                seed=(args.seed << 32) + step, first_row=P * rank // world * G, **sampler,
            )  # fmt: skip
            texts = [tokenizer.decode(t[:n], skip_special_tokens=True) for t, n in zip(drawn.tokens, drawn.lengths)]
        with timed(seconds, "verify", device):
            owners = [task for task in mine for _ in range(G)]
            scores = verify_batch([(task["verifier"], text, task["answer"]) for task, text in zip(owners, texts)])
        parts, texts, scores = zip(*gather([([part.cpu() for part in drawn], texts, scores)]))
        rollouts = Rollouts(*(torch.cat(part).to(device) for part in zip(*parts)))
        texts, scores, owners = sum(texts, []), sum(scores, []), [task for task in batch for _ in range(G)]
        sampled, rewards = int(rollouts.lengths.sum()), torch.tensor(scores).view(P, G)

        # 2. Who weighs what: the loss is a sum over tokens divided by this, by row and for the whole batch.
        by_teacher = sorted(domains, key=teachers.get)  # domains with one teacher in turn: it is loaded once
        members = {d: [row for row, task in enumerate(owners) if task["domain"] == d] for d in by_teacher}
        members = {domain: rows for domain, rows in members.items() if rows}
        outcome = args.alpha * (rewards - rewards.mean(-1, keepdim=True)).flatten().to(device)  # (B,)
        tokens = {domain: int(rollouts.lengths[rows].sum()) for domain, rows in members.items()}
        normalizer = {
            "tokens": torch.full((P * G, 1), sampled, device=device),
            "rows": (P * G * rollouts.lengths)[:, None],
            "equal": torch.tensor([[len(tokens) * tokens[task["domain"]]] for task in owners], device=device),
        }[args.domain_weight]  # (B, 1)

        # 3. Update. The rows are grouped by domain, so that each teacher's weights are loaded once a step.
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * lr_factor(step, args.steps, args.warmup_steps, args.lr_scheduler_type)
        prompt_ids = [task["ids"] for task in owners]
        totals, forwards = dict.fromkeys(("loss", "gap", "tokens", "padded"), 0.0), 0
        kl_sums, gradients, overlaps = {}, {}, {}  # by domain
        with timed(seconds, "train", device):
            for domain, rows_of_domain in members.items():
                if resident != teachers[domain]:
                    load_weights(teacher, teachers[domain])
                    resident = teachers[domain]
                shared = (prompt_ids, rollouts.lengths.tolist(), G, args.tokens_per_microbatch)
                packs, pack_tokens = pack_groups(model, rows_of_domain, *shared)
                forwards += sum(pack_tokens)
                packs, pack_tokens = packs[rank::world], pack_tokens[rank::world]  # torchrun: this process's share
                for index in micro_batches(pack_tokens, args.tokens_per_microbatch):
                    chosen = [packs[i] for i in index]
                    rows = torch.tensor(sum(chosen, []), device=device)  # (b,)
                    counts, first = list(map(len, chosen)), [prompt_ids[pack[0]] for pack in chosen]
                    which = (first, rollouts.tokens[rows], rollouts.lengths[rows], pad_id)
                    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                        hidden, mask = completion_hidden(model, *which, counts)  # (N, H), (b, T)
                        with torch.no_grad():
                            teacher_hidden, _ = completion_hidden(teacher, *which, counts)
                        heads = output_head(model), output_head(teacher)
                        targets, mu = (x[rows, : mask.shape[1]][mask] for x in (rollouts.tokens, rollouts.logprobs))
                        divide = normalizer[rows].expand(mask.shape)[mask]  # (N,)
                        hidden.retain_grad()
                        if args.kl == "sampled":
                            logprobs = token_logprobs(hidden, heads[0], targets)  # (N,)
                            teacher_logprobs = token_logprobs(teacher_hidden, heads[1], targets)
                            kl = (logprobs - teacher_logprobs).detach()
                            loss = sampled_kl_loss(
                                logprobs, teacher_logprobs, mu, 1, normalizer=divide, advantage_clip=args.advantage_clip,
                                outcome_advantages=outcome[rows, None].expand(mask.shape)[mask],
                            )  # fmt: skip
                        else:
                            with torch.no_grad():
                                logprobs = token_logprobs(hidden, heads[0], targets)
                            topk = dict(k=top_k) if args.kl == "topk" else {}
                            kl = (topk_kl_loss if topk else full_kl_loss)(hidden, teacher_hidden, *heads, **topk)
                            loss = (kl / divide).sum()
                            if domain not in overlaps:  # on its first micro-batch of the step: a sample will do
                                part = (hidden[:512].detach(), teacher_hidden[:512])
                                overlaps[domain] = top_overlap(*part, *heads, top_k)
                    loss.backward()
                    totals["loss"] += float(loss.detach())
                    totals["gap"] += float((logprobs.detach() - mu).abs().sum())
                    totals["tokens"] += len(targets)
                    totals["padded"] += len(index) * max(pack_tokens[i] for i in index)
                    kl_sums[domain] = kl_sums.get(domain, 0.0) + float(kl.detach().sum())
                    gradients[domain] = gradients.get(domain, 0.0) + float(hidden.grad.norm(dim=-1).sum())
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
            bad_step(out, step + 1, bad_steps, zip(owners, texts, scores), args.max_bad_steps)
        totals, kl_sums, gradients = map(sum_numbers, (totals, kl_sums, gradients))
        trained = max(1, totals["tokens"])
        gap = totals["gap"] / trained
        if not gap_checked and args.temperature == 1 and not gap <= (1e-3 if dtype == torch.float32 else 0.05):
            stop(
                f"the sampler's log-probabilities differ from a fresh forward's by {gap:.2g} on average: what samples is "
                "not what is trained. Likely causes: logits scaled or capped in a new way (output_head in eval.py), a kind "
                "of cache or attention that the sampler does not know (try --sampler hf), a too coarse --dtype"
            )
        gap_checked = True

        # 4. Write down what happened.
        cost["tokens_sampled"] += sampled
        cost["tokens_trained"] += forwards
        cost["teacher_tokens"] += forwards
        for phase, value in seconds.items():
            cost["seconds"][phase] = cost["seconds"].get(phase, 0.0) + value
        mean_reward = float(rewards.mean())
        scores_of = {}
        for task, row in zip(batch, rewards.mean(-1).tolist()):
            scores_of.setdefault(task["domain"], []).append(row)
        mean_rewards = {domain: sum(values) / len(values) for domain, values in scores_of.items()}
        metrics = {
            "step": step + 1,
            "reward/mean": mean_reward,
            **{f"reward/{domain}": value for domain, value in mean_rewards.items()},
            **{f"proportion/{domain}": len(values) / len(batch) for domain, values in scores_of.items()},
            # new to mopd: how far the student is from each teacher, in nats a token, and whose gradient it follows
            **{f"teacher/{domain}_kl": kl_sums[domain] / tokens[domain] for domain in members},
            **{f"teacher/{domain}_overlap": overlap for domain, overlap in overlaps.items()},
            **{f"gradient_share/{domain}": gradients[domain] / (sum(gradients.values()) or 1) for domain in members},
            "completion/length": float(rollouts.lengths.float().mean()),
            "completion/truncated": float((~rollouts.finished).float().mean()),
            "policy/loss": totals["loss"],
            # On policy, -log pi of the sampled tokens averages to the entropy.
            "policy/entropy": float(-rollouts.logprobs.sum() / rollouts.lengths.sum()),
            "policy/kl": sum(kl_sums.values()) / trained,
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
        shown = {"step": step + 1, "prompt": batch[0]["prompt"], "completion": texts[0], "reward": scores[0]}
        add_json(out / "samples.jsonl", {**shown, "domain": batch[0]["domain"], "answer": batch[0]["answer"]})
        tqdm.write(
            f"step {step + 1:4d}  reward {mean_reward:.3f}  length {metrics['completion/length']:5.1f}  "
            f"kl {abs(metrics['policy/kl']):.4f}  entropy {metrics['policy/entropy']:.3f}  {metrics['time/step']:.2f} s"
        )
        if step + 1 == args.steps or args.eval_every and (step + 1) % args.eval_every == 0:
            scores = validate()
            add_json(out / "evals.jsonl", {"step": step + 1, **scores, **recovery(before, scores)})
        if saves.due(step + 1):
            saved = {"model": {name: model.get_parameter(name).detach() for name in learnt}, "step": step + 1}
            saved |= {"optimizer": optimizer.state_dict(), "cost": cost, "position": position, "bad_steps": bad_steps}
            saves.write(saved)

    if rank > 0:
        return
    save_model(adapter or model, tokenizer, out)
    cost["seconds"]["total"] = sum(cost["seconds"].values())
    reused = {path: run_cost(path) for path in teachers.values()}
    cost |= {"parameters": parameters, "peak_memory_gb": peak_gb(device), "device": str(device), "reused": reused}
    write_json(out / "cost.json", cost)
    rewards = [row["reward/mean"] for row in read_lines(out / "metrics.jsonl")]
    few = min(5, (len(rewards) + 1) // 2)
    first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
    after = read_lines(out / "evals.jsonl")[-1]
    change = ", ".join(
        f"{name} {before[name]:.3f} -> {after[name]:.3f}"
        + (f" (teacher {before[f'teacher/{name}']:.3f})" if f"teacher/{name}" in before else "")
        for name in after
        if name in before and name != "step"
    )
    print(
        f"Learnt: reward {first:.3f} -> {last:.3f} on training prompts (means of {few} steps)"
        + (f"; validation avg@{args.eval_samples} {change}" if change else "")
        + f"\nThe model lies in {out}. Next: {next_command(args, f'mopd={out}')}"
    )


if __name__ == "__main__":
    run(main)
