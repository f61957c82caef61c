"""Copies are deliberate, so they are kept honest: same name, same text; small diffs; short files; few imports."""

import ast
import difflib
import sys

import pytest
from conftest import ROOT

SCRIPTS = ("grpo_expert", "mix_rl", "mopd", "merge", "eval")
STANDALONE = ("grpo_expert", "mix_rl", "mopd", "merge")
INSTALLED = {"torch", "transformers", "datasets", "tqdm", "numpy", "safetensors", "huggingface_hub"}


def text_of(script):
    return (ROOT / f"{script}.py").read_text(encoding="utf-8")


def definitions(script):
    """{name: text} of the top-level functions and classes, decorators included, Args and main apart."""
    text, found = text_of(script), {}
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in ("Args", "main"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def test_one_name_one_text():
    seen, copies = {}, 0
    for script in SCRIPTS:
        for name, text in definitions(script).items():
            other, first = seen.setdefault(name, (script, text))
            copies += other != script
            diff = "\n".join(
                difflib.unified_diff(first.splitlines(), text.splitlines(), other, script, lineterm="", n=1)
            )
            assert text == first, f"{name} differs between {other}.py and {script}.py:\n{diff}"
    assert copies >= 20  # the sampler alone stands in four files


def changed_lines(left, right):
    """What `diff left.py right.py | grep -c '^[<>]'` counts, up to how diff aligns them."""
    matcher = difflib.SequenceMatcher(None, text_of(left).splitlines(), text_of(right).splitlines(), autojunk=False)
    return sum(i2 - i1 + j2 - j1 for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


@pytest.mark.parametrize(
    "left, right, budget", [("grpo_expert", "mix_rl", 220), ("grpo_expert", "mopd", 480), ("mix_rl", "mopd", 600)]
)
def test_the_diff_is_the_lesson(left, right, budget):
    assert 0 < changed_lines(left, right) <= budget


BUDGETS = {"grpo_expert": 705, "mix_rl": 840, "mopd": 800, "merge": 890, "eval": 1500}


@pytest.mark.parametrize("script, budget", BUDGETS.items())
def test_scripts_stay_short(script, budget):
    assert text_of(script).count("\n") <= budget


def imported(script):
    nodes = list(ast.walk(ast.parse(text_of(script))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    assert not any(node.level for node in nodes if isinstance(node, ast.ImportFrom))
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("script", STANDALONE)
def test_a_training_script_imports_no_other(script):
    mine = {path.stem for path in ROOT.glob("*.py")}
    assert len(mine) >= 6 and imported(script) & mine <= {"verifiers", "eval"}


@pytest.mark.parametrize("script", [*SCRIPTS, "verifiers"])
def test_imports_need_nothing_that_is_not_required(script):
    """Beyond requirements.txt: sympy and mpmath come with torch, the others are optional."""
    others = imported(script) - set(sys.stdlib_module_names) - {path.stem for path in ROOT.glob("*.py")}
    assert others <= INSTALLED | {"sympy", "mpmath", "langdetect", "matplotlib", "peft", "wandb"}
    required = (ROOT / "requirements.txt").read_text()
    assert all(name in required for name in ("torch", "transformers", "datasets", "tqdm", "numpy"))


@pytest.mark.parametrize("script", ["grpo_expert", "mix_rl", "mopd"])
def test_scripts_read_in_the_same_order(script):
    """Docstring, Args, sampler, maths, run folder, main: the same landmarks in the same order."""
    tree = ast.parse(text_of(script))
    assert len(ast.get_docstring(tree).splitlines()) >= 10
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    order = [names.index(n) for n in ("Args", "Rollouts", "draw", "sample", "token_logprobs", "nth_task", "main")]
    assert order == sorted(order) and names[0] == "Args" and names[-1] == "main"
