"""Trains random models under SuperOffload or plain ZeRO-3 offload, and writes what each training showed.

    superoffload_random.py MODE FIRST COUNT RESULT      MODE: serial, step or forward; RESULT is a JSON file

A seed chooses the model, the dtypes, accumulation, clipping, spikes and Infs, the tail of SuperOffload, and what the program does between
a step and the next forward. "forward" is SuperOffload with the verdict in the next forward."""

import hashlib
import json
import logging
import os
import pathlib
import random
import shutil
import sys
import tempfile

import superoffload
import train


def main(mode, first, count, result):
    train.become_single_rank()
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    train.without_compiled_collectives()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    type(get_accelerator()).is_fp16_supported = lambda self: True
    if mode != "serial":
        superoffload.allow_the_cpu()
    trainings = {}
    for seed in range(int(first), int(first) + int(count)):
        trainings[seed] = Training(mode, seed, deepspeed, torch).run()
    trainings["active"] = train.active().get("superoffload", {})
    if os.environ["RANK"] != "0":
        train.leave_group()
    pathlib.Path(result).write_text(json.dumps(trainings))
    train.leave_group()


class Training:
    """The training of a seed."""

    def __init__(self, mode, seed, deepspeed, torch):
        # Choices are those of all ranks, data those of one.
        self.torch, self.utils, self.zero, self.mode = torch, deepspeed.utils, deepspeed.zero, mode
        self.choose, self.seen, self.due = random.Random(seed), [], 0
        self.data = torch.Generator().manual_seed(1000 * seed + int(os.environ["RANK"]))
        choose = self.choose
        self.dtype = choose.choice(["bf16", "bf16", "fp16", "fp32"])
        self.width, layers = choose.choice([8, 24, 40]), choose.randint(2, 5)
        self.micro_batches = choose.choice([1, 1, 2, 3])
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(self.width, self.width), torch.nn.LayerNorm(self.width)) for _ in range(layers))
        )
        frozen, self.tail = choose.random() < 0.3, choose.choice([0, 1, 3, "auto"])
        model[0][0].weight.requires_grad_(not frozen)
        parameters = [param for param in model.parameters() if param.requires_grad]
        groups = [{"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2]}] if choose.random() < 0.4 else parameters
        self.engine = deepspeed.initialize(model=model, model_parameters=groups, config=self.config())[0]
        self.params = [param for param in self.engine.module.parameters() if param.requires_grad]
        self.folder = pathlib.Path(tempfile.gettempdir()) / f"spillway-random-{os.environ['MASTER_PORT']}"

    def config(self):
        choose = self.choose
        offload = {"device": "cpu", "super_offload": self.mode != "serial"}
        zero = {"stage": 3, "sub_group_size": choose.choice([300, 1000, 5000]), "offload_optimizer": offload}
        zero["stage3_param_persistence_threshold"] = choose.choice([0, 100, 10**6])
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": choose.choice([0.0, 0.05, 0.7, 100.0]),
            "zero_optimization": zero,
            "optimizer": {"type": choose.choice(["AdamW", "Adam"]), "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
            "steps_per_print": 1 << 30,
            **({} if self.dtype == "fp32" else {self.dtype: {"enabled": True}}),
            **(
                {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 3}}
                if self.dtype == "fp16"
                else {}
            ),
            **({} if self.mode == "serial" else {"spillway": {"superoffload": {"verdict": self.mode, "tail": self.tail}}}),
        }

    def run(self):
        engine = self.engine
        for step in range(self.choose.randint(4, 8)):
            for _ in range(self.micro_batches):
                factor = self.choose.choice([1.0, 1.0, 1.0, 1e2, 1e-3, float("inf")])
                loss = self.loss()
                engine.backward(loss * factor)
                self.see(loss)
                engine.step()
            # What DeepSpeed shows at once.
            norm = engine.get_global_grad_norm()
            self.seen.append([engine.skipped_steps, engine.global_steps, engine.get_lr(), engine.optimizer.overflow, float(norm)])
            self.seen.append([engine.optimizer.loss_scale, engine.lr_scheduler.last_batch_iteration])
            window = vars(engine.optimizer).get("_spillway_window")
            self.due += window is not None and (window._due is not None)
            getattr(self, "after_" + self.choose.choice(AFTER))()
        self.after_states()
        self.after_weights()
        engine.destroy()
        shutil.rmtree(self.folder, ignore_errors=True)
        return {"seen": self.seen, "due": self.due}

    def loss(self):
        dtype = {"bf16": self.torch.bfloat16, "fp16": self.torch.float16, "fp32": self.torch.float32}[self.dtype]
        return self.engine(self.torch.randn(2, self.width, generator=self.data).to(dtype)).float().square().mean()

    def see(self, *tensors):
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().float().contiguous().numpy().tobytes())
        self.seen.append(digest.hexdigest()[:16])

    # What the program does after a step.

    def after_nothing(self):
        pass

    def after_states(self):
        for param in self.params:
            master = self.utils.safe_get_full_fp32_param(param)
            try:
                moment = self.utils.safe_get_full_optimizer_state(param, "exp_avg")
            except KeyError:
                # If all steps until now were skipped, DeepSpeed has no states yet: those of a step are zeros before it.
                moment = self.torch.zeros_like(master)
            self.see(master, moment)

    def after_gradients(self):
        self.see(self.utils.safe_get_full_grad(self.choose.choice(self.params)))

    def after_master(self):
        param = self.choose.choice(self.params)
        self.utils.safe_set_full_fp32_param(param, self.torch.full(param.ds_shape, 0.01))

    def after_weights(self):
        for param in self.params:
            with self.zero.GatheredParameters([param]):
                self.see(param.data)

    def after_write(self):
        param = self.choose.choice(self.params)
        with self.zero.GatheredParameters([param], modifier_rank=0):
            param.data.mul_(0.5)

    def after_evaluation(self):
        self.engine.eval()
        # DeepSpeed keeps weights that several ranks gathered in inference mode, and its next forward cannot save them for backward.
        inference = self.choose.random() < 0.5 and os.environ["WORLD_SIZE"] == "1"
        with self.torch.inference_mode() if inference else self.torch.no_grad():
            self.see(self.loss())
        self.engine.train()

    def after_direct_forward(self):
        with self.torch.no_grad():
            x = self.torch.randn(2, self.width, generator=self.data).to(next(self.engine.module.parameters()).dtype)
            self.see(self.engine.module(x))

    def after_rate(self):
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= 0.5

    def after_checkpoint(self):
        self.engine.save_checkpoint(str(self.folder), tag="t")
        self.loss()
        self.engine.load_checkpoint(str(self.folder), tag="t")

    def after_save(self):
        self.engine.save_checkpoint(str(self.folder), tag="u")
        saved = self.engine._get_zero_ckpt_name(str(self.folder), "u")
        masters = self.torch.load(saved, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]
        self.see(*(master for master in masters))

    def after_rank_alone(self):
        """The first rank reads its part, and no other does."""
        if os.environ["RANK"] == "0":
            self.see(self.utils.safe_get_local_fp32_param(self.params[len(self.seen) % len(self.params)]))
        self.torch.distributed.barrier()


AFTER = ["nothing"] * 6 + [name.removeprefix("after_") for name in vars(Training) if name.startswith("after_") and name != "after_nothing"]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
