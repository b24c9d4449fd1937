//! A module of PTX after parsing: its kernels, and their instructions.

use std::collections::HashMap;
use std::sync::Arc;

/// The memory that kernels read and write.
pub trait Memory {
    /// Reads bytes.
    fn load(&mut self, address: u64, to: &mut [u8]) -> Result<(), String>;
    /// Writes bytes.
    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), String>;
}

/// A module.
#[derive(Debug)]
pub struct Module {
    pub(super) kernels: HashMap<String, Arc<Kernel>>,
}

impl Module {
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
    /// The limit of `.maxntid`.
    pub most_threads: Option<u32>,
    /// Values of the registers before the first instruction: constants, then zeros.
    pub(super) registers: Vec<u64>,
    pub(super) code: Vec<Instruction>,
}

/// The number of a register. A constant has a register of its own.
pub(super) type Register = u16;

/// Special registers of every kernel, in this order: thread, threads of the block, block, blocks.
pub(super) const SPECIAL: [&str; 4] = ["%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"];

#[derive(Debug, Clone)]
pub(super) struct Instruction {
    /// Runs only if this predicate is (or with false: is not) set.
    pub(super) guard: Option<(Register, bool)>,
    pub(super) operation: Operation,
}

#[derive(Debug, Clone)]
pub(super) enum Operation {
    /// Parameters are addressed by their offset.
    LoadParameter {
        to: Vec<Register>,
        base: Register,
        offset: i64,
        bytes: usize,
    },
    Load {
        to: Vec<Register>,
        base: Register,
        offset: i64,
        bytes: usize,
    },
    Store {
        from: Vec<Register>,
        base: Register,
        offset: i64,
        bytes: usize,
    },
    Unary(Unary, Register, Register),
    Binary(Binary, Register, Register, Register),
    Fma32(Register, [Register; 3]),
    Fma64(Register, [Register; 3]),
    MulAdd32(Register, [Register; 3]),
    /// The lower bits of the first operand, `length` of them, replace those of the second from `position` on.
    Insert64 {
        to: Register,
        from: Register,
        into: Register,
        position: Register,
        length: Register,
    },
    /// Four bytes of two words, which a selector names. Bit 3 of a number asks for the sign of the byte.
    Permute(Register, [Register; 3]),
    Compare(Compare, Kind, Register, Register, Register),
    Select {
        to: Register,
        then: Register,
        otherwise: Register,
        by: Register,
    },
    /// Joins two halves of this many bits into one value.
    Join(Register, [Register; 2], u32),
    /// Splits one value into two halves; None discards a half.
    Split([Option<Register>; 2], Register),
    Branch(usize),
    /// The value of another thread of the warp: of that `by` threads further, or of that whose number differs in the
    /// bits of `by`.
    Shuffle {
        across: bool,
        to: Register,
        from: Register,
        by: Register,
    },
    WarpBarrier,
    Return,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unary {
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
pub(super) enum Binary {
    Add32,
    Add64,
    Sub32,
    Sub64,
    Mul64,
    Mul32,
    MulWide32,
    MulHigh64,
    MinU32,
    MaxU32,
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
pub(super) enum Compare {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Unordered,
}

/// The type as which a comparison reads its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Unsigned,
    Signed16,
    Signed32,
    Signed64,
    Float32,
}
