//! Proves that the binary interface is what is committed: exported symbols, sizes and offsets as Rust, C and ctypes see
//! them, and a header that compiles by itself in every C and C++.
//!
//! `SPILLWAY_BLESS=1 cargo test --test abi` writes exports.txt and layout.txt anew. Within one SPW_ABI_VERSION lines may
//! be added to them and none may change.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::mem::{offset_of, size_of};
use std::process::Command;
use std::time::Duration;

use spillway::capi;
use support::{empty_dir, release_library, root, succeed};

const TIMEOUT: Duration = Duration::from_secs(60);

fn golden(file: &str, text: &str) {
    let path = root().join("ffi_tests").join(file);
    if std::env::var_os("SPILLWAY_BLESS").is_some() {
        fs::write(&path, text).expect("the golden file is writable");
    }
    let committed = fs::read_to_string(&path).expect("the golden file exists");
    assert!(committed == text, "{file} is stale: SPILLWAY_BLESS=1 cargo test --test abi; now it is\n{text}");
}

fn header() -> String {
    fs::read_to_string(root().join("include/spillway.h")).expect("include/spillway.h exists")
}

/// Every symbol that the release library defines for others.
fn exports() -> BTreeSet<String> {
    let nm = succeed(Command::new("nm").args(["-D", "--defined-only"]).arg(release_library()), TIMEOUT);
    nm.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_string).collect()
}

/// Every function that the header declares.
fn declared() -> BTreeSet<String> {
    let header = header();
    let code = header.lines().filter(|line| !line.trim_start().starts_with("//"));
    let words = code.flat_map(|line| line.split_inclusive('('));
    let names = words.filter_map(|word| word.strip_suffix('(')?.rsplit([' ', '*']).next());
    names.filter(|name| name.starts_with("spw_") && !name.ends_with(')')).map(str::to_string).collect()
}

#[test]
fn exported_symbols_are_the_committed_list() {
    let list: String = exports().iter().map(|name| format!("{name}\n")).collect();
    golden("exports.txt", &list);
}

#[test]
fn every_exported_function_is_declared_and_the_other_way_round() {
    assert!(declared().contains("spw_adam_step"));
    assert_eq!(declared(), exports());
}

#[test]
fn nothing_runs_or_is_demanded_when_the_library_is_loaded() {
    let needed = succeed(Command::new("readelf").arg("-d").arg(release_library()), TIMEOUT);
    let allowed = ["libc.so", "libm.so", "libgcc_s.so", "libpthread.so", "libdl.so", "librt.so", "ld-linux"];
    let libraries: Vec<&str> = needed.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(!libraries.is_empty());
    for library in libraries {
        assert!(allowed.iter().any(|name| library.contains(name)), "{library}");
    }
}

/// Lines of the layout: a struct's size, then offset and size of each field.
macro_rules! layout {
    ($($name:path { $($field:ident),* $(,)? })*) => {{
        let mut text = String::new();
        $({
            let name = stringify!($name).rsplit(' ').next().and_then(|path| path.rsplit("::").next());
            let name = name.expect("a path ends with a name");
            text.push_str(&format!("{name} {}\n", size_of::<$name>()));
            $({
                let size = field_size(|value: &$name| size_of_val(&value.$field));
                text.push_str(&format!("{name}.{} {} {size}\n", stringify!($field), offset_of!($name, $field)));
            })*
        })*
        text
    }};
}

/// Size of a field without a value to take it from: all fields are plain numbers and pointers, valid as zeros.
fn field_size<T: Copy>(of: impl Fn(&T) -> usize) -> usize {
    // SAFETY: the structs of the C face are `Record`s, for which all bytes zero are a valid value.
    of(&unsafe { std::mem::zeroed() })
}

fn layout_of_rust() -> String {
    layout! {
        capi::library::spw_stats {
            struct_size, reserved, adam_calls, adam_elements, adagrad_calls, adagrad_elements, lion_calls, lion_elements,
        }
        capi::threads::spw_thread_options { struct_size, num_threads }
        capi::adam::spw_adam_options {
            struct_size, weight_decay_mode, step, lr, beta1, beta2, eps, weight_decay, grad_scale, no_bias_correction,
            reserved,
        }
        capi::tensor::spw_tensor {
            struct_size, param_dtype, state_dtype, grad_dtype, copy_dtype, reserved, n, param, grad, exp_avg, exp_avg_sq,
            param_copy, options, shadow_param, shadow_exp_avg, shadow_exp_avg_sq,
        }
        capi::tensor::spw_step_stats { struct_size, nonfinite, sum_squares }
        capi::adagrad::spw_adagrad_options {
            struct_size, reserved, step, lr, lr_decay, eps, weight_decay, grad_scale,
        }
        capi::lion::spw_lion_options { struct_size, reserved, lr, beta1, beta2, weight_decay, grad_scale }
        capi::undo::spw_undo_options { struct_size, mode, elements, tensors }
        capi::speculate::spw_spec_options { struct_size, buckets, undo_mode, publish }
        capi::speculate::spw_spec_stats {
            struct_size, reserved, commits, redos, skips, aborts, buckets_speculated, buckets_committed, buckets_redone,
            buckets_rolled_back, buckets_spared, seconds_exposed,
        }
        capi::spec_bucket::spw_spec_event { struct_size, kind, fd, value, word, gpu, handle }
        capi::spec_verdict::spw_spec_outcome { struct_size, verdict, norm, grad_scale, withdrawn, reserved }
        capi::plan::spw_plan_rates {
            struct_size, half_duplex, cpu, downscale, gpu, h2d, d2h, cast, dram,
        }
        capi::plan::spw_plan_shape {
            struct_size, wire, fetch_gradients, slots, count, sizes, size, chunk,
        }
        capi::plan::spw_plan_options { struct_size, mode, parameter, residents, backward }
        capi::plan::spw_plan_result {
            struct_size, reserved, exposed_seconds, home_seconds, serial_seconds, cpu_seconds, h2d_seconds,
            d2h_seconds, gpu_seconds, gpu, residents, gpu_bytes, host_bytes, to_device_bytes, to_host_bytes,
        }
        capi::policy::spw_plan_bucket {
            struct_size, reserved, grad, step_cpu, param, step_gpu, backward,
        }
        capi::policy::spw_plan_load {
            struct_size, reserved, peak, link, tokens, parameters, free_bytes,
        }
        capi::policy::spw_plan_probe {
            struct_size, accumulates, f32_wire, native_wire, f32_step, native_step,
        }
        capi::interleave_open::spw_interleave_options {
            struct_size, backend, wire, fetch_gradients, slots, grad_dtype, copy_dtype, reserved, chunk, gpu,
        }
        capi::interleave_open::spw_interleave_subgroup {
            struct_size, reserved, n, param, exp_avg, exp_avg_sq, grad, param_copy, host_grad,
        }
        capi::pool::spw_pool_options {
            struct_size, flags, block_bytes, block_count, node, reserved,
        }
        capi::pool::spw_pool_stats {
            struct_size, page_kind, block_bytes, block_count, in_use, high_water, quarantined,
            bytes, locked_bytes, foreign_bytes,
        }
        capi::pool::spw_pinned_stats {
            struct_size, reserved, allocations, bytes, high_water, mapped_bytes, locked_bytes,
        }
        capi::io::spw_io_options {
            struct_size, backend, flags, queue_depth, block_bytes, workers, file_mode, deadline_ms,
        }
        capi::io::spw_io_request {
            struct_size, fd, path, offset, buffer, bytes, deadline_ms,
        }
        capi::io::spw_io_stats {
            struct_size, reserved, reads, writes, read_bytes, written_bytes, failed, requests,
            direct_bytes, buffered_bytes, bounced_bytes, resumed, retried, pending, stuck, queue_depth,
            block_bytes,
        }
        capi::tier_options::spw_tier_path { struct_size, kind, directory, limit_bytes, reserve_bytes }
        capi::tier_options::spw_tier_options {
            struct_size, mode, job, host, rank, world, paths, path_count, durability, flags, block_bytes, stall_ms,
            queue_depth, io_backend, at_step,
        }
        capi::tier_steps::spw_tier_steps_info { struct_size, committed, last, before, has_before, first, exists, reserved }
        capi::tier_report::spw_tier_opened_info {
            struct_size, resumed, step, payload_bytes, missing_paths, lost_extents,
        }
        capi::tier_report::spw_tier_extent_info {
            struct_size, extent, bytes, generation, streams, committed, lost, blocks,
        }
        capi::tier_report::spw_tier_path_info {
            struct_size, health, kind, reserved, read_bytes, written_bytes, reading_ns, writing_ns, wear_bytes,
            file_bytes, free_bytes, blocks,
        }
        capi::tier_report::spw_tier_checked { struct_size, reserved, extents, blocks, bytes, damaged }
        capi::io_wait::spw_io_failure { struct_size, system_errno, offset, bytes, path }
        capi::swap_options::spw_swap_options {
            struct_size, flags, host_bytes, elements, subgroups, ratio, speeds, patience_seconds,
        }
        capi::swap_options::spw_swap_budget {
            struct_size, reserved, host_bytes, buffer_bytes, buffers, cached, state_bytes, step_bytes,
            master_bytes, masters, working_bytes,
        }
        capi::swap_options::spw_swap_stats {
            struct_size, reserved, rounds, hits, fetched, flushed, moved, exposed_seconds,
        }
        capi::deepspeed_swap::spw_ds_adam_call {
            struct_size, bias_correction, step, lr, beta1, beta2, eps, weight_decay, grad_scale,
        }
        capi::deepspeed_swap::spw_ds_adam_state {
            struct_size, adamw_mode, step, beta1, beta2, beta1_power, beta2_power,
        }
        capi::gpu::spw_gpu_driver { struct_size, devices, cuda_version, reserved }
        capi::gpu::spw_gpu_options { struct_size, ordinal, chunk_bytes }
        capi::gpu::spw_gpu_info {
            struct_size, ordinal, capability, multiprocessors, copy_engines, reserved, memory_bytes, free_bytes, name, pci,
        }
        capi::gpu_transfer::spw_gpu_copy {
            struct_size, direction, device_dtype, host_dtype, after, reserved, n, device, host, handle,
        }
        capi::gpu_transfer::spw_gpu_link {
            struct_size, wire, out_f32, out_native, in_f32, in_native, step_f32, step_native,
        }
    }
}

/// The structs with a body in the header, in its order, with their fields.
fn structs_of_header() -> Vec<(String, Vec<String>)> {
    let mut structs: Vec<(String, Vec<String>)> = Vec::new();
    let mut inside = false;
    for line in header().lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        if let Some(name) = line.strip_prefix("typedef struct ").and_then(|rest| rest.strip_suffix(" {")) {
            structs.push((name.to_string(), Vec::new()));
            inside = true;
        } else if line.starts_with('}') {
            inside = false;
        } else if let (true, Some(field)) = (inside, line.strip_suffix(';')) {
            let name = field.rsplit([' ', '*']).next().expect("a field has a name");
            structs.last_mut().expect("inside one").1.push(name.to_string());
        }
    }
    structs
}

fn layout_of_c(compiler: &[&str]) -> String {
    let mut source = "#include <spillway.h>\n#include <stdio.h>\nint main(void) {\n".to_string();
    for (name, fields) in structs_of_header() {
        source.push_str(&format!("printf(\"{name} %d\\n\", (int)sizeof({name}));\n"));
        for field in fields {
            source.push_str(&format!(
                "printf(\"{name}.{field} %d %d\\n\", (int)offsetof({name}, {field}), (int)sizeof((({name} *)0)->{field}));\n"
            ));
        }
    }
    source.push_str("return 0;\n}\n");
    let folder = empty_dir(&format!("layout-{}", compiler[0]));
    let (file, binary) = (folder.join("layout.c"), folder.join("layout"));
    fs::write(&file, source).expect("the target directory is writable");
    let mut build = Command::new(compiler[0]);
    build.args(&compiler[1..]).arg("-I").arg(root().join("include")).arg(&file).arg("-o").arg(&binary);
    succeed(&mut build, TIMEOUT);
    succeed(&mut Command::new(binary), TIMEOUT)
}

fn layout_of_ctypes() -> String {
    const SCRIPT: &str = "
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location('_structures', sys.argv[1])
structures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(structures)
for structure in structures.STRUCTURES:
    print(structure.c_name, ctypes.sizeof(structure))
    for name, *_ in structure._fields_:
        field = getattr(structure, name)
        print(f'{structure.c_name}.{name}', field.offset, field.size)
";
    let module = root().join("packaging/python/spillway/_structures.py");
    succeed(Command::new("python3").args(["-B", "-c", SCRIPT]).arg(module), TIMEOUT)
}

/// Structs in order of their names: each view has its own order.
fn sorted(layout: &str) -> String {
    let mut blocks: Vec<Vec<&str>> = Vec::new();
    for line in layout.lines() {
        let starts_struct = line.split(' ').next().is_some_and(|name| !name.contains('.'));
        if starts_struct {
            blocks.push(Vec::new());
        }
        blocks.last_mut().expect("a layout begins with a struct").push(line);
    }
    blocks.sort();
    blocks.concat().iter().map(|line| format!("{line}\n")).collect()
}

#[test]
fn rust_c_and_ctypes_see_the_committed_layout() {
    let rust = sorted(&layout_of_rust());
    golden("layout.txt", &rust);
    assert_eq!(sorted(&layout_of_c(&["gcc", "-std=c99"])), rust, "C (left) and Rust");
    assert_eq!(sorted(&layout_of_c(&["g++", "-std=c++11", "-x", "c++"])), rust, "C++ (left) and Rust");
    assert_eq!(sorted(&layout_of_ctypes()), rust, "ctypes (left) and Rust");
}

#[test]
fn the_header_compiles_alone_and_twice_in_every_c_and_cpp() {
    let folder = empty_dir("header");
    let once = "#include <spillway.h>\n";
    let compilers =
        [("gcc", "c", ["c99", "c11", "c17", "c2x"]), ("g++", "c++", ["c++11", "c++14", "c++17", "c++20"])];
    for (compiler, language, standards) in compilers {
        for standard in standards {
            for (name, text) in [("once", once.to_string()), ("twice", once.repeat(2))] {
                let file = folder.join(format!("{name}.c"));
                fs::write(&file, text + "int main(void) { return (int)spw_abi_version(); }\n")
                    .expect("the target directory is writable");
                let mut build = Command::new(compiler);
                build.args(["-x", language, "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]);
                build.arg(format!("-std={standard}")).arg("-I").arg(root().join("include")).arg(&file);
                succeed(&mut build, TIMEOUT);
            }
        }
    }
}
