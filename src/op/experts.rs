//! Shared by the host implementations of the expert operators: the table of experts, routes, tiles.

use super::constants::{ABSENT, TABLE_HEADER};
use super::host::{Operands, slice};
use crate::error::{Result, bail};
use cmf_kernels_ref::op::linear::linear;
use cmf_kernels_ref::op::route::{Routing, route, sigmoid};
use std::ops::Range;

/// A layer's experts, and their places in one bank of weights.
pub(super) struct Table {
    pub routing: Routing,
    pub count: usize,
    biases: Option<Vec<f32>>,
    /// Index of the logit of the shared expert's weight.
    gate: Option<usize>,
    places: Vec<u32>,
}

impl Table {
    /// The table in `experts`.
    pub fn read(o: &Operands) -> Result<Table> {
        let header = o.words("experts", 0, TABLE_HEADER)?;
        let count = header[0] as usize;
        let all = o.words("experts", TABLE_HEADER, count.saturating_mul(2))?;
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

    /// The place of an expert in the bank, if it is there.
    pub fn place(&self, expert: u32) -> Result<Option<usize>> {
        let place = slice(&self.places, expert as usize, 1, "experts")?[0];
        Ok((place != ABSENT).then_some(place as usize))
    }

    /// The chosen experts with their weights, by the logits of one token.
    pub fn route(&self, logits: &[f32]) -> Result<Vec<(usize, f64)>> {
        let logits = slice(logits, 0, self.count, "logits")?;
        Ok(route(logits, self.biases.as_deref(), &self.routing))
    }

    pub fn shared_weight(&self, logits: &[f32]) -> Result<f64> {
        match self.gate {
            None => Ok(1.0),
            Some(gate) => Ok(sigmoid(f64::from(slice(logits, gate, 1, "logits")?[0]))),
        }
    }
}

/// Writes the place and weight of every expert that token `t` takes. Returns, for the experts that the bank holds,
/// the index token * top_k + rank and the place.
pub(super) fn write_routes(
    o: &mut Operands,
    table: &Table,
    logits: &[f32],
    routes_at: u32,
    t: usize,
) -> Result<Vec<(usize, usize)>> {
    let routes = table.route(logits)?;
    let mut present = Vec::new();
    for (slot, &(expert, weight)) in routes.iter().enumerate() {
        let slot = t * routes.len() + slot;
        let place = table.place(expert as u32)?;
        let route = [place.map_or(ABSENT, |place| place as u32), (weight as f32).to_bits()];
        o.words_mut("router", routes_at as usize + 2 * slot, 2)?
            .copy_from_slice(&route);
        present.extend(place.map(|place| (slot, place)));
    }
    Ok(present)
}

/// `Σ_k w[r][k] · x[i][k]` as `[starts, rows]`, for `rows` of a weight with `stored` rows. The activations `x[i]`
/// begin at element `starts[i]`.
pub(super) fn row_products(
    o: &Operands,
    rows: Range<usize>,
    stored: u32,
    groups: u32,
    starts: &[usize],
) -> Result<Vec<f64>> {
    let weights = o.weight(stored)?;
    let cols = weights.cols;
    if rows.end > stored as usize || (groups as usize * 32) < cols {
        bail!(
            Internal,
            "rows {rows:?} of a weight with {stored} rows, and {groups} groups of 32 activations for {cols} columns"
        );
    }
    let mut gathered = Vec::with_capacity(starts.len() * cols);
    for &start in starts {
        gathered.extend_from_slice(o.floats("x", start, cols)?);
    }
    let mut y = vec![0.0; starts.len() * rows.len()];
    linear(&weights, rows, cols, &gathered, cols, starts.len(), &mut y);
    Ok(y)
}

/// The parameters that the operators on tiles of tokens share.
pub(super) struct Tiled {
    pub rows: u32,
    pub groups: u32,
    pub outputs: u32,
    pub row0: u32,
    pub y_stride: u32,
    pub x_entries: u32,
    pub tiles: u32,
}

/// The shared ones of an operator's parameters.
macro_rules! tiled {
    ($params:expr) => {
        $crate::op::experts::Tiled {
            rows: $params.rows,
            groups: $params.groups,
            outputs: $params.outputs,
            row0: $params.row0,
            y_stride: $params.y_stride,
            x_entries: $params.x_entries,
            tiles: $params.tiles,
        }
    };
}
pub(super) use tiled;

/// Computes N products for each entry of the tiles in `lists`, and replaces every value of `y` by
/// `value(products, old value)`. `first_rows`: the first rows of the N products, by the place of the expert. An entry is
/// token * top_k + rank.
pub(super) fn store_entries<const N: usize>(
    o: &mut Operands,
    p: &Tiled,
    first_rows: impl Fn(usize) -> [usize; N],
    value: impl Fn([f64; N], f64) -> f64,
) -> Result<()> {
    let table = Table::read(o)?;
    let (outputs, x_entries, entries_at) = (p.outputs as usize, p.x_entries as usize, 3 * p.tiles as usize);
    if x_entries == 0 {
        bail!(Internal, "x_entries is 0, expected at least 1");
    }
    for tile in o.words("lists", 0, entries_at)?.to_vec().chunks_exact(3) {
        let (expert, first, count) = (tile[0], tile[1] as usize, tile[2] as usize);
        if count == 0 {
            continue;
        }
        let Some(place) = table.place(expert)? else {
            continue;
        };
        let entries = o.words("lists", entries_at + first, count)?.to_vec();
        // Consecutive entries share a row of x.
        let start = |&entry: &u32| entry as usize / x_entries * p.groups as usize * 32;
        let starts: Vec<usize> = entries.iter().map(start).collect();
        let product = |&first: &usize| row_products(o, first..first + outputs, p.rows, p.groups, &starts);
        let products = first_rows(place).iter().map(product).collect::<Result<Vec<_>>>()?;
        for (i, &entry) in entries.iter().enumerate() {
            let at = entry as usize * p.y_stride as usize * 4 + p.row0 as usize;
            let mut y = o.values("y", at, outputs)?;
            for (r, y) in y.iter_mut().enumerate() {
                *y = value(std::array::from_fn(|n| products[n][i * outputs + r]), *y);
            }
            o.store_vectors("y", at, y)?;
        }
    }
    Ok(())
}
