//! The parameters of every kernel, laid out as the WGSL `Params` of the same name; a test compares the two.

use super::Kernel;
use bytemuck::{Pod, Zeroable};

macro_rules! params {
    ($($(#[$doc:meta])* $name:ident $(, $other:ident)* { $($(#[$field_doc:meta])* $field:ident: $ty:ident),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
            pub struct $name { $($(#[$field_doc])* pub $field: $ty),* }
        )*

        /// One dispatch's kernel with its parameters, laid out as the WGSL `Params` of the same kernel.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs, reason = "one variant per kernel")]
        pub enum Op { $($name($name) $(, $other($name))*),* }

        impl Op {
            /// Which kernel runs.
            pub fn kernel(&self) -> Kernel {
                match self { $(Op::$name(_) => Kernel::$name $(, Op::$other(_) => Kernel::$other)*),* }
            }

            /// The parameters as the uniform buffer holds them.
            pub fn bytes(&self) -> &[u8] {
                match self { $(Op::$name(params) $(| Op::$other(params))* => bytemuck::bytes_of(params)),* }
            }
        }

        impl Kernel {
            /// Names and types of the parameters, in order; each takes 4 bytes.
            pub fn fields(self) -> &'static [(&'static str, &'static str)] {
                match self { $(Kernel::$name $(| Kernel::$other)* => &[$((stringify!($field), stringify!($ty))),*]),* }
            }
        }
    };
}

params! {
    /// Parameters of `embed`.
    Embed {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First token of this segment.
        row0: u32,
        /// Factor of every embedding.
        multiplier: f32,
    }
    /// Parameters of `prep`.
    Prep {
        /// Vectors of 4 in a column.
        vectors: u32,
    }
    /// Parameters of `norm`.
    Norm {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// Where in an output column the result begins, in vectors of 4.
        y_first: u32,
    }
    /// Parameters of `add_norm`.
    AddNorm {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// 1 / number of elements under the norms.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
    }
    /// Parameters of `matvec` and `matvec_some`.
    Matvec, MatvecSome {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the output.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// Vectors of 4 sums of squares; 0 = no norm.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = add the bias.
        has_bias: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `matvec_add`.
    MatvecAdd {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the outputs.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// 1 = add the bias.
        has_bias: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `matvec_glu` and `matvec_glu_some`.
    MatvecGlu, MatvecGluSome {
        /// Rows stored in this segment, gate and up together.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First output of this segment.
        row0: u32,
        /// Outputs of this segment.
        part1: u32,
        /// Unused third part.
        part2: u32,
        /// Vectors of 4 sums of squares; 0 = no norm.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = add the biases.
        has_bias: u32,
        /// Where the up biases begin.
        bias_up: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `matvec_add_some`: those of `matvec_add`, which has a bias.
    MatvecAddSome {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the outputs.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `silence`.
    Silence {
        /// Vectors of 4 in a column.
        vectors: u32,
    }
    /// Parameters of `matmul`, `matmul_add`, `matmul_some` and `matmul_add_some`.
    Matmul, MatmulAdd, MatmulSome, MatmulAddSome {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First row of this segment in the output.
        row0: u32,
        /// First row of the second stacked tensor, in this segment.
        part1: u32,
        /// First row of the third.
        part2: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// 1 = add the bias.
        has_bias: u32,
    }
    /// Parameters of `matmul_glu` and `matmul_glu_some`.
    MatmulGlu, MatmulGluSome {
        /// Rows stored in this segment, gate and up together.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// First output of this segment.
        row0: u32,
        /// Outputs of this segment.
        part1: u32,
        /// Unused third part.
        part2: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// 1 = add the biases.
        has_bias: u32,
        /// Where the up biases begin.
        bias_up: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `glu`.
    Glu {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `rope`.
    Rope {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Vectors of 4 in a head.
        head_vectors: u32,
        /// Vectors of 4 in half of the rotated part.
        rot_vectors: u32,
        /// Positions the caches hold.
        positions: u32,
        /// Added to the mean of squares of a head.
        eps: f32,
        /// Query and key heads are normalised: 0 = not, 1 = before they turn, 2 = afterwards.
        qk_norm: u32,
        /// 1 = value heads are normalised.
        v_norm: u32,
        /// Vectors from one query head to the next.
        query_vectors: u32,
    }
    /// Parameters of `attn_block` and `attn_block_some`.
    AttnBlock, AttnBlockSome {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Vectors of 4 in a head.
        head_vectors: u32,
        /// Positions the caches hold.
        positions: u32,
        /// Blocks that the parts hold for a head.
        blocks: u32,
        /// Factor of every score.
        scale: f32,
        /// Soft cap of scores; 0 = none.
        softcap: f32,
        /// Positions a query sees; 0 = all.
        window: u32,
        /// Vectors from one query head to the next.
        query_vectors: u32,
    }
    /// Parameters of `attn_merge` and `attn_merge_some`.
    AttnMerge, AttnMergeSome {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Vectors of 4 in a head.
        head_vectors: u32,
        /// Blocks that the parts hold for a head.
        blocks: u32,
        /// As in `attn_block`.
        scale: f32,
        /// As in `attn_block`.
        softcap: f32,
        /// Positions a query sees; 0 = all.
        window: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// Vectors from one query head to the next; more than a head has: its gate follows.
        query_vectors: u32,
    }
    /// Parameters of `attn_chunk` and `attn_chunk_some`.
    AttnChunk, AttnChunkSome {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
        /// Vectors of 4 in a head.
        head_vectors: u32,
        /// Positions the caches hold.
        positions: u32,
        /// Factor of every score.
        scale: f32,
        /// Soft cap of scores; 0 = none.
        softcap: f32,
        /// Positions a query sees; 0 = all.
        window: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
        /// Vectors from one query head to the next; more than a head has: its gate follows.
        query_vectors: u32,
    }
    /// Parameters of `delta_net`.
    DeltaNet {
        /// Value heads.
        value_heads: u32,
        /// Neighbouring value heads that share a key head.
        group: u32,
        /// Vectors of 4 in a key head, at most 64.
        key_vectors: u32,
        /// Vectors of 4 in a value head, at most 64.
        value_vectors: u32,
        /// Positions under the convolution.
        taps: u32,
        /// Positions whose inputs are kept.
        ring: u32,
        /// States that are kept.
        slots: u32,
        /// Vectors of 4 from one column of the projections to the next.
        stride: u32,
        /// Vectors from one key head's q to the next one's, and likewise of k.
        key_stride: u32,
        /// Where the first key head's k begins, in vectors.
        k_at: u32,
        /// Where the first value head's v begins, in vectors.
        v_at: u32,
        /// Where its z begins.
        z_at: u32,
        /// Vectors from the v of one key head's value heads to that of the next one's, and likewise of z.
        value_stride: u32,
        /// Where the first value head's b is, in elements.
        b_at: u32,
        /// Where its a is.
        a_at: u32,
        /// Elements from the b of one key head's value heads to that of the next one's, and likewise of a.
        gate_stride: u32,
        /// Factor of q after it is divided by its length.
        q_scale: f32,
        /// Added to the squares of q and k before the root.
        length_eps: f32,
        /// Added to the mean of squares of a head's output.
        eps: f32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `moe_glu`.
    MoeGlu {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// Outputs of each expert in this segment.
        outputs: u32,
        /// Experts in this segment.
        placed: u32,
        /// Outputs of the shared expert in this segment, 0 = it is not there.
        shared_outputs: u32,
        /// Slots before the shared expert's.
        first_shared: u32,
        /// First of an expert's outputs in this segment.
        row0: u32,
        /// Where the first slot's outputs begin.
        y_at: u32,
        /// Elements from one slot's outputs to the next.
        y_stride: u32,
        /// Elements from one column's outputs of the shared expert to the next.
        shared_stride: u32,
        /// Elements from one column's logits to the next.
        stride: u32,
        /// Where places and weights begin.
        routes_at: u32,
        /// Vectors of 4 sums of squares; 0, with eps 1, takes x as it is.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `moe_matvec`.
    MoeMatvec {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// Rows of each expert in this segment.
        outputs: u32,
        /// Slots: experts a token takes; 0 = the weights are the shared expert's.
        slots: u32,
        /// First of an expert's rows in this segment, a multiple of 4.
        row0: u32,
        /// Where the first slot's outputs begin, in vectors of 4.
        y_at: u32,
        /// Vectors of 4 from one slot's outputs to the next.
        y_stride: u32,
        /// Elements from one column's logits to the next.
        stride: u32,
        /// Where places and weights begin.
        routes_at: u32,
        /// Vectors of 4 sums of squares; 0, with eps 1, takes x as it is.
        square_vectors: u32,
        /// 1 / number of elements under the norm.
        inv_cols: f32,
        /// Added to the mean of squares.
        eps: f32,
        /// 1 = the outputs hold gates, which become products.
        gated: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `moe_down`.
    MoeDown {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// 1 / units.
        inv_units: f32,
        /// Rows of each expert in this segment.
        outputs: u32,
        /// First row of this segment in the outputs, a multiple of 4.
        row0: u32,
        /// Slots: experts a token takes.
        slots: u32,
        /// Units before the first slot's activations.
        x_at: u32,
        /// Where places and weights begin.
        routes_at: u32,
        /// Vectors of 4 from one output column to the next.
        y_stride: u32,
    }
    /// Parameters of `moe_route`.
    MoeRoute {
        /// Elements from one column's logits to the next.
        stride: u32,
        /// 1 = there is a shared expert, 0 = its weight is 0.
        shared_expert: u32,
    }
    /// Parameters of `moe_count`.
    MoeCount {
        /// Elements from one column's logits to the next.
        stride: u32,
    }
    /// Parameters of `moe_lists`.
    MoeLists {
        /// Tiles there is room for.
        tiles: u32,
    }
    /// Parameters of `moe_matmul_glu`.
    MoeMatmulGlu {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// Outputs of each expert in this segment.
        outputs: u32,
        /// Experts in this segment.
        placed: u32,
        /// Outputs of the shared expert in this segment, 0 = it is not there.
        shared_outputs: u32,
        /// First of an expert's outputs in this segment, a multiple of 4.
        row0: u32,
        /// Vectors of 4 from one entry of y to the next.
        y_stride: u32,
        /// Entries that share a column of x: the experts a token takes.
        x_entries: u32,
        /// Tiles that lists have room for.
        tiles: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `moe_matmul_up`.
    MoeMatmulUp {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// Rows of each expert in this segment.
        outputs: u32,
        /// First row of this segment in y, a multiple of 4.
        row0: u32,
        /// Vectors of 4 from one entry of y to the next.
        y_stride: u32,
        /// Entries that share a column of x: the experts a token takes.
        x_entries: u32,
        /// Tiles that lists have room for.
        tiles: u32,
        /// 1 = gelu_tanh, 0 = silu.
        gelu: u32,
    }
    /// Parameters of `moe_matmul`.
    MoeMatmul {
        /// Rows stored in this segment.
        rows: u32,
        /// Units of 32 columns in a row.
        units: u32,
        /// Rows of each expert in this segment.
        outputs: u32,
        /// First row of this segment in y, a multiple of 4.
        row0: u32,
        /// Vectors of 4 from one entry of y to the next.
        y_stride: u32,
        /// Entries that share a column of x.
        x_entries: u32,
        /// Entries of a column, which bound the grid.
        top_k: u32,
        /// Tiles that lists have room for.
        tiles: u32,
    }
    /// Parameters of `moe_combine`.
    MoeCombine {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// Experts of a column.
        top_k: u32,
    }
    /// Parameters of `cap`.
    Cap {
        /// Vectors of 4 in a column.
        vectors: u32,
        /// Factor of every element.
        multiplier: f32,
        /// Soft cap; 0 = none.
        cap: f32,
    }
    /// Parameters of `sample`.
    Sample {
        /// Tokens of the vocabulary.
        vocab: u32,
        /// Elements from one column of the logits to the next.
        stride: u32,
    }
    /// Parameters of `last_column`.
    LastColumn {
        /// Vectors of 4 in a column.
        vectors: u32,
    }
    /// Parameters of `round_begin`.
    RoundBegin {
        /// Most drafts of a round.
        depth: u32,
    }
    /// Parameters of `draft`.
    Draft {
        /// Tokens of the vocabulary.
        vocab: u32,
        /// Which draft of the round, from 1.
        number: u32,
    }
}
