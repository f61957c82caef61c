"""What a task is, and how an answer is checked.

A reward is only as good as its verifier: a wrong answer that is paid is learnt as a hack, a right one that is refused
is noise. Each verifier here takes the completion of a model and the answer of a task and returns a score in [0, 1]:

    math     the last \\boxed{...} or `#### ` line against a number, an expression, an interval, a list, ...
    code     the last Python block against inputs and outputs, in a sandbox that never sees the expected values
    choice   a letter (or the text of exactly one option)      ifeval   Google's 25 instruction types
    number   a value with a unit, within a tolerance           tool     one or more function calls
    exact    the text itself, white space folded

    verify("math", "So it is \\\\boxed{1/2}.", "0.5")           1.0
    verify_batch([(verifier, completion, answer), ...])       many of them, parallel, one row cannot hurt another
    load_tasks("gsm8k:train", limit=100)                      rows with prompt, domain, verifier, answer, id
    python verifiers.py FILE.jsonl                            scores rows {"verifier", "completion", "answer"[, "expected"]}

The rules and their reasons are in each section. Two hold everywhere: what a model wrote is never evaluated, nor used as a
pattern, outside the sandbox; and what cannot be read scores 0.
"""

import ast
import atexit
import builtins
import contextlib
import ctypes
import gc
import itertools
import json
import math
import operator
import os
import re
import select
import signal
import socket
import sys
import textwrap
import time
import types
import unicodedata
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

with contextlib.suppress(ImportError):  # Windows
    import resource

# Modules that only the caller needs are imported where they are used: the fork server of the sandbox stays small, and a
# third of the cost of a fork is what Python has loaded.


class TaskError(ValueError):
    """A task (file, preset, row or answer) that cannot be used; the message is one line that says what to do."""


# what reading a malformed answer of a task, or call of a tool, may raise
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, SyntaxError)


def ensure(condition):
    """An assert that python -O keeps."""
    if not condition:
        raise ValueError("a value out of place")


def answer_reader(form):
    """Makes a function read each answer once, and say in one line (TaskError) which form is wanted if it cannot."""

    def decorate(read):
        @lru_cache(maxsize=8192)
        def reader(answer):
            try:
                return read(answer)
            except TaskError:
                raise
            except MALFORMED as error:
                reason = f"{type(error).__name__}: {error}".split("\n")[0][:80]
                raise TaskError(f"{form} ({reason})") from None

        return reader

    return decorate


class NeedsWorker(Exception):
    """Raised where a check may be slow: the row is sent to a worker process, which has a wall clock."""


IN_WORKER = False  # set in the worker processes


# Contents: extraction and exact, math, choice, number, ifeval, tool, code, the sandbox, the pool, verify, load_tasks.
# ---------------------------------------------------------------------------------------------------------------------
# Extraction: what counts as the answer; exact: the text itself

THINK_END = re.compile(r"</(?:think|thinking|reasoning)>")
THINK_START = re.compile(r"<(?:think|thinking|reasoning)>")
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BARE = re.compile(r"-?(?:[A-Za-z](?!\w)|[\d./]+)")  # \boxed 5, \boxed x; not the word \boxed in a sentence
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a backslash takes the next character with it
HASH = re.compile(r"####[ \t]*(\S[^\n]*)")  # the answer line of GSM8K


def strip_thinking(text):
    """The text after the last closing tag; nothing at all when thinking was opened and never closed.

    >>> strip_thinking("<think>maybe 3</think>4"), strip_thinking("perhaps 3</think>4"), strip_thinking("<think>3")
    ('4', '4', '')
    """
    return THINK_START.split(THINK_END.split(text)[-1], maxsplit=1)[0]


def brace_pairs(text):
    """{position of an opening brace: that of its closing one}, in one pass; escaped braces left out."""
    pairs, opened = {}, []
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


def marked_answers(text):
    """(start, end, content) of boxes and `####` lines in order, empty ones left out; a box that is cut off is none.

    >>> [content for _, _, content in marked_answers(r"\\boxed{\\frac{1}{2}} or \\boxed 5, \\boxed{cut")]
    ['\\\\frac{1}{2}', '5']
    """
    found, end = [], 0
    pairs = brace_pairs(text) if BOX.search(text) else {}
    while match := BOX.search(text, end):
        end = match.end()
        if end in pairs:
            content, end = text[end + 1 : pairs[end]], pairs[end] + 1
        elif bare := BARE.match(text, end):
            content, end = bare[0].rstrip("."), bare.end()
        else:
            continue
        found.append((match.start(), end, content))
    lines = [(m.start(), m.end(), m[1]) for m in HASH.finditer(text)]
    lines = [line for line in lines if not any(line[0] <= start < line[1] for start, _, c in found if c.strip())]
    return sorted([box for box in found if box[2].strip()] + lines)


def fold(text):
    """White space folded, letters in lower case."""
    return " ".join(text.split()).casefold()


def check_exact(completion, answer):
    """1 when the text is the answer, white space folded."""
    return float(" ".join(strip_thinking(completion).split()) == " ".join(answer.split()) != "")


# ---------------------------------------------------------------------------------------------------------------------
# math: extract, normalise, exact rationals, structure, and only then numbers of many digits

# Answers are compared by the type of the gold. Numbers are exact fractions: 0.33 is no 1/3 and 100001 no 100000. What has
# letters or roots is evaluated at fixed points, exactly where that is possible, else with 60 digits and again with 150:
# equal means that the difference falls with the precision (so e^(pi*sqrt(163)) is no integer). That takes no algebra
# system, hence no simplification that never ends, and every size is bounded before anything is computed.

MAX_ANSWER, MAX_ITEMS, MAX_BITS = 20_000, 300, 150_000  # characters, items of a list, bits of a number


class Unreadable(ValueError):
    """Text that is no mathematics, or mathematics beyond the bounds."""


class Inexact(Exception):
    """The value is no rational number."""


def macro(names):
    return rf"\\(?:{names})(?![A-Za-z])"


UNICODE = dict(zip("−–—×·⋅∙÷’′＝⩽⩾≦≧˚º\u00a0\u2009\u202f", "---****/''=≤≥≤≥°°   "))
UNICODE |= dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", "")  # of no width
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
CLEAN = [  # (pattern, replacement) in order; what LaTeX can say in five ways is said in one afterwards
    (r"(?<=\d)\s*(?:\{\s*,\s*\}|,\s*\\!|\\,|~|\\ )\s*(?=\d{3}(?!\d))", ""),  # 1{,}000  1,\!000  1\,000  1~000
    (r"(?<![\d.,] )(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d.]| \d)", lambda m: m[1] + m[2].replace(" ", "")),  # 1 000
    (macro("(?:text)?color|phantom|hphantom|vspace|hspace|label|tag") + r"\s*\{[^{}]*\}", ""),
    (macro("left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|large|Large|huge|small|it|bf|rm"), ""),
    (macro("quad|qquad|thinspace|checkmark|blacksquare|square|qed|Box|dots|ldots|cdots") + r"|\\[,;:>! ]|~|\\$", " "),
    (r"\\begin\{(?:cases|aligned|align\*?)\}(.*?)\\end\{[^}]*\}", lambda m: re.sub("&", "", m[1]).strip("⏎ ").replace("⏎", ", ")),
    (macro("[dtcs]frac"), r"\\frac"), (macro("[dt]binom"), r"\\binom"), (macro("implies|Longrightarrow"), r"\\Rightarrow "),
    (macro("leqslant|leq?") + "|<=|=<", "≤"), (macro("geqslant|geq?") + "|>=", "≥"), (macro("neq?|not=") + "|!=", "≠"),
    (macro("lt"), "<"), (macro("gt"), ">"), (macro("approx|simeq|sim"), "≈"), (macro("in"), "∈"), (macro("cup"), "∪"),
    (macro("pm") + r"|\+/-|\+-", "±"), (macro("mp"), "∓"), (r"\*\*", "^"), (macro("div"), "/"),
    (macro("infty|infin") + r"|(?<![A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", "∞"),
    (macro("pi") + r"|(?<![A-Za-z])pi(?![A-Za-z])", "π"),
    (macro("cdot|times|ast") + r"|(?<=\d)\s+[xX]\s+(?=10\s*\^)", "*"),
    (r"\^\s*\{\s*(?:\\circ|\\degree|°)\s*\}|\^?\s*" + macro("circ|degree|textdegree") + r"|\^°|(?<=\d)\s*“?degrees?\b”?", "°"),
    (macro("emptyset|varnothing"), "∅"), (r"\\\{|" + macro("lbrace"), "‹"), (r"\\\}|" + macro("rbrace"), "›"),
    (macro("langle"), "⟨"), (macro("rangle"), "⟩"), (macro("lfloor"), "⌊"), (macro("rfloor"), "⌋"), (macro("lceil"), "⌈"),
    (macro("rceil"), "⌉"), (macro("[lr]?vert|mid") + r"|\\\|", "|"), (macro("colon"), ":"),
    (r"\\%|(?<=[\d}])\s*(?:percent(?:age)?|pct)\b", "%"),
    (r"\\\$|\$|£|€|¥|\\(?:pounds|euro)(?![A-Za-z])|\\[()\[\]]", ""),  # currency and math delimiters
    (r"√\s*(\d+|[A-Za-zπ])", r"\\sqrt{\1}"), (r"√", r"\\sqrt"),
    (r"(?<![\d.])\.(?=\\(?:overline|dot))", "0."), (r"(?<![\d.])" + macro("overline"), ""),  # .\overline{5}, a segment
    (r"(?<![\w.^_/})])(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", lambda m: "({}+{}/{})".format(*filter(None, m.groups()))),
    (r"(?<![\w.^_/})])(\d+) +(\d+)/(\d+)(?![\d.])", r"(\1+\2/\3)"),  # 1\frac12 and 1 1/2 are mixed numbers
    (r"(?<=[^,]),\s*(?:“?(?:where|for|with)\s*”?)?\s*[a-z]\s*∈.*$", ""),  # n pi, n in Z
]  # fmt: skip
CLEAN = [(re.compile(pattern), replacement) for pattern, replacement in CLEAN]
# \text{...} and its like: in quotes “...” when it holds a word, dropped otherwise
WRAPPER = re.compile(
    r"\\(text(?!color)\w*|math(?:rm|bf|it|sf|tt|cal|bb)|mbox|hbox|operatorname\*?|boxed|fbox|underline|boldsymbol|bm|emph)\s*\{"
)
EDGES = re.compile(r"^(?:[\s,;:*`]|\.(?!\d))+|[\s.,;:*`]+$")  # around an answer in a sentence or in Markdown


def nfkc(text):
    return unicodedata.normalize("NFKC", text)


def unicode_to_tex(text):
    text = "".join(UNICODE.get(c, c) for c in text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m[0].translate(SUPERSCRIPTS) + "}", text)
    text = re.sub("[½⅓¼¾⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", lambda m: r"\frac{{{}}}{{{}}}".format(*nfkc(m[0]).split("⁄")), text)
    text = re.sub("[！-～]", lambda m: nfkc(m[0]), text)  # full width
    return re.sub(r"\d", lambda m: str(unicodedata.digit(m[0], m[0])), text)


@lru_cache(maxsize=8192)
def clean(text):
    """The answer in one spelling; raises Unreadable when it is too long."""
    text = " ".join(text.split())
    if len(text) > MAX_ANSWER:
        raise Unreadable("too long")
    text = (text if text.isascii() else unicode_to_tex(text)).strip(" *_`")
    if "\\begin" in text:
        text = text.replace(r"\\", "⏎")  # the end of a row
    else:
        text = re.sub(r"\\\\(?=[A-Za-z{}()$!,])", r"\\", text)  # doubled backslashes, as after a JSON round trip
    for _ in range(40):
        match = WRAPPER.search(text)
        end = match and brace_pairs(text).get(match.end() - 1)
        if not end:
            break
        name, body = match[1], text[match.end() : end]
        letters = len(re.findall("[A-Za-z]", re.sub(r"\\\w+", "", body)))
        quoted = letters > (name == "mathrm") and name.startswith(("text", "hbox", "mbox", "operatorname", "mathrm"))
        body = "ℝ" if (name, body) == ("mathbb", "R") else f" “{body}” " if quoted else f" {body} "
        text = text[: match.start()] + body + text[end + 1 :]
    for pattern, replacement in CLEAN:
        text = pattern.sub(replacement, text)
    return strip_edges(text)


def strip_edges(text):
    """Without blanks, punctuation, quotes and braces around it."""
    before = None
    while text != before:
        before, text = text, EDGES.sub("", text)
        pairs, inner = brace_pairs(text) if text[:1] == "{" else {}, 0
        while pairs.get(inner) == len(text) - 1 - inner:  # {{5}}
            inner += 1
        text = text[inner : len(text) - inner]
        text = text[1:-1] if re.fullmatch("“[^”]*”", text) else text
    return text


def split_top(text, separator):
    """Parts between matches of the separator outside brackets and quotes, and the separators.

    >>> split_top("1, (2, 3)", ",")
    (['1', ' (2, 3)'], [','])
    """
    if not (found := list(re.finditer(separator, text))):
        return [text], []
    levels = [0, *itertools.accumulate((c in "([{‹⟨⌊⌈“") - (c in ")]}›⟩⌋⌉”") for c in text)]
    found = [m for m in found if levels[m.start()] == 0]
    starts, ends = [0, *(m.end() for m in found)], [*(m.start() for m in found), len(text)]
    return [text[start:end] for start, end in zip(starts, ends)], [m[0] for m in found]


# A value is a tuple: ("expr", node)  ("%", node)  ("°", node)  ("text", words)  ("list", items)  ("set", items)
# ("seq", open, close, items), a matrix being one of rows  ("ratio", nodes)  ("base", digits, base)  ("rel", sign, left - right)
# ("name", name, value, its relation or None)  ("sets", intervals, relation or None), an interval (low, closed, high, closed)

MATRIX = re.compile(r"^\\begin\{([pbBvV]?matrix|array)\}(?:\{[lcr|\s]*\})?(.*)\\end\{\1\}$", re.DOTALL)
# what separates the items of a list: a comma (not that of 1,000), `and`, `or`, also in quotes
JOIN = r"\s*[,;]?\s*(?:“\s*,?\s*(?:and|or)\s*”|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))|\s*,(?!\d{3}(?!\d))|,\s+"
LEAD = re.compile(  # "The final answer is" before an answer
    r"^[“\s]*(?:(?:so|thus|hence),? )?(?:the |our |my )?(?:final )?(?:answer|result|value|solution)s?\s*(?:is|are)?\s*[:=]?\s*”?\s*(?=\S)",
    re.I,
)
MEMBER = re.compile(r"^[A-Za-z]\w*(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*∈\s*")  # x in ...
BASED = re.compile(r"^([0-9A-Fa-f]+)\s*_\s*\{?\s*“?\s*(\d+|[a-z]+)\s*”?\s*\}?$")  # 204_5, 2A_{sixteen}
THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?!\d)")
WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
SYNONYMS = {"dne": "does not exist", "no solution": "∅", "no solutions": "∅", "empty set": "∅"}
SYNONYMS |= {"all real numbers": "ℝ", "all reals": "ℝ"}
FLIP = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}


def join_thousands(text):
    return THOUSANDS.sub(lambda m: m[1] + m[2].replace(",", ""), text)


def read_value(text, thousands=True, depth=0):
    """The structure of a cleaned answer, the loosest separator first. Raises Unreadable."""
    if depth > 6:
        raise Unreadable("nested too deep")
    text = strip_edges(text if depth else LEAD.sub("", text))
    text = join_thousands(text) if thousands else text
    text = MEMBER.sub("", split_top(text, "≈")[0][0])  # an exact value before its rounding
    again = lambda part: read_value(part, thousands, depth + 1)  # noqa: E731
    if not text:
        raise Unreadable("empty")
    if match := MATRIX.match(text):
        rows = [[again(cell) for cell in row.split("&")] for row in match[2].split("⏎") if row.strip()]
        return ("seq", "[", "]", [("seq", "[", "]", row) for row in rows])
    if match := BASED.match(text):
        return ("base", match[1].upper(), str(WORDS.index(match[2])) if match[2] in WORDS else match[2])
    if re.fullmatch(r"\][^∪]*\[", text):  # ]0,1[
        text = f"({text[1:-1]})"
    if len(parts := split_top(text, "∪")[0]) > 1:
        return ("sets", merge([interval for part in parts for interval in as_sets(again(part))]), None)
    if len(parts := split_top(text, ";")[0]) > 1:  # p=5,q=2;p=7,q=2
        items = [again(part) for part in parts if part.strip()]
        return ("list", [("seq", "(", ")", [strip_name(v) for v in i[1]]) if i[0] == "list" else i for i in items])
    parts = [part for part in split_top(text, JOIN)[0] if EDGES.sub("", part)]
    if len(parts) > 1:
        if len(parts) > MAX_ITEMS:
            raise Unreadable("too many items")
        items = [again(part) for part in parts]
        if items[0][0] == "name" and all(item[0] != "name" for item in items[1:]):  # n=1, 2, 3
            items[0] = items[0][2]
        return ("list", items)
    if "±" in text:  # x = 1 ± 2
        text = text.split("=", 1)[-1] if text.count("=") == 1 else text
        return ("list", [again(text.translate(str.maketrans("±∓", signs))) for signs in ("+-", "-+")])
    parts, signs = split_top(text, "[=<>≤≥≠]")
    if signs:
        return read_relation([strip_edges(part) for part in parts], signs, again)
    if text[0] in "([‹⟨" and text[-1] in ")]›⟩" and not split_top(text[1:-1], r"[)\]›⟩]")[1]:
        return read_bracket(text, again)
    parts, _ = split_top(text, ":")
    return ("ratio", [expression(part) for part in parts]) if len(parts) > 1 else read_leaf(text)


def read_bracket(text, again):
    """A set, a tuple or interval, a letter or an expression in brackets."""
    inside = text[1:-1]
    if text[0] == "‹":
        condition, _ = split_top(inside, r"\||:")  # {x | 1 <= x < 5}
        value = again(condition[-1]) if inside.strip() else ("list", [])
        return value if len(condition) == 2 else ("set", value[1] if value[0] in ("list", "set") else [value])
    if len(parts := split_top(inside, ",")[0]) == 1:
        return again(inside) if re.fullmatch(r"\s*[A-J]\s*", inside) else read_leaf(text)  # (B)
    return ("seq", text[0].replace("⟨", "("), text[-1].replace("⟩", ")"), [again(part) for part in parts])


def is_name(text):
    """Whether the left side of an equation only names what follows: x, f(x), A_{max}, P(A), (p,q), V_1:V_2."""
    bare = re.sub(r"_\{[^{}]*\}|_\w|\\frac|“[^”]*”|\([A-Za-z0-9]\)", "", text)
    return bool(re.search("[A-Za-zα-ωΑ-Ω“]", text) and re.fullmatch(r"[A-Za-zα-ωΑ-Ω{}()\\,:\s'|]*", bare))


def read_relation(parts, signs, again):
    """x = 5 names a value, x > 2 and 1 < x < 3 are intervals, 2x + y = 3 is an equation."""
    if len(parts) == 3 and is_name(parts[1]) and (set(signs) <= {"<", "≤"} or set(signs) <= {">", "≥"}):
        (low, _, high), (first, second) = (parts, signs) if signs[0] in "<≤" else (parts[::-1], signs[::-1])
        return ("sets", [(expression(low), first in "≤≥", expression(high), second in "≤≥")], None)
    if len(parts) > 2 and set(signs) == {"="}:  # x = 10/2 = 5, if it holds
        values = [again(part) for part in parts if not is_name(part)]
        if values and all(same(values[-1], value) for value in values):
            return ("name", parts[0], values[-1], None)
    if len(parts) != 2 or not all(parts):
        raise Unreadable("no relation")
    (left, right), sign = parts, signs[0]
    if is_name(right) and not is_name(left):
        left, right, sign = right, left, FLIP[sign]
    relation = None
    with contextlib.suppress(Unreadable):
        sides = expression(left), expression(right)
        first, second = sides if sign in "<≤=≠" else sides[::-1]
        relation = ("rel", FLIP[sign] if sign in ">≥" else sign, ("+", [first, minus(second)]))
    if is_name(left) and sign == "=":
        return ("name", re.sub(r"[\s{}]", "", left), again(right), relation)
    if relation is None:
        raise Unreadable("no relation")
    below, above = (MINUS_INFINITY, False, sides[1], sign == "≤"), (sides[1], sign == "≥", INFINITY, False)
    bounds = [below] * (sign in "<≤≠") + [above] * (sign in ">≥≠")
    return ("sets", bounds, relation) if is_name(left) and bounds else relation


def read_leaf(text):
    """An expression, a percentage, an angle or words."""
    text = strip_edges(text)
    if text[-1:] in ("%", "°") and len(text) > 1:
        return (text[-1], expression(text[:-1]))
    words = text.replace("“", "").replace("”", "").strip()
    folded = SYNONYMS.get(fold(words), fold(words))
    if folded == "∅":
        return ("set", [])
    if folded == "ℝ":
        return ("sets", [(MINUS_INFINITY, False, INFINITY, False)], None)
    if folded in WORDS:
        return ("expr", number(WORDS.index(folded)))
    if len(words) > 1 and re.fullmatch(r"[A-Za-z][A-Za-z' ,.-]*", words) and ("“" in text or not is_product(words)):
        return ("text", folded.rstrip("."))
    try:
        return ("expr", expression(text))
    except Unreadable:
        if (bare := without_unit(text)) is None:
            raise
        return ("expr", expression(bare))


UNIT_WORDS = set("cm mm km kg mg ml mL m g s h ft in lb oz mi yd hr kmh mph kph L N J W V A K C F Pa Hz kJ kW".split())
TAIL = re.compile(  # a unit behind a number: words, a power, a second unit after a slash
    r"(?<=[\d)}\s.%°π])[ ]*(“[^”]*”|[A-Za-z]+(?: [A-Za-z]+){0,3})[ ]*(?:\^ ?\{?-?\d\}?)?[ ]*(?:/ ?(?:“[^”]*”|[A-Za-z]+)(?:\^ ?\{?\d\}?)?)?$"
)
HEAD = re.compile(r"^(?:“[^”]*”|Rs\.?|USD|INR)\s*(?=[-\d.\\(])")  # "Rs. " 450
HEDGES = set("or and not if else than more less least most maybe either import lambda for but is mod".split())


def without_unit(text):
    """The text without the unit behind it (or before it), or None when there is none.

    >>> without_unit("5 cm"), without_unit("5 x"), without_unit("5 “square units”")
    ('5', None, '5')
    """
    text = re.sub(r" ?\(“?[A-Za-z ]+”?\)$", "", text)  # 5 (five)
    if match := TAIL.search(text):
        words = match[1].strip("“” ").split() or [""]
        known = match[1][0] == "“" or len(words[0]) > 2 or words[0] in UNIT_WORDS
        return text[: match.start()].strip() or None if known and not HEDGES & {w.lower() for w in words} else None
    head = HEAD.sub("", text)
    return head if head != text else None


FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp sqrt abs gcd lcm max min".split()
GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta lambda mu nu xi rho sigma tau phi varphi chi psi omega"
)
GREEK = {"ell", "hbar", *GREEK.split(), *GREEK.title().split()}


def is_product(words):
    """Whether bare letters are variables: single ones, or two small ones; DNA and HTHT are words."""
    single = all(len(part) == 1 or part in FUNCTIONS for part in words.split())
    return single or len(words) == 2 and words.islower() and words not in ("no", "up")


# An expression is ("n", Fraction, decimals or None), ("s", symbol) or (operator, arguments); the operators are
# + * / ^ ! ° root binom floor ceil abs and the functions.
# a number, a symbol with its index, a macro or a word, any other sign
TOKEN = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|(?:\\?[A-Za-z]+)_(?:\{[^{}]*\}|\w)|\\?[A-Za-z]+|\S")


def number(value, decimals=None):
    return ("n", Fraction(value), decimals)


def minus(node):
    return ("n", -node[1], node[2]) if node[0] == "n" else ("*", [number(-1), node])


def times(factors):
    return ("*", factors) if len(factors) > 1 else factors[0]


INFINITY = ("s", "∞")
MINUS_INFINITY = minus(INFINITY)
CLOSING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉", "|": "|"}


def expression(text):
    """The tree of an expression. Raises Unreadable."""
    parser = Parser(text.replace("“", "").replace("”", "") if re.fullmatch(r"[^“]*“[A-Za-z]”.*", text) else text)
    try:
        node = parser.sum()
    except RecursionError:
        raise Unreadable("nested too deep") from None
    parser.take("")
    return node


class Parser:
    """Recursive descent, sum > product > power > atom, over a white list of symbols; no text is evaluated."""

    def __init__(self, text):
        self.tokens, self.i = [*TOKEN.findall(text), ""], 0

    @property
    def next(self):
        return self.tokens[self.i]

    def take(self, wanted=None):
        """The next token, which must be there, and be the wanted one."""
        token = self.next
        if token != wanted if wanted is not None else not token:
            raise Unreadable(f"unexpected {token[:20]!r}")
        self.i += bool(token)
        return token

    def accept(self, *signs):
        """The next token if it is one of the signs, else nothing is taken."""
        return self.take() if self.next in signs else ""

    def sum(self):
        terms = [self.product()]
        while sign := self.accept("+", "-"):
            terms.append(self.product() if sign == "+" else minus(self.product()))
        return ("+", terms) if len(terms) > 1 else terms[0]

    def product(self):
        factors = [self.factor()]
        while True:
            if self.accept("*"):
                factors.append(self.factor())
            elif self.accept("/"):
                factors = [("/", [times(factors), self.factor()])]
            elif not self.starts_factor():
                return times(factors)
            elif self.next[0].isdigit() and self.tokens[self.i - 1][-1].isalnum():  # 2x and x(3), but not 2 3 or x2
                raise Unreadable("numbers side by side")
            else:
                factors.append(self.factor(signs=0))

    def starts_factor(self):
        return self.next != "" and (self.next[0].isalnum() or self.next[0] in "\\.([{⌊⌈π∞")

    def factor(self, signs=2):
        """An atom behind up to so many signs, with its ! ° and ^; a tower of powers is read from the right."""
        negative = sum(self.accept("+", "-") == "-" for _ in range(signs)) == 1
        node = self.atom()
        while sign := self.accept("!", "°", "^"):
            if sign == self.next == "!":
                raise Unreadable("double factorial")
            if sign == "^":
                below = self.accept("+", "-") == "-"
                exponent = self.atom() if self.next == "{" else self.factor(signs=0)
            node = ("^", [node, minus(exponent) if below else exponent]) if sign == "^" else (sign, [node])
        return minus(node) if negative else node

    def argument(self):
        """What \\frac takes: {...}, or one digit or letter as in \\frac12."""
        if self.next.isalnum():
            self.tokens[self.i : self.i + 1] = [*self.next]
        return self.atom()

    def atom(self):
        token = self.take()
        if token[0].isdigit() or token[0] == "." and len(token) > 1:
            return self.number(token)
        if token in CLOSING:
            node = self.sum()
            self.take(CLOSING[token])
            return ({"⌊": "floor", "⌈": "ceil", "|": "abs"}[token], [node]) if token in "⌊⌈|" else node
        name, _, index = token.lstrip("\\").partition("_")
        if name in FUNCTIONS:
            return self.root() if name == "sqrt" else self.function(name, index)
        if name in ("frac", "binom"):
            return (name.replace("frac", "/"), [self.argument(), self.argument()])
        if token in ("π", "∞") or token[0] == "\\" and name in GREEK or "_" in token and token[0] != "\\":
            return ("s", f"{name}_{index.strip('{}“” ')}" if index else name)
        if not token.isalpha():
            raise Unreadable(f"unexpected {token[:20]!r}")
        if len(token) == 2 and token.islower():  # xy is x*y, DNA is a word
            self.tokens[self.i - 1 : self.i] = [*token]
            token = token[0]
        while self.accept("'"):
            token += "'"
        return ("s", token)

    def number(self, token):
        mantissa, _, exponent = token.lower().partition("e")
        whole, _, decimals = mantissa.partition(".")
        if len(mantissa) > 4000 or len(exponent) > 5 or abs(int(exponent or 0)) > 5000:  # int() stops at 4300 digits
            raise Unreadable("too many digits")
        value = int(whole + decimals) * Fraction(10) ** (int(exponent or 0) - len(decimals))
        repeated = ""
        while "." in token and self.accept("\\overline", "\\dot"):  # 0.1\overline{6}
            braced = self.accept("{")
            repeated += self.take()
            braced and self.take("}")
        if not repeated:
            return number(value, len(decimals) if decimals and not exponent else None)
        if not repeated.isdigit() or len(repeated) > 400:
            raise Unreadable("no digits under the bar")
        return number(value + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(decimals)))

    def root(self):
        degree = number(2)
        if self.accept("["):
            degree = self.sum()
            self.take("]")
        return ("root", [self.argument(), degree])

    def function(self, name, index):
        """sin 2x, \\sin^2(x), log_2 8, max(1, 2)."""
        base = expression(index.strip("{}")) if index else number(10)
        power = None
        if self.accept("^"):
            power = minus(self.argument()) if self.accept("-") else self.argument()
        if opening := self.accept("(", "{", "["):
            arguments = [self.sum()]
            while self.accept(","):
                arguments.append(self.sum())
            self.take(CLOSING[opening])
        else:
            sign, factors = self.accept("-"), [self.factor(signs=0)]
            while self.starts_factor() and self.next[0] not in "([{" and self.next.lstrip("\\") not in FUNCTIONS:
                factors.append(self.factor(signs=0))
            arguments = [minus(times(factors)) if sign else times(factors)]
        if name in ("log", "lg"):
            name, arguments = "log", [*arguments, base]
        if power == number(-1):
            return ("arc" + name, arguments)
        return ("^", [(name, arguments), power]) if power else (name, arguments)


CONSTANTS = {"π", "e", "i", "∞"}


def symbols(node):
    return {node[1]} if node[0] == "s" else set() if node[0] == "n" else set().union(*map(symbols, node[1]))


def evaluate(node, point, apply):
    """The value of an expression at a point {symbol: Fraction}, with the arithmetic of `apply`."""
    if node[0] in "ns":
        return apply("n", [node[1] if node[0] == "n" else point.get(node[1], node[1])])
    return apply(node[0], [evaluate(argument, point, apply) for argument in node[1]])


RATIONAL = {"n": lambda a: a[0], "+": sum, "*": math.prod, "max": max, "min": min}  # of a list of fractions
RATIONAL |= {"abs": lambda a: abs(a[0]), "floor": lambda a: math.floor(a[0]), "ceil": lambda a: math.ceil(a[0])}
WHOLE = {"!": math.factorial, "binom": math.comb, "gcd": math.gcd, "lcm": math.lcm}  # of whole numbers up to 5000


def exactly(op, arguments):
    """One operation on fractions; raises Inexact where the result is none, Unreadable beyond the bounds."""
    x, y = arguments[0], arguments[-1]
    if isinstance(x, str):
        raise Unreadable("infinite") if x == "∞" else Inexact
    sizes = [a.numerator.bit_length() + a.denominator.bit_length() for a in arguments]
    if (
        (sizes[0] * abs(y) if op == "^" and abs(x) != 1 else sum(sizes)) > MAX_BITS
        or op == "^"
        and y.denominator > 10**6
    ):
        raise Unreadable("too large, or too near to 1")
    if op in RATIONAL:
        return Fraction(RATIONAL[op](arguments))
    if op == "/" and y or op == "^" and y.denominator == 1 and (x or y > 0):
        return x / y if op == "/" else x ** int(y)
    if op in WHOLE and all(a.denominator == 1 and 0 <= a <= 5000 for a in arguments):
        return Fraction(WHOLE[op](*map(int, arguments)))
    if op in ("/", "^", *WHOLE) and y.denominator == 1:
        raise Unreadable("division by zero, or out of bounds")
    raise Inexact


def with_digits(mp, real):
    """The operations on mpmath's numbers; over the reals unless i occurs, and what is undefined there is Unreadable."""
    constants = {"π": mp.pi, "e": mp.e, "i": mp.j}
    names = {"abs": "fabs", "!": "factorial", "°": "radians", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}

    def apply(op, arguments):
        x, y, result = arguments[0], arguments[-1], mp.nan
        if op == "n":
            result = mp.mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else +constants.get(x, mp.nan)
        elif op in "+*":
            result = mp.fsum(arguments) if op == "+" else mp.fprod(arguments)
        elif op == "/" and y != 0:
            result = x / y
        elif op == "^" and abs(y) < 20_000 and (x != 0 or mp.re(y) > 0):
            third = mp.nint(3 * y)  # (-8)^(1/3) is -2 over the reals
            cubic = real and x < 0 and abs(3 * y - third) < mp.eps * 8 * abs(third)
            result = x ** int(mp.re(y)) if mp.isint(y) else (-1) ** int(third) * (-x) ** y if cubic else x**y
        elif op == "root" and mp.isint(y) and 1 < (n := int(mp.re(y))) <= 10_000:
            result = -mp.root(-x, n) if real and x < 0 and n % 2 else mp.root(x, n)
        elif op in ("ln", "log") and x != 0 and (op == "ln" or y not in (0, 1)):
            result = mp.log(x) / (mp.log(y) if op == "log" else 1)
        elif len(arguments) == 1 and (op == "abs" or abs(x) < 1e6):
            result = getattr(mp, names.get(op, op))(x)
        if not mp.isfinite(result) or result != 0 and abs(mp.mag(result)) > 100_000 or real and mp.im(result) != 0:
            raise Unreadable("undefined, too large, or not real")
        return result

    return apply


POINTS = [  # values for the letters in their order; rational, some negative, none special
    [Fraction(n, 7) for n in (11, 17, 25, 9, 31, 20, 13, 5, 37, 23)],
    [Fraction(n, 11) for n in (19, 7, 31, 14, 5, 27, 40, 9, 23, 16)],
    [Fraction(n, 13) for n in (-8, 21, -17, 5, -30, 11, -3, 28, -12, 35)],
    [Fraction(n, 5) for n in (3, -4, -7, 12, 2, -9, 6, -1, 13, -11)],
    [Fraction(n, 3) for n in (14, 20, 13, 22, 10, 25, 16, 28, 11, 19)],
]


def points_for(*nodes):
    names = sorted(set().union(*map(symbols, nodes)) - CONSTANTS)
    if len(names) > 10:
        raise Unreadable("too many letters")
    return [dict(zip(names, values)) for values in POINTS] if names else [{}]


def numerically(pairs, combine, digits):
    """combine(values of (node, point) pairs) with mpmath: only in a worker, where a wall clock watches."""
    if not IN_WORKER:
        raise NeedsWorker
    import mpmath

    with mpmath.mp.workdps(digits):
        apply = with_digits(mpmath.mp, not any("i" in symbols(node) for node, _ in pairs))
        return combine(*[evaluate(node, point, apply) for node, point in pairs])


def vanishes(pairs, combine):
    """Whether combine(values of the (node, point) pairs) is zero."""
    with contextlib.suppress(Inexact):
        return combine(*[evaluate(node, point, exactly) for node, point in pairs]) == 0
    coarse, fine = (abs(numerically(pairs, combine, digits)) for digits in (60, 150))
    return fine < 1e-50 and (fine == 0 or coarse == 0 or fine * 10**40 < coarse)


def same_expression(a, b):
    """Equal wherever both are defined, and that at two points at least (at the only one, without letters)."""
    if a == b or "∞" in symbols(a) | symbols(b):
        return a == b
    defined, points = 0, points_for(a, b)
    for point in points:
        with contextlib.suppress(Unreadable):
            if not vanishes([(a, point), (b, point)], lambda x, y: x - y):
                return False
            defined += 1
    return defined >= min(2, len(points))


def same_relation(a, b):
    """Whether left - right of two relations differ by a constant factor only, a positive one for < and ≤."""
    usable = []
    for point in points_for(a[2], b[2]):
        with contextlib.suppress(Unreadable):
            pair = [(a[2], point), (b[2], point)]
            zero = [vanishes([side], lambda x: x) for side in pair]
            if zero[0] != zero[1]:
                return False
            usable += [pair] * (not zero[0])
    cross = lambda p, q, r, s: p * s - q * r  # noqa: E731
    if a[1] != b[1] or len(usable) < 2 or not all(vanishes(usable[0] + pair, cross) for pair in usable[1:]):
        return False
    return a[1] in "=≠" or approximate(*usable[0][0]) * approximate(*usable[0][1]) > 0


def approximate(node, point=None):
    """A float, for the order of end points."""
    if node in (INFINITY, MINUS_INFINITY):
        return math.inf if node == INFINITY else -math.inf
    try:
        return float(evaluate(node, point or {}, exactly))
    except OverflowError:
        raise Unreadable("too large") from None
    except Inexact:
        return numerically([(node, point or {})], lambda x: float(x.real), 30)


def same_number(gold, said):
    """Expressions, with the two tolerances there are: a gold of three digits or more that rounds an exact value, and a
    decimal of twelve digits or more for a gold that no decimal can equal."""
    if same_expression(gold, said):
        return True
    if (symbols(gold) | symbols(said)) - {"π", "e"} or (gold[0] == "n") == (said[0] == "n"):
        return False
    decimal, exact, enough = (gold, said, 3) if gold[0] == "n" else (said, gold, 12)
    return bool(decimal[2]) and abs(decimal[1]) * 10 ** decimal[2] >= 10 ** (enough - 1) and rounds_to(exact, decimal)


def rounds_to(node, decimal):
    """Whether the decimal is the expression, rounded or cut; never when the expression has an exact decimal itself."""
    try:
        true = evaluate(node, {}, exactly)
        if pow(10, true.denominator.bit_length(), true.denominator) == 0:  # it divides a power of ten
            return False
    except Inexact:
        true = numerically([(node, {})], lambda x: Fraction(x.man_exp[0]) * Fraction(2) ** x.man_exp[1], 60)
    step, off = Fraction(1, 10 ** decimal[2]), abs(true) - abs(decimal[1])
    return true * decimal[1] > 0 and (abs(off) <= step / 2 or 0 <= off < step)


def strip_name(value):
    return value[2] if value[0] == "name" else value


def as_sets(value):
    """A value as intervals; raises Unreadable."""
    value = strip_name(value)
    if value[0] == "sets":
        return value[1]
    if value[0] == "seq" and len(value[3]) == 2 and all(item[0] == "expr" for item in value[3]):
        return [(value[3][0][1], value[1] == "[", value[3][1][1], value[2] == "]")]
    if value[0] == "set" and all(item[0] == "expr" for item in value[1]):
        return [(item[1], True, item[1], True) for item in value[1]]
    if value[0] == "list":  # x < 0 or x > 1
        return [interval for item in value[1] for interval in as_sets(item)]
    raise Unreadable("no set")


def merge(intervals):
    """Sorted, and parts that touch put together: [0,1] with [1,2] is [0,2]."""
    merged = []
    for interval in sorted(intervals, key=lambda i: (approximate(i[0]), not i[1])):
        if merged and approximate(merged[-1][2]) == approximate(interval[0]) and (merged[-1][3] or interval[1]):
            merged[-1] = (*merged[-1][:2], *interval[2:])
        else:
            merged.append(interval)
    return merged


def same(gold, said):
    """Whether two values agree; the type of the gold decides how. Raises Unreadable."""
    kinds = {gold[0], said[0]}
    if "rel" in kinds or kinds == {"name"} and gold[1] != said[1]:
        relations = [{"name": v[-1], "sets": v[-1], "rel": v}.get(v[0]) for v in (gold, said)]
        return all(relations) and same_relation(*relations)
    if "name" in kinds:
        return same(strip_name(gold), strip_name(said))
    if kinds == {"expr"}:
        return same_number(gold[1], said[1])
    if kinds < {"%", "°", "expr"}:
        return same_percent(gold, said)
    if "sets" in kinds:
        return same_sets(gold, said)
    if kinds == {"seq"}:
        return (len(gold[3]) != 2 or gold[1:3] == said[1:3]) and same_items(gold[3], said[3])
    if kinds == {"seq", "list"}:  # a tuple without its brackets, or with names: (1,2) and y=2, x=1
        items, loose = (gold[3], said[1]) if gold[0] == "seq" else (said[3], gold[1])
        named = all(item[0] == "name" for item in loose)
        return same_items(items, [i[2] for i in sorted(loose, key=lambda i: i[1])] if named else loose)
    if kinds & {"list", "set"} and "seq" not in kinds:
        return same_lists(*(v[1] if v[0] in ("list", "set") else [v] for v in (gold, said)))
    if "ratio" in kinds and kinds <= {"ratio", "expr"}:
        a, b = (v[1] if v[0] == "ratio" else [v[1], number(1)] for v in (gold, said))
        return len(a) == len(b) and all(same_expression(times([a[0], y]), times([b[0], x])) for x, y in zip(a, b))
    if gold[0] == "base" and said[0] == "expr":  # the base may be known from the question
        return gold[1].isdigit() and len(gold[1]) < 1000 and said[1] == number(int(gold[1]))
    return gold == said


def same_or_not(a, b):
    try:
        return same(a, b)
    except Unreadable:
        return False


def same_items(a, b):
    return len(a) == len(b) and all(map(same, a, b))


def same_percent(gold, said):
    """p % against p %, p, or p/100 (the last two not at once). 72° against 72, and against 2 pi/5."""
    if same_number(gold[1], said[1]):
        return True
    scaled = [{"%": ("/", [v[1], number(100)]), "°": ("°", [v[1]])}.get(v[0], v[1]) for v in (gold, said)]
    comparable = "%" in (gold[0], said[0]) or "π" in symbols(gold[1]) | symbols(said[1])
    return "expr" in (gold[0], said[0]) and comparable and same_expression(*scaled)


def same_sets(gold, said):
    a, b = as_sets(gold), as_sets(said)
    if gold[0] == said[0] and gold[-1] and said[-1] and any(symbols(i[j]) - CONSTANTS for i in a + b for j in (0, 2)):
        return same_relation(gold[-1], said[-1])  # a <= b and b >= a
    ends = lambda x, y: same_number(x[0], y[0]) and same_number(x[2], y[2])  # noqa: E731
    a, b = merge(a), merge(b)
    return len(a) == len(b) and all(x[1::2] == y[1::2] and ends(x, y) for x, y in zip(a, b))


def same_lists(gold, said):
    """The same items in any order, or the same names; repeated ones count once."""
    gold, said = ([v for i, v in enumerate(items) if v not in items[:i]] for items in (gold, said))
    names = [sorted(item[1] for item in items if item[0] == "name") for items in (gold, said)]
    if names[0] == names[1] and len(set(names[0])) == len(gold) == len(said):
        return same_items(sorted(gold, key=lambda i: i[1]), sorted(said, key=lambda i: i[1]))
    return len(gold) == len(said) and all_matched(gold, said, same_or_not)


def all_matched(wanted, found, agree):
    """Whether each wanted item takes one of the found ones away."""
    for item in wanted:
        match = next((i for i, other in enumerate(found) if agree(item, other)), None)
        if match is None:
            return False
        found = found[:match] + found[match + 1 :]
    return True


PLAIN_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,9})?")  # the common case, without further ado
BETWEEN = re.compile(r"(?:\s|\$|,|;|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\\q?quad|\\[,; ])*")  # joins two boxes
LABELLED = re.compile(r"^“?\s*\(?([A-J])[).]\s*”?\s*\S")  # (A) 5


def final_answer(completion):
    """The answer of a completion: the last marked one, with the boxes that a comma or `and` joins to it."""
    text = strip_thinking(completion)
    found = marked_answers(text)
    if not found:
        return None
    parts = found[-1:]
    for before in reversed(found[:-1]):
        between = text[before[1] : parts[0][0]]
        if len(between) > 60 or not re.search(",|;|and|or", between) or not BETWEEN.fullmatch(between):
            break
        parts.insert(0, before)
    if len({"".join(content.split()) for _, _, content in parts}) > 1:
        return ", ".join(content for _, _, content in parts)
    _, end, content = parts[-1]
    percent = re.match(r"\s*\$?\s*(?:\\?%|percent|pct)", text[end : end + 20])
    return unmarked(content) + (r"\%" if percent else "")


def unmarked(text):
    """Without the marks that are left: #### \\boxed{10}, \\boxed{\\boxed{5}}."""
    inner = marked_answers(text)
    return inner[-1][2] if inner else text


@lru_cache(maxsize=8192)
def golds(answer):
    """The acceptable answers of a gold: itself, or the strings of a JSON list; raises TaskError."""
    found = [answer]
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(answer) if answer.lstrip().startswith("[") else None
        found = data if data and all(isinstance(x, str) for x in data) else found
    if any(re.sub(r"[\s$]", "", unmarked(gold)).lower() in ("", "nan", "none", "null") for gold in found):
        raise TaskError("the answer of a math task is empty")
    return [unmarked(gold) for gold in found]


@lru_cache(maxsize=8192)
def readings(text):
    """The values a cleaned text may mean: 1,234 as a number and as a list of two, with its unit and without."""
    found = []
    for part in filter(None, (text, without_unit(text))):
        for thousands in (True, False) if THOUSANDS.search(part) else (True,):
            with contextlib.suppress(Unreadable):
                found.append(read_value(part, thousands))
    return found


def squeeze(text):
    """Without blanks that separate nothing."""
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)|\$", "", " ".join(text.split()))


def check_math(completion, answer):
    """1 when the marked answer equals the gold, or one of several."""
    said, wanted = final_answer(completion), golds(answer)
    if said is None:
        return "no answer"
    plain = [t if PLAIN_NUMBER.fullmatch(t) else None for t in map(str.strip, (said, *wanted))]
    if all(plain):
        return float(Fraction(plain[0]) in map(Fraction, plain[1:]))
    if squeeze(said) in map(squeeze, wanted):
        return 1.0
    if len(said) > 500 and not IN_WORKER:
        raise NeedsWorker
    for gold in wanted:
        with contextlib.suppress(Unreadable):
            a, b = clean(gold), clean(said)
            if b and squeeze(a) == squeeze(b) or any(same_or_not(x, y) for x in readings(a) for y in readings(b)):
                return 1.0
            letters = [LABELLED.match(t)[1] if LABELLED.match(t) else t.strip("() .") for t in (a, b)]
            if letters[0] == letters[1] and len(letters[0]) == 1 and not all(map(LABELLED.match, (a, b))):
                return 1.0
    return 0.0


# ---------------------------------------------------------------------------------------------------------------------
# choice: a letter, or the text of exactly one option

# The last claim wins, and a claim needs an anchor: a box, <answer> tags, "Answer: B", "I choose B", "B is correct". A bare
# letter counts when it is all there is (or all of the last line). So the A of "A city", the I of "I think" and the B of
# "not B" are no claims, and two letters in one claim are no answer.

ANCHORS = [  # L is the letter; blanks are counted, since \s* after \s* is slow on a long run of them
    r"(?:answer|choice|option|antwort|réponse|respuesta|答案)\)?\s{0,5}(?:to [^.:\n]{1,60} )?(?:is|are|seems to be|would be|must be|should be|est|ist|es|是)?"
    r"\s{0,5}(?:for sure|clearly|definitely|likely|the)?\s{0,5}(?:option|choice|letter)?\s{0,5}[:：=\-–—]*\s{0,5}L",
    r"(?:^|\n)\s{0,5}(?:(?:my |the )?(?:pick|final|ans|solution|response|result|letter)(?: is)?)\s{0,5}[:=]\s{0,5}L",
    r"(?:→|\bletter is|\bsay)\s{0,5}L",
    r"(?:choose|pick|select|choosing|selecting|picking|go(?:ing)? with|opt for)\s{1,5}(?:option |answer |choice |letter )?L",
    r"(?:^|[^\w'])(?:so|thus|hence|therefore|but|it's|it is|it must be|think)[,:]?\s{1,5}L(?=\s{0,5}(?:[.!,;]|$))",
    r"(?:^|[^\w'])L\s{1,5}(?:is|must be|seems|looks)\s{1,5}(?:the\s{1,5})?(?:correct|right|valid|true|best|answer)",
]
DENIED = re.compile(  # behind a letter: "is wrong", "cannot"
    r"\s*(?:(?:is|are|was|seems|looks)\s*(?:n't|not|incorrect|wrong|false|invalid|tempting|out)|can(?:no|')t\b|cannot\b)", re.I
)  # fmt: skip
NEGATED = re.compile(  # before an anchor: "it is not", "I don't think that"
    r"(?:\bnot|n't|\bnever|\bneither|\bnor|\brules? out|\beliminate)\W*(?:(?:think|believe|say)(?: that)?\W*)?"
    r"(?:option |answer |be |the )?$", re.I
)  # fmt: skip
MARKUP = re.compile(r"[*`\"“”$\[\]{}<>_]|\\[()\[\]]")  # stands around letters and says nothing
ANSWER_TAG = re.compile(r"<answer>(.{0,2000}?)</answer>", re.DOTALL | re.IGNORECASE)
PRONOUN = re.compile(r"\s+[a-z]")  # a letter in a sentence: a car, I think


@lru_cache(maxsize=256)
def choice_patterns(labels):
    """The anchors, a letter, and a further letter behind it."""
    one = "|".join(map(re.escape, labels))
    letter = rf"\(?\s{{0,5}}(?P<letter>(?i:{one}))(?![\w'’])\s{{0,5}}\)?"
    also = rf"\s{{0,5}}(?:,|/|&|\+|\band\b|\bor\b)\s{{0,5}}(?:and |or )?\(?({one})(?![\w'’])\)?(?!\s+[a-z])"
    anchors = [re.compile(anchor.replace("L", letter, 1), re.I) for anchor in ANCHORS]
    return anchors, re.compile(r"\s{0,5}" + letter), re.compile(also)


def claimed(content, choices, labels):
    """The labels that the content of a box, a tag or a whole answer stands for: {'B'}, {'A', 'B'}, or nothing."""
    text = re.sub(r"\\(?:text\w*|math\w+)\s*\{", " {", nfkc(content))
    text = MARKUP.sub(" ", text).strip(" \t\n.,;:!。")
    same_text = {label for label, option in choices.items() if fold(option) in (fold(text), fold(content))}
    if len(same_text) == 1:
        return same_text
    if (bare := text.strip("() ").upper()) in labels:
        return {bare}
    _, start, also = choice_patterns(labels)
    if not (match := start.match(text)):
        run = text.replace(" ", "")  # BD
        return set(run) if 1 < len(run) and set(run) <= set(labels) else set()
    letter, end = match["letter"].upper(), match.end()
    found = {letter}
    while more := also.match(text, end):
        found, end = found | {more[1].upper()}, more.end()
    rest = text[end:].strip()
    clear = not rest or len(found) > 1 or rest[0] in ".:)-–—," or match[0].strip().startswith("(")
    return found if clear or fold(rest) == fold(choices.get(letter, "")) else set()


def claims(text, choices, labels):
    """(start, end, labels) of every anchored claim, in order."""
    found = [(start, end, claimed(content, choices, labels)) for start, end, content in marked_answers(text)]
    found += [(m.start(), m.end(), claimed(m[1], choices, labels)) for m in ANSWER_TAG.finditer(text)]
    anchors, _, also = choice_patterns(labels)
    flat = nfkc(text) if len(nfkc(text)) == len(text) else text
    flat = re.sub(r"(?<!\w)'|'(?!\w)", " ", MARKUP.sub(" ", flat))  # quotes; the one of it's stays
    for match in (match for pattern in anchors for match in pattern.finditer(flat)):
        letter, end = match["letter"], match.end("letter")
        word = (letter not in labels or letter == "I") and PRONOUN.match(flat, end)  # "a" and "I" inside a sentence
        if word or NEGATED.search(flat[max(match.start() - 30, 0) : match.start()]) or DENIED.match(flat, match.end()):
            continue
        said = {letter.upper()}
        while more := also.match(flat, end):
            said, end = said | {more[1].upper()}, more.end()
        found.append((match.start(), max(end, match.end()), said))
    return sorted((claim for claim in found if claim[2]), key=lambda claim: (claim[1], claim[0]))


def check_choice(completion, answer):
    """1 when the last claim is the label of the answer, or its labels."""
    wanted, choices, labels = parse_choice_answer(answer)
    text = re.sub(r"[ \t]{2,}", " ", strip_thinking(completion))
    if found := claims(text, choices, labels):
        start, _, said = found[-1]
        spray = said
        for before in reversed(found[:-1]):  # Answer: A, Answer: B, Answer: C with nothing between is no answer
            if re.search(r"\w", text[before[1] : start]):
                break
            spray, start = spray | before[2], before[0]
        return float(said == wanted and len(spray) <= max(2, len(wanted)))
    lines = [line for line in text.strip().split("\n") if line.strip()]
    listed = [re.match(r"\W*([A-Za-z0-9])\W*[.):]\s", line) for line in lines]
    if len({m[1] for m in listed if m}) > 1:  # the options, listed again
        lines = [line for line, m in zip(lines, listed) if not m]
    for part in (" ".join(lines), *lines[-1:], *lines[:1]):
        if said := claimed(part, choices, labels):
            return float(said == wanted)
    folded = {label: fold(option) for label, option in choices.items()}
    said = {a for a, option in folded.items() if option and re.search(rf"(?<!\w){re.escape(option)}(?!\w)", fold(text))}
    said -= {a for a in said for b in said - {a} if folded[a] in folded[b]}
    if not said or re.search(r"\bnot\b|n't|\bor\b|\bbecause\b", text, re.I) or len(text) > 200:
        return "no answer"
    return float(said == wanted)


@answer_reader('a choice answer is a letter or JSON {"label": "B", "choices": {"A": "...", ...}}')
def parse_choice_answer(answer):
    """(labels of the answer, {label: text}, all labels): the answer is a bare letter or JSON; raises TaskError."""
    answer = answer.strip()
    task = json.loads(answer) if answer.startswith("{") else {"label": answer}
    choices = {str(k).strip(): str(v) for k, v in (task.get("choices") or {}).items()}
    wanted = set(re.findall(r"\w+", str(task["label"])))
    labels = tuple(choices) or tuple("123456789" if min(wanted).isdigit() else "ABCDEFGHIJ")
    ensure(wanted and wanted <= set(labels))
    return wanted, choices, labels


# ---------------------------------------------------------------------------------------------------------------------
# number: a value with a unit

# The unit of the answer is converted to that of the gold; another dimension is wrong. A bare number is read in the unit
# of the gold, and a unit is ignored where the gold has none. The tolerance is relative only: 0 is not nearly 1.6e-19.

BASE_UNITS = ("m", "g", "s", "A", "K", "mol")
UNITS = """N kg m s-2; J N m; W J s-1; Pa N m-2; Hz s-1; C A s; V W A-1; F C V-1; Ω V A-1; ohm Ω; Wb V s; T Wb m-2; H Wb A-1;
S A V-1; Bq s-1; L 1e-3 m3; l L; min 60 s; h 3600 s; hr h; day 24 h; yr 365.25 day; year yr; eV 1.602176634e-19 J;
cal 4.184 J; atm 101325 Pa; bar 1e5 Pa; mmHg 133.322 Pa; torr mmHg; psi 6894.757 Pa; Å 1e-10 m; in 2.54e-2 m; ft 12 in;
yd 3 ft; mi 1760 yd; mph mi h-1; kph km h-1; lb 453.59237 g; tonne 1e3 kg; u 1.66053907e-24 g; amu u; M mol L-1;
hp 745.7 W; °C K; °F 5/9 K; % 1e-2; rad 1; sr 1; deg °"""
UNITS = {line.split()[0]: line.split()[1:] for line in UNITS.split(";")} | {"°": [str(Fraction(math.pi) / 180)]}
OFFSETS = {"°C": Fraction("273.15"), "°F": Fraction("459.67") * Fraction(5, 9)}
SPELLED = """meter=m metre=m gram=g second=s sec=s ampere=A amp=A kelvin=K mole=mol newton=N joule=J watt=W pascal=Pa
hertz=Hz coulomb=C volt=V farad=F ohms=Ω tesla=T liter=L litre=L minute=min hour=h degree=° radian=rad celsius=°C
fahrenheit=°F percent=% angstrom=Å mile=mi foot=ft feet=ft inch=in"""
SPELLED = dict(pair.split("=") for pair in SPELLED.split())
PREFIXES = dict(zip("fpnµμumcdkMGT", (-15, -12, -9, -6, -6, -6, -3, -2, -1, 3, 6, 9, 12)))
PREFIXES |= {"kilo": 3, "mega": 6, "giga": 9, "centi": -2, "milli": -3, "micro": -6, "nano": -9, "pico": -12}
UNPREFIXED = {"min", "h", "hr", "day", "%", "°", "in", "ft", "mi"}
UNIT_SIGNS = {"\\mu": "µ", "“": " ", "”": " ", "\\Omega": "Ω", "\\ohm": "Ω", "\\AA": "Å"}
UNIT_TOKEN = re.compile(  # a name with its power, or a sign
    r"(?P<name>°\s*[CF](?![a-z])|[A-Za-zµμΩÅ%°]+)(?:\s*\^?\s*\{?(?P<power>[+-]?\d+)\}?)?|(?P<sign>[/()*])|\s+"
)


@lru_cache(maxsize=1024)
def unit_named(name):
    """(factor, exponents of the base units) of one unit in letters or words, with its prefix; None when not known."""
    prefixed = [(name[len(p) :], n) for p, n in PREFIXES.items() if (name.lower() if p[1:] else name).startswith(p)]
    for known, exponent in [(name, 0), *prefixed]:
        known = SPELLED.get(known.lower(), SPELLED.get(known.lower().rstrip("s"), known)) if len(known) > 2 else known
        if exponent and known in UNPREFIXED:
            continue
        if known in BASE_UNITS:
            return Fraction(10) ** exponent, [int(known == base) for base in BASE_UNITS]
        if known in UNITS:
            scale, *parts = UNITS[known] if UNITS[known][0][0].isdigit() else (1, *UNITS[known])
            factor, dimension, _ = read_unit(" ".join(parts))
            return factor * Fraction(scale) * Fraction(10) ** exponent, dimension
    return None


def read_unit(text):
    """(factor, exponents, offset) of kg m/s^2, J/(mol K), g mol^{-1}; raises Unreadable."""
    factor, dimension, names, side, inside, position = Fraction(1), [0] * len(BASE_UNITS), [], 1, False, 0
    while position < len(text):
        match = UNIT_TOKEN.match(text, position)
        if not match or match["name"] and not (unit := unit_named(match["name"].replace(" ", ""))):
            raise Unreadable(f"no unit: {text[position:][:40]}")
        position = match.end()
        if match["sign"]:
            side = {"/": -1, ")": 1}.get(match["sign"], side)
            inside = match["sign"] == "(" or inside and match["sign"] != ")"
        elif match["name"]:
            power = side * int(match["power"] or 1)
            if abs(power) > 12:
                raise Unreadable("a power out of bounds")
            factor *= unit[0] ** power
            dimension = [d + e * power for d, e in zip(dimension, unit[1])]
            names.append(match["name"].replace(" ", ""))
            side = side if inside else 1  # a slash is for one unit, or for a bracket
    return factor, dimension, OFFSETS.get(SPELLED.get(names[0], names[0]), 0) if len(names) == 1 else 0


def read_quantity(text):
    """(value, unit or None) of an answer: the number is what stands before the unit. Raises Unreadable."""
    text = join_thousands(clean(text))
    left, equals, right = text.rpartition("=")
    text = strip_edges(right if equals and is_name(strip_edges(left)) else text).replace("≈", "").strip()
    starts = [m.start() for m in re.finditer(r"(?<![A-Za-z\\])[A-Za-z“µμΩÅ°%]|\\(?:mu|Omega|AA)", text)][:20]
    for start in [len(text), *starts]:
        with contextlib.suppress(Unreadable):
            sign = re.sub(r"\\mu\s*“?\s*", "µ", text[start:])
            for written, plain in UNIT_SIGNS.items():
                sign = sign.replace(written, plain)
            unit = read_unit(sign) if start < len(text) else None
            node = expression(text[:start].strip(" *"))
            if symbols(node) <= {"π", "e"}:
                with contextlib.suppress(Inexact):
                    return evaluate(node, {}, exactly), unit
                return Fraction(approximate(node)), unit
    raise Unreadable("no number with a unit")


def check_number(completion, answer):
    """1 when the boxed value is within the tolerance, after its unit is converted."""
    (gold, gold_unit), tolerance = parse_number_answer(answer)
    said = final_answer(completion)
    if said is None:
        return "no answer"
    with contextlib.suppress(Unreadable, OverflowError):
        value, unit = read_quantity(said)
        if gold_unit and unit:
            if gold_unit[1] != unit[1]:
                return 0.0
            value, gold = value * unit[0] + unit[2], gold * gold_unit[0] + gold_unit[2]
        elif unit and not any(unit[1]):  # 50 % of nothing is 0.5
            value *= unit[0]
        return float(abs(value - gold) <= tolerance * abs(gold))
    return 0.0


@answer_reader('a number answer is JSON {"value": "9.81 m/s^2", "rel_tol": 0.01}')
def parse_number_answer(answer):
    """((value, unit), relative tolerance) of JSON {"value": "9.81 m/s^2", "rel_tol": 0.01}; raises TaskError."""
    task = json.loads(answer)
    tolerance = Fraction(task.get("rel_tol", 0.01))
    ensure(0 <= tolerance < 1)
    return read_quantity(str(task["value"])), tolerance


# ---------------------------------------------------------------------------------------------------------------------
# ifeval: the 25 instruction types of Google's IFEval (arXiv 2311.07911), with the verdicts of its reference

# The reference is kept also where it reads strangely (a keyword is found inside other words, a nested bullet counts,
# text with more than the wanted sections passes), so that scores compare with published ones. It is left where it takes
# a keyword for a regular expression (here it is plain text), crashes (deep JSON fails, "zh" is any Chinese), draws a
# random letter (the given character is counted) or says yes because the language detector failed (here that fails).


def compare(count, relation, bound):
    if relation not in ("at least", "less than"):
        raise TaskError(f"unknown relation {relation!r}: IFEval has 'at least' and 'less than'")
    return count >= bound if relation == "at least" else count < bound


def count_text(needle, text):
    return text.lower().count(needle.lower())


# Sentences as NLTK's punkt cuts them, without NLTK: its list of English abbreviations, and for its statistics of words that
# start a sentence its own starters and the commonest words. On 2,402 texts the count differs from punkt's for 14.
ABBREVIATIONS = set(
    "a.a a.c a.d a.g a.h a.m a.m.e a.s a.t adm ala ariz aug ave b.f b.v bros c.i.t c.o.m.b c.v calif chg cie co col colo conn "
    "corp cos ct d.c d.h d.w dec dr e.f e.h e.l e.m f.g f.j feb fla fri ft g.d g.f g.k ga gen h.c h.f h.m i.m.s ill inc j.b "
    "j.c j.j j.k j.p j.r jan jr kan ky l.a l.f l.p lt ltd m.b.a m.d.c m.j maj messrs mg mich minn mr mrs ms n.c n.d n.h n.j "
    "n.m n.v n.y nev nov oct ok okla ore p.a.m p.m pa ph.d prof r.a r.h r.i r.j r.k r.t rep reps s.a s.a.y s.c s.g s.p.a s.s "
    "sen sep sept sr st sw t.j tenn tues u.k u.n u.s u.s.a u.s.s.r va vs vt w.c w.r w.va w.w wash wed wis yr".split()
)
STARTERS = set(
    "according although among both but despite even he however i if in indeed instead it many meanwhile moreover most "
    "nevertheless nonetheless nor sales separately similarly since so some the there these they this though thus under when "
    "while yet a an and are as at by can did do for from has have how is may my no not of on one our she that their then to "
    "was we what where which who why will with you your".split()
)
SENTENCE_END = re.compile(r"[.?!](?=$|[)\";}\]*:@'({\[!?])")  # in a run of text without blanks
CLOSERS = re.compile(r"\s*[\"')\]}]+(?:\s+|(?=--)|$)")  # quotes and brackets that belong to the sentence before


def is_abbreviation(word, after):
    """Whether the point behind a word ends no sentence, given the run of text that follows."""
    word = re.split(r"[()\[\]{}\";!?*]", word)[-1].lower()
    if len(word) == 1 and word.isalpha():  # an initial, but in a list numbered a. b. i.
        return word not in "abix" or after[:1].islower()
    if word.endswith(".") or {word, word.split("-")[-1]} & ABBREVIATIONS:
        return not (after[:1].isupper() and re.split(r"\W", after.lower())[0] in STARTERS)
    return re.fullmatch(r"-?[\d.,-]+", word) is not None and after[:1].islower()  # 1. first item


def sentences(text):
    count, start, runs = 0, 0, [*re.finditer(r"\S+", text)]
    for run, following in zip(runs, [m[0] for m in runs[1:]] + [""]):
        found = [m.start() for m in SENTENCE_END.finditer(run[0]) if following or m.end() < len(run[0])][-1:]
        for end in found:
            after = following if end == len(run[0]) - 1 else ""
            if run[0][end] != "." or not is_abbreviation(run[0][:end], after):
                end += run.start() + 1
                count += bool(text[start:end].strip())
                closers = CLOSERS.match(text, end)
                start = closers.end() if closers else end
    return count + bool(text[start:].strip())


def capital_words(text):
    """Words in capitals as NLTK's word_tokenize cuts them, nearly: CAN'T is two, WELL-KNOWN and STOP/GO are one."""
    text = re.sub(r"(?<=[^' ])('s|'m|'d|'ll|'re|'ve|n't)\b", r" \1", text, flags=re.IGNORECASE)
    return sum(word.isupper() for word in re.sub(r"[^\w\s'./-]|--+", " ", text).split())


def bullets(text):
    """Lines that start with - or with one *; as in the reference a lone * takes the next line with it."""
    text = re.sub(r"^[^\S\n]+", "", text, flags=re.MULTILINE)
    return len(re.findall(r"^\*[^*].*$|^-.*$", text, re.MULTILINE))


def filled_parts(text, divider):
    """The parts between dividers; none at all when one in the middle is blank."""
    parts = [part.strip() for part in re.split(divider, text)]
    return [part for part in parts if part] if all(parts[1:-1]) else []


def paragraph_start(text, number):
    """How many paragraphs there are and the first word of one; the reference counts filled ones, but numbers all."""
    parts = [part.strip() for part in text.split("\n\n")]
    count = sum(map(bool, parts))
    if number > count or not parts[number - 1]:
        return None
    word = parts[number - 1].split()[0].lstrip("'").lstrip('"')
    return count, re.split(r"[.,?!'\"]", word)[0].lower()


def highlights(text):
    return sum(
        bool(part[size:-size].strip(" *" if size == 1 else None))
        for size, pattern in ((1, r"\*[^\n*]*\*"), (2, r"\*\*[^\n*]*\*\*"))
        for part in re.findall(pattern, text)
    )


def is_json(text):
    text = text.strip()
    for tag in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(tag)
    try:
        json.loads(text.removesuffix("```").strip())
        return True
    except (ValueError, RecursionError):
        return False


def is_title(line):
    """<<title>>, something between. By str.find, as regular expressions are quadratic in unclosed brackets."""
    start, end = line.find("<<"), line.rfind(">>")
    return 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip() != ""


def in_language(text, wanted):
    """Whether langdetect sees the language; seeded, since unseeded it changes its mind on short texts."""
    if not IN_WORKER:
        raise NeedsWorker
    from langdetect import DetectorFactory, detect
    from langdetect.lang_detect_exception import LangDetectException

    DetectorFactory.seed = 0
    with contextlib.suppress(LangDetectException):  # no letters
        return detect(text) in (wanted, *(("zh-cn", "zh-tw") if wanted == "zh" else ()))
    return False


CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}

IFEVAL = {  # instruction: a function of the text and of its arguments, by name
    "keywords:existence": lambda t, keywords: all(count_text(k, t) for k in keywords),
    "keywords:frequency": lambda t, keyword, frequency, relation: compare(count_text(keyword, t), relation, frequency),
    # a word has no letter, digit or underscore beside an edge that is itself one
    "keywords:forbidden_words": lambda t, forbidden_words: not any(re.search(rf"\b{re.escape(w)}\b", t, re.I) for w in forbidden_words),
    "keywords:letter_frequency": lambda t, letter, let_frequency, let_relation: compare(count_text(letter, t), let_relation, let_frequency),
    "language:response_language": lambda t, language: in_language(t, language),
    "length_constraints:number_sentences": lambda t, num_sentences, relation: compare(sentences(t), relation, num_sentences),
    "length_constraints:number_paragraphs": lambda t, num_paragraphs: len(filled_parts(t, r"\s?\*\*\*\s?")) == num_paragraphs,
    "length_constraints:number_words": lambda t, num_words, relation: compare(len(re.findall(r"\w+", t)), relation, num_words),
    "length_constraints:nth_paragraph_first_word": lambda t, num_paragraphs, nth_paragraph, first_word: (
        paragraph_start(t, nth_paragraph) == (num_paragraphs, first_word.lower())
    ),
    "detectable_content:number_placeholders": lambda t, num_placeholders: (
        sum("[" in part for line in t.split("\n") for part in line.split("]")[:-1]) >= num_placeholders
    ),
    "detectable_content:postscript": lambda t, postscript_marker: (
        re.search(POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker.lower())), t.lower()) is not None
    ),
    "detectable_format:number_bullet_lists": lambda t, num_bullets: bullets(t) == num_bullets,
    "detectable_format:constrained_response": lambda t: any(option in t for option in CONSTRAINED),
    "detectable_format:number_highlighted_sections": lambda t, num_highlights: highlights(t) >= num_highlights,
    "detectable_format:multiple_sections": lambda t, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", t)) >= num_sections
    ),
    "detectable_format:json_format": is_json,
    "detectable_format:title": lambda t: any(map(is_title, t.split("\n"))),
    "combination:two_responses": lambda t: len(parts := filled_parts(t, r"\*{6}")) == 2 and parts[0] != parts[1],
    "combination:repeat_prompt": lambda t, prompt_to_repeat: t.strip().lower().startswith(prompt_to_repeat.strip().lower()),
    "startend:end_checker": lambda t, end_phrase: t.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": lambda t: len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"',
    "change_case:capital_word_frequency": lambda t, capital_frequency, capital_relation: (
        compare(capital_words(t), capital_relation, capital_frequency)
    ),
    "change_case:english_capital": lambda t: t.isupper() and in_language(t, "en"),
    "change_case:english_lowercase": lambda t: t.islower() and in_language(t, "en"),
    "punctuation:no_comma": lambda t: "," not in t,
}  # fmt: skip


def check_ifeval(completion, answer):
    """All-or-nothing over the instructions of a prompt; with "partial": true in the answer, the share that is met."""
    instructions, partial = parse_ifeval_answer(answer)
    text = strip_thinking(completion)
    if not text.strip():
        return "no answer"
    met = [IFEVAL[name](text, **kwargs) for name, kwargs in instructions]
    return sum(met) / len(met) if partial else float(all(met))


@answer_reader('an ifeval answer is JSON {"instruction_id_list": [...], "kwargs": [{...}, ...]}')
def parse_ifeval_answer(answer):
    """([(id, kwargs), ...], partial) of an answer; raises TaskError for what is not known: a type that is passed over in
    silence would pay every answer."""
    task = json.loads(answer)
    ids, kwargs = task["instruction_id_list"], task.get("kwargs") or [{}] * len(task["instruction_id_list"])
    pairs = [(name, {k: v for k, v in (given or {}).items() if v is not None}) for name, given in zip(ids, kwargs)]
    ensure(pairs and len(pairs) == len(ids))
    for name, given in pairs:
        if name not in IFEVAL:
            raise TaskError(f"unknown instruction {name!r}: only the 25 of Google's IFEval are checked (not IFBench's)")
        if ("language" in name or name.startswith("change_case:english")) and not find_spec("langdetect"):
            raise TaskError("this task needs language detection: pip install langdetect")
        with contextlib.suppress(NeedsWorker):
            IFEVAL[name]("", **given)  # a trial shows arguments that are missing, unknown or of a wrong type
    return pairs, bool(task.get("partial"))


# ---------------------------------------------------------------------------------------------------------------------
# tool: function calls, judged as the AST check of the Berkeley Function-Calling Leaderboard (BFCL) judges them

# A call is right when its name, its set of arguments, their types and their values are: an int stands for a float, never
# the other way round, and no bool for an int; texts are compared without case, blanks and ,./-_*^. Order of calls is free,
# their number is not. In an answer "accept" lists more values for an argument and "optional" names those that may be absent;
# BFCL's own form {"name": {"argument": [value, value, ""]}} is read too, where "" means optional.

CALL_BLOCK = re.compile(  # <tool_call>...</tool_call>, or a fence
    r"<(tool_call|function_call)>(.*?)(?:</\1>|\Z)|^[ \t]*```[\w]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)  # fmt: skip


def check_tool(completion, answer):
    """1 when the calls in the completion are those of the answer."""
    wanted = parse_tool_answer(answer)
    text = strip_thinking(completion).strip()
    blocks = [(m[2] or m[3] or "").strip() for m in CALL_BLOCK.finditer(text)]
    try:
        said = [call for block in blocks or [text.removeprefix("[TOOL_CALLS]").strip()] for call in read_calls(block)]
    except (*MALFORMED, MemoryError):
        return "no answer"
    if not said:
        return "no answer"
    return float(len(said) == len(wanted) and all_matched(wanted, said, same_call))


def read_calls(text):
    """(name, arguments) of the calls in a block: JSON, or Python call syntax, which is parsed and not run."""
    try:
        data = json.loads(text)
    except ValueError:
        return python_calls(text)
    data = data["tool_calls"] if isinstance(data, dict) and "tool_calls" in data else data
    calls = []
    for call in data if isinstance(data, list) else [data]:
        call = call["function"] if isinstance(call.get("function"), dict) else call
        key = next((key for key in ("arguments", "parameters", "args") if key in call), "input")
        arguments = json.loads(call[key]) if isinstance(call[key], str) else call[key]
        calls.append((str(call["name"]), dict(arguments)))
    return calls


def python_calls(text):
    if not IN_WORKER:  # a hostile expression can exhaust the stack of Python's parser
        raise NeedsWorker
    nodes = [node.value for node in ast.parse(text.strip()).body if isinstance(node, ast.Expr)][:50]
    nodes = [part for node in nodes for part in (node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node])]
    for node in nodes:
        names = [keyword.arg for keyword in node.keywords]
        ensure(not node.args and None not in names and len({*names}) == len(names))  # arguments need names
    return [(ast.unparse(n.func), {k.arg: ast.literal_eval(k.value) for k in n.keywords}) for n in nodes]


def same_call(wanted, said):
    (name, arguments), accept, optional = said, wanted["accept"], wanted["optional"]
    if name != wanted["name"] or not accept.keys() - optional <= arguments.keys() <= accept.keys():
        return False
    return all(any(same_argument(value, good) for good in accept[key]) for key, value in arguments.items())


def same_argument(said, good):
    if isinstance(good, str) and isinstance(said, str):
        a, b = (re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"') for text in (said, good))
        return said == good or a == b != ""
    if isinstance(good, list):
        return isinstance(said, (list, tuple)) and len(said) == len(good) and all(map(same_argument, said, good))
    if isinstance(good, dict):
        return (
            isinstance(said, dict) and said.keys() == good.keys() and all(same_argument(said[k], good[k]) for k in good)
        )
    return (type(said) is type(good) or (type(said), type(good)) == (int, float)) and said == good


@answer_reader('a tool answer is JSON {"calls": [{"name": "f", "arguments": {"x": 1}}, ...]}')
def parse_tool_answer(answer):
    """The calls of an answer as {"name", "accept": {argument: [values]}, "optional"}; raises TaskError."""
    calls = []
    for call in json.loads(answer)["calls"]:
        if "name" in call:
            name, optional = call["name"], set(call.get("optional", []))
            accept = {key: [value] for key, value in call["arguments"].items()}
            accept |= {key: [*accept.get(key, []), *values] for key, values in call.get("accept", {}).items()}
        else:  # BFCL's form
            ((name, accept),) = call.items()
            optional = {key for key, values in accept.items() if "" in list(values)}
        ensure(isinstance(name, str) and optional <= accept.keys())
        calls.append({"name": name, "accept": accept, "optional": optional})
    ensure(calls)
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# code: the program runs in a sandbox, the expected values stay outside

FENCE = re.compile(r"^[ \t>]*(?P<ticks>`{3,}|~{3,})[ \t]*(?P<tag>[\w+#.-]*)[^\n]*$", re.MULTILINE)
TAGS = {"<answer>": "</answer>", "[BEGIN]": "[DONE]"}  # around code without a fence
PYTHON_TAG = re.compile(r"i?py(?:thon)?[\d.]*")
MAX_CODE = 1_000_000  # characters


@lru_cache(maxsize=1024)
def extract_code(completion, names=()):
    """The last Python block after the thinking that defines one of the names, else the last non-empty one, else the last
    block without a language; None when there is none."""
    text = strip_thinking(completion.replace("\r\n", "\n").lstrip("\ufeff"))
    python, plain, position = [], [], 0
    fences = list(FENCE.finditer(text))
    for i, fence in enumerate(fences):
        if fence.start() < position:
            continue
        ticks, tag = fence["ticks"], fence["tag"].lower()
        close = next((f for f in fences[i + 1 : i + 50] if f["ticks"].startswith(ticks) and not f["tag"]), None)
        body = text[fence.end() + 1 : close.start() if close else len(text)]
        position = close.end() if close else len(text)
        if not close and body.rstrip().endswith(ticks):  # print(a + b)```
            body = body.rstrip()[: -len(ticks)]
        if fence[0].lstrip(" ").startswith(">"):  # a quotation
            body = re.sub(r"^[ ]*>[ ]?", "", body, flags=re.MULTILINE)
        if not body.strip() and not close and not tag and i == 0:  # the prompt had opened the block
            plain.append(text[: fence.start()])
        elif body.strip() and (not tag or PYTHON_TAG.fullmatch(tag)):
            (python if tag else plain).append(textwrap.dedent(body) if body[:1] in " \t" else body)
    tagged = [text.rpartition(tag)[2].partition(TAGS[tag])[0].lstrip("\n") for tag in TAGS if tag in text]
    blocks = python or plain or (tagged if not fences else [])
    wanted = re.compile(rf"^[ \t]*(?:(?:async )?def|class) +(?:{'|'.join(map(re.escape, names))})\b", re.MULTILINE)
    defining = [block for block in blocks if names and wanted.search(block)]
    return (defining or blocks)[-1].lstrip("\ufeff") if blocks else None


def check_code(completion, answer, worker, timeout):
    """Score of a program, or why there is none. `worker` runs it; what it returns or prints is compared here."""
    task = parse_code_answer(answer)
    job = {"code": extract_code(completion, task["wanted"]), "seconds": timeout}
    if not job["code"] or len(job["code"]) > MAX_CODE:
        return "no answer"
    if task["type"] == "stdin":
        for text, expected in task["cases"]:
            reply = worker.call(job | {"do": "program", "stdin": text}, timeout)
            if reply.get("exit") != 0 or not same_output(reply["stdout"], expected):
                return "timeout" if "timeout" in reply else 0.0
        return 1.0
    job["imports"] = task["imports"]
    if task["type"] == "function":
        reply = worker.call(job | {"do": "function", "calls": task["calls"]}, timeout)
        with contextlib.suppress(*MALFORMED, LookupError, ArithmeticError):  # the program may have written anything
            if "timeout" not in reply:
                values = decode(json.loads(reply["values"]))
                return float(len(values) == len(task["calls"]) and all(map(task["same"], values, task["expected"])))
    else:
        tests = {"setup": task["setup"], "asserts": task["asserts"]}
        reply = worker.call(job | {"do": "tests", "names": task["wanted"]}, timeout, tests)
    return "timeout" if "timeout" in reply else float(reply.get("passed", False))


@answer_reader('a code answer is JSON {"type": "stdin" | "function" | "assert", ...} with "cases" or "asserts"')
def parse_code_answer(answer):
    """The answer of a code task as a dictionary, checked; raises TaskError."""
    task = {"imports": "", "wanted": ()} | json.loads(answer)
    if task["type"] == "stdin":
        ensure(task["cases"] and all(isinstance(text, str) for case in task["cases"] for text in case))
        ensure(all(len(case) == 2 for case in task["cases"]))
    elif task["type"] == "function":
        ensure(task["cases"] and all(isinstance(arguments, list) for arguments, _ in task["cases"]))
        target = ".".join(filter(None, (task.get("cls"), task["name"])))
        task["calls"] = [[target, encode(arguments)] for arguments, _ in task["cases"]]
        task |= {"expected": [expected for _, expected in task["cases"]], "same": same_value}
        task["wanted"] = (target.split(".")[0],)
    elif task["type"] == "assert":
        ensure(task["asserts"] and all(isinstance(line, str) for line in task["asserts"]))
        parse_asserts(task)
    else:
        raise KeyError(task["type"])
    return task


BUILTINS = set(dir(builtins))


def parse_asserts(task):
    """Reads the tests. Where each is `assert f(literals) == literal`, they become calls and values, compared here;
    else they run in a child of their own, with a stub for each name that they use and do not define."""
    tree = ast.parse(task.setdefault("setup", "") + "\n" + "\n".join(task["asserts"]))
    nodes = list(ast.walk(tree))
    imports = [
        n for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)) and getattr(n, "module", "") != "__future__"
    ]
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler))}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    bound |= {(a.asname or a.name).split(".")[0] for n in imports for a in n.names}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    names = (
        used - bound - BUILTINS | {*filter(None, [task.get("entry_point")])} or called - bound
    )  # it may be called sum
    task |= {"imports": "\n".join(map(ast.unparse, imports)), "wanted": tuple(sorted(names))}
    calls, expected = [], []
    for node in tree.body:
        match node:
            case ast.Assert(
                test=ast.Compare(left=ast.Call(func=ast.Name(id=name), args=args, keywords=[]), ops=[ast.Eq()])
            ):
                try:
                    calls.append([name, encode([ast.literal_eval(a) for a in args])])
                    expected.append(ast.literal_eval(node.test.comparators[0]))
                except (ValueError, TypeError):
                    return
            case ast.Import() | ast.ImportFrom():
                pass
            case _:
                return
    if {name for name, _ in calls} <= names:
        task |= {
            "type": "function",
            "calls": calls,
            "expected": expected,
            "same": lambda value, right: bool(value == right),
        }


DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?")


def same_output(printed, expected):
    """Line by line, then token by token: text and integers exactly, 1e-6 where the expected token has a point.

    >>> same_output("3\\r\\n", "3\\n"), same_output("0.30000000000000004", "0.3"), same_output("3.0", "3")
    (True, True, False)
    """
    lines, wanted = ([line.split() for line in text.rstrip().split("\n")] for text in (printed, expected))
    if list(map(len, lines)) != list(map(len, wanted)):
        return False
    return all(same_token(*pair) for line, want in zip(lines, wanted) for pair in zip(line, want))


def same_token(token, target):
    if token == target or "." not in target:
        return token == target
    readable = all(DECIMAL.fullmatch(text) and len(text) < 400 for text in (token, target))
    return bool(readable) and math.isclose(float(token), float(target), rel_tol=1e-6, abs_tol=1e-6)


def same_value(value, expected):
    """Equal as Python's == has it, except that a tuple is no list and floats have 1e-6; `expected` is from JSON."""
    if isinstance(expected, list):
        return type(value) is list and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        if type(value) is not dict or len(value) != len(expected):
            return False
        keys = {k if isinstance(k, str) else json.dumps(k): v for k, v in value.items() if not isinstance(k, tuple)}
        return keys.keys() == expected.keys() and all(same_value(keys[k], v) for k, v in expected.items())
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        return type(value) is type(expected) and value == expected
    if isinstance(expected, float):
        return type(value) in (int, float) and (value == expected or math.isclose(value, expected, rel_tol=1e-6))
    return type(value) in (int, float, complex, bool) and value == expected


# ---------------------------------------------------------------------------------------------------------------------
# The worker process: `python -I verifiers.py --worker`. It runs programs in children of its own, which it forks warm.

# The child gets inputs only. Its values come back through a file in memory, as plain types with their names, so that an
# object that is equal to everything arrives as what it is: nothing. Nothing in there is secret, so nothing can be stolen;
# a forged reply has to hold the right values, and then it is no forgery. Tests written as code (`assert f(1) == 2`, a
# HumanEval check) run in a second child that never loads the solution: the names of the solution are stubs there, which
# send arguments to the first child and get plain values back.

MAX_OUTPUT = 4 << 20  # bytes of stdout, of a result, of a file
LIMITS = {"AS": 1 << 30, "FSIZE": MAX_OUTPUT, "NOFILE": 64, "NPROC": 64, "CORE": 0}  # memory, files, processes
MAX_DEPTH = 60  # of a returned value
SCRATCH = "/scratch"  # the folder of a program, where the root is ours
WARM = (
    "collections heapq bisect itertools functools math string re typing copy operator".split()
)  # what programs import
TYPING = {}  # names that LeetCode's solutions use without an import, filled in the worker
TYPES = {name: value for name, value in vars(builtins).items() if type(value) is type}
SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
CODECS = {  # name in a message: (type, to JSON, from JSON)
    "int": (int, hex, lambda body: int(body, 16)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, lambda v: [v.real, v.imag], lambda body: complex(*body)),
    "fraction": (Fraction, str, Fraction),
    "type": (type, lambda v: TYPES.get(v.__name__) is v and v.__name__, lambda body: TYPES[body]),
}


def encode(value, keep=None, depth=0):
    """A value as JSON with its type; what is not plain becomes a handle (when `keep` can hold it) or {"?": type}."""
    kind, again = type(value), lambda v: encode(v, keep, depth + 1)
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if kind in (bool, str, float, type(None)) or kind is int and abs(value) < 1 << 60:
        return value
    if kind is list:
        return [again(v) for v in value]
    if SEQUENCES.get(kind.__name__) is kind:
        return {kind.__name__: [again(v) for v in value]}
    if isinstance(value, dict):  # also a Counter
        return {"dict": [[again(k), again(v)] for k, v in dict(value).items()]}
    for name, (known, to_json, _) in CODECS.items():
        if kind is known:
            return {name: to_json(value)}
    if (
        kind.__module__ == "numpy"
        and getattr(value, "shape", None) == ()
        and type(value.item()) in (bool, int, float, str)
    ):
        return value.item()
    return {"handle": keep(value)} if keep else {"?": kind.__name__}


def decode(data, handle=None):
    """Back from `encode`; `handle(i)` stands for what could not be sent. Anything may be raised by a forged message."""
    if isinstance(data, list):
        return [decode(v, handle) for v in data]
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(v, handle) for v in body)
    if kind == "dict":
        return {decode(k, handle): decode(v, handle) for k, v in body}
    if kind in CODECS:
        return CODECS[kind][2](body)
    return handle(body) if handle and kind == "handle" else NOTHING


NOTHING = object()  # stands for a value that could not be sent: equal to nothing else


def send(fd, message):
    """A message is eight bytes of length and JSON."""
    data = json.dumps(message).encode()
    data = memoryview(len(data).to_bytes(8, "little") + data)
    while data:
        data = data[os.write(fd, data) :]


def receive(fd, deadline=None):
    """The next message; raises EOFError, or TimeoutError after the deadline (of time.monotonic)."""
    data, size = bytearray(), 8
    while len(data) < size:
        if deadline and not select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise TimeoutError
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
        if size == len(data) == 8:
            size += int.from_bytes(data, "little")
    return json.loads(data[8:])


def worker_main(isolation, user):
    """Serves jobs from standard input until it closes, which it does when the caller ends, however it ends."""
    global IN_WORKER
    IN_WORKER = True
    jobs, replies, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sandbox = Sandbox(isolation == "namespaces", user == "0", jobs, replies)
    for name in WARM:
        __import__(name)
    import typing

    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", HOME=SCRATCH, TMPDIR=SCRATCH, LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1")
    TYPING.update({n: getattr(typing, n) for n in "Any Callable Dict List Optional Set Tuple Union".split()})
    send(replies, "ready")
    gc.freeze()  # fewer pages to copy after a fork
    while True:
        try:
            job = receive(jobs)
        except EOFError:
            os._exit(0)
        send(replies, JOBS[job.pop("do")](sandbox, **job))


class Sandbox:
    """Where children run: with a root folder of our own in Linux namespaces, else with limits of the process only."""

    def __init__(self, isolated, root, jobs, replies):
        self.isolated, self.root, self.linux = isolated, root, sys.platform == "linux"
        self.jobs, self.private, self.children = jobs, {jobs, replies}, []
        self.uid = 64000 + os.getpid() % 1000  # for the children of root: its own count of processes, no rights
        self.libc = ctypes.CDLL(None, use_errno=True)
        if isolated:
            self.build_root()
        elif self.linux:
            self.libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of a child become ours, and die with it

    def ok(self, result, what):
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    def mount(self, source, target, kind=None, flags=2, data=None):  # MS_NOSUID
        source, target, kind, data = (None if x is None else os.fsencode(x) for x in (source, target, kind, data))
        self.ok(self.libc.mount(source, target, kind, flags, data), f"mount {os.fsdecode(target)}")

    def build_root(self):
        """A root folder of bind mounts: system libraries, the interpreter, /dev/null; the old root is let go."""
        new = "/sys"  # any folder that Python does not live in
        self.mount("tmpfs", new, "tmpfs", data="size=1m,mode=755")
        wanted = ["/usr", "/lib", "/lib64", "/bin", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"]
        wanted += ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", os.path.dirname(os.__file__)]
        wanted += [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
        bound = []
        for path in sorted({*filter(os.path.exists, wanted)}, key=len):
            if os.path.islink(path) and path.count("/") == 1:  # /bin -> usr/bin
                os.symlink(os.readlink(path), new + path)
            elif not any(path.startswith(b + "/") for b in bound):
                os.makedirs(new + (path if os.path.isdir(path) else os.path.dirname(path)), exist_ok=True)
                if not os.path.isdir(path):
                    Path(new + path).touch()
                self.mount(path, new + path, flags=0x5000)  # MS_BIND | MS_REC
                bound.append(path)
        for name in ("/proc", "/dev/shm", "/old", SCRATCH):
            os.makedirs(new + name, exist_ok=True)
        if not os.path.exists(f"{new}/tmp"):
            os.symlink(SCRATCH, f"{new}/tmp")
        for name, target in (("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"), ("fd", "")):
            os.symlink("/proc/self/fd" + target, f"{new}/dev/{name}")
        self.mount("proc", f"{new}/proc", "proc")
        os.chdir(new)
        self.ok(self.libc.pivot_root(b".", b"old"), "pivot_root")
        os.chdir("/")
        self.ok(self.libc.umount2(b"/old", 2), "umount /old")  # MNT_DETACH
        read_only = (ctypes.c_uint64 * 4)(1)  # by mount_setattr for all mounts below; its number is 442 everywhere
        self.ok(self.libc.syscall(442, -100, b"/", 0x8000, read_only, ctypes.sizeof(read_only)), "mount_setattr")
        self.fresh_folders()

    def fresh_folders(self):
        """New file systems for scratch: what a program left is gone, however it is nested or locked."""
        for path, size in ((SCRATCH, "size=64m,nr_inodes=4k"), ("/dev/shm", "size=16m,nr_inodes=1k")):
            self.libc.umount2(path.encode(), 2)
            self.mount("tmpfs", path, "tmpfs", data=size + ",mode=1777")

    def spawn(self, body, seconds, keep=()):
        """Forks a child that runs body() with limits in an empty folder; returns its process id."""
        if not self.children:
            self.folder = SCRATCH if self.isolated else temporary_path()
            self.isolated or os.mkdir(self.folder, 0o700)
        pid = os.fork()
        if pid:
            self.children.append(pid)
            return pid
        try:
            for fd in self.private - {*keep}:
                os.close(fd)
            self.confine(seconds)
            body()
        finally:
            os._exit(70)

    def confine(self, seconds):
        """What a child does before it runs the code of others."""
        os.setsid()
        os.chdir(self.folder)
        os.environ.update(HOME=self.folder, TMPDIR=self.folder)
        for name, value in [*LIMITS.items(), ("CPU", math.ceil(seconds) + 1)]:
            with contextlib.suppress(ValueError, OSError, AttributeError):  # macOS refuses some
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        if self.root:
            if not self.isolated:
                os.chown(".", self.uid, self.uid)
            os.setgroups([]), os.setgid(self.uid), os.setuid(self.uid)
            if not os.access(os.__file__, os.R_OK):  # Python in /root, and no mount to reach it by
                raise PermissionError(f"programs run as user {self.uid}, who cannot read {os.__file__}")
        elif self.isolated:
            version, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            self.ok(self.libc.capset(version, none), "capset")  # no rights in the namespaces either
        if self.linux:
            self.libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS

    def wait(self, pid, seconds):
        """Exit code of a child, or None when its time was up; all children and what descends from them end here."""
        deadline, code = time.monotonic() + seconds, None
        watch = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        while code is None and (left := deadline - time.monotonic()) > 0:
            select.select([watch], [], [], left) if watch else time.sleep(0.002)
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
        if watch:
            os.close(watch)
        self.end_children()
        return code

    def end_children(self):
        orphans = Path(f"/proc/self/task/{os.getpid()}/children")  # on Linux: with those that had left the group
        doomed = [-1] if self.isolated else [*(-pid for pid in self.children), *self.children]
        while True:
            for pid in doomed:  # -1 is every other process here, -pid a process group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
            if not self.isolated:
                doomed = map(int, orphans.read_text().split()) if orphans.exists() else []
        self.children = []
        if not self.isolated:
            import shutil

            for path, names, _ in os.walk(self.folder):
                for name in names:  # of folders, which may be locked
                    os.path.islink(os.path.join(path, name)) or os.chmod(os.path.join(path, name), 0o700)
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            os.unlink(f"{SCRATCH}/solution.py")
        if any(os.listdir(path) or os.stat(path).st_mode != 0o41777 for path in (SCRATCH, "/dev/shm")):
            self.fresh_folders()


def temporary_path():
    return f"/tmp/verifiers-{os.getpid()}-{time.monotonic_ns()}"


def memory_file(content=b""):
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("file")
    else:
        fd = os.open(path := temporary_path(), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read_back(fd):
    """The bytes of a memory file, which is closed."""
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read(MAX_OUTPUT)


def load_solution(code, name, extra=""):
    """Runs the code as a real module, so that dataclasses, pickle, globals and __main__ work; returns its names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    sys.path.insert(0, os.getcwd())
    module.__dict__.update(TYPING)
    if name == "__main__":
        module.__file__ = os.path.abspath("solution.py")
        Path("solution.py").write_text(code, encoding="utf-8", errors="replace")
    with contextlib.suppress(ImportError):
        exec(compile(extra, "setup", "exec", dont_inherit=True), module.__dict__)
    exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def run_program(sandbox, code, stdin, seconds):
    source, sink = memory_file(stdin.encode("utf-8", "surrogatepass")), memory_file()

    def body():
        os.dup2(source, 0)
        os.dup2(sink, 1)
        os.close(source), os.close(sink)
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
        atexit._clear()
        status = 0
        try:
            load_solution(code, "__main__")
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:  # noqa: B036  as the interpreter does
            status = 1
        if "threading" in sys.modules:  # it also waits for threads, runs exit handlers and flushes
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()
        os._exit(status & 255)

    status = sandbox.wait(sandbox.spawn(body, seconds), seconds)
    os.close(source)
    output = read_back(sink).decode("utf-8", "replace")
    return {"timeout": True} if status is None else {"exit": status, "stdout": output}


def run_function(sandbox, code, calls, imports, seconds):
    result = memory_file()

    def body():
        dumps, write = json.dumps, os.write  # as they are before the program can replace them
        names, values = load_solution(code, "solution", imports), []
        for target, arguments in calls:  # f, or a method of a new Solution.f
            cls, _, name = target.rpartition(".")
            function = getattr(names[cls](), name) if cls else names[name]
            values.append(encode(function(*decode(arguments))))
        write(result, dumps(values).encode())
        os._exit(0)

    status = sandbox.wait(sandbox.spawn(body, seconds), seconds)
    output = read_back(result).decode("utf-8", "replace")  # read by the caller, with care
    return {"timeout": True} if status is None else {"values": output if status == 0 else "[]"}


class Remote:
    """In the child with the tests: something that lives in the child with the solution. Equal to nothing, and false."""

    def __init__(self, target, ask):
        self.__dict__.update(target=target, ask=ask)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.ask("getattr", self.target, (name,))

    __iter__ = lambda self: iter(self.ask("list", self.target))  # noqa: E731
    __bool__ = lambda self: False  # noqa: E731


for do in ("call", "setattr", "getitem", "len", "str"):
    setattr(Remote, f"__{do}__", lambda self, *args, do=do, **kwargs: self.ask(do, self.target, args, kwargs))
REMOTE = {"getattr": getattr, "setattr": setattr, "getitem": operator.getitem, "list": list, "len": len, "str": str}
REMOTE["call"] = lambda function, *args, **kwargs: function(*args, **kwargs)


def solver(names, connection):
    """Answers the calls of the tests until the connection closes. `names`: the namespace of the solution."""
    kept = []
    keep = lambda value: kept.append(value) or len(kept) - 1  # noqa: E731
    while True:
        message = receive(connection)
        try:
            arguments, keywords = (decode(message[key], kept.__getitem__) for key in ("args", "kwargs"))
            target = message["target"]
            target = kept[target] if isinstance(target, int) else names[target]
            value = encode(REMOTE[message["do"]](target, *arguments, **keywords), keep)
            after = encode(list(arguments), lambda value: None)  # a function may sort its list in place
            reply = {"value": value, "args": after if after != message["args"] else None}
        except Exception as error:  # the tests may expect it
            reply = {"error": next(c for c in type(error).__mro__ if c.__module__ == "builtins").__name__}
        send(connection, reply)


def judge(tests, names, connection):
    """Runs the tests with a stub for each name of the solution; raises what they raise."""

    def ask(do, target, args=(), kwargs=None):
        number = lambda value: value.target if type(value) is Remote else None  # noqa: E731
        sent = {"args": encode(list(args), number), "kwargs": encode(kwargs or {}, number)}
        send(connection, sent | {"do": do, "target": target})
        reply = receive(connection)
        if "error" in reply:
            raise getattr(builtins, reply["error"], RuntimeError)
        for old, new in zip(args, decode(reply["args"] or [])):
            if type(old) is list:
                old[:] = new
            elif type(old) in (dict, set):
                old.clear()
                old.update(new)
        return decode(reply["value"], lambda number: Remote(number, ask))

    module = sys.modules["tests"] = types.ModuleType("tests")
    for text in (tests["setup"], *tests["asserts"]):
        module.__dict__.update({name: Remote(name, ask) for name in names})  # the setup must not replace the solution
        exec(compile(text, "tests", "exec", dont_inherit=True), module.__dict__)


def run_tests(sandbox, code, names, imports, seconds):
    """The solution in one child, the tests in another. This process never holds the tests: its next children are forks
    of it, and the memory of a child is an open book to the code in it."""
    ours, theirs = socket.socketpair()

    def solution_body():
        ours.close()
        solver(load_solution(code, "solution", imports), theirs.fileno())

    def tests_body():
        if sandbox.linux:
            sandbox.libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: its memory is closed to the other child
        theirs.close()
        tests = receive(sandbox.jobs)
        os.close(sandbox.jobs)
        os.write(result, b"read ")
        judge(tests, names, ours.fileno())
        os.write(result, b"pass")
        os._exit(0)

    sandbox.spawn(solution_body, seconds)
    result = memory_file()  # after the fork: the solution must not be able to write to it
    tests_pid = sandbox.spawn(tests_body, seconds, keep={sandbox.jobs})
    ours.close(), theirs.close()
    status = sandbox.wait(tests_pid, seconds)
    output = read_back(result)
    if not output.startswith(b"read "):
        os._exit(1)  # the tests may still be in the pipe: start afresh
    return {"timeout": True} if status is None else {"passed": status == 0 and output == b"read pass"}


JOBS = {"program": run_program, "function": run_function, "tests": run_tests}
JOBS["score"] = lambda sandbox, **row: {"outcome": check((row["verifier"], row["completion"], row["answer"]))}


# ---------------------------------------------------------------------------------------------------------------------
# The pool: worker processes of the caller, kept between calls

TIMEOUT = 6.0  # seconds of wall clock for one run of a program, or one check


class WorkerFailed(Exception):
    """The worker died or did not answer; it is replaced, and its row scores 0."""


class Worker:
    """One worker process and the pipe to it. A new Python, not a fork: the caller may hold CUDA and threads."""

    command = [sys.executable, "-I", "-X", "utf8", "-X", "int_max_str_digits=0", os.path.abspath(__file__), "--worker"]
    # The ways to start one, best first; one that does not work is not tried again. unshare makes the worker the first
    # process of namespaces of its own, the last one to die there.
    isolations = {
        "namespaces": "unshare --mount --pid --net --ipc --fork --kill-child".split(),
        "limits only, with the network and the files of this user": [],
    }
    logged = False

    def __init__(self):
        if os.name != "posix":
            raise TaskError("this check needs a worker process and runs on Linux and macOS; on Windows use WSL")
        import shutil
        import subprocess

        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        streams["start_new_session"] = True  # Ctrl-C is the caller's, who may finish what it does
        environment = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"}
        user = str(os.geteuid())
        for name, prefix in [*self.isolations.items()]:
            if prefix and not shutil.which(prefix[0]):
                continue
            command = [*prefix, *["--map-root-user"] * (prefix != [] and user != "0"), *self.command, name, user]
            streams["stderr"] = subprocess.DEVNULL if prefix else None
            self.isolation, self.process = name, subprocess.Popen(command, env=environment, **streams)
            with contextlib.suppress(WorkerFailed):
                self.call(None, 60.0)
                break
            self.stop()
            Worker.isolations.pop(name, None)  # another thread may have found out, too
        else:
            raise TaskError("no worker process could be started")
        if not Worker.logged:
            import logging

            Worker.logged, level = True, logging.INFO if self.isolation == "namespaces" else logging.WARNING
            logging.getLogger("verifiers").log(level, "programs of the model run in children with %s", self.isolation)

    def call(self, job, seconds, tests=None):
        """The worker's reply to a job; raises WorkerFailed when there is none in time."""
        try:
            for message in filter(None, (job, tests)):
                send(self.process.stdin.fileno(), message)
            return receive(self.process.stdout.fileno(), time.monotonic() + seconds + 5.0)
        except TimeoutError:
            raise WorkerFailed("timeout") from None
        except (OSError, EOFError):
            raise WorkerFailed("crash") from None

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


IDLE = {"code": [], "score": []}  # started workers: those for programs, and those that have loaded mpmath


def take_worker(kind):
    while IDLE[kind]:
        with contextlib.suppress(IndexError):  # another thread was faster
            worker = IDLE[kind].pop()
            if worker.process.poll() is None:
                return worker
            worker.stop()
    return Worker()


def forget_workers(stop):
    for workers in IDLE.values():
        while workers:
            worker = workers.pop()
            stop and worker.stop()


if os.name == "posix":
    atexit.register(forget_workers, stop=True)
    os.register_at_fork(after_in_child=lambda: forget_workers(stop=False))  # they are the parent's


def check_outside(row, timeout):
    """Checks one row with a worker: a score, or the reason for 0."""
    verifier, completion, answer = row
    kind = "code" if verifier == "code" else "score"
    worker = take_worker(kind)
    try:
        if verifier == "code":
            outcome = check_code(completion, answer, worker, timeout)
        else:
            job = {"do": "score", "verifier": verifier, "completion": completion, "answer": answer}
            outcome = worker.call(job, timeout)["outcome"]
    except WorkerFailed as failure:
        worker.stop()
        return str(failure)
    except BaseException:
        worker.stop()
        raise
    IDLE[kind].append(worker)
    return outcome


# ---------------------------------------------------------------------------------------------------------------------
# verify, verify_batch

VERIFIERS = {  # name: (what reads an answer, what checks a completion; code has a function of its own)
    "math": (golds, check_math), "code": (parse_code_answer, None), "choice": (parse_choice_answer, check_choice),
    "number": (parse_number_answer, check_number), "ifeval": (parse_ifeval_answer, check_ifeval),
    "tool": (parse_tool_answer, check_tool), "exact": (str.strip, check_exact),
}  # fmt: skip


class Scores(list):
    """Scores in the order of the rows; `counts` says how many zeros were no plain wrong answers: "no answer" (no box,
    no code, no letter), "unparsable gold", "timeout", "crash"."""

    def __init__(self, scores, counts):
        super().__init__(scores)
        self.counts = counts


def check(row):
    """A score in [0, 1], or the reason for 0 in a word. Slow rows raise NeedsWorker."""
    verifier, completion, answer = row
    try:
        if verifier == "code":
            if extract_code(completion, parse_code_answer(answer)["wanted"]) is None:
                return "no answer"
            raise NeedsWorker
        return VERIFIERS[verifier][1](completion, answer)
    except TaskError:
        return "unparsable gold"
    except RecursionError:
        return 0.0


def verify_batch(rows, workers=None, timeout=TIMEOUT):
    """Scores of (verifier, completion, answer) rows, in order; equal rows are checked once.

    workers: processes at a time (default: the cores). timeout: seconds for one run of a program or one slow check.
    Returns a list of floats in [0, 1] that also has `.counts`. Raises TaskError for an unknown verifier only.
    """
    rows = [tuple(row) for row in rows]
    for name in {row[0] for row in rows} - VERIFIERS.keys():
        raise TaskError(f"unknown verifier {name!r}: there are {', '.join(VERIFIERS)}")
    outcomes, slow = {}, []
    for row in dict.fromkeys(rows):
        try:
            outcomes[row] = check(row)
        except NeedsWorker:
            slow.append(row)
    if slow:
        from concurrent.futures import ThreadPoolExecutor

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(min(workers or cores, len(slow))) as threads:
            outcomes.update(zip(slow, threads.map(lambda row: check_outside(row, timeout), slow)))
    counts = {}
    for row in rows:
        if isinstance(outcomes[row], str):
            counts[outcomes[row]] = counts.get(outcomes[row], 0) + 1
    return Scores([0.0 if isinstance(outcomes[row], str) else float(outcomes[row]) for row in rows], counts)


def verify(verifier, completion, answer):
    """The score of one completion in [0, 1]. Never raises on a bad completion.

    >>> verify("exact", " some  text\\n", "some text"), verify("choice", "The answer is (B).", "B")
    (1.0, 1.0)
    """
    return verify_batch([(verifier, completion, answer)])[0]


# ---------------------------------------------------------------------------------------------------------------------
# load_tasks: presets, files, and the layouts in common use

BOXED = "Think step by step. Put the final answer in \\boxed{}."
LETTER = "Think step by step. End with a line `Answer: X`, where X is the letter of the right option."
PYTHON = "Write a complete Python program text in one ```python block: imports, the function, nothing that runs it."
STDIN = "Write a complete Python program in one ```python block that reads standard input and prints the answer."
CALLS = 'Answer with one line <tool_call>{"name": ..., "arguments": {...}}</tool_call> for each function call, nothing else.'

# Layouts: what the columns of a data set are made into, a row of this project, or None where it has no answer to check.


def task(prompt, domain, verifier, answer, **more):
    answer = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return {"prompt": prompt, "domain": domain, "verifier": verifier, "answer": answer} | more


def math_task(problem, answer):
    """The answer as it is, or the last box or #### line in it: gsm8k's and MATH's golds are whole solutions."""
    answer = unmarked(str(answer if answer is not None else "")).strip()
    return task(f"{problem}\n\n{BOXED}", "math", "math", answer) if answer else None


def dapo_task(messages, reward_model):
    """DAPO's prompts are wrapped in a request for a line "Answer: ..."."""
    wrapping = r"\ASolve the following math problem.*?\n\n|\n\nRemember to put your answer on its own line.*\Z"
    return math_task(re.sub(wrapping, "", messages[0]["content"], flags=re.DOTALL), reward_model["ground_truth"])


def svamp_task(body, question, answer):
    return math_task(f"{body.strip().rstrip('.')}. {question}", str(answer).removesuffix(".0"))


def choice_task(question, texts, answer, labels="ABCDEFGHIJ"):
    """`answer` is a label, or counts from 0."""
    choices = dict(zip(labels, texts))
    gold = {"label": labels[answer] if isinstance(answer, int) else answer, "choices": choices}
    listed = "\n".join(f"{label}. {text}" for label, text in choices.items())
    return task(f"{question}\n\n{listed}\n\n{LETTER}", "science", "choice", gold)


def options_task(question, choices, answer):
    return choice_task(question, choices["text"], answer, choices["label"])


def shuffled_task(question, right, *wrong):
    """Options that come without an order: theirs depends on the question only."""
    import random

    texts = random.Random(question).sample([right, *wrong], 1 + len(wrong))
    return choice_task(question, texts, texts.index(right))


def assert_task(text, tests, setup):
    setup = "\n".join(setup) if isinstance(setup, list) else setup
    text = f"{text}\n\nYour code must pass:\n{tests[0]}\n\n{PYTHON}"
    return task(text, "code", "code", {"type": "assert", "setup": setup, "asserts": tests})


def humaneval_task(prompt, test, name):
    # the prompt's own helpers (poly, encode_shift, ...) come with the tests: a solution must not bring its own judge
    tests = {"type": "assert", "setup": prompt + "\n" + test, "asserts": [f"check({name})"], "entry_point": name}
    return task(f"Complete this function:\n\n```python\n{prompt.strip()}\n```\n\n{PYTHON}", "code", "code", tests)


def cases_task(problem, tests, starter="", metadata=None):
    """Inputs and outputs as APPS, TACO, Eurus-2, LiveCodeBench and DeepCoder have them: lists side by side, or a list of
    pairs; of programs, or of a function, whose arguments LiveCodeBench writes as lines of JSON."""
    tests, name = json.loads(tests) if isinstance(tests, str) else tests, (metadata or {}).get("func_name")
    if isinstance(tests, dict):
        name = tests.get("fn_name") or name
        tests = [{"input": text, "output": wanted} for text, wanted in zip(tests["inputs"], tests["outputs"])]
    if not tests:
        return None
    pairs = [(test["input"], test["output"]) for test in tests]
    if not name:
        cases = [[x if isinstance(x, str) else "\n".join(map(str, x)) for x in pair] for pair in pairs]
        return task(f"{problem}\n\n{STDIN}", "code", "code", {"type": "stdin", "cases": cases})
    if isinstance(pairs[0][0], str):
        cases = [[[json.loads(line) for line in text.splitlines()], json.loads(wanted)] for text, wanted in pairs]
    else:  # APPS and TACO wrap the value in a list
        cases = [[args, out[0] if isinstance(out, list) and len(out) == 1 else out] for args, out in pairs]
    answer = {"type": "function", "name": name, "cases": cases}
    answer |= {"cls": "Solution"} if "class Solution" in (starter or "") else {}
    return task(f"{problem}\n\n{starter or f'The function is called {name}.'}\n\n{PYTHON}", "code", "code", answer)


def ifeval_task(prompt, ids, kwargs):
    kwargs = [{k: v for k, v in (given or {}).items() if v is not None} for given in kwargs]
    return task(prompt, "instruction", "ifeval", {"instruction_id_list": list(ids), "kwargs": kwargs})


RLVR_IFEVAL = """verify_keywords keywords:existence keywords=keyword_list
verify_keyword_frequency keywords:frequency keyword=word frequency=N relation=exactly
validate_forbidden_words keywords:forbidden_words forbidden_words=forbidden_words
verify_letter_frequency keywords:letter_frequency letter=letter let_frequency=N let_relation=exactly
validate_response_language language:response_language language=language
validate_word_constraint length_constraints:number_words num_words=N relation=quantifier
verify_sentence_constraint length_constraints:number_sentences num_sentences=N relation=quantifier
validate_paragraphs length_constraints:nth_paragraph_first_word num_paragraphs=N first_word=first_word nth_paragraph=i
verify_postscript detectable_content:postscript postscript_marker=postscript_marker
validate_placeholders detectable_content:number_placeholders num_placeholders=N
verify_bullet_points detectable_format:number_bullet_lists num_bullets=N
validate_title detectable_format:title
validate_highlighted_sections detectable_format:number_highlighted_sections num_highlights=N
validate_sections detectable_format:multiple_sections section_spliter=section_splitter num_sections=N
validate_json_format detectable_format:json_format
validate_repeat_prompt combination:repeat_prompt prompt_to_repeat=original_prompt
validate_two_responses combination:two_responses
validate_uppercase change_case:english_capital
validate_lowercase change_case:english_lowercase
validate_frequency_capital_words change_case:capital_word_frequency capital_frequency=N capital_relation=quantifier
validate_end startend:end_checker end_phrase=end_phrase
validate_quotation startend:quotation
validate_no_commas punctuation:no_comma"""  # function of open-instruct, instruction of IFEval, its arguments there
RLVR_IFEVAL = {line.split()[0]: line.split()[1:] for line in RLVR_IFEVAL.split("\n")}


def constraint_task(messages, truth):
    """open-instruct's two forms: JSON {"func_name", its arguments} (RLVR-IFeval), or a Python list of instruction ids with
    their arguments (IF_multi_constraints). None where a constraint is none of IFEval's 25 (two functions are not)."""
    try:
        truth = json.loads(truth)
    except ValueError:
        truth = ast.literal_eval(truth)
    if isinstance(truth, list):
        ids, kwargs = truth[0]["instruction_id"], truth[0]["kwargs"]
        return ifeval_task(messages, ids, kwargs) if {*ids} <= IFEVAL.keys() else None
    if truth["func_name"] not in RLVR_IFEVAL:
        return None
    instruction, *pairs = RLVR_IFEVAL[truth["func_name"]]
    names = dict(pair.split("=") for pair in pairs)
    kwargs = {ours: truth[theirs] for ours, theirs in names.items() if theirs != "exactly"}
    relation = next((name for name in names if name.endswith("relation")), None)
    if relation is None:
        return ifeval_task(messages, [instruction], [kwargs])
    count = next(ours for ours, theirs in names.items() if theirs == "N")
    low = high = truth["N"]
    if (quantifier := kwargs.get(relation, "exactly")) == "around":  # as there: within 10 %, or one sentence
        near = 1 if "sentences" in instruction else max(round(truth["N"] * 0.1), 1)
        low, high = low - near, high + near
    bounds = [{relation: "at least", count: low}] * (quantifier != "at most")
    bounds += [{relation: "less than", count: high + 1}] * (quantifier != "at least")
    return ifeval_task(messages, [instruction] * len(bounds), [kwargs | bound for bound in bounds])


def call_task(question, tools, calls):
    tools = tools if isinstance(tools, str) else json.dumps(tools)
    calls = json.loads(calls) if isinstance(calls, str) else calls
    return task(f"{question}\n\nFunctions:\n{tools}\n\n{CALLS}", "tools", "tool", {"calls": calls}) if calls else None


def bbh_task(question, answer):
    return task(f"{question}\n\nAnswer with the result only.", "bbh", "exact", answer, held_out=True)


# The columns are those of the hub, and the licence is the one that its card names. The splits of bbh are its subsets,
# which are configs on the hub.
GATED = "gated: accept its terms on the hub and log in there (hf auth login)"
PRESETS = {  # name: (hub id, config, split, layout, columns, licence)
    "gsm8k": ("openai/gsm8k", "main", "train", math_task, "question, answer", "MIT"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "default", "train", math_task, "problem, solution", "MIT"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", math_task, "problem, answer", "MIT"),
    "dapo-math-17k": ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train", dapo_task, "prompt, reward_model", "Apache-2.0"),
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", None, "train", math_task, "problem, answer", "MIT"),
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", math_task, "problem, answer", "problems of the MAA"),
    "aime25": ("MathArena/aime_2025", None, "train", math_task, "problem, answer", "CC-BY-NC-SA-4.0"),
    "svamp": ("ChilleD/SVAMP", None, "test", svamp_task, "Body, Question, Answer", "MIT"),
    "mbpp": ("google-research-datasets/mbpp", "full", "train", assert_task, "text, test_list, test_setup_code", "CC-BY-4.0"),
    "mbpp-sanitized": ("google-research-datasets/mbpp", "sanitized", "train", assert_task, "prompt, test_list, test_imports", "CC-BY-4.0"),
    "humaneval": ("openai/openai_humaneval", None, "test", humaneval_task, "prompt, test, entry_point", "MIT"),
    "deepcoder": ("agentica-org/DeepCoder-Preview-Dataset", "primeintellect", "train", cases_task, "problem, tests, starter_code, metadata", "MIT"),
    "openbookqa": ("allenai/openbookqa", "main", "train", options_task, "question_stem, choices, answerKey", "Apache-2.0"),
    "arc-easy": ("allenai/ai2_arc", "ARC-Easy", "train", options_task, "question, choices, answerKey", "CC-BY-SA-4.0"),
    "arc-challenge": ("allenai/ai2_arc", "ARC-Challenge", "train", options_task, "question, choices, answerKey", "CC-BY-SA-4.0"),
    "sciq": ("allenai/sciq", None, "train", shuffled_task, "question, correct_answer, distractor1, distractor2, distractor3", "CC-BY-NC-3.0"),
    "mmlu": ("cais/mmlu", "all", "test", choice_task, "question, choices, answer", "MIT"),
    "mmlu-stem": ("TIGER-Lab/MMLU-STEM", None, "test", choice_task, "question, choices, answer", "MIT"),
    "mmlu-pro": ("TIGER-Lab/MMLU-Pro", None, "test", choice_task, "question, options, answer", "MIT"),
    "gpqa": ("Idavidrein/gpqa", "gpqa_diamond", "train", shuffled_task,
             "Question, Correct Answer, Incorrect Answer 1, Incorrect Answer 2, Incorrect Answer 3", "CC-BY-4.0, " + GATED),
    "ifeval": ("google/IFEval", None, "train", ifeval_task, "prompt, instruction_id_list, kwargs", "Apache-2.0"),
    "rlvr-ifeval": ("allenai/RLVR-IFeval", None, "train", constraint_task, "messages, ground_truth", "ODC-BY"),
    "if-multi-constraints": ("allenai/IF_multi_constraints_upto5", None, "train", constraint_task, "messages, ground_truth", "ODC-BY"),
    "xlam": ("Salesforce/xlam-function-calling-60k", None, "train", call_task, "query, tools, answers", "CC-BY-4.0, " + GATED),
    "bbh": ("lukaemon/bbh", "{split}", "boolean_expressions", bbh_task, "input, target", "MIT"),
}  # fmt: skip
ONE_TEST_SPLIT = {"aime24", "aime25", "gpqa", "ifeval", "bbh"}  # sets for testing only, whatever their split is called
REPEATED = {"dapo-math-17k"}  # sets that hold each row many times
TINY = Path(__file__).resolve().parent / "tiny" / "tasks"
DOMAINS = ("math", "code", "science", "instruction", "reverse", "translate")
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def from_preset(name):
    layout, columns = PRESETS[name][3:5]
    return lambda row: layout(*(row[column] for column in columns.split(", ")))


def is_test_set(spec):
    """Whether a spec names tasks that are there to test with: a test split, or a set that has no other.

    >>> [is_test_set(spec) for spec in ("tiny:math", "tiny:math:test", "mmlu", "mmlu:auxiliary_train", "ifeval", "my/test.jsonl")]
    [False, True, True, False, True, False]
    """
    name, _, split = spec.partition(":")
    if name in PRESETS:
        return name in ONE_TEST_SPLIT or (split or PRESETS[name][2]) == "test"
    return name == "tiny" and split.split(":")[-1] == "test"


def from_verl(row):
    """verl's parquet rows; the domain is its ability, the verifier follows from that and from the ground truth."""
    truth, domain = row["reward_model"]["ground_truth"], str(row.get("ability") or "math").lower()
    struct = json.loads(truth) if isinstance(truth, str) and truth.lstrip().startswith("{") else truth
    if isinstance(struct, dict):
        if "inputs" in struct:  # Eurus-2
            return task(row["prompt"], domain, "code", cases_task("", struct)["answer"])
        known = {"type": "code", "label": "choice", "instruction_id_list": "ifeval", "value": "number", "calls": "tool"}
        verifier = next((known[key] for key in known if key in struct), None)
        if verifier is None:
            raise TaskError(f"no verifier here for a ground truth of {', '.join(map(str, struct))}")
        return task(row["prompt"], domain, verifier, struct)
    verifier = {"science": "choice", "mcq": "choice"}.get(domain, "math")
    return task(row["prompt"], domain, verifier, truth if isinstance(truth, (str, list)) else str(truth))


def from_open_instruct(row):
    """open-instruct's rows (messages, ground_truth, dataset)."""
    name = str(row["dataset"][0] if isinstance(row["dataset"], list) else row["dataset"]).lower()
    if name.startswith("ifeval"):
        return constraint_task(row["messages"], row["ground_truth"])
    if name not in ("gsm8k", "math", "test"):
        raise TaskError(f"dataset {name!r} of open-instruct has no verifier here: there are gsm8k, math, ifeval")
    return task(row["messages"], "math", "math", row["ground_truth"])


def from_trl(row):
    """TRL's prompt-only rows with the column that its accuracy reward, or another, compares with: mathematics."""
    return task(row["prompt"], "math", "math", str(row[next(n for n in TRL_ANSWERS if row.get(n) is not None)]))


def from_bfcl(row):
    turn = row["question"][0] if isinstance(row["question"], list) else row["question"]
    return call_task(turn if isinstance(turn, str) else turn[-1]["content"], row["function"], row["ground_truth"])


TRL_ANSWERS = ("solution", "answer", "ground_truth")
LAYOUTS = [  # columns that mark a layout, and its reader
    ({"prompt", "verifier", "answer"}, lambda row: {"domain": row["verifier"]} | row),
    ({"prompt", "reward_model", "data_source"}, from_verl),
    ({"messages", "ground_truth", "dataset"}, from_open_instruct),
    ({"question", "function", "ground_truth"}, from_bfcl),
    ({"query", "tools", "answers"}, from_preset("xlam")),
    *(({"prompt", name}, from_trl) for name in TRL_ANSWERS),
]


def read_rows(path):
    """(line number, row) of a file; .json is a list, or an object with one under "examples"; `datasets` reads the rest."""
    path, kind = Path(path), Path(path).suffix[1:]
    if not os.path.isfile(path):
        raise TaskError(f"{str(path)[:200]}: no such file")

    def parsed(number, text):  # of bytes: a line that is not UTF-8 is refused with its number, too
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path}:{number}: not JSON ({error}); one object a line is wanted") from None

    if kind == "jsonl":
        lines = enumerate(path.read_bytes().split(b"\n"), 1)
        rows = ((number, parsed(number, line)) for number, line in lines if line.strip())
    elif kind == "json":
        data = parsed(1, path.read_bytes())
        rows = enumerate(data.get("examples", [data]) if isinstance(data, dict) else data, 1)
    else:
        import datasets

        as_text = {"keep_default_na": False, "converters": {"answer": str, "prompt": str}} if kind == "csv" else {}
        try:
            rows = enumerate(datasets.load_dataset(kind, data_files=str(path), split="train", **as_text), 1)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise TaskError(f"{path}: cannot be read as {kind} ({str(error).splitlines()[0][:120]})") from None
    for number, row in rows:
        if not isinstance(row, dict):
            raise TaskError(f"{path}:{number}: a JSON object is wanted, got {type(row).__name__}")
        yield number, row


def read_preset(name, split, data_dir):
    """Rows of a preset: DATA_DIR/<preset>/<split>.* when it is given, else the hub."""
    hub, config, *_, licence = PRESETS[name]
    if data_dir:
        paths = [Path(data_dir) / name / (split + suffix) for suffix in SUFFIXES]
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            raise TaskError(f"{name}:{split}: none of {paths[0]} (or .json, .parquet, .csv) exists; see --data_dir")
        return ((f"{path}:{number}", row) for number, row in read_rows(path))
    import datasets

    try:
        config, split = (split, "test") if config == "{split}" else (config, split)
        return (
            (f"{hub}:{number}", row) for number, row in enumerate(datasets.load_dataset(hub, config, split=split), 1)
        )
    except Exception as error:  # the hub client raises many kinds, all of them mean the same here
        reason = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise TaskError(
            f"{name}:{split}: cannot load {hub} from the hub ({reason}; {licence}); try --data_dir"
        ) from None


def source(spec, data_dir):
    """(place, row, reader) of all rows that a spec names; reader is None for files, whose layout is looked up."""
    name, _, split = spec.partition(":")
    if spec.endswith(SUFFIXES):
        yield from ((f"{spec}:{number}", row, None) for number, row in read_rows(spec))
    elif name == "tiny":
        domain, _, part = split.rpartition(":")
        if part in DOMAINS and not domain:
            domain, part = part, "train"
        files = [TINY / f"{d}-{part or 'train'}.jsonl" for d in ([domain] if domain else DOMAINS)]
        if not (found := [path for path in files if path.exists()]):
            known = sorted(path.stem for path in TINY.glob("*.jsonl"))
            raise TaskError(
                f"{spec}: no tiny tasks of that name; there are {', '.join(known) or 'none at ' + str(TINY)}"
            )
        yield from ((f"{path}:{number}", row, None) for path in found for number, row in read_rows(path))
    elif name in PRESETS:
        seen, reader = set(), from_preset(name)
        for place, row in read_preset(name, split or PRESETS[name][2], data_dir):
            key = json.dumps(row.get("prompt")) if name in REPEATED else place
            if key not in seen:
                seen.add(key)
                yield place, row, reader
    else:
        raise TaskError(f"{spec}: neither a preset (tiny, {', '.join(PRESETS)}) nor a path to {', '.join(SUFFIXES)}")


def read_task(place, row, reader):
    """One checked task row; None for one that the reader leaves out."""
    import hashlib

    if reader is None:
        reader = next((reader for columns, reader in LAYOUTS if columns <= row.keys()), None)
        if reader is None:
            raise TaskError(
                f"{place}: columns {', '.join(sorted(row))} fit no layout; wanted are prompt, domain, verifier, answer "
                "(or verl's prompt, reward_model, data_source, or open-instruct's messages, ground_truth, dataset)"
            )
    try:
        if (made := reader(row)) is None:
            return None
        check_gold(made)
    except (*MALFORMED, LookupError) as error:
        reason = error if isinstance(error, TaskError) else f"{type(error).__name__} {error}"
        raise TaskError(f"{place}: {reason}") from None
    text = made["prompt"] if isinstance(made["prompt"], str) else json.dumps(made["prompt"])
    digest = hashlib.sha256((text + "\0" + made["answer"]).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    kept = {key: made[key] for key in ("prompt", "domain", "verifier", "answer")} | {
        "id": str(made.get("id") or digest)
    }
    return kept | ({"held_out": True} if made.get("held_out") else {})


def check_gold(row):
    """Raises TaskError for a row that could never be scored rightly."""
    prompt, domain, verifier, answer = (row[key] for key in ("prompt", "domain", "verifier", "answer"))
    chat = isinstance(prompt, list) and all(
        isinstance(m, dict) and "role" in m and isinstance(m.get("content"), str) for m in prompt
    )
    if not (isinstance(prompt, str) and prompt.strip() or chat and prompt):
        raise TaskError("the prompt must be a text or a list of messages with role and content, which is text")
    if not (isinstance(domain, str) and domain):
        raise TaskError(f"the domain must be a word, got {json.dumps(domain)[:40]}")
    if not isinstance(answer, str):
        raise TaskError(f"the answer must be a string (JSON where structured), got {type(answer).__name__}")
    if verifier not in VERIFIERS:
        raise TaskError(f"unknown verifier {verifier!r}: there are {', '.join(VERIFIERS)}")
    if VERIFIERS[verifier][0](answer) == "":
        raise TaskError("the answer is empty")


def load_tasks(spec, limit=None, seed=0, data_dir=None):
    """Task rows with prompt, domain, verifier, answer, id (and held_out) of a preset, `tiny...` or a file.

    spec: "tiny:math", "tiny:math:test", "tiny:test" (all domains of a split), "gsm8k:test", or a path.
    limit: keep so many rows, drawn with `seed`, in their old order. Raises TaskError, one line that names the place.
    """
    read = [read_task(*item) for item in source(str(spec), data_dir)]
    rows = [row for row in read if row is not None]
    if not rows:
        raise TaskError(f"{spec}: no rows" + (" with an answer that can be checked" if read else ""))
    if len(rows) < len(read):
        import logging

        missing = len(read) - len(rows)
        logging.getLogger("verifiers").warning(
            "%s: %d of %d rows have no answer that can be checked: left out", spec, missing, len(read)
        )
    if limit is not None and limit < len(rows):
        import random

        rows = [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), limit))]
    return rows


# ---------------------------------------------------------------------------------------------------------------------


def main(path):
    """Scores a file of rows and says where scores differ from what was expected."""
    rows = [(number, row) for number, row in read_rows(path)]
    for number, row in rows:
        if not {"verifier", "completion", "answer"} <= row.keys():
            raise TaskError(f"{path}:{number}: a row needs verifier, completion, answer")
    started = time.monotonic()
    scores = verify_batch([(row["verifier"], row["completion"], row["answer"]) for _, row in rows])
    seconds = time.monotonic() - started
    table = {}  # group: rows, wrongly paid, wrongly refused
    for (_, row), score in zip(rows, scores):
        expected = row.get("expected", score)
        print(json.dumps({"score": score} | ({"expected": expected} if "expected" in row else {})))
        group = "apart (debatable, policy)" if row.get("debatable") or row.get("policy") else "core"
        for name in (group, f"  {row.get('kind', row['verifier'])}") if "expected" in row else ():
            counts = table.get(name, (0, 0, 0))
            table[name] = (counts[0] + 1, counts[1] + (score > expected), counts[2] + (score < expected))
    print(f"{len(rows)} rows, mean score {sum(scores) / max(len(rows), 1):.3f}, {seconds:.1f} s", file=sys.stderr)
    print(f"zeros that are no plain wrong answers: {scores.counts or 'none'}", file=sys.stderr)
    for name, (n, paid, refused) in sorted(table.items(), key=lambda item: (item[0][0] == " ", item[0])):
        if name[0] != " " or paid or refused:
            print(f"{name:36} {n:5} rows  {paid:3} wrongly paid  {refused:3} wrongly refused", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker_main(*sys.argv[2:])
    elif len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(
            "verifiers.py: python verifiers.py FILE.jsonl (rows with verifier, completion, answer[, expected])",
            file=sys.stderr,
        )
        sys.exit(2)
    else:
        try:
            main(sys.argv[1])
        except TaskError as error:
            print(f"verifiers.py: {error}", file=sys.stderr)
            sys.exit(2)
