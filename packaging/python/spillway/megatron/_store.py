"""OptimizerStateStore: the optimizer states of a process on a tier, stepped there.

    from spillway.megatron import OptimizerStateStore

    store = OptimizerStateStore.attach(distributed_optimizer, ["/mnt/nvme", "/mnt/pfs"], job="run7")
    for batch in batches:
        ...                            # distributed_optimizer.step() steps on the tier
        store.commit()                 # this step survives a crash from here on

The float32 masters and both moments are on the tier. Host memory holds the buffers of a few buckets, the gradients, and the 16-bit weights
that go back to the GPU. A step has the bits of a step in memory (spillway.torch.AdamW over float32 masters)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError, NoStateError
from ..optim import Adam
from ..swap import STATES, Swap
from ..tier import Tier, TierPath
from . import _saved
from ._shards import Bucket, Shard, buckets_of, digest_of

__all__ = ["OptimizerStateStore", "Shard"]


class OptimizerStateStore:
    """Adam states of shards on a tier. Not thread-safe.

    A new store commits its start values as step 0. A store whose tier has a committed step resumes there, and writes the weights of that
    step to the shards. What was not committed is lost at a crash.

    Args:
        shards: The Shards of this process, in any order.
        paths: Directories, "s3://BUCKET/PREFIX" or TierPath, as for spillway.Tier.
        job: Name of the run, and of a directory on each path.
        host: Name of this machine; None: the host name.
        rank: Number of this process in the run.
        world: Number of processes of the run.
        decoupled: Weight decay as in AdamW; False adds it to the gradient.
        memory_budget: Limit of the host memory for states, in bytes; None: the least that keeps every path busy.
        bucket_bytes: Bytes of float32 parameters of a subgroup of the tier.
        tier_options: Further arguments of spillway.Tier, such as `durability`.

    Attributes:
        resumed_step: The step at which the tier was resumed; None for a new store.
        committed_step: The last committed step.

    Raises:
        InvalidArgumentError: A shard has a wrong value, or the tier has the states of other shards.
        TierLockedError: A live process holds the tier.

    Example:
        store = OptimizerStateStore([Shard("w", weight, group, lambda: weight.grad)], ["/mnt/nvme"], job="run7")
        store.step()
        store.commit()"""

    def __init__(self, shards: Iterable[Shard], paths: Iterable[str | os.PathLike[str] | TierPath | None], *, job: str,
                 host: str | None = None, rank: int = 0, world: int = 1, decoupled: bool = True, memory_budget: int | None = None,
                 bucket_bytes: int = 64 << 20, tier_options: Mapping[str, Any] | None = None):
        self._buckets = buckets_of(shards, bucket_bytes)
        self._digest, self._rank = digest_of(self._buckets), rank
        #: Step and count of a commit that has begun, and the status of the library's call once it has returned.
        self._pending: tuple[int, int, list[int]] | None = None
        self._committed_steps = 0
        mode = "decoupled" if decoupled else "l2"
        self._adams = [Adam(weight_decay_mode=mode) for _ in self._buckets]
        self._tier = Tier(paths, job=job, host=host, rank=rank, world=world, **(tier_options or {}))
        try:
            opened = self._tier.opened
            if opened.step is not None:
                self._committed_steps = self._check_payload(opened.payload)
                self._set_steps(self._committed_steps)
            self._swap = Swap(self._tier, [bucket.elements for bucket in self._buckets], memory_budget=memory_budget)
            self.resumed_step: int | None = opened.step
            self.committed_step = 0 if opened.step is None else opened.step
            self._changed = False
            if opened.step is None:
                self._fill()
            else:
                self.publish()
        except BaseException:
            self._tier.close()
            raise

    @classmethod
    def attach(cls, distributed_optimizer: Any, paths: Iterable[str | os.PathLike[str] | TierPath | None], *, job: str,
               **options: Any) -> OptimizerStateStore:
        """Makes a store of a Megatron DistributedOptimizer's states, and steps the optimizer through it.

        The memory of the float32 main parameters on the GPU is freed. Call it before a checkpoint is loaded. The state dict of the
        optimizer is then without states: save_to() and load_from() have them.

        Args:
            distributed_optimizer: The optimizer. Without precision-aware optimizer, CPU offload, FP8 parameters and Megatron FSDP.
            paths, job: As for the class.
            options: Further arguments of the class; `rank` and `world` are by default those of torch.distributed.

        Raises:
            UnsupportedError: The optimizer is of a kind that a store cannot step."""
        from . import _distributed
        return _distributed.attach(cls, distributed_optimizer, paths, job=job, **options)

    @property
    def steps(self) -> int:
        """Number of steps since the start of training."""
        return self._adams[0].step_count

    @torch.no_grad()
    def step(self, grad_scale: float = 1.0) -> bool:
        """Steps all shards with their gradients, and writes the weights.

        Args:
            grad_scale: Factor of the gradients.

        Returns:
            True, as Megatron's optimizers do.

        Raises:
            InvalidArgumentError: A shard has no gradient, or one of another size; nothing was stepped.
            IoError: A path failed, and no other path could take its data. Call rollback()."""
        grads = [bucket.start_grads() for bucket in self._buckets]
        _synchronize(self._buckets)
        for adam, bucket in zip(self._adams, self._buckets, strict=True):
            _set_options(adam, bucket)
        self._changed = True
        self._swap.step(self._adams, [(grad, bucket.weights()) for grad, bucket in zip(grads, self._buckets, strict=True)],
                        grad_scale=grad_scale)
        for number, bucket in enumerate(self._buckets):
            stepped = bucket.weights()
            bucket.publish(self._masters(number) if stepped is None else stepped)
        # The next step writes the same memory.
        _synchronize(self._buckets)
        return True

    def commit(self, step: int | None = None) -> int:
        """Makes the states durable.

        Args:
            step: Number under which the next open finds them; None: the number of steps.

        Returns:
            The step.

        Raises:
            IoError: A path failed; the commit before is still there."""
        self._settle()
        number = self.steps if step is None else step
        payload = json.dumps({"format": 1, "steps": self.steps, "shards": self._digest}).encode()
        status: list[int] = []
        # Noted before the call: a signal handler may raise after the library has committed.
        self._pending = number, self.steps, status
        try:
            self._swap._commit(number, payload, status)
        finally:
            self._settle()
        return number

    def _settle(self) -> None:
        """Takes over step and count of a commit that the library has completed."""
        if self._pending is not None:
            number, steps, status = self._pending
            if status == [0]:
                self.committed_step, self._changed, self._committed_steps = number, False, steps
            self._pending = None

    def rollback(self) -> None:
        """Returns to the last commit, weights included; also after a failed step."""
        self._settle()
        self._swap.rollback()
        self._set_steps(self._committed_steps)
        self._changed = False
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Writes the weights of the states to the shards, rounded to their dtype."""
        for number, bucket in enumerate(self._buckets):
            bucket.publish(self._masters(number))
        _synchronize(self._buckets)

    @torch.no_grad()
    def refresh(self, masters: Mapping[str, torch.Tensor] | None = None) -> None:
        """Sets the float32 masters anew, after the model's weights were loaded or changed. Moments and steps stay.

        Args:
            masters: Float32 values by the name of the shard; shards that are not in it take the values of their weight."""
        given = masters or {}
        unknown = set(given) - {shard.name for bucket in self._buckets for shard in bucket.shards}
        if unknown:
            raise InvalidArgumentError(f"refresh: there is no shard {sorted(unknown)[0]!r}; pass names of shards of this process")
        self._changed = True
        for number, bucket in enumerate(self._buckets):
            self._swap.write(number, bucket.collect(lambda shard: given.get(shard.name, shard.weight)))

    @torch.no_grad()
    def save_to(self, directory: str | os.PathLike[str]) -> int:
        """Copies the states to a directory, which is created. Commits the step first if it is not committed: rollback() then returns to it.

        Every process of a job writes its part of the same directory. A process that is killed leaves its part of before.

        Returns:
            The step of the states.

        Raises:
            OSError: The directory cannot be written."""
        if self._changed:
            self.commit()
        os.makedirs(directory, exist_ok=True)
        sizes = [(f"{shard.name}.{state}", shard.weight.numel()) for bucket in self._buckets for shard in bucket.shards for state in STATES]
        _saved.write(os.fspath(directory), self._rank, self.steps, sizes, self._states())
        return self.steps

    def _states(self) -> Iterable[tuple[str, torch.Tensor]]:
        for number, bucket in enumerate(self._buckets):
            flats = [torch.empty(bucket.elements, device="cpu") for _ in STATES]
            self._swap.read(number, *flats)
            for parts in zip(*(bucket.parts(flat) for flat in flats), strict=True):
                yield from ((f"{shard.name}.{state}", part) for state, (shard, part) in zip(STATES, parts, strict=True))

    @torch.no_grad()
    def load_from(self, directory: str | os.PathLike[str], *, allow_missing: bool = False) -> bool:
        """Loads the states of a directory that save_to() wrote, commits them, and writes the weights to the shards.

        The shards may have been saved by other processes, in another number: each one is found by its name.

        Args:
            directory: The directory.
            allow_missing: Return False if the directory has no states at all; otherwise that is an error.

        Returns:
            True if the states were loaded.

        Raises:
            NoStateError: The directory has no state of a shard; nothing was changed.
            InvalidArgumentError: A shard has another size, or the shards are of different steps; nothing was changed.
            CorruptError: A file is damaged; the store is at its last commit."""
        where = os.fspath(directory)
        found = _saved.places(where)
        if not found:
            if allow_missing:
                return False
            raise NoStateError(f"{where} has no optimizer states; pass allow_missing=True to start with new ones")
        steps = _saved.step_of(found, {shard.name: shard.weight.numel() for bucket in self._buckets for shard in bucket.shards}, where)
        if self._changed:
            self.commit()
        try:
            for number, bucket in enumerate(self._buckets):
                self._swap.write(number, *(_read_bucket(bucket, found, state) for state in STATES))
        except BaseException:
            self.rollback()
            raise
        self._set_steps(steps)
        self.commit()
        self.publish()
        return True

    def close(self) -> None:
        """Closes the tier. What was not committed is lost."""
        self._swap.close()
        self._tier.close()

    def __enter__(self) -> OptimizerStateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        for number, bucket in enumerate(self._buckets):
            zeros = torch.zeros(bucket.elements, device="cpu")
            start = bucket.collect(lambda shard: shard.weight if shard.master is None else shard.master)
            self._swap.write(number, start, zeros, zeros)
        self.commit(0)

    def _masters(self, number: int) -> torch.Tensor:
        masters = torch.empty(self._buckets[number].elements, device="cpu")
        self._swap.read(number, masters)
        return masters

    def _set_steps(self, steps: int) -> None:
        for adam in self._adams:
            adam.step_count = steps

    def _check_payload(self, payload: bytes) -> int:
        try:
            content = json.loads(payload)
            steps, digest = int(content["steps"]), content["shards"]
        except (ValueError, KeyError, TypeError):
            raise InvalidArgumentError("OptimizerStateStore: the tier was written by another program; pass another job") from None
        if digest != self._digest:
            raise InvalidArgumentError("OptimizerStateStore: the tier has the states of other shards, or in buckets of another bucket_bytes; "
                                       "pass the same ones, or another job and load_from() a directory that save_to() wrote")
        return steps


def _set_options(adam: Adam, bucket: Bucket) -> None:
    group, options = bucket.group, adam._options
    try:
        options.lr, options.eps, options.weight_decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        options.beta1, options.beta2 = map(float, group["betas"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the group of shard {bucket.shards[0].name!r} lacks a hyper-parameter, or it is no number: {error!r}; set "
                                   "lr, betas, eps and weight_decay") from None


def _read_bucket(bucket: Bucket, found: Mapping[str, _saved.Place], state: str) -> torch.Tensor:
    flat = torch.empty(bucket.elements, device="cpu")
    for shard, part in bucket.parts(flat):
        _saved.read(found[shard.name], state, part)
    return flat


def _synchronize(buckets: Iterable[Bucket]) -> None:
    """Waits for copies from and to GPUs."""
    for device in {shard.weight.device for bucket in buckets for shard in bucket.shards if shard.weight.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
