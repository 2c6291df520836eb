// Signed bytes with one f16 scale a row: 2 vectors a unit; scales: row halves.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const APART: bool = false;
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.units * 2u); }
fn row_scale(row: u32) -> f32 { return half((scales[row >> 1u] >> ((row & 1u) * 16u)) & 0xffffu); }
fn prep_x(part: u32, unit: u32, x: X32) -> X32 { return x; }
fn prep_w(part: u32, unit: u32, j: u32, w: W8) -> W8 { return w; }
