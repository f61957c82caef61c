"""The tiny world: disjoint splits, demonstrations that the verifiers judge as meant, and a base that loads and half knows."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from verifiers import load_tasks, verify_batch

TINY = Path(__file__).resolve().parent.parent / "tiny"


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"tiny_{name}", TINY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_script("make")


def rows(domain, split):
    return [json.loads(line) for line in (TINY / "tasks" / f"{domain}-{split}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("domain", make.DOMAINS)
def test_no_prompt_occurs_twice(domain):
    splits = ("validation", "test") if domain in make.HELD_OUT else ("train", "validation", "test")
    prompts = [row["prompt"] for split in splits for row in rows(domain, split)]
    assert len(prompts) == len(set(prompts)) == (256 if domain in make.HELD_OUT else 840)


def test_held_out_domains_have_no_train_split_and_say_so():
    for domain in make.HELD_OUT:
        assert not (TINY / "tasks" / f"{domain}-train.jsonl").exists()
        assert all(row["held_out"] for row in rows(domain, "test"))
    assert {task["domain"] for task in load_tasks("tiny:train")} == set(make.DOMAINS) - set(make.HELD_OUT)
    assert {task["domain"] for task in load_tasks("tiny:test")} == set(make.DOMAINS)


def test_the_committed_tasks_are_what_make_writes(tmp_path):
    make.write_tasks(tmp_path, seed=0)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(path.name for path in (TINY / "tasks").iterdir())
    assert all((tmp_path / name).read_bytes() == (TINY / "tasks" / name).read_bytes() for name in written)


def test_committed_files_stay_small():
    assert (
        sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file() and "__pycache__" not in str(path)) < 5e6
    )


@pytest.mark.parametrize("domain", make.DOMAINS)
def test_demonstrations_score_as_meant(domain):
    maker, verifier, _ = make.DOMAINS[domain]
    rng = random.Random(7)
    tasks = [maker(rng) for _ in range(60)]
    right = verify_batch([(verifier, good, answer) for _, answer, _, good, _ in tasks])
    wrong = verify_batch([(verifier, bad, answer) for _, answer, _, _, bad in tasks])
    assert min(right) == 1
    # The held-out noise is a shuffle or another word, which is now and then the right one; an instruction may be kept by chance.
    limit = {"reverse": 30, "translate": 6, "instruction": 8}.get(domain, 0)
    assert sum(wrong) <= limit


def test_dropping_the_topic_or_repeating_words_does_not_pay():
    rng = random.Random(3)
    tasks = [make.instruction_task(rng) for _ in range(60)]
    topic = [json.loads(answer)["kwargs"][0]["keywords"][0] for _, answer, *_ in tasks]
    good = [task[3] for task in tasks]
    without = [text.replace(word, "thing") for text, word in zip(good, topic)]
    twice = [text.replace(word, f"{word} {word}") for text, word in zip(good, topic)]
    for changed in (without, twice):
        assert sum(verify_batch([("ifeval", text, task[1]) for text, task in zip(changed, tasks)])) == 0


def test_base_and_tokenizer_load_and_round_trip():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY / "base"), AutoTokenizer.from_pretrained(TINY / "base")
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    rng = random.Random(1)
    for maker, _, _ in make.DOMAINS.values():
        for text in (part for _ in range(20) for part in (lambda task: (task[0], task[3]))(maker(rng))):
            assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "Reverse: big dog"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|user|>Reverse: big dog<|assistant|>"


def test_the_readme_shows_the_study():
    """Every number of its table is one of tiny/study.json, which the study's command writes."""
    study = load_script("study")
    readme = (TINY.parent / "README.md").read_text(encoding="utf-8")
    tables = json.loads((TINY / "study.json").read_text())["tables"]
    table = readme.split(study.HEADLINE[0])[1].split(study.HEADLINE[1])[0].strip()
    assert table == study.headline(tables) and table.count("\n") >= 16
