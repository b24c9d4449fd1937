//! The macro `optimizer_calls`, which declares the calls of an optimizer with the text about its step.

/// The macro.
pub struct Calls {
    parameters: Vec<String>,
    body: String,
}

impl Calls {
    const BEGIN: &'static str = "\noptimizer_calls! {\n";
    const ABOUT: &'static str = "$(#[$about])*";

    /// The macro in the text of the file that defines it.
    pub fn of(text: &str) -> Calls {
        let rest = text.split("macro_rules! optimizer_calls {\n").nth(1).expect("table.rs defines it");
        let (pattern, rest) = rest.split_once(" => {\n").expect("it has one form");
        let name = |part: &str| Some(format!("${}", part.split_once(":ident")?.0));
        let body = rest.split("\n    };\n").next().unwrap_or_default();
        let body: Vec<&str> =
            body.lines().map(|line| line.strip_prefix("        ").unwrap_or(line)).collect();
        Calls { parameters: pattern.split('$').filter_map(name).collect(), body: body.join("\n") }
    }

    /// The text with what the macro makes in place of its uses.
    pub fn expand(&self, text: &str) -> String {
        let mut parts = text.split(Calls::BEGIN);
        let mut expanded = parts.next().unwrap_or_default().to_string();
        for part in parts {
            let (inside, after) =
                part.split_once("\n}\n").expect("a use of the macro ends with a line of its own");
            expanded.push_str(&format!("\n{}\n{after}", self.one(inside)));
        }
        expanded
    }

    /// What one use makes: comments about the step, then the names.
    fn one(&self, inside: &str) -> String {
        let (about, names): (Vec<&str>, Vec<&str>) =
            inside.lines().map(str::trim).partition(|line| line.starts_with("///"));
        let body = self.body.replace(Calls::ABOUT, &about.join("\n"));
        let names = names.join("");
        let names = names.split([':', ',']).map(str::trim);
        let put = |body: String, (parameter, name): (&String, &str)| body.replace(parameter.as_str(), name);
        self.parameters.iter().zip(names).fold(body, put)
    }
}
