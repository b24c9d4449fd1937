// One Adam step over zeros: what the instruction counts and the throughput table look at.
//
//   one_step PARAM STATE GRAD COPY DECAY SQUARES N      types: f32 f16 bf16, COPY also none; DECAY: none l2 decoupled
//
// Prints the kernel that ran.

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
    fprintf(stderr, "no type is called %s\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    if (argc != 8)
        return 2;
    static float param[MOST], grad[MOST], exp_avg[MOST], exp_avg_sq[MOST], copy[MOST];
    spw_adam_options options;
    spw_adam_options_init(&options, sizeof options);
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
    spw_step_stats stats = {.struct_size = sizeof stats};
    const char *kernel;
    if (tensor.n > MOST || spw_kernel_name(&kernel) != SPW_OK ||
        spw_adam_step(&options, &tensor, 1, strcmp(argv[6], "1") ? NULL : &stats) != SPW_OK) {
        fprintf(stderr, "%s\n", spw_last_error());
        return 1;
    }
    puts(kernel);
    return 0;
}
