//! Runs the blocks, warps and threads of one launch, one after the other.

use super::program::{Binary, Compare, Instruction, Kernel, Kind, Memory, Operation, Register, Unary};

const WARP: usize = 32;
/// The hardware's arithmetic produces this pattern for every NaN.
const NAN: u32 = 0x7fff_ffff;

/// The reason why a thread stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// The thread waits at the shuffle or barrier with this index.
    Meet(usize),
    Return,
}

struct Thread {
    registers: Vec<u64>,
    at: usize,
    /// Instructions so far.
    ran: u64,
}

impl Kernel {
    /// Runs a whole launch, and returns the number of instructions of all threads together.
    pub fn run(
        &self,
        blocks: u32,
        threads: u32,
        parameters: &[u8],
        memory: &mut dyn Memory,
    ) -> Result<u64, String> {
        let mut ran = 0;
        for block in 0..blocks {
            for warp in (0..threads as usize).step_by(WARP) {
                let lanes = warp..(warp + WARP).min(threads as usize);
                let thread = |thread: usize| {
                    let mut registers = self.registers.clone();
                    let special = [thread as u64, threads.into(), block.into(), blocks.into()];
                    registers[..special.len()].copy_from_slice(&special);
                    Thread { registers, at: 0, ran: 0 }
                };
                ran += self
                    .run_warp(lanes.map(thread).collect(), parameters, memory)
                    .map_err(|words| format!("{}: {words}", self.name))?;
            }
        }
        Ok(ran)
    }

    fn run_warp(
        &self,
        mut threads: Vec<Thread>,
        parameters: &[u8],
        memory: &mut dyn Memory,
    ) -> Result<u64, String> {
        loop {
            let mut stops = Vec::with_capacity(threads.len());
            for thread in &mut threads {
                stops.push(self.run_thread(thread, parameters, memory)?);
            }
            if stops.iter().any(|stop| *stop != stops[0]) {
                return Err("threads of a warp wait at different instructions".to_string());
            }
            let Stop::Meet(place) = stops[0] else {
                return Ok(threads.iter().map(|thread| thread.ran).sum());
            };
            if let Operation::Shuffle { across, to, from, by } = self.code[place].operation {
                let values: Vec<u64> = threads.iter().map(|thread| thread.get(from)).collect();
                for (lane, thread) in threads.iter_mut().enumerate() {
                    let by = thread.get(by) as usize;
                    let source = if across { lane ^ by } else { lane + by };
                    thread.set(to, values[if source < values.len() { source } else { lane }]);
                }
            }
        }
    }

    fn run_thread(
        &self,
        thread: &mut Thread,
        parameters: &[u8],
        memory: &mut dyn Memory,
    ) -> Result<Stop, String> {
        loop {
            let place = thread.at;
            let Instruction { guard, operation } =
                self.code.get(place).ok_or("execution ran past the last instruction")?;
            thread.at += 1;
            thread.ran += 1;
            if guard.is_some_and(|(register, wanted)| (thread.get(register) != 0) != wanted) {
                continue;
            }
            match operation {
                Operation::Return => {
                    thread.at = place;
                    return Ok(Stop::Return);
                }
                Operation::Branch(target) => thread.at = *target,
                Operation::Shuffle { .. } | Operation::WarpBarrier => return Ok(Stop::Meet(place)),
                Operation::LoadParameter { to, base, offset, bytes } => {
                    let start = thread.get(*base).wrapping_add_signed(*offset) as usize;
                    let read = start.checked_add(to.len() * bytes).and_then(|end| parameters.get(start..end));
                    let read = read.ok_or("access outside of the parameters")?;
                    for (register, value) in to.iter().zip(read.chunks(*bytes)) {
                        thread.set(*register, word(value));
                    }
                }
                Operation::Load { to, base, offset, bytes } => {
                    let address = aligned(thread.get(*base).wrapping_add_signed(*offset), to.len() * bytes)?;
                    let mut buffer = [0; 32];
                    let read = &mut buffer[..to.len() * bytes];
                    memory.load(address, read)?;
                    for (register, value) in to.iter().zip(read.chunks(*bytes)) {
                        thread.set(*register, word(value));
                    }
                }
                Operation::Store { from, base, offset, bytes } => {
                    let address =
                        aligned(thread.get(*base).wrapping_add_signed(*offset), from.len() * bytes)?;
                    let mut buffer = [0; 32];
                    for (register, place) in from.iter().zip(buffer.chunks_mut(*bytes)) {
                        place.copy_from_slice(&thread.get(*register).to_le_bytes()[..*bytes]);
                    }
                    memory.store(address, &buffer[..from.len() * bytes])?;
                }
                _ => thread.compute(operation),
            }
        }
    }
}

impl Thread {
    fn get(&self, register: Register) -> u64 {
        self.registers[usize::from(register)]
    }

    fn set(&mut self, register: Register, value: u64) {
        self.registers[usize::from(register)] = value;
    }

    fn f32(&self, register: Register) -> f32 {
        f32::from_bits(self.get(register) as u32)
    }

    fn f64(&self, register: Register) -> f64 {
        f64::from_bits(self.get(register))
    }

    fn compute(&mut self, operation: &Operation) {
        match *operation {
            Operation::Unary(unary, to, from) => self.set(to, one(unary, self.get(from))),
            Operation::Binary(binary, to, a, b) => self.set(to, two(binary, self.get(a), self.get(b))),
            Operation::Fma32(to, [a, b, c]) => {
                self.set(to, of_f32(self.f32(a).mul_add(self.f32(b), self.f32(c))))
            }
            Operation::Fma64(to, [a, b, c]) => {
                self.set(to, self.f64(a).mul_add(self.f64(b), self.f64(c)).to_bits())
            }
            Operation::MulAdd32(to, [a, b, c]) => {
                let product = (self.get(a) as u32).wrapping_mul(self.get(b) as u32);
                self.set(to, u64::from(product.wrapping_add(self.get(c) as u32)))
            }
            Operation::Insert64 { to, from, into, position, length } => {
                let (position, length) = (self.get(position) as u32, self.get(length) as u32);
                let mask = u64::MAX.unbounded_shr(64u32.saturating_sub(length)).unbounded_shl(position);
                self.set(to, self.get(from).unbounded_shl(position) & mask | self.get(into) & !mask)
            }
            Operation::Permute(to, [a, b, selector]) => {
                let bytes = (self.get(a) & 0xffff_ffff | self.get(b) << 32).to_le_bytes();
                let chosen = [0, 4, 8, 12].map(|at| {
                    let number = self.get(selector) >> at;
                    let byte = bytes[(number & 7) as usize];
                    if number & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
                });
                self.set(to, u32::from_le_bytes(chosen).into())
            }
            Operation::Compare(compare, kind, to, a, b) => {
                self.set(to, u64::from(compares(compare, kind, self.get(a), self.get(b))))
            }
            Operation::Select { to, then, otherwise, by } => {
                self.set(to, self.get(if self.get(by) != 0 { then } else { otherwise }))
            }
            Operation::Join(to, [low, high], bits) => {
                let half = |register| self.get(register) & u64::MAX >> (64 - bits);
                self.set(to, half(low) | half(high) << bits)
            }
            Operation::Split(halves, from) => {
                let value = self.get(from);
                for (half, value) in halves.into_iter().zip([value & 0xffff_ffff, value >> 32]) {
                    if let Some(register) = half {
                        self.set(register, value);
                    }
                }
            }
            _ => unreachable!("the caller runs what is not arithmetic"),
        }
    }
}

fn one(unary: Unary, value: u64) -> u64 {
    let float = f32::from_bits(value as u32);
    match unary {
        Unary::Move => value,
        Unary::Truncate16 => value & 0xffff,
        Unary::Truncate32 => value & 0xffff_ffff,
        Unary::Extend32 => i64::from(value as i32) as u64,
        Unary::NotPredicate => u64::from(value == 0),
        Unary::Not32 => !value & 0xffff_ffff,
        Unary::Not64 => !value,
        Unary::Negate32 => value ^ 0x8000_0000,
        Unary::Sqrt32 => of_f32(float.sqrt()),
        Unary::F16ToF32 => of_f32(widen_f16(value as u16)),
        Unary::F32ToF16 => narrow_f16(float).into(),
        Unary::F32ToF64 => f64::from(float).to_bits(),
    }
}

fn two(binary: Binary, a: u64, b: u64) -> u64 {
    let (f, g) = (f32::from_bits(a as u32), f32::from_bits(b as u32));
    let (x, y) = (f64::from_bits(a), f64::from_bits(b));
    let low = |value: u64| value & 0xffff_ffff;
    let shift = |value: u64, bits: u64, right: bool| match (b as u32 as u64 >= bits, right) {
        (true, _) => 0,
        (false, true) => value >> b,
        (false, false) => value << b,
    };
    match binary {
        Binary::Add32 => low(a.wrapping_add(b)),
        Binary::Add64 => a.wrapping_add(b),
        Binary::Sub32 => low(a.wrapping_sub(b)),
        Binary::Sub64 => a.wrapping_sub(b),
        Binary::Mul64 => a.wrapping_mul(b),
        Binary::Mul32 => u64::from((a as u32).wrapping_mul(b as u32)),
        Binary::MulWide32 => low(a) * low(b),
        Binary::MulHigh64 => ((u128::from(a) * u128::from(b)) >> 64) as u64,
        Binary::MinU32 => low(a).min(low(b)),
        Binary::MaxU32 => low(a).max(low(b)),
        Binary::MinS32 => u64::from((a as i32).min(b as i32) as u32),
        Binary::MinU64 => a.min(b),
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::ShiftLeft32 => low(shift(low(a), 32, false)),
        Binary::ShiftLeft64 => shift(a, 64, false),
        Binary::ShiftRight32 => shift(low(a), 32, true),
        Binary::ShiftRightS32 => u64::from(((a as i32) >> (b as u32).min(31)) as u32),
        Binary::ShiftRight64 => shift(a, 64, true),
        Binary::AddF32 => of_f32(f + g),
        Binary::MulF32 => of_f32(f * g),
        Binary::DivF32 => of_f32(f / g),
        Binary::AddF64 => (x + y).to_bits(),
        Binary::MulF64 => (x * y).to_bits(),
    }
}

fn compares(compare: Compare, kind: Kind, a: u64, b: u64) -> bool {
    let (x, y) = (f32::from_bits(a as u32), f32::from_bits(b as u32));
    let order = match kind {
        Kind::Unsigned => Some(a.cmp(&b)),
        Kind::Signed16 => Some((a as i16).cmp(&(b as i16))),
        Kind::Signed32 => Some((a as i32).cmp(&(b as i32))),
        Kind::Signed64 => Some((a as i64).cmp(&(b as i64))),
        Kind::Float32 => x.partial_cmp(&y),
    };
    match (compare, order) {
        (Compare::Unordered, order) => order.is_none(),
        (_, None) => false,
        (Compare::Equal, Some(order)) => order.is_eq(),
        (Compare::NotEqual, Some(order)) => order.is_ne(),
        (Compare::Less, Some(order)) => order.is_lt(),
        (Compare::LessEqual, Some(order)) => order.is_le(),
        (Compare::Greater, Some(order)) => order.is_gt(),
        (Compare::GreaterEqual, Some(order)) => order.is_ge(),
    }
}

fn of_f32(value: f32) -> u64 {
    if value.is_nan() { NAN.into() } else { value.to_bits().into() }
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// The hardware terminates a kernel that does not align an access to its size.
fn aligned(address: u64, bytes: usize) -> Result<u64, String> {
    match address % bytes as u64 {
        0 => Ok(address),
        _ => Err(format!("misaligned access of {bytes} bytes at {address:#x}")),
    }
}

/// The exact value of a binary16 pattern.
fn widen_f16(bits: u16) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let size = match exponent {
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        0 => fraction * 2f32.powi(-24),
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    if bits & 0x8000 == 0 { size } else { -size }
}

/// To the nearest binary16, ties to even; NaN is 0x7fff, as on the hardware.
fn narrow_f16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let size = f64::from(value.abs());
    if size >= 65520.0 {
        return sign | 0x7c00;
    }
    let exponent = (((size.to_bits() >> 52) as i32) - 1023).max(-14);
    let steps = (size * 2f64.powi(10 - exponent)).round_ties_even() as i32;
    // A value that rounds up to the next power of two carries into the exponent without extra code.
    sign | (steps + (exponent + 14) * 1024) as u16
}
