//! Fields of the header, and tensors whose presence decides, that no recorded model has: small networks against a forward pass
//! in float64 that was written from the format's text, on the device and on the host.
//!
//! `scripts/reference/fields.py` writes `tests/fixtures/fields` and says what is in there. Each network has variants, without
//! a field or with another value, which are far from it: an engine that ignores the field cannot agree with both.

use cmf_gpu::container::{Container, Sections, TensorSpec, Writer};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::gpu::GpuExecutor;
use cmf_gpu::host::HostExecutor;
use cmf_gpu::kernel::Kv;
use cmf_gpu::model::bind;
use cmf_gpu::program::{Executor, ExpertOptions, PlanOptions};
use cmf_gpu::session::Session;
use half::f16;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;

const TOLERANCE: f32 = 1e-3;
/// How far variants are from their network.
const APART: f32 = 0.05;

struct Fixture {
    json: Value,
    /// A row for each token, then one for the last token of each variant.
    logits: Vec<Vec<f32>>,
}

impl Fixture {
    fn open(name: &str) -> Fixture {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fields");
        let json: Value = serde_json::from_slice(&std::fs::read(dir.join(format!("{name}.json"))).unwrap()).unwrap();
        let vocab = json["arch"]["vocab_size"].as_u64().unwrap() as usize;
        let bytes = std::fs::read(dir.join(format!("{name}.logits"))).unwrap();
        let words = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word));
        let logits: Vec<Vec<f32>> = words.collect::<Vec<_>>().chunks(vocab).map(<[f32]>::to_vec).collect();
        let fixture = Fixture { json, logits };
        let rows = fixture.tokens().len() + fixture.variants().len();
        assert_eq!(fixture.logits.len(), rows, "{name}");
        fixture
    }

    fn tokens(&self) -> Vec<u32> {
        let tokens = self.json["tokens"].as_array().unwrap();
        tokens.iter().map(|token| token.as_u64().unwrap() as u32).collect()
    }

    fn variants(&self) -> &[Value] {
        self.json["variants"].as_array().unwrap()
    }

    /// The network with patches of the header's `arch` and of its tensors.
    fn network(&self, patch: &Value) -> Network {
        let [mut arch, mut tensors] = [self.json["arch"].clone(), self.json["tensors"].clone()];
        merge(&mut arch, &patch["arch"]);
        merge(&mut tensors, &patch["tensors"]);
        Network::new(self.json["seed"].as_str().unwrap(), arch, tensors.as_object().unwrap())
    }
}

/// A merge patch, RFC 7396.
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

/// A tensor as `scripts/reference/fields.py` makes it, in f16.
fn payload(seed: &str, name: &str, count: usize, base: f64, exponent: i32) -> Vec<u8> {
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
    (0..count as u64)
        .flat_map(|i| f16::from_f64(element(i)).to_le_bytes())
        .collect()
}

struct Network {
    tensors: Arc<Container>,
    _dir: tempfile::TempDir,
}

impl Network {
    fn new(seed: &str, arch: Value, tensors: &Map<String, Value>) -> Network {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("network.cmf");
        let shape =
            |spec: &Value| -> Vec<u64> { spec[0].as_array().unwrap().iter().filter_map(Value::as_u64).collect() };
        let specs = tensors.iter().map(|(name, spec)| TensorSpec {
            name: name.clone(),
            dtype: Dtype::F16,
            shape: shape(spec),
        });
        let header = Map::from_iter([("arch".to_owned(), arch)]);
        let mut writer = Writer::create(&path, header, specs.collect(), Sections::default()).unwrap();
        for (name, spec) in tensors {
            let count: u64 = shape(spec).iter().product();
            let (base, exponent) = (spec[1].as_f64().unwrap(), spec[2].as_i64().unwrap() as i32);
            writer
                .write(&payload(seed, name, count as usize, base, exponent))
                .unwrap();
        }
        writer.finish().unwrap();
        Network {
            tensors: Arc::new(Container::open(&path).unwrap()),
            _dir: dir,
        }
    }

    fn session(&self, on_device: bool) -> Session {
        let device = crate::device();
        let options = PlanOptions {
            ctx: 32,
            // Chunks that the tokens do not fill evenly.
            chunk: if on_device { 8 } else { 16 },
            kv: Kv::F32,
            max_binding: device.max_binding(),
            all_logits: true,
            drafts: 0,
            experts: ExpertOptions::default(),
        };
        let plan = crate::plan_of(&self.tensors, &options);
        let executor: Box<dyn Executor> = match on_device {
            true => Box::new(GpuExecutor::new(device, plan.clone(), &*self.tensors, &mut |_, _| Ok(())).unwrap()),
            false => Box::new(HostExecutor::new(plan.clone(), self.tensors.clone()).unwrap()),
        };
        Session::new(plan, executor)
    }
}

/// The logits of every token, the first `prefill` of them in chunks.
fn logits(session: &mut Session, tokens: &[u32], prefill: usize) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
        all.push(logits.to_vec());
        Ok(())
    };
    session.logits(tokens, prefill, false, &mut sink).unwrap();
    all
}

/// How far two rows are apart at most; what is not a number is as far as can be.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |most, d| if d.is_nan() { f32::INFINITY } else { most.max(d) })
}

fn check(name: &str, on_device: bool) {
    let fixture = Fixture::open(name);
    let tokens = fixture.tokens();
    let (wanted, of_variants) = fixture.logits.split_at(tokens.len());
    let last = tokens.len() - 1;
    let network = fixture.network(&json!({"arch": {}, "tensors": {}}));
    let model = bind(&network.tensors.header().arch, &*network.tensors).unwrap();
    assert!(model.unused.is_empty(), "{name}: every tensor has a part");
    let mut session = network.session(on_device);
    for prefill in [tokens.len(), tokens.len() / 2, 0] {
        let found = logits(&mut session, &tokens, prefill);
        assert_eq!(found.len(), tokens.len());
        for (row, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let apart = apart(found, wanted);
            assert!(
                apart <= TOLERANCE,
                "{name}, {prefill} in chunks, token {row}: {apart} apart"
            );
        }
    }
    for (variant, wanted_last) in fixture.variants().iter().zip(of_variants) {
        let about = &variant["about"];
        let far = apart(wanted_last, &wanted[last]);
        assert!(far >= APART, "{name}, {about}: only {far} from the network itself");
        let mut session = fixture.network(variant).session(on_device);
        for prefill in [tokens.len(), tokens.len() / 2] {
            let found = logits(&mut session, &tokens, prefill);
            let apart = apart(&found[last], wanted_last);
            assert!(
                apart <= TOLERANCE,
                "{name}, variant of {about}, {prefill} in chunks: {apart} apart"
            );
        }
    }
}

macro_rules! networks {
    ($($name:ident)*) => {
        mod device {
            $(#[test] fn $name() { super::check(stringify!($name), true); })*
        }
        mod host {
            $(#[test] fn $name() { super::check(stringify!($name), false); })*
        }
    };
}
networks!(attention mixture passes);
