// The units of a row that a tile sums: those that a list names, in order, so that the sum is that of a matrix without the
// others. Overlays are summed whole: x is zero in the units that are left out. Needs `list`, as in listed.wgsl.
fn tile_units() -> u32 { return list[1] * min(ctl.columns, 1u); }

fn tile_unit(entry: u32) -> u32 { return list[4u + entry]; }
