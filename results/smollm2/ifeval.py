"""IFEval's two strict scores from an evaluation's samples: share of prompts, and share of single instructions, followed.

python results/smollm2/ifeval.py OUT/ifeval/samples.jsonl DATA
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from verifiers import load_tasks, verify_batch

samples, data = sys.argv[1:]
golds = {task["id"]: json.loads(task["answer"]) for task in load_tasks("ifeval", data_dir=data)}
rows = [json.loads(line) for line in Path(samples).read_text().splitlines()]
singles = []
for row in rows:
    for name, arguments in zip(*(golds[row["id"]][key] for key in ("instruction_id_list", "kwargs"))):
        gold = {"instruction_id_list": [name], "kwargs": [arguments]}
        singles.append(("ifeval", row["completion"], json.dumps(gold)))
prompts = sum(row["score"] for row in rows) / len(rows)
instructions = sum(verify_batch(singles)) / len(singles)
print(f"prompts {100 * prompts:.1f} of {len(rows)}, instructions {100 * instructions:.1f} of {len(singles)}, ", end="")
print(f"their mean {50 * (prompts + instructions):.1f}")
