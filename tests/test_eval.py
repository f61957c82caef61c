"""eval.py: every number of the report from counts worked by hand, evaluate() on models that are known, resuming."""

import importlib
import json

import pytest
import torch
from conftest import ROOT


@pytest.fixture(scope="module")
def evaluation():
    return importlib.import_module("eval")


SETTINGS = {"k": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 0, "seed": 3}


def result(counts, held_out=False):
    return {"n": 4, "counts": counts, "ids": [str(i) for i in range(len(counts))], "held_out": held_out}


def run(parameters=10, sampled=0, scored=0, teacher=0, trained=0, seconds=0.0, **reused):
    return {
        "parameters": parameters, "tokens_sampled": sampled, "tokens_scored": scored, "teacher_tokens": teacher,
        "tokens_trained": trained, "seconds": {"sample": seconds, "train": seconds, "eval": 1000.0, "total": 2000.0},
        "reused": reused,
    }  # fmt: skip


MATH = run(sampled=100, trained=50, seconds=1.0)  # 10 * (2 * 100 + 6 * 50) = 5000 FLOPs, 2 s
CODE = run(sampled=30, scored=20, trained=0, seconds=2.0)  # 10 * 2 * (30 + 20) = 1000 FLOPs, 4 s


def models():
    """Four completions a task, two tasks a domain (three in code): avg@4 = sum of counts / 8 (12)."""
    return {
        "base": {  # math 25, code 50, poems 12.5
            "domains": {"math": result([2, 0]), "code": result([4, 2, 0]), "poems": result([1, 0], True)},
            "cost": {},
        },
        "math": {  # math 87.5, code 25, poems 25
            "domains": {"math": result([4, 3]), "code": result([1, 1, 1]), "poems": result([2, 0], True)},
            "cost": MATH,
        },
        "code": {  # math 0, code 50: no gain at all; poems 0
            "domains": {"math": result([0, 0]), "code": result([4, 2, 0]), "poems": result([0, 0], True)},
            "cost": CODE,
        },
        "merge-ties": {  # math 50, code 75, poems 12.5
            "domains": {"math": result([3, 1]), "code": result([4, 4, 1]), "poems": result([0, 1], True)},
            "cost": run(seconds=0.5, math=MATH, code=CODE),
        },
        "mopd": {  # math 100, code 25, poems 0
            "domains": {"math": result([4, 4]), "code": result([0, 0, 3]), "poems": result([0, 0], True)},
            # 10 * (2 * (40 + 60) + 6 * 100) = 8000 FLOPs, 1 s; with the experts 14000 and 7 s
            "cost": run(sampled=40, teacher=60, trained=100, seconds=0.5, math=MATH, code=CODE),
        },
    }


def tables(text):
    """{title: {row name: {column: cell}}} of a report."""
    found = {}
    for part in text.split("## ")[1:]:
        lines = [line[1:-1].split("|") for line in part.splitlines() if line.startswith("|")]
        header, *rows = [[cell.strip() for cell in line] for line in lines]
        found[part.splitlines()[0]] = {row[0]: dict(zip(header[1:], row[1:])) for row in rows[1:]}
    return found


def starting(table, title):
    return next(rows for name, rows in table.items() if name.startswith(title))


@pytest.fixture
def shown(evaluation):
    return tables(evaluation.report(SETTINGS, models()))


def test_scores(shown):
    scores = starting(shown, "Scores: avg@4")
    assert list(scores) == ["base", "math", "code", "own expert", "merge-ties", "mopd"]
    cells = {name: [row["math"], row["code"], row["average"], row["held-out"]] for name, row in scores.items()}
    assert cells == {
        "base": ["25.0", "50.0", "37.5", "12.5"],
        "math": ["87.5", "25.0", "56.2", "25.0"],
        "code": ["0.0", "50.0", "25.0", "0.0"],
        "own expert": ["87.5", "50.0", "68.8", ""],  # each expert on its own domain; none for the held-out one
        "merge-ties": ["50.0", "75.0", "62.5", "12.5"],
        "mopd": ["100.0", "25.0", "62.5", "0.0"],
    }


def test_coverage(shown):
    # pass@4 of 4 completions: the share of tasks solved at least once; poems are held out of the average.
    coverage, scores = starting(shown, "Coverage: pass@4"), starting(shown, "Scores")
    assert [coverage["base"][d] for d in ("math", "code", "poems")] == ["50.0", "66.7", "50.0"]
    assert [coverage["mopd"][d] for d in ("math", "code", "poems")] == ["100.0", "33.3", "0.0"]
    assert scores["base"]["pass@4"] == "58.3" and scores["mopd"]["pass@4"] == "66.7"


def test_differences_to_the_base(shown):
    gains = starting(shown, "Difference to the base")
    assert "base" not in gains
    assert [gains["merge-ties"][c] for c in ("math", "code", "average", "poems")] == ["25.0", "25.0", "25.0", "0.0"]
    assert [gains["mopd"][c] for c in ("math", "code", "average", "poems")] == ["75.0", "-25.0", "25.0", "-12.5"]
    assert [gains["own expert"][c] for c in ("math", "code", "average", "poems")] == ["62.5", "0.0", "31.2", ""]


def test_differences_to_the_experts(shown):
    # Share kept: (model - base) / (expert - base): math merge 25 of 62.5, mopd 75 of 62.5. The code expert gained
    # nothing, so there is no share of it.
    kept = starting(shown, "Difference to the domain's expert")
    assert kept == {
        "merge-ties": {"math": "-37.5 (40 %)", "code": "+25.0"},
        "mopd": {"math": "+12.5 (120 %)", "code": "-25.0"},
    }


def test_relative_costs(shown):
    # The merge is the unit: its experts' 5000 + 1000 FLOPs, and 2 + 4 + 1 s. Validation does not count.
    scores = starting(shown, "Scores")
    flops = {name: row["cost (FLOPs)"] for name, row in scores.items()}
    assert flops == {
        "base": "", "math": "0.83", "code": "0.17", "own expert": "1.00", "merge-ties": "1.00", "mopd": "2.33"
    }  # fmt: skip
    seconds = {name: row["cost (s)"] for name, row in scores.items()}
    assert seconds == {
        "base": "", "math": "0.29", "code": "0.57", "own expert": "0.86", "merge-ties": "1.00", "mopd": "1.00"
    }  # fmt: skip


def test_without_a_merge_the_experts_are_the_unit(evaluation):
    rest = {name: model for name, model in models().items() if name != "merge-ties"}
    scores = starting(tables(evaluation.report(SETTINGS, rest)), "Scores")
    assert {name: row["cost (FLOPs)"] for name, row in scores.items()} == {
        "base": "", "math": "0.83", "code": "0.17", "own expert": "1.00", "mopd": "2.33"
    }  # fmt: skip


def test_flops_and_seconds_by_hand(evaluation):
    # arXiv 2001.08361: a forward is 2 N a token, a forward and backward 6 N.
    cost = run(parameters=7, sampled=1, scored=2, teacher=3, trained=4, seconds=1.5)
    assert evaluation.own_flops(cost) == 7 * (2 * (1 + 2 + 3) + 6 * 4)
    assert evaluation.own_seconds(cost) == 3.0
    nested = run(seconds=0.5, merge=run(seconds=0.25, math=MATH, code=CODE), base={}, gone=None)
    assert evaluation.end_to_end(nested, evaluation.own_seconds) == 1 + 0.5 + 2 + 4
    assert evaluation.end_to_end({}, evaluation.own_flops) == 0


def test_the_report_follows_from_eval_json(evaluation):
    stored = json.loads(json.dumps({"settings": SETTINGS, "models": models()}))
    before = json.dumps(stored)
    assert evaluation.report(**stored) == evaluation.report(SETTINGS, models())
    assert json.dumps(stored) == before


def test_a_report_of_the_base_alone(evaluation):
    text = evaluation.report(SETTINGS, {"base": models()["base"]})
    assert "| base | 25.0 | 50.0 | 37.5 | 12.5 |" in text
    assert "own expert" not in text and "Difference" not in text


def test_score_is_pass_at_k_of_the_mean_task(evaluation):
    domain = result([1, 3, 0])  # pass@2: 1 - 3/6, 1, 0
    assert evaluation.score(domain) == pytest.approx(100 * (1 / 4 + 3 / 4 + 0) / 3)
    assert evaluation.score(domain, 2) == pytest.approx(100 * (0.5 + 1 + 0) / 3)


# ------------------------------------------------------------------------------------------------------ evaluate


def fixed_sampler(completions):
    """A sampler that answers the i-th prompt with completions[i], sample by sample."""

    def draw(model, prompts, *, num_generations, **how):
        evaluation = importlib.import_module("eval")
        rows = [row for prompt in prompts for row in completions[tuple(prompt)]]
        assert len(rows) == len(prompts) * num_generations
        T = 4
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.tensor([row + [0] * (T - len(row)) for row in rows])
        finished = torch.tensor([row[-1] == 0 for row in rows])
        return evaluation.Rollouts(tokens, lengths, torch.zeros(tokens.shape), finished)

    return draw


def test_evaluate_counts_what_is_right(evaluation, toy):
    _, tokenizer, eos_ids, pad_id = evaluation.load_model(str(toy / "base"), torch.device("cpu"))
    assert eos_ids == [0] and pad_id == 0
    tasks = [  # letters a to h are the tokens 1 to 8; the first answer is "a", the others "b" and "cd"
        {"prompt": "ab", "domain": "one", "verifier": "exact", "answer": "a", "id": "x", "ids": [1, 2]},
        {"prompt": "b", "domain": "two", "verifier": "exact", "answer": "cd", "id": "z", "ids": [2], "held_out": True},
        {"prompt": "cde", "domain": "one", "verifier": "exact", "answer": "b", "id": "y", "ids": [3, 4, 5]},
    ]
    completions = {
        (1, 2): [[1, 0], [1], [2, 0]],  # right, right though cut, wrong
        (3, 4, 5): [[1, 0], [0], [3, 4, 5, 6]],  # all wrong, the second empty
        (2,): [[3, 4, 0], [3, 4, 0], [3, 4]],
    }
    for slots in (1, 3, 512):
        results, rows = evaluation.evaluate(
            None, tasks, tokenizer, samples=3, slots=slots, draw_completions=fixed_sampler(completions),
            max_completion_length=4, eos_ids=eos_ids, pad_id=pad_id,
        )  # fmt: skip
        assert list(results) == ["one", "two"]
        one, two = results["one"], results["two"]
        assert (one["n"], one["counts"], one["ids"], one["held_out"]) == (3, [2, 0], ["x", "y"], False)
        assert (two["n"], two["counts"], two["ids"], two["held_out"]) == (3, [3], ["z"], True)
        assert one["length"] == pytest.approx((2 + 1 + 2 + 2 + 1 + 4) / 6) and one["tokens"] == 12
        assert one["truncated"] == pytest.approx(2 / 6) and two["truncated"] == pytest.approx(1 / 3)
        assert [(row["id"], row["completion"], row["score"]) for row in rows[:3]] == [
            ("x", "a", 1.0), ("x", "a", 1.0), ("x", "b", 0.0)
        ]  # fmt: skip
        assert [row["id"] for row in rows] == list("xxxyyyzzz")


def test_evaluate_does_not_depend_on_slots(evaluation, toy):
    model, tokenizer, eos_ids, pad_id = evaluation.load_model(str(toy / "base"), torch.device("cpu"))
    tasks = evaluation.load_prompts([str(toy / "both.jsonl")], tokenizer, 10, "")
    how = dict(samples=6, max_completion_length=3, eos_ids=eos_ids, pad_id=pad_id, seed=1)
    results = [evaluation.evaluate(model, tasks, tokenizer, slots=slots, **how) for slots in (1, 7, 512)]
    assert results[0] == results[1] == results[2]
    assert len({row["completion"] for row in results[0][1]}) > 10


def test_load_prompts(evaluation, toy, capsys):
    _, tokenizer, _, _ = evaluation.load_model(str(toy / "base"), torch.device("cpu"))
    specs = [str(toy / "math.jsonl"), str(toy / "code.jsonl")]
    tasks = evaluation.load_prompts(specs, tokenizer, 3, "")
    assert [task["prompt"] for task in tasks] == ["ab", "b", "cde", "fgh", "hg", "a", "bcd", "gg"]
    assert all(tokenizer.decode(task["ids"]) == task["prompt"] for task in tasks)
    out = capsys.readouterr().out
    assert "1 of 6" in out and "1 of 4" in out  # dead and face are too long
    limited = [evaluation.load_prompts(specs, tokenizer, 9, "", limit=2, seed=seed) for seed in (0, 0, 1, 2)]
    names = [[task["id"] for task in tasks] for tasks in limited]
    assert all(len(set(ids)) == 4 for ids in names)  # two of each entry
    assert names[0] == names[1] and not names[0] == names[2] == names[3]


def test_prompts_go_through_the_chat_template(evaluation, toy, tmp_path):
    from conftest import save_toy_model
    from transformers import AutoTokenizer

    save_toy_model(tmp_path, 0, chat_template="{% for m in messages %}{{ m['content'] }}h{% endfor %}{{ 'g' }}")
    with_template, without = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(toy / "base")
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert evaluation.encode_prompt(with_template, "ab") == [1, 2, 8, 7]
    assert evaluation.encode_prompt(with_template, messages) == [1, 2, 8, 3, 8, 7]
    assert evaluation.encode_prompt(without, "ab") == [1, 2]


def test_evaluate_the_tiny_base(evaluation, tiny_base):
    model, tokenizer, eos_ids, pad_id = evaluation.load_model(tiny_base, torch.device("cpu"))
    tasks = evaluation.load_prompts(["tiny:test"], tokenizer, 200, "", 16)
    how = dict(samples=4, max_completion_length=48, eos_ids=eos_ids, pad_id=pad_id)
    results, rows = evaluation.evaluate(model, tasks, tokenizer, **how)
    assert len(rows) == 4 * len(tasks)
    known = {"math", "code", "science", "instruction", "reverse", "translate"}
    assert set(results) <= known and any(not domain["held_out"] for domain in results.values())
    for name, domain in results.items():
        assert domain["held_out"] == (name in ("reverse", "translate"))
        scores = [row["score"] for row in rows if row["domain"] == name]
        assert sum(domain["counts"]) == sum(score == 1 for score in scores)
    # A base worth training ends its answers, and gets some but not all right.
    right = sum(sum(domain["counts"]) for domain in results.values()) / len(rows)
    assert 0.02 < right < 0.9
    assert sum(domain["truncated"] for domain in results.values()) / len(results) < 0.5


# ---------------------------------------------------------------------------------------------------- the program


def test_a_model_is_sampled_once(evaluation, toy, tmp_path, monkeypatch):
    """The second call reads the first model's part and samples only what is new or has changed."""
    sampled, original = [], evaluation.evaluate

    def spy(model, *rest, **how):
        sampled.append(how["samples"])
        return original(model, *rest, **how)

    monkeypatch.setattr(evaluation, "evaluate", spy)
    monkeypatch.chdir(ROOT)

    def call(*models, k=2):
        flags = ["--tasks", str(toy / "math.jsonl"), "--k", str(k), "--max_completion_length", "3", "--device", "cpu"]
        names = [f"{model}={toy / model}" for model in models]
        monkeypatch.setattr("sys.argv", ["eval.py", "--models", *names, *flags, "--out", str(tmp_path)])
        sampled.clear()
        evaluation.main()
        return json.loads((tmp_path / "eval.json").read_text())

    first = call("base")
    assert sampled == [2]
    both = call("base", "math")
    assert sampled == [2] and list(both["models"]) == ["base", "math"]
    assert both["models"]["base"] == first["models"]["base"]
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 6 * 2 and {row["model"] for row in rows} == {"base", "math"}
    call("base", "math", k=3)
    assert sampled == [3, 3]
