//! The functions of DeepSpeed's ops as the loader sees them.
//!
//! Each has the C++ name, and continues in the function of the parent module, with its return address as a further
//! argument: two compiled ops may count their optimizers from 0, and only the address tells which one calls.
//! Arguments stay in their registers, so the further one is the next register of its kind. On x86-64 the Adam step has
//! used these up, and its entry copies the one argument on the stack.
//!
//! | | integers and pointers | next |
//! |---|---|---|
//! | x86-64 | rdi rsi rdx rcx r8 r9, then the stack | return address at the top of the stack |
//! | 64-bit Arm | x0 to x7 | return address in x30 |

use std::arch::naked_asm;

/// An entry whose arguments are all in registers.
macro_rules! entry {
    ($name:literal, $entry:ident, $target:path, x86 $x86:literal, arm $arm:literal) => {
        /// # Safety
        /// Called with the arguments of the C++ function.
        #[unsafe(export_name = $name)]
        #[unsafe(naked)]
        unsafe extern "C-unwind" fn $entry() {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(concat!("mov ", $x86, ", [rsp]"), "jmp {target}", target = sym $target);
            #[cfg(target_arch = "aarch64")]
            naked_asm!(concat!("mov ", $arm, ", x30"), "b {target}", target = sym $target);
        }
    };
}

/// An entry of the Adam step's type. On x86-64 the stack holds, from the top, after the pushes: the last tensor, the
/// return address. At the call the stack is aligned to 16 bytes.
macro_rules! adam_entry {
    ($name:literal, $entry:ident, $target:path) => {
        /// # Safety
        /// Called with the arguments of the C++ function.
        #[unsafe(export_name = $name)]
        #[unsafe(naked)]
        unsafe extern "C-unwind" fn $entry() {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                ".cfi_startproc",
                "sub rsp, 8",
                ".cfi_adjust_cfa_offset 8",
                "push qword ptr [rsp + 8]",
                ".cfi_adjust_cfa_offset 8",
                "push qword ptr [rsp + 24]",
                ".cfi_adjust_cfa_offset 8",
                "call {target}",
                "add rsp, 24",
                ".cfi_adjust_cfa_offset -24",
                "ret",
                ".cfi_endproc",
                target = sym $target
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!("mov x7, x30", "b {target}", target = sym $target);
        }
    };
}

entry!("_Z21create_adam_optimizerifffffbb", create_adam, super::create_adam, x86 "rcx", arm "x3");
adam_entry!("_Z12ds_adam_stepimfffffbRN2at6TensorES1_S1_S1_", adam_step, super::adam_step);
adam_entry!("_Z16ds_adam_rollbackimfffffbRN2at6TensorES1_S1_S1_", adam_rollback, super::adam_rollback);
entry!("_Z22destroy_adam_optimizeri", destroy_adam, super::destroy_adam, x86 "rsi", arm "x1");

entry!("_Z24create_adagrad_optimizerifffb", create_adagrad, super::create_adagrad, x86 "rdx", arm "x2");
entry!("_Z15ds_adagrad_stepimfffRN2at6TensorES1_S1_", adagrad_step, super::adagrad_step, x86 "r9", arm "x5");
entry!("_Z25destroy_adagrad_optimizeri", destroy_adagrad, super::destroy_adagrad, x86 "rsi", arm "x1");

entry!("_Z21create_lion_optimizeriffffb", create_lion, super::create_lion, x86 "rdx", arm "x2");
entry!("_Z12ds_lion_stepimffffRN2at6TensorES1_S1_", lion_step, super::lion_step, x86 "r9", arm "x5");
entry!("_Z22destroy_lion_optimizeri", destroy_lion, super::destroy_lion, x86 "rsi", arm "x1");
