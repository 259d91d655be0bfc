"""The comparison of vs_trl.py on one GPU: a 7B-shaped model with random weights, in bf16 and in NF4, with LoRA.

    bash benchmarks/gpu.sh [--minutes 7.5] [--out FILE] [--trl_path DIR]

Ours and TRL 1.12's trainer, each in a process of its own, one after the other; a run that does not fit into the memory
or the time says so in its row. Weights are made on the card, nothing is downloaded but TRL 1.12 itself (by pip, without
dependencies: all other packages are those of this environment); without it ours runs alone. --trl_path names a folder
that holds TRL 1.12. Without a GPU a model of two layers runs on the CPU, which shows that the script works, no more.

There is one run a side, not interleaved: the spread is that of the updates, and a figure for publication needs
`vs_trl.py --device cuda`. In NF4 TRL's critic has 4-bit weights too, of which its trainer trains embeddings, norms and
head.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from speed import report
from speed.options import describe, write_json
from speed.processes import ROOT, Sides, describe_machine, fetch_trl
from speed.result import card, versions
from speed.work import Work, random_prompts

from trl_alpharl.builtin.cache import default_root

DTYPES = ("bfloat16", "nf4")
SIDES = {"ours": "ours", "trl": "TRL 1.12"}
LEAST_S = 10.0  # time under which no run is started
FULL = {"rows": 32, "prompt_tokens": 128, "response_tokens": 128, "micro_batch": 8, "updates": report.WARM_UP + 2}
TINY = {"rows": 4, "prompt_tokens": 4, "response_tokens": 6, "micro_batch": 2, "updates": report.WARM_UP + 1}


def work_of(dtype: str, device: str) -> Work:
    """The 7B shape on a GPU, two layers on the CPU."""
    model, sizes = ("7b", FULL) if device == "cuda" else ("tiny", TINY)
    rest = {name: value for name, value in sizes.items() if name not in ("rows", "prompt_tokens")}
    prompts = random_prompts(model, sizes["rows"], sizes["prompt_tokens"], ragged=False)
    return Work(model=model, prompts=prompts, dtype=dtype, device=device, **rest)


def run_all(sides: Sides, names: list[str], device: str, end: float) -> list[dict[str, Any]]:
    """Every type of weights on every side, while there is time."""
    runs = []
    for dtype in DTYPES:
        for side in names:
            work, left = work_of(dtype, device), end - time.monotonic()
            result = {"failed": "no time left"} if left < LEAST_S else sides.run(side, work, timeout=left)
            label = f"{SIDES[side]}, {dtype}"
            runs.append({**report.figures({**result, "side": label}, work), "dtype": dtype})
            print(f"{label}: {runs[-1].get('failed', 'done')}", flush=True)
    return runs


def main(words: list[str] | None = None) -> None:
    """Run, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=7.5, help="when to stop (default: %(default)s)")
    parser.add_argument("--sides", choices=["both", "ours"], default="both")
    parser.add_argument("--trl_python", help="interpreter of an environment with TRL 1.12")
    parser.add_argument("--trl_path", help="a folder that holds TRL 1.12 (default: fetched by pip)")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/gpu.json, with a GPU only)")
    options = parser.parse_args(words)
    end = time.monotonic() + 60 * options.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ["ours"] if options.sides == "ours" else ["ours", "trl"]
    if names == ["ours", "trl"] and not (options.trl_python or options.trl_path):
        options.trl_path = fetch_trl(default_root() / "trl-1.12-alone", timeout=60)
        if options.trl_path is None:
            names = ["ours"]
            print("TRL 1.12 cannot be fetched: ours alone")
    machine = {**describe_machine(core=None), "card": card(device), "versions": versions()}
    runs = run_all(Sides(options.trl_python, options.trl_path), names, device, end)
    print(f"\n{machine['card'] or machine['processor']}; {describe(work_of(DTYPES[0], device))}; and in {DTYPES[1]}\n")
    print(report.runs_table(runs, {}))
    if len(names) > 1:
        print(f"\n{report.DIFFERENCES}")
    out = options.out or (ROOT / "benchmarks/results/gpu.json" if device == "cuda" else None)
    write_json(out, "gpu_bench.py", words, {"machine": machine, "differences": report.DIFFERENCES, "runs": runs})


if __name__ == "__main__":
    main()
