-- One step of Adam from LuaJIT, and the text of a failed call: luajit adam.lua [PATH_OF_LIBSPILLWAY]
local ffi = require("ffi")

ffi.cdef([[
typedef struct {
    uint32_t struct_size, weight_decay_mode;
    uint64_t step;
    double lr, beta1, beta2, eps, weight_decay, grad_scale;
    uint32_t no_bias_correction, reserved, rounding, reserved2;
    uint64_t rounding_seed, rounding_first;
} spw_adam_options;
typedef struct {
    uint32_t struct_size, param_dtype, state_dtype, grad_dtype, copy_dtype, take_copy;
    uint64_t n;
    void *param;
    const void *grad;
    void *exp_avg, *exp_avg_sq, *param_copy;
    const void *options;
    void *shadow_param, *shadow_exp_avg, *shadow_exp_avg_sq, *param_low;
    uint64_t *low_sums;
} spw_tensor;
uint32_t spw_abi_version(void);
const char *spw_last_error(void);
int32_t spw_struct_init(const char *name, void *struct_out, uint64_t size);
int32_t spw_adam_step(const spw_adam_options *options, const spw_tensor *tensors, uint64_t count, void *stats_out);
]])

local spillway = ffi.load(arg[1] or "spillway")
assert(spillway.spw_abi_version() == 2)

local function check(status)
    if status ~= 0 then
        error(ffi.string(spillway.spw_last_error()), 0)
    end
end

local function made(name)
    local struct = ffi.new(name)
    check(spillway.spw_struct_init(name, struct, ffi.sizeof(struct)))
    return struct
end

local n, f32 = 8, 1
local param, grad = ffi.new("float[?]", n), ffi.new("float[?]", n)
local exp_avg, exp_avg_sq = ffi.new("float[?]", n), ffi.new("float[?]", n)
ffi.fill(exp_avg, 4 * n)
ffi.fill(exp_avg_sq, 4 * n)
for i = 0, n - 1 do
    param[i], grad[i] = 1, 0.5
end

local options, tensor = made("spw_adam_options"), made("spw_tensor")
options.lr = 0.1
tensor.n, tensor.param_dtype, tensor.state_dtype, tensor.grad_dtype = n, f32, f32, f32
tensor.param, tensor.grad, tensor.exp_avg, tensor.exp_avg_sq = param, grad, exp_avg, exp_avg_sq
check(spillway.spw_adam_step(options, tensor, 1, nil))
for i = 0, n - 1 do
    assert(math.abs(param[i] - 0.9) < 1e-6)
end

options.grad_scale = 0
local done, text = pcall(function() check(spillway.spw_adam_step(options, tensor, 1, nil)) end)
assert(not done)
print(string.format("%.4f", param[0]))
print(text)
