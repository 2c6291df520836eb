//! What the targets `tools` and `parts` do with files. Knows no fuzzer.

use cmf_gpu::container::{Container, SkillView, Tensors};
use cmf_gpu::tools::compact::compact;
use cmf_gpu::tools::defrag::defrag;
use cmf_gpu::tools::moe::{self, Narrowing, RoutingStats};
use cmf_gpu::tools::shard::shard;
use cmf_gpu::tools::sign;
use serde_json::{Map, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// What a tool wrote can be opened, and nothing in it is damaged that was not before.
fn sound(path: &Path, was: bool) {
    let container = Container::open(path).expect("what a tool writes can be opened");
    let report = container.verify(&mut |_, _| {});
    assert!(!was || report.failures.is_empty(), "{:?}", report.failures);
}

/// Skills, copies, splits and cuts of the container at `path`; results go to `dir`.
pub fn use_tools(path: &Path, dir: &Path) {
    let Ok(container) = Container::open(path) else { return };
    let was = container.verify(&mut |_, _| {}).failures.is_empty();
    for skill in container.skills().iter().take(4) {
        if let Ok(view) = SkillView::new(&container, Some(&skill.id)) {
            for id in 0..view.infos().len() {
                let _ = view.bytes(id);
            }
        }
    }
    let out = dir.join("out.cmf");
    if compact(path, &out, &mut go_on).is_ok() {
        sound(&out, was);
    }
    let bytes = container.file_bytes();
    if let Ok((paths, _)) = shard(path, bytes / 3 + 1, &dir.join("split"), &mut go_on) {
        sound(&paths[0], was);
        paths.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
    let masks = container
        .masks()
        .map(|masks| masks.masks.as_slice())
        .unwrap_or_default();
    for mask in masks.iter().take(4) {
        if defrag(path, &mask.name, true, &out, &mut go_on).is_ok() {
            sound(&out, was);
        }
    }
    // Every expert chosen as often as its number says.
    let mut layers = Map::new();
    for info in container.infos() {
        let layer = info
            .name
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split_once('.'));
        if let Some((layer, "mlp.gate.weight")) = layer {
            let experts = info.rows_cols().0.min(4096);
            layers.insert(layer.to_owned(), (0..experts).collect::<Vec<usize>>().into());
        }
    }
    let Ok(stats) = RoutingStats::parse(json!({ "layers": layers }).to_string().as_bytes()) else {
        return;
    };
    let narrowing = Narrowing { stats, cover: 0.75 };
    if moe::mask(path, &narrowing, "fuzzed", &out, &mut go_on).is_ok() {
        sound(&out, was);
    }
    if moe::defrag(path, &narrowing, &out, &mut go_on).is_ok() {
        sound(&out, was);
    }
}

/// Both files of a model, from either side, and the signature that lies beside the first.
pub fn use_parts(paths: &[PathBuf; 2]) {
    for path in paths {
        if let Ok(container) = Container::open(path) {
            let _ = container.verify(&mut |_, _| {});
            for id in 0..container.infos().len() {
                let _ = container.bytes(id);
            }
        }
    }
    let _ = sign::check(&paths[..1], None, &mut go_on);
}
