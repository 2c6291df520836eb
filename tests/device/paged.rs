//! Networks in memory with paged experts: golden models with random experts of any type, and tensors that record reads.

use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::encode;
use cmf_gpu::error::{Error, Kind, Result};
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::graph::Measured;
use cmf_gpu::lm::run::Session;
use cmf_gpu::lm::{ExpertOptions, LowerOptions, Plan, lower};
use cmf_gpu::model::{FeedForward, Model, bind};
use cmf_gpu::source::{Arch, Mask, MaskShape, Masks, MemoryTensors, Stored, TensorId, TensorInfo, Tensors};
use cmf_gpu::synthetic::{ExpertShape, Shape, synthetic};
use half::f16;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

/// One projection of an expert.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    pub layer: usize,
    /// The shared expert has none.
    pub expert: Option<usize>,
    /// `gate_proj`, `up_proj` or `down_proj`.
    pub part: &'a str,
}

impl Projection<'_> {
    fn of(name: &str) -> Option<Projection<'_>> {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let layer = layer.parse().ok()?;
        let part = rest.strip_suffix(".weight")?;
        if let Some(part) = part.strip_prefix("mlp.shared_expert.") {
            return Some(Projection {
                layer,
                expert: None,
                part,
            });
        }
        let (expert, part) = part.strip_prefix("mlp.experts.")?.split_once('.')?;
        let expert = Some(expert.parse().ok()?);
        Some(Projection { layer, expert, part })
    }
}

/// Bytes that follow from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z ^ (z >> 31)
    }

    fn scale(&mut self) -> [u8; 2] {
        f16::from_f32(0.02 + (self.next() % 64) as f32 / 1000.0).to_le_bytes()
    }
}

/// A payload whose rows hold more with a larger `richness`: wider codes, more overlay entries. With 0 there are only codes of
/// 3 bits, and no entries.
fn payload(dtype: Dtype, rows: usize, cols: usize, seed: u64, richness: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut tiles = |bytes: usize, most: u64| -> Vec<u8> {
        let mut tile = |_| {
            let mut tile = random.scale().to_vec();
            tile.extend((0..bytes).map(|_| (random.next() % most) as u8));
            tile
        };
        (0..rows * cols / 32).flat_map(&mut tile).collect()
    };
    let has_entry = |row: usize, col: usize| (row * 7 + col * 5) % 23 < richness;
    let entries = |row: usize| (0..cols).filter(move |&col| has_entry(row, col));
    let value = |row: usize, col: usize| f16::from_f32(0.3 - ((row + col * 3) % 13) as f32 * 0.05).to_le_bytes();
    match dtype {
        Dtype::Q1s => {
            let mut all = tiles(4, 256);
            let count: usize = (0..rows).map(|row| entries(row).count()).sum();
            all.extend((count as u32).to_le_bytes());
            for row in 0..rows {
                for col in entries(row) {
                    all.extend(((row * cols + col) as u32).to_le_bytes());
                    all.extend(value(row, col));
                }
            }
            all
        }
        Dtype::Q1t => {
            let mut all = tiles(7, 9);
            let mut at = 0u32;
            all.extend(at.to_le_bytes());
            for row in 0..rows {
                at += entries(row).count() as u32;
                all.extend(at.to_le_bytes());
            }
            for row in 0..rows {
                for col in entries(row) {
                    all.extend((col as u16).to_le_bytes());
                    all.extend(value(row, col));
                }
            }
            all
        }
        Dtype::Vbit | Dtype::VbitRo => {
            let width = |row: usize| [3u8, 4, 5, 6, 8][((row % 5) * richness / 4).min(4)];
            let mut all: Vec<u8> = (0..rows).map(width).collect();
            for row in 0..rows {
                for _ in 0..cols / 32 {
                    let worth = f32::from(1u16 << (width(row) - 1));
                    all.extend(f16::from_f32(0.15 / worth).to_le_bytes());
                }
            }
            let row_bytes = |row: usize| cols / 8 * usize::from(width(row));
            if dtype == Dtype::VbitRo {
                let mut at = 0;
                all.extend(0u32.to_le_bytes());
                for row in 0..rows {
                    at += row_bytes(row) as u32;
                    all.extend(at.to_le_bytes());
                }
            }
            let packed: usize = (0..rows).map(row_bytes).sum();
            all.extend((0..packed).map(|_| random.next() as u8));
            all
        }
        _ => encode(dtype, rows, cols, &|first, out| {
            for (i, value) in out.iter_mut().enumerate() {
                let mut random = Random(seed ^ ((first * cols + i) as u64) << 20);
                *value = (random.next() % 1000) as f32 / 3000.0 - 1.0 / 6.0;
            }
            Ok(())
        })
        .unwrap(),
    }
}

/// A tensor on its way into a network.
type Tensor = (String, Dtype, Vec<u64>, Vec<u8>);

/// A golden model's tensors, those of experts made up.
fn tensors(container: &CmfContainer, by: usize, choose: impl Fn(Projection) -> Dtype) -> impl Iterator<Item = Tensor> {
    container.infos().iter().enumerate().map(move |(id, info)| {
        let (dtype, bytes) = match Projection::of(&info.name) {
            None => (info.dtype, container.bytes(id).unwrap().to_vec()),
            Some(projection) => {
                let dtype = choose(projection);
                let (rows, cols) = info.rows_cols();
                let richness = projection.expert.unwrap_or(3) + by;
                (dtype, payload(dtype, rows, cols, id as u64, richness))
            }
        };
        (info.name.clone(), dtype, info.shape.clone(), bytes)
    })
}

/// Tensors that record which of them are read, and of which one can be broken.
pub struct Watched {
    tensors: MemoryTensors,
    pub read: Mutex<HashSet<TensorId>>,
    pub broken: Mutex<Option<TensorId>>,
    masks: Masks,
}

impl Tensors for Watched {
    fn infos(&self) -> &[TensorInfo] {
        self.tensors.infos()
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.tensors.find(name)
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        if *self.broken.lock().unwrap() == Some(id) {
            return Err(Error::new(Kind::Io, format!("tensor {id} cannot be read")));
        }
        self.read.lock().unwrap().insert(id);
        self.tensors.stored(id)
    }

    fn masks(&self) -> Option<&Masks> {
        Some(&self.masks)
    }

    fn release(&self, id: TensorId) {
        self.tensors.release(id);
    }
}

/// A network in memory, with masks.
pub struct Network {
    pub arch: Arch,
    pub tensors: Arc<Watched>,
}

impl Network {
    /// A golden model with random experts of the types that `choose` returns. Later experts hold more than earlier ones.
    pub fn of(name: &str, choose: impl Fn(Projection) -> Dtype) -> Network {
        Network::richer(name, 0, choose)
    }

    /// The same, but each expert holds as much as the one `by` numbers later.
    pub fn richer(name: &str, by: usize, choose: impl Fn(Projection) -> Dtype) -> Network {
        let (container, _guard) = crate::golden(name, Dtype::F16);
        let all = tensors(&container, by, choose);
        Network::new(container.header().arch.clone(), all.collect())
    }

    /// The same with changed tensors.
    pub fn changed(
        name: &str,
        choose: impl Fn(Projection) -> Dtype,
        change: impl Fn(Tensor) -> Option<Tensor>,
    ) -> Network {
        let (container, _guard) = crate::golden(name, Dtype::F16);
        let all = tensors(&container, 0, choose);
        Network::new(container.header().arch.clone(), all.filter_map(change).collect())
    }

    /// A mixture with rows of 256 weights, and random experts of one type that is read and never written.
    pub fn of_blocks(dtype: Dtype) -> Network {
        let real = Shape::named("qwen3-30b-a3b").unwrap();
        let shape = Shape {
            hidden: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            vocab: 128,
            experts: Some(ExpertShape {
                count: 4,
                top_k: 2,
                width: 256,
                shared: 0,
            }),
            ..real.with_layers(1).unwrap()
        };
        let (arch, all) = synthetic(&shape, Dtype::Q82f).unwrap();
        let tensor = |(id, info): (usize, &TensorInfo)| {
            let (name, shape) = (info.name.clone(), info.shape.clone());
            if Projection::of(&name).is_none() {
                return (name, info.dtype, shape, all.stored(id).unwrap().bytes.to_vec());
            }
            let (rows, cols) = info.rows_cols();
            let mut bytes = vec![0; rows * dtype.row_bytes(cols).unwrap()];
            dtype.fill_random(&mut bytes, [rows, cols], 1.0 / 16.0, &|bytes| {
                let mut random = Random(id as u64);
                bytes.iter_mut().for_each(|byte| *byte = random.next() as u8);
            });
            (name, dtype, shape, bytes)
        };
        let tensors = all.infos().iter().enumerate().map(tensor).collect();
        Network::new(arch, tensors)
    }

    fn new(arch: Arch, tensors: Vec<Tensor>) -> Network {
        Network {
            arch,
            tensors: Arc::new(Watched {
                tensors: MemoryTensors::new(tensors).unwrap(),
                read: Mutex::default(),
                broken: Mutex::default(),
                masks: Masks::default(),
            }),
        }
    }

    /// The same with one more mask.
    pub fn with(mut self, name: &str, edit: impl FnOnce(&mut Mask)) -> Network {
        let masks = &mut Arc::get_mut(&mut self.tensors).unwrap().masks.masks;
        let mut mask = Mask::open(masks.len() as u32, name, MaskShape::of(&self.arch, false));
        edit(&mut mask);
        masks.push(mask);
        self
    }

    pub fn model(&self) -> Model {
        bind(&self.arch, &*self.tensors).unwrap()
    }

    /// The tensors of experts, in order.
    pub fn experts_tensors(&self) -> Vec<TensorId> {
        let infos = self.tensors.infos().iter().enumerate();
        let of_experts = infos.filter(|(_, info)| Projection::of(&info.name).is_some());
        of_experts.map(|(id, _)| id).collect()
    }

    /// Experts of a layer, and how many a token takes.
    pub fn experts(&self) -> (usize, usize) {
        let model = self.model();
        let mut mixtures = model.layers.iter().filter_map(|layer| match &layer.ffn {
            FeedForward::Moe(moe) => Some((moe.experts.len(), moe.top_k)),
            FeedForward::Dense(_) => None,
        });
        mixtures.next().unwrap()
    }

    pub fn plan(&self, slots: Option<usize>, max_binding: u64) -> Result<Plan> {
        self.lowered(&LowerOptions {
            max_binding,
            all_logits: true,
            experts: ExpertOptions { counted: false, slots },
            ..crate::options(96)
        })
    }

    pub fn lowered(&self, options: &LowerOptions) -> Result<Plan> {
        lower(&self.model(), &*self.tensors, options, &Measured::default())
    }

    pub fn session(&self, plan: Plan) -> Session {
        crate::session(crate::Place::Device, &plan, self.tensors.clone())
    }

    /// A session with so many slots, or with all experts on the device.
    pub fn paged(&self, slots: Option<usize>) -> Session {
        self.session(self.plan(slots, crate::device().max_binding()).unwrap())
    }
}

/// The longest recorded prompt.
pub fn prompt(name: &str) -> Vec<u32> {
    let json = crate::golden::described(name);
    let ids = json["prompts"][2]["prompt"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Bits of the logits of every token, the first `prefill` in chunks and the others one by one.
pub fn logits(session: &mut Session, tokens: &[u32], prefill: usize) -> Result<Vec<u32>> {
    let mut all = Vec::new();
    let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
        assert!(logits.iter().all(|value| value.is_finite()));
        all.extend(logits.iter().map(|value| value.to_bits()));
        Ok(())
    };
    session.logits(tokens, prefill, false, &mut sink)?;
    Ok(all)
}
