"""Sample, score and compare models: avg@k, pass@k, what each gained over the base and kept of its expert, and the cost.

For each task n completions are drawn and c of them are right; everything in the tables follows from these counts:

    avg@n  = mean over tasks of c/n                      one try
    pass@k = mean over tasks of 1 - C(n-c, k)/C(n, k)    one right in k tries, unbiased (arXiv 2107.03374)

    python eval.py                                                    the tiny base on the tiny test tasks
    python eval.py --models base=tiny/base math=runs/math --tasks tiny:test --out runs/eval
    python eval.py --models base=Qwen/Qwen2.5-0.5B-Instruct --tasks gsm8k:test --k 4 --max_completion_length 512

A model named like a domain (math=...) counts as that domain's expert. Held-out domains are those whose task rows say
so; they stay out of the average. A model scored before under the same settings is read from --out, not sampled again,
so an evaluation grows by a model, and after an interruption it goes on, within a model too. What chose a model, e.g. the
scale of a merge, is an evaluation of its own, whose cost is added by --chosen_by. Left out: the spread over training
seeds (one table is one seed), and corrections for the many pairs compared.
"""

import argparse
import atexit
import dataclasses
import difflib
import fcntl
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import sys
import time
import traceback
import warnings
import zipfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, HfArgumentParser
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.hf_argparser import HfArg
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from verifiers import (
    PRESETS, VERIFIERS, TaskError, claims, final_answer, is_test_set, load_tasks, parse_choice_answer, strip_thinking,
    verify_batch,
)  # fmt: skip

# GPU hours from end to end in arXiv 2608.27409, in units of experts + Merge
PAPER_COSTS = {"merge": "1.00", "mix": "0.58-0.67", "mopd": "1.14-1.19"}

# Letters are dimensions only: P prompts, G samples a prompt, B = P*G rows, T completion tokens, V vocabulary.


def stop(message):
    """End as bad input should: one line on stderr that says what to do, and exit code 2. --debug adds the traceback."""
    if "--debug" in sys.argv:
        (traceback.print_exc if sys.exc_info()[0] else traceback.print_stack)()
    print(f"{os.path.basename(sys.argv[0])}: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def first_line(error):
    """The first line of an error's message, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":.")


def run(main):
    """Call a script's main. What the world does to a run ends in one line, as bad input does; a bug keeps its traceback."""
    try:
        main()
    except KeyboardInterrupt:
        print(f"{os.path.basename(sys.argv[0])}: interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:  # a full disk, a folder that is gone, no file handle left
        stop(f"{first_line(error)}. What was saved stands: mend it and call again (training: with --resume)")
    except TaskError as error:
        stop(error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
            raise
        stop(
            "out of memory: lower --slots if it was sampling, --tokens_per_microbatch if it was training. What was saved "
            "stands: call again (training: with --resume)"
        )


@dataclass
class Args:
    # fmt: off
    models: list[str] = HfArg(default_factory=lambda: ["base=tiny/base"], help="NAME=folder or hub id, the base first; an expert is named like its domain")
    tasks: list[str] = HfArg(default_factory=lambda: ["tiny:test"], help="presets (tiny:test, gsm8k:test) or files (.jsonl .json .parquet .csv)")
    k: int = HfArg(default=16, help="completions a task; time grows with it")
    limit: int = HfArg(default=0, help="tasks of each entry of --tasks (tiny:test is one, of six domains), drawn with --seed; 0: all")
    temperature: float = HfArg(default=1.0, help="sampling temperature; 0 is greedy")
    top_p: float = HfArg(default=1.0, help="sample from the smallest set of tokens with this mass; 1: off")
    top_k: int = HfArg(default=0, help="sample from this many most likely tokens; 0: off")
    max_prompt_length: int = HfArg(default=2048, help="tokens; tasks with longer prompts are left out, and counted")
    max_completion_length: int = HfArg(default=48, help="tokens sampled at the most; the default suits the tiny world")
    chosen_by: list[str] = HfArg(default_factory=list, help="NAME=folder of the evaluation that chose a model (a merge's scale): its cost counts")
    out: str = HfArg(default="", help="folder of eval.json, eval.md, samples.jsonl and pictures; empty: runs/eval-<time>")
    seed: int = HfArg(default=0, help="seed of every draw; the same for each model")
    slots: int = HfArg(default=512, help="completions sampled side by side; lower it when memory runs out")
    sampler: Literal["fast", "hf"] = HfArg(default="fast", help="fast: the sampler in this file; hf: model.generate, the slow reference")
    data_dir: str = HfArg(default="", help="folder with local copies of the presets: DATA_DIR/<preset>/<split>.jsonl|json|parquet")
    system_prompt: str = HfArg(default="", help="system message put before every prompt that brings none")
    prompt_suffix: list[str] = HfArg(default_factory=list, help="VERIFIER=text ...: a paragraph behind the prompts of a verifier, e.g. 'math=Put the answer in \\boxed{}.'; presets bring theirs")
    enable_thinking: Literal["", "on", "off"] = HfArg(default="", help="for chat templates that know it (Qwen3); empty: the template's default")
    device: str = HfArg(default="", help="cuda, cpu or mps; empty: cuda where there is one, else cpu")
    dtype: Literal["auto", "float32", "bfloat16"] = HfArg(default="auto", help="of the weights while sampling; auto: bfloat16 where the GPU has it")
    # fmt: on

    def __post_init__(self):
        least = dict(k=1, max_completion_length=1, max_prompt_length=1, slots=1)
        check_bounds(self, least | dict(seed=0, temperature=0, top_k=0, limit=0), above_0=["top_p"])
        if self.top_p > 1:
            stop(f"--top_p must be 1 or less, not {self.top_p}")
        names = [model.partition("=")[0] for model in self.models]
        if not all("=" in model for model in self.models) or len(set(names)) < len(names):
            stop("--models takes NAME=folder pairs with different names, e.g. base=tiny/base math=runs/math")
        if wrong := [name for name in names if not name or "/" in name or name.startswith(".")]:  # files are named so
            stop(f"--models {wrong[0]}=...: a name is a word without slashes")
        for name, _, folder in (pair.partition("=") for pair in self.chosen_by):
            if name not in names or not os.path.exists(os.path.join(folder, "eval.json")):
                stop(f"--chosen_by {name}={folder}: give NAME=folder, a name of --models and a folder with eval.json")
        settle_device(self)
        self.out = self.out or f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}"


def check_bounds(args, least, above_0):
    """Refuse a number that is below the one in `least`, or not above 0, or not finite."""
    for name, value in least.items():
        if not value <= getattr(args, name) < math.inf:
            stop(f"--{name} must be {value} or more, not {getattr(args, name)}")
    for name in above_0:
        if not 0 < getattr(args, name) < math.inf:
            stop(f"--{name} must be above 0, not {getattr(args, name)}")
    if args.seed >= 1 << 32:
        stop(f"--seed must be below 2**32, not {args.seed}")


def settle_device(args):
    """Fill in --device and --dtype where they are left to the machine, and refuse what it does not have."""
    track = getattr(args, "track", "")
    if track and importlib.util.find_spec(track) is None:
        stop(f"--track {track} needs it: pip install {track}")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.empty(0, device=args.device).device.type not in ("cuda", "cpu", "mps"):
            stop(f"--device {args.device}: choose cuda, cpu or mps")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        stop(f"--device {args.device}: {first_line(error)}; leave --device out, or install a PyTorch that sees it")
    if args.dtype == "auto":
        bfloat16 = args.device.startswith("cuda") and torch.cuda.is_bf16_supported()
        args.dtype = "bfloat16" if bfloat16 else "float32"


def parse_args(args_class, description):
    """The flags of a script as its dataclass; a wrong flag or value ends with one line, not with a page of usage."""
    parser = HfArgumentParser(args_class, description=description, allow_abbrev=False)
    formats = (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter)
    parser.formatter_class = type("Help", formats, {})
    parser.error = lambda message: stop(f"{message} (see --help)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error, too")
    args, _, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    args.started = time.monotonic()  # for --max_minutes; no flag, so that args.json is without it
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0], flags, n=1, cutoff=0.7)
        stop(f"unknown argument {unknown[0]}" + (f": did you mean {near[0]}?" if near else " (see --help)"))
    return args


# ---------------------------------------------------------------------------------------------- model and tasks


def model_folder(name):
    """The folder of a model given as a folder or as a hub id (downloaded once, and never a pickle)."""
    if os.path.isdir(name):
        if not any(os.path.exists(os.path.join(name, file)) for file in ("config.json", "adapter_config.json")):
            stop(f"{name} holds no config.json: give the folder of a model in the Hugging Face format")
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except (OSError, ValueError) as error:
        made = "`bash speedrun.sh` makes it; or " * name.startswith("runs/speedrun/")
        stop(f"no model at {name}: {made}give a folder, or a hub id that can be reached ({type(error).__name__})")


def base_folder(folder):
    """The folder of the whole model: of the one that a LoRA adapter belongs to, or `folder` itself."""
    if os.path.exists(os.path.join(folder, "config.json")):
        return folder
    if not os.path.exists(os.path.join(folder, "adapter_model.safetensors")):  # never a pickle
        stop(f"{folder} holds no adapter_model.safetensors: give the folder of a LoRA adapter as peft saves it")
    base = model_folder(read_json(Path(folder) / "adapter_config.json").get("base_model_name_or_path") or "")
    if not os.path.exists(os.path.join(base, "config.json")):
        merge = f"merge.py --base ... --experts {base} --scale 1"
        stop(f"{folder} is an adapter on the adapter {base}: merge that one first ({merge})")
    return base


def tokenizer_folder(folder):
    """Where the tokenizer of a model lies; an adapter may leave it to its base."""
    own = any(os.path.exists(os.path.join(folder, file)) for file in ("tokenizer.json", "tokenizer_config.json"))
    return folder if own else base_folder(folder)


def peft():
    """The optional library of the adapters."""
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # an old name that peft uses
    try:
        import peft
    except ImportError:
        stop("LoRA adapters need peft: pip install peft")
    return peft


@contextmanager
def loading(name):
    """End in one line where a model cannot be read."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        stop(f"cannot load a causal language model from {name}: {first_line(error)}; give another, or fetch it again")


def load_model(name, device):
    """A causal language model in float32 with dropout off -> (model, tokenizer, ids that end a completion, pad id).

    name: a folder or hub id; a folder with a LoRA adapter is loaded as its base model with the adapter merged into it.
    Padding is never told from content by its id, so the pad id may be one that ends.
    """
    adapter = model_folder(name)
    folder = base_folder(adapter)
    disable_progress_bar()  # of loading; the runs show their own
    set_verbosity_error()  # what transformers would warn of is refused here
    data = {"trust_remote_code": False}  # a model is data: no pickle, and no code of its own
    with loading(name):
        if AutoConfig.from_pretrained(folder, **data).is_encoder_decoder:
            raise ValueError("it is an encoder-decoder")
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(adapter), **data)
        how = dict(use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **data)
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
        if adapter != folder:
            model = peft().PeftModel.from_pretrained(model, adapter).merge_and_unload().requires_grad_(True)
    if lost := [*info["missing_keys"], *info["mismatched_keys"]]:  # they would start at random
        stop(f"{name} lacks {len(lost)} tensors of its config.json, {lost[0]} for one: fetch or save it again")
    if broken := [key for key, weight in model.named_parameters() if not weight.isfinite().all()]:
        stop(f"{name} holds NaN or infinite values in {broken[0]}: take an earlier save")
    if len(tokenizer) > (rows := len(model.get_input_embeddings().weight)):
        stop(f"{name}: the tokenizer has {len(tokenizer)} tokens and the embedding {rows} rows: they do not fit")
    listed = model.generation_config.eos_token_id
    eos_ids = sorted({tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None})
    if not eos_ids:
        stop(f"{name} names no end-of-sequence token: set eos_token_id in its generation_config.json")
    pad_id = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return model.to(device).eval(), tokenizer, eos_ids, pad_id


def add_lora(model, args):
    """Freeze the model, and put a trainable low-rank adapter beside all its linear layers but the lm_head -> its PeftModel.

    What is frozen needs no float32: with bfloat16 it takes 2 bytes a parameter. The adapter itself is float32.
    """
    if base_folder(folder := model_folder(args.model)) != folder:
        merge = f"merge.py --base ... --experts {args.model} --scale 1"
        stop(f"--model {args.model} is an adapter: merge it first ({merge})")
    size = dict(r=args.lora_rank, lora_alpha=args.lora_alpha or 2 * args.lora_rank)
    config = peft().LoraConfig(**size, target_modules="all-linear", task_type="CAUSAL_LM")
    model.name_or_path = os.path.abspath(args.model) if os.path.isdir(args.model) else args.model
    torch.manual_seed(args.seed)  # of its A; its B is 0, so that the run starts from the model as it is
    return peft().get_peft_model(model.to(getattr(torch, args.dtype)), config).eval()


def cache_fits(model):
    """Whether the fast sampler can hold the model's cache: keys and values of every layer, and no recurrent state."""
    layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    known = "cache" in inspect.signature(model.forward).parameters  # not so in GPT-1, RWKV, XLNet
    if known and layers <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return True
    print(f"{type(model).__name__} caches not just keys and values: model.generate samples instead (--sampler hf)")
    return False


def output_head(model):
    """The function from hidden states (N, H) to logits (N, V): the lm_head, and what the model does to its result.

    Cohere and Falcon-H1 multiply it, Granite divides it, and Gemma caps it softly: cap * tanh(logits / cap).
    """
    config, lm_head = model.config.get_text_config(decoder=True), model.get_output_embeddings()
    factors = [getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier")]
    scale = math.prod(factors) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    if scale == 1 and not cap:
        return lm_head
    return lambda hidden: cap * (lm_head(hidden) * scale / cap).tanh() if cap else lm_head(hidden) * scale


def encode_prompt(tokenizer, prompt, system="", suffix="", thinking=""):
    """Token ids of a task's prompt (text or messages), through the chat template where the tokenizer has one.

    system: a message before it, unless it brings one; suffix: a paragraph behind it; thinking: "on", "off" or "" (the
    template's own default), for templates that know enable_thinking.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if suffix:
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{suffix}"}]
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if tokenizer.chat_template:
        how = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
        how |= {"enable_thinking": thinking == "on"} if thinking else {}
        return tokenizer.apply_chat_template(messages, **how)
    return tokenizer("\n\n".join(message["content"] for message in messages)).input_ids


def load_prompts(specs, tokenizer, max_prompt_length, args, limit=None, seed=0):
    """The tasks of `specs`, each with its prompt's token ids under "ids"; prompts that are too long are left out."""
    tasks, suffixes = [], dict(pair.partition("=")[::2] for pair in args.prompt_suffix)
    if wrong := [verifier for verifier, text in suffixes.items() if verifier not in VERIFIERS or not text]:
        stop(f"--prompt_suffix {wrong[0]}: give VERIFIER=TEXT, with one of {', '.join(VERIFIERS)}")
    for spec in specs:
        try:
            rows = load_tasks(spec, limit=limit, seed=seed, data_dir=args.data_dir or None)
        except TaskError as error:
            stop(error)
        for row in rows:
            try:
                style = (args.system_prompt, suffixes.get(row["verifier"]), args.enable_thinking)
                row["ids"] = encode_prompt(tokenizer, row["prompt"], *style)
            except Exception as error:  # a chat template is a program that raises what it likes
                stop(f"{spec}, task {row['id']}: the chat template refuses this prompt: {first_line(error)}")
        if copies := len(rows) - len({(str(row["prompt"]), row["answer"]) for row in rows}):
            print(f"{spec}: {copies} of {len(rows)} tasks are there more than once, and count as often")
        kept = [row for row in rows if 0 < len(row["ids"]) <= max_prompt_length]
        if len(kept) < len(rows):
            print(f"{spec}: {len(rows) - len(kept)} of {len(rows)} prompts exceed {max_prompt_length} tokens: left out")
        if not kept:
            stop(f"{spec}: no task is left; raise --max_prompt_length or name other tasks")
        tasks += kept
    return tasks


def hold_out(tasks, share):
    """(tasks to train on, tasks to validate on), by a hash of the prompt: a task never changes sides."""
    place = {id(task): int(hashlib.sha256(str(task["prompt"]).encode()).hexdigest()[:8], 16) / 16**8 for task in tasks}
    ordered = sorted(tasks, key=lambda task: place[id(task)])
    kept = [task for task in tasks if place[id(task)] >= share]
    if not kept:
        stop(f"--validation_share {share} leaves no task to train on: lower it")
    return kept, ordered[: len(tasks) - len(kept)]


def say_doubts(args, model, tasks, eval_tasks):
    """Say what makes a run's numbers doubtful: a real model under the tiny world's settings, prompts seen in training.

    Prompts are compared without case, punctuation and white space.
    """
    names = ("learning_rate", "max_completion_length")
    left = [f"--{name} {getattr(args, name)}" for name in names if getattr(args, name) == getattr(type(args), name)]
    if left and model.num_parameters() > 2e7:
        print(f"Made for the tiny world: {', '.join(left)}; real models use about 1e-6 (LoRA: 2e-5), 512 or more")
    words = [{" ".join(re.findall(r"\w+", str(t["prompt"]).lower())) for t in some} for some in (tasks, eval_tasks)]
    if both := len(words[0] & words[1]):
        print(f"{both} of {len(words[1])} prompts of the evaluation are trained on: what they score is no test")


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
    how = dict(temperature=temperature, top_p=top_p, top_k=top_k) if temperature else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed + first_row)
        out = model.generate(
            ids, attention_mask=mask, num_return_sequences=num_generations if temperature else 1, max_new_tokens=T, do_sample=temperature > 0,
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


def evaluate(
    model, tasks, tokenizer, *, samples, slots=512, draw_completions=sample, sampled=None, save=lambda: None, **how
):  # fmt: skip
    """Sample each task `samples` times and score every completion -> ({domain: result}, [one row a completion]).

    A result holds n (samples a task), counts (right ones, a task: a score of 1), majority (of each task's vote, or
    None), ids, held_out, length (mean tokens), truncated (share cut at max_completion_length) and tokens. `tasks` carry
    their prompt's token ids (load_prompts); `how` goes to the sampler. `sampled` {domain: (texts, lengths, finished)} is
    filled on the way, with a call of save() after each block of `slots`; what it holds already is not sampled again.
    """
    results, completions, block = {}, [], max(1, slots // samples)
    sampled = {} if sampled is None else sampled
    bar = tqdm(total=len(tasks) * samples, unit="completion", desc="sampling", leave=False, dynamic_ncols=True)
    for domain in dict.fromkeys(task["domain"] for task in tasks):
        members = [task for task in tasks if task["domain"] == domain]
        texts, lengths, finished = sampled.setdefault(domain, ([], [], []))
        bar.update(len(texts))
        for start in range(len(texts) // samples, len(members), block):
            prompts = [task["ids"] for task in members[start : start + block]]
            rows = {"num_generations": samples, "first_row": start * samples, "slots": slots}
            rollouts = draw_completions(model, prompts, **rows, **how)
            texts += decode(tokenizer, rollouts)
            lengths += rollouts.lengths.tolist()
            finished += rollouts.finished.tolist()
            bar.update(len(prompts) * samples)
            save()
        owners = [task for task in members for _ in range(samples)]
        scores = verify_batch([(task["verifier"], text, task["answer"]) for task, text in zip(owners, texts)])
        groups = [slice(i, i + samples) for i in range(0, len(scores), samples)]
        votes = [majority_vote(task, texts[rows], scores[rows]) for task, rows in zip(members, groups)]
        results[domain] = {
            "n": samples,
            "counts": [sum(s == 1 for s in scores[rows]) for rows in groups],
            "majority": None if None in votes else votes,
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


def answer_given(verifier, completion, answer):
    """What a completion answers, as plain text to compare with other completions of the task; None for no answer."""
    text = strip_thinking(completion)
    said = text if verifier == "exact" else final_answer(text)
    if verifier == "choice":
        _, choices, labels = parse_choice_answer(answer)
        found = claims(text, choices, labels)
        said = " ".join(sorted(found[-1][2])) if found else text
    return " ".join((said or "").split()).casefold() or None


def majority_vote(task, completions, scores):
    """1.0 when the answer that most completions of a task give is right, else 0.0; None where answers cannot be compared.

    Right completions give one answer by the verifier's judgement; wrong ones are told apart by the text of theirs. Who
    gives none does not vote, and of answers that tie the share that is right counts.

    >>> said = [r"\\boxed{3}", r"\\boxed{4}", r"\\boxed{ 3 }", r"\\boxed{8/2}", "no idea"]
    >>> majority_vote({"verifier": "math", "answer": "4"}, said, [0, 1, 0, 1, 0])  # 3 and 4 tie, two votes each
    0.5
    """
    if task["verifier"] not in ("math", "number", "choice", "exact"):
        return None
    given = (answer_given(task["verifier"], text, task["answer"]) for text in completions)
    votes = Counter(True if score == 1 else said for said, score in zip(given, scores))
    del votes[None]
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    return (True in top) / len(top) if top else 0.0


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


# ---------------------------------------------------------------------------------------------------------- cost


def own_tokens(cost):
    """Tokens of one run: sampled, scored and trained on."""
    return sum(cost.get(key, 0) for key in ("tokens_sampled", "tokens_scored", "teacher_tokens", "tokens_trained"))


def own_flops(cost):
    """Compute of one run: 2N FLOPs a token sampled or scored, 6N a token trained on (arXiv 2001.08361), N parameters.

    >>> own_flops({"parameters": 10, "tokens_sampled": 3, "tokens_trained": 5})
    360
    """
    return cost.get("parameters", 0) * (2 * own_tokens(cost) + 4 * cost.get("tokens_trained", 0))


def own_seconds(cost):
    """Seconds of one run, its validation left out."""
    return sum(value for phase, value in cost.get("seconds", {}).items() if phase not in ("eval", "total"))


def fusion(cost, measure):
    """`measure` of a run and of the evaluation that chose it among others (--chosen_by)."""
    return measure(cost) + measure(cost.get("chosen_by", {}))


def end_to_end(cost, measure):
    """`measure` of a run and of all that it reused: the experts of a merge or of a distillation."""
    return fusion(cost, measure) + sum(end_to_end(reused or {}, measure) for reused in cost.get("reused", {}).values())


def choice_cost(folder, parameters):
    """The cost of an evaluation as cost.json would hold it, from its folder: all that its models sampled."""
    models = read_json(Path(folder) / "eval.json")["models"].values()
    tokens = sum(domain["tokens"] for model in models for domain in model["domains"].values())
    seconds = {"sample": sum(model["seconds"] for model in models)}
    return {"parameters": parameters, "tokens_sampled": tokens, "seconds": seconds}


# ----------------------------------------------------------------------------------------------------- intervals


@lru_cache(maxsize=64)
def bootstrap_weights(tasks, stream, resamples=2000):
    """(1 + resamples, tasks): how often each task counts, first in the data, then in samples drawn with replacement."""
    drawn = np.random.default_rng([tasks, stream]).multinomial(tasks, np.full(tasks, 1 / tasks), resamples)
    return np.concatenate([np.ones((1, tasks)), drawn])


def estimates(models, k=1):
    """{model: {domain: (1 + R,)}}: mean pass@k over the tasks in points, then R bootstrap replicates of it.

    A replicate draws the tasks of a domain anew, the same ones for every model and every k, so the difference of two
    entries is paired; the domains' mean, "average" (or "held-out"), is stratified. What is computed from entries keeps
    the form: the estimate, then its replicates. k may be "majority": majority_vote, for the domains that have one.
    """
    found, groups = {name: {} for name in models}, {"average": [], "held-out": []}
    for stream, (domain, first) in enumerate(next(iter(models.values()))["domains"].items()):
        results = {name: model["domains"][domain] for name, model in models.items() if domain in model["domains"]}
        shared = set.intersection(*(set(result["ids"]) for result in results.values()))  # less if prompts were too long
        if not shared or k == "majority" and any(result.get(k) is None for result in results.values()):
            continue
        groups["held-out" if first["held_out"] else "average"].append(domain)
        for name, result in results.items():
            values = result[k] if k == "majority" else [pass_at_k(result["n"], c, k) for c in result["counts"]]
            values = np.array([value for task, value in zip(result["ids"], values) if task in shared])
            found[name][domain] = 100 * bootstrap_weights(len(values), stream) @ values / len(values)
    for row in found.values():
        for group, domains in groups.items():
            if domains and all(domain in row for domain in domains):
                row[group] = sum(row[domain] for domain in domains) / len(domains)
    return found


def interval(x):
    """Bounds of the 95 % percentile interval of an estimate and its replicates."""
    return np.percentile(x[1:], [2.5, 97.5], axis=0)


def p_value(x):
    """Two-sided bootstrap p of a difference: twice the share of its replicates beyond 0, at least 2/(R + 1)."""
    return min(1.0, 2 * (1 + min((x[1:] <= 0).sum(), (x[1:] >= 0).sum())) / len(x))


def minus(row, other):
    """Entry by entry, where both have one."""
    return {column: row[column] - other[column] for column in row if column in other}


def share_kept(row, base, expert):
    """(model - base)/(expert - base) in percent; n/a where the expert's own gain does not stand out of the noise."""
    return {
        column: 100 * (row[column] - base[column]) / gain if interval(gain)[0] > 0 else "n/a"
        for column, gain in minus(expert, base).items()
    }


# -------------------------------------------------------------------------------------------------------- tables


def level(x):
    return f"{x[0]:.1f} ± {np.ptp(interval(x)) / 2:.1f}"


def change(x, sign="+"):
    cells = [f"{round(value, 1) + 0.0:{sign}.1f}" for value in (x[0], *interval(x))]  # + 0.0: no -0.0
    return f"{cells[0]} [{cells[1]}, {cells[2]}]"


def markdown(rows, columns, show=str):
    """A Markdown table of {row: {column: cell}}; cells that are no text yet are written by `show`."""
    lines = [["model", *columns], ["---"] + ["---:"] * len(columns)]
    for name, row in rows.items():
        cells = [row.get(column) for column in columns]
        lines.append([name, *("" if c is None else c if isinstance(c, str) else show(c) for c in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def paradigm(name):
    """merge, mix or mopd for a model whose name starts so, else None."""
    return next((start for start in PAPER_COSTS if name.startswith(start)), None)


def roles(models):
    """Who is what -> (models, domains trained on, domains held out, fused models).

    `models` gets a row "own expert" behind the experts: each domain's expert on its domain, at the cost of all.
    """
    base = next(iter(models))
    domains = models[base]["domains"]
    trained = [domain for domain in domains if not domains[domain]["held_out"]]
    experts = {domain: models[domain] for domain in trained if domain in models}
    fused = {name: model for name, model in models.items() if name not in (base, "own expert", *experts)}
    own = {
        "domains": {domain: expert["domains"][domain] for domain, expert in experts.items()},
        "cost": {"reused": {domain: expert["cost"] for domain, expert in experts.items()}},
    }
    models = {base: models[base], **experts, **({"own expert": own} if experts else {}), **fused}
    return models, trained, [domain for domain in domains if domain not in trained], list(fused)


def cost_rows(models):
    """({model: {column: cell}}, the model that is the unit): what each run took by itself and with all it reused."""
    unit = next((name for name in models if paradigm(name) == "merge"), "own expert")
    rows = {name: {"paper": PAPER_COSTS.get(paradigm(name))} for name, model in models.items() if model["cost"]}
    for label, measure, size in (("M tokens", own_tokens, 1e6), ("TFLOPs", own_flops, 1e12), ("s", own_seconds, 1)):
        whole = end_to_end(models[unit]["cost"], measure) if unit in rows else 0
        for name, row in rows.items():
            own, total = fusion(models[name]["cost"], measure), end_to_end(models[name]["cost"], measure)
            row |= {label: f"{own / size:.3g}", f"all {label}": f"{total / size:.3g}"}
            row[f"relative {label}"] = f"{total / whole:.2f}" if whole else None
    return rows, unit


def pair_rows(avg, names):
    """Of every two models the paired difference of their averages, its p, and the domains in which they differ."""
    rows = {}
    for left, right in itertools.combinations(names, 2):
        gap = minus(avg[right], avg[left])
        average, _ = gap.pop("average"), gap.pop("held-out", None)
        apart = ", ".join(f"{domain} {x[0]:+.1f}" for domain, x in gap.items() if p_value(x) < 0.05)
        rows[f"{right} - {left}"] = {"average": change(average), "p": f"{p_value(average):.3f}", "p < 0.05 in": apart}
    return rows


def guideline(models, avg, fused):
    """The paper's three questions, each answered by the best value, or the lowest price of those not told from it."""
    best = {paradigm(name): name for name in sorted(fused, key=lambda name: avg[name]["average"][0])}
    rivals = [name for start, name in best.items() if start]
    if len(rivals) < 2:
        return "It takes models of two paradigms, named merge..., mix... or mopd..."
    own, whole = ({name: price(models[name]["cost"], own_flops) for name in rivals} for price in (fusion, end_to_end))
    average = {name: avg[name]["average"] for name in rivals}
    questions = {
        "(a) The experts exist: average, and cost without them": (average, own),
        "(b) One model from scratch: average, and cost from end to end": (average, whole),
    }
    if "average" in avg.get("own expert", {}):
        lost = {name: minus(avg[name], avg["own expert"]) for name in rivals}
        worst = {name: np.min([x for d, x in row.items() if d != "average"], axis=0) for name, row in lost.items()}
        questions["(c) Keep each domain's gain: the worst difference to an expert"] = (worst, whole)
    lines = []
    for question, (values, prices) in questions.items():
        first, *others = sorted(rivals, key=lambda name: -values[name][0])  # noqa: B023
        gaps = {name: values[first] - values[name] for name in others}
        tied = [name for name, gap in gaps.items() if interval(gap)[0] <= 0]
        ahead = [f"{change(gap)} over {name}" + " (not distinguishable)" * (name in tied) for name, gap in gaps.items()]
        spent = ", ".join(f"{name} {price / 1e12:.3g}" for name, price in prices.items())
        choice = min([first, *tied], key=prices.get)
        verdict = f"{first} {values[first][0]:.1f}, {', '.join(ahead)}"
        lines.append(f"- {question}: **{choice}**. {verdict}; TFLOPs: {spent}.")
    return "\n".join(lines)


def level_sections(settings, models, avg):
    """(title, note, rows, columns, how a cell is written) of the tables about each model by itself."""
    n, (_, trained, held_out, _) = settings["k"], roles(models)
    cover, votes = estimates(models, n), estimates(models, "majority")
    costs, unit = cost_rows(models)
    scores = {name: {**avg[name], f"pass@{n}": cover[name].get("average"), **costs.get(name, {})} for name in models}
    lengths = {
        name: {domain: f"{r['length']:.1f} ({r['truncated']:.1%})" for domain, r in model["domains"].items()}
        for name, model in models.items()
    }
    bill = [f"{which}{kind}" for which in ("", "all ", "relative ") for kind in ("M tokens", "TFLOPs", "s")]
    columns = [*trained, "average", *held_out, "held-out"]
    return [
        (f"Scores: avg@{n}, in points", f"{n} completions a task at temperature {settings['temperature']}, top-p "
         f"{settings['top_p']}, top-k {settings['top_k']}, seed {settings['seed']}. ± is half of the 95 % bootstrap interval "
         "over tasks. Averages leave held-out domains out. Costs: see below.", scores,
         [*trained, "average", "held-out", f"pass@{n}", "relative TFLOPs", "relative s"], level),
        (f"Coverage: pass@{n}, in points", "", cover, columns, level),
        (f"Majority vote: maj@{n}, in points", "All right answers are one to the verifier, wrong ones are told apart by "
         "their text, a tie counts by its share of right ones.", votes, columns, level),
        ("Completion length in tokens (share cut off)", "", lengths, columns, str),
        ("Cost" + f", relative to {unit}" * (unit in costs), "FLOPs: 6N a token trained on, 2N a token sampled or scored, N parameters. A run's "
         "own cost holds the evaluation that chose it (--chosen_by) and no other; all: the experts it reused as well. "
         "paper: GPU hours of arXiv 2608.27409.", costs, [*bill, "paper"], str),
    ]  # fmt: skip


def difference_sections(settings, models, avg):
    """The same of the tables that compare models, task by task."""
    base, n, (_, trained, held_out, fused) = next(iter(models)), settings["k"], roles(models)
    gains = {name: minus(avg[name], avg[base]) for name in models if name != base}
    transfer = {name: gains.pop(name) for name in trained if name in gains}
    by_k = {f"pass@{k}": estimates(models, k) for k in sorted({2**i for i in range(n.bit_length())} | {n})}
    coverage = {
        name: {column: found[name]["average"] - found[base]["average"] for column, found in by_k.items()}
        for name in gains
        if "average" in avg[name]
    }
    own = avg.get("own expert", {})
    lost = {name: minus(avg[name], own) for name in fused}
    kept = {name: share_kept(avg[name], avg[base], own) for name in fused}
    columns = [*trained, "average", *held_out, "held-out"]
    pairs = pair_rows(avg, [name for name in ("own expert", *fused) if "average" in avg.get(name, {})])
    return [
        ("Difference to the base, in points", "Brackets: 95 % intervals, paired by task. With 0 inside, the models cannot "
         "be distinguished.", gains, columns, change),
        ("Coverage gained: difference to the base in average pass@k, in points", "", coverage, list(by_k), change),
        ("Transfer: the experts' difference to the base, in points", "", transfer, columns, change),
        ("Difference to the domain's expert, in points", "", lost, columns, change),
        ("Share of the expert's gain kept, in percent", "n/a: the expert's own gain does not stand out of the noise.",
         kept, columns, lambda x: change(x, "")),
        ("Pairs: difference of the averages, in points", "p: paired bootstrap, two-sided, not corrected for the number of "
         "pairs.", pairs, ["average", "p", "p < 0.05 in"], str),
    ]  # fmt: skip


def report(settings, models):
    """The text of eval.md out of nothing but the content of eval.json; the first model is the base."""
    models, trained, _, fused = roles(models)
    avg, parts = estimates(models), []
    sections = level_sections(settings, models, avg) + difference_sections(settings, models, avg)
    for title, note, rows, columns, show in sections:
        if any(rows.values()):
            columns = [column for column in columns if any(row.get(column) is not None for row in rows.values())]
            parts += [f"## {title}", note, markdown(rows, columns, show)]
    fused = [name for name in fused if "average" in avg[name]]
    if len(fused) > 1:
        spread = {column: np.ptp([avg[name][column][0] for name in fused]) for column in (*trained, "average")}
        widest, best = max(trained, key=spread.get), max(fused, key=lambda name: avg[name]["average"][0])
        parts.insert(0, f"The averages of the fused models lie within {spread['average']:.1f} points, single domains up to "
            f"{spread[widest]:.1f} apart ({widest}). The best average is {best}'s, {level(avg[best]['average'])}.")  # fmt: skip
        parts += ["## Guideline: what these numbers favour", "A paradigm is represented by its best average on these tasks. "
            "Favoured: the best, or the cheapest of those that cannot be distinguished from it.", guideline(models, avg, fused)]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


# ------------------------------------------------------------------------------------------------------ pictures


def looks(names):
    """{model: colour and line}: base and experts grey, a colour a paradigm, its further models lighter and dashed.

    The colours are Okabe and Ito's, which colour-blind readers can tell apart.
    """
    palette = iter(["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"] * len(names))
    colours, members, found = {names[0]: "#AAAAAA", "own expert": "#333333"}, Counter(), {}
    for name in names:
        family = name if name in colours else paradigm(name) or name
        colours[family] = colours.get(family) or next(palette)
        shade, line = 0.72 ** members[family], ("-", "--", "-.", ":")[members[family] % 4]
        rgb = [1 - shade * (1 - int(colours[family][i : i + 2], 16) / 255) for i in (1, 3, 5)]
        found[name], members[family] = {"color": rgb, "linestyle": line}, members[family] + 1
    return found


def new_figure(rows, columns, width, height):
    """A matplotlib figure and its (rows, columns) panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#E5E5E5")
        panel.set_axisbelow(True)
    return figure, panels


def finish(figure):
    """One legend for all panels; a panel in which nothing is drawn goes."""
    handles = {}
    for panel in figure.axes:
        handles |= dict(reversed(pair) for pair in zip(*panel.get_legend_handles_labels()))
        panel.set_visible(panel.has_data())
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False)
    return figure


def coverage_figure(models):
    """pass@k against k with its 95 % band: a panel a domain, a line a model."""
    models, trained, held_out, _ = roles(models)
    domains, names = trained + held_out, [name for name in models if name not in trained]
    n = min(result["n"] for result in models[names[0]]["domains"].values())
    curves, ks = [estimates(models, k) for k in range(1, n + 1)], range(1, n + 1)
    columns = min(3 if len(domains) % 3 == 0 else 4, len(domains))
    figure, panels = new_figure(-(-len(domains) // columns), columns, 3.4, 2.8)
    for panel, domain in zip(panels.flat, domains):
        for name, look in looks(names).items():
            if domain in curves[0][name]:
                points = np.stack([curve[name][domain] for curve in curves], -1)  # (1 + R, n)
                panel.plot(ks, points[0], label=name, **look)
                if len(names) < 8:  # bands of many models would hide each other
                    panel.fill_between(ks, *interval(points), color=look["color"], alpha=0.12, linewidth=0)
        ticks = [k for k in ks if k & (k - 1) == 0]
        panel.set_xscale("log", base=2)
        panel.set(title=domain + " (held out)" * (domain in held_out), xlabel="k", xticks=ticks, xticklabels=ticks)
    for row in panels:
        row[0].set_ylabel("pass@k, in points")
    return finish(figure)


def scores_figure(models):
    """avg@n with 95 % intervals: a group of bars a domain, a bar a model."""
    models, trained, held_out, _ = roles(models)
    avg, names = estimates(models), [name for name in models if name not in trained]
    groups, width = [*trained, *["average"] * bool(trained), *held_out], 0.85 / len(names)
    figure, panels = new_figure(1, 1, min(14, 2 + 0.2 * len(groups) * len(names)), 3.6)
    for i, (name, look) in enumerate(looks(names).items()):
        here = [place for place, group in enumerate(groups) if group in avg[name]]
        bars = np.array([[avg[name][groups[place]][0], *interval(avg[name][groups[place]])] for place in here]).T
        places = np.array(here) + (i - (len(names) - 1) / 2) * width
        panels[0, 0].bar(places, bars[0], 0.9 * width, color=look["color"], label=name)
        panels[0, 0].errorbar(places, bars[0], abs(bars[1:] - bars[0]), fmt="none", ecolor="#000000", elinewidth=0.8)
    labels = [group + "\n(held out)" * (group in held_out) for group in groups]
    panels[0, 0].set(xticks=range(len(groups)), xticklabels=labels, ylabel="avg@n, in points", xmargin=0.02)
    return finish(figure)


def training_figure(models):
    """Of each domain the reward against steps and against its prompts seen, and its share of the prompts."""
    models, trained, _, _ = roles(models)
    figure, panels = new_figure(3, len(trained), 3.4, 2.3)
    for column, domain in enumerate(trained):
        for name, look in looks([name for name in models if name not in trained]).items():
            curves = models.get(domain if name == "own expert" else name, {}).get("curves", {})
            if f"reward/{domain}" in curves:
                reward, share = curves[f"reward/{domain}"], curves.get(f"proportion/{domain}")
                seen = np.cumsum([part or 0 for part in share or [1] * len(reward)]) * curves["prompts_per_step"]
                lines = ((curves["step"], reward), (seen, reward), (curves["step"], share or []))
                for panel, (x, y) in zip(panels[:, column], lines):
                    points = np.array([point for point in zip(x, y) if point[1] is not None])
                    window = max(1, len(points) // 10)
                    if len(points):
                        mean = np.convolve(points[:, 1], np.ones(window) / window, "valid")
                        panel.plot(points[window - 1 :, 0], mean, label=name, **look)
        for panel, label in zip(panels[:, column], ("step", f"{domain} prompts seen", "step")):
            panel.set(xlabel=label)
        panels[0, column].set_title(domain)
        panels[2, column].set_ylim(bottom=0)
    for row, label in zip(panels, ("reward, running mean", "reward, running mean", "share of the prompts")):
        row[0].set_ylabel(label)
    return finish(figure)


def draw_pictures(models, out):
    """coverage.png, scores.png and training.png from the content of eval.json, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("No pictures: pip install matplotlib and call again (nothing is sampled twice)")
        return
    coverage_figure(models).savefig(out / "coverage.png", dpi=150)
    scores_figure(models).savefig(out / "scores.png", dpi=150)
    if any(model.get("curves") for model in models.values()):
        training_figure(models).savefig(out / "training.png", dpi=150)


# -------------------------------------------------------------------------------------------- several processes

# torchrun tells each process which one it is, of how many. All of them hold the same model and know the whole batch; each
# samples its share of the prompts and computes its share of the gradient, and only the first writes.
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def join_processes(args):
    """Under torchrun: meet the other processes, each with a GPU of its own where there are any -> (rank, processes)."""
    if WORLD > 1:
        if args.prompts_per_step < WORLD:
            stop(f"--prompts_per_step {args.prompts_per_step} leaves some of the {WORLD} processes without a prompt")
        if args.device.startswith("cuda"):
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if args.device.startswith("cuda") else "gloo")
        atexit.register(dist.destroy_process_group)
        args.out = gather([args.out])[0]  # it may hold the time
    if RANK:
        sys.stdout = open(os.devnull, "w")
    return RANK, WORLD


def gather(values):
    """The lists of all processes, joined in the order of their ranks; they are sent by the CPU."""
    if WORLD == 1:
        return values
    lists = [None] * WORLD
    dist.all_gather_object(lists, values)
    return sum(lists, [])


def sum_gradients(model):
    """The gradient of the whole batch out of each process's share of it: the one all-reduce of an update."""
    if WORLD > 1:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        shares = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        flat = torch.cat([share.flatten() for share in shares])
        dist.all_reduce(flat)
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights])):
            weight.grad = part.view_as(weight)


def sum_numbers(numbers):
    """{name: number} summed over the processes, of which not each has every name."""
    shares = gather([numbers])
    names = dict.fromkeys(name for share in shares for name in share)
    return {name: sum(share.get(name, 0) for share in shares) for name in names}


# --------------------------------------------------------------------------------------------------- run folder


def write_whole(path, write):
    """write(file), so that `path` is never seen half written, whatever dies: the old content stands until all is on disk."""
    if RANK:
        return
    partial = Path(f"{path}.tmp")
    try:
        with open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(partial.parent)


def sync_folder(folder):
    """Put the names of a folder's files on disk, as fsync does with a file's content."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_json(path, value):
    """Write a JSON file so that it is never seen half written."""
    write_whole(path, lambda file: file.write((json.dumps(value, indent=1) + "\n").encode()))


def peak_gb(device):
    """Peak memory in GB: of the GPU where there is one, else of the process (ru_maxrss is KB on Linux, bytes on macOS)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def add_json(path, *values):
    """Append JSON lines."""
    if RANK == 0:
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


LOCKS = {}  # {folder: its open lock file}; a lock goes with the process that holds it, however that ends


def lock_folder(folder):
    """Make a folder that is this process's alone: another one that wants it is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = LOCKS.setdefault(folder.resolve(), open(folder / "lock", "a"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stop(f"{folder.parent} is in use by another process: let it end, or choose another --out")
    except OSError as error:
        stop(f"cannot write --out {folder.parent}: {error.strerror}; choose another")


# Flags that a resumed run may change: none of them changes what is computed, but for the order of floating-point sums.
FREE = """out resume overwrite device slots tokens_per_microbatch eval_every save_every save_minutes keep max_minutes
    max_bad_steps track""".split()


def open_run(args):
    """Make the run folder -> the saved state to continue from, or None. One that holds a run needs --resume or --overwrite."""
    out, state, new = Path(args.out), None, dataclasses.asdict(args)
    if RANK:  # the first process opens it
        gather([])
        saves = sorted((out / "state").glob("step-*.pt"))
        return load_state(saves[-1]) if saves else None
    held = (out / "args.json").exists()
    if args.resume and args.overwrite:
        stop("--resume continues the run in --out and --overwrite starts it anew: give one of them")
    if held and not (args.resume or args.overwrite):
        stop(f"{out} already holds a run: --resume continues it, --overwrite replaces it; or choose another --out")
    if not held and (out / "config.json").exists():
        stop(f"{out} holds a model that no run here made: choose another --out")
    lock_folder(out / "state")
    changed = {}
    if held and args.resume:
        old = read_json(out / "args.json")
        changed = {name: new[name] for name in new if old.get(name) != new[name]}
        if refused := [name for name in changed if name not in FREE]:
            stop(f"{out} was started with another --{', --'.join(refused)}: give the same, or choose another --out")
    made = ("args.json", "cost.json", "model*", "adapter*", "bad-step-*", "state/step-*", "events.*")
    for pattern in made if args.overwrite else ():
        for path in out.glob(pattern):
            path.unlink()
    if saves := sorted((out / "state").glob("step-*.pt")):
        state = load_state(saves[-1])
        free = [f"--{name} {changed[name]}" for name in changed if name not in ("out", "resume", "overwrite")]
        print(f"{out}: continues after step {state['step']}" + (f", now with {' '.join(free)}" if free else ""))
    for name in ("metrics.jsonl", "samples.jsonl", "evals.jsonl"):
        cut_lines(out / name, state["step"] if state else -1)
    write_json(out / "args.json", new)
    gather([])
    return state


def read_json(path):
    """A JSON object; {} where there is no such file."""
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        stop(f"{path} is not JSON: fetch or save it again")


def read_lines(path):
    """The rows of a .jsonl file; none where there is no such file."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except ValueError as error:
        stop(f"{path} is damaged ({first_line(error)}): restore it, or move it away")


def cut_lines(path, step):
    """Leave the lines of a .jsonl file up to `step`: later ones will be written again, and the last may be half a line."""
    lines, kept = path.read_bytes().splitlines() if path.exists() else [], []
    for number, line in enumerate(lines, 1):
        try:
            kept += [line + b"\n"] if json.loads(line)["step"] <= step else []
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                stop(f"{path}:{number} is damaged, no line of a run: restore or remove it")
    write_whole(path, lambda file: file.writelines(kept))


def load_state(path):
    """What save_state wrote; tensors and plain values only, as a pickle of anything else is refused."""
    try:
        if damaged := zipfile.ZipFile(path).testzip():
            raise zipfile.BadZipFile(f"wrong checksum in {damaged}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        stop(
            f"{path} is damaged or no state of a run ({first_line(error)}): remove it, and --resume continues from the "
            "save before it, or from the start"
        )


@contextmanager
def saving(folder, tensors):
    """Turn a write that fails into one line. What was saved before stands, as only whole files take its place."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # the last two hide an OSError
        reason = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
        needed, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(folder).free
        stop(
            f"cannot save to {folder} ({first_line(reason)}): {needed:,} bytes are needed and {free:,} free. The save "
            "before stands: make room and continue with --resume"
        )


TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def save_model(model, tokenizer, out):
    """Write weights and config in the Hugging Face format, and the tokenizer's files as they are: whole, or not at all.

    Of a PeftModel it is the adapter that is written: merge.py, or peft itself, makes a whole model of it.
    """
    if RANK:
        return
    partial = Path(out) / "state" / "model"
    shutil.rmtree(partial, ignore_errors=True)
    with saving(out, model.parameters()):
        model.save_pretrained(partial)
        (partial / "README.md").unlink(missing_ok=True)  # peft's
        for path in Path(tokenizer.name_or_path).iterdir():
            if path.name.startswith(TOKENIZER_FILES):
                shutil.copyfile(path, partial / path.name)
        for path in partial.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            os.replace(path, Path(out) / path.name)
    partial.rmdir()
    sync_folder(out)


class Saves:
    """When a run saves its state, and when it stops before its last step: on SIGINT or SIGTERM, or out of --max_minutes."""

    def __init__(self, args):
        self.args, self.asked, self.agreed, self.longest = args, "", "", 0.0
        self.last_step = self.last_save = time.monotonic()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame):
        if self.asked:  # the second time: at once
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        os.write(2, f"{self.asked}: the run saves this step and ends; once more, and it ends at once\n".encode())

    def due(self, step):
        """Called after every step, which is the first: 1."""
        args, now = self.args, time.monotonic()
        self.longest, self.last_step = max(self.longest, now - self.last_step), now
        if args.max_minutes and now + self.longest > args.started + 60 * args.max_minutes:  # another would not fit
            self.asked = self.asked or "--max_minutes"
        by_steps = args.save_every and (step % args.save_every == 0 or step == args.steps)
        by_time = args.save_minutes and now > self.last_save + 60 * args.save_minutes
        # What one process is asked, all do after the same step; who is asked meanwhile, says so at the next.
        reasons, times = zip(*gather([(self.asked, by_time)]))
        self.agreed = max(reasons)
        return self.agreed or by_steps or any(times)

    def write(self, state):
        """Save what --resume continues from, keep the last --keep of them, and end the run if it was asked to."""
        folder, self.last_save = Path(self.args.out) / "state", time.monotonic()
        moments = [value for of_weight in state["optimizer"]["state"].values() for value in of_weight.values()]
        with saving(folder, [*state["model"].values(), *moments]):
            write_whole(folder / f"step-{state['step']:08d}.pt", lambda file: torch.save(state, file))
        for path in sorted(folder.glob("step-*.pt"))[: -self.args.keep] if RANK == 0 else ():
            path.unlink()
        if self.agreed:
            print(f"{self.args.out}: saved after step {state['step']}, as {self.agreed} says; continue with --resume")
            sys.exit(3)


def tracker(args):
    """log(metrics) for the program that --track names."""
    if args.track == "wandb" and RANK == 0:
        import wandb

        run = wandb.init(project="rlvr", name=Path(args.out).name, dir=args.out, config=dataclasses.asdict(args))
        return lambda metrics: run.log(metrics, step=metrics["step"])
    if args.track == "tensorboard" and RANK == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(args.out)
        return lambda metrics: [writer.add_scalar(name, metrics[name], metrics["step"]) for name in metrics]
    return lambda metrics: None


def bad_step(out, step, bad_steps, batch, limit):
    """Note a step that made no update, as its gradient was not finite: its batch is kept, and `limit` in a row end the run.

    batch: (task, completion or completions, reward or rewards) of each row or group.
    """
    path = out / f"bad-step-{step}.jsonl"
    rows = [{**task, "completion": completion, "reward": reward} for task, completion, reward in batch]
    write_whole(path, lambda file: file.writelines((json.dumps(row) + "\n").encode() for row in rows))
    if bad_steps >= limit:
        stop(
            f"step {step}: the gradient is not finite, {bad_steps} times in a row; the last batch lies in {path}. Start "
            "again with a lower --learning_rate, or --beta above 0; the last save stands"
        )
    tqdm.write(f"step {step}: the gradient is not finite, so no update is made; the batch lies in {path}")


def next_command(args, model):
    """The evaluation of a run's model beside its base, on what the run was validated on and with its prompts."""
    words = ["python eval.py --models", f"base={args.model}", model]
    if any(spec.split(":")[0] != "tiny" for spec in args.tasks):
        words += ["--tasks", *(args.eval_tasks or ["TEST.jsonl"])]
    usual = dict(max_completion_length=48, data_dir="", system_prompt="", prompt_suffix=[], enable_thinking="")
    for flag in usual:
        if (value := getattr(args, flag)) != usual[flag]:
            words += [
                f"--{flag}",
                *(shlex.quote(str(part)) for part in (value if flag == "prompt_suffix" else [value])),
            ]
    return " ".join(words)


def run_cost(folder):
    """The cost.json of the run that made a model, {} where there is none (a model that was not trained here)."""
    return read_json(Path(folder) / "cost.json")


def training_curves(folder):
    """What training.png shows of the run that made a model, {} where there is none."""
    rows = read_lines(Path(folder) / "metrics.jsonl")
    if not rows:
        return {}
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(("step", "reward/", "proportion/")))
    prompts = read_json(Path(folder) / "args.json").get("prompts_per_step", 0)
    return {"prompts_per_step": prompts, **{name: [row.get(name) for row in rows] for name in names}}


def save_sampled(path, saved, start, every=60.0):
    """Write what was sampled so far, `every` so many seconds: an interruption costs little."""
    if (seconds := time.perf_counter() - start) > saved["seconds"] + every:
        saved["seconds"] = seconds
        write_json(path, saved)


def main():
    args = parse_args(Args, __doc__)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    folders = {name: model_folder(path) for name, _, path in (model.partition("=") for model in args.models)}
    try:
        for spec in args.tasks:  # a wrong one is found before a model is loaded
            load_tasks(spec, data_dir=args.data_dir or None)
    except TaskError as error:
        stop(error)
    if any((out := Path(args.out)).joinpath(name).exists() for name in ("args.json", "config.json")):
        stop(f"--out {out} holds a model, whose samples.jsonl would be lost: choose another folder")
    for spec in args.tasks:
        name, _, split = spec.partition(":")
        if name in (*PRESETS, "tiny") and not is_test_set(spec) and "validation" not in split:
            print(f"{spec} names training tasks; those of another split are e.g. {name}:test")
    lock_folder(out / "models")
    apart = ("models", "chosen_by", "out", "slots", "device")  # what does not change a completion
    settings = {name: value for name, value in dataclasses.asdict(args).items() if name not in apart}
    before = read_json(out / "eval.json").get("settings", {})
    if changed := [name for name in settings if before.get(name, settings[name]) != settings[name]]:
        print(f"{out} held an evaluation with other settings ({', '.join(changed)}): this one replaces it")
    chosen_by = dict(pair.split("=", 1) for pair in args.chosen_by)
    models, completions = {}, []
    for name, folder in tqdm(folders.items(), unit="model", dynamic_ncols=True):
        # A model is sampled once: it is read again while settings, folder and weights are the same as they were.
        part = out / "models" / f"{name}.json"
        key = {**settings, "folder": os.path.realpath(folder)}
        key["files"] = [os.path.getmtime(spec) for spec in args.tasks if os.path.exists(spec)]
        key["weights"] = max((path.stat().st_mtime for path in Path(folder).glob("*.safetensors")), default=0)
        if (saved := read_json(part)).get("key") != key:
            saved = {"key": key, "seconds": 0.0, "sampled": {}}
        if "domains" in saved:
            tqdm.write(f"{name}: scored before, read from {part}")
        else:
            model, tokenizer, eos_ids, pad_id = load_model(folder, device)
            context = getattr(model.config, "max_position_embeddings", None) or math.inf
            longest = int(min(args.max_prompt_length, context - args.max_completion_length))
            tasks = load_prompts(args.tasks, tokenizer, longest, args, args.limit or None, args.seed)
            start = time.perf_counter() - saved["seconds"]
            domains, rows = evaluate(
                model.to(dtype), tasks, tokenizer, samples=args.k, temperature=args.temperature,
                top_p=args.top_p, top_k=args.top_k, max_completion_length=args.max_completion_length,
                seed=args.seed, eos_ids=eos_ids, pad_id=pad_id, slots=args.slots, sampled=saved["sampled"],
                save=partial(save_sampled, part, saved, start),
                draw_completions=sample if args.sampler == "fast" and cache_fits(model) else sample_hf,
            )  # fmt: skip
            saved = {"key": key, "domains": domains, "seconds": time.perf_counter() - start, "samples": rows}
            write_json(part, saved)
            scores = "  ".join(f"{domain} {score(result):.1f}" for domain, result in domains.items())
            tqdm.write(f"{name}: {scores}  ({saved['seconds']:.0f} s)")
        cost = run_cost(folder)
        if name in chosen_by:
            cost["chosen_by"] = choice_cost(chosen_by[name], cost.get("parameters", 0))
        models[name] = {"domains": saved["domains"], "cost": cost, "seconds": saved["seconds"]}
        models[name]["curves"] = training_curves(folder)
        completions += [{"model": name, **row} for row in saved["samples"]]
    settings |= {"models": args.models, "chosen_by": args.chosen_by}
    write_json(out / "eval.json", {"settings": settings, "models": models})
    (out / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in completions))
    (out / "eval.md").write_text(text := report(settings, models))
    if len(models) > 1:
        draw_pictures(models, out)
    print(f"\n{text}\nWritten to {out}: eval.md, eval.json (every count), samples.jsonl (read some), *.png")


if __name__ == "__main__":
    run(main)
