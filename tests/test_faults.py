"""Nothing is lost: kills, signals, full disks, damaged files and bad gradients leave the last save, and one line that says so.

A run that is to be killed is a fork of this process, which has everything imported: it starts in no time.
"""

import importlib
import json
import math
import os
import pickle
import random
import re
import resource
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, save_toy_model
from safetensors.torch import load_file

import eval as evaluation
import verifiers

TRAINERS = ("grpo_expert", "mix_rl", "mopd")


@pytest.fixture(scope="module")
def toy(toy):
    """The toy world with a reward that has some variance in every batch: an a among the letters of the completion."""
    answer = json.dumps(
        {
            "instruction_id_list": ["keywords:letter_frequency"],
            "kwargs": [{"letter": "a", "let_frequency": 1, "let_relation": "at least"}],
        }
    )
    for domain in ("math", "code"):
        rows = [row | {"verifier": "ifeval", "answer": answer} for row in json_lines(toy / f"{domain}.jsonl")]
        (toy / f"{domain}-a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return toy


def flags_of(toy, script="grpo_expert", **changes):
    """Flags of a run in the toy world that saves after each of its 4 steps."""
    tasks = [toy / "math-a.jsonl"] if script == "grpo_expert" else [toy / "math-a.jsonl", toy / "code-a.jsonl"]
    flags = dict(model=toy / "base", tasks=tasks, steps=4, prompts_per_step=4, num_generations=4, device="cpu")
    flags |= dict(dtype="float32", max_completion_length=6, learning_rate=0.01, save_every=1, keep=2)
    flags |= {"teachers": [f"math={toy / 'math'}", f"code={toy / 'code'}"]} if script == "mopd" else {"beta": 0.1}
    words = []
    for name, value in (flags | changes).items():
        words += [f"--{name}"] if value is True else [f"--{name}", *(value if isinstance(value, list) else [value])]
    return [str(word) for word in words]


@pytest.fixture(autouse=True)
def handlers():
    """A training script catches signals; this process gets its own handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def call(monkeypatch, capsys):
    """call(script, out, *flags) runs a script in this process -> its exit code, its lines on stderr, its text on stdout."""

    def run(script, out, *flags):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags), "--out", str(out)])
        capsys.readouterr()
        code = 0
        try:
            evaluation.run(importlib.import_module(script).main)
        except SystemExit as stopped:
            code = stopped.code
        shown = capsys.readouterr()
        return code, shown.err.splitlines(), shown.out

    return run


class Run:
    """A script in a fork of this process, its output in a file; `prepare` is called first, in the fork."""

    def __init__(self, script, out, *flags, prepare=lambda: None, name="log"):
        self.log = Path(f"{out}.{name}")
        self.log.parent.mkdir(exist_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                sys.stdout = sys.stderr = open(handle, "w", buffering=1)
                os.chdir(ROOT)
                sys.argv = [f"{script}.py", *map(str, flags), "--out", str(out)]
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
                prepare()
                evaluation.run(importlib.import_module(script).main)
                code = 0
            except SystemExit as stopped:
                code = stopped.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)
        return self

    def end(self):
        """Wait for it -> exit code, -9 where it was killed; and what it printed."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.log.read_text()


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(row):
    return {key: value for key, value in row.items() if not key.startswith(("time/", "memory/"))}


def assert_same_run(whole, parts):
    """Weights, metrics and samples to the last bit; nothing half written and nothing twice."""
    left, right = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    for name in ("metrics.jsonl", "samples.jsonl", "evals.jsonl"):
        assert list(map(timeless, json_lines(whole / name))) == list(map(timeless, json_lines(parts / name))), name
    costs = [json.loads((out / "cost.json").read_text()) for out in (whole, parts)]
    for key in ("tokens_sampled", "tokens_trained", "tokens_scored", "teacher_tokens"):
        assert costs[0][key] == costs[1][key]
    assert sorted(path.name for path in whole.iterdir()) == sorted(path.name for path in parts.iterdir())
    state = [path.name for path in (parts / "state").iterdir()]
    assert all(re.fullmatch(r"lock|step-\d{8}.pt", name) for name in state), state


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """{script: the folder of an uninterrupted run}, made when asked for."""
    made = {}

    def make(script):
        if script not in made:
            made[script] = tmp_path_factory.mktemp("whole") / script
            code, log = Run(script, made[script], *flags_of(toy, script)).end()
            assert code == 0, log
            assert all(row["policy/grad_norm"] > 0.01 for row in json_lines(made[script] / "metrics.jsonl"))
        return made[script]

    return make


# ------------------------------------------------------------------------------------------------------------- kills


def test_kills_at_random_moments(tiny_base, tmp_path):
    """The tiny expert, killed six times and resumed each time, ends as the one that nobody disturbed."""
    flags = (
        "--tasks tiny:instruction --steps 8 --prompts_per_step 2 --num_generations 4 --max_completion_length 8".split()
    )
    flags += (
        f"--model {tiny_base} --eval_limit 1 --eval_samples 1 --save_every 1 --beta 0.1 --device cpu --resume".split()
    )
    start = time.monotonic()
    code, log = Run("grpo_expert", tmp_path / "whole", *flags).end()
    seconds = time.monotonic() - start
    assert code == 0, log
    assert max(row["policy/grad_norm"] for row in json_lines(tmp_path / "whole/metrics.jsonl")) > 0
    draw, killed = random.Random(int(os.environ.get("RLVR_KILL_SEED", 0))), 0
    kills = int(os.environ.get("RLVR_KILLS", 6))
    for _ in range(10 * kills):
        run = Run("grpo_expert", tmp_path / "parts", *flags)
        time.sleep(draw.uniform(0, seconds / 2))
        code, log = run.kill().end()
        killed += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), log
        if killed == kills:
            break
        if code == 0:  # it came to its end: from the start again
            assert_same_run(tmp_path / "whole", tmp_path / "parts")
            os.rename(tmp_path / "parts", tmp_path / f"parts-{killed}")
    assert killed == kills
    code, log = Run("grpo_expert", tmp_path / "parts", *flags).end()
    assert code == 0, log
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def dies_at(name, count):
    """Kill this process at its count-th call of os.fsync, os.replace or the like, halfway through what it was to do."""

    def prepare():
        original, calls = getattr(os, name), []

        def fatal(*args):
            calls.append(args)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        setattr(os, name, fatal)

    return prepare


# A run calls replace for three .jsonl, args.json, a state a step, and then the files of the model; fsync twice as often.
@pytest.mark.parametrize("name, count", [("replace", 2), ("replace", 6), ("replace", 10), ("fsync", 9), ("fsync", 12)])
def test_a_kill_in_the_middle_of_a_save(toy, whole, tmp_path, name, count):
    flags = flags_of(toy)
    code, log = Run("grpo_expert", tmp_path / "run", *flags, "--resume", prepare=dies_at(name, count)).end()
    assert code == -signal.SIGKILL, log
    code, log = Run("grpo_expert", tmp_path / "run", *flags, "--resume").end()
    assert code == 0, log
    assert_same_run(whole("grpo_expert"), tmp_path / "run")


def test_half_a_state_is_never_read(toy, whole, tmp_path):
    """Killed within torch.save of step 2: the state of step 1 is there, whole, and the half one goes."""

    def prepare():
        save = torch.save

        def half(state, file):
            if state["step"] == 2:
                save(state, file)
                file.truncate(file.tell() // 2)
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            save(state, file)

        torch.save = half

    Run("grpo_expert", tmp_path / "run", *flags_of(toy), prepare=prepare).end()
    names = sorted(path.name for path in (tmp_path / "run/state").iterdir())
    assert names == ["lock", "step-00000001.pt", "step-00000002.pt.tmp"]
    code, log = Run("grpo_expert", tmp_path / "run", *flags_of(toy), "--resume").end()
    assert code == 0 and "after step 1" in log, log
    assert_same_run(whole("grpo_expert"), tmp_path / "run")


# ----------------------------------------------------------------------------------------------------- signals and time


def slow_steps(script, seconds):
    """Every sampling takes so long, so that a signal meets a step."""

    def prepare():
        module = importlib.import_module(script)
        original = module.sample
        module.sample = lambda *args, **how: (time.sleep(seconds), original(*args, **how))[1]

    return prepare


@pytest.mark.parametrize("script, number", [*((s, signal.SIGTERM) for s in TRAINERS), ("grpo_expert", signal.SIGINT)])
def test_a_signal_finishes_the_step_and_saves(toy, whole, tmp_path, script, number):
    """Also with --save_every 0; and the resumed run ends as the one that nobody stopped, whatever --save_every then is."""
    flags, out = flags_of(toy, script, save_every=0), tmp_path / "run"
    run = Run(script, out, *flags, prepare=slow_steps(script, 0.2))
    wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") == 2)
    code, log = run.kill(number).end()
    assert code == 3, log
    step = len(json_lines(out / "metrics.jsonl"))
    assert step in (2, 3) and f"saved after step {step}" in log  # 2 where the signal came before the save of step 2
    assert "--resume" in log and number.name in log and "Traceback" not in log
    code, log = Run(script, out, *flags_of(toy, script), "--resume").end()
    assert code == 0 and f"after step {step}" in log and "now with --save_every 1" in log, log
    assert_same_run(whole(script), out)


def test_a_second_interrupt_stops_at_once(toy, tmp_path):
    out = tmp_path / "run"
    run = Run("grpo_expert", out, *flags_of(toy), prepare=slow_steps("grpo_expert", 20))
    wait_for(lambda: (out / "args.json").exists())
    time.sleep(0.3)
    start = time.monotonic()
    run.kill(signal.SIGINT)
    wait_for(lambda: "once more" in run.log.read_text())
    code, log = run.kill(signal.SIGINT).end()
    assert code == 130 and time.monotonic() - start < 5, log
    assert log.splitlines()[-1] == "grpo_expert.py: interrupted" and "Traceback" not in log


@pytest.mark.parametrize("script", ["eval", "merge"])
def test_an_interrupt_leaves_no_traceback(toy, tmp_path, script):
    """eval.py and merge.py have no step to finish: Ctrl-C ends them at once."""

    def prepare():
        module = importlib.import_module(script)
        module.parse_args = lambda *args: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5)

    code, log = Run(script, tmp_path / "run", prepare=prepare).end()
    assert code == 130 and log == f"{script}.py: interrupted\n"


def test_max_minutes(toy, whole, tmp_path):
    """Time for the first step only; a resumed run has its minutes anew."""
    out = tmp_path / "run"
    code, log = Run("grpo_expert", out, *flags_of(toy), "--max_minutes", "1e-4").end()
    assert code == 3 and "saved after step 1, as --max_minutes says" in log, log
    code, log = Run("grpo_expert", out, *flags_of(toy), "--resume").end()
    assert code == 0, log
    assert_same_run(whole("grpo_expert"), out)


def test_no_step_begins_that_would_not_fit_into_max_minutes(toy, tmp_path):
    """3 seconds and steps of one second: the third would end too late, and is not begun."""
    start = time.monotonic()
    flags = [*flags_of(toy), "--max_minutes", 3 / 60]
    code, log = Run("grpo_expert", tmp_path / "run", *flags, prepare=slow_steps("grpo_expert", 1)).end()
    assert code == 3 and time.monotonic() - start < 3.5, log
    assert len(json_lines(tmp_path / "run/metrics.jsonl")) in (1, 2)


def test_save_minutes(toy, tmp_path):
    flags = [*flags_of(toy, save_every=0, keep=9), "--save_minutes", 1.5 / 60]
    code, log = Run("grpo_expert", tmp_path / "run", *flags, prepare=slow_steps("grpo_expert", 0.8)).end()
    assert code == 0, log
    assert [path.name for path in sorted((tmp_path / "run/state").glob("*.pt"))] == [
        "step-00000002.pt",
        "step-00000004.pt",
    ]


# ------------------------------------------------------------------------------------------------------ the run folder


def test_two_processes_do_not_share_a_folder(toy, whole, tmp_path):
    """The second is refused while the first lives, whatever flags it brings; a dead process holds nothing."""
    out = tmp_path / "run"
    first = Run("grpo_expert", out, *flags_of(toy), prepare=slow_steps("grpo_expert", 20))
    wait_for(lambda: (out / "args.json").exists())
    for flag in ("--resume", "--overwrite"):
        code, log = Run("grpo_expert", out, *flags_of(toy), flag).end()
        assert code == 2 and "in use" in log and log.count("\n") == 1, log
    first.kill().end()
    code, log = Run("grpo_expert", out, *flags_of(toy), "--resume").end()
    assert code == 0, log
    assert_same_run(whole("grpo_expert"), out)


def test_overwrite_starts_anew(call, toy, tmp_path):
    out = tmp_path / "run"
    assert call("grpo_expert", out, *flags_of(toy, seed=1))[0] == 0
    (out / "bad-step-7.jsonl").write_text("{}\n")
    (out / "notes.txt").write_text("mine")
    code, lines, _ = call("grpo_expert", out, *flags_of(toy, steps=2), "--resume", "--overwrite")
    assert code == 2 and "--resume" in lines[0] and "--overwrite" in lines[0]
    code, _, shown = call("grpo_expert", out, *flags_of(toy, steps=2), "--overwrite")
    assert code == 0 and "continues" not in shown
    assert [row["step"] for row in json_lines(out / "metrics.jsonl")] == [1, 2]
    assert not (out / "bad-step-7.jsonl").exists() and (out / "notes.txt").exists()
    assert sorted(path.name for path in (out / "state").glob("*.pt")) == ["step-00000001.pt", "step-00000002.pt"]


def test_an_overwritten_run_leaves_no_model_that_is_not_its_own(call, toy, tmp_path):
    """From the start on: else a run that dies early would pass the old model off as its own."""
    out = tmp_path / "run"
    assert call("grpo_expert", out, *flags_of(toy))[0] == 0
    assert call("grpo_expert", out, *flags_of(toy, seed=1, max_minutes=1e-4), "--overwrite")[0] == 3
    assert not (out / "model.safetensors").exists() and not (out / "cost.json").exists()


def test_free_flags_are_taken_and_said_others_refused_by_name(call, toy, tmp_path):
    out = tmp_path / "run"
    assert call("grpo_expert", out, *flags_of(toy), "--max_minutes", "1e-4")[0] == 3
    code, lines, _ = call("grpo_expert", out, *flags_of(toy, learning_rate=0.02, beta=0.2, slots=3), "--resume")
    assert code == 2 and len(lines) == 1
    assert "--learning_rate" in lines[0] and "--beta" in lines[0] and "--slots" not in lines[0]
    code, _, shown = call("grpo_expert", out, *flags_of(toy, slots=3, tokens_per_microbatch=99), "--resume")
    assert code == 0 and "--slots 3" in shown and "--tokens_per_microbatch 99" in shown and "--seed" not in shown


def test_half_a_line_is_cut(call, toy, whole, tmp_path):
    out = tmp_path / "run"
    assert call("grpo_expert", out, *flags_of(toy), "--max_minutes", "1e-4")[0] == 3
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(out / name, "a") as file:
            file.write('{"step": 2, "reward/me')
    assert call("grpo_expert", out, *flags_of(toy), "--resume")[0] == 0
    assert_same_run(whole("grpo_expert"), out)


@pytest.mark.parametrize(
    "name, damage, words",
    [
        ("args.json", lambda data: data[:40], ["args.json"]),
        ("metrics.jsonl", lambda data: b"\x00" * 30 + b"\n" + data, ["metrics.jsonl:1"]),
        ("samples.jsonl", lambda data: data.replace(b'"step"', b'"stop"', 1), ["samples.jsonl:1"]),
        ("state/step-00000004.pt", lambda data: data[: len(data) // 2], ["step-00000004.pt", "remove"]),
        ("state/step-00000004.pt", lambda data: b"", ["step-00000004.pt", "remove"]),
        ("state/step-00000004.pt", lambda data: data[:20000] + b"?" + data[20001:], ["step-00000004.pt", "checksum"]),
    ],
)
def test_a_damaged_file_is_named(call, toy, tmp_path, name, damage, words):
    out = tmp_path / "run"
    assert call("grpo_expert", out, *flags_of(toy))[0] == 0
    (out / name).write_bytes(damage((out / name).read_bytes()))
    code, lines, _ = call("grpo_expert", out, *flags_of(toy), "--resume")
    assert code == 2 and len(lines) == 1 and all(word in lines[0] for word in words), lines


def test_keep_lets_a_run_go_on_from_the_save_before(call, toy, whole, tmp_path):
    out = tmp_path / "run"
    assert call("grpo_expert", out, *flags_of(toy))[0] == 0
    assert sorted(path.name for path in (out / "state").glob("*.pt")) == ["step-00000003.pt", "step-00000004.pt"]
    (out / "state/step-00000004.pt").unlink()  # as the message says that it is damaged
    code, _, shown = call("grpo_expert", out, *flags_of(toy), "--resume")
    assert code == 0 and "after step 3" in shown
    assert_same_run(whole("grpo_expert"), out)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_state_that_is_a_program_is_not_run(call, toy, tmp_path):
    out = tmp_path / "run"
    assert call("grpo_expert", out, *flags_of(toy))[0] == 0
    for content in (
        lambda path: torch.save(Payload(tmp_path / "owned"), path),
        lambda path: path.write_bytes(pickle.dumps(Payload(tmp_path / "owned"))),
    ):
        content(out / "state/step-00000004.pt")
        code, lines, _ = call("grpo_expert", out, *flags_of(toy), "--resume")
        assert code == 2 and len(lines) == 1 and "step-00000004.pt" in lines[0], lines
        assert not (tmp_path / "owned").exists()


# --------------------------------------------------------------------------------------------------------- bad steps


LOSSES = {"grpo_expert": "policy_loss", "mix_rl": "policy_loss", "mopd": "full_kl_loss"}


def spoil(monkeypatch, script, bad):
    """Make the loss NaN in the steps of which bad(step) holds."""
    module, steps = importlib.import_module(script), []
    draw, loss = module.sample, getattr(module, LOSSES[script])
    monkeypatch.setattr(module, "sample", lambda *args, **how: (steps.append(1), draw(*args, **how))[1])
    factor = {True: math.nan, False: 1.0}
    monkeypatch.setattr(module, LOSSES[script], lambda *args, **how: loss(*args, **how) * factor[bad(len(steps))])


@pytest.mark.parametrize("script", TRAINERS)
def test_a_step_whose_gradient_is_not_finite_is_skipped(call, toy, tmp_path, monkeypatch, script):
    spoil(monkeypatch, script, lambda step: step == 2)
    out = tmp_path / "run"
    assert call(script, out, *flags_of(toy, script, keep=9))[0] == 0
    states = [torch.load(out / f"state/step-0000000{step}.pt", weights_only=True) for step in (1, 2, 3)]
    assert [state["bad_steps"] for state in states] == [0, 1, 0]
    weights = [state["model"]["model.norm.weight"] for state in states]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    batch = json_lines(out / "bad-step-2.jsonl")
    assert sum(len(row["completion"]) if isinstance(row["completion"], list) else 1 for row in batch) == 16
    assert all({"prompt", "domain", "answer", "completion", "reward"} <= set(row) for row in batch)
    assert [row["step"] for row in json_lines(out / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("script", TRAINERS)
def test_bad_steps_in_a_row_end_the_run(call, toy, tmp_path, monkeypatch, script):
    spoil(monkeypatch, script, lambda step: step > 2)
    out = tmp_path / "run"
    code, lines, _ = call(script, out, *flags_of(toy, script, steps=9, keep=9, max_bad_steps=2))
    assert code == 2 and len(lines) == 1
    assert "not finite" in lines[0] and "--learning_rate" in lines[0] and "bad-step" in lines[0]
    assert not (out / "model.safetensors").exists()
    last = torch.load(sorted((out / "state").glob("*.pt"))[-1], weights_only=True)
    assert last["bad_steps"] == 1 and all(weight.isfinite().all() for weight in last["model"].values())


# ------------------------------------------------------------------------------------------- memory, disk, other parts


def refuse_memory():
    torch.empty(10**15)


def refuse_cuda_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")


def refuse_python_memory():
    raise MemoryError


@pytest.mark.parametrize("fail", [refuse_memory, refuse_cuda_memory, refuse_python_memory])
@pytest.mark.parametrize("script", [*TRAINERS, "eval"])
def test_out_of_memory_names_the_flags(call, toy, tmp_path, monkeypatch, script, fail):
    module, calls = importlib.import_module(script), []
    original = module.sample

    def sample(*args, **how):
        calls.append(1)
        if len(calls) == 3 or script == "eval":
            fail()
        return original(*args, **how)

    monkeypatch.setattr(module, "sample", sample)
    flags = ["--models", f"base={toy / 'base'}", "--tasks", toy / "math.jsonl"]
    code, lines, _ = call(script, tmp_path / "run", *(flags if script == "eval" else flags_of(toy, script)))
    assert code == 2 and len(lines) == 1 and "memory" in lines[0], lines
    assert "--slots" in lines[0] and "--tokens_per_microbatch" in lines[0]
    if script != "eval":
        assert torch.load(tmp_path / "run/state/step-00000002.pt", weights_only=True)["step"] == 2


def test_other_errors_keep_their_traceback(call, toy, tmp_path, monkeypatch):
    def fail(*args, **how):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(importlib.import_module("grpo_expert"), "policy_loss", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        call("grpo_expert", tmp_path / "run", *flags_of(toy))


def limit_files(size):
    def prepare():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return prepare


def test_a_full_disk_leaves_the_last_save(call, toy, whole, tmp_path):
    """No file may be larger than 60 kB, and the state has more."""
    out = tmp_path / "run"
    assert call("grpo_expert", out, *flags_of(toy), "--max_minutes", "1e-4")[0] == 3
    before = (out / "state/step-00000001.pt").read_bytes()
    assert len(before) > 60_000
    code, log = Run("grpo_expert", out, *flags_of(toy), "--resume", prepare=limit_files(60_000)).end()
    line = log.splitlines()[-1]
    assert code == 2 and "Traceback" not in log and line.startswith("grpo_expert.py: cannot save"), log
    assert str(out / "state") in line and "bytes" in line and "too large" in line and "--resume" in line
    needed = int(line.partition(" bytes are needed")[0].split()[-1].replace(",", ""))
    assert 0.5 * len(before) < needed <= len(before)
    assert [path.name for path in sorted((out / "state").iterdir())] == ["lock", "step-00000001.pt"]
    assert (out / "state/step-00000001.pt").read_bytes() == before
    code, log = Run("grpo_expert", out, *flags_of(toy), "--resume").end()
    assert code == 0, log
    assert_same_run(whole("grpo_expert"), out)


def test_a_full_disk_at_the_end(toy, tmp_path):
    """The model does not fit: one line, and no half model in the folder."""
    out = tmp_path / "run"
    code, log = Run("grpo_expert", out, *flags_of(toy, save_every=0), prepare=limit_files(20_000)).end()
    line = log.splitlines()[-1]
    assert code == 2 and "Traceback" not in log and line.startswith("grpo_expert.py: cannot save"), log
    assert str(out) in line and "bytes are needed" in line
    assert not (out / "model.safetensors").exists() and not (out / "config.json").exists()


def test_a_full_disk_while_metrics_are_written(toy, tmp_path):
    out = tmp_path / "run"
    code, log = Run("grpo_expert", out, *flags_of(toy, save_every=0, steps=50), prepare=limit_files(5_000)).end()
    assert code == 2 and "Traceback" not in log and "too large" in log.splitlines()[-1], log


def test_a_teacher_that_disappears(call, toy, tmp_path, monkeypatch):
    for seed, domain in enumerate(("math", "code")):
        save_toy_model(tmp_path / domain, seed + 5)
    module, calls = importlib.import_module("mopd"), []
    original = module.sample

    def sample(*args, **how):
        calls.append(1)
        if len(calls) == 3:
            os.rename(tmp_path / "code", tmp_path / "moved")
        return original(*args, **how)

    monkeypatch.setattr(module, "sample", sample)
    teachers = [f"{domain}={tmp_path / domain}" for domain in ("math", "code")]
    code, lines, _ = call("mopd", tmp_path / "run", *flags_of(toy, "mopd", teachers=teachers))
    assert code == 2 and len(lines) == 1 and str(tmp_path / "code") in lines[0], lines
    assert torch.load(tmp_path / "run/state/step-00000002.pt", weights_only=True)["step"] == 2


ADD = "```python\ndef f(x):\n    return x + 1\n```"
ADDED = json.dumps({"type": "function", "name": "f", "cases": [[[1], 2], [[5], 6]]})


def children(pid="self"):
    """The pids of a process's children and theirs, zombies among them."""
    found = {int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()}
    return found.union(*map(children, found))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_verifier_worker_that_dies_or_hangs(number):
    """Idle workers are killed or stopped: the next batch takes others, and a row that met a stopped one scores 0."""
    rows = [("code", ADD + f"\n{i}", ADDED) for i in range(3)]
    assert list(verifiers.verify_batch(rows, workers=1)) == [1, 1, 1]
    workers = children()
    assert workers
    for pid in workers:
        os.kill(pid, number)
    time.sleep(0.1)
    scores = verifiers.verify_batch(rows, workers=1, timeout=0.5)
    assert list(scores) == ([1, 1, 1] if number == signal.SIGKILL else [0, 1, 1]), scores.counts
    assert scores.counts == ({} if number == signal.SIGKILL else {"timeout": 1})
    assert not children() & workers  # reaped: no zombie


def test_an_interrupt_of_the_group_spares_the_verifier(tmp_path):
    """Ctrl-C reaches every process of the terminal: the step that is finished after it must not score 0 for it."""

    def prepare():
        os.setsid()
        signal.signal(signal.SIGINT, lambda *_: None)
        slow = ADD.replace("return", "import time; time.sleep(1); return")
        verifiers.verify_batch([("code", ADD, ADDED)])
        killer = os.fork()
        if killer == 0:
            time.sleep(0.4)
            os.killpg(os.getppid(), signal.SIGINT)
            os._exit(0)
        scores = verifiers.verify_batch([("code", slow, ADDED)], timeout=20)
        print(list(scores), scores.counts)
        sys.exit(0)

    code, log = Run("grpo_expert", tmp_path / "run", prepare=prepare).end()
    assert code == 0 and log == "[1.0] {}\n", log


# -------------------------------------------------------------------------------------------------------- evaluation


def test_an_evaluation_goes_on_where_it_was(call, toy, tmp_path, monkeypatch):
    out = tmp_path / "eval"
    models = [f"{name}={toy / name}" for name in ("base", "math", "code")]
    flags = ["--models", *models, "--tasks", toy / "math.jsonl", "--k", 2, "--device", "cpu"]
    original, calls = evaluation.sample, []

    def sample(*args, **how):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **how)

    monkeypatch.setattr(evaluation, "sample", sample)
    code, lines, _ = call("eval", out, *flags)
    assert code == 130 and lines == ["eval.py: interrupted"]
    assert [path.name for path in (out / "models").glob("*.json")] == ["base.json"]
    code, _, shown = call("eval", out, *flags)
    assert code == 0 and "base: scored before" in shown and len(calls) == 4
    (out / "models/math.json").write_text('{"key": ')
    code, lines, _ = call("eval", out, *flags)
    assert code == 2 and len(lines) == 1 and "math.json" in lines[0]


def test_an_evaluation_goes_on_within_a_model(call, toy, tmp_path, monkeypatch):
    """After an interruption only what was not sampled is, also under other --slots, and the result is the same."""
    flags = ["--models", f"base={toy / 'base'}", "--tasks", toy / "both.jsonl", "--k", 2, "--device", "cpu"]
    assert call("eval", tmp_path / "whole", *flags)[0] == 0
    original, drawn = evaluation.sample, []

    def sample(model, prompts, **how):
        if len(drawn) == 5:
            raise KeyboardInterrupt
        drawn.append(len(prompts))
        return original(model, prompts, **how)

    monkeypatch.setattr(evaluation, "save_sampled", partial(evaluation.save_sampled, every=0))
    monkeypatch.setattr(evaluation, "sample", sample)
    assert call("eval", tmp_path / "cut", *flags, "--slots", 2)[0] == 130
    assert drawn == [1] * 5
    drawn += [0]
    assert call("eval", tmp_path / "cut", *flags, "--slots", 4)[0] == 0
    whole, cut = (json.loads((tmp_path / out / "models/base.json").read_text()) for out in ("whole", "cut"))
    assert sum(drawn) == sum(len(domain["ids"]) for domain in whole["domains"].values())
    assert (cut["domains"], cut["samples"]) == (whole["domains"], whole["samples"])


def test_one_evaluation_at_a_time(toy, tmp_path):
    out, flags = tmp_path / "eval", ["--models", f"base={toy / 'base'}", "--tasks", toy / "math.jsonl", "--k", 1]
    first = Run("eval", out, *flags, prepare=slow_steps("eval", 20))
    wait_for(lambda: (out / "models/lock").exists())
    time.sleep(0.3)
    code, log = Run("eval", out, *flags).end()
    first.kill().end()
    assert code == 2 and "in use" in log


# ---------------------------------------------------------------------------------------------------------- security


def test_nothing_is_written_outside_and_nothing_listens(toy, tmp_path, monkeypatch):
    """Every file opened for writing, every name made or moved, and every socket of a run of each script, by audit hook."""
    seen = tmp_path / "seen.txt"

    def watch():
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        os.environ["HOME"] = str(home)
        log = open(seen, "a", buffering=1)

        def hook(event, args):
            if (
                event == "open"
                and isinstance(args[0], (str, bytes))
                and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            ):
                print("write", os.fsdecode(args[0]), file=log)
            elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink"):
                print("write", os.fsdecode(args[0]), file=log)
            elif event == "os.rename":
                print("write", os.fsdecode(args[1]), file=log)
            elif event in ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"):
                print("socket", event, args, file=log)

        sys.addaudithook(hook)

    for script in TRAINERS:
        code, log = Run(script, tmp_path / "out" / script, *flags_of(toy, script, steps=2), prepare=watch).end()
        assert code == 0, log
    models = [f"{name}={tmp_path / 'out' / name}" for name in TRAINERS]
    flags = ["--models", *models, "--tasks", toy / "math.jsonl", "--k", 2]
    code, log = Run("eval", tmp_path / "out" / "eval", *flags, prepare=watch).end()
    assert code == 0, log
    flags = ["--base", toy / "base", "--experts", toy / "math", toy / "code"]
    code, log = Run("merge", tmp_path / "out" / "merge", *flags, prepare=watch).end()
    assert code == 0, log
    lines = seen.read_text().splitlines()
    assert len(lines) > 50
    inside = (f"write {tmp_path / 'out'}", "write /dev/null")
    assert [line for line in lines if not line.startswith(inside)] == []
    assert list((tmp_path / "home").iterdir()) == []
