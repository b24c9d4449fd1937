// One step of Adam from Node with koffi (npm install koffi), and the text of a failed call: node adam.js [PATH_OF_LIBSPILLWAY]
const assert = require("node:assert");
const koffi = require("koffi");

const library = koffi.load(process.argv[2] ?? "libspillway.so.2");

koffi.struct("spw_adam_options", {
  struct_size: "uint32_t", weight_decay_mode: "uint32_t", step: "uint64_t",
  lr: "double", beta1: "double", beta2: "double", eps: "double", weight_decay: "double", grad_scale: "double",
  no_bias_correction: "uint32_t", reserved: "uint32_t", rounding: "uint32_t", reserved2: "uint32_t",
  rounding_seed: "uint64_t", rounding_first: "uint64_t",
});
koffi.struct("spw_tensor", {
  struct_size: "uint32_t", param_dtype: "uint32_t", state_dtype: "uint32_t", grad_dtype: "uint32_t",
  copy_dtype: "uint32_t", take_copy: "uint32_t", n: "uint64_t",
  param: "void *", grad: "void *", exp_avg: "void *", exp_avg_sq: "void *", param_copy: "void *", options: "void *",
  shadow_param: "void *", shadow_exp_avg: "void *", shadow_exp_avg_sq: "void *", param_low: "void *",
  low_sums: "uint64_t *",
});
const F32 = 1;
const abiVersion = library.func("uint32_t spw_abi_version()");
const lastError = library.func("const char *spw_last_error()");
const optionsInit = library.func("spw_struct_init", "int", ["str", koffi.out("spw_adam_options *"), "uint64_t"]);
const tensorInit = library.func("spw_struct_init", "int", ["str", koffi.out("spw_tensor *"), "uint64_t"]);
const adamStep = library.func("int spw_adam_step(const spw_adam_options *, const spw_tensor *, uint64_t, void *)");

function check(status) {
  if (status !== 0) throw new Error(lastError());
}

function made(init, name) {
  const struct = {};
  check(init(name, struct, koffi.sizeof(name)));
  return struct;
}

assert.equal(abiVersion(), 2);
const n = 8;
const [param, grad, exp_avg, exp_avg_sq] = [1, 0.5, 0, 0].map((value) => new Float32Array(n).fill(value));
const options = made(optionsInit, "spw_adam_options");
const tensor = made(tensorInit, "spw_tensor");
options.lr = 0.1;
Object.assign(tensor, { n, param, grad, exp_avg, exp_avg_sq, param_dtype: F32, state_dtype: F32, grad_dtype: F32 });
check(adamStep(options, tensor, 1, null));
assert(param.every((value) => Math.abs(value - 0.9) < 1e-6), param);

options.grad_scale = 0;
assert.throws(() => check(adamStep(options, tensor, 1, null)), (error) => {
  console.log(param[0].toFixed(4));
  console.log(error.message);
  return true;
});
