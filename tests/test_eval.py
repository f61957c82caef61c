"""eval.py: every number of the report from counts worked by hand, intervals on synthetic data, evaluate(), resuming."""

import importlib
import json
import sys
import types

import numpy as np
import pytest
import torch
from conftest import ROOT


@pytest.fixture(scope="module")
def evaluation():
    return importlib.import_module("eval")


SETTINGS = {"k": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 0, "seed": 3}


def result(counts, held_out=False, majority=None):
    ids = [str(i) for i in range(len(counts))]
    parts = {"n": 4, "counts": counts, "ids": ids, "held_out": held_out, "majority": majority}
    return parts | {"length": 7.25, "truncated": 0.125, "tokens": 29 * len(counts)}


def run(parameters=10, sampled=0, scored=0, teacher=0, trained=0, seconds=0.0, **reused):
    return {
        "parameters": parameters, "tokens_sampled": sampled, "tokens_scored": scored, "teacher_tokens": teacher,
        "tokens_trained": trained, "seconds": {"sample": seconds, "train": seconds, "eval": 1000.0, "total": 2000.0},
        "reused": reused,
    }  # fmt: skip


MATH = run(sampled=100, trained=50, seconds=1.0)  # 10 * (2 * 100 + 6 * 50) = 5000 FLOPs, 2 s, 150 tokens
CODE = run(sampled=30, scored=20, trained=0, seconds=2.0)  # 10 * 2 * (30 + 20) = 1000 FLOPs, 4 s, 50 tokens


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
        if lines:
            header, *rows = [[cell.strip() for cell in line] for line in lines]
            found[part.splitlines()[0]] = {row[0]: dict(zip(header[1:], row[1:])) for row in rows[1:]}
    return found


def starting(table, title):
    return next(rows for name, rows in table.items() if name.startswith(title))


def points(row, *columns):
    """The estimates of some cells, without their intervals."""
    return [row[column].split()[0] if row[column] else "" for column in columns]


@pytest.fixture
def shown(evaluation):
    return tables(evaluation.report(SETTINGS, models()))


def test_scores(shown):
    scores = starting(shown, "Scores: avg@4")
    assert {name: points(row, "math", "code", "average", "held-out") for name, row in scores.items()} == {
        "base": ["25.0", "50.0", "37.5", "12.5"],
        "math": ["87.5", "25.0", "56.2", "25.0"],
        "code": ["0.0", "50.0", "25.0", "0.0"],
        "own expert": ["87.5", "50.0", "68.8", ""],  # each expert on its own domain; none for the held-out one
        "merge-ties": ["50.0", "75.0", "62.5", "12.5"],
        "mopd": ["100.0", "25.0", "62.5", "0.0"],
    }
    assert list(scores) == ["base", "math", "code", "own expert", "merge-ties", "mopd"]
    # Of two tasks with 50 and 0, a quarter of the draws each takes 0 or 50 twice: the interval is all of [0, 50].
    assert scores["base"]["math"] == "25.0 ± 25.0" and scores["mopd"]["math"] == "100.0 ± 0.0"


def test_coverage(shown):
    # pass@4 of 4 completions: the share of tasks solved at least once; poems are held out of the average.
    coverage, scores = starting(shown, "Coverage: pass@4"), starting(shown, "Scores")
    assert points(coverage["base"], "math", "code", "poems") == ["50.0", "66.7", "50.0"]
    assert points(coverage["mopd"], "math", "code", "poems") == ["100.0", "33.3", "0.0"]
    assert points(scores["base"], "pass@4") == ["58.3"] and points(scores["mopd"], "pass@4") == ["66.7"]


def test_differences_to_the_base(shown):
    gains, columns = starting(shown, "Difference to the base"), ("math", "code", "average", "poems")
    assert list(gains) == ["own expert", "merge-ties", "mopd"]
    assert points(gains["merge-ties"], *columns) == ["+25.0", "+25.0", "+25.0", "+0.0"]
    assert points(gains["mopd"], *columns) == ["+75.0", "-25.0", "+25.0", "-12.5"]
    assert points(gains["own expert"], *columns) == ["+62.5", "+0.0", "+31.2", ""]
    # Paired: the expert is 50 and 75 ahead in the two tasks, so no draw of them gives less or more.
    assert gains["own expert"]["math"] == "+62.5 [+50.0, +75.0]"


def test_coverage_gained(shown):
    gained = starting(shown, "Coverage gained")
    assert list(gained) == ["own expert", "merge-ties", "mopd"] and list(gained["mopd"]) == [
        "pass@1",
        "pass@2",
        "pass@4",
    ]
    # pass@2 of 1, 2, 3 right ones in 4: 1/2, 5/6, 1. base: math 5/12, code 11/18; mopd: math 1, code 1/3.
    assert points(gained["mopd"], *gained["mopd"]) == ["+25.0", "+15.3", "+8.3"]


def test_transfer(shown):
    transfer, columns = starting(shown, "Transfer"), ("math", "code", "poems", "held-out")
    assert {name: points(row, *columns) for name, row in transfer.items()} == {
        "math": ["+62.5", "-25.0", "+12.5", "+12.5"],
        "code": ["-25.0", "+0.0", "-12.5", "-12.5"],
    }


def test_differences_to_the_experts(shown):
    lost = starting(shown, "Difference to the domain's expert")
    assert {name: points(row, "math", "code", "average") for name, row in lost.items()} == {
        "merge-ties": ["-37.5", "+25.0", "-6.2"],
        "mopd": ["+12.5", "-25.0", "-6.2"],
    }
    # Share kept: (model - base) / (expert - base): math merge 25 of 62.5, mopd 75 of 62.5. The code expert gained
    # nothing, so there is no share of it; of the average gain of 31.25 both keep 25.
    kept = starting(shown, "Share of the expert's gain kept")
    assert {name: points(row, "math", "code", "average") for name, row in kept.items()} == {
        "merge-ties": ["40.0", "n/a", "80.0"],
        "mopd": ["120.0", "n/a", "80.0"],
    }


def test_a_share_needs_a_gain_that_stands_out(evaluation):
    zeros = np.zeros(101)
    gain = np.concatenate([[5.0], np.linspace(-1, 11, 100)])  # 5 [-0.7, 10.7]
    assert evaluation.share_kept({"a": gain / 2}, {"a": zeros}, {"a": gain}) == {"a": "n/a"}
    assert evaluation.share_kept({"a": gain}, {"a": zeros}, {"a": -gain - 9}) == {"a": "n/a"}  # the expert got worse
    share = evaluation.share_kept({"a": gain / 2}, {"a": zeros}, {"a": gain + 1.01})["a"]  # 6 [0.3, 11.7]
    assert (
        share[0] == pytest.approx(100 * 2.5 / 6.01) and share[1] < -1000
    )  # where the gain nears 0, the share explodes


def test_pairs(shown):
    pairs = starting(shown, "Pairs")
    assert list(pairs) == ["merge-ties - own expert", "mopd - own expert", "mopd - merge-ties"]
    assert [points(row, "average") for row in pairs.values()] == [["-6.2"], ["-6.2"], ["+0.0"]]
    assert pairs["mopd - merge-ties"]["p"] == "1.000"


def test_lengths(shown):
    assert starting(shown, "Completion length")["mopd"]["poems"] == "7.2 (12.5%)"


def test_relative_costs(shown):
    # The merge is the unit: its experts' 5000 + 1000 FLOPs, and 2 + 4 + 1 s. Validation does not count.
    scores = starting(shown, "Scores")
    flops = {name: row["relative TFLOPs"] for name, row in scores.items()}
    assert flops == {
        "base": "", "math": "0.83", "code": "0.17", "own expert": "1.00", "merge-ties": "1.00", "mopd": "2.33"
    }  # fmt: skip
    seconds = {name: row["relative s"] for name, row in scores.items()}
    assert seconds == {
        "base": "", "math": "0.29", "code": "0.57", "own expert": "0.86", "merge-ties": "1.00", "mopd": "1.00"
    }  # fmt: skip
    costs = starting(shown, "Cost, relative to merge-ties")
    assert list(costs) == ["math", "code", "own expert", "merge-ties", "mopd"]
    assert [costs["mopd"][c] for c in ("s", "all s", "M tokens", "all M tokens")] == ["1", "7", "0.0002", "0.0004"]
    assert [costs["merge-ties"][c] for c in ("TFLOPs", "all TFLOPs", "paper")] == ["0", "6e-09", "1.00"]
    assert costs["mopd"]["paper"] == "1.14-1.19" and costs["math"]["paper"] == ""


def test_what_chose_a_merge_counts(evaluation, tmp_path):
    # Two candidates, 7 tasks each at 29 tokens: 406 tokens, 10 * 2 * 406 = 8120 FLOPs; and 3 + 4 s.
    merge = models()["merge-ties"]
    candidates = {name: merge | {"seconds": seconds} for name, seconds in (("merge-0.5", 3.0), ("merge-1.0", 4.0))}
    (tmp_path / "eval.json").write_text(json.dumps({"settings": SETTINGS, "models": candidates}))
    chosen = merge["cost"] | {"chosen_by": evaluation.choice_cost(tmp_path, 10)}
    assert evaluation.fusion(chosen, evaluation.own_tokens) == 2 * 7 * 29
    assert evaluation.fusion(chosen, evaluation.own_flops) == 8120
    assert evaluation.fusion(chosen, evaluation.own_seconds) == 1 + 7
    assert evaluation.end_to_end(chosen, evaluation.own_flops) == 8120 + 5000 + 1000
    assert evaluation.end_to_end(chosen, evaluation.own_seconds) == 1 + 7 + 2 + 4
    costs = starting(tables(evaluation.report(SETTINGS, models() | {"merge-ties": merge | {"cost": chosen}})), "Cost")
    assert costs["mopd"]["relative s"] == "0.50" and costs["merge-ties"]["s"] == "8"


def test_without_a_merge_the_experts_are_the_unit(evaluation):
    rest = {name: model for name, model in models().items() if name != "merge-ties"}
    scores = starting(tables(evaluation.report(SETTINGS, rest)), "Scores")
    assert {name: row["relative TFLOPs"] for name, row in scores.items()} == {
        "base": "", "math": "0.83", "code": "0.17", "own expert": "1.00", "mopd": "2.33"
    }  # fmt: skip


def test_flops_and_seconds_by_hand(evaluation):
    # arXiv 2001.08361: a forward is 2 N a token, a forward and backward 6 N.
    cost = run(parameters=7, sampled=1, scored=2, teacher=3, trained=4, seconds=1.5)
    assert evaluation.own_flops(cost) == 7 * (2 * (1 + 2 + 3) + 6 * 4)
    assert evaluation.own_seconds(cost) == 3.0 and evaluation.own_tokens(cost) == 10
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
    assert "| base | 25.0 ± 25.0 | 50.0 ± 50.0 |" in text
    assert list(tables(text)) == ["Scores: avg@4, in points", "Coverage: pass@4, in points",
                                  "Completion length in tokens (share cut off)"]  # fmt: skip
    assert "own expert" not in text and "Guideline" not in text


def test_a_report_of_held_out_tasks_alone(evaluation):
    held_out = {name: {**m, "domains": {"poems": m["domains"]["poems"]}} for name, m in models().items()}
    found = tables(evaluation.report(SETTINGS, held_out))
    assert points(starting(found, "Difference to the base")["math"], "poems", "held-out") == ["+12.5", "+12.5"]
    assert not any(title.startswith(("Transfer", "Pairs", "Difference to the domain's")) for title in found)


def test_score_is_pass_at_k_of_the_mean_task(evaluation):
    domain = result([1, 3, 0])  # pass@2: 1 - 3/6, 1, 0
    assert evaluation.score(domain) == pytest.approx(100 * (1 / 4 + 3 / 4 + 0) / 3)
    assert evaluation.score(domain, 2) == pytest.approx(100 * (0.5 + 1 + 0) / 3)
    for k in range(1, 5):
        found = evaluation.estimates({"base": {"domains": {"math": domain}}}, k)["base"]["math"]
        assert found[0] == pytest.approx(evaluation.score(domain, k)) and found.shape == (2001,)


# ----------------------------------------------------------------------------------------------------- intervals


def test_only_tasks_of_all_models_are_compared(evaluation):
    long, short = models()["base"], {"domains": {"math": result([1]) | {"ids": ["1"]}, "code": result([4, 2, 0])}}
    found = evaluation.estimates({"base": long, "other": short})
    assert [found["base"]["math"][0], found["other"]["math"][0]] == [0, 25]  # the task "1" alone
    assert found["base"]["code"][0] == 50 and "poems" in found["base"] and "poems" not in found["other"]


def world(generator, *domains):
    """Models with c right ones of 4, from each domain's (n,) probabilities of success, one array a model."""
    return {
        str(i): {"domains": {str(d): result(generator.binomial(4, p).tolist()) for d, p in enumerate(probabilities)}}
        for i, probabilities in enumerate(domains)
    }


def test_intervals_cover_what_they_say(evaluation):
    """95 % intervals of an average over two domains, and of a paired difference, hold the truth 95 times in 100."""
    generator, inside, inside_gap, small = np.random.default_rng(0), 0, 0, 0
    trials = 300
    for _ in range(trials):
        easy, hard = generator.beta(2, 1, 60), generator.beta(0.5, 1, 90)  # means 2/3 and 1/3 over all tasks
        found = evaluation.estimates(world(generator, (easy, hard), (easy, 1 - (1 - hard) ** 2), (easy, hard)))
        low, high = evaluation.interval(found["0"]["average"])
        inside += low <= 50 <= high
        # The second model gets hard tasks right with 1 - (1 - p)^2; the mean of (1 - p)^2 for Beta(1/2, 1) is 8/15.
        low, high = evaluation.interval(found["1"]["average"] - found["0"]["average"])
        inside_gap += low <= 100 * (1 - 8 / 15 - 1 / 3) / 2 <= high
        small += evaluation.p_value(found["2"]["average"] - found["0"]["average"]) < 0.05  # the third is the first
    assert 0.90 < inside / trials < 0.98 and 0.90 < inside_gap / trials < 0.98
    assert 0.02 < small / trials < 0.10


def test_paired_intervals_are_narrower(evaluation):
    """Two models find the same tasks hard: their difference is known better than either of them."""
    generator = np.random.default_rng(1)
    p = generator.choice([0.05, 0.95], 200)
    found = evaluation.estimates(world(generator, (p,), (p * 0.98,)))
    alone = [np.ptp(evaluation.interval(found[name]["average"])) for name in "01"]
    paired = np.ptp(evaluation.interval(found["1"]["average"] - found["0"]["average"]))
    assert paired < 0.5 * np.hypot(*alone)
    assert evaluation.estimates(world(generator, (p,)))["0"]["0"].std() > 0


def test_p_value_by_hand(evaluation):
    x = np.array([1.0, -1.0, 2.0, 3.0, 4.0])  # the estimate, then four replicates of which one lies below 0
    assert evaluation.p_value(x) == 2 * (1 + 1) / 5
    assert evaluation.p_value(np.ones(2001)) == 2 / 2001 and evaluation.p_value(np.zeros(5)) == 1


# ------------------------------------------------------------------------------------------------- majority vote


@pytest.mark.parametrize(
    "verifier, answer, completions, scores, expected",
    [
        ("math", "4", [r"\boxed{4}", r"\boxed{8/2}", r"\boxed{5}"], [1, 1, 0], 1.0),  # right ones are one answer
        ("math", "4", [r"\boxed{4}", r"\boxed{5}", r"\boxed{ 5}"], [1, 0, 0], 0.0),
        ("math", "4", [r"\boxed{4}", r"\boxed{5}", r"\boxed{6}"], [1, 0, 0], 1 / 3),
        ("math", "4", ["no", "idea", r"\boxed{4}"], [0, 0, 1], 1.0),  # no answer, no vote
        ("math", "4", ["no", "idea"], [0, 0], 0.0),
        ("choice", "B", ["Answer: B", "x. Answer: C", "y. Answer: (C)"], [1, 0, 0], 0.0),
        ("choice", "B", ["Answer: B", "I choose B.", "Answer: C"], [1, 1, 0], 1.0),
        ("exact", "a b", ["a b", "A  c", "<think>b</think>a c"], [1, 0, 0], 0.0),
        ("exact", "a b", [" ", "", "a b"], [0, 0, 1], 1.0),
        ("number", '{"value": "3 m"}', [r"\boxed{3 m}", r"\boxed{300 cm}", r"\boxed{4}"], [1, 1, 0], 1.0),
        ("code", "{}", ["def f(): pass"], [1], None),
        ("ifeval", "{}", ["text"], [1], None),
    ],
)
def test_majority_vote(evaluation, verifier, answer, completions, scores, expected):
    assert evaluation.majority_vote({"verifier": verifier, "answer": answer}, completions, scores) == expected


def test_majority_table(evaluation):
    voted = models()
    for model, votes in (("base", [1.0, 0.0]), ("math", [1.0, 0.5])):
        voted[model]["domains"]["math"]["majority"] = votes
    found = tables(evaluation.report(SETTINGS, {name: voted[name] for name in ("base", "math")}))
    votes = starting(found, "Majority vote: maj@4")
    assert list(votes["base"]) == ["math", "average"]  # code and poems cannot be compared
    assert points(votes["math"], "math", "average") == ["75.0", "75.0"]
    assert not any(title.startswith("Majority") for title in tables(evaluation.report(SETTINGS, models())))


# ----------------------------------------------------------------------------------------------------- guideline


def fused(generator, merge, mix, mopd, expert=0.8):
    """A base, an expert and three fused models, whose tasks are right with the given probabilities."""
    found = world(generator, *[(np.full(100, p),) for p in (0.2, expert, merge, mix, mopd)])
    named = dict(zip(("base", "0", "merge-ties", "mix", "mopd"), found.values()))
    costs = {
        "base": {},
        "0": MATH,
        "merge-ties": run(math=MATH),
        "mix": run(trained=70),
        "mopd": run(trained=60, math=MATH),
    }
    return {name: {**model, "cost": costs[name]} for name, model in named.items()}


def guideline_lines(text):
    lines = text.split("## Guideline")[1].splitlines()
    return [next(line for line in lines if line.startswith(f"- ({letter})")) for letter in "abc"]


def test_guideline_where_models_differ(evaluation):
    text = evaluation.report(SETTINGS, fused(np.random.default_rng(0), merge=0.4, mix=0.5, mopd=0.7))
    for line in guideline_lines(text):
        assert "**mopd**" in line and "not distinguishable" not in line
        assert line.index("over mix") < line.index("over merge-ties")
    # 10 * 6 * 60 = 3600 FLOPs of its own, with the expert's 5000 in all 8600; mix 10 * 6 * 70 = 4200.
    first, second, third = guideline_lines(text)
    assert first.endswith("TFLOPs: merge-ties 0, mix 4.2e-09, mopd 3.6e-09.")
    assert second.endswith("merge-ties 5e-09, mix 4.2e-09, mopd 8.6e-09.") and third.endswith("mopd 8.6e-09.")
    assert "averages of the fused models lie within" in text


def test_guideline_where_models_cannot_be_told_apart(evaluation):
    text = evaluation.report(SETTINGS, fused(np.random.default_rng(0), merge=0.5, mix=0.5, mopd=0.5))
    first, second, third = guideline_lines(text)
    assert all(line.count("(not distinguishable)") == 2 for line in (first, second, third))
    assert "**merge-ties**" in first  # the cheapest once the experts exist
    assert "**mix**" in second and "**mix**" in third  # 4200 FLOPs against 5000 and 8600 from end to end


def test_a_paradigm_stands_there_with_its_best(evaluation):
    found = fused(np.random.default_rng(0), merge=0.4, mix=0.5, mopd=0.7)
    found["mopd-weak"] = found["merge-ties"]
    assert "mopd-weak" not in "".join(guideline_lines(evaluation.report(SETTINGS, found)))
    two = {name: found[name] for name in ("base", "mopd", "mopd-weak")}
    assert "two paradigms" in evaluation.report(SETTINGS, two)


# ------------------------------------------------------------------------------------------------------ pictures


def with_curves():
    found = models()
    steps = list(range(1, 21))
    found["math"]["curves"] = {"prompts_per_step": 8, "step": steps, "reward/math": [i / 20 for i in steps]}
    found["mopd"]["curves"] = {
        "prompts_per_step": 4, "step": steps, "reward/math": [0.5] * 20, "reward/code": [None] + [0.25] * 19,
        "proportion/math": [0.75] * 20, "proportion/code": [None] + [0.25] * 19,
    }  # fmt: skip
    return found


def drawn(panel):
    """{label: (x, y)} of the lines in a panel."""
    return {line.get_label(): line.get_data() for line in panel.lines}


def test_every_series_is_drawn(evaluation):
    pytest.importorskip("matplotlib")
    lines = ["base", "own expert", "merge-ties", "mopd"]
    figure = evaluation.coverage_figure(models())
    panels = {panel.get_title(): drawn(panel) for panel in figure.axes if panel.get_visible()}
    assert {title: list(found) for title, found in panels.items()} == {
        "math": lines, "code": lines, "poems (held out)": [name for name in lines if name != "own expert"]
    }  # fmt: skip
    x, y = panels["math"]["base"]  # counts 2 and 0 of 4: pass@1 25, pass@2 (1 - 1/6)/2, then one of two tasks
    assert list(x) == [1, 2, 3, 4] and y == pytest.approx([25, 100 * 5 / 12, 50, 50])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == lines

    (panel,) = evaluation.scores_figure(models()).axes
    bars = {
        bars.get_label(): [bar.get_height() for bar in bars] for bars in panel.containers if bars.get_label()[0] != "_"
    }
    assert bars["merge-ties"] == pytest.approx([50, 75, 62.5, 12.5]) and bars["own expert"] == [87.5, 50, 68.75]
    assert list(bars) == lines and len(panel.collections) == 4  # an error bar for each
    assert [label.get_text() for label in panel.get_xticklabels()] == ["math", "code", "average", "poems\n(held out)"]


def test_training_curves(evaluation):
    pytest.importorskip("matplotlib")
    panels = np.array(evaluation.training_figure(with_curves()).axes).reshape(3, 2)  # reward, reward, share; math, code
    assert [list(drawn(panel)) for panel in panels[:, 0]] == [["own expert", "mopd"], ["own expert", "mopd"], ["mopd"]]
    assert [list(drawn(panel)) for panel in panels[:, 1]] == [["mopd"]] * 3
    x, y = drawn(panels[0, 0])["own expert"]  # the mean of two steps, at the second
    assert list(x) == list(range(2, 21)) and y == pytest.approx([(2 * i - 1) / 40 for i in range(2, 21)])
    x, y = drawn(panels[1, 0])["mopd"]  # 3 of the 4 prompts a step are math
    assert list(x) == [3 * i for i in range(2, 21)] and set(y) == {0.5}
    x, y = drawn(panels[1, 1])["mopd"]  # no code prompt in the first step
    assert list(x) == list(range(1, 20)) and set(y) == {0.25}
    assert set(drawn(panels[2, 0])["mopd"][1]) == {0.75}


def test_pictures_hold_every_colour(evaluation, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    evaluation.draw_pictures(with_curves(), tmp_path)
    names = ["base", "own expert", "merge-ties", "mopd"]
    for picture in ("coverage", "scores", "training"):
        pixels = image.imread(tmp_path / f"{picture}.png")[..., :3]
        assert min(pixels.shape[:2]) > 300
        for name, look in evaluation.looks(names).items():
            if picture != "training" or name in ("own expert", "mopd"):  # the others were not trained here
                assert (np.abs(pixels - look["color"]).max(-1) < 0.02).sum() > 50, (picture, name)


def test_looks_differ(evaluation):
    names = ["base", "own expert", "merge-ties", "merge-sce", "merge-ram", "mix", "mix-dads", "mopd", "x", "y"]
    found = evaluation.looks(names)
    assert len({(*look["color"], look["linestyle"]) for look in found.values()}) == len(names)
    assert found["merge-ties"] == evaluation.looks(["base", "merge-ties"])["merge-ties"]
    assert len({found[name]["linestyle"] for name in names[2:5]}) == 3


def test_without_matplotlib(evaluation, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    evaluation.draw_pictures(models(), tmp_path)
    assert "pip install matplotlib" in capsys.readouterr().out and not list(tmp_path.iterdir())


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
        assert one["majority"] == [1.0, 0.0] and two["majority"] == [1.0]
        assert [(row["id"], row["completion"], row["score"]) for row in rows[:3]] == [
            ("x", "a", 1.0), ("x", "a", 1.0), ("x", "b", 0.0)
        ]  # fmt: skip
        assert [row["id"] for row in rows] == list("xxxyyyzzz")


def test_evaluate_does_not_depend_on_slots(evaluation, toy):
    model, tokenizer, eos_ids, pad_id = evaluation.load_model(str(toy / "base"), torch.device("cpu"))
    tasks = evaluation.load_prompts([str(toy / "both.jsonl")], tokenizer, 10, evaluation.Args())
    how = dict(samples=6, max_completion_length=3, eos_ids=eos_ids, pad_id=pad_id, seed=1)
    results = [evaluation.evaluate(model, tasks, tokenizer, slots=slots, **how) for slots in (1, 7, 512)]
    assert results[0] == results[1] == results[2]
    assert len({row["completion"] for row in results[0][1]}) > 10


def test_load_prompts(evaluation, toy, capsys):
    _, tokenizer, _, _ = evaluation.load_model(str(toy / "base"), torch.device("cpu"))
    specs = [str(toy / "math.jsonl"), str(toy / "code.jsonl")]
    tasks = evaluation.load_prompts(specs, tokenizer, 3, evaluation.Args())
    assert [task["prompt"] for task in tasks] == ["ab", "b", "cde", "fgh", "hg", "a", "bcd", "gg"]
    assert all(tokenizer.decode(task["ids"]) == task["prompt"] for task in tasks)
    out = capsys.readouterr().out
    assert "1 of 6" in out and "1 of 4" in out  # dead and face are too long
    limited = [
        evaluation.load_prompts(specs, tokenizer, 9, evaluation.Args(), limit=2, seed=seed) for seed in (0, 0, 1, 2)
    ]
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
    assert evaluation.encode_prompt(with_template, "ab", system="c") == [3, 8, 1, 2, 8, 7]
    own = [{"role": "system", "content": "d"}, {"role": "user", "content": "ab"}]
    assert evaluation.encode_prompt(with_template, own, system="c") == [4, 8, 1, 2, 8, 7]
    # A suffix is a paragraph of its own; the toy tokenizer has no line breaks.
    told = []
    with_template.apply_chat_template = lambda messages, **how: told.append((messages, how))
    evaluation.encode_prompt(with_template, "ab", suffix="c", thinking="off")
    messages, how = told[0]
    assert messages == [{"role": "user", "content": "ab\n\nc"}] and how["enable_thinking"] is False


def test_prompt_suffix_is_by_verifier(evaluation, toy, monkeypatch):
    _, tokenizer, _, _ = evaluation.load_model(str(toy / "base"), torch.device("cpu"))
    shown = []
    monkeypatch.setattr(evaluation, "encode_prompt", lambda tokenizer, prompt, *style: shown.append(style) or [1])
    row = {"domain": "d", "prompt": "ab", "answer": "A"}
    rows = [{**row, "verifier": verifier} for verifier in ("choice", "exact")]
    (toy / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = evaluation.Args(prompt_suffix=["choice=Answer: X"], system_prompt="s", enable_thinking="on")
    evaluation.load_prompts([str(toy / "two.jsonl")], tokenizer, 10, args)
    assert shown == [("s", "Answer: X", "on"), ("s", None, "on")]


@pytest.mark.parametrize("pair", ["exact", "exact=", "=text", "arithmetic=text"])
def test_a_suffix_that_would_reach_nobody_is_refused(evaluation, tiny_base, pair, capsys):
    args = evaluation.Args(prompt_suffix=[pair])
    with pytest.raises(SystemExit) as stopped:
        evaluation.load_prompts(["tiny:math"], None, 10, args)
    assert stopped.value.code == 2 and "VERIFIER=TEXT" in capsys.readouterr().err


def test_what_to_type_next_is_the_run_s_own_evaluation(evaluation):
    usual = dict(model="m", tasks=["tiny:math"], eval_tasks=[], max_completion_length=48, data_dir="", system_prompt="")
    usual |= dict(prompt_suffix=[], enable_thinking="")
    args = types.SimpleNamespace(**usual)
    assert evaluation.next_command(args, "math=runs/m") == "python eval.py --models base=m math=runs/m"
    args = types.SimpleNamespace(**usual | dict(tasks=["tiny:math", "own.jsonl"], prompt_suffix=["math=Box it."]))
    assert evaluation.next_command(args, "mix=r").endswith("mix=r --tasks TEST.jsonl --prompt_suffix 'math=Box it.'")
    args = types.SimpleNamespace(**usual | dict(tasks=["gsm8k"], eval_tasks=["gsm8k:test"], max_completion_length=512))
    assert evaluation.next_command(args, "e=r").endswith("e=r --tasks gsm8k:test --max_completion_length 512")


def test_training_tasks_and_a_replaced_evaluation_are_said(evaluation, toy, tmp_path, monkeypatch, capsys):
    def said(*flags):
        flags = ["--models", f"base={toy / 'base'}", "--limit", "2", "--out", tmp_path / "e", "--device", "cpu", *flags]
        monkeypatch.setattr(sys, "argv", ["eval.py", "--max_completion_length", "2", *map(str, flags)])
        evaluation.main()
        return capsys.readouterr().out

    assert "tiny:math names training tasks" in said("--tasks", "tiny:math", "--k", "1")
    again = said("--tasks", "tiny:math:test", "tiny:code:validation", "--k", "2")
    assert "training tasks" not in again and "with other settings (tasks, k)" in again
    assert "other settings" not in said("--tasks", "tiny:math:test", "tiny:code:validation", "--k", "2")


def test_evaluate_the_tiny_base(evaluation, tiny_base):
    model, tokenizer, eos_ids, pad_id = evaluation.load_model(tiny_base, torch.device("cpu"))
    tasks = evaluation.load_prompts(["tiny:test"], tokenizer, 200, evaluation.Args(), 16)
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
    assert (tmp_path / "eval.md").read_text() == evaluation.report(**both)
    call("base", "math", k=3)
    assert sampled == [3, 3]


def test_wrong_tasks_are_found_before_a_model_is_loaded(evaluation, toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "load_model", lambda *_: pytest.fail("loaded a model"))
    flags = ["--tasks", str(toy / "math.jsonl"), "no-such-preset", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["eval.py", "--models", f"base={toy / 'base'}", *flags])
    with pytest.raises(SystemExit) as ended:
        evaluation.main()
    assert ended.value.code == 2 and "no-such-preset" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pair", ["math=nowhere", "other={}", "base"])
def test_a_wrong_choice_is_refused(evaluation, tmp_path, monkeypatch, capsys, pair):
    (tmp_path / "eval.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["eval.py", "--models", "math=x", "--chosen_by", pair.format(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        evaluation.main()
    assert ended.value.code == 2 and "--chosen_by" in capsys.readouterr().err


def test_costs_curves_and_choice_go_into_eval_json(evaluation, toy, tmp_path, monkeypatch):
    """A run's cost.json and metrics.jsonl are stored, and the evaluation that chose the model is added to its cost."""
    run_folder = tmp_path / "mix"
    run_folder.mkdir()
    for path in (toy / "math").iterdir():
        (run_folder / path.name).write_bytes(path.read_bytes())
    (run_folder / "cost.json").write_text(json.dumps(run(sampled=5, seconds=1.0)))
    (run_folder / "args.json").write_text(json.dumps({"prompts_per_step": 3}))
    lines = [{"step": 1, "reward/math": 0.5, "time/step": 9.0}, {"step": 2, "reward/math": 1.0, "proportion/math": 1.0}]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(ROOT)

    def call(out, *flags):
        tasks = ["--tasks", str(toy / "math.jsonl"), "--k", "2", "--max_completion_length", "3", "--device", "cpu"]
        names = [f"base={toy / 'base'}", f"mix={run_folder}"]
        monkeypatch.setattr("sys.argv", ["eval.py", "--models", *names, *tasks, "--out", str(out), *flags])
        evaluation.main()
        return json.loads((out / "eval.json").read_text())["models"]

    first = call(tmp_path / "choice")
    assert first["mix"]["curves"] == {
        "prompts_per_step": 3, "step": [1, 2], "reward/math": [0.5, 1.0], "proportion/math": [None, 1.0]
    }  # fmt: skip
    assert first["base"]["curves"] == {} and "chosen_by" not in first["mix"]["cost"]
    chosen = call(tmp_path / "out", "--chosen_by", f"mix={tmp_path / 'choice'}")["mix"]["cost"]["chosen_by"]
    sampled = sum(first[name]["domains"]["math"]["tokens"] for name in ("base", "mix"))
    assert chosen["tokens_sampled"] == sampled > 0 and chosen["parameters"] == 10
    assert chosen["seconds"]["sample"] == first["base"]["seconds"] + first["mix"]["seconds"]
