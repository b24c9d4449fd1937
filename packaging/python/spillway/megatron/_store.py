"""OptimizerStateStore: the optimizer states of a process on a tier, stepped there.

    from spillway.megatron import OptimizerStateStore

    store = OptimizerStateStore.attach(distributed_optimizer, ["/mnt/nvme", "/mnt/pfs"], job="run7")
    for batch in batches:
        ...                            # distributed_optimizer.step() steps on the tier
        store.commit()                 # this step survives a crash from here on

The float32 masters and both moments are on the tier. Host memory holds the buffers of a few buckets, the gradients, and the 16-bit weights
that go back to the GPU. A step is bit-identical to one in memory (spillway.torch.AdamW over float32 masters)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import torch

from .. import _files, _log, _ranks
from .._attributes import described
from .._commit import Commit
from .._groups import put_numbers
from .._holdings import alignment_of
from .._parts import Commits
from .._snapshot import Snapshot
from .._tier_options import number as whole_number
from ..errors import InvalidArgumentError, NoStateError, UnsupportedError
from ..optim import Adam
from ..swap import STATES, UNROUNDED, Swap
from ..tier import Tier, TierPath
from ..tiered import Prepared, Record, Tiered
from . import _saved
from ._agreement import CURE, place_of
from ._shards import Bucket, Shard, buckets_of, check_master, digest_of, held_in, holding_of

__all__ = ["OptimizerStateStore", "Shard"]
#: The author of the commits.
_BY = "megatron"


class OptimizerStateStore:
    """Adam states of shards on a tier. Not thread-safe.

    A new store commits its start values as step 0. A store whose tier has a committed step resumes there, and writes the weights of that
    step to the shards. What was not committed is lost at a crash.

    With `world` above 1 the processes agree by torch.distributed. All of them make the store, and call step(), commit(), rollback(),
    publish(), save_to(), load_from() and restore() at the same points. If one fails there, all raise. They resume at the last step that all
    of them have committed.

    Args:
        shards: The Shards of this process, in any order.
        paths: Directories, "s3://BUCKET/PREFIX" or TierPath, as for spillway.Tier.
        job: Name of the run, and of a directory on each path.
        host: Name of this machine; None: the host name.
        rank: Number of this process in the run.
        world: Number of processes of the run.
        process_group: The group of torch.distributed of these processes; None: the default group.
        decoupled: Weight decay as in AdamW; False adds it to the gradient.
        host_memory: Limit of the host memory for states, in bytes; None: the least that keeps every path busy; "auto": half of what the
            machine, and a cgroup, have left for this process. What exceeds the least caches states.
        bucket_bytes: Bytes of float32 parameters of a subgroup of the tier.
        tier_options: Further arguments of spillway.Tier, such as `durability`.
        swap_options: Further arguments of spillway.Swap, such as `ratio`, `speeds` and `moment_dtype`. `split_master` and `low_bits` are
            refused.
        begin_from: A new store begins with the last commit of this other job, with any number of processes, and not with the masters. Pass
            the job's directory, as PATH/JOB, or a list of these on each path; or the directory of a snapshot. All processes read the
            directories of all its ranks. Both jobs must have the same names of parameters, so the same tensor, pipeline and expert
            parallelism.

    Attributes:
        resumed_step: The step at which the tier was resumed; None for a new store.
        committed_step: The last committed step.

    Raises:
        InvalidArgumentError: A shard has a wrong value, or the tier has the states of other shards. Or the processes have no committed step
            in common.
        TierError: Another process failed.
        TierLockedError: A live process holds the tier.

    Example:
        store = OptimizerStateStore([Shard("w", weight, group, lambda: weight.grad)], ["/mnt/nvme"], job="run7")
        store.step()
        store.commit()"""

    def __init__(
        self,
        shards: Iterable[Shard],
        paths: Iterable[str | os.PathLike[str] | TierPath | None],
        *,
        job: str,
        host: str | None = None,
        rank: int = 0,
        world: int = 1,
        process_group: Any = None,
        decoupled: bool = True,
        host_memory: int | Literal["auto"] | None = None,
        bucket_bytes: int = 64 << 20,
        tier_options: Mapping[str, Any] | None = None,
        swap_options: Mapping[str, Any] | None = None,
        begin_from: Any = None,
    ):
        further = dict(swap_options or {})
        for kind in ("split_master", "low_bits"):
            if further.get(kind):
                raise InvalidArgumentError(f"OptimizerStateStore: swap_options has {kind}; leave it out, the store keeps whole masters")
        self._place = place_of(paths, job, host, rank, world, process_group, tier_options)
        self._moments = further.get("moment_dtype", "f32")
        self._buckets = self._place.together(lambda: buckets_of(shards, bucket_bytes, alignment_of(self._moments)))
        if self._moments == "bf16":
            self._place.together(lambda: _check_rounded(self._buckets))
        self._digest = digest_of(self._buckets)
        #: Calls, in all processes, a function that writes the weights of the process's shards; then the model has all weights.
        self._gathering: Callable[[Callable[[], object]], None] = self._place.together
        others: list[Commits] = []
        mode = "decoupled" if decoupled else "l2"
        rounding = "stochastic" if self._moments == "int8" else "nearest"
        self._adams = [Adam(weight_decay_mode=mode, rounding=rounding, rounding_seed=number) for number in range(len(self._buckets))]

        def update(tier: Tier, committed: Record | None) -> Swap:
            if committed is not None:
                self._check_shards(committed)
            return Swap(tier, [bucket.elements for bucket in self._buckets], host_memory=host_memory, **further)

        foreign = "OptimizerStateStore: the tier was written by another program; pass another job"

        def found(committed: Record | None) -> None:
            if committed is None and begin_from is not None:
                others.append(Commits(begin_from, self._place, _BY, lambda record: holding_of(record.facts)))

        self._tiered = Tiered(type(self).__name__, _BY, self._place, CURE, foreign, update, found=found)
        try:
            if others:
                self._begin_from(others[0])
            elif self._tiered.committed is None:
                self._place.together(self._fill)
                self.commit(0)
            else:
                self._set_steps(self._tiered.committed.facts["steps"])
                self.publish()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        def facts() -> dict[str, Any]:
            place = self._place
            asked = {"job": place.job, "rank": place.rank, "world": place.world}
            return {**asked, "buckets": len(self._buckets), "resumed_step": self._tiered.resumed_step}

        return described("OptimizerStateStore", facts)

    def _begin_from(self, others: Commits) -> None:
        """Begins with the elements of another run's commit, and commits them at its step. A kill before that leaves a tier without a
        commit, which begins anew."""
        others.give(self._tiered, holding_of(self._facts()))
        self._set_steps(others.records[others.own].facts["steps"])
        self.commit(others.step)
        self._tiered.resumed_step = others.step
        self.publish()

    def _facts(self) -> dict[str, Any]:
        """The facts that a commit stores beside the states."""
        elements = [bucket.elements for bucket in self._buckets]
        return {"steps": self.steps, "shards": self._digest, "elements": elements, "moments": self._moments, "held": held_in(self._buckets)}

    @property
    def resumed_step(self) -> int | None:
        """The step at which the tier was resumed; None for a new store."""
        return self._tiered.resumed_step

    @property
    def committed_step(self) -> int:
        """The last committed step."""
        self._tiered.note_ended_commit()
        return self._tiered.committed_step or 0

    def _check_shards(self, committed: Record) -> None:
        if committed.facts["shards"] != self._digest:
            raise InvalidArgumentError(
                "OptimizerStateStore: the tier has the states of other shards, or in buckets of another bucket_bytes; "
                "pass the same ones, or another job and load_from() a directory that save_to() wrote"
            )

    def _same(self, name: str, value: Any) -> None:
        """Raises InvalidArgumentError in all processes if they have different values."""
        if differ := _ranks.differences(_ranks.gathered(value, self._place.world, self._place.group)):
            raise InvalidArgumentError(
                f"OptimizerStateStore: the processes have different {name}: {differ}; call the store at the same points in all processes"
            )

    @classmethod
    def attach(
        cls, distributed_optimizer: Any, paths: Iterable[str | os.PathLike[str] | TierPath | None], *, job: str, **options: Any
    ) -> OptimizerStateStore:
        """Makes a store of a Megatron DistributedOptimizer's states, and steps the optimizer through it.

        The memory of the float32 main parameters on the GPU is freed. Call it before a checkpoint is loaded. The state dict of the
        optimizer is then without states: save_to() and load_from() have them.

        Args:
            distributed_optimizer: The optimizer. Without precision-aware optimizer, CPU offload, quantized parameters and Megatron FSDP.
            paths, job: As for the class.
            options: Further arguments of the class; `rank` and `world` are by default those of torch.distributed.

        Raises:
            UnsupportedError: The optimizer is of a kind that a store cannot step."""
        from . import _distributed

        return _distributed.attach(cls, distributed_optimizer, paths, job=job, **options)

    @classmethod
    def attach_all(
        cls, distributed_optimizers: Iterable[Any], paths: Sequence[str | os.PathLike[str] | TierPath | None], *, job: str, **options: Any
    ) -> list[OptimizerStateStore]:
        """Makes stores of the optimizers of a ChainedOptimizer, as attach() does. All of them resume at one step.

        A process may be killed between the commits of two stores. So stores that are attached one by one may resume at different steps.

        Args:
            distributed_optimizers: The optimizers, as many in each process.
            paths: As for attach().
            job: Name of the run. The tier of optimizer N has the name JOB-N.
            options: As for attach().

        Returns:
            A store for each optimizer.

        Raises:
            InvalidArgumentError: The stores have no committed step in common."""
        from . import _distributed

        return _distributed.attach_all(cls, list(distributed_optimizers), paths, job=job, **options)

    @property
    def steps(self) -> int:
        """Number of steps since the start of training."""
        return self._adams[0].step_count

    @torch.no_grad()
    def step(self, grad_scale: float = 1.0) -> bool:
        """Steps all shards with their gradients, and writes the weights. Every process calls it.

        Args:
            grad_scale: Factor of the gradients.

        Returns:
            True, as Megatron's optimizers do.

        Raises:
            InvalidArgumentError: A shard has no gradient, or one of another size; nothing was stepped in this process.
            IoError: A path failed, and no other path could take its data. Call rollback() in all processes.
            TierError: Another process could not step. Call rollback() in all processes."""
        self._tiered.step(lambda: self._step(grad_scale), lambda: self.steps)
        _log.first_served("megatron", type(self).__name__)
        return True

    def _step(self, grad_scale: float) -> None:
        self._tiered.check()
        grads = [bucket.start_grads() for bucket in self._buckets]
        _synchronize(self._buckets)
        for adam, bucket in zip(self._adams, self._buckets, strict=True):
            _set_options(adam, bucket)
        self._tiered.changes()
        self._tiered.swap.step(
            self._adams, [(grad, bucket.weights()) for grad, bucket in zip(grads, self._buckets, strict=True)], grad_scale=grad_scale
        )
        for number, bucket in enumerate(self._buckets):
            stepped = bucket.weights()
            bucket.publish(self._masters(number) if stepped is None else stepped)
        # The next step writes the same memory.
        _synchronize(self._buckets)

    @overload
    def commit(self, step: int | None = ..., wait: Literal[True] = ...) -> int: ...

    @overload
    def commit(self, step: int | None = ..., *, wait: Literal[False]) -> Commit: ...

    def commit(self, step: int | None = None, wait: bool = True) -> int | Commit:
        """Makes the states durable.

        Args:
            step: Number under which the next open finds them; None: the number of steps.
            wait: False: return at once. Threads of the library commit the states as they are now, beside the next steps. The next commit,
                save_to(), load_from(), rollback(), snapshot(), restore() and close() wait for the end. close() raises an error that wait()
                has not raised; a warning is logged too. Of stores that were attached together, the first commit of another step waits for
                those of all.

        Returns:
            The step, or with `wait=False` the Commit that is in flight.

        Raises:
            IoError: A path failed; the commit before is still there.
            InvalidArgumentError: The processes have different steps; nothing was committed.
            TierError: Another process failed. If the step was committed in some processes only, every further call raises this error in all
                of them: make the stores again."""

        def prepared() -> Prepared:
            return Prepared(whole_number(self.steps if step is None else step, "step"), self.steps, self._facts())

        begun = self._tiered.commit(prepared, wait)
        return self.committed_step if begun is None else begun

    def snapshot(self, directory: str | os.PathLike[str], *, bytes_per_second: int = 0, keep: int | None = None) -> Snapshot:
        """Starts to write the last commit to a new directory, and returns at once. Steps and commits continue meanwhile. restore() returns
        to it; save_to() writes what other shards can load.

        Args:
            directory: The directory; in a run of several processes each one writes `rank-N` in it.
            bytes_per_second: Limit of the speed of this process; 0: no limit.
            keep: The snapshot's wait() removes all but this number of finished snapshots of this store beside it, those written last;
                None: none.

        Returns:
            A snapshot; its wait() returns when the directory is complete.

        Raises:
            IoError: The directory exists."""
        return self._tiered.snapshot(directory, bytes_per_second, keep)

    def restore(self, directory: str | os.PathLike[str]) -> int:
        """Returns to the states of a finished snapshot of the same shards, commits them, and writes the weights. Every process calls it. A
        step that was not committed before is committed first.

        Args:
            directory: As it was given to snapshot().

        Returns:
            The step of the snapshot.

        Raises:
            NoStateError: The snapshot is not finished; nothing was changed.
            InvalidArgumentError: It is one of other shards; nothing was changed.
            CorruptError: A file is missing or truncated; nothing was changed. Or its content is damaged; the store is at its last
                commit."""
        found = self._tiered.snapshot_of(directory, self._check_shards)
        self._tiered.keep(found, self.steps, self.commit)

        def take() -> None:
            try:
                self._tiered.take(found)
                self._take_committed()
            except BaseException:
                if not self._tiered.apart:
                    self.rollback()
                raise

        self._tiered.whole(take)
        return found.step

    def rollback(self) -> None:
        """Returns to the last commit, weights included; also after a failed step. Every process calls it."""
        self._tiered.finish()
        self._tiered.check(also_mixed=True)

        def back() -> None:
            self._place.together(self._tiered.rollback)
            self._take_committed()

        self._tiered.whole(back)

    def _take_committed(self) -> None:
        self._set_steps(self._tiered.committed.facts["steps"] if self._tiered.committed is not None else 0)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Writes the weights of the states to the shards, rounded to their dtype. Every process calls it. With attach(), the model then has
        the weights of all processes."""
        self._gathering(self._write_weights)

    def _write_weights(self) -> None:
        for number, bucket in enumerate(self._buckets):
            bucket.publish(self._masters(number))
        _synchronize(self._buckets)

    @torch.no_grad()
    def refresh(self, masters: Mapping[str, torch.Tensor] | None = None) -> None:
        """Sets the float32 masters anew, after the model's weights were loaded or changed. Moments and steps stay.

        Args:
            masters: Float32 values by the name of the shard, in any shape; shards that are not in it take the values of their weight.

        Raises:
            InvalidArgumentError: There is no such shard, or values are not float32 of its number of elements; nothing was changed."""
        given, shards = masters or {}, {shard.name: shard for bucket in self._buckets for shard in bucket.shards}
        for name, master in given.items():
            if name not in shards:
                raise InvalidArgumentError(f"refresh: there is no shard {name!r}; pass names of shards of this process")
            check_master(shards[name], master)
        self._tiered.check()

        def write() -> None:
            for number, bucket in enumerate(self._buckets):
                self._tiered.write(number, bucket.collect(lambda shard: given.get(shard.name, shard.weight)))

        self._tiered.whole(write)

    @torch.no_grad()
    def save_to(self, directory: str | os.PathLike[str]) -> int:
        """Copies the states to a directory. Commits the step first if it is not committed: rollback() then returns to it.

        Every process of a job writes its part of the same directory. A process that is killed leaves its part of before. A new directory
        has mode 0700; its parent must exist. Files have mode 0600.

        Returns:
            The step of the states.

        Raises:
            OSError: The directory cannot be written; a directory with the name of a file, or a file in its place, is named before the
                write.
            TierError: Another process failed."""
        self._commit_changes()
        sizes = [(f"{shard.name}.{state}", shard.weight.numel()) for bucket in self._buckets for shard in bucket.shards for state in STATES]

        def save() -> None:
            _files.make_directory(directory)
            _saved.write(os.fspath(directory), self._place.rank, self.steps, sizes, self._states())

        self._place.together(save)
        return self.steps

    def _commit_changes(self) -> None:
        self._tiered.finish()
        self._tiered.check()
        self._same("steps", self.steps)
        if any(_ranks.gathered(self._tiered.changed, self._place.world, self._place.group)):
            self.commit()

    def _states(self) -> Iterable[tuple[str, torch.Tensor]]:
        for number, bucket in enumerate(self._buckets):
            flats = [torch.empty(bucket.elements, device="cpu") for _ in STATES]
            self._tiered.read(number, *flats)
            for parts in zip(*(bucket.parts(flat) for flat in flats), strict=True):
                yield from ((f"{shard.name}.{state}", part) for state, (shard, part) in zip(STATES, parts, strict=True))

    @torch.no_grad()
    def load_from(self, directory: str | os.PathLike[str], *, allow_missing: bool = False) -> bool:
        """Loads the states of a directory that save_to() wrote, commits them, and writes the weights to the shards.

        The shards may have been saved by other processes, in another number: each one is found by its name. A shard with a name such as
        "w[0:4096]", which attach() gives them, is also put together from other ranges of "w". Ranks of tensor, pipeline and expert
        parallelism are part of such a name, so they must be as many as before.

        Args:
            directory: The directory.
            allow_missing: Return False if the directory has no states at all; otherwise that is an error.

        Returns:
            True if the states were loaded.

        Raises:
            NoStateError: The directory has no state of a shard; nothing was changed.
            InvalidArgumentError: The path is not a directory, a shard has another size, or the shards are of different steps; nothing was
                changed.
            CorruptError: A file is damaged; the store is at its last commit. A step that was not committed before is committed then.
            TierError: Another process failed; the store is at its last commit."""
        self._tiered.check()
        where = os.fspath(directory)
        found = self._place.together(lambda: _saved.places(where))
        missing = [not there for there in _ranks.gathered(bool(found), self._place.world, self._place.group)]
        if all(missing) and allow_missing:
            return False
        if any(missing):
            of = "" if all(missing) else f" for the processes {[rank for rank, none in enumerate(missing) if none]}"
            raise NoStateError(f"{where} has no optimizer states{of}; pass allow_missing=True to start with new ones if no process has any")
        shards = {shard.name: shard.weight.numel() for bucket in self._buckets for shard in bucket.shards}
        wanted = self._place.together(lambda: _saved.pieces_of(found, shards, where))
        steps = self._place.together(lambda: _saved.step_of(wanted, where))
        self._same("steps in the directory", steps)
        self._commit_changes()

        def load() -> None:
            for number, bucket in enumerate(self._buckets):
                self._tiered.write(number, *(_read_bucket(bucket, wanted, state) for state in STATES))

        try:
            self._place.together(load)
            self._set_steps(steps)
            self.commit()
            self.publish()
        except BaseException:
            if not self._tiered.apart:
                self.rollback()
            raise
        return True

    def close(self) -> None:
        """Closes the tier. What was not committed is lost."""
        self._tiered.close()

    def __enter__(self) -> OptimizerStateStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        for number, bucket in enumerate(self._buckets):
            zeros = torch.zeros(bucket.elements, device="cpu")
            start = bucket.collect(lambda shard: shard.weight if shard.master is None else shard.master)
            self._tiered.write(number, start, zeros, zeros)

    def _masters(self, number: int) -> torch.Tensor:
        masters = torch.empty(self._buckets[number].elements, device="cpu")
        self._tiered.read(number, masters)
        return masters

    def _set_steps(self, steps: int) -> None:
        for adam in self._adams:
            adam.step_count = steps


def _check_rounded(buckets: Iterable[Bucket]) -> None:
    for shard in (shard for bucket in buckets for shard in bucket.shards):
        if shard.weight.dtype is torch.float16:
            raise UnsupportedError(f"OptimizerStateStore: the shard {shard.name!r} is float16: {UNROUNDED}")


def _set_options(adam: Adam, bucket: Bucket) -> None:
    put_numbers(adam._options, bucket.group, f"the group of shard {bucket.shards[0].name!r}")


def _read_bucket(bucket: Bucket, wanted: Mapping[str, list[_saved.Piece]], state: str) -> torch.Tensor:
    flat = torch.empty(bucket.elements, device="cpu")
    for shard, part in bucket.parts(flat):
        _saved.read(wanted[shard.name], state, part)
    return flat


def _synchronize(buckets: Iterable[Bucket]) -> None:
    """Waits for copies from and to GPUs."""
    for device in {shard.weight.device for bucket in buckets for shard in bucket.shards if shard.weight.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
