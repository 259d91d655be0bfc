"""The quickstart over several seeds: what the README's first command comes to.

    python benchmarks/quickstart.py [--recipe quickstart/arpo_tiny] [--seeds 0 1 2] [--out FILE]

Runs `trl-alpharl train RECIPE --seed S` once a seed, each in a process of its own, and prints a table: the mean score
of held-out prompts before and after, the difference in standard errors, KL and entropy of the last rollout, seconds of
training. Seconds depend on the machine and its load; nothing here is a comparison. FILE is by default
benchmarks/results/quickstart_<last part of the recipe's name>.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = "quickstart/arpo_tiny"


def run(recipe: str, seed: int) -> dict:
    """The summary of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trl_alpharl.cli.train", recipe, "--seed", str(seed), "--output_dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    del summary["rows"]
    return {"seed": seed, **summary}


def table(summaries: list[dict]) -> str:
    """The seeds as a Markdown table."""
    lines = [
        "| seed | score before | score after | difference in standard errors | KL | entropy | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for summary in summaries:
        before, after = summary["score_before"], summary["score_after"]
        error = (summary["score_before_se"] ** 2 + summary["score_after_se"] ** 2) ** 0.5
        cells = (
            summary["seed"],
            f"{before:.2f} ± {summary['score_before_se']:.2f}",
            f"{after:.2f} ± {summary['score_after_se']:.2f}",
            f"{(after - before) / error:.1f}",
            f"{summary['kl']:.1f}",
            f"{summary['entropy']:.1f}",
            f"{summary['seconds']:.0f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the seeds, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(f"benchmarks/results/quickstart_{Path(options.recipe).stem}.json")
    summaries = [run(options.recipe, seed) for seed in options.seeds]
    print(table(summaries))
    print(f"\nversions: {summaries[0]['versions']}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"recipe": options.recipe, "runs": summaries}, indent=1) + "\n")


if __name__ == "__main__":
    main()
