"""load_tasks: presets from local copies, files, the layouts in common use, and one clear line for what is wrong."""

import json

import pytest

import verifiers
from verifiers import PRESETS, TaskError, load_tasks, verify

ROW = {"prompt": "1+1?", "domain": "math", "verifier": "math", "answer": "2"}


def write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def refusal(spec, **how):
    with pytest.raises(TaskError) as error:
        load_tasks(spec, **how)
    message = str(error.value)
    assert "\n" not in message and isinstance(error.value, ValueError)
    return message


def test_our_rows_keep_their_id_or_get_one_of_their_content(tmp_path):
    path = write(
        tmp_path / "a.jsonl", [ROW, ROW | {"id": 7}, ROW | {"prompt": "2?", "held_out": True}, "", ROW | {"extra": 1}]
    )
    tasks = load_tasks(path)
    assert [set(task) for task in tasks] == [{"prompt", "domain", "verifier", "answer", "id"}] * 2 + [
        {"prompt", "domain", "verifier", "answer", "id", "held_out"}, {"prompt", "domain", "verifier", "answer", "id"}
    ]  # fmt: skip
    assert tasks[1]["id"] == "7" and tasks[0]["id"] == tasks[3]["id"] != tasks[2]["id"]
    assert load_tasks(path) == tasks


def test_a_limit_is_a_seeded_subset_in_order(tmp_path):
    path = write(tmp_path / "a.jsonl", [ROW | {"id": str(i)} for i in range(50)])
    first, again, other = (load_tasks(path, limit=10, seed=seed) for seed in (0, 0, 1))
    numbers = [int(task["id"]) for task in first]
    assert first == again != other and numbers == sorted(numbers) and len(set(numbers)) == 10
    assert len(load_tasks(path, limit=99)) == 50


def test_files_of_other_kinds(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.json").write_text(json.dumps([ROW, ROW]))
    table = datasets.Dataset.from_list([ROW, ROW | {"prompt": "chat"}])
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.to_csv(str(tmp_path / "a.csv"))
    for name in ("a.json", "a.parquet", "a.csv"):
        assert [task["answer"] for task in load_tasks(str(tmp_path / name))] == ["2", "2"]


def test_verl_and_open_instruct_rows(tmp_path):
    chat = [{"role": "user", "content": "1+1?"}]
    verl = {
        "data_source": "x",
        "prompt": chat,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": 2.5},
    }
    (task,) = load_tasks(write(tmp_path / "verl.jsonl", [verl]))
    assert (task["prompt"], task["domain"], task["verifier"], task["answer"]) == (chat, "math", "math", "2.5")
    rows = [{"messages": chat, "ground_truth": "2", "dataset": name} for name in ("gsm8k", "MATH")]
    assert [task["verifier"] for task in load_tasks(write(tmp_path / "oi.jsonl", rows))] == ["math", "math"]
    rows = [{"messages": chat, "ground_truth": "2", "dataset": "judge"}]
    assert "dataset 'judge'" in refusal(write(tmp_path / "oi.jsonl", rows))


@pytest.mark.parametrize(
    "row, words",
    [
        ("{", "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: a JSON object is wanted"),
        ({"question": "?", "gold": 1}, "a.jsonl:2: columns gold, question fit no layout; wanted are prompt, domain"),
        (ROW | {"verifier": "maths"}, "a.jsonl:2: unknown verifier 'maths': there are math"),
        (ROW | {"answer": ""}, "a.jsonl:2: the answer of a math task is empty"),
        (ROW | {"answer": 2}, "a.jsonl:2: the answer must be a string"),
        (ROW | {"prompt": "  "}, "a.jsonl:2: the prompt must be"),
        (ROW | {"prompt": [{"role": "user"}]}, "a.jsonl:2: the prompt must be"),
        (ROW | {"verifier": "code", "answer": "{}"}, "a.jsonl:2: a code answer is JSON"),
        (ROW | {"verifier": "code", "answer": '{"type": "stdin", "cases": []}'}, "a.jsonl:2: a code answer is JSON"),
        (ROW | {"verifier": "code", "answer": '{"type": "assert", "asserts": ["assert ("]}'}, "a.jsonl:2: a code answer"),
        (ROW | {"verifier": "choice", "answer": '{"label": "E", "choices": {"A": "x"}}'}, "a.jsonl:2: a choice answer"),
        (ROW | {"verifier": "number", "answer": '{"value": "m/s"}'}, "a.jsonl:2: a number answer is JSON"),
        (ROW | {"verifier": "tool", "answer": '{"calls": []}'}, "a.jsonl:2: a tool answer is JSON"),
        (ROW | {"verifier": "ifeval", "answer": '{"instruction_id_list": ["count:word_count_range"], "kwargs": [{}]}'},
         "a.jsonl:2: unknown instruction 'count:word_count_range': only the 25 of Google's IFEval are checked (not IFBench's)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line_with_its_place(tmp_path, row, words):
    assert words in refusal(write(tmp_path / "a.jsonl", [ROW, row]))


def test_language_detection_is_asked_for_when_it_is_missing(tmp_path, monkeypatch):
    answer = json.dumps({"instruction_id_list": ["change_case:english_capital"], "kwargs": [{}]})
    path = write(tmp_path / "a.jsonl", [ROW | {"verifier": "ifeval", "answer": answer}])
    monkeypatch.setattr("verifiers.has_langdetect", lambda: False)
    verifiers.parse_ifeval_answer.cache_clear()
    assert "pip install langdetect" in refusal(path)


def test_unknown_places_are_named(tmp_path, monkeypatch):
    assert "no such file" in refusal(str(tmp_path / "none.jsonl"))
    assert "neither a preset (tiny, gsm8k" in refusal("gsm9k:train")
    assert "none of" in refusal("gsm8k:train", data_dir=str(tmp_path)) and "no rows" in refusal(
        write(tmp_path / "e.jsonl", [])
    )
    assert "cannot load openai/gsm8k" in refusal("gsm8k:test")  # HF_HUB_OFFLINE is set
    assert "tiny:physics" in refusal("tiny:physics")


def test_tiny_specs(tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers.TINY", tmp_path)
    for domain in ("math", "code", "reverse"):
        for split in ("train", "test") if domain != "reverse" else ("test",):
            row = ROW | {"domain": domain, "verifier": "exact", "id": f"{domain}-{split}"}
            write(tmp_path / f"{domain}-{split}.jsonl", [row])
    found = {
        spec: [task["id"] for task in load_tasks(spec)]
        for spec in ("tiny", "tiny:train", "tiny:test", "tiny:code", "tiny:math:test")
    }
    assert found == {
        "tiny": ["math-train", "code-train"], "tiny:train": ["math-train", "code-train"],
        "tiny:test": ["math-test", "code-test", "reverse-test"], "tiny:code": ["code-train"], "tiny:math:test": ["math-test"],
    }  # fmt: skip


GOLDS = {  # what a right completion looks like, from the row of the data set
    "gsm8k:test": lambda row: row["answer"],
    "svamp:test": lambda row: f"\\boxed{{{row['Answer']}}}",
    "openbookqa:test": lambda row: f"The answer is {row['answerKey']}.",
    "mmlu-stem:test": lambda row: f"Answer: {'ABCD'[row['answer']]}",
    "mbpp:test": lambda row: f"```python\n{row['code']}\n```",
    "mbpp-sanitized:test": lambda row: f"```python\n{row['code']}\n```",
    "humaneval:test": lambda row: f"```python\n{row['prompt']}{row['canonical_solution']}\n```",
}


@pytest.mark.parametrize("spec", GOLDS)
def test_presets_pay_the_reference_answers(data_folder, spec):
    name, split = spec.split(":")
    rows = [
        json.loads(line) for line in (data_folder / name / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    tasks = load_tasks(spec, data_dir=str(data_folder))
    assert len(tasks) == len(rows) and {task["domain"] for task in tasks} <= {"math", "code", "science"}
    assert len({task["id"] for task in tasks}) > 0.99 * len(tasks)
    chosen = range(0, len(rows), max(len(rows) // (20 if tasks[0]["verifier"] == "code" else 200), 1))
    wrong = [i for i in chosen if verify(tasks[i]["verifier"], GOLDS[spec](rows[i]), tasks[i]["answer"]) != 1.0]
    assert wrong == []


def test_ifeval_loads_whole(data_folder):
    pytest.importorskip("langdetect")
    assert len(load_tasks("ifeval", data_dir=str(data_folder))) == 541


def test_each_preset_is_a_line_of_the_table():
    assert {
        "gsm8k",
        "svamp",
        "openbookqa",
        "mmlu-stem",
        "mbpp",
        "mbpp-sanitized",
        "humaneval",
        "ifeval",
        "math500",
    } <= PRESETS.keys()
    for hub, config, split, reader in PRESETS.values():
        assert "/" in hub and (config is None or config) and split in ("train", "test") and callable(reader)
