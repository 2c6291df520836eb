//! The dimensions of cases with experts, and the inputs that several of their operators share.

use super::dtypes::WHOLE;
use crate::dtype::Dtype;
use crate::dtype::planes::Planes;
use crate::error::Result;
use crate::graph::{Segment, Slice};
use crate::op::{ABSENT, EXPERT_TILE, Kernel, TABLE_HEADER};
use crate::parity::maker::{Maker, op, sequence};
use crate::parity::random::{Random, Values, operands, padded, words};

/// The weights of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    None,
    /// One projection of each placed expert.
    Experts,
    /// The same, for products with gates.
    Gated,
    /// Gate and up projections of the shared expert and of each placed one.
    Pairs,
    /// One projection of the shared expert, for products with gates.
    Shared,
}

/// An operator of a mixture of experts, and the weights of one of its uses.
pub type Part = (Kernel, Weights);

/// The experts of a layer, for one operator.
#[derive(Clone)]
pub struct Moe {
    pub part: Part,
    pub dtype: Dtype,
    pub experts: usize,
    pub top_k: usize,
    /// Outputs of an expert.
    pub outputs: usize,
    /// Columns of an expert.
    pub cols: usize,
    /// Outputs of the shared expert; 0 = none.
    pub shared: usize,
    /// Whether the shared expert's weight is the sigmoid of a logit.
    pub gated: bool,
    pub sigmoid: bool,
    pub renormalise: bool,
    pub biased: bool,
    /// Whether many logits are equal.
    pub ties: bool,
    /// Whether the bank lacks every third expert.
    pub partial: bool,
    pub gelu: bool,
    pub values: Values,
    /// The tokens of each round.
    pub tokens: Vec<u32>,
    /// Bytes of a segment.
    pub limit: u64,
}

impl Moe {
    pub fn plain(part: Part, dtype: Dtype) -> Moe {
        // The decoding operators compute as many tokens as the widest round has.
        let is_decoding = part.0.spec().position("batch").is_none();
        Moe {
            part,
            dtype,
            experts: 8,
            top_k: 3,
            outputs: 24,
            cols: 96usize.next_multiple_of(dtype.row_multiple()),
            shared: 40,
            gated: true,
            sigmoid: false,
            renormalise: false,
            biased: false,
            ties: false,
            partial: false,
            gelu: false,
            values: Values::PLAIN,
            tokens: if is_decoding { vec![1, 8, 3] } else { vec![1, 5, 33] },
            limit: WHOLE,
        }
    }
}

/// A case in the making: its weights, and where they are.
pub struct Bank<'s> {
    pub spec: &'s Moe,
    /// The place of each expert, or [`ABSENT`].
    pub places: Vec<u32>,
    /// How many experts have a place.
    pub placed: usize,
    /// Outputs of the shared expert in the weights.
    pub shared: usize,
    pub segments: Vec<Segment>,
}

impl<'s> Bank<'s> {
    pub fn new(spec: &'s Moe, maker: &mut Maker) -> Result<Bank<'s>> {
        let mut placed = 0;
        let place = |expert: usize| match spec.partial && expert % 3 == 2 {
            true => ABSENT,
            false => {
                placed += 1;
                placed - 1
            }
        };
        let places = (0..spec.experts).map(place).collect();
        let placed = placed as usize;
        let weights = spec.part.1;
        let shared = if weights == Weights::Pairs { spec.shared } else { 0 };
        let count = match weights {
            Weights::None => 0,
            Weights::Experts | Weights::Gated => placed,
            Weights::Pairs => 2 * placed,
            Weights::Shared => 1,
        };
        let mut slices = |count: usize, rows: usize| -> Result<Vec<Slice>> {
            let slice = |_| {
                let tensor = maker.tensor(spec.dtype, rows, spec.cols, spec.values)?;
                Ok(Slice { tensor, first: 0, rows })
            };
            (0..count).map(slice).collect()
        };
        let first = slices(if shared == 0 { 0 } else { 2 }, shared)?;
        let cut = slices(count, spec.outputs)?;
        maker.vector("g", spec.outputs)?;
        let segments = match weights {
            Weights::None => Vec::new(),
            _ => {
                let planes = Planes::of(spec.dtype, spec.cols)?;
                maker.bank(planes, spec.cols, [&first, &cut], spec.limit)?.segments
            }
        };
        maker.buffer("experts", TABLE_HEADER + 2 * spec.experts);
        Ok(Bank {
            spec,
            places,
            placed,
            shared,
            segments,
        })
    }

    /// Adds a step for each segment of the weights, or the only step of an operator without weights. `own` has the
    /// parameters whose values are not the same for all operators.
    pub fn steps(&self, maker: &mut Maker, own: &[(&str, usize)]) -> Result<()> {
        let segments = self.segments.iter();
        let mut parts: Vec<_> = segments.map(|segment| (segment.geometry.rows, segment.row0)).collect();
        if parts.is_empty() {
            parts.push((0, 0));
        }
        let own: Vec<_> = own.iter().map(|&(name, value)| (name, value as u32)).collect();
        for (i, (rows, row0)) in parts.into_iter().enumerate() {
            let values = [&own[..], &self.params(rows, row0)].concat();
            maker.segment_step(i, op(self.spec.part.0, &values)?)?;
        }
        Ok(())
    }

    /// The parameters of a step with so many rows, the first of which computes output `row0` of each expert.
    fn params(&self, rows: usize, row0: u32) -> [(&'static str, u32); 20] {
        let spec = self.spec;
        let outputs = match spec.part.1 {
            Weights::Pairs => (rows - 2 * self.shared) / (2 * self.placed),
            Weights::Shared => rows,
            _ => rows / self.placed,
        };
        [
            ("rows", rows as u32),
            ("row0", row0),
            ("outputs", outputs as u32),
            ("groups", self.groups() as u32),
            ("inv_groups", (1.0 / self.groups() as f32).to_bits()),
            ("inv_cols", (1.0 / spec.cols as f32).to_bits()),
            ("eps", 1e-2f32.to_bits()),
            ("square_vectors", spec.cols.div_ceil(16) as u32),
            ("vectors", (spec.cols / 4) as u32),
            ("placed", self.placed as u32),
            ("top_k", spec.top_k as u32),
            ("first_shared", spec.top_k as u32),
            ("shared_outputs", self.shared as u32),
            ("shared_stride", self.shared_stride() as u32),
            ("shared_expert", u32::from(spec.shared != 0)),
            ("stride", self.logits_len() as u32),
            ("routes_at", (self.logits_len() * self.most()) as u32),
            ("y_stride", (self.width() / 4) as u32),
            ("tiles", self.tiles() as u32),
            ("gelu", u32::from(spec.gelu)),
        ]
    }

    /// Adds a round for each number of tokens.
    pub fn rounds(
        &self,
        maker: &mut Maker,
        inputs: impl Fn(&mut Random, u32) -> Vec<(&'static str, Vec<u32>)>,
    ) -> Result<()> {
        for &tokens in &self.spec.tokens {
            let inputs = inputs(&mut maker.random, tokens);
            maker.round(sequence(0, tokens), inputs)?;
        }
        Ok(())
    }

    /// Most tokens of a round.
    pub fn most(&self) -> usize {
        self.spec.tokens.iter().copied().max().unwrap_or(1) as usize
    }

    /// Groups of 32 columns in a row.
    pub fn groups(&self) -> usize {
        self.spec.cols.div_ceil(32)
    }

    /// Elements from one expert's outputs to the next.
    pub fn width(&self) -> usize {
        self.spec.outputs.next_multiple_of(32)
    }

    /// Elements from one token's outputs of the shared expert to the next.
    pub fn shared_stride(&self) -> usize {
        self.shared.next_multiple_of(32)
    }

    /// Elements from one token's logits to the next; the shared expert's logit follows the experts'.
    pub fn logits_len(&self) -> usize {
        (self.spec.experts + 1).next_multiple_of(4)
    }

    /// Elements of a token's row of sums of squares.
    fn sums(&self) -> usize {
        (self.spec.cols.div_ceil(16) * 4).next_multiple_of(32)
    }

    /// The table of experts.
    pub fn table(&self, random: &mut Random) -> Vec<u32> {
        let spec = self.spec;
        let mut table = vec![
            spec.experts as u32,
            spec.top_k as u32,
            u32::from(spec.sigmoid),
            u32::from(spec.renormalise),
            u32::from(spec.biased),
            if spec.gated { spec.experts as u32 } else { ABSENT },
            1.5f32.to_bits(),
            0,
        ];
        for &place in &self.places {
            let bits = random.bits();
            // Biases are equal where logits are.
            let bias = match spec.ties {
                true => (bits >> 40) as u32 as f32 % 3.0 * 0.25,
                false => Random::unit(bits) * 0.5,
            };
            table.extend([place, bias.to_bits()]);
        }
        table
    }

    /// The logits of so many tokens.
    pub fn logits(&self, random: &mut Random, tokens: u32) -> Vec<u32> {
        let mut all = Vec::new();
        for _ in 0..tokens {
            let mut value = |_| {
                let bits = random.bits();
                match self.spec.ties {
                    // Both zeros are the largest.
                    true => [0.0, -0.0, -0.5, -1.0, -4.0][(bits >> 40) as usize % 5],
                    false => Random::unit(bits) * 6.0,
                }
            };
            all.extend(words(&(0..=self.spec.experts).map(&mut value).collect::<Vec<_>>()));
            all.resize(all.len().next_multiple_of(self.logits_len()), 0);
        }
        all
    }

    /// The experts of one token in random order, each once.
    pub fn chosen(&self, random: &mut Random) -> Vec<u32> {
        let mut all: Vec<u32> = (0..self.spec.experts as u32).collect();
        for i in 0..self.spec.top_k {
            let j = i + (random.bits() % (self.spec.experts - i) as u64) as usize;
            all.swap(i, j);
        }
        all.truncate(self.spec.top_k);
        all
    }

    /// Experts and weights of so many tokens, as `moe_route` leaves them.
    pub fn routes(&self, random: &mut Random, tokens: u32) -> Vec<u32> {
        let mut routes = Vec::new();
        for _ in 0..tokens {
            for expert in self.chosen(random) {
                routes.extend([expert, Random::unit(random.bits()).to_bits()]);
            }
            let shared = if self.spec.shared == 0 { 0.0 } else { 0.75f32 };
            routes.extend([0, shared.to_bits()]);
        }
        routes
    }

    /// Makes the operands of an operator that chooses experts, and leaves places and weights in `router` after the logits.
    pub fn choosing(&self, maker: &mut Maker) {
        let (most, logits) = (self.most(), self.logits_len());
        let router = maker.rows_after("router", logits * most, 2 * self.spec.top_k, most);
        maker.more_rows(router, 0, logits);
        maker.rows("x", self.groups() * 32, most);
        maker.rows("squares", self.sums(), most);
        maker.width = most;
    }

    pub fn choosing_inputs(&self, random: &mut Random, tokens: u32) -> Vec<(&'static str, Vec<u32>)> {
        let (cols, n) = (self.spec.cols, tokens as usize);
        let mut squares = padded(random, n, cols.div_ceil(4), self.sums(), 1.0);
        squares.iter_mut().for_each(|word| *word &= !(1 << 31));
        vec![
            ("experts", self.table(random)),
            ("router", self.logits(random, tokens)),
            ("x", operands(random, n, cols, self.groups() * 32)),
            ("squares", squares),
        ]
    }

    /// Tiles that the lists of the widest round can need.
    pub fn tiles(&self) -> usize {
        let entries = self.most() * self.spec.top_k;
        entries.div_ceil(EXPERT_TILE as usize) + self.spec.experts.min(entries)
    }

    /// Words of those lists.
    pub fn lists_len(&self) -> usize {
        3 * self.tiles() + self.most() * self.spec.top_k
    }

    /// The lists of so many tokens, as `moe_lists` leaves them.
    pub fn lists(&self, random: &mut Random, tokens: u32) -> Vec<u32> {
        let mut by_expert = vec![Vec::new(); self.spec.experts];
        for token in 0..tokens {
            for (rank, expert) in self.chosen(random).into_iter().enumerate() {
                by_expert[expert as usize].push(token * self.spec.top_k as u32 + rank as u32);
            }
        }
        let (mut tiles, mut listed) = (Vec::new(), Vec::new());
        for (expert, entries) in by_expert.iter().enumerate() {
            for tile in entries.chunks(EXPERT_TILE as usize) {
                tiles.extend([expert as u32, listed.len() as u32, tile.len() as u32]);
                listed.extend_from_slice(tile);
            }
        }
        tiles.resize(3 * self.tiles(), 0);
        tiles.extend(listed);
        tiles
    }
}
