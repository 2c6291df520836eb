// The overlay interface of weight types without an overlay.
const HAS_OVERLAY: bool = false;

fn overlay_range(row: Row) -> vec2<u32> { return vec2<u32>(0u); }
fn overlay_ends(entry: u32) -> bool { return true; }
fn overlay_col(entry: u32) -> u32 { return 0u; }
fn overlay_value(entry: u32) -> f32 { return 0.0; }
fn overlay_change(row: Row, entry: u32) -> f32 { return 0.0; }
