from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

FOLDER = Path(__file__).parents[1] / "configs/accelerate"


def test_every_accelerate_config_is_tested_here():
    assert {path.name for path in FOLDER.glob("*.yaml")} == {"single.yaml", "ddp.yaml"}


@pytest.mark.parametrize(("name", "kind", "processes"), [("single.yaml", "NO", 1), ("ddp.yaml", "MULTI_GPU", 2)])
def test_accelerate_reads_its_configs(name, kind, processes):
    config = load_config_from_file(str(FOLDER / name))
    assert (config.distributed_type.value, config.num_processes, config.num_machines) == (kind, processes, 1)
    assert config.mixed_precision == "no"  # else it would override the recipe's bf16
