import math
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_alpharl.functional.logps import chunked_logps_and_entropy, logps_and_entropy


def naive(logits, labels):
    """torch's own distribution, with its own autograd graph, in float64."""
    distribution = torch.distributions.Categorical(logits=logits.double(), validate_args=False)
    return distribution.log_prob(labels), distribution.entropy()


def random_problem(rows, hidden_size, vocab_size, dtype=torch.float32):
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype)
    hidden = torch.randn(rows, hidden_size, dtype=dtype, requires_grad=True)
    return hidden, torch.randint(vocab_size, (rows,)), head


class LiveTensors(TorchDispatchMode):
    """Watches every tensor that an operator makes: the largest one, and how many large ones live at once."""

    def __init__(self, large):
        super().__init__()
        self.large, self.largest, self.most_large, self._alive = large, 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                if tensor.numel() >= self.large:
                    self._alive.append(weakref.ref(tensor))
        storages = {t.untyped_storage().data_ptr() for ref in self._alive if (t := ref()) is not None}
        self.most_large = max(self.most_large, len(storages))
        return result


def test_values_of_known_distributions():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(0.7), math.log(0.2), math.log(0.1), -math.inf]])
    logps, entropies = logps_and_entropy(logits, torch.tensor([3, 1]))
    by_hand = -sum(p * math.log(p) for p in (0.7, 0.2, 0.1))
    assert logps.tolist() == pytest.approx([math.log(0.25), math.log(0.2)])
    assert entropies.tolist() == pytest.approx([math.log(4), by_hand])


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_equals_torch_distributions(shift):
    torch.manual_seed(1)
    logits, labels = 5 * torch.randn(32, 11) + shift, torch.randint(11, (32,))
    for found, wanted in zip(logps_and_entropy(logits, labels), naive(logits, labels)):
        assert torch.allclose(found.double(), wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_are_at_least_fp32(dtype):
    logps, entropies = logps_and_entropy(torch.randn(2, 5).to(dtype), torch.tensor([0, 4]))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert logps.dtype == entropies.dtype == expected


def test_entropy_of_a_certain_token_is_zero_and_never_negative():
    logits = torch.tensor([[80.0, 0.0, 0.0], [0.0, -math.inf, -math.inf], [20.0, 0.0, -20.0]])
    entropies = logps_and_entropy(logits, torch.tensor([0, 0, 0]))[1]
    assert torch.all(entropies >= 0)
    assert entropies[:2].tolist() == pytest.approx([0, 0], abs=1e-30)


@pytest.mark.parametrize("use", [(1, 0), (0, 1), (1.5, -0.7)], ids=["logps", "entropies", "both"])
def test_gradients_are_exact(use):
    torch.manual_seed(2)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 5, 2, 2])

    def loss(logits):
        logps, entropies = logps_and_entropy(logits, labels)
        return sum(weight * x for weight, x in zip(use, (logps, entropies)) if weight)

    assert torch.autograd.gradcheck(loss, logits, atol=1e-9, rtol=1e-7)


def test_a_forbidden_token_leaves_all_gradients_finite_and_equal_to_those_without_it():
    logits = torch.tensor([[0.3, -1.0, -math.inf, 2.0]], requires_grad=True)
    kept = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    sum(x.sum() for x in logps_and_entropy(logits, torch.tensor([3]))).backward()
    sum(x.sum() for x in naive(kept, torch.tensor([2]))).backward()
    assert logits.grad[0, 2] == 0
    assert torch.allclose(logits.grad[0, [0, 1, 3]], kept.grad[0], atol=1e-6)


def test_a_nan_is_not_hidden():
    logps, entropies = logps_and_entropy(torch.tensor([[0.0, math.nan]]), torch.tensor([0]))
    assert logps.isnan() and entropies.isnan()


@pytest.mark.parametrize("rows", [0, 1, 7, 16, 21])
def test_chunked_equals_the_naive_path_in_values_and_all_gradients(rows):
    hidden, labels, head = random_problem(rows, hidden_size=8, vocab_size=40)
    weights = torch.randn(2, rows)
    outputs = chunked_logps_and_entropy(hidden, labels, head, 0.7, max_chunk_elements=5 * 40, vocab_size=40)
    assert all(x.shape == (rows,) for x in outputs)
    expected = naive(head(hidden) / 0.7, labels)
    for found, wanted in zip(outputs, expected):
        assert torch.allclose(found.double(), wanted, atol=1e-6)
    parameters = [hidden, head.weight]
    found = torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, outputs)), parameters)
    wanted = torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, expected)), parameters)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted))


def test_no_tensor_is_larger_than_one_chunk_forward_and_backward():
    chunk_rows, vocab_size = 16, 256

    def peak(rows):
        hidden, labels, head = random_problem(rows, hidden_size=4, vocab_size=vocab_size)
        with LiveTensors(large=chunk_rows * vocab_size) as seen:
            logps, entropies = chunked_logps_and_entropy(
                hidden, labels, head, 1.0, max_chunk_elements=chunk_rows * vocab_size, vocab_size=vocab_size
            )
            (logps.sum() + entropies.sum()).backward()
        assert seen.largest == chunk_rows * vocab_size
        return seen.most_large

    few, many = peak(4 * chunk_rows), peak(16 * chunk_rows)
    assert few == many <= 4  # what lives at once does not depend on the number of chunks


def test_without_gradients_nothing_is_recomputed():
    hidden, labels, head = random_problem(10, 4, 8)
    calls = []
    counted = lambda x: (calls.append(len(x)), head(x))[1]  # noqa: E731
    with torch.no_grad():
        chunked_logps_and_entropy(hidden, labels, counted, 1.0, max_chunk_elements=4 * 8, vocab_size=8)
    assert calls == [4, 4, 4]  # equal chunks: the last is filled up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_rows_get_equal_bits_in_every_chunk_and_with_gradients(dtype):
    torch.manual_seed(3)
    head = torch.nn.Linear(64, 300, bias=False, dtype=dtype)
    hidden = torch.randn(1, 64, dtype=dtype).expand(7, 64).contiguous()
    labels = torch.full((7,), 7)

    def run():  # chunks of 3, 3 and 1 row; without filler rows the last one takes another matrix kernel
        return chunked_logps_and_entropy(hidden, labels, head, 0.7, max_chunk_elements=3 * 300, vocab_size=300)

    with torch.no_grad():
        scored = run()
    for scored_part, trained_part in zip(scored, run()):
        assert len(set(scored_part.tolist())) == 1
        assert torch.equal(scored_part, trained_part)


def test_a_row_longer_than_the_limit_is_a_chunk_of_its_own():
    hidden, labels, head = random_problem(3, 4, 50)
    logps, _ = chunked_logps_and_entropy(hidden, labels, head, 1.0, max_chunk_elements=10, vocab_size=50)
    assert torch.allclose(logps.double(), naive(head(hidden), labels)[0], atol=1e-6)


def test_the_recompute_runs_under_the_callers_context():
    hidden, labels, head = random_problem(6, 4, 8)
    events = []

    @contextmanager
    def record(phase):
        events.append(phase)
        yield

    logps, _ = chunked_logps_and_entropy(
        hidden,
        labels,
        head,
        1.0,
        max_chunk_elements=3 * 8,
        context_fn=lambda: (record("forward"), record("recompute")),
        vocab_size=8,
    )
    logps.sum().backward()
    assert events == ["forward", "forward", "recompute", "recompute"]
