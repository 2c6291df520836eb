//! Splitting models into several files, and converting to several files.

use super::super::golden;
use super::{copy, entries, go_on, interop, same, sound};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::tools::shard::{compact, convert_to_shards, shard};
use cmf_gpu::{Kind, convert};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

#[test]
fn shards_hold_the_same_model_within_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    for (name, most, least_files) in [
        ("qwen2-q8_row-densemasks.cmf", 90_000, 4),
        ("qwen3_mtp-q8-appended.cmf", 120_000, 4),
        ("llama_tied-q8_row-sharded-00003-of-00003.cmf", 200_000, 4),
        ("qwen2-q4tp.cmf", 10_000_000, 1),
    ] {
        let target = TempDir::new_in(dir.path()).unwrap();
        let (paths, written) = shard(&interop(name), most, target.path(), &mut go_on).unwrap();
        assert!(paths.len() >= least_files, "{name}: {}", paths.len());
        assert_eq!(entries(target.path()), paths.len());
        let sizes: Vec<u64> = paths
            .iter()
            .map(|path| std::fs::metadata(path).unwrap().len())
            .collect();
        assert_eq!(sizes.iter().sum::<u64>(), written.bytes);
        for (path, size) in paths.iter().zip(sizes) {
            same(path, &interop(name));
            let own = CmfContainer::open(path).unwrap();
            let no = paths.iter().position(|other| other == path).unwrap();
            let tensors = own.payloads().iter().filter(|payload| payload.shard == no).count();
            assert!(size <= most || tensors == 1, "{}: {size} bytes", path.display());
        }
        let joined = target.path().join("joined.cmf");
        compact(&paths[paths.len() - 1], &joined, &mut go_on).unwrap();
        let direct = target.path().join("direct.cmf");
        compact(&interop(name), &direct, &mut go_on).unwrap();
        assert_eq!(std::fs::read(joined).unwrap(), std::fs::read(direct).unwrap(), "{name}");
    }
    // Named by the caller; the first file has the sections of the whole model.
    let (paths, _) = shard(
        &interop("qwen2-q4tp.cmf"),
        100_000,
        &dir.path().join("x.y.cmf"),
        &mut go_on,
    )
    .unwrap();
    let names: Vec<&str> = paths
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap())
        .collect();
    assert_eq!(names, ["x.y-00001-of-00002.cmf", "x.y-00002-of-00002.cmf"]);
    let again = shard(&paths[1], 100_000, &dir.path().join("x.y"), &mut go_on).unwrap_err();
    assert!(
        again.kind == Kind::Usage && again.message.contains("replace an input"),
        "{again}"
    );
    assert_eq!(
        shard(&paths[0], 0, dir.path(), &mut go_on).unwrap_err().kind,
        Kind::Usage
    );
}

/// Converts a golden model to files of at most `most` bytes.
fn converted(out: &Path, quant: Dtype, overrides: &[(&str, Dtype)], most: u64) -> Vec<PathBuf> {
    let options = convert::Options {
        overrides: overrides
            .iter()
            .map(|&(glob, dtype)| (glob.to_owned(), dtype))
            .collect(),
        ..convert::Options::new(quant)
    };
    let source = golden::dir("qwen3");
    let whole = out.join("whole.cmf");
    let going_on = |_: convert::Event| ControlFlow::Continue(());
    let one = convert::convert(&source, &whole, &options, &mut { going_on }).unwrap();
    let (many, paths) = convert_to_shards(&source, &out.join("parts"), most, &options, &mut { going_on }).unwrap();
    assert!(paths.len() > 2, "{}", paths.len());
    assert!(many.tensors == one.tensors && many.groups == one.groups);
    assert_eq!(entries(out), 1 + paths.len());
    let sizes = paths.iter().map(|path| std::fs::metadata(path).unwrap().len());
    assert!(sizes.clone().all(|size| size <= most) && sizes.sum::<u64>() == many.bytes);
    same(&paths[1], &whole);
    paths
}

#[test]
fn a_conversion_to_shards_equals_a_conversion_that_is_split() {
    let dir = tempfile::tempdir().unwrap();
    // Types of known size: the files are identical to those of a split.
    let paths = converted(dir.path(), Dtype::Q8Row, &[], 300_000);
    let split = tempfile::tempdir().unwrap();
    let base = split.path().join("parts");
    let (again, _) = shard(&dir.path().join("whole.cmf"), 300_000, &base, &mut go_on).unwrap();
    assert_eq!(again.len(), paths.len());
    for (a, b) in paths.iter().zip(&again) {
        assert!(
            std::fs::read(a).unwrap() == std::fs::read(b).unwrap(),
            "{}",
            a.display()
        );
    }
    // Types whose size depends on the weights.
    for (quant, other, most) in [(Dtype::VbitRo, Dtype::Q1s, 120_000), (Dtype::F16, Dtype::Q1t, 300_000)] {
        let dir = tempfile::tempdir().unwrap();
        converted(dir.path(), quant, &[("*.self_attn.*_proj.weight", other)], most);
    }
}

#[test]
fn a_failed_split_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let source = golden::dir("qwen3");
    let options = convert::Options::new(Dtype::VbitRo);
    let base = dir.path().join("parts");
    // Cancelled at every moment: with complete files, within a file, before the first.
    for stop in [1, 5, 12, 20] {
        let mut converting = |convert::Event::Tensor { done, total, .. }: convert::Event| {
            assert!(total > 20);
            match done == stop {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let err = convert_to_shards(&source, &base, 100_000, &options, &mut converting).unwrap_err();
        assert!(
            err.kind == Kind::Interrupted && err.message.contains("cancelled"),
            "{err}"
        );
        assert_eq!(entries(dir.path()), 0, "stopped at {stop}");
    }
    // A directory at the path of a late file; a missing output directory.
    let model = interop("qwen3_mtp-q8-appended.cmf");
    let (paths, _) = shard(&model, 120_000, &base, &mut go_on).unwrap();
    paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    std::fs::create_dir(paths.last().unwrap()).unwrap();
    let err = shard(&model, 120_000, &base, &mut go_on).unwrap_err();
    assert!(
        err.kind == Kind::Io && err.message.contains("not a regular file"),
        "{err}"
    );
    assert_eq!(entries(dir.path()), 1);
    let err = shard(&model, 120_000, &dir.path().join("missing/parts"), &mut go_on).unwrap_err();
    assert_eq!(err.kind, Kind::Io, "{err}");
    for out in ["..", "parts/"] {
        let err = shard(&model, 1 << 40, &dir.path().join("none").join(out), &mut go_on).unwrap_err();
        assert_eq!(err.kind, if out == ".." { Kind::Usage } else { Kind::Io }, "{err}");
    }
}

#[test]
fn exceeded_limits_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let model = interop("qwen2-q4tp.cmf");
    let (paths, written) = shard(&model, 1, dir.path(), &mut go_on).unwrap();
    assert_eq!(paths.len(), written.tensors, "a file for each tensor");
    assert_eq!(written.notes.len(), 1);
    assert!(
        written.notes[0].starts_with("38 of 38 files have more than 1 bytes"),
        "{:?}",
        written.notes
    );
    same(&paths[7], &model);
    let (paths, written) = shard(&model, u64::MAX, &dir.path().join("one"), &mut go_on).unwrap();
    assert!(paths.len() == 1 && written.notes.is_empty());
    same(&paths[0], &model);
}

#[test]
fn a_sibling_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = copy(&dir, "qwen2-q4tp.cmf");
    // The same network with one bit of a scale of the last tensor changed, and valid checksums.
    let tuned = dir.path().join("tuned.cmf");
    let from = sound(&model);
    let last = from.infos().len() - 1;
    let specs = from.infos().iter().map(|info| cmf_gpu::format::TensorSpec {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    });
    let header = from.header_json().clone();
    let sections = from.sections().unwrap();
    let mut writer = cmf_gpu::format::cmf::CmfWriter::create(&tuned, header, specs.collect(), sections).unwrap();
    for id in 0..=last {
        let mut bytes = from.bytes(id).unwrap().to_vec();
        bytes[0] ^= u8::from(id == last);
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap();
    let split = |model: &Path, dir: &str, most: u64| {
        let base = TempDir::with_prefix(dir).unwrap();
        let (paths, _) = shard(model, most, &base.path().join("m"), &mut go_on).unwrap();
        (base, paths)
    };
    let ((_a, ours), (_b, theirs)) = (split(&model, "a", 60_000), split(&tuned, "b", 60_000));
    assert!(ours.len() == theirs.len() && ours.len() > 2);
    assert_eq!(sound(&ours[0]).header().arch, sound(&theirs[0]).header().arch);
    let (last, opened) = (ours.len() - 1, |path: &PathBuf| CmfContainer::open(path).map(|_| ()));
    // Exchanges the first, a middle and the last shard; opens each of the files.
    for no in [0, 1, last] {
        let good = std::fs::read(&ours[no]).unwrap();
        std::fs::copy(&theirs[no], &ours[no]).unwrap();
        for path in [&ours[0], &ours[1], &ours[last]] {
            let err = opened(path).unwrap_err();
            assert!(
                err.kind == Kind::ShardMismatch && err.message.contains("shard.set differs"),
                "{no}: {err}"
            );
        }
        std::fs::write(&ours[no], good).unwrap();
        opened(&ours[no]).unwrap();
    }
    // The same model split differently: a mixed set may have duplicate or missing tensors.
    let ((_c, wide), (_d, narrow)) = (split(&model, "c", 100_000), split(&model, "d", 110_000));
    assert!(wide.len() == narrow.len() && std::fs::read(&wide[1]).unwrap() != std::fs::read(&narrow[1]).unwrap());
    std::fs::copy(&narrow[1], &wide[1]).unwrap();
    assert!(opened(&wide[0]).unwrap_err().message.contains("shard.set differs"));
    // Repeating the same split makes the same set.
    let (_e, again) = split(&model, "e", 60_000);
    std::fs::copy(&again[1], &ours[1]).unwrap();
    opened(&ours[0]).unwrap();
    let set = sound(&ours[1]).header_json()["shard"]["set"].clone();
    assert_eq!(set.as_str().map(str::len), Some(16));
    assert_eq!(
        sound(&ours[1]).header_json()["shard"],
        json!({"no": 1, "count": ours.len(), "set": set})
    );
}
