//! GGUF files of the family whose Gated DeltaNet inputs are fused: as two tensors in current files, as one in older ones.

use crate::build::{Block, Copy, Gguf, Meta, convert_gguf, converted, fixture, source_values, values};
use crate::recurrent::{hybrid, hybrid_name};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use std::collections::BTreeMap;

/// Shape and values of tensors.
type Values = BTreeMap<String, (Vec<u64>, Vec<f32>)>;

/// How q, k, v and z of a layer are stored in a file.
#[derive(Clone, Copy, PartialEq)]
pub enum Form {
    Parts,
    Whole,
}

/// Number and width of key heads and of value heads.
#[derive(Clone, Copy)]
pub struct Heads {
    keys: usize,
    values: usize,
    key: usize,
    value: usize,
}

/// The heads of the golden model.
pub const GOLDEN: Heads = Heads {
    keys: 2,
    values: 4,
    key: 32,
    value: 32,
};

/// The rows of q, k, v and z of every head, gathered by projection.
fn parts(rows: &[Vec<f32>], heads: Heads) -> [Vec<f32>; 4] {
    let shared = heads.values / heads.keys * heads.value;
    let mut out: [Vec<f32>; 4] = Default::default();
    let mut rows = rows.iter();
    for _ in 0..heads.keys {
        for (part, width) in out.iter_mut().zip([heads.key, heads.key, shared, shared]) {
            rows.by_ref().take(width).for_each(|row| part.extend(row));
        }
    }
    assert!(rows.next().is_none());
    out
}

/// A model as a GGUF file.
pub fn gguf_of(source: &Values, heads: Heads, form: Form) -> Gguf {
    let mut file = hybrid(
        "qwen3next",
        [heads.key, heads.keys, heads.values, heads.values * heads.value].map(|n| n as u32),
    );
    for (key, value) in [
        ("expert_count", 8),
        ("expert_used_count", 3),
        ("expert_feed_forward_length", 32),
        ("expert_shared_feed_forward_length", 64),
    ] {
        file.set(format!("qwen3next.{key}"), Meta::U32(value));
    }
    let mut experts: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (name, (shape, values)) in source {
        let cols = *shape.last().unwrap() as usize;
        let name = name.replace("model.layers.", "blk.");
        // Experts of a layer in one tensor. There are fewer than ten: their names are in order.
        if let Some((layer, rest)) = name.split_once(".mlp.experts.") {
            let role = rest.split_once('.').unwrap().1.replace("_proj.", "_exps.");
            experts.entry(format!("{layer}.ffn_{role}")).or_default().extend(values);
            continue;
        }
        if name.ends_with("in_proj_qkvz.weight") && form == Form::Parts {
            let rows: Vec<Vec<f32>> = values.chunks(cols).map(<[f32]>::to_vec).collect();
            let [q, k, v, z] = parts(&rows, heads);
            let layer = name.split_once(".linear_attn").unwrap().0;
            for (part, values) in [("attn_qkv", [q, k, v].concat()), ("attn_gate", z)] {
                let shape = [(values.len() / cols) as u64, cols as u64];
                file.f32(format!("{layer}.{part}.weight"), &shape, &values);
            }
            continue;
        }
        let (mut shape, mut values) = (shape.clone(), values.clone());
        if name.ends_with("A_log") {
            values.iter_mut().for_each(|value| *value = -value.exp());
        } else if name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            values.iter_mut().for_each(|value| *value += 1.0);
        } else if name.ends_with("conv1d.weight") {
            shape = vec![shape[0], shape[2]];
        } else if name.ends_with("shared_expert_gate.weight") {
            shape = vec![shape[1]];
        }
        file.f32(hybrid_name(&name), &shape, &values);
    }
    for (name, values) in experts {
        let shape = if name.contains("down") {
            [8, 64, 32]
        } else {
            [8, 32, 64]
        };
        file.f32(name, &shape, &values);
    }
    file
}

/// The same network, bit by bit except for the rates, which went through exp and ln.
fn same(found: &CmfContainer, wanted: &CmfContainer) {
    assert_eq!(found.header().arch, wanted.header().arch);
    let kinds = |container: &CmfContainer| {
        let infos = container.infos().iter();
        infos
            .map(|info| (info.name.clone(), info.dtype, info.shape.clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(kinds(found), kinds(wanted));
    let (all, mut rates) = (values(found), 0);
    for (name, (_, wanted)) in values(wanted) {
        let near = |(found, wanted): (&f32, &f32)| match name.ends_with("A_log") {
            true => (found - wanted).abs() <= 1e-3 * wanted.abs(),
            false => found.to_bits() == wanted.to_bits(),
        };
        assert!(all[&name].1.iter().zip(&wanted).all(near), "{name}");
        rates += usize::from(name.ends_with("A_log"));
    }
    assert_eq!(rates, 3);
}

#[test]
fn both_forms_give_the_network_of_the_original() {
    let source = source_values("qwen3_next");
    for quant in [Dtype::F16, Dtype::Q82f, Dtype::Q4tp] {
        let (_dir, _, wanted) = converted(&fixture("qwen3_next"), quant);
        for form in [Form::Parts, Form::Whole] {
            let (_guard, report, found) = convert_gguf(&gguf_of(&source, GOLDEN, form), quant).unwrap();
            assert!(report.dropped.is_empty(), "{:?}", report.dropped);
            same(&found, &wanted);
        }
    }
}

#[test]
fn gates_and_ups_of_experts_may_be_one_tensor() {
    let (_dir, _, wanted) = converted(&fixture("qwen3_next"), Dtype::Q82f);
    let mut file = gguf_of(&source_values("qwen3_next"), GOLDEN, Form::Parts);
    for layer in 0..4 {
        let mut take = |part: &str| {
            let name = format!("blk.{layer}.ffn_{part}_exps.weight");
            let at = file.tensors.iter().position(|tensor| tensor.name == name).unwrap();
            file.tensors.remove(at)
        };
        let (gate, up) = (take("gate"), take("up"));
        let expert = gate.data.len() / 8;
        let pairs = gate.data.chunks(expert).zip(up.data.chunks(expert));
        file.tensors.push(Block {
            name: format!("blk.{layer}.ffn_gate_up_exps.weight"),
            dims: vec![64, 64, 8],
            data: pairs.flat_map(|(gate, up)| [gate, up].concat()).collect(),
            ..gate
        });
    }
    let (_guard, report, found) = convert_gguf(&file, Dtype::Q82f).unwrap();
    assert!(report.dropped.is_empty(), "{:?}", report.dropped);
    same(&found, &wanted);
}

/// Heads for which the order is not its own inverse: with as many heads as projections of one width it would be.
#[test]
fn heads_of_other_widths_go_back_to_their_places() {
    let heads = Heads {
        keys: 2,
        values: 6,
        key: 32,
        value: 16,
    };
    let mut source = source_values("qwen3_next");
    // Distinct numbers that are exact in f16.
    let numbered = |shape: &[u64]| -> Vec<f32> {
        let len: u64 = shape.iter().product();
        (0..len)
            .map(|i| (1.0 + (i % 1021) as f32 / 1024.0) * if i / 1021 % 2 == 0 { 1.0 } else { -1.0 })
            .collect()
    };
    for (name, (shape, values)) in &mut source {
        let part = name.split_once("linear_attn.").map_or("", |(_, part)| part);
        let wanted: &[u64] = match part {
            "in_proj_qkvz.weight" => &[2 * (64 + 2 * 48), 64],
            "in_proj_ba.weight" => &[12, 64],
            "conv1d.weight" => &[128 + 96, 1, 4],
            "out_proj.weight" => &[64, 96],
            "norm.weight" => &[16],
            "A_log" | "dt_bias" => &[6],
            _ => continue,
        };
        (*shape, *values) = (wanted.to_vec(), numbered(wanted));
    }
    let copy = Copy::of("qwen3_next");
    copy.tensors(&source).edit("config.json", |config| {
        config.insert("linear_num_value_heads".into(), 6.into());
        config.insert("linear_value_head_dim".into(), 16.into());
    });
    let (_dir, _, wanted) = converted(copy.path(), Dtype::F16);
    for form in [Form::Parts, Form::Whole] {
        let (_guard, _, found) = convert_gguf(&gguf_of(&source, heads, form), Dtype::F16).unwrap();
        same(&found, &wanted);
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_by_name() {
    let source = source_values("qwen3_next");
    let file = || gguf_of(&source, GOLDEN, Form::Parts);
    let refused = |file: &Gguf, kind: Kind, what: &[&str]| {
        let err = convert_gguf(file, Dtype::F16).map(|_| ()).unwrap_err();
        assert_eq!(err.kind, kind, "{err}");
        what.iter()
            .for_each(|what| assert!(err.message.contains(what), "{what}: {err}"));
    };
    let mut alone = file();
    alone.tensors.retain(|tensor| tensor.name != "blk.1.attn_gate.weight");
    let lost = "model.layers.1.linear_attn.in_proj_z.weight";
    refused(&alone, Kind::MissingTensor, &[lost]);

    let mut both = file();
    both.f32("blk.2.ssm_in.weight", &[384, 64], &[0.0; 384 * 64]);
    let second = "model.layers.2.linear_attn.in_proj_qkvz.weight";
    refused(&both, Kind::UnsupportedModel, &[second]);

    let mut short = file();
    short.tensors.retain(|tensor| tensor.name != "blk.0.attn_gate.weight");
    short.f32("blk.0.attn_gate.weight", &[64, 64], &[0.0; 64 * 64]);
    let wrong = ["model.layers.0.linear_attn.in_proj_z.weight", "[64, 64]"];
    refused(&short, Kind::Parse, &wrong);

    for (key, value) in [
        ("ssm.group_count", 3),
        ("ssm.group_count", 0),
        ("ssm.state_size", u32::MAX),
    ] {
        let mut other = file();
        other.set(format!("qwen3next.{key}"), Meta::U32(value));
        refused(&other, Kind::Parse, &["linear_"]);
    }
}
