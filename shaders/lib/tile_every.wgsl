// The units of a row that a tile sums: all of them.
fn tile_units() -> u32 { return units_of_run(); }

fn tile_unit(entry: u32) -> u32 { return entry; }
