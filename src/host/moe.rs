//! Mixtures of experts on the host: routing is the reference crate's, products are those of single rows.

use super::linear::{activation, whole_vectors};
use super::{Bound, part, prepared};
use crate::error::{Result, bail};
use crate::kernel;
use crate::program::ABSENT;
use cmf_kernels_ref::op::linear::linear;
use cmf_kernels_ref::op::route::{Routing, route, sigmoid};

/// Words before the experts of a table; see `shaders/lib/experts.wgsl`.
const HEADER: usize = 8;
/// Entries of a tile.
const TILE: u32 = 8;

/// A layer's experts as a bank sees them.
struct Table {
    routing: Routing,
    count: usize,
    biases: Option<Vec<f32>>,
    gate: Option<usize>,
    places: Vec<u32>,
}

impl Table {
    fn place(&self, expert: u32) -> Result<Option<usize>> {
        let place = part(&self.places, expert as usize, 1, "experts")?[0];
        Ok((place != ABSENT).then_some(place as usize))
    }

    /// Chosen experts with their weights, by the logits of one column.
    fn route(&self, logits: &[f32]) -> Result<Vec<(usize, f64)>> {
        let logits = part(logits, 0, self.count, "logits")?;
        Ok(route(logits, self.biases.as_deref(), &self.routing))
    }

    fn shared_weight(&self, logits: &[f32]) -> Result<f64> {
        match self.gate {
            None => Ok(1.0),
            Some(gate) => Ok(sigmoid(f64::from(part(logits, gate, 1, "logits")?[0]))),
        }
    }
}

/// The entries of one tile: the expert, and each entry's number.
struct Task {
    expert: u32,
    entries: Vec<usize>,
}

impl Bound<'_> {
    /// The table of experts in binding `i`.
    fn table(&self, i: usize) -> Result<Table> {
        let words = self.words(i)?;
        let header = part(words, 0, HEADER, "experts")?;
        let count = header[0] as usize;
        let all = part(words, HEADER, count.saturating_mul(2), "experts")?;
        let biases = all.chunks_exact(2).map(|pair| f32::from_bits(pair[1]));
        Ok(Table {
            routing: Routing {
                top_k: header[1] as usize,
                sigmoid: header[2] != 0,
                renormalise: header[3] != 0,
                scale: f64::from(f32::from_bits(header[6])),
            },
            count,
            biases: (header[4] != 0).then(|| biases.collect()),
            gate: (header[5] != ABSENT).then_some(header[5] as usize),
            places: all.chunks_exact(2).map(|pair| pair[0]).collect(),
        })
    }

    /// Σ_k w[first + r][k] · x[c][k] for `count` stored rows: `[columns, count]`; every column of x begins at one of `starts`.
    fn row_products(
        &self,
        first: usize,
        count: usize,
        stored: u32,
        units: u32,
        x: usize,
        starts: &[usize],
    ) -> Result<Vec<f64>> {
        let weights = self.rows(0, stored)?;
        if first.checked_add(count).is_none_or(|end| end > stored as usize) || (units as usize * 32) < weights.cols {
            bail!(
                Usage,
                "rows {first} + {count} of {stored}, {units} units for {} columns",
                weights.cols
            );
        }
        let x = self.floats(x)?;
        let mut y = vec![0.0; starts.len() * count];
        let mut gathered = Vec::with_capacity(starts.len() * weights.cols);
        for &start in starts {
            gathered.extend_from_slice(part(x, start, weights.cols, "x")?);
        }
        let cols = weights.cols;
        linear(
            &weights,
            first..first + count,
            cols,
            &gathered,
            cols,
            starts.len(),
            &mut y,
        );
        Ok(y)
    }

    pub(super) fn moe_glu(&mut self, p: &kernel::MoeGlu) -> Result<()> {
        (0..self.columns).try_for_each(|c| self.moe_glu_column(p, c))
    }

    fn moe_glu_column(&mut self, p: &kernel::MoeGlu, c: usize) -> Result<()> {
        let scale = self.norm_scale(2, c, p.square_vectors, p.inv_cols, p.eps)?;
        let table = self.table(3)?;
        let logits = part(self.floats(4)?, c * p.stride as usize, p.stride as usize, "router")?.to_vec();
        let (outputs, shared) = (p.outputs as usize, p.shared_outputs as usize);
        let x = c * p.units as usize * 32;
        let glu = |bound: &Self, gate: usize, up: usize, outputs: usize, factor: f64| -> Result<Vec<f64>> {
            let gate = bound.row_products(gate, outputs, p.rows, p.units, 1, &[x])?;
            let up = bound.row_products(up, outputs, p.rows, p.units, 1, &[x])?;
            let pairs = gate.iter().zip(&up);
            Ok(pairs
                .map(|(g, u)| activation(p.gelu, g * scale) * u * scale * factor)
                .collect())
        };
        if p.first_shared != 0 {
            for (slot, place) in self.write_routes(&table, &logits, p.routes_at, c)? {
                let gate = 2 * shared + place * outputs;
                let y = glu(self, gate, gate + p.placed as usize * outputs, outputs, 1.0)?;
                let at = p.y_at as usize + slot * p.y_stride as usize + p.row0 as usize;
                self.store(5, at, &y)?;
            }
        }
        if shared != 0 {
            let y = glu(self, 0, shared, shared, table.shared_weight(&logits)?)?;
            self.store(5, c * p.shared_stride as usize + p.row0 as usize, &y)?;
        }
        Ok(())
    }

    /// Writes the place and the weight of what every slot of a column takes; the slots, counted from the first column's, whose
    /// experts are there, with their places.
    fn write_routes(&mut self, table: &Table, logits: &[f32], routes_at: u32, c: usize) -> Result<Vec<(usize, usize)>> {
        let routes = table.route(logits)?;
        let mut there = Vec::new();
        for (slot, &(expert, weight)) in routes.iter().enumerate() {
            let slot = c * routes.len() + slot;
            let place = table.place(expert as u32)?;
            let route = [place.map_or(ABSENT, |place| place as u32), (weight as f32).to_bits()];
            self.words_mut(4, routes_at as usize + 2 * slot, 2)?
                .copy_from_slice(&route);
            there.extend(place.map(|place| (slot, place)));
        }
        Ok(there)
    }

    pub(super) fn moe_matvec(&mut self, p: &kernel::MoeMatvec) -> Result<()> {
        (0..self.columns).try_for_each(|c| self.moe_matvec_column(p, c))
    }

    fn moe_matvec_column(&mut self, p: &kernel::MoeMatvec, c: usize) -> Result<()> {
        let scale = self.norm_scale(2, c, p.square_vectors, p.inv_cols, p.eps)?;
        let table = self.table(3)?;
        let logits = part(self.floats(4)?, c * p.stride as usize, p.stride as usize, "router")?.to_vec();
        let (slots, factor) = match p.slots {
            0 => (vec![(c, 0)], table.shared_weight(&logits)?),
            _ => (self.write_routes(&table, &logits, p.routes_at, c)?, 1.0),
        };
        let (outputs, x) = (p.outputs as usize, c * p.units as usize * 32);
        for (slot, place) in slots {
            let mut y = self.row_products(place * outputs, outputs, p.rows, p.units, 1, &[x])?;
            let at = (p.y_at as usize + slot * p.y_stride as usize) * 4 + p.row0 as usize;
            let gates = part(self.floats(5)?, at, outputs, "gates")?;
            for (y, &gate) in y.iter_mut().zip(gates) {
                *y *= scale;
                if p.gated != 0 {
                    *y *= activation(p.gelu, f64::from(gate)) * factor;
                }
            }
            whole_vectors(&mut y);
            self.store(5, at, &y)?;
        }
        Ok(())
    }

    pub(super) fn moe_down(&mut self, p: &kernel::MoeDown) -> Result<()> {
        (0..self.columns).try_for_each(|c| self.moe_down_column(p, c))
    }

    fn moe_down_column(&mut self, p: &kernel::MoeDown, c: usize) -> Result<()> {
        let outputs = p.outputs as usize;
        let mut y = vec![0.0; outputs];
        let slots = p.slots as usize;
        for slot in c * slots..(c + 1) * slots {
            let route = part(self.words(1)?, p.routes_at as usize + 2 * slot, 2, "routes")?;
            let (place, weight) = (route[0], f64::from(f32::from_bits(route[1])));
            if place == ABSENT {
                continue;
            }
            let start = (p.x_at as usize + slot * p.units as usize) * 32;
            let products = self.row_products(place as usize * outputs, outputs, p.rows, p.units, 2, &[start])?;
            y.iter_mut()
                .zip(products)
                .for_each(|(y, product)| *y += weight * product);
        }
        whole_vectors(&mut y);
        let (stride, row0) = (p.y_stride as usize * 4, p.row0 as usize);
        let at = c * stride + row0;
        let h = part(self.floats(4)?, at, y.len(), "h")?;
        y.iter_mut().zip(h).for_each(|(y, &h)| *y += f64::from(h));
        self.store(4, at, &y)?;
        let h = part(self.floats(4)?, at, y.len(), "h")?;
        let (hg, squares) = prepared(h, part(self.floats(3)?, row0, y.len(), "g")?);
        self.store(5, at, &hg)?;
        self.store(6, c * (stride / 4).next_multiple_of(32) + row0 / 4, &squares)
    }

    pub(super) fn moe_route(&mut self, p: &kernel::MoeRoute) -> Result<()> {
        let table = self.table(1)?;
        for c in 0..self.ctl(0)?.columns as usize {
            let logits = part(self.floats(2)?, c * p.stride as usize, p.stride as usize, "router")?;
            let routes = table.route(logits)?;
            let shared = match p.shared_expert {
                0 => 0.0,
                _ => table.shared_weight(logits)?,
            };
            let words: Vec<u32> = routes
                .iter()
                .chain(&[(0, shared)])
                .flat_map(|&(expert, weight)| [expert as u32, (weight as f32).to_bits()])
                .collect();
            self.words_mut(3, c * words.len(), words.len())?.copy_from_slice(&words);
        }
        Ok(())
    }

    pub(super) fn moe_count(&mut self, p: &kernel::MoeCount) -> Result<()> {
        let table = self.table(1)?;
        for c in 0..self.ctl(0)?.columns as usize {
            let logits = part(self.floats(2)?, c * p.stride as usize, p.stride as usize, "router")?;
            for (expert, _) in table.route(logits)? {
                let count = &mut self.words_mut(3, expert, 1)?[0];
                *count = count.wrapping_add(1);
            }
        }
        Ok(())
    }

    pub(super) fn moe_lists(&mut self, p: &kernel::MoeLists) -> Result<()> {
        let table = self.table(1)?;
        let (columns, top_k) = (self.ctl(0)?.columns as usize, table.routing.top_k);
        let routes = part(self.words(2)?, 0, columns * (top_k + 1) * 2, "routes")?;
        let mut entries = vec![Vec::new(); table.count];
        for entry in 0..columns * top_k {
            let expert = routes[(entry / top_k * (top_k + 1) + entry % top_k) * 2];
            match entries.get_mut(expert as usize) {
                Some(list) => list.push(entry as u32),
                None => bail!(Usage, "expert {expert} of {}", table.count),
            }
        }
        let (mut tiles, mut listed) = (Vec::new(), Vec::new());
        for (expert, list) in entries.iter().enumerate() {
            for tile in list.chunks(TILE as usize) {
                tiles.push([expert as u32, listed.len() as u32, tile.len() as u32]);
                listed.extend_from_slice(tile);
            }
        }
        let room = p.tiles as usize;
        if tiles.len() > room {
            bail!(Usage, "{} tiles, there is room for {room}", tiles.len());
        }
        for (tile, words) in tiles.iter().enumerate() {
            self.words_mut(3, 3 * tile, 3)?.copy_from_slice(words);
        }
        for tile in tiles.len()..room {
            self.words_mut(3, 3 * tile + 2, 1)?[0] = 0;
        }
        self.words_mut(3, 3 * room, listed.len())?.copy_from_slice(&listed);
        Ok(())
    }

    /// The tiles that are needed.
    fn tasks(&self, i: usize, tiles: u32) -> Result<Vec<Task>> {
        let lists = self.words(i)?;
        let room = 3 * tiles as usize;
        let mut tasks = Vec::new();
        for tile in part(lists, 0, room, "lists")?.chunks_exact(3) {
            let (first, count) = (tile[1] as usize, tile[2] as usize);
            if count != 0 {
                let entries = part(lists, room + first, count, "lists")?;
                tasks.push(Task {
                    expert: tile[0],
                    entries: entries.iter().map(|&entry| entry as usize).collect(),
                });
            }
        }
        Ok(tasks)
    }

    pub(super) fn moe_matmul_glu(&mut self, p: &kernel::MoeMatmulGlu) -> Result<()> {
        let table = self.table(2)?;
        let outputs = p.outputs as usize;
        for task in self.tasks(3, p.tiles)? {
            let Some(place) = table.place(task.expert)? else {
                continue;
            };
            let starts = starts(&task, p.x_entries, p.units)?;
            let gate = 2 * p.shared_outputs as usize + place * outputs;
            let up = gate + p.placed as usize * outputs;
            let gates = self.row_products(gate, outputs, p.rows, p.units, 4, &starts)?;
            let ups = self.row_products(up, outputs, p.rows, p.units, 4, &starts)?;
            let pairs = gates.chunks(outputs.max(1)).zip(ups.chunks(outputs.max(1)));
            for (entry, (gate, up)) in task.entries.iter().zip(pairs) {
                let pairs = gate.iter().zip(up);
                let mut y: Vec<f64> = pairs.map(|(&g, u)| activation(p.gelu, g) * u).collect();
                whole_vectors(&mut y);
                self.store(5, entry * p.y_stride as usize * 4 + p.row0 as usize, &y)?;
            }
        }
        Ok(())
    }

    pub(super) fn moe_matmul(&mut self, p: &kernel::MoeMatmul) -> Result<()> {
        self.entries(p, |product, _| product)
    }

    pub(super) fn moe_matmul_up(&mut self, p: &kernel::MoeMatmulUp) -> Result<()> {
        let products = kernel::MoeMatmul {
            rows: p.rows,
            units: p.units,
            outputs: p.outputs,
            row0: p.row0,
            y_stride: p.y_stride,
            x_entries: p.x_entries,
            top_k: p.x_entries,
            tiles: p.tiles,
        };
        self.entries(&products, |up, gate| activation(p.gelu, f64::from(gate)) * up)
    }

    /// What `value` makes of an entry's products and of what was there.
    fn entries(&mut self, p: &kernel::MoeMatmul, value: impl Fn(f64, f32) -> f64) -> Result<()> {
        let table = self.table(2)?;
        let outputs = p.outputs as usize;
        for task in self.tasks(3, p.tiles)? {
            let Some(place) = table.place(task.expert)? else {
                continue;
            };
            let starts = starts(&task, p.x_entries, p.units)?;
            let products = self.row_products(place * outputs, outputs, p.rows, p.units, 4, &starts)?;
            for (entry, products) in task.entries.iter().zip(products.chunks(outputs.max(1))) {
                let at = entry * p.y_stride as usize * 4 + p.row0 as usize;
                let before = part(self.floats(5)?, at, outputs, "y")?;
                let pairs = products.iter().zip(before);
                let mut y: Vec<f64> = pairs.map(|(&product, &before)| value(product, before)).collect();
                whole_vectors(&mut y);
                self.store(5, at, &y)?;
            }
        }
        Ok(())
    }

    pub(super) fn moe_combine(&mut self, p: &kernel::MoeCombine) -> Result<()> {
        let (len, top_k) = (p.vectors as usize * 4, p.top_k as usize);
        for c in 0..self.ctl(0)?.columns as usize {
            let routes = part(self.words(1)?, c * (top_k + 1) * 2, (top_k + 1) * 2, "routes")?;
            let weights = routes.chunks_exact(2).map(|route| f64::from(f32::from_bits(route[1])));
            let mut sum = vec![0.0; len];
            for (rank, weight) in weights.enumerate() {
                let y = match rank {
                    // A layer without a shared expert has a weight of 0 and nothing there.
                    rank if rank == top_k && weight == 0.0 => continue,
                    rank if rank == top_k => part(self.floats(3)?, c * len, len, "shared_y")?,
                    rank => part(self.floats(2)?, (c * top_k + rank) * len, len, "parts")?,
                };
                sum.iter_mut()
                    .zip(y)
                    .for_each(|(sum, &y)| *sum += weight * f64::from(y));
            }
            let h = part(self.floats(4)?, c * len, len, "h")?;
            sum.iter_mut().zip(h).for_each(|(sum, &h)| *sum += f64::from(h));
            self.store(4, c * len, &sum)?;
        }
        Ok(())
    }
}

/// Where the activations of a tile's entries begin.
fn starts(task: &Task, x_entries: u32, units: u32) -> Result<Vec<usize>> {
    if x_entries == 0 {
        bail!(Usage, "no entry shares a column");
    }
    let start = |entry: &usize| entry / x_entries as usize * units as usize * 32;
    Ok(task.entries.iter().map(start).collect())
}
