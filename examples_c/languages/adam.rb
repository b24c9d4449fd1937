# One step of Adam from Ruby, and the text of a failed call: ruby adam.rb [PATH_OF_LIBSPILLWAY]
require "fiddle/import"

module Spillway
  extend Fiddle::Importer
  dlload ARGV[0] || "libspillway.so.2"
  typealias "uint32_t", "unsigned int"
  typealias "uint64_t", "unsigned long long"

  AdamOptions = struct [
    "uint32_t struct_size", "uint32_t weight_decay_mode", "uint64_t step",
    "double lr", "double beta1", "double beta2", "double eps", "double weight_decay", "double grad_scale",
    "uint32_t no_bias_correction", "uint32_t reserved", "uint32_t rounding", "uint32_t reserved2",
    "uint64_t rounding_seed", "uint64_t rounding_first"
  ]
  Tensor = struct [
    "uint32_t struct_size", "uint32_t param_dtype", "uint32_t state_dtype", "uint32_t grad_dtype",
    "uint32_t copy_dtype", "uint32_t take_copy", "uint64_t n",
    "void *param", "void *grad", "void *exp_avg", "void *exp_avg_sq", "void *param_copy", "void *options",
    "void *shadow_param", "void *shadow_exp_avg", "void *shadow_exp_avg_sq", "void *param_low", "uint64_t *low_sums"
  ]
  F32 = 1

  extern "uint32_t spw_abi_version()"
  extern "const char *spw_last_error()"
  extern "int spw_struct_init(const char *, void *, uint64_t)"
  extern "int spw_adam_step(void *, void *, uint64_t, void *)"

  def self.check(status)
    raise spw_last_error.to_s unless status.zero?
  end

  def self.make(type, name)
    made = type.malloc(Fiddle::RUBY_FREE)
    check(spw_struct_init(name, made, type.size))
    made
  end
end

raise "another ABI" unless Spillway.spw_abi_version == 2

n = 8
param, grad, exp_avg, exp_avg_sq = [1.0, 0.5, 0.0, 0.0].map { |value| Fiddle::Pointer[[value].pack("f") * n] }
options = Spillway.make(Spillway::AdamOptions, "spw_adam_options")
tensor = Spillway.make(Spillway::Tensor, "spw_tensor")
options.lr = 0.1
tensor.n = n
tensor.param_dtype = tensor.state_dtype = tensor.grad_dtype = Spillway::F32
tensor.param, tensor.grad, tensor.exp_avg, tensor.exp_avg_sq = param, grad, exp_avg, exp_avg_sq
Spillway.check(Spillway.spw_adam_step(options, tensor, 1, nil))
stepped = param[0, 4 * n].unpack("f*")
raise stepped.inspect unless stepped.all? { |value| (value - 0.9).abs < 1e-6 }

options.grad_scale = 0
begin
  Spillway.check(Spillway.spw_adam_step(options, tensor, 1, nil))
rescue RuntimeError => error
  puts format("%.4f", stepped[0]), error.message
else
  raise "nothing was refused"
end
