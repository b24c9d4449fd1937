// Runs one Adam step for the instruction counts and for the throughput table.
//
//   one_step PARAM STATE GRAD COPY DECAY WORK N      types: f32 f16 bf16, COPY also none; DECAY: none l2 decoupled
//
// WORK is step; squares, which also sums the squares; record, which writes a log; undo, which records a step and rolls
// it back; or redo, which repeats a recorded step with another factor. Prints the name of the kernel.

#include <spillway.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 16384 };

static uint32_t dtype(const char *name)
{
    static const char *const names[] = {"none", "f32", "f16", "bf16"};
    for (uint32_t i = 0; i < 4; i++)
        if (!strcmp(name, names[i]))
            return i;
    fprintf(stderr, "unknown type %s\n", name);
    exit(2);
}

static float param[MOST], grad[MOST], exp_avg[MOST], exp_avg_sq[MOST], copy[MOST];

// Bit patterns that are small numbers in every type, so that the log's differences resemble those of training.
static void fill(float *span, uint32_t type, uint64_t n, uint32_t exponent)
{
    for (uint64_t i = 0; i < n; i++) {
        uint32_t fraction = (uint32_t)(i * 2654435761u) >> 9, exponent_bits = exponent << 23;
        if (type == SPW_DTYPE_F32)
            memcpy(&span[i], &(uint32_t){exponent_bits | fraction}, 4);
        else
            ((uint16_t *)span)[i] =
                (uint16_t)(type == SPW_DTYPE_BF16 ? (exponent_bits | fraction) >> 16
                                                  : (exponent - 112) << 10 | fraction >> 13);
    }
}

static spw_status work(const char *what, const spw_adam_options *options, const spw_tensor *tensor)
{
    spw_step_stats stats = {.struct_size = sizeof stats};
    if (!strcmp(what, "step") || !strcmp(what, "squares"))
        return spw_adam_step(options, tensor, 1, !strcmp(what, "squares") ? &stats : NULL);
    spw_undo_options undo_options = {
        .struct_size = sizeof undo_options, .mode = SPW_UNDO_MODE_DELTA, .elements = tensor->n, .tensors = 1};
    spw_undo *undo = NULL;
    spw_status status = spw_undo_open(&undo_options, &undo);
    if (status == SPW_OK)
        status = spw_undo_adam_step(undo, options, tensor, 1, &stats);
    if (status == SPW_OK && !strcmp(what, "undo"))
        status = spw_undo_rollback(undo);
    if (status == SPW_OK && !strcmp(what, "redo"))
        status = spw_undo_redo(undo, 0.5);
    return status;
}

int main(int argc, char **argv)
{
    if (argc != 8)
        return 2;
    spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
    options.step = 100;
    options.weight_decay = strcmp(argv[5], "none") ? 0.01 : 0;
    options.weight_decay_mode = strcmp(argv[5], "l2") ? SPW_WEIGHT_DECAY_DECOUPLED : SPW_WEIGHT_DECAY_L2;
    spw_tensor tensor = {.struct_size = sizeof tensor,
                         .n = strtoull(argv[7], NULL, 10),
                         .param_dtype = dtype(argv[1]),
                         .state_dtype = dtype(argv[2]),
                         .grad_dtype = dtype(argv[3]),
                         .copy_dtype = dtype(argv[4]),
                         .param = param,
                         .grad = grad,
                         .exp_avg = exp_avg,
                         .exp_avg_sq = exp_avg_sq,
                         .param_copy = dtype(argv[4]) ? copy : NULL};
    spw_info info = SPW_INFO_INIT;
    if (tensor.n > MOST)
        return 2;
    fill(param, tensor.param_dtype, tensor.n, 122);
    fill(grad, tensor.grad_dtype, tensor.n, 117);
    fill(exp_avg, tensor.state_dtype, tensor.n, 118);
    fill(exp_avg_sq, tensor.state_dtype, tensor.n, 113);
    if (spw_get_info(&info) != SPW_OK || work(argv[6], &options, &tensor) != SPW_OK) {
        fprintf(stderr, "%s\n", spw_last_error());
        return 1;
    }
    puts(info.kernel);
    return 0;
}
