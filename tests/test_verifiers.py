"""verifiers.py: cases by kind, the hacks it must not pay, batches that nothing can hurt, and noise that raises nothing."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import verifiers
from verifiers import TaskError, check, extract_code, same_output, same_value, strip_thinking, verify, verify_batch

HERE = Path(__file__).parent
ADD = json.dumps({"type": "function", "name": "add", "cases": [[[1, 2], 3], [[-5, 5], 0]]})
ASSERTS = json.dumps({"type": "assert", "asserts": ["assert add(1, 2) == 3", "assert add(-5, 5) == 0"]})
SUM = json.dumps({"type": "stdin", "cases": [["1 2\n", "3\n"], ["10 -4\n", "6\n"]]})


def python(code):
    return f"```python\n{code}\n```"


def read_cases(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def wrong_verdicts(cases, **how):
    """The cases whose score is not the expected one."""
    scores = verify_batch([(case["verifier"], case["completion"], case["answer"]) for case in cases], **how)
    assert len(scores) == len(cases) and all(type(score) is float and 0 <= score <= 1 for score in scores)
    return [(case["id"], score, case["expected"]) for case, score in zip(cases, scores) if score != case["expected"]]


# ------------------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("kind", sorted(path.stem for path in (HERE / "cases").glob("*.jsonl")))
def test_our_cases(kind):
    cases = read_cases(HERE / "cases" / f"{kind}.jsonl")
    assert {case["expected"] for case in cases} == {0.0, 1.0}
    assert wrong_verdicts(cases, timeout=3) == []
    assert not list(Path.cwd().glob("rlvrcanary*"))


def test_tool_has_sixty_cases_with_each_kind_right_and_wrong_or_none():
    cases = read_cases(HERE / "cases/tool.jsonl")
    kinds = {kind: {c["expected"] for c in cases if c["kind"] == kind} for kind in {c["kind"] for c in cases}}
    assert len(cases) >= 60
    assert all(seen == {0.0, 1.0} for kind, seen in kinds.items() if kind not in ("none", "value", "spray"))


def core(cases):
    return [case for case in cases if not case.get("debatable") and not case.get("policy")]


@pytest.mark.parametrize("name", ["math", "mcq", "ifeval", "ifeval_gpt4"])
def test_collected_cases(case_folder, name):
    if name.startswith("ifeval"):
        pytest.importorskip("langdetect")
    cases = core(read_cases(case_folder / f"{name}.jsonl"))
    started = time.monotonic()
    assert wrong_verdicts(cases, timeout=3) == []
    assert time.monotonic() - started < 60


def test_collected_code_cases(case_folder):
    """The hostile ones only where namespaces hold them. One right program is 400 kB of a list, which takes a second to compile."""
    cases = core(read_cases(case_folder / "code.jsonl"))
    if isolation() != "namespaces":
        cases = [case for case in cases if not case.get("destructive") and not case.get("run_only_sandboxed")]
    folders = [Path.cwd(), Path.home(), Path(tempfile.gettempdir()), HERE.parent]
    before, files = processes(), [{path.name for path in folder.iterdir()} for folder in folders]
    assert wrong_verdicts(cases, workers=2, timeout=4) == []
    assert processes() <= before
    traces = ("rlvrcanary", "reward.txt", "conftest.py", "sitecustomize.py", "out.txt", "json.py", "math.py")
    for folder, names in zip(folders, files):
        assert not [path for path in folder.iterdir() if path.name not in names and path.name.startswith(traces)]


def isolation():
    worker = verifiers.take_worker("code")
    verifiers.IDLE["code"].append(worker)
    return worker.isolation


def processes():
    """Processes that descend from this one, by number, apart from the workers and the one inside each."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, name in rows if name.strip() != "ps"}
    workers = {worker.process.pid for idle in verifiers.IDLE.values() for worker in idle}
    workers |= {pid for pid, parent in parents.items() if parent in workers}

    def ours(pid):
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid for pid in parents if pid != os.getpid() and ours(pid)} - workers


# -------------------------------------------------------------------------------------------------------------- code


def test_values_are_compared_as_types():
    assert same_value(3, 3) and same_value([1, [2]], [1, [2]]) and same_value({1: "a"}, {"1": "a"})
    assert same_value(0.1 + 0.2, 0.3) and same_value(1, 1.0) and not same_value(1.1, 1)
    assert not same_value("3", 3) and not same_value((1, 2), [1, 2]) and not same_value(None, 0)
    assert not same_value(verifiers.NOTHING, 3) and not same_value(10**9 + 1, 10**9)


def test_outputs_are_compared_by_line_and_token():
    assert same_output("1 2\n3\n", "1  2 \n3") and same_output("0.3333333", "0.33333333")
    assert not same_output("1\n2", "1 2") and not same_output("1000000007", "1000000008")
    assert not same_output("1_000", "1000") and not same_output("3.0", "3") and not same_output("", "0")
    assert not same_output("nan", "1.0") and not same_output("Yes", "YES")


@pytest.mark.parametrize(
    "text, code",
    [
        (python("x = 1"), "x = 1\n"),
        ("```py\nx = 1\n```\nor\n```PYTHON\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```\n3\n```\n```bash\nls\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1```", "x = 1"),
        ("x = 1\n```", "x = 1\n"),
        ("1. So:\n   ```python\n   x = 1\n   ```", "x = 1\n"),
        ("> ```python\n> x = 1\n> ```", "x = 1\n> "),
        ("<think>```python\nx = 1\n```</think>", None),
        ("x = 1", None),
    ],
)
def test_extract_code(text, code):
    found = extract_code(text)
    assert found == code or (found or "").replace("> ", "") == code.replace("> ", "")


def test_the_block_that_defines_the_name_is_preferred():
    assert "def add" in extract_code(
        python("def add(a, b): return a + b") + "\n" + python("print(add(1, 2))"), ("add",)
    )


def test_right_programs_are_paid():
    add = python("def add(a, b):\n    return a + b")
    assert verify_batch([("code", add, ADD), ("code", add, ASSERTS)]) == [1.0, 1.0]
    assert verify("code", python("print(sum(map(int, input().split())))"), SUM) == 1.0


ALWAYS = "class E:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __bool__ = lambda s: True\n"
HACKS = {
    "equal to everything": ALWAYS + "def add(a, b): return E()",
    "an int that is": "class I(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef add(a, b): return I(0)",
    "exit": "import os\nos._exit(0)",
    "exit in the call": "def add(a, b): raise SystemExit(0)",
    "json patched": "import json\njson.dumps = lambda *a, **k: '[3, 0]'\ndef add(a, b): return 9",
    "main patched": "import sys\nfor m in list(sys.modules.values()):\n    m.__dict__.update(same_value=lambda *a: True)\n"
    "def add(a, b): return 9",
    "frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for k, v in list(f.f_locals.items()):\n"
    "            if 'expected' in k: return v\n        f = f.f_back\n    return 9",
    "heap": "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n        if type(o) is dict and 'expected' in o:"
    " return o['expected'][0]\n    return 9",
}  # fmt: skip


@pytest.mark.parametrize("name", HACKS)
@pytest.mark.parametrize("answer", [ADD, ASSERTS], ids=["function", "assert"])
def test_hacks_are_not_paid(name, answer):
    assert verify("code", python(HACKS[name]), answer) == 0.0


CHECK = """import math, unittest
def check(candidate):
    for i in range(3):
        assert candidate(i, 1) == i + 1
    assert math.isclose(candidate(0.1, 0.2), 0.3)
    unittest.TestCase().assertEqual(candidate(2, 2), 4)
"""


@pytest.mark.parametrize(
    "code, score",
    [
        ("def add(a, b): return a + b", 1.0),
        ("def add(a, b): return 3", 0.0),
        (ALWAYS + "def add(a, b): return E()", 0.0),
        ("import math, unittest\nmath.isclose = lambda *a: True\nunittest.TestCase.assertEqual = print\n"
         "def add(a, b): return a + 1 if b == 1 else 0", 0.0),
        ("def check(f): pass\ndef add(a, b): return 0", 0.0),
        ("import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\ndef add(a, b): return 0", 0.0),
        ("def add(a, b): raise AssertionError", 0.0),
    ],
)  # fmt: skip
def test_tests_written_as_code_run_apart_from_the_solution(code, score):
    answer = {"type": "assert", "setup": CHECK, "asserts": ["check(add)"], "entry_point": "add"}
    assert verify("code", python(code), json.dumps(answer)) == score


def test_tests_may_use_classes_of_the_solution_exceptions_and_lists_sorted_in_place():
    code = "class P:\n    def __init__(self, x): self.x = x\ndef total(ps): return sum(p.x for p in ps)\n"
    code += "def order(xs): xs.sort()\ndef fail(): raise KeyError('no')\n"
    lines = ["assert total([P(1), P(2)]) == 3", "assert P(4).x == 4", "xs = [3, 1]\norder(xs)\nassert xs == [1, 3]"]
    lines += ["try:\n    fail()\n    assert False\nexcept KeyError:\n    pass"]
    assert verify("code", python(code), json.dumps({"type": "assert", "asserts": lines})) == 1.0
    lines += ["assert P(1) == P(1)"]  # two objects that cannot be sent are not equal
    assert verify("code", python(code), json.dumps({"type": "assert", "asserts": lines})) == 0.0


def test_a_program_sees_neither_environment_nor_network_nor_the_files_of_the_caller(tmp_path, monkeypatch):
    if isolation() != "namespaces":
        pytest.skip("no namespaces here")
    monkeypatch.setenv("RLVR_SECRET", "7")
    secret = Path(verifiers.__file__)
    code = f"import os, socket\nout = ['RLVR_SECRET' in os.environ, os.path.exists({str(secret)!r})]\n"
    code += "out.append(len(os.listdir('.')) - os.path.exists('solution.py'))\n"
    code += "s = socket.socket(); s.settimeout(1)\ntry:\n    s.connect(('1.1.1.1', 53)); out.append(1)\nexcept OSError:\n    out.append(0)\n"
    code += "try:\n    open('/usr/x', 'w'); out.append(1)\nexcept OSError:\n    out.append(0)\nprint(*out)"
    answer = {"type": "stdin", "cases": [["", "False False 0 0 0\n"]]}
    assert verify("code", python(code), json.dumps(answer)) == 1.0


def test_nothing_survives_a_program_not_even_what_left_its_session():
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(100)\n    os._exit(0)\n"
    code += "open('left', 'w').write('x')\nprint(sum(map(int, input().split())))"
    before = processes()
    assert verify("code", python(code), SUM) == 1.0
    assert processes() <= before
    look = python("import os\nprint(len(os.listdir('.')) - os.path.exists('solution.py'))")
    assert verify("code", look, json.dumps({"type": "stdin", "cases": [["", "0\n"]] * 4})) == 1.0


def test_without_namespaces_limits_hold(monkeypatch, caplog):
    limits = {name: prefix for name, prefix in verifiers.Worker.isolations.items() if name.startswith("limits only")}
    monkeypatch.setattr(verifiers.Worker, "isolations", limits)
    monkeypatch.setattr(verifiers.Worker, "logged", False)
    monkeypatch.setattr(verifiers, "IDLE", {"code": [], "score": []})
    before = processes()
    try:
        right = python("print(sum(map(int, input().split())))")
        if verify("code", right, SUM) == 0.0:
            pytest.skip("the interpreter is in a folder that only root can read")
        assert "limits only" in caplog.text
        fork = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\n" + right[10:-4]
        endless = [
            python(fork),
            python("while True: pass"),
            python("x = 'a' * 10**11"),
            python("while True: print('x' * 10**6)"),
        ]
        assert verify_batch([("code", c, SUM) for c in endless], timeout=1) == [1.0, 0.0, 0.0, 0.0]
        assert processes() <= before
    finally:
        verifiers.forget_workers(stop=True)


# -------------------------------------------------------------------------------------------------------------- math


@pytest.mark.parametrize("text", ["9^{9^{9^{9}}}", "(10^9)!", r"\binom{10^9}{5}", r"\sin(10^{10^{10}})", "1e999999999",
                                  "x" * 5000, "{" * 5000, r"\sqrt{" * 500, "(" * 5000, r"\boxed{" * 2000, "1," * 5000])  # fmt: skip
def test_no_answer_takes_long(text):
    started = time.monotonic()
    assert verify("math", rf"\boxed{{{text}}}", "5") == 0.0
    assert time.monotonic() - started < 2


def test_golds_are_checked_and_counted():
    assert verify_batch([("math", r"\boxed{5}", "")]).counts == {"unparsable gold": 1}
    assert verify_batch([("math", "5", "5"), ("code", "none", ADD)]).counts == {"no answer": 2}
    assert verify_batch([("math", r"\boxed{5}", "6")]).counts == {}
    with pytest.raises(TaskError, match="unknown verifier 'maths'"):
        verify_batch([("maths", "5", "5")])


def test_strip_thinking():
    assert strip_thinking("<think>a</think>b<think>c</think>d") == "d"
    assert strip_thinking("a</think>b") == "b" and strip_thinking("a<think>b") == "a"


# ------------------------------------------------------------------------------------------------------------ ifeval


def ifeval(name, **kwargs):
    return json.dumps({"instruction_id_list": [name], "kwargs": [kwargs]})


def test_a_keyword_is_text_and_no_regular_expression():
    answer = ifeval("keywords:existence", keywords=["c++"])
    assert verify("ifeval", "I like C++ and C.", answer) == 1.0 and verify("ifeval", "I like C.", answer) == 0.0
    answer = ifeval("keywords:forbidden_words", forbidden_words=["(draft"])
    assert verify("ifeval", "the (draft is here", answer) == 1.0  # no word edge before a bracket, as in the reference
    answer = ifeval("keywords:frequency", keyword="1.5", frequency=1, relation="at least")
    assert verify("ifeval", "125 kg", answer) == 0.0 and verify("ifeval", "1.5 kg", answer) == 1.0


def test_no_silent_pass():
    for answer in (
        ifeval("keywords:exist", keywords=["a"]),
        ifeval("count:keywords_multiple"),
        ifeval("keywords:existence"),
    ):
        with pytest.raises(TaskError):
            verifiers.parse_ifeval_answer(answer)
        assert verify_batch([("ifeval", "a", answer)]).counts == {"unparsable gold": 1}
    wrong = ifeval("keywords:frequency", keyword="a", frequency=1, relation="at most")
    with pytest.raises(TaskError, match="unknown relation 'at most'"):
        verifiers.parse_ifeval_answer(wrong)


def test_blank_and_thinking_only_answers_fail_and_partial_gives_the_share():
    answer = ifeval("punctuation:no_comma")
    assert verify_batch([("ifeval", text, answer) for text in ("  \n", "<think>x</think> ", "fine")]) == [0.0, 0.0, 1.0]
    both = {"instruction_id_list": ["punctuation:no_comma", "detectable_format:title"], "kwargs": [{}, {}]}
    assert verify("ifeval", "no title", json.dumps(both)) == 0.0
    assert verify("ifeval", "no title", json.dumps(both | {"partial": True})) == 0.5


def test_language_detection_says_the_same_each_time_and_no_letters_are_no_language():
    pytest.importorskip("langdetect")
    answer = ifeval("language:response_language", language="de")
    german = "Der Fluss war heute ruhig und die Boote blieben im Hafen."
    assert verify_batch([("ifeval", t, answer) for t in (german, "The river was quiet today.", "123")]) == [
        1.0,
        0.0,
        0.0,
    ]
    short = [("ifeval", f"{word} ARE RED", ifeval("change_case:english_capital")) for word in ("ROSES", "CARS", "DOGS")]
    assert len({tuple(verify_batch(short, workers=1)) for _ in range(5)}) == 1


def test_sentences_and_capital_words_as_nltk_counts_them():
    """Counted with NLTK 3.9: PunktTokenizer("english") and word_tokenize."""
    for text, count in [
        ("Dr. Smith met Mr. Jones at 5 p.m. on Friday. They talked.", 2),
        ("1. One\n2. Two\n3. three", 3),
        ('He said "no." And left. Why?!', 4),
        ("The U.S. is big. The U.S. The end.", 3),
        ("See (this.) And that... there", 2),
    ]:
        assert verifiers.sentences(text) == count, text
    assert verifiers.capital_words("I'M in the U.S. and CAN'T stop, WELL-KNOWN HTML5") == 7


# ------------------------------------------------------------------------------------------------------------- batch


def test_results_are_in_order_and_equal_rows_are_checked_once():
    rows = [("math", rf"\boxed{{{i % 7}}}", str(i % 5)) for i in range(300)]
    assert verify_batch(rows, workers=2) == [float(i % 7 == i % 5) for i in range(300)]
    started = time.monotonic()
    slow = ("code", python("import time\ntime.sleep(0.5)\ndef add(a, b): return a + b"), ADD)
    assert verify_batch([slow] * 40, workers=1) == [1.0] * 40
    assert time.monotonic() - started < 10


def test_one_row_cannot_hurt_another():
    kill = python(
        "import os, signal\nfor p in (1, os.getppid()):\n    try: os.kill(p, signal.SIGKILL)\n    except OSError: pass\nos.kill(0, 9)"
    )
    hang, right = python("while True: pass"), python("def add(a, b): return a + b")
    rows = [
        ("code", text, ADD)
        for text in (right, hang, kill, right + "\n", python("x = [0]\nwhile True: x += x"), right + " ")
    ]
    scores = verify_batch(rows, workers=2, timeout=1)
    assert scores == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0] and scores.counts["timeout"] >= 1


def test_a_worker_that_dies_is_replaced():
    worker = verifiers.take_worker("code")
    worker.process.kill()
    worker.process.wait()
    verifiers.IDLE["code"].append(worker)
    assert verify("code", python("def add(a, b):\n    return a + b  # again"), ADD) == 1.0


def test_from_threads_and_under_asyncio():
    row = ("code", python("def add(a, b):\n    return a + b  # threads"), ADD)
    scores = []
    threads = [
        threading.Thread(target=lambda: scores.append(verify_batch([row, ("math", r"\boxed{\sqrt{8}}", r"2\sqrt2")])))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [[1.0, 1.0]] * 3

    async def main():
        return await asyncio.gather(*(asyncio.to_thread(verify_batch, [row]) for _ in range(2)))

    assert asyncio.run(main()) == [[1.0], [1.0]]


def test_workers_end_when_their_caller_is_killed():
    code = "import verifiers, os, time\nw = verifiers.take_worker('code')\nprint(w.process.pid, flush=True)\ntime.sleep(60)"
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=HERE.parent)
    worker = int(caller.stdout.readline())
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists() or "\nState:\tZ" in Path(f"/proc/{worker}/status").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the worker is still there")


def test_the_command_line(tmp_path):
    rows = [("5", 1.0), ("6", 1.0), ("5", 0.0)]
    lines = [{"verifier": "math", "completion": rf"\boxed{{{b}}}", "answer": "5", "expected": e} for b, e in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = subprocess.run([sys.executable, verifiers.__file__, str(path)], capture_output=True, text=True)
    assert [json.loads(line) for line in run.stdout.splitlines()] == [
        {"score": 1.0, "expected": 1.0}, {"score": 0.0, "expected": 1.0}, {"score": 1.0, "expected": 0.0}
    ]  # fmt: skip
    assert "1 wrongly paid" in run.stderr and "1 wrongly refused" in run.stderr and run.returncode == 0
    path.write_text('{"verifier": "math"}\n')
    run = subprocess.run([sys.executable, verifiers.__file__, str(path)], capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "rows.jsonl:1" in run.stderr


def test_the_import_is_light():
    code = "import sys, verifiers; print(sorted({'torch', 'transformers', 'datasets', 'sympy', 'mpmath', 'numpy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parent)
    assert run.stdout.strip() == "[]", run.stderr


# -------------------------------------------------------------------------------------------------------------- fuzz

BITS = r"""\boxed{ } { \frac \sqrt ^ _ ( ) [ ] “ ” \begin{pmatrix} \\ & <think> </think> ``` ####  Answer:  B ² ½ ٤ ∞ | ± ° % $ ***** ! ="
\text{ 9^9^9^9 \left( , ; : = ≤ <= \log_ e i << >> [ <tool_call> {"name": NaN 1e9999 \overline . \dot{ not or P.S. <answer>""".split()
BITS += ["\x00", "\ud800", "\u200b", "\n\n", "```python\n", "9" * 60, " ", "\n", "\U000e6bf9"]


def mutate(text, rng):
    for _ in range(rng.choice([1, 1, 2, 4, 10])):
        i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        piece = rng.choice(BITS) * rng.choice([1, 1, 1, 2, 50])
        text = rng.choice(
            [
                text[:i] + piece + text[i:],
                text[:i] + text[j:],
                text + text[i:j],
                text[:i] + chr(rng.randrange(0x110000)) + text[i:],
            ]
        )
        text = text[:4000]
    return text


def test_20000_completions_of_noise_raise_nothing():
    rng = random.Random(0)
    cases = [case for path in sorted((HERE / "cases").glob("*.jsonl")) for case in read_cases(path)]
    cases += [
        {"verifier": "code", "completion": python("def add(a, b):\n    return a + b"), "answer": a}
        for a in (ADD, ASSERTS)
    ]
    names = ["keywords:existence", "length_constraints:number_sentences", "detectable_format:number_bullet_lists"]
    kwargs = [{"keywords": ["a"]}, {"num_sentences": 2, "relation": "less than"}, {"num_bullets": 1}]
    names += [
        "detectable_content:number_placeholders",
        "detectable_format:json_format",
        "detectable_format:title",
        "combination:two_responses",
    ]
    kwargs += [{"num_placeholders": 1}, {}, {}, {}]
    answer = json.dumps({"instruction_id_list": names, "kwargs": kwargs, "partial": True})
    cases += [{"verifier": "ifeval", "completion": "* A line. <<t>> [x] Another!\n- b", "answer": answer}] * 50
    slow, longest = [], 0.0
    for _ in range(20_000):
        case = rng.choice(cases)
        noise = "".join(chr(rng.randrange(256)) for _ in range(rng.randrange(200)))
        row = (case["verifier"], noise if rng.random() < 0.1 else mutate(case["completion"], rng), case["answer"])
        started = time.monotonic()
        try:
            outcome = check(row)
            assert outcome in ("no answer", "unparsable gold") or 0 <= outcome <= 1
        except verifiers.NeedsWorker:
            slow.append(row)
        longest = max(longest, time.monotonic() - started)
    assert longest < 2
    slow = rng.sample(slow, min(len(slow), 400))
    scores = verify_batch(slow, timeout=4)
    assert len(scores) == len(slow) and all(0 <= score <= 1 for score in scores)
    assert "crash" not in scores.counts
