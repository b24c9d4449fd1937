//! The macros `SPW_X_INIT`: initialisers of the structs that begin with `struct_size`.

use std::collections::BTreeMap;

use crate::items::Item;

/// A field of a struct as the library has it.
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its offset.
    pub offset: usize,
    /// Its bytes in a struct that the initialiser makes.
    pub initial: Vec<u8>,
}

/// The fields of each struct.
pub type Structs = BTreeMap<&'static str, Vec<Field>>;

const WIDTH: usize = 110;

/// The macro of a struct that begins with `struct_size`. It names every field, so no compiler warns of missing fields.
pub fn macro_of(item: &Item, structs: &Structs) -> Option<String> {
    let fields = item.fields();
    if fields.first().is_none_or(|(field, _)| *field != "struct_size") {
        return None;
    }
    let value = |(field, kind): &(&str, &str)| -> String {
        match *field {
            "struct_size" => format!("sizeof({})", item.name),
            _ => initial(&structs[item.name.as_str()], field, kind),
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

/// The initial value of a field, as C writes it.
pub fn initial(fields: &[Field], name: &str, kind: &str) -> String {
    let field =
        fields.iter().find(|field| field.name == name).expect("the library has the fields of the header");
    let bytes = &field.initial[..];
    let four = || bytes.try_into().expect("four bytes");
    let eight = || bytes.try_into().expect("eight bytes");
    match kind {
        _ if kind.ends_with('*') && bytes.iter().all(|byte| *byte == 0) => "NULL".to_string(),
        "double" => format!("{:?}", f64::from_ne_bytes(eight())),
        "float" => format!("{:?}f", f32::from_ne_bytes(four())),
        "int32_t" => i32::from_ne_bytes(four()).to_string(),
        "uint32_t" => u32::from_ne_bytes(four()).to_string(),
        "uint64_t" => u64::from_ne_bytes(eight()).to_string(),
        kind => panic!("{name} of type {kind} has no initialiser"),
    }
}
