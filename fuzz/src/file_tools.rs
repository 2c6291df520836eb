//! The work of the targets `tools` and `shards`. Does not depend on the fuzzer.

use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::{SkillView, Tensors};
use cmf_gpu::tools::defrag::defrag;
use cmf_gpu::tools::moe::{self, Narrowing, RoutingStats};
use cmf_gpu::tools::shard::{compact, shard};
use cmf_gpu::tools::sign;
use serde_json::{Map, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Checks a file that a tool wrote: it can be opened, and its checksums match if those of its source did (`source_ok`).
fn check_output(path: &Path, source_ok: bool) {
    let container = CmfContainer::open(path).expect("the output of a tool can be opened");
    let report = container.verify(&mut |_, _| {});
    assert!(!source_ok || report.failures.is_empty(), "{:?}", report.failures);
}

/// Runs the tools on the container at `path` and checks their outputs, which go to `dir`.
pub fn use_tools(path: &Path, dir: &Path) {
    let Ok(container) = CmfContainer::open(path) else {
        return;
    };
    let source_ok = container.verify(&mut |_, _| {}).failures.is_empty();
    for skill in container.skills().iter().take(4) {
        if let Ok(view) = SkillView::new(&container, container.skills(), Some(&skill.id)) {
            for id in 0..view.infos().len() {
                let _ = view.stored(id);
            }
        }
    }
    let out = dir.join("out.cmf");
    if compact(path, &out, &mut go_on).is_ok() {
        check_output(&out, source_ok);
    }
    let bytes = container.file_bytes();
    if let Ok((paths, _)) = shard(path, bytes / 3 + 1, &dir.join("split"), &mut go_on) {
        check_output(&paths[0], source_ok);
        paths.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
    let masks = container
        .masks()
        .map(|masks| masks.masks.as_slice())
        .unwrap_or_default();
    for mask in masks.iter().take(4) {
        if defrag(path, &mask.name, true, &out, &mut go_on).is_ok() {
            check_output(&out, source_ok);
        }
    }
    // Expert number n was chosen n times.
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
        check_output(&out, source_ok);
    }
    if moe::defrag(path, &narrowing, &out, &mut go_on).is_ok() {
        check_output(&out, source_ok);
    }
}

/// Opens a model by each of its two shards, reads all tensors, and checks the signature next to the first shard.
pub fn use_shards(paths: &[PathBuf; 2]) {
    for path in paths {
        if let Ok(container) = CmfContainer::open(path) {
            let _ = container.verify(&mut |_, _| {});
            for id in 0..container.infos().len() {
                let _ = container.bytes(id);
            }
        }
    }
    let _ = sign::check(&paths[..1], None, &mut go_on);
}
