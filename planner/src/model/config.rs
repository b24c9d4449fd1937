//! A model's description: its size and its shape, from the text of a config.json of `transformers` or of a description.
//!
//! A description is a JSON object with `parameters`, `num_hidden_layers`, `hidden_size` and `vocab_size`, and
//! optionally `active_parameters`. It describes a model whose `model_type` is not known; other fields are ignored.
#![forbid(unsafe_code)]

use std::ops::RangeInclusive;

use serde::Serialize;
use serde_json::Value;

use super::families::{DecoderParams, FAMILIES};
use super::fields::Fields;
use crate::error::{Error, Result};

/// Parameters of a model of which only their number is given.
const SIZES: RangeInclusive<f64> = 1e6..=1e14;
/// The heads of such a model have this width, and its vocabulary these words.
const WIDTH_OF_A_LAYER: u64 = 128;
const WORDS: u64 = 32_000;
/// Most parameters of a model. Bytes of all ranks and micro-batches then stay within 64 bits.
const MOST_PARAMETERS: u64 = 1 << 50;

/// A model, as the planner sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Model {
    /// The preset's name or the file's.
    pub name: String,
    /// `model_type`, "description", or the source of a preset.
    pub family: String,
    /// All parameters; tied ones count once.
    pub parameters: u64,
    /// Parameters that one token uses; fewer than `parameters` in a mixture of experts.
    pub active_parameters: u64,
    /// Number of layers.
    pub layers: u64,
    /// Width of the hidden states.
    pub hidden: u64,
    /// Number of tokens in the vocabulary; 0: unknown, then logits are not counted.
    pub vocabulary: u64,
    /// Parameters of the largest module that ZeRO-3 gathers: a layer, or the embeddings.
    pub largest_module: u64,
}

impl Model {
    /// Reads the text of a config.json or of a description. `name` is used in the report only. Fails for text that is
    /// not a JSON object, for missing or wrong fields, and for more than 2^50 parameters.
    pub fn parse(name: &str, text: &[u8]) -> Result<Model> {
        let value: Value = serde_json::from_slice(text)
            .map_err(|error| Error::invalid("config", format!("{name} is not JSON: {error}")))?;
        let Value::Object(map) = value else {
            return Err(Error::invalid("config", format!("{name} is not a JSON object")));
        };
        let fields = Fields::new(&map);
        let kind = fields.text("model_type")?;
        match kind.and_then(|kind| FAMILIES.iter().find(|(family, _)| *family == kind)) {
            Some((family, count)) => Model::of(name, family, &count(&fields)?),
            None => described(name, kind, &fields),
        }
    }

    /// A decoder with this number of parameters: layers of 12 squares of the width, which is 128 for each layer, as in
    /// models of 7 to 70 billion.
    pub fn decoder(parameters: u64) -> Model {
        let square = (12 * WIDTH_OF_A_LAYER * WIDTH_OF_A_LAYER) as f64;
        let layers = ((parameters as f64 / square).cbrt().round() as u64).max(1);
        let hidden = WIDTH_OF_A_LAYER * layers;
        let vocabulary = (parameters / (4 * hidden)).clamp(2, WORDS);
        Model {
            name: "decoder".to_string(),
            family: "shape assumed".to_string(),
            parameters,
            active_parameters: parameters,
            layers,
            hidden,
            vocabulary,
            largest_module: parameters.div_ceil(layers).max(vocabulary * hidden).min(parameters),
        }
    }

    fn of(name: &str, family: &str, parts: &DecoderParams) -> Result<Model> {
        let layers = u128::from(parts.layers);
        let all = parts.embeddings + layers * parts.layer + parts.last;
        Ok(Model {
            name: name.to_string(),
            family: family.to_string(),
            parameters: limited(all)?,
            active_parameters: limited(all - layers * parts.idle)?,
            layers: parts.layers,
            hidden: parts.hidden,
            vocabulary: parts.vocabulary,
            largest_module: limited(parts.layer.max(parts.embeddings))?,
        })
    }
}

/// The number of parameters that a text such as `7B`, `350M`, `7e9` or `7000000000` names.
pub fn parameters(text: &str) -> std::result::Result<u64, String> {
    let (number, factor) =
        match text.char_indices().last().map(|(at, letter)| (at, letter.to_ascii_uppercase())) {
            Some((at, 'K')) => (&text[..at], 1e3),
            Some((at, 'M')) => (&text[..at], 1e6),
            Some((at, 'B' | 'G')) => (&text[..at], 1e9),
            Some((at, 'T')) => (&text[..at], 1e12),
            _ => (text, 1.0),
        };
    let letters = if factor == 1.0 { "0123456789.eE+" } else { "0123456789." };
    let found =
        Some(number.trim_end()).filter(|number| number.chars().all(|letter| letters.contains(letter)));
    let found = found.and_then(|number| number.parse::<f64>().ok()).map(|number| (number * factor).round());
    found.filter(|count| SIZES.contains(count)).map(|count| count as u64).ok_or_else(|| {
        format!("is {text:?}; pass a number of parameters from 1M to 100T, such as 7B, 350M or 7e9")
    })
}

/// A model of an unknown family, which must say how many parameters it has.
fn described(name: &str, kind: Option<&str>, fields: &Fields) -> Result<Model> {
    let parameters = fields.need_up_to(&["parameters"], MOST_PARAMETERS)?;
    let (layers, hidden) = (fields.layers(&["num_hidden_layers"])?, fields.need(&["hidden_size"])?);
    let vocabulary = fields.need(&["vocab_size"])?;
    let missing = fields.missing();
    if !missing.is_empty() {
        let known: Vec<&str> = FAMILIES.iter().map(|(family, _)| *family).collect();
        let kind = kind.map_or("there is no model_type".to_string(), |kind| {
            let shown: String = kind.chars().take(40).collect();
            format!("model_type {shown:?} is not one of {}", known.join(", "))
        });
        let reason =
            format!("{kind}, so the file must describe the size itself, but it lacks {}", missing.join(", "));
        return Err(Error::invalid("config", reason));
    }
    let active = fields.up_to("active_parameters", parameters)?.unwrap_or(parameters);
    let embeddings = u128::from(vocabulary) * u128::from(hidden);
    let layer = u128::from(parameters.div_ceil(layers));
    Ok(Model {
        name: name.to_string(),
        family: "description".to_string(),
        parameters,
        active_parameters: active,
        layers,
        hidden,
        vocabulary,
        largest_module: limited(layer.max(embeddings).min(u128::from(parameters)))?,
    })
}

fn limited(count: u128) -> Result<u64> {
    u64::try_from(count).ok().filter(|count| *count <= MOST_PARAMETERS).ok_or_else(|| {
        Error::invalid("config", format!("describes {count} parameters, but the limit is {MOST_PARAMETERS}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA_2_7B: &str = r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "tie_word_embeddings": false}"#;

    fn parse(text: &str) -> Result<Model> {
        Model::parse("test", text.as_bytes())
    }

    fn refusal(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    /// "Non-Embedding Params" of the model cards of Pythia: all parameters but the two matrices of the vocabulary.
    #[test]
    fn published_counts_are_met_exactly() {
        for (layers, hidden, published) in [
            (6, 512, 18_915_328),
            (12, 768, 85_056_000),
            (24, 1024, 302_311_424),
            (16, 2048, 805_736_448),
            (24, 2048, 1_208_602_624),
            (32, 2560, 2_517_652_480),
        ] {
            let text = format!(
                r#"{{"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": {hidden},
                    "num_hidden_layers": {layers}, "intermediate_size": {}}}"#,
                4 * hidden
            );
            assert_eq!(parse(&text).unwrap().parameters - 2 * 50304 * hidden, published);
        }
    }

    /// The sums of `AutoModelForCausalLM.from_config` of transformers 5.
    #[test]
    fn falcon_and_bloom_count_as_in_transformers() {
        let falcon = r#"{"model_type": "falcon", "hidden_size": 256, "num_hidden_layers": 3,
            "num_attention_heads": 8, "vocab_size": 1003"#;
        for (fields, expected) in [
            ("", 2_274_048),
            (r#", "num_ln_in_parallel_attn": 2"#, 2_275_584),
            (r#", "num_ln_in_parallel_attn": 1"#, 2_274_048),
            (r#", "new_decoder_architecture": true"#, 2_619_648),
            (r#", "new_decoder_architecture": true, "num_ln_in_parallel_attn": 1"#, 2_618_112),
            (r#", "parallel_attn": false"#, 2_275_584),
        ] {
            assert_eq!(parse(&format!("{falcon}{fields}}}")).unwrap().parameters, expected, "{fields}");
        }
        let bloom = r#"{"model_type": "bloom", "n_embed": 64, "hidden_size": 256, "n_layer": 3, "n_head": 8,
            "vocab_size": 1003}"#;
        assert_eq!(parse(bloom).unwrap().parameters, 214_400);
    }

    #[test]
    fn a_mixture_counts_all_experts_and_those_of_a_token() {
        let text = r#"{"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}"#;
        let all = parse(text).unwrap();
        let expert = 3 * 4096 * 14336;
        assert_eq!(all.parameters - all.active_parameters, 32 * 6 * expert);
        let one = parse(&text.replace("\"num_local_experts\": 8", "\"num_local_experts\": 2")).unwrap();
        assert_eq!(one.parameters, one.active_parameters);
        // The router has a column per expert.
        assert_eq!(one.parameters + 32 * 6 * 4096, all.active_parameters);
        let wrong = text.replace("\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9");
        assert!(refusal(&wrong).contains("num_experts_per_tok: is 9"));
    }

    #[test]
    fn an_unknown_architecture_must_describe_itself() {
        let unknown = r#"{"model_type": "mamba", "hidden_size": 64}"#;
        let reason = refusal(unknown);
        for word in ["mamba", "llama", "lacks parameters, num_hidden_layers, vocab_size"] {
            assert!(reason.contains(word), "{reason}");
        }
        assert!(refusal("{}").contains("there is no model_type"));
        let described = parse(
            r#"{"model_type": "mamba", "parameters": 1000, "num_hidden_layers": 4, "hidden_size": 8,
                "vocab_size": 10, "active_parameters": 500}"#,
        );
        let described = described.unwrap();
        assert_eq!((described.parameters, described.active_parameters), (1000, 500));
        assert_eq!(described.largest_module, 250);
    }

    #[test]
    fn missing_and_wrong_fields_are_named() {
        assert!(
            refusal(r#"{"model_type": "llama", "hidden_size": 8}"#)
                .contains("lacks num_hidden_layers, vocab_size, num_attention_heads, intermediate_size")
        );
        for (field, value, words) in [
            ("hidden_size", "-4096", "hidden_size: is -4096"),
            ("hidden_size", "4096.5", "hidden_size: is 4096.5"),
            ("hidden_size", "99999999999999999999999", "hidden_size: is 1e+23"),
            ("hidden_size", "0", "hidden_size: is 0"),
            ("num_hidden_layers", "4294967296", "num_hidden_layers: is 4294967296"),
            ("tie_word_embeddings", "\"no\"", "tie_word_embeddings: is \"no\""),
            ("num_attention_heads", "33", "does not divide"),
            ("model_type", "[[]]", "model_type: is [[]]"),
        ] {
            let mut map: Value = serde_json::from_str(LLAMA_2_7B).unwrap();
            map[field] = serde_json::from_str(value).unwrap();
            let reason = refusal(&map.to_string());
            assert!(reason.contains(words), "{field} {value}: {reason}");
        }
    }

    #[test]
    fn hostile_texts_are_errors() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let huge = r#"{"model_type": "llama", "vocab_size": 4294967296, "hidden_size": 4294967296,
            "intermediate_size": 4294967296, "num_hidden_layers": 1048576, "num_attention_heads": 1,
            "num_key_value_heads": 1, "attention_bias": true, "mlp_bias": true}"#;
        for (text, words) in [
            (deep.as_str(), "recursion limit"),
            ("", "is not JSON"),
            ("[]", "is not a JSON object"),
            ("{\"model_type\": \"llama\"", "is not JSON"),
            (huge, "but the limit is"),
        ] {
            let reason = refusal(text);
            assert!(reason.contains(words) && reason.len() < 400, "{reason}");
        }
        // Every prefix is read or refused, never a panic.
        for end in 0..LLAMA_2_7B.len() {
            let _ = parse(&LLAMA_2_7B[..end]);
        }
    }

    #[test]
    fn a_number_of_parameters_has_a_unit_or_all_its_digits() {
        for (text, expected) in [
            ("7B", 7_000_000_000),
            ("350m", 350_000_000),
            ("1.5 B", 1_500_000_000),
            ("7e9", 7_000_000_000),
            ("2000000", 2_000_000),
            ("1T", 1_000_000_000_000),
        ] {
            assert_eq!(parameters(text), Ok(expected), "{text}");
            assert_eq!(Model::decoder(expected).parameters, expected);
        }
        for text in ["", "7", "-7B", "0", "1e9B", "nan", "inf", "7BB", "7 billions", "200T", "B", "7\u{e9}"] {
            assert!(parameters(text).unwrap_err().contains("such as 7B"), "{text}");
        }
    }

    #[test]
    fn a_decoder_has_the_shape_of_its_size() {
        let found = Model::decoder(7_000_000_000);
        assert_eq!((found.layers, found.hidden, found.vocabulary), (33, 4224, 32_000));
        assert!(found.largest_module < found.parameters / 30);
    }

    #[test]
    fn a_whole_number_may_be_a_float() {
        let text = |number: &str| {
            format!(
                r#"{{"parameters": {number}, "num_hidden_layers": 32.0, "hidden_size": 4096, "vocab_size": 1e4}}"#
            )
        };
        assert_eq!(parse(&text("7e9")).unwrap().parameters, 7_000_000_000);
        for wrong in ["7.5", "-1e3", "1e300", "0.0"] {
            assert!(refusal(&text(wrong)).contains("must be a whole number"), "{wrong}");
        }
    }
}
