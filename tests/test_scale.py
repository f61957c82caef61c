"""What models beyond one GPU's float32 need: LoRA adapters, several processes, and metrics sent elsewhere."""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import types

import pytest
import torch
import transformers
from conftest import ROOT, save_toy_model
from safetensors.torch import load_file
from test_faults import Run, assert_same_run, call, flags_of, handlers, json_lines, slow_steps, toy, wait_for  # noqa: F401

import eval as evaluation

TRAINERS = ("grpo_expert", "mix_rl", "mopd")


# -------------------------------------------------------------------------------------------------- several processes


class Pair:
    """A script as torchrun starts it, in two processes that are forks of this one."""

    def __init__(self, script, out, *flags, prepare=lambda: None):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]

        def as_rank(rank):
            def become():
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                evaluation.RANK, evaluation.WORLD = rank, 2
                prepare()

            return become

        self.runs = [Run(script, out, *flags, prepare=as_rank(rank), name=f"log{rank}") for rank in (0, 1)]

    def end(self):
        codes, logs = zip(*(run.end() for run in self.runs))
        return codes, logs


def close(one, two, skip=("time/", "memory/", "tokens/padding", "policy/sampler_gap", "teacher/")):
    """Two rows of metrics that differ by the order of sums only."""
    assert one.keys() == two.keys()
    for name, value in one.items():
        if not name.startswith(skip):
            assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def assert_close_run(one, two):
    """The same tokens and rewards, and weights to rounding."""
    assert json_lines(one / "samples.jsonl") == json_lines(two / "samples.jsonl")
    for rows in zip(json_lines(one / "metrics.jsonl"), json_lines(two / "metrics.jsonl"), strict=True):
        close(*rows)
    left, right = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert left.keys() == right.keys()
    assert max(float((left[name] - right[name]).abs().max()) for name in left) < 1e-4
    costs = [json.loads((out / "cost.json").read_text()) for out in (one, two)]
    assert all(costs[0][key] == costs[1][key] for key in costs[0] if "token" in key)


@pytest.mark.parametrize("script", TRAINERS)
def test_two_processes_do_what_one_does(toy, tmp_path, script):  # noqa: F811
    """3 prompts a step, so that the shares are uneven; each process packs and splits its own rows."""
    flags = flags_of(toy, script, prompts_per_step=3, steps=2, tokens_per_microbatch=20)
    code, log = Run(script, tmp_path / "one", *flags).end()
    assert code == 0, log
    codes, logs = Pair(script, tmp_path / "two", *flags).end()
    assert codes == (0, 0), logs
    assert logs[1] == "" and "Learnt" in logs[0]  # the second process is silent
    assert_close_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("flags", [{"dynamic_sampling": True}, {"num_iterations": 2, "scale_rewards": "batch"}])
def test_two_processes_under_other_flags(toy, tmp_path, flags):  # noqa: F811
    flags = flags_of(toy, steps=2, **flags)
    assert Run("grpo_expert", tmp_path / "one", *flags).end()[0] == 0
    codes, logs = Pair("grpo_expert", tmp_path / "two", *flags).end()
    assert codes == (0, 0), logs
    assert_close_run(tmp_path / "one", tmp_path / "two")


def test_a_step_without_any_gradient(toy, tmp_path):  # noqa: F811
    """All rewards are equal: no process has anything to add, and none waits for another."""
    rows = [row | {"verifier": "exact", "answer": "never"} for row in json_lines(toy / "math.jsonl")]
    (tmp_path / "never.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    codes, logs = Pair("grpo_expert", tmp_path / "run", *flags_of(toy, tasks=[tmp_path / "never.jsonl"], beta=0)).end()
    assert codes == (0, 0), logs
    assert all(row["policy/grad_norm"] == 0 for row in json_lines(tmp_path / "run/metrics.jsonl"))


def test_two_processes_stop_together_and_go_on(toy, tmp_path):  # noqa: F811
    """A signal reaches one of them; both end after the same step, and resume to the end of an undisturbed pair."""
    flags = flags_of(toy, save_every=0)
    assert Pair("grpo_expert", tmp_path / "whole", *flags).end()[0] == (0, 0)
    out = tmp_path / "parts"
    pair = Pair("grpo_expert", out, *flags, prepare=slow_steps("grpo_expert", 0.5))
    wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") == 1)
    pair.runs[1].kill(signal.SIGTERM)
    codes, logs = pair.end()
    assert codes == (3, 3), logs
    codes, logs = Pair("grpo_expert", out, *flags, "--resume").end()
    assert codes == (0, 0) and "continues after step" in logs[0], logs
    (tmp_path / "whole/state/step-00000004.pt").unlink(missing_ok=True)
    for path in out.glob("state/step-*"):
        path.unlink()  # --save_every 0: only the one that was stopped has saved
    assert_same_run(tmp_path / "whole", out)


@pytest.mark.parametrize(
    "script, flags, words",
    [
        ("grpo_expert", dict(prompts_per_step=1), "--prompts_per_step 1 leaves"),
        ("mix_rl", dict(length_caps="math=4"), "--length_caps takes one process"),
    ],
)
def test_what_two_processes_refuse(toy, tmp_path, script, flags, words):  # noqa: F811
    codes, logs = Pair(script, tmp_path / "run", *flags_of(toy, script, **flags)).end()
    assert codes == (2, 2) and words in logs[0] and not (tmp_path / "run/model.safetensors").exists()


def test_torchrun(toy, tmp_path):  # noqa: F811
    """The real one, as the README has it."""
    flags = flags_of(toy, steps=2)
    assert Run("grpo_expert", tmp_path / "one", *flags).end()[0] == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(ROOT / "grpo_expert.py"), *flags, "--out", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Learnt") == 1
    assert_close_run(tmp_path / "one", tmp_path / "two")


# --------------------------------------------------------------------------------------------------------------- LoRA


def lora_flags(toy, script="grpo_expert", **changes):  # noqa: F811
    pytest.importorskip("peft")
    return flags_of(toy, script, lora_rank=2, **changes)


@pytest.mark.parametrize("script", TRAINERS)
def test_lora_trains_an_adapter(call, toy, tmp_path, script):  # noqa: F811
    """Only the adapter is learnt, saved and resumed; loaded or merged, it is the same model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = tmp_path / "run"
    code, errors, _ = call(script, out, *lora_flags(toy, script))
    assert code == 0, errors
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 4, str(toy / "base"))
    assert not (out / "model.safetensors").exists() and not (out / "config.json").exists()
    adapter = load_file(out / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * 2 and all(".lora_" in name for name in adapter)  # 7 matrices in each of 2 layers
    assert max(float(weight.abs().max()) for name, weight in adapter.items() if "lora_B" in name) > 0
    state = torch.load(out / "state/step-00000004.pt", weights_only=True)
    assert len(state["model"]) == len(adapter) and len(state["optimizer"]["state"]) == len(adapter)

    loaded = evaluation.load_model(str(out), torch.device("cpu"))[0].state_dict()
    base = AutoModelForCausalLM.from_pretrained(toy / "base")
    theirs = PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
    assert loaded.keys() == theirs.keys() and all(torch.equal(loaded[name], theirs[name]) for name in loaded)
    code, errors, _ = call("merge", tmp_path / "merge", "--base", toy / "base", "--experts", out, "--scale", "1")
    assert code == 0, errors
    merged = load_file(tmp_path / "merge/model.safetensors")
    assert max(float((merged[name] - loaded[name]).abs().max()) for name in merged) < 1e-6
    code, errors, _ = call("eval", tmp_path / "eval", "--models", f"a={out}", "--tasks", toy / "both.jsonl", "--k", "2")
    assert code == 0, errors


def test_a_lora_run_resumes(toy, tmp_path):  # noqa: F811
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert Run("grpo_expert", whole, *lora_flags(toy)).end()[0] == 0
    run = Run("grpo_expert", parts, *lora_flags(toy), prepare=slow_steps("grpo_expert", 0.2))
    wait_for(lambda: list(parts.glob("state/step-*2.pt")))
    run.kill().end()
    code, log = Run("grpo_expert", parts, *lora_flags(toy), "--resume").end()
    assert code == 0 and "continues after step" in log, log
    left, right = (load_file(out / "adapter_model.safetensors") for out in (whole, parts))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_reference_is_the_model_without_its_adapter(call, toy, tmp_path):  # noqa: F811
    """So the KL is 0 at the first step, and grows; and the gradient of what is frozen stays away."""
    flags = lora_flags(toy, learning_rate=0.05, lr_scheduler_type="constant", warmup_steps=0)
    code, errors, _ = call("grpo_expert", tmp_path / "run", *flags)
    assert code == 0, errors
    kl = [row["policy/kl"] for row in json_lines(tmp_path / "run/metrics.jsonl")]
    assert abs(kl[0]) < 1e-9 and kl[-1] > 1e-4


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True, "kl": "topk"}])
def test_adapters_as_teachers(call, toy, tmp_path, more):  # noqa: F811
    """They teach what the same models teach when they are whole; and the student may be an adapter as well."""
    pytest.importorskip("peft")
    teachers = {}
    for domain in ("math", "code"):
        tasks = [toy / f"{domain}-a.jsonl"]
        code, errors, _ = call("grpo_expert", tmp_path / domain, *lora_flags(toy, tasks=tasks, learning_rate=0.1))
        assert code == 0, errors
        whole = tmp_path / f"{domain}-whole"
        call("merge", whole, "--base", toy / "base", "--experts", tmp_path / domain, "--scale", "1")
        teachers[domain] = whole
    rows = []
    for name, folders in (("adapters", {d: tmp_path / d for d in teachers}), ("whole", teachers)):
        named = [f"{domain}={folder}" for domain, folder in folders.items()]
        code, errors, _ = call("mopd", tmp_path / name, *lora_flags(toy, "mopd", teachers=named, **more))
        assert code == 0, errors
        rows.append(json_lines(tmp_path / name / "metrics.jsonl"))
    assert rows[0][0]["policy/kl"] > 1e-4
    for pair in zip(*rows):
        close(*pair)


def test_lora_in_bfloat16(call, toy, tmp_path):  # noqa: F811
    """The frozen weights are held in bfloat16, the adapter and its moments in float32."""
    code, errors, _ = call("grpo_expert", tmp_path / "run", *lora_flags(toy, dtype="bfloat16"))
    assert code == 0, errors
    adapter = load_file(tmp_path / "run/adapter_model.safetensors")
    assert {weight.dtype for weight in adapter.values()} == {torch.float32}
    assert json_lines(tmp_path / "run/metrics.jsonl")[0]["policy/sampler_gap"] < 0.05


def test_a_run_starts_from_an_adapter(call, toy, tmp_path):  # noqa: F811
    """As from the model that it makes of its base: all weights are trained again; another adapter on it is refused."""
    assert call("grpo_expert", tmp_path / "a", *lora_flags(toy))[0] == 0
    flags = flags_of(toy, model=tmp_path / "a", steps=2)
    code, errors, _ = call("grpo_expert", tmp_path / "b", *flags)
    assert code == 0 and errors == []
    before = evaluation.load_model(str(tmp_path / "a"), torch.device("cpu"))[0].state_dict()
    after = load_file(tmp_path / "b/model.safetensors")
    assert all(not torch.equal(before[name], after[name]) for name in after)
    code, errors, _ = call("grpo_expert", tmp_path / "c", *flags, "--lora_rank", 2)
    assert code == 2 and len(errors) == 1 and "is an adapter: merge it first" in errors[0]


@pytest.mark.parametrize(
    "damage, words",
    [
        (dict(base="/nowhere"), "no model at /nowhere"),
        (dict(base=""), "no model at "),
        (dict(base="a"), "is an adapter on the adapter"),
        (dict(pickle=True), "holds no adapter_model.safetensors"),
        (dict(base="small"), "cannot load a causal language model"),
    ],
)
def test_adapters_that_cannot_be(call, toy, tmp_path, damage, words):  # noqa: F811
    assert call("grpo_expert", tmp_path / "a", *lora_flags(toy, steps=1))[0] == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    if "base" in damage:
        save_toy_model(tmp_path / "small", 0, vocab_size=9)
        config = json.loads((tmp_path / "small/config.json").read_text())
        smaller = transformers.LlamaConfig(**{**config, "intermediate_size": 16})
        transformers.AutoModelForCausalLM.from_config(smaller).save_pretrained(tmp_path / "small")
        base = {"a": str(tmp_path / "a"), "small": str(tmp_path / "small")}.get(damage["base"], damage["base"])
        config = json.loads((tmp_path / "b/adapter_config.json").read_text()) | {"base_model_name_or_path": base}
        (tmp_path / "b/adapter_config.json").write_text(json.dumps(config))
    else:
        weights = load_file(tmp_path / "b/adapter_model.safetensors")
        (tmp_path / "b/adapter_model.safetensors").unlink()
        torch.save(weights, tmp_path / "b/adapter_model.bin")
    flags = ["--models", f"b={tmp_path / 'b'}", "--tasks", toy / "math.jsonl", "--k", 1]
    code, errors, _ = call("eval", tmp_path / "eval", *flags)
    assert code == 2 and len(errors) == 1 and words in errors[0], errors


def test_lora_alpha_needs_a_rank(call, toy, tmp_path):  # noqa: F811
    code, errors, _ = call("mopd", tmp_path / "run", *flags_of(toy, "mopd", lora_alpha=4))
    assert code == 2 and errors == ["mopd.py: --lora_alpha has no effect without --lora_rank: give both"]


def test_without_peft(call, toy, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "peft", None)
    code, errors, _ = call("grpo_expert", tmp_path / "run", *flags_of(toy, lora_rank=2))
    assert code == 2 and errors == ["grpo_expert.py: LoRA adapters need peft: pip install peft"]


# ----------------------------------------------------------------------------------------------------------- tracking


def test_track_tensorboard(call, toy, tmp_path):  # noqa: F811
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, errors, _ = call("grpo_expert", tmp_path / "run", *flags_of(toy, track="tensorboard"))
    assert code == 0, errors
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    rows = json_lines(tmp_path / "run/metrics.jsonl")
    shown = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert shown == [(row["step"], pytest.approx(row["reward/mean"])) for row in rows]


def test_track_wandb(call, toy, tmp_path, monkeypatch):  # noqa: F811
    """Against a stand-in: the real one wants an account."""
    told = []
    run = types.SimpleNamespace(log=lambda metrics, step: told.append((step, metrics["reward/mean"])))
    fake = types.SimpleNamespace(__spec__=object(), init=lambda **how: told.append(how["config"]["steps"]) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    code, errors, _ = call("mopd", tmp_path / "run", *flags_of(toy, "mopd", track="wandb"))
    assert code == 0, errors
    assert told == [4, *((row["step"], row["reward/mean"]) for row in json_lines(tmp_path / "run/metrics.jsonl"))]


@pytest.mark.parametrize("program", ["wandb", "tensorboard"])
def test_track_without_the_program(call, toy, tmp_path, monkeypatch, program):  # noqa: F811
    monkeypatch.setitem(sys.modules, program, None)
    code, errors, _ = call("grpo_expert", tmp_path / "run", *flags_of(toy, track=program))
    assert code == 2 and errors == [f"grpo_expert.py: --track {program} needs it: pip install {program}"]
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------------------------------------- tasks


def test_hold_out_never_moves_a_task():
    tasks = [{"prompt": f"task {i}"} for i in range(1000)]
    train, held = evaluation.hold_out(tasks, 0.1)
    assert len(train) + len(held) == 1000 and 70 < len(held) < 130
    assert train == [task for task in tasks if task not in held]  # in their old order
    more, held_of_more = evaluation.hold_out([{"prompt": "new"}, *reversed(tasks)], 0.2)
    assert [task for task in held_of_more if task in held] == held and len(more) + len(held_of_more) == 1001
    assert evaluation.hold_out(tasks, 0) == (tasks, [])


def test_doubts_are_said(capsys):
    tasks, args = [{"prompt": "What is 2 + 2?"}, {"prompt": "Another"}], importlib.import_module("grpo_expert").Args()
    tiny, real = (types.SimpleNamespace(num_parameters=lambda n=n: n) for n in (800_000, 135_000_000))
    evaluation.say_doubts(args, tiny, tasks, [{"prompt": "what is  2+2"}, {"prompt": "Not this"}])
    assert capsys.readouterr().out.startswith("1 of 2 prompts of the evaluation are trained on")
    evaluation.say_doubts(args, tiny, tasks, [{"prompt": "Not this"}])
    assert capsys.readouterr().out == ""
    evaluation.say_doubts(args, real, tasks, [])
    assert "the tiny world: --learning_rate 0.0007, --max_completion_length 48;" in capsys.readouterr().out
    args.learning_rate = 1e-6
    evaluation.say_doubts(args, real, tasks, [])
    assert capsys.readouterr().out.startswith("Made for the tiny world: --max_completion_length 48;")
    args.max_completion_length = 512
    evaluation.say_doubts(args, real, tasks, [])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("script", TRAINERS)
def test_validation_share(call, toy, tmp_path, script):  # noqa: F811
    """The held-out tasks are validated on and never trained on."""
    flags = flags_of(toy, script, validation_share=0.4, steps=6)
    code, errors, text = call(script, tmp_path / "run", *flags)
    assert code == 0, errors
    before, after = json_lines(tmp_path / "run/evals.jsonl")
    assert "math" in before and "math" in after
    trained = {row["prompt"] for row in json_lines(tmp_path / "run/samples.jsonl")}
    rows = [row for name in ("math", "code") for row in json_lines(toy / f"{name}-a.jsonl")]
    held = {row["prompt"] for row in evaluation.hold_out(rows, 0.4)[1]}
    assert held and not trained & held and "trained on" not in text


# ------------------------------------------------------------------------------------------------------------- memory


def test_the_readme_says_what_fits_on_which_gpu():
    """Its table is what the formula gives, and the formula is what can be counted by hand for one model."""
    path = ROOT / "tests" / "bench" / "bench_memory.py"
    bench = types.ModuleType("bench_memory")
    bench.__file__ = str(path)
    exec(path.read_text(), bench.__dict__)
    table = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- table: python tests/bench/bench_memory.py -->")[1]
    )
    assert table.split("<!--")[0].strip() == bench.recipes()
    # Qwen2.5-0.5B as its config.json has it: biases and norms, which the formula leaves out, are 0.02 % of it
    N = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864) + 151936 * 896
    parts = bench.memory(bench.SHAPES["Qwen2.5-0.5B"], slots=64, length=1536, tokens=8192, beta=0.1)
    assert parts["weights"] + parts["gradients"] + parts["Adam"] == 16 * N and abs(N / 494.0e6 - 1) < 1e-3
    assert parts["reference"] == 4 * N and parts["bfloat16 copy"] == 2 * N
    assert parts["keys and values"] == 64 * 1536 * 24 * 2 * (2 * 64) * 2
    lora = bench.memory(bench.SHAPES["Qwen2.5-0.5B"], slots=64, length=1536, tokens=8192, beta=0.1, lora_rank=32)
    assert lora["reference"] == 0 and lora["Adam"] < 0.05 * parts["Adam"]
