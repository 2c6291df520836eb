//! Quantised sources whose values are kept, and rotated weights.

use crate::build::{Gguf, fixture, run, values};
use crate::sources::{as_gguf, best_after, bytes, logits, random_model, write};
use cmf_gpu::convert::{Options, Report, convert, quantised};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::{self, ModelSource};
use cmf_gpu::{Kind, Result};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const PROMPT: [u32; 7] = [1, 2, 3, 5, 8, 13, 21];

fn convert_with(src: &Path, out: &Path, options: &Options) -> Result<Report> {
    convert(src, out, options, &mut |_| ControlFlow::Continue(()))
}

fn keeping(src: &Path, out: &Path) -> (Report, CmfContainer) {
    let report = convert_with(src, out, &Options::keeping()).unwrap();
    let container = CmfContainer::open(out).unwrap();
    assert!(container.verify(&mut |_, _| {}).ok());
    (report, container)
}

/// The bits of the values of every matrix of a model, as it runs from its own file.
fn bits(source: &ModelSource) -> BTreeMap<String, Vec<u32>> {
    let matrices = source.tensors.infos().iter().enumerate();
    let matrices = matrices.filter(|(_, info)| info.shape.len() > 1);
    let decode = |(id, info): (usize, &source::TensorInfo)| {
        let stored = source.tensors.stored(id).unwrap();
        let (rows, cols) = info.rows_cols();
        let decoder = stored.decoder().unwrap();
        let mut values = vec![0f32; rows * cols];
        let all = values.chunks_mut(cols).enumerate();
        all.for_each(|(row, out)| decoder.row(row, out));
        (info.name.clone(), values.into_iter().map(f32::to_bits).collect())
    };
    matrices.map(decode).collect()
}

fn written_bits(container: &CmfContainer) -> BTreeMap<String, Vec<u32>> {
    let matrices = values(container).into_iter().filter(|(_, (shape, _))| shape.len() > 1);
    matrices
        .map(|(name, (_, values))| (name, values.into_iter().map(f32::to_bits).collect()))
        .collect()
}

/// The types of the matrices.
fn types(container: &CmfContainer) -> BTreeMap<&str, Dtype> {
    let matrices = container.infos().iter().filter(|info| info.shape.len() > 1);
    matrices.map(|info| (info.name.as_str(), info.dtype)).collect()
}

/// Replaces bytes of every matrix.
fn edit(mut file: Gguf, edit: impl Fn(&mut [u8])) -> Gguf {
    let matrices = file.tensors.iter_mut().filter(|tensor| tensor.dims.len() > 1);
    matrices.for_each(|tensor| edit(&mut tensor.data));
    file
}

/// A code −128 does not fit; files that programs write have none.
fn without_lowest(data: &mut [u8]) {
    for block in data.chunks_mut(34) {
        block[2..]
            .iter_mut()
            .filter(|code| **code == 0x80)
            .for_each(|code| *code = 0x81);
    }
}

/// Of the codes 3, which mean +2, one of each block is left.
fn few_large(data: &mut [u8]) {
    for block in data.chunks_mut(34) {
        for byte in &mut block[2..] {
            let pairs = (0..4).map(|at| *byte >> (2 * at) & 3).map(|code| code.min(2));
            *byte = pairs.enumerate().fold(0, |byte, (at, code)| byte | code << (2 * at));
        }
        block[9] |= 0x0C;
    }
}

/// The values are the same bits, with a scale of either sign, and the tokens are the same.
#[test]
fn every_kept_type_has_the_same_bits_and_tokens() {
    let dir = TempDir::new().unwrap();
    let (path, out) = (dir.path().join("model.gguf"), dir.path().join("model.cmf"));
    for (dtype, kept, change) in [
        (Dtype::Q4_0, Dtype::Q4Tiled, None),
        (Dtype::Q5_0, Dtype::VbitRo, None),
        (Dtype::Q8_0, Dtype::VbitRo, Some(without_lowest as fn(&mut [u8]))),
        (Dtype::TQ1_0, Dtype::Q1t, None),
        (Dtype::PTQ1_0, Dtype::Q1t, None),
        (Dtype::PQ2_0, Dtype::Q4Tiled, None),
        (Dtype::PQ2_0, Dtype::Q1t, Some(few_large)),
        (Dtype::TQ2_0, Dtype::Q4Tiled, None),
    ] {
        let file = match change {
            Some(change) => edit(random_model(dtype), change),
            None => random_model(dtype),
        };
        std::fs::write(&path, file.bytes()).unwrap();
        let source = source::open(&path).unwrap();
        let (report, container) = keeping(&path, &out);
        let name = dtype.name();
        assert!(
            types(&container).values().all(|found| *found == kept),
            "{name}: {:?}",
            types(&container)
        );
        assert!(bits(&source) == written_bits(&container), "{name}: other values");
        assert_eq!(report.kept.tensors, bits(&source).len(), "{name}");
        assert_eq!((report.again.tensors, report.kept.relative_error()), (0, 0.0), "{name}");
        let sizes = container
            .infos()
            .iter()
            .filter(|info| info.shape.len() > 1)
            .map(|info| info.nbytes);
        assert_eq!(report.kept.bytes, sizes.sum::<u64>());
        let sizes = source
            .tensors
            .infos()
            .iter()
            .filter(|info| info.shape.len() > 1)
            .map(|info| info.nbytes);
        assert_eq!(report.kept.source_bytes, sizes.sum::<u64>());
        assert_eq!(container.header_json()["quant_type"], kept.name().to_uppercase());
        for on_device in [true, false] {
            let tokens: Vec<u32> = (0..24).map(|i| i * i * 5 % 61).collect();
            let wanted = best_after(&source, &tokens, on_device);
            let found = best_after(&source::open(&out).unwrap(), &tokens, on_device);
            assert_eq!(found, wanted, "{name}");
        }
    }
}

/// Rows and columns that a file has in another order keep their values too, unless heads cut through groups.
#[test]
fn reordered_matrices_are_kept() {
    let dir = TempDir::new().unwrap();
    let (path, out) = (dir.path().join("model.gguf"), dir.path().join("model.cmf"));
    for (model, file, cut) in [
        ("llama_tied", as_gguf("llama_tied"), false),
        ("qwen3_5", as_gguf("qwen3_5"), false),
        ("eight heads", crate::recurrent::gguf_with_eight_heads(), true),
    ] {
        write(file, 8, bytes, &path);
        let (report, container) = keeping(&path, &out);
        // The same values without quantisation, from the reader that undoes every order.
        let plain = dir.path().join("plain.cmf");
        run(&path, &plain, Dtype::F32).unwrap();
        let wanted = written_bits(&CmfContainer::open(&plain).unwrap());
        let found = written_bits(&container);
        let types = types(&container);
        let kept = types.iter().filter(|(_, dtype)| **dtype == Dtype::VbitRo);
        let mut count = 0;
        for (name, _) in kept {
            count += 1;
            assert!(found[*name] == wanted[*name], "{model}: {name}");
        }
        assert_eq!(count, report.kept.tensors, "{model}");
        assert!(count > 6, "{model}: {count}");
        assert_eq!(report.again.tensors > 0, cut, "{model}: {types:?}");
        assert_eq!(report.again.relative_error() > 0.01, cut, "{model}");
    }
}

#[test]
fn what_does_not_fit_is_quantised_again_and_reported() {
    let dir = TempDir::new().unwrap();
    let (path, out) = (dir.path().join("model.gguf"), dir.path().join("model.cmf"));
    let lowest = |data: &mut [u8]| data[2] = 0x80;
    for file in [
        random_model(Dtype::Q4_1),
        random_model(Dtype::Q6_K),
        random_model(Dtype::IQ4_NL),
        edit(random_model(Dtype::Q8_0), lowest),
    ] {
        std::fs::write(&path, file.bytes()).unwrap();
        let (report, container) = keeping(&path, &out);
        assert_eq!(
            (report.kept.tensors, report.again.tensors),
            (0, types(&container).len())
        );
        assert!(
            (0.001..0.2).contains(&report.again.relative_error()),
            "{}",
            report.again.relative_error()
        );
        assert_eq!(container.header_json()["quant_type"], "Q4TP");
        // f32 holds everything.
        let report = run(&path, &out, Dtype::F32).unwrap();
        assert_eq!(
            (report.kept.tensors, report.again.tensors),
            (types(&container).len(), 0)
        );
    }
    let infinite = edit(random_model(Dtype::Q4_0), |data| data[..2].copy_from_slice(&[0, 0x7C]));
    std::fs::write(&path, infinite.bytes()).unwrap();
    let err = convert_with(&path, &out, &Options::keeping()).unwrap_err();
    assert!(
        err.kind == Kind::NonFinite && err.message.contains("row 0, column 0"),
        "{err}"
    );
}

/// A type for all matrices or for one decides as before.
#[test]
fn explicit_types_win() {
    let dir = TempDir::new().unwrap();
    let (path, out) = (dir.path().join("model.gguf"), dir.path().join("model.cmf"));
    std::fs::write(&path, random_model(Dtype::Q4_0).bytes()).unwrap();
    let mut options = Options::keeping();
    options.overrides.push(("*.down_proj.weight".into(), Dtype::Q8Row));
    let report = convert_with(&path, &out, &options).unwrap();
    assert_eq!(report.again.tensors, 1);
    let container = CmfContainer::open(&out).unwrap();
    let found = types(&container);
    assert_eq!(found["model.layers.0.mlp.down_proj.weight"], Dtype::Q8Row);
    assert_eq!(found["model.layers.0.mlp.up_proj.weight"], Dtype::Q4Tiled);
    let report = run(&path, &out, Dtype::VbitRo).unwrap();
    assert_eq!(report.kept.tensors, 0);
    // A container keeps the types that it has.
    let again = dir.path().join("again.cmf");
    let (report, copied) = keeping(&out, &again);
    let container = CmfContainer::open(&out).unwrap();
    assert_eq!(copied.infos(), container.infos());
    assert!(written_bits(&copied) == written_bits(&container));
    assert_eq!(report.again.tensors, 0);
    // Matrices that are not quantised have the default type.
    let (report, container) = keeping(&fixture("qwen3"), &out);
    let (direct, wanted) = (dir.path().join("direct.cmf"), Dtype::Q4tp);
    run(&fixture("qwen3"), &direct, wanted).unwrap();
    assert_eq!(container.infos(), CmfContainer::open(&direct).unwrap().infos());
    assert_eq!((report.kept.tensors, report.again.tensors), (0, 0));
}

fn ternary(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/ternary")
        .join(name)
}

/// The recorded prompts of a network, and the tokens that follow each.
fn recorded(name: &str) -> Vec<[Vec<u32>; 2]> {
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(ternary(name)).unwrap()).unwrap();
    let prompts = json["prompts"].as_array().unwrap().iter();
    let ids = |value: &serde_json::Value| serde_json::from_value::<Vec<u32>>(value.clone()).unwrap();
    prompts
        .map(|prompt| [ids(&prompt["prompt"]), ids(&prompt["greedy"])])
        .collect()
}

/// Bit 7 of the features: some matrices are rotated.
fn says_rotated(path: &Path) -> bool {
    std::fs::read(path).unwrap()[0x0C] & 0x80 != 0
}

fn answers_as_recorded(path: &Path, name: &str) {
    for (index, [prompt, greedy]) in recorded(name).into_iter().enumerate() {
        for on_device in [true, false] {
            let source = source::open(path).unwrap();
            let tokens = [&prompt[..], &greedy[..greedy.len() - 1]].concat();
            let found = best_after(&source, &tokens, on_device);
            assert_eq!(found[prompt.len() - 1..], greedy, "{name}: prompt {index}");
        }
    }
}

#[test]
fn rotated_weights_keep_their_codes_and_their_rotation() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("model.cmf");
    for (file, golden) in [
        ("dense-pq2_0.gguf", "dense.json"),
        ("hybrid-ptq1_0.gguf", "hybrid.json"),
    ] {
        let source = source::open(&ternary(file)).unwrap();
        let (report, container) = keeping(&ternary(file), &out);
        let rotation = source.arch.prism_hadamard.clone().unwrap();
        assert_eq!(container.header().arch.prism_hadamard.as_ref(), Some(&rotation));
        assert!(says_rotated(&out));
        let (wanted, found) = (bits(&source), written_bits(&container));
        let types = types(&container);
        for name in rotation.forward.iter().chain(&rotation.inverse) {
            assert_eq!(types[name.as_str()], Dtype::Q1t, "{name}");
            assert!(wanted[name] == found[name], "{file}: {name}");
        }
        assert_eq!(report.kept.tensors, rotation.forward.union(&rotation.inverse).count());
        assert_eq!((report.again.tensors, report.unrotated.tensors), (0, 0));
        answers_as_recorded(&out, golden);
    }
}

#[test]
fn a_type_for_all_matrices_undoes_the_rotation() {
    let dir = TempDir::new().unwrap();
    let [kept, direct, indirect] = ["kept", "direct", "indirect"].map(|name| dir.path().join(name));
    for (file, golden) in [
        ("dense-pq2_0.gguf", "dense.json"),
        ("hybrid-ptq1_0.gguf", "hybrid.json"),
    ] {
        let rotated = keeping(&ternary(file), &kept).0.kept.tensors;
        for quant in [Dtype::F32, Dtype::Q8Row] {
            let report = run(&ternary(file), &direct, quant).unwrap();
            assert_eq!((report.unrotated.tensors, report.kept.tensors), (rotated, 0));
            assert_eq!(report.unrotated.relative_error() > 0.0, quant == Dtype::Q8Row);
            assert!(report.unrotated.relative_error() < 0.02);
            let container = CmfContainer::open(&direct).unwrap();
            assert_eq!(container.header().arch.prism_hadamard, None);
            assert!(!says_rotated(&direct) && says_rotated(&kept));
            // From the file that keeps the rotation comes the same.
            run(&kept, &indirect, quant).unwrap();
            let again = CmfContainer::open(&indirect).unwrap();
            assert!(written_bits(&container) == written_bits(&again), "{file}");
            // So does loading in that type.
            let loaded = quantised(&ternary(file), Options::new(quant)).unwrap();
            assert_eq!(loaded.arch.prism_hadamard, None);
            let of = |source: ModelSource| logits(source, &PROMPT, false);
            assert!(of(loaded) == of(source::open(&direct).unwrap()), "{file}");
            if quant == Dtype::F32 {
                answers_as_recorded(&direct, golden);
            }
        }
    }
}

/// A container cannot state the rotation of a matrix that it joins with another one.
#[test]
fn rotations_that_cannot_be_stated_are_refused() {
    let dir = TempDir::new().unwrap();
    let (kept, broken) = (dir.path().join("kept.cmf"), dir.path().join("broken.cmf"));
    keeping(&ternary("dense-pq2_0.gguf"), &kept);
    let text = std::fs::read(&kept).unwrap();
    let name: &[u8] = b"model.layers.1.mlp.up_proj.weight";
    assert!(text.windows(name.len()).any(|window| window == name));
    // A name that no tensor has, of the same length, in the header's list.
    let options = Options::keeping();
    let mut header = CmfContainer::open(&kept).unwrap().header_json().clone();
    header["arch"]["prism_hadamard"]["forward_weight_names"][0] = "model.layers.9.mlp.up_proj.weight".into();
    let container = CmfContainer::open(&kept).unwrap();
    let specs = container.infos().iter().map(|info| cmf_gpu::format::TensorSpec {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    });
    header.retain(|key, _| !["format", "version", "section_hashes"].contains(&key.as_str()));
    let sections = cmf_gpu::format::cmf::Sections::default();
    let mut writer = cmf_gpu::format::cmf::CmfWriter::create(&broken, header, specs.collect(), sections).unwrap();
    for id in 0..container.infos().len() {
        writer.write(container.bytes(id).unwrap()).unwrap();
    }
    writer.finish().unwrap();
    for options in [options, Options::new(Dtype::F16)] {
        let err = convert_with(&broken, &dir.path().join("out.cmf"), &options).unwrap_err();
        assert!(
            err.kind == Kind::UnsupportedFeature && err.message.contains("layers.9.mlp"),
            "{err}"
        );
        assert!(!dir.path().join("out.cmf").exists());
    }
}
