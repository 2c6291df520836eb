//! The networks of `tests/fixtures/fields`, which use header fields that no golden model has, and their logits from a
//! forward pass in float64. `scripts/reference/fields.py` writes these fixtures and documents their layout.

use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfWriter, Sections};
use half::f16;
use serde_json::{Map, Value, json};
use std::path::Path;

/// One of the networks.
pub struct Fixture {
    json: Value,
    /// One row per token, then one row per variant, for the last token.
    pub logits: Vec<Vec<f32>>,
}

impl Fixture {
    pub fn open(name: &str) -> Fixture {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fields");
        let json: Value = serde_json::from_slice(&std::fs::read(dir.join(format!("{name}.json"))).unwrap()).unwrap();
        let vocab = json["arch"]["vocab_size"].as_u64().unwrap() as usize;
        let bytes = std::fs::read(dir.join(format!("{name}.logits"))).unwrap();
        let words = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word));
        let words: Vec<f32> = words.collect();
        let logits = words.chunks(vocab).map(<[f32]>::to_vec).collect();
        let fixture = Fixture { json, logits };
        let rows = fixture.tokens().len() + fixture.variants().len();
        assert_eq!(fixture.logits.len(), rows, "{name}");
        fixture
    }

    pub fn tokens(&self) -> Vec<u32> {
        let tokens = self.json["tokens"].as_array().unwrap();
        tokens.iter().map(|token| token.as_u64().unwrap() as u32).collect()
    }

    /// The variants: the fields that a variant changes (`about`), and its merge patches of `arch` and `tensors`.
    pub fn variants(&self) -> &[Value] {
        self.json["variants"].as_array().unwrap()
    }

    /// Writes the network to a file, with the merge patches `arch` and `tensors` of `patch` if there are any.
    pub fn write(&self, patch: &Value, path: &Path) {
        let part = |key: &str| {
            let mut part = self.json[key].clone();
            merge(&mut part, patch.get(key).unwrap_or(&json!({})));
            part
        };
        let (arch, tensors) = (part("arch"), part("tensors"));
        let tensors = tensors.as_object().unwrap();
        let shape = |spec: &Value| -> Vec<u64> {
            let dims = spec[0].as_array().unwrap();
            dims.iter().filter_map(Value::as_u64).collect()
        };
        let specs = tensors.iter().map(|(name, spec)| TensorSpec {
            name: name.clone(),
            dtype: Dtype::F16,
            shape: shape(spec),
        });
        let header = Map::from_iter([("arch".to_owned(), arch)]);
        let mut writer = CmfWriter::create(path, header, specs.collect(), Sections::default()).unwrap();
        let seed = self.json["seed"].as_str().unwrap();
        for (name, spec) in tensors {
            let count: u64 = shape(spec).iter().product();
            let (base, exponent) = (spec[1].as_f64().unwrap(), spec[2].as_i64().unwrap() as i32);
            writer.write(&payload(seed, name, count, base, exponent)).unwrap();
        }
        writer.finish().unwrap();
    }
}

/// Applies a merge patch (RFC 7396).
fn merge(value: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *value = patch.clone();
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    let value = value.as_object_mut().unwrap();
    for (key, change) in patch {
        match change {
            Value::Null => drop(value.remove(key)),
            _ => merge(value.entry(key).or_insert(Value::Null), change),
        }
    }
}

/// The values of a tensor as f16.
fn payload(seed: &str, name: &str, count: u64, base: f64, exponent: i32) -> Vec<u8> {
    let text = format!("{seed}/{name}");
    let state = text.bytes().fold(0xcbf2_9ce4_8422_2325u64, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let element = |i: u64| {
        let mut z = state.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let u = (z ^ (z >> 31)) >> 54;
        base + (u as f64 - 512.0) * f64::from(exponent).exp2()
    };
    (0..count)
        .flat_map(|i| f16::from_f64(element(i)).to_le_bytes())
        .collect()
}
