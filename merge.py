"""Merge experts into one model by arithmetic on their weights: no training, no GPU, no model in memory.

An expert is the base plus what its training added, the task vector tau_i = theta_i - theta_base. A method folds the task
vectors into one, which goes back on the base:

    theta = theta_base + scale * merged(tau_1, ..., tau_E)

Most methods drop entries of each task vector (trim, dare, magprune, select) and then combine what is left, in a weighted
sum or mean, or after electing a sign for each entry (elect): METHODS spells out each of them in one line.

Everything is computed in float32, whatever the files hold, a block of rows at a time, straight from the experts' files to
those of the merge: memory does not grow with the model. LoRA adapters are merged like whole experts. --geometry describes
how the task vectors lie to each other, without --method it does only that.

    python merge.py                                    the speedrun's experts on tiny/base, seconds on one core
    python merge.py --base tiny/base --experts runs/math runs/code --method ties --density 0.2 --out runs/merged
    python merge.py --experts runs/math runs/code --scale 0.4 0.6 0.8 1.0 --out runs/merge-{scale}
    python merge.py --experts runs/math runs/code --geometry --out runs/geometry
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import time
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers.hf_argparser import HfArg

from eval import model_folder, parse_args, peak_gb, run, run_cost, stop, write_json

# Letters are dimensions only: E experts, n entries of one tensor or of a block of it.
BLOCK = 1 << 17  # entries at a time: the blocks of all experts stay in the processor's cache
KEEP = 1 << 23  # entries of a tensor's task vectors (32 MB) that are kept where a method looks at them several times


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
        made = [f"runs/speedrun/{domain}" for domain in ("math", "code", "science", "instruction") if not self.experts]
        self.experts = self.experts or made
        paths = [os.path.realpath(name) for name in (self.base, *self.experts)]
        if twice := [name for place, name in enumerate(self.experts, 1) if paths[place] in paths[:place]]:
            stop(f"{twice[0]} is named twice: the base is no expert, and an expert counts more by --weights")
        self.method = self.method or ("" if self.geometry else "task_arithmetic")
        if self.method not in ("", *METHODS):
            stop(f"there is no --method {self.method}: choose from {', '.join(METHODS)}")
        _, usual_scale, usual, measure = METHODS.get(self.method, (None, MEAN, {}, None))
        for flag in ("density", "epsilon", "gamma", "select_topk"):
            share = getattr(self, flag)
            if share is None:
                setattr(self, flag, usual.get(flag))
            elif flag not in usual:
                users = ", ".join(name for name in METHODS if flag in METHODS[name][2])
                stop(f"--{flag} has no effect on --method {self.method or 'none'}: leave it out, or choose {users}")
            elif not (0 < share <= 1 or share == 0 and flag in ("epsilon", "gamma")):
                stop(f"--{flag} is a share, above 0 and up to 1, not {share}")
        below, above = self.epsilon or 0, self.epsilon or self.gamma or 0
        if self.density and not below < self.density <= 1 - above:
            stop(f"--density {self.density} leaves no room below it for --epsilon, or above for --epsilon or --gamma")
        if self.method == "slerp" and len(self.experts) != 2 or self.method == "model_stock" and len(self.experts) < 2:
            stop(f"--method {self.method} takes two {'' if self.method == 'slerp' else 'or more '}experts")
        if self.weights and self.method in ("", "sce", "ram", "model_stock"):
            stop(f"--weights has no effect on --method {self.method or 'none'}: leave it out")
        if self.trim == "global" and measure is not limits:
            stop(f"--trim has no effect on --method {self.method or 'none'}: choose ties or breadcrumbs")
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
        if missing := [expert for expert in made if not os.path.isdir(expert)]:
            stop(f"{missing[0]} does not exist: `bash speedrun.sh` makes it, or name others: --experts DIR DIR ...")


# ------------------------------------------------------------------------------------------------ maths: what is dropped
# taus (E, n) float32: the task vectors of one tensor, or of a block of it; no function changes them. What is dropped is
# multiplied by 0 or the like, so that a NaN or an infinite value of an expert shows in the merge.


def trim(taus, limits):
    """Keep |tau| >= limit, one limit (E,) an expert. TIES (arXiv 2306.01708) trims so that the largest 20 % stay; RAM (arXiv
    2601.13572) leaves out what hardly changed.

    Equal magnitudes stay or go together, since nothing tells them apart (task vectors of bfloat16 experts hold many);
    mergekit picks among those that equal the limit, so that the count comes out exact.

    >>> trim(torch.tensor([[4.0, -3.0, 1.0, 0.5]]), [1.0])
    tensor([[ 4., -3.,  1.,  0.]])
    """
    kept = torch.empty_like(taus)
    for tau, limit, out in zip(taus, np.float32(limits), kept):  # hardshrink keeps |tau| > limit
        torch.hardshrink(tau, float(np.nextafter(limit, np.float32(0))), out=out)
    return kept


def breadcrumbs(taus, low, high):
    """Keep low <= |tau| < high: outliers, the largest 1 %, are cut like the smallest (arXiv 2312.06795).

    >>> breadcrumbs(torch.tensor([[4.0, -3.0, 1.0, 0.5]]), [1.0], [4.0])
    tensor([[ 0., -3.,  1.,  0.]])
    """
    return trim(taus, low) - trim(taus, high)


def coins(draws, n):
    """(E, n) whole numbers below 65536, evenly distributed: 16 random bits an entry, from each expert's own generator."""
    return np.stack([generator.random_raw(-(-n // 4)).view(np.uint16)[:n] for generator in draws])


def dare(taus, density, draws):
    """tau * Bernoulli(density) / density: its expectation is tau (arXiv 2311.03099, where p = 1 - density; usual: 0.1 to
    0.8). Density counts in steps of 1/65536. mergekit scales up to the L1 norm that the tensor had, so by another factor
    where few entries hold the norm.

    >>> dare(torch.ones(1, 4), 0.5, [np.random.PCG64(1)])  # the coins are 58623 31010 48627 33542
    tensor([[0., 2., 0., 0.]])
    """
    below = max(1, round(density * 65536))
    keep = coins(draws, taus.shape[1]) < below
    return torch.from_numpy(taus.numpy() * keep).mul_(65536 / below)


def magprune(taus, density, epsilon, columns, draws):
    """DELLA's drop (arXiv 2406.11617): the larger an entry within its row, the likelier it stays. With rank 0 for the
    smallest, keep = density - epsilon + 2 epsilon rank / (columns - 1); what stays is divided by keep, so that the
    expectation is tau. mergekit has these probabilities, but scales as in its dare, and fails on rows of one entry.

    >>> magprune(torch.tensor([[2.0, -1.0, 5.0, 6.0]]), 0.6, 0.3, 4, [np.random.PCG64(0)])  # keep 0.5 0.3 0.7 0.9
    tensor([[0.0000, -0.0000, 0.0000, 6.6667]])
    """
    rows = taus.abs().view(len(taus), -1, columns)  # coins above: 33375 55746 60367 41743, of 65536
    rank = rows.argsort(dim=-1, stable=True).argsort(dim=-1) / (columns - 1 or math.nan)
    keep = (density - epsilon + 2 * epsilon * rank.nan_to_num(0.5)).view(taus.shape)
    return taus * (torch.from_numpy(coins(draws, taus.shape[1]).astype(np.float32)) < keep * 65536) / keep


def variances(taus):
    """Variance over the experts, (n,)."""
    share = torch.full((len(taus),), 1 / len(taus))
    return share @ (taus - share @ taus).square_()


def select(taus, low):
    """SCE's drop: keep the entries whose variance over the experts is at least `low`. Usual: all, or the top 10 %.

    >>> select(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), low=0.5)  # variances 1 and 0
    tensor([[1., 0.],
            [3., 0.]])
    """
    return taus if low == 0 else torch.from_numpy(taus.numpy() * (variances(taus).numpy() >= low))


# ----------------------------------------------------------------------------------------- maths: how the rest is combined


def linear(taus, weights):
    """sum_i w_i tau_i / sum_i w_i, so that at scale 1 theta is the experts' weighted mean (arXiv 2203.05482).

    >>> linear(torch.tensor([[1.0, 2.0], [3.0, -2.0]]), torch.tensor([1.0, 3.0]))  # (1 + 9)/4, (2 - 6)/4
    tensor([ 2.5000, -1.0000])
    """
    return weights / weights.sum() @ taus


def task_arithmetic(taus, weights):
    """sum_i w_i tau_i (arXiv 2212.04089). Usual: weights 1, scale 0.3 to 1; a negative weight unlearns.

    >>> task_arithmetic(torch.tensor([[1.0, 2.0], [3.0, -2.0]]), torch.tensor([1.0, 0.5]))  # 1 + 1.5, 2 - 1
    tensor([2.5000, 1.0000])
    """
    return weights @ taus


def elect(taus, weights, votes=None):
    """Sign election and disjoint mean of TIES: sign = sgn(sum_i w_i tau_i), then the weighted mean of the entries that
    have this sign. Entries that are 0 have no vote and do not count in the mean; where the sum is 0, so is the result
    (mergekit takes the positive side). `votes` elect in place of the weights; SCE gives each expert one.

    >>> elect(torch.tensor([[4.0, -3.0, 2.0], [0.0, 5.0, -2.0]]), torch.ones(2))
    tensor([4., 5., 0.])
    """
    sign = ((weights if votes is None else votes) @ taus).sign_()
    agreeing = (taus * sign).relu_()
    total = weights @ agreeing
    count = weights @ agreeing.sign_()
    return sign * total / count.clamp_(min=1e-30)


def ram(taus):
    """Mean over the experts that changed an entry: what one alone changed stays whole (arXiv 2601.13572).

    >>> ram(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]))
    tensor([2., 0., 2.])
    """
    return taus.sum(0) / (taus != 0).sum(0).clamp_(min=1)


def model_stock(taus, gram):
    """t * mean tau_i with t = E cos / (1 + (E - 1) cos), between base and mean, nearest to the centre around which the
    experts scatter (arXiv 2403.19522); cos: mean cosine of the pairs, from gram (E, E) = tau_i . tau_j. Where it is
    negative t is 0; mergekit then goes beyond the base.

    >>> model_stock(torch.tensor([[3.0, 0.0], [3.0, 4.0]]), torch.tensor([[9.0, 9.0], [9.0, 25.0]]))  # cos 0.6, t 0.75
    tensor([2.2500, 1.5000])
    """
    norms, experts = gram.diagonal().sqrt().clamp(min=1e-30), len(taus)
    cosine = (gram / norms[:, None] / norms).triu(1).sum() / (experts * (experts - 1) / 2)
    ratio = experts * cosine / (1 + (experts - 1) * cosine)
    return taus.mean(0) * float(ratio if cosine > 0 else 0)


def slerp(taus, weights, gram):
    """Along the arc between two task vectors: (sin((1-t) a) tau_1 + sin(t a) tau_2) / sin a, a their angle, t = w_2 /
    (w_1 + w_2); parallel ones are averaged. mergekit turns the weights themselves, which for experts of one base are
    parallel all but exactly: there it is their mean.

    >>> slerp(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2), torch.eye(2))  # sin 45 / sin 90 degrees
    tensor([0.7071, 0.7071])
    """
    share, norms = weights / weights.sum(), gram.diagonal().prod().sqrt()
    angle = (gram[0, 1] / norms).clamp(-1, 1).acos()
    arc = (share * angle).sin() / angle.sin() if norms > 0 and angle.sin() > 0.03 else share
    return arc.float() @ taus


# --------------------------------------------------------------------------- maths: what is measured of a whole tensor first


def kth_largest(stream, k):
    """The k-th largest of the numbers >= 0 in the blocks (n,) of stream(1): exact, and without sorting.

    For numbers of one sign the order of floats is the order of their bits. The upper 16 bits of a sample, stream(17), tell
    between which bits the k-th lies; a pass over all then counts those above and looks at those between.

    >>> kth_largest(lambda every: [torch.tensor([4.0, 3.0]), torch.tensor([1.0, 0.5])], k=2)
    3.0
    """
    for every in (17, 1):  # the sample may mislead, or tell too little; all entries do not
        counts = sum(np.bincount(block.numpy().view(np.int32) >> 16, minlength=1 << 15) for block in stream(every))
        counted = np.append(every * counts[::-1].cumsum()[::-1], 0)
        slack = 4 * math.sqrt(every * k) * (every > 1)  # four standard deviations of what a sample says
        low, high = (max(0, np.count_nonzero(counted >= rank) - 1) for rank in (k + slack, k - slack))
        if high - low > 32:
            continue
        start, stop, above, held = low << 16, high + 1 << 16, 0, []
        few = counted[low] - counted[high + 1] < 1 << 22  # too many to hold are counted by value
        for block in stream(1):
            bits = block.numpy().view(np.int32)
            larger = bits >= stop
            above += np.count_nonzero(larger)
            between = bits[(bits >= start) ^ larger]
            held = [*held, between] if few else [sum(held) + np.bincount(between - start, minlength=stop - start)]
        held, rank = np.concatenate(held), k - above  # the k-th of all is the rank-th largest of those between
        if few and 0 < rank <= len(held):
            return float(np.partition(held, -rank)[-rank].view(np.float32))
        if not few and 0 < rank <= held.sum():
            return float(np.int32(start + np.count_nonzero(held[::-1].cumsum()[::-1] >= rank) - 1).view(np.float32))


def thinned(values, every):
    """16 neighbours (as many as a cache line holds) out of `every` 16 of the values (n,); 1: all."""
    return values if every == 1 else values[: len(values) // 16 * 16].view(-1, 16)[::every].flatten()


def limits(tensors, how):
    """low, high (E,): from low on and below high lie `density` of the magnitudes of the tensors, above it `gamma`."""
    n, found = sum(vectors.n for vectors in tensors), {"low": [], "high": []}
    cut, keep = int((how.gamma or 0) * n), max(1, int(how.density * n))  # rounded down, as in mergekit
    for expert in range(len(how.experts)):

        def stream(every, expert=expert):
            return (block for vectors in tensors for block in vectors.magnitudes(expert, every))

        found["low"].append(kth_largest(stream, min(n, cut + keep)))
        found["high"].append(kth_largest(stream, cut) if cut else math.inf)
    return found


def inner_products(tensors, how):
    """gram (E, E): tau_i . tau_j."""
    return {"gram": sum((taus @ taus.T).double() for _, taus in tensors[0].blocks())}


def sce_shares(tensors, how):
    """SCE (arXiv 2408.07990): low, the variance from which on an entry is selected; shares (E,), each expert's part of the
    squares of what is selected. mergekit gives equal shares where the mean squares sum to less than 1e-6, as they do in
    most experts by RL, and so loses what the method is about.
    """
    blocks, low = tensors[0].blocks, 0.0
    if how.select_topk < 1:

        def stream(every):
            return (thinned(variances(taus), every) for _, taus in blocks())

        low = kth_largest(stream, max(1, int(how.select_topk * sum(map(torch.count_nonzero, stream(1))))))
    squares = sum(torch.linalg.vector_norm(select(taus, low), dim=1).double().square() for _, taus in blocks())
    return {"low": low, "shares": (squares / squares.sum().clamp(min=1e-300)).float()}


def generators(tensors, how):
    """draws: a generator for each expert, from the seed and the tensor's name, whatever the order of tensors or threads."""
    return {"draws": [np.random.PCG64([how.seed, place, *how.name.encode()]) for place in range(len(how.experts))]}


# A method: its fold of taus t (E, n), weights w (E,) and how h (the flags, and what was measured) to (n,); its usual scale
# and settings; what it measures first. Sums keep every update in full, so that --scale must tame them; means do not.
SUM, MEAN = 0.6, 1.0
DARE, DELLA, CRUMBS = {"density": 0.8}, {"density": 0.5, "epsilon": 0.15}, {"density": 0.9, "gamma": 0.01}
METHODS = {
    "linear": (lambda t, w, h: linear(t, w), MEAN, {}, None),
    "task_arithmetic": (lambda t, w, h: task_arithmetic(t, w), SUM, {}, None),
    "ties": (lambda t, w, h: elect(trim(t, h.low), w), MEAN, {"density": 0.2}, limits),
    "dare_linear": (lambda t, w, h: task_arithmetic(dare(t, h.density, h.draws), w), SUM, DARE, generators),
    "dare_ties": (lambda t, w, h: elect(dare(t, h.density, h.draws), w), MEAN, DARE, generators),
    "della_linear": (lambda t, w, h: w @ magprune(t, h.density, h.epsilon, h.columns, h.draws), SUM, DELLA, generators),
    "della": (lambda t, w, h: elect(magprune(t, h.density, h.epsilon, h.columns, h.draws), w), MEAN, DELLA, generators),
    "breadcrumbs": (lambda t, w, h: task_arithmetic(breadcrumbs(t, h.low, h.high), w), SUM, CRUMBS, limits),
    "breadcrumbs_ties": (lambda t, w, h: elect(breadcrumbs(t, h.low, h.high), w), MEAN, CRUMBS, limits),
    "sce": (lambda t, w, h: elect(select(t, h.low), h.shares, votes=w), MEAN, {"select_topk": 1.0}, sce_shares),
    "ram": (lambda t, w, h: ram(trim(t, [h.threshold] * len(t))), MEAN, {}, None),
    "model_stock": (lambda t, w, h: model_stock(t, h.gram), MEAN, {}, inner_products),
    "slerp": (lambda t, w, h: slerp(t, w, h.gram), MEAN, {}, inner_products),
    "lora_concat": (None, SUM, {}, None),  # task_arithmetic of adapters that stays an adapter: concat_adapters
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
    shape: tuple
    place: int  # of its first byte
    size: int  # bytes
    file: FileIO

    def read(self, start=0, stop=math.inf):
        """Its entries from start to stop, flat; of what is no float, bytes."""
        dtype = FLOATS.get(self.dtype, torch.uint8)
        values = torch.empty(min(stop, self.size // dtype.itemsize) - start, dtype=dtype)
        place = self.place + start * dtype.itemsize
        if os.preadv(self.file.fileno(), [values.view(torch.uint8).numpy()], place) < values.nbytes:
            raise MergeError(f"{self.path} ends within {self.name}: fetch or save it again")
        return values


class LowRank(NamedTuple):
    """What a LoRA adapter adds to a tensor: factor * B @ A, transposed where layers store (in, out); without A, nothing."""

    path: Path
    name: str
    dtype: str
    shape: tuple
    a: Stored | None = None  # (r, in)
    b: Stored | None = None  # (out, r)
    factor: float = 1.0
    transposed: bool = False

    def factors(self):
        """A (r, in) and factor * B (out, r), float32."""
        a, b = (stored.read().float().view(stored.shape) for stored in (self.a, self.b))
        return a, b * self.factor

    def read(self, start=0, stop=math.inf):
        """As of Stored, for whole rows."""
        stop = min(stop, math.prod(self.shape))
        if self.a is None:
            return torch.zeros(1).expand(stop - start)
        a, b = self.factors()
        left, right = (a.T, b.T) if self.transposed else (b, a)
        return (left[start // self.shape[1] : stop // self.shape[1]] @ right).flatten()


class TaskVectors:
    """The task vectors of one tensor, in blocks of whole rows, straight from the files."""

    def __init__(self, base, experts, keep=0):
        self.base, self.experts, self.n = base, experts, math.prod(base.shape)
        self.columns = base.shape[-1] if base.shape else 1
        self.small, self.kept = self.n * len(experts) <= keep, []

    def blocks(self):
        """theta (n,) and taus (E, n), float32."""
        yield from self.kept
        size = max(1, BLOCK // self.columns) * self.columns
        for start in range(0, 0 if self.kept else self.n, size):
            theta = self.base.read(start, start + size).float()
            taus = torch.empty(len(self.experts), len(theta))
            for tau, expert in zip(taus, self.experts):  # what a LoRA expert holds is a task vector already
                values = expert.read(start, start + size).float()
                torch.sub(values, 0 if isinstance(expert, LowRank) else theta, out=tau)
            if self.small:
                self.kept.append((theta, taus))
            yield theta, taus

    def magnitudes(self, expert, every):
        """|tau| of one expert, or a sample of it, in blocks (n,)."""
        vectors = self if self.small else TaskVectors(self.base, self.experts[expert : expert + 1])
        blocks = (thinned(taus[expert if self.small else 0], every).abs() for _, taus in vectors.blocks())
        return [torch.cat(list(blocks))] if self.small and every > 1 else blocks  # few blocks are counted faster


def read_json(path):
    """A JSON object; {} where there is no such file."""
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        stop(f"{path} is not JSON: fetch or save it again")


def file_tensors(path):
    """{name: Stored} of a safetensors file in the order of its values: 8 bytes of length, a JSON header, the values."""
    try:
        file = open(path, "rb", buffering=0)  # stays open for Stored.read
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(start - 8, path.stat().st_size)))
        tensors = [
            Stored(path, name, entry["dtype"], tuple(entry["shape"]), start + place, end - place, file)
            for name, entry in header.items() if name != "__metadata__" for place, end in [entry["data_offsets"]]
        ]  # fmt: skip
        if any(tensor.place + tensor.size > path.stat().st_size for tensor in tensors):
            raise ValueError("it is cut short")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        stop(f"{path} is missing or broken, fetch or save it again: {error}")
    return {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.place)}


def model_tensors(folder):
    """{name: Stored} of a model's safetensors files, sharded or not."""
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
            twins = [t for t in tensors.values() if t != head and t[2:4] == head[2:4]]  # of the same dtype and shape
            if any(torch.equal(head.read(), twin.read()) for twin in twins):
                del tensors[head.name]
    return tensors


def adapter_tensors(folder, base):
    """{name: LowRank, or Stored where it trained a tensor whole} of a PEFT LoRA adapter, for every tensor of the base."""
    path, config = Path(folder) / "adapter_model.safetensors", read_json(Path(folder) / "adapter_config.json")
    plain = {"peft_type": ["LORA"], "bias": ["none"], "init_lora_weights": [True, "gaussian", "eva", "orthogonal"]}
    others = "use_dora lora_bias use_qalora layer_replication target_parameters trainable_token_indices"
    for key, usual in {**plain, **dict.fromkeys(others.split(), [])}.items():
        if config.get(key) and config[key] not in usual:
            stop(f"{folder}/adapter_config.json: {key} is {config[key]}, not plain LoRA: merge_and_unload it first")
    tensors, layers = {}, {}
    for name, tensor in base.items():
        tensors[name] = LowRank(path, name, "F32", tensor.shape) if tensor.dtype in FLOATS else tensor
    for key, stored in file_tensors(path).items():
        name = key.removeprefix("base_model.model.")
        if lora := re.fullmatch(r"(.+)\.lora_([AB])\.weight", name):
            layers.setdefault(lora[1], {})[lora[2]] = stored
        elif name in base:  # of modules_to_save
            tensors[name] = stored
        else:
            stop(f"{path}: {key} is neither A nor B of a LoRA layer nor a tensor of the base")
    for layer, pair in layers.items():
        name, ranks = f"{layer}.weight", {pair["A"].shape[0], pair["B"].shape[-1]} if len(pair) == 2 else ()
        if name not in base or len(ranks) != 1:
            stop(f"{path}: {layer} lacks A, B or its tensor in the base, or their ranks differ")
        patterns = (config.get("alpha_pattern") or {}).items()
        alphas = [alpha for pattern, alpha in patterns if re.fullmatch(rf"(.*\.)?({pattern})", layer)]
        factor = (*alphas, config.get("lora_alpha", 8))[0] / max(ranks) ** (0.5 if config.get("use_rslora") else 1)
        shape, transposed = (pair["B"].shape[0], *pair["A"].shape[1:]), bool(config.get("fan_in_fan_out"))
        shape = shape[::-1] if transposed else shape
        tensors[name] = LowRank(path, name, "F32", shape, pair["A"], pair["B"], factor, transposed)
    return tensors


def text_files(folder):
    """{file: content} of what decides on the tokens of a text: the vocabulary, and the chat template."""
    names = ("tokenizer.json", "chat_template.jinja")
    if not (Path(folder) / names[0]).exists():
        names += ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")
    found = {name: (Path(folder) / name).read_bytes() for name in names if (Path(folder) / name).exists()}
    if in_config := read_json(Path(folder) / "tokenizer_config.json").get("chat_template"):  # as older versions keep it
        found.setdefault(names[1], str(in_config).encode())
    return found


def vocabulary(folder):
    """tokenizer.json but for the truncation and padding that trainers leave in it; newer versions pair its merges."""
    content = read_json(Path(folder) / "tokenizer.json")
    merges = [m.split(" ") if isinstance(m, str) else m for m in content["model"].get("merges") or []]
    return {**content, "truncation": 0, "padding": 0, "model": {**content["model"], "merges": merges}}


def check_expert(args, expert, folder, base_folder, base):
    """Stop where an expert cannot be the base plus a task vector -> its tensors; `base`: those of the base."""
    adapter = read_json(Path(folder) / "adapter_config.json")
    # A run folder names what it started from, and an adapter its base.
    start = read_json(Path(folder) / "args.json").get("model") or adapter.get("base_model_name_or_path") or args.base
    if os.path.isdir(start) and os.path.realpath(start) != os.path.realpath(base_folder):
        stop(f"{expert} was trained from {start}, not from {args.base}: give --base {start}")
    tensors = adapter_tensors(folder, base) if adapter else model_tensors(folder)
    if missing := [name for name in base if name not in tensors]:
        stop(f"{expert} lacks {missing[0]} ({len(missing)} of the base's tensors in all): is it a whole model?")
    for name, tensor in tensors.items():
        if name not in base:
            stop(f"{tensor.path}: {name} is not in the base {args.base}: the expert is another model")
        kinds = [f"{list(t.shape)} {'float' if t.dtype in FLOATS else t.dtype}" for t in (tensor, base[name])]
        if kinds[0] != kinds[1]:
            stop(f"{tensor.path}: {name} is {kinds[0]}, in the base {kinds[1]}")
    ours, theirs = read_json(Path(base_folder) / "config.json"), read_json(Path(folder) / "config.json")
    for key in ("model_type", "num_attention_heads", "num_key_value_heads", "rope_theta"):
        if key in ours.keys() & theirs.keys() and ours[key] != theirs[key]:
            stop(f"{expert}/config.json: {key} is {theirs[key]}, in the base {ours[key]}: not the same model")
    ours, theirs = text_files(base_folder), text_files(folder)
    for name in sorted(theirs if adapter else ours.keys() | theirs.keys()):  # an adapter may leave them to its base
        same = ours.get(name) == theirs.get(name) or args.ignore_tokenizer
        if not same and name == "tokenizer.json" and name in ours.keys() & theirs.keys():
            same = vocabulary(base_folder) == vocabulary(folder)
        if not same:
            stop(f"{expert}: its {name} is not the base's, so it reads other tokens (--ignore_tokenizer: merge anyway)")
    return tensors


def refusal(tensors, otherwise):
    """The error for a merge that is not finite: it names the tensor that brought this in, or says `otherwise`."""
    for tensor in tensors:
        if not all(map(math.isfinite, tensor.read().float().aminmax())):
            return MergeError(f"{tensor.path}: {tensor.name} holds NaN or infinite values: nothing sound comes from it")
    return MergeError(otherwise)


# ----------------------------------------------------------------------------------------------------- geometry


def lens(theta, taus, threshold):
    """Sums over a block, which add up over blocks and tensors, and from which `describe` computes what is reported.

    >>> sums = lens(torch.zeros(3), torch.tensor([[3.0, 4.0, 0.0], [3.0, -1.0, 2.0]]), 1e-5)
    >>> sums["both"].tolist(), sums["agree"].tolist()  # both changed entries 0 and 1, and agree on 0
    ([[2.0, 2.0], [2.0, 3.0]], [[2.0, 1.0], [1.0, 3.0]])
    >>> sums["gram"].tolist(), sums["erased"].tolist()  # the elected signs are + + +
    ([[25.0, 5.0], [5.0, 14.0]], [0.0, 1.0])
    """
    sizes, signs = taus.abs(), taus.sign() * (taus.abs() >= threshold)
    both = signs.abs() @ signs.abs().T
    sums = {"n": torch.tensor(len(theta)), "gram": taus @ taus.T, "both": both, "agree": (both + signs @ signs.T) / 2}
    sums |= {"mass": sizes.sum(1), "erased": (taus * -taus.sum(0).sign()).relu_().sum(1)}
    sums |= {f"below {least:g}": (sizes < least).sum(1) for least in (1e-6, 1e-5)}
    sums["equal in bfloat16"] = ((theta + taus).bfloat16() == theta.bfloat16()).sum(1)
    return {key: value.double() for key, value in sums.items()}


def subspaces(matrices, rank):
    """Of E matrices, by their leading left singular vectors U: overlap ||U_i' U_j||_F^2 / rank (by chance: rank / rows), and
    angles arccos sigma(U_i' U_j) in degrees; and effective ranks exp(entropy of sigma / sum sigma).

    >>> sums = subspaces([torch.tensor([[2.0, 0], [0, 0]]), torch.tensor([[1.0, 0], [1, 0]]), torch.eye(2)], rank=1)
    >>> [round(float(sums[key][0, 1]), 6) for key in ("overlap", "angles")], sums["effective rank"].tolist()
    ([0.5, 45.0], [1.0, 1.0, 2.0])
    """
    leading, ranks = [], []
    for matrix in (matrix.double() for matrix in matrices):
        wide = matrix.shape[0] <= matrix.shape[1]  # the smaller of M M' and M' M holds all singular values
        squares, vectors = torch.linalg.eigh(matrix @ matrix.T if wide else matrix.T @ matrix)
        leading.append(vectors[:, -rank:] if wide else torch.linalg.qr(matrix @ vectors[:, -rank:])[0])
        sigma = squares.clamp(min=0).sqrt()
        ranks.append(torch.special.entr(sigma / sigma.sum()).sum().exp())
    stacked = torch.stack(leading)  # (E, rows, rank)
    cosines = torch.linalg.svdvals(stacked.mT[:, None] @ stacked).clamp(max=1)  # (E, E, rank)
    sums = {"overlap": cosines.square().mean(-1), "overlap by chance": torch.tensor(rank / stacked.shape[1])}
    sums |= {"angles": cosines.acos().rad2deg(), "effective rank": torch.stack(ranks)}
    return {**sums, "matrices": torch.tensor(1)}


def describe(sums, whole):
    """What is reported of a part of the model, from its sums and those of the whole."""
    squares, changed = sums["gram"].diagonal(), sums["both"].diagonal()
    found = {"parameters": sums["n"], "norm": squares.sqrt()}
    found["cosine"] = sums["gram"] / (squares.sqrt()[:, None] * squares.sqrt()).clamp(min=1e-300)
    found["share of displacement"] = squares / whole["gram"].diagonal().clamp(min=1e-300)
    found["relative displacement"] = found["share of displacement"] * whole["n"] / sums["n"]
    found |= {key: sums[key] / sums["n"] for key in ("below 1e-06", "below 1e-05", "equal in bfloat16")}
    found["jaccard"] = sums["both"] / (changed[:, None] + changed - sums["both"]).clamp(min=1)
    found["sign agreement"] = sums["agree"] / sums["both"].clamp(min=1)
    found["erased by election"] = sums["erased"] / sums["mass"].clamp(min=1e-300)
    means = ("overlap", "overlap by chance", "angles", "effective rank") if "matrices" in sums else ()
    found |= {key: sums[key] / sums["matrices"] for key in means}
    return {key: value.tolist() for key, value in found.items()}


def geometry(args, base, experts):
    """How the task vectors lie to each other: in all, by layer, and by kind of module; one tensor in memory at a time."""
    parts = {}
    for name in tqdm([name for name in base if base[name].dtype in FLOATS and base[name].size], desc="geometry"):
        vectors, shape = TaskVectors(base[name], [tensors[name] for tensors in experts], math.inf), base[name].shape
        found = {}
        for theta, taus in vectors.blocks():
            found = {key: found.get(key, 0) + value for key, value in lens(theta, taus, args.threshold).items()}
        if not found["gram"].isfinite().all():
            raise refusal([base[name], *vectors.experts], f"{name}: squares of its task vectors are too large")
        if len(shape) == 2 and min(shape) >= args.rank > 0 and found["gram"].diagonal().all():
            found |= subspaces(torch.cat([taus for _, taus in vectors.blocks()], 1).view(-1, *shape), args.rank)
        kind = re.sub(r"\.(weight|bias)$", "", name).split(".")[-1]
        for part in ("all", f"module {kind}", *(f"layer {number}" for number in re.findall(r"\.(\d+)\.", name)[:1])):
            sums = parts.setdefault(part, {})
            sums |= {key: sums.get(key, 0) + value for key, value in found.items()}
    found = {part: describe(sums, parts["all"]) for part, sums in parts.items()}
    return {"experts": args.experts, "threshold": args.threshold, "rank": args.rank, **found}


def picture(report, path):
    """geometry.png: three tables of pairs, and three pictures by layer or by expert."""
    from matplotlib.figure import Figure

    names = [os.path.basename(os.path.normpath(name)) for name in report["experts"]]
    numbers = sorted(int(key.split()[1]) for key in report if key.startswith("layer "))
    layers = [report[f"layer {number}"] for number in numbers]
    figure, places = Figure(figsize=(15, 9), layout="constrained"), range(len(names))
    axes = figure.subplots(2, 3)
    for axis, key in zip(axes[0], ("cosine", "jaccard", "overlap" if "overlap" in report["all"] else "sign agreement")):
        axis.imshow(report["all"][key], cmap="RdBu_r", vmin=-1, vmax=1)
        axis.set(title=key, xticks=places, yticks=places, xticklabels=names, yticklabels=names)
        for i, row in enumerate(report["all"][key]):
            for j, value in enumerate(row):
                axis.text(j, i, f"{value:.3f}", ha="center", color="white" if abs(value) > 0.6 else "black")
    for i in places:
        for j in range(i):
            axes[1, 0].plot(numbers, [layer["cosine"][i][j] for layer in layers], ".-", label=f"{names[j]}, {names[i]}")
        axes[1, 1].plot(numbers, [layer["relative displacement"][i] for layer in layers], ".-", label=names[i])
        shares = ("below 1e-06", "below 1e-05", "equal in bfloat16", "erased by election")
        axes[1, 2].plot([report["all"][key][i] for key in shares], shares, "o", label=names[i])
    for axis, title in zip(axes[1], ("cosine by layer", "relative displacement by layer", "shares")):
        axis.set_title(title)
        axis.legend()
    figure.savefig(path)


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

    >>> [list(header) for header in plan_shards([Stored("", n, "F32", [2], 0, 8, None) for n in "abc"], torch.float32, 16)]
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
    """Write one adapter of rank sum_i r_i: all A stacked, all B side by side, times scale * w_i * its factor. An expert that
    leaves a layer alone has zeros there, so that the rank is the same everywhere.
    """
    configs, adapter = [read_json(Path(folder) / "adapter_config.json") for folder in folders], {}
    whole = [t.path for tensors in experts for t in tensors.values() if isinstance(t, Stored) and t.dtype in FLOATS]
    if whole or len({bool(config.get("fan_in_fan_out")) for config in configs}) > 1:
        raise MergeError(f"lora_concat takes adapters of LoRA layers only, unlike {[*whole, *folders][0]}")
    ranks = [max((t.a.shape[0] for t in tensors.values() if t.a), default=0) for tensors in experts]
    starts = np.cumsum([0, *ranks])
    for name in experts[0]:
        for tensors, start, weight in zip(experts, starts, args.weights):
            if tensors[name].a:
                a, b = tensors[name].factors()
                place, columns = f"base_model.model.{name.removesuffix('.weight')}", slice(start, start + len(a))
                down = adapter.setdefault(f"{place}.lora_A.weight", torch.zeros(sum(ranks), a.shape[1]))
                up = adapter.setdefault(f"{place}.lora_B.weight", torch.zeros(len(b), sum(ranks)))
                down[columns], up[:, columns] = a, scale * weight * b
    if not all(t.isfinite().all() for t in adapter.values()):
        raise MergeError(f"NaN or infinite values in an adapter of {args.experts}, or a --scale that is too large")
    save_file({key: t.to(getattr(torch, args.dtype)) for key, t in adapter.items()}, out / "adapter_model.safetensors")
    modules = sorted({key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for key in adapter})
    config = {**configs[0], "r": sum(ranks), "lora_alpha": sum(ranks), "target_modules": modules, "use_rslora": False}
    gone = ("rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform", "layers_pattern")
    write_json(out / "adapter_config.json", {key: value for key, value in config.items() if key not in gone})


def merge_files(args, base, experts, folders):
    """Write the weights of the merge at each scale into its folder, block by block -> the experts that equal the base."""
    dtype, weights, how = getattr(torch, args.dtype), torch.tensor(args.weights), SimpleNamespace(**vars(args))
    fold, _, _, measure = METHODS[args.method]
    if args.trim == "global":
        every = [TaskVectors(t, [e[name] for e in experts]) for name, t in base.items() if t.dtype in FLOATS]
        vars(how).update(limits(every, how))
        measure = None
    shards = plan_shards(base.values(), dtype, args.shard_size * 1e9)
    file_names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    file_names = file_names if len(shards) > 1 else ["model.safetensors"]
    unmoved, to_read = range(len(experts)), sum(t.size for t in base.values()) * (1 + len(experts))
    with tqdm(total=to_read, unit="B", unit_scale=True, dynamic_ncols=True, desc=args.method) as progress:
        for file_name, shard in zip(file_names, shards):
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(open(folder / file_name, "wb")) for folder in folders]
                header = json.dumps({"__metadata__": {"format": "pt"}, **shard}).encode()
                header += b" " * (-len(header) % 8)
                for file in files:
                    file.write(len(header).to_bytes(8, "little") + header)
                for name in shard:
                    others = [tensors[name] for tensors in experts]
                    vectors = TaskVectors(base[name], others, KEEP if measure else 0)
                    if base[name].dtype not in FLOATS:  # counters and masks have no mean
                        content = base[name].read()
                        for other in others:
                            if not torch.equal(other.read(), content):
                                raise MergeError(f"{other.path}: {name} ({other.dtype}) differs from the base's")
                        for file in files:
                            file.write(content.numpy())
                    elif base[name].size:
                        how.name, how.columns = name, vectors.columns
                        vars(how).update(measure([vectors], how) if measure else {})
                        for theta, taus in vectors.blocks():
                            unmoved = [place for place in unmoved if not taus[place].any()]
                            merged = fold(taus, weights, how)  # (n,)
                            for scale, file in zip(args.scale, files):
                                # theta = theta_base + scale * merged
                                values = theta.add(merged, alpha=scale).to(dtype)
                                if not all(map(math.isfinite, values.aminmax())):
                                    remedy = f"{name}: {args.dtype} cannot hold the merge at scale {scale}: lower it"
                                    raise refusal([base[name], *others], remedy)
                                file.write(values.view(torch.uint8).numpy())
                    progress.update(base[name].size * (1 + len(experts)))
    if len(shards) > 1:
        weight_map = {name: file_name for file_name, shard in zip(file_names, shards) for name in shard}
        total = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for shard in shards for entry in shard.values())
        for folder in folders:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / "model.safetensors.index.json", index)
    return unmoved


def main():
    start = time.perf_counter()
    args = parse_args(Args, __doc__)
    np.seterr(invalid="ignore")  # infinite values times 0: what comes of them is refused when it is written
    base_folder, outs = model_folder(args.base), [Path(args.out.replace("{scale}", str(scale))) for scale in args.scale]
    folders = [e if os.path.exists(os.path.join(e, "adapter_config.json")) else model_folder(e) for e in args.experts]
    for out in outs:
        check_out(out, args.overwrite)
    base = model_tensors(base_folder)
    experts = [check_expert(args, name, folder, base_folder, base) for name, folder in zip(args.experts, folders)]
    partials = [out.with_name(f".{out.name}.partial") for out in outs]
    notes = []
    for expert, tensors in zip(args.experts, experts):
        if any(base[name].dtype == "F32" and t.dtype in ("F16", "BF16") for name, t in tensors.items()):
            notes.append(f"{expert} is stored in 16 bits, the base in 32: rounding is a part of its task vector")
    try:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)  # of a merge that was killed
            partial.mkdir(parents=True)
        if args.geometry:
            report = geometry(args, base, experts)
            for partial in partials:
                write_json(partial / "geometry.json", report)
                try:
                    picture(report, partial / "geometry.png")
                except ImportError:
                    notes.append("no geometry.png, since matplotlib is not installed; geometry.json is complete")
        if args.method == "lora_concat":
            for scale, partial in zip(args.scale, partials):
                concat_adapters(args, scale, experts, folders, partial)
        elif args.method:
            for place in merge_files(args, base, experts, partials):  # no error, but a comparison should say so
                notes.append(f"{args.experts[place]} equals the base: it adds nothing (and dilutes a mean)")
        seconds = time.perf_counter() - start  # of the whole pass, however many scales shared it
        cost = dict.fromkeys(("tokens_sampled", "tokens_trained", "tokens_scored", "teacher_tokens"), 0)
        cost |= {"seconds": {"merge": seconds, "total": seconds}, "peak_memory_gb": peak_gb(torch.device("cpu"))}
        cost |= {"parameters": sum(math.prod(tensor.shape) for tensor in base.values()), "device": "cpu"}
        cost |= {"reused": {expert: run_cost(folder) or None for expert, folder in zip(args.experts, folders)}}
        for scale, out, partial in zip(args.scale, outs, partials):
            write_json(partial / "args.json", {**dataclasses.asdict(args), "scale": [scale], "out": str(out)})
            write_json(partial / "cost.json", cost)
            if args.method not in ("", "lora_concat"):
                carry_over(base_folder, partial, args.dtype)
            put_in_place(partial, out)
    except (MergeError, OSError) as error:  # a full disk, for one
        stop(error)
    finally:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)

    print(*notes, sep="\n", end="\n" if notes else "")
    done = f"Merged {len(experts)} experts by {args.method}" if args.method else f"Compared {len(experts)} experts"
    print(f"{done} in {seconds:.1f} s: {', '.join(map(str, outs))}")
    if args.method not in ("", "lora_concat"):
        names = [f"merge-{args.method}" + f"-{scale}" * (len(outs) > 1) for scale in args.scale]
        models = " ".join(f"{n}={out}" for n, out in zip(names, outs))
        print(f"Next: python eval.py --models base={args.base} {models}" + " --tasks ..." * (args.base != "tiny/base"))


if __name__ == "__main__":
    run(main)
