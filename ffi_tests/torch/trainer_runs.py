"""Runs of transformers' Trainer, for the tests of programs that own the training loop."""

import pytest
import torch


def trained(keywords, folder, clip=0.5, resume=None):
    """A Trainer after 10 steps; with `resume`, a checkpoint, after the steps behind it. `keywords(model)`: those of the Trainer that name
    the optimizer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    data = [{"input_ids": torch.arange(32).roll(by), "labels": torch.arange(32).roll(by)} for by in range(64)]
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=10,
        per_device_train_batch_size=8,
        save_steps=5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        max_grad_norm=clip,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, **keywords(model))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def losses(trainer):
    """The losses of all steps."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
