"""The tables of tiny/STUDY.md over several seeds of speedrun.sh, and every number in them as tiny/study.json.

    python tiny/study.py runs/study/seed0 runs/study/seed1 runs/study/seed2

A number is the mean over the seeds. Brackets are 95 % intervals of a bootstrap over tasks, the same tasks drawn for every
model and seed, so that differences are paired; parentheses hold the smallest and the largest seed. What stands in STUDY.md
above the first table is kept: it is written by hand. The README's table is written,
too, and pictures of the first seed to results/tiny.
"""

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from eval import draw_pictures, end_to_end, estimates, interval, minus, own_flops, own_seconds, roles, share_kept  # noqa: E402

MARK = "<!-- tables: python tiny/study.py -->"
HEADLINE = ("<!-- table: python tiny/study.py -->", "<!-- end of the table -->")  # in README.md


def over_seeds(rows):
    """{column: what is to be told} of one model's rows, one a seed: the mean, its interval over tasks, the seeds."""
    cells = {}
    for column in rows[0]:
        values = [row[column] for row in rows]
        if any(isinstance(value, str) for value in values):
            continue
        low, high = interval(sum(values) / len(values))
        seeds = [round(float(value[0]), 2) for value in values]
        cells[column] = {
            "mean": round(float(np.mean(seeds)), 2),
            "interval": [round(float(low), 2), round(float(high), 2)],
        }
        cells[column]["seeds"] = seeds
    return cells


def measure(results):
    """All numbers of the study out of the seeds' eval.json files -> {table: {model: {column: cell}}}."""
    worlds = [roles(result["models"]) for result in results]
    models, trained, held_out, fused = worlds[0]
    base, k = next(iter(models)), results[0]["settings"]["k"]
    avg, cover = ([estimates(world[0], n) for world in worlds] for n in (1, k))
    tables = {f"avg@{k}": {name: over_seeds([scores[name] for scores in avg]) for name in models}}
    others = [name for name in models if name != base]
    gains = {name: [minus(scores[name], scores[base]) for scores in avg] for name in others}
    tables["difference to the base"] = {name: over_seeds(rows) for name, rows in gains.items()}
    lost = {name: [minus(scores[name], scores["own expert"]) for scores in avg] for name in fused}
    tables["difference to the own expert"] = {name: over_seeds(rows) for name, rows in lost.items()}
    kept = {name: [share_kept(s[name], s[base], s["own expert"]) for s in avg] for name in fused}
    tables["share of the gain kept, %"] = {name: over_seeds(rows) for name, rows in kept.items()}
    wider = {name: [minus(scores[name], scores[base]) for scores in cover] for name in others}
    tables[f"pass@{k} gained over the base"] = {name: over_seeds(rows) for name, rows in wider.items()}
    pairs = [(a, b) for place, a in enumerate(fused) for b in fused[place + 1 :]]
    gaps = {f"{b} - {a}": [minus(scores[b], scores[a]) for scores in avg] for a, b in pairs}
    tables["pairs"] = {name: over_seeds(rows) for name, rows in gaps.items()}
    costs = {}
    for name in ("own expert", *fused):
        costs[name] = {}
        for label, what in (("FLOPs", own_flops), ("seconds", own_seconds)):
            unit = [end_to_end(world[0]["merge-task_arithmetic"]["cost"], what) for world in worlds]
            seeds = [round(end_to_end(w[0][name]["cost"], what) / whole, 3) for w, whole in zip(worlds, unit)]
            costs[name][label] = {"mean": round(float(np.mean(seeds)), 3), "seeds": seeds}
    tables["cost from end to end, experts + task arithmetic = 1"] = costs
    return tables, trained, held_out


def scales(folders):
    """{method: {scale: cell}}: validation average of every merge that was tried, and the scales that were chosen."""
    found = {}
    for folder in folders:
        for path in sorted(Path(folder).glob("choose-*/eval.json")):
            method = path.parent.name.removeprefix("choose-")
            avg = estimates(json.loads(path.read_text())["models"])
            for name, row in avg.items():
                scale = name.removeprefix(f"{method}-")
                found.setdefault(method, {}).setdefault(scale, []).append(round(float(row["average"][0]), 2))
    return {
        method: {scale: {"mean": round(float(np.mean(seeds)), 2), "seeds": seeds} for scale, seeds in row.items()}
        for method, row in found.items()
    }


def written(title, rows, columns, note=""):
    """A Markdown table; a cell is the mean, its interval over tasks where it has one, and the seeds' spread."""

    def show(cell):
        if not cell:
            return ""
        text = (
            f"{cell['mean']:.2f}"
            if "interval" not in cell
            else f"{cell['mean']:.1f} [{cell['interval'][0]:.1f}, {cell['interval'][1]:.1f}]"
        )
        low, high = min(cell["seeds"]), max(cell["seeds"])
        return text + (f" ({low:.1f}..{high:.1f})" if "interval" in cell else f" ({low:.2f}..{high:.2f})")

    lines = ["| model | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    lines += [
        f"| {name} | " + " | ".join(show(row.get(column)) for column in columns) + " |" for name, row in rows.items()
    ]
    return f"### {title[0].upper()}{title[1:]}\n\n" + (note + "\n\n" if note else "") + "\n".join(lines)


def headline(tables):
    """The README's table: means over the seeds, and the average's interval over tasks and spread over seeds."""
    avg, k = next((rows, title.split("@")[1]) for title, rows in tables.items() if title.startswith("avg@"))
    cost = next(rows for title, rows in tables.items() if title.startswith("cost"))
    kept = tables["share of the gain kept, %"]
    lines = [f"| avg@{k} | math | code | science | instruction | average | gain kept | held-out | cost (FLOPs) |"]
    lines += ["| --- |" + " ---: |" * 8]
    for name, row in avg.items():
        cells = [f"{row[domain]['mean']:.1f}" for domain in ("math", "code", "science", "instruction")]
        whole = row["average"]
        (low, high), seeds = whole["interval"], whole["seeds"]
        cells += [f"{whole['mean']:.1f} [{low:.1f}, {high:.1f}] ({min(seeds):.1f}..{max(seeds):.1f})"]
        cells += [f"{kept[name]['average']['mean']:.0f} %" if name in kept else ""]
        cells += [f"{row['held-out']['mean']:.1f}" if "held-out" in row else ""]
        cells += [f"{cost[name]['FLOPs']['mean']:.2f}" if name in cost else ""]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    folders = sys.argv[1:]
    if not folders:
        sys.exit("study.py: give the folders of speedrun.sh's seeds: runs/study/seed0 runs/study/seed1 ...")
    results = [json.loads((Path(folder) / "eval" / "eval.json").read_text()) for folder in folders]
    tables, trained, held_out = measure(results)
    tables["validation average by scale"] = scales(folders)
    found = {
        "settings": results[0]["settings"],
        "seeds": [result["settings"]["seed"] for result in results],
        "tables": tables,
    }
    (ROOT / "tiny" / "study.json").write_text(json.dumps(found, indent=1) + "\n")

    columns = [*trained, "average", "held-out"]
    text = []
    for title, rows in tables.items():
        if title == "pairs":
            shown = {name: row for name, row in rows.items() if "average" in row}
            text.append(written(title, shown, ["average"], "Differences of the averages."))
        elif title.startswith("cost"):
            text.append(
                written(
                    title,
                    rows,
                    ["FLOPs", "seconds"],
                    "With the evaluations that chose a merge's scale; the paper's GPU hours: mix 0.58-0.67, mopd 1.14-1.19.",
                )
            )
        elif title.startswith("validation"):
            names = [name for name in next(iter(rows.values()))]
            text.append(written(title, rows, names, "avg@4 of the merges tried, mean over the four domains."))
        else:
            wanted = columns if "expert" not in title and "share" not in title else [*trained, "average"]
            text.append(
                written(title, rows, [*wanted, *held_out] if title.startswith("difference to the base") else wanted)
            )
    study = ROOT / "tiny" / "STUDY.md"
    prose = study.read_text().split(MARK)[0] if study.exists() else "# The tiny study\n\n"
    study.write_text(prose + MARK + "\n\n" + "\n\n".join(text) + "\n")
    readme = (ROOT / "README.md").read_text()
    before, _, rest = readme.partition(HEADLINE[0])
    after = rest.partition(HEADLINE[1])[2]
    (ROOT / "README.md").write_text(f"{before}{HEADLINE[0]}\n\n{headline(tables)}\n\n{HEADLINE[1]}{after}")
    few = ["base", *trained, "merge-task_arithmetic", "mix", "mopd"]  # more would hide each other
    draw_pictures({name: results[0]["models"][name] for name in few}, ROOT / "results" / "tiny")
    print(
        f"{len(folders)} seeds: tiny/study.json, the tables of tiny/STUDY.md and README.md, results/tiny/*.png are written"
    )


if __name__ == "__main__":
    main()
