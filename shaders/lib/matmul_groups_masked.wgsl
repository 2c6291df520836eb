// The groups of 32 columns that a tile sums: those that `list` names, in order. The sum has the bits of the sum of a
// matrix without the other groups. Overlays are not skipped: the caller sets x to zero in the groups that are left
// out. For the list see groups_masked.wgsl.
// Needs: `list`, `batch`.
fn tile_groups() -> u32 { return list[1] * min(batch.count, 1u); }

fn tile_group(entry: u32) -> u32 { return list[LIST_HEADER + entry]; }
