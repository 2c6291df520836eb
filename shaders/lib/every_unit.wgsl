// The units of a row that are summed: all of them.
const LISTED: bool = false;

fn unit_count() -> u32 { return params.units; }

fn unit_at(entry: u32) -> u32 { return entry; }
