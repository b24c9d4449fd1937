// Spillway: optimizer offload for training large models on few GPUs.
//
// The library updates parameters in host memory while the GPU computes. Optimizer state can lie in host memory, on
// NVMe drives or in object stores; a step can be rolled back bit by bit. Results have the same bits on every processor.
//
// The headers are for C99 or C++11, or newer; strict C89 lacks comments with // and <stdint.h>. spillway.hpp has C++17
// classes over these calls. Headers, each of which compiles alone:
//
//   spillway/base.h         Statuses and error messages, versions, the log, the thread pool.
//   spillway/optim.h        Adam, AdamW, Adagrad, Lion and Signum over parameters and states in host memory.
//   spillway/undo.h         Recorded steps that can be rolled back.
//   spillway/memory.h       Pinned host memory.
//   spillway/io.h           Asynchronous reads and writes of files.
//   spillway/tier.h         Crash-safe storage of optimizer state over several paths, with commits.
//   spillway/swap.h         Adam over states that are stored on a tier.
//   spillway/speculate.h    Steps before the norm of the whole gradient is known, then a verdict.
//   spillway/deepspeed.h    The optimizer ids of DeepSpeed.
//
// Experimental headers. This one does not include them, and their ABI is not frozen. Define SPW_EXPERIMENTAL before
// the include of one:
//
//   spillway/gpu.h          Adam on a GPU, copies between device and host memory, buckets in device memory.
//   spillway/interleave.h   An update divided between CPU and GPU.
//   spillway/plan.h         Predictions of an update's time; schedules of pipelines.
//   spillway/arena.h        Parameters that several processes share.
//   spillway/stage.h        Asynchronous optimizer jobs of a pipeline.
//   spillway/topo.h         Processors, NUMA nodes and GPUs; bound workers.
//   spillway/window.h       Weights that are on a device only while they are used.
//
// Functions to begin with:
//
//   spw_abi_version, spw_last_error,           Check the loaded library; read the message of a failed call.
//       spw_error_text
//   spw_adam_step                              Update tensors in host memory.
//   spw_undo_open, _adam_step, _rollback       Update tensors so that the step can be rolled back.
//   spw_tier_open, _define, _put, _get,        Store state on drives; a commit makes it durable.
//       _wait, _commit
//   spw_swap_open, _adam_step                  Update state that is stored on a tier.
//
// A complete program (others are in examples_c/, such as examples_c/adam.c):
//
//     #include <spillway.h>
//     #include <stdio.h>
//
//     int main(void) {
//         static float weight[1000], grad[1000], exp_avg[1000], exp_avg_sq[1000];
//         spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
//         spw_tensor tensor = SPW_TENSOR_INIT;
//         int i;
//
//         if (spw_abi_version() != SPW_ABI_VERSION)
//             return 1;
//         tensor.n = 1000;
//         tensor.param_dtype = tensor.state_dtype = tensor.grad_dtype = SPW_DTYPE_F32;
//         tensor.param = weight;
//         tensor.grad = grad;
//         tensor.exp_avg = exp_avg;
//         tensor.exp_avg_sq = exp_avg_sq;
//         options.lr = 0.1;
//         for (options.step = 1; options.step <= 100; options.step++) {
//             for (i = 0; i < 1000; i++)
//                 grad[i] = weight[i] - 1.0f; /* of (weight - 1)^2 / 2 */
//             if (spw_adam_step(&options, &tensor, 1, NULL) != SPW_OK) {
//                 fprintf(stderr, "%s\n", spw_last_error());
//                 return 1;
//             }
//         }
//         printf("weight[0] = %.2f\n", weight[0]);
//         return 0;
//     }
//
// Rules for all functions, unless a function's comment says otherwise:
//
//   Status     A call that can fail returns spw_status; SPW_OK is 0. A failed call changes nothing and writes no
//              output. spw_last_error() names the argument and the reason of the calling thread's last failure. A
//              runtime that moves a task to another thread between two calls reads errno together with the status,
//              and passes it to spw_error_text(). After SPW_ERR_INTERNAL data may be changed in part.
//   Ownership  X_open creates an object, X_close frees it. Any other pointer is borrowed during the call, unless the
//              function's comment says under "Kept:" until when the library uses it.
//   Closes     X_close frees the object, whatever its status. It waits for operations in flight, because they use
//              memory of the caller. A file system may never answer, so spw_io_close and spw_tier_close take a timeout:
//              after SPW_ERR_TIMEOUT that memory stays in use. Operations on a tier that other closes wait for end at
//              the I/O timeout of the tier.
//   Callbacks  A callback runs on a thread of the program that is in a call of the library, never on another one.
//   Threads    Any thread may call any function. Several threads may use a const handle at once. Only one thread at a
//              time may use any other handle. X_close is the last call on an object: no other call may be in flight.
//              Steps share one thread pool per process.
//   NULL       X_close(NULL) does nothing. Any other NULL is SPW_ERR_INVALID_ARGUMENT, unless the comment allows it.
//   Outputs    Their names end in _out. A text output takes up to `size` bytes, truncated, always with a NUL;
//              `needed_out` (may be NULL) receives the bytes of the whole text with its NUL. `text_out` NULL asks for
//              that number alone.
//   Structs    A struct that begins with struct_size may grow at its end. Begin with its macro: spw_X x = SPW_X_INIT;
//              the macro sets struct_size and the defaults, every other field is 0. That holds for output structs
//              too. Without macros, spw_struct_init() does the same. A struct of zeros with its struct_size has the
//              defaults, or the error names a field that must not be 0. Structs of an array lie struct_size bytes apart,
//              at most 4096. Reserved fields are 0.
//   Enums      Enum arguments and fields are integers. A value outside the enum is SPW_ERR_INVALID_ARGUMENT. Flags
//              are combined by addition.
//   Counts     Counts are uint64_t or uint32_t, as declared; sizes in bytes are uint64_t. Timeouts are milliseconds; a
//              negative timeout waits without limit, 0 polls. Measured times are seconds, or nanoseconds if their name
//              ends in _ns.
//   Forks      A forked child opens its own objects. The parent's objects are SPW_ERR_UNSUPPORTED in the child
//              (SPW_ERR_GPU_FORKED for a GPU), and closing them there does nothing. A child has working copies of
//              spw_undo.
//   Signals    A signal does not interrupt a wait. The I/O timeout of a path excludes time in which the process is
//              stopped (SIGSTOP, a paused container).
//   Users      Files below a path of a tier belong to the effective user alone. Every open and commit checks this.
//   Panics     A bug inside the library returns SPW_ERR_INTERNAL. The library never unwinds into the caller, aborts,
//              exits, or installs a signal handler. It prints only to stderr, and only if SPILLWAY_LOG is set. It
//              leaves the caller's affinity and float mode unchanged.
//   Versions   Within one SPW_ABI_VERSION functions, fields and enum values are only added.
//
// docs/promises.md describes these rules in full.

#ifndef SPILLWAY_H
#define SPILLWAY_H

#include "spillway/base.h"
#include "spillway/optim.h"
#include "spillway/undo.h"
#include "spillway/memory.h"
#include "spillway/io.h"
#include "spillway/tier.h"
#include "spillway/swap.h"
#include "spillway/speculate.h"
#include "spillway/deepspeed.h"

#endif // SPILLWAY_H
