"""Write FOLDER/constraints-{train,test}.jsonl: short requests under one IFEval constraint, with a word that must occur.

    python results/smollm2/tasks.py FOLDER

The word is there so that "No." breaks a rule. Train and test share openings and constraints, but no topic.
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


def main(folder):
    for split, topics in TOPICS.items():
        rows = []
        for topic in topics:
            for opening in OPENINGS:
                for request, name, arguments in CONSTRAINTS:
                    gold = {
                        "instruction_id_list": [name, "keywords:existence"],
                        "kwargs": [arguments, {"keywords": [topic]}],
                    }
                    prompt = f"{opening.format(topic)} {request} Use the word {topic}."
                    rows.append(dict(prompt=prompt, domain="constraints", verifier="ifeval", answer=json.dumps(gold)))
        random.Random(0).shuffle(rows)
        Path(folder, f"constraints-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


main(sys.argv[1])
