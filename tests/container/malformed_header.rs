//! Malformed headers, as tables: text, members, values of `arch`.

use super::malformed::{case, changed, check};
use super::raw::sample;
use cmf_gpu::Kind::*;
use serde_json::{Value, json};

fn header(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    sample().with_header(change).build()
}

fn text(header: impl Into<Vec<u8>>) -> Vec<u8> {
    changed(|raw| raw.header = header.into())
}

#[test]
fn header_text() {
    let json = String::from_utf8(sample().header).unwrap();
    let with = |from: &str, to: &str| {
        assert!(json.contains(from), "{from}");
        text(json.replacen(from, to, 1))
    };
    let deep = |open: &str| with("\"by hand\"", &open.repeat(10_000));
    check(vec![
        case(
            "not UTF-8",
            text(&b"{\"a\": \"\xFF\"}"[..]),
            Parse,
            "not UTF-8 from byte 7",
        ),
        case(
            "byte order mark",
            text(format!("\u{feff}{json}")),
            Parse,
            "byte order mark",
        ),
        case(
            "blanks",
            text(vec![b' '; (64 << 20) + 1]),
            Parse,
            "expected at most 67108864",
        ),
        case("no object", text("[1]"), Parse, "expected an object, found an array"),
        case(
            "garbage behind",
            text(json.clone() + "}"),
            Parse,
            "trailing characters at line 1",
        ),
        case("cut", text(&json[..40]), Parse, "EOF"),
        case("deep arrays", deep("["), Parse, "recursion limit"),
        case("deep objects", deep("{\"a\":"), Parse, "recursion limit"),
        case(
            "key twice",
            with("\"num_layers\":2", "\"num_layers\":2,\"num_layers\":200"),
            Parse,
            "'num_layers' appears twice",
        ),
        case(
            "number 1e999",
            with("\"head_dim\":16", "\"head_dim\":1e999"),
            Parse,
            "out of range",
        ),
        case(
            "negative",
            with("\"head_dim\":16", "\"head_dim\":-1"),
            Parse,
            "arch.head_dim: invalid value: integer `-1`",
        ),
        case(
            "fraction",
            with("\"head_dim\":16", "\"head_dim\":2.5"),
            Parse,
            "arch.head_dim: invalid type",
        ),
        case(
            "text",
            with("\"head_dim\":16", "\"head_dim\":\"2\""),
            Parse,
            "arch.head_dim: invalid type: string \"2\"",
        ),
        case(
            "20 digits",
            with("\"head_dim\":16", "\"head_dim\":99999999999999999999"),
            Parse,
            "arch.head_dim",
        ),
    ]);
}

#[test]
fn header_members() {
    check(vec![
        case(
            "other format",
            header(|h| h["format"] = json!("vmfc")),
            Parse,
            "header.format is \"vmfc\"",
        ),
        case(
            "other version",
            header(|h| h["version"] = json!(3)),
            UnsupportedVersion,
            "header.version is 3",
        ),
        case(
            "no arch",
            header(|h| h["arch"] = json!(null)),
            Parse,
            "header.arch is missing",
        ),
        case(
            "arch no object",
            header(|h| h["arch"] = json!([])),
            Parse,
            "header.arch: expected an object",
        ),
        case(
            "eos negative",
            header(|h| h["tokenizer_config"]["eos_token_ids"] = json!([-1])),
            Parse,
            "tokenizer_config",
        ),
        case(
            "eos too large",
            header(|h| h["tokenizer_config"]["eos_token_ids"] = json!([5, 32])),
            Parse,
            "has 32, expected ids below",
        ),
        case(
            "skills no array",
            header(|h| h["skills"] = json!({})),
            Parse,
            "header.skills",
        ),
        case(
            "shard no object",
            header(|h| h["shard"] = json!(3)),
            Parse,
            "header.shard",
        ),
        case(
            "section hash no text",
            header(|h| h["section_hashes"] = json!({"vocab": 1})),
            Parse,
            "section_hashes.vocab is 1",
        ),
        case(
            "section hash not hex",
            header(|h| h["section_hashes"] = json!({"masks": "+1"})),
            Parse,
            "section_hashes.masks",
        ),
        case(
            "section hash too long",
            header(|h| h["section_hashes"] = json!({"index": "0".repeat(17)})),
            Parse,
            "section_hashes.index",
        ),
    ]);
}

#[test]
fn arch_values() {
    let moe = |change: Value| {
        let mut moe = json!({"num_experts": 8, "top_k": 2, "moe_intermediate_size": 32, "norm_topk_prob": true});
        moe.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        moe
    };
    let yarn = |change: Value| {
        let mut yarn = json!({"factor": 4.0, "original_max_position_embeddings": 4096});
        yarn.as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        yarn
    };
    let values = [
        ("hidden_size", json!(null), "arch.hidden_size is missing"),
        ("layer_types", json!(null), "arch.layer_types is missing"),
        ("hidden_size", json!(0), "arch.hidden_size is 0"),
        ("intermediate_size", json!(0), "arch.intermediate_size is 0"),
        ("num_layers", json!(0), "arch.num_layers is 0"),
        ("num_layers", json!(1u64 << 40), "arch.num_layers is 1099511627776"),
        ("num_loops", json!(0), "arch.num_loops is 0"),
        ("num_loops", json!(1u64 << 62), "arch.num_loops is 4611686018427387904"),
        ("num_attention_heads", json!(0), "arch.num_attention_heads is 0"),
        ("num_kv_heads", json!(0), "arch.num_kv_heads is 0"),
        ("num_kv_heads", json!(8), "arch.num_kv_heads is 8, expected 1 to 4"),
        (
            "num_kv_heads",
            json!(3),
            "arch.num_attention_heads is 4, expected a multiple of num_kv_heads, 3",
        ),
        ("head_dim", json!(0), "arch.head_dim is 0"),
        ("head_dim", json!(15), "arch.head_dim is 15, expected an even number"),
        ("vocab_size", json!(0), "arch.vocab_size is 0"),
        (
            "layer_types",
            json!(["FullAttention"]),
            "arch.layer_types has 1 entries",
        ),
        (
            "layer_types",
            json!(["FullAttention", "Mamba"]),
            "arch.layer_types: unknown variant `Mamba`",
        ),
        (
            "attention_heads_per_layer",
            json!([4]),
            "arch.attention_heads_per_layer has 1 entries",
        ),
        (
            "attention_heads_per_layer",
            json!([4, 0]),
            "arch.attention_heads_per_layer[1] is 0",
        ),
        ("attention_heads_per_layer", json!([4, 5]), "arch.heads of layer 1 is 5"),
        (
            "attention_heads_per_layer",
            json!([4, -4]),
            "arch.attention_heads_per_layer: invalid value: integer `-4`",
        ),
        ("kv_heads_per_layer", json!([2, 3]), "of layer 1, 3"),
        (
            "kv_heads_per_layer",
            json!([2, 2, 2]),
            "arch.kv_heads_per_layer has 3 entries",
        ),
        ("kv_heads_per_layer", json!([0, 2]), "arch.kv_heads_per_layer[0] is 0"),
        ("num_loops", json!(-1), "arch.num_loops: invalid value: integer `-1`"),
        ("loop_final_norm", json!(1), "arch.loop_final_norm: invalid type"),
        ("attn_v_norm", json!("yes"), "arch.attn_v_norm: invalid type"),
        ("qk_norm_after_rope", json!(0), "arch.qk_norm_after_rope: invalid type"),
        ("sliding_window", json!(0), "arch.sliding_window is 0"),
        ("sliding_window_pattern", json!(0), "arch.sliding_window_pattern is 0"),
        ("max_position_embeddings", json!(0), "arch.max_position_embeddings is 0"),
        (
            "max_position_embeddings",
            json!(1u64 << 60),
            "arch.max_position_embeddings is 1152921504606846976",
        ),
        ("rope_theta", json!(0), "arch.rope_theta is 0"),
        ("rope_theta", json!(-1.0), "arch.rope_theta is -1"),
        ("rope_theta", json!(1e300), "arch.rope_theta is 1000"),
        ("rope_local_base_freq", json!(0.0), "arch.rope_local_base_freq is 0"),
        ("partial_rotary_factor", json!(1.5), "arch.partial_rotary_factor is 1.5"),
        (
            "local_partial_rotary_factor",
            json!(-0.5),
            "arch.local_partial_rotary_factor is -0.5",
        ),
        ("rope_freq_factors", json!([1.0, 0.0]), "arch.rope_freq_factors[1] is 0"),
        ("yarn", yarn(json!({"factor": 0.0})), "arch.yarn.factor is 0"),
        (
            "yarn",
            yarn(json!({"beta_fast": 0.5})),
            "arch.yarn.beta_fast is 0.5, expected at least beta_slow, 1",
        ),
        (
            "yarn",
            yarn(json!({"original_max_position_embeddings": 0})),
            "arch.yarn.original_max_position_embeddings is 0",
        ),
        ("yarn", json!({"factor": 4.0}), "arch.yarn: missing field"),
        ("rms_norm_eps", json!(0.0), "arch.rms_norm_eps is 0"),
        ("rms_norm_eps", json!(-1e-6), "arch.rms_norm_eps is -"),
        ("norm_style", json!("foo"), "arch.norm_style: unknown variant `foo`"),
        ("hidden_act", json!("relu"), "arch.hidden_act: unknown variant `relu`"),
        ("embed_multiplier", json!(0.0), "arch.embed_multiplier is 0"),
        ("embed_multiplier", json!("nan"), "arch.embed_multiplier: invalid type"),
        ("query_pre_attn_scalar", json!(0.0), "arch.query_pre_attn_scalar is 0"),
        ("query_pre_attn_scalar", json!(-64), "arch.query_pre_attn_scalar is -64"),
        // These are zero as f32, or on devices that flush subnormal numbers.
        (
            "query_pre_attn_scalar",
            json!(1e-80),
            "arch.query_pre_attn_scalar is 0.0",
        ),
        (
            "attn_logit_softcapping",
            json!(1e-40),
            "arch.attn_logit_softcapping is 0.0",
        ),
        ("logit_multiplier", json!(0), "arch.logit_multiplier is 0"),
        ("logit_multiplier", json!(-0.5), "arch.logit_multiplier is -0.5"),
        ("logit_multiplier", json!(1e39), "arch.logit_multiplier is 1000"),
        ("logit_multiplier", json!("nan"), "arch.logit_multiplier: invalid type"),
        (
            "final_logit_softcapping",
            json!(-30.0),
            "arch.final_logit_softcapping is -30",
        ),
        ("attn_logit_softcapping", json!(0.0), "arch.attn_logit_softcapping is 0"),
        ("linear_num_key_heads", json!(0), "arch.linear_num_key_heads is 0"),
        ("linear_conv_kernel_dim", json!(0), "arch.linear_conv_kernel_dim is 0"),
        (
            "tie_word_embeddings",
            json!("yes"),
            "arch.tie_word_embeddings: invalid type",
        ),
        (
            "mtp",
            json!({"num_layers": 1_000_000_000}),
            "arch.mtp.num_layers is 1000000000",
        ),
        ("moe", moe(json!({"top_k": 0})), "arch.moe.top_k is 0"),
        ("moe", moe(json!({"top_k": 9})), "arch.moe.top_k is 9, expected 1 to 8"),
        (
            "moe",
            moe(json!({"num_experts": 1u64 << 31})),
            "arch.moe.num_experts is 2147483648",
        ),
        (
            "moe",
            moe(json!({"moe_intermediate_size": 0})),
            "arch.moe.moe_intermediate_size is 0",
        ),
        (
            "moe",
            moe(json!({"shared_expert_intermediate_size": 0})),
            "arch.moe.shared_expert_intermediate_size is 0",
        ),
        (
            "moe",
            moe(json!({"routed_scaling_factor": 0})),
            "arch.moe.routed_scaling_factor is 0",
        ),
        (
            "moe",
            moe(json!({"routed_scaling_factor": -2.5})),
            "arch.moe.routed_scaling_factor is -2.5",
        ),
        (
            "moe",
            moe(json!({"router_sigmoid": 1})),
            "arch.moe: invalid type: integer `1`",
        ),
        ("moe", json!({"num_experts": 8}), "arch.moe: missing field `top_k`"),
    ];
    check(
        values
            .into_iter()
            .map(|(key, value, says)| {
                case(
                    format!("{key} = {value}"),
                    header(|h| h["arch"][key] = value.clone()),
                    Parse,
                    says,
                )
            })
            .collect(),
    );
}
