"""spillway.torch.offload in programs that own the training loop: transformers' Trainer, accelerate, Lightning, and accelerate's FSDP2,
which axolotl uses. Each trains as with torch's AdamW, and steps start during backward. torchtune's is in test_cpu_adams.py."""

import functools
import pathlib

import processes
import pytest
import torch
from trainer_runs import losses, trained

import spillway.torch

#: Parameters on the CPU do not overlap unless the program asks for it.
offload = functools.partial(spillway.torch.offload, overlap=True, bucket_bytes=1)


@pytest.fixture
def speculated(monkeypatch):
    """The number of buckets that were stepped before the verdict."""
    plans, init = [], spillway.Speculation.__init__

    def noted(self, *given, **more):
        init(self, *given, **more)
        plans.append(self)

    monkeypatch.setattr(spillway.Speculation, "__init__", noted)
    return lambda: sum(speculation.stats().buckets_speculated for speculation in plans)


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def close(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("more", [{}, {"verdict": "forward"}, {"weights": "flow", "device": "cpu"}], ids=["step", "forward", "flow"])
def test_the_trainer_steps_during_backward_clips_and_resumes_with_the_same_bits(tmp_path, speculated, more):
    def torchs(model):
        return {"optimizers": (torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), None)}

    def ours(model):
        return {"optimizers": (offload(model, torch.optim.AdamW, lr=1e-3, weight_decay=0.0, max_norm=0.5, **more), None)}

    theirs = trained(torchs, tmp_path / "torch")

    # The norm that the Trainer clips with is left out: the optimizer clips.
    one = trained(ours, tmp_path / "ours", clip=0.0)
    assert speculated() > 0
    assert losses(one) == pytest.approx(losses(theirs), rel=1e-3) and losses(one)[-1] < losses(one)[0]
    resumed = trained(ours, tmp_path / "again", clip=0.0, resume=tmp_path / "ours" / "checkpoint-5")
    assert all(map(torch.equal, one.model.parameters(), resumed.model.parameters()))


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    models = []
    for make in (offload, torch.optim.AdamW):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = layers()
        given = {"max_norm": 0.5} if make is offload else {}
        model, optimizer = accelerator.prepare(model, make(model.parameters(), lr=1e-2, **given))
        for batch in torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(1)):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if not given and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    close(*models)


@pytest.mark.parametrize("verdict", ["step", "forward"])
def test_lightning(tmp_path, speculated, verdict):
    lightning = pytest.importorskip("lightning")

    class Training(lightning.LightningModule):
        def __init__(self, make):
            super().__init__()
            self.model, self.make = layers(), make

        def training_step(self, batch):
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            return self.make(self.model)

    models = []
    for make, clip in (
        (lambda model: offload(model, lr=1e-2, max_norm=0.5, verdict=verdict), None),
        (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), 0.5),
    ):
        data = torch.utils.data.TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
        training = Training(make)
        lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            gradient_clip_val=clip,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        ).fit(training, torch.utils.data.DataLoader(data, batch_size=8))
        if clip is None:
            assert speculated() > 0
            training.optimizers().settle()
        models.append(training.model)
    close(*models)


#: Optimizers that a program saves and loads, with their states in host memory or on a tier in a folder.
RESUMED = {
    "memory": lambda model, _: spillway.torch.AdamW(model.parameters(), lr=1e-2, master="f32"),
    "offload": lambda model, _: offload(model, lr=1e-2),
    "forward": lambda model, _: offload(model, lr=1e-2, verdict="forward"),
    "tier": lambda model, folder: spillway.torch.AdamW(
        model.parameters(), lr=1e-2, tier=spillway.torch.TierOptions(folder, pin_memory=False, durability="process")
    ),
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_state_that_accelerate_saved_resumes_with_the_same_bits(tmp_path, kind):
    accelerate = pytest.importorskip("accelerate")
    models, saved = [], tmp_path / "saved"
    for resumes in (False, True):
        (tmp_path / f"tier-{resumes}").mkdir()
        accelerator = accelerate.Accelerator(cpu=True)
        model = layers()
        model, optimizer = accelerator.prepare(model, RESUMED[kind](model, tmp_path / f"tier-{resumes}"))
        if resumes:
            accelerator.load_state(saved)
        for number, batch in enumerate(torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(1))):
            if number == 3 and not resumes:
                accelerator.save_state(saved)
            if number >= 3 or not resumes:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        optimizer.state_dict()
        models.append(model)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("kind", RESUMED)
def test_a_checkpoint_of_lightning_resumes_with_the_same_bits(tmp_path, kind):
    lightning = pytest.importorskip("lightning")

    class Training(lightning.LightningModule):
        def __init__(self, folder):
            super().__init__()
            folder.mkdir()
            self.model, self.folder = layers(), folder

        def training_step(self, batch):
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            return RESUMED[kind](self.model, self.folder)

    def fitted(name, epochs, checkpoint=None):
        training = Training(tmp_path / name)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path,
        )
        data = torch.utils.data.TensorDataset(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
        trainer.fit(training, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        return training.model

    whole = fitted("whole", 2)
    fitted("first", 1)
    assert all(map(torch.equal, whole.parameters(), fitted("second", 2, tmp_path / "first.ckpt").parameters()))


def test_fsdp2_of_accelerate_with_clipping(tmp_path):
    pytest.importorskip("accelerate")
    worker = pathlib.Path(__file__).with_name("offload_accelerate_worker.py")
    end = processes.run(worker, 2, tmp_path)
    assert end.stdout.count("holds\n") == 2, end
