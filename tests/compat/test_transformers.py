"""A tiny GPT-2 of transformers: plain loop, Trainer, script."""

from tests.compat.conftest import Run, require
from tests.kernel.client import Kernel, both

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
LOOP = (
    "%%ddp"
    + TINY
    + """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

torch.manual_seed(1)
model = DDP(tiny())
items = texts(32)
loader = DataLoader(items, batch_size=8, sampler=DistributedSampler(items))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for epoch in range(8):
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print(len(loader), losses[-1] < losses[0] / 1.5)
"""
)


def test_a_plain_loop_trains_a_gpt2(run: Run):
    assert run(LOOP).by_rank == both("2 True")


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
    cell = "%%ddp" + TINY + TRAINER
    for source in (cell, cell, "%ddp_run finetune.py"):
        printed = run(source).by_rank
        found = [[line for line in printed[rank] if line in TRAINED] for rank in (0, 1)]
        assert found == [list(TRAINED)] * 2, printed
