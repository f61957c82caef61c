"""How fast merge.py is and what memory it takes, beside mergekit and beside a plain copy of the same bytes.

    python tests/bench/bench_merge.py --model SMOLLM2 --work DIR --json result.json      needs mergekit 0.1.5 (requirements.txt here)
    python tests/bench/bench_merge.py --large --work DIR --methods ties linear           a synthetic model of 1.5 billion bfloat16

Three experts are made of the model by noise, each tensor's a hundredth of its own spread. A round runs the copy, then each
method with merge.py and with mergekit, each in a process of its own with one thread; --runs rounds alternate. Seconds are
those of the merge itself, without imports: wall, and in brackets processor seconds; all files are in the page cache. The copy reads the base and the experts
in pieces of 256 KB, writes the base's bytes, and syncs them to disk as merge.py does (mergekit does not). Memory is the
peak of RssAnon (what the process allocated; pages of mapped files are not in it), sampled every 5 ms.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = """
import sys, time; sys.path.insert(0, {root!r}); sys.argv = ['merge.py', *{words!r}]
import torch, merge
torch.set_num_threads(1)
start = time.perf_counter(), time.process_time()
merge.main()
print('SECONDS', time.perf_counter() - start[0], time.process_time() - start[1])
"""
PEER = """
import time, torch
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
torch.set_num_threads(1)
config = MergeConfiguration.model_validate({config!r})
start = time.perf_counter(), time.process_time()
run_merge(config, {out!r}, options=MergeOptions(quiet=True, write_model_card=False))
print('SECONDS', time.perf_counter() - start[0], time.process_time() - start[1])
"""
COPY = """
import os, time
start, buffer = (time.perf_counter(), time.process_time()), bytearray(1 << 18)
view = memoryview(buffer)
with open({out!r}, 'wb', buffering=0) as target:
    for path in {paths!r}:
        with open(path, 'rb', buffering=0) as file:
            while count := file.readinto(buffer):
                if path in {written!r}:
                    target.write(view[:count])
    os.fsync(target.fileno())
print('SECONDS', time.perf_counter() - start[0], time.process_time() - start[1])
"""
# method: flags of merge.py, mergekit's method, parameters of its models, and of its merge
METHODS = {
    "linear": ([], "linear", {}, {}),
    "task_arithmetic": (["--scale", 0.6], "task_arithmetic", {}, {"lambda": 0.6}),
    "ties": (["--density", 0.2], "ties", {"density": 0.2}, {}),
    "dare_ties": (["--density", 0.8], "dare_ties", {"density": 0.8}, {}),
    "sce": ([], "sce", {}, {}),
    "sce_half": (["--select_topk", 0.5], "sce", {}, {"select_topk": 0.5}),
    "della": ([], "della", {"density": 0.5, "epsilon": 0.15}, {}),
    "breadcrumbs": ([], "breadcrumbs", {"density": 0.9, "gamma": 0.01}, {}),
}


def run(script, paths, python=sys.executable):
    """Run a script on files that were read just before -> wall seconds, processor seconds, peak of RssAnon in MB."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [python, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.split("RssAnon:")[1].split()[0]) // 1000)
        except (OSError, IndexError):  # it ended just now
            pass
        time.sleep(0.005)
    printed, errors = process.communicate()
    if process.returncode:
        sys.exit(f"a run failed: {errors[-2000:]}")
    wall, cpu = printed.split("SECONDS")[1].split()
    return float(wall), float(cpu), peak


def make_models(args):
    """The base and three experts in args.work, float32 from args.model, or bfloat16 and synthetic."""
    import torch
    from safetensors.torch import load_file, save_file

    folders = [args.work / name for name in ("base", "a", "b", "c")]
    if all((folder / "config.json").exists() for folder in folders):
        return folders
    if args.large:  # the shapes of Qwen2.5-1.5B, a shard for each of its layers or so
        shapes = [{"model.embed_tokens.weight": (151936, 1536)}]
        for layer in range(args.layers):
            sizes = {"self_attn.q_proj": (1536, 1536), "self_attn.k_proj": (256, 1536), "self_attn.v_proj": (256, 1536)}
            sizes |= {"self_attn.o_proj": (1536, 1536), "mlp.gate_proj": (8960, 1536), "mlp.up_proj": (8960, 1536)}
            sizes |= {"mlp.down_proj": (1536, 8960), "input_layernorm": (1536,), "post_attention_layernorm": (1536,)}
            shapes.append({f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()})
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
        config |= {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": args.layers,
            "torch_dtype": "bfloat16",
        }
        config |= {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936}
        shapes[-1]["model.norm.weight"] = (1536,)
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        if args.large:
            names = [f"model-{i + 1:05d}-of-{len(shapes):05d}.safetensors" for i in range(len(shapes))]
            for place, (name, shard) in enumerate(zip(names, shapes)):
                tensors = {}
                for number, (key, shape) in enumerate(shard.items()):
                    common = torch.Generator().manual_seed(1000 * place + number)
                    tensor = torch.empty(shape).normal_(0, 0.02, generator=common)
                    if seed:
                        tensor.add_(torch.empty(shape).normal_(0, 5e-4, generator=common.manual_seed(seed + 10**6)))
                    tensors[key] = tensor.bfloat16()
                save_file(tensors, folder / name, {"format": "pt"})
            index = {"metadata": {}, "weight_map": {key: name for name, shard in zip(names, shapes) for key in shard}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            (folder / "config.json").write_text(json.dumps(config))
            continue
        for path in args.model.iterdir():
            if path.suffix in (".json", ".jinja", ".txt", ".model"):
                shutil.copyfile(path, folder / path.name)
        tensors, generator = load_file(args.model / "model.safetensors"), torch.Generator().manual_seed(seed)
        for key, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator) * (0.01 if seed else 0.0)
            tensors[key] = tensor.float() + noise * tensor.float().std()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folders


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="folder of the model that the experts are made of, such as SmolLM2-135M"
    )
    parser.add_argument("--work", type=Path, required=True, help="scratch folder: some 5 times the model's size")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["linear", "task_arithmetic", "ties", "dare_ties", "sce"]
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", default=sys.executable, help="python that has mergekit; 'none': leave it out")
    parser.add_argument(
        "--large", action="store_true", help="3 GB a model; give --layers to see that memory does not grow"
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--json", type=Path, help="file for the figures of every run")
    args = parser.parse_args()
    folders = make_models(args)
    out, measured = str(args.work / "out"), {}
    paths = [str(path) for folder in folders for path in sorted(folder.glob("*.safetensors"))]
    for _ in range(args.runs):
        scripts = {
            ("copy", ""): (COPY.format(out=out, paths=paths, written=[p for p in paths if str(folders[0]) in p]), None)
        }
        for method in args.methods:
            flags, name, of_models, of_merge = METHODS[method]
            words = ["--base", folders[0], "--experts", *folders[1:], "--method", name, *flags, "--out", out]
            words += ["--dtype", "bfloat16"] if args.large else []
            scripts[method, "merge.py"] = OURS.format(root=str(ROOT), words=[str(word) for word in words]), None
            if args.peer != "none":
                models = [{"model": str(f), "parameters": {"weight": 1.0, **of_models}} for f in folders[1:]]
                config = {"merge_method": name, "models": models, "parameters": of_merge, "dtype": "float32"}
                config |= {} if name == "linear" else {"base_model": str(folders[0])}
                config |= {"out_dtype": "bfloat16"} if args.large else {}
                scripts[method, "mergekit"] = PEER.format(config=config, out=out), args.peer
        for key, (script, python) in scripts.items():
            measured.setdefault(" ".join(key).strip(), []).append(run(script, paths, python or sys.executable))
            shutil.rmtree(out) if os.path.isdir(out) else os.remove(out)
    copy = statistics.median(wall for wall, _, _ in measured["copy"])
    for key, rows in measured.items():
        walls, middle = sorted(wall for wall, _, _ in rows), statistics.median(wall for wall, _, _ in rows)
        cpu = statistics.median(cpu for _, cpu, _ in rows)
        line = f"{key:26} min {walls[0]:7.2f}  median {middle:7.2f}  max {walls[-1]:7.2f} s  ({cpu:.2f})  {middle / copy:5.2f} x the copy"
        peer = measured.get(key.replace("merge.py", "mergekit"))
        if "merge.py" in key and peer:
            line += f"  mergekit takes {statistics.median(wall for wall, _, _ in peer) / middle:5.2f} x as long"
        print(f"{line}  peak {max(peak for _, _, peak in rows)} MB", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"processors": os.cpu_count(), "runs": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
