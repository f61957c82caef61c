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


CHAT = [{"role": "user", "content": "1+1?"}]
PAIRS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
IFEVAL = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def verl(truth, ability="math"):
    return {
        "data_source": "x",
        "prompt": CHAT,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


def right(text):
    return f"```python\n{text}\n```"


@pytest.mark.parametrize(
    "row, verifier, good, bad",
    [
        (verl("34"), "math", r"\boxed{34}", r"\boxed{35}"),
        (verl(25.0), "math", r"\boxed{25}", r"\boxed{2}"),
        (verl('["42", "43"]'), "math", r"\boxed{43}", r"\boxed{44}"),
        (verl(["42"]), "math", r"\boxed{42}", r"\boxed{[43]}"),
        (verl("B", "science"), "choice", "Answer: B", "Answer: C"),
        (verl({"label": "B", "choices": {"A": "x", "B": "y"}}, "mcq"), "choice", "y", "x"),
        (verl(PAIRS, "code"), "code", right("print(sum(map(int, input().split())))"), right("print(4)")),
        (verl(json.dumps(PAIRS), "code"), "code", right("print(3)"), right("print(4)")),
        (verl(json.dumps(PAIRS | {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}), "code"), "code",
         right("def f(a, b): return a + b"), right("def f(a, b): return a")),
        (verl(IFEVAL, "if"), "ifeval", "no", "a, b"),
        ({"prompt": CHAT, "solution": r"So \boxed{5}."}, "math", r"\boxed{5}", r"\boxed{6}"),
        ({"prompt": "1+1?", "answer": 2}, "math", r"\boxed{2}", "2"),
        ({"messages": CHAT, "ground_truth": "2", "dataset": "gsm8k"}, "math", r"\boxed{2}", r"\boxed{3}"),
        ({"messages": CHAT, "ground_truth": "2", "dataset": ["MATH"]}, "math", r"\boxed{2}", r"\boxed{3}"),
        ({"query": "Add 1 and 2.", "tools": "[]", "answers": '[{"name": "add", "arguments": {"a": 1, "b": 2}}]', "id": 0},
         "tool", '{"name": "add", "arguments": {"b": 2, "a": 1}}', '{"name": "add", "arguments": {"a": 1}}'),
        ({"id": "simple_1", "question": [[{"role": "user", "content": "Area?"}]], "function": [{"name": "area"}],
          "ground_truth": [{"area": {"base": [10], "unit": ["cm", ""]}}]}, "tool", "area(base=10)", "area(base=11)"),
    ],
)  # fmt: skip
def test_layouts_of_other_projects(tmp_path, row, verifier, good, bad):
    (task,) = load_tasks(write(tmp_path / "a.jsonl", [row]))
    assert task["verifier"] == verifier and (task["prompt"] == CHAT or isinstance(task["prompt"], str))
    assert [verify(verifier, text, task["answer"]) for text in (good, bad)] == [1.0, 0.0]


def test_verl_parquet_with_structs(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_list([verl(PAIRS, "code"), verl(PAIRS, "code")]).to_parquet(path)
    assert [task["verifier"] for task in load_tasks(path)] == ["code", "code"]


def test_what_other_layouts_hold_and_nothing_here_checks_is_refused(tmp_path):
    words = refusal(write(tmp_path / "kk.jsonl", [verl({"names": ["Zoey"], "solution_text_format": "(1) Zoey"})]))
    assert "kk.jsonl:1: no verifier here for a ground truth of names" in words
    rows = [{"messages": CHAT, "ground_truth": "2", "dataset": "judge"}]
    assert "dataset 'judge'" in refusal(write(tmp_path / "oi.jsonl", rows))


# One row for each preset, with the columns that its card documents, a right answer and a wrong one.
DAPO = "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer " \
    "(without quotes).\n\nWhat is 1+1?\n\nRemember to put your answer on its own line after \"Answer:\"."  # fmt: skip
OPTIONS = {"choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}, "answerKey": "2"}
LCB = {"problem": "Add.", "tests": json.dumps([{"input": "1\n[2, 3]", "output": "6", "testtype": "functional"}]),
       "starter_code": "class Solution:\n    def add(self, a, b):", "metadata": {"func_name": "add"}}  # fmt: skip
GPQA = {
    "Question": "q?",
    "Correct Answer": "right",
    "Incorrect Answer 1": "a",
    "Incorrect Answer 2": "b",
    "Incorrect Answer 3": "c",
}
HUB = {
    "gsm8k": ({"question": "q", "answer": "2 * 9 = <<2*9=18>>18\n#### 1,018"}, r"\boxed{1018}", r"\boxed{18}"),
    "math": ({"problem": "q", "level": "Level 5", "type": "Algebra", "solution": r"So $\boxed{\frac{1}{2}}$."}, r"\boxed{0.5}", r"\boxed{1}"),
    "math500": ({"problem": "q", "answer": r"\frac{1}{2}", "unique_id": "test/algebra/1.json"}, r"\boxed{1/2}", r"\boxed{2}"),
    "dapo-math-17k": ({"data_source": "math_dapo", "prompt": [{"content": DAPO, "role": "user"}], "ability": "MATH",
                       "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}}, r"\boxed{34}", r"\boxed{3}"),
    "deepscaler": ({"problem": "q", "answer": "-2", "solution": ""}, r"\boxed{-2}", r"\boxed{2}"),
    "aime24": ({"id": 60, "problem": "q", "solution": "", "answer": "204", "url": ""}, r"\boxed{204}", r"\boxed{24}"),
    "aime25": ({"problem_idx": 1, "problem": "q", "answer": 70}, r"\boxed{70}", r"\boxed{7}"),
    "svamp": ({"Body": "Two cats.", "Question": "How many?", "Answer": "2.0", "ID": "chal-1"}, r"\boxed{2}", r"\boxed{3}"),
    "mbpp": ({"task_id": 601, "text": "q", "code": "", "test_list": ["assert f(1) == 2"], "test_setup_code": "", "challenge_test_list": []},
             right("def f(x): return x + 1"), right("def f(x): return x")),
    "mbpp-sanitized": ({"task_id": 2, "prompt": "q", "test_imports": ["import math"], "test_list": ["assert f(4) == 2"]},
                       right("def f(x): return math.isqrt(x)"), right("def f(x): return 3")),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f(x):\n    '''Add one.'''\n", "entry_point": "f",
                   "test": "def check(candidate):\n    assert candidate(1) == 2\n"}, right("def f(x): return x + 1"), right("def f(x): return 1")),
    "deepcoder": (LCB, right("class Solution:\n    def add(self, a, b): return a + sum(b)"), right("class Solution:\n    def add(self, a, b): return a")),
    "openbookqa": ({"id": "7-980", "question_stem": "q", **OPTIONS}, "Answer: 2", "Answer: 3"),
    "arc-easy": ({"id": "Mercury_1", "question": "q", **OPTIONS}, "The answer is (2).", "1"),
    "arc-challenge": ({"id": "Mercury_2", "question": "q", **OPTIONS}, r"\boxed{2}", "3"),
    "sciq": ({"question": "q", "correct_answer": "ox", "distractor1": "ant", "distractor2": "bee", "distractor3": "cat", "support": ""}, "ox", "bee"),
    "mmlu": ({"question": "q", "subject": "anatomy", "choices": ["w", "x", "y", "z"], "answer": 2}, "Answer: C", "Answer: B"),
    "mmlu-stem": ({"question": "q", "type": "physics", "choices": ["w", "x", "y", "z"], "answer": 0}, "Answer: A", "Answer: B"),
    "mmlu-pro": ({"question_id": 70, "question": "q", "options": list("qrstuvwxyz"), "answer": "J", "answer_index": 9}, "Answer: J", "Answer: I"),
    "gpqa": (GPQA, "right", "a"),
    "ifeval": ({"key": 1, "prompt": "q", "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 2, "relation": "at least", "keyword": None}]}, "a b", "a"),
    "rlvr-ifeval": ({"messages": CHAT, "dataset": "ifeval", "ground_truth": json.dumps(
        {"func_name": "validate_word_constraint", "N": 10, "quantifier": "around", "keyword_list": None})}, "a " * 11, "a " * 12),
    "if-multi-constraints": ({"key": "1", "messages": CHAT, "dataset": "ifeval", "ground_truth": str(
        [{"instruction_id": ["punctuation:no_comma", "detectable_format:title"], "kwargs": [None, {}]}])}, "<<t>>", "<<t>>,"),
    "xlam": ({"id": 0, "query": "q", "tools": "[]", "answers": '[{"name": "f", "arguments": {"x": 1}}]'}, "f(x=1)", "f(x=2)"),
    "bbh": ({"input": "not True is", "target": "False"}, "False", "True"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_the_rows_that_their_cards_document(tmp_path, name):
    row, good, bad = HUB[name]
    split = PRESETS[name][2]
    (tmp_path / name).mkdir()
    write(tmp_path / name / f"{split}.jsonl", [row])
    (task,) = load_tasks(name, data_dir=str(tmp_path))
    assert [verify(task["verifier"], text, task["answer"]) for text in (good, bad)] == [1.0, 0.0]
    domain = {"bbh": "bbh", "xlam": "tools"}.get(name)
    assert task["domain"] == domain if domain else task["domain"] in ("math", "code", "science", "instruction")


def test_dapo_loses_its_wrapping_and_its_repeats(tmp_path):
    (tmp_path / "dapo-math-17k").mkdir()
    write(
        tmp_path / "dapo-math-17k/train.jsonl",
        [HUB["dapo-math-17k"][0] | {"extra_info": {"index": str(i)}} for i in range(3)],
    )
    (task,) = load_tasks("dapo-math-17k", data_dir=str(tmp_path))
    assert task["prompt"].startswith("What is 1+1?\n\nThink") and "Answer:" not in task["prompt"]


def test_rows_without_a_checkable_answer_are_left_out_and_counted(tmp_path, caplog):
    (tmp_path / "rlvr-ifeval").mkdir()
    other = HUB["rlvr-ifeval"][0] | {"ground_truth": '{"func_name": "validate_choice", "options": ["a"]}'}
    write(tmp_path / "rlvr-ifeval/train.jsonl", [HUB["rlvr-ifeval"][0], other])
    assert len(load_tasks("rlvr-ifeval", data_dir=str(tmp_path))) == 1
    assert "1 of 2 rows have no answer that can be checked" in caplog.text
    write(tmp_path / "rlvr-ifeval/train.jsonl", [other])
    assert "no rows with an answer" in refusal("rlvr-ifeval", data_dir=str(tmp_path))


@pytest.mark.parametrize(
    "truth, good, bad",
    [
        ({"func_name": "verify_keyword_frequency", "word": "cat", "N": 2}, "cat Cat", "cat cat cat"),
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "at most"}, "a b c", "a b c d"),
        ({"func_name": "validate_sentence_constraint", "N": 3, "quantifier": "around"}, None, None),
        ({"func_name": "verify_sentence_constraint", "N": 3, "quantifier": "around"}, "One. Two.", "One."),
        ({"func_name": "validate_frequency_capital_words", "N": 2, "quantifier": "at least"}, "GO ON", "GO on"),
        ({"func_name": "validate_paragraphs", "N": 2, "first_word": "so", "i": 2}, "a\n\nSo b", "So a\n\nb"),
        ({"func_name": "verify_paragraph_count", "N": 2}, None, None),
    ],
)
def test_functions_of_rlvr_ifeval(truth, good, bad):
    task = verifiers.constraint_task(CHAT, json.dumps(truth))
    assert (task is None) == (good is None)
    if task:
        assert [verify("ifeval", text, task["answer"]) for text in (good, bad)] == [1.0, 0.0]


def test_a_gated_set_says_how_to_get_it():
    assert "gated: accept its terms on the hub" in refusal("gpqa")


def test_test_sets_are_known():
    test = {name for name in PRESETS if verifiers.is_test_set(name)}
    assert test >= {
        "math500",
        "aime24",
        "aime25",
        "humaneval",
        "mmlu",
        "mmlu-stem",
        "mmlu-pro",
        "gpqa",
        "ifeval",
        "bbh",
    }
    assert not test & {
        "gsm8k",
        "math",
        "dapo-math-17k",
        "deepscaler",
        "mbpp",
        "openbookqa",
        "sciq",
        "rlvr-ifeval",
        "deepcoder",
    }
    for spec, wanted in {"gsm8k:test": True, "gsm8k:train": False, "svamp:train": False, "bbh:word_sorting": True, "tiny:test": True,
                         "tiny:code:test": True, "tiny:code": False, "mbpp:validation": False, "rows.jsonl": False}.items():  # fmt: skip
        assert verifiers.is_test_set(spec) == wanted, spec


@pytest.mark.parametrize(
    "row, words",
    [
        ("{", "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: a JSON object is wanted"),
        ({"question": "?", "gold": 1}, "a.jsonl:2: columns gold, question fit no layout; wanted are prompt, domain"),
        (ROW | {"verifier": "maths"}, "a.jsonl:2: unknown verifier 'maths': there are math"),
        (ROW | {"answer": ""}, "a.jsonl:2: the answer of a math task is empty"),
        (ROW | {"answer": 2}, "a.jsonl:2: the answer must be a string"),
        (ROW | {"verifier": "exact", "answer": " "}, "a.jsonl:2: the answer is empty"),
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
    monkeypatch.setattr("verifiers.find_spec", lambda name: None)
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


@pytest.mark.parametrize("subset", ["boolean_expressions", "object_counting", "word_sorting"])
def test_bbh_loads_whole_and_held_out(data_folder, subset):
    tasks = load_tasks(f"bbh:{subset}", data_dir=str(data_folder))
    assert len(tasks) == 250 and all(task["held_out"] and task["verifier"] == "exact" for task in tasks)


def test_each_preset_is_a_line_of_the_table():
    assert HUB.keys() == PRESETS.keys()
    for hub, config, split, layout, columns, licence in PRESETS.values():
        assert "/" in hub and (config is None or config) and split and callable(layout) and columns and licence
