import pytest
@pytest.mark.parametrize("critic,lr", [("shared",3e-3),("adapter",3e-3),("adapter",1e-2)])
@pytest.mark.parametrize("rl", [1,3])
def test_ev(trainer, critic, lr, lora,rl):
    run = trainer(critic=critic, peft_config=lora if critic=="adapter" else None, total_episodes=20*32, per_device_train_batch_size=8, num_ppo_epochs=4, learning_rate=lr, vf_coef=1.0, response_length=rl, cliprange_value=10.0,
       reward_funcs=lambda prompts, completions, **kwargs: [float(p.split()[-1][1:])/32 for p in prompts])
    run.train()
    print(rl, critic, lr, [round(l["val/explained_variance"],2) for l in run.state.log_history if "val/explained_variance" in l])
