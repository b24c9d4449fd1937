//! Parses PTX text into instructions.

use std::collections::HashMap;
use std::sync::Arc;

use super::program::{
    Binary, Compare, Instruction, Kernel, Kind, Module, Operation, Register, SPECIAL, Unary,
};

type Outcome<T> = Result<T, String>;

impl Module {
    /// Parses the text; an error names the line.
    pub fn parse(text: &str) -> Outcome<Module> {
        module(text)
    }
}

fn module(text: &str) -> Outcome<Module> {
    let mut kernels = HashMap::new();
    let mut lines = text.lines().enumerate().filter(|(_, line)| {
        let line = line.trim();
        !line.is_empty() && !line.starts_with("//")
    });
    while let Some((number, line)) = lines.next() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix(".visible .entry ") {
            let mut depth = 0;
            let mut body = Vec::new();
            for (number, line) in lines.by_ref() {
                let line = line.trim();
                depth += i32::from(line == "{") - i32::from(line == "}");
                body.push((number, line));
                if line == "}" && depth == 0 {
                    break;
                }
            }
            let kernel = kernel(name.trim_end_matches('('), &body)?;
            kernels.insert(kernel.name.clone(), Arc::new(kernel));
        } else if !["version 8.0", "target sm_70", "address_size 64"]
            .iter()
            .any(|known| line == format!(".{known}"))
        {
            return Err(format!("line {}: {line}", number + 1));
        }
    }
    Ok(Module { kernels })
}

#[derive(Default)]
struct Parser {
    registers: HashMap<String, Register>,
    values: Vec<u64>,
    labels: HashMap<String, usize>,
    offsets: HashMap<String, usize>,
    code: Vec<Instruction>,
    branches: Vec<(usize, String)>,
    /// Width in bits of the constants in the current instruction.
    bits: u32,
}

fn kernel(name: &str, body: &[(usize, &str)]) -> Outcome<Kernel> {
    let mut parser = Parser::default();
    let mut kernel = Kernel {
        name: name.to_string(),
        parameters: Vec::new(),
        parameter_bytes: 0,
        most_threads: None,
        registers: Vec::new(),
        code: Vec::new(),
    };
    for special in SPECIAL {
        parser.declare(special);
    }
    for (number, line) in body {
        let outcome = match line.strip_prefix(".param ") {
            Some(parameter) => parser.parameter(&mut kernel, parameter),
            None => parser.line(&mut kernel, line),
        };
        outcome.map_err(|words| format!("{name}, line {}: {line}: {words}", number + 1))?;
    }
    for (at, label) in parser.branches {
        let target = *parser.labels.get(&label).ok_or_else(|| format!("{name}: no label {label}"))?;
        parser.code[at].operation = Operation::Branch(target);
    }
    kernel.registers = parser.values;
    kernel.code = parser.code;
    Ok(kernel)
}

impl Parser {
    fn declare(&mut self, name: &str) -> Register {
        if let Some(register) = self.registers.get(name) {
            return *register;
        }
        let register = self.values.len() as Register;
        self.values.push(0);
        self.registers.insert(name.to_string(), register);
        register
    }

    fn parameter(&mut self, kernel: &mut Kernel, text: &str) -> Outcome<()> {
        let words: Vec<&str> = text.trim_end_matches(',').split_whitespace().collect();
        let (alignment, bytes, name) = match words[..] {
            [".align", alignment, ".b8", array] => {
                let (name, size) = array.trim_end_matches(']').split_once('[').ok_or("no size")?;
                (number(alignment)? as usize, number(size)? as usize, name)
            }
            [kind, name] => (size_of_type(kind)?, size_of_type(kind)?, name),
            _ => return Err("unknown kind of parameter".to_string()),
        };
        let offset = kernel.parameter_bytes.next_multiple_of(alignment);
        kernel.parameters.push((offset, bytes));
        kernel.parameter_bytes = offset + bytes;
        self.offsets.insert(name.to_string(), offset);
        Ok(())
    }

    fn line(&mut self, kernel: &mut Kernel, line: &str) -> Outcome<()> {
        // How many blocks of a kernel a multiprocessor must hold limits its registers, which the interpreter does not count.
        if [")", "{", "}", ".pragma \"nounroll\";", ".minnctapersm 2"].contains(&line) {
            return Ok(());
        }
        if let Some(threads) = line.strip_prefix(".maxntid ") {
            let most = threads.strip_suffix(", 1, 1").ok_or("only blocks of one dimension")?;
            kernel.most_threads = Some(number(most)? as u32);
            return Ok(());
        }
        if let Some(label) = line.strip_suffix(':') {
            self.labels.insert(label.to_string(), self.code.len());
            return Ok(());
        }
        let line = line.strip_suffix(';').ok_or("no semicolon")?.trim();
        match line.strip_prefix(".reg ") {
            Some(registers) => self.registers(registers),
            None => self.instruction(line),
        }
    }

    fn registers(&mut self, text: &str) -> Outcome<()> {
        let (kind, name) = text.split_once(char::is_whitespace).ok_or("no name")?;
        if ![".pred", ".b16", ".b32", ".b64", ".f32", ".f64"].contains(&kind) {
            return Err(format!("registers of {kind}"));
        }
        let name = name.trim();
        match name.split_once('<') {
            None => {
                self.declare(name);
            }
            Some((stem, count)) => {
                for index in 0..number(count.trim_end_matches('>'))? {
                    self.declare(&format!("{stem}{index}"));
                }
            }
        }
        Ok(())
    }

    /// Returns a register; a constant receives a register of its own, and so does the address of a parameter.
    fn register(&mut self, text: &str) -> Outcome<Register> {
        if let Some(register) = self.registers.get(text) {
            return Ok(*register);
        }
        if text.starts_with('%') {
            return Err(format!("no register {text}"));
        }
        let value = match self.offsets.get(text) {
            Some(offset) => *offset as u64,
            None => constant(text)? & (u64::MAX >> (64 - self.bits)),
        };
        let register = self.declare(&format!("{text} of {} bits", self.bits));
        self.values[usize::from(register)] = value;
        Ok(register)
    }

    fn instruction(&mut self, line: &str) -> Outcome<()> {
        let (guard, line) = match line.strip_prefix('@') {
            None => (None, line),
            Some(rest) => {
                let (predicate, rest) = rest.split_once(' ').ok_or("a guard without an instruction")?;
                let wanted = !predicate.starts_with('!');
                (Some((self.register(predicate.trim_start_matches('!'))?, wanted)), rest.trim())
            }
        };
        let (name, operands) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let operands = split_operands(operands);
        let operands: Vec<&str> = operands.iter().map(String::as_str).collect();
        self.bits = match name.get(name.len().saturating_sub(2)..) {
            Some("16") => 16,
            Some("32") => 32,
            _ => 64,
        };
        let operation = self.operation(name, &operands)?;
        self.code.push(Instruction { guard, operation });
        Ok(())
    }

    fn operation(&mut self, name: &str, operands: &[&str]) -> Outcome<Operation> {
        Ok(match (name, operands) {
            ("ret", []) => Operation::Return,
            ("bar.warp.sync", ["-1"]) => Operation::WarpBarrier,
            ("bar.warp.sync", [mask]) => {
                self.register(mask)?;
                Operation::WarpBarrier
            }
            ("bra" | "bra.uni", [label]) => {
                self.branches.push((self.code.len(), label.to_string()));
                Operation::Branch(usize::MAX)
            }
            ("shfl.sync.down.b32" | "shfl.sync.bfly.b32", [to, from, by, clamp, mask]) => {
                let to = to.split_once('|').ok_or("a shuffle returns a value and a predicate")?.0;
                for known in [clamp, mask] {
                    self.register(known)?;
                }
                Operation::Shuffle {
                    across: name.contains("bfly"),
                    to: self.register(to)?,
                    from: self.register(from)?,
                    by: self.register(by)?,
                }
            }
            ("mov.b64" | "mov.b32", [to, from]) if from.starts_with('{') => {
                let halves = vector(from)?;
                let [low, high] = halves[..] else { return Err("not two halves".to_string()) };
                let halves = [self.register(low)?, self.register(high)?];
                Operation::Join(self.register(to)?, halves, if name == "mov.b64" { 32 } else { 16 })
            }
            ("mov.b64", [to, from]) if to.starts_with('{') => {
                let halves = vector(to)?;
                let [low, high] = halves[..] else { return Err("not two halves".to_string()) };
                let mut half =
                    |name: &str| if name == "%temp" { Ok(None) } else { self.register(name).map(Some) };
                Operation::Split([half(low)?, half(high)?], self.register(from)?)
            }
            _ if name.starts_with("ld.") || name.starts_with("st.") => self.access(name, operands)?,
            _ if name.starts_with("setp.") => self.compare(name, operands)?,
            (
                "selp.b16" | "selp.u16" | "selp.b32" | "selp.u32" | "selp.f32" | "selp.f64" | "selp.b64",
                [to, then, otherwise, by],
            ) => Operation::Select {
                to: self.register(to)?,
                then: self.register(then)?,
                otherwise: self.register(otherwise)?,
                by: self.register(by)?,
            },
            ("fma.rn.f32", [to, a, b, c]) => Operation::Fma32(
                self.register(to)?,
                [self.register(a)?, self.register(b)?, self.register(c)?],
            ),
            ("fma.rn.f64", [to, a, b, c]) => Operation::Fma64(
                self.register(to)?,
                [self.register(a)?, self.register(b)?, self.register(c)?],
            ),
            ("mad.lo.s32", [to, a, b, c]) => Operation::MulAdd32(
                self.register(to)?,
                [self.register(a)?, self.register(b)?, self.register(c)?],
            ),
            ("prmt.b32", [to, a, b, selector]) => Operation::Permute(
                self.register(to)?,
                [self.register(a)?, self.register(b)?, self.register(selector)?],
            ),
            ("bfi.b64", [to, from, into, position, length]) => Operation::Insert64 {
                to: self.register(to)?,
                from: self.register(from)?,
                into: self.register(into)?,
                position: self.register(position)?,
                length: self.register(length)?,
            },
            (_, [to, from]) => Operation::Unary(unary(name)?, self.register(to)?, self.register(from)?),
            (_, [to, a, b]) => {
                Operation::Binary(binary(name)?, self.register(to)?, self.register(a)?, self.register(b)?)
            }
            _ => return Err("unknown instruction".to_string()),
        })
    }

    fn access(&mut self, name: &str, operands: &[&str]) -> Outcome<Operation> {
        let words: Vec<&str> = name.split('.').collect();
        let (lanes, kind) = match words[..] {
            [_, "global" | "param", kind] => (1, kind),
            [_, "global" | "param", "v2", kind] => (2, kind),
            [_, "global", "v4", kind] => (4, kind),
            _ => return Err("unknown access".to_string()),
        };
        let [first, second] = operands else { return Err("an access has two operands".to_string()) };
        let (place, registers) = if words[0] == "ld" { (*second, *first) } else { (*first, *second) };
        let names = if registers.starts_with('{') { vector(registers)? } else { vec![registers] };
        if names.len() != lanes {
            return Err(format!("{} registers for {lanes} lanes", names.len()));
        }
        let registers: Vec<Register> =
            names.into_iter().map(|name| self.register(name)).collect::<Outcome<_>>()?;
        let bytes = size_of_type(&format!(".{kind}"))?;
        let inner = place.strip_prefix('[').and_then(|place| place.strip_suffix(']')).ok_or("no brackets")?;
        let (base, offset) = match inner.split_once('+') {
            Some((base, offset)) => (base, offset.parse::<i64>().map_err(|error| error.to_string())?),
            None => (inner, 0),
        };
        self.bits = 64;
        let base = self.register(base)?;
        Ok(match (words[0], words[1]) {
            ("ld", "param") => Operation::LoadParameter { to: registers, base, offset, bytes },
            ("ld", _) => Operation::Load { to: registers, base, offset, bytes },
            (_, "param") => return Err("a store to a parameter".to_string()),
            _ => Operation::Store { from: registers, base, offset, bytes },
        })
    }

    fn compare(&mut self, name: &str, operands: &[&str]) -> Outcome<Operation> {
        let words: Vec<&str> = name.split('.').collect();
        let ([_, compare, kind], [to, a, b]) = (&words[..], operands) else {
            return Err("unknown comparison".to_string());
        };
        let kind = match *kind {
            "u16" | "u32" | "u64" | "b16" | "b32" | "b64" => Kind::Unsigned,
            "s16" => Kind::Signed16,
            "s32" => Kind::Signed32,
            "s64" => Kind::Signed64,
            "f32" => Kind::Float32,
            other => return Err(format!("comparison of {other}")),
        };
        let compare = match *compare {
            "eq" => Compare::Equal,
            "ne" => Compare::NotEqual,
            "lt" => Compare::Less,
            "le" => Compare::LessEqual,
            "gt" => Compare::Greater,
            "ge" => Compare::GreaterEqual,
            "nan" if kind == Kind::Float32 => Compare::Unordered,
            other => return Err(format!("comparison {other}")),
        };
        Ok(Operation::Compare(compare, kind, self.register(to)?, self.register(a)?, self.register(b)?))
    }
}

fn unary(name: &str) -> Outcome<Unary> {
    Ok(match name {
        "mov.u16" | "mov.u32" | "mov.u64" | "mov.b16" | "mov.b32" | "mov.b64" | "mov.f32" | "mov.f64"
        | "mov.pred" | "cvta.to.global.u64" | "cvt.u32.u16" | "cvt.u64.u32" | "cvt.u64.u16" => Unary::Move,
        "cvt.s64.s32" => Unary::Extend32,
        "cvt.u16.u32" | "cvt.u16.u64" => Unary::Truncate16,
        "cvt.u32.u64" => Unary::Truncate32,
        "not.pred" => Unary::NotPredicate,
        "not.b32" => Unary::Not32,
        "not.b64" => Unary::Not64,
        "neg.f32" => Unary::Negate32,
        "sqrt.rn.f32" => Unary::Sqrt32,
        "cvt.f32.f16" => Unary::F16ToF32,
        "cvt.rn.f16.f32" => Unary::F32ToF16,
        "cvt.f64.f32" => Unary::F32ToF64,
        _ => return Err("unknown instruction".to_string()),
    })
}

fn binary(name: &str) -> Outcome<Binary> {
    Ok(match name {
        "add.s32" | "add.u32" => Binary::Add32,
        "add.s64" | "add.u64" => Binary::Add64,
        "sub.s32" | "sub.u32" => Binary::Sub32,
        "sub.s64" | "sub.u64" => Binary::Sub64,
        "mul.lo.s64" | "mul.lo.u64" => Binary::Mul64,
        "mul.lo.s32" | "mul.lo.u32" => Binary::Mul32,
        "mul.wide.u32" => Binary::MulWide32,
        "mul.hi.u64" => Binary::MulHigh64,
        "min.u32" => Binary::MinU32,
        "max.u32" => Binary::MaxU32,
        "min.s32" => Binary::MinS32,
        "min.u64" => Binary::MinU64,
        "and.b16" | "and.b32" | "and.b64" | "and.pred" => Binary::And,
        "or.b16" | "or.b32" | "or.b64" | "or.pred" => Binary::Or,
        "xor.b16" | "xor.b32" | "xor.b64" | "xor.pred" => Binary::Xor,
        "shl.b32" => Binary::ShiftLeft32,
        "shl.b64" => Binary::ShiftLeft64,
        "shr.u32" => Binary::ShiftRight32,
        "shr.s32" => Binary::ShiftRightS32,
        "shr.u64" => Binary::ShiftRight64,
        "add.rn.f32" => Binary::AddF32,
        "mul.rn.f32" => Binary::MulF32,
        "div.rn.f32" => Binary::DivF32,
        "add.rn.f64" => Binary::AddF64,
        "mul.rn.f64" => Binary::MulF64,
        _ => return Err("unknown instruction".to_string()),
    })
}

/// Splits operands at commas, and keeps those in braces together.
fn split_operands(text: &str) -> Vec<String> {
    let mut operands = Vec::new();
    let mut depth = 0;
    let mut operand = String::new();
    for letter in text.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if letter == ',' && depth == 0 {
            operands.push(std::mem::take(&mut operand).trim().to_string());
        } else {
            operand.push(letter);
        }
    }
    if !operand.trim().is_empty() {
        operands.push(operand.trim().to_string());
    }
    operands
}

fn vector(text: &str) -> Outcome<Vec<&str>> {
    let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).ok_or("no braces")?;
    Ok(inner.split(',').map(str::trim).collect())
}

fn size_of_type(kind: &str) -> Outcome<usize> {
    match kind {
        ".u8" | ".b8" => Ok(1),
        ".u16" | ".b16" => Ok(2),
        ".u32" | ".b32" | ".f32" => Ok(4),
        ".u64" | ".b64" | ".f64" => Ok(8),
        _ => Err(format!("unknown type {kind}")),
    }
}

fn number(text: &str) -> Outcome<u64> {
    text.trim().parse().map_err(|_| format!("{text} is not a number"))
}

fn constant(text: &str) -> Outcome<u64> {
    let hex = |digits: &str| u64::from_str_radix(digits, 16).map_err(|_| format!("{text} is not a constant"));
    if let Some(digits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0d")) {
        return hex(digits);
    }
    text.parse::<i64>().map(|value| value as u64).map_err(|_| format!("{text} is not a constant"))
}
