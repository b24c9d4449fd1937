//! PTX on the processor: the instructions that the kernels use, parsed strictly and run as the PTX manual defines them.
//!
//! Anything unknown is an error, and so are flush-to-zero, approximations and floating point without a rounding mode.
//! Threads of a warp meet at shuffles and warp barriers; all of them have to arrive. A NaN that arithmetic makes is
//! 0x7fffffff, as on the hardware.

mod parse;
mod run;

use std::collections::HashMap;
use std::sync::Arc;

/// What kernels read and write.
pub trait Memory {
    /// Reads bytes.
    fn load(&mut self, address: u64, to: &mut [u8]) -> Result<(), String>;
    /// Writes bytes.
    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), String>;
}

/// A module.
#[derive(Debug)]
pub struct Module {
    kernels: HashMap<String, Arc<Kernel>>,
}

impl Module {
    /// Reads the text; an error names the line.
    pub fn parse(text: &str) -> Result<Module, String> {
        parse::module(text)
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<Arc<Kernel>> {
        self.kernels.get(name).cloned()
    }

    /// Names of all kernels, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.kernels.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }
}

/// A kernel.
#[derive(Debug)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Offset and size of each parameter.
    pub parameters: Vec<(usize, usize)>,
    /// Bytes of all parameters.
    pub parameter_bytes: usize,
    /// `.maxntid`
    pub most_threads: Option<u32>,
    /// Values of the registers before the first instruction: constants, then zeros.
    registers: Vec<u64>,
    code: Vec<Instruction>,
}

/// A register, or a constant that has one.
type Slot = u16;

/// Registers that every kernel has, in this order: thread, threads of the block, block, blocks.
const SPECIAL: [&str; 4] = ["%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"];

#[derive(Debug, Clone)]
struct Instruction {
    /// Runs only if this predicate is (or with false: is not) set.
    guard: Option<(Slot, bool)>,
    operation: Operation,
}

#[derive(Debug, Clone)]
enum Operation {
    LoadParameter {
        to: Slot,
        offset: usize,
        bytes: usize,
    },
    Load {
        to: Vec<Slot>,
        base: Slot,
        offset: i64,
        bytes: usize,
    },
    Store {
        from: Vec<Slot>,
        base: Slot,
        offset: i64,
        bytes: usize,
    },
    Unary(Unary, Slot, Slot),
    Binary(Binary, Slot, Slot, Slot),
    Fma32(Slot, [Slot; 3]),
    Fma64(Slot, [Slot; 3]),
    Compare(Compare, Kind, Slot, Slot, Slot),
    Select {
        to: Slot,
        then: Slot,
        otherwise: Slot,
        by: Slot,
    },
    /// Two halves to one.
    Join(Slot, [Slot; 2]),
    /// One to two halves; None is thrown away.
    Split([Option<Slot>; 2], Slot),
    Branch(usize),
    ShuffleDown {
        to: Slot,
        from: Slot,
        by: Slot,
    },
    WarpBarrier,
    Return,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unary {
    Move,
    Truncate16,
    Truncate32,
    Extend32,
    NotPredicate,
    Not32,
    Not64,
    Negate32,
    Sqrt32,
    F16ToF32,
    F32ToF16,
    F32ToF64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Binary {
    Add32,
    Add64,
    Sub32,
    Sub64,
    Mul64,
    MulWide32,
    MinU32,
    MinU64,
    MinS32,
    And,
    Or,
    Xor,
    ShiftLeft32,
    ShiftLeft64,
    ShiftRight32,
    ShiftRightS32,
    ShiftRight64,
    AddF32,
    MulF32,
    DivF32,
    AddF64,
    MulF64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compare {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Unordered,
}

/// How a comparison reads its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unsigned,
    Signed16,
    Signed32,
    Signed64,
    Float32,
}
