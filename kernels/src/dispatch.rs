//! Detection and choice of the instruction set of this process.

use std::sync::atomic::{AtomicU8, Ordering};

use super::scalar::Scalar;
use super::vector::{Body, Isa};
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};
#[cfg(target_arch = "aarch64")]
use super::{neon::Neon, sve};
use crate::error::{Error, Result};

/// A kernel that this processor can run. Values are created only after feature detection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel(InstructionSet);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum InstructionSet {
    Scalar = 1,
    Avx2 = 2,
    Avx512 = 3,
    Neon = 4,
    Sve = 5,
    SveBf16 = 6,
}

/// All instruction sets, fastest first.
const INSTRUCTION_SETS: [InstructionSet; 6] = [
    InstructionSet::Avx512,
    InstructionSet::Avx2,
    InstructionSet::SveBf16,
    InstructionSet::Sve,
    InstructionSet::Neon,
    InstructionSet::Scalar,
];

impl InstructionSet {
    const fn name(self) -> &'static str {
        match self {
            InstructionSet::Scalar => "scalar",
            InstructionSet::Avx2 => "avx2",
            InstructionSet::Avx512 => "avx512",
            InstructionSet::Neon => "neon",
            InstructionSet::Sve => "sve",
            InstructionSet::SveBf16 => "sve_bf16",
        }
    }

    fn detected(self) -> bool {
        match self {
            InstructionSet::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => Avx2::detected(),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => Avx512::detected(),
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => true,
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Sve => sve::detected(),
            #[cfg(target_arch = "aarch64")]
            InstructionSet::SveBf16 => sve::bf16_detected(),
            _ => false,
        }
    }
}

impl Kernel {
    /// All kernels that this processor can run, fastest first.
    pub fn all() -> impl Iterator<Item = Kernel> {
        INSTRUCTION_SETS.into_iter().filter(|set| set.detected()).map(Kernel)
    }

    /// Returns the kernel with this name. Fails if no kernel has the name or the processor cannot run it.
    pub fn named(name: &str) -> Result<Kernel> {
        let known = INSTRUCTION_SETS.into_iter().find(|set| set.name() == name);
        match known {
            Some(set) if set.detected() => Ok(Kernel(set)),
            Some(_) => Err(Error::Unsupported(format!("this processor does not support {name}"))),
            None => {
                let names: Vec<&str> = INSTRUCTION_SETS.iter().map(|set| set.name()).collect();
                Err(Error::Unsupported(format!(
                    "there is no kernel {name:?}; the kernels are {}",
                    names.join(", ")
                )))
            }
        }
    }

    /// Returns the kernel of this process: the one that `SPILLWAY_KERNEL` names, else the fastest. The call that makes
    /// the choice takes the variable from `variable`, and passes a message about the choice to `told`.
    pub fn current<E: From<Error>>(
        variable: impl FnOnce() -> std::result::Result<Option<String>, E>,
        told: impl FnOnce(&str),
    ) -> std::result::Result<Kernel, E> {
        // An atomic instead of a lock: a lock that is held during fork stays locked in the child. Two threads that race
        // here choose the same kernel.
        static CHOSEN: AtomicU8 = AtomicU8::new(0);
        let chosen = CHOSEN.load(Ordering::Relaxed);
        if let Some(set) = INSTRUCTION_SETS.into_iter().find(|set| *set as u8 == chosen) {
            return Ok(Kernel(set));
        }
        let (kernel, reason) = match variable()? {
            Some(name) => {
                let forced = Kernel::named(&name).map_err(|error| {
                    Error::Unsupported(format!(
                        "SPILLWAY_KERNEL={name}: {error}; unset it to use the fastest supported kernel"
                    ))
                })?;
                (forced, "forced by SPILLWAY_KERNEL")
            }
            None => (
                Kernel::all().next().unwrap_or(Kernel(InstructionSet::Scalar)),
                "the fastest that this processor supports",
            ),
        };
        CHOSEN.store(kernel.0 as u8, Ordering::Relaxed);
        told(&format!("kernel {}: {reason}", kernel.name()));
        Ok(kernel)
    }

    /// Name of the kernel, as `SPILLWAY_KERNEL` spells it.
    pub const fn name(self) -> &'static str {
        self.0.name()
    }

    /// The C bodies of Adam, for kernels that have them.
    #[cfg(target_arch = "aarch64")]
    pub(super) fn adam(self) -> Option<&'static sve::Adam> {
        match self.0 {
            InstructionSet::Sve => Some(&sve::SVE),
            InstructionSet::SveBf16 => Some(&sve::SVE_BF16),
            _ => None,
        }
    }

    /// Runs `body` with this kernel's vectors in the current float mode of the thread.
    ///
    /// # Safety
    /// The pointers of the body are valid for all elements that it accesses.
    pub unsafe fn run<B: Body>(self, body: B) -> f64 {
        // SAFETY: a Kernel exists only for a set that the processor has; the caller upholds the contract of the body.
        unsafe {
            match self.0 {
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx2 => Avx2::vectorize(body),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx512 => Avx512::vectorize(body),
                #[cfg(target_arch = "aarch64")]
                InstructionSet::Neon | InstructionSet::Sve | InstructionSet::SveBf16 => Neon::vectorize(body),
                _ => Scalar::vectorize(body),
            }
        }
    }
}
