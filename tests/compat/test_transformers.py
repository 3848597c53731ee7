"""A tiny GPT-2 of transformers: plain loop, Trainer, script, comparison."""

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


def test_trainer_trains_in_a_cell_more_than_once(run: Run):
    for _ in range(2):
        cell = run("%%ddp" + TINY + TRAINER)
        assert [line for line in cell.by_rank[0] if line in TRAINED] == list(TRAINED), cell.text
        assert [line for line in cell.by_rank[1] if line in TRAINED] == list(TRAINED)


def test_trainer_trains_in_a_script(run: Run, kernel: Kernel):
    (kernel.folder / "finetune.py").write_text(TINY + TRAINER)
    cell = run("%ddp_run finetune.py")
    assert [line for line in cell.by_rank[0] if line in TRAINED] == list(TRAINED), cell.text


COMPARED = (
    "%%ddp_compare dp ddp async fsdp --epochs 2 --batch-size 16"
    + TINY
    + """
def model():
    return tiny()

def data(split):
    return texts(64)

def training_step(model, batch):
    outputs = model(**batch)
    return {"loss": outputs.loss, "perplexity": outputs.loss.detach().exp()}

def validation_step(model, batch):
    scores = model(**batch).logits[:, :-1]
    return {"right": (scores.argmax(-1) == batch["labels"][:, 1:]).float().mean()}
"""
)
ADAM = """
def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2)
"""


def test_it_is_compared_with_a_step_on_batches_that_are_dicts(compare: Run, kernel: Kernel):
    assert "held-out right" in compare(COMPARED + ADAM).text
    assert kernel.value("'perplexity' in _.steps().columns") == "True"


PADDED = """
from torch.nn.utils.rnn import pad_sequence
from transformers.optimization import get_cosine_schedule_with_warmup

def collate_fn(items):
    ids = [item["input_ids"][: 4 + int(item["input_ids"][0]) % 4] for item in items]
    padded = pad_sequence(ids, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    labels = padded.masked_fill(mask == 0, -100)
    return {"input_ids": padded, "attention_mask": mask, "labels": labels}

def optimizer(params, num_steps):
    made = torch.optim.AdamW(params, lr=1e-2)
    return made, get_cosine_schedule_with_warmup(made, 2, num_steps)
"""


def test_texts_of_different_length_and_a_schedule_of_transformers(compare: Run):
    compare(COMPARED + PADDED)
