"""The Trainer of transformers trains a tiny GPT-2, in a cell and in a script."""

from tests.compat.conftest import Run, require
from tests.kernel.client import Kernel

require("transformers", "accelerate")

TINY = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def tiny():
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    ))

def texts(num):
    begins = torch.arange(num)[:, None]
    return [{"input_ids": row, "labels": row} for row in (begins + torch.arange(8)) % 32]
"""
TRAINER = """
from transformers import Trainer, TrainingArguments, set_seed

set_seed(2)
trainer = Trainer(
    model=tiny(),
    args=TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=4, learning_rate=1e-2,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=4,
    ),
    train_dataset=texts(32), eval_dataset=texts(8),
)
result = trainer.train()
held_out = trainer.evaluate()["eval_loss"]
print(trainer.args.world_size, trainer.args.parallel_mode.value, result.global_step)
print(type(trainer.model_wrapped).__name__, held_out < 3)
"""
TRAINED = ("2 distributed 16", "DistributedDataParallel True")


def test_trainer_trains_in_cells_and_in_a_script(run: Run, kernel: Kernel):
    (kernel.folder / "finetune.py").write_text(TINY + TRAINER)
    for source in ("%%ddp" + TINY + TRAINER, "%ddp_run finetune.py"):
        printed = run(source).by_rank
        found = [[line for line in printed[rank] if line in TRAINED] for rank in (0, 1)]
        assert found == [list(TRAINED)] * 2, printed
