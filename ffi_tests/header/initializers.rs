//! The macros `SPW_X_INIT`: initialisers of the structs that begin with `struct_size`.

use crate::items::Item;

/// A default other than 0: struct, field and value.
pub type Default = (&'static str, &'static str, String);

const WIDTH: usize = 110;

/// The macro of a struct that begins with `struct_size`. It names every field, so no compiler warns of missing fields.
pub fn macro_of(item: &Item, defaults: &[Default]) -> Option<String> {
    let fields = item.fields();
    if fields.first().is_none_or(|(field, _)| *field != "struct_size") {
        return None;
    }
    let value = |(field, kind): &(&str, &str)| -> String {
        let given = defaults.iter().find(|(owner, name, _)| *owner == item.name && name == field);
        match (given, *field, *kind) {
            (Some((_, _, value)), _, "float") => format!("{value}f"),
            (Some((_, _, value)), ..) => value.clone(),
            (None, "struct_size", _) => format!("sizeof({})", item.name),
            (None, _, kind) if kind.ends_with('*') => "NULL".to_string(),
            (None, _, "double") => "0.0".to_string(),
            (None, _, "float") => "0.0f".to_string(),
            (None, _, "uint32_t" | "int32_t" | "uint64_t") => "0".to_string(),
            (None, field, kind) => panic!("{}.{field} of type {kind} has no initialiser", item.name),
        }
    };
    let name = item.name.to_uppercase();
    let mut lines = vec![format!("#define {name}_INIT \\")];
    let mut line = "    { ".to_string();
    for (index, field) in fields.iter().enumerate() {
        let more = if index + 1 < fields.len() { ", " } else { " }" };
        let value = value(field) + more;
        if line.len() + value.len() > WIDTH {
            lines.push(format!("{}\\", line));
            line = "      ".to_string();
        }
        line.push_str(&value);
    }
    lines.push(line);
    Some(lines.join("\n"))
}
