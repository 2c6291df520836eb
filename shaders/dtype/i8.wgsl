// Signed bytes with one f16 scale for each row: 2 vectors for each group.
// Needs: weights.wgsl; `scales` [rows] of f16; params.groups.
const NEEDS_SUM: bool = false;
const PREPARES_X: bool = false;
const MANY_REGISTERS: bool = false;
struct Row { code: u32 }

fn row_open(row: u32) -> Row { return Row(row * params.groups * 2u); }
fn group_scale(row: Row, group: u32) -> f32 { return 1.0; }
fn row_scale(row: u32) -> f32 { return half((scales[row >> 1u] >> ((row & 1u) * 16u)) & 0xffffu); }
fn prep_x(tensor: u32, group: u32, x: X32) -> X32 { return x; }
fn prep_w(tensor: u32, group: u32, j: u32, w: W8) -> W8 { return w; }
