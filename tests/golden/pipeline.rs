//! The golden text-to-image pipeline: a diffusers directory, and the containers that two other programs made of it.
//!
//! `scripts/pack-goldens` writes `tests/fixtures/lumina`. Weights are packed like those of the models. A packed container
//! names the weights and the files of the directory that it contains, so that only the rest of its bytes is stored.

use super::{Weight, Weights, split};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The prefix of a component's tensors in a container, and its folder.
const COMPONENTS: [(&str, &str); 3] = [("te", "text_encoder"), ("dit", "transformer"), ("vae", "vae")];

/// A conforming container with all weights in f16.
pub const F16: &str = "lumina_a.f16.cmf";

/// What the format's reference tool writes: q4_tiled, q8_row, f16 and f32, a header of defaults, no scheduler.
pub const REFERENCE_Q4T: &str = "lumina_a.reference-q4t.cmf";

/// The directory of the packed files and of the recorded pictures.
pub fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lumina")
}

/// A directory with everything in its original form, unpacked on first use: `pipeline/`, [`F16`] and [`REFERENCE_Q4T`].
fn unpacked() -> PathBuf {
    let Some(temporary) = option_env!("CARGO_TARGET_TMPDIR") else {
        panic!("only integration tests have a directory for this");
    };
    // The files never change without their sum.
    let sum = packed_files(&fixture()).iter().fold(0, |sum, path| {
        sum ^ cmf_gpu::format::hash64(&std::fs::read(fixture().join(path)).unwrap())
    });
    let place = Path::new(temporary).join(format!("lumina-{sum:016x}"));
    if !place.exists() {
        let made = tempfile::tempdir_in(temporary).unwrap();
        unpack(made.path());
        let renamed = std::fs::rename(made.path(), &place);
        assert!(
            renamed.is_ok() || place.exists(),
            "{} cannot be created",
            place.display()
        );
    }
    place
}

/// The diffusers directory.
pub fn dir() -> PathBuf {
    unpacked().join("pipeline")
}

/// A container, by its name.
pub fn container(name: &str) -> PathBuf {
    unpacked().join(name)
}

/// All files in a folder and its folders, as paths from it.
fn packed_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => files.push(path.strip_prefix(folder).unwrap().to_owned()),
            }
        }
    }
    files
}

fn unpack(to: &Path) {
    let (mut weights, mut containers) = (HashMap::new(), Vec::new());
    for path in packed_files(&fixture()) {
        if !path.starts_with("pipeline") {
            containers.extend((path.extension().unwrap() == "packed").then_some(path));
            continue;
        }
        let (from, target) = (fixture().join(&path), to.join(&path));
        let folder = target.parent().unwrap();
        std::fs::create_dir_all(folder).unwrap();
        if path.extension().unwrap() != "packed" {
            std::fs::copy(from, target).unwrap();
            continue;
        }
        let read = Weights::read(&from);
        std::fs::write(target.with_extension("safetensors"), read.file()).unwrap();
        let mut components = COMPONENTS.iter();
        let (prefix, _) = components.find(|(_, name)| folder.ends_with(name)).unwrap();
        let named = read
            .all
            .into_iter()
            .map(|weight| (format!("{prefix}.{}", weight.name), weight));
        weights.extend(named);
    }
    for path in containers {
        let bytes = whole(
            &std::fs::read(fixture().join(&path)).unwrap(),
            &weights,
            &to.join("pipeline"),
        );
        std::fs::write(to.join(path.with_extension("")), bytes).unwrap();
    }
}

/// The bytes of a container, whose pieces are bytes of the packed file, payloads of weights, or files of the directory.
fn whole(packed: &[u8], weights: &HashMap<String, Weight>, pipeline: &Path) -> Vec<u8> {
    let (pieces, mut rest) = split::<Vec<Value>>(packed);
    let mut bytes = Vec::new();
    for piece in pieces {
        if let Some(count) = piece["bytes"].as_u64() {
            let (these, others) = rest.split_at(count as usize);
            bytes.extend(these);
            rest = others;
        } else if let Some(file) = piece["file"].as_str() {
            bytes.extend(std::fs::read(pipeline.join(file)).unwrap());
        } else {
            let values = weights[piece["tensor"].as_str().unwrap()].values();
            match piece["dtype"].as_str().unwrap() {
                "F16" => bytes.extend(values.flat_map(|value| half::f16::from_f32(value).to_le_bytes())),
                "F32" => bytes.extend(values.flat_map(f32::to_le_bytes)),
                other => panic!("{other}"),
            }
        }
    }
    assert!(rest.is_empty(), "{} bytes too many", rest.len());
    bytes
}

impl Weight {
    fn values(&self) -> Box<dyn Iterator<Item = f32> + '_> {
        let pairs = self.bytes.as_chunks().0.iter();
        match self.dtype.as_str() {
            "BF16" => Box::new(pairs.map(|pair| half::bf16::from_le_bytes(*pair).to_f32())),
            "F16" => Box::new(pairs.map(|pair| half::f16::from_le_bytes(*pair).to_f32())),
            _ => Box::new(self.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))),
        }
    }
}
