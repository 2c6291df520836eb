//! The dimensions of cases with experts, and the inputs that several of their operators share.

use super::dtypes::WHOLE;
use crate::dtype::Dtype;
use crate::dtype::planes::Planes;
use crate::error::Result;
use crate::graph::{Segment, Slice};
use crate::op::{ABSENT, EXPERT_TILE, Kernel, Op, TABLE_HEADER};
use crate::parity::maker::{Maker, sequence};
use crate::parity::random::{Random, Values, operands, padded, words};

/// Makes the steps and rounds of a case.
pub type Build = fn(&Bank, &mut Maker) -> Result<()>;

/// The weights of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    None,
    /// One projection of each placed expert.
    Experts,
    /// Gate and up projections of the shared expert and of each placed one.
    Pairs,
    /// One projection of the shared expert.
    Shared,
}

/// An operator of a mixture of experts, in one of its uses.
#[derive(Clone, Copy)]
pub struct Part {
    pub kernel: Kernel,
    /// The use, in the case's name.
    pub suffix: &'static str,
    pub weights: Weights,
    pub build: Build,
}

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
        let is_decoding = part.kernel.spec().position("batch").is_none();
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
        let weights = spec.part.weights;
        let shared = if weights == Weights::Pairs { spec.shared } else { 0 };
        let count = match weights {
            Weights::None => 0,
            Weights::Experts => placed,
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

    /// Adds a step for each segment of the weights, with parameters made of the segment's rows and its first output.
    pub fn steps<P: Into<Op>>(&self, maker: &mut Maker, params: impl Fn(u32, u32) -> P) -> Result<()> {
        let mut segments = self.segments.iter().enumerate();
        segments.try_for_each(|(i, segment)| maker.segment_step(i, params(segment.geometry.rows as u32, segment.row0)))
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

    /// Makes the operands of an operator that chooses experts. Returns where in `router` it leaves places and weights.
    pub fn choosing(&self, maker: &mut Maker) -> u32 {
        let (spec, most, logits) = (self.spec, self.most(), self.logits_len());
        let routes_at = logits * most;
        let router = maker.rows_after("router", routes_at, 2 * spec.top_k, most);
        maker.more_rows(router, 0, logits);
        maker.rows("x", self.groups() * 32, most);
        maker.rows("squares", self.sums(), most);
        maker.width = most;
        routes_at as u32
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
