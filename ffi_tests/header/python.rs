//! The C interface as a Python module for ctypes: constants, structs and prototypes, from the same items as the headers.

use std::collections::BTreeSet;

use crate::items::Item;

const HEAD: &str = "\"\"\"The C interface for ctypes: constants, structs and prototypes.

Generated from src/capi: SPILLWAY_BLESS=1 cargo test -p spillway-header.\"\"\"

from ctypes import (CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64,
                    c_void_p)

from ._integers import Given, address, i32, i64, u32, u64
";

/// Structs whose integers need no check: rows of tables that the package fills from tensors, and structs that the library
/// writes and a caller passes back as they are.
const UNCHECKED: [&str; 4] = ["spw_tensor", "spw_grad_tensor", "spw_step_stats", "spw_ds_adam_state"];

/// The text of the module.
pub fn module(items: &[Item]) -> String {
    let structs: Vec<&Item> = items.iter().filter(|item| !item.fields().is_empty()).collect();
    let given = given(items, &structs);
    let mut text = HEAD.to_string();
    text.push('\n');
    items.iter().for_each(|item| text.push_str(&constants(item)));
    for item in items.iter().filter(|item| item.is_callback()) {
        let types: Vec<String> = item.parameters().iter().map(|(kind, _)| callback_type(kind)).collect();
        let result = result_of(item);
        text.push_str(&format!("{} = CFUNCTYPE({result}, {})\n", constant(&item.name), types.join(", ")));
    }
    for item in &structs {
        let base = if given.contains(item.name.as_str()) { "Given" } else { "Structure" };
        let class = class(&item.name);
        text.push_str(&format!(
            "\n\nclass {class}({base}):\n    c_name = \"{}\"\n    _fields_ = [\n",
            item.name
        ));
        for (field, kind) in item.fields() {
            text.push_str(&format!("        (\"{field}\", {}),\n", field_type(kind, field, &structs)));
        }
        text.push_str("    ]\n");
    }
    text.push_str("\n\nSTRUCTURES = (\n");
    structs.iter().for_each(|item| text.push_str(&format!("    {},\n", class(&item.name))));
    text.push_str(")\n\n# For each function its result and its arguments.\nPROTOTYPES = {\n");
    // cbindgen names a function of a module twice.
    let mut seen = BTreeSet::new();
    for item in items.iter().filter(|item| item.is_function() && seen.insert(item.name.as_str())) {
        let arguments: Vec<String> =
            item.parameters().iter().map(|(kind, name)| argument_type(kind, name, &structs)).collect();
        text.push_str(&format!(
            "    \"{}\": ({}, [{}]),\n",
            item.name,
            result_of(item),
            arguments.join(", ")
        ));
    }
    text.push_str("}\n");
    text
}

/// Structs with input of the caller: those that a function or another such struct takes as `const`.
fn given<'a>(items: &'a [Item], structs: &[&'a Item]) -> BTreeSet<&'a str> {
    let read = |kind: &str| kind.starts_with("const ");
    let taken: Vec<String> = items
        .iter()
        .filter(|item| item.is_function())
        .flat_map(|item| item.parameters().into_iter().map(|(kind, _)| kind))
        .chain(structs.iter().flat_map(|item| item.fields().into_iter().map(|(_, kind)| kind.to_string())))
        .filter(|kind| read(kind))
        .collect();
    let is_taken = |item: &&&Item| taken.iter().any(|kind| pointee(kind) == Some(item.name.as_str()));
    let names = structs.iter().filter(is_taken).map(|item| item.name.as_str());
    names.filter(|name| !UNCHECKED.contains(name)).collect()
}

/// `NAME = value` for each value of an enum, and for a number that is defined. Names have no `SPW_`.
fn constants(item: &Item) -> String {
    let numbers = item.numbers().into_iter();
    let values: String = numbers.map(|(name, value)| format!("{} = {value}\n", constant(name))).collect();
    if item.is_enum() { format!("# {}\n{}\n", item.name, values) } else { values }
}

/// `spw_adam_options` as the name of a class: `AdamOptions`.
fn class(name: &str) -> String {
    let words = name.trim_start_matches("spw_").split('_');
    words.map(|word| word[..1].to_uppercase() + &word[1..]).collect()
}

/// `SPW_DTYPE_F32` or `spw_log_fn` as the name of a constant.
fn constant(name: &str) -> String {
    let name = name.to_uppercase();
    name.strip_prefix("SPW_").unwrap_or(&name).to_string()
}

fn result_of(item: &Item) -> &'static str {
    match item.result() {
        "void" => "None",
        "uint32_t" => "c_uint32",
        "uint64_t" => "c_uint64",
        "int32_t" | "spw_status" => "c_int32",
        "const char *" => "c_char_p",
        other => panic!("{}: the result {other} has no type in Python", item.name),
    }
}

fn callback_type(kind: &str) -> String {
    match number(kind) {
        Some(number) => number.to_string(),
        None if kind == "const char *" => "c_char_p".to_string(),
        None => "c_void_p".to_string(),
    }
}

/// The type of an argument. Integers and addresses have the argument's name, for the check that they fit.
fn argument_type(kind: &str, name: &str, structs: &[&Item]) -> String {
    let short = match kind {
        "uint32_t" => "u32",
        "int32_t" | "spw_status" => "i32",
        "uint64_t" => "u64",
        "int64_t" => "i64",
        // Tables of tensors, and numbers for which a caller has an address, of an array of numpy or torch.
        "void *" | "const void *" | "float *" | "const float *" => "address",
        "const uint64_t *" | "const uint32_t *" => "address",
        "const spw_tensor *" | "const spw_grad_tensor *" if name == "tensors" => "address",
        _ => return pointer_type(kind, structs),
    };
    format!("{short}(\"{name}\")")
}

fn field_type(kind: &str, field: &str, structs: &[&Item]) -> String {
    match kind {
        "void *" | "const void *" => "c_void_p".to_string(),
        // An address of a word that a GPU may write.
        "const uint32_t *" if field == "word" => "c_void_p".to_string(),
        _ => number(kind).map_or_else(|| pointer_type(kind, structs), str::to_string),
    }
}

fn number(kind: &str) -> Option<&'static str> {
    match kind {
        "uint32_t" => Some("c_uint32"),
        "int32_t" => Some("c_int32"),
        "uint64_t" => Some("c_uint64"),
        "int64_t" => Some("c_int64"),
        "double" => Some("c_double"),
        "float" => Some("c_float"),
        _ => None,
    }
}

fn pointer_type(kind: &str, structs: &[&Item]) -> String {
    let Some(to) = pointee(kind) else {
        return number(kind).map_or_else(|| constant(kind), str::to_string);
    };
    if kind.matches('*').count() == 2 {
        return if to == "char" { "POINTER(c_char_p)" } else { "POINTER(c_void_p)" }.to_string();
    }
    match number(to) {
        Some(number) => format!("POINTER({number})"),
        None if to == "char" => "c_char_p".to_string(),
        None if structs.iter().any(|item| item.name == to) => format!("POINTER({})", class(to)),
        // A handle.
        None => "c_void_p".to_string(),
    }
}

/// The type at the end of a pointer; `None` for other types.
fn pointee(kind: &str) -> Option<&str> {
    let to = kind.trim_start_matches("const ");
    kind.contains('*').then(|| to.split([' ', '*']).next().unwrap_or(to))
}
