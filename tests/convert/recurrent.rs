//! Families with Gated DeltaNet layers: their tensors in the container, and refused sources.

use crate::build::{Copy, Gguf, Meta, convert_gguf, converted, fixture, run, source_values, values};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::model::{FeedForward, Mixer, bind};
use cmf_gpu::source::{LayerType, MemoryTensors, NormStyle};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

#[test]
fn headers_say_which_layers_recur_and_how() {
    let (linear, full) = (LayerType::LinearAttention, LayerType::FullAttention);
    let (_dir, report, container) = converted(&fixture("qwen3_5"), Dtype::F16);
    assert!(report.dropped.is_empty(), "{:?}", report.dropped);
    let arch = container.header().arch.clone();
    assert_eq!(arch.layer_types, [linear, linear, linear, full]);
    assert_eq!(
        (arch.norm_style, arch.tie_word_embeddings),
        (Some(NormStyle::Gemma), false)
    );
    assert_eq!(
        (arch.rope_theta, arch.partial_rotary_factor, arch.head_dim),
        (1e7, 0.25, 64)
    );
    let heads = (arch.linear_num_key_heads, arch.linear_num_value_heads);
    let dims = (arch.linear_key_head_dim, arch.linear_value_head_dim);
    assert_eq!(
        (heads, dims, arch.linear_conv_kernel_dim),
        ((Some(2), Some(4)), (Some(32), Some(32)), Some(4))
    );
    assert!(values(&container) == source_values("qwen3_5"));

    let copy = Copy::of("qwen3_5");
    std::fs::copy(
        fixture("qwen3_5").join("config.v5.json"),
        copy.path().join("config.json"),
    )
    .unwrap();
    let (_dir, _, other) = converted(copy.path(), Dtype::F16);
    assert_eq!(other.header_json()["arch"], container.header_json()["arch"]);
    // A list of layers overrides the rule.
    let list = json!([
        "full_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention"
    ]);
    copy.edit("config.json", |config| drop(config.insert("layer_types".into(), list)));
    let err = run(copy.path(), &copy.path().join("o.cmf"), Dtype::F16).unwrap_err();
    assert_eq!(err.kind, Kind::MissingTensor);
    assert!(err.message.contains("model.layers.0.self_attn.q_proj.weight"), "{err}");
}

#[test]
fn the_published_layout_gives_the_same_network_and_its_multi_token_head() {
    let (_dir, _, plain) = converted(&fixture("qwen3_5"), Dtype::F16);
    let (_dir, report, published) = converted(&fixture("qwen3_5_hub"), Dtype::F16);
    assert!(report.dropped.is_empty(), "{:?}", report.dropped);
    let mut arch = published.header().arch.clone();
    assert_eq!(arch.mtp.take().map(|mtp| mtp.num_layers), Some(1));
    assert_eq!(arch, plain.header().arch);
    let mut all = values(&published);
    let head: Vec<String> = all
        .keys()
        .filter(|name| name.starts_with("model.mtp."))
        .cloned()
        .collect();
    let source = source_values("qwen3_5_hub");
    for (name, old) in [
        ("enorm.weight", "pre_fc_norm_embedding.weight"),
        ("hnorm.weight", "pre_fc_norm_hidden.weight"),
        ("eh_proj.weight", "fc.weight"),
        ("norm.weight", "norm.weight"),
        ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
    ] {
        assert!(
            all[&format!("model.mtp.{name}")] == source[&format!("mtp.{old}")],
            "{name}"
        );
    }
    assert_eq!(head.len(), 15);
    head.iter().for_each(|name| drop(all.remove(name)));
    assert!(all == values(&plain));
}

/// Mixtures as Qwen3.5 and Qwen3-Next publish them: the draft head's layer has its own experts, all in two tensors. The
/// configuration of Qwen3-Next does not announce the head.
#[test]
fn the_layer_of_a_multi_token_head_may_be_a_mixture() {
    let mut source = source_values("qwen3_5_moe_hub");
    let last = "model.language_model.layers.3.";
    let layer = source.iter().filter_map(|(name, tensor)| {
        let part = name.strip_prefix(last)?;
        Some((format!("mtp.layers.0.{part}"), tensor.clone()))
    });
    let layer: Vec<_> = layer.collect();
    assert!(layer.iter().any(|(name, _)| name.contains("mlp.experts.gate_up_proj")));
    let norm = source["model.language_model.norm.weight"].clone();
    let hidden = norm.0[0];
    source.extend(layer);
    for part in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
        source.insert(format!("mtp.{part}.weight"), norm.clone());
    }
    let fc = vec![0.25; 2 * (hidden * hidden) as usize];
    source.insert("mtp.fc.weight".into(), (vec![hidden, 2 * hidden], fc));
    for announced in [true, false] {
        let copy = Copy::of("qwen3_5_moe_hub");
        if announced {
            copy.edit("config.json", |config| {
                config["text_config"]["mtp_num_hidden_layers"] = 1.into()
            });
        }
        let (_dir, report, container) = converted(copy.tensors(&source).path(), Dtype::Q8Row);
        assert!(report.dropped.is_empty(), "{:?}", report.dropped);
        let model = bind(&container.header().arch, &container).unwrap();
        assert!(model.unused.is_empty());
        let mtp = model.mtp.unwrap();
        assert_eq!(mtp.layers.len(), 1);
        match &mtp.layers[0].ffn {
            FeedForward::Moe(moe) => assert_eq!((moe.experts.len(), moe.shared.is_some()), (8, true)),
            FeedForward::Dense(_) => panic!("the head has no experts"),
        }
    }
}

#[test]
fn recurrent_gates_are_not_quantised() {
    for quant in [Dtype::Q4tp, Dtype::Q82f, Dtype::Q8Row] {
        let (_dir, _, container) = converted(&fixture("qwen3_5"), quant);
        let dtype = |part: &str| {
            let id = container.find(&format!("model.layers.1.linear_attn.{part}")).unwrap();
            container.infos()[id].dtype
        };
        for part in [
            "A_log",
            "dt_bias",
            "conv1d.weight",
            "norm.weight",
            "in_proj_a.weight",
            "in_proj_b.weight",
        ] {
            assert_eq!(dtype(part), Dtype::F16, "{part}");
        }
        for part in ["in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"] {
            assert_eq!(dtype(part), quant, "{part}");
        }
        assert!(bind(&container.header().arch, &container).unwrap().unused.is_empty());
    }
}

#[test]
fn unsupported_configurations_are_refused() {
    type Edit = fn(&mut Map<String, Value>);
    let cases: [(&str, Edit, &str); 6] = [
        (
            "qwen3_5",
            |c| drop(c.insert("attn_output_gate".into(), false.into())),
            "'attn_output_gate' is false",
        ),
        (
            "qwen3_5",
            |c| drop(c.insert("full_attention_interval".into(), 0.into())),
            "'full_attention_interval' is 0",
        ),
        (
            "qwen3_5",
            |c| drop(c.insert("num_experts".into(), 8.into())),
            "'num_experts' is 8; qwen3_5_text models have no experts",
        ),
        (
            "qwen3_5_hub",
            |c| c["text_config"]["mtp_use_dedicated_embeddings"] = true.into(),
            "'mtp_use_dedicated_embeddings' is true",
        ),
        (
            "qwen3_5",
            |c| drop(c.insert("layer_types".into(), json!(["full_attention"]))),
            "1 entries for 4 layers",
        ),
        (
            "qwen3",
            |c| drop(c.insert("layer_types".into(), json!(vec!["linear_attention"; 3]))),
            "\"linear_attention\"",
        ),
    ];
    for (model, edit, wanted) in cases {
        let copy = Copy::of(model);
        copy.edit("config.json", edit);
        let err = run(copy.path(), &copy.path().join("o.cmf"), Dtype::F16).unwrap_err();
        assert!(
            err.kind == Kind::UnsupportedModel && err.message.contains(wanted),
            "{wanted}: {err}"
        );
    }
}

/// The tensors of a container whose names `keep` accepts.
fn without(container: &CmfContainer, keep: impl Fn(&str) -> bool) -> MemoryTensors {
    let infos = container
        .infos()
        .iter()
        .enumerate()
        .filter(|(_, info)| keep(&info.name));
    let all = infos.map(|(id, info)| {
        let bytes = container.bytes(id).unwrap().to_vec();
        (info.name.clone(), info.dtype, info.shape.clone(), bytes)
    });
    MemoryTensors::new(all).unwrap()
}

#[test]
fn tensors_decide_what_a_layer_is() {
    let (_dir, _, container) = converted(&fixture("qwen3_5"), Dtype::F16);
    let arch = container.header().arch.clone();
    // The tensors decide, not the header's layer types.
    let mut renamed = arch.clone();
    renamed.arch_name = "something".into();
    renamed.layer_types = vec![LayerType::FullAttention; 4];
    let model = bind(&renamed, &container).unwrap();
    let recurs: Vec<bool> = model
        .layers
        .iter()
        .map(|layer| matches!(layer.mixer, Mixer::DeltaNet(_)))
        .collect();
    assert_eq!(recurs, [true, true, true, false]);
    assert!(matches!(&model.layers[3].mixer, Mixer::Attention(attention) if attention.gated));

    for part in [
        "A_log",
        "conv1d.weight",
        "in_proj_a.weight",
        "norm.weight",
        "out_proj.weight",
    ] {
        let name = format!("model.layers.2.linear_attn.{part}");
        let err = bind(&arch, &without(&container, |tensor| tensor != name)).unwrap_err();
        assert_eq!(err.kind, Kind::MissingTensor);
        assert!(err.message.contains(&name), "{err}");
    }
    let err = bind(
        &arch,
        &without(&container, |tensor| !tensor.starts_with("model.layers.1.linear_attn.")),
    )
    .unwrap_err();
    assert_eq!(err.kind, Kind::MissingTensor);
    assert!(
        err.message.contains("model.layers.1.linear_attn.in_proj_qkv.weight"),
        "{err}"
    );

    let mut bad = arch.clone();
    bad.linear_key_head_dim = None;
    let err = bind(&bad, &container).unwrap_err();
    assert!(
        err.kind == Kind::Parse && err.message.contains("arch.linear_key_head_dim is missing"),
        "{err}"
    );
    for (key_dim, kind) in [
        (30, Kind::UnsupportedModel),
        (260, Kind::UnsupportedModel),
        (64, Kind::Parse),
    ] {
        let mut bad = arch.clone();
        bad.linear_key_head_dim = Some(key_dim);
        let err = bind(&bad, &container).unwrap_err();
        assert_eq!(err.kind, kind, "{err}");
    }
    // A size that would overflow.
    let mut bad = arch.clone();
    bad.linear_num_value_heads = Some(1 << 62);
    let err = bind(&bad, &container).unwrap_err();
    assert_eq!(err.kind, Kind::Parse, "{err}");
}

/// Blocks of `width` rows from `first` on: value head k·sharing + j moves to position j·key_heads + k.
fn tiled(rows: &[Vec<f32>], first: usize, key_heads: usize, sharing: usize, width: usize) -> Vec<Vec<f32>> {
    let mut out = rows.to_vec();
    for k in 0..key_heads {
        for j in 0..sharing {
            for row in 0..width {
                out[first + (j * key_heads + k) * width + row] = rows[first + (k * sharing + j) * width + row].clone();
            }
        }
    }
    out
}

fn transposed(rows: &[Vec<f32>]) -> Vec<Vec<f32>> {
    (0..rows[0].len())
        .map(|col| rows.iter().map(|row| row[col]).collect())
        .collect()
}

/// Shape and values of tensors.
pub type Values = BTreeMap<String, (Vec<u64>, Vec<f32>)>;

/// The model as a GGUF file.
pub fn gguf() -> Gguf {
    gguf_of(source_values("qwen3_5"), 4)
}

/// The name of a tensor of these families in a GGUF file.
pub fn hybrid_name(name: &str) -> String {
    let mut name = name.replace("model.layers.", "blk.");
    for (from, to) in [
        ("model.embed_tokens.", "token_embd."),
        ("model.norm.", "output_norm."),
        ("lm_head.", "output."),
        ("input_layernorm.", "attn_norm."),
        ("post_attention_layernorm.", "post_attention_norm."),
        ("self_attn.q_proj.", "attn_q."),
        ("self_attn.k_proj.", "attn_k."),
        ("self_attn.v_proj.", "attn_v."),
        ("self_attn.o_proj.", "attn_output."),
        ("self_attn.q_norm.", "attn_q_norm."),
        ("self_attn.k_norm.", "attn_k_norm."),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.conv1d.", "ssm_conv1d."),
        ("linear_attn.dt_bias", "ssm_dt.bias"),
        ("linear_attn.in_proj_qkv.", "attn_qkv."),
        ("linear_attn.in_proj_z.", "attn_gate."),
        ("linear_attn.in_proj_a.", "ssm_alpha."),
        ("linear_attn.in_proj_b.", "ssm_beta."),
        ("linear_attn.norm.", "ssm_norm."),
        ("linear_attn.out_proj.", "ssm_out."),
        ("mlp.gate_proj.", "ffn_gate."),
        ("mlp.up_proj.", "ffn_up."),
        ("mlp.down_proj.", "ffn_down."),
        ("linear_attn.in_proj_qkvz.", "ssm_in."),
        ("linear_attn.in_proj_ba.", "ssm_ba."),
        ("mlp.gate.", "ffn_gate_inp."),
        ("mlp.shared_expert_gate.", "ffn_gate_inp_shexp."),
        ("mlp.shared_expert.gate_proj.", "ffn_gate_shexp."),
        ("mlp.shared_expert.up_proj.", "ffn_up_shexp."),
        ("mlp.shared_expert.down_proj.", "ffn_down_shexp."),
    ] {
        name = name.replace(from, to);
    }
    name
}

/// A GGUF file of one of these families without tensors. The numbers are the state size, key heads, value heads, and elements of
/// all value heads.
pub fn hybrid(architecture: &str, [state, keys, heads, inner]: [u32; 4]) -> Gguf {
    let mut file = Gguf::new();
    file.set("general.architecture", Meta::Str(architecture.into()));
    for (key, value) in [
        ("block_count", 4),
        ("context_length", 4096),
        ("embedding_length", 64),
        ("feed_forward_length", 160),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("rope.dimension_count", 16),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", state),
        ("ssm.group_count", keys),
        ("ssm.time_step_rank", heads),
        ("ssm.inner_size", inner),
        ("full_attention_interval", 4),
    ] {
        file.set(format!("{architecture}.{key}"), Meta::U32(value));
    }
    file.set(format!("{architecture}.rope.freq_base"), Meta::F32(1e7));
    file.set(
        format!("{architecture}.attention.layer_norm_rms_epsilon"),
        Meta::F32(1e-6),
    );
    file
}

/// The model with this number of value heads as a GGUF file.
fn gguf_of(source: Values, heads: usize) -> Gguf {
    let (sharing, width) = (heads / 2, 128 / heads);
    let mut file = hybrid("qwen35", [32, 2, heads as u32, 128]);
    for (name, (shape, values)) in source {
        let cols = *shape.last().unwrap() as usize;
        let mut rows: Vec<Vec<f32>> = match shape.len() {
            1 => values.iter().map(|&value| vec![value]).collect(),
            _ => values.chunks(cols).map(<[f32]>::to_vec).collect(),
        };
        let part = name.split_once("linear_attn.").map_or("", |(_, part)| part);
        match part {
            "in_proj_qkv.weight" | "conv1d.weight" => rows = tiled(&rows, 128, 2, sharing, width),
            "in_proj_z.weight" => rows = tiled(&rows, 0, 2, sharing, width),
            "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias" => rows = tiled(&rows, 0, 2, sharing, 1),
            "out_proj.weight" => rows = transposed(&tiled(&transposed(&rows), 0, 2, sharing, width)),
            _ => {}
        }
        let mut values = rows.concat();
        if part == "A_log" {
            values.iter_mut().for_each(|value| *value = -value.exp());
        } else if name.ends_with("norm.weight") && part.is_empty() {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        let shape: Vec<u64> = match part {
            "conv1d.weight" => vec![shape[0], shape[2]],
            _ => shape,
        };
        file.f32(hybrid_name(&name), &shape, &values);
    }
    file
}

#[test]
fn a_gguf_file_gives_the_same_network() {
    let (_dir, _, wanted) = converted(&fixture("qwen3_5"), Dtype::F16);
    let mut file = gguf();
    let (_guard, report, found) = convert_gguf(&file, Dtype::F16).unwrap();
    assert!(report.dropped.is_empty(), "{:?}", report.dropped);
    assert_eq!(found.header().arch, wanted.header().arch);
    let names = |container: &CmfContainer| {
        container
            .infos()
            .iter()
            .map(|info| info.name.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&found), names(&wanted));
    let all = values(&found);
    for (name, (shape, wanted)) in values(&wanted) {
        let (found_shape, found) = &all[&name];
        assert_eq!(*found_shape, shape, "{name}");
        // These values went through exp and ln and may differ by rounding.
        let near = |(found, wanted): (&f32, &f32)| match name.ends_with("A_log") {
            true => (found - wanted).abs() <= 1e-3 * wanted.abs(),
            false => found == wanted,
        };
        assert!(found.iter().zip(&wanted).all(near), "{name}");
    }
    // A draft head after the layers is listed as dropped.
    file.set("qwen35.block_count", Meta::U32(5));
    file.set("qwen35.nextn_predict_layers", Meta::U32(1));
    file.f32("blk.4.nextn.eh_proj.weight", &[64, 128], &[0.0; 64 * 128]);
    file.f32("blk.4.attn_norm.weight", &[64], &[1.0; 64]);
    let (_guard, report, again) = convert_gguf(&file, Dtype::F16).unwrap();
    assert!(values(&again) == all);
    assert_eq!(report.dropped.len(), 2);
    assert!(report.dropped[0].contains("blk.4."), "{:?}", report.dropped);
}

/// A draft head after the layers is that of the published model.
#[test]
fn a_gguf_file_may_have_a_draft_head() {
    let mut file = gguf();
    file.set("qwen35.block_count", Meta::U32(5));
    file.set("qwen35.nextn_predict_layers", Meta::U32(1));
    for (name, (shape, mut values)) in source_values("qwen3_5_hub") {
        let Some(part) = name.strip_prefix("mtp.") else {
            continue;
        };
        let own = match part {
            "fc.weight" => "blk.4.nextn.eh_proj.weight".into(),
            "pre_fc_norm_embedding.weight" => "blk.4.nextn.enorm.weight".into(),
            "pre_fc_norm_hidden.weight" => "blk.4.nextn.hnorm.weight".into(),
            "norm.weight" => "blk.4.nextn.shared_head_norm.weight".into(),
            _ => hybrid_name(&format!("model.{part}")).replace("blk.0.", "blk.4."),
        };
        if part.contains("norm") {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        file.f32(own, &shape, &values);
    }
    let (_dir, _, wanted) = converted(&fixture("qwen3_5_hub"), Dtype::F16);
    let (_guard, report, found) = convert_gguf(&file, Dtype::F16).unwrap();
    assert!(report.dropped.is_empty(), "{:?}", report.dropped);
    assert_eq!(found.header().arch.mtp.as_ref().map(|head| head.num_layers), Some(1));
    let (wanted, found) = (values(&wanted), values(&found));
    let head = wanted.iter().filter(|(name, _)| name.starts_with("model.mtp."));
    assert_eq!(head.clone().count(), 15);
    for (name, tensor) in head {
        assert!(found.get(name) == Some(tensor), "{name}");
    }
    // A part of one is left out, with one note.
    file.tensors
        .retain(|tensor| !tensor.name.ends_with("nextn.hnorm.weight"));
    let (_guard, report, found) = convert_gguf(&file, Dtype::F16).unwrap();
    assert_eq!((found.header().arch.mtp.as_ref(), report.dropped.len()), (None, 14));
    let notes = report
        .notes
        .iter()
        .filter(|note| note.contains("14 tensors of blocks after the layers"));
    assert_eq!(notes.count(), 1, "{:?}", report.notes);
}

/// The golden model with eight value heads of half the width.
fn eight_heads() -> Values {
    let mut source = source_values("qwen3_5");
    for (name, (shape, values)) in &mut source {
        let part = name.split_once("linear_attn.").map_or("", |(_, part)| part);
        match part {
            // Eight heads of half the width: twice as many numbers per head, all distinct.
            "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias" => {
                shape[0] *= 2;
                values.extend(values.clone().iter().map(|value| value / 2.0));
            }
            "norm.weight" => {
                shape[0] /= 2;
                values.truncate(16);
            }
            _ => {}
        }
    }
    source
}

/// The golden model with eight value heads of half the width, as a GGUF file.
pub fn gguf_with_eight_heads() -> Gguf {
    gguf_of(eight_heads(), 8)
}

/// Heads for which the order of the file is not its own inverse: with two value heads for each of two key heads it would be.
#[test]
fn value_heads_of_a_gguf_file_go_back_to_their_places() {
    let source = eight_heads();
    let copy = Copy::of("qwen3_5");
    copy.tensors(&source).edit("config.json", |config| {
        config.insert("linear_num_value_heads".into(), 8.into());
        config.insert("linear_value_head_dim".into(), 16.into());
    });
    let file = gguf_of(source, 8);
    let (_dir, _, wanted) = converted(copy.path(), Dtype::F16);
    let (_guard, _, found) = convert_gguf(&file, Dtype::F16).unwrap();
    assert_eq!(found.header().arch, wanted.header().arch);
    let all = values(&found);
    for (name, (shape, wanted)) in values(&wanted) {
        let (found_shape, found) = &all[&name];
        assert_eq!(*found_shape, shape, "{name}");
        let near = |(found, wanted): (&f32, &f32)| (found - wanted).abs() <= 1e-3 * wanted.abs();
        assert!(found.iter().zip(&wanted).all(near), "{name}");
    }
}

#[test]
fn a_gguf_file_with_other_heads_is_refused() {
    for (key, value, wanted) in [
        ("ssm.inner_size", 126, "'qwen35.ssm.inner_size' is 126"),
        ("ssm.time_step_rank", 0, "'qwen35.ssm.inner_size' is 128"),
        ("ssm.inner_size", 256, "are not 128 and 4 heads of 64"),
        ("ssm.group_count", 0, "0 key heads"),
        ("full_attention_interval", 0, "'full_attention_interval' is 0"),
    ] {
        let mut file = gguf();
        file.set(format!("qwen35.{key}"), Meta::U32(value));
        let err = convert_gguf(&file, Dtype::F16).map(|_| ()).unwrap_err();
        assert_eq!(err.kind, Kind::UnsupportedModel, "{err}");
        assert!(err.message.contains(wanted), "{wanted}: {err}");
    }
}
