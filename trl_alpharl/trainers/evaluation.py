"""Evaluation by sampling: scores, KL and entropy of completions for held-out prompts, and tables of them."""

from __future__ import annotations

from typing import Any

from accelerate.utils import gather_object
from rich.console import Console
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ..functional.masking import masked_sum
from ..records import Scored
from ..rollout.prompts import seeded_generator
from ..rollout.sampler import sample
from ..rollout.scoring import plan_chunks
from . import inputs
from .loader import PromptLoader
from .metrics import MetricSums

logger = logging.get_logger(__name__)

SAMPLE_ROWS = 5


class EvaluationMixin:
    """The trainer's `evaluate()` and `generate_completions()`."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PromptLoader:
        """Batches of rows of an evaluation set; a string names one of a dict of sets."""
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        if eval_dataset is None:
            raise ValueError("evaluation needs an eval_dataset.")
        if eval_dataset is not self.eval_dataset:  # that one was checked when the trainer was made
            inputs.check_dataset(self.tokenize_prompts, eval_dataset, "eval_dataset")
        args = self.args
        return PromptLoader(eval_dataset, args.per_device_eval_batch_size, args.process_index, args.world_size)

    def evaluation_loop(
        self,
        dataloader: PromptLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sample a completion for every row and average what training logs about completions.

        The draw depends on the seed alone: two evaluations differ by the weights, not by luck.
        """
        sums = MetricSums()
        for number, examples in enumerate(dataloader):
            scored = self._score_examples(examples, number, sums)
            if not scored.finite:
                logger.warning(f"{description}: {scored.cause} is not finite; those rows are left out of the means.")
            rows = scored.valid.sum().cpu()
            mask = scored.rollout.completion_mask & scored.valid.unsqueeze(1)
            sums.add("objective/scores", scored.scores.sum().cpu(), rows)
            sums.add("objective/kl", self._kl(scored).sum().cpu(), rows)
            sums.add("objective/entropy", -masked_sum(scored.old_per_token_logps, mask).cpu(), rows)
            sums.add("completions/mean_length", scored.rollout.completion_mask.sum().cpu(), len(examples))
            sums.add("completions/finished", scored.rollout.finished.sum().cpu(), len(examples))
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        means = sums.flush(self._sum_over_processes, self._union_over_processes)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(dataloader.dataset))

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Sample completions for the evaluation prompts, print the first few as a table, and return them all.

        `sampling=True` takes each process's first batch only. Rows are dicts with `query`, `model response` and
        `score`; without an eval_dataset the list is empty, as in TRL 1.12. The policy's temperature is kept.
        """
        if self.eval_dataset is None:
            return []
        dataset = next(iter(self.eval_dataset.values())) if isinstance(self.eval_dataset, dict) else self.eval_dataset
        table: list[dict[str, Any]] = []
        for number, examples in enumerate(self.get_eval_dataloader(dataset)):
            scored = self._score_examples(examples, number, MetricSums())
            table += self._table_rows(scored)
            if sampling:
                break
        if self.accelerator.num_processes > 1:
            table = gather_object(table)
        if self.is_world_process_zero():
            self._show_table(table)
        return table

    def score_dataset(self, dataset: Any) -> list[dict[str, Any]]:
        """One completion and its score for every row of a dataset, on this process; nothing is printed or logged."""
        loader = PromptLoader(dataset, self.args.per_device_eval_batch_size, 0, 1)
        return [
            row
            for number, examples in enumerate(loader)
            for row in self._table_rows(self._score_examples(examples, number, MetricSums()))
        ]

    def _score_examples(self, examples: list[dict[str, Any]], number: int, sums: MetricSums) -> Scored:
        seed = seeded_generator(self.args.seed, number, self.args.process_index, 2).initial_seed()
        with self.accelerator.autocast():
            prompts = self.tokenize_prompts(examples)
            rollout = sample(self.model, prompts, examples, -1, self.sampling, seed)
        rows = min(self.args.per_device_train_batch_size, len(examples))
        return self._score(rollout, plan_chunks(rollout, [[list(range(len(examples)))]], rows), sums)

    def _table_rows(self, scored: Scored) -> list[dict[str, Any]]:
        prompts, completions, _ = self._texts(scored.rollout)
        return [
            {"query": as_text(prompt), "model response": as_text(completion), "score": score}
            for prompt, completion, score in zip(prompts, completions, scored.scores.tolist())
        ]

    def _show_table(self, table: list[dict[str, Any]]) -> None:
        # reporting is outside the loop and never calls it; the loop may not import it, so the table is built here
        from rich.markup import escape
        from rich.table import Table

        shown = Table("query", "model response", "score", show_lines=True, title=f"step {self.state.global_step}")
        for row in table[:SAMPLE_ROWS]:
            shown.add_row(escape(row["query"]), escape(row["model response"]), f"{row['score']:.3f}")
        Console().print(shown)
        if "wandb" in self.args.report_to:
            import wandb

            if wandb.run is not None:
                columns = list(table[0])
                wandb.log(
                    {"completions": wandb.Table(columns=columns, data=[[row[c] for c in columns] for row in table])}
                )

    def _sample_table_due(self) -> bool:
        """Whether the rollout that just ended is one after which a table is printed."""
        args = self.args
        if args.num_sample_generations <= 0 or self.eval_dataset is None:
            return False
        rollouts = max(1, args.max_steps // args.steps_per_rollout)
        every = max(1, rollouts // args.num_sample_generations)
        return (self.state.global_step // args.steps_per_rollout - 1) % every == 0


def as_text(message: Any) -> str:
    """A prompt or completion for people: text as it is, chat turns one a line."""
    if isinstance(message, str):
        return message
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in message)
