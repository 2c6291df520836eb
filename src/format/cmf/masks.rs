//! Task masks: the neurons, heads, layers and experts that a task uses (section 5 of the format).
//!
//! A mask has one bit for each of them; the weights themselves are unchanged.

use crate::error::{Error, Kind, Result, bail};
use crate::format::arch::Arch;
use crate::format::bytes::u32_at;
use crate::format::hash::hash64;
use crate::format::json::{self, without_nulls};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::ops::Range;

/// The alignment of mask bits within the section.
const BLOB_ALIGN: usize = 8;
/// Bytes before the section's JSON.
const HEAD: usize = 8;
/// The longest name of a task, in bytes.
const MAX_NAME: usize = 256;
/// The name that means "no mask". No task may have it.
pub const NO_TASK: &str = "none";

/// The units that a mask leaves out in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskAxis {
    /// Neurons of the feed-forward network.
    Neurons,
    /// Query heads.
    Heads,
    /// Experts of a mixture.
    Experts,
}

impl MaskAxis {
    /// All of them, in the order of declaration.
    pub const ALL: [MaskAxis; 3] = [MaskAxis::Neurons, MaskAxis::Heads, MaskAxis::Experts];
}

/// The dimensions of a model's masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskShape {
    /// Layers of the stack.
    pub layers: usize,
    /// Rows of bits: one per layer, or one per layer invocation if every loop has masks of its own.
    pub rows: usize,
    /// Neurons of a layer's FFN, the most of any layer.
    pub ffn: usize,
    /// Query heads of a layer, the most of any layer.
    pub heads: usize,
    /// Experts of a layer; 0 in networks without experts.
    pub experts: usize,
}

impl MaskShape {
    /// The dimensions of a network's masks; `per_loop`: every loop of the stack has rows of its own.
    pub fn of(arch: &Arch, per_loop: bool) -> MaskShape {
        let loops = if per_loop { arch.num_loops } else { 1 };
        MaskShape {
            layers: arch.num_layers,
            // `Arch::validate` bounds the product.
            rows: arch.num_layers * loops,
            ffn: arch.intermediate_size,
            heads: arch.num_attention_heads,
            experts: arch.moe.as_ref().map_or(0, |moe| moe.num_experts),
        }
    }

    /// The units of a layer, the most of any layer.
    fn units(&self, axis: MaskAxis) -> usize {
        match axis {
            MaskAxis::Neurons => self.ffn,
            MaskAxis::Heads => self.heads,
            MaskAxis::Experts => self.experts,
        }
    }

    /// Bytes of a mask's bits; `None` if they overflow `usize`.
    fn blob_bytes(&self, with_experts: bool) -> Option<usize> {
        let experts = if with_experts { self.experts.div_ceil(8) } else { 0 };
        let row = self.ffn.div_ceil(8) + self.heads.div_ceil(8) + experts;
        self.rows.checked_mul(row)?.checked_add(self.layers.div_ceil(8))
    }
}

/// Rows of bits, least significant first, each row padded to whole bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bits {
    width: usize,
    bytes: Vec<u8>,
}

impl Bits {
    fn ones(rows: usize, width: usize) -> Bits {
        let mut row = vec![0xFF; width.div_ceil(8)];
        if let (Some(last), tail @ 1..) = (row.last_mut(), width % 8) {
            *last = (1 << tail) - 1;
        }
        Bits {
            width,
            bytes: row.repeat(rows),
        }
    }

    /// Errors: `Parse` if a row has a padding bit set.
    fn parse(bytes: &[u8], width: usize, what: &str) -> Result<Bits> {
        let bits = Bits {
            width,
            bytes: bytes.to_vec(),
        };
        let tail = width % 8;
        if tail != 0 {
            for (row, bytes) in bytes.chunks_exact(width.div_ceil(8)).enumerate() {
                if bytes.last().is_some_and(|last| last >> tail != 0) {
                    bail!(Parse, "{what} of row {row}: a bit past the last of {width} is set");
                }
            }
        }
        Ok(bits)
    }

    fn row(&self, row: usize) -> &[u8] {
        let bytes = self.width.div_ceil(8);
        let start = row.saturating_mul(bytes);
        self.bytes
            .get(start..)
            .and_then(|rest| rest.get(..bytes))
            .unwrap_or_default()
    }

    fn get(&self, row: usize, bit: usize) -> Option<bool> {
        (bit < self.width).then(|| self.row(row).get(bit / 8).map(|byte| byte >> (bit % 8) & 1 == 1))?
    }

    fn set(&mut self, row: usize, bit: usize, on: bool) -> Result<()> {
        let index = (bit < self.width)
            .then(|| row.checked_mul(self.width.div_ceil(8))?.checked_add(bit / 8))
            .flatten();
        let Some(byte) = index.and_then(|index| self.bytes.get_mut(index)) else {
            bail!(Usage, "a mask has no bit {bit} in row {row}");
        };
        match on {
            true => *byte |= 1 << (bit % 8),
            false => *byte &= !(1 << (bit % 8)),
        }
        Ok(())
    }

    /// The number of bits set in a row.
    fn count(&self, row: usize) -> usize {
        self.row(row).iter().map(|byte| byte.count_ones() as usize).sum()
    }

    fn all(&self, rows: usize) -> bool {
        (0..rows).all(|row| self.count(row) == self.width)
    }
}

/// The mask of one task: a bit for each neuron, head, layer and expert of the stack. Draft heads are not masked.
///
/// `invocation` numbers the invocations of layers: loop · layers + layer. If loops have no rows of their own, every loop
/// uses the row of its layer. Everything outside the mask's dimensions is active.
#[derive(Clone, Debug, PartialEq)]
pub struct Mask {
    /// The task's number in the sparse index.
    pub task_id: u32,
    /// The task's name.
    pub name: String,
    /// A description, for display.
    pub description: Option<String>,
    /// The fraction that is switched off, as stated by the mask's creator.
    pub sparsity: Option<f64>,
    /// Measurements of the model under this mask; `None`: not measured.
    pub quality: Option<Value>,
    /// Members that this program does not use. They are kept when masks are rewritten.
    pub other: Map<String, Value>,
    shape: MaskShape,
    gates: Bits,
    /// By [`MaskAxis`]. Bits for experts are optional.
    units: [Option<Bits>; 3],
}

impl Mask {
    /// A mask that restricts nothing.
    pub fn open(task_id: u32, name: impl Into<String>, shape: MaskShape) -> Mask {
        let ones = |axis| Some(Bits::ones(shape.rows, shape.units(axis)));
        Mask {
            task_id,
            name: name.into(),
            description: None,
            sparsity: None,
            quality: None,
            other: Map::new(),
            shape,
            gates: Bits::ones(1, shape.layers),
            units: [ones(MaskAxis::Neurons), ones(MaskAxis::Heads), None],
        }
    }

    fn row(&self, invocation: usize) -> usize {
        match self.shape.rows == self.shape.layers {
            true => invocation % self.shape.layers.max(1),
            false => invocation,
        }
    }

    /// The mask's dimensions.
    pub fn shape(&self) -> MaskShape {
        self.shape
    }

    /// Whether a unit is active: a neuron, a query head, or an expert that may be chosen.
    pub fn unit(&self, axis: MaskAxis, invocation: usize, unit: usize) -> bool {
        let bits = self.units[axis as usize].as_ref();
        let on = bits.and_then(|bits| bits.get(self.row(invocation), unit));
        on.unwrap_or(true)
    }

    /// Whether a layer is active, in every loop.
    pub fn layer(&self, layer: usize) -> bool {
        self.gates.get(0, layer).unwrap_or(true)
    }

    /// Whether the mask has bits for experts.
    pub fn has_experts(&self) -> bool {
        self.units[MaskAxis::Experts as usize].is_some()
    }

    /// The number of active units; all of them if the mask has no bits for them.
    pub fn count(&self, axis: MaskAxis, invocation: usize) -> usize {
        match &self.units[axis as usize] {
            Some(bits) => bits.count(self.row(invocation)),
            None => self.shape.units(axis),
        }
    }

    /// The bits of the units, least significant first, padded with zeros to whole bytes; empty past the last row. `None` if
    /// the mask has no bits for them.
    pub fn bits(&self, axis: MaskAxis, invocation: usize) -> Option<&[u8]> {
        let bits = self.units[axis as usize].as_ref()?;
        Some(bits.row(self.row(invocation)))
    }

    /// hash64 of all bits.
    pub fn bits_hash(&self) -> u64 {
        hash64(&self.blob())
    }

    /// Whether everything is active.
    pub fn is_open(&self) -> bool {
        let mut units = self.units.iter().flatten();
        units.all(|bits| bits.all(self.shape.rows)) && self.gates.all(1)
    }

    /// Switches a unit on or off. Errors: `Usage` if there is no such unit.
    pub fn set_unit(&mut self, axis: MaskAxis, invocation: usize, unit: usize, on: bool) -> Result<()> {
        let row = self.row(invocation);
        let ones = || Bits::ones(self.shape.rows, self.shape.units(axis));
        self.units[axis as usize].get_or_insert_with(ones).set(row, unit, on)
    }

    /// Switches a layer on or off. Errors: `Usage` if there is no such layer.
    pub fn set_layer(&mut self, layer: usize, on: bool) -> Result<()> {
        self.gates.set(0, layer, on)
    }

    /// Reads one mask; the position of its bits was checked.
    fn parse(meta: MaskMeta, section: &[u8], shape: MaskShape) -> Result<Mask> {
        if meta.sparsity.is_some_and(|sparsity| !(0.0..=1.0).contains(&sparsity)) {
            bail!(Parse, "sparsity is {:?}, expected 0 to 1", meta.sparsity);
        }
        let mut rest = section.get(meta.blob_off as usize..).unwrap_or_default();
        let mut area = |rows: usize, width: usize, what: &str| {
            let (area, after) = rest.split_at_checked(rows * width.div_ceil(8)).unwrap_or_default();
            rest = after;
            Bits::parse(area, width, what)
        };
        let neurons = area(shape.rows, shape.ffn, "neurons")?;
        let heads = area(shape.rows, shape.heads, "heads")?;
        let gates = area(1, shape.layers, "layer gates")?;
        let mut experts = None;
        if meta.has_expert_fields {
            let bits = experts.insert(area(shape.rows, shape.experts, "experts")?);
            if let Some(row) = (0..shape.rows).find(|&row| bits.count(row) == 0) {
                bail!(Parse, "experts of row {row}: all are switched off");
            }
        }
        Ok(Mask {
            task_id: meta.task_id,
            name: meta.name,
            description: meta.description,
            sparsity: meta.sparsity,
            quality: meta.quality,
            other: meta.other,
            shape,
            gates,
            units: [Some(neurons), Some(heads), experts],
        })
    }

    fn blob(&self) -> Vec<u8> {
        let [neurons, heads, experts] = self.units.each_ref().map(Option::as_ref);
        let areas = [neurons, heads, Some(&self.gates), experts].into_iter().flatten();
        areas.flat_map(|bits| bits.bytes.iter().copied()).collect()
    }
}

/// All masks of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Masks {
    /// The task whose mask is active by default, if there is a mask of that name.
    pub default_task: Option<String>,
    /// The masks, in the file's order.
    pub masks: Vec<Mask>,
}

/// The JSON of a masks section.
#[derive(Deserialize, Serialize)]
struct Meta {
    default_task: Option<String>,
    #[serde(default)]
    masks: Vec<MaskMeta>,
}

#[derive(Deserialize, Serialize)]
struct MaskMeta {
    task_id: u32,
    name: String,
    description: Option<String>,
    sparsity: Option<f64>,
    quality: Option<Value>,
    #[serde(default)]
    has_expert_fields: bool,
    blob_off: u64,
    blob_len: u64,
    #[serde(flatten)]
    other: Map<String, Value>,
}

impl Masks {
    /// Reads a masks section.
    ///
    /// Errors: `Bounds` for bits outside the section or overlapping other bytes; `Parse` for an invalid description or name,
    /// and for lengths and bits that do not match `shape`.
    pub fn parse(section: &[u8], shape: MaskShape) -> Result<Masks> {
        let (Some(count), Some(meta_len)) = (u32_at(section, 0), u32_at(section, 4)) else {
            bail!(
                Bounds,
                "a masks section has at least {HEAD} bytes, found {}",
                section.len()
            );
        };
        let Some(text) = section[HEAD..].get(..meta_len as usize) else {
            bail!(
                Bounds,
                "masks section of {} bytes is too short for a description of {meta_len}",
                section.len()
            );
        };
        let meta = Value::Object(json::parse_object(text, "masks")?);
        let meta: Meta = serde_json::from_value(without_nulls(&meta))
            .map_err(|err| Error::new(Kind::Parse, format!("masks: {err}")))?;
        if meta.masks.len() as u64 != u64::from(count) {
            bail!(
                Parse,
                "the masks section has a count of {count} masks and describes {}",
                meta.masks.len()
            );
        }
        let description = 0..(HEAD + text.len()) as u64;
        let mut spans = vec![description];
        for meta in &meta.masks {
            let span = span(meta, section, shape);
            spans.push(span.map_err(|err| err.context(format_args!("mask '{}'", meta.name)))?);
        }
        spans.sort_unstable_by_key(|span| span.start);
        if let Some([a, b]) = spans.array_windows().find(|[a, b]| b.start < a.end) {
            bail!(Bounds, "bytes {a:?} and {b:?} of the masks section overlap");
        }
        let parse = |meta: MaskMeta| {
            let name = meta.name.clone();
            Mask::parse(meta, section, shape).map_err(|err| err.context(format_args!("mask '{name}'")))
        };
        let masks = Masks {
            default_task: meta.default_task,
            masks: meta.masks.into_iter().map(parse).collect::<Result<_>>()?,
        };
        masks.check_names()?;
        Ok(masks)
    }

    /// The section that [`Masks::parse`] reads back.
    ///
    /// Errors: `Usage` for invalid or duplicate names, masks of different shapes, and a row without an active expert.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.check_names().map_err(|err| Error::new(Kind::Usage, err.message))?;
        if self.masks.windows(2).any(|pair| pair[0].shape != pair[1].shape) {
            bail!(Usage, "all masks of a model must have the same shape");
        }
        for mask in &self.masks {
            let rows = 0..mask.shape.rows;
            if mask.has_experts() && rows.clone().any(|row| mask.count(MaskAxis::Experts, row) == 0) {
                bail!(Usage, "mask '{}': a row without an active expert", mask.name);
            }
        }
        let blobs: Vec<Vec<u8>> = self.masks.iter().map(Mask::blob).collect();
        // The text contains offsets that depend on its own length. The length only grows, so this ends.
        let mut meta_len = 0;
        loop {
            let (text, offsets) = self.meta(&blobs, meta_len)?;
            if text.len() != meta_len {
                meta_len = text.len();
                continue;
            }
            let head = u32::try_from(self.masks.len()).ok().zip(u32::try_from(text.len()).ok());
            let Some((count, meta_len)) = head else {
                bail!(Usage, "too many masks");
            };
            let mut section = [count.to_le_bytes(), meta_len.to_le_bytes()].concat();
            section.extend_from_slice(&text);
            for (blob, offset) in blobs.iter().zip(offsets) {
                section.resize(offset, 0);
                section.extend_from_slice(blob);
            }
            return Ok(section);
        }
    }

    /// The JSON, and where the bits of each mask start, on the assumption that the JSON has `meta_len` bytes.
    fn meta(&self, blobs: &[Vec<u8>], meta_len: usize) -> Result<(Vec<u8>, Vec<usize>)> {
        let mut end = HEAD + meta_len;
        let mut offsets = Vec::with_capacity(blobs.len());
        let described = self.masks.iter().zip(blobs).map(|(mask, blob)| {
            let offset = end.next_multiple_of(BLOB_ALIGN);
            end = offset + blob.len();
            offsets.push(offset);
            MaskMeta {
                task_id: mask.task_id,
                name: mask.name.clone(),
                description: mask.description.clone(),
                sparsity: mask.sparsity,
                quality: mask.quality.clone(),
                has_expert_fields: mask.has_experts(),
                blob_off: offset as u64,
                blob_len: blob.len() as u64,
                other: mask.other.clone(),
            }
        });
        let meta = Meta {
            default_task: self.default_task.clone(),
            masks: described.collect(),
        };
        let text = serde_json::to_vec(&meta).map_err(|err| Error::new(Kind::Usage, format!("masks: {err}")))?;
        Ok((text, offsets))
    }

    /// The mask of this name. Errors: `Usage`, with the existing names.
    pub fn find(&self, name: &str) -> Result<&Mask> {
        if let Some(mask) = self.masks.iter().find(|mask| mask.name == name) {
            return Ok(mask);
        }
        if self.masks.is_empty() {
            bail!(Usage, "no task '{name}': the model has no tasks");
        }
        let names: Vec<&str> = self.masks.iter().map(|mask| mask.name.as_str()).collect();
        bail!(Usage, "no task '{name}'; existing tasks: {}", names.join(", "))
    }

    /// The mask of the default task, if there is one.
    pub fn default_mask(&self) -> Option<&Mask> {
        let name = self.default_task.as_ref()?;
        self.masks.iter().find(|mask| mask.name == *name)
    }

    fn check_names(&self) -> Result<()> {
        let mut names = HashSet::new();
        let mut ids = HashSet::new();
        for Mask { name, task_id, .. } in &self.masks {
            if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) || name == NO_TASK {
                bail!(
                    Parse,
                    "task name '{name}': expected 1 to {MAX_NAME} bytes without control characters, and not '{NO_TASK}'"
                );
            }
            if !names.insert(name) {
                bail!(Parse, "two masks are named '{name}'");
            }
            if !ids.insert(task_id) {
                bail!(Parse, "two masks have task_id {task_id}");
            }
        }
        Ok(())
    }
}

/// The byte range of a mask's bits, checked against the section.
fn span(meta: &MaskMeta, section: &[u8], shape: MaskShape) -> Result<Range<u64>> {
    let (blob_off, blob_len) = (meta.blob_off, meta.blob_len);
    if meta.has_expert_fields && shape.experts == 0 {
        bail!(Parse, "the mask has experts, the network has none");
    }
    if !blob_off.is_multiple_of(BLOB_ALIGN as u64) {
        bail!(Bounds, "bits at offset {blob_off}, expected a multiple of {BLOB_ALIGN}");
    }
    let wanted = shape.blob_bytes(meta.has_expert_fields);
    if wanted.map(|wanted| wanted as u64) != Some(blob_len) {
        bail!(
            Parse,
            "{blob_len} bytes of bits, expected {} for {shape:?}",
            wanted.unwrap_or(usize::MAX)
        );
    }
    match blob_off.checked_add(blob_len) {
        Some(end) if end <= section.len() as u64 => Ok(blob_off..end),
        _ => bail!(
            Bounds,
            "bits at offset {blob_off} with {blob_len} bytes, the masks section has {}",
            section.len()
        ),
    }
}
