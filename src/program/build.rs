//! From a [`Model`] to a [`Plan`]: one walk over the layers writes the decode and the prefill programs.

use super::{ATTENTION_BLOCK, Bind, Buffer, BufferId, Fill, Fixed, Grid, Matrix, MatrixId, Piece, Plan, Program, Step};
use super::{Vector, VectorId, weights};
use crate::container::{TensorId, Tensors};
use crate::dtype::planes::Planes;
use crate::error::{Result, bail};
use crate::kernel::{self, Kv, Op};
use crate::model::{Activation, Attention, Ffn, Linear, Model};
use crate::sampling;

/// What the device and the caller decide about a plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanOptions {
    /// Positions of the context.
    pub ctx: u32,
    /// Columns of a prefill chunk, a multiple of 8.
    pub chunk: u32,
    /// Type of the caches.
    pub kv: Kv,
    /// Largest storage binding, in bytes; larger weights are cut into segments.
    pub max_binding: u64,
    /// Whether to plan the program that makes the logits of every prompt column.
    pub all_logits: bool,
}

/// Lowers the network. Errors: `UnsupportedTensorType` for weights without kernels, `OutOfMemory` when a buffer exceeds the
/// largest binding, `UnsupportedModel` for shapes no kernel serves.
pub fn plan(model: &Model, tensors: &dyn Tensors, options: &PlanOptions) -> Result<Plan> {
    let mut b = Builder {
        tensors,
        options,
        buffers: Vec::new(),
        matrices: Vec::new(),
        vectors: Vec::new(),
    };
    let widest = |f: &dyn Fn(&crate::model::Layer) -> usize| model.layers.iter().map(f).max().unwrap_or(0);
    let heads = widest(&|layer| layer.attention.heads);
    let qkv = widest(&|layer| (layer.attention.heads + 2 * layer.attention.kv_heads) * model.head_dim);
    let attn = widest(&|layer| layer.attention.heads * model.head_dim);
    let act = widest(&|layer| layer.ffn.down.cols);
    let blocks = options.ctx.div_ceil(ATTENTION_BLOCK) as usize;
    let chunk = options.chunk as usize;

    let fixed = Fixed {
        ctl: b.words("ctl", 64)?,
        settings: b.words("settings", sampling::SETTINGS_WORDS)?,
        tokens: b.words("tokens", chunk)?,
    };
    let logits = b.columns("decode.logits", model.vocab, 1)?;
    let decode = Scratch {
        h: b.columns("decode.h", model.hidden, 1)?,
        hg: b.columns("decode.hg", model.hidden, 1)?,
        squares: b.columns("decode.squares", model.hidden / 4, 1)?,
        qkv: b.columns("decode.qkv", qkv, 1)?,
        part: b.floats("decode.part", heads * blocks * (4 + model.head_dim))?,
        attn: b.columns("decode.attn", attn, 1)?,
        act: b.columns("decode.act", act, 1)?,
    };
    let prefill = Scratch {
        h: b.columns("prefill.h", model.hidden, chunk)?,
        hg: b.columns("prefill.norm", model.hidden, chunk)?,
        squares: decode.squares,
        qkv: b.columns("prefill.qkv", qkv, chunk)?,
        part: decode.part,
        attn: b.columns("prefill.attn", attn, chunk)?,
        act: b.columns("prefill.act", act, chunk)?,
    };
    let positions = options.ctx;
    let mut ropes = Vec::new();
    for (i, rope) in model.ropes.iter().enumerate() {
        let fill = Fill::Rope {
            inv_freq: rope.inv_freq.clone(),
            factor: rope.factor,
            positions,
        };
        ropes.push(b.buffer(
            format!("rope.{i}"),
            rope.inv_freq.len() as u64 * 8 * u64::from(positions),
            fill,
        )?);
    }

    let embed = b.matrix("embed".into(), &[model.embed], false)?;
    let lm_head = if model.lm_head.weight == model.embed {
        embed
    } else {
        b.matrix("lm_head".into(), &[model.lm_head.weight], false)?
    };
    let lm_bias = b.biases("lm_head.bias".into(), &[&model.lm_head])?;
    let none = b.vector("none".into(), vec![Piece { tensor: None, len: 32 }], 0.0);
    let mut walk = Walk {
        b,
        model,
        fixed,
        ropes,
        none,
        decode: Program::default(),
        prefill: Program::default(),
    };

    for (program, scratch, tokens) in [
        (Mode::Decode, decode, fixed.ctl),
        (Mode::Prefill, prefill, fixed.tokens),
    ] {
        walk.embed(program, embed, &scratch, tokens);
    }
    let first_norm = walk.norm_vector(
        0,
        model.layers.first().map_or(model.final_norm, |layer| layer.attn_norm),
    );
    walk.prep(Mode::Decode, decode.h, &decode, first_norm);
    let mut norm = first_norm;
    for (i, layer) in model.layers.iter().enumerate() {
        let ffn_norm = walk.vector(format!("layer.{i:02}.ffn.norm"), layer.ffn_norm);
        let next = model
            .layers
            .get(i + 1)
            .map_or(model.final_norm, |layer| layer.attn_norm);
        let next_norm = walk.norm_vector(i + 1, next);
        walk.attention(i, &layer.attention, &decode, &prefill, norm, ffn_norm)?;
        walk.ffn(i, &layer.ffn, &decode, &prefill, ffn_norm, next_norm)?;
        let ends = (walk.decode.steps.len(), walk.prefill.steps.len());
        walk.decode.layer_ends.push(ends.0);
        walk.prefill.layer_ends.push(ends.1);
        norm = next_norm;
    }

    walk.decode.hidden = decode.h;
    walk.prefill.hidden = prefill.h;
    let mut head = Program {
        hidden: decode.h,
        ..Program::default()
    };
    std::mem::swap(&mut walk.decode, &mut head);
    // The head program shares the tail of the decode program.
    walk.prep(Mode::Decode, prefill.h, &decode, norm);
    walk.head(lm_head, lm_bias, &decode, logits);
    std::mem::swap(&mut walk.decode, &mut head);
    head.logits = Some(logits);
    walk.head(lm_head, lm_bias, &decode, logits);
    walk.decode.logits = Some(logits);

    let mut with_logits = Program::default();
    if options.all_logits {
        let all = walk.b.columns("prefill.logits", model.vocab, chunk)?;
        let mut plain = walk.prefill.clone();
        walk.norm(prefill.h, prefill.hg, norm, "head.norm");
        walk.matmul(lm_head, lm_bias, prefill.hg, all, model.vocab, "head");
        std::mem::swap(&mut walk.prefill, &mut plain);
        with_logits = plain;
        with_logits.logits = Some(all);
    }
    let Walk { b, decode, prefill, .. } = walk;
    Ok(Plan {
        buffers: b.buffers,
        matrices: b.matrices,
        vectors: b.vectors,
        programs: [decode, prefill, head, with_logits],
        fixed,
        ctx: options.ctx,
        chunk: options.chunk,
        kv: options.kv,
        vocab: model.vocab as u32,
        hidden: model.hidden as u32,
    })
}

/// Buffers of activations, for one column or for a chunk.
#[derive(Clone, Copy)]
struct Scratch {
    h: BufferId,
    hg: BufferId,
    squares: BufferId,
    qkv: BufferId,
    part: BufferId,
    attn: BufferId,
    act: BufferId,
}

#[derive(Clone, Copy)]
enum Mode {
    Decode,
    Prefill,
}

struct Builder<'a> {
    tensors: &'a dyn Tensors,
    options: &'a PlanOptions,
    buffers: Vec<Buffer>,
    matrices: Vec<Matrix>,
    vectors: Vec<Vector>,
}

impl Builder<'_> {
    fn buffer(&mut self, label: String, bytes: u64, fill: Fill) -> Result<BufferId> {
        let bytes = bytes.next_multiple_of(128);
        if bytes > self.options.max_binding {
            let limit = self.options.max_binding;
            bail!(
                OutOfMemory,
                "buffer {label} needs {bytes} bytes, the device binds {limit} at once; a smaller --ctx would help"
            );
        }
        self.buffers.push(Buffer { label, bytes, fill });
        Ok(self.buffers.len() - 1)
    }

    fn floats(&mut self, label: impl Into<String>, count: usize) -> Result<BufferId> {
        self.buffer(label.into(), count as u64 * 4, Fill::Zero)
    }

    fn words(&mut self, label: &str, count: usize) -> Result<BufferId> {
        self.floats(label, count)
    }

    /// Columns of activations, each padded to whole units.
    fn columns(&mut self, label: &str, elements: usize, columns: usize) -> Result<BufferId> {
        self.floats(label, elements.next_multiple_of(32) * columns)
    }

    fn vector(&mut self, label: String, pieces: Vec<Piece>, add: f32) -> VectorId {
        self.vectors.push(Vector { label, pieces, add });
        self.vectors.len() - 1
    }

    /// The stacked biases of sibling maps, or `None` if no sibling has one.
    fn biases(&mut self, label: String, siblings: &[&Linear]) -> Result<Option<VectorId>> {
        if siblings.iter().all(|linear| linear.bias.is_none()) {
            return Ok(None);
        }
        let pieces = siblings
            .iter()
            .map(|linear| Piece {
                tensor: linear.bias,
                len: linear.rows,
            })
            .collect();
        Ok(Some(self.vector(label, pieces, 0.0)))
    }

    fn planes(&self, tensor: TensorId) -> Result<Planes> {
        weights::planes(self.tensors, tensor)
    }

    fn matrix(&mut self, label: String, parts: &[TensorId], pair: bool) -> Result<MatrixId> {
        let matrix = Matrix::stack(label, parts, pair, self.tensors, self.options.max_binding)?;
        self.matrices.push(matrix);
        Ok(self.matrices.len() - 1)
    }
}

struct Walk<'a> {
    b: Builder<'a>,
    model: &'a Model,
    fixed: Fixed,
    ropes: Vec<BufferId>,
    none: VectorId,
    decode: Program,
    prefill: Program,
}

impl Walk<'_> {
    fn push(&mut self, mode: Mode, label: String, op: Op, planes: Option<Planes>, bindings: Vec<Bind>) {
        let grid = Grid::of(&op);
        let step = Step {
            label,
            op,
            planes,
            bindings,
            grid,
        };
        match mode {
            Mode::Decode => self.decode.steps.push(step),
            Mode::Prefill => self.prefill.steps.push(step),
        }
    }

    fn vector(&mut self, label: String, tensor: TensorId) -> VectorId {
        let len = self.b.tensors.infos()[tensor].rows_cols().1;
        self.b.vector(
            label,
            vec![Piece {
                tensor: Some(tensor),
                len,
            }],
            self.model.norm_add,
        )
    }

    fn norm_vector(&mut self, layer: usize, tensor: TensorId) -> VectorId {
        let last = layer == self.model.layers.len();
        self.vector(
            if last {
                "head.norm".into()
            } else {
                format!("layer.{layer:02}.attn.norm")
            },
            tensor,
        )
    }

    fn embed(&mut self, mode: Mode, matrix: MatrixId, scratch: &Scratch, tokens: BufferId) {
        let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let units = segment.geometry.units() as u32;
            let op = Op::Embed(kernel::Embed {
                rows: segment.geometry.rows as u32,
                units,
                row0: segment.row0,
                multiplier: self.model.embed_multiplier,
            });
            let bindings = vec![
                Bind::Weight(matrix, i),
                Bind::Buffer(self.fixed.ctl),
                Bind::Buffer(tokens),
                Bind::Buffer(scratch.h),
            ];
            self.push(mode, "embed".into(), op, Some(planes), bindings);
        }
    }

    fn vectors_of(elements: usize) -> u32 {
        (elements.next_multiple_of(32) / 4) as u32
    }

    fn prep(&mut self, mode: Mode, source: BufferId, scratch: &Scratch, norm: VectorId) {
        let vectors = Self::vectors_of(self.model.hidden);
        let bindings = vec![
            Bind::Buffer(self.fixed.ctl),
            Bind::Buffer(source),
            Bind::Vector(norm),
            Bind::Buffer(scratch.hg),
            Bind::Buffer(scratch.squares),
        ];
        self.push(mode, "prep".into(), Op::Prep(kernel::Prep { vectors }), None, bindings);
    }
}

// Decode and prefill of one layer.
impl Walk<'_> {
    /// Both modes of h += attention(norm(h)).
    fn attention(
        &mut self,
        layer: usize,
        attention: &Attention,
        decode: &Scratch,
        prefill: &Scratch,
        norm: VectorId,
        next_norm: VectorId,
    ) -> Result<()> {
        let name = |part: &str| format!("layer.{layer:02}.attn.{part}");
        let model = self.model;
        let head_vectors = (model.head_dim / 4) as u32;
        let (heads, kv_heads) = (attention.heads as u32, attention.kv_heads as u32);
        let positions = self.b.options.ctx;
        let blocks = positions.div_ceil(ATTENTION_BLOCK);
        let cache_bytes =
            (attention.kv_heads * model.head_dim) as u64 * u64::from(positions) * self.b.options.kv.bytes();
        let k_cache = self.b.buffer(name("k_cache"), cache_bytes, Fill::Zero)?;
        let v_cache = self.b.buffer(name("v_cache"), cache_bytes, Fill::Zero)?;
        let window = attention.window.unwrap_or(0) as u32;
        let y_stride = Self::vectors_of(attention.heads * model.head_dim);

        self.norm(prefill.h, prefill.hg, norm, &name("norm"));
        self.projections(
            &name("qkv"),
            &[&attention.q, &attention.k, &attention.v],
            decode,
            prefill,
        )?;

        let qk_norm = [attention.q_norm, attention.k_norm];
        let head_norms = match qk_norm {
            [Some(q), Some(k)] => [self.vector(name("q_norm"), q), self.vector(name("k_norm"), k)],
            _ => [self.none, self.none],
        };
        let rope = Op::Rope(kernel::Rope {
            heads,
            kv_heads,
            head_vectors,
            rot_vectors: (model.ropes[attention.rope].inv_freq.len() / 4) as u32,
            positions,
            eps: model.eps,
            qk_norm: u32::from(qk_norm[0].is_some()),
        });
        for (mode, scratch) in [(Mode::Decode, decode), (Mode::Prefill, prefill)] {
            let bindings = vec![
                Bind::Buffer(self.fixed.ctl),
                Bind::Buffer(self.ropes[attention.rope]),
                Bind::Vector(head_norms[0]),
                Bind::Vector(head_norms[1]),
                Bind::Buffer(scratch.qkv),
                Bind::Buffer(k_cache),
                Bind::Buffer(v_cache),
            ];
            self.push(mode, name("rope"), rope, None, bindings);
        }

        let (scale, softcap) = (model.attn_scale, 0.0);
        let caches = |scratch: &Scratch, out| {
            [self.fixed.ctl, scratch.qkv, k_cache, v_cache, out]
                .map(Bind::Buffer)
                .to_vec()
        };
        let block = kernel::AttnBlock {
            heads,
            kv_heads,
            head_vectors,
            positions,
            blocks,
            scale,
            softcap,
            window,
        };
        let chunk = kernel::AttnChunk {
            heads,
            kv_heads,
            head_vectors,
            positions,
            scale,
            softcap,
            window,
            y_stride,
        };
        let merge = kernel::AttnMerge {
            heads,
            head_vectors,
            blocks,
            scale,
            softcap,
            window,
            y_stride,
        };
        let (block_bindings, chunk_bindings) = (caches(decode, decode.part), caches(prefill, prefill.attn));
        let merge_bindings = [self.fixed.ctl, decode.part, decode.attn].map(Bind::Buffer).to_vec();
        self.push(Mode::Decode, name("block"), Op::AttnBlock(block), None, block_bindings);
        self.push(Mode::Decode, name("merge"), Op::AttnMerge(merge), None, merge_bindings);
        self.push(Mode::Prefill, name("chunk"), Op::AttnChunk(chunk), None, chunk_bindings);

        self.residual(
            &name("o"),
            &attention.o,
            decode,
            prefill,
            [decode.attn, prefill.attn],
            next_norm,
        )
    }

    /// Both modes of h += ffn(norm(h)).
    fn ffn(
        &mut self,
        layer: usize,
        ffn: &Ffn,
        decode: &Scratch,
        prefill: &Scratch,
        norm: VectorId,
        next_norm: VectorId,
    ) -> Result<()> {
        let name = |part: &str| format!("layer.{layer:02}.ffn.{part}");
        self.norm(prefill.h, prefill.hg, norm, &name("norm"));
        if self.b.planes(ffn.gate.weight)? != self.b.planes(ffn.up.weight)? {
            bail!(
                UnsupportedModel,
                "layer {layer}: gate and up projections of different types are not supported yet"
            );
        }
        let width = ffn.gate.rows;
        let matrix = self
            .b
            .matrix(name("gate_up"), &[ffn.gate.weight, ffn.up.weight], true)?;
        let bias_up = width.next_multiple_of(4);
        let bias = match (ffn.gate.bias, ffn.up.bias) {
            (None, None) => None,
            (gate, up) => {
                let pieces = [(gate, width), (None, bias_up - width), (up, width)];
                let pieces = pieces.map(|(tensor, len)| Piece { tensor, len }).to_vec();
                Some(self.b.vector(name("gate_up.bias"), pieces, 0.0))
            }
        };
        let model = self.model;
        let gelu = u32::from(model.activation == Activation::GeluTanh);
        let has_bias = u32::from(bias.is_some());
        let bias = Bind::Vector(bias.unwrap_or(self.none));
        let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let (rows, units) = (segment.geometry.rows as u32, segment.geometry.units() as u32);
            let [_, part1, part2] = segment.part_rows;
            let weight = Bind::Weight(matrix, i);
            let row0 = segment.row0;
            let op = Op::MatvecGlu(kernel::MatvecGlu {
                rows,
                units,
                row0,
                part1,
                part2,
                square_vectors: square_vectors(model.hidden),
                inv_cols: 1.0 / model.hidden as f32,
                eps: model.eps,
                has_bias,
                bias_up: bias_up as u32,
                gelu,
            });
            let bindings = vec![
                weight,
                Bind::Buffer(decode.hg),
                Bind::Buffer(decode.squares),
                bias,
                Bind::Buffer(decode.act),
            ];
            self.push(Mode::Decode, name("gate_up"), op, Some(planes), bindings);

            let y_stride = Self::vectors_of(width);
            let op = Op::MatmulGlu(kernel::MatmulGlu {
                rows,
                units,
                row0,
                part1,
                part2,
                y_stride,
                has_bias,
                bias_up: bias_up as u32,
                gelu,
            });
            let bindings = vec![
                weight,
                Bind::Buffer(self.fixed.ctl),
                Bind::Buffer(prefill.hg),
                bias,
                Bind::Buffer(prefill.act),
            ];
            self.push(Mode::Prefill, name("gate_up"), op, Some(planes), bindings);
        }
        self.residual(
            &name("down"),
            &ffn.down,
            decode,
            prefill,
            [decode.act, prefill.act],
            next_norm,
        )
    }

    /// Sibling maps of the normalised stream into `qkv`: those with one device layout are stacked.
    fn projections(&mut self, label: &str, siblings: &[&Linear], decode: &Scratch, prefill: &Scratch) -> Result<()> {
        let total: usize = siblings.iter().map(|linear| linear.rows).sum();
        let bias = self.b.biases(format!("{label}.bias"), siblings)?;
        let mut first = 0;
        let mut rest = siblings;
        while let [head, ..] = rest {
            let planes = self.b.planes(head.weight)?;
            let mut same = 1;
            while same < rest.len() && self.b.planes(rest[same].weight)? == planes {
                same += 1;
            }
            let (stacked, others) = rest.split_at(same);
            let parts: Vec<_> = stacked.iter().map(|linear| linear.weight).collect();
            let matrix = self.b.matrix(label.into(), &parts, false)?;
            let from = Source {
                matrix,
                bias,
                row0: first as u32,
            };
            self.matvec(from, decode, decode.qkv, label);
            self.matmul_from(from, prefill.hg, prefill.qkv, (total / 4) as u32, label);
            first += stacked.iter().map(|linear| linear.rows).sum::<usize>();
            rest = others;
        }
        Ok(())
    }

    fn matvec(&mut self, from: Source, scratch: &Scratch, y: BufferId, label: &str) {
        let model = self.model;
        let Matrix { planes, segments, .. } = self.b.matrices[from.matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let rows = segment.geometry.rows as u32;
            let op = Op::Matvec(kernel::Matvec {
                rows,
                units: segment.geometry.units() as u32,
                row0: from.row0 + segment.row0,
                part1: segment.part_rows[1],
                part2: segment.part_rows[2],
                square_vectors: square_vectors(model.hidden),
                inv_cols: 1.0 / model.hidden as f32,
                eps: model.eps,
                has_bias: u32::from(from.bias.is_some()),
            });
            let bindings = vec![
                Bind::Weight(from.matrix, i),
                Bind::Buffer(scratch.hg),
                Bind::Buffer(scratch.squares),
                Bind::Vector(from.bias.unwrap_or(self.none)),
                Bind::Buffer(y),
            ];
            self.push(Mode::Decode, label.into(), op, Some(planes), bindings);
        }
    }

    fn matmul(
        &mut self,
        matrix: MatrixId,
        bias: Option<VectorId>,
        x: BufferId,
        y: BufferId,
        outputs: usize,
        label: &str,
    ) {
        self.matmul_from(Source { matrix, bias, row0: 0 }, x, y, Self::vectors_of(outputs), label);
    }

    fn matmul_from(&mut self, from: Source, x: BufferId, y: BufferId, y_stride: u32, label: &str) {
        let Matrix { planes, segments, .. } = self.b.matrices[from.matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let rows = segment.geometry.rows as u32;
            let op = Op::Matmul(kernel::Matmul {
                rows,
                units: segment.geometry.units() as u32,
                row0: from.row0 + segment.row0,
                part1: segment.part_rows[1],
                part2: segment.part_rows[2],
                y_stride,
                has_bias: u32::from(from.bias.is_some()),
            });
            let bindings = vec![
                Bind::Weight(from.matrix, i),
                Bind::Buffer(self.fixed.ctl),
                Bind::Buffer(x),
                Bind::Vector(from.bias.unwrap_or(self.none)),
                Bind::Buffer(y),
            ];
            self.push(Mode::Prefill, label.into(), op, Some(planes), bindings);
        }
    }

    /// Both modes of h += linear(x), the decode mode preparing the next norm.
    fn residual(
        &mut self,
        label: &str,
        linear: &Linear,
        decode: &Scratch,
        prefill: &Scratch,
        x: [BufferId; 2],
        next_norm: VectorId,
    ) -> Result<()> {
        let matrix = self.b.matrix(label.into(), &[linear.weight], false)?;
        let bias = self.b.biases(format!("{label}.bias"), &[linear])?;
        let has_bias = u32::from(bias.is_some());
        let bias = Bind::Vector(bias.unwrap_or(self.none));
        let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let (rows, units) = (segment.geometry.rows as u32, segment.geometry.units() as u32);
            let [_, part1, part2] = segment.part_rows;
            let row0 = segment.row0;
            let op = Op::MatvecAdd(kernel::MatvecAdd {
                rows,
                units,
                row0,
                part1,
                part2,
                has_bias,
            });
            let bindings = vec![
                Bind::Weight(matrix, i),
                Bind::Buffer(x[0]),
                bias,
                Bind::Vector(next_norm),
                Bind::Buffer(decode.h),
                Bind::Buffer(decode.hg),
                Bind::Buffer(decode.squares),
            ];
            self.push(Mode::Decode, label.into(), op, Some(planes), bindings);

            let y_stride = Self::vectors_of(linear.rows);
            let op = Op::MatmulAdd(kernel::MatmulAdd {
                rows,
                units,
                row0,
                part1,
                part2,
                y_stride,
                has_bias,
            });
            let bindings = vec![
                Bind::Weight(matrix, i),
                Bind::Buffer(self.fixed.ctl),
                Bind::Buffer(x[1]),
                bias,
                Bind::Buffer(prefill.h),
            ];
            self.push(Mode::Prefill, label.into(), op, Some(planes), bindings);
        }
        Ok(())
    }

    fn norm(&mut self, x: BufferId, y: BufferId, norm: VectorId, label: &str) {
        let op = Op::Norm(kernel::Norm {
            vectors: Self::vectors_of(self.model.hidden),
            inv_cols: 1.0 / self.model.hidden as f32,
            eps: self.model.eps,
        });
        let bindings = vec![
            Bind::Buffer(self.fixed.ctl),
            Bind::Buffer(x),
            Bind::Vector(norm),
            Bind::Buffer(y),
        ];
        self.push(Mode::Prefill, label.into(), op, None, bindings);
    }

    /// Logits of one column and the choice of the next token.
    fn head(&mut self, lm_head: MatrixId, bias: Option<VectorId>, scratch: &Scratch, logits: BufferId) {
        self.matvec(
            Source {
                matrix: lm_head,
                bias,
                row0: 0,
            },
            scratch,
            logits,
            "head",
        );
        let op = Op::Sample(kernel::Sample {
            vocab: self.model.vocab as u32,
        });
        let bindings = [self.fixed.settings, logits, self.fixed.ctl].map(Bind::Buffer).to_vec();
        self.push(Mode::Decode, "sample".into(), op, None, bindings);
    }
}

#[derive(Clone, Copy)]
struct Source {
    matrix: MatrixId,
    bias: Option<VectorId>,
    row0: u32,
}

/// Vectors of 4 sums of squares, each over 4 elements.
fn square_vectors(hidden: usize) -> u32 {
    hidden.div_ceil(16) as u32
}
