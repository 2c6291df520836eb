//! Rigs of mixtures of experts: one bank, and for each kernel what the ones before it would have left.

use super::random::{Random, operands, padded, words};
use super::{CTL, Maker};
use crate::container::Tensors;
use crate::error::Result;
use crate::kernel::{self, Op};
use crate::parity::cases::{Moe, MoePart};
use crate::program::{ABSENT, Bind, BufferId, Matrix, Measured, Slice, Stack};
use std::sync::Arc;

/// Entries of a tile.
const TILE: usize = 8;

impl Maker {
    pub(super) fn moe(&mut self, spec: &Moe, max_binding: u64) -> Result<Arc<dyn Tensors>> {
        let (places, placed) = places(spec);
        let mut matrix = None;
        let shared = if spec.part.is_glu() { spec.shared } else { 0 };
        if spec.part.has_weights() {
            let projections = if spec.part.is_glu() { 2 } else { 1 };
            let mut slices = |count: usize, rows: usize| -> Result<Vec<Slice>> {
                let slice = |_| {
                    let tensor = self.tensor(spec.dtype, rows, spec.cols, spec.amplitude, spec.overlay)?;
                    Ok(Slice { tensor, first: 0, rows })
                };
                (0..count).map(slice).collect()
            };
            let first = slices(if shared == 0 { 0 } else { 2 }, shared)?;
            let count = match spec.part {
                MoePart::SharedUp => 1,
                _ => placed * projections,
            };
            let cut = slices(count, spec.outputs)?;
            matrix = Some((first, cut));
        }
        let g = self.vector("g", spec.outputs)?;
        let tensors = self.tensors()?;
        if let Some((first, cut)) = matrix {
            let planes = crate::dtype::planes::Planes::of(spec.dtype, spec.cols)?;
            let limit = max_binding.min(spec.max_binding);
            let stack = Stack {
                first: &first,
                cut: &cut,
                pool: &[],
            };
            let measured = Measured::default();
            let tensors = (&*tensors, &measured);
            let matrix = Matrix::sliced("experts".into(), (planes, spec.cols), stack, tensors, limit)?;
            self.matrices.push(matrix);
        }
        let mut rig = MoeRig {
            spec,
            places,
            placed,
            shared,
            g,
            table: self.buffer("experts", 8 + 2 * spec.experts),
        };
        match spec.part {
            MoePart::Glu => rig.glu(self),
            MoePart::Gate | MoePart::Up | MoePart::SharedUp => rig.matvec(self),
            MoePart::Down => rig.down(self),
            MoePart::Route => rig.route(self),
            MoePart::Count => rig.count(self),
            MoePart::Lists => rig.lists(self),
            MoePart::MatmulGlu | MoePart::MatmulUp | MoePart::Matmul => rig.matmul(self),
            MoePart::Combine => rig.combine(self),
        }
        Ok(tensors)
    }
}

/// The place of each expert, and how many have one.
fn places(spec: &Moe) -> (Vec<u32>, usize) {
    let mut placed = 0;
    let place = |expert: usize| match spec.partial && expert % 3 == 2 {
        true => ABSENT,
        false => {
            placed += 1;
            placed - 1
        }
    };
    let places = (0..spec.experts).map(place).collect();
    (places, placed as usize)
}

struct MoeRig<'s> {
    spec: &'s Moe,
    places: Vec<u32>,
    placed: usize,
    shared: usize,
    g: Bind,
    table: BufferId,
}

/// What kernels read that choose experts themselves.
#[derive(Clone, Copy)]
struct Choosing {
    x: BufferId,
    squares: BufferId,
    router: BufferId,
    /// Where they leave places and weights.
    routes_at: usize,
}

impl MoeRig<'_> {
    fn most(&self) -> usize {
        self.spec.columns.iter().copied().max().unwrap_or(1) as usize
    }

    /// The index of the shared expert's logit, and the length of a column of logits.
    fn logits_len(&self) -> (usize, usize) {
        (self.spec.experts, (self.spec.experts + 1).next_multiple_of(4))
    }

    fn table(&self, random: &mut Random) -> Vec<u32> {
        let spec = self.spec;
        let (gate, _) = self.logits_len();
        let mut table = vec![
            spec.experts as u32,
            spec.top_k as u32,
            u32::from(spec.sigmoid),
            u32::from(spec.renormalise),
            u32::from(spec.biased),
            if spec.gated { gate as u32 } else { ABSENT },
            1.5f32.to_bits(),
            0,
        ];
        for &place in &self.places {
            let bits = random.bits();
            // Equal biases where logits are equal, too.
            let bias = match spec.ties {
                true => (bits >> 40) as u32 as f32 % 3.0 * 0.25,
                false => Random::unit(bits) * 0.5,
            };
            table.extend([place, bias.to_bits()]);
        }
        table
    }

    /// Logits of the experts and of the shared one.
    fn logits(&self, random: &mut Random) -> Vec<u32> {
        let mut value = |_| {
            let bits = random.bits();
            match self.spec.ties {
                // Both zeros are the largest.
                true => [0.0, -0.0, -0.5, -1.0, -4.0][(bits >> 40) as usize % 5],
                false => Random::unit(bits) * 6.0,
            }
        };
        words(&(0..=self.spec.experts).map(&mut value).collect::<Vec<_>>())
    }

    /// Experts of one column in a made-up order, each once.
    fn chosen(&self, random: &mut Random) -> Vec<u32> {
        let mut all: Vec<u32> = (0..self.spec.experts as u32).collect();
        for i in 0..self.spec.top_k {
            let j = i + (random.bits() % (self.spec.experts - i) as u64) as usize;
            all.swap(i, j);
        }
        all.truncate(self.spec.top_k);
        all
    }

    /// The buffers that kernels read which choose experts themselves.
    fn choosing(&self, maker: &mut Maker) -> Choosing {
        let (spec, most, (_, logits)) = (self.spec, self.most(), self.logits_len());
        let routes_at = logits * most;
        Choosing {
            x: maker.buffer("x", spec.cols.next_multiple_of(32) * most),
            squares: maker.buffer("squares.in", self.sums() * most),
            router: maker.buffer("router", routes_at + 2 * spec.top_k * most),
            routes_at,
        }
    }

    /// Sums of squares of a column, padded.
    fn sums(&self) -> usize {
        (self.spec.cols.div_ceil(16) * 4).next_multiple_of(32)
    }

    fn choosing_inputs(&self, maker: &mut Maker, choosing: Choosing, columns: u32) -> Vec<(BufferId, Vec<u32>)> {
        let (cols, n) = (self.spec.cols, columns as usize);
        let mut squares = padded(&mut maker.random, n, cols.div_ceil(4), self.sums(), 1.0);
        squares
            .iter_mut()
            .for_each(|word| *word = f32::from_bits(*word).abs().to_bits());
        vec![
            (self.table, self.table(&mut maker.random)),
            (choosing.router, self.columns_of_logits(maker, columns)),
            (
                choosing.x,
                operands(&mut maker.random, n, cols, cols.next_multiple_of(32)),
            ),
            (choosing.squares, squares),
        ]
    }

    fn glu(&mut self, maker: &mut Maker) {
        let spec = self.spec;
        let (units, width) = (spec.cols.div_ceil(32), spec.outputs.next_multiple_of(32));
        let (most, (_, logits)) = (self.most(), self.logits_len());
        let choosing = self.choosing(maker);
        let shared_stride = self.shared.next_multiple_of(32);
        let y_at = shared_stride * most;
        let y = maker.buffer("y", y_at + spec.top_k * width * most);
        for (i, segment) in maker.matrices[0].clone().segments.iter().enumerate() {
            let rows = segment.geometry.rows;
            let op = Op::MoeGlu(kernel::MoeGlu {
                rows: rows as u32,
                units: units as u32,
                outputs: ((rows - 2 * self.shared) / (2 * self.placed)) as u32,
                placed: self.placed as u32,
                shared_outputs: self.shared as u32,
                first_shared: spec.top_k as u32,
                row0: segment.row0,
                y_at: y_at as u32,
                y_stride: width as u32,
                shared_stride: shared_stride as u32,
                stride: logits as u32,
                routes_at: choosing.routes_at as u32,
                square_vectors: spec.cols.div_ceil(16) as u32,
                inv_cols: 1.0 / spec.cols as f32,
                eps: 1e-2,
                gelu: u32::from(spec.gelu),
            });
            let Choosing { x, squares, router, .. } = choosing;
            let buffers = [x, squares, self.table, router, y].map(Bind::Buffer);
            maker.step(op, [&[Bind::Weight(0, i)], &buffers[..]].concat());
            maker.widen(most as u32);
        }
        for &columns in &spec.columns {
            let inputs = self.choosing_inputs(maker, choosing, columns);
            maker.round(0, columns, inputs);
        }
    }

    fn matvec(&mut self, maker: &mut Maker) {
        let spec = self.spec;
        let (units, width) = (spec.cols.div_ceil(32), spec.outputs.next_multiple_of(32));
        let (most, (_, logits)) = (self.most(), self.logits_len());
        let choosing = self.choosing(maker);
        let (placed, slots) = match spec.part {
            MoePart::SharedUp => (1, 0),
            _ => (self.placed, spec.top_k),
        };
        let y_at = 64;
        let y = maker.buffer("y", y_at + slots.max(1) * width * most);
        for (i, segment) in maker.matrices[0].clone().segments.iter().enumerate() {
            let rows = segment.geometry.rows;
            let op = Op::MoeMatvec(kernel::MoeMatvec {
                rows: rows as u32,
                units: units as u32,
                outputs: (rows / placed) as u32,
                slots: slots as u32,
                row0: segment.row0,
                y_at: (y_at / 4) as u32,
                y_stride: (width / 4) as u32,
                stride: logits as u32,
                routes_at: choosing.routes_at as u32,
                square_vectors: spec.cols.div_ceil(16) as u32,
                inv_cols: 1.0 / spec.cols as f32,
                eps: 1e-2,
                gated: u32::from(spec.part != MoePart::Gate),
                gelu: u32::from(spec.gelu),
            });
            let Choosing { x, squares, router, .. } = choosing;
            let buffers = [x, squares, self.table, router, y].map(Bind::Buffer);
            maker.step(op, [&[Bind::Weight(0, i)], &buffers[..]].concat());
            maker.widen(most as u32);
        }
        for &columns in &spec.columns {
            let mut inputs = self.choosing_inputs(maker, choosing, columns);
            let mut gates = vec![0; y_at];
            let count = columns as usize * slots.max(1);
            gates.extend(padded(&mut maker.random, count, spec.outputs, width, 4.0));
            inputs.push((y, gates));
            maker.round(0, columns, inputs);
        }
    }

    fn down(&mut self, maker: &mut Maker) {
        let spec = self.spec;
        let (most, units) = (self.most(), spec.cols.div_ceil(32));
        let len = spec.outputs.next_multiple_of(32);
        let sums = (len / 4).next_multiple_of(32);
        let (x_at, routes_at) = (2, 6);
        let router = maker.buffer("router", routes_at + 2 * spec.top_k * most);
        let x = maker.buffer("x", (x_at + spec.top_k * units * most) * 32);
        let h = maker.buffer("h", len * most);
        let (hg, squares) = (maker.buffer("hg", len * most), maker.buffer("squares", sums * most));
        for (i, segment) in maker.matrices[0].clone().segments.iter().enumerate() {
            let rows = segment.geometry.rows as u32;
            let op = Op::MoeDown(kernel::MoeDown {
                rows,
                units: units as u32,
                inv_units: 1.0 / units as f32,
                outputs: rows / self.placed as u32,
                row0: segment.row0,
                slots: spec.top_k as u32,
                x_at: x_at as u32,
                routes_at: routes_at as u32,
                y_stride: (len / 4) as u32,
            });
            let bindings = vec![
                Bind::Weight(0, i),
                Bind::Buffer(router),
                Bind::Buffer(x),
                self.g,
                Bind::Buffer(h),
                Bind::Buffer(hg),
                Bind::Buffer(squares),
            ];
            maker.step(op, bindings);
            maker.widen(most as u32);
        }
        for &columns in &spec.columns {
            let n = columns as usize;
            let mut routes = vec![0; routes_at];
            for _ in 0..n {
                for expert in self.chosen(&mut maker.random) {
                    let weight = Random::unit(maker.random.bits());
                    routes.extend([self.places[expert as usize], weight.to_bits()]);
                }
            }
            let mut activations = vec![0; x_at * 32];
            activations.extend(operands(&mut maker.random, n * spec.top_k, spec.cols, units * 32));
            let stream = padded(&mut maker.random, n, spec.outputs, len, 1.0);
            maker.round(0, columns, vec![(router, routes), (x, activations), (h, stream)]);
        }
    }

    fn route(&mut self, maker: &mut Maker) {
        let spec = self.spec;
        let (_, stride) = self.logits_len();
        let router = maker.buffer("router", stride * self.most());
        let routes = maker.buffer("routes", 2 * (spec.top_k + 1) * self.most());
        let op = Op::MoeRoute(kernel::MoeRoute {
            stride: stride as u32,
            shared_expert: u32::from(spec.shared != 0),
        });
        maker.step(op, [CTL, self.table, router, routes].map(Bind::Buffer).to_vec());
        for &columns in &spec.columns {
            let table = self.table(&mut maker.random);
            let logits = self.columns_of_logits(maker, columns);
            maker.round(0, columns, vec![(self.table, table), (router, logits)]);
        }
    }

    fn columns_of_logits(&self, maker: &mut Maker, columns: u32) -> Vec<u32> {
        let (_, stride) = self.logits_len();
        let mut logits = Vec::new();
        for _ in 0..columns {
            logits.extend(self.logits(&mut maker.random));
            logits.resize(logits.len().next_multiple_of(stride), 0);
        }
        logits
    }

    fn count(&mut self, maker: &mut Maker) {
        let spec = self.spec;
        let (_, stride) = self.logits_len();
        let router = maker.buffer("router", stride * self.most());
        let counts = maker.buffer("counts", spec.experts);
        let op = Op::MoeCount(kernel::MoeCount { stride: stride as u32 });
        maker.step(op, [CTL, self.table, router, counts].map(Bind::Buffer).to_vec());
        for &columns in &spec.columns {
            let table = self.table(&mut maker.random);
            let logits = self.columns_of_logits(maker, columns);
            // Of earlier runs.
            let before = (0..spec.experts as u32).map(|expert| expert % 5).collect();
            let inputs = vec![(self.table, table), (router, logits), (counts, before)];
            maker.round(0, columns, inputs);
        }
    }

    fn tiles(&self) -> usize {
        let entries = self.most() * self.spec.top_k;
        entries.div_ceil(TILE) + self.spec.experts.min(entries)
    }

    fn lists(&mut self, maker: &mut Maker) {
        let spec = self.spec;
        let entries = self.most() * spec.top_k;
        let routes = maker.buffer("routes", 2 * (spec.top_k + 1) * self.most());
        let lists = maker.buffer("lists", 3 * self.tiles() + entries);
        let op = Op::MoeLists(kernel::MoeLists {
            tiles: self.tiles() as u32,
        });
        maker.step(op, [CTL, self.table, routes, lists].map(Bind::Buffer).to_vec());
        for &columns in &spec.columns {
            let table = self.table(&mut maker.random);
            let ids = self.routes(maker, columns);
            maker.round(0, columns, vec![(self.table, table), (routes, ids)]);
        }
    }

    /// Experts and weights of so many columns.
    fn routes(&self, maker: &mut Maker, columns: u32) -> Vec<u32> {
        let mut routes = Vec::new();
        for _ in 0..columns {
            for expert in self.chosen(&mut maker.random) {
                routes.extend([expert, Random::unit(maker.random.bits()).to_bits()]);
            }
            let shared = if self.spec.shared == 0 { 0.0 } else { 0.75f32 };
            routes.extend([0, shared.to_bits()]);
        }
        routes
    }

    fn matmul(&mut self, maker: &mut Maker) {
        let spec = self.spec;
        let units = spec.cols.div_ceil(32);
        let width = spec.outputs.next_multiple_of(32);
        let entries = self.most() * spec.top_k;
        let x_entries = if spec.part == MoePart::Matmul { 1 } else { spec.top_k };
        let lists = maker.buffer("lists", 3 * self.tiles() + entries);
        let x = maker.buffer("x", units * 32 * entries / x_entries);
        let y = maker.buffer("y", width * entries);
        for (i, segment) in maker.matrices[0].clone().segments.iter().enumerate() {
            let (rows, row0, units) = (segment.geometry.rows, segment.row0, units as u32);
            let (y_stride, tiles) = ((width / 4) as u32, self.tiles() as u32);
            let op = match spec.part {
                MoePart::MatmulGlu => Op::MoeMatmulGlu(kernel::MoeMatmulGlu {
                    rows: rows as u32,
                    units,
                    outputs: ((rows - 2 * self.shared) / (2 * self.placed)) as u32,
                    placed: self.placed as u32,
                    shared_outputs: self.shared as u32,
                    row0,
                    y_stride,
                    x_entries: x_entries as u32,
                    tiles,
                    gelu: u32::from(spec.gelu),
                }),
                MoePart::MatmulUp => Op::MoeMatmulUp(kernel::MoeMatmulUp {
                    rows: rows as u32,
                    units,
                    outputs: (rows / self.placed) as u32,
                    row0,
                    y_stride,
                    x_entries: x_entries as u32,
                    tiles,
                    gelu: u32::from(spec.gelu),
                }),
                _ => Op::MoeMatmul(kernel::MoeMatmul {
                    rows: rows as u32,
                    units,
                    outputs: (rows / self.placed) as u32,
                    row0,
                    y_stride,
                    x_entries: 1,
                    top_k: spec.top_k as u32,
                    tiles,
                }),
            };
            let buffers = [CTL, self.table, lists, x, y].map(Bind::Buffer);
            maker.step(op, [&[Bind::Weight(0, i)], &buffers[..]].concat());
        }
        for &columns in &spec.columns {
            let table = self.table(&mut maker.random);
            let mut by_expert = vec![Vec::new(); spec.experts];
            for column in 0..columns {
                for (rank, expert) in self.chosen(&mut maker.random).into_iter().enumerate() {
                    by_expert[expert as usize].push(column * spec.top_k as u32 + rank as u32);
                }
            }
            let (mut tasks, mut listed) = (Vec::new(), Vec::new());
            for (expert, entries) in by_expert.iter().enumerate() {
                for tile in entries.chunks(TILE) {
                    tasks.extend([expert as u32, listed.len() as u32, tile.len() as u32]);
                    listed.extend_from_slice(tile);
                }
            }
            tasks.resize(3 * self.tiles(), 0);
            tasks.extend(listed);
            let count = columns as usize * spec.top_k / x_entries;
            let activations = operands(&mut maker.random, count, spec.cols, units * 32);
            let mut inputs = vec![(self.table, table), (lists, tasks), (x, activations)];
            if spec.part == MoePart::MatmulUp {
                let count = columns as usize * spec.top_k;
                inputs.push((y, padded(&mut maker.random, count, spec.outputs, width, 4.0)));
            }
            maker.round(0, columns, inputs);
        }
    }

    fn combine(&mut self, maker: &mut Maker) {
        let spec = self.spec;
        let (most, len) = (self.most(), spec.cols);
        let routes = maker.buffer("routes", 2 * (spec.top_k + 1) * most);
        let parts = maker.buffer("parts", len * spec.top_k * most);
        let shared = maker.buffer("shared_y", len * most);
        let h = maker.buffer("h", len * most);
        let op = Op::MoeCombine(kernel::MoeCombine {
            vectors: (len / 4) as u32,
            top_k: spec.top_k as u32,
        });
        maker.step(op, [CTL, routes, parts, shared, h].map(Bind::Buffer).to_vec());
        for &columns in &spec.columns {
            let ids = self.routes(maker, columns);
            let count = columns as usize * len;
            let mut inputs = vec![(routes, ids), (parts, maker.random.words(count * spec.top_k, 1.0))];
            // Without a shared expert nothing may be read here.
            if spec.shared != 0 {
                inputs.push((shared, maker.random.words(count, 1.0)));
            }
            inputs.push((h, maker.random.words(count, 1.0)));
            maker.round(0, columns, inputs);
        }
    }
}
