"""The structs of the C headers as ctypes structures, with the same field names.

| file | structs of |
|---|---|
| `optim.py` | base.h, optim.h, undo.h, speculate.h and deepspeed.h: optimizers, their records and rounds |
| `storage.py` | memory.h, io.h, tier.h and swap.h: pools, files, tiers, and updates over a tier |
| `gpu.py` | gpu.h and interleave.h: the GPU, and updates divided between CPU and GPU |
| `plan.py` | plan.h: what a machine and a model need, and schedules of pipelines |
| `processes.py` | arena.h, stage.h and topo.h: shared memory, stages, and the topology |
| `given.py` | the base of structs with input of the caller |
| `integers.py` | the ranges of C integers, and the check of a value |"""

from .gpu import (GpuCopy, GpuDriver, GpuInfo, GpuLink, GpuOptions, InterleaveOptions, InterleaveRates,
                  InterleaveSubgroup)
from .optim import (AdagradOptions, AdamOptions, DsAdamCall, DsAdamState, GradTensor, LionOptions, SpecEvent,
                    SpecOptions, SpecOutcome, SpecStats, Stats, StepStats, Tensor, ThreadOptions, UndoOptions)
from .plan import (PipelineChange, PipelineDevice, PipelineOperation, PipelineOptions, PipelineResult, PipelineUnit,
                   PlanOptions, PlanResult, PlanShape)
from .processes import (ArenaInfo, ArenaOptions, ArenaRegion, ArenaRegionInfo, ArenaSnapshot, ArenaVerdict,
                        StageCores, StageOptions, StageTarget, TopoGpu, TopoInfo, TopoNode, TopoOptions, TopoPages,
                        TopoRankOptions)
from .storage import (IoFailure, IoOptions, IoRequest, IoStats, PinnedStats, PoolOptions, PoolStats, SwapBudget,
                      SwapOptions, SwapStats, TierExtentInfo, TierOpenedInfo, TierOptions, TierPath, TierPathInfo,
                      TierStepsInfo, TierTarget, TierVerifyInfo)

STRUCTURES = (ThreadOptions, Stats, Tensor, GradTensor, StepStats, AdamOptions, AdagradOptions, LionOptions, UndoOptions,
              SpecOptions, SpecStats, SpecEvent, SpecOutcome,
              InterleaveRates, PlanShape, PlanOptions, PlanResult, PipelineOptions, PipelineUnit,
              PipelineResult, PipelineOperation, PipelineChange, PipelineDevice, InterleaveOptions,
              InterleaveSubgroup, PoolOptions, PoolStats, PinnedStats, IoOptions, IoRequest, IoStats, IoFailure,
              TierPath, TierOptions, TierTarget, TierStepsInfo, TierOpenedInfo, TierExtentInfo, TierPathInfo, TierVerifyInfo,
              SwapOptions, SwapBudget, SwapStats, DsAdamCall, DsAdamState,
              GpuDriver, GpuOptions, GpuInfo, GpuCopy, GpuLink,
              ArenaRegion, ArenaOptions, ArenaInfo, ArenaRegionInfo, ArenaSnapshot, ArenaVerdict,
              StageOptions, StageTarget, StageCores,
              TopoOptions, TopoInfo, TopoNode, TopoGpu, TopoRankOptions, TopoPages)

__all__ = [structure.__name__ for structure in STRUCTURES]
