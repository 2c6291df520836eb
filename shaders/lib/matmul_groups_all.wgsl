// The groups of 32 columns that a tile sums: all of them.
// Needs: matmul.wgsl.
fn tile_groups() -> u32 { return groups_of_run(); }

fn tile_group(entry: u32) -> u32 { return entry; }
