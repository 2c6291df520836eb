//! Mixtures of experts: their tensors in the container and their order, refused sources, and containers that contradict
//! themselves.

use crate::build::{Block, Copy, Gguf, Meta, converted, fixture, gguf_of, run, source_values, values};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::model::{FeedForward, Model, bind};
use cmf_gpu::source::{Arch, MemoryTensors, Moe};
use serde_json::{Value, json};
use tempfile::TempDir;

fn model_of(container: &CmfContainer) -> Model {
    bind(&container.header().arch, container).unwrap()
}

/// For each layer: experts, experts per token, width of the shared expert.
fn mixtures(model: &Model) -> Vec<Option<(usize, usize, Option<usize>)>> {
    let mixture = |ffn: &FeedForward| match ffn {
        FeedForward::Dense(_) => None,
        FeedForward::Moe(moe) => Some((
            moe.experts.len(),
            moe.top_k,
            moe.shared.as_ref().map(|ffn| ffn.down.cols),
        )),
    };
    model.layers.iter().map(|layer| mixture(&layer.ffn)).collect()
}

#[test]
fn headers_say_what_the_configuration_says() {
    let moe = |top_k, width, norm_topk_prob, shared| Moe {
        num_experts: 8,
        top_k,
        moe_intermediate_size: width,
        norm_topk_prob,
        shared_expert_intermediate_size: shared,
        router_sigmoid: false,
        routed_scaling_factor: 1.0,
    };
    let some = |top_k, shared| Some((8, top_k, shared));
    for (name, wanted, layers) in [
        (
            "qwen2_moe",
            moe(3, 96, false, Some(128)),
            vec![None, None, None, some(3, Some(128)), None, some(3, Some(128))],
        ),
        (
            "qwen3_moe",
            moe(2, 64, true, None),
            vec![None, some(2, None), some(2, None), some(2, None)],
        ),
        ("qwen3_next", moe(3, 32, true, Some(64)), vec![some(3, Some(64)); 4]),
        ("qwen3_5_moe", moe(3, 32, true, Some(64)), vec![some(3, Some(64)); 4]),
    ] {
        let (_dir, report, container) = converted(&fixture(name), Dtype::F16);
        assert!(report.dropped.is_empty(), "{:?}", report.dropped);
        assert_eq!(container.header().arch.moe, Some(wanted), "{name}");
        let model = model_of(&container);
        assert_eq!(mixtures(&model), layers, "{name}");
        assert!(model.unused.is_empty());
        if !name.contains("next") {
            assert!(values(&container) == source_values(name), "{name}");
        }
        // The other spelling of the same.
        let copy = Copy::of(name);
        let other = fixture(name).join("config.v5.json");
        std::fs::copy(other, copy.path().join("config.json")).unwrap();
        let (_dir, _, other) = converted(copy.path(), Dtype::F16);
        assert_eq!(other.header_json()["arch"], container.header_json()["arch"], "{name}");
    }
}

#[test]
fn experts_are_written_role_by_role() {
    let (_dir, _, container) = converted(&fixture("qwen2_moe"), Dtype::Q4tp);
    let prefix = "model.layers.3.mlp.";
    let found = container
        .infos()
        .iter()
        .filter_map(|info| info.name.strip_prefix(prefix));
    let experts = |role: &'static str| (0..8).map(move |expert| format!("experts.{expert}.{role}.weight"));
    let shared = ["gate_proj", "up_proj", "down_proj"].map(|role| format!("shared_expert.{role}.weight"));
    let wanted = ["gate.weight".to_owned()]
        .into_iter()
        .chain(experts("gate_proj"))
        .chain(experts("up_proj"))
        .chain(experts("down_proj"))
        .chain(shared)
        .chain(["shared_expert_gate.weight".to_owned()]);
    assert!(found.eq(wanted));
    // Routers have more bits than experts.
    for info in container.infos().iter().filter(|info| info.name.starts_with(prefix)) {
        let routes = ["gate.weight", "shared_expert_gate.weight"].contains(&&info.name[prefix.len()..]);
        let wanted = if routes { Dtype::F16 } else { Dtype::Q4tp };
        assert_eq!(info.dtype, wanted, "{}", info.name);
    }
}

#[test]
fn experts_in_one_tensor_are_taken_apart() {
    let (_dir, _, plain) = converted(&fixture("qwen3_5_moe"), Dtype::F16);
    let (_dir, report, published) = converted(&fixture("qwen3_5_moe_hub"), Dtype::F16);
    assert!(report.dropped.is_empty(), "{:?}", report.dropped);
    assert!(values(&plain) == values(&published));
    assert_eq!(plain.infos(), published.infos());
    assert_eq!(plain.header_json()["arch"], published.header_json()["arch"]);
}

#[test]
fn dense_members_of_these_families_are_dense() {
    let copy = Copy::of("qwen3_moe");
    let mut tensors = source_values("qwen3_moe");
    let dense = tensors
        .iter()
        .filter(|(name, _)| name.starts_with("model.layers.0.mlp."));
    let dense: Vec<_> = dense.map(|(name, value)| (name.clone(), value.clone())).collect();
    tensors.retain(|name, _| !name.contains(".mlp."));
    for layer in 0..4 {
        let renamed = |name: &str| name.replace("layers.0.", &format!("layers.{layer}."));
        tensors.extend(dense.iter().map(|(name, value)| (renamed(name), value.clone())));
    }
    copy.tensors(&tensors);
    copy.edit("config.json", |config| {
        drop(config.insert("mlp_only_layers".into(), json!([0, 1, 2, 3])))
    });
    let (_dir, _, container) = converted(copy.path(), Dtype::F16);
    assert_eq!(container.header().arch.moe, None);
    assert_eq!(mixtures(&model_of(&container)), [None; 4]);
}

fn refused(copy: &Copy, kind: Kind, what: &str) {
    let err = run(copy.path(), &copy.path().join("out.cmf"), Dtype::F16).unwrap_err();
    assert_eq!(err.kind, kind, "{err}");
    assert!(err.message.contains(what), "{err}");
}

#[test]
fn configurations_and_tensors_have_to_agree() {
    let with = |key: &str, value: Value| {
        let copy = Copy::of("qwen3_moe");
        copy.edit("config.json", |config| drop(config.insert(key.to_owned(), value)));
        copy
    };
    let router = "model.layers.0.mlp.gate.weight";
    refused(&with("mlp_only_layers", json!([])), Kind::MissingTensor, router);
    let dense = with("decoder_sparse_step", json!(2));
    refused(&dense, Kind::UnsupportedModel, "model.layers.2.mlp.gate.weight");
    refused(&with("mlp_only_layers", json!("0")), Kind::Parse, "mlp_only_layers");
    refused(
        &with("num_experts", json!(9)),
        Kind::Parse,
        "model.layers.1.mlp.gate.weight",
    );
    refused(&with("num_experts_per_tok", json!(9)), Kind::Parse, "moe.top_k");
    refused(&with("num_experts", Value::Null), Kind::UnsupportedModel, "num_experts");
    refused(
        &with("moe_intermediate_size", json!(32)),
        Kind::Parse,
        "experts.0.gate_proj",
    );

    let copy = Copy::of("qwen3_moe");
    let mut tensors = source_values("qwen3_moe");
    let lost = "model.layers.2.mlp.experts.5.up_proj.weight";
    tensors.remove(lost).unwrap();
    copy.tensors(&tensors);
    refused(&copy, Kind::MissingTensor, lost);

    let copy = Copy::of("qwen3_5_moe_hub");
    copy.edit("config.json", |config| {
        config["text_config"]["moe_intermediate_size"] = json!(64);
    });
    refused(&copy, Kind::Parse, "mlp.experts.");
}

/// A GGUF file of this model as other converters write it: the experts of a layer in one tensor each.
fn stacked(model: &str) -> Gguf {
    let mut file = gguf_of(model);
    let mut all: Vec<Block> = Vec::new();
    let mut experts: std::collections::BTreeMap<String, Vec<(usize, Block)>> = Default::default();
    for mut block in std::mem::take(&mut file.tensors) {
        if let Some((layer, rest)) = block.name.split_once(".mlp.experts.") {
            let (expert, role) = rest.split_once('.').unwrap();
            let role = role.replace("_proj", "_exps");
            let name = format!("{layer}.ffn_{role}");
            experts.entry(name).or_default().push((expert.parse().unwrap(), block));
            continue;
        }
        for (from, to) in [
            ("mlp.gate.", "ffn_gate_inp."),
            ("mlp.shared_expert_gate.", "ffn_gate_inp_shexp."),
            ("mlp.shared_expert.gate_proj.", "ffn_gate_shexp."),
            ("mlp.shared_expert.up_proj.", "ffn_up_shexp."),
            ("mlp.shared_expert.down_proj.", "ffn_down_shexp."),
        ] {
            block.name = block.name.replace(from, to);
        }
        if block.name.contains("gate_inp_shexp") {
            // As a vector.
            block.dims.truncate(1);
        }
        all.push(block);
    }
    for (name, mut blocks) in experts {
        blocks.sort_by_key(|(expert, _)| *expert);
        let dims = [&blocks[0].1.dims[..], &[blocks.len() as u64]].concat();
        let data = blocks.iter().flat_map(|(_, block)| block.data.clone()).collect();
        all.push(Block {
            name,
            dims,
            kind: 0,
            data,
            offset: None,
        });
    }
    file.tensors = all;
    file
}

#[test]
fn gguf_files_give_the_same_network() {
    for (model, arch, top_k) in [("qwen2_moe", "qwen2moe", 3), ("qwen3_moe", "qwen3moe", 2)] {
        let (_dir, _, wanted) = converted(&fixture(model), Dtype::F16);
        let mut file = stacked(model);
        file.set(format!("{arch}.expert_count"), Meta::U32(8));
        file.set(format!("{arch}.expert_used_count"), Meta::U32(top_k));
        let convert = |file: &Gguf| {
            let dir = TempDir::new().unwrap();
            let path = dir.path().join("model.gguf");
            std::fs::write(&path, file.bytes()).unwrap();
            (converted(&path, Dtype::F16), dir)
        };
        let ((_out, report, found), _dir) = convert(&file);
        assert!(report.dropped.is_empty());
        assert!(values(&found) == values(&wanted), "{model}: values differ");
        assert_eq!(found.infos(), wanted.infos(), "{model}");
        assert_eq!(found.header().arch, wanted.header().arch, "{model}");
        // Widths in the keys must be those of the tensors.
        file.set(format!("{arch}.expert_feed_forward_length"), Meta::U32(32));
        let path = _dir.path().join("wrong.gguf");
        std::fs::write(&path, file.bytes()).unwrap();
        let err = run(&path, &_dir.path().join("out.cmf"), Dtype::F16).unwrap_err();
        assert_eq!(err.kind, Kind::Parse, "{err}");
        file.set(format!("{arch}.expert_gating_func"), Meta::U32(2));
        std::fs::write(&path, file.bytes()).unwrap();
        let err = run(&path, &_dir.path().join("out.cmf"), Dtype::F16).unwrap_err();
        assert!(err.message.contains("expert_gating_func"), "{err}");
    }
}

/// Binds qwen3_moe with its tensors and header changed.
fn bound(
    change: impl Fn(&str, &mut Dtype, &mut Vec<u64>, &mut Vec<u8>) -> bool,
    arch: impl Fn(&mut Arch),
) -> cmf_gpu::Result<Model> {
    let (_dir, _, container) = converted(&fixture("qwen3_moe"), Dtype::F16);
    let mut header = container.header().arch.clone();
    arch(&mut header);
    let tensors = container.infos().iter().enumerate().filter_map(|(id, info)| {
        let (mut dtype, mut shape) = (info.dtype, info.shape.clone());
        let mut payload = container.bytes(id).unwrap().to_vec();
        change(&info.name, &mut dtype, &mut shape, &mut payload).then(|| (info.name.clone(), dtype, shape, payload))
    });
    bind(&header, &MemoryTensors::new(tensors).unwrap())
}

#[test]
fn containers_have_to_have_the_experts_that_their_routers_know() {
    let is = |err: cmf_gpu::Error, kind: Kind, what: &str| {
        assert_eq!(err.kind, kind, "{err}");
        assert!(err.message.contains(what), "{err}");
    };
    let all = |_: &str, _: &mut Dtype, _: &mut Vec<u64>, _: &mut Vec<u8>| true;
    let same = |_: &mut Arch| {};
    assert!(bound(all, same).is_ok());
    is(bound(all, |arch| arch.moe = None).unwrap_err(), Kind::Parse, "arch.moe");
    let fewer = |arch: &mut Arch| arch.moe.as_mut().unwrap().num_experts = 7;
    is(bound(all, fewer).unwrap_err(), Kind::Parse, "8 rows");
    let without =
        |lost: &'static str| move |name: &str, _: &mut Dtype, _: &mut Vec<u64>, _: &mut Vec<u8>| !name.contains(lost);
    for lost in [
        "model.layers.2.mlp.experts.3.gate_proj.weight",
        "model.layers.1.mlp.experts.7.down_proj.weight",
    ] {
        is(bound(without(lost), same).unwrap_err(), Kind::MissingTensor, lost);
    }
    // A router of 7 rows beside 8 experts.
    let cut = |name: &str, _: &mut Dtype, shape: &mut Vec<u64>, payload: &mut Vec<u8>| {
        if name == "model.layers.1.mlp.gate.weight" {
            shape[0] -= 1;
            payload.truncate(7 * 64 * 2);
        }
        true
    };
    is(
        bound(cut, same).unwrap_err(),
        Kind::Parse,
        "model.layers.1.mlp.experts.7.gate_proj.weight",
    );
    // One expert is half as wide.
    let narrow = |name: &str, _: &mut Dtype, shape: &mut Vec<u64>, payload: &mut Vec<u8>| {
        if name.contains("layers.1.mlp.experts.4.") {
            let at = if name.contains("down_proj") { 1 } else { 0 };
            shape[at] /= 2;
            payload.truncate(payload.len() / 2);
        }
        true
    };
    is(
        bound(narrow, same).unwrap_err(),
        Kind::UnsupportedModel,
        "expert 4 is 32 wide",
    );
    // At most as many experts per token as there are.
    let many = |arch: &mut Arch| {
        let moe = arch.moe.as_mut().unwrap();
        (moe.num_experts, moe.top_k) = (100, 20);
    };
    let model = bound(all, many).unwrap();
    assert_eq!(mixtures(&model)[1], Some((8, 8, None)));
}
