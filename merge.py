"""Merge experts into one model by arithmetic on their weights: no training, no GPU, no model in memory.

An expert is the base plus what its training added, the task vector tau_i = theta_i - theta_base. A method folds the task
vectors into one, which goes back on the base:

    theta = theta_base + scale * merged(tau_1, ..., tau_E)

Most methods first drop entries of each task vector (trim, dare, magprune, ...) and then combine what is left, by a
weighted sum or by electing a sign for each entry: the table METHODS spells out each of them in one line.

Everything is computed in float32, whatever the files hold, and a block of some rows at a time, straight from the files of
the experts to those of the merge: memory does not grow with the model. LoRA adapters are merged like whole experts.
--geometry describes how the task vectors lie to each other; without --method it does only that.

    python merge.py                                    the speedrun's experts on tiny/base, seconds on one core
    python merge.py --base tiny/base --experts runs/math runs/code --method ties --density 0.2 --out runs/merged
    python merge.py --experts runs/math runs/code --scale 0.4 0.6 0.8 1.0 --out runs/merge-{scale}
    python merge.py --experts runs/math runs/code --geometry --out runs/geometry
"""

import contextlib
import dataclasses
import json
import math
import mmap
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers.hf_argparser import HfArg

from eval import model_folder, parse_args, peak_gb, run_cost, stop, write_json

# Letters are dimensions only: E experts, n entries of one tensor or of a block of it.
BLOCK = 1 << 16  # entries at a time: a block of every expert stays in the processor's cache


@dataclass
class Args:
    # fmt: off
    base: str = HfArg(default="tiny/base", help="folder or hub id of the model that every expert started from")
    experts: list[str] = HfArg(default_factory=list, help="folders or hub ids of the experts, whole models or LoRA adapters; empty: runs/speedrun/{math,code,science,instruction}")
    method: str = HfArg(default="", help="how the task vectors become one: linear, task_arithmetic, ties, dare_linear, dare_ties, della, della_linear, breadcrumbs, breadcrumbs_ties, sce, ram, model_stock, slerp (two experts), or lora_concat (adapters become one adapter). Empty: task_arithmetic, or none with --geometry")
    weights: list[float] = HfArg(default_factory=list, help="one weight an expert, in the order of --experts; empty: 1 each")
    scale: list[float] = HfArg(default_factory=list, help="lambda, the factor on the merged task vector; several values make several merges in one pass, with {scale} in --out. Empty: 0.6 where task vectors are summed (arXiv 2608.27409; 0.3 to 1 are usual), 1 where they are averaged. Lower it when answers grow long or lose their form")
    density: float | None = HfArg(default=None, help="share of each task vector's entries that is kept. Empty: 0.2 for ties (arXiv 2306.01708), 0.8 for dare (arXiv 2608.27409), 0.5 for della, 0.9 for breadcrumbs (mergekit's manual)")
    epsilon: float | None = HfArg(default=None, help="della: the smallest entry of a row is kept with probability density - epsilon, the largest with density + epsilon. Empty: 0.15 (mergekit's)")
    gamma: float | None = HfArg(default=None, help="breadcrumbs: share of the entries that is cut as outliers, from the largest down. Empty: 0.01 (mergekit's; arXiv 2312.06795 uses 0.007)")
    select_topk: float | None = HfArg(default=None, help="sce: share of the entries that is merged, those that vary most between experts. Empty: 1, all (arXiv 2602.12566; arXiv 2408.07990 selects 0.1)")
    threshold: float = HfArg(default=1e-5, help="magnitude from which on ram and --geometry take an entry as changed. arXiv 2601.13572 uses 1e-5")
    trim: Literal["tensor", "global"] = HfArg(default="tensor", help="ties and breadcrumbs keep --density of each tensor (as mergekit does) or of all parameters together (as arXiv 2306.01708 does; two more passes over the files)")
    seed: int = HfArg(default=0, help="seed of the drops of dare and della; the same seed drops the same entries")
    out: str = HfArg(default="", help="folder of the merged model; {scale} in it stands for the scale. Empty: runs/merge-<time>")
    overwrite: bool = HfArg(default=False, help="replace an earlier merge in --out, once the new one is complete")
    dtype: Literal["float32", "bfloat16", "float16"] = HfArg(default="float32", help="of the files written; the arithmetic is float32")
    shard_size: float = HfArg(default=5.0, help="GB a weights file at the most; a larger tensor gets a file of its own")
    ignore_tokenizer: bool = HfArg(default=False, help="merge experts whose tokenizer or chat template differs from the base's; the merge gets the base's")
    geometry: bool = HfArg(default=False, help="write geometry.json (and geometry.png where matplotlib is installed) to --out: angles, norms, sparsity and overlap of the task vectors. Without --method it does only that")
    rank: int = HfArg(default=8, help="--geometry: leading directions of each matrix that are compared. 0: no singular values, which are the slow part of large models")
    # fmt: on

    def __post_init__(self):
        if not self.experts:
            self.experts = [f"runs/speedrun/{domain}" for domain in ("math", "code", "science", "instruction")]
            if missing := [expert for expert in self.experts if not os.path.isdir(expert)]:
                stop(f"{missing[0]} does not exist: `bash speedrun.sh` makes it, or name others: --experts DIR DIR ...")
        paths = [os.path.realpath(name) for name in (self.base, *self.experts)]
        if twice := [name for place, name in enumerate(self.experts, 1) if paths[place] in paths[:place]]:
            stop(f"{twice[0]} is named twice: the base is no expert, and an expert counts more by --weights")
        self.method = self.method or ("" if self.geometry else "task_arithmetic")
        if self.method not in ("", *METHODS):
            stop(f"there is no --method {self.method}: choose from {', '.join(METHODS)}")
        _, usual_scale, usual, measure = METHODS.get(self.method, (None, MEAN, {}, None))
        for flag in ("density", "epsilon", "gamma", "select_topk"):
            if getattr(self, flag) is None:
                setattr(self, flag, usual.get(flag))
            elif flag not in usual:
                users = ", ".join(name for name in METHODS if flag in METHODS[name][2])
                stop(f"--{flag} has no effect on --method {self.method or 'none'}: leave it out, or choose {users}")
            elif not 0 < getattr(self, flag) <= 1:
                stop(f"--{flag} is a share, above 0 and up to 1, not {getattr(self, flag)}")
        if self.density and (self.density <= (self.epsilon or 0) or self.density + (self.epsilon or self.gamma or 0) > 1):
            stop(f"--density {self.density} leaves no room below it for --epsilon, or above for --epsilon or --gamma")
        if self.method == "slerp" and len(self.experts) != 2 or self.method == "model_stock" and len(self.experts) < 2:
            stop(f"--method {self.method} takes two {'' if self.method == 'slerp' else 'or more '}experts")
        if self.weights and self.method in ("", "sce", "ram", "model_stock"):
            stop(f"--weights has no effect on --method {self.method or 'none'}: leave it out")
        if self.trim == "global" and measure is not limits:
            stop(f"--trim has no effect on --method {self.method or 'none'}: leave it out, or choose ties or breadcrumbs")
        self.scale, self.weights = self.scale or [usual_scale], self.weights or [1.0] * len(self.experts)
        if len(self.weights) != len(self.experts) or not all(map(math.isfinite, self.weights + self.scale)):
            stop(f"--weights takes {len(self.experts)} finite numbers, one an expert, and --scale finite numbers")
        if usual_scale == MEAN and (min(self.weights) < 0 or sum(self.weights) == 0):
            stop(f"--method {self.method} takes a mean: its --weights must be 0 or more, and not all 0")
        if self.seed < 0 or self.rank < 0 or not self.shard_size > 0 or not self.threshold > 0:
            stop("--seed and --rank must be 0 or more, --shard_size and --threshold above 0")
        self.out = self.out or f"runs/merge-{time.strftime('%Y%m%d-%H%M%S')}" + "-{scale}" * (len(self.scale) > 1)
        if len({self.out.replace("{scale}", str(scale)) for scale in self.scale}) < len(self.scale):
            stop("each --scale makes a model: give different values, and write {scale} in --out: runs/merge-{scale}")


# -------------------------------------------------------------------------------------------- maths: what is dropped
# Each function takes the task vectors of one tensor, or of a block of it, and leaves them as they are: taus (E, n) float32.
# What is dropped is multiplied by 0, so that a NaN or an infinite value stays visible.


def trim(taus, low, high=math.inf):
    """Keep the entries of magnitude low <= |tau| < high; limits: one number for all, or (E, 1), one an expert.

    Equal magnitudes are kept or dropped together, because nothing tells them apart (the task vectors of bfloat16 experts
    hold many); mergekit picks among those as large as the limit, so that the count comes out exact.

    >>> trim(torch.tensor([[4.0, -3.0, 1.0, 0.5]]), low=1.0, high=4.0)
    tensor([[ 0., -3.,  1.,  0.]])
    """
    sizes = taus.abs().numpy()
    return torch.from_numpy(taus.numpy() * ((sizes >= low) & (sizes < high)))


def coins(draws, n):
    """(E, n) numbers from 0 to 65535, all equally likely: 16 random bits an entry, from each expert's own generator."""
    return np.stack([generator.random_raw(-(-n // 4)).view(np.uint16)[:n] for generator in draws])


def dare(taus, density, draws):
    """tau * Bernoulli(density) / density: its expectation is tau (arXiv 2311.03099, where p = 1 - density).

    Density counts in steps of 1/65536, and what is kept grows by just its inverse. mergekit rescales to the L1 norm that the
    tensor had: nearly the same factor where n is large, another where few entries hold the norm.

    >>> dare(torch.ones(1, 4), 0.6, [np.random.PCG64(0)])  # the coins are 33375 55746 60367 41743, below 39322 is kept
    tensor([[1.6666, 0.0000, 0.0000, 0.0000]])
    """
    below = max(1, round(density * 65536))
    keep = coins(draws, taus.shape[1]) < below
    return torch.from_numpy(taus.numpy() * keep).mul_(65536 / below)


def magprune(taus, density, epsilon, columns, draws):
    """DELLA's drop (arXiv 2406.11617): the larger an entry within its row, the likelier it stays.

    keep = density - epsilon + 2 epsilon * rank / (columns - 1) with rank 0 for the smallest; what stays is divided by keep,
    so that the expectation is tau. A tensor of one dimension is one row. mergekit has the same probabilities, but rescales
    to the L1 norm, and fails on rows of one entry (they are kept with probability density here).

    >>> magprune(torch.tensor([[2.0, -1.0, 5.0, 6.0]]), 0.6, 0.3, 4, [np.random.PCG64(0)])  # keep: 0.5 0.3 0.7 0.9
    tensor([[0.0000, -0.0000, 0.0000, 6.6667]])
    """
    rows = taus.abs().view(len(taus), -1, columns)
    rank = rows.argsort(dim=-1, stable=True).argsort(dim=-1).float() / max(1, columns - 1) if columns > 1 else rows * 0 + 0.5
    keep = (density - epsilon + 2 * epsilon * rank).view(taus.shape)
    kept = torch.from_numpy(coins(draws, taus.shape[1]).astype(np.float32)) < keep * 65536
    return taus * kept / keep


def spread(taus):
    """Variance of each entry over the experts, (n,), by which SCE selects.

    >>> spread(torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    tensor([1., 0.])
    """
    share = torch.full((len(taus),), 1 / len(taus))
    return share @ (taus - share @ taus).square_()


# ------------------------------------------------------------------------------------- maths: how the rest is combined


def elect(taus, weights, votes=None):
    """Sign election and disjoint mean of TIES: sign = sgn(sum_i w_i tau_i), then the weighted mean of the entries that
    have this sign. Entries that are 0 have no vote and do not count in the mean; where the sum is 0, so is the result
    (mergekit then takes the positive side). `votes` are the weights of the election, where they are others.

    >>> elect(torch.tensor([[4.0, -3.0, 2.0], [0.0, 5.0, -2.0]]), torch.ones(2))
    tensor([4., 5., 0.])
    """
    sign = ((weights if votes is None else votes) @ taus).sign_()
    agreeing = (taus * sign).relu_()
    total = weights @ agreeing
    count = weights @ agreeing.sign_()
    return sign * total.div_(count.clamp_(min=1e-30))


def linear(taus, weights):
    """sum_i w_i tau_i / sum_i w_i, so that at scale 1 theta is the experts' weighted mean (arXiv 2203.05482).

    >>> linear(torch.tensor([[1.0, 2.0], [3.0, -2.0]]), torch.tensor([1.0, 3.0]))  # (1 + 9)/4, (2 - 6)/4
    tensor([ 2.5000, -1.0000])
    """
    return weights / weights.sum() @ taus


def ram(taus):
    """Mean over the experts that changed an entry: what one alone changed is kept whole (arXiv 2601.13572).

    >>> ram(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]))
    tensor([2., 0., 2.])
    """
    return taus.sum(0) / (taus != 0).sum(0).clamp_(min=1)


def model_stock(taus, gram):
    """t * mean tau_i, t = E cos / (1 + (E - 1) cos): the point between base and mean that is nearest to the centre on which
    experts of one task scatter (arXiv 2403.19522); cos is the mean cosine of the pairs, from gram (E, E) = tau_i . tau_j.
    Where it is negative, t is 0 here, while mergekit goes beyond the base.

    >>> model_stock(torch.tensor([[1.0, 0.0], [1.0, 3.0 ** 0.5]]), torch.tensor([[1.0, 1.0], [1.0, 4.0]]))  # cos 1/2, t 2/3
    tensor([0.6667, 0.5774])
    """
    norms, experts = gram.diagonal().sqrt().clamp(min=1e-30), len(taus)
    cosine = (gram / norms[:, None] / norms).triu(1).sum() / (experts * (experts - 1) / 2)
    ratio = experts * cosine / (1 + (experts - 1) * cosine)
    return taus.mean(0) * torch.where(cosine > 0, ratio, cosine * 0).float()


def slerp(taus, weights, gram):
    """Two task vectors on the arc from one to the other: (sin((1-t) a) tau_1 + sin(t a) tau_2) / sin a, with a their angle
    and t = w_2 / (w_1 + w_2); norms are kept where a mean shrinks them. Parallel ones are averaged. mergekit turns the
    weights themselves, which for two experts of one base are all but parallel: there it is their mean.

    >>> slerp(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2), torch.eye(2))  # a is 90 degrees: sin 45 / sin 90
    tensor([0.7071, 0.7071])
    """
    share = weights / weights.sum()
    cosine = gram[0, 1] / (gram[0, 0] * gram[1, 1]).sqrt().clamp(min=1e-30)
    angle = cosine.clamp(-1, 1).acos()
    arc = torch.where(cosine.abs() < 0.9995, (share * angle).sin() / angle.sin(), share)
    return arc.float() @ taus


# ------------------------------------------------------------------------------- maths: what is measured of a tensor first


def kth_largest(stream, k):
    """The k-th largest of the numbers >= 0 in the blocks (n,) of stream(1): exact, without sorting, in two passes.

    For numbers of one sign the order of floats is the order of their bits. The upper 16 bits of each 17th entry, from
    stream(17), tell between which bits the k-th lies; then all are counted: those above, and those of each value between.

    >>> kth_largest(lambda every: [torch.tensor([4.0, 3.0])[::every], torch.tensor([1.0, 0.5])[::every]], k=2)
    3.0
    """
    for every in (17, 1):  # the sample may mislead or tell too little
        counts = sum(np.bincount(block.numpy().view(np.int32) >> 16, minlength=1 << 15) for block in stream(every))
        at_least = np.append(every * counts[::-1].cumsum()[::-1], 0)
        slack = 4 * math.sqrt(every * k) * (every > 1)  # four standard deviations of what the sample says
        low, high = (max(0, np.count_nonzero(at_least >= rank) - 1) for rank in (k + slack, k - slack))
        if high - low > 32:
            continue
        start, stop, above, held = low << 16, high + 1 << 16, 0, []
        for block in stream(1):
            bits = block.numpy().view(np.int32)
            above += np.count_nonzero(bits >= stop)
            bits = bits[(bits >= start) & (bits < stop)]
            few = at_least[low] - at_least[high + 1] < 1 << 24  # else only their counts are held
            held.append(bits if few else np.bincount(bits - start, minlength=stop - start))
            held = held if few else [sum(held)]
        held, rank = np.concatenate(held), k - above  # the k-th of all is the rank-th largest of what is between
        if few and 0 < rank <= len(held):
            return float(np.partition(held, len(held) - rank)[len(held) - rank].view(np.float32))
        if not few and 0 < rank <= held.sum():
            return float(np.int32(start + np.count_nonzero(held[::-1].cumsum()[::-1] >= rank) - 1).view(np.float32))


def limits(tensors, how):
    """low, high (E, 1): magnitudes between which `density` of the entries of `tensors` lie, below the `gamma` largest.

    Shares of the n entries are rounded down, as in mergekit.
    """
    n, found = sum(math.prod(base.shape) for base, _ in tensors), {"low": [], "high": []}
    cut, keep = int((how.gamma or 0) * n), max(1, int(how.density * n))
    for expert in range(len(how.experts)):
        stream = partial(magnitudes, tensors, expert)
        found["low"].append([kth_largest(stream, min(n, cut + keep))])
        found["high"].append([kth_largest(stream, cut) if cut else math.inf])
    return {key: np.float32(values) for key, values in found.items()}


def inner_products(tensors, how):
    """gram (E, E): tau_i . tau_j."""
    return {"gram": sum((taus @ taus.T).double() for _, taus in TaskVectors(*tensors[0]).blocks())}


def sce_shares(tensors, how):
    """low: the variance from which on SCE selects; shares (E,): of each expert in the squares of the selected entries.

    mergekit gives equal shares where the mean squares sum to less than 1e-6, as those of experts by RL mostly do.
    """
    blocks, low = TaskVectors(*tensors[0]).blocks, 0.0
    if how.select_topk < 1:
        values = torch.cat([spread(taus) for _, taus in blocks()])
        k = max(1, int(how.select_topk * torch.count_nonzero(values)))
        low = kth_largest(lambda every: (block[::every] for block in values.split(1 << 20)), k)
    squares = sum(((spread(taus) >= low) * taus).square().sum(1).double() for _, taus in blocks())
    return {"low": low, "shares": (squares / squares.sum().clamp(min=1e-300)).float()}


def generators(tensors, how):
    """draws: a generator for each expert, which depends on the seed and the tensor's name, not on order or threads."""
    return {"draws": [np.random.PCG64([how.seed, place, *how.name.encode()]) for place in range(len(how.experts))]}


# A method: its equation, from taus t (E, n), weights w (E,) and how h (flags, and what is measured), to (n,); its usual
# --scale, and other settings; what is measured first. Sums keep every update in full, and --scale tames them (a negative
# weight unlearns, arXiv 2212.04089); elections let experts that disagree on an entry's sign not cancel (arXiv 2306.01708).
SUM, MEAN, DARE, DELLA, CRUMBS = 0.6, 1.0, {"density": 0.8}, {"density": 0.5, "epsilon": 0.15}, {"density": 0.9, "gamma": 0.01}
METHODS = {
    "linear": (lambda t, w, h: linear(t, w), MEAN, {}, None),
    "task_arithmetic": (lambda t, w, h: w @ t, SUM, {}, None),
    "ties": (lambda t, w, h: elect(trim(t, h.low), w), MEAN, {"density": 0.2}, limits),
    "dare_linear": (lambda t, w, h: w @ dare(t, h.density, h.draws), SUM, DARE, generators),
    "dare_ties": (lambda t, w, h: elect(dare(t, h.density, h.draws), w), MEAN, DARE, generators),
    "della_linear": (lambda t, w, h: w @ magprune(t, h.density, h.epsilon, h.columns, h.draws), SUM, DELLA, generators),
    "della": (lambda t, w, h: elect(magprune(t, h.density, h.epsilon, h.columns, h.draws), w), MEAN, DELLA, generators),
    "breadcrumbs": (lambda t, w, h: w @ trim(t, h.low, h.high), SUM, CRUMBS, limits),
    "breadcrumbs_ties": (lambda t, w, h: elect(trim(t, h.low, h.high), w), MEAN, CRUMBS, limits),
    "sce": (lambda t, w, h: elect((spread(t) >= h.low) * t, h.shares, votes=w), MEAN, {"select_topk": 1.0}, sce_shares),
    "ram": (lambda t, w, h: ram(trim(t, h.threshold)), MEAN, {}, None),
    "model_stock": (lambda t, w, h: model_stock(t, h.gram), MEAN, {}, inner_products),
    "slerp": (lambda t, w, h: slerp(t, w, h.gram), MEAN, {}, inner_products),
    "lora_concat": (None, SUM, {}, None),  # task_arithmetic of adapters that stays an adapter: concat_adapters
}  # fmt: skip


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
    place: int  # of its first byte
    size: int  # bytes

    def values(self):
        """The tensor, flat, mapped for as long as it is used: nothing is read before its pages are looked at."""
        if not self.size:
            return torch.empty(0)
        with open(self.path, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype = FLOATS.get(self.dtype, torch.uint8)
        return torch.frombuffer(pages, dtype=dtype, count=self.size // dtype.itemsize, offset=self.place)


class LowRank(NamedTuple):
    """What a LoRA adapter adds to a tensor: B @ A * factor (transposed where the layer stores (in, out)), or nothing."""

    name: str
    shape: list
    a: Stored | None = None  # (r, in)
    b: Stored | None = None  # (out, r)
    factor: float = 1.0
    transposed: bool = False
    dtype: str = "F32"

    @property
    def path(self):
        return self.a.path

    def factors(self):
        """A (r, in), B (out, r) times the factor, float32."""
        a, b = (stored.values().float().view(stored.shape) for stored in (self.a, self.b))
        return a, b * self.factor

    def values(self):
        if self.a is None:
            return torch.zeros(1).expand(math.prod(self.shape))
        a, b = self.factors()
        return (a.T @ b.T if self.transposed else b @ a).reshape(-1)


class TaskVectors:
    """The task vectors of one tensor, in blocks of whole rows, straight from the files."""

    def __init__(self, base, experts):
        self.theta, self.others = base.values(), [expert.values() for expert in experts]
        self.added = [isinstance(expert, LowRank) for expert in experts]  # its values are a task vector already
        self.columns = base.shape[-1] if base.shape else 1
        step = max(1, BLOCK // self.columns) * self.columns
        self.places = [slice(start, start + step) for start in range(0, len(self.theta), step)]

    def blocks(self):
        """theta (n,) and taus (E, n), float32."""
        for place in self.places:
            theta = self.theta[place].float()
            taus = torch.stack([other[place].float() for other in self.others])
            for tau, added in zip(taus, self.added):
                if not added:
                    tau -= theta
            yield theta, taus


def magnitudes(tensors, expert, every=1):
    """|tau| of one expert in blocks, each every-th entry; so large that counting a block costs more than starting it."""
    for base, experts in tensors:
        vectors = TaskVectors(base, experts[expert : expert + 1])
        for tau, theta in zip(vectors.others[0].split(1 << 20), vectors.theta.split(1 << 20)):
            tau = tau[::every].float()
            yield tau.abs() if vectors.added[0] else (tau - theta[::every].float()).abs_()


def read_json(path):
    """A JSON object; {} where there is no such file."""
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        stop(f"{path} is not JSON: fetch or save it again")


def file_tensors(path):
    """{name: Stored} of a safetensors file, from its header: 8 bytes of length, then JSON, then the values."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(length := int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size < end:
            raise ValueError(f"it ends after {path.stat().st_size} of {end} bytes")
    except (OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        stop(f"{path} is missing or broken, fetch or save it again: {error}")
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {
        name: Stored(path, name, header[name]["dtype"], header[name]["shape"], 8 + length + start, stop - start)
        for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1])
    }


def stored_tensors(folder):
    """{name: Stored} of a model's safetensors files, sharded or not, in the order of the files."""
    folder, tensors, files = Path(folder), {}, ["model.safetensors"]
    if not (folder / files[0]).exists():
        files = sorted(set(read_json(folder / f"{files[0]}.index.json").get("weight_map", {}).values()))
    if not files:
        pickles = "only .bin weights: convert them with from_pretrained and save_pretrained"
        stop(f"{folder} holds {pickles if any(folder.glob('*.bin')) else 'no model.safetensors and no index of them'}")
    for file in files:
        tensors |= file_tensors(folder / file)
    # Tied embeddings are one tensor, which some files store twice; merged by chance, the copies would drift apart.
    if read_json(folder / "config.json").get("tie_word_embeddings") is not False:
        for head in [t for name, t in tensors.items() if name.endswith(("lm_head.weight", "embed_out.weight"))]:
            twins = [t for t in tensors.values() if t.name != head.name and (t.dtype, t.shape) == (head.dtype, head.shape)]
            if any(torch.equal(head.values(), twin.values()) for twin in twins):
                del tensors[head.name]
    return tensors


# What an adapter may hold beside A and B, and its value where it doesn't.
PLAIN_LORA = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False, "use_qalora": False, "use_bdlora": None,
    "layer_replication": None, "target_parameters": None, "trainable_token_indices": None,
}  # fmt: skip


def adapter_tensors(folder, base):
    """{name: LowRank, or Stored where the adapter holds a whole tensor} of a PEFT LoRA adapter, for each tensor of the base."""
    path, config = Path(folder) / "adapter_model.safetensors", read_json(Path(folder) / "adapter_config.json")
    for key, plain in PLAIN_LORA.items():
        if config.get(key, plain) not in (plain, None, [], {}):
            stop(f"{folder}/adapter_config.json: {key} is {config[key]!r}: only plain LoRA is merged, so merge_and_unload it")
    if str(config.get("init_lora_weights", True)).lower() not in ("true", "false", "none", "gaussian", "eva", "orthogonal"):
        stop(f"{folder}/adapter_config.json: init_lora_weights {config['init_lora_weights']} changes the base: convert it")
    tensors, pairs = {name: LowRank(name, t.shape) if t.dtype in FLOATS else t for name, t in base.items()}, {}
    for key, stored in file_tensors(path).items():
        name = key.removeprefix("base_model.model.")
        if lora := re.fullmatch(r"(.+)\.lora_([AB])\.weight", name):
            pairs.setdefault(lora[1], {})[lora[2]] = stored
        elif name not in base:
            stop(f"{path}: {key} is neither A nor B of a LoRA layer nor a tensor of the base")
        else:  # of modules_to_save
            tensors[name] = stored
    for module, pair in pairs.items():
        a, b, name = pair.get("A"), pair.get("B"), f"{module}.weight"
        if a is None or b is None or name not in base or a.shape[:1] != b.shape[1:]:
            stop(f"{path}: the LoRA layer {module} lacks A or B, or its place in the base, or their ranks differ")
        patterns = (config.get("alpha_pattern") or {}).items()
        alpha = [alpha for pattern, alpha in patterns if re.fullmatch(rf"(.*\.)?({pattern})", module)]
        alpha = alpha[0] if alpha else config.get("lora_alpha", 8)
        factor = alpha / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
        shape, transposed = [b.shape[0], *a.shape[1:]], bool(config.get("fan_in_fan_out"))
        tensors[name] = LowRank(name, shape[::-1] if transposed else shape, a, b, factor, transposed)
    return tensors


def text_files(folder):
    """{file: content} of what decides on the tokens of a text: the vocabulary, and the chat template."""
    folder = Path(folder)
    names = ["tokenizer.json", "chat_template.jinja"]
    if not (folder / names[0]).exists():
        names += ["vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"]
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    if in_config := read_json(folder / "tokenizer_config.json").get("chat_template"):  # where older versions kept it
        found.setdefault("chat_template.jinja", str(in_config).encode())
    return found


def vocabulary(folder):
    """tokenizer.json but for what trainers leave in it, truncation and padding; newer versions write merges as pairs."""
    content = read_json(Path(folder) / "tokenizer.json")
    merges = [m.split(" ") if isinstance(m, str) else m for m in content["model"].get("merges") or []]
    return content | dict(truncation=0, padding=0, model=content["model"] | {"merges": merges})


def check_expert(args, expert, folder, base_folder, base):
    """Stop where an expert cannot be the base plus a task vector -> its stored tensors; `base`: those of the base."""
    adapter = read_json(Path(folder) / "adapter_config.json")
    tensors = adapter_tensors(folder, base) if adapter else stored_tensors(folder)
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
    # A run folder names what it started from, an adapter its base.
    start = read_json(Path(folder) / "args.json").get("model", adapter.get("base_model_name_or_path") or args.base)
    if os.path.isdir(start) and os.path.realpath(start) != os.path.realpath(base_folder):
        stop(f"{expert} was trained from {start}, not from {args.base}: give --base {start}")
    ours, theirs = text_files(base_folder), text_files(folder)
    for name in sorted(theirs if adapter else ours.keys() | theirs.keys()):  # an adapter may leave it to its base
        differs = ours.get(name) != theirs.get(name) and not args.ignore_tokenizer
        if differs and name == "tokenizer.json" and name in ours.keys() & theirs.keys():
            differs = vocabulary(base_folder) != vocabulary(folder)
        if differs:
            stop(f"{expert}: its {name} is not the base's, so it reads other tokens (--ignore_tokenizer: merge anyway)")
    return tensors


def refuse_values(tensors, otherwise):
    """The error for a merge that is not finite: the tensor that brought it in, or else what `otherwise` says."""
    for tensor in tensors:
        if not all(map(math.isfinite, tensor.values().float().aminmax())):
            return MergeError(f"{tensor.path}: {tensor.name} holds NaN or infinite values: nothing sound comes from it")
    return MergeError(otherwise)


# ----------------------------------------------------------------------------------------------------- geometry


def lens(theta, taus, threshold):
    """Sums over a block from which `describe` computes everything but subspaces; each adds up over blocks.

    >>> sums = lens(torch.zeros(3), torch.tensor([[3.0, 4.0, 0.0], [3.0, -1.0, 2.0]]), 1e-5)
    >>> sums["gram"].tolist(), sums["both"].tolist(), sums["agree"].tolist()  # entry 0 agrees, entry 1 doesn't
    ([[25.0, 5.0], [5.0, 14.0]], [[2.0, 2.0], [2.0, 3.0]], [[2.0, 1.0], [1.0, 3.0]])
    >>> sums["erased"].tolist()  # the elected signs are + + +
    [0.0, 1.0]
    """
    signs = taus.sign() * (taus.abs() >= threshold)
    both, against = signs.abs() @ signs.abs().T, (taus * -taus.sum(0).sign()).relu_()
    rounded = ((theta + taus).bfloat16() == theta.bfloat16()).sum(1)
    sums = {"parameters": torch.tensor(taus.shape[1]), "gram": taus @ taus.T, "both": both}
    sums |= {"agree": (both + signs @ signs.T) / 2, "mass": taus.abs().sum(1), "erased": against.sum(1)}
    sums |= {f"still, |tau| < {least:g}": (taus.abs() < least).sum(1) for least in (1e-6, 1e-5)}
    return {key: value.double() for key, value in (sums | {"still, equal in bfloat16": rounded}).items()}


def subspaces(matrices, rank):
    """Overlap and angles of the leading left singular vectors of some matrices, and their effective ranks.

    overlap (E, E) = ||U_i' U_j||_F^2 / k, by chance k / rows; angles (E, E, k) = arccos sigma(U_i' U_j), degrees, from the
    smallest; effective rank (E,) = exp(entropy of sigma / sum sigma) (Roy and Vetterli 2007).

    >>> sums = subspaces([torch.tensor([[2.0, 0], [0, 0]]), torch.tensor([[1.0, 0], [1, 0]]), torch.eye(2)], rank=1)
    >>> [round(float(sums[key][0, 1]), 6) for key in ("overlap", "angles")], sums["effective_rank"].tolist()
    ([0.5, 45.0], [1.0, 1.0, 2.0])
    """
    leading, ranks = [], []
    for matrix in matrices:
        wide = matrix.shape[0] <= matrix.shape[1]  # the smaller of M M' and M' M has all singular values
        matrix = matrix.double()
        squares, vectors = torch.linalg.eigh(matrix @ matrix.T if wide else matrix.T @ matrix)
        sigma, vectors = squares.clamp(min=0).sqrt().flip(0), vectors.flip(1)[:, :rank]
        leading.append(vectors if wide else torch.linalg.qr(matrix @ vectors)[0])
        share = sigma / sigma.sum().clamp(min=1e-300)
        ranks.append(torch.special.entr(share).sum().exp())
    cosines = [[torch.linalg.svdvals(left.T @ right).clamp(max=1) for right in leading] for left in leading]
    cosines = torch.stack([torch.stack(row) for row in cosines])  # (E, E, k)
    chance = torch.tensor(rank / len(matrices[0])).double()
    overlap, angles = cosines.square().mean(-1), cosines.acos().rad2deg()
    sums = {"overlap": overlap, "angles": angles, "effective_rank": torch.stack(ranks), "overlap_by_chance": chance}
    return sums | {"matrices": torch.tensor(1.0).double()}


def describe(sums, whole):
    """What is written of a part of the model, from its sums and those of the whole."""
    norms = (squares := sums["gram"].diagonal()).sqrt()
    found, changed = {"parameters": int(sums["parameters"]), "norm": norms}, sums["both"].diagonal()
    found["cosine"] = sums["gram"] / (norms[:, None] * norms).clamp(min=1e-300)
    found["share_of_displacement"] = squares / whole["gram"].diagonal().clamp(min=1e-300)
    found["relative_displacement"] = found["share_of_displacement"] * whole["parameters"] / sums["parameters"]
    found |= {key: value / sums["parameters"] for key, value in sums.items() if key.startswith("still")}
    found["jaccard"] = sums["both"] / (changed[:, None] + changed - sums["both"]).clamp(min=1)
    found["sign_agreement"] = sums["agree"] / sums["both"].clamp(min=1)
    found["erased_by_election"] = sums["erased"] / sums["mass"].clamp(min=1e-300)
    means = ("overlap", "overlap_by_chance", "angles", "effective_rank") if "matrices" in sums else ()
    found |= {key: sums[key] / sums["matrices"] for key in means}
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def geometry(args, base, experts):
    """How the task vectors lie to each other: all, by layer, and by kind of module; one tensor in memory at a time."""
    parts = {}
    for name in tqdm([name for name in base if base[name].dtype in FLOATS and base[name].size], desc="geometry"):
        members = [tensors[name] for tensors in experts]
        layer, words = re.search(r"\.(\d+)\.", name), re.sub(r"\.(weight|bias)$", "", name).split(".")
        keys = [("all",), ("modules", words[-1]), *([("layers", layer[1])] if layer else [])]
        vectors = TaskVectors(base[name], members)
        found = [lens(theta, taus, args.threshold) for theta, taus in vectors.blocks()]
        found = [{key: sum(sums[key] for sums in found) for key in found[0]}]
        if not found[0]["gram"].isfinite().all():
            raise refuse_values([base[name], *members], f"{name}: squares of its task vectors overflow")
        shape = base[name].shape
        if args.rank and len(shape) == 2 and min(shape) >= args.rank and found[0]["gram"].diagonal().all():
            rows = [torch.cat(blocks).view(shape) for blocks in zip(*(taus for _, taus in vectors.blocks()))]
            found.append(subspaces(rows, args.rank))
        for key, sums in ((key, sums) for key in keys for sums in found):
            part = parts.setdefault(key, {})
            for what, value in sums.items():
                part[what] = part.get(what, 0) + value
    report = {"experts": args.experts, "threshold": args.threshold, "rank": args.rank, "layers": {}, "modules": {}}
    for (where, *which), sums in parts.items():
        found = describe(sums, parts[("all",)])
        report |= {where: report[where] | {which[0]: found}} if which else {where: found}
    return report


def draw_geometry(report, path):
    """geometry.png: a page of six pictures, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return print("No geometry.png, as matplotlib is not installed (pip install matplotlib); geometry.json is complete")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, layers = [os.path.basename(os.path.normpath(name)) for name in report["experts"]], report["layers"]
    places, pairs = range(len(names)), [(i, j) for i in range(len(names)) for j in range(i)]
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 9), layout="constrained")
    for axis, key in ((axes[0, 0], "cosine"), (axes[1, 0], "overlap"), (axes[1, 1], "jaccard")):
        axis.set_title(f"{key}, whole model" + " (left subspaces)" * (key == "overlap"))
        if key in report["all"]:
            axis.imshow(report["all"][key], cmap="RdBu_r", vmin=-1, vmax=1)
            axis.set_xticks(places, names, rotation=30)
            axis.set_yticks(places, names)
            for i, j in ((i, j) for i in places for j in places):
                axis.text(j, i, f"{report['all'][key][i][j]:.3f}", ha="center", va="center")
    for i, j in pairs:
        values = [layer["cosine"][i][j] for layer in layers.values()]
        axes[0, 1].plot(values, ".-", label=f"{names[j]} - {names[i]}")
    for i in places:
        axes[0, 2].plot([layer["relative_displacement"][i] for layer in layers.values()], ".-", label=names[i])
    bars = [key for key in report["all"] if key.startswith("still")] + ["erased_by_election"]
    for i in places:
        axes[1, 2].bar([x + i * 0.8 / len(names) for x in range(len(bars))], [report["all"][key][i] for key in bars], 0.8 / len(names), label=names[i])
    axes[1, 2].set_xticks(range(len(bars)), [key.replace(", ", "\n").replace("_", " ") for key in bars], fontsize=8)
    for axis, title in ((axes[0, 1], "cosine by layer"), (axes[0, 2], "displacement over share of parameters, by layer"), (axes[1, 2], "share of entries, share of mass")):
        axis.set_title(title)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


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

    >>> [list(header) for header in plan_shards([Stored("", n, "F32", [2], 0, 8) for n in "abc"], torch.float32, 16)]
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


def concat_adapters(args, scale, experts, folders, out):
    """Write one adapter of rank sum_i r_i: the A stacked, the B side by side, times scale * w_i and what each had as factor.

    An expert that leaves a layer alone has zeros there, so that all layers have one rank.
    """
    configs, adapter = [read_json(Path(folder) / "adapter_config.json") for folder in folders], {}
    whole = [t.path for tensors in experts for t in tensors.values() if isinstance(t, Stored) and t.dtype in FLOATS]
    if whole or len({bool(config.get("fan_in_fan_out")) for config in configs}) > 1:
        stop(f"--method lora_concat takes plain adapters, unlike {whole[0] if whole else folders[0]}: use task_arithmetic")
    ranks = [max(t.a.shape[0] for t in tensors.values() if t.a) for tensors in experts]
    for name in experts[0]:
        if known := [tensors[name] for tensors in experts if tensors[name].a]:
            columns, rows = known[0].a.shape[1], known[0].b.shape[0]
            down, up, start = torch.zeros(sum(ranks), columns), torch.zeros(rows, sum(ranks)), 0
            for tensors, rank, weight in zip(experts, ranks, args.weights):
                if tensors[name].a:
                    a, b = tensors[name].factors()
                    down[start : start + len(a)], up[:, start : start + len(a)] = a, scale * weight * b
                start += rank
            place = f"base_model.model.{name.removesuffix('.weight')}"
            adapter |= {f"{place}.lora_A.weight": down, f"{place}.lora_B.weight": up}
    if not all(bool(t.isfinite().all()) for t in adapter.values()):
        raise MergeError("the adapters hold NaN or infinite values, or --scale is too large")
    save_file({key: t.to(getattr(torch, args.dtype)) for key, t in adapter.items()}, out / "adapter_model.safetensors")
    modules = sorted({key.split(".", 2)[2].rsplit(".", 2)[0] for key in adapter})
    same = {"r": sum(ranks), "lora_alpha": sum(ranks), "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    same |= {"target_modules": modules, "exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}
    write_json(out / "adapter_config.json", configs[0] | same)


def merge_files(args, base, experts, folders):
    """Write the weights of the merge at each scale into its folder, a block of a tensor at a time."""
    dtype, weights, how = getattr(torch, args.dtype), torch.tensor(args.weights), SimpleNamespace(**vars(args))
    fold, _, _, measure = METHODS[args.method]
    shards = plan_shards(base.values(), dtype, args.shard_size * 1e9)
    file_names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    file_names = file_names if len(shards) > 1 else ["model.safetensors"]
    pairs = {name: (base[name], [tensors[name] for tensors in experts]) for name in base}
    if args.trim == "global":
        vars(how).update(limits([pair for pair in pairs.values() if pair[0].dtype in FLOATS], how))
        measure = None
    still = range(len(experts))  # the experts that have not moved from the base so far
    progress = tqdm(total=sum(t.size for t in base.values()) * (1 + len(experts)), unit="B", unit_scale=True, desc=args.method)
    with progress, contextlib.ExitStack() as stack:
        for file_name, shard in zip(file_names, shards):
            files = [stack.enter_context(open(folder / file_name, "wb")) for folder in folders]
            header = json.dumps({"__metadata__": {"format": "pt"}, **shard}).encode()
            header += b" " * (-len(header) % 8)
            for file in files:
                file.write(len(header).to_bytes(8, "little") + header)
            for name in shard:
                start, others = pairs[name]
                if start.dtype not in FLOATS:  # counters and masks have no mean
                    content = start.values()
                    for other in others:
                        if not torch.equal(other.values(), content):
                            raise MergeError(f"{other.path}: {name} ({other.dtype}) differs from the base's")
                    for file in files:
                        file.write(content.numpy())
                elif start.size:
                    how.name, how.columns = name, start.shape[-1] if start.shape else 1
                    vars(how).update(measure([pairs[name]], how) if measure else {})
                    for theta, taus in TaskVectors(start, others).blocks():
                        still = [place for place in still if not taus[place].any()]
                        merged = fold(taus, weights, how)  # (n,)
                        for scale, file in zip(args.scale, files):
                            # theta = theta_base + scale * merged
                            values = theta.add(merged, alpha=scale).to(dtype)
                            if not all(map(math.isfinite, values.aminmax())):
                                remedy = f"{name}: {args.dtype} cannot hold the merge at scale {scale}: lower --scale"
                                raise refuse_values([start, *others], remedy)
                            file.write(values.view(torch.uint8).numpy())
                progress.update(start.size * (1 + len(experts)))
            stack.close()
    if len(shards) > 1:
        weight_map = {name: file_name for file_name, shard in zip(file_names, shards) for name in shard}
        total = sum(max(entry["data_offsets"][1] for entry in shard.values()) for shard in shards)
        for folder in folders:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / "model.safetensors.index.json", index)
    return still


def main():
    start = time.perf_counter()
    args = parse_args(Args, __doc__)
    folders = [e if os.path.exists(os.path.join(e, "adapter_config.json")) else model_folder(e) for e in args.experts]
    base_folder, outs = model_folder(args.base), [Path(args.out.replace("{scale}", str(scale))) for scale in args.scale]
    for out in outs:
        check_out(out, args.overwrite)
    base = stored_tensors(base_folder)
    experts = [check_expert(args, name, folder, base_folder, base) for name, folder in zip(args.experts, folders)]
    notes = [
        f"{name} is stored in 16 bits and the base in 32, so that rounding is a part of its task vector"
        for name, tensors in zip(args.experts, experts)
        if any(base[t.name].dtype == "F32" and isinstance(t, Stored) and t.dtype in ("F16", "BF16") for t in tensors.values())
    ]
    partials = [out.with_name(f".{out.name}.partial") for out in outs]
    try:
        for partial_out in partials:
            shutil.rmtree(partial_out, ignore_errors=True)  # of a merge that was killed
            partial_out.mkdir(parents=True)
        if args.geometry:
            report = geometry(args, base, experts)
            for partial_out in partials:
                write_json(partial_out / "geometry.json", report)
                draw_geometry(report, partial_out / "geometry.png")
        if args.method == "lora_concat":
            for scale, partial_out in zip(args.scale, partials):
                concat_adapters(args, scale, experts, folders, partial_out)
        elif args.method:
            for place in merge_files(args, base, experts, partials):  # training may have changed nothing: no error, but news
                notes.append(f"{args.experts[place]} equals the base: it adds nothing, and dilutes a mean of all")
        seconds = time.perf_counter() - start  # of the whole pass, however many scales shared it
        cost = dict.fromkeys(("tokens_sampled", "tokens_trained", "tokens_scored", "teacher_tokens"), 0)
        cost |= {"seconds": {"merge": seconds, "total": seconds}, "peak_memory_gb": peak_gb(torch.device("cpu"))}
        cost |= {"parameters": sum(math.prod(tensor.shape) for tensor in base.values()), "device": "cpu"}
        cost |= {"reused": {expert: run_cost(folder) or None for expert, folder in zip(args.experts, folders)}}
        for scale, out, partial_out in zip(args.scale, outs, partials):
            write_json(partial_out / "args.json", {**dataclasses.asdict(args), "scale": [scale], "out": str(out)})
            write_json(partial_out / "cost.json", cost)
            if args.method not in ("", "lora_concat"):
                carry_over(base_folder, partial_out, args.dtype)
            put_in_place(partial_out, out)
    except (MergeError, OSError) as error:  # a full disk, for one
        stop(error)
    finally:
        for partial_out in partials:
            shutil.rmtree(partial_out, ignore_errors=True)

    print(*notes, sep="\n", end="\n" * bool(notes))
    done = f"Merged {len(experts)} experts by {args.method}" if args.method else f"Compared {len(experts)} experts"
    print(f"{done} in {seconds:.1f} s: {', '.join(map(str, outs))}")
    if args.method == "lora_concat":
        print(f"Next: peft.PeftModel.from_pretrained(base, '{outs[0]}'), and merge_and_unload for eval.py")
    elif args.method:
        names = [f"merge-{args.method}" + f"-{scale}" * (len(outs) > 1) for scale in args.scale]
        print(f"Next: python eval.py --models base={args.base} {' '.join(f'{n}={out}' for n, out in zip(names, outs))}")


if __name__ == "__main__":
    main()
