// The units of a row that are summed: those that a list names. Lane l takes entries l, l + 32, ... of the list, so that the sum
// is that of a matrix without the other units. Overlays are summed whole: x is zero in the units that are left out. Needs
// `list`: blocks, units, where the blocks begin, 0, the units, the blocks.
const LISTED: bool = true;

fn unit_count() -> u32 { return list[1]; }

fn unit_at(entry: u32) -> u32 { return list[4u + entry]; }
