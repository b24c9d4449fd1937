"""Trains a small model under ZeRO with DeepSpeed's Muon: matrices by Muon, embedding, head and vectors by its auxiliary Adam.

Only the report at its end mentions Spillway. The matrices and the embedding have at least 1 MiB in each of two ranks. DeepSpeed's swapper
keeps smaller sub-groups in memory, such as that of the vectors and the head of one rank."""

import argparse
import json
import logging
import os
import pathlib

import train


def main():
    options = arguments()
    train.become_single_rank()
    train.without_compiled_collectives()
    import deepspeed
    import torch
    import torch._dynamo

    # The bits are those of the eager operations, which need no compiler.
    torch._dynamo.config.disable = True
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = model_of(torch)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config(options))
    if options.load:
        assert engine.load_checkpoint(options.load)[0], f"{options.load} has no checkpoint"
    if options.again:
        engine.save_checkpoint(options.again)
        run(engine, options, torch)
        engine.load_checkpoint(options.again)
    losses = run(engine, options, torch)
    report = {
        "steps": engine.global_steps,
        "skipped": engine.skipped_steps,
        "losses": losses,
        "sha256": train.weights_hash(engine.module),
        "files": train.files_in(options.nvme),
        "active": train.active(),
        "compiled_ops": train.compiled_ops(),
    }
    if int(os.environ["RANK"]) == 0:
        pathlib.Path(options.json).write_text(json.dumps(report))
    train.leave_group()


def model_of(torch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(1024, 512)
            self.norm = torch.nn.LayerNorm(512)
            self.wide, self.narrow = torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512)
            self.lm_head = torch.nn.Linear(512, 64, bias=False)

        def forward(self, tokens):
            x = self.embed(tokens)
            x = x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))
            return torch.nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1).float(), (tokens % 64).flatten())

    return Model()


def run(engine, options, torch):
    losses = []
    while engine.global_steps < options.steps:
        for micro in range(options.accumulate):
            source = torch.Generator().manual_seed(1000 * engine.global_steps + 10 * micro + int(os.environ["RANK"]))
            loss = engine(torch.randint(1024, (4, 16), generator=source))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        if options.save and engine.global_steps == options.save_at:
            engine.save_checkpoint(options.save)
    return losses


def config(options):
    zero = {
        "stage": options.stage,
        "reduce_scatter": False,
        "sub_group_size": 524_288,
        "offload_optimizer": {"device": "cpu"},
        **json.loads(options.zero),
    }
    if options.nvme:
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": options.nvme,
            "buffer_count": 16,
            "pipeline_read": options.pipeline,
            "pipeline_write": options.pipeline,
        }
    optimizer = {"lr": 0.02, "adam_lr": 1e-3, "momentum": 0.95, "betas": [0.9, 0.95], "weight_decay": 0.1}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": options.accumulate,
        **train.precision("bf16"),
        "gradient_clipping": options.clip,
        "zero_optimization": zero,
        "optimizer": {"type": "Muon", "params": optimizer},
        "steps_per_print": 1 << 30,
        **({"spillway": json.loads(options.block)} if options.block else {}),
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--nvme", help="directory of the optimizer states; without it they are in host memory")
    parser.add_argument("--pipeline", action="store_true", help="states are read and written ahead")
    parser.add_argument("--block", help="the spillway block, as JSON")
    parser.add_argument("--zero", default="{}", help="further keys of zero_optimization, as JSON")
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--again", help="trains, loads the checkpoint of the beginning from here, and trains again")
    for name in ("save", "load", "json"):
        parser.add_argument(f"--{name}")
    for name, value in (("steps", 4), ("save_at", 2), ("accumulate", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
