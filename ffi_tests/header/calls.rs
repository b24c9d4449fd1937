//! The macro `optimizer_calls`, which declares the calls of an optimizer.

/// The macro.
pub struct Calls {
    parameters: Vec<String>,
    body: String,
}

impl Calls {
    const BEGIN: &'static str = "\noptimizer_calls! {\n";

    /// The macro in the text of the file that defines it.
    pub fn of(text: &str) -> Calls {
        let rest = text.split("macro_rules! optimizer_calls {\n").nth(1).expect("table.rs defines it");
        let (pattern, rest) = rest.split_once(" => {\n").expect("it has one form");
        let name = |part: &str| format!("${}", part.split(':').next().unwrap_or_default());
        let body = rest.split("\n    };\n").next().unwrap_or_default();
        let body: Vec<&str> =
            body.lines().map(|line| line.strip_prefix("        ").unwrap_or(line)).collect();
        Calls { parameters: pattern.split('$').skip(1).map(name).collect(), body: body.join("\n") }
    }

    /// The text with what the macro makes in its place.
    pub fn expand(&self, text: &str) -> String {
        let Some((before, rest)) = text.split_once(Calls::BEGIN) else { return text.to_string() };
        let (arguments, after) =
            rest.split_once("\n}\n").expect("a use of the macro ends with a line of its own");
        let arguments = arguments.split([':', ',']).map(str::trim);
        let body =
            self.parameters.iter().zip(arguments).fold(self.body.clone(), |body, (parameter, argument)| {
                body.replace(parameter.as_str(), argument)
            });
        format!("{before}\n{body}\n{after}")
    }
}
