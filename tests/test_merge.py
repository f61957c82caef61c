"""Merging: identities, hand-worked numbers, plain references, files that load, and every refusal."""

import functools
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, save_toy_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import merge

METHODS = tuple(name for name in merge.METHODS if name != "lora_concat")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """base, and the experts a, b, c: the base plus noise of their own; float32, tied embeddings, one file each."""
    folder = tmp_path_factory.mktemp("world")
    save_toy_model(folder / "base", seed=0, chat_template=TEMPLATE)
    for seed, name in enumerate("abc"):
        shutil.copytree(folder / "base", folder / name)
        generator = torch.Generator().manual_seed(seed)
        edit(folder / name, lambda _, w, g=generator: w + 0.02 * torch.randn(w.shape, generator=g))
    return folder


@pytest.fixture
def copy(world, tmp_path):
    """copy("a") -> a private copy of the expert, free to be spoilt."""
    return lambda name, new=None: shutil.copytree(world / name, tmp_path / (new or name))


@pytest.fixture
def run(world, tmp_path, monkeypatch, capsys):
    """run("a", folder, method="ties", ...) merges these experts of the world in this process -> (out, what it printed)."""

    def call(*experts, out=tmp_path / "out", base=world / "base", **flags):
        words = ["--base", base, "--experts", *(e if os.sep in str(e) else world / e for e in experts), "--out", out]
        for name, value in flags.items():
            words += [f"--{name}"] if value is True else [f"--{name}", *(value if isinstance(value, list) else [value])]
        monkeypatch.setattr(sys, "argv", ["merge.py", *map(str, words)])
        capsys.readouterr()
        merge.main()
        return out, capsys.readouterr().out

    return call


@pytest.fixture
def refused(run, capsys, tmp_path):
    """As run, for what must stop with exit code 2 and one line, and leave nothing behind -> the line."""

    def call(*experts, **flags):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as stopped:
            run(*experts, **flags)
        lines = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2 and len(lines) == 1 and lines[0].startswith("merge.py: "), lines
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return call


def edit(folder, change, file="model.safetensors"):
    """Rewrite a model's file with change(name, tensor) in place of each tensor; None drops it."""
    changed = {name: change(name, tensor) for name, tensor in load_file(folder / file).items()}
    save_file({k: v.contiguous() for k, v in changed.items() if v is not None}, folder / file, {"format": "pt"})
    return folder


def weights(folder):
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def set_json(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]), name


def assert_close_to_one_ulp(left, right, base):
    """base + (expert - base) rounds twice: to one unit in the last place of the larger of the two."""
    assert left.keys() == right.keys()
    for name in left:
        size = torch.maximum(right[name].abs(), base[name].abs())
        ulp = torch.nextafter(size, torch.tensor(torch.inf)) - size
        assert ((left[name] - right[name]).abs() <= ulp).all(), name


# -------------------------------------------------------------------------------------------------------- maths


class InMemory:
    """A tensor as merge.py sees one in a file."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, list(tensor.shape)

    def read(self, start=0, stop=None):
        return self.tensor.reshape(-1)[start:stop]


def fold(method, taus, weights=None, seed=0, name="t", **settings):
    """A method on whole task vectors, each (n,) or (rows, columns), on a base of zeros -> (n,), block by block."""
    function, _, usual, measure = merge.METHODS[method]
    weights = torch.tensor(weights or [1.0] * len(taus), dtype=torch.float32)
    how = {"gamma": None, "threshold": 1e-5, **usual, **settings, "seed": seed, "name": name, "experts": taus}
    how = SimpleNamespace(**how, columns=taus[0].shape[-1])
    pair = InMemory(torch.zeros_like(taus[0])), [InMemory(tau) for tau in taus]
    vectors = merge.TaskVectors(*pair)
    vars(how).update(measure([vectors], how) if measure else {})
    return torch.cat([function(block, weights, how) for _, block in vectors.blocks()])


T = torch.tensor
TAUS = [T([4.0, -3.0, 1.0, 0.5]), T([-1.0, -5.0, 2.0, 3.0]), T([-2.0, 6.0, 1.0, -7.0])]


@pytest.mark.parametrize(
    "method, settings, expected",
    [
        ("linear", {}, [1 / 3, -2 / 3, 4 / 3, -3.5 / 3]),
        ("linear", {"weights": [1, 1, 2]}, [-1 / 4, 4 / 4, 5 / 4, -10.5 / 4]),
        ("task_arithmetic", {"weights": [1, -1, 0.5]}, [4 + 1 - 1, -3 + 5 + 3, 1 - 2 + 0.5, 0.5 - 3 - 3.5]),
        # Trimmed to two each: [4 -3 0 0] [0 -5 0 3] [0 6 0 -7]; sums 4 -2 0 -4.
        ("ties", {"density": 0.5}, [4, -4, 0, -7]),
        # With weights 1, 1, 2 the sums are 4 -8+12 0 3-14.
        ("ties", {"density": 0.5, "weights": [1, 1, 2]}, [4, 6, 0, -7]),
        ("ties", {"density": 1.0}, [4, -4, 4 / 3, -7]),  # sums 1 -2 4 -3.5
        # The largest of each is cut, the next two stay: [0 -3 1 0] [0 0 2 3] [-2 6 0 0].
        ("breadcrumbs", {"density": 0.5, "gamma": 0.25}, [-2, 3, 3, 3]),
        ("breadcrumbs_ties", {"density": 0.5, "gamma": 0.25}, [-2, 6, 1.5, 3]),
        ("breadcrumbs", {"density": 1.0, "gamma": 0.2}, [1, -2, 4, -3.5]),  # int(0.2 * 4) = 0 outliers
        # Squares 26.25, 39, 90; the signs of the sums are + - + -.
        ("sce", {}, [4, (-3 * 26.25 - 5 * 39) / 65.25, (26.25 + 78 + 90) / 155.25, -7]),
        # Variances 62/9 206/9 2/9 158/9 (times 3: 20.7 68.7 .7 52.7): half are entries 1 and 3. Squares 9.25, 34, 85.
        ("sce", {"select_topk": 0.5}, [0, (-3 * 9.25 - 5 * 34) / 43.25, 0, -7]),
        ("ram", {"threshold": 2.5}, [4, (-3 - 5 + 6) / 3, 0, -2]),  # changed: [4 -3 0 0] [0 -5 0 3] [0 6 0 -7]
    ],
)  # fmt: skip
def test_methods_by_hand(method, settings, expected):
    before = [tau.clone() for tau in TAUS]
    torch.testing.assert_close(fold(method, TAUS, **settings), T(expected, dtype=torch.float32))
    assert all(map(torch.equal, before, TAUS))  # inputs untouched


def test_model_stock_and_slerp_by_hand():
    pair = [T([3.0, 0.0]), T([3.0, 4.0])]  # norms 3 and 5, cosine 9/15 = 0.6
    torch.testing.assert_close(fold("model_stock", pair), 2 * 0.6 / 1.6 * T([3.0, 2.0]))
    opposed = [T([1.0, 0.0]), T([-1.0, 0.1])]
    assert torch.equal(fold("model_stock", opposed), torch.zeros(2))
    three = [T([1.0, 1.0, 0.0]), T([1.0, 0.0, 1.0]), T([0.0, 1.0, 1.0])]  # each cosine 1/2: t = 1.5 / 2
    torch.testing.assert_close(fold("model_stock", three), 0.75 * 2 / 3 * torch.ones(3))
    angle = math.acos(0.6)
    for weights, t in (([1.0, 1.0], 0.5), ([3.0, 1.0], 0.25), ([1.0, 0.0], 0.0)):
        expected = (math.sin((1 - t) * angle) * pair[0] + math.sin(t * angle) * pair[1]) / math.sin(angle)
        torch.testing.assert_close(fold("slerp", pair, weights), expected)
    torch.testing.assert_close(fold("slerp", [pair[0], 2 * pair[0]]), 1.5 * pair[0])  # parallel: the mean
    torch.testing.assert_close(fold("slerp", [pair[0], 0 * pair[0]]), 0.5 * pair[0])  # no angle at all


def plain_ties(task_vectors, weights, density):
    """TIES entry by entry, with a full sort."""
    n, trimmed = len(task_vectors[0]), []
    for tau in task_vectors:
        least = sorted((abs(x) for x in tau), reverse=True)[max(1, int(density * n)) - 1]
        trimmed.append([x if abs(x) >= least else 0.0 for x in tau])
    merged = []
    for entries in zip(*trimmed):
        total = sum(w * x for w, x in zip(weights, entries))
        agreeing = [(w, x) for w, x in zip(weights, entries) if x * total > 0]
        merged.append(sum(w * x for w, x in agreeing) / sum(w for w, _ in agreeing) if agreeing else 0.0)
    return merged


# Small whole numbers: sums are exact, equal magnitudes and cancelling sums are common.
vectors = st.integers(1, 4).flatmap(
    lambda experts: st.integers(1, 40).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-6, 6).map(float), min_size=n, max_size=n), min_size=experts, max_size=experts
        )
    )
)


@settings(deadline=None, max_examples=80)
@given(vectors, st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_ties_equals_the_plain_loop(task_vectors, density):
    factors = [1.0, 2.0, 0.5, 0.0][: len(task_vectors)]
    merged = fold("ties", [T(tau) for tau in task_vectors], factors, density=density)
    torch.testing.assert_close(merged, T(plain_ties(task_vectors, factors, density)))


@pytest.mark.parametrize("kind", ["normal", "sparse", "bfloat16", "equal", "zero", "denormal", "wide", "ordered"])
def test_kth_largest_equals_a_sort(kind):
    def stream(blocks):
        return lambda every: (merge.thinned(block, every) for block in blocks)

    values = torch.randn(200_001, generator=torch.Generator().manual_seed(1)).abs() * 1e-3
    values = {
        "normal": values,
        "sparse": values * (torch.arange(len(values)) % 9 == 0),
        "bfloat16": values.bfloat16().float(),
        "equal": torch.full_like(values, 0.25),
        "zero": torch.zeros_like(values),
        "denormal": values * 1e-38,
        "wide": (values * 3e4).exp(),
        "ordered": values.sort().values,  # each block is unlike the others
    }[kind]
    ordered = values.sort(descending=True).values
    for k in (1, 2, 777, 40_000, 100_000, 200_001):
        assert merge.kth_largest(stream(values.split(60_000)), k) == float(ordered[k - 1])
    # In large tensors, the many entries between the sample's bounds are held as counts.
    large = stream([half.repeat(300) for half in values[:60_000].split(30_000)])
    assert merge.kth_largest(large, 9_000_000) == float(values[:60_000].sort(descending=True).values[29_999])


def test_dare_and_della_are_unbiased_and_seeded():
    tau = T([1.0, -2.0, 0.5, 4.0]).repeat(48).view(24, 8)
    for method, usual in (("dare_linear", {"density": 0.3}), ("della_linear", {"density": 0.5, "epsilon": 0.3})):
        draws = torch.stack([fold(method, [tau], seed=seed, **usual) for seed in range(2000)])
        assert float((draws != 0).float().mean()) == pytest.approx(usual["density"], abs=0.004)  # 4 standard errors
        # Standard error of the mean at the least keep-probability, 0.2: |tau| * sqrt(0.8/0.2/2000) = 0.045 |tau|.
        assert ((draws.mean(0) - tau.flatten()).abs() <= 5 * 0.045 * tau.flatten().abs()).all()
        one, two = ([fold(method, [tau, -tau], [1, 2], seed=seed, **usual) for _ in range(2)] for seed in (0, 1))
        assert torch.equal(*one) and torch.equal(*two) and not torch.equal(one[0], two[0])


def test_dare_scales_up_by_what_it_keeps():
    kept = fold("dare_linear", [torch.ones(4000)], density=0.3)
    torch.testing.assert_close(kept[kept != 0], torch.full(((kept != 0).sum(),), 1 / 0.3), rtol=2e-5, atol=0)


def test_della_keeps_the_large_more_often():
    row = T([0.1, -5.0, 2.0, 0.3]).repeat(5000, 1)
    kept = (fold("della_linear", [row], density=0.5, epsilon=0.3).view(row.shape) != 0).float().mean(0)
    torch.testing.assert_close(kept, T([0.2, 0.8, 0.6, 0.4]), rtol=0, atol=0.03)
    values = fold("della_linear", [row], density=0.5, epsilon=0.3).view(row.shape)[:, 1]
    torch.testing.assert_close(values[values != 0].unique(), T([-5.0 / 0.8]), rtol=1e-4, atol=0)
    column = fold("della_linear", [torch.ones(4000, 1)], density=0.5, epsilon=0.3)  # mergekit has NaN here
    assert float((column != 0).float().mean()) == pytest.approx(0.5, abs=0.03) and set(column.tolist()) == {0.0, 2.0}


def test_experts_and_tensors_drop_different_entries():
    ones = torch.ones(1000)
    alone, both = (fold("dare_linear", [ones] * experts, density=0.5) for experts in (1, 2))
    assert int((both != 0).sum()) > int((alone != 0).sum()) + 150  # 3/4 against 1/2
    names = [fold("dare_linear", [ones], density=0.5, name=f"layers.{layer}") for layer in (0, 1)]
    assert not torch.equal(*names)


@pytest.mark.parametrize("method", [name for name in merge.METHODS if name != "lora_concat"])
def test_blocks_do_not_change_the_result(method, monkeypatch):
    taus = list(torch.randn(2, 60, 80, generator=torch.Generator().manual_seed(0)))
    whole = fold(method, taus)
    monkeypatch.setattr(merge, "BLOCK", 999)
    torch.testing.assert_close(fold(method, taus), whole, rtol=1e-6, atol=1e-7)


# --------------------------------------------------------------------------------------------------- identities


# What makes a method keep every entry. model_stock and slerp take two experts: the same one twice, below.
KEEP_ALL = {name: {"density": 1} for name in METHODS if "density" in merge.METHODS[name][2]}
KEEP_ALL |= {name: {"density": 1, "epsilon": 0} for name in ("della", "della_linear")}
KEEP_ALL |= {name: {"density": 1, "gamma": 0} for name in ("breadcrumbs", "breadcrumbs_ties")}
KEEP_ALL |= {"ram": {"threshold": 1e-30}}


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("model_stock", "slerp")])
def test_one_expert_at_scale_one_is_the_expert(world, run, method):
    out, _ = run("a", method=method, scale=1, **KEEP_ALL.get(method, {}))
    assert_close_to_one_ulp(weights(out), weights(world / "a"), weights(world / "base"))


@pytest.mark.parametrize("method", METHODS)
def test_scale_zero_is_the_base(world, run, method):
    out, _ = run("a", "b", method=method, scale=0)
    assert_equal(weights(out), weights(world / "base"))


@pytest.mark.parametrize("method", ["linear", "ties", "breadcrumbs_ties", "sce", "ram"])
def test_two_equal_experts_are_one(world, run, copy, method):
    one, _ = run("a", method=method)
    two, _ = run("a", copy("a", "twin"), out=one.with_name("two"), method=method)
    assert_equal(weights(one), weights(two))


@pytest.mark.parametrize("method", ["model_stock", "slerp"])
def test_two_equal_experts_are_the_expert(world, run, copy, method):
    out, _ = run("a", copy("a", "twin"), method=method)
    assert_close_to_one_ulp(weights(out), weights(world / "a"), weights(world / "base"))


def test_two_equal_experts_add_up_in_task_arithmetic(run, copy):
    one, _ = run("a", scale=1.0)
    two, _ = run("a", copy("a", "twin"), out=one.with_name("two"), scale=0.5)
    assert_equal(weights(one), weights(two))


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith(("da", "de", "slerp"))])
def test_the_order_of_experts_does_not_matter(run, method):
    taken = method not in ("sce", "ram", "model_stock")
    one, _ = run("a", "b", "c", method=method, **{"weights": [1, 2, 3]} if taken else {})
    two, _ = run("c", "a", "b", out=one.with_name("two"), method=method, **{"weights": [3, 1, 2]} if taken else {})
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, weights(two)[name], rtol=0, atol=2e-7)


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_a_merge_of_files_equals_the_formula(world, run, method):
    out, _ = run("a", "b", "c", method=method, weights=[1, 0.5, 2], scale=0.7)
    base, members = weights(world / "base"), [weights(world / name) for name in "abc"]
    for name, start in base.items():
        taus = [(member[name] - start).flatten() for member in members]
        if method == "ties":
            merged = torch.tensor(plain_ties([tau.tolist() for tau in taus], [1, 0.5, 2], 0.2))
        else:
            merged = (taus[0] + 0.5 * taus[1] + 2 * taus[2]) / (3.5 if method == "linear" else 1)
        torch.testing.assert_close(weights(out)[name], start + 0.7 * merged.view(start.shape), rtol=0, atol=1e-6)


def test_global_trimming_has_one_threshold_for_all_tensors(world, run, copy):
    strong = edit(copy("a"), lambda name, w: w + (0.5 if name == "model.norm.weight" else 0.0))
    for keep in (1 << 23, 0):  # whether tensors are read once, or again for each look
        merge.KEEP, before = keep, merge.KEEP
        out, _ = run(strong, out=strong.with_name(f"out-{keep}"), method="ties", trim="global", density=0.1)
        merge.KEEP = before
        start, end, merged = weights(world / "base"), weights(strong), weights(out)
        taus = torch.cat([(end[name] - start[name]).flatten() for name in start])
        least = taus.abs().sort(descending=True).values[int(0.1 * len(taus)) - 1]
        for name, tensor in merged.items():
            tau = end[name] - start[name]
            torch.testing.assert_close(tensor, start[name] + tau * (tau.abs() >= least), rtol=0, atol=1e-7)
        assert bool((merged["model.norm.weight"] != start["model.norm.weight"]).all())  # by tensor, only a tenth moves
    tensor, _ = run(strong, out=strong.with_name("tensor"), method="ties", density=0.1)
    assert int((weights(tensor)["model.norm.weight"] != start["model.norm.weight"]).sum()) == 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_method_hides_a_broken_value(copy, refused, method, value):
    expert = edit(copy("a"), spoilt(value))
    line = refused(expert, "b", method=method)
    assert f"{expert / 'model.safetensors'}: model.layers.1.mlp.up_proj.weight holds NaN or infinite" in line


def test_dare_depends_on_the_seed_and_not_on_the_files(world, run, copy):
    one, _ = run("a", "b", method="dare_ties")
    sharded = copy("b", "sharded")
    shard(sharded)
    again, _ = run("a", sharded, out=one.with_name("again"), method="dare_ties", shard_size=1e-5)
    other, _ = run("a", "b", out=one.with_name("other"), method="dare_ties", seed=1)
    assert_equal(weights(one), weights(again))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(one)[name], weights(other)[name])


# -------------------------------------------------------------------------------------------------------- files


def shard(folder):
    """Split a model's file in two, the second half of the tensors first, with an index."""
    tensors = weights(folder)
    names = sorted(tensors, reverse=True)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sharded_equals_unsharded_and_both_load(world, run, copy, dtype):
    base, a = copy("base"), copy("a")
    shard(base)
    shard(a)
    whole, _ = run("a", "b", dtype=dtype, scale=1)
    parts, _ = run(a, "b", base=base, out=whole.with_name("parts"), dtype=dtype, scale=1, shard_size=1e-5)
    assert [path.name for path in whole.glob("*.safetensors")] == ["model.safetensors"]
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 2 and (parts / "model.safetensors.index.json").exists()
    assert_equal(weights(whole), weights(parts))
    exact, _ = run("a", "b", out=whole.with_name("exact"), scale=1)
    assert_equal(weights(whole), {k: v.to(getattr(torch, dtype)) for k, v in weights(exact).items()})

    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (whole, parts)]
    ids = AutoTokenizer.from_pretrained(parts).apply_chat_template([{"role": "user", "content": "abc"}])["input_ids"]
    assert ids == [1, 2, 3]
    for model in models:
        assert model.dtype == getattr(torch, dtype)
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        assert torch.equal(model.model.embed_tokens.weight, weights(whole)["model.embed_tokens.weight"])
    assert torch.equal(*(model(torch.tensor([ids])).logits for model in models))


def test_what_lies_beside_the_weights(world, run, copy):
    a = copy("a")
    (a / "cost.json").write_text('{"tokens_sampled": 7}')
    out, printed = run(a, "b", method="ties", dtype="bfloat16", weights=[1, 2])
    recipe = json.loads((out / "args.json").read_text())
    assert recipe["method"] == "ties" and recipe["weights"] == [1, 2] and recipe["density"] == 0.2
    assert recipe["scale"] == [1.0] and recipe["experts"] == [str(a), str(world / "b")] and recipe["out"] == str(out)
    cost = json.loads((out / "cost.json").read_text())
    assert cost["reused"] == {str(a): {"tokens_sampled": 7}, str(world / "b"): None} and cost["device"] == "cpu"
    assert cost["tokens_sampled"] == cost["tokens_trained"] == cost["teacher_tokens"] == 0
    assert 0 < cost["seconds"]["merge"] <= cost["seconds"]["total"] and 0.05 < cost["peak_memory_gb"] < 50
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (world / "base" / name).read_bytes()
    assert f"python eval.py --models base={world / 'base'} merge-ties={out}" in printed
    assert not list(out.parent.glob(".*"))


def test_several_scales_in_one_pass(run, tmp_path):
    run("a", "b", scale=[0.5, 1.0], out=tmp_path / "merge-{scale}")
    for scale in ("0.5", "1.0"):
        alone, _ = run("a", "b", scale=scale, out=tmp_path / f"alone-{scale}")
        assert_equal(weights(tmp_path / f"merge-{scale}"), weights(alone))
        assert json.loads((tmp_path / f"merge-{scale}" / "args.json").read_text())["scale"] == [float(scale)]


def test_dtypes_are_mixed_in_float32(world, run, copy):
    low = edit(copy("a"), lambda _, w: w.bfloat16())
    out, printed = run(low, scale=1)
    expected = {name: w.bfloat16().float() for name, w in weights(world / "a").items()}
    assert_close_to_one_ulp(weights(out), expected, weights(world / "base"))
    assert "16 bits" in printed


def test_a_head_stored_beside_its_tied_embeddings(world, run, copy):
    twice = copy("a")
    tensors = weights(twice)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, twice / "model.safetensors", {"format": "pt"})
    plain, _ = run("a", "b", method="dare_ties")
    out, _ = run(twice, "b", out=plain.with_name("twice"), method="dare_ties")
    assert_equal(weights(out), weights(plain))


def test_integers_are_copied(run, copy, refused):
    extra = {"steps": torch.tensor(3), "mask": torch.tensor([True, False, True]), "ids": torch.arange(5)}
    folders = [copy(name) for name in ("base", "a")]
    for folder in folders:
        save_file({**weights(folder), **extra}, folder / "model.safetensors", {"format": "pt"})
    out, _ = run(folders[1], base=folders[0], dtype="bfloat16")
    merged = weights(out)
    assert all(torch.equal(merged[name], tensor) for name, tensor in extra.items())
    content = (out / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, tensor in merged.items():  # readers that map the file want each tensor aligned
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0
    assert merged["mask"].dtype == torch.bool and merged["model.norm.weight"].dtype == torch.bfloat16
    edit(folders[1], lambda name, w: w + 1 if name == "ids" else w)
    line = refused(folders[1], base=folders[0], out=out.with_name("second"))
    assert str(folders[1] / "model.safetensors") in line and "ids (I64) differs" in line


def test_an_expert_equal_to_the_base_is_pointed_out(world, run, copy):
    out, printed = run("a", copy("base", "untrained"), scale=1)
    assert_close_to_one_ulp(weights(out), weights(world / "a"), weights(world / "base"))
    lines = [line for line in printed.splitlines() if "equals the base" in line]
    assert len(lines) == 1 and "untrained" in lines[0]


def test_trainers_may_rewrite_the_tokenizer(run, copy):
    a = copy("a")
    set_json(a / "tokenizer.json", truncation={"max_length": 8, "strategy": "LongestFirst"})
    text = (a / "chat_template.jinja").read_text()
    (a / "chat_template.jinja").unlink()
    set_json(a / "tokenizer_config.json", chat_template=text)  # as older versions of transformers keep it
    run(a, "b")


def test_an_earlier_merge_is_replaced_only_when_told(run, refused):
    out, _ = run("a", scale=1)
    before = weights(out)
    assert "--overwrite" in refused("b", out=out)
    assert_equal(weights(out), before)
    run("b", out=out, scale=1, overwrite=True)
    assert not torch.equal(weights(out)["model.norm.weight"], before["model.norm.weight"])
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_folder_that_is_no_merge_is_never_replaced(world, copy, refused):
    a = copy("a")
    assert "not empty" in refused("b", out=a, overwrite=True)
    assert "not empty" in refused("b", out=a.parent, overwrite=True)
    assert_equal(weights(a), weights(world / "a"))


def test_an_empty_folder_will_do(run, tmp_path):
    (tmp_path / "out").mkdir()
    run("a")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_killed_merge_leaves_nothing_that_loads(world, tmp_path, run):
    # The merge is held at its fifth tensor, with the file half written, and killed there.
    script = (
        "import sys, time, merge\nfold = merge.task_arithmetic\ncalls = []\n"
        "def slow(*how):\n    calls.append(1)\n    if len(calls) == 5:\n        print('there', flush=True)\n"
        "        time.sleep(60)\n    return fold(*how)\n"
        "merge.task_arithmetic = slow\nmerge.main()\n"
    )
    out = tmp_path / "out"
    flags = ["--base", world / "base", "--experts", world / "a", world / "b", "--out", out]
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, flags)], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"there\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = list(tmp_path.iterdir())
    assert not out.exists() and [path.name for path in left] == [".out.partial"]
    for loads in (AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained):
        with pytest.raises((OSError, ValueError)):
            loads(left[0])
    run("a", "b")  # the next merge takes its place
    AutoModelForCausalLM.from_pretrained(out)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="resident memory is read from /proc")
@pytest.mark.parametrize("trim", ["tensor", "global"])
def test_memory_does_not_grow_with_depth(tmp_path, run, monkeypatch, trim):
    """32 tensors of 2 MB in three models: what is resident at the last is what was at the fifth, to 20 of 160 MB."""
    for seed, name in enumerate(("base", "a", "b")):
        (tmp_path / name).mkdir()
        tensors = {f"layer.{i}": torch.full((1024, 512), float(seed + i)) for i in range(32)}
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    resident, elect = [], merge.elect

    def watched(*how):
        resident.append(int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) / 1e3)
        return elect(*how)

    monkeypatch.setattr(merge, "elect", watched)
    run(tmp_path / "a", tmp_path / "b", base=tmp_path / "base", method="ties", trim=trim)
    assert len(resident) % 32 == 0 and resident[-1] - resident[len(resident) // 8] < 20, resident


# -------------------------------------------------------------------------------------------------------- LoRA


def save_adapter(folder, base, layers, seed, rank=4, whole=(), **config):
    """A PEFT adapter folder with random A and B for these layers; `whole`: tensors that it trained in full."""
    generator = torch.Generator().manual_seed(seed)
    tensors, start = {}, weights(base)
    for layer in layers:
        rows, columns = start[f"{layer}.weight"].shape
        rows, columns = (columns, rows) if config.get("fan_in_fan_out") else (rows, columns)
        tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    tensors |= {f"base_model.model.{name}": start[name] + 1 for name in whole}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 6, "bias": "none", **config}
    config |= {
        "target_modules": sorted({layer.split(".")[-1] for layer in layers}),
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


ATTENTION = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")]
MLP = [f"model.layers.{layer}.mlp.{name}" for layer in (0, 1) for name in ("up_proj", "down_proj")]


def test_lora_experts_add_b_a_times_their_factor(world, run, tmp_path):
    base, norm = world / "base", "model.norm.weight"
    plain = save_adapter(tmp_path / "plain", base, ATTENTION, 1, alpha_pattern={"v_proj": 20}, whole=[norm])
    rooted = save_adapter(tmp_path / "rooted", base, MLP, 2, use_rslora=True)
    out, _ = run(plain, rooted, "a", weights=[1, 0.5, 2], scale=0.7)
    start, end, full = weights(base), weights(out), weights(world / "a")
    pairs = {name: load_file(folder / "adapter_model.safetensors") for name, folder in (("p", plain), ("r", rooted))}
    for name in start:
        tau, layer = 2 * (full[name] - start[name]), f"base_model.model.{name.removesuffix('.weight')}"
        for key, weight in (("p", 20 / 4 if "v_proj" in name else 6 / 4), ("r", 0.5 * 6 / 2)):
            if f"{layer}.lora_A.weight" in pairs[key]:
                tau += weight * pairs[key][f"{layer}.lora_B.weight"] @ pairs[key][f"{layer}.lora_A.weight"]
        tau += 1.0 if name == norm else 0.0
        torch.testing.assert_close(end[name], start[name] + 0.7 * tau, rtol=1e-5, atol=1e-5)


def test_a_layer_that_stores_in_by_out(tmp_path):
    """Of GPT-2: W is (in, out), so what is added is (B A)'; read by rows, as from a file."""
    (tmp_path / "base").mkdir()
    save_file({"h.0.attn.weight": torch.zeros(6, 15)}, tmp_path / "base" / "model.safetensors")
    folder = save_adapter(tmp_path / "a", tmp_path / "base", ["h.0.attn"], 0, fan_in_fan_out=True)
    stored = merge.adapter_tensors(folder, merge.model_tensors(tmp_path / "base"))["h.0.attn.weight"]
    a, b = load_file(folder / "adapter_model.safetensors").values()
    assert a.shape == (4, 6) and b.shape == (15, 4) and stored.shape == (6, 15)
    torch.testing.assert_close(stored.read().view(6, 15), 6 / 4 * (b @ a).T)
    torch.testing.assert_close(stored.read(15, 45).view(2, 15), 6 / 4 * (b @ a).T[1:3])


def test_lora_concat_is_the_sum(world, run, tmp_path):
    base = world / "base"
    one = save_adapter(tmp_path / "one", base, ATTENTION + MLP, 1, rank=3)
    two = save_adapter(tmp_path / "two", base, ATTENTION, 2, rank=5, use_rslora=True)
    flags = {"weights": [1, -0.5], "scale": 0.7}
    adapter, _ = run(one, two, out=tmp_path / "adapter", method="lora_concat", **flags)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 8 and config["base_model_name_or_path"] == str(base)
    assert all(8 in tensor.shape for tensor in load_file(adapter / "adapter_model.safetensors").values())
    summed, _ = run(one, two, out=tmp_path / "sum", method="task_arithmetic", **flags)
    applied, _ = run(adapter, out=tmp_path / "applied", scale=1)
    for name, tensor in weights(summed).items():
        torch.testing.assert_close(weights(applied)[name], tensor, rtol=1e-5, atol=2e-6)
    assert not torch.equal(
        weights(summed)["model.layers.0.mlp.up_proj.weight"], weights(base)["model.layers.0.mlp.up_proj.weight"]
    )


def test_lora_as_peft_has_it(world, run, tmp_path):
    peft = pytest.importorskip("peft")
    folders, merged = [], []
    for seed, how in enumerate(
        ({"use_rslora": True}, {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3}})
    ):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(world / "base")
        config = peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **how
        )
        model = peft.get_peft_model(model, config)
        model.save_pretrained(folders_name := tmp_path / f"adapter{seed}")
        folders.append(folders_name)
        merged.append(model.merge_and_unload().state_dict())
    for folder, state in zip(folders, merged):
        out, _ = run(folder, out=tmp_path / f"full-{folder.name}", scale=1)
        for name, tensor in weights(out).items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6)
    concat, _ = run(*folders, out=tmp_path / "concat", method="lora_concat", scale=1)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(world / "base"), concat)
    state, start = loaded.merge_and_unload().state_dict(), weights(world / "base")
    for name, tensor in start.items():
        torch.testing.assert_close(state[name] - tensor, sum(m[name] - tensor for m in merged), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config, word",
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias is all"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa"),
        ({"base_model_name_or_path": "elsewhere"}, "give --base"),
    ],
)
def test_adapters_that_are_not_plain_lora(world, copy, refused, tmp_path, config, word):
    folder = save_adapter(tmp_path / "lora", world / "base", ATTENTION, 0)
    set_json(folder / "adapter_config.json", **config)
    if word == "give --base":
        set_json(folder / "adapter_config.json", base_model_name_or_path=str(copy("base", "elsewhere")))
    line = refused(folder, "a")
    assert word in line and "lora" in line


def test_adapters_with_other_tensors(world, refused, tmp_path):
    folder = save_adapter(tmp_path / "lora", world / "base", ATTENTION, 0)
    tensors = load_file(folder / "adapter_model.safetensors")
    for change, word in (
        ({"base_model.model.x.lora_embedding_A": torch.ones(2, 2)}, "x.lora_embedding_A is neither A nor B"),
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 4)}, "layers.9.mlp.up_proj lacks"),
        ({f"base_model.model.{ATTENTION[0]}.lora_A.weight": torch.ones(4, 99)}, "[32, 99] float, in the base [32, 32]"),
        ({f"base_model.model.{ATTENTION[0]}.lora_B.weight": torch.full((32, 4), torch.inf)}, "NaN or infinite"),
    ):
        save_file(tensors | change, folder / "adapter_model.safetensors")
        assert word in refused(folder, "a")
    assert "lora_concat takes adapters" in refused("a", "b", method="lora_concat")


# ---------------------------------------------------------------------------------------------------- geometry


def test_geometry_of_task_vectors_by_hand(tmp_path, run):
    """Two experts that differ from a base of ones in one layer's matrix and in an embedding."""
    names = ("model.embed.weight", "model.layers.0.up_proj.weight")
    start = {name: torch.ones(4, 4) for name in names}
    moved = {name: {key: tensor.clone() for key, tensor in start.items()} for name in "ab"}
    moved["a"][names[0]][0, :2] += T([3.0, 4.0])  # a direction: row 0
    moved["b"][names[0]][0, :2] += T([3.0, -4.0])
    moved["a"][names[1]][0, 0] += 2.0
    moved["b"][names[1]][:2, 0] += T([1.0, 1.0])
    moved["b"][names[1]][3, 3] += 1e-3  # lost in bfloat16, whose step at 1 is 1/128
    for name, tensors in {"base": start, **moved}.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    out, printed = run(tmp_path / "a", tmp_path / "b", base=tmp_path / "base", geometry=True, rank=1)
    assert "Compared 2 experts" in printed and not (out / "model.safetensors").exists()
    found = json.loads((out / "geometry.json").read_text())
    near = functools.partial(pytest.approx, rel=1e-5, abs=1e-5)
    whole, layer = found["all"], found["layer 0"]
    assert found["module up_proj"] == layer and "layer 1" not in found
    assert whole["parameters"] == 32 and layer["parameters"] == 16
    assert whole["norm"] == near([29**0.5, 27**0.5]) and layer["norm"] == near([2, 2**0.5])
    assert whole["cosine"][0][1] == near((9 - 16 + 2) / (29 * 27) ** 0.5) and layer["cosine"][0][1] == near(0.5**0.5)
    assert layer["share of displacement"] == near([4 / 29, 2 / 27])
    assert layer["relative displacement"] == near([8 / 29, 4 / 27])
    assert whole["below 1e-05"] == [29 / 32, 27 / 32] and whole["equal in bfloat16"] == [29 / 32, 28 / 32]
    assert whole["jaccard"][0][1] == near(3 / 5) and whole["jaccard"][0][0] == 1
    assert whole["sign agreement"][0][1] == near(2 / 3)
    # Elected signs: + 0 in the embedding (4 - 4 is a draw, which erases nothing by sign), + + + in the layer.
    assert whole["erased by election"] == near([0, 0])
    assert layer["overlap"][0][1] == near(0.5) and layer["overlap by chance"] == near(1 / 4)
    assert layer["angles"][0][1] == near([45.0]) and layer["angles"][0][0] == near([0.0], abs=1e-3)
    sigma = (2**0.5, 1e-3)
    shares = [s / sum(sigma) for s in sigma]
    assert layer["effective rank"] == near([1.0, math.exp(-sum(s * math.log(s) for s in shares))], rel=1e-4)
    assert whole["overlap"][0][1] == near(0.75)  # mean of both matrices


def test_geometry_beside_a_merge(world, run, copy):
    lora = save_adapter(copy("a").with_name("lora"), world / "base", ATTENTION, 0)
    out, _ = run("a", "b", lora, method="ties", geometry=True)
    plain, _ = run("a", "b", lora, method="ties", out=out.with_name("plain"))
    assert_equal(weights(out), weights(plain))
    found = json.loads((out / "geometry.json").read_text())
    ranks = found["module q_proj"]["effective rank"]
    assert ranks[2] <= 4.0001 < 15 < ranks[0]  # the adapter has rank 4, the others are noise
    assert {"layer 0", "layer 1", "module embed_tokens"} <= found.keys()
    if importlib.util.find_spec("matplotlib"):
        assert (out / "geometry.png").read_bytes()[:4] == b"\x89PNG"


def test_geometry_without_matplotlib(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out, printed = run("a", "b", geometry=True, rank=0)
    assert "no geometry.png, since matplotlib is not installed" in printed and (out / "geometry.json").exists()
    assert "overlap" not in json.loads((out / "geometry.json").read_text())["all"]


# ---------------------------------------------------------------------------------------------------- mergekit


@pytest.fixture
def peer(world, tmp_path):
    """peer("ties", density=0.5, ...) merges a, b and c of the world with mergekit 0.1.5, in float32 -> its tensors."""
    pytest.importorskip("mergekit", reason="mergekit is not installed, see tests/bench/requirements.txt")
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    def call(method, experts="abc", weights=(1.0, 1.0, 1.0), base=True, **parameters):
        models = [
            {"model": str(world / name), "parameters": {"weight": weight}} for name, weight in zip(experts, weights)
        ]
        config = {"merge_method": method, "models": models, "parameters": parameters, "dtype": "float32"}
        config |= {"base_model": str(world / "base")} if base else {}
        out = tmp_path / "mergekit"
        shutil.rmtree(out, ignore_errors=True)
        run_merge(MergeConfiguration.model_validate(config), str(out), options=MergeOptions(copy_tokenizer=False))
        return {name: tensor for name, tensor in globals()["weights"](out).items() if name != "lm_head.weight"}

    return call


@pytest.mark.parametrize(
    "method, ours, theirs",
    [
        ("linear", {"weights": [1, 0.5, 2]}, {"weights": [1, 0.5, 2], "base": False}),
        ("task_arithmetic", {"weights": [1, -0.5, 2], "scale": 0.7}, {"weights": [1, -0.5, 2], "lambda": 0.7}),
        ("ties", {"density": 0.3, "weights": [1, 0.5, 2]}, {"density": 0.3, "weights": [1, 0.5, 2]}),
        ("breadcrumbs", {"density": 0.6, "gamma": 0.1, "scale": 1}, {"density": 0.6, "gamma": 0.1}),
        ("breadcrumbs", {"scale": 1}, {"density": 0.9, "gamma": 0.01}),  # int(0.01 * 32) = 0 outliers in norms
        # Theirs divides by the agreeing weights only where it is told to.
        ("breadcrumbs_ties", {"density": 0.6, "gamma": 0.1}, {"density": 0.6, "gamma": 0.1, "normalize": True}),
        ("sce", {}, {}),
        ("sce", {"select_topk": 0.4}, {"select_topk": 0.4}),
        ("ram", {"threshold": 0.02}, {"epsilon": 0.02}),
        ("model_stock", {}, {}),
    ],
)
def test_the_same_as_mergekit(world, run, peer, method, ours, theirs):
    expected = peer(method, **theirs)
    out, _ = run("a", "b", "c", method=method, **ours)
    merged, clamped = weights(out), 0
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        if method == "model_stock" and torch.equal(tensor, weights(world / "base")[name]):
            clamped += 1  # a negative cosine, where theirs leaves the segment from base to mean
        else:
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    assert clamped < len(merged)


def test_sce_where_mergekit_gives_up_its_shares(world, run, copy, peer):
    """Where the mean squares sum to less than 1e-6, mergekit weighs the experts alike, though one moved ten times as far."""
    base, folders = weights(world / "base"), []
    for name, size in (("a", 0.02), ("b", 0.002), ("c", 0.002)):
        folders.append(edit(copy(name), lambda key, w, size=size: base[key] + size * (w - base[key])))
    out, _ = run(*folders, method="sce")
    theirs, alike = (
        peer("sce", experts=folders),
        weights(run(*folders, out=out.with_name("ties"), method="ties", density=1)[0]),
    )
    for name, tensor in weights(out).items():
        torch.testing.assert_close(theirs[name], alike[name], rtol=0, atol=1e-6)  # equal shares: TIES without trimming
        taus = torch.stack([(weights(folder)[name] - base[name]).flatten() for folder in folders])
        shares = taus.square().sum(1) / taus.square().sum()
        expected = torch.tensor([plain_sce(column, shares.tolist()) for column in taus.T.tolist()])
        torch.testing.assert_close(tensor, base[name] + expected.view(tensor.shape), rtol=0, atol=1e-7)
    assert (
        max(float((theirs[name] - base[name]).sub(weights(out)[name] - base[name]).abs().max()) for name in base) > 1e-4
    )


def plain_sce(entries, shares):
    agreeing = [(share, x) for share, x in zip(shares, entries) if x * sum(entries) > 0]
    return sum(share * x for share, x in agreeing) / sum(share for share, _ in agreeing) if agreeing else 0.0


def test_dare_and_della_are_those_of_mergekit_on_average():
    """Theirs scales what is kept to the L1 norm that the tensor had: other values, but nearly the same on average."""
    sparsify = pytest.importorskip("mergekit.sparsify", reason="mergekit is not installed")
    tau = torch.linspace(-2.0, 2.0, 64).view(4, 16)
    torch.manual_seed(0)
    for method, how in (("dare_linear", {"density": 0.6}), ("della_linear", {"density": 0.6, "epsilon": 0.2})):
        theirs = sparsify.bernoulli if method == "dare_linear" else sparsify.della_magprune
        left = torch.stack([fold(method, [tau], seed=seed, **how) for seed in range(3000)])
        right = torch.stack([theirs(tau, **how, rescale_norm=sparsify.RescaleNorm.l1).flatten() for _ in range(3000)])
        kept = ((left != 0).float().mean(0) - (right != 0).float().mean(0)).abs().max()
        assert kept < 0.06  # the same probabilities, entry by entry: 4.5 standard errors
        if method == "dare_linear":
            assert (left.mean(0) - tau.flatten()).abs().max() < 0.15
            assert (right.mean(0) - tau.flatten()).abs().max() < 0.15
        assert (
            right.unique().numel() > 1000
        ) and left.unique().numel() <= 65  # one factor an entry; theirs varies by draw


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"density": 0}, ["--density", "no effect", "task_arithmetic"]),
        ({"method": "ties", "density": 0}, ["--density", "above 0"]),
        ({"method": "ties", "density": 1.5}, ["--density", "1.5"]),
        ({"weights": [1]}, ["--weights", "2"]),
        ({"weights": [1, "nan"]}, ["--weights", "finite"]),
        ({"scale": "inf"}, ["--scale", "finite"]),
        ({"method": "linear", "weights": [1, -1]}, ["--weights", "linear"]),
        ({"method": "ties", "weights": [0, 0]}, ["--weights", "not all 0"]),
        ({"scale": [0.5, 1]}, ["{scale}", "--out"]),
        ({"scale": [1, 1.0], "out": "x-{scale}"}, ["different values"]),
        ({"seed": -1}, ["--seed"]),
        ({"shard_size": 0}, ["--shard_size"]),
        ({"method": "slurp"}, ["slurp", "task_arithmetic", "slerp"]),
        ({"method": "slerp", "weights": [0, 0]}, ["slerp", "not all 0"]),
        ({"method": "ties", "gamma": 0.1}, ["--gamma", "breadcrumbs"]),
        ({"method": "della", "density": 0.1}, ["--density 0.1", "--epsilon"]),
        ({"method": "breadcrumbs", "density": 0.95, "gamma": 0.1}, ["--density 0.95", "--gamma"]),
        ({"method": "sce", "select_topk": 0}, ["--select_topk", "above 0"]),
        ({"method": "sce", "weights": [1, 2]}, ["--weights", "sce"]),
        ({"method": "dare_ties", "trim": "global"}, ["--trim", "dare_ties"]),
        ({"geometry": True, "weights": [1, 2]}, ["--weights", "none"]),
        ({"threshold": 0}, ["--threshold"]),
        ({"lambda": 1}, ["unknown argument --lambda"]),
        ({"base": "no/such"}, ["no/such", "folder, or a hub id"]),
    ],
)
def test_wrong_flags(refused, flags, words):
    line = refused("a", "b", **flags)
    assert all(word in line for word in words), line


def test_without_arguments_and_without_experts(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge.py"])
    with pytest.raises(SystemExit):
        merge.main()
    assert "bash speedrun.sh" in capsys.readouterr().err


def test_the_base_or_an_expert_twice(world, refused, tmp_path):
    assert "named twice" in refused("a", "base")
    assert "named twice" in refused("a", "b", "a")
    (tmp_path / "link").symlink_to(world / "a")
    assert f"{tmp_path / 'link'} is named twice" in refused("a", tmp_path / "link")


def grown(name, tensor):
    return torch.cat([tensor, tensor[:1]]) if name == "model.norm.weight" else tensor


def without_norm(name, tensor):
    return None if name == "model.norm.weight" else tensor


def spoilt(value):
    def change(name, tensor):
        if name == "model.layers.1.mlp.up_proj.weight":
            tensor[3, 5] = value
        return tensor

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (grown, ["model.norm.weight", "[33]", "[32]"]),
        (without_norm, ["lacks model.norm.weight"]),
        (spoilt(float("nan")), ["model.safetensors: model.layers.1.mlp.up_proj.weight", "NaN"]),
        (spoilt(float("-inf")), ["model.safetensors: model.layers.1.mlp.up_proj.weight", "infinite"]),
        (lambda name, w: w.int() if name == "model.norm.weight" else w, ["model.norm.weight", "I32", "float"]),
    ],
)
def test_other_tensors(copy, refused, change, words):
    expert = edit(copy("a"), change)
    line = refused("b", expert)
    assert str(expert) in line and all(word in line for word in words), line


def test_an_extra_tensor(copy, refused):
    expert = copy("a")
    tensors = weights(expert)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1  # untied in training
    save_file(tensors, expert / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight is not in the base" in refused("b", expert)


def test_a_base_that_holds_nan(copy, refused):
    base = edit(copy("base"), spoilt(float("nan")))
    assert f"{base / 'model.safetensors'}: model.layers.1.mlp.up_proj.weight holds NaN" in refused("a", base=base)


def test_a_merge_that_overflows(refused):
    assert "model.embed_tokens.weight: float16 cannot hold" in refused("a", dtype="float16", scale=1e9)


def test_other_tokenizers_and_templates(copy, run, refused):
    a = copy("a")
    (a / "chat_template.jinja").write_text(TEMPLATE + " ")
    assert "chat_template.jinja" in refused(a)
    out, _ = run(a, ignore_tokenizer=True)
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    b = copy("b")
    vocabulary = json.loads((b / "tokenizer.json").read_text())["model"]
    swapped = {**vocabulary["vocab"], "a": vocabulary["vocab"]["b"], "b": vocabulary["vocab"]["a"]}
    set_json(b / "tokenizer.json", model={**vocabulary, "vocab": swapped})
    line = refused(b, out=out.with_name("second"))
    assert str(b) in line and "tokenizer.json" in line and "--ignore_tokenizer" in line


def test_another_start(world, copy, refused):
    a, elsewhere = copy("a"), copy("base", "elsewhere")
    (a / "args.json").write_text(json.dumps({"model": str(elsewhere)}))
    assert f"give --base {elsewhere}" in refused(a)
    (a / "args.json").write_text(json.dumps({"model": str(world / "base")}))
    set_json(a / "config.json", num_attention_heads=2)
    assert "num_attention_heads is 2, in the base 4" in refused(a)


def test_broken_folders(copy, refused):
    a = copy("a")
    (a / "model.safetensors").rename(a / "pytorch_model.bin")
    assert "only .bin weights" in refused(a)
    (a / "pytorch_model.bin").unlink()
    assert "no model.safetensors" in refused(a)
    (a / "config.json").unlink()
    assert "no config.json" in refused(a)
    b = copy("b")
    shard(b)
    (b / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refused(b)
    c = copy("c")
    content = (c / "model.safetensors").read_bytes()
    (c / "model.safetensors").write_bytes(content[:-100])
    assert f"{c / 'model.safetensors'} is missing or broken" in refused(c)
    (c / "model.safetensors").write_bytes(content)
    (c / "tokenizer.json").write_text("{")
    assert "tokenizer.json is not JSON" in refused(c)


def test_an_out_that_cannot_be_written(world, run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        run("a", out=tmp_path / "file" / "out")
    assert "file" in capsys.readouterr().err
    assert time.time() > (world / "base" / "config.json").stat().st_mtime  # the base is read, never written
