//! The C interface as JSON, for generators of bindings that do not read C.
//!
//! The file stands beside the headers and has what they declare: numbers, enums, structs with offsets and initial values,
//! functions. `"abi"` is `SPW_ABI_VERSION`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::Module;
use crate::initializers::{self, Structs};
use crate::items::Item;

/// The text of the file.
pub(super) fn text(modules: &[Module], items: &[Item], version: &str, structs: &Structs) -> String {
    let mut kinds: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for item in items {
        let module =
            modules.iter().find(|module| module.declared.contains(&item.name)).expect("it has an owner");
        let (kind, mut value) = declaration(item, structs);
        value["header"] = format!("spillway/{}.h", module.name).into();
        if module.is_experimental() {
            value["experimental"] = true.into();
        }
        kinds.entry(kind).or_default().insert(item.name.clone(), value);
    }
    let abi = kinds["constants"]["SPW_ABI_VERSION"]["value"].clone();
    let kinds: Vec<String> = kinds
        .into_iter()
        .map(|(kind, found)| {
            // A line for each declaration.
            let lines: Vec<String> =
                found.iter().map(|(name, value)| format!("    \"{name}\": {value}")).collect();
            format!("  \"{kind}\": {{\n{}\n  }}", lines.join(",\n"))
        })
        .collect();
    format!("{{\n  \"version\": \"{version}\",\n  \"abi\": {abi},\n{}\n}}\n", kinds.join(",\n"))
}

/// The kind of a declaration, and what it declares.
fn declaration(item: &Item, structs: &Structs) -> (&'static str, Value) {
    let parameters = || -> Vec<Value> {
        item.parameters().iter().map(|(kind, name)| json!({"name": name, "type": kind})).collect()
    };
    let numbers = || -> Map<String, Value> {
        item.numbers().into_iter().map(|(name, value)| (name.to_string(), value.into())).collect()
    };
    if item.is_enum() {
        ("enums", json!({"values": numbers()}))
    } else if item.is_callback() {
        ("callbacks", json!({"result": item.result(), "parameters": parameters()}))
    } else if item.is_function() {
        ("functions", json!({"result": item.result(), "parameters": parameters()}))
    } else if item.is_handle() {
        ("handles", json!({}))
    } else if item.fields().is_empty() {
        ("constants", json!({"value": numbers().into_values().next()}))
    } else {
        ("structs", structure(item, structs))
    }
}

fn structure(item: &Item, structs: &Structs) -> Value {
    let known = &structs[item.name.as_str()];
    let fields = item.fields().into_iter().zip(known).map(|((name, kind), field)| {
        assert_eq!(name, field.name, "{}: the header and the library differ", item.name);
        let initial = match name {
            "struct_size" => json!(known.iter().map(|field| field.initial.len()).sum::<usize>()),
            _ => number(&initializers::initial(known, name, kind)),
        };
        json!({"name": name, "type": kind, "offset": field.offset, "size": field.initial.len(), "initial": initial})
    });
    let fields: Vec<Value> = fields.collect();
    json!({"size": known.iter().map(|field| field.initial.len()).sum::<usize>(), "fields": fields})
}

/// An initial value of C as a number; null for NULL.
fn number(text: &str) -> Value {
    serde_json::from_str(text.trim_end_matches('f')).unwrap_or(Value::Null)
}
