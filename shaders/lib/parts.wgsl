// Which of the stacked tensors a stored row belongs to.
fn part_of(row: u32) -> u32 { return u32(row >= params.part1) + u32(row >= params.part2); }
