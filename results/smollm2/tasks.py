"""Write two domains into FOLDER: constraints-{train,test}.jsonl and arithmetic-{train,test}.jsonl.

    python results/smollm2/tasks.py FOLDER

Constraints are short requests under one IFEval constraint, with a word that must occur, so that "No." breaks a rule.
Train and test share openings and constraints, but no topic. Arithmetic is sums and products of one-digit numbers behind
four solved ones, as the model rarely answers with a bare number otherwise. Train and test share no pair of numbers.
"""

import json
import random
import sys
from pathlib import Path

TOPICS = {
    "train": "rain music winter bread chess horses rivers trains gardens coffee tigers paper bridges honey boats dreams".split(),
    "test": "mountains snow bicycles cheese lions letters clouds pianos".split(),
}
OPENINGS = ["Write a short note on {}.", "Tell me something about {}.", "Describe {}.", "Write two sentences about {}."]
CONSTRAINTS = [  # request, IFEval's id and arguments
    ("Do not use any commas.", "punctuation:no_comma", {}),
    ("Wrap your entire answer in double quotation marks.", "startend:quotation", {}),
    ("Use fewer than 25 words.", "length_constraints:number_words", {"relation": "less than", "num_words": 25}),
    ("Give it a title in double angular brackets, like <<title>>.", "detectable_format:title", {}),
    ("Answer with exactly 2 bullet points, each on a line that starts with *.", "detectable_format:number_bullet_lists", {"num_bullets": 2}),
]  # fmt: skip


def constraints(split):
    for topic in TOPICS[split]:
        for opening in OPENINGS:
            for request, name, arguments in CONSTRAINTS:
                gold = {
                    "instruction_id_list": [name, "keywords:existence"],
                    "kwargs": [arguments, {"keywords": [topic]}],
                }
                prompt = f"{opening.format(topic)} {request} Use the word {topic}."
                yield dict(prompt=prompt, domain="constraints", verifier="ifeval", answer=json.dumps(gold))


def arithmetic(split, rng):
    for sign, smallest in {"+": 1, "x": 2}.items():
        pairs = [(a, b) for a in range(smallest, 10) for b in range(a, 10)]
        random.Random(0).shuffle(pairs)
        test, train = pairs[: len(pairs) // 4], pairs[len(pairs) // 4 :]
        for a, b in 4 * (test if split == "test" else train):
            shots = rng.sample([pair for pair in train if pair != (a, b)], 4)
            lines = [rng.sample(pair, 2) for pair in [*shots, (a, b)]]  # either order
            answers = [str(x + y if sign == "+" else x * y) for x, y in lines]
            prompt = []
            for (x, y), answer in zip(lines, answers):
                prompt += [dict(role="user", content=f"{x} {sign} {y} = ?"), dict(role="assistant", content=answer)]
            yield dict(prompt=prompt[:-1], domain="arithmetic", verifier="exact", answer=answers[-1])


def main(folder):
    for split in ("train", "test"):
        for name, rows in {
            "constraints": list(constraints(split)),
            "arithmetic": list(arithmetic(split, random.Random(split))),
        }.items():
            random.Random(0).shuffle(rows)
            Path(folder, f"{name}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


main(sys.argv[1])
