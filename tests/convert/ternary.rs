//! Ternary models in a rotated basis, from GGUF and `.ninfer` files: logits and tokens as recorded, objects that are laid out
//! in other ways, and what is refused.

use crate::sources::logits;
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::ninfer::{Format, Identity, NewObject, Ninfer, RowSplit, Tensor, write};
use cmf_gpu::source::{self, ModelSource};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const TOLERANCE: f32 = 1e-3;

pub fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/ternary")
        .join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

/// An object with its bytes.
#[derive(Clone)]
pub struct Object {
    pub name: String,
    tensor: Option<Tensor>,
    pub bytes: Vec<u8>,
}

/// A `.ninfer` file in memory.
pub struct File {
    identity: Identity,
    pub objects: Vec<Object>,
}

impl File {
    pub fn read(name: &str) -> File {
        let bytes = std::fs::read(path(name)).unwrap();
        let file = Ninfer::parse(&bytes).unwrap();
        let objects = file.objects.iter().map(|object| Object {
            name: object.name.clone(),
            tensor: object.tensor.clone(),
            bytes: bytes[object.range.clone()].to_vec(),
        });
        File {
            identity: file.identity,
            objects: objects.collect(),
        }
    }

    pub fn take(&mut self, name: &str) -> Object {
        let at = self.objects.iter().position(|object| object.name == name).unwrap();
        self.objects.remove(at)
    }

    fn rename(&mut self, from: &str, to: &str) {
        let object = self.objects.iter_mut().find(|object| object.name == from).unwrap();
        object.name = to.to_owned();
    }

    pub fn add(&mut self, name: &str, tensor: Option<(&[u64], Format)>, bytes: &[u8]) {
        self.objects.push(Object {
            name: name.to_owned(),
            tensor: tensor.map(|(shape, format)| Tensor {
                shape: shape.to_vec(),
                format,
            }),
            bytes: bytes.to_vec(),
        });
    }

    /// Replaces objects by one with the rows of all, one below the other.
    fn stack(&mut self, names: &[&str], to: &str) {
        let parts: Vec<Object> = names.iter().map(|name| self.take(name)).collect();
        let tensor = |object: &Object| object.tensor.clone().unwrap();
        let (format, cols) = (tensor(&parts[0]).format, tensor(&parts[0]).shape[1]);
        let rows = parts.iter().map(|part| tensor(part).shape[0]).sum();
        let bytes = match format {
            Format::Bf16 => parts.iter().flat_map(|part| part.bytes.clone()).collect(),
            _ => planes(format, rows, cols, &parts.iter().flat_map(blocks).collect::<Vec<_>>()),
        };
        self.add(to, Some((&[rows, cols], format)), &bytes);
    }

    /// The same weights in the type with two bits per weight.
    fn recoded(mut self) -> File {
        for object in &mut self.objects {
            let Some(tensor) = &mut object.tensor else { continue };
            if tensor.format != Format::Ptq1_0 {
                continue;
            }
            let (rows, cols) = (tensor.shape[0], tensor.shape[1]);
            let blocks: Vec<_> = blocks(object).iter().map(|row| recoded(row)).collect();
            object.bytes = planes(Format::Pq2_0, rows, cols, &blocks);
            object.tensor.as_mut().unwrap().format = Format::Pq2_0;
        }
        self
    }

    pub fn write(self) -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.ninfer");
        let objects = self.objects.into_iter().map(|object| NewObject {
            name: object.name,
            tensor: object.tensor,
            bytes: object.bytes.len() as u64,
            payload: Box::new(move || Ok(object.bytes)),
        });
        write(&path, &self.identity, objects.collect()).unwrap();
        (dir, path)
    }

    fn open(self) -> cmf_gpu::Result<ModelSource> {
        let (_dir, path) = self.write();
        source::open(&path)
    }
}

/// The blocks of every row of a ternary object.
fn blocks(object: &Object) -> Vec<Vec<u8>> {
    let Tensor { shape, format } = object.tensor.as_ref().unwrap();
    let planes = RowSplit::new(*format, shape[0], shape[1]).unwrap();
    let row = |row| {
        let mut blocks = vec![0; planes.block_row_bytes()];
        planes.blocks(&object.bytes, row, &mut blocks).unwrap();
        blocks
    };
    (0..planes.rows).map(row).collect()
}

fn planes(format: Format, rows: u64, cols: u64, blocks: &[Vec<u8>]) -> Vec<u8> {
    let planes = RowSplit::new(format, rows, cols).unwrap();
    let mut payload = vec![0; planes.bytes as usize];
    for (row, blocks) in blocks.iter().enumerate() {
        planes.set_blocks(&mut payload, row, blocks).unwrap();
    }
    payload
}

/// A row of PTQ1_0 blocks as PQ2_0 blocks.
fn recoded(row: &[u8]) -> Vec<u8> {
    let decode = |block: &[u8]| {
        let mut values = vec![0.0; 128];
        Dtype::PTQ1_0.decoder(block, 1, 128).unwrap().row(0, &mut values);
        let codes = values.chunks(4).map(|four| {
            let code = |value: &f32| if *value == 0.0 { 1 } else { 1 + value.signum() as i8 };
            let place = |(i, value)| (code(value) as u8) << (2 * i);
            four.iter().enumerate().map(place).sum::<u8>()
        });
        [block[26], block[27]].into_iter().chain(codes).collect::<Vec<u8>>()
    };
    row.chunks(28).flat_map(decode).collect()
}

/// Compares with the recorded logits of every prompt, and the likeliest tokens of every answer, in both places.
fn as_recorded(model: &str, source: &ModelSource) {
    let recorded = std::fs::read(path(&format!("{model}.safetensors"))).unwrap();
    let recorded = safetensors::SafeTensors::deserialize(&recorded).unwrap();
    let ids = |value: &Value| {
        let ids = value.as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap() as u32).collect::<Vec<u32>>()
    };
    for (i, prompt) in json(&format!("{model}.json"))["prompts"]
        .as_array()
        .unwrap()
        .iter()
        .enumerate()
    {
        let (tokens, greedy) = (ids(&prompt["prompt"]), ids(&prompt["greedy"]));
        let view = recorded.tensor(&format!("logits.p{i}")).unwrap();
        let wanted: Vec<f32> = view
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|&word| f32::from_le_bytes(word))
            .collect();
        let all = [&tokens[..], &greedy[..greedy.len() - 1]].concat();
        for on_device in [false, true] {
            let found = logits(source.clone(), &all, on_device);
            let flat = found.concat();
            let far = wanted.iter().zip(&flat).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far <= TOLERANCE, "{model}, prompt {i}: logits differ by {far}");
            let answer = found[tokens.len() - 1..].iter().map(|logits| {
                let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
                best.unwrap().0 as u32
            });
            assert_eq!(answer.collect::<Vec<_>>(), greedy, "{model}, prompt {i}");
        }
    }
}

#[test]
fn the_dense_model_computes_what_was_recorded() {
    as_recorded("dense", &source::open(&path("dense-ptq1_0.ninfer")).unwrap());
    as_recorded("dense", &source::open(&path("dense-pq2_0.gguf")).unwrap());
    let (_dir, path) = File::read("dense-ptq1_0.ninfer").recoded().write();
    as_recorded("dense", &source::open(&path).unwrap());
}

#[test]
fn the_hybrid_model_computes_what_was_recorded() {
    as_recorded("hybrid", &source::open(&path("hybrid-ptq1_0.ninfer")).unwrap());
    as_recorded("hybrid", &source::open(&path("hybrid-ptq1_0.gguf")).unwrap());
    let (_dir, path) = File::read("hybrid-ptq1_0.ninfer").recoded().write();
    as_recorded("hybrid", &source::open(&path).unwrap());
}

/// What a file says of itself, of its texts, and of its rotation.
#[test]
fn a_file_has_the_network_the_texts_and_the_rotation_of_its_resources() {
    let source = source::open(&path("hybrid-ptq1_0.ninfer")).unwrap();
    assert_eq!(source.format, "ninfer");
    assert_eq!(source.arch.arch_name, "qwen3_5_text");
    assert_eq!(source.text.eos_token_ids, [507, 505]);
    assert!(source.text.tokenizer_json().is_some() && source.text.chat_template.is_some());
    let rotation = source.arch.prism_hadamard.as_ref().unwrap();
    assert_eq!(rotation.block(), 128);
    assert_eq!(rotation.widths().collect::<Vec<_>>(), [256, 384, 640]);
    assert!(rotation.inverse.contains("model.embed_tokens.weight"));
    // 3 layers with in_proj_qkv, in_proj_z, out_proj; one with q, k, v, o; gate, up and down in each; the output.
    assert_eq!(rotation.forward.len(), 3 * 3 + 4 + 4 * 3 + 1);
    let report = source.verify(&mut |_, _| ()).unwrap();
    assert!(report.failures.is_empty(), "{:?}", report.failures);
}

/// Other files fuse more. The tensors are the same, byte for byte.
#[test]
fn roles_may_be_fused_and_separated() {
    let plain = source::open(&path("hybrid-ptq1_0.ninfer")).unwrap();
    let mut file = File::read("hybrid-ptq1_0.ninfer");
    let of = |layer: usize, name: &str| format!("text/layers/{layer}/{name}");
    for layer in 0..3 {
        let [keys, values] = ["gdn/query_key", "gdn/value_z"].map(|name| of(layer, name));
        file.stack(&[&keys, &values], &of(layer, "gdn/query_key_value_z"));
        let [a, b] = ["gdn/a_projection", "gdn/b_projection"].map(|name| of(layer, name));
        file.stack(&[&a, &b], &of(layer, "gdn/a_b_projection"));
    }
    let [keys, values] = ["attention/query_key", "attention/gate_value"].map(|name| of(3, name));
    file.stack(&[&keys, &values], &of(3, "attention/query_key_gate_value"));
    let (_dir, path) = file.write();
    let fused = source::open(&path).unwrap();
    assert_eq!(plain.tensors.infos(), fused.tensors.infos());
    assert_eq!(plain.arch.prism_hadamard, fused.arch.prism_hadamard);
    for (id, info) in plain.tensors.infos().iter().enumerate() {
        let [one, other] = [&plain, &fused].map(|source| source.tensors.stored(id).unwrap().bytes.into_owned());
        assert!(one == other, "{}", info.name);
        assert_eq!(one.len() as u64, info.nbytes, "{}", info.name);
    }
}

#[test]
fn parts_that_are_not_needed_are_counted_in_notes() {
    let mut file = File::read("dense-ptq1_0.ninfer");
    file.add("vision/a", Some((&[1], Format::Fp32)), &[0; 4]);
    file.add("vision/b", Some((&[1, 128], Format::W8G32)), &[0; 264]);
    file.add("mtp/norm", Some((&[1], Format::Fp32)), &[0; 4]);
    file.add("text/draft_head_token_ids", Some((&[1], Format::I32)), &[0; 4]);
    file.add("frontend/preprocessor_config.json", None, b"{}");
    file.take("frontend/chat_template.jinja");
    file.take("frontend/tokenizer.json");
    let source = file.open().unwrap();
    for wanted in [
        "objects 'vision/*' are left out: 2",
        "objects 'mtp/*' are left out: 1",
        "objects 'text/draft_head*' are left out: 1",
        "objects 'frontend/*' are left out: 1",
        "token ids",
    ] {
        let found = source.notes.iter().any(|note| note.contains(wanted));
        assert!(found, "{wanted}: {:?}", source.notes);
    }
}

#[test]
fn what_is_no_part_of_the_network_is_refused_by_name() {
    type Edit = fn(&mut File);
    let cases: [(Edit, Kind, &str); 9] = [
        (
            |file| drop(file.take("frontend/config.json")),
            Kind::UnsupportedModel,
            "tiny-dense",
        ),
        (
            |file| {
                file.take("frontend/config.json");
                file.identity.model_id = "qwen3.6-27b".into();
            },
            Kind::UnsupportedModel,
            "layer count is 64",
        ),
        (
            |file| file.add("text/other", Some((&[1], Format::Fp32)), &[0; 4]),
            Kind::UnsupportedModel,
            "text/other",
        ),
        (
            |file| file.add("text/note", None, b"?"),
            Kind::UnsupportedModel,
            "text/note",
        ),
        (
            |file| drop(file.take("text/layers/1/attention/value")),
            Kind::MissingTensor,
            "layers.1.self_attn.v_proj",
        ),
        (
            |file| {
                file.rename(
                    "text/layers/0/attention/query_key",
                    "text/layers/0/attention/query_value",
                )
            },
            Kind::Parse,
            "'value' occur twice in layer 0",
        ),
        (
            |file| file.rename("text/layers/0/attention/value", "text/layers/0/attention/gate"),
            Kind::Parse,
            "text/layers/0/attention/gate",
        ),
        (
            |file| {
                file.take("text/hadamard_signs");
                file.take("text/hadamard_widths");
            },
            Kind::MissingTensor,
            "there is no 'text/hadamard_signs'",
        ),
        (
            |file| {
                file.take("text/layers/1/mlp/down");
                let bytes = vec![0; Format::Ptq1_0.size(&[256, 200]).unwrap() as usize];
                file.add("text/layers/1/mlp/down", Some((&[256, 200], Format::Ptq1_0)), &bytes);
            },
            Kind::UnsupportedModel,
            "200 columns",
        ),
    ];
    for (edit, kind, text) in cases {
        let mut file = File::read("dense-ptq1_0.ninfer");
        edit(&mut file);
        let err = file.open().err().expect(text);
        assert!(err.kind == kind && err.message.contains(text), "{text}: {err}");
    }
}

/// Columns of rotated weights that are tiled heads cannot move: the activation follows them. The other way to compute the same
/// network is without the rotation, whose rows are multiplied back first.
#[test]
fn rotated_columns_may_be_tiled() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiled.gguf");
    let mut file = crate::exchange::ternary_gguf("hybrid-ptq1_0.gguf");
    let grouped = |path: &Path| logits(source::open(path).unwrap(), &[5, 77, 301, 12, 450], false);
    std::fs::write(&path, file.bytes()).unwrap();
    let before = grouped(&path);
    file.set("prism.hadamard.gdn_v_grouped", crate::build::Meta::Bool(false));
    std::fs::write(&path, file.bytes()).unwrap();
    let plain = cmf_gpu::convert::quantised(&path, cmf_gpu::convert::Options::new(Dtype::F32)).unwrap();
    let far = |a: &[Vec<f32>], b: &[Vec<f32>]| {
        let pairs = a.iter().flatten().zip(b.iter().flatten());
        pairs.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
    };
    for on_device in [false, true] {
        let tokens = [5, 77, 301, 12, 450];
        let found = logits(source::open(&path).unwrap(), &tokens, on_device);
        let wanted = logits(plain.clone(), &tokens, on_device);
        // Vectors of the network without rotation are f16.
        assert!(far(&found, &wanted) < 20.0 * TOLERANCE, "{}", far(&found, &wanted));
        assert!(far(&found, &before) > 1.0, "another network");
    }
    // Neither a CMF nor a .ninfer file can state it.
    let out = dir.path().join("out.cmf");
    let keeping = cmf_gpu::convert::Options::keeping();
    let go = &mut |_: cmf_gpu::convert::Event| std::ops::ControlFlow::Continue(());
    let err = cmf_gpu::convert::convert(&path, &out, &keeping, go).unwrap_err();
    assert_eq!(err.kind, Kind::UnsupportedFeature, "{err}");
    let out = dir.path().join("out.ninfer");
    let err = cmf_gpu::convert::exchange(&path, &out, cmf_gpu::convert::Exchange::Ninfer, false, go).unwrap_err();
    assert!(err.message.contains("another form"), "{err}");
}

/// The recorded edits of a file.
#[test]
fn broken_files_are_refused() {
    let base = std::fs::read(path("dense-ptq1_0.ninfer")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("broken.ninfer");
    let mut refused = 0;
    for case in json("patches.json").as_array().unwrap() {
        if case["base"] != "dense-ptq1_0.ninfer" {
            continue;
        }
        let name = case["name"].as_str().unwrap().rsplit(':').next().unwrap();
        let mut bytes = base.clone();
        for edit in case["edits"].as_array().unwrap() {
            let (at, hex) = (edit[0].as_u64().unwrap() as usize, edit[1].as_str().unwrap());
            for i in 0..hex.len() / 2 {
                bytes[at + i] = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
            }
        }
        std::fs::write(&path, bytes).unwrap();
        let found = source::open(&path);
        let kind = match name {
            "magic_v1" | "magic_v3" => Kind::UnsupportedVersion,
            "no_signs" | "missing_norm" => Kind::MissingTensor,
            "block_96" => Kind::UnsupportedFeature,
            "unknown_model_type" => Kind::UnsupportedModel,
            "unknown_format" => Kind::UnsupportedTensorType,
            // Weights are read later.
            "scale_nan" => {
                let report = found.unwrap().verify(&mut |_, _| ()).unwrap();
                assert_eq!(report.failures[0].error.kind, Kind::NonFinite);
                continue;
            }
            _ => Kind::Parse,
        };
        let err = found.err().expect(name);
        assert_eq!(err.kind, kind, "{name}: {err}");
        refused += 1;
    }
    assert_eq!(refused, 12);
}
