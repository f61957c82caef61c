"""Merge experts into one model by arithmetic on their weights: no training, no GPU, one pass over the files.

An expert is the base plus what its training added, the task vector tau_i = theta_i - theta_base. A method folds the task
vectors into one, which goes back on the base:

    theta = theta_base + scale * merged(tau_1, ..., tau_E)

    linear           merged = sum_i w_i tau_i / sum_i w_i        at scale 1 the mean of the experts (model soup)
    task_arithmetic  merged = sum_i w_i tau_i                    every update in full, scaled down by --scale
    ties             each tau_i trimmed to its largest entries, a sign elected, the mean of those that agree
    dare_ties        the same with entries dropped at random, the others scaled up, in place of the trimming

Everything is computed in float32, whatever the files hold, and one tensor at a time: memory is about (experts + 3) times
the largest tensor, however deep the model. Left out of the paper (arXiv 2608.27409): sce, and merging LoRA adapters.

    python merge.py                                    the speedrun's experts on tiny/base, seconds on one core
    python merge.py --base tiny/base --experts runs/math runs/code --method ties --density 0.2 --out runs/merged
    python merge.py --experts runs/math runs/code --scale 0.4 0.6 0.8 1.0 --out runs/merge-{scale}
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm
from transformers.hf_argparser import HfArg

from eval import model_folder, parse_args, peak_gb, run_cost, stop, write_json

# Letters are dimensions only: E experts, n entries of one tensor.


@dataclass
class Args:
    # fmt: off
    base: str = HfArg(default="tiny/base", help="folder or hub id of the model that every expert started from")
    experts: list[str] = HfArg(default_factory=list, help="folders or hub ids of the experts; empty: runs/speedrun/{math,code,science,instruction}")
    method: Literal["linear", "task_arithmetic", "ties", "dare_ties"] = HfArg(default="task_arithmetic", help="how the task vectors become one. ties trims within each tensor, as mergekit does; its paper trims over all parameters at once")
    weights: list[float] = HfArg(default_factory=list, help="one weight an expert, in the order of --experts; empty: 1 each")
    scale: list[float] = HfArg(default_factory=list, help="lambda, the factor on the merged task vector; several values make several merges in one pass, with {scale} in --out. Empty: 0.6 for task_arithmetic (arXiv 2608.27409; 0.3 to 1 are usual), else 1. Lower it when answers grow long or lose their form")
    density: float | None = HfArg(default=None, help="share of each task vector's entries that is kept. Empty: 0.2 for ties (arXiv 2306.01708), 0.8 for dare_ties (arXiv 2608.27409); the other methods keep all")
    seed: int = HfArg(default=0, help="seed of dare_ties' drops; the same seed drops the same entries")
    out: str = HfArg(default="", help="folder of the merged model; {scale} in it stands for the scale. Empty: runs/merge-<time>")
    overwrite: bool = HfArg(default=False, help="replace an earlier merge in --out, once the new one is complete")
    dtype: Literal["float32", "bfloat16", "float16"] = HfArg(default="float32", help="of the files written; the arithmetic is float32")
    shard_size: float = HfArg(default=5.0, help="GB a weights file at the most; a larger tensor gets a file of its own")
    ignore_tokenizer: bool = HfArg(default=False, help="merge experts whose tokenizer or chat template differs from the base's; the merge gets the base's")
    # fmt: on

    def __post_init__(self):
        if not self.experts:
            self.experts = [f"runs/speedrun/{domain}" for domain in ("math", "code", "science", "instruction")]
            if missing := [expert for expert in self.experts if not os.path.isdir(expert)]:
                stop(f"{missing[0]} does not exist: `bash speedrun.sh` makes it, or name others: --experts DIR DIR ...")
        paths = [os.path.realpath(name) for name in (self.base, *self.experts)]
        if twice := [name for place, name in enumerate(self.experts, 1) if paths[place] in paths[:place]]:
            stop(f"{twice[0]} is named twice: the base is no expert, and an expert counts more by --weights")
        _, usual_scale, usual_density = METHODS[self.method]
        if self.density is not None and usual_density is None:
            stop(f"--density has no effect on --method {self.method}: leave it out, or choose ties or dare_ties")
        self.density = usual_density if self.density is None else self.density
        self.scale, self.weights = self.scale or [usual_scale], self.weights or [1.0] * len(self.experts)
        if self.density is not None and not 0 < self.density <= 1:
            stop(f"--density is a share, above 0 and up to 1, not {self.density}")
        if len(self.weights) != len(self.experts) or not all(map(math.isfinite, self.weights + self.scale)):
            stop(f"--weights takes {len(self.experts)} finite numbers, one an expert, and --scale finite numbers")
        if self.method != "task_arithmetic" and (min(self.weights) < 0 or sum(self.weights) == 0):
            stop(f"--method {self.method} takes a mean: its --weights must be 0 or more, and not all 0")
        if self.seed < 0 or not self.shard_size > 0:
            stop("--seed must be 0 or more, and --shard_size above 0")
        self.out = self.out or f"runs/merge-{time.strftime('%Y%m%d-%H%M%S')}" + "-{scale}" * (len(self.scale) > 1)
        if len({self.out.replace("{scale}", str(scale)) for scale in self.scale}) < len(self.scale):
            stop("each --scale makes a model: give different values, and write {scale} in --out: runs/merge-{scale}")


# -------------------------------------------------------------------------------------------------------- maths
# Each function takes one tensor's task vectors, flattened: E of (n,) float32, and leaves them as they are.


def blocks(*tensors, size=1 << 16):
    """Views of the same `size` entries of each tensor at a time: what a block needs stays in the processor's cache."""
    return zip(*(tensor.split(size) for tensor in tensors))


def task_arithmetic(task_vectors, weights):
    """sum_i w_i tau_i (arXiv 2212.04089). Usual: weights 1, scale 0.3 to 1; a negative weight unlearns.

    >>> task_arithmetic([torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])], [1.0, 0.5])  # 1 + 1.5, 2 - 1
    tensor([2.5000, 1.0000])
    """
    merged = torch.zeros_like(task_vectors[0])
    for weight, tau in zip(weights, task_vectors):
        merged.add_(tau, alpha=weight)
    return merged


def linear(task_vectors, weights):
    """sum_i w_i tau_i / sum_i w_i, so that at scale 1 theta is the experts' weighted mean (arXiv 2203.05482).

    >>> linear([torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])], [1.0, 3.0])  # (1 + 9)/4, (2 - 6)/4
    tensor([ 2.5000, -1.0000])
    """
    return task_arithmetic(task_vectors, [weight / sum(weights) for weight in weights])


def magnitude_threshold(tau, density):
    """Magnitude of the k-th largest entry of tau (n,), with k = round(density * n) but at least 1.

    Selection without sorting: for numbers of one sign the order of floats is the order of their bits, so counting the
    upper 16 bits finds the narrow range that holds the k-th, and only that range is partitioned.

    >>> magnitude_threshold(torch.tensor([4.0, -3.0, 1.0, 0.5]), density=0.5)
    3.0
    """
    k = max(1, round(density * len(tau)))
    counts = np.zeros(1 << 15, np.int64)
    for (block,) in blocks(tau):
        counts += np.bincount(block.abs().numpy().view(np.int32) >> 16, minlength=1 << 15)
    at_least = counts[::-1].cumsum()[::-1]  # entries in this range or a larger one
    place = int((at_least >= k).nonzero()[0][-1])
    magnitudes = (block.abs().numpy() for (block,) in blocks(tau))
    inside = np.concatenate([block[block.view(np.int32) >> 16 == place] for block in magnitudes])
    rank = at_least[place] - k  # the k-th largest of all is the rank-th smallest of these
    return float(np.partition(inside, rank)[rank])


def elect(task_vectors, weights):
    """Sign election and disjoint mean of TIES: sign = sgn(sum_i w_i tau_i), then the weighted mean of the entries that
    have this sign. Entries that are 0 have no vote and do not count in the mean; where the sum is 0, so is the result.

    >>> elect([torch.tensor([4.0, -3.0, 2.0]), torch.tensor([0.0, 5.0, -2.0])], [1.0, 1.0])
    tensor([4., 5., 0.])
    """
    sign = sum(weight * tau for weight, tau in zip(weights, task_vectors)).sign()
    agreeing = [(tau * sign).relu_() for tau in task_vectors]
    total = sum(weight * size for weight, size in zip(weights, agreeing))
    count = sum(weight * (size > 0) for weight, size in zip(weights, agreeing))
    return torch.where(count > 0, sign * total / count, 0.0)


def ties(task_vectors, weights, density):
    """Trim, elect, merge (arXiv 2306.01708). Usual: density 0.2, scale 1.

    Trimming keeps the k = round(density * n) entries of largest magnitude of this tensor; all that are as large as the
    k-th stay, because nothing tells them apart (task vectors of bfloat16 experts hold many equal entries).

    >>> tau = torch.tensor([[4, -3, 1, 0.5], [-1, -5, 2, 3], [-2, 6, 1, -7]])
    >>> ties(list(tau), [1, 1, 1], density=0.5)  # trimmed: [4 -3 0 0] [0 -5 0 3] [0 6 0 -7]; signs + - 0 -
    tensor([ 4., -4.,  0., -7.])
    """
    thresholds = [magnitude_threshold(tau, density) for tau in task_vectors]
    merged = torch.empty_like(task_vectors[0])
    for out, *taus in blocks(merged, *task_vectors):
        trimmed = [torch.where(tau.abs() >= least, tau, 0.0) for tau, least in zip(taus, thresholds)]
        out.copy_(elect(trimmed, weights))
    return merged


def dare(tau, density, generator):
    """tau * Bernoulli(density) / density: its expectation is tau (arXiv 2311.03099, where p = 1 - density).

    >>> dare(torch.ones(4), 0.5, np.random.default_rng(0))  # the uniforms are 0.85 0.64 0.51 0.27
    tensor([0., 0., 0., 2.])
    """
    keep = torch.from_numpy(generator.random(len(tau), dtype=np.float32) < density)
    return tau * keep / density


def dare_ties(task_vectors, weights, density, seed):
    """DARE, then TIES' election and mean. Usual: density 0.8 in the fusion paper, 0.1 to 0.5 elsewhere; scale 1.

    `seed` is a list of integers, of the run and the tensor; the expert's place is added, so that each has its own drops.

    >>> dare_ties([torch.tensor([3.0, -1.0])], [1.0], density=1.0, seed=[0])  # nothing dropped, one voter
    tensor([ 3., -1.])
    """
    generators = [np.random.default_rng([*seed, place]) for place in range(len(task_vectors))]
    merged = torch.empty_like(task_vectors[0])
    for out, *taus in blocks(merged, *task_vectors):
        out.copy_(elect([dare(tau, density, generator) for tau, generator in zip(taus, generators)], weights))
    return merged


# method: its function, usual scale and usual density (None: it keeps every entry)
METHODS = {
    "linear": (linear, 1.0, None),
    "task_arithmetic": (task_arithmetic, 0.6, None),
    "ties": (ties, 1.0, 0.2),
    "dare_ties": (dare_ties, 1.0, 0.8),
}


# -------------------------------------------------------------------------------------------------- model files

# The float types that are merged, as safetensors spells them; tensors of another type must equal the base's.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class MergeError(ValueError):
    """Values that cannot be merged, or not be written; main ends with its one line."""


class Stored(NamedTuple):
    """Where a tensor lies, and what it is; its values stay in the file."""

    path: Path
    name: str
    dtype: str
    shape: list

    def read(self):
        """The tensor, flat. A file is opened for one tensor at a time: mapped pages would pile up to the whole model."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name).reshape(-1)

    def floats(self):
        """Its values, (n,) float32."""
        values = self.read().float()
        if not all(map(math.isfinite, values.aminmax())):
            raise MergeError(
                f"{self.path}: {self.name} holds NaN or infinite values: nothing sound can be merged from it"
            )
        return values


def read_json(path):
    """A JSON object; {} where there is no such file."""
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        stop(f"{path} is not JSON: fetch or save it again")


def stored_tensors(folder):
    """{name: Stored} of a model's safetensors files, sharded or not, in the order of the files."""
    folder, tensors, files = Path(folder), {}, ["model.safetensors"]
    if not (folder / files[0]).exists():
        files = sorted(set(read_json(folder / f"{files[0]}.index.json").get("weight_map", {}).values()))
    if not files:
        pickles = "only .bin weights: convert them with from_pretrained and save_pretrained"
        stop(f"{folder} holds {pickles if any(folder.glob('*.bin')) else 'no model.safetensors and no index of them'}")
    for path in (folder / name for name in files):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    entry = file.get_slice(name)
                    tensors[name] = Stored(path, name, entry.get_dtype(), entry.get_shape())
        except (OSError, SafetensorError) as error:
            stop(f"{path} is missing or broken, fetch or save it again: {error}")
    # Tied embeddings are one tensor, which some files store twice; merged by chance, the copies would drift apart.
    if read_json(folder / "config.json").get("tie_word_embeddings") is not False:
        for head in [t for name, t in tensors.items() if name.endswith(("lm_head.weight", "embed_out.weight"))]:
            if any(head[2:] == t[2:] and head != t and torch.equal(head.read(), t.read()) for t in tensors.values()):
                del tensors[head.name]
    return tensors


def text_files(folder):
    """{file: content} of what decides on the tokens of a text: the vocabulary, and the chat template."""
    folder, content = Path(folder), read_json(Path(folder) / "tokenizer.json")
    names = ("chat_template.jinja", *(() if content else ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")))
    found = {name: (folder / name).read_text(errors="replace") for name in names if (folder / name).exists()}
    if in_config := read_json(folder / "tokenizer_config.json").get("chat_template"):  # where older versions kept it
        found.setdefault("chat_template.jinja", in_config)
    if content:  # trainers leave their truncation and padding in it, and newer versions write merges as pairs
        merges = [m.split(" ") if isinstance(m, str) else m for m in content["model"].get("merges") or []]
        found["tokenizer.json"] = content | dict(truncation=0, padding=0, model=content["model"] | {"merges": merges})
    return found


def check_expert(args, expert, folder, base_folder, base):
    """Stop where an expert cannot be the base plus a task vector -> its stored tensors; `base`: those of the base."""
    tensors = stored_tensors(folder)
    if missing := [name for name in base if name not in tensors]:
        stop(f"{expert} lacks {missing[0]} ({len(missing)} of the base's tensors in all): is it a whole model?")
    for name, tensor in tensors.items():
        if name not in base:
            stop(f"{tensor.path}: {name} is not in the base {args.base}: the expert is another model")
        kinds = [(t.shape, "float" if t.dtype in FLOATS else t.dtype) for t in (tensor, base[name])]
        if kinds[0] != kinds[1]:
            stop(f"{tensor.path}: {name} is {kinds[0][0]} {kinds[0][1]}, in the base {kinds[1][0]} {kinds[1][1]}")
    ours, theirs = read_json(Path(base_folder) / "config.json"), read_json(Path(folder) / "config.json")
    for key in ("model_type", "num_attention_heads", "num_key_value_heads", "rope_theta"):
        if key in ours.keys() & theirs.keys() and ours[key] != theirs[key]:
            stop(f"{expert}/config.json: {key} is {theirs[key]}, in the base {ours[key]}: not the same model")
    start = read_json(Path(folder) / "args.json").get("model", args.base)  # a run folder names what it started from
    if os.path.isdir(start) and os.path.realpath(start) != os.path.realpath(base_folder):
        stop(f"{expert} was trained from {start}, not from {args.base}: give --base {start}")
    ours, theirs = text_files(base_folder), text_files(folder)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name) and not args.ignore_tokenizer:
            stop(f"{expert}: its {name} is not the base's, so it reads other tokens (--ignore_tokenizer: merge anyway)")
    return tensors


# --------------------------------------------------------------------------------------------------- run folder


def check_out(out, overwrite):
    """Stop where `out` holds anything but an earlier merge that may be replaced."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        merged = {"experts", "method"} <= read_json(out / "args.json").keys()
        if not (merged and overwrite):
            advice = ", or give --overwrite" if merged else " (no merge made it, so it stays as it is)"
            stop(f"--out {out} is not empty: choose another folder{advice}")


def plan_shards(tensors, dtype, shard_bytes):
    """The header of each file of the merge, {name: dtype, shape, place of its bytes}: known before any value is.

    >>> [list(header) for header in plan_shards([Stored("", n, "F32", [2]) for n in "abc"], torch.float32, 16)]
    [['a', 'b'], ['c']]
    """
    code = next(code for code in FLOATS if FLOATS[code] == dtype)
    plan = [(t.name, code if t.dtype in FLOATS else t.dtype, t.shape) for t in tensors]
    width = {code: int("".join(filter(str.isdigit, code)) or 8) // 8 for _, code, _ in plan}  # bytes: BF16 2, BOOL 1
    shards, end = [], math.inf
    for name, code, shape in sorted(plan, key=lambda entry: -width[entry[1]]):  # wide ones first: all are aligned
        size = width[code] * math.prod(shape)
        if end + size > shard_bytes:
            shards, end = shards + [{}], 0
        shards[-1][name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return shards


def carry_over(base_folder, out, dtype):
    """Copy the base's config (with the dtype of the files written), generation settings, tokenizer and own code."""
    names = ("generation_config", "tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
    for path in Path(base_folder).iterdir():
        if path.name.startswith(names) or path.suffix in (".model", ".py"):
            shutil.copyfile(path, out / path.name)
    cast = {"dtype": dtype, "torch_dtype": dtype}
    config = (Path(base_folder) / "config.json").read_text()
    config = json.loads(config, object_hook=lambda level: {key: cast.get(key, level[key]) for key in level})
    write_json(out / "config.json", {**config, "dtype": dtype})


def put_in_place(partial, out):
    """Rename a finished folder to its name; an earlier merge is moved aside first, and deleted after."""
    for path in partial.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    replaced = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if out.exists():
        os.rename(out, replaced)
    os.rename(partial, out)
    shutil.rmtree(replaced, ignore_errors=True)


def main():
    start = time.perf_counter()
    args = parse_args(Args, __doc__)
    base_folder, folders = model_folder(args.base), [model_folder(expert) for expert in args.experts]
    outs = [Path(args.out.replace("{scale}", str(scale))) for scale in args.scale]
    for out in outs:
        check_out(out, args.overwrite)
    base = stored_tensors(base_folder)
    experts = [check_expert(args, name, folder, base_folder, base) for name, folder in zip(args.experts, folders)]

    dtype = getattr(torch, args.dtype)
    shards = plan_shards(base.values(), dtype, args.shard_size * 1e9)
    file_names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    file_names = file_names if len(shards) > 1 else ["model.safetensors"]
    total = sum(max(entry["data_offsets"][1] for entry in shard.values()) for shard in shards)
    partials = [out.with_name(f".{out.name}.partial") for out in outs]
    base_square, tau_squares = 0.0, np.zeros(len(experts))
    to_read = sum(path.stat().st_size for path in {t.path for tensors in (base, *experts) for t in tensors.values()})
    progress = tqdm(total=to_read, unit="B", unit_scale=True, dynamic_ncols=True, desc=args.method)
    try:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)  # of a merge that was killed
            partial.mkdir(parents=True)
        for file_name, shard in zip(file_names, shards):
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(open(partial / file_name, "wb")) for partial in partials]
                header = json.dumps({"__metadata__": {"format": "pt"}, **shard}).encode()
                header += b" " * (-len(header) % 8)
                for file in files:
                    file.write(len(header).to_bytes(8, "little") + header)
                for name, entry in shard.items():
                    size = entry["data_offsets"][1] - entry["data_offsets"][0]
                    others = [tensors[name] for tensors in experts]
                    if base[name].dtype in FLOATS and size:
                        theta = base[name].floats()  # (n,)
                        task_vectors = [other.floats() - theta for other in others]  # E of (n,)
                        how = {} if args.density is None else {"density": args.density}
                        if args.method == "dare_ties":  # drops depend on the tensor's name, not on the order of tensors
                            how["seed"] = [args.seed, *name.encode()]
                        merged = METHODS[args.method][0](task_vectors, args.weights, **how)  # (n,)
                        base_square += float(theta.dot(theta))
                        tau_squares += [float(tau.dot(tau)) for tau in task_vectors]
                        del task_vectors
                        for scale, file in zip(args.scale, files):
                            # theta = theta_base + scale * merged
                            values = theta.add(merged, alpha=scale).to(dtype)
                            if not all(map(math.isfinite, values.aminmax())):
                                raise MergeError(
                                    f"{name}: {args.dtype} cannot hold the merge at scale {scale}: lower --scale"
                                )
                            file.write(values.view(torch.uint8).numpy())
                    else:  # counters and masks have no mean
                        content = base[name].read()
                        for other in others:
                            if not torch.equal(other.read(), content):
                                raise MergeError(f"{other.path}: {name} ({other.dtype}) differs from the base's")
                        for file in files:
                            file.write(content.view(torch.uint8).numpy())
                    progress.update(to_read * size // total)
        progress.close()

        seconds = time.perf_counter() - start  # of the whole pass, however many scales shared it
        cost = dict.fromkeys(("tokens_sampled", "tokens_trained", "tokens_scored", "teacher_tokens"), 0)
        cost |= {"seconds": {"merge": seconds, "total": seconds}, "peak_memory_gb": peak_gb(torch.device("cpu"))}
        cost |= {"parameters": sum(math.prod(tensor.shape) for tensor in base.values()), "device": "cpu"}
        cost |= {"reused": {expert: run_cost(folder) or None for expert, folder in zip(args.experts, folders)}}
        weight_map = {name: file_name for file_name, shard in zip(file_names, shards) for name in shard}
        for scale, out, partial in zip(args.scale, outs, partials):
            if len(shards) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                write_json(partial / "model.safetensors.index.json", index)
            write_json(partial / "args.json", {**dataclasses.asdict(args), "scale": [scale], "out": str(out)})
            write_json(partial / "cost.json", cost)
            carry_over(base_folder, partial, args.dtype)
            put_in_place(partial, out)
    except (MergeError, OSError) as error:  # a full disk, for one
        progress.close()
        stop(error)
    finally:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)

    for expert, tensors, square in zip(args.experts, experts, tau_squares):
        note = f"{expert}: its task vector has {math.sqrt(square / (base_square or 1)):.2g} times the norm of the base"
        if square == 0:  # no error: training may have changed nothing, and a comparison should say so
            note += "; it equals the base, so it adds nothing (and dilutes the others in linear)"
        if any(base[name].dtype == "F32" and tensors[name].dtype in ("F16", "BF16") for name in base):
            note += "; it is stored in 16 bits and the base in 32, so that rounding is a part of it"
        print(note)
    names = [f"merge-{args.method}" + f"-{scale}" * (len(outs) > 1) for scale in args.scale]
    print(
        f"Merged {len(experts)} experts by {args.method} in {seconds:.1f} s: {', '.join(map(str, outs))}"
        f"\nNext: python eval.py --models base={args.base} {' '.join(f'{n}={out}' for n, out in zip(names, outs))}"
    )


if __name__ == "__main__":
    main()
