"""Bad input: each case ends with exit code 2 and one line on stderr that names what, where and what to do; no traceback."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
import transformers
from conftest import ROOT, save_toy_model
from safetensors.torch import load_file, save_file
from test_faults import Payload, call, flags_of, handlers, toy  # noqa: F401 (fixtures)

ROW = {"prompt": "ab", "domain": "math", "verifier": "exact", "answer": "a"}


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


# Task files: name, content, words of the line (the file's name is always one of them)
TASK_FILES = {
    "empty": ("", ["no rows"]),
    "blank lines only": ("\n\n", ["no rows"]),
    "no JSON": (lines(ROW, '{"prompt": "ab", "domain"'), [":2", "not JSON"]),
    "a list instead of an object": (lines(ROW, ROW, [1, 2]), [":3", "object"]),
    "not UTF-8": (b'{"prompt": "\xff\xfe"}\n', [":1"]),
    "a prompt is missing": (lines({"domain": "math", "verifier": "exact", "answer": "a"}), [":1", "prompt"]),
    "an answer is missing": (lines({"prompt": "ab", "domain": "math", "verifier": "exact"}), [":1", "answer"]),
    "another layout": (lines({"question": "1 + 1?", "solution": "2"}), [":1", "question"]),
    "a prompt that is blank": (lines(ROW | {"prompt": "  "}), [":1", "prompt"]),
    "a prompt that is a number": (lines(ROW | {"prompt": 7}), [":1", "prompt"]),
    "messages without content": (lines(ROW | {"prompt": [{"role": "user"}]}), [":1", "content"]),
    "an empty list of messages": (lines(ROW | {"prompt": []}), [":1", "prompt"]),
    "a message whose content is a number": (lines(ROW | {"prompt": [{"role": "user", "content": 5}]}), ["content"]),
    "an answer that is a number": (lines(ROW, ROW | {"answer": 5}), [":2", "answer"]),
    "an unknown verifier": (lines(ROW, ROW | {"verifier": "oracle"}), [":2", "oracle", "choice"]),
    "a verifier that is a list": (lines(ROW | {"verifier": ["exact"]}), [":1"]),
    "a domain that is a list": (lines(ROW | {"domain": ["math"]}), [":1", "domain"]),
    "a domain that is null": (lines(ROW | {"domain": None}), [":1", "domain"]),
    "an empty gold": (lines(ROW, ROW | {"answer": " "}), [":2", "empty"]),
    "a code gold that is no JSON": (lines(ROW, ROW | {"verifier": "code", "answer": "def f"}), [":2"]),
    "a code gold without a type": (lines(ROW | {"verifier": "code", "answer": '{"cases": []}'}), [":1"]),
    "a choice that is none": (lines(ROW | {"verifier": "choice", "answer": '{"label": "E", "choices": {"A": "x"}}'}), [":1"]),
    "an unknown instruction": (
        lines(ROW | {"verifier": "ifeval", "answer": '{"instruction_id_list": ["sing:loudly"], "kwargs": [{}]}'}),
        [":1", "sing:loudly"],
    ),
    "a number gold without a number": (lines(ROW | {"verifier": "number", "answer": '{"value": "many"}'}), [":1"]),
    "a tool gold without calls": (lines(ROW | {"verifier": "tool", "answer": "{}"}), [":1"]),
    "prompts that are all too long": (lines(ROW | {"prompt": "abcdefgh" * 70}), ["--max_prompt_length"]),
    "a gigantic prompt": (lines(ROW | {"prompt": "ab " * 100_000}), ["--max_prompt_length"]),
    "a gigantic line that is no JSON": ("[" * 3_000_000, [":1"]),
}  # fmt: skip


# Flags: script, flags after the usual ones, words of the line
FLAGS = [
    ("grpo_expert", ["--stepz", "3"], ["--stepz", "did you mean --steps"]),
    ("grpo_expert", ["--steps", "many"], ["--steps", "many"]),
    ("grpo_expert", ["--steps"], ["--steps"]),
    ("grpo_expert", ["--steps", "0"], ["--steps", "1 or more"]),
    ("mix_rl", ["--num_generations", "1"], ["--num_generations", "2 or more"]),
    ("mopd", ["--num_generations", "0"], ["--num_generations", "1 or more"]),
    ("grpo_expert", ["--prompts_per_step", "-4"], ["--prompts_per_step", "-4"]),
    ("grpo_expert", ["--max_prompt_length", "0"], ["--max_prompt_length"]),
    ("grpo_expert", ["--max_completion_length", "128"], ["--max_completion_length", "128"]),
    ("grpo_expert", ["--temperature", "inf"], ["--temperature", "inf"]),
    ("mopd", ["--learning_rate", "nan"], ["--learning_rate", "nan"]),
    ("grpo_expert", ["--weight_decay", "nan"], ["--weight_decay", "nan"]),
    ("mix_rl", ["--beta", "nan"], ["--beta", "nan"]),
    ("grpo_expert", ["--epsilon", "1"], ["--epsilon", "below 1"]),
    ("grpo_expert", ["--seed", "4294967296"], ["--seed", "2**32"]),
    ("grpo_expert", ["--eval_limit", "0"], ["--eval_limit"]),
    ("grpo_expert", ["--eval_every", "-1"], ["--eval_every"]),
    ("mopd", ["--save_every", "-1"], ["--save_every"]),
    ("mopd", ["--keep", "0"], ["--keep"]),
    ("mopd", ["--max_minutes", "-3"], ["--max_minutes"]),
    ("mix_rl", ["--max_bad_steps", "0"], ["--max_bad_steps"]),
    ("grpo_expert", ["--device", "cuda:99"], ["--device", "cuda:99"]),
    ("grpo_expert", ["--device", "tpu"], ["--device", "tpu"]),
    ("grpo_expert", ["--device", "meta"], ["--device", "meta"]),
    ("grpo_expert", ["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
    ("grpo_expert", ["--scale_rewards", "groups"], ["--scale_rewards", "groups", "batch"]),
    ("grpo_expert", ["--resume", "--overwrite"], ["--resume", "--overwrite"]),
    ("grpo_expert", ["--tasks", "gsm9k:train"], ["gsm9k"]),
    ("grpo_expert", ["--tasks", "tiny:poetry"], ["tiny:poetry", "math"]),
    ("grpo_expert", ["--tasks", "tiny:math:training"], ["tiny:math:training"]),
    ("grpo_expert", ["--tasks", "nowhere.jsonl"], ["nowhere.jsonl"]),
    ("grpo_expert", ["--tasks", "gsm8k:train", "--data_dir", "nowhere"], ["nowhere", "--data_dir"]),
    ("grpo_expert", ["--eval_tasks", "nowhere.jsonl"], ["nowhere.jsonl"]),
    ("mix_rl", ["--proportions", "naturel"], ["--proportions", "naturel"]),
    ("mix_rl", ["--proportions", "math=1"], ["--proportions", "code"]),
    ("mix_rl", ["--proportions", "math=1", "code=1", "poetry=1"], ["--proportions", "poetry"]),
    ("mix_rl", ["--proportions", "math=nan", "code=1"], ["--proportions"]),
    ("mopd", ["--kl", "reverse"], ["--kl", "reverse", "sampled"]),
    ("mopd", ["--teachers", "runs/math"], ["--teachers", "DOMAIN=folder"]),
    ("mopd", ["--teachers", "math="], ["--teachers", "DOMAIN=folder"]),
    ("mopd", ["--teachers", "math=a", "math=b"], ["--teachers", "one a domain"]),
    ("mopd", ["--teachers", "math=nowhere", "code=nowhere"], ["nowhere"]),
    ("eval", ["--k", "0"], ["--k"]),
    ("eval", ["--top_p", "1.5"], ["--top_p", "1.5"]),
    ("eval", ["--temperature", "nan"], ["--temperature", "nan"]),
    ("eval", ["--models", "tiny/base"], ["--models", "NAME=folder"]),
    ("eval", ["--models", "a=x", "a=y"], ["--models", "different names"]),
    ("eval", ["--models", "../escape=tiny/base"], ["../escape", "slashes"]),
    ("eval", ["--models", "=tiny/base"], ["--models"]),
    ("eval", ["--models", "a=no/such/model"], ["no/such/model"]),
    ("eval", ["--tasks", "tiny:poetry"], ["tiny:poetry"]),
    ("eval", ["--chosen_by", "nobody=runs"], ["--chosen_by", "nobody"]),
    ("merge", ["--method", "soup"], ["--method", "soup", "ties"]),
    ("merge", ["--experts", "nowhere"], ["nowhere"]),
    ("merge", ["--base", "nowhere"], ["nowhere"]),
    ("merge", ["--method", "ties", "--density", "1.5"], ["--density"]),
    ("merge", ["--weights", "1"], ["--weights", "2"]),
    ("merge", ["--scale", "nan"], ["--scale"]),
    ("merge", ["--scale", "0.5", "0.6"], ["--scale", "{scale}"]),
]  # fmt: skip


def usual_flags(toy, script, **changes):  # noqa: F811
    """Flags with which the script would run."""
    if script == "merge":
        return ["--base", str(toy / "base"), "--experts", str(toy / "math"), str(toy / "code")]
    if script == "eval":
        models = changes.get("models", [f"base={toy / 'base'}"])
        return ["--models", *models, "--tasks", str(changes.get("tasks", toy / "math.jsonl")), "--k", "1"]
    return flags_of(toy, script, steps=1, save_every=0, **changes)


@pytest.fixture
def refused(call, tmp_path):  # noqa: F811
    """Run a script that must refuse what it is given, in under ten seconds -> its one line."""

    def run(script, *flags, out=None, words=()):
        start = time.monotonic()
        code, errors, _ = call(script, out or tmp_path / "run", *flags)
        assert time.monotonic() - start < 10
        assert code == 2 and len(errors) == 1, (code, errors)
        assert errors[0].startswith(f"{script}.py: ") and len(errors[0]) < 600, errors[0]
        assert all(str(word) in errors[0] for word in words), (words, errors[0])
        return errors[0]

    return run


@pytest.mark.parametrize("script, flags, words", FLAGS, ids=[" ".join([s, *flags])[:60] for s, flags, _ in FLAGS])
def test_flags(refused, toy, script, flags, words):  # noqa: F811
    refused(script, *usual_flags(toy, script), *flags, words=words)


@pytest.mark.parametrize("name", TASK_FILES)
@pytest.mark.parametrize("script", ["grpo_expert", "eval"])
def test_task_files(refused, toy, tmp_path, script, name):  # noqa: F811
    content, words = TASK_FILES[name]
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(script, *usual_flags(toy, script, tasks=path), words=["tasks.jsonl", *words])


# ------------------------------------------------------------------------------------------------------------ models


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def spoil_weight(folder, value):
    edit_weights(folder, lambda weights: weights["model.layers.1.mlp.up_proj.weight"].view(-1)[3:4].fill_(value))


def as_pickle(folder):
    (folder / "model.safetensors").unlink()
    torch.save(Payload(folder / "owned"), folder / "pytorch_model.bin")


def with_own_code(folder):
    edit_config(
        folder,
        model_type="own",
        architectures=["Own"],
        auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"},
    )
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(folder / 'owned')!r})\nclass C: pass\nclass M: pass\n")


def as_t5(folder):
    tiny = dict(vocab_size=9, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    transformers.T5ForConditionalGeneration(transformers.T5Config(**tiny)).save_pretrained(folder)


def as_bart(folder):
    """transformers would take half of it for a causal model."""
    tiny = dict(vocab_size=9, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16)
    tiny |= dict(encoder_attention_heads=2, decoder_attention_heads=2, pad_token_id=0, eos_token_id=0)
    transformers.BartForConditionalGeneration(transformers.BartConfig(**tiny)).save_pretrained(folder)


def no_end(folder):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if not k.startswith("eos_token")}))


def cut(name, bytes_left):
    def change(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:bytes_left])

    return change


MODELS = {
    "no config.json": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "half a config.json": (cut("config.json", 50), ["config.json"]),
    "an unknown model type": (lambda folder: edit_config(folder, model_type="nonesuch"), ["nonesuch"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors"]),
    "half the weights": (cut("model.safetensors", 20_000), []),
    "weights of no bytes": (cut("model.safetensors", 0), []),
    "a tensor is missing": (lambda f: edit_weights(f, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")), ["up_proj"]),
    "a tensor of another shape": (
        lambda f: edit_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(5)})), ["tensors", "model.norm"]
    ),
    "NaN": (lambda folder: spoil_weight(folder, float("nan")), ["NaN", "up_proj"]),
    "infinite": (lambda folder: spoil_weight(folder, float("inf")), ["infinite", "up_proj"]),
    "a tokenizer larger than the embedding": (lambda f: (shutil.rmtree(f), save_toy_model(f, 0, vocab_size=7)), ["9", "7"]),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], []),
    "half a tokenizer": (cut("tokenizer.json", 80), []),
    "no end of sequence": (no_end, ["end-of-sequence", "eos_token_id"]),
    "an encoder-decoder": (as_t5, []),
    "an encoder-decoder with a causal half": (as_bart, ["encoder-decoder"]),
    "a pickle": (as_pickle, ["model.safetensors"]),
    "code of its own": (with_own_code, ["code"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("script", ["grpo_expert", "eval", "mopd"])
def test_models(refused, toy, tmp_path, script, name):  # noqa: F811
    """As the model to start from, to evaluate, or as a teacher: refused before anything is sampled, and no code is run."""
    folder, (change, words) = tmp_path / "model", MODELS[name]
    shutil.copytree(toy / "base", folder)
    change(folder)
    flags = {"grpo_expert": {"model": folder}, "eval": {"models": [f"base={folder}"]}}
    flags = flags.get(script, {"teachers": [f"math={toy / 'math'}", f"code={folder}"]})
    if (script, name) == ("mopd", "no end of sequence"):
        pytest.skip("only the student's end counts")
    words = [] if script == "mopd" else words  # of a teacher, other things go wrong first
    line = refused(script, *usual_flags(toy, script, **flags), words=words)
    assert str(folder) in line
    assert not (folder / "owned").exists()


def test_chat_templates(refused, call, toy, tmp_path):  # noqa: F811
    """A role that the template refuses; messages without a template are their texts; text through a template works."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    save_toy_model(tmp_path / "chat", 0, chat_template=template)
    save_toy_model(tmp_path / "broken", 0, chat_template="{% for m in messages %}{{ m.content.fly() }}{% endfor %}")
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    (tmp_path / "chat.jsonl").write_text(lines(ROW, ROW | {"prompt": chat}))
    words = ["chat.jsonl", "chat template", "no system role"]
    refused(
        "grpo_expert",
        *usual_flags(toy, "grpo_expert", model=tmp_path / "chat", tasks=tmp_path / "chat.jsonl"),
        words=words,
    )
    refused("grpo_expert", *usual_flags(toy, "grpo_expert", model=tmp_path / "broken"), words=["chat template"])
    flags = usual_flags(toy, "grpo_expert", tasks=tmp_path / "chat.jsonl")
    assert call("grpo_expert", tmp_path / "plain", *flags)[0] == 0
    assert call("grpo_expert", tmp_path / "text", *usual_flags(toy, "grpo_expert", model=tmp_path / "chat"))[0] == 0


# ------------------------------------------------------------------------------------------------------ the out folder


@pytest.mark.parametrize("script", ["grpo_expert", "mopd", "eval", "merge"])
def test_an_out_folder_that_cannot_be(refused, toy, tmp_path, script):  # noqa: F811
    (tmp_path / "file").write_text("mine")
    refused(script, *usual_flags(toy, script), out=tmp_path / "file", words=[tmp_path / "file"])
    refused(script, *usual_flags(toy, script), out=tmp_path / "file" / "below", words=[tmp_path / "file"])
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_an_out_folder_that_is_read_only(refused, toy, tmp_path):  # noqa: F811
    (tmp_path / "locked").mkdir(mode=0o500)
    refused("grpo_expert", *usual_flags(toy, "grpo_expert"), out=tmp_path / "locked" / "run", words=["locked"])


@pytest.mark.parametrize("script", ["grpo_expert", "eval", "merge"])
def test_a_model_is_never_overwritten(refused, toy, tmp_path, script):  # noqa: F811
    """--out names the folder of a model that the script did not make."""
    shutil.copytree(toy / "math", tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    refused(script, *usual_flags(toy, script), out=tmp_path / "model", words=[tmp_path / "model"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


# ------------------------------------------------------------------------------------------ what is odd, but not wrong


def test_a_group_of_one_is_enough_for_mopd(call, toy, tmp_path):  # noqa: F811
    assert call("mopd", tmp_path / "run", *usual_flags(toy, "mopd", num_generations=1))[0] == 0


def test_long_prompts_and_duplicates_are_counted(call, toy, tmp_path):  # noqa: F811
    (tmp_path / "tasks.jsonl").write_text(lines(ROW, ROW, ROW | {"prompt": "abcdefgh" * 20}, ROW | {"prompt": "b"}))
    code, _, shown = call(
        "grpo_expert", tmp_path / "run", *usual_flags(toy, "grpo_expert", tasks=tmp_path / "tasks.jsonl")
    )
    assert (
        code == 0 and "1 of 4 prompts exceed 122 tokens: left out" in shown
    )  # the context of 128 less 6 to be sampled
    assert "1 of 4 tasks are there more than once" in shown


def test_a_path_with_spaces_and_unicode(call, toy, tmp_path):  # noqa: F811
    home = tmp_path / "eine schöne Mappe 模型"
    shutil.copytree(toy / "base", home / "my model")
    shutil.copyfile(toy / "math.jsonl", home / "tâches à faire.jsonl")
    flags = usual_flags(toy, "grpo_expert", model=home / "my model", tasks=home / "tâches à faire.jsonl")
    assert call("grpo_expert", home / "the run", *flags)[0] == 0
    flags = usual_flags(toy, "eval", models=[f"größe={home / 'the run'}"], tasks=home / "tâches à faire.jsonl")
    assert call("eval", home / "eval", *flags)[0] == 0
    flags = ["--base", home / "my model", "--experts", home / "the run", toy / "code"]
    assert call("merge", home / "merge", *flags)[0] == 0


def test_dropout_is_off(call, toy, tmp_path):  # noqa: F811
    """Else the log-probabilities of the learner would not be the sampler's: the first step would stop."""
    shutil.copytree(toy / "base", tmp_path / "model")
    edit_config(tmp_path / "model", attention_dropout=0.5)
    out = tmp_path / "run"
    assert call("grpo_expert", out, *usual_flags(toy, "grpo_expert", model=tmp_path / "model"))[0] == 0
    assert json.loads((out / "metrics.jsonl").read_text())["policy/sampler_gap"] < 1e-4


# ------------------------------------------------------------------------------------------------------- as a program


def test_debug_shows_the_traceback(call, toy, tmp_path):  # noqa: F811
    flags = [*usual_flags(toy, "grpo_expert", tasks=tmp_path / "none.jsonl"), "--debug"]
    code, errors, _ = call("grpo_expert", tmp_path / "run", *flags)
    assert code == 2 and "Traceback (most recent call last):" in errors and "load_tasks" in "".join(errors)
    assert errors[-1].startswith("grpo_expert.py: ") and "none.jsonl" in errors[-1]


@pytest.mark.parametrize("script, flags", [("mopd", ["--steps", "0"]), ("merge", ["--method", "soup"])])
def test_as_a_program(tmp_path, script, flags):
    command = [sys.executable, str(ROOT / f"{script}.py"), *flags, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"{script}.py: ") and done.stderr.count("\n") == 1 and flags[0] in done.stderr
    assert not (tmp_path / "run").exists()


def test_there_are_at_least_sixty_cases():
    assert len(FLAGS) + len(TASK_FILES) + len(MODELS) >= 60
    assert all(callable(importlib.import_module(script).main) for script, *_ in FLAGS)
