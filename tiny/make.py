"""Make the tiny world: task files of four domains (and two held out), and a small chat model that half knows them.

    python tiny/make.py                 writes tiny/tasks/*.jsonl and tiny/base, 10 to 20 minutes on one core
    python tiny/make.py --tasks_only    the task files alone, seconds

The model is a Llama of 0.8 M parameters, trained from scratch on demonstrations that are wrong on purpose: reinforcement
learning needs something to sharpen, so the base must know how a right answer looks and yet give it in a minority of its
samples. Two rates do that. In every domain some kinds of task are shown right often (`COMMON`) and some hardly ever
(`RARE`), and a quarter of the code tasks are compositions that are never shown: the first set pass@1, the others keep
pass@16 below 100, so that coverage can be measured.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COMMON, RARE = 0.45, 0.02  # share of right demonstrations in the second phase, by kind of task
SIZES = {"train": 512, "validation": 128, "test": 200}
FENCE_OPEN, FENCE_CLOSE = "```python\n", "\n```"

# ------------------------------------------------------------------------------------------------------- math
# A story of two to four steps over whole numbers; every step is an equation of the chain of thought.

NAMES = "Ann Bob Cora Dan Eva Finn Gina Hugo Ida Jack".split()
THINGS = "coins pens cups books nuts keys cards eggs".split()


def math_task(rng, least=3, most=20):
    """(prompt, answer, rare kind?, right demonstration, wrong demonstration)"""
    name, thing, steps = rng.choice(NAMES), rng.choice(THINGS), rng.choice([2, 2, 3, 3, 4])
    start = value = rng.randint(least, most)
    text, moves = f"{name} has {value} {thing}.", []
    for _ in range(steps):
        possible = (
            ["finds"] * (value < 85) + ["loses"] * (value > 9) + ["buys"] * (value < 75) + ["doubles"] * (value < 50)
        )
        kind = rng.choice(possible)
        n, m = (
            (rng.randint(2, 5), rng.randint(2, 5))
            if kind == "buys"
            else (rng.randint(2, 14 if kind == "finds" else 9), 0)
        )
        moves.append((kind, n, m))
        text += {
            "finds": f" Finds {n}.",
            "loses": f" Loses {n}.",
            "buys": f" Buys {n} bags of {m}.",
            "doubles": " Doubles them.",
        }[kind]
        value = step(value, *moves[-1])[0]
    rare = steps == 4 or [kind for kind, _, _ in moves].count("buys") >= 2
    return f"{text} How many {thing}?", str(value), rare, solve(start, moves), wrong_solve(start, moves, rng)


def step(value, kind, n, m, slip=0):
    """(value after a move, its equations)"""
    text = ""
    if kind == "buys":
        text, n = f"{n}*{m}={n * m}. ", n * m
    if kind == "doubles":
        n = value
    after = (value - n if kind == "loses" else value + n) + slip
    return after, f"{text}{value}{'-' if kind == 'loses' else '+'}{n}={after}. "


def solve(value, moves, spoiled=None, slip=0):
    """The chain of thought and the boxed result; the result of move `spoiled` is off by `slip`."""
    chain = ""
    for i, move in enumerate(moves):
        value, equations = step(value, *move, slip=slip if i == spoiled else 0)
        chain += equations
    return f"{chain}\\boxed{{{value}}}"


def wrong_solve(start, moves, rng):
    """A slip, a wrong operator, a step left out or no box: what a learner does."""
    how, i = rng.random(), rng.randrange(len(moves))
    if how < 0.4:
        return solve(start, moves, i, rng.choice([-10, -1, 1, 10]))
    if how < 0.65:
        kind, n, m = moves[i]
        return solve(
            start, moves[:i] + [("finds" if kind == "loses" else "loses", max(1, n * max(m, 1)), 0)] + moves[i + 1 :]
        )
    if how < 0.85:
        return solve(start, moves[:i] + moves[i + 1 :])
    return solve(start, moves).split(" \\boxed")[0]


# ------------------------------------------------------------------------------------------------------- code
# One line of Python: an aggregate of a map over a filter, then something done to the result.

FILTERS = {
    "items": "", "even items": " if v%2==0", "odd items": " if v%2==1", "positive items": " if v>0",
    "items above {n}": " if v>{n}", "items below {n}": " if v<{n}",
}  # fmt: skip
MAPS = {
    "": "v",
    "squares of the ": "v*v",
    "doubles of the ": "2*v",
    "sizes of the ": "abs(v)",
    "negatives of the ": "-v",
}
AGGREGATES = {
    "sum": "sum({})",
    "largest": "max({})",
    "smallest": "min({})",
    "number": "len({})",
    "list": "{}",
    "sorted list": "sorted({})",
}
POSTS = {"": "{}", "{n} plus the ": "{n}+{}", "{n} times the ": "{n}*{}", "minus the ": "-{}"}


def code_task(rng):
    agg = rng.choice(list(AGGREGATES))
    post = rng.choice(list(POSTS)) if "list" not in agg else ""
    map_, filter_ = rng.choice(list(MAPS)), rng.choice(list(FILTERS))
    n, m = rng.randint(2, 9), rng.randint(2, 9)
    prompt = f"Write f(x): {post.format(n=n)}{'' if post else 'the '}{agg} of the {map_}{filter_.format(n=m)} of x."

    def program(agg, map_, filter_, post, n, m):
        body = AGGREGATES[agg].format(f"[{MAPS[map_]} for v in x{FILTERS[filter_].format(n=m)}]")
        return f"def f(x): return {POSTS[post].format('{}', n=n).replace('{}', body)}"

    parts = [agg, map_, filter_, post, n, m]
    right = program(*parts)
    cases = make_cases(right, rng)
    rare = map_ == "sizes of the " or filter_ == "items below {n}"
    wrong = right
    for _ in range(20):
        how = rng.random()
        if how < 0.7:
            i = rng.choice([0, 1, 2, 3, 4, 5])
            other = list(parts)
            other[i] = (
                rng.choice([list(AGGREGATES), list(MAPS), list(FILTERS), list(POSTS)][i])
                if i < 4
                else rng.randint(2, 9)
            )
            wrong = program(*other)
        elif how < 0.85:
            wrong = right.replace(" return", "")
        else:
            wrong = right[: right.rindex("]")] + right[right.rindex("]") + 1 :]
        if fails(wrong, cases):
            break
    answer = json.dumps({"type": "function", "name": "f", "cases": cases})
    return prompt, answer, bool(rare), FENCE_OPEN + right + FENCE_CLOSE, FENCE_OPEN + wrong + FENCE_CLOSE


def hard_code_task(rng):
    """A composition that pretraining never shows: two things done to the result, or two maps."""
    agg = rng.choice([name for name in AGGREGATES if "list" not in name])
    first, second, filter_ = rng.choice(list(MAPS)[1:]), rng.choice(list(MAPS)[1:]), rng.choice(list(FILTERS))
    outer, inner = rng.choice(list(POSTS)[1:]), rng.choice(list(POSTS)[1:])
    n, k, m = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    if rng.random() < 0.5:
        second, value = "", MAPS[first]
    else:
        inner, value = "", MAPS[first].replace("v", f"({MAPS[second]})")
    asked = (
        f"{outer.format(n=n)[:-4]}{inner.format(n=k) or 'the '}{agg} of the {first}{second}{filter_.format(n=m)} of x"
    )
    body = AGGREGATES[agg].format(f"[{value} for v in x{FILTERS[filter_].format(n=m)}]")
    program = f"def f(x): return {POSTS[outer].format(f'({POSTS[inner].format(body, n=k)})', n=n)}"
    return (
        f"Write f(x): {asked}.",
        json.dumps({"type": "function", "name": "f", "cases": make_cases(program, rng)}),
        program,
    )


def make_cases(program, rng):
    """Six lists and what the program makes of them."""
    cases = []
    while len(cases) < 6:
        x = [rng.randint(-12, 15) for _ in range(rng.randint(3, 6))]
        try:
            cases.append([[x], run(program, x)])
        except ValueError:  # the largest of nothing
            continue
    return cases


def run(program, x):
    scope = {}
    exec(program, scope)  # our own text, from the tables above
    return scope["f"](x)


def fails(program, cases):
    try:
        return any(run(program, x) != value for (x,), value in cases)
    except (SyntaxError, ValueError, TypeError):
        return True


# ---------------------------------------------------------------------------------------------------- science
# Two elements, two facts, nine or ten options in a fixed order: guessing is right one time in nine or ten.

ELEMENTS = {  # name: atomic number, state at room temperature, kind
    "hydrogen": (1, "gas", "nonmetal"), "helium": (2, "gas", "nonmetal"), "lithium": (3, "solid", "metal"),
    "boron": (5, "solid", "metalloid"), "carbon": (6, "solid", "nonmetal"), "nitrogen": (7, "gas", "nonmetal"),
    "oxygen": (8, "gas", "nonmetal"), "fluorine": (9, "gas", "nonmetal"), "neon": (10, "gas", "nonmetal"),
    "sodium": (11, "solid", "metal"), "magnesium": (12, "solid", "metal"), "aluminium": (13, "solid", "metal"),
    "silicon": (14, "solid", "metalloid"), "phosphorus": (15, "solid", "nonmetal"), "sulfur": (16, "solid", "nonmetal"),
    "chlorine": (17, "gas", "nonmetal"), "argon": (18, "gas", "nonmetal"), "potassium": (19, "solid", "metal"),
    "calcium": (20, "solid", "metal"), "iron": (26, "solid", "metal"), "copper": (29, "solid", "metal"),
    "zinc": (30, "solid", "metal"), "germanium": (32, "solid", "metalloid"), "arsenic": (33, "solid", "metalloid"),
    "bromine": (35, "liquid", "nonmetal"), "krypton": (36, "gas", "nonmetal"), "silver": (47, "solid", "metal"),
    "tin": (50, "solid", "metal"), "tellurium": (52, "solid", "metalloid"), "iodine": (53, "solid", "nonmetal"),
    "xenon": (54, "gas", "nonmetal"), "gold": (79, "solid", "metal"), "mercury": (80, "liquid", "metal"),
    "lead": (82, "solid", "metal"),
}  # fmt: skip
STATES, KINDS = ["solid", "liquid", "gas"], ["metal", "metalloid", "nonmetal"]
LETTERS = "ABCDEFGHIJ"


def science_task(rng):
    family = rng.choice(["number", "number", "state", "kind"])
    if family == "number":
        x, y = rng.sample(list(ELEMENTS), 2)
        options = [str(digit) for digit in range(10)]
        prompt = f"The atomic numbers of {x} and {y} add up to a number that ends in"
    else:
        values, place = (STATES, 1) if family == "state" else (KINDS, 2)
        wanted = rng.choice(values), rng.choice(values)  # balanced, though most elements are solid metals
        x, y = (rng.choice([name for name in ELEMENTS if ELEMENTS[name][place] == value]) for value in wanted)
        options = [f"{a} {b}" for a in values for b in values]
        prompt = f"The {'states' if family == 'state' else 'kinds'} of {x} and {y} are"
    listed = " ".join(f"({letter}) {option}" for letter, option in zip(LETTERS, options))

    def demonstration(x_facts, y_facts):
        if family == "number":
            total = x_facts[0] + y_facts[0]
            return f"{x} {x_facts[0]}, {y} {y_facts[0]}, sum {total}. Answer: {LETTERS[total % 10]}"
        a, b = values.index(x_facts[place]), values.index(y_facts[place])
        return f"{x} {values[a]}, {y} {values[b]}. Answer: {LETTERS[3 * a + b]}"

    right = demonstration(ELEMENTS[x], ELEMENTS[y])
    label = right[-1]
    wrong = right
    while wrong[-1] == label:  # a wrong fact, or (less often) a letter out of the air
        facts = ELEMENTS[x], ELEMENTS[y]
        spoiled = ELEMENTS[rng.choice(list(ELEMENTS))]
        wrong = demonstration(*((spoiled, facts[1]) if rng.random() < 0.5 else (facts[0], spoiled)))
        if rng.random() < 0.2:
            wrong = right[:-1] + rng.choice(LETTERS[: len(options)])
    answer = json.dumps({"label": label, "choices": dict(zip(LETTERS, options))})
    rare = list(ELEMENTS).index(x) % 3 == 0 and list(ELEMENTS).index(y) % 2 == 0 or (x in HARD and y in HARD)
    return f"{prompt} {listed}?", answer, rare, right, wrong


HARD = {"germanium", "arsenic", "krypton", "silver", "tin", "tellurium", "iodine", "xenon", "gold", "mercury", "lead"}

# ------------------------------------------------------------------------------------------------ instruction
# A phrase on a topic under one to three of Google's IFEval constraints. The topic is a constraint too, it and the wanted
# words may be used once only, and lengths are bounded from above: neither leaving the topic out nor repeating pays.

TOPICS = "star river dog tree ship bird house cloud garden train horse lake".split()
ADJECTIVES = "big small old new red blue dark cold warm quiet wild bright".split()
VERBS = "runs sleeps waits sings falls grows moves shines hides turns".split()
PLACES = "here there today now again alone outside inside".split()


def phrase(topic, rng, words=()):
    """A phrase about the topic that holds `words`, each once: article, adjectives, topic, verb, place."""
    adjectives = [w for w in words if w in ADJECTIVES] or ([rng.choice(ADJECTIVES)] if rng.random() < 0.6 else [])
    verb = [w for w in words if w in VERBS] or [rng.choice(VERBS)]
    place = [w for w in words if w in PLACES] or ([rng.choice(PLACES)] if rng.random() < 0.5 else [])
    return ["the", *adjectives, topic, *verb[:1], *place[:1]]


def instruction_task(rng):
    topic = rng.choice(TOPICS)
    words = [rng.choice(ADJECTIVES)] * (rng.random() < 0.6) + [rng.choice(VERBS)] * (rng.random() < 0.4)
    ids, kwargs = (
        ["keywords:existence", "keywords:frequency"],
        [{"keywords": [topic]}, {"keyword": topic, "relation": "less than", "frequency": 2}],
    )
    text = f"Write about a {topic}."
    if words:
        text += " Use " + " and ".join(f'"{word}"' for word in words) + " once."
        for word in words:
            ids += ["keywords:existence", "keywords:frequency"]
            kwargs += [{"keywords": [word]}, {"keyword": word, "relation": "less than", "frequency": 2}]
    extras = rng.sample(["end", "few", "quote", "title", "without"], rng.choice([1, 1, 2, 2, 3]))
    place, limit, taboo = rng.choice(PLACES), rng.randint(4, 6) + len(words), rng.choice(["the", *ADJECTIVES, *VERBS])
    while taboo in words:
        taboo = rng.choice(ADJECTIVES)
    title = rng.choice(ADJECTIVES)
    for extra in sorted(extras):
        if extra == "end":
            text += f' End with "{place}".'
            ids, kwargs = ids + ["startend:end_checker"], kwargs + [{"end_phrase": place}]
        if extra == "few":
            text += f" Fewer than {limit} words."
            ids += ["length_constraints:number_words"]
            kwargs += [{"relation": "less than", "num_words": limit}]
        if extra == "quote":
            text += " In double quotes."
            ids, kwargs = ids + ["startend:quotation"], kwargs + [{}]
        if extra == "title":
            text += " With a <<title>>."
            ids, kwargs = ids + ["detectable_format:title"], kwargs + [{}]
        if extra == "without":
            text += f' Without "{taboo}".'
            ids, kwargs = ids + ["keywords:forbidden_words"], kwargs + [{"forbidden_words": [taboo]}]
    kept = {extra for extra in extras}

    def write(kept, words, topic=topic):
        body = phrase(topic, rng, [*words, *([place] if "end" in kept else [])])
        if "without" in kept:
            body = [w for w in body if w != taboo]
        elif "without" in extras and taboo not in body:
            body.insert(0, taboo)
        if "few" in kept:
            drop = [w for w in body if w not in (topic, place, *words)]
            while len(body) + ("title" in kept) >= limit and drop:
                body.remove(drop.pop(0))
        elif "few" in extras:
            while len(body) < limit:
                body.insert(1, rng.choice(ADJECTIVES))
        if "end" in extras and "end" not in kept and body[-1] == place:
            body.pop()
        result = " ".join(body)
        if "title" in kept:
            result = f"<<{title if title != taboo and title not in words else 'night'}>> {result}"
        return f'"{result}"' if "quote" in kept else result

    if "quote" in kept and "end" in kept:  # the quote would come behind the last word
        return instruction_task(rng)
    wanted = [*extras, *words, topic]
    spoiled = set(rng.sample(wanted, rng.choice([1, 1, 2]) if len(wanted) > 1 else 1))
    wrong = write(
        kept - spoiled, [w for w in words if w not in spoiled], rng.choice(TOPICS) if topic in spoiled else topic
    )
    rare = len(extras) == 3 or {"title", "few"} <= kept or {"quote", "without"} <= kept
    return text, json.dumps({"instruction_id_list": ids, "kwargs": kwargs}), rare, write(kept, words), wrong


# --------------------------------------------------------------------------------------------------- held out

SPANISH = {
    "star": "estrella", "river": "rio", "dog": "perro", "tree": "arbol", "ship": "barco", "bird": "pajaro",
    "house": "casa", "cloud": "nube", "garden": "jardin", "train": "tren", "horse": "caballo", "lake": "lago",
    "big": "grande", "small": "chico", "old": "viejo", "new": "nuevo", "red": "rojo", "blue": "azul", "dark": "oscuro",
    "cold": "frio", "warm": "calido", "quiet": "quieto", "wild": "salvaje", "bright": "claro", "here": "aqui",
    "there": "alli", "today": "hoy", "now": "ahora", "again": "otra vez", "alone": "solo", "outside": "fuera", "inside": "dentro",
}  # fmt: skip


def reverse_task(rng):
    words = rng.sample(TOPICS + ADJECTIVES + VERBS + PLACES, rng.randint(2, 3))
    wrong = rng.sample(words, len(words))
    return f"Reverse: {' '.join(words)}", " ".join(words[::-1]), False, " ".join(words[::-1]), " ".join(wrong)


def translate_task(rng):
    words = [rng.choice(ADJECTIVES), rng.choice(TOPICS)] + ([rng.choice(PLACES)] if rng.random() < 0.6 else [])
    right = [SPANISH[word] for word in words]
    wrong = list(right)
    wrong[rng.randrange(len(wrong))] = rng.choice(list(SPANISH.values()))
    return f"Translate: {' '.join(words)}", " ".join(right), False, " ".join(right), " ".join(wrong)


DOMAINS = {  # domain: (maker, verifier, share of the demonstrations)
    "math": (math_task, "math", 1.7), "code": (code_task, "code", 1.0), "science": (science_task, "choice", 1.3),
    "instruction": (instruction_task, "ifeval", 1.1), "reverse": (reverse_task, "exact", 0.5),
    "translate": (translate_task, "exact", 0.4),
}  # fmt: skip
HELD_OUT = ("reverse", "translate")


def drill(rng):
    """Single facts and single sums: what the tasks are made of."""
    if rng.random() < 0.5:
        name = rng.choice(list(ELEMENTS))
        number, state, kind = ELEMENTS[name]
        return f"Facts about {name}?", f"{name} {number}, {name} {state}, {name} {kind}"
    a, b = rng.randint(3, 99), rng.randint(2, 25)
    if rng.random() < 0.2:
        a, b = rng.randint(2, 5), rng.randint(2, 5)
        return f"{a}*{b}?", f"{a}*{b}={a * b}."
    if rng.random() < 0.2:
        b = a = rng.randint(3, 50)
    return (f"{a}+{b}?", f"{a}+{b}={a + b}.") if rng.random() < 0.6 or b >= a else (f"{a}-{b}?", f"{a}-{b}={a - b}.")


# ---------------------------------------------------------------------------------------------------- task files


def write_tasks(folder, seed):
    """Write <domain>-<split>.jsonl, no prompt in two splits -> every prompt of validation and test."""
    folder.mkdir(parents=True, exist_ok=True)
    unseen = set()
    for domain, (maker, verifier, _) in DOMAINS.items():
        rng, taken = random.Random(f"{seed} {domain}"), set()
        for split, size in reversed(SIZES.items()):  # train comes last: what is left
            rows = []
            while len(rows) < (size if domain not in HELD_OUT else 0 if split == "train" else 128):
                prompt, answer, *_ = maker(rng)
                if prompt not in taken:
                    taken.add(prompt)
                    rows.append({"prompt": prompt, "domain": domain, "verifier": verifier, "answer": answer})
                    rows[-1] |= {"held_out": True} if domain in HELD_OUT else {}
            if split != "train":
                unseen |= {row["prompt"] for row in rows}
            if domain == "math" and rows:  # mostly stories that the base can solve now and then
                rows = easy_rows(random.Random(f"{seed} easy {split}"), taken, rows)
            if domain == "code":  # a quarter of the tasks are compositions that no demonstration shows
                rows[::4] = hard_rows(random.Random(f"{seed} hard {split}"), taken, len(rows[::4]))
            if rows:
                (folder / f"{domain}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return unseen


def easy_rows(rng, taken, rows):
    """`rows` with three in four replaced by two-step stories without a loss: subtraction is what the base is worst at.

    They begin with 21 to 26 things, the demonstrations with 20 at most: none of them was seen in pretraining.
    """
    easy = []
    while len(easy) < 3 * len(rows) // 4:
        prompt, answer, *_ = math_task(rng, 21, 26)
        if prompt not in taken and prompt.count(".") == 3 and "Loses" not in prompt:
            taken.add(prompt)
            easy.append({**rows[0], "prompt": prompt, "answer": answer})
    return [row for i in range(0, len(rows), 4) for row in [rows[i], *easy[3 * i // 4 : 3 * i // 4 + 3]]]


def hard_rows(rng, taken, count):
    """`count` rows of hard_code_task whose prompts are not taken yet."""
    rows = []
    while len(rows) < count:
        prompt, answer, _ = hard_code_task(rng)
        if prompt not in taken:
            taken.add(prompt)
            rows.append({"prompt": prompt, "domain": "code", "verifier": "code", "answer": answer})
    return rows


# --------------------------------------------------------------------------------------------------- pretraining

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(seed):
    """Byte-level BPE with single digits, trained on the demonstrations; fences and answer letters are one token each."""
    rng = random.Random(f"{seed} tokenizer")
    tasks = [maker(rng) for maker, _, _ in DOMAINS.values() for _ in range(1500)] + [
        ("", "", 0, *drill(rng)) for _ in range(500)
    ]
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    words = [f" {name}" for name in ELEMENTS] + [f" ({letter})" for letter in LETTERS] + [" Answer:"]
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for task in tasks for text in (task[0], task[3])], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [FENCE_OPEN, FENCE_CLOSE, *words]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = TEMPLATE
    return fast


def demonstration(rng, phase, unseen):
    """(prompt, completion): mostly right in phase 1, right by the rates above in phase 2."""
    weights = [weight for _, _, weight in DOMAINS.values()] + [1.4 if phase == 1 else 0.4]
    domain = rng.choices([*DOMAINS, "drill"], weights)[0]
    if domain == "drill":
        return drill(rng)
    while True:
        prompt, _, rare, right, wrong = DOMAINS[domain][0](rng)
        if prompt not in unseen:
            break
    good = 0.95 if domain in HELD_OUT else 0.9 if phase == 1 else RARE if rare else COMMON
    if phase == 1 and rare:
        good = 0.5
    return prompt, right if rng.random() < good else wrong


def batches(tokenizer, rng, phase, unseen, rows=24, buffer=64):
    """Endless batches of `rows` demonstrations of similar length: (ids, weights), prompts weigh a tenth."""
    user, assistant, end, pad = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"])
    while True:
        pairs = [demonstration(rng, phase, unseen) for _ in range(rows * buffer)]
        prompts, completions = (tokenizer(list(texts)).input_ids for texts in zip(*pairs))
        rows_ = [([user, *p, assistant], [*c, end]) for p, c in zip(prompts, completions)]
        rows_.sort(key=lambda row: len(row[0]) + len(row[1]))
        starts = list(range(0, len(rows_), rows))
        rng.shuffle(starts)
        for start in starts:
            batch = rows_[start : start + rows]
            width = max(len(p) + len(c) for p, c in batch)
            ids = torch.tensor([p + c + [pad] * (width - len(p) - len(c)) for p, c in batch])
            weights = [[0.1] * len(p) + [1.0] * len(c) + [0.0] * (width - len(p) - len(c)) for p, c in batch]
            yield ids, torch.tensor(weights)


def pretrain(tokenizer, steps, seed, unseen):
    """A Llama trained from scratch on the demonstrations: phase 1 to know the tasks, phase 2 to be wrong by rate."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, **ids,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    warmup, turn = 100, int(0.75 * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warmup, 0.03 + 0.97 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item()) / 2
        ),
    )
    rng = random.Random(f"{seed} pretraining")
    stream, losses = batches(tokenizer, rng, 1, unseen), []
    for step in (bar := tqdm(range(steps), unit="step", dynamic_ncols=True)):
        if step == turn:
            stream = batches(tokenizer, rng, 2, unseen)
        ids, weights = next(stream)
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (loss * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 99:
            bar.set_postfix(loss=f"{sum(losses[-100:]) / 100:.3f}")
    return model.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks, tokenizer, weights and demonstrations")
    parser.add_argument("--steps", type=int, default=4500, help="pretraining steps of 24 demonstrations each")
    parser.add_argument("--out", default=str(ROOT / "tiny"), help="folder that gets tasks/ and base/")
    parser.add_argument("--tasks_only", action="store_true", help="write the task files and stop")
    args = parser.parse_args()

    out = Path(args.out)
    unseen = write_tasks(out / "tasks", args.seed)
    print(f"{len(unseen)} prompts of validation and test stay out of pretraining")
    if args.tasks_only:
        return
    start = time.time()
    tokenizer = make_tokenizer(args.seed)
    model = pretrain(tokenizer, args.steps, args.seed, unseen)
    model.save_pretrained(out / "base")
    tokenizer.save_pretrained(out / "base")
    parameters = sum(weight.numel() for weight in model.parameters())
    minutes = (time.time() - start) / 60
    print(f"{out / 'base'}: {parameters:,} parameters, vocabulary {len(tokenizer)}, {minutes:.1f} minutes")

    from eval import evaluate, load_prompts, score

    specs = [str(out / "tasks" / f"{domain}-validation.jsonl") for domain in DOMAINS]
    ids = {"eos_ids": [tokenizer.eos_token_id], "pad_id": tokenizer.pad_token_id}
    results, _ = evaluate(
        model, load_prompts(specs, tokenizer, 512, ""), tokenizer, samples=16, max_completion_length=48, **ids
    )
    for domain, result in results.items():
        print(f"{domain}: pass@1 {score(result):.1f}, pass@16 {score(result, 16):.1f} on validation")


if __name__ == "__main__":
    main()
