import copy

import pytest
import torch
from peft import get_peft_model

from trl_alpharl.roles.actor_critic import ActorCritic
from trl_alpharl.roles.saved_bytes import saved_bytes_per_token


def really_kept(roles, rows, width, completion):
    """Bytes of all storages that a training forward of this size keeps, the weights' own left out."""
    weights = {p.untyped_storage().data_ptr() for p in roles.parameters()}
    kept = {}
    ids = torch.randint(2, 60, (rows, width))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    places = torch.arange(width).expand(rows, width)

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stats = roles(ids, mask, places, places[:, -completion - 1 : -1], ids[:, :completion])
    assert stats.values.requires_grad
    return sum(size for pointer, size in kept.items() if pointer not in weights)


@pytest.mark.parametrize("critic", ["shared", "adapter"])
@pytest.mark.parametrize("rows, width", [(4, 64), (9, 50)])
def test_predicts_what_other_sizes_keep(model, lora, critic, rows, width):
    roles = ActorCritic(get_peft_model(model, lora), critic=critic)
    predicted = saved_bytes_per_token(roles) * rows * width
    assert predicted == pytest.approx(really_kept(roles, rows, width, width // 2), rel=0.2)


def test_roles_apart_keep_no_more_than_the_greater_of_them(model, lora):
    roles = ActorCritic(get_peft_model(model, lora), critic="adapter")
    together, policy, value = (saved_bytes_per_token(roles, [want]) for want in ("policy+value", "policy", "value"))
    assert saved_bytes_per_token(roles, ("policy", "value")) == max(policy, value) < 0.6 * together
    assert policy + value == pytest.approx(together, rel=0.05)


def test_checkpointed_layers_keep_less_and_all_is_left_as_it_was(model, lora):
    roles = ActorCritic(get_peft_model(model, lora)).train()
    plain = saved_bytes_per_token(roles)
    roles.activation_checkpointing_enable()
    assert saved_bytes_per_token(roles) < 0.75 * plain
    assert roles.policy.is_activation_checkpointing and roles.training
    assert all(p.grad is None for p in roles.parameters())


def widest(run):
    """Rows x width of the chunks of a rollout."""
    rollout = run.rollout()
    return {chunk.input_ids.shape[0] for chunk in run.plan(rollout)[0].chunks(rollout, range(len(rollout.finished)))}


@pytest.mark.parametrize("budget, rows", [(1e-6, 1), (100.0, 8)])
def test_the_budget_chooses_the_rows_of_a_chunk(trainer, lora, budget, rows):
    assert widest(trainer(peft_config=lora, memory_budget_gib=budget)) == {rows}


def test_a_budget_in_between_holds_what_the_rows_keep(trainer, lora):
    run = trainer(peft_config=lora, stop_token=None, response_length=20)
    token = saved_bytes_per_token(run.model)
    (width,) = {sum(sizes) + 1 for sizes in [(max(run.rollout().lengths()[0]), 20)]}
    run.args.memory_budget_gib = 4.5 * token * width / 2**30
    assert widest(run) == {4}  # eight rows in two chunks


def test_the_rows_of_a_chunk_change_no_gradient(trainer, lora, model):
    logs = []
    for budget in (None, 1e-6, 100.0):
        run = trainer(model=copy.deepcopy(model), peft_config=lora, memory_budget_gib=budget, total_episodes=8)
        run.train()
        logs.append([log["grad_norm"] for log in run.state.log_history if "grad_norm" in log])
    assert logs[0] == pytest.approx(logs[1], rel=1e-4) and logs[0] == pytest.approx(logs[2], rel=1e-4)
