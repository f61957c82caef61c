"""The scripts end to end: one step against a plain reference, run folders, resuming, errors, and that experts learn."""

import copy
import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, save_toy_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TRAINERS = ("grpo_expert", "mix_rl", "mopd")
TINY_DOMAINS = ("math", "code", "science", "instruction")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run("grpo_expert", "--steps", 1, ...) calls main() of the script in this process -> its run folder."""

    def call(script, *flags, out=None):
        out = out or tmp_path / "run"
        monkeypatch.chdir(ROOT)  # the defaults are relative to it
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags), "--out", str(out)])
        importlib.import_module(script).main()
        return out

    return call


@pytest.fixture
def refused(run, capsys):
    """Call a script that must stop with exit code 2 and one line on stderr -> that line."""

    def call(script, *flags, **more):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            run(script, *flags, **more)
        lines = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2
        assert len(lines) == 1 and lines[0].startswith(f"{script}.py: "), lines
        return lines[0]

    return call


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def toy_flags(toy, script="grpo_expert", **changes):
    """Flags of a small step in the toy world: 6 prompts of 3 completions of up to 6 letters."""
    tasks = [toy / "math.jsonl"] if script == "grpo_expert" else [toy / "math.jsonl", toy / "code.jsonl"]
    flags = dict(model=toy / "base", tasks=tasks, steps=1, prompts_per_step=6, num_generations=3, device="cpu")
    flags |= dict(dtype="float32", max_completion_length=6, save_every=0, learning_rate=0.01)
    if script == "mopd":
        flags["teachers"] = [f"math={toy / 'math'}", f"code={toy / 'code'}"]
    words = []
    for name, value in (flags | changes).items():
        words += [f"--{name}"] if value is True else [f"--{name}", *(value if isinstance(value, list) else [value])]
    return words


def toy_score(completion):
    """A reward with some variance in every group: from 0 to 1 by how many of the letters are a, b or c."""
    return sum(letter in "abc" for letter in completion) / max(1, len(completion))


@pytest.fixture
def watch(monkeypatch):
    """Replace a script's rewards by toy_score and record what its sampler drew -> the list of (prompts, rollouts)."""

    def start(script):
        module, drawn = importlib.import_module(script), []

        def spy(model, prompts, **how):
            drawn.append((prompts, original(model, prompts, **how)))
            return drawn[-1][1]

        original = module.sample
        monkeypatch.setattr(module, "sample", spy)
        monkeypatch.setattr(module, "verify_batch", lambda rows: [toy_score(text) for _, text, _ in rows])
        return drawn

    return start


# ------------------------------------------------------------------------ one step against a plain reference: GRPO


def row_logprobs(model, prompt, tokens, temperature):
    """log pi of the tokens of one row: nothing padded, the whole (T, V) in memory."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)


def plain_grpo(folder, prompts, rollouts, G, how):
    """The update as the docstrings state it, row by row -> metrics, and the gradient of the first iteration."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = copy.deepcopy(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [row[:n].tolist() for row, n in zip(rollouts.tokens, rollouts.lengths.tolist())]
    rewards = [toy_score(tokenizer.decode(row, skip_special_tokens=True)) for row in tokens]
    cap, cache = how["max_completion_length"], how.get("overlong_cache", 0)
    shaped = [r - (min(1, max(0, len(t) - cap + cache) / cache) if cache else 0) for r, t in zip(rewards, tokens)]
    shaped = torch.tensor(shaped).view(-1, G)
    scale = {
        "none": torch.tensor(1.0), "group": shaped.std(-1, keepdim=True) + 1e-4, "batch": shaped.std() + 1e-4
    }[how["scale_rewards"]]  # fmt: skip
    advantages = ((shaped - shaped.mean(-1, keepdim=True)) / scale).flatten()
    counted = [row for row in range(len(tokens)) if rollouts.finished[row] or not how.get("mask_truncated")]
    batch_tokens = sum(len(tokens[row]) for row in counted)
    optimizer = torch.optim.AdamW(model.parameters(), how["learning_rate"] / 3, (0.9, 0.95), weight_decay=0)
    first = None
    for _ in range(how.get("num_iterations", 1)):
        loss, kl_sum = 0, 0
        for row in counted:
            logprobs = row_logprobs(model, prompts[row // G], tokens[row], how["temperature"])
            with torch.no_grad():
                reference = row_logprobs(start, prompts[row // G], tokens[row], how["temperature"])
            N = {
                "token": batch_tokens, "sequence": len(counted) * len(tokens[row]), "constant": len(tokens) * cap
            }[how["loss_norm"]]  # fmt: skip
            ratio = (logprobs - rollouts.logprobs[row, : len(tokens[row])]).exp()
            A = advantages[row]
            surrogate = torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A)
            kl = (reference - logprobs).exp() - (reference - logprobs) - 1
            loss = loss + ((how.get("beta", 0) * kl - surrogate) / N).sum()
            kl_sum += float(kl.detach().sum())
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        first = first or {name: weight.grad.clone() for name, weight in model.named_parameters()}
        optimizer.step()
    return {
        "reward/mean": sum(rewards) / len(rewards),
        "completion/length": sum(map(len, tokens)) / len(tokens),
        "completion/truncated": sum(row[-1] != 0 for row in tokens) / len(tokens),
        "groups/zero_variance": float((shaped.max(-1).values == shaped.min(-1).values).float().mean()),
        "policy/entropy": -float(rollouts.logprobs.sum()) / sum(map(len, tokens)),
        "policy/grad_norm": norm,
        "policy/learning_rate": how["learning_rate"] / 3,  # the first of three steps of warm-up
        "tokens/sampled": sum(map(len, tokens)),
        "loss": float(loss.detach()),
        "kl": kl_sum / batch_tokens,
    }, first


@pytest.mark.parametrize(
    "script, changes",
    [
        ("grpo_expert", dict()),
        ("grpo_expert", dict(loss_norm="sequence", scale_rewards="group", tokens_per_microbatch=20, temperature=0.8)),
        ("grpo_expert", dict(loss_norm="constant", scale_rewards="batch", tokens_per_microbatch=1)),
        ("grpo_expert", dict(mask_truncated=True, overlong_cache=3, tokens_per_microbatch=20)),
        ("grpo_expert", dict(num_iterations=3, beta=0.3, learning_rate=0.2, tokens_per_microbatch=30)),
        ("mix_rl", dict(tokens_per_microbatch=20, temperature=0.8)),
        ("mix_rl", dict(loss_norm="sequence", mask_truncated=True, num_iterations=2, beta=0.3, learning_rate=0.2)),
    ],
)
def test_one_step_equals_the_plain_update(run, watch, toy, script, changes):
    how = dict(scale_rewards="none", loss_norm="token", temperature=1.0, learning_rate=0.01, max_completion_length=6)
    how |= changes
    drawn = watch(script)
    out = run(script, *toy_flags(toy, script, **how))
    expected, gradient = plain_grpo(toy / "base", *drawn[0], 3, how)
    metrics = json_lines(out / "metrics.jsonl")[0]
    loss, kl = expected.pop("loss"), expected.pop("kl")
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert metrics["policy/sampler_gap"] < 1e-5
    assert expected["policy/grad_norm"] > 0.01
    assert 0 < expected["completion/truncated"] < 1  # else the masks of this test would not be tested
    if how.get("num_iterations", 1) == 1:
        assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-6)
        assert metrics["policy/clip_fraction"] == 0
        # AdamW's first step is the learning rate against the gradient's sign.
        before, after = weights_of(toy / "base"), weights_of(out)
        for name, slope in gradient.items():
            sure = slope.abs() > 1e-4 * expected["policy/grad_norm"]
            moved = (after[name] - before[name])[sure]
            torch.testing.assert_close(moved, -0.01 / 3 * slope[sure].sign(), rtol=1e-2, atol=1e-6)
    else:  # the clip was at work, and the KL held back
        assert metrics["policy/clip_fraction"] > 0.01
        assert 0 < metrics["policy/kl"] < kl  # the mean over the iterations, of which the first has none


def test_skipped_groups_stay_in_the_normalizer(run, watch, toy, monkeypatch):
    """Groups with equal rewards need no forward, but their tokens count; when all are equal nothing is updated."""
    module = importlib.import_module("grpo_expert")
    drawn = watch("grpo_expert")
    # only group 0 learns
    monkeypatch.setattr(module, "verify_batch", lambda rows: [float(i == 0) for i in range(len(rows))])
    flags = toy_flags(toy, scale_rewards="none")
    metrics = json_lines(run("grpo_expert", *flags) / "metrics.jsonl")[0]
    lengths = drawn[0][1].lengths.tolist()
    assert metrics["groups/zero_variance"] == pytest.approx(5 / 6)
    # A = 2/3, -1/3, -1/3, and every ratio is 1
    expected = -(2 / 3 * lengths[0] - sum(lengths[1:3]) / 3) / sum(lengths)
    assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_without_any_signal_nothing_moves(run, watch, toy, monkeypatch):
    watch("grpo_expert")
    monkeypatch.setattr(importlib.import_module("grpo_expert"), "verify_batch", lambda rows: [1.0] * len(rows))
    out = run("grpo_expert", *toy_flags(toy, weight_decay=0.1))
    metrics = json_lines(out / "metrics.jsonl")[0]
    assert metrics["groups/zero_variance"] == 1 and metrics["policy/grad_norm"] == 0
    before, after = weights_of(toy / "base"), weights_of(out)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dynamic_sampling_replaces_groups_without_signal(run, watch, toy, tmp_path, monkeypatch):
    module, calls = importlib.import_module("grpo_expert"), []
    drawn = watch("grpo_expert")

    def scores(rows):  # of 6 groups a round: 2 with signal in the first round, 3 in the second, 6 in the third
        calls.append(len(rows))
        return [float(row % 3 == 0 and row // 3 < (2, 3, 6)[len(calls) - 1]) for row in range(len(rows))]

    monkeypatch.setattr(module, "verify_batch", scores)
    one = tmp_path / "one.jsonl"
    one.write_text((toy / "math.jsonl").read_text().splitlines()[0])
    metrics = json_lines(run("grpo_expert", *toy_flags(toy, dynamic_sampling=True, tasks=[one])) / "metrics.jsonl")[0]
    assert calls == [18, 18, 18]
    assert metrics["groups/zero_variance"] == 0 and metrics["reward/mean"] == pytest.approx(1 / 3)
    assert metrics["tokens/sampled"] == sum(int(rollouts.lengths.sum()) for _, rollouts in drawn)  # rejected ones too
    # The same prompts again, and other samples of them.
    assert drawn[0][0] == drawn[1][0] == drawn[2][0]
    assert len({tuple(row) for _, rollouts in drawn for row in rollouts.tokens.tolist()}) > 40


@pytest.mark.parametrize("script", TRAINERS)
def test_an_epoch_meets_every_task(run, watch, toy, script):
    """Six tasks of math and four of code: a step of as many prompts meets each once, and so does the next."""
    drawn = watch(script)
    count = 6 if script == "grpo_expert" else 10
    run(script, *toy_flags(toy, script, prompts_per_step=count, steps=2))
    assert [len({tuple(prompt) for prompt in prompts}) for prompts, _ in drawn] == [count, count]
    assert drawn[0][0] != drawn[1][0]


@pytest.mark.parametrize("script", TRAINERS)
def test_bfloat16_keeps_float32_weights(run, watch, toy, script):
    drawn = watch(script)
    how = dict(dtype="bfloat16", steps=3, warmup_steps=0, prompts_per_step=10, learning_rate=0.03)
    out = run(script, *toy_flags(toy, script, **how))
    assert len(drawn) == 3
    for row in json_lines(out / "metrics.jsonl"):  # the sampler is updated along with the learner
        assert 0 < row["policy/sampler_gap"] < 0.05
    weights = weights_of(out)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32


def test_importance_weights_of_a_bfloat16_sampler(run, toy, tmp_path, monkeypatch):
    """The loss carries min(pi/mu, tis_cap): exp(.03) more when the sampler claims .03 less, and the cap below it."""
    module = importlib.import_module("grpo_expert")
    original = module.sample
    monkeypatch.setattr(module, "verify_batch", lambda rows: [toy_score(text) for _, text, _ in rows])

    def loss(shift, cap):
        def shifted(model, prompts, **how):
            out = original(model, prompts, **how)
            within = torch.arange(out.tokens.shape[1]) < out.lengths[:, None]
            return out._replace(logprobs=out.logprobs - shift * within)

        monkeypatch.setattr(module, "sample", shifted)
        out = run("grpo_expert", *toy_flags(toy, dtype="bfloat16", tis_cap=cap), out=tmp_path / f"{shift}-{cap}")
        metrics = json_lines(out / "metrics.jsonl")[0]
        assert metrics["policy/kl"] == metrics["policy/clip_fraction"] == 0  # the old policy is recomputed
        return metrics["policy/loss"]

    assert abs(loss(0, 2)) > 1e-3
    assert loss(0.03, 2) == pytest.approx(loss(0, 2.001) * math.exp(0.03), rel=1e-3)
    assert loss(0.03, 0.5) == pytest.approx(2 * loss(0.03, 0.25), rel=1e-3)


def test_the_sampler_by_generate_trains_too(run, toy):
    metrics = json_lines(run("grpo_expert", *toy_flags(toy, sampler="hf")) / "metrics.jsonl")[0]
    assert metrics["policy/sampler_gap"] < 1e-5


def test_a_sampler_that_is_not_the_learner_is_stopped(refused, toy, monkeypatch):
    module = importlib.import_module("grpo_expert")
    original = module.sample

    def wrong(model, prompts, **how):
        out = original(model, prompts, **how)
        return out._replace(logprobs=out.logprobs - 0.01)

    monkeypatch.setattr(module, "sample", wrong)
    monkeypatch.setattr(module, "verify_batch", lambda rows: [toy_score(text) for _, text, _ in rows])
    assert "log-probabilities differ" in refused("grpo_expert", *toy_flags(toy))


@pytest.mark.parametrize(
    "script, loss", [("grpo_expert", "policy_loss"), ("mix_rl", "policy_loss"), ("mopd", "full_kl_loss")]
)
def test_a_gradient_that_is_not_finite_is_stopped(refused, toy, monkeypatch, script, loss):
    """Else the weights become nan, and the next step's sampler fails on them without a word about why."""
    module = importlib.import_module(script)
    original = getattr(module, loss)
    monkeypatch.setattr(module, loss, lambda *args, **how: original(*args, **how) * math.inf)
    monkeypatch.setattr(module, "verify_batch", lambda rows: [toy_score(text) for _, text, _ in rows])
    assert "--learning_rate" in refused(script, *toy_flags(toy, script, steps=2, max_bad_steps=1))


# ------------------------------------------------------------------------ one step against a plain reference: MOPD


def plain_mopd(toy, prompts, rollouts, domains, form, domain_weight):
    """MOPD's update row by row, each row with the teacher of its domain and the whole vocabulary in memory."""
    model = AutoModelForCausalLM.from_pretrained(toy / "base", dtype=torch.float32).eval()
    teachers = {d: AutoModelForCausalLM.from_pretrained(toy / d, dtype=torch.float32).eval() for d in ("math", "code")}
    tokens = [row[:n].tolist() for row, n in zip(rollouts.tokens, rollouts.lengths.tolist())]
    by_domain = {d: sum(len(t) for t, other in zip(tokens, domains) if other == d) for d in set(domains)}
    loss, kls, hiddens = 0, dict.fromkeys(by_domain, 0.0), []
    for prompt, row, domain, mu in zip(prompts, tokens, domains, rollouts.logprobs):
        N = {
            "tokens": sum(map(len, tokens)), "rows": len(tokens) * len(row), "equal": len(by_domain) * by_domain[domain]
        }[domain_weight]  # fmt: skip
        ids, where = torch.tensor([prompt + row]), slice(len(prompt) - 1, -1)
        hidden = model.base_model(ids).last_hidden_state[0, where]
        hidden.retain_grad()
        hiddens.append((domain, hidden))
        student = model.lm_head(hidden).log_softmax(-1)
        with torch.no_grad():
            teacher = teachers[domain](ids).logits[0, where].log_softmax(-1)
        drawn = torch.tensor(row)[:, None]
        if form == "full":
            kl = (student.exp() * (student - teacher)).sum(-1)
            loss = loss + (kl / N).sum()
        else:
            s, t = student.gather(-1, drawn).squeeze(-1), teacher.gather(-1, drawn).squeeze(-1)
            kl = s - t
            weight = (s - mu[: len(row)]).exp().detach()
            assert (0.5 < weight).all() and (weight < 2).all() or form == "sampled"
            weight = torch.where((weight < 0.5) | (weight > 2), 0.0, weight)
            loss = loss - (weight * (-kl).detach().clamp(-1, 1) * s / N).sum()
        kls[domain] += float(kl.detach().sum())
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    pull = {d: sum(float(h.grad.norm(dim=-1).sum()) for other, h in hiddens if other == d) for d in by_domain}
    return {
        "policy/loss": float(loss.detach()),
        "policy/grad_norm": float(norm),
        "policy/kl": sum(kls.values()) / sum(by_domain.values()),
        **{f"teacher/{d}_kl": kls[d] / by_domain[d] for d in by_domain},
        **{f"gradient_share/{d}": pull[d] / sum(pull.values()) for d in by_domain},
    }


@pytest.mark.parametrize(
    "changes",
    [
        dict(kl="full"),
        dict(kl="sampled", domain_weight="rows", tokens_per_microbatch=20),
        dict(kl="sampled", domain_weight="equal", temperature=1.6, num_generations=2),  # the gate on pi/mu works
        dict(kl="full", domain_weight="equal", tokens_per_microbatch=1),
    ],
)
def test_one_mopd_step_equals_the_plain_update(run, watch, toy, changes):
    how = dict(kl="full", domain_weight="tokens", num_generations=1, prompts_per_step=9, advantage_clip=1.0) | changes
    drawn = watch("mopd")
    out = run("mopd", *toy_flags(toy, "mopd", **how))
    owner = {row["prompt"]: row["domain"] for row in json_lines(toy / "both.jsonl")}
    tokenizer = AutoTokenizer.from_pretrained(toy / "base")
    prompts = [prompt for prompt in drawn[0][0] for _ in range(how["num_generations"])]
    domains = [owner[tokenizer.decode(prompt)] for prompt in prompts]
    expected = plain_mopd(toy, prompts, drawn[0][1], domains, how["kl"], how["domain_weight"])
    metrics = json_lines(out / "metrics.jsonl")[0]
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert set(domains) == {"math", "code"} and expected["policy/grad_norm"] > 0.01


@pytest.mark.parametrize("form", ["sampled", "topk", "full"])
def test_teachers_that_equal_the_student_change_nothing(run, toy, form):
    same = [f"math={toy / 'base'}", f"code={toy / 'base'}"]
    out = run("mopd", *toy_flags(toy, "mopd", kl=form, teachers=same, tokens_per_microbatch=25))
    metrics = json_lines(out / "metrics.jsonl")[0]
    assert abs(metrics["policy/kl"]) <= 1e-6 and metrics["policy/grad_norm"] <= 1e-6
    before, after = weights_of(toy / "base"), weights_of(out)  # Adam would blow the smallest gradient up
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("form", ["sampled", "full"])
def test_the_student_nears_its_teachers(run, toy, form):
    flags = dict(kl=form, steps=25, prompts_per_step=16, num_generations=2, warmup_steps=0)
    metrics = json_lines(run("mopd", *toy_flags(toy, "mopd", **flags)) / "metrics.jsonl")
    for domain in ("math", "code"):
        first, last = metrics[0][f"teacher/{domain}_kl"], metrics[-1][f"teacher/{domain}_kl"]
        assert last < 0.8 * first, (domain, first, last)


# ------------------------------------------------------------------------------------------------- run folder, resume


@pytest.mark.parametrize("script", TRAINERS)
def test_resume_gives_the_same_run(run, watch, toy, tmp_path, script, monkeypatch):
    watch(script)
    module, steps = importlib.import_module(script), []
    scored = dict(eval_tasks=[toy / "math.jsonl"], eval_every=1, eval_samples=1)
    flags = toy_flags(toy, script, steps=4, save_every=2, warmup_steps=1, **scored)
    whole = run(script, *flags, out=tmp_path / "whole")
    score = module.verify_batch

    def killed(rows):  # in step 4: the last save was after step 2, step 3 is to be done again
        steps.append(len(rows))
        if len(steps) == 4:
            raise KeyboardInterrupt
        return score(rows)

    monkeypatch.setattr(module, "verify_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        run(script, *flags, "--resume", out=tmp_path / "parts")  # nothing is saved yet, so it starts
    monkeypatch.setattr(module, "verify_batch", score)
    assert [row["step"] for row in json_lines(tmp_path / "parts/metrics.jsonl")] == [1, 2, 3]
    parts = run(script, *flags, "--resume", out=tmp_path / "parts")

    first, second = weights_of(whole), weights_of(parts)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("metrics.jsonl", "samples.jsonl", "evals.jsonl"):
        rows, again = json_lines(whole / name), json_lines(parts / name)
        assert [row["step"] for row in again] == [0, 1, 2, 3, 4][name != "evals.jsonl" :]
        for left, right in zip(rows, again):
            for key in left:
                if not key.startswith(("time/", "memory/")):
                    assert left[key] == right[key], key
    costs = [json.loads((folder / "cost.json").read_text()) for folder in (whole, parts)]
    for key in ("tokens_sampled", "tokens_trained", "teacher_tokens"):
        assert costs[0][key] == costs[1][key]


@pytest.mark.parametrize("script", TRAINERS)
def test_resuming_a_finished_run_leaves_it_as_it_is(run, toy, script):
    flags = toy_flags(toy, script, steps=2, save_every=2)
    before = weights_of(run(script, *flags))
    after = weights_of(run(script, *flags, "--resume"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("script", TRAINERS)
def test_a_second_run_in_the_same_folder_is_refused(run, refused, toy, script):
    out = run(script, *toy_flags(toy, script))
    before = (out / "metrics.jsonl").read_text()
    assert "--resume" in refused(script, *toy_flags(toy, script))
    assert (out / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("script", TRAINERS)
def test_resuming_with_other_flags_is_refused(run, refused, toy, script):
    run(script, *toy_flags(toy, script, save_every=1))
    line = refused(script, *toy_flags(toy, script, save_every=1, learning_rate=0.5, seed=4), "--resume")
    assert "--learning_rate" in line and "--seed" in line and "--temperature" not in line
    run(script, *toy_flags(toy, script, save_every=2, slots=5), "--resume")  # these do not change the run


def test_a_refused_start_leaves_the_folder_free(run, refused, toy):
    refused("mopd", *toy_flags(toy, "mopd", teachers=[f"math={toy / 'math'}"]))
    run("mopd", *toy_flags(toy, "mopd"))


# ----------------------------------------------------------------------------------------------------- flags and errors


def fields_of(script):
    return dataclasses.fields(importlib.import_module(script).Args)


@pytest.mark.parametrize("script", [*TRAINERS, "merge", "eval"])
def test_help_names_every_flag(monkeypatch, capsys, script):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(script).main()
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    for field in fields_of(script):
        assert f"--{field.name}" in shown
        assert len(field.metadata.get("help", "")) > 10, f"--{field.name} says too little about itself"


COMMON = """--model --tasks --eval_tasks --out --seed --steps --prompts_per_step --num_generations --max_prompt_length
    --max_completion_length --temperature --learning_rate --warmup_steps --lr_scheduler_type --max_grad_norm
    --weight_decay --tokens_per_microbatch --slots --sampler --data_dir --device --dtype --eval_every --save_every
    --resume"""
POLICY = "--num_iterations --beta --epsilon --epsilon_high --scale_rewards --loss_norm"


@pytest.mark.parametrize(
    "script, names",
    [
        ("grpo_expert", f"{COMMON} {POLICY}"),
        ("mix_rl", f"{COMMON} {POLICY} --proportions"),
        ("mopd", f"{COMMON} --teachers --kl"),
        ("merge", "--base --experts --method --weights --scale --density --seed --out"),
        ("eval", "--models --tasks --k --temperature --top_p --out --data_dir --seed"),
    ],
)
def test_promised_flags_exist(script, names):
    assert {name.strip("-") for name in names.split()} <= {field.name for field in fields_of(script)}


@pytest.mark.parametrize(
    "script, flags, words",
    [
        ("grpo_expert", ["--step", "3"], ["--step", "did you mean --steps"]),
        ("mix_rl", ["--num_generation", "3"], ["did you mean --num_generations"]),
        ("mopd", ["--teacher", "math=x"], ["did you mean --teachers"]),
        ("eval", ["--model", "base=x"], ["did you mean --models"]),
        ("grpo_expert", ["--steps", "many"], ["--steps", "many"]),
        ("grpo_expert", ["--scale_rewards", "groups"], ["--scale_rewards", "groups", "batch"]),
        ("mopd", ["--kl", "reverse"], ["--kl", "reverse", "sampled"]),
        ("grpo_expert", ["--num_generations", "1"], ["--num_generations", "2"]),
        ("mix_rl", ["--num_generations", "1"], ["--num_generations", "2"]),
        ("grpo_expert", ["--steps", "0"], ["--steps"]),
        ("grpo_expert", ["--learning_rate", "-1"], ["--learning_rate"]),
        ("grpo_expert", ["--learning_rate", "nan"], ["--learning_rate"]),
        ("mopd", ["--temperature", "0"], ["--temperature"]),
        ("grpo_expert", ["--epsilon", "1.5"], ["--epsilon"]),
        ("grpo_expert", ["--seed", "-1"], ["--seed"]),
        ("grpo_expert", ["--eval_samples", "0"], ["--eval_samples"]),
        ("mix_rl", ["--tokens_per_microbatch", "0"], ["--tokens_per_microbatch"]),
        ("grpo_expert", ["--weight_decay", "-1"], ["--weight_decay"]),
        ("eval", ["--k", "0"], ["--k"]),
        ("eval", ["--top_p", "0"], ["--top_p"]),
        ("eval", ["--models", "runs/math"], ["--models", "NAME=folder"]),
        ("eval", ["--models", "a=x", "a=y"], ["--models", "different names"]),
        ("mopd", ["--teachers", "runs/math"], ["--teachers", "DOMAIN=folder"]),
        ("mix_rl", ["--proportions", "naturel"], ["--proportions", "naturel"]),
        ("mix_rl", ["--proportions", "math=1"], ["--proportions", "code"]),
        ("mix_rl", ["--proportions", "temperature=0"], ["--proportions", "above 0"]),
        ("mix_rl", ["--reward_weights", "poetry=1"], ["--reward_weights", "poetry"]),
        ("mix_rl", ["--length_caps", "math=1000"], ["--length_caps"]),
        ("mopd", ["--alpha", "0.5"], ["--alpha", "sampled"]),
    ],
)
def test_a_wrong_value_is_one_line(refused, toy, script, flags, words):
    start = toy_flags(toy, script) if script != "eval" else []
    line = refused(script, *start, *flags)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("script", [*TRAINERS, "eval"])
def test_a_missing_model_is_one_line(refused, toy, tmp_path, script):
    name = "models" if script == "eval" else "model"
    prefix = "base=" if script == "eval" else ""
    start = [] if script == "eval" else toy_flags(toy, script)
    nowhere = tmp_path / "nowhere"
    assert str(nowhere) in refused(script, *start, f"--{name}", f"{prefix}{nowhere}")
    nowhere.mkdir()
    assert "config.json" in refused(script, *start, f"--{name}", f"{prefix}{nowhere}")


@pytest.mark.parametrize(
    "content, words",
    [
        ("", []),
        ('{"question": "1 + 1?", "solution": "2"}\n', ["question", "prompt"]),
        ('{"prompt": "1 + 1?", "domain": "math", "verifier": "oracle", "answer": "2"}\n', ["oracle"]),
        ('{"prompt": "1 + 1?", "domain"', [":1"]),
    ],
)
def test_a_useless_task_file_is_one_line(refused, toy, tmp_path, content, words):
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    line = refused("grpo_expert", *toy_flags(toy, tasks=[path]))
    assert all(word in line for word in ["tasks.jsonl", *words]), line


def test_tasks_that_are_missing_or_too_long_are_one_line(refused, toy, tmp_path):
    (tmp_path / "long.jsonl").write_text('{"prompt": "abcdefgh", "domain": "m", "verifier": "exact", "answer": "a"}')
    assert "none.jsonl" in refused("grpo_expert", *toy_flags(toy, tasks=["none.jsonl"]))
    assert "gsm9k" in refused("grpo_expert", *toy_flags(toy, tasks=["gsm9k:train"]))
    long = toy_flags(toy, tasks=[tmp_path / "long.jsonl"], max_prompt_length=7)
    assert "--max_prompt_length" in refused("grpo_expert", *long)
    assert "--max_completion_length" in refused("grpo_expert", *toy_flags(toy, max_completion_length=128))


def test_teachers_that_do_not_fit_are_one_line(refused, toy, tmp_path):
    def line(teacher):
        return refused("mopd", *toy_flags(toy, "mopd", teachers=[f"math={toy / 'math'}", *teacher]))

    missing = line([])
    assert "code" in missing and "--teachers" in missing
    assert "nowhere" in line([f"code={tmp_path / 'nowhere'}"])
    save_toy_model(tmp_path / "letters", 1, letters="ABCDEFGH")
    assert "vocabulary" in line([f"code={tmp_path / 'letters'}"])
    save_toy_model(tmp_path / "template", 1, chat_template="{{ messages[0]['content'] }}")
    assert "chat template" in line([f"code={tmp_path / 'template'}"])
    save_toy_model(tmp_path / "wider", 1, vocab_size=16)
    assert "vocabulary size" in line([f"code={tmp_path / 'wider'}"])


def test_a_teacher_without_all_its_weights_is_refused(refused, toy, tmp_path):
    """Else the one resident module would keep the weights of the teacher before, and say nothing."""
    from safetensors.torch import load_file, save_file

    save_toy_model(tmp_path / "partial", 2)
    weights = load_file(tmp_path / "partial/model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "partial/model.safetensors", {"format": "pt"})
    teachers = [f"math={toy / 'math'}", f"code={tmp_path / 'partial'}"]
    assert "partial" in refused("mopd", *toy_flags(toy, "mopd", teachers=teachers))


def test_as_a_program():
    """Once through the shell: exit code 2, one line on stderr, nothing on stdout."""
    command = [sys.executable, str(ROOT / "eval.py"), "--models", "base=no/such/model", "--k", "zero"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("eval.py: ") and done.stderr.count("\n") == 1 and "--k" in done.stderr


# --------------------------------------------------------------------------------------------- the tiny world, end to end


STANDARD = """reward/mean completion/length completion/truncated policy/entropy policy/kl policy/sampler_gap
    policy/grad_norm time/sample time/verify time/train tokens/sampled memory/peak_gb""".split()
COST = """tokens_sampled tokens_trained tokens_scored teacher_tokens seconds parameters peak_memory_gb device reused"""


def check_run(out, base, steps, names, domains):
    """What DESIGN promises of a run folder: its files, metric names, finite values, a model that loads."""
    args = json.loads((out / "args.json").read_text())
    assert args["steps"] == steps and args["device"]
    metrics = json_lines(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    for row in metrics:
        assert set(STANDARD + names) <= set(row)
        assert all(math.isfinite(value) for value in row.values())
        assert {key for key in row if key.startswith("reward/")} <= {"reward/mean", *(f"reward/{d}" for d in domains)}
        assert 0 <= row["reward/mean"] <= 1 and row["policy/sampler_gap"] < 1e-4
    samples = json_lines(out / "samples.jsonl")
    assert len(samples) == steps
    assert all({"step", "prompt", "completion", "reward", "domain"} <= set(row) for row in samples)
    cost = json.loads((out / "cost.json").read_text())
    assert set(COST.split()) <= set(cost)
    assert cost["tokens_sampled"] == sum(row["tokens/sampled"] for row in metrics)
    assert {"sample", "verify", "train", "eval", "total"} <= set(cost["seconds"])
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(base).chat_template
    for path in out.glob("tokenizer*"):
        assert path.read_bytes() == (ROOT / "tiny/base" / path.name).read_bytes()
    assert (out / "state").is_dir()
    before, after = weights_of(base), model.state_dict()
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    return metrics, cost


SMALL = "--steps 2 --prompts_per_step 4 --num_generations 8 --eval_limit 2 --eval_samples 2 --slots 16".split()
LEARN = "--steps 12 --prompts_per_step 8 --num_generations 12 --eval_limit 4 --lr_scheduler_type constant".split()


@pytest.fixture(scope="module")
def experts(tiny_base, tmp_path_factory):
    """{domain: run folder}: a science expert of twelve steps on the same eight tasks, and three that had two steps."""
    folder, argv = tmp_path_factory.mktemp("experts"), sys.argv
    tasks = (ROOT / "tiny/tasks/science-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "eight.jsonl").write_text("".join(tasks[:8]), encoding="utf-8")
    for domain in TINY_DOMAINS:
        flags = ["--tasks", f"tiny:{domain}", *SMALL]
        if domain == "science":
            flags = ["--tasks", str(folder / "eight.jsonl"), "--eval_tasks", "tiny:science:validation", *LEARN]
        sys.argv = ["grpo_expert.py", "--model", tiny_base, *flags, "--out", str(folder / domain)]
        try:
            importlib.import_module("grpo_expert").main()
        finally:
            sys.argv = argv
    return {domain: folder / domain for domain in TINY_DOMAINS}


def test_grpo_expert_in_the_tiny_world(experts, tiny_base):
    names = ["groups/zero_variance", "policy/clip_fraction"]
    check_run(experts["science"], tiny_base, 12, [*names, "reward/science"], ["science"])
    check_run(experts["code"], tiny_base, 2, [*names, "reward/code"], ["code"])


def test_the_tiny_expert_learns(experts):
    """The same eight tasks at each step, so that the reward is not noise of their difficulty: from about .4 to .8."""
    rewards = [row["reward/mean"] for row in json_lines(experts["science"] / "metrics.jsonl")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards


def test_mix_rl_in_the_tiny_world(run, tiny_base):
    tasks = [f"tiny:{domain}" for domain in TINY_DOMAINS]
    out = run("mix_rl", "--model", tiny_base, "--tasks", *tasks, *SMALL, "--proportions", "uniform")
    names = ["groups/zero_variance", "policy/clip_fraction"]
    names += [f"{kind}/{domain}" for kind in ("reward", "proportion") for domain in TINY_DOMAINS]
    metrics, _ = check_run(out, tiny_base, 2, names, TINY_DOMAINS)
    assert all(row[f"proportion/{domain}"] == 0.25 for row in metrics for domain in TINY_DOMAINS)


def test_all_tiny_tasks_in_one_word(run, tiny_base):
    run("mix_rl", "--model", tiny_base, "--tasks", "tiny:train", *SMALL, "--steps", "1")


@pytest.mark.parametrize("form", ["sampled", "full"])
def test_mopd_in_the_tiny_world(run, experts, tiny_base, form):
    teachers = [f"{domain}={folder}" for domain, folder in experts.items()]
    tasks = [f"tiny:{domain}" for domain in TINY_DOMAINS]
    enough = ["--prompts_per_step", 16]  # for a task of every domain in each step
    out = run("mopd", "--model", tiny_base, "--teachers", *teachers, "--tasks", *tasks, *SMALL, *enough, "--kl", form)
    names = [f"teacher/{domain}_kl" for domain in TINY_DOMAINS]
    names += [f"gradient_share/{domain}" for domain in TINY_DOMAINS]
    metrics, cost = check_run(out, tiny_base, 2, names, TINY_DOMAINS)
    for row in metrics:
        assert sum(row[f"gradient_share/{domain}"] for domain in TINY_DOMAINS) == pytest.approx(1)
    assert cost["teacher_tokens"] == cost["tokens_trained"] > 0
    assert {os.path.realpath(path) for path in experts.values()} == set(cost["reused"])
    assert all(reused["tokens_sampled"] > 0 for reused in cost["reused"].values())


def test_merge_and_eval_in_the_tiny_world(run, experts, tiny_base, tmp_path):
    flags = ["--base", tiny_base, "--experts", *map(str, experts.values()), "--method", "task_arithmetic"]
    merged = run("merge", *flags, "--scale", "0.5", out=tmp_path / "merged")
    before, after = weights_of(tiny_base), weights_of(merged)
    members = [weights_of(folder) for folder in experts.values()]
    for name, start in before.items():
        expected = start + 0.5 * sum(member[name] - start for member in members)
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6)

    models = [f"base={tiny_base}", f"science={experts['science']}", f"merge={merged}"]
    out = run("eval", "--models", *models, "--tasks", "tiny:test", "--limit", "8", "--k", "2", out=tmp_path / "eval")
    result = json.loads((out / "eval.json").read_text())
    assert list(result["models"]) == ["base", "science", "merge"] and result["settings"]["k"] == 2
    for model in result["models"].values():
        for name, domain in model["domains"].items():
            assert domain["n"] == 2 and len(domain["counts"]) == len(domain["ids"])
            assert all(0 <= count <= 2 for count in domain["counts"])
            assert domain["held_out"] == (name not in TINY_DOMAINS)
    assert result["models"]["science"]["cost"]["tokens_sampled"] > 0
    assert len(result["models"]["merge"]["cost"]["reused"]) == 4
    rows = json_lines(out / "samples.jsonl")
    assert len(rows) == 3 * 2 * sum(len(d["counts"]) for d in result["models"]["base"]["domains"].values())
    table = (out / "eval.md").read_text()
    assert "| own expert |" in table and "## Coverage: pass@2" in table
