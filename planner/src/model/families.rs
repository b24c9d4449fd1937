//! The parameters of each family of transformers, from the fields of its config.json.
//!
//! A family's function follows the modules of the implementation in `transformers`; a field that a config.json leaves
//! out has that implementation's default. All sums are in 128 bits: the fields are limited, so that no sum overflows.
#![forbid(unsafe_code)]

use super::fields::Fields;
use crate::error::{Error, Result};

/// The parameters of a decoder, by part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecoderParams {
    /// Embeddings of tokens and positions, with their projections and norms.
    pub embeddings: u128,
    /// One layer, with all experts.
    pub layer: u128,
    /// Parameters of a layer's experts that a token does not use.
    pub idle: u128,
    /// The last norm, and the output head unless it is tied to the embeddings.
    pub last: u128,
    /// Number of layers.
    pub layers: u64,
    /// Width of the hidden states.
    pub hidden: u64,
    /// Number of tokens in the vocabulary.
    pub vocabulary: u64,
}

type Family = fn(&Fields) -> Result<DecoderParams>;

/// The `model_type` values that are known, and how their parameters are counted.
pub const FAMILIES: [(&str, Family); 12] = [
    ("llama", |fields| gated(fields, &LLAMA)),
    ("mistral", |fields| gated(fields, &MISTRAL)),
    ("mixtral", |fields| gated(fields, &MIXTRAL)),
    ("qwen2", |fields| gated(fields, &QWEN2)),
    ("qwen3", |fields| gated(fields, &QWEN3)),
    ("gemma", |fields| gated(fields, &GEMMA)),
    ("gemma2", |fields| gated(fields, &GEMMA2)),
    ("gpt2", gpt2),
    ("gpt_neox", gpt_neox),
    ("opt", opt),
    ("bloom", bloom),
    ("falcon", falcon),
];

/// Parameters of a matrix of `rows` times `columns`, and of its bias.
fn linear(rows: u64, columns: u64, bias: bool) -> u128 {
    u128::from(rows) * u128::from(columns) + if bias { u128::from(columns) } else { 0 }
}

/// Parameters of a layer norm: a weight and a bias per channel.
fn layer_norm(width: u64) -> u128 {
    2 * u128::from(width)
}

/// Bias of the attention's matrices.
#[derive(PartialEq)]
enum Bias {
    /// Query, key, value and output have one if the field `attention_bias` says so.
    Field,
    /// Query, key and value have one.
    Inputs,
    None,
}

/// What distinguishes the families with a gated MLP and norms without bias.
struct Gated {
    bias: Bias,
    mlp_bias: bool,
    /// Default of `num_key_value_heads`; `None`: the number of heads.
    kv_heads: Option<u64>,
    /// Default of `head_dim`; `None`: `hidden_size` divided by the number of heads.
    head_dim: Option<u64>,
    /// Norms of queries and keys, one weight per channel of a head.
    head_norms: u64,
    norms: u64,
    tied: bool,
    experts: bool,
}

const LLAMA: Gated = Gated {
    bias: Bias::Field,
    mlp_bias: true,
    kv_heads: None,
    head_dim: None,
    head_norms: 0,
    norms: 2,
    tied: false,
    experts: false,
};
const MISTRAL: Gated = Gated { bias: Bias::None, mlp_bias: false, kv_heads: Some(8), ..LLAMA };
const MIXTRAL: Gated = Gated { experts: true, ..MISTRAL };
const QWEN2: Gated = Gated { bias: Bias::Inputs, mlp_bias: false, kv_heads: Some(32), ..LLAMA };
const QWEN3: Gated = Gated { bias: Bias::Field, head_dim: Some(128), head_norms: 2, ..QWEN2 };
const GEMMA: Gated = Gated { mlp_bias: false, kv_heads: Some(16), head_dim: Some(256), tied: true, ..LLAMA };
const GEMMA2: Gated = Gated { kv_heads: Some(4), norms: 4, ..GEMMA };

fn gated(fields: &Fields, family: &Gated) -> Result<DecoderParams> {
    let (layers, hidden, vocabulary) = (
        fields.layers(&["num_hidden_layers"])?,
        fields.need(&["hidden_size"])?,
        fields.need(&["vocab_size"])?,
    );
    let (heads, inner) = (fields.need(&["num_attention_heads"])?, fields.need(&["intermediate_size"])?);
    fields.check()?;
    let kv_heads = fields.or_null("num_key_value_heads", family.kv_heads.unwrap_or(heads), heads)?;
    let width = match (fields.number("head_dim")?, family.head_dim) {
        (Some(given), _) => given,
        (None, Some(default)) => default,
        (None, None) => head_width(hidden, heads)?,
    };
    let (queries, keys) = (product(heads, width)?, product(kv_heads, width)?);
    let bias = match family.bias {
        Bias::Field => fields.flag("attention_bias", false)?,
        Bias::Inputs => true,
        Bias::None => false,
    };
    let attention = linear(hidden, queries, bias)
        + 2 * linear(hidden, keys, bias)
        + linear(queries, hidden, bias && family.bias != Bias::Inputs)
        + u128::from(family.head_norms) * u128::from(width);
    let mlp_bias = family.mlp_bias && fields.flag("mlp_bias", false)?;
    let mlp = 2 * linear(hidden, inner, mlp_bias) + linear(inner, hidden, mlp_bias);
    let (mlp, idle) = match family.experts {
        false => (mlp, 0),
        true => {
            let experts = fields.or_null("num_local_experts", 8, 8)?;
            let used = fields.or_null("num_experts_per_tok", 2, 2)?;
            if used > experts {
                let reason = format!("is {used}, but num_local_experts is {experts}");
                return Err(Error::invalid("num_experts_per_tok", reason));
            }
            (u128::from(experts) * mlp + linear(hidden, experts, false), u128::from(experts - used) * mlp)
        }
    };
    let tied = fields.flag("tie_word_embeddings", family.tied)?;
    Ok(DecoderParams {
        embeddings: linear(vocabulary, hidden, false),
        layer: attention + mlp + u128::from(family.norms) * u128::from(hidden),
        idle,
        last: u128::from(hidden) + head(vocabulary, hidden, tied),
        layers,
        hidden,
        vocabulary,
    })
}

fn gpt2(fields: &Fields) -> Result<DecoderParams> {
    let (layers, hidden) =
        (fields.layers(&["n_layer", "num_hidden_layers"])?, fields.need(&["n_embd", "hidden_size"])?);
    let (vocabulary, positions) =
        (fields.need(&["vocab_size"])?, fields.need(&["n_positions", "max_position_embeddings"])?);
    fields.check()?;
    if fields.flag("add_cross_attention", false)? {
        return Err(Error::invalid("add_cross_attention", "is true, but only decoders are counted"));
    }
    let inner = fields.or_null("n_inner", 4 * hidden, 4 * hidden)?;
    let tied = fields.flag("tie_word_embeddings", true)?;
    Ok(DecoderParams {
        embeddings: linear(vocabulary, hidden, false) + linear(positions, hidden, false),
        layer: 2 * layer_norm(hidden)
            + linear(hidden, 3 * hidden, true)
            + linear(hidden, hidden, true)
            + mlp(hidden, inner, true),
        idle: 0,
        last: layer_norm(hidden) + head(vocabulary, hidden, tied),
        layers,
        hidden,
        vocabulary,
    })
}

fn gpt_neox(fields: &Fields) -> Result<DecoderParams> {
    let (layers, hidden, vocabulary) = (
        fields.layers(&["num_hidden_layers"])?,
        fields.need(&["hidden_size"])?,
        fields.need(&["vocab_size"])?,
    );
    let inner = fields.need(&["intermediate_size"])?;
    fields.check()?;
    let bias = fields.flag("attention_bias", true)?;
    let tied = fields.flag("tie_word_embeddings", false)?;
    Ok(DecoderParams {
        embeddings: linear(vocabulary, hidden, false),
        layer: 2 * layer_norm(hidden)
            + linear(hidden, 3 * hidden, bias)
            + linear(hidden, hidden, bias)
            + mlp(hidden, inner, true),
        idle: 0,
        last: layer_norm(hidden) + head(vocabulary, hidden, tied),
        layers,
        hidden,
        vocabulary,
    })
}

fn opt(fields: &Fields) -> Result<DecoderParams> {
    /// Positions that OPT's embedding has beyond `max_position_embeddings`.
    const OFFSET: u64 = 2;
    let (layers, hidden, vocabulary) = (
        fields.layers(&["num_hidden_layers"])?,
        fields.need(&["hidden_size"])?,
        fields.need(&["vocab_size"])?,
    );
    let (inner, positions) = (fields.need(&["ffn_dim"])?, fields.need(&["max_position_embeddings"])?);
    fields.check()?;
    let width = fields.or_null("word_embed_proj_dim", hidden, hidden)?;
    let bias = fields.flag("enable_bias", true)?;
    let norm = if fields.flag("layer_norm_elementwise_affine", true)? { layer_norm(hidden) } else { 0 };
    let last =
        fields.flag("do_layer_norm_before", true)? && !fields.flag("_remove_final_layer_norm", false)?;
    let projection = if width == hidden { 0 } else { linear(width, hidden, false) };
    let tied = fields.flag("tie_word_embeddings", true)?;
    Ok(DecoderParams {
        embeddings: linear(vocabulary, width, false)
            + linear(positions + OFFSET, hidden, false)
            + 2 * projection,
        layer: 4 * linear(hidden, hidden, bias) + mlp(hidden, inner, bias) + 2 * norm,
        idle: 0,
        last: if last { norm } else { 0 } + head(vocabulary, width, tied),
        layers,
        hidden,
        vocabulary,
    })
}

fn bloom(fields: &Fields) -> Result<DecoderParams> {
    let (layers, hidden, vocabulary) = (
        fields.layers(&["n_layer", "num_hidden_layers"])?,
        // transformers takes `n_embed` if both are given.
        fields.need(&["n_embed", "hidden_size"])?,
        fields.need(&["vocab_size"])?,
    );
    fields.check()?;
    let tied = fields.flag("tie_word_embeddings", true)?;
    Ok(DecoderParams {
        embeddings: linear(vocabulary, hidden, false) + layer_norm(hidden),
        layer: 2 * layer_norm(hidden)
            + linear(hidden, 3 * hidden, true)
            + linear(hidden, hidden, true)
            + mlp(hidden, 4 * hidden, true),
        idle: 0,
        last: layer_norm(hidden) + head(vocabulary, hidden, tied),
        layers,
        hidden,
        vocabulary,
    })
}

fn falcon(fields: &Fields) -> Result<DecoderParams> {
    let (layers, hidden, vocabulary) = (
        fields.layers(&["num_hidden_layers", "n_layer"])?,
        fields.need(&["hidden_size"])?,
        fields.need(&["vocab_size"])?,
    );
    let heads = fields.need(&["num_attention_heads", "n_head"])?;
    fields.check()?;
    let width = head_width(hidden, heads)?;
    let newer = fields.flag("new_decoder_architecture", false)?;
    let kv_heads = fields.or_null("num_kv_heads", heads, heads)?;
    let columns = match (newer, fields.flag("multi_query", true)?) {
        (true, _) => product(2 * kv_heads + heads, width)?,
        (false, true) => hidden + 2 * width,
        (false, false) => 3 * hidden,
    };
    let bias = fields.flag("bias", false)?;
    let inner = fields.or_null("ffn_hidden_size", 4 * hidden, 4 * hidden)?;
    let norms = match (fields.flag("parallel_attn", true)?, fields.number("num_ln_in_parallel_attn")?) {
        (false, _) | (true, Some(2)) => 2,
        (true, None) if newer => 2,
        (true, _) => 1,
    };
    let tied = fields.flag("tie_word_embeddings", true)?;
    Ok(DecoderParams {
        embeddings: linear(vocabulary, hidden, false),
        layer: norms * layer_norm(hidden)
            + linear(hidden, columns, bias)
            + linear(hidden, hidden, bias)
            + mlp(hidden, inner, bias),
        idle: 0,
        last: layer_norm(hidden) + head(vocabulary, hidden, tied),
        layers,
        hidden,
        vocabulary,
    })
}

/// An MLP without a gate.
fn mlp(hidden: u64, inner: u64, bias: bool) -> u128 {
    linear(hidden, inner, bias) + linear(inner, hidden, bias)
}

fn head(vocabulary: u64, width: u64, tied: bool) -> u128 {
    if tied { 0 } else { linear(vocabulary, width, false) }
}

fn head_width(hidden: u64, heads: u64) -> Result<u64> {
    match hidden.is_multiple_of(heads) {
        true => Ok(hidden / heads),
        false => Err(Error::invalid(
            "num_attention_heads",
            format!("is {heads}, which does not divide the hidden size of {hidden}"),
        )),
    }
}

/// The width of all heads together.
fn product(heads: u64, width: u64) -> Result<u64> {
    heads.checked_mul(width).filter(|product| *product < 1 << 33).ok_or_else(|| {
        Error::invalid("head_dim", format!("is {width}; times {heads} heads that is 2^33 or more"))
    })
}
