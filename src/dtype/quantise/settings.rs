//! Settings of the encoders.

/// Settings of the encoders that have any.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// vbit: the mean bits per weight, 3 to 8, without the scales.
    pub mean_bits: f64,
    /// vbit: the bits of every row; `None`: chosen for `mean_bits` by [`spread`](super::widths::spread).
    pub widths: Option<&'a [u8]>,
    /// q1s, q1t: the largest fraction of the weights that is kept in the overlay, at 48 bits each in q1s and 32 in q1t.
    pub outliers: f64,
    /// q1s, q1t: the root mean square of each column's input, which weights are multiplied by when outliers are chosen.
    pub rms: Option<&'a [f32]>,
}

impl Settings<'_> {
    /// A quarter bit more per weight than q4_block; both add 0.5 bits of scales.
    pub const MEAN_BITS: f64 = 4.25;

    /// One weight in a hundred: q1s then takes 1.98 bits per weight, q1t 2.57.
    pub const OUTLIERS: f64 = 0.01;
}

impl Default for Settings<'_> {
    fn default() -> Self {
        Settings {
            mean_bits: Self::MEAN_BITS,
            widths: None,
            outliers: Self::OUTLIERS,
            rms: None,
        }
    }
}
